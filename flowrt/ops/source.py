"""Where values begin: constants, placeholders, and tensors made from a shape alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowrt.base.attributes import frozen
from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import as_dtype_of, common_dtype, default_array, is_weak, is_whole, takes
from flowrt.base.spec import MAX_VALUE_SIZE, Spec, as_dtype, is_float, spec_of
from flowrt.op import active_builder, as_value, lookup
from flowrt.ops.inference import carry, described, filled
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import TensorOrArray
    from flowrt.op import DType
    from flowrt.typed import Operand, Result

__all__ = [
    "arange",
    "constant",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "placeholder",
    "shape_of",
    "zeros",
    "zeros_like",
]


@op(name="constant")
def constant_op(value: Any, *, name: str | None = None) -> Result:
    """The array that is the attribute ``value``."""
    if not isinstance(value, np.ndarray):
        raise SpecError(f"the value of a constant is an array, got {value!r}")
    return spec_of(value)


@located("constant")
def constant(value: Operand, dtype: DType | None = None, *, name: str | None = None) -> TensorOrArray:
    """A tensor that always holds ``value``: Python floats as float32, ints as int64, unless ``dtype`` says.

    An array is copied, unless it is read-only, as is all that it views.
    """
    array = default_array(value) if dtype is None else frozen(as_dtype_of(value, as_dtype(dtype)))
    if active_builder() is None:  # nobody keeps it
        return cast("TensorOrArray", np.array(array, array.dtype.newbyteorder("="), order="C"))
    return constant_op(array, name=name)


@op
def placeholder(dtype: DType, shape: int | Sequence[int | None] | None = None, *, name: str | None = None) -> Result:
    """A value that every step is given. ``None`` in ``shape`` leaves a size open; ``shape=None`` even the rank."""
    return Spec(dtype, shape)


@op(gradient=lambda node, dy: (None,))
def shape_of(x: Operand, *, name: str | None = None) -> Result:
    """The sizes of ``x`` as an int64 vector."""
    if x.dims is None:
        return Spec("int64", (None,))
    return Spec("int64", (x.rank,), x.shape)


@op(name="full", gradient=lambda node, dy: (None, lookup("sum")(dy)))
def full_op(shape: Operand, value: Operand, *, name: str | None = None) -> Result:
    """A tensor of ``shape``, every entry of which is the scalar ``value``."""
    if value.dims not in (None, ()):
        raise SpecError(f"the value to fill with must be a scalar, got {value}; broadcast_to repeats an array")
    return filled(value.dtype, shape)


@located("full")
def full(shape: Operand, value: Operand, dtype: DType | None = None, *, name: str | None = None) -> TensorOrArray:
    """A tensor of ``shape`` filled with the scalar ``value``, of its dtype unless ``dtype`` says otherwise."""
    return full_op(shape, _of_dtype(value, dtype), name=name)


@located("zeros")
def zeros(shape: Operand, dtype: DType = "float32", *, name: str | None = None) -> TensorOrArray:
    """A tensor of ``shape`` (a tuple, or an integer vector tensor) filled with zeros."""
    return full_op(shape, np.zeros((), as_dtype(dtype)), name=name)


@located("ones")
def ones(shape: Operand, dtype: DType = "float32", *, name: str | None = None) -> TensorOrArray:
    """A tensor of ``shape`` (a tuple, or an integer vector tensor) filled with ones."""
    return full_op(shape, np.ones((), as_dtype(dtype)), name=name)


@op(name="full_like", gradient=lambda node, dy: (None, lookup("sum")(dy)))
def full_like_op(x: Operand, value: Operand, *, name: str | None = None) -> Result:
    """A tensor shaped like ``x``, every entry of which is the scalar ``value``. It is dead where ``x`` is dead."""
    if value.dims not in (None, ()):
        raise SpecError(f"the value to fill with must be a scalar, got {value}")
    return Spec(value.dtype, x.dims)


@located("full_like")
def full_like(x: Operand, value: Operand, dtype: DType | None = None, *, name: str | None = None) -> TensorOrArray:
    """The scalar ``value`` in the shape of ``x``; a number is of its dtype, unless it is of a higher kind."""
    if dtype is None and takes(value, held := described(x).dtype):
        dtype = held
    return full_like_op(x, _of_dtype(value, dtype), name=name)


@located("zeros_like")
def zeros_like(x: Operand, dtype: DType | None = None, *, name: str | None = None) -> TensorOrArray:
    """Zeros of the shape of ``x``, and of its dtype unless ``dtype`` says otherwise."""
    return full_like_op(x, np.zeros((), described(x).dtype if dtype is None else as_dtype(dtype)), name=name)


@located("ones_like")
def ones_like(x: Operand, dtype: DType | None = None, *, name: str | None = None) -> TensorOrArray:
    """Ones of the shape of ``x``, and of its dtype unless ``dtype`` says otherwise."""
    return full_like_op(x, np.ones((), described(x).dtype if dtype is None else as_dtype(dtype)), name=name)


@op(name="arange", gradient=lambda node, dy: (None, None, None))
def arange_op(start: Operand, stop: Operand, step: Operand, *, name: str | None = None) -> Result:
    """``start, start + step, …`` up to ``stop``, which is left out: three integer scalars."""
    if any(s.dims not in (None, ()) or s.dtype.kind not in "iu" for s in (start, stop, step)):
        raise SpecError(f"arange counts in integer scalars, got {start}, {stop} and {step}")
    if start.dtype != stop.dtype or start.dtype != step.dtype:
        raise SpecError(f"start, stop and step must be of one dtype, got {start}, {stop} and {step}")
    if not all(isinstance(s.value, int) for s in (start, stop, step)):
        return Spec(start.dtype, (None,))
    if step.value == 0:
        raise SpecError("arange needs a step other than 0, and no NaN")
    count = len(range(start.value, stop.value, step.value))  # type: ignore[arg-type]
    out = Spec(start.dtype, (count,))
    return carry(out, lambda *bounds: range(*map(int, bounds)), start, stop, step) if count <= MAX_VALUE_SIZE else out


@located("arange")
def arange(
    start: Operand,
    stop: Operand | None = None,
    step: Operand = 1,
    dtype: DType | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """Evenly spaced numbers from ``start`` (0 if only ``stop`` is given) up to ``stop``, which is left out.

    Plain numbers make a constant (float32 where they have fractions); what tensors tell is counted in the graph, in
    int64, or, where one of the three is a float, in their common dtype.
    """
    first, last = (0, start) if stop is None else (start, stop)
    bounds = [as_value(v) for v in (first, last, step)]
    if any(hasattr(v, "builder") for v in bounds):
        return _counted(bounds, dtype, name)
    numbers: list[Any] = [v.item() if isinstance(v, np.ndarray) and v.ndim == 0 else v for v in bounds]
    if not all(isinstance(v, Real) and math.isfinite(v) for v in numbers):
        raise SpecError("it counts from number to number by number, got {!r}, {!r} and {!r}".format(*numbers))
    begin, end, by = numbers
    if by == 0:
        raise SpecError("arange needs a step other than 0")
    Spec("int64", (max(math.ceil((end - begin) / by), 0),))  # raises for more than there can be
    array = np.arange(begin, end, by)
    held = array.dtype if dtype is None else as_dtype(dtype)
    array = array.astype("float32" if dtype is None and is_float(held) else held, copy=False)
    return constant(array, name=name)


def _counted(bounds: Sequence[Any], dtype: DType | None, name: str | None) -> TensorOrArray:
    """`arange` of tensors."""
    own = common_dtype([v.dtype if hasattr(v, "builder") else v for v in bounds])
    counted = np.dtype(np.int64) if not is_float(own) else np.dtype(np.float64)
    held = (own if is_float(own) else counted) if dtype is None else as_dtype(dtype)
    cast = held != counted
    begin, end, by = [_of_dtype(v, counted) for v in bounds]
    if not is_float(own):
        made = arange_op(begin, end, by, name=None if cast else name)
    elif not hasattr(by, "builder") and not by.any():
        raise SpecError("arange needs a step other than 0")
    else:
        steps = lookup("ceil")(lookup("divide")(lookup("subtract")(end, begin), by))
        sound = lookup("logical_and")(lookup("equal")(steps, steps), lookup("not_equal")(by, 0.0))
        count, one = [lookup("astype")(each, "int64") for each in (steps, sound)]  # by 0 is refused
        numbers = lookup("astype")(arange_op(np.int64(0), count, one), counted)
        made = lookup("add")(lookup("multiply")(numbers, by), begin, name=None if cast else name)
    return lookup("astype")(made, held, name=name) if cast else made


@located("linspace")
def linspace(
    start: Operand,
    stop: Operand,
    num: int = 50,
    endpoint: bool = True,
    dtype: DType | None = None,
    *,
    name: str | None = None,
) -> TensorOrArray:
    """``num`` numbers from ``start`` to ``stop``, evenly spaced; the last one is exactly ``stop``.

    Without the ``endpoint`` it is left out, and the spaces are that of one more. Numbers make float32, tensors and
    arrays their own dtype, integers float64. Where these are no scalars, the numbers between each two are [num, ...].
    """
    if not is_whole(num, 0):
        raise SpecError(f"num must be an integer from 0 up, got {num!r}")
    first, last = as_value(start), as_value(stop)
    own = common_dtype([end.dtype for end in (first, last) if not is_weak(end) and hasattr(end, "dtype")] or [0.0])
    held = as_dtype(dtype) if dtype is not None else own if is_float(own) else np.dtype(np.float64)
    if is_weak(first) and is_weak(last):
        return constant(np.linspace(first, last, num, endpoint, dtype=held), name=name)
    return _between(first, last, num, endpoint, held, name)


def _between(start: Any, stop: Any, num: int, endpoint: bool, dtype: np.dtype[Any], name: str | None) -> TensorOrArray:
    """`linspace` of tensors and arrays."""
    wide = dtype if is_float(dtype) else np.dtype(np.float64)
    first, last = _of_dtype(start, wide), _of_dtype(stop, wide)
    rank = max(described(first).rank, described(last).rank)
    share = (np.arange(num) / max(num - endpoint, 1)).reshape(num, *[1] * rank)
    made = lookup("add")(lookup("multiply")(share.astype(wide), lookup("subtract")(last, first)), first, name=name)
    if endpoint and num > 1:
        made = lookup("where")(share == 1, last, made)
    if not is_float(dtype):
        made = lookup("astype")(lookup("floor")(made), dtype)
    return cast("TensorOrArray", made)


@located("eye")
def eye(rows: int, columns: int | None = None, dtype: DType = "float32", *, name: str | None = None) -> TensorOrArray:
    """The identity matrix with ``rows`` and ``columns`` (square unless ``columns`` is given)."""
    Spec(dtype, (rows, rows if columns is None else columns))  # raises for what there cannot be
    return constant(np.eye(rows, columns, dtype=as_dtype(dtype)), name=name)


def _of_dtype(value: Any, dtype: Any) -> Any:
    """``value`` as something of ``dtype`` that an op takes."""
    found = as_value(value)
    if dtype is None:
        return found
    if hasattr(found, "builder"):
        return found if found.dtype == as_dtype(dtype) else lookup("astype")(found, dtype)
    return as_dtype_of(found, as_dtype(dtype))
