"""Models as they lie on disk, or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from flowrt.base.errors import GraphError, path_of, user_site
from flowrt.onnx.converting import OLDEST, domain_of


def model_from(given: Any) -> Any:
    """The model that is ``given``: a path, its bytes, or a ``ModelProto``, which is left as it is.

    Tensors in files beside a model are read, within its folder alone: a way out of that is refused.
    """
    if isinstance(given, onnx.ModelProto):
        return _whole(given)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _whole(_parsed(bytes(given), "the bytes"))
    path = Path(path_of(given, "a model of ONNX, unless it is its bytes or a ModelProto,"))
    try:
        model = _parsed(path.read_bytes(), str(path))
        onnx.load_external_data_for_model(model, str(path.parent))
    except OSError as error:
        raise GraphError(f"{user_site()}: {path} cannot be read: {error.strerror or error}") from None
    except (onnx.checker.ValidationError, ValueError) as error:
        raise GraphError(f"{user_site()}: {path}: what lies beside it cannot be read: {error}") from None
    return model


def _parsed(data: bytes, what: str) -> Any:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise GraphError(f"{user_site()}: {what} hold no model of ONNX: {error}") from None
    if not model.ir_version or not model.HasField("graph"):
        raise GraphError(f"{user_site()}: {what} hold no model of ONNX")
    return model


def _whole(model: Any) -> Any:
    """``model``, all of whose tensors are in it."""
    outside = [t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    if outside:
        raise GraphError(f"{user_site()}: {outside[0]!r} lies in a file beside the model; give the model's path")
    return model


def opsets_of(model: Any) -> dict[str, int]:
    """The version of each domain that a model asks for; raises `GraphError` for one that is not read."""
    found = {domain_of(one): one.version for one in model.opset_import}
    version, newest = found.get("", OLDEST), onnx.defs.onnx_opset_version()
    if version > newest:
        raise GraphError(
            f"{user_site()}: the model is of opset {version}, and the package onnx here knows up to {newest}; "
            "pip install --upgrade onnx"
        )
    return {"": version, **found}
