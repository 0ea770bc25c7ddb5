"""ONNX's types and tensors as flowrt's, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, as_dtype, holds

Array = np.ndarray[Any, Any]


def dtype_of(element: int) -> np.dtype[Any]:
    """The dtype of tensors of an element type; raises `SpecError` where tensors here cannot be of that."""
    names = {number: name for name, number in onnx.TensorProto.DataType.items()}
    name = names.get(element, f"element type {element}").lower()
    if element in names and name not in ("undefined", "string"):
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(element))
        if holds(found):
            return as_dtype(found)
    raise SpecError(f"tensors of {name} are not supported; convert the model to float32 first")


def element_of(dtype: np.dtype[Any]) -> int:
    """The element type of tensors of a dtype."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))


def array_of(tensor: Any) -> Array:
    """The entries of a tensor that a model holds."""
    dtype = dtype_of(tensor.data_type)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:  # of a path, all is in the model by now
        raise SpecError(f"{tensor.name!r} lies in a file beside the model; give the model's path")
    try:
        return np.ascontiguousarray(numpy_helper.to_array(tensor), dtype).reshape(tuple(tensor.dims))
    except (ValueError, TypeError) as error:
        raise SpecError(f"the tensor {tensor.name!r} is damaged: {error}") from None


def spec_from(value: Any) -> Spec:
    """The spec of an input or output: sizes that have names, or are not said, are open."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise SpecError(f"a value of {(kind or 'no type').removesuffix('_type')} is not supported, only tensors are")
    found = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else None for d in found.shape.dim]
    return Spec(dtype_of(found.elem_type), dims if found.HasField("shape") else None)


def type_of(spec: Spec) -> Any:
    """The type of a value of ``spec``."""
    return onnx.helper.make_tensor_type_proto(element_of(spec.dtype), spec.dims)
