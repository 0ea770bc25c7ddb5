"""The coordination of a run that needs no client: `Detached` hands out its batches and keeps its reports.

Law: once its client has said that all have begun, every version is allowed, unless a client that is attached has all
stand still for a moment; until then it is a run like others. Of who is gone the node's own links tell, and a client
where one is attached, of which the newest alone is heard. A server that is gone ends the run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.device import CLIENT
from flowrt.base.errors import NodeLost
from flowrt.sched.drivers.messages import Gone, Lost, Probe
from flowrt.sched.drivers.way import may_be
from flowrt.sched.server.coordination import Coordination
from flowrt.sched.server.detached import Detached
from flowrt.sched.server.reporting import OUTCOMES
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowrt.sched.drivers.beginning import BeginServer
    from flowrt.sched.drivers.messages import Allow, Report
    from flowrt.sched.drivers.way import Way

UNUSED = frozenset({OUTCOMES.index(Outcome.LATE), OUTCOMES.index(Outcome.LOST)})


class Undriven(Coordination):
    """What server 0 does beside being a server, in a run that goes on without its client."""

    def __init__(self, role: BeginServer, way: Way, *others: Any) -> None:
        super().__init__(role, way, *others)
        self._detached = Detached(role, way)
        self._births = dict(self._detached.terms.births)
        self._goes_on = False  # all have begun
        self._attachment = 0  # how often a client has attached
        self._released = False  # a client has had its end

    @property
    def session(self) -> str:
        over = self._released and not self._detached.reports  # else who comes next is to have them
        return self._detached.terms.session if self._goes_on and not over else ""

    @property
    def _lost(self) -> tuple[int, ...]:
        return tuple([replica for replica, alive in enumerate(self._value.alive) if not alive])

    def go_on(self, lost: tuple[int, ...]) -> tuple[int, ...]:
        """All have begun but these: see `GoOn`."""
        self._goes_on = True
        for replica in lost:
            self.hear(Lost(self._role.run, replica, self._incarnations[replica]))
        self._resume()
        return self._lost

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hand_out(self) -> None:
        """Hand out batches, and note how many there are, once that is known."""
        if self._end is None and (totals := self._detached.hand_out()) is not None:
            self._value, self._counted = self._value.exhausted(totals), self.version

    def arrived(self, replica: int) -> None:
        self._hand_out()
        self._detached.arrived(replica)

    def join(self, replica: int, incarnation: int, given: int, birth: str = "") -> tuple[int, int, int]:
        """As that of others; server 0 says after which of its batches the replica begins."""
        if incarnation > self._incarnations[replica]:
            self._births[self._role.replicas[replica]] = birth
            self._lose(replica, incarnation - 1)
            joined = super().join(replica, incarnation, self._detached.join(replica))
            self._hand_out()
            return joined
        return super().join(replica, incarnation, given)

    def _lose(self, replica: int, incarnation: int) -> None:
        was_there = self._value.alive[replica]
        super()._lose(replica, incarnation)
        if was_there:
            self._hand_back(replica)

    def _hand_back(self, replica: int) -> None:
        self._detached.lose(replica, self._gone[replica])
        self._hand_out()

    def lose_node(self, task: str, birth: str) -> Iterable[Lost]:
        """End where a server is lost; of another node, what is to be heard of its replicas.

        That another process than takes part is gone, which was that task before, is said late.
        """
        if self._end is not None or not may_be(birth, self._births.get(task, "")):
            return ()
        if task in self._role.servers:
            text = f"training stopped at step {self.version + 1}: lost the parameter server {task}"
            self.end(NodeLost.__name__, text)
            self.give_up()
        here = [replica for replica, where in enumerate(self._role.replicas) if where == task]
        alive = [replica for replica in here if self._value.alive[replica]]
        return [Lost(self._role.run, replica, self._incarnations[replica]) for replica in alive]

    def broken(self, peer: str) -> None:
        """Say again what ``peer`` may not have heard, be that the end: no client need be there who sees to it."""
        if self.ended is not None and peer in (*self._role.servers[1:], *self._role.replicas):
            self._way.post(peer, self.ended)
        for replica, task in enumerate(self._role.replicas):
            if task == peer and self._value.alive[replica]:
                self._detached.arrived(replica)
        if peer in self._role.servers[1:]:
            self._way.post(peer, Probe(self._role.run, -1))  # only who posts to one that is gone learns that
        if peer == CLIENT:
            self._detached.tell_again()
            for replica in self._lost:
                self._way.post(CLIENT, Gone(self._role.run, replica, self._incarnations[replica], self._gone[replica]))
        super().broken(peer)

    # ── versions, and who is told of them ────────────────────────────────────────────────────────────────────────────

    def _may_order(self) -> bool:
        if not self._goes_on or self._detached.held:
            return False
        self._steady.allow(self.version + 1)
        return True

    async def stand_still(self, on: bool) -> int:
        """Order nothing, if it is ``on``; answers the version at which all servers are: see `Hold`."""
        self._detached.held = on
        if on and not self.over.is_set():
            await self.wait_rest()
        elif not on:
            self._resume()
        return self.version

    def attach(self) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...], str, int]:
        """A client has come: see `Attach`. Reports follow once it says which it has had."""
        self.client_gone()  # the one before
        self._attachment += 1
        first, dropped = self._detached.attach()
        incarnations, lost = ((), ()) if self.over.is_set() else (tuple(self._incarnations), self._lost)
        compression, begun = self._detached.terms.compression, self._role.version
        return self._attachment, first, dropped, incarnations, lost, compression, begun

    def client_gone(self) -> None:
        """It goes on without, if all had begun."""
        if not self._goes_on:
            super().client_gone()
            return
        self._detached.detach()
        self._resume()

    def release(self) -> None:
        """A client ends it, or has had its end: nobody need attach to it who has had all reports."""
        self._released = True

    def _allow(self, message: Allow) -> None:
        """Take in what a client has had, and tell it more; not of one that another has come after."""
        if message.version != self._attachment:
            return
        self._detached.seen(message.seen)
        if self.ended is not None:
            self._way.post(CLIENT, self.ended)

    def _keep(self, report: Report) -> None:
        spent = [
            self._detached.spend(replica, batch, again=code in UNUSED) for replica, batch, code, *_ in report.receipts
        ]
        self._detached.report(replace(report, identities=tuple(spent)))
        self._hand_out()
