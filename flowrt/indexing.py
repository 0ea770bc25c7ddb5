"""Index expressions, as calls of ops by their names.

What is known while the graph is built goes to `getitem` as plain data. What only a step will know, an index, several,
or a bound of a slice, cuts its own axis of what that leaves: from the last axis to the first, so that places stay.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.plain import default_array
from flowrt.op import REGISTRY, as_value

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE = (None, None, None)
FARTHEST = np.iinfo(np.int64).max


def indexed(x: Any, key: Any) -> Any:
    """``x[key]`` as NumPy has it, for an ``x`` that stands for a tensor."""
    items = [_as_item(item) for item in (key if isinstance(key, tuple) else (key,))]
    if not any(map(_is_late, items)):
        return REGISTRY["getitem"](x, tuple(items))
    items = _for_each_axis(items, as_value(x))
    known = tuple(WHOLE if _is_late(item) else item for item in items)
    if any(item != WHOLE for item in known):
        x = REGISTRY["getitem"](x, known)
    left = [item for item in items if not isinstance(item, int)]  # one for each axis that there is now
    for axis in reversed(range(len(left))):
        if isinstance(left[axis], slice):
            x = _stretch(x, axis, left[axis])
        elif _is_late(left[axis]):
            x = REGISTRY["take"](x, left[axis], axis)
    return x


def _is_late(item: Any) -> bool:
    return not isinstance(item, (int, tuple, str, type(None)))


def _as_item(item: Any) -> Any:
    """An item as plain data: an int, (start, stop, step), None or "..."; late are slices, and arrays and tensors."""
    if item is None or item is Ellipsis:
        return None if item is None else "..."
    if isinstance(item, slice):
        start, stop = _bound(item.start), _bound(item.stop)
        step = None if item.step is None else _number(item.step, "by an int that is known while the graph is built")
        return slice(start, stop, step) if _is_late(start) or _is_late(stop) else (start, stop, step)
    value = as_value(item)
    if isinstance(value, (list, np.ndarray)):
        value = default_array(value) if np.size(value) else np.zeros(np.shape(value), np.int64)
    if isinstance(value, bool) or not _is_integral(value):
        raise GraphError(
            f"{user_site()}: index with integers (alone, or in a list, array or tensor), slices, None and ..., not "
            f"{item!r}; fr.where takes a bool condition"
        )
    return value if hasattr(value, "builder") or np.ndim(value) else int(value)


def _is_integral(value: Any) -> bool:
    return isinstance(value, int) or getattr(value, "dtype", np.dtype(object)).kind in "iu"


def _bound(given: Any) -> Any:
    """Where a slice starts or stops: None, an int, or an int64 scalar tensor."""
    value = as_value(given)
    if value is None or not hasattr(value, "builder"):
        return None if value is None else max(-FARTHEST, min(_number(value, "from integer to integer"), FARTHEST))
    if not _is_integral(value) or value.spec.dims not in (None, ()):
        raise GraphError(f"{user_site()}: a slice is from integer to integer, not {given!r}")
    if isinstance(value.spec.value, int):
        return value.spec.value
    if value.dtype == np.uint64:
        value = REGISTRY["minimum"](value, FARTHEST)
    return value if value.dtype == np.int64 else REGISTRY["astype"](value, "int64")


def _number(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except (TypeError, GraphError):
        raise GraphError(f"{user_site()}: a slice is {what}, not {value!r}") from None


def _for_each_axis(items: list[Any], x: Any) -> list[Any]:
    """``items``, new axes apart one for each axis of ``x``; raises `GraphError` where they are no key to it."""
    used = [item for item in items if item is not None and not isinstance(item, str)]
    dots = [place for place, item in enumerate(items) if isinstance(item, str)]
    if len(used) > len(x.shape) or len(dots) > 1:
        raise GraphError(
            f"{user_site()}: {len(used)} indices do not fit {x!r}; use at most one for each axis, and one ..."
        )
    chosen = [item for item in used if not isinstance(item, (slice, tuple))]
    if len(chosen) > 1 and any(map(np.ndim, chosen)):
        raise GraphError(
            f"{user_site()}: an array of indices stands beside slices alone; of one entry for each row write "
            "fr.sum(x * fr.one_hot(ids, n), -1), else x[ids] axis by axis"
        )
    place = dots[0] if dots else len(items)
    return [*items[:place], *[WHOLE] * (len(x.shape) - len(used)), *items[place + len(dots) :]]


def _stretch(x: Any, axis: int, item: slice) -> Any:
    """The entries of one axis of ``x`` that a slice names, one of whose bounds only a step knows."""
    size = as_value(x).shape[axis]
    if size is None:
        size = REGISTRY["getitem"](REGISTRY["shape_of"](x), (axis,))
    if item.step is None or item.step > 0:
        first, end = _clipped((item.start, item.stop), (0, size), size)
    else:
        first, end = (last + 1 for last in _clipped((item.stop, item.start), (-1, size - 1), size))
    count = REGISTRY["maximum"](end - first, 0)
    part = REGISTRY["slice_along"](x, first, count, axis)
    return part if item.step in (None, 1) else REGISTRY["getitem"](part, (*[WHOLE] * axis, (None, None, item.step)))


def _clipped(bounds: Sequence[Any], limits: Sequence[Any], size: Any) -> list[Any]:
    """``bounds``, which count from the end where they are below 0, within ``limits``, which stand for None.

    Of ops that carry values (`Spec.value`), so that shapes are known where all of this is.
    """
    minimum, maximum = REGISTRY["minimum"], REGISTRY["maximum"]
    out = []
    for bound, limit in zip(bounds, limits, strict=True):
        if bound is None:
            out.append(limit)
            continue
        from_end = minimum(maximum(-bound, 0), 1)
        out.append(minimum(maximum(bound + size * from_end, limits[0]), limits[1]))
    return out
