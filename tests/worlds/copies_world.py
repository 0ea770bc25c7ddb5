"""A simulated world whose servers' variables are held twice, and whose servers die and come back with nothing.

What a task holds for itself and for the one before it is one array here, as all servers apply the same sets. The
shipped `Copies` decides who is whole; only the copying itself is done by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from schedule_world import APPLY, CONTAINER, COUNT, PAIR, Look, SimHost, Violation, World

from flowrt.base.errors import NodeLost
from flowrt.train.copies import Copies, copies_known
from flowrt.train.holding import Guide, Holders, Leading


class CopiesWorld(World):
    """`World`, with ``copies=2``; what is ``large`` is copied to a server while the others go on."""

    large = False

    def client(self, epoch: str, ahead: int = 0) -> Any:
        steps = super().client(epoch, ahead)
        trainer, session = steps._trainer, steps._session
        runner = session._open_here()
        runner.keepers = []
        runner.lost |= self.dead  # it is opened without those
        holders = Holders(self.servers, {t: {} for t in self.servers}, dict.fromkeys(self.servers, ("step",)))

        async def program(session: Any, gone: frozenset[str] = frozenset()) -> Any:
            return self.program_without(gone)

        async def copies_on(session: Any) -> Any:
            return copies_known(session, trainer) or SimCopies(self, session, trainer, holders, guide)

        async def guide(task: str, gone: frozenset[str]) -> Any:
            applied = self.program().begin_servers[0].keywords["applied"]
            w, step = (("", "w"), PAIR), ((CONTAINER, "step"), COUNT)
            after, before = holders.after(task), holders.before(task)
            two = (Leading(after, (w,), (0,)), Leading(before, (step,), ()))
            leaders = (Leading(after, (w, step), (0,)),) if after == before else two
            return Guide(task, CONTAINER, "trainer", leaders, APPLY, applied, 0)

        trainer.copies, trainer.program, trainer.copies_on = 2, program, copies_on
        trainer.container = CONTAINER
        del steps._miss  # which only knows of clients that are lost
        return steps

    def program_without(self, gone: frozenset[str]) -> Any:
        """The program in which those that are left tell what those had that are gone."""
        whole = self.program()
        left = [server for server, task in enumerate(self.servers) if task not in gone]
        tasks = tuple(self.servers[server] for server in left)
        count = len(self.servers)
        teller = [server if server in left else (server + 1) % count for server in range(count)]
        told = [[server for server in range(count) if teller[server] == each] for each in left]
        begin_servers = []
        for number, mine in enumerate(told):
            how = whole.begin_servers[left[number]].keywords
            values = how["values"] * len(mine)
            begin_servers.append(_with(whole.begin_servers[0], server=number, servers=tasks, values=values, keeps=True))
        feeds = [
            (left.index(teller[server]), told[left.index(teller[server])].index(server)) for server in range(count)
        ]
        begin_replicas = [
            _with(
                begin,
                servers=tasks,
                feeds=((-1, 0), *feeds),
                parts=tuple((server,) for server in left),
                finite=((),) * len(left),
                wants=begin.keywords["wants"][: len(left)],
            )
            for begin in whole.begin_replicas
        ]
        looks = (Look(CONTAINER, "trainer", ("step",)),) * len(left)
        return SimpleNamespace(
            servers=tasks,
            looks=looks,
            begin_servers=tuple(begin_servers),
            replicas=whole.replicas,
            begin_replicas=tuple(begin_replicas),
            nbytes=16,
        )

    def strike(self, number: int, back: bool) -> None:
        """A server dies, if all others have what they should; it is there again after a while, if it comes ``back``."""
        loop = asyncio.get_running_loop()
        copies = [keeper for runner in self.runners.values() if runner.alive for keeper in runner.keepers]
        known = [keeper for keeper in copies if keeper.known]
        still = self.silent.intersection(self.servers) or any(until > loop.time() for _, until in self._frozen.values())
        left_out = any(keeper.gone or keeper._parted for keeper in known) if known else self._differ()
        if not (still or left_out or self.dead.intersection(self.servers)):
            self.end(number, back)

    def _differ(self) -> bool:
        """Whether, while no client knows, some server has not what others do, or nobody has anything yet.

        One that holds something may lack the rest still, which those know that are whole.
        """
        hosts = [self.hosts[task] for task in self.servers]
        at = [len(host.applied) if host.held else -9 for host in hosts]
        said = [host.iterations._lacking.get((CONTAINER, "trainer"), (0, ())) for host in hosts]
        return max(at) < 1 or max(at) - min(at) > 1 or bool(max(said)[1])

    def end(self, number: int, back: bool = True) -> None:
        """A server dies; see `strike`."""
        task, loop = self.servers[number], asyncio.get_running_loop()
        self._die(task)
        self._gone.append(self.hosts[task])
        known = loop.time() + self.while_(0.2)
        for runner in self.runners.values():
            loop.call_at(known, runner.lose, task)
        if back:
            loop.call_at(known + 0.001 + self.while_(0.5), self._bring_back, number)

    def _bring_back(self, number: int) -> None:
        task = self.servers[number]
        for (sender, receiver, _), way in self._ways.items():
            if task in (sender, receiver):
                way.life += 1
        host = self.hosts[task] = SimHost(self, task, number)
        host.held = {}  # it comes with nothing
        self.kernels[task] = self._server_kernels(task)
        self.dead.discard(task)
        for runner in self.runners.values():
            asyncio.get_running_loop().call_later(self.while_(0.1), runner.regain, task)

    def check_whole(self) -> None:
        """As of all servers, of those that hold anything."""
        self._of_those_there(super().check_whole)

    def check_ledger(self) -> None:
        self._of_those_there(super().check_ledger)

    def _of_those_there(self, check: Callable[[], None]) -> None:
        servers = self.servers
        keepers = [keeper for runner in self.runners.values() for keeper in runner.keepers if keeper.survive]
        left_out = {task for keeper in keepers for task in keeper.gone}
        self.servers = tuple(t for t in servers if t not in self.dead | left_out and self.hosts[t].held)
        try:
            check()
        finally:
            self.servers = servers


class SimCopies(Copies):
    """The shipped decisions; what is copied are the arrays of a simulated host, and how they came about."""

    def __init__(self, world: CopiesWorld, session: Any, trainer: Any, holders: Holders, guide: Any) -> None:
        super().__init__(session, trainer, holders, guide)
        self._world = world

    def _is_small(self, task: str) -> bool:
        return not self._world.large

    async def _copy(self, variables: Any, task: str, other: str) -> None:
        source, target = self._world.hosts[task], self._world.hosts[other]
        await asyncio.sleep(self._world.while_(self._world.faults.latency))
        for each in (source, target):
            await self._world.thawed(each.task)
            if each.task in self._world.dead:
                self._runner.lose(each.task)
            if each.task in self._world.dead or self._world.hosts[each.task] is not each:
                raise NodeLost(f"{each.task} was lost")
        for each in (source, target):
            if any(driver.left.ended is False for driver in each.iterations._servers.values()):
                raise Violation(f"{task} is copied to {other} while {each.task} trains")
        target.held = {name: value.copy() for name, value in source.held.items()}
        target.applied, target.stale = list(source.applied), list(source.stale)

    async def _make_equal(self, task: str, other: str) -> None:
        if not self.is_whole(other):
            await self._copy({}, task, other)
        elif self._world.hosts[task].applied != self._world.hosts[other].applied:
            raise Violation(f"{task} applied {self._world.hosts[task].applied}, {other} other sets")


def _with(begin: Any, **changes: Any) -> Any:
    """How to begin somebody, otherwise: a function of the fields that a run has."""
    return lambda **of_run: replace(begin(**of_run), **changes)
