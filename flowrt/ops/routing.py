"""Rows sent to whoever has them, and back: Part and Stitch, and lookups in tables that are split by rows.

`dynamic_partition` and `dynamic_stitch` are Part and Stitch of Abadi et al., "TensorFlow: a system for large-scale
machine learning", OSDI 2016, section 4.2. All that they compute is where things go, `route_rows` and `last_places`:
entries are moved by `take`, whose gradient is theirs.

How many ids each part of a table gets is another number in each step; `route_rows` fills them up with what is no row's
to one of few sizes. All else has as many rows as there are ids, or as fit in any case: so only what is done beside the
parts has sizes that a step decides, and these come again. Where all parts of a lookup lie in one place, nothing is
dealt out: see `flowrt.passes.parts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.partitioning import padded_room
from flowrt.base.plain import is_whole
from flowrt.base.spec import Spec, agree
from flowrt.base.traits import Elsewhere
from flowrt.graph import TensorOperators
from flowrt.ops.elementwise import astype
from flowrt.ops.index import take
from flowrt.ops.inference import described
from flowrt.ops.reduce import max as max_
from flowrt.ops.shape import concat, getitem, place_along, reshape, slice_along
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import shape_of, zeros
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.partitioning import Partition
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["dynamic_partition", "dynamic_stitch"]


@op(elsewhere=Elsewhere.AGAIN, gradient=None)
def route_rows(
    indices: Operand,
    bounds: Operand,
    wraps: bool = True,
    absent: bool = False,
    padded: bool = False,
    again: bool = False,
    *,
    name: str | None = None,
) -> tuple[Result, Result, Result, Result]:
    """Which of n ``indices`` are whose, of parts whose rows lie between ``bounds``, [parts + 1]: four int64 vectors.

    They are: where each part's begin among the indices once these are sorted by part, equal ones in their order, and
    where the last part's end, [parts + 1]; the row within its part of each so sorted, its place before, and, for each
    index, its place then. Where parts are ``padded``, each has as many as `padded_rows` says, unless n is 0: of the
    largest, where there is room for as many of all, which the sorted vectors have for any n. What is no index there is
    no row's, and has no place before. Where it ``wraps``, negative indices count from the end; those that may be
    ``absent``, as of `take`, are the first part's. One that is out of range fails the step. Where it is done ``again``,
    every task that wants to know has the indices, and finds out by itself.
    """
    for what, spec in (("indices", indices), ("bounds", bounds)):
        if spec.dtype.kind not in "iu" or (spec.dims is not None and spec.rank != 1):
            raise SpecError(f"the {what} are a vector of integers, got {spec}")
    count = None if indices.dims is None else indices.shape[0]
    ends = None if bounds.dims is None else bounds.shape[0]
    sorted_too = Spec("int64", (_room(count, ends) if padded else count,))
    return Spec("int64", (ends,)), sorted_too, sorted_too, Spec("int64", (count,))


def _room(count: int | None, ends: int | None) -> int | None:
    """For how many rows there is room where ``count`` are dealt out to parts, each of them padded."""
    return None if count is None or ends is None else padded_room(count, ends - 1)


@op(elsewhere=Elsewhere.AS_FIRST)
def part_of(x: Operand, starts: Operand, part: int) -> Result:
    """What of ``x`` is one part's, as `route_rows` tells where each begins: a stretch along the first axis."""
    check_part(starts, part)
    if x.dims is not None and x.rank < 1:
        raise SpecError(f"a scalar has no parts, got {x}")
    begin, end = starts.value[part : part + 2] if isinstance(starts.value, tuple) else (None, None)
    count = end - begin if isinstance(begin, int) and isinstance(end, int) else None
    return Spec(x.dtype, None if x.dims is None else (count, *x.shape[1:]))


def check_part(starts: Spec, part: int) -> None:
    if starts.dtype != np.int64 or (starts.dims is not None and starts.rank != 1):
        raise SpecError(f"the starts of parts are a vector of int64, got {starts}")
    parts = None if starts.dims is None or starts.shape[0] is None else starts.shape[0] - 1
    if part < 0 or (parts is not None and part >= parts):
        raise SpecError(f"part {part} is not one of {'those from 0 up' if parts is None else parts}")


@part_of.gradient
def part_of_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    x, starts = node.inputs
    return place_along(dy, getitem(starts, (node.attrs["part"],)), shape_of(x)), None


@op
def join_parts(parts: Sequence[Operand], starts: Operand, order: Operand) -> Result:
    """The rows of all ``parts`` one after another, then zeros: as many as `route_rows` answered in ``order``."""
    ranked = [part for part in parts if part.dims is not None]
    if not parts or any(part.rank < 1 for part in ranked):
        raise SpecError(f"parts are rows of one or more tensors, got {' and '.join(map(str, parts)) or 'none'}")
    if any(part.shape[1:] != ranked[0].shape[1:] for part in ranked):
        raise SpecError(f"rows of parts are alike, got {' and '.join(map(str, parts))}")
    count = None if order.dims is None else order.shape[0]
    rows = sum(part.shape[0] or 0 for part in ranked)
    if count is not None and rows > count:
        raise SpecError(f"{rows} rows of parts are more than the {count} that were dealt out")
    return Spec(parts[0].dtype, (count, *ranked[0].shape[1:]) if ranked else None)


@join_parts.gradient
def join_parts_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    *parts, starts, _ = node.inputs
    return *(part_of(dy, starts, part) for part in range(len(parts))), None, None


@op(gradient=None)
def last_places(indices: Operand, size: Operand) -> Result:
    """For each number below ``size``, an integer scalar, the last place among ``indices`` where it stands: int64.

    Of those that stand nowhere it is what `take` has for absent ones.
    """
    if indices.dtype.kind not in "iu" or (indices.dims is not None and indices.rank != 1):
        raise SpecError(f"the indices are a vector of integers, got {indices}")
    if size.dtype.kind not in "iu" or size.dims not in (None, ()):
        raise SpecError(f"the size is an integer scalar, got {size}")
    return Spec("int64", (size.value if isinstance(size.value, int) else None,))


@located("dynamic_partition")
def dynamic_partition(x: Operand, partitions: Operand, num_partitions: int) -> list[TensorOrArray]:
    """``x`` dealt out to ``num_partitions`` tensors: part i has the slices of ``x`` whose entry of ``partitions`` is i.

    ``partitions`` are integers from 0 up, shaped as the first axes of ``x``. Each part is [count, ...], in the order of
    ``x``; how many there are only a step knows. An entry out of range fails the step.
    """
    if not is_whole(num_partitions, 1):
        raise SpecError(f"num_partitions is how many parts there are, 1 or more, not {num_partitions!r}")
    num_partitions = int(num_partitions)
    given, told = described(x), described(partitions)
    if told.dtype.kind not in "iu":
        raise SpecError(f"partitions are integers, got {told}; use astype")
    if told.dims is None or (given.dims is not None and not agree(given.shape[: told.rank], told.shape)):
        raise SpecError(f"partitions are shaped as the first axes of {given}, got {told}")
    bounds = np.arange(num_partitions + 1)
    starts, _, order, _ = route_rows(_flat(partitions, told.rank), bounds, False)
    rows = _flat(x, told.rank)
    return [take(rows, stretch(order, starts, part)) for part in range(num_partitions)]


def _flat(x: Any, axes: int) -> Any:
    """``x`` with its first ``axes`` as one."""
    if axes == 1:
        return x
    spec = described(x)
    if spec.dims is None:
        return reshape(x, concat([np.array([-1]), shape_of(x)[axes:]]))
    first, inner = spec.shape[:axes], spec.shape[axes:]
    if None not in inner:
        return reshape(x, (-1 if None in first else math.prod(n or 0 for n in first), *inner))
    return reshape(x, concat([np.array([-1]), shape_of(x)[axes:]]))


def stretch(x: Any, starts: Any, part: int) -> Any:
    """What of ``x`` is one part's, as `route_rows` tells where each begins."""
    first = getitem(starts, (part,))
    return slice_along(x, first, getitem(starts, (part + 1,)) - first)


@located("dynamic_stitch")
def dynamic_stitch(indices: Sequence[Any], values: Sequence[Any]) -> TensorOrArray:
    """One tensor of the ``values``, slice j of whose i-th is at ``indices[i][j]``: what undoes `dynamic_partition`.

    ``indices[i]`` are integers from 0 up, shaped as the first axes of ``values[i]``. The result has as many slices as
    the largest index asks for. Of several for one index the last counts; where there is none there are zeros.
    """
    if not isinstance(indices, (list, tuple)) or not isinstance(values, (list, tuple)) or not values:
        raise SpecError(f"indices and values are lists, one tensor for each part, got {indices!r} and {values!r}")
    if len(indices) != len(values):
        raise SpecError(f"each part has indices and values, got {len(indices)} indices for {len(values)} values")
    told = [described(each) for each in indices]
    for spec, value in zip(told, map(described, values), strict=True):
        if spec.dtype.kind not in "iu":
            raise SpecError(f"indices are integers, got {spec}; use astype")
        if spec.dims is None or (value.dims is not None and not agree(value.shape[: spec.rank], spec.shape)):
            raise SpecError(f"indices are shaped as the first axes of {value}, got {spec}")
    places = concat([astype(_flat(i, spec.rank), "int64") for i, spec in zip(indices, told, strict=True)])
    rows = concat([_flat(value, spec.rank) for value, spec in zip(values, told, strict=True)])
    size = max_(concat([places, np.array([-1])])) + 1
    return take(rows, last_places(places, size), absent=True)


def looked_up(
    tables: Sequence[Any],
    bounds: Sequence[int],
    ids: Any,
    beside: Callable[[Any], Any],
    name: str | None = None,
    table: str | None = None,
    absent: bool = False,
) -> Any:
    """`take` of the rows ``ids`` of the table that ``tables`` are together: Part, Gather on each, Stitch.

    Table i has the rows from ``bounds[i]`` up to the next; ``beside(value)`` is the scope of what is done there,
    ``table`` its name, for errors. Some ids may be ``absent``.
    Nothing travels but the rows that occur, as often as they do, and some more (`padded_rows`). Gradients are rows of
    each table in the order of ``ids``, so that what occurs several times is added up as in the whole table.
    """
    spec = described(ids)
    if spec.dtype.kind not in "iu":
        raise SpecError(f"indices must be integers, got {spec}; use astype")
    if spec.dims is None:
        raise SpecError(f"the rank of indices into a table that is split must be known, got {spec}")
    starts, found, order, back = _routed(_flat_ids(ids, spec), absent, bounds, described(tables[0]), table)
    rows = []
    for part, shard in enumerate(tables):
        with beside(found):  # so that no more than the part's travels
            mine = part_of(found, starts, part)
        with beside(shard):
            rows.append(take(shard, mine, absent=True))
    flat = spec.rank == 1
    whole = take(join_parts(rows, starts, order), back, name=name if flat else None)
    if flat:
        return whole
    inner = described(tables[0]).concrete[1:]
    sizes = (*spec.concrete, *inner) if spec.known else concat([shape_of(ids), np.array(inner, np.int64)])
    return reshape(whole, sizes, name=name)


def _routed(ids: Any, absent: bool, bounds: Sequence[int], table: Spec, name: str | None) -> Any:
    """`route_rows` for tables of rows like those of ``table``, which is called ``name``.

    As it takes but one message, all who have a part are sent all ids, where those are not more bytes than the rows.
    """
    row_bytes = table.dtype.itemsize * math.prod(table.concrete[1:])
    again = (len(bounds) - 2) * described(ids).dtype.itemsize <= row_bytes
    called = f"{name}/rows" if name else None
    return route_rows(ids, np.array(bounds, np.int64), absent=absent, padded=True, again=again, name=called)


def _flat_ids(ids: Any, spec: Spec) -> Any:
    return reshape(ids, (math.prod(spec.concrete) if spec.known else -1,)) if spec.rank != 1 else ids


class SplitGradient(TensorOperators):
    """The gradient of a variable that is split by rows: one for each part, a tensor, an `IndexedSlices` or None.

    Used as a tensor, or by ``np.asarray`` where it holds arrays, it is the whole, dense; optimisers, and clipping, take
    the parts as they are.
    """

    __slots__ = ("partition", "parts")

    def __init__(self, partition: Partition, parts: Sequence[Any]) -> None:
        self.partition = partition
        self.parts = tuple(parts)

    @property
    def spec(self) -> Spec:
        """The spec of the whole."""
        return self.partition.spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of its entries."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole."""
        return self.spec.concrete

    def map(self, change: Callable[[Any], Any]) -> SplitGradient:
        """That of which each part is ``change`` of this one's."""
        return SplitGradient(self.partition, [None if part is None else change(part) for part in self.parts])

    def __tensor__(self) -> Any:
        specs = [self.partition.spec_of(first, end) for _, first, end in self.partition.pieces()]
        return concat(
            [zeros(s.concrete, s.dtype) if part is None else part for part, s in zip(self.parts, specs, strict=True)]
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.__tensor__(), *args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return SplitGradient, (self.partition, self.parts)  # as a step answers them, of arrays

    def __repr__(self) -> str:
        return f"<SplitGradient of {self.partition.name!r} {self.spec}>"


def split_gradient(gradient: Any, partition: Partition) -> Sequence[Any]:
    """What each part of a variable has of a ``gradient`` of the whole: a tensor, `IndexedSlices`, a `SplitGradient`."""
    if isinstance(gradient, SplitGradient) and gradient.partition == partition:
        return gradient.parts
    if isinstance(gradient, IndexedSlices):
        return split_slices(gradient, partition)
    return [getitem(gradient, ((first, end, None),)) for _, first, end in partition.pieces()]


def split_slices(slices: IndexedSlices, partition: Partition) -> list[IndexedSlices]:
    """The slices of each part, in their order."""
    starts, found, order, _ = _routed(slices.indices, slices.absent, partition.rows, partition.spec, partition.name)
    values = take(slices.values, order, absent=True)
    sizes = [partition.spec_of(first, end).concrete for _, first, end in partition.pieces()]
    return [
        IndexedSlices(part_of(values, starts, part), part_of(found, starts, part), mine, absent=True)
        for part, mine in enumerate(sizes)
    ]
