"""A node that comes to hold what others hold and move: it takes what they were at a version, then applies what follows.

Law: what it holds is nobody's to read before it has *arrived* at the version at which all others rest; given up before
that, it holds nothing. Each leader's items are used once, in order; of what may be lost on the way, who leads is told
how far that is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.checkpoints.shards import bytes_of
from flowrt.sched.drivers.closed import checked
from flowrt.sched.drivers.following import Follow, Had, Passed
from flowrt.sched.drivers.way import unbundled
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.segments import LARGE
from flowrt.sched.host.spares import touched

if TYPE_CHECKING:
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.host.variables import Name

_log = logging.getLogger(__name__)
NEAR = 1  # versions behind the others at which it has caught up
NOTHING: frozenset[Any] = frozenset()


@dataclass(eq=False, slots=True)
class _Leader:
    """What one of those who lead has told."""

    specs: dict[Name, Spec]
    nbytes: int
    arrays: dict[Name, Array] = field(default_factory=dict)
    came: int = 0  # bytes of variables
    had: int = 0  # items that were used
    heard: int = 0  # items that came
    left: int = 0  # items that are to follow, as it said last
    updates: deque[Sequence[Array]] = field(default_factory=deque)  # by version, of those that are not applied

    def take(self, piece: Array) -> None:
        """Put bytes where they belong, behind those that came."""
        first = 0
        for array in self.arrays.values():
            if first <= self.came < first + array.nbytes:
                place = self.came - first
                bytes_of(array)[place : place + piece.nbytes] = piece.data
                break
            first += array.nbytes
        self.came += piece.nbytes


class Follower:
    """Follows as it is asked; ``apply`` is the plan that moves the variables."""

    def __init__(self, asked: Follow, apply: Closed, way: Way) -> None:
        self.asked, self.version = asked, asked.version
        self.over = False
        self.arrived = False  # what it holds counts
        self._apply, self._way = apply, way
        self._whole = False  # the variables are there
        self._applying: asyncio.Task[None] | None = None
        self._busy = False
        self._changed = asyncio.Event()
        self._leaders: dict[str, _Leader] = {}
        for task, variables in zip(asked.leaders, asked.variables, strict=True):
            specs = {(container, name): Spec(dtype, tuple(dims)) for container, name, dtype, dims in variables}
            self._leaders[task] = _Leader(specs, sum(spec.nbytes for spec in specs.values()))
        self._preparing = way.tasks.start(self._prepare())

    async def ready(self) -> None:
        """Wait until there is memory for all that comes, or it is given up."""
        await asyncio.shield(self._preparing)

    async def _prepare(self) -> None:
        """Have memory for all that comes: made in a thread, as new memory takes longer than what comes into it."""
        lane, memory = Lanes(1, "following"), self._way.host.memory
        try:
            for leader in self._leaders.values():
                for name, spec in leader.specs.items():
                    work = (touched, memory, spec, lambda: not self.over)
                    made = await lane.run(*work) if spec.nbytes >= LARGE else touched(*work[1:])
                    if made is None:
                        return
                    leader.arrays[name] = made
        except Exception as error:
            self._failed(error)
        finally:
            lane.close()

    # ── what those who lead say ──────────────────────────────────────────────────────────────────────────────────────

    def hear(self, peer: str, passed: Passed) -> None:
        """Use the next item."""
        leader = self._leaders.get(peer)
        if leader is None or self.over or self.arrived:
            return
        if passed.number < 0:
            self.close()
        elif passed.number == leader.heard:
            try:
                self._use(leader, passed)
            except Exception as error:  # there was no memory to receive it, or none to put it
                self._failed(error)
        self._way.post(peer, Had(self.asked.follow, leader.had))

    def _use(self, leader: _Leader, passed: Passed) -> None:
        leader.heard += 1
        values = unbundled(passed.values)
        if leader.came < leader.nbytes:
            leader.take(values[0])
            leader.had = leader.heard
        else:
            leader.updates.append(values)
        leader.left = passed.left
        self._go_on()

    def broken(self, peer: str) -> None:
        """Say again how far one who leads has come."""
        if (leader := self._leaders.get(peer)) is not None and not self.over:
            self._way.post(peer, Had(self.asked.follow, leader.had))

    @property
    def leaders(self) -> tuple[str, ...]:
        """The tasks that lead."""
        return self.asked.leaders

    # ── applying ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        """Take the variables once all have come, and apply what there is an update for of everybody."""
        leaders = self._leaders.values()
        if not self._whole and all(leader.came == leader.nbytes for leader in leaders):
            self._begin()
        while self._whole and not (self._busy or self.over) and all(leader.updates for leader in leaders):
            self._move([leader.updates[0] for leader in leaders])
        self._changed.set()

    def _begin(self) -> None:
        host = self._way.host
        arrays = {name: array for leader in self._leaders.values() for name, array in leader.arrays.items()}
        for name, array in arrays.items():
            host.variables.declare(name, Spec(array.dtype.name, array.shape))
        names = frozenset(arrays)
        if not host.variables.try_hold(NOTHING, names):
            self.close()
            return
        try:
            for name, array in arrays.items():
                host.variables.begin(name, array)
        finally:
            host.variables.release(NOTHING, names)
        for leader in self._leaders.values():
            leader.arrays = {}
        self._whole = True

    def _move(self, told: Sequence[Sequence[Array]]) -> None:
        """Apply the next version; ``told`` are by leader the parts of each update, one update behind another."""
        members = 1 + max((member for member, _ in self.asked.applied), default=-1)
        counts = [len(values) // max(1, members) for values in told]
        made = np.asarray(self.version + 1, np.int64)
        updates = [
            [value for values, n in zip(told, counts, strict=True) for value in values[member * n : (member + 1) * n]]
            for member in range(members)
        ]
        feeds = [made if member < 0 else updates[member][part] for member, part in self.asked.applied]
        self._busy = True
        try:
            checked(feeds, self._apply.plan.feeds, f"an update of {self.asked.group!r}")
        except Exception as error:
            self._failed(error)
            return
        self._applying = self._way.compute(self._apply, feeds, (self.version, 0, 0), self._applied, self._failed)

    def _applied(self, _: Sequence[Array]) -> None:
        in_a_task, self._applying, self._busy = self._applying is not None, None, False
        if self.over:
            self._changed.set()
            return
        self.version += 1
        for task, leader in self._leaders.items():
            leader.updates.popleft()
            leader.had += 1
            self._way.post(task, Had(self.asked.follow, leader.had))
        if in_a_task:
            self._go_on()

    def _failed(self, error: BaseException) -> None:
        _log.warning("%s cannot follow %s: %s", self._way.host.task, ", ".join(self.leaders), error)
        self._busy, self._applying = False, None
        self.close()

    # ── what the client asks ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_near(self) -> bool:
        """Whether it keeps up; not before it has applied a version: the first one may have to be compiled."""
        if not self._whole or self.version == self.asked.version:
            return False
        return all(each.left + len(each.updates) <= NEAR for each in self._leaders.values())

    async def caught(self) -> bool:
        """See `Caught`."""
        while not (self._is_near or self.over):
            await self._change()
        return not self.over

    async def arrive(self, version: int) -> bool:
        """See `Arrive`."""
        while not (self.over or (self._whole and not self._busy and self.version >= version)):
            await self._change()
        if self.over or self.version != version:
            await self.end()
            return False
        self.arrived = True
        return True

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def close(self) -> None:
        """Follow no more; nothing is used that comes."""
        if not self.arrived:
            self.over = True
            for leader in self._leaders.values():
                leader.updates.clear()
                leader.arrays = {}
            self._changed.set()

    async def end(self) -> None:
        """Follow no more, and hold nothing, once nothing is being applied; unless it has arrived."""
        if self.arrived:
            return
        self.close()
        await self.ready()
        while (applying := self._applying) is not None and not applying.done():
            await asyncio.wait([applying])
        if self._whole:
            self._whole = False
            names = [(container, name) for told in self.asked.variables for container, name, *_ in told]
            self._way.host.variables.forget(names)
