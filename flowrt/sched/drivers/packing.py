"""How parts of updates are packed for the way between hosts, and made again what is to be applied: rounded, in fewer
bytes.

Law: what a part becomes follows from its numbers alone, wherever and by however many threads that is computed. Which
parts are packed, and how, the begin of a run says: nobody guesses it from bytes, and what comes is judged by the spec
that follows from that before there is memory for what it becomes. A number that is not finite comes as one that is not.
What is short is computed on the loop's own thread, all else in lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import InternalError
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace, valueclass
from flowrt.kernels.language.variants import is_compiled
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Operand
from flowrt.kernels.ops.updates.compressing import BLOCK, launch_of
from flowrt.sched.host.await_all import await_all

if TYPE_CHECKING:
    import asyncio

    from flowrt.base.plan import PlanFeed
    from flowrt.sched.drivers.beginning import BeginReplica
    from flowrt.sched.drivers.closed import Closed, Runnable
    from flowrt.sched.drivers.way import Failed, Way
    from flowrt.sched.host.host import Host, RunContext
    from flowrt.sched.host.lanes import Lanes
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.rendezvous import Array

Parts: TypeAlias = "Sequence[Array]"
BFLOAT16, INT8 = "bfloat16", "int8"
INLINE_BYTES = 1 << 18  # of numbers that are packed, or come of it, on the loop's own thread: in about 50 µs
_BITS, _BYTES, _NUMBERS = np.dtype(np.uint16), np.dtype(np.uint8), np.dtype(np.float32)


def packed_spec(how: str, spec: Spec) -> Spec:
    """What comes of a part of ``spec``: the bits of bfloat16s; or of int8 the scales, and then the codes."""
    match how:
        case "":
            return spec
        case "bfloat16":
            return Spec(_BITS, spec.dims)
        case "int8":
            size = math.prod(spec.concrete)
            return Spec(_BYTES, (_scales_of(size) + size,))
        case _:
            raise InternalError(f"nothing is packed as {how!r}")


def _scales_of(size: int) -> int:
    """The bytes of the scales of so many numbers."""
    return 4 * -(-size // BLOCK)


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Packing:
    """The launch of a kernel that ``reads`` arrays of so many numbers, and ``fills`` others."""

    kernel: str
    reads: tuple[Array, ...]
    fills: tuple[Array, ...]
    size: int

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)

    def compute(self, begin: int, end: int) -> None:
        """Compute some blocks, without the GIL."""
        entry, block = _entry(self.kernel)
        words, size = np.zeros(RUN_WORDS, np.int64), np.array([self.size])
        bases = np.array([array.ctypes.data for array in (words, *self.reads, size, *self.fills)], np.int64)
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
    await await_all(lanes.run(_compute_share, share) for share in shares(packings, lanes.threads))


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


class Feedback:
    """What int8 left of a replica's numbers, by their places, which goes with the numbers that are packed next.

    Law: it moves with updates that counted, and with no other: what a late, lost or refused one was made of is as it
    was before. So it follows from the updates that counted since the replica was begun, when it was nothing.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[int, Array] = {}
        self._left: dict[int, Array] = {}  # by the update that was packed last
        self._posted = -1  # the version of that, if it may count
        self.counted = -1  # the newest version of which an update of this replica is known to have counted

    def begin(self) -> None:
        """Another update is packed; what became of the one before is known by now."""
        if self._posted >= 0 and self._posted == self.counted:
            self._kept, self._left = self._left, self._kept
        self._posted = -1

    def of(self, place: int, size: int) -> tuple[Array, Array]:
        """What was kept of so many numbers, and where is to be what is left of them."""
        kept, left = (self._in(each, place, size) for each in (self._kept, self._left))
        return kept, left

    def _in(self, among: dict[int, Array], place: int, size: int) -> Array:
        found = among.get(place)
        if found is None or found.size != size:
            found = among[place] = self._memory.zeros((size,), _NUMBERS)
        return found

    def post(self, version: int) -> None:
        """It is posted, as that of a version."""
        self._posted = version


class PackingPlan:
    """A plan of a replica, and behind it the packing of an update: ``how``, by places of its fetches.

    It runs as `Closed`.
    """

    def __init__(self, plan: Closed, how: Mapping[int, str], feedback: Feedback, host: Host) -> None:
        self._plan, self._how, self._feedback, self._host = plan, how, feedback, host
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
        if self._short:
            compute_now(packings)
        else:
            await compute_in_lanes(packings, self._host.lanes)
        return fetches

    def _begin(self, fetches: Sequence[Array]) -> tuple[list[Array], list[Packing]]:
        """The fetches, those that are packed in memory that is yet to be filled, and what fills it."""
        made, packings = list(fetches), []
        self._feedback.begin()
        for place, how in self._how.items():
            part = _in_order(fetches[place])
            spec = packed_spec(how, Spec(part.dtype, part.shape))
            made[place] = packed = self._host.memory.output(spec.concrete, spec.dtype)
            if how == BFLOAT16:
                packings.append(Packing("narrow_blocks", (part,), (packed,), part.size))
            else:
                kept, left = self._feedback.of(place, part.size)
                packings.append(Packing("quantize_blocks", (part, kept), (*_codes(packed, part.size), left), part.size))
        self._short = is_short(packings)
        return made, packings


def _codes(packed: Array, size: int) -> tuple[Array, Array]:
    """The codes of so many numbers, and their scales."""
    scales = _scales_of(size)
    return packed[scales:].view(np.int8), packed[:scales].view(_NUMBERS)


def packing(plan: Closed, role: BeginReplica, feedback: Feedback, host: Host, first: int = 0) -> Runnable:
    """A plan whose fetches from the ``first`` on are an update, with that packed as the replica is told, if it is."""
    pairs = zip(chain(*role.parts), chain(*role.packed), strict=bool(role.packed))
    how = {first + place: each for place, each in pairs if each}
    return PackingPlan(plan, how, feedback, host) if how else plan


# ── a server's side ──────────────────────────────────────────────────────────────────────────────────────────────────


class Unpacking:
    """Makes updates what they were: ``packed`` says how each of their parts comes, ``feeds`` what it was.

    ``expected`` are what comes, in place of these; of a part that is of no feed nothing is made.
    """

    def __init__(self, packed: Sequence[str], feeds: Mapping[int, PlanFeed], way: Way) -> None:
        self.expected = {part: replace(feed, spec=packed_spec(packed[part], feed.spec)) for part, feed in feeds.items()}
        self._packed = {part: packed[part] for part in feeds if packed[part]}
        self._shapes = {part: feeds[part].spec.concrete for part, how in self._packed.items() if how == INT8}
        self._way = way

    def unpack(
        self, updates: Sequence[Parts], then: Callable[[Sequence[Parts]], None], failed: Failed
    ) -> asyncio.Task[None] | None:
        """Call ``then`` with the updates as they were, or ``failed``: before this returns, if they are short.

        Answers the task that it runs in otherwise; cancelled, that calls neither.
        """
        try:
            made, packings = self._begin(updates)
            if not is_short(packings):
                return self._way.start(self._unpack(made, packings, then, failed))
            compute_now(packings)
        except Exception as error:
            failed(error)
            return None
        then(made)
        return None

    def _begin(self, updates: Sequence[Parts]) -> tuple[list[list[Array]], list[Packing]]:
        """The updates, what comes of packed parts in memory that is yet to be filled, and what fills it."""
        made, packings = [list(parts) for parts in updates], []
        for parts in made:
            for part, how in self._packed.items():
                each = unpacking(how, parts[part], self._way.host.memory)
                parts[part] = each.fills[0].reshape(self._shapes[part]) if how == INT8 else each.fills[0]
                packings.append(each)
        return made, packings

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


def unpacking(how: str, packed: Any, memory: Memory) -> Packing:
    """What fills memory with the numbers of a part; those of int8 are one row."""
    if how == BFLOAT16:
        bits = _in_order(packed)
        return Packing("widen_blocks", (bits,), (memory.received(_NUMBERS, bits.shape),), bits.size)
    size = packed.size - _scales_of(packed.size * BLOCK // (BLOCK + 4))
    codes, scales = _codes(packed, size)
    return Packing("dequantize_blocks", (codes, _in_order(scales)), (memory.received(_NUMBERS, (size,)),), size)


def unpacked_now(parts: Parts, packed: Sequence[str], memory: Memory) -> list[Array]:
    """One update's parts, computed here: see `unpacking`. One that is empty, as it is not finite, stays so."""
    made = list(parts)
    for place, how in enumerate(packed if parts else ()):
        if how:
            each = unpacking(how, parts[place], memory)
            each.compute(0, each.blocks)
            (made[place],) = each.fills
    return made
