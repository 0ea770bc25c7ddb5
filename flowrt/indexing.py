"""Index expressions, as calls of ops by their names.

What is known while the graph is built goes to `getitem` as plain data. What only a step will know, an index, several,
or a bound of a slice, cuts its own axis of what that leaves: from the last axis to the first, so that places stay.
Arrays of indices of several axes name entries together: these axes become one, of which `take` takes them.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import located
from flowrt.base.plain import default_array
from flowrt.base.spec import agree
from flowrt.op import REGISTRY, as_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WHOLE = (None, None, None)
FARTHEST = np.iinfo(np.int64).max


@located("getitem")
def indexed(x: Any, key: Any) -> Any:
    """``x[key]`` as NumPy has it, for an ``x`` that stands for a tensor."""
    items = [_as_item(item) for item in (key if isinstance(key, tuple) else (key,))]
    if any(map(_is_mask, items)):
        x, items = _behind_mask(x, items)
    if not any(map(_is_late, items)):
        return REGISTRY["getitem"](x, tuple(items))
    items = _for_each_axis(items, as_value(x))
    together = _together(items)
    known = tuple(WHOLE if _is_late(item) or place in together else item for place, item in enumerate(items))
    if any(item != WHOLE for item in known):
        x = REGISTRY["getitem"](x, known)
    left = [item for place, item in enumerate(items) if place in together or not isinstance(item, int)]
    for axis in reversed(range(len(left))):  # one item for each axis that there is now
        if isinstance(left[axis], slice):
            x = _stretch(x, axis, left[axis])
        elif axis not in together and _is_late(left[axis]):
            x = REGISTRY["take"](x, left[axis], axis)
    if not together:
        return x
    indices = _side_by_side([left[axis] for axis in together])
    return entries_at(x, as_value(x).shape, indices, len(together), together[0])


def _together(items: Sequence[Any]) -> Sequence[int]:
    """Which items name entries together, an index of each for each entry: none where there are no two arrays."""
    chosen = [place for place, item in enumerate(items) if _chooses(item)]
    arrays = sum(_is_late(items[place]) and items[place].shape != () for place in chosen)
    if arrays and chosen[-1] - chosen[0] >= len(chosen):
        raise GraphError(
            f"{user_site()}: indices beside an array of indices must follow one another, as in x[:, i, j]; put "
            "the axes of x in another order first, by fr.transpose"
        )
    return chosen if arrays > 1 else ()


def _chooses(item: Any) -> bool:
    return isinstance(item, int) or (_is_late(item) and not isinstance(item, slice))


def _side_by_side(items: Sequence[Any]) -> Any:
    """Indices that are broadcast together, as [..., k]."""
    if not any(hasattr(item, "builder") for item in items):
        return np.stack(np.broadcast_arrays(*items), -1)
    wide = [_as_int64(item) for item in items]
    shapes = [getattr(item, "shape", ()) for item in items]
    if len(set(shapes)) > 1 or None in shapes[0]:
        nothing = sum(item * 0 for item in wide)  # which broadcasts
        wide = [nothing + item for item in wide]
    return REGISTRY["stack"](wide, -1)


def _as_int64(index: Any) -> Any:
    """An index that is a tensor, as int64; what that does not hold, out of range as it was."""
    if isinstance(index, int):
        return index
    if index.dtype == np.uint64:
        index = REGISTRY["minimum"](index, FARTHEST)
    return index if index.dtype == np.int64 else REGISTRY["astype"](index, "int64")


def entries_at(
    x: Any, shape: Sequence[int | None], indices: Any, count: int, axis: int = 0, name: str | None = None
) -> Any:
    """What ``indices`` [..., count] name in so many axes of ``x``, from ``axis`` on: slices of the others.

    ``shape`` is that of ``x``, as far as it is known.
    """
    sizes = sizes_of(shape, lambda: REGISTRY["shape_of"](x))
    flat, merged = flattened(indices, sizes, count, axis)
    return REGISTRY["take"](REGISTRY["reshape"](x, merged), flat, axis, name=name)


def sizes_of(shape: Sequence[int | None], late: Callable[[], Any]) -> list[Any]:
    """The sizes in ``shape``, those that are not known as entries of the vector that ``late`` answers."""
    vector = late() if None in shape else None
    return [REGISTRY["getitem"](vector, (axis,)) if n is None else n for axis, n in enumerate(shape)]


def flattened(indices: Any, sizes: Sequence[Any], count: int, axis: int = 0) -> tuple[Any, list[Any]]:
    """The indices of one axis in the place of ``count`` ones, from ``axis`` on, and the ``sizes`` that then are."""
    chosen = sizes[axis : axis + count]
    known = all(isinstance(n, int) for n in chosen)
    bounds = np.array(chosen, np.int64) if known else REGISTRY["stack"](chosen)
    return REGISTRY["flat_indices"](indices, bounds, axis), [*sizes[:axis], math.prod(chosen), *sizes[axis + count :]]


def _is_mask(item: Any) -> bool:
    return getattr(item, "dtype", None) == np.bool_


def _behind_mask(x: Any, items: list[Any]) -> tuple[Any, list[Any]]:
    """What the one mask among ``items`` chooses of ``x``, and what is left to be done, where its axes are one."""
    others = [item for item in items if not _is_mask(item)]
    if len(others) < len(items) - 1 or any(not isinstance(item, (tuple, str, slice, type(None))) for item in others):
        raise GraphError(f"{user_site()}: one mask stands in an index, beside slices alone; choose axis by axis")
    place = next(n for n, item in enumerate(items) if _is_mask(item))
    before, after = ([item for item in part if item is not None] for part in (items[:place], items[place + 1 :]))
    sizes, mask = as_value(x).shape, items[place].shape
    axis = len(before) if "..." not in before else len(sizes) - len(after) - len(mask)
    if not agree(sizes[axis : axis + len(mask)], mask):
        raise GraphError(f"{user_site()}: a mask is shaped as the axes that it chooses from, {x!r}, not {mask}")
    return masked(x, items[place], axis), [*items[:place], WHOLE, *items[place + 1 :]]


def masked(x: Any, mask: Any, axis: int, name: str | None = None) -> Any:
    """The slices of ``x`` where ``mask`` is true, whose axes, those of ``x`` from ``axis`` on, become one.

    Of as many entries as the mask has, so that sizes that only a step knows are found to be others.
    """
    reshape, shape_of, getitem = REGISTRY["reshape"], REGISTRY["shape_of"], REGISTRY["getitem"]
    mask, shape = np.asarray(mask) if isinstance(mask, (list, tuple)) else mask, as_value(x).shape
    sizes = [getitem(shape_of(x), (at,)) if n is None else n for at, n in enumerate(shape)]
    many = REGISTRY["prod"](shape_of(mask)) if None in mask.shape else math.prod(mask.shape)
    lines = reshape(x, [*sizes[:axis], many, *sizes[axis + len(mask.shape) :]])
    places, count = REGISTRY["true_places"](reshape(mask, (-1,)))
    return REGISTRY["take"](lines, REGISTRY["slice_along"](places, 0, count), axis, name=name)


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
        array = default_array(value)
        value = array if array.size else np.zeros(array.shape, np.int64)
    if _is_mask(value) and len(value.shape) > 0:
        return value
    if isinstance(value, bool) or not _is_integral(value):
        raise GraphError(
            f"{user_site()}: index with integers (alone, or in a list, array or tensor), slices, None and ..., "
            f"or a mask of bools, not {item!r}"
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
    return _as_int64(value)


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
