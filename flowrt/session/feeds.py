"""What a step is given: any value as the array that its tensor stands for, or an error that says what does not fit.

Arrays and NumPy scalars keep their dtype, so a wrong one is an error with its fix; plain Python data takes the
tensor's, where that loses no kind of number (a float never becomes an int) and every value fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import FeedError, GraphError, SpecError, user_site
from flowrt.base.plain import RANKS, narrowed, shortened, unmasked
from flowrt.base.spec import MAX_RANK, Spec, holds, kind_of

if TYPE_CHECKING:
    from flowrt.graph import Tensor

Array = np.ndarray[Any, Any]


def as_feed(tensor: Tensor, value: Any, copy: Callable[[Array], Array] = np.ascontiguousarray) -> Array:
    """``value`` as a C-contiguous array of the tensor's spec; raises `FeedError` for one that does not fit.

    ``copy`` makes a C-contiguous array of a strided one.
    """
    spec = tensor.spec
    if type(value) is np.ndarray and value.dtype is spec.dtype and value.shape == spec.dims:  # as nearly always
        return value if value.flags.c_contiguous else copy(value)
    if isinstance(value, np.generic) and value.dtype == spec.dtype and spec.dims == ():
        return np.asarray(value)  # at once: a step of scalars takes less time than looking at them closely
    array = _native(value) if type(value) is np.ndarray else _convert(tensor, value)
    if array.dtype != spec.dtype or not spec.accepts(array.dtype, array.shape):
        raise FeedError(f"{_begin(tensor)}: expected {spec}, got {_describe(array)}{_fix(spec, array)}")
    return array if array.flags.c_contiguous else copy(array)


def not_fetched(asked: Any) -> GraphError:
    """The error for what is no part of a graph."""
    named = f"; graph.get_tensor_by_name({asked!r}) finds one" if isinstance(asked, str) else ""
    return GraphError(f"{user_site()}: {asked!r} cannot be fetched; fetch tensors, operations or variables{named}")


def copied_bytes(values: Iterable[Any]) -> tuple[int, ...]:
    """The bytes of each of the values that `as_feed` copies because it is strided."""
    return tuple(v.nbytes for v in values if isinstance(v, np.ndarray) and not v.flags.c_contiguous)


def _native(array: Array) -> Array:
    """A plain array (no subclass) in this machine's byte order."""
    plain = np.asarray(array)
    return plain if plain.dtype.isnative else plain.astype(plain.dtype.newbyteorder("="))


def _convert(tensor: Tensor, value: Any) -> Array:
    if hasattr(value, "__tensor__") or hasattr(value, "builder"):
        raise FeedError(f"{_begin(tensor)} with a value, not with {value!r}; run the step that computes it first")
    if value is None:
        raise FeedError(f"{_begin(tensor)}: expected {tensor.spec}, got None")
    try:
        if isinstance(value, np.ndarray):
            return _native(unmasked(value))
        natural = np.asarray(value)
        if natural.dtype == object:  # no array comes of it
            raise FeedError(f"{_begin(tensor)}: expected {tensor.spec}, got {shortened(value)}")
        if isinstance(value, np.generic) or not _keeps_kind(natural.dtype, tensor.dtype):
            return _native(natural)
        return narrowed(natural, tensor.dtype)
    except (TypeError, ValueError, OverflowError, GraphError) as error:
        raise FeedError(f"{_begin(tensor)}: {shortened(value)} is not a value for {tensor.spec}: {error}") from error


def _keeps_kind(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether numbers of one dtype, written in Python, may be taken for the other: bool, then ints, then floats."""
    return holds(given) and RANKS[kind_of(given)] <= RANKS[kind_of(wanted)]


def _begin(tensor: Tensor) -> str:
    return f"{user_site()}: feed {tensor.name!r} ({tensor.op.site})"


def _describe(array: Array) -> str:
    held = holds(array.dtype) and array.ndim <= MAX_RANK
    return str(Spec(array.dtype, array.shape)) if held else f"{array.dtype}{list(array.shape)}"


def _fix(spec: Spec, array: Array) -> str:
    if array.dtype != spec.dtype:
        return (
            f"; convert it with .astype({spec.dtype.name!r})"
            if array.dtype.kind in (*RANKS, "O") or holds(array.dtype)
            else ""
        )
    if array.ndim + 1 == len(spec.shape) and spec.accepts(array.dtype, (1, *array.shape)):
        return "; give it a first axis with value[None]"
    if spec.known and array.size == spec.size:
        return f"; value.reshape({list(spec.concrete)}) has that shape"
    return ""


def fed_spec(tensor: Tensor, value: Any) -> Spec:
    """The spec of what a tensor is fed: None, a shape, or an array."""
    if value is None:
        return tensor.spec
    shape = np.shape(value) if hasattr(value, "dtype") else (value,) if isinstance(value, int) else tuple(value)
    spec = Spec(tensor.dtype, shape)
    if not tensor.spec.accepts(spec.dtype, spec.shape):
        raise SpecError(f"{user_site()}: {tensor.name!r} ({tensor.op.site}) is {tensor.spec}; it cannot be fed {spec}")
    return spec
