"""What is known of a tensor before it exists: its dtype, its shape, and sometimes its value.

``None`` stands for a dimension that only a step will know. ``value`` carries small host integers (a shape computed in
the graph) into shape inference; it has the nesting of the array, with ``None`` for entries not known yet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.valueclass import valueclass

Shape: TypeAlias = tuple[int | None, ...]
Value: TypeAlias = int | tuple["Value", ...] | None

INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")
"""What a tensor may hold, beside bfloat16: NumPy's own dtypes."""
BFLOAT16 = "bfloat16"
_BITS = np.dtype("uint16")
MAX_RANK = 8
MOST_SLID = 2**31  # how far a window reaches or goes at once, at most
MOST_BYTES = 2**63 - 1  # what memory can address; axes of size 0 do not count
MAX_VALUE_SIZE = 64
_INT = frozenset({int})


_KNOWN: dict[Any, np.dtype[Any]] = {known: np.dtype(name) for name in DTYPES for known in (name, np.dtype(name))}
THE_DTYPES = "they are of bool, int8 to int64, uint8 to uint64, bfloat16, float16, float32 or float64"


NAMES: dict[np.dtype[Any], str] = {np.dtype(name): name for name in DTYPES}
"""NumPy works a dtype's name out anew each time, in the time that a node takes to be built otherwise."""


@cache
def bfloat16() -> np.dtype[Any]:
    """The dtype that NumPy knows once ml_dtypes is imported, as it is where a program first has to do with one."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    NAMES[found] = BFLOAT16
    _KNOWN.update({BFLOAT16: found, found: found})
    return found


def kind_of(dtype: np.dtype[Any]) -> str:
    """NumPy's letter for what the entries are of a dtype that a tensor `holds`: b, i, u or f, where NumPy says V of
    bfloat16, too."""
    return "f" if dtype.kind == "V" else dtype.kind


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether these are floats, of a dtype that a tensor `holds`."""
    return dtype.kind in "fV"


def is_half(dtype: np.dtype[Any]) -> bool:
    """Whether these are floats of 16 bits, which are stored as such and computed with in float32."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def computed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What is computed with, and kept beside a variable: float32 where these are floats of 16 bits."""
    return _KNOWN["float32"] if is_half(dtype) else dtype


@cache
def largest(dtype: np.dtype[Any]) -> float:
    """The largest number that is not infinite, of a dtype of floats."""
    return float.fromhex("0x1.fep127") if dtype.kind == "V" else float(np.finfo(dtype).max)


@cache
def epsilon(dtype: np.dtype[Any]) -> float:
    """How far it is from 1 to the next number, of a dtype of floats."""
    return 2.0**-7 if dtype.kind == "V" else float(np.finfo(dtype).eps)


def stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What memory holds for kernels to see: of floats of 16 bits their bits."""
    return _BITS if is_half(dtype) else dtype


def holds(dtype: np.dtype[Any]) -> bool:
    """Whether a tensor may be of ``dtype``, in this machine's byte order."""
    return dtype in _KNOWN or (dtype.kind == "V" and dtype.name == BFLOAT16 and dtype == bfloat16())


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype that ``dtype`` names, if a tensor may hold it."""
    try:
        return _KNOWN[dtype]
    except (KeyError, TypeError):
        return _named(dtype)


def _named(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype == BFLOAT16:
        return bfloat16()
    try:
        named = isinstance(dtype, (str, type, np.dtype))
        found = np.dtype(dtype).newbyteorder("=") if named else None
    except (TypeError, ValueError, DeprecationWarning):
        found = None
    if found is None:
        raise SpecError(f"{dtype!r:.80} is not a dtype of tensors; {THE_DTYPES}")
    if not holds(found):
        raise SpecError(f"tensors of dtype {found} are not supported; {THE_DTYPES}")
    return _KNOWN[found]


def as_shape(shape: Any) -> Shape:
    """``shape`` as a tuple of non-negative ints and Nones."""
    if (
        type(shape) is tuple
        and len(shape) <= MAX_RANK
        and _INT.issuperset(map(type, shape))
        and min(shape, default=0) >= 0
    ):
        return shape  # as most are
    try:
        items = tuple(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else (shape,)
        out = tuple(None if n is None else operator.index(n) for n in items)
    except TypeError:
        raise SpecError(f"a shape is a tuple of sizes and Nones, got {shape!r}") from None
    if any(n is not None and n < 0 for n in out):
        raise SpecError(f"a shape cannot hold negative sizes: {out}")
    if len(out) > MAX_RANK:
        raise SpecError(f"a tensor has at most {MAX_RANK} dimensions, got {len(out)}")
    return out


@dataclass(frozen=True, slots=True, init=False)
class Spec:
    """The static description of a tensor.

    ``Spec("float32", (None, 784))`` is a matrix of any number of rows. ``shape=None`` leaves even the rank open;
    reading ``.shape`` of such a spec raises `SpecError`.
    """

    dtype: np.dtype[Any]
    dims: Shape | None
    value: Value = None
    _nbytes: int | None = field(default=None, init=False, repr=False, compare=False)
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __init__(self, dtype: Any, shape: Any = (), value: Value = None) -> None:
        object.__setattr__(self, "dtype", as_dtype(dtype))
        dims = None if shape is None else as_shape(shape)
        nbytes = None if dims is None or None in dims else math.prod(dims) * self.dtype.itemsize  # type: ignore[arg-type]
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "_nbytes", nbytes)
        object.__setattr__(self, "_hash", 0)
        small = nbytes is not None and 0 < nbytes <= MOST_BYTES
        if dims and not small and math.prod(filter(None, dims)) > MOST_BYTES // self.dtype.itemsize:
            raise SpecError(f"{self} is too large: a tensor has at most 2**63 - 1 bytes")

    def __hash__(self) -> int:
        if not self._hash:  # recordings look up what they know of specs again and again
            object.__setattr__(self, "_hash", hash((self.dtype, self.dims, self.value)))
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.dtype, self.dims, self.value)  # a hash is of one process

    @property
    def shape(self) -> Shape:
        """The sizes, None where one is not known; raises `SpecError` where even the rank is not."""
        if self.dims is None:
            raise SpecError("the rank is not known here; declare the shape (a queue takes shapes=)")
        return self.dims

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def known(self) -> bool:
        """Whether every dimension is known."""
        return self.dims is not None and None not in self.dims

    @property
    def size(self) -> int:
        """The number of elements of a known shape."""
        return math.prod(self.concrete)

    @property
    def nbytes(self) -> int:
        """The number of bytes of a known shape."""
        return math.prod(self.concrete) * self.dtype.itemsize if self._nbytes is None else self._nbytes

    @property
    def concrete(self) -> tuple[int, ...]:
        """The shape of a spec that is known entirely."""
        dims = self.dims
        if dims is None or None in dims:
            raise SpecError(f"the shape of {self} is not known before a step")
        return dims  # type: ignore[return-value]  # plans ask for it by the hundred thousand: no call for a checker

    def accepts(self, dtype: np.dtype[Any], shape: Sequence[int | None]) -> bool:
        """Whether a tensor of ``dtype`` and ``shape`` may stand where this spec is asked for."""
        return dtype == self.dtype and agree(self.dims, shape)

    def with_shape(self, shape: Any) -> Spec:
        """The same dtype in another shape."""
        return Spec(self.dtype, shape)

    def without_value(self) -> Spec:
        """The same dtype and shape, whatever the value."""
        return self if self.value is None else replace_value(self, None)

    def __str__(self) -> str:
        dims = "..." if self.dims is None else ",".join("?" if n is None else str(n) for n in self.dims)
        return f"{self.dtype}[{dims}]"


Axes: TypeAlias = int | Sequence[int] | None
"""An axis, several, or None for all; counted from the front, or, below 0, from behind."""
Pair: TypeAlias = int | Sequence[int]
"""(vertical, horizontal), or one integer for both."""
Paddings: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]] | np.ndarray[Any, Any]
"""(before, after) for each axis, or one pair or number for all."""
Padding: TypeAlias = str | Sequence[Sequence[int]]
""""SAME", "VALID" or ((top, bottom), (left, right))."""


def agree(first: Sequence[int | None] | None, second: Sequence[int | None] | None) -> bool:
    """Whether two shapes differ nowhere that both are known."""
    if first is None or second is None or first == second:
        return True
    return len(first) == len(second) and all(
        m is None or n is None or m == n for m, n in zip(first, second, strict=True)
    )


def replace_value(spec: Spec, value: Value) -> Spec:
    """``spec`` with another known value."""
    return Spec(spec.dtype, spec.dims, value)


def value_known(value: Value) -> bool:
    """Whether a spec's value is known in every entry."""
    return all(map(value_known, value)) if isinstance(value, tuple) else value is not None


def spec_of(array: np.ndarray[Any, Any]) -> Spec:
    """The spec of an array, with its value when that is small and integral."""
    spec = _spec_like(array.dtype, array.shape)
    if array.ndim <= 1 and array.dtype.kind in "iu" and array.size <= MAX_VALUE_SIZE:
        value = array.tolist()
        return replace_value(spec, tuple(value) if array.ndim else value)
    return spec


@lru_cache(1024)
def _spec_like(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Spec:
    return Spec(dtype, shape)


def normal_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """``axis`` (None for all, an int, a tuple) as sorted axes of a tensor of ``rank``, counted from its front."""
    given = range(rank) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) for a in given):
        raise SpecError(f"axis is an integer, or several, got {axis!r}")
    out = sorted(a + rank if a < 0 else a for a in given)
    if len(set(out)) != len(out):
        raise SpecError(f"axis {axis} names an axis twice")
    if out and not 0 <= out[0] <= out[-1] < rank:
        there = f"among the {rank} axes (0 to {rank - 1}, or -{rank} to -1)" if rank else "there: a scalar has none"
        raise SpecError(f"axis {axis} is not {there}")
    return tuple(out)


def one_axis(axis: Any, rank: int) -> int:
    """``axis``, one integer, as an axis of a tensor of ``rank``, counted from its front."""
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise SpecError(f"axis is one integer, got {axis!r}")
    return normal_axes(axis, rank)[0]


def check_axis(axis: Any, x: Spec) -> None:
    """Raise `SpecError` unless ``axis`` is one of ``x``, as far as its axes are known."""
    one_axis(axis, MAX_RANK if x.dims is None else x.rank)


@valueclass
class AxisSlice:
    """What one item of an index expression does: ``count`` entries of ``axis`` from ``start``, every ``step``-th.

    ``axis`` is None for a new axis; ``kept`` is False where an integer removes the axis. What is not known is None.
    """

    axis: int | None
    start: int | None
    step: int
    count: int | None
    kept: bool = True


def index_steps(key: Sequence[Any], shape: Sequence[int | None]) -> list[AxisSlice]:
    """The steps of an index expression (ints, ``(start, stop, step)``, None, ``"..."``) on a tensor of ``shape``."""
    used = sum(item is not None and item != "..." for item in key)
    if used > len(shape) or list(key).count("...") > 1:
        raise SpecError(f"{used} indices do not fit {len(shape)} dimensions; use at most one index each and one ...")
    whole = [(None, None, None)] * (len(shape) - used)
    spot = list(key).index("...") if "..." in key else len(key)
    full = [*key[:spot], *whole, *key[spot + 1 :]]
    out: list[AxisSlice] = []
    axis = 0
    for item in full:
        if item is None:
            out.append(AxisSlice(None, 0, 1, 1))
            continue
        out.append(_integer(item, axis, shape[axis]) if isinstance(item, int) else _slice(item, axis, shape[axis]))
        axis += 1
    return out


def _integer(index: int, axis: int, size: int | None) -> AxisSlice:
    if size is None:
        return AxisSlice(axis, index if index >= 0 else None, 1, 1, kept=False)
    if not -size <= index < size:
        raise SpecError(f"index {index} is out of range for axis {axis} of size {size}")
    return AxisSlice(axis, index % size, 1, 1, kept=False)


def _slice(item: Sequence[int | None], axis: int, size: int | None) -> AxisSlice:
    step = 1 if item[2] is None else item[2]
    if step == 0:
        raise SpecError(f"the slice on axis {axis} has a step of 0")
    if size is not None:
        start, stop, step = slice(*item).indices(size)
        return AxisSlice(axis, start, step, len(range(start, stop, step)))
    return AxisSlice(axis, None, step, None)


@valueclass
class Sliding:
    """How a window slides along one axis: ``count`` places, ``stride`` apart, the first ``before`` the axis' start.

    The window touches every ``dilation``-th of the entries it spans. What is not known is None.
    """

    count: int | None
    stride: int
    dilation: int
    before: int | None


def pair(what: str, value: Any) -> tuple[int, int]:
    """``value``, a positive integer or two of them, as (vertical, horizontal)."""
    items = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(items) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < MOST_SLID for n in items):
        raise SpecError(f"{what} must be a positive integer below 2**31 or a pair of them, got {value!r}")
    return items[0], items[1]


def sliding(
    sizes: Sequence[int | None], window: Sequence[int | None], strides: Any, dilations: Any, padding: Any
) -> tuple[Sliding, Sliding]:
    """How a window slides over an image of ``sizes``: vertically and horizontally.

    ``padding`` is "SAME" (as many places as the size over the stride, rounded up; the odd entry of padding comes
    last), "VALID" (none) or ((top, bottom), (left, right)).
    """
    steps, spacing = pair("strides", strides), pair("dilations", dilations)
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise SpecError(f'padding must be "SAME", "VALID" or ((top, bottom), (left, right)), got {padding!r}')
        edges: Sequence[Any] = (None, None) if padding == "SAME" else ((0, 0), (0, 0))
    else:
        edges = tuple(_edges(edge) for edge in padding) if isinstance(padding, (tuple, list)) else ()
        if len(edges) != 2:
            raise SpecError(f'padding must be "SAME", "VALID" or ((top, bottom), (left, right)), got {padding!r}')
    vertical, horizontal = (_slide(sizes[i], window[i], steps[i], spacing[i], edges[i]) for i in (0, 1))
    return vertical, horizontal


def _edges(edge: Any) -> tuple[int, int]:
    items = tuple(edge) if isinstance(edge, (tuple, list)) else ()
    if len(items) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < MOST_SLID for n in items):
        raise SpecError(f"padding of an axis is (before, after), two sizes from 0 up and below 2**31, got {edge!r}")
    return items[0], items[1]


def _slide(size: int | None, window: int | None, stride: int, dilation: int, edges: tuple[int, int] | None) -> Sliding:
    span = None if window is None else (window - 1) * dilation + 1
    if edges is None:
        count = None if size is None else -(-size // stride)
        if size is None or span is None or count is None:
            return Sliding(count, stride, dilation, None)
        return Sliding(count, stride, dilation, max((count - 1) * stride + span - size, 0) // 2)
    if size is None or span is None:
        return Sliding(None, stride, dilation, edges[0])
    room = size + sum(edges) - span
    if room < 0:
        raise SpecError(
            f"a window that spans {span} does not fit into {size + sum(edges)} entries; "
            'use a smaller one, or padding="SAME"'
        )
    return Sliding(room // stride + 1, stride, dilation, edges[0])
