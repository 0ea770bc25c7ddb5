"""Loops of a tape whose iterations several threads may share: where their launches lie, and what waits for what.

Law: pure; it reads blocks as `kernels.composite.nested` lays them out. Within an iteration, launches are what they are
in a tape: the operands of the loop's launch stand for slots. Loops inside branches have iterations of their own, which
nobody shares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FlowrtError
from flowrt.kernels.composite.nested import LAUNCH_WORDS, LOOP, NestedStep
from flowrt.kernels.composite.scalar_loop import ScalarLoopStep
from flowrt.kernels.launch import Operand, failure
from flowrt.kernels.run import board as at
from flowrt.kernels.run.board import NODE_WORDS
from flowrt.sched.host.lanes import aligned_zeros
from flowrt.sched.regions.misfits import PlanWithin, misfit_of_launch, misfit_of_look
from flowrt.sched.regions.recorded import FIRST_SLOT, LOCAL_SLOT, Launch
from flowrt.sched.tape.schedule import hazards

if TYPE_CHECKING:
    from flowrt.kernels.composite.nested import Inner

Array: TypeAlias = "np.ndarray[Any, Any]"

BODIES, BODY_TABLE = LOOP.index("bodies"), LOOP.index("body_table")


class LaidLoop:
    """One loop: its launches as the tape's are laid out, their ``units``, those each is ``after``, the loops ``inside``
    by the number of their launch, and the slot of the bases (``cell``) that says who shares its iterations."""

    __slots__ = ("after", "cell", "inside", "nodes", "units")

    def __init__(self, step: NestedStep, places: Sequence[Operand], block: int, words: Array, words_at: int) -> None:
        _, body = step.spans
        start = (block - words_at) // words.itemsize
        table = start + int(words[start + BODY_TABLE])
        self.nodes = words[table : table + LAUNCH_WORDS * len(body)].reshape(-1, NODE_WORDS).copy()
        self.nodes[:, 1] = block + words.itemsize * self.nodes[:, 1]
        self.cell = places[step.crew].slot
        self.units = [inner.step.units for inner in body]
        self.after = hazards([_as_launch(inner, step.local) for inner in body])
        self.inside: dict[int, LaidLoop] = {}
        for number, inner in enumerate(body):
            if isinstance(inner.step, NestedStep) and inner.step.kind == "loop":
                there = _resolved(inner, places)
                self.inside[number] = LaidLoop(inner.step, there, int(self.nodes[number, 1]), words, words_at)

    @property
    def divisible(self) -> bool:
        """Whether there is anything that several threads could do at once."""
        return len(self.units) > 1 or sum(self.units) > 1

    def all(self) -> Iterator[LaidLoop]:
        """This loop and those inside."""
        yield self
        for loop in self.inside.values():
            yield from loop.all()


def _resolved(inner: Inner, places: Sequence[Operand]) -> list[Operand]:
    """The places of a launch inside a loop or branch whose operands lie at ``places``."""
    return [Operand(places[p.slot].slot, places[p.slot].offset + p.offset) for p in inner.places]


def _as_launch(inner: Inner, local: Collection[int]) -> Launch:
    """A launch of a body, the loop's operands as slots; ``local`` are those that each thread has for itself."""
    places = [Operand(LOCAL_SLOT if p.slot in local else FIRST_SLOT + p.slot, p.offset) for p in inner.places]
    return Launch(inner.step, tuple(places), 0, inner.sizes)


def find_loops(launches: Sequence[Launch], nodes: Array, words: Array, words_at: int) -> dict[int, LaidLoop]:
    """The loops among ``launches``, by number, which are compiled as ``nodes``, their blocks in ``words``."""
    return {
        number: LaidLoop(launch.step, launch.places, int(nodes[number, 1]), words, words_at)
        for number, launch in enumerate(launches)
        if isinstance(launch.step, NestedStep) and launch.step.kind == "loop"
    }


def _stopped_inside(body: PlanWithin, launch: Launch, bases: Sequence[int]) -> tuple[str, Callable[[], str]]:
    """Which node of a loop's or branch's body failed, in which iterations, as what stands before the loop itself; and
    who answers what may be said of why, as long as the slots lie as they did."""
    step, places = launch.step, list(launch.places)
    launched = node = body.plan.nodes[launch.node]
    numbers: list[str] = []
    more: Callable[[], str] = partial(misfit_of_launch, body, launch, bases)
    while isinstance(step, NestedStep):
        trace = bases[places[step.trace].slot]
        span = step.spans[trace > 0]
        if not 0 < abs(trace) <= len(span):
            break
        if step.kind == "loop":
            numbers.append(str(bases[places[step.iteration].slot] + 1))
        inner = span[abs(trace) - 1]
        if inner.body is not None:
            body = PlanWithin(inner.body, node, body)
            node = inner.body.nodes[inner.position]
        own = places[step.local[0]].slot
        step, places = inner.step, _resolved(inner, places)
        if not isinstance(step, (NestedStep, ScalarLoopStep)) and own not in {place.slot for place in places}:
            failing = Launch(step, tuple(places), inner.position, inner.sizes)
            more = partial(misfit_of_launch, body, failing, bases)
    if isinstance(step, ScalarLoopStep) and step.trace:
        failed, index, size, *done = (bases[places[operand].slot] for operand in step.trace)
        if 0 < failed <= len(step.looks):
            look = step.looks[failed - 1]
            node, more = look.node, partial(misfit_of_look, look, index, size, body)
            numbers += [str(number + 1) for number in done if number >= 0]
    if node is launched:
        return "", more
    return f"{node.where()} in {''.join(f'iteration {number} of ' for number in reversed(numbers))}", more


def failed_at(body: PlanWithin, launch: Launch, status: int, bases: Sequence[int], mine: bool) -> FlowrtError:
    """The error of a launch that left a ``status``; whether the slots still lie as in its run is told by ``mine``."""
    node = body.plan.nodes[launch.node]
    inside, more = _stopped_inside(body, launch, bases)
    return FlowrtError(f"{inside}{node.where()}: {failure(node.op, status)}{more() if mine else ''}")


class Clock:
    """Times the launches of a loop's iterations in one run; ``address`` is what the loop's cell must hold meanwhile."""

    __slots__ = ("_times", "_words", "address")

    def __init__(self, loop: LaidLoop) -> None:
        count = len(loop.units)
        self._times = np.zeros(max(count, 1), np.int64)
        self._words = aligned_zeros(at.COUNTERS_END)
        self._words[at.NODES], self._words[at.TIMES] = loop.nodes.ctypes.data, self._times.ctypes.data
        self._words[at.SPAN + 1] = count
        self.address = int(self._words.ctypes.data)

    def nanoseconds(self) -> Array | None:
        """What each launch of an iteration took on average; None where there was no iteration."""
        count = int(self._words[at.ITERATIONS])
        return self._times / count if count else None


def clocks(loops: Mapping[int, LaidLoop]) -> dict[LaidLoop, Clock]:
    """A clock for each loop, also those inside others."""
    return {loop: Clock(loop) for outer in loops.values() for loop in outer.all()}
