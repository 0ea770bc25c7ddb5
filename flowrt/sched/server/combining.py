"""Makes one update of a set of them: their mean, or a weighted sum, of as many as a policy has kept.

Law: what is computed follows from the updates in replica order and their weights alone, never from who came first or
how many threads share the work. Numbers are summed as an apply plan for a fixed number of updates would sum them, to
the bit. Of a table's gradient, indices and values of all updates are laid behind one another, the values weighted.
What takes long is computed in lanes; the update that is made is valid until the next one is asked for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import InternalError, SpecError
from flowrt.kernels.language.variants import is_compiled
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, LaunchStep, Operand
from flowrt.kernels.ops.updates.combining import blocks_of, summing, weighed_in
from flowrt.sched.drivers.measuring import square_of

if TYPE_CHECKING:
    from flowrt.sched.drivers.way import Failed, Way
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.rendezvous import Array

Parts: TypeAlias = "Sequence[Array]"
Weights: TypeAlias = "tuple[float, ...] | None"
INLINE_BYTES = 1 << 18  # that are read on the loop's own thread: in about 50 µs
ALIGNMENT = 64  # of sums, in bytes: a cache line


class Combiner:
    """Combines updates of ``replicas`` replicas at most; ``rows`` says of each part of one whether it is of rows.

    ``square`` is the sum of the squares of what it made last of several updates, of the first ``measured`` parts.
    """

    def __init__(self, rows: Sequence[bool], replicas: int, way: Way, measured: int = 0) -> None:
        self._rows, self._replicas, self._way, self._measured = tuple(rows), replicas, way, measured
        self.square = math.nan
        self._sums: tuple[Any, list[_PartSum]] = (None, [])

    def combine(
        self, updates: Sequence[Parts], weights: Weights, then: Callable[[Parts], None], failed: Failed
    ) -> asyncio.Task[None] | None:
        """Call ``then`` with the update made of ``updates``, or ``failed``: before this returns, if that is short.

        Without ``weights`` it is the mean; else each update is multiplied by its own, and that is all. Answers the task
        that it runs in otherwise; cancelled, that calls neither.
        """
        if len(updates) == 1 and weights is None:
            then(updates[0])
            return None
        try:
            updates = [[_in_order(part) for part in parts] for parts in updates]
            sums = self._sums_for(updates)
            short = sum(part.nbytes for parts in updates for part in parts) <= INLINE_BYTES
            made = self._compute_now(updates, sums, weights) if short and all(s.is_compiled for s in sums) else None
        except Exception as error:
            failed(error)
            return None
        if made is None:
            return self._way.start(self._compute(updates, sums, weights, then, failed))
        then(made)
        return None

    def forget(self) -> None:
        """Let the memory of sums go; what is asked for later makes it anew."""
        self._sums = (None, [])

    def _sums_for(self, updates: Sequence[Parts]) -> list[_PartSum]:
        """What sums the dense parts: made once for parts of these dtypes and shapes."""
        dense = [part for part, of_rows in enumerate(self._rows) if not of_rows]
        kinds = [[(parts[part].dtype, parts[part].shape) for part in dense] for parts in updates]
        for other in kinds[1:]:
            if other != kinds[0]:
                part, one, two = next(each for each in zip(dense, kinds[0], other, strict=True) if each[1] != each[2])
                raise SpecError(f"part {part} of two updates of one set differs: {one} and {two}")
        if self._sums[0] != kinds[0]:
            of_dtype: dict[np.dtype[Any], list[int]] = {}
            for part in dense:
                of_dtype.setdefault(updates[0][part].dtype, []).append(part)
            shapes = {part: updates[0][part].shape for part in dense}
            made = [
                _PartSum(dtype, parts, [shapes[part] for part in parts], self._replicas, self._way.host)
                for dtype, parts in of_dtype.items()
            ]
            self._sums = (kinds[0], made)
        return self._sums[1]

    def _compute_now(self, updates: Sequence[Parts], sums: Sequence[_PartSum], weights: Weights) -> Parts:
        for each in sums:
            each.begin(updates, weights)
            each.compute(0, each.blocks)
        return self._put_together(updates, sums, weights)

    async def _compute(
        self,
        updates: Sequence[Parts],
        sums: Sequence[_PartSum],
        weights: Weights,
        then: Callable[[Parts], None],
        failed: Failed,
    ) -> None:
        lanes = self._way.host.lanes
        try:
            for each in sums:
                await lanes.run(each.compile)
            async with asyncio.TaskGroup() as group:
                for each in sums:
                    each.begin(updates, weights)
                    for begin, end in each.shares(lanes.threads):
                        group.create_task(lanes.run(each.compute, begin, end))
            made = await lanes.run(self._put_together, updates, sums, weights)
        except Exception as error:
            failed(error.exceptions[0] if isinstance(error, ExceptionGroup) else error)
        else:
            then(made)

    def _put_together(self, updates: Sequence[Parts], sums: Sequence[_PartSum], weights: Weights) -> Parts:
        """The parts in their order: sums that are computed, and rows."""
        made: dict[int, Array] = {
            part: array for each in sums for part, array in zip(each.parts, each.made, strict=True)
        }
        for part, of_rows in enumerate(self._rows):
            if of_rows:
                made[part] = _behind_one_another([parts[part] for parts in updates], weights)
        combined = [made[part] for part in range(len(self._rows))]
        if self._measured:
            self.square = square_of(combined, self._rows[: self._measured])
        return combined


class _PartSum:
    """Sums of the ``parts`` of one dtype and of these shapes, which lie in ``made``."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        parts: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        replicas: int,
        host: Host,
    ) -> None:
        self.parts = tuple(parts)
        sizes = [math.prod(shape) for shape in shapes]
        starts = blocks_of(sizes)
        self.blocks = starts[-1]
        places = np.cumsum([0, *(-(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
        memory = host.memory.empty((places[-1] + ALIGNMENT,), np.dtype(np.uint8))
        memory = memory[-memory.ctypes.data % ALIGNMENT :]
        self.made = [
            memory[place : place + size * dtype.itemsize].view(dtype).reshape(shape)
            for place, size, shape in zip(places, sizes, shapes, strict=False)
        ]
        self._sources = np.zeros((replicas, len(sizes)), np.int64)
        targets = np.array([_place(array) for array in self.made], np.int64)
        self._count, self._weights = np.zeros(1, np.int64), np.ones(replicas + 1, weighed_in(dtype))
        words = (self._sources, targets, np.array(sizes, np.int64), np.array(starts, np.int64))
        self._operands = (*words, self._count, self._weights)
        application = summing(dtype, len(sizes), replicas, self.blocks)
        (step,) = application.steps
        assert isinstance(step, LaunchStep)
        (self._near,) = application.local
        self._step = step
        self._entry: Callable[[int, int, int, int], None] = _not_compiled
        self._block = step.block([Operand(1 + slot) for slot in range(2 + len(self._operands))])

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` takes no time; then it has been done."""
        if self._entry is _not_compiled and is_compiled(self._step.variant()):
            self.compile()
        return self._entry is not _not_compiled

    def compile(self) -> None:
        """Get what sums ready, once."""
        if self._entry is _not_compiled:
            self._entry = ENTRY_TYPE(self._step.address())

    def begin(self, updates: Sequence[Parts], weights: Weights) -> None:
        """The updates to be summed next, which the caller keeps until they are."""
        count = self._count[0] = len(updates)
        self._sources[:count] = [[_place(parts[part]) for part in self.parts] for parts in updates]
        self._weights[:count] = 1 if weights is None else weights
        self._weights[-1] = count if weights is None else 1

    def shares(self, threads: int) -> list[tuple[int, int]]:
        """The ranges of blocks that so many threads compute."""
        ends = [self.blocks * i // threads for i in range(threads + 1)]
        return [(begin, end) for begin, end in pairwise(ends) if end > begin]

    def compute(self, begin: int, end: int) -> None:
        """Sum some blocks, without the GIL."""
        near, words = np.empty(self._near.concrete, self._near.dtype), np.zeros(RUN_WORDS, np.int64)
        memory = 0  # where it begins
        bases = np.array(
            [words.ctypes.data, memory, *(array.ctypes.data for array in (*self._operands, near))], np.int64
        )
        self._entry(bases.ctypes.data, self._block.ctypes.data, begin, end)


def _not_compiled(bases: int, block: int, begin: int, end: int) -> None:
    raise InternalError("a sum was computed before it was compiled")


def _behind_one_another(parts: Sequence[Array], weights: Weights) -> Array:
    """All updates' indices, or their values: over the number of updates, or times their weights."""
    if parts[0].dtype.kind in "iu":
        return np.concatenate(parts)
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    made = np.empty((ends[-1], *parts[0].shape[1:]), parts[0].dtype)
    for number, part in enumerate(parts):
        slot = made[ends[number] : ends[number + 1]]
        if weights is None:
            np.divide(part, part.dtype.type(len(parts)), out=slot)
        else:
            np.multiply(part, part.dtype.type(weights[number]), out=slot)
    return made


def _in_order(part: Any) -> Array:
    """The part, its numbers one behind another, at a place that is counted in them."""
    array: Array = np.asarray(part)
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _place(array: Array) -> int:
    """Where it begins in memory, counted in its numbers."""
    address: int = array.__array_interface__["data"][0]
    return address // array.itemsize
