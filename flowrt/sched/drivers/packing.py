"""How parts of updates are packed for the way between hosts, and made again what is to be applied: rounded, in fewer
bytes.

Law: what a part becomes follows from its numbers alone, wherever and by however many threads that is computed. Which
parts are packed, and how, the begin of a run says: nobody guesses it from bytes, and what comes is judged by the spec
that follows from that before there is memory for what it becomes. A number that is not finite comes as one that is not.
What is short is computed on the loop's own thread, all else in lanes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace, valueclass
from flowrt.kernels.language.variants import is_compiled
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Operand
from flowrt.kernels.ops.updates.compressing import BLOCK, launch_of

if TYPE_CHECKING:
    from flowrt.base.plan import PlanFeed
    from flowrt.sched.drivers.beginning import BeginReplica
    from flowrt.sched.drivers.closed import Closed, Runnable
    from flowrt.sched.drivers.way import Failed, Way
    from flowrt.sched.host.host import Host, RunContext
    from flowrt.sched.host.lanes import Lanes
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.rendezvous import Array

Parts: TypeAlias = "Sequence[Array]"
BFLOAT16 = "bfloat16"
INLINE_BYTES = 1 << 18  # of numbers that are packed, or come of it, on the loop's own thread: in about 50 µs
_BITS, _NUMBERS = np.dtype(np.uint16), np.dtype(np.float32)


def packed_spec(how: str, spec: Spec) -> Spec:
    """What comes of a part of ``spec``."""
    return Spec(_BITS, spec.dims) if how else spec


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Packing:
    """The launch of a kernel on ``arrays`` of so many numbers."""

    kernel: str
    arrays: tuple[Array, ...]
    size: int

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)

    def compute(self, begin: int, end: int) -> None:
        """Compute some blocks, without the GIL."""
        entry, block = _entry(self.kernel)
        words, size = np.zeros(RUN_WORDS, np.int64), np.array([self.size])
        bases = np.array([array.ctypes.data for array in (words, *self.arrays, size)], np.int64)
        entry(bases.ctypes.data, block.ctypes.data, begin, end)


@cache
def _entry(kernel: str) -> tuple[Callable[[int, int, int, int], None], Array]:
    """What computes, compiled first if need be, and where its operands are."""
    step = launch_of(kernel)
    return ENTRY_TYPE(step.address()), step.block([Operand(1 + number) for number in range(len(step.dtypes))])


def is_short(packings: Sequence[Packing]) -> bool:
    """Whether these may be computed on the loop's own thread."""
    if 4 * sum(each.size for each in packings) > INLINE_BYTES:
        return False
    return all(is_compiled(launch_of(kernel).variant()) for kernel in {each.kernel for each in packings})


def compute_now(packings: Iterable[Packing]) -> None:
    """Compute all of them here."""
    for each in packings:
        each.compute(0, each.blocks)


async def compute_in_lanes(packings: Sequence[Packing], lanes: Lanes) -> None:
    """Compute all of them in ``lanes``, which share the work alike."""
    try:
        async with asyncio.TaskGroup() as group:
            for share in shares(packings, lanes.threads):
                group.create_task(lanes.run(_compute_share, share))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def shares(packings: Sequence[Packing], threads: int) -> list[list[tuple[Packing, int, int]]]:
    """What each of so many threads computes: (what, its first block, and the one after its last)."""
    total, shared = sum(each.blocks for each in packings), [list[tuple[Packing, int, int]]() for _ in range(threads)]
    before = 0
    for each in packings:
        for number, share in enumerate(shared):
            begin, end = (min(max(total * n // threads - before, 0), each.blocks) for n in (number, number + 1))
            if begin < end:
                share.append((each, begin, end))
        before += each.blocks
    return [share for share in shared if share]


def _compute_share(share: Sequence[tuple[Packing, int, int]]) -> None:
    for each, begin, end in share:
        each.compute(begin, end)


def _in_order(part: Any) -> Array:
    """The part, its numbers one behind another, where kernels may read them."""
    array: Array = np.asarray(part)
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


# ── a replica's side ─────────────────────────────────────────────────────────────────────────────────────────────────


class PackingPlan:
    """A plan of a replica, and behind it the packing of its fetches: ``how``, by their places. It runs as `Closed`."""

    def __init__(self, plan: Closed, how: Mapping[int, str], host: Host) -> None:
        self._plan, self._how, self._host = plan, how, host
        self._short = False  # that of its last run: nobody knows before the first

    def run_now(self, feeds: Sequence[Array], number: int) -> list[Array] | None:
        """As `Closed.run_now`; None, too, where there is much to be packed, as far as is known."""
        if not self._short or (fetches := self._plan.run_now(feeds, number)) is None:
            return None
        fetches, packings = self._begin(fetches)
        compute_now(packings)
        return fetches

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array]:
        """As `Closed.run`."""
        fetches, packings = self._begin(await self._plan.run(feeds, context))
        await self._compute(packings)
        return fetches

    async def _compute(self, packings: Sequence[Packing]) -> None:
        if self._short:
            compute_now(packings)
        else:
            await compute_in_lanes(packings, self._host.lanes)

    def _begin(self, fetches: Sequence[Array]) -> tuple[list[Array], list[Packing]]:
        """The fetches, those that are packed in memory that is yet to be filled, and what fills it."""
        made, packings = list(fetches), []
        for place in self._how:
            part = _in_order(fetches[place])
            made[place] = packed = self._host.memory.output(part.shape, _BITS)
            packings.append(Packing("narrow_blocks", (part, packed), part.size))
        self._short = is_short(packings)
        return made, packings


def packing(plan: Closed, role: BeginReplica, host: Host, first: int = 0) -> Runnable:
    """A plan whose fetches from the ``first`` on are an update, with that packed as the replica is told, if it is."""
    pairs = zip(chain(*role.parts), chain(*role.packed), strict=bool(role.packed))
    how = {first + place: each for place, each in pairs if each}
    return PackingPlan(plan, how, host) if how else plan


# ── a server's side ──────────────────────────────────────────────────────────────────────────────────────────────────


class Unpacking:
    """Makes updates what they were: ``packed`` says how each of their parts comes."""

    def __init__(self, packed: Sequence[str], way: Way) -> None:
        self._packed = {part: how for part, how in enumerate(packed) if how}
        self._way = way

    def expected(self, feeds: Mapping[int, PlanFeed]) -> dict[int, PlanFeed]:
        """What comes of parts, in place of what they are."""
        return {
            part: replace(feed, spec=packed_spec(self._packed.get(part, ""), feed.spec)) for part, feed in feeds.items()
        }

    def unpack(
        self, updates: Sequence[Parts], then: Callable[[Sequence[Parts]], None], failed: Failed
    ) -> asyncio.Task[None] | None:
        """Call ``then`` with the updates as they were, or ``failed``: before this returns, if they are short.

        Answers the task that it runs in otherwise; cancelled, that calls neither.
        """
        try:
            made, packings = unpacked(updates, self._packed, self._way.host.memory)
            if not is_short(packings):
                return self._way.tasks.start(self._unpack(made, packings, then, failed))
            compute_now(packings)
        except Exception as error:
            failed(error)
            return None
        then(made)
        return None

    async def _unpack(
        self,
        made: Sequence[Parts],
        packings: Sequence[Packing],
        then: Callable[[Sequence[Parts]], None],
        failed: Failed,
    ) -> None:
        try:
            await compute_in_lanes(packings, self._way.host.lanes)
        except Exception as error:
            failed(error)
        else:
            then(made)


def unpacked(
    updates: Sequence[Parts], packed: Mapping[int, str], memory: Memory
) -> tuple[list[list[Array]], list[Packing]]:
    """Updates as they were, in memory that is yet to be filled, and what fills it."""
    made, packings = [list(parts) for parts in updates], []
    for parts in made:
        for part in packed:
            bits = _in_order(parts[part])
            parts[part] = numbers = memory.received(_NUMBERS, bits.shape)
            packings.append(Packing("widen_blocks", (bits, numbers), bits.size))
    return made, packings


def unpacked_now(parts: Parts, packed: Sequence[str], memory: Memory) -> list[Array]:
    """One update's parts as they were, computed here."""
    (made,), packings = unpacked([parts], {part: how for part, how in enumerate(packed) if how and parts}, memory)
    compute_now(packings)
    return made
