"""Runs of a trainer on hosts that are none: the shipped drivers and the shipped client, and between them a network.

The network keeps what is posted from one task to another in order, takes its time, and breaks: then what was on its way
is lost, or arrived although its sender cannot know, and the sender is told. Kernels are functions on small arrays that
take a while or none. A variable is the version that it is at, twice, so that a tower which sees it torn can tell; an
update is the replica, its batch, and what it saw, so that what is applied can be compared with what was promised. With
``rows`` the variable is gathered for a batch: what comes is the variable and the batch that was named.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sim_loop import simulate

from flowrt.base.device import CLIENT
from flowrt.base.errors import NodeLost
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.base.valueclass import replace
from flowrt.ledger import Ledger
from flowrt.sched.drivers.beginning import BeginReplica, BeginServer
from flowrt.sched.drivers.inquiries import Look
from flowrt.sched.drivers.messages import Allow
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.spares import Spares
from flowrt.sched.policies import fixed_size, policy_to_data, together
from flowrt.sched.replica.stopwatch import Stopwatch
from flowrt.sched.runs.iterations import Iterations
from flowrt.train.compression import PackingChoice
from flowrt.train.statistics import Tally
from flowrt.train.steps import Steps

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.sched.policies import Policy

Array = np.ndarray[Any, Any]
Computing = Generator[None, None, list[Array]]
CONTAINER = ""
COUNT, PAIR, UPDATE, SEVERAL = Spec("int64", ()), Spec("int64", (2,)), Spec("int64", (3,)), Spec("int64", (None,))
TORN = -1
MOMENT = 1e-3  # seconds in which a node that stood still hears what has come meanwhile
SUSPECT = 2.0  # seconds for which a node stands still before clients suspect it
TOWER, APPLY, GATHER, ASK = 1, 2, 3, 4


class Violation(AssertionError):
    """What was promised does not hold."""


@dataclass
class Faults:
    """How often what goes wrong: by message, that the way it goes breaks; the seconds that things take at most; how
    often they take a hundred times as long, and for how long nobody knows of a death at most. ``at`` says of a message
    whether it is to be lost with its way."""

    breaks: float = 0.0
    latency: float = 0.01
    compute: float = 0.01
    slow: float = 0.0
    unknown: float = 1.0
    at: Callable[[Any], bool] = lambda message: False


class Kernel:
    """What runs of a plan come to: a generator that yields where it takes time, and answers the fetches."""

    def __init__(self, world: World, feeds: list[Spec], function: Callable[..., Computing]) -> None:
        named = (PlanFeed(f"feed {i}", spec) for i, spec in enumerate(feeds))
        self.plan = SimpleNamespace(feeds=tuple(named), fetches=())
        self._world, self._function = world, function
        self.direct_gate = (ctypes.c_int64 * 1)(1)

    def run_now(self, feeds: Any, number: int, seed: int) -> list[Array] | None:
        if self._world.rng.random() < 0.5:
            return None
        return self._ended(self._function(*feeds))

    def direct_plan(self, *how: Any) -> None:
        """It can be run by no direct call."""

    async def run(self, feeds: Any, context: Any) -> list[Array]:
        steps = self._function(*feeds)
        try:
            while True:
                next(steps)
                await asyncio.sleep(self._world.while_(self._world.faults.compute))
        except StopIteration as end:
            result: list[Array] = end.value
            return result

    @staticmethod
    def _ended(steps: Computing) -> list[Array]:
        try:
            while True:
                next(steps)
        except StopIteration as end:
            result: list[Array] = end.value
            return result


class SimHost:
    """What drivers see of a host."""

    def __init__(self, world: World, task: str, server: int | None) -> None:
        self.task, self.delay, self.tracer, self.random = task, None, None, world.rng
        self.birth = f"process {next(world.processes)}"
        self._world = world
        self.held = {("", "w"): np.zeros(2, np.int64), (CONTAINER, "step"): np.zeros((), np.int64)}
        self.variables = self.rendezvous = self
        self.server = server
        self.applied: list[frozenset[tuple[int, int]]] = []
        self.stale: list[tuple[int, ...]] = []  # of each update of a set, in replica order
        self.memory = Memory()
        self.spares = Spares(self.memory)
        clock = asyncio.get_running_loop().time
        self.iterations = Iterations(self, self.post, world.lives, clock)  # type: ignore[arg-type]

    def post(self, peer: str, epoch: str, message: Any) -> None:
        self._world.post(self.task, peer, epoch, message)

    def inventory(self) -> dict[tuple[str, str], Spec]:
        return {name: Spec(value.dtype.name, value.shape) for name, value in self.held.items()}

    def find(self, name: tuple[str, str], spec: Spec) -> Array | None:
        return self.held.get(name)

    value = find

    # as a node's variables are lent to be told to another, and taken there

    def try_hold(self, reads: frozenset[tuple[str, str]], writes: frozenset[tuple[str, str]]) -> bool:
        return True

    def release(self, reads: frozenset[tuple[str, str]], writes: frozenset[tuple[str, str]]) -> None:
        """Nothing was held."""

    def lend(self, name: tuple[str, str], spec: Spec) -> Array:
        return self.held[name].copy()

    def declare(self, name: tuple[str, str], spec: Spec) -> None:
        """There is room for all."""

    def begin(self, name: tuple[str, str], value: Array) -> None:
        self.held[name] = value
        if name == (CONTAINER, "step"):
            self.applied, self.stale = self._world.history(int(value))

    def forget(self, names: Iterable[tuple[str, str]]) -> None:
        for name in names:
            del self.held[name]
        self.applied, self.stale = [], []

    def close(self, key: Any) -> None:
        """Nothing of a step is kept."""


@dataclass
class Way:
    """What is on its way from one task to another, in order, and how often it broke."""

    due: float = 0.0
    held: float = 0.0  # when the last one is heard of those that came to a node that stands still
    life: int = 0


@dataclass
class Runner:
    """What a client sees of a cluster."""

    world: World
    epoch: str
    alive: bool = True
    lost: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    losses: Counter[str] = field(default_factory=Counter)
    listener: Any = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    copy = staticmethod(np.ascontiguousarray)

    @property
    def births(self) -> dict[str, str]:
        return {task: host.birth for task, host in self.world.hosts.items()}

    def why_lost(self, task: str) -> NodeLost:
        return NodeLost(f"{task} was lost")

    @contextmanager
    def listening(self, listener: Any) -> Iterator[None]:
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None

    def post(self, task: str, message: Any) -> None:
        if self.alive:
            if isinstance(message, Allow):
                self.world.allowed = max(self.world.allowed, message.version)
            self.world.post(CLIENT, task, self.epoch, message)

    async def command(self, task: str, message: Any) -> Any:
        world = self.world
        await asyncio.sleep(world.while_(world.faults.latency))
        await world.thawed(task)
        if not self.alive:
            await asyncio.Event().wait()
        if task in world.dead:
            self.lose(task)
            raise NodeLost(f"{task} was lost")
        host = world.hosts[task]
        answer = await host.iterations.answer(message, self.epoch, world.kernels[task].__getitem__)
        await world.thawed(task)
        if task in world.dead or world.hosts[task] is not host:
            self.lose(task)
            raise NodeLost(f"{task} was lost")
        await asyncio.sleep(world.while_(world.faults.latency))
        return answer

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str]) -> None:
        while (self.lost, self.suspects) == (lost, suspects):
            await self.changed.wait()

    def lose(self, task: str) -> None:
        self.losses[task] += task not in self.lost
        self._now(self.lost | {task})

    def regain(self, task: str) -> None:
        self._now(self.lost - {task})

    def expect(self, tasks: Iterable[str]) -> None:
        """All are known."""

    def leaves(self, task: str) -> None:
        self.leaving |= {task}
        self._now(self.lost)

    def look(self) -> None:
        """See who is silent."""
        self._now(self.lost)

    def _now(self, lost: frozenset[str]) -> None:
        self.lost, self.leaving = lost, self.leaving - lost
        self.suspects = (self.leaving | self.world.silent) - lost
        self.changed.set()
        self.changed = asyncio.Event()


class World:
    """Hosts, the network between them, and clients."""

    def __init__(
        self,
        rng: Random,
        policy: Policy,
        *,
        replicas: int,
        servers: int,
        faults: Faults | None = None,
        rows: bool = False,
        floor: int = 0,
    ) -> None:
        self.rows, self.floor, self.processes = rows, floor, itertools.count(1)
        self.rng, self.policy, self.faults = rng, policy, faults or Faults()
        self.servers = tuple(f"/job:ps/task:{i}" for i in range(servers))
        self.replicas = tuple(f"/job:worker/task:{i}" for i in range(replicas))
        self.hosts = {task: SimHost(self, task, i) for i, task in enumerate(self.servers)}
        self.hosts |= {task: SimHost(self, task, None) for task in self.replicas}
        self.kernels: dict[str, dict[int, Any]] = {task: self._server_kernels(task) for task in self.servers}
        self.kernels |= {task: self._replica_kernels(i) for i, task in enumerate(self.replicas)}
        self.runners: dict[str, Runner] = {}
        self.dead: set[str] = set()
        self._frozen: dict[str, tuple[float, float]] = {}  # by task, since and until when it stands still, or did
        self.silent: frozenset[str] = frozenset()  # those that clients suspect
        self._gone: list[SimHost] = []  # of nodes that were started again
        self.allowed = 0  # versions that any client has asked for
        self.late = rng.choice(["drop", "requeue"])
        self.ledger: Path | None = None
        self.clients: dict[str, Steps] = {}
        self.known: set[int] = set()  # versions that clients have had reports of, their own or another's
        self.delivered = self.broke = 0
        self._ways: dict[tuple[str, str, str], Way] = {}
        self._busy = 0.0  # until then something takes its time

    @property
    def spare(self) -> int:
        """How many replicas may be dead while others train."""
        count = len(self.replicas)
        return count - (self.floor or self.policy.least(count))

    def history(self, version: int) -> tuple[list[frozenset[tuple[int, int]]], list[tuple[int, ...]]]:
        """How variables came to be at a version, as a server tells who was there."""
        told = max((self.hosts[task] for task in self.servers), key=lambda host: len(host.applied))
        return told.applied[:version], told.stale[:version]

    # ── the network ──

    def lives(self, epoch: str) -> bool:
        return self.runners[epoch].alive

    def while_(self, most: float) -> float:
        """How long something takes that begins now."""
        seconds = self.rng.uniform(0.0, most) * (100.0 if self.rng.random() < self.faults.slow else 1.0)
        self._busy = max(self._busy, asyncio.get_running_loop().time() + seconds)
        return seconds

    async def rest(self) -> None:
        """Wait until all that was begun has come to its end: each message arrived, each broken way known to be so."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(100):
            for left in iter(lambda: max(0.0, self._busy + 1e-3 - loop.time()), 0.0):
                await asyncio.sleep(left)

    def post(self, sender: str, receiver: str, epoch: str, message: Any) -> None:
        """Have a message on its way, or have that way break."""
        if sender in self.dead:
            return
        way = self._ways.setdefault((sender, receiver, epoch if CLIENT in (sender, receiver) else ""), Way())
        loop = asyncio.get_running_loop()
        if self.rng.random() < 0.5:
            message = copied(message)  # as it leaves; else as it arrives: what is sent may change meanwhile
        still = max(
            [self._frozen[task][1] + MOMENT for task in (sender, receiver) if task in self._frozen], default=0.0
        )
        way.due = max(way.due, max(loop.time(), still) + self.while_(self.faults.latency))
        loop.call_at(way.due + 1e-6, self._arrive, way, way.life, sender, receiver, epoch, message)
        way.due += 2e-6
        if self.faults.at(message):
            self._break(way, way.life, sender, receiver, epoch)
        elif sender != receiver and self.rng.random() < self.faults.breaks:
            loop.call_later(self.while_(self.faults.latency), self._break, way, way.life, sender, receiver, epoch)

    def _arrive(self, way: Way, life: int, sender: str, receiver: str, epoch: str, message: Any) -> None:
        if way.life != life or receiver in self.dead or sender in self.dead:
            return
        loop = asyncio.get_running_loop()
        since, until = self._frozen.get(receiver, (0.0, 0.0))
        if loop.time() < until:  # it is heard, in order, when that goes on
            way.held = max(way.held + 2e-6, until + MOMENT * (loop.time() - since) / (until - since))
            loop.call_at(way.held, self._arrive, way, life, sender, receiver, epoch, message)
            return
        self.delivered += 1
        if receiver != CLIENT:
            self.hosts[receiver].iterations.hear(sender, copied(message))
            return
        runner = self.runners[epoch]
        if runner.alive and runner.listener is not None:
            runner.listener.hear(sender, copied(message))

    def _break(self, way: Way, life: int, sender: str, receiver: str, epoch: str) -> None:
        """What is on its way is lost. Who posts again is told after a while, but for the client's link both ends."""
        if way.life != life:
            return
        self.broke += 1
        ways = [(sender, receiver, way)]
        if CLIENT in (sender, receiver):
            ways.append((receiver, sender, self._ways.setdefault((receiver, sender, epoch), Way())))
        for one, other, broken in ways:
            broken.life += 1
            after = self.while_(10 * self.faults.latency)
            asyncio.get_running_loop().call_later(after, self._tell_broken, one, other, epoch)

    def _tell_broken(self, task: str, peer: str, epoch: str) -> None:
        if task == CLIENT:
            runner = self.runners[epoch]
            if runner.alive and runner.listener is not None:
                runner.listener.broken(peer, epoch)
        elif task not in self.dead:
            self.hosts[task].iterations.broken(peer, epoch if peer == CLIENT else "")

    # ── who dies ──

    def kill_client(self, epoch: str) -> None:
        """A client is gone, at once; the nodes learn of it one by one."""
        self.runners[epoch].alive = False
        if (ledger := self.clients[epoch]._ledger) is not None:
            ledger.close()  # as the system does
        for task in (*self.servers, *self.replicas):
            after = self.while_(10 * self.faults.latency)
            asyncio.get_running_loop().call_later(after, self._tell_ended, task, epoch)

    def _tell_ended(self, task: str, epoch: str) -> None:
        if task not in self.dead:
            self.hosts[task].iterations.ended(epoch)

    def kill(self, task: str) -> None:
        """A node is gone; clients learn of it after a while."""
        self._die(task)
        for runner in self.runners.values():
            asyncio.get_running_loop().call_later(self.while_(self.faults.unknown), runner.lose, task)

    def restart(self, replica: int) -> None:
        """A replica's node is gone, and after clients have learned of it there is another in its place."""
        task, loop = self.replicas[replica], asyncio.get_running_loop()
        if task in self.dead:
            return
        self._die(task)
        self._gone.append(self.hosts[task])
        for (sender, receiver, _), way in self._ways.items():
            if {sender, receiver} == {task, CLIENT}:
                way.life += 1  # what others have sent, or were sent by it, may still come
        known = loop.time() + self.while_(self.faults.unknown)
        for runner in self.runners.values():
            loop.call_at(known, runner.lose, task)
        loop.call_at(known + 0.001 + self.while_(0.1), self._start_anew, replica)

    def freeze(self, task: str, seconds: float) -> None:
        """A node stands still, and then goes on as if nothing had been; clients suspect it meanwhile, if it is long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if task in self.dead or now < self._frozen.get(task, (0.0, 0.0))[1]:
            return
        self._frozen[task] = now, now + seconds
        if seconds > SUSPECT:
            loop.call_at(now + SUSPECT, self._suspect, task, now + seconds)
            loop.call_at(now + seconds + self.while_(0.1), self._trust, task)

    def distrust(self, task: str, seconds: float) -> None:
        """Clients suspect a node for a while, with which all is well."""
        self._be_silent(self.silent | {task})
        asyncio.get_running_loop().call_later(seconds, self._trust, task)

    def _suspect(self, task: str, until: float) -> None:
        if self._frozen.get(task, (0.0, 0.0))[1] == until:
            self._be_silent(self.silent | {task})

    def _trust(self, task: str) -> None:
        self._be_silent(self.silent - {task})

    def _be_silent(self, silent: frozenset[str]) -> None:
        self.silent = silent
        for runner in self.runners.values():
            runner.look()

    async def thawed(self, task: str) -> None:
        """Wait until a node does not stand still any more."""
        left = self._frozen.get(task, (0.0, 0.0))[1] - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left + MOMENT)
            await self.thawed(task)

    def _die(self, task: str) -> None:
        self.dead.add(task)
        self._frozen.pop(task, None)

    async def leave(self, replica: int) -> None:
        """A replica's node is told to end, and does so in order, or not if that takes long; another takes its place."""
        task = self.replicas[replica]
        if task in self.dead:
            return
        for runner in self.runners.values():
            runner.leaves(task)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.while_(0.5)):
                await self.hosts[task].iterations.leave()
        self.restart(replica)

    def _start_anew(self, replica: int) -> None:
        task = self.replicas[replica]
        self.hosts[task] = SimHost(self, task, None)
        self.kernels[task] = self._replica_kernels(replica)
        self.dead.discard(task)
        for runner in self.runners.values():
            asyncio.get_running_loop().call_later(self.while_(0.1), runner.regain, task)

    async def aclose(self) -> None:
        for host in (*self.hosts.values(), *self._gone):
            await host.iterations.aclose()

    # ── kernels ──

    def _replica_kernels(self, replica: int) -> dict[int, Any]:
        def tower(batch: Array, *values: Array) -> Computing:
            seen = {int(v) for value in values for v in value[:2]}
            yield
            seen |= {int(v) for value in values for v in value[:2]}
            if any(named != batch[0] for value in values for named in value[2:]):
                raise Violation(f"replica {replica} computes batch {batch[0]} with rows {values}")
            made = np.array([replica, batch[0], seen.pop() if len(seen) == 1 else TORN])
            return [np.asarray(float(batch[0])), *([made] * len(values))]

        def ask(batch: Array) -> Computing:
            yield
            return [batch]

        value = UPDATE if self.rows else PAIR
        towers = Kernel(self, [UPDATE, *([value] * len(self.servers))], tower)
        return {TOWER: towers, ASK: Kernel(self, [UPDATE], ask)}

    def _server_kernels(self, task: str) -> dict[int, Any]:
        host = self.hosts[task]  # and no later one in its place

        def gather(batch: Array) -> Computing:
            w = host.held["", "w"]
            first = int(w[0])
            yield
            return [np.array([first, w[1], batch[0]])]

        def apply(made: Array, *given: Array) -> Computing:
            updates = tuple(update for each in given for update in each.reshape(-1, 3))
            version = int(made) - 1
            self._check_apply(host, version, updates)
            w, step = host.held["", "w"], host.held[CONTAINER, "step"]
            for place in range(2):
                w[place] = made
                yield
            step[...] = made
            host.applied.append(frozenset((int(u[0]), int(u[1])) for u in updates))
            host.stale.append(tuple(version - int(u[2]) for u in updates))
            return []

        size = fixed_size(self.policy, len(self.replicas), self.floor)
        applies = Kernel(self, [COUNT, *([SEVERAL] if size is None else [UPDATE] * size)], apply)
        return {APPLY: applies, GATHER: Kernel(self, [UPDATE], gather)}

    def _check_apply(self, host: SimHost, version: int, updates: tuple[Array, ...]) -> None:
        if version != len(host.applied):
            raise Violation(f"{host.task} applies version {version} after {len(host.applied)}")
        if version >= self.allowed:
            raise Violation(f"{host.task} applies version {version}, the client asked for {self.allowed}")
        if any(update[2] == TORN or not 0 <= version - update[2] <= self.policy.staleness for update in updates):
            raise Violation(f"{host.task} applies updates computed from other values to {version}: {updates}")
        replicas = [int(update[0]) for update in updates]
        if replicas != sorted(set(replicas)):
            raise Violation(f"{host.task} applies updates of {replicas}")

    # ── clients ──

    def program(self) -> Any:
        servers, count = len(self.servers), len(self.replicas)
        size = fixed_size(self.policy, count, self.floor)
        common: dict[str, Any] = {"container": CONTAINER, "group": "trainer", "seed": 0}
        common["staleness"] = self.policy.staleness
        applied = ((-1, -1), *((member, 0) for member in range(size or 1)))
        begin_servers = tuple(
            partial(
                BeginServer,
                **common,
                server=server,
                servers=self.servers,
                replicas=self.replicas,
                policy=policy_to_data(self.policy),
                apply=APPLY,
                applied=applied,
                combined=(True,) if size is None else (),  # of rows: one update behind another
                versions=("step",),
                values=() if self.rows else (("", "w"),),
                gather=GATHER if self.rows else -1,
                floor=self.floor,
                together=together(self.policy, count, self.floor),
            )
            for server in range(servers)
        )
        asks = ASK if self.rows and self.rng.random() < 0.5 else -1
        wants = ((() if not self.rows else (0,) if asks < 0 else (1,)),) * servers
        begin_replicas = tuple(
            partial(
                BeginReplica,
                **common,
                replica=replica,
                replicas=count,
                servers=self.servers,
                plan=TOWER,
                feeds=((-1, 0), *((server, 0) for server in range(servers))),
                ask=asks,
                wants=wants,
                told=1,
                parts=tuple((server,) for server in range(servers)),
                finite=((),) * servers,
            )
            for replica in range(count)
        )
        looks = (Look(CONTAINER, "trainer", ("step",)),) * servers
        return SimpleNamespace(
            servers=self.servers,
            looks=looks,
            begin_servers=begin_servers,
            replicas=self.replicas,
            begin_replicas=begin_replicas,
            nbytes=16,
        )

    def client(self, epoch: str, ahead: int = 0) -> Steps:
        """A client that trains."""
        runner, program = Runner(self, epoch), self.program()
        self.runners[epoch] = runner

        async def make(session: Any, gone: frozenset[str]) -> Any:
            return program

        session = SimpleNamespace(
            checkpoints=None, _open_here=lambda: runner, _iterating={}, _name=epoch, lost=frozenset(), _seed=0
        )
        tower = SimpleNamespace(inputs={"x": SimpleNamespace(spec=UPDATE)}, metrics={})
        trainer = Trainer(
            name="trainer",
            inputs={"x": UPDATE},
            towers=[tower] * len(self.replicas),
            replicas=len(self.replicas),
            floor=self.floor,
            least=self.floor or self.policy.least(len(self.replicas)),
            servers=self.servers,
            nodes=self.replicas,
            policy=self.policy,
            local_steps=1,
            overlap=0,
            copies=1,
            late=self.late,
            shards=[None] * len(self.servers),
            tally=Tally(len(self.replicas)),
            program=make,
        )
        steps = Steps(trainer, session, ahead, self.ledger)  # type: ignore[arg-type]
        take_down = steps._miss

        def miss(reports: Any) -> None:
            self.known.update(report.version for report in reports)
            take_down(reports)

        steps._miss = miss  # type: ignore[method-assign]
        self.clients[epoch] = steps
        return steps

    def check_ledger(self) -> None:
        """The ledger knows of every version what it was made of, and nothing in it is amiss."""
        assert self.ledger is not None
        ledger, applied = Ledger(self.ledger), self.hosts[self.servers[0]].applied
        if ledger.violations or ledger.count("handed"):
            raise Violation(f"the ledger: {ledger.violations}, {ledger.count('handed')} batches are with replicas")
        if ledger.version not in (None, len(applied)):
            raise Violation(f"the ledger is at version {ledger.version} of {len(applied)}")
        for version, updates in zip(ledger.versions, applied, strict=True):
            if set(version.kept) != {replica for replica, _ in updates}:
                raise Violation(
                    f"version {version.version} was made of {sorted(updates)}, the ledger says {version.kept}"
                )
        if ledger.count("kept") != sum(map(len, applied)):
            raise Violation(f"{ledger.count('kept')} batches were kept in {sum(map(len, applied))} updates")

    def check_known(self) -> None:
        """Of each version a client has had a report, or server 0 keeps it for the next one."""
        host = self.hosts[self.servers[0]]
        newest = host.iterations._newest.get((CONTAINER, "trainer"))
        kept = set() if newest is None else {report.version for report in newest.left.unseen}
        if missing := set(range(len(host.applied))) - self.known - kept:
            raise Violation(f"nobody knows what became of versions {sorted(missing)} of {len(host.applied)}")

    def check_whole(self) -> None:
        """All servers are at one version, made of the same updates, each of which counted once."""
        first, *others = (self.hosts[task] for task in self.servers)
        for other in others:
            if other.applied != first.applied:
                raise Violation(f"torn: {first.task} applied {first.applied}, {other.task} {other.applied}")
        for task in self.servers:
            host = self.hosts[task]
            at = {int(host.held[CONTAINER, "step"]), *host.held["", "w"].tolist()}
            if at != {len(host.applied)}:
                raise Violation(f"{task} is at {at} after {len(host.applied)} updates")
        counted = [batch for updates in first.applied for _, batch in updates]
        if len(set(counted)) != len(counted):
            raise Violation(f"a batch counted twice: {sorted(counted)}")


class Trainer(SimpleNamespace):
    """What a client needs of a trainer."""

    scale = None  # its loss is as it is
    compression = ""  # nor are its updates packed
    __hash__ = object.__hash__  # type: ignore[assignment]

    def packing_in(self, session: Any) -> PackingChoice:
        return PackingChoice("")


def simulated(rng: Random, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """What ``work`` answers in a loop of `simulate`, whose clock is everybody's: a seed decides all that happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.randbits", Random(0).getrandbits)
        patch.setattr("flowrt.sched.replica.replica.Stopwatch", partial(Stopwatch, _loop_time))
        for module in ("batches", "steps"):
            patch.setattr(f"flowrt.train.{module}.time", SimpleNamespace(monotonic=_loop_time, perf_counter=_loop_time))
        return simulate(rng, work)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def batches(first: int = 0) -> Iterator[dict[str, Array]]:
    """Batches that are told apart."""
    for number in itertools.count(first):
        yield {"x": np.array([number, 0, 0], np.int64)}


def copied(message: Any) -> Any:
    """A message as it travels, with the arrays in it as they are now."""
    names = _arrays_in(type(message))
    return (
        replace(message, **{name: tuple(map(np.array, getattr(message, name))) for name in names}) if names else message
    )


@cache
def _arrays_in(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name in ("values", "parts", "rows"))
