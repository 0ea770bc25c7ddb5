"""A parameter server of a run: keeps updates, applies the sets that are ordered, and tells replicas each new version.

Law: what is kept and applied is `Shard`'s to say, which set it is server 0's. A version is told to each replica once,
as the values are then; while two of them are on their way to a replica, it is told no more, and then of the newest
alone. Where updates may be stale, a version is told to whoever has nothing under way here, as its update is applied,
to whoever says that it waits for one, and to whoever is to know that what it does is too old to count. Whether its
numbers are finite says an update itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from math import nan
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError, InternalError, name_error
from flowrt.base.valueclass import replace
from flowrt.sched.drivers.closed import checked
from flowrt.sched.drivers.messages import (
    Allow,
    Applied,
    ApplyOrder,
    Failed,
    Held,
    Lost,
    Probe,
    Ready,
    Seen,
    Update,
    Wants,
    make_applied,
    make_held,
    make_version,
)
from flowrt.sched.drivers.packing import Unpacking
from flowrt.sched.drivers.way import Way, bundled, unbundled
from flowrt.sched.server.combining import Combiner
from flowrt.sched.server.coordination import Coordination
from flowrt.sched.server.gathering import Gathering
from flowrt.sched.server.led import Led
from flowrt.sched.server.standing_in import left_with_orders, report_of
from flowrt.sched.server.undriven import Undriven
from flowrt.sched.versions.opening import Left
from flowrt.sched.versions.quorum import Verdict
from flowrt.sched.versions.shard import Shard, Untold

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.sched.drivers.beginning import BeginServer
    from flowrt.sched.drivers.closed import Closed
    from flowrt.sched.host.rendezvous import Array
    from flowrt.sched.server.leading import Leader

Parts: TypeAlias = "tuple[Array, ...]"
AHEAD = 2  # versions on their way to a replica
REMEMBERED = 64  # orders, in case that server 0 is lost: the client may not have had the reports of the newest


@dataclass(slots=True)
class _Told:
    """What one replica was told: the newest version, and those that it has not acknowledged, with when that was.

    It ``asks`` for a newer one where it has said that it waits for that.
    """

    listens: bool = False
    asks: bool = False
    lost: bool = False
    incarnation: int = 0  # how often it was begun again
    newest: int = -1
    waiting: dict[int, float] = field(default_factory=dict)

    def acknowledge(self, version: int) -> float:
        """It has what it was told until that version; answers when it was told that, 0 where this is known already."""
        waiting = self.waiting
        when = waiting.pop(version, 0.0)
        if waiting:
            for older in [other for other in waiting if other < version]:
                del waiting[older]
        return when


class Server:
    """One server of a run. ``lives`` says whether the client is there; server 0 calls ``ended`` when it is over."""

    def __init__(
        self,
        role: BeginServer,
        apply: Closed,
        gather: Closed | None,
        way: Way,
        ended: Callable[[bool], None],
        lives: Callable[[], bool] = lambda: True,
    ) -> None:
        self.role = role
        self.way = way
        self.broke = False  # an update was begun to be applied, and is not
        self.over = False
        self._apply = apply
        fed = zip(role.applied, apply.plan.feeds, strict=True)
        self._expected = {part: feed for (member, part), feed in fed if member == 0}  # of each part of an update
        self._whose = [f"replica {replica} of {role.group!r}" for replica in range(len(role.replicas))]
        self._gathering = None if gather is None else Gathering(role, gather, way, self._fail, self._obey_waiting)
        self._waiting: ApplyOrder | None = None  # for rows to be taken first
        self._orders: deque[ApplyOrder] = deque(maxlen=REMEMBERED)  # that were heard, should server 0 be lost
        self._led = Led()  # who are to hold what this does
        self._combiner = (
            Combiner(role.combined, len(role.replicas), way, role.counted if role.measures else 0)
            if role.combined
            else None
        )
        self._unpacking = Unpacking(role.packed, self._expected, way) if any(role.packed) else None
        if self._unpacking is not None:
            self._expected = self._unpacking.expected
        self._counted = [-1] * len(role.replicas)  # by replica: the newest version of which its update is in a set
        self._squares = [nan] * len(role.replicas)  # of the newest update of each
        self._unsaid: dict[int, float] = {}  # by replica: since when its update is here of which server 0 is to be told
        self._said = 0  # of how many updates of the version it was told
        self._square = nan  # of what the variables were moved by last
        self._applying: asyncio.Task[None] | None = None
        self._untold = Untold[Parts](Shard.start(len(role.replicas), role.version, role.staleness))
        self._told = [_Told() for _ in role.replicas]
        self._values: tuple[Any, ...] = ()
        self._at = role.version  # what replicas are told
        self._specs = self._find_specs()
        kind = Undriven if role.detached else Coordination
        self.coordination = None if role.server else kind(role, way, self.obey, self._publish, ended, lives)
        self._publish(role.version)

    @property
    def _shard(self) -> Shard[Parts]:
        """What is held here, all that came included."""
        return self._untold.told()

    @_shard.setter
    def _shard(self, shard: Shard[Parts]) -> None:
        self._untold.of = shard

    @property
    def moves(self) -> frozenset[tuple[str, str]]:
        """The variables that replicas are told, and that hold the version."""
        role = self.role
        return frozenset((*role.values, *((role.container, version) for version in role.versions)))

    @property
    def version(self) -> int:
        """The version of the variables."""
        return self._untold.of.version

    @property
    def left(self) -> Left:
        """What is kept of this run, for an opening to decide by."""
        shard, coordination = self._shard, self.coordination
        held = frozenset((r, shard.computed[r]) for r, update in enumerate(shard.held) if update is not None)
        ended = self.over and shard.taken is None
        left = Left(self.role.run, self.version, held, None, ended, self.role.client, self.broke)
        if coordination is None:
            return left_with_orders(left, self._orders, self.role.server)
        left = replace(left, client="" if coordination.ending else left.client, unseen=coordination.unseen)
        left = replace(left, detached=coordination.session)
        if coordination.pending is None:
            return left
        order = coordination.order(*coordination.pending)
        if self.role.keeps and order.version < self.version:  # who has not applied it may be lost
            left = replace(left, unseen=(*left.unseen, report_of(order)))
        return replace(left, order=coordination.pending, weights=order.weights, versions=order.versions)

    def hear(self, message: Any) -> None:
        """Do as a message says."""
        coordination = self.coordination
        match message:
            case Update():
                self._take_in(message)
            case Seen(_, replica, version, cut, incarnation, waits):
                if incarnation > self._told[replica].incarnation:
                    self._told[replica] = _Told(incarnation=incarnation)
                told = self._told[replica]
                if not told.listens and coordination is not None:
                    coordination.arrived(replica)
                told.listens = True
                told.asks |= waits and version >= told.newest  # else what it waits for is on its way
                if cut and coordination is not None:
                    coordination.overtook(replica, cut, told.waiting.get(int(cut[0]), 0.0))
                told.acknowledge(version)
                self._tell(replica)
            case Wants(_, replica, _, version):
                if self._gathering is not None:
                    self._gathering.hear(message, self._at if self._may_gather else -2)
                if version >= 0:  # while it waits for rows it may be overtaken
                    told = self._told[replica]
                    told.asks |= version >= told.newest
                    told.acknowledge(version)
                    self._tell(replica)
            case ApplyOrder(_, version, replicas, weights, versions):
                if not self.over:  # else the opening of the next run decides
                    if self.role.keeps and (not self._orders or self._orders[-1].version < version):
                        self._orders.append(message)
                    self.obey(version, replicas, weights, versions)
            case Lost(_, replica, incarnation, leaves):
                if incarnation >= self._told[replica].incarnation and not leaves:  # else it was begun again meanwhile
                    self._told[replica].lost = True
                if coordination is not None:
                    coordination.hear(message)
            case Probe():
                if coordination is not None:
                    coordination.tell_pending([min(told.waiting.values(), default=0.0) for told in self._told])
            case Allow() | Ready() | Held() | Applied() | Failed():
                if coordination is None:
                    raise InternalError(f"server {self.role.server} does not coordinate")
                coordination.hear(message)
            case _:
                raise InternalError(f"{type(message).__name__} is not said to a server")

    def broken(self, peer: str) -> None:
        """Say again what those at ``peer`` may not have heard."""
        role = self.role
        for replica, task in enumerate(role.replicas):
            if task == peer and self._told[replica].listens:
                told = self._told[replica]
                self._told[replica] = _Told(listens=True, asks=True, lost=told.lost, incarnation=told.incarnation)
                self._tell(replica)
        if self.coordination is not None:
            self.coordination.broken(peer)
        elif peer == role.servers[0]:
            self._say_all()

    def lose_node(self, task: str, birth: str) -> None:
        """The process of ``birth`` that a task was is gone, as this node sees."""
        for lost in () if self.coordination is None else self.coordination.lose_node(task, birth):
            self.hear(lost)

    def lead(self, leader: Leader) -> None:
        """Have somebody told what this holds, and how it moves, from the version on at which that is to begin."""
        self._led.add(leader)
        if self.over or self.version > leader.asked.version:
            leader.close()
        elif self.rests:
            leader.reach(self.version)

    def close(self, whole: bool) -> None:
        """Tell nobody anything any more, and forget the updates, if they are not wanted to make all servers whole."""
        self.over = True
        self._led.close()
        if self.coordination is not None:
            self.coordination.close()
        self._told = [_Told() for _ in self._told]
        self._values = ()
        if self._combiner is not None:
            self._combiner.forget()
        if whole and self._shard.taken is None:
            self._shard = Shard.start(len(self._told), self.version, self.role.staleness)

    @property
    def rests(self) -> bool:
        """Whether the variables are at a version, as nothing is being applied."""
        return self._shard.taken is None and (self._applying is None or self._applying.done())

    async def wait_applied(self) -> None:
        """Wait until nothing is being applied."""
        while (applying := self._applying) is not None and not applying.done():
            await asyncio.wait([applying])

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_in(self, update: Update) -> None:
        """Take in what a replica posts."""
        replica, version = update.replica, update.version
        told = self._told[replica]
        if told.lost:
            return  # it was taken for lost, and goes on: its batches are others', until it begins again
        if self._gathering is not None:
            self._gathering.note(update)
        when = told.acknowledge(version)
        if self.coordination is not None:
            self.coordination.came(update, when)
        try:
            verdict = self._keep(update)
        except InternalError:
            raise
        except Exception as error:
            self._fail(version, replica, error)
            return
        if verdict is not Verdict.LATE and not self.over:
            self._say_held(replica, version, verdict is not Verdict.REFUSED)
        if told.newest < self._at:
            self._tell(replica)

    def _keep(self, update: Update) -> Verdict:
        """Keep an update, if its numbers are finite and it is what the variables are moved by, which raises if not."""
        version, replica, finite, untold = update.version, update.replica, update.finite, self._untold
        if not untold.expects(version, replica):
            self._shard, verdict = self._shard.known(version, replica)
            return verdict
        parts = unbundled(update.parts)
        if finite:
            checked([*map(parts.__getitem__, self._expected)], self._expected.values(), self._whose[replica])
        self._squares[replica] = update.square
        return untold.keep(version, replica, tuple(parts), finite)

    def _say_held(self, replica: int, version: int, finite: bool) -> None:
        """Have server 0 know of an update: of one that is refused at once, of others once these may make a set."""
        if self.coordination is not None and len(self.role.servers) == 1:
            self.coordination.hold(version, replica, finite, self._squares[replica] if finite else nan)
        elif not finite:
            self._tell_held(version, {replica: self.way.clock()}, False)
        else:
            self._unsaid[replica] = self.way.clock()
            if self._said + len(self._unsaid) >= self.role.together:
                self._tell_held(version, self._unsaid, True)
                self._said, self._unsaid = self._said + len(self._unsaid), {}

    def _tell_held(self, version: int, since: dict[int, float], finite: bool) -> None:
        """Tell server 0 of updates that are here since then, by replica; where squares are measured, of one."""
        role, now = self.role, self.way.clock()
        seconds = tuple([now - at for at in since.values()])
        square = self._squares[min(since)] if finite else nan
        self._say(make_held(role.run, role.server, version, tuple(since), finite, seconds, square))

    def _say(self, message: Held | Applied | Failed) -> None:
        """Tell server 0."""
        if self.coordination is None:
            self.way.post(self.role.servers[0], message)
        else:
            self.coordination.hear(message)

    def _say_all(self) -> None:
        role, shard, now = self.role, self._shard, self.way.clock()
        for replica, update in enumerate(shard.held):
            if update is not None or replica in shard.refused:
                self._tell_held(shard.computed[replica], {replica: now}, replica not in shard.refused)
        if shard.version > role.version:
            self._say(Applied(role.run, role.server, shard.version - 1, self._square))

    def _fail(self, version: int, replica: int, error: BaseException) -> None:
        self._say(Failed(self.role.run, version, replica, self.role.server, *name_error(error)))

    # ── applying ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def obey(
        self,
        version: int,
        replicas: tuple[int, ...],
        weights: tuple[float, ...] | None = None,
        versions: tuple[int, ...] = (),
    ) -> None:
        """Apply a set of updates, once: their mean, or each times its weight; see `ApplyOrder`."""
        for replica, computed in zip(replicas, versions or repeat(version), strict=False):
            self._counted[replica] = max(self._counted[replica], computed)
        if self.role.staleness and not self.over and self._gathering is not None and not self._gathering.rests:
            self._waiting = ApplyOrder(self.role.run, version, replicas, weights, versions)
            return
        self._shard, updates = self._shard.take(version, replicas, versions)
        if updates is None:
            if version < self._shard.version:
                self._say(Applied(self.role.run, self.role.server, version, self._square))
            return
        then = partial(self._combine, version, replicas, weights)
        if self._unpacking is None:
            then(updates)
        elif (unpacking := self._unpacking.unpack(updates, then, partial(self._give_back, version))) is not None:
            self._applying = unpacking  # else it is done already

    def _combine(
        self,
        version: int,
        replicas: tuple[int, ...],
        weights: tuple[float, ...] | None,
        updates: Sequence[Sequence[Array]],
    ) -> None:
        """Move the variables by what the plan takes of a set: its updates, or the one that is made of them."""
        if self._combiner is None:
            self._move(version, updates)
            return
        combiner = self._combiner
        alone = len(replicas) == 1 and weights is None

        def combined(parts: Sequence[Array]) -> None:
            self._square = self._squares[replicas[0]] if alone else combiner.square
            self._move(version, [parts], lasting=alone)

        failed = partial(self._give_back, version)
        if (combining := combiner.combine(updates, weights, combined, failed)) is not None:
            self._applying = combining  # else they are moved already, or that goes on in another task

    def _obey_waiting(self) -> None:
        """Apply what was ordered while rows were being taken."""
        if (order := self._waiting) is not None and not self.over:
            self._waiting = None
            self.obey(order.version, order.replicas, order.weights, order.versions)

    def _move(self, version: int, updates: Sequence[Sequence[Array]], lasting: bool = True) -> None:
        """Move the variables by updates, as the plan takes them; they are ``lasting`` unless others come in place."""
        role = self.role
        made = np.asarray(version + 1, np.int64)
        feeds = [made if member < 0 else updates[member][part] for member, part in role.applied]
        step = version, len(role.replicas), len(role.replicas)

        def applied(_: Sequence[Array]) -> None:
            self._shard, self._unsaid, self._said = self._shard.applied(version), {}, 0
            self._led.moved(version, updates, lasting, partial(self.way.do, partial(self._say_applied, version)))

        def failed(error: BaseException) -> None:
            self.broke = True
            self._give_back(version, error)

        if self._combiner is not None:  # else these are what came, and was checked
            try:
                checked(feeds, self._apply.plan.feeds, f"an update of {role.group!r}")
            except Exception as error:
                self._give_back(version, error)
                return
        self._applying = self.way.compute(self._apply, feeds, step, applied, failed, at="server")

    def _give_back(self, version: int, error: BaseException) -> None:
        """What was ordered of ``version`` is not applied; unless it `broke`, nothing of it is written."""
        self._shard = self._shard.give_back(version)
        self._fail(version, -1, error)

    def _say_applied(self, version: int) -> None:
        if self.coordination is not None:
            self.coordination.applied(version, self._square)
            return
        self._publish(version + 1)  # server 0 does so once all have applied it, since it says who begins
        self._say(make_applied(self.role.run, self.role.server, version, self._square))

    # ── telling replicas ─────────────────────────────────────────────────────────────────────────────────────────────

    def _find_specs(self) -> list[Spec]:
        host, known = self.way.host, self.way.host.inventory()
        missing = [name for name in self.role.values if name not in known]
        if missing:
            raise GraphError(
                f"variable {missing[0][1]!r} has no value on {host.task}: was it reset since the session opened?"
            )
        return [known[name] for name in self.role.values]

    def _publish(self, version: int) -> None:
        """Tell replicas of a version. What is on its way may change: then its update comes too late to count.

        Where it may count all the same, or replicas read here while others may write, they are told copies.
        """
        self._at = version
        if self.over:
            return
        variables = self.way.host.variables
        values = (variables.value(name, spec) for name, spec in zip(self.role.values, self._specs, strict=True))
        copies = self.role.staleness or self.way.host.task in self.role.replicas
        self._values = bundled([self._copy(value) if copies else value for value in values])
        for replica in range(len(self._told)):
            self._tell(replica)

    def _copy(self, value: Array) -> Array:
        copied = self.way.host.memory.output(value.shape, value.dtype)
        np.copyto(copied, value)
        return copied

    def _tell(self, replica: int) -> None:
        """Tell a replica of the newest version, if it is to know of it, and of what it was told enough has arrived."""
        told, role, at = self._told[replica], self.role, self._at
        if not told.listens or told.lost or told.newest >= at or len(told.waiting) >= AHEAD:
            return
        if role.staleness and not self._may_be_told(replica, told):
            return
        told.newest, told.asks = at, False
        told.waiting[at] = self.way.clock()
        spent, begun, since = (0, False, 0) if self.coordination is None else self.coordination.booked(replica)
        number, rows = (0, ()) if self._gathering is None else self._gathering.give(replica, at)
        values, run, server, counted = self._values, role.run, role.server, self._counted[replica]
        told_now = make_version(run, at, server, replica, spent, begun, since, values, number, rows, counted)
        self.way.post(role.replicas[replica], told_now)

    def _may_be_told(self, replica: int, told: _Told) -> bool:
        """Whether a replica is told of the newest version rather than of the next one, where updates may be stale."""
        if not self._may_gather:
            return False
        may_count = self._at - told.newest <= self.role.staleness  # what it does, if it does anything
        return not may_count or told.asks or not (told.waiting or self._is_under_way(replica))

    def _is_under_way(self, replica: int) -> bool:
        """Whether an update of a replica is here that may yet count: server 0 knows, others believe it."""
        shard, coordination = self._shard, self.coordination
        if shard.held[replica] is None:
            return False
        return coordination is None or coordination.is_under_way(replica, shard.computed[replica])

    @property
    def _may_gather(self) -> bool:
        """Whether rows that are taken now are of the version that replicas are told, where that has to be so."""
        if self._gathering is None or not self.role.staleness:
            return True
        return self._shard.version == self._at and self._shard.taken is None
