"""What server 0 does beside being a server: carries out what `Coordinator` decides, and reports to the client.

Law: the coordinator decides; this file gives its orders, wakes it when it is due, tells the client of each version
that all servers have applied, and ends the run where it cannot go on or its client does not want it to. Everybody is
told of that once nothing is left to apply that was ordered, however long that takes; but nobody waits for a server
whose process is gone. Nothing is ordered while the client is away. There is one timer at most, none while no policy
waits for a time, and none once the run is over. A run that needs no client is `Undriven`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.device import CLIENT
from flowrt.base.errors import (
    DeviceLost,
    GraphError,
    LinkBroken,
    NodeLost,
    RemoteError,
    ResourceError,
    name_error,
)
from flowrt.sched.drivers.messages import (
    Allow,
    Applied,
    ApplyOrder,
    Ended,
    Failed,
    Gone,
    Held,
    Lost,
    Pending,
    Ready,
    Report,
    Update,
    make_applied,
    make_held,
    make_order,
)
from flowrt.sched.drivers.way import may_be
from flowrt.sched.policies import asking, policy_from_data
from flowrt.sched.server.reporting import Reporting
from flowrt.sched.versions.batched import held_by
from flowrt.sched.versions.coordinator import Coordinator
from flowrt.sched.versions.ledger import Cause
from flowrt.sched.versions.steady import Steady

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginServer
    from flowrt.sched.drivers.way import Way

Weights: TypeAlias = "tuple[float, ...] | None"
_log = logging.getLogger(__name__)
PASSING = (LinkBroken.__name__, NodeLost.__name__, ResourceError.__name__)
"""Errors of a replica that may be well for the next version."""


class Coordination:
    """The coordinator of a run, on the way.

    ``obey`` has the server beside it apply a set, ``publish`` tell replicas of a version; ``ended`` is called when the
    run is over, with whether all servers are at one version then; ``lives`` says whether the client is connected.
    """

    def __init__(
        self,
        role: BeginServer,
        way: Way,
        obey: Callable[[int, tuple[int, ...], Weights, tuple[int, ...]], None],
        publish: Callable[[int], None],
        ended: Callable[[bool], None],
        lives: Callable[[], bool],
    ) -> None:
        self._role, self._way = role, way
        self._obey, self._publish, self._tell_ended, self._lives = obey, publish, ended, lives
        self._steady = Steady(
            Coordinator.start(
                policy_from_data(role.policy),
                len(role.replicas),
                len(role.servers),
                version=role.version,
                now=way.clock(),
                floor=role.floor,
            )
        )
        self.booked = self._steady.booked  # what is told to a replica of its batches, with each version
        self._reporting = Reporting(role.run, role.staleness > 0)
        self._incarnations = [0] * len(role.replicas)  # by replica: how often it was begun again
        self._gone = [0] * len(role.replicas)  # by replica: how many batches the one that was lost last had spent
        self._joined = [0] * len(role.replicas)  # by replica: after how many batches it began again
        self._counted = -1  # the version that was open when the client last counted the batches; -1 if not since a loss
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None  # when that wakes the coordinator
        self._reports: list[Report] = []  # that the client may not have
        self._resting: list[asyncio.Future[None]] = []  # who waits for all to have applied what was ordered
        self._lost_servers: frozenset[int] = frozenset()  # whose processes are gone
        self._end: Ended | None = None
        self.ended: Ended | None = None  # as everybody was told
        self.over = asyncio.Event()

    @property
    def _value(self) -> Coordinator:
        """The coordinator, with all that was heard."""
        return self._steady.told()

    @_value.setter
    def _value(self, value: Coordinator) -> None:
        self._steady.of = value

    @property
    def version(self) -> int:
        """The open version."""
        return self._steady.version

    @property
    def ending(self) -> bool:
        """Whether nothing is ordered any more."""
        return self._end is not None

    @property
    def unseen(self) -> tuple[Report, ...]:
        """The reports that the client is not known to have had."""
        return tuple(self._reports)

    @property
    def pending(self) -> tuple[int, tuple[int, ...]] | None:
        """The set that was ordered, and that some server may not have applied, with its version."""
        decided = None if self._value.settled else self._value.decided(self._value.version)
        return None if decided is None else (self._value.version, decided)

    @property
    def weights(self) -> Weights:
        """What the updates of the set that was ordered last are multiplied by."""
        return self._steady.weights

    @property
    def versions(self) -> tuple[int, ...]:
        """What those were computed from, where not all from the open version."""
        return self._value.versions

    def is_under_way(self, replica: int, version: int) -> bool:
        """Whether the update that a replica computed from ``version`` may yet count."""
        return self._value.computed[replica] == version and self._value.begun(replica) > 0

    def hear(self, message: Any) -> None:
        """Do as a message says."""
        self._follow(message, self._way.clock())

    def _wake(self) -> None:
        """It is the time that the policy waited for."""
        self._timer, due, self._due = None, self._due, None
        assert due is not None
        try:
            self._follow(None, max(due, self._way.clock()))
        except Exception as error:  # as of a message: see `Iterations.hear`
            _log.exception("%s: a run of %r failed", self._way.host.task, self._role.group)
            self.end(*name_error(error))
            self.give_up()

    def _follow(self, message: Any, now: float) -> None:
        """Do as a message says, and what follows of it."""
        try:
            self._note(message, now)
            if self._due is None and self._steady.usual:
                self._give_order(now)
                return
            if (due := self._value.due) is not None and due <= now:
                self._value = self._value.tick(now)
        except GraphError as error:  # the policy makes no sense: it is asked no more
            self.end(*name_error(error))
            self._note(message, now)
        if not self._give_order(now) and not self._is_hopeful(message):
            self._end_if_stuck()
        if self._value.due != self._due:
            self._set_timer(now)

    def _is_hopeful(self, message: Any) -> bool:
        """Whether a message is an update that brings a set nearer; not where the policy has seen enough, and waits."""
        quorum = self._value.quorum
        return isinstance(message, Held) and message.finite and len(quorum.offers) < quorum.least

    def _set_timer(self, now: float) -> None:
        due = None if self.over.is_set() else self._value.due
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, due
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._wake)

    def _note(self, message: Any, now: float) -> None:
        match message:
            case Held(_, server, version, replicas, finite, seconds, square):
                if version <= self.version:
                    for replica, ago in zip(replicas, seconds, strict=True):
                        self._reporting.hold(replica, now - ago)
                    samples = [*map(self._reporting.samples, replicas)]
                    self._value = held_by(self._value, server, version, replicas, finite, now, square, samples)
            case Applied(_, server, version, square):
                self._applied(server, version, now, square)
            case Ready(_, replica, total):
                self._value = self._value.ready(replica, total, now)
            case Allow():
                self._allow(message)
            case Lost(_, replica, incarnation, leaves) if leaves:
                if incarnation == self._incarnations[replica] and self._value.alive[replica]:
                    self._value = self._value.left(replica)
                    self._gone[replica] = self._value.spent[replica]
                    self._hand_back(replica)
            case Lost(_, replica, incarnation):
                if incarnation >= self._incarnations[replica]:  # else it was begun again meanwhile
                    self._lose(replica, incarnation)
                    self._way.post(CLIENT, Gone(self._role.run, replica, incarnation, self._gone[replica]))
            case Failed():
                self._failed(message)

    def join(self, replica: int, incarnation: int, given: int, birth: str = "") -> tuple[int, int, int]:
        """Have a replica that was lost take part from the next version on: see `Join`."""
        if incarnation > self._incarnations[replica]:
            self._lose(replica, incarnation - 1)
            self._incarnations[replica] = incarnation
            self._joined[replica] = given
            self._value = self._value.joined(replica, given)
        return self.version, self._gone[replica], self._joined[replica]

    def _lose(self, replica: int, incarnation: int) -> None:
        if self._value.alive[replica] or self._value.begun(replica):
            self._value, self._counted = self._value.lost(replica), -1
            self._gone[replica] = self._value.spent[replica]
        for task in self._role.servers[1:]:
            self._way.post(task, Lost(self._role.run, replica, incarnation))

    def came(self, update: Update, told: float) -> None:
        """Take down what comes with an update, before it is looked at; its replica was ``told`` the version then."""
        now, replica = self._way.clock(), update.replica
        if not self._steady.give(replica, update.version, update.ready):
            self._value = self._value.ready(replica, update.ready, now)
        self._reporting.take_down(update, told, now, self._steady.oldest(replica))

    def hold(self, version: int, replica: int, finite: bool, square: float) -> None:
        """Server 0 itself holds its parts of an update, or refused them: see `Held`."""
        now = self._way.clock()
        if finite and self._steady.hold(replica, version, now, self._reporting.samples(replica)):
            self._reporting.whole[replica] = now
            if self._steady.fixed is not None:
                self._give_order(now)
        else:
            self._follow(make_held(self._role.run, 0, version, (replica,), finite, (0.0,), square), now)

    def applied(self, version: int, square: float) -> None:
        """Server 0 itself has applied the set of a version: see `Applied`."""
        now = self._way.clock()
        if self._due is not None or self._steady.fixed is None:
            self._follow(make_applied(self._role.run, 0, version, square), now)
            return
        self._applied(0, version, now, square)
        if not self._steady.usual:  # else nothing follows until an update comes
            self._follow(None, now)

    def overtook(self, replica: int, cut: tuple[float, ...], told: float) -> None:
        """Take down what a replica was doing for a version that was overtaken, of which it was ``told`` then."""
        self._reporting.take_down_cut(replica, cut, told, self._way.clock())

    def tell_pending(self, told: Sequence[float]) -> None:
        """Tell the client what is waited for; ``told`` is when replicas were told what they owe an answer to, or 0."""
        now, value = self._way.clock(), self._value
        stages = value.quorum.opened, value.quorum.closed_at or 0.0, value.ordered_at or 0.0
        ago = [tuple([now - at if at > 0 else -1.0 for at in stamps]) for stamps in (stages, told)]
        self._way.post(CLIENT, Pending(self._role.run, self.version, ago[0], ago[1], self._reporting.came))

    def broken(self, peer: str) -> None:
        """Say again what ``peer`` may not have heard."""
        role, pending = self._role, self.pending
        if peer == CLIENT:
            for message in (*self._reports, *([self.ended] if self.ended else [])):
                self._way.post(CLIENT, message)
            self._resume()  # what could not be ordered while it was away
        elif pending is not None:
            for task in role.servers[1:]:
                if task == peer:
                    self._way.post(task, self.order(*pending))

    def end(self, error: str = "", text: str = "") -> None:
        """Order nothing more, and end the run once all that was ordered is applied."""
        if self._end is None:
            self._value = self._value.close()
            self._end = Ended(self._role.run, self.version, error, text)
            self._set_timer(self._way.clock())
        if self._rests:
            self._finish()

    def give_up(self) -> None:
        """End a run that was to end, whether or not all have applied what was ordered."""
        self._finish()

    @property
    def _rests(self) -> bool:
        """Whether all servers have applied what was ordered, but those that are gone."""
        return self._value.settled or len(self._value.published | self._lost_servers) == len(self._role.servers)

    async def wait_rest(self) -> None:
        """Wait until all servers that are there have applied what was ordered, or the run is over."""
        while not (self._rests or self.over.is_set()):
            waiter = asyncio.get_running_loop().create_future()
            self._resting.append(waiter)
            await waiter

    def made_whole(self, version: int) -> None:
        """All servers have applied what was ordered of ``version``: an opening has seen to that, and asked them."""
        if self.pending is not None and self.version == version:
            now = self._way.clock()
            for server in range(len(self._role.servers)):
                self._applied(server, version, now, nan)

    def close(self) -> None:
        """Nothing is to happen any more."""
        self._value = self._value.close()
        self._set_timer(0.0)

    def _finish(self) -> None:
        if self.over.is_set() or self._end is None:
            return
        self.over.set()
        role = self._role
        end = replace(self._end, version=self.version, whole=self._value.settled)
        for task in (CLIENT, *dict.fromkeys((*role.servers[1:], *role.replicas))):
            self._way.post(task, end)
        self.ended = end
        self._wake_resting()
        self._tell_ended(end.whole)

    def _wake_resting(self) -> None:
        while self._resting:
            waiter = self._resting.pop()
            if not waiter.done():
                waiter.set_result(None)

    def _resume(self) -> None:
        """Go on where nothing could be ordered."""
        if not self._value.closing:
            self._follow(None, self._way.clock())

    # ── what a run without a client does otherwise ───────────────────────────────────────────────────────────────────

    @property
    def session(self) -> str:
        """Of which name sessions may attach to the run, as it needs no client; empty if none may."""
        return ""

    def arrived(self, replica: int) -> None:
        """A replica has begun."""

    def client_gone(self) -> None:
        """The client is gone for good: what was ordered is applied, nothing else is."""
        self.end(RemoteError.__name__, "the client is gone")

    def _hand_back(self, replica: int) -> None:
        """A replica leaves with what it has begun. Who has the rest, the client says."""

    def lose_node(self, task: str, birth: str) -> Iterable[Lost]:
        """A process is gone, as this node sees: answers what is to be heard of that.

        Who is lost, the client says; but a server that was takes no order any more, which others may wait for. That
        another process than takes part is gone, which was that task before, is said late.
        """
        births = dict(zip(self._role.servers, self._role.births, strict=False))  # without them, any is meant
        if task in self._role.servers and may_be(birth, births.get(task, "")):
            self._lost_servers |= {self._role.servers.index(task)}
            self._see_rest()
        return ()

    def _allow(self, message: Allow) -> None:
        self._reports = [report for report in self._reports if report.version >= message.seen]
        self._steady.allow(message.version)
        if message.totals is not None:
            self._value, self._counted = self._value.exhausted(message.totals), message.seen

    def _may_order(self) -> bool:
        return self._lives()

    def _keep(self, report: Report) -> None:
        """Tell the client of a version, and keep the report until it has had it."""
        self._reports.append(report)
        self._way.post(CLIENT, report)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _give_order(self, now: float) -> bool:
        """Give the order that is due, if one is."""
        if self._steady.waits or not self._may_order():
            return False
        replicas = self._steady.order(now)
        if replicas is None:
            return False
        if others := self._role.servers[1:]:
            order = self.order(self.version, replicas)
            for task in others:
                self._way.post(task, order)
        self._obey(self.version, replicas, self.weights, self._steady.versions)
        return True

    def order(self, version: int, replicas: tuple[int, ...]) -> ApplyOrder:
        """The order to apply the set of the open version."""
        order = make_order(self._role.run, version, replicas, self.weights, self._steady.versions, (), ())
        if not self._role.keeps:
            return order
        was = dict(self._value.was)
        batches = tuple([was.get(replica, self._value.spent[replica]) for replica in replicas])
        return replace(order, batches=batches, told=self._reporting.means(replicas))

    def _end_if_stuck(self) -> None:
        if self._end is not None or (stuck := self._value.stuck()) is None:
            return
        if stuck.cause is not Cause.EXHAUSTED or self._counted >= self.version:
            self.end(*self._reporting.why(stuck, self._role.replicas, bool(self._role.floor)))

    def _applied(self, server: int, version: int, now: float, square: float) -> None:
        made = self._steady.publish(server, version, now, square)
        if made is not None:
            try:
                self._publish(self.version)
            finally:  # where it cannot be told, that is an end, of which the client hears after this
                report = self._reporting.report(made, now)
                self._reporting.forget(self._steady.oldest)
                self._keep(report)
            if asking.prepares(self._steady.policy):
                asyncio.get_running_loop().call_soon(self._prepare)
        self._see_rest()

    def _see_rest(self) -> None:
        """Where all have applied what was ordered, tell who waits for that, and end a run that is to end."""
        if (self._end is not None or self._resting) and self._rests:
            if self._end is not None:
                self._finish()
            self._wake_resting()

    def _prepare(self) -> None:
        """Have the policy get ready for the open version, now that replicas were told of it."""
        try:
            asking.prepare(self._steady.policy)
        except GraphError as error:
            self.end(*name_error(error))

    def _failed(self, failed: Failed) -> None:
        if failed.replica < 0:
            where = self._role.servers[failed.server]
            self._stop(failed, where)
        elif failed.error == DeviceLost.__name__:
            self._lose_device(failed)
        elif self._value.alive[failed.replica] and self._value.may_count(failed.replica, failed.version):
            self._do_without(failed)

    def _do_without(self, failed: Failed) -> None:
        """Go on without an update that could not be computed, where the next one may be well and, if memory was short,
        others come that are enough; else the run ends of that error, as where it is a server that has no memory."""
        replica, short = failed.replica, failed.error == ResourceError.__name__
        value = self._value.lost(replica).joined(replica)
        stuck = value.stuck() if short else None
        if short and failed.server >= 0:
            self._stop(failed, self._role.servers[failed.server])
        elif failed.error in PASSING and (stuck is None or stuck.cause is Cause.EXHAUSTED):
            self._value = value
            self._reporting.failed[replica] = failed
        elif stuck is not None:
            self._reporting.failed[replica] = failed
            error, text = self._reporting.why(stuck, self._role.replicas)
            self.end(failed.error if self._role.floor else error, text)  # who comes has no more memory
        else:
            self._stop(failed, self._role.replicas[replica])

    def _lose_device(self, failed: Failed) -> None:
        """Go on without a replica whose node lost the device that it computes on."""
        replica = failed.replica
        if self._value.alive[replica]:
            incarnation = self._incarnations[replica]
            self._lose(replica, incarnation)
            self._way.post(CLIENT, Gone(self._role.run, replica, incarnation, self._gone[replica], failed.text))

    def _stop(self, failed: Failed, where: str) -> None:
        here = where == self._way.host.task
        self.end(failed.error, failed.text if here else f"on {where}: {failed.text}")
        if failed.replica < 0:  # what was ordered is not going to be applied by all
            self._finish()
