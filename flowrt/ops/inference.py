"""What the inference of many ops shares: broadcasting, shapes that are tensors, values carried through small integers.

Everything here infers as much as is known and lets the rest be None; it fails only on what can never fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.plain import as_dtype_of, common_dtype, default_spec, is_weak
from flowrt.base.spec import MAX_VALUE_SIZE, Shape, Spec, is_float, largest, replace_value
from flowrt.op import as_value


def broadcast(*specs: Spec) -> Shape | None:
    """The shape that tensors of ``specs`` broadcast to, by NumPy's rules."""
    first, *others = [spec.dims for spec in specs if spec.dims != ()] or [()]
    if others.count(first) == len(others):
        return first
    if any(s.dims is None for s in specs):
        return None
    rank = max(s.rank for s in specs)
    columns = zip(*[(1,) * (rank - s.rank) + s.shape for s in specs], strict=True)
    return tuple(_broadcast_size(column, specs) for column in columns)


def _broadcast_size(column: Sequence[int | None], specs: Sequence[Spec]) -> int | None:
    large = {n for n in column if n is not None and n != 1}
    if len(large) > 1:
        raise SpecError(f"{' and '.join(map(str, specs))} do not broadcast; sizes must be equal or 1, from the right")
    if large:
        return large.pop()
    return None if None in column else 1


def merged(shapes: Sequence[Shape | None], specs: Sequence[Spec]) -> Shape | None:
    """What is known of one shape that is all of ``shapes``."""
    known = [s for s in shapes if s is not None]
    if not known:
        return None
    if len({len(s) for s in known}) > 1:
        raise SpecError(f"{' and '.join(map(str, specs))} must have the same shape")
    return tuple(_merged_size(column, specs) for column in zip(*known, strict=True))


def _merged_size(column: Sequence[int | None], specs: Sequence[Spec]) -> int | None:
    sizes = {n for n in column if n is not None}
    if len(sizes) > 1:
        raise SpecError(f"{' and '.join(map(str, specs))} must have the same shape")
    return sizes.pop() if sizes else None


def target(shape: Spec) -> Shape | None:
    """The shape that the tensor ``shape`` names: None for entries not known yet, -1 as it stands."""
    if shape.dims == (0,):
        return ()
    if shape.dtype.kind not in "iu" or (shape.dims is not None and shape.rank > 1):
        raise SpecError(f"a shape is an integer or a vector of integers, got {shape}")
    if shape.value is not None:
        return shape.value if isinstance(shape.value, tuple) else (shape.value,)  # type: ignore[return-value]
    if shape.dims is None or shape.dims == (None,):
        return None
    return (None,) * ((shape.shape or (1,))[0] or 0)


def filled(dtype: Any, shape: Spec) -> Spec:
    """The spec of a tensor of ``dtype`` whose shape is the tensor ``shape``."""
    dims = target(shape)
    if dims is not None and any(n is not None and n < 0 for n in dims):
        raise SpecError(f"a shape cannot hold negative sizes, got {dims}")
    return Spec(dtype, dims)


def carry(out: Spec, compute: Callable[..., Any], *inputs: Spec) -> Spec:
    """``out`` with the value that ``compute`` makes of the inputs' values (object arrays, None where unknown)."""
    if out.dtype.kind not in "iu" or any(s.value is None for s in inputs):
        return out
    result = np.asarray(compute(*[np.array(s.value, dtype=object) for s in inputs]), dtype=object)
    if result.ndim > 1 or result.size > MAX_VALUE_SIZE:
        return out
    inside = np.iinfo(out.dtype)  # beyond it the kernels wrap around, and Python's integers grow without bound
    values = [n if n is not None and inside.min <= n <= inside.max else None for n in result.ravel().tolist()]
    return replace_value(out, tuple(values) if result.ndim else values[0])


def carry_each(out: Spec, compute: Callable[..., Any], *inputs: Spec) -> Spec:
    """As `carry`, where ``compute`` makes each entry of the inputs' entries; None where one of those is not known."""

    if out.dtype.kind not in "iu":
        return out

    def known(*entries: Any) -> Any:
        return None if None in entries else compute(*entries)

    return carry(out, lambda *values: np.frompyfunc(known, len(inputs), 1)(*values), *inputs)


def as_float(spec: Spec) -> Spec:
    """``spec`` where it is floating, else its float64 (what NumPy computes integers' functions in)."""
    return spec if is_float(spec.dtype) else Spec("float64", spec.dims)


def described(value: Any) -> Spec:
    """The spec of anything an op takes: a tensor, a variable, an array, a number."""
    found = as_value(value)
    known = getattr(found, "spec", None)
    return known if isinstance(known, Spec) else default_spec(found)


def far_below(x: Any) -> float:
    """A number that is as good as -inf beside others and no product makes NaN of: -1e30, if ``x`` holds such."""
    dtype = described(x).dtype
    return -min(1e30, largest(dtype)) if is_float(dtype) else -1e30


def settled(*operands: Any) -> list[Any]:
    """What several operands stand for, numbers and lists of them in the dtype that they take beside the others.

    For ops composed of others, the first of which would see a number alone. None stays None.
    """
    found = [as_value(x) for x in operands]
    there = [getattr(getattr(x, "spec", None), "dtype", x) for x in found if x is not None]
    dtype = common_dtype(there)
    return [as_dtype_of(x, dtype) if x is not None and is_weak(x) else x for x in found]
