"""Values that an iteration of scalars reads where they lie in memory, at indices that it computes.

Law: pure. What is larger than a value of entries may be, or is read at computed indices, stays a table: ops that read
some of its entries look these up, others ask for all of them, which a large table does not give. A lookup in a branch
that is not chosen reads zeros rather than fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flowrt.base.spec import Spec, normal_axes
from flowrt.base.traits import is_alias
from flowrt.kernels.composite.iteration import Lookup
from flowrt.kernels.composite.scalar_loop import LookedUp
from flowrt.kernels.ops.slices import BEYOND
from flowrt.sched.loops.making import MOST_ENTRIES, Entries, Making, TableAddress, Unfit, Value, check_entries
from flowrt.sched.loops.structured import COND, LOOP

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode

ANYWHERE = -1  # the number of a lookup that cannot fail


def is_table(size: int, is_indexed: bool) -> bool:
    """Whether a captured value, read at computed indices or not, is left in memory."""
    return size > MOST_ENTRIES or (is_indexed and size > 1)


def indexed_inputs(attrs: Mapping[str, Any]) -> frozenset[int]:
    """The inputs of a loop, by their place behind its count, that its bodies read at computed indices."""
    carried, scanned, body, cond = attrs["carried"], attrs["scanned"], attrs["body"], attrs["cond"]
    found = set(_indexed(body))
    if cond is not None:
        found |= {i if i < carried else i + scanned for i in _indexed(cond)}
    return frozenset(found)


def _indexed(body: Plan) -> set[int]:
    feeds = {i: i for i in range(len(body.feeds))}  # of the values that are feeds as they are
    found: set[int] = set()
    for node, first in zip(body.nodes, body.value_starts(), strict=False):
        if is_alias(node.op) and node.inputs[0] in feeds:
            feeds[first] = feeds[node.inputs[0]]
        read = node.inputs[:1] if node.op == "take" else _indexed_inside(node)
        found |= {feeds[value] for value in read if value in feeds}
    return found


def _indexed_inside(node: PlanNode) -> Sequence[int]:
    if node.op == COND:
        return [node.inputs[1 + i] for name in ("if_true", "if_false") for i in _indexed(node.attrs[name])]
    if node.op == LOOP:
        return [node.inputs[int(node.attrs["counted"]) + i] for i in indexed_inputs(node.attrs)]
    return ()


# ── entries at places that are known ─────────────────────────────────────────────────────────────────────────────────


def entries_of(making: Making, value: Value) -> Entries:
    """All the entries of a value."""
    if not isinstance(value, TableAddress):
        return value
    return _entries_at(making, value, _places(value.shape, ()))


def part_of(making: Making, value: Value, key: Any) -> Entries:
    """The entries that a key of `getitem` names."""
    if not isinstance(value, TableAddress):
        return np.asarray(value[key])
    return _entries_at(making, value, _places(value.shape, key))


def _places(shape: tuple[int, ...], key: tuple[Any, ...]) -> Entries:
    """Where the entries that a key of `getitem` names lie, in a value of that shape however large."""
    pitches = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    whole = as_strided(np.empty(1, np.int8), shape, pitches)  # whose entries, a byte each, are never looked at
    named = whole[key if ... in key else (*key, ...)]
    check_entries(named.size)
    places = np.array(named.ctypes.data - whole.ctypes.data)
    for size, pitch in zip(named.shape, named.strides, strict=True):
        places = places[..., None] + np.arange(size) * pitch
    return places


def _entries_at(making: Making, table: TableAddress, places: Entries) -> Entries:
    if not places.size:
        raise Unfit("no entries of a table")
    offsets = tuple(int(n) for n in places.flat)
    found = making.lookup(Lookup(table.place, 0, None, None, 0, offsets, table.dtype, ANYWHERE))
    return np.array(found, np.int64).reshape(places.shape)


# ── entries at places that an iteration computes
# ───────────────────────────────────────────────────────────────────────────


def taken(
    making: Making, node: PlanNode, inputs: Sequence[Value], axis: int, absent: bool, guard: int | None
) -> Entries:
    """What `take` answers."""
    x, indices = _indexable(making, inputs[0]), entries_of(making, inputs[1])
    at = normal_axes(axis, len(x.shape))[0]
    if not indices.size:
        raise Unfit("nothing taken")
    spec = Spec(making.dtype(int(indices.flat[0])), indices.shape)
    looks = ((LookedUp(node, place, spec, at), int(index)) for place, index in np.ndenumerate(indices))
    rows = [_row(making, look, x, index, absent, guard) for look, index in looks]
    return np.stack(rows, at).reshape((*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


def _row(making: Making, look: LookedUp, x: Value, index: int, absent: bool, guard: int | None) -> Entries:
    """The row at that ``index`` along an axis, without the axis."""
    axis = look.axis
    size, pitch = x.shape[axis], math.prod(x.shape[axis + 1 :])
    places = _places(x.shape, (*[slice(None)] * axis, 0))
    if making.dtype(index) == np.uint64:
        (most,) = making.constant(np.array([BEYOND], np.uint64))
        index = making.member("minimum", [index, int(most)], np.dtype(np.uint64))
    if making.dtype(index) != np.int64:
        index = making.member("astype", [index], np.dtype(np.int64))
    looks = making.shared.looks
    held = () if isinstance(x, TableAddress) else tuple(int(n) for n in x.flat)
    table, dtype = (x.place, x.dtype) if isinstance(x, TableAddress) else (0, making.dtype(held[0]))
    looks.append(look)
    offsets, count = tuple(int(n) for n in places.flat), making.shared.word(size)
    found = Lookup(table, count, index, guard, pitch, offsets, dtype, len(looks) - 1, held, absent)
    return np.array(making.lookup(found), np.int64).reshape(places.shape)


def _indexable(making: Making, value: Value) -> Value:
    """The value as one that can be read at computed indices: constants are left in memory, too."""
    if not value.size:
        raise Unfit("a table of no entries")
    if isinstance(value, TableAddress) or (value >= 0).any():
        return value
    constants = [making.shared.constants[-1 - int(n)] for n in value.flat]
    return making.shared.constant_table(np.array(constants, constants[0].dtype).reshape(value.shape))
