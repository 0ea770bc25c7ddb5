"""Which entry of its operands a kernel refused, in words.

Law: pure. It is looked for once the kernel has failed, so kernels note nothing but the reason. Of tables no entry is
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.attributes import Attr
from flowrt.base.spec import normal_axes, spec_of
from flowrt.base.valueclass import valueclass
from flowrt.kernels.ops.slices import ABSENT

Array: TypeAlias = "np.ndarray[Any, Any]"
Attrs: TypeAlias = Mapping[str, Attr]


@valueclass
class _Choosing:
    """An op whose operand ``indices`` names some of as many entries as ``bound`` says of its operands.

    Where that says it of several axes, the last one of the indices has one for each.
    """

    indices: int
    bound: Callable[[Sequence[Array], Any], Any]
    entries: str = "rows"
    wraps: bool = True


def _along(operands: Sequence[Array], attrs: Any) -> int:
    return int(operands[0].shape[normal_axes(attrs["axis"], operands[0].ndim)[0]])


def _scattered(operands: Sequence[Array], attrs: Any) -> int:
    shape = operands[2].reshape(-1)
    return int(shape[normal_axes(attrs["axis"], shape.size)[0]])


_CLASSES = _Choosing(1, lambda operands, _: operands[0].shape[-1], "classes", wraps=False)
_CHOOSING = {
    "take": _Choosing(1, _along),
    "bag": _Choosing(1, lambda operands, _: operands[0].shape[0]),
    "scatter_add": _Choosing(1, _scattered),
    "take_along_axis": _Choosing(1, _along),
    "add_along_axis": _Choosing(1, _scattered),
    "flat_indices": _Choosing(0, lambda operands, _: operands[1]),
    "group_rows": _Choosing(0, lambda _, attrs: attrs["size"]),
    "route_rows": _Choosing(0, lambda operands, _: operands[1].flat[-1]),
    "take_parts": _Choosing(-1, lambda _, attrs: attrs["bounds"][-1]),
    "class_cross_entropy": _CLASSES,
    "class_cross_entropy_slope": _CLASSES,
}


def chooses(op: str) -> bool:
    """Whether `misfit` may know more of a failure of ``op``."""
    return op in _CHOOSING


def indices_of(op: str) -> int:
    """Which operand of an op that `chooses` has the indices."""
    return _CHOOSING[op].indices


def misfit(
    op: str, operands: Sequence[Array], attrs: Attrs, shape: Sequence[int | None] | None = None, table: str = ""
) -> str:
    """What follows the reason for which a kernel of ``op`` failed: the first index that names nothing, or "".

    ``shape`` is what the indices had where the program made them, of which the first size may be None; ``table`` the
    name of what they choose from.
    """
    choosing = _CHOOSING.get(op)
    if choosing is None:
        return ""
    indices, bound = operands[choosing.indices], choosing.bound(operands, attrs)
    wraps, absent = choosing.wraps and bool(attrs.get("wraps", True)), bool(attrs.get("absent", False))
    of_axes = isinstance(bound, np.ndarray)
    found = _first_outside(
        indices.reshape(-1), np.resize(bound, indices.size) if of_axes else int(bound), wraps, absent
    )
    if found is None:
        return ""
    spec, at = _placed(indices, shape, found)
    axis: Any = attrs.get("axis", 0)
    if of_axes:
        has = has_so_many(int(bound[at[-1]]), axis + at[-1])
    else:
        has = has_so_many(int(bound), normal_axes(axis, operands[0].ndim)[0] if axis else 0, table, choosing.entries)
    return f": {indices.reshape(-1)[found]} at position {at} of {spec}, and {has}"


def has_so_many(bound: int, axis: int, table: str = "", entries: str = "rows") -> str:
    """How many there are to choose from along an axis of what is called ``table``."""
    whose = f"{table!r} has" if table else "there are"
    return f"{whose} {bound:,} {entries if axis == 0 else f'entries along axis {axis}'}"


def _first_outside(indices: Array, bound: int | Array, wraps: bool, absent: bool) -> int | None:
    least = -bound if wraps else 0
    outside = indices >= bound
    if indices.dtype.kind == "i":
        outside |= (indices < least) & ((indices != ABSENT) if absent and indices.dtype.itemsize == 8 else True)
    return int(np.argmax(outside)) if outside.any() else None


def _placed(indices: Array, shape: Sequence[int | None] | None, found: int) -> tuple[str, tuple[int, ...]]:
    """The spec of the indices as the program made them, and where among them the one is that was ``found``."""
    seen = indices
    if shape is not None and indices.size and None not in shape[1:]:
        inner = [size for size in shape[1:] if size is not None]
        if indices.size % int(np.prod(inner)) == 0:
            seen = indices.reshape(-1, *inner) if shape else indices.reshape(())
    return str(spec_of(seen)), tuple(int(place) for place in np.unravel_index(found, seen.shape))
