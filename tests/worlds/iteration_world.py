"""Servers and replicas of a run over a network that the test moves: every message is delivered, or lost, when it says.

Each server keeps one variable, from which every update takes 1, and its version. Replicas are told the variable, or
with ``rows`` it is gathered for a batch: then what comes is the variable and the batch that was named. With ``combine``
servers make one update of each set, and apply that.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from flowrt.base.device import CLIENT
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.kernels.ops.updates.combining import summing
from flowrt.sched.drivers.beginning import BeginReplica, BeginServer
from flowrt.sched.drivers.messages import Allow, Batch, Ended, Report
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.rendezvous import Rendezvous
from flowrt.sched.host.spares import Spares
from flowrt.sched.host.variables import Variables
from flowrt.sched.policies import AllOf, FirstOf, policy_to_data, together
from flowrt.sched.runs.iterations import Iterations

RUN = 7
NUMBER, COUNT = Spec("float64", ()), Spec("int64", ())


@dataclass
class FakePlan:
    """Stands for an executor: ``compute`` makes fetches of feeds. A ``slow`` one waits for ``go``, as a task."""

    specs: Sequence[Spec]
    compute: Callable[[list[Any], int], list[Any]]
    slow: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    direct_gate: Any = field(default_factory=lambda: (ctypes.c_int64 * 1)(1))
    together: list[int] = field(default_factory=list)  # how many runs were asked for, each time that several may be

    @property
    def plan(self) -> Any:
        feeds = [PlanFeed(f"feed {i}", spec, "here") for i, spec in enumerate(self.specs)]
        return SimpleNamespace(feeds=feeds, fetches=())

    def run_now(self, feeds: list[Any], number: int, seed: int) -> list[Any] | None:
        return None if self.slow else self.compute(feeds, number)

    def direct_plan(self, *how: Any) -> None:
        """It can be run by no direct call."""

    async def run(self, feeds: list[Any], context: Any) -> list[Any]:
        await self.go.wait()
        return self.compute(feeds, context.number)

    async def run_several(self, fed: list[list[Any]], context: Any) -> list[list[Any]]:
        self.together.append(len(fed))
        await self.go.wait()
        return [self.compute(feeds, number) for number, feeds in enumerate(fed, context.number)]


class FakeHost:
    """What drivers use of a host."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.variables = Variables(task)
        self.rendezvous = Rendezvous()
        self.memory = Memory()
        self.spares = Spares(self.memory)
        self.random = random.Random(0)
        self.delay: Any = None
        self.tracer = None
        self.inventory = self.variables.inventory

    def put(self, name: str, value: Any) -> None:
        array = np.array(value)
        self.variables.declare(("", name), Spec(array.dtype, array.shape))
        assert self.variables.try_hold(frozenset(), frozenset([("", name)]))
        self.variables.begin(("", name), array)
        self.variables.release(frozenset(), frozenset([("", name)]))

    def get(self, name: str, spec: Spec) -> Any:
        return self.variables.value(("", name), spec)


class World:
    """A run of ``replicas`` replicas over ``servers`` servers, begun."""

    def __init__(
        self,
        replicas: int = 2,
        servers: int = 1,
        *,
        take: int | None = None,
        version: int = 0,
        rows: bool = False,
        combine: bool = False,
        births: tuple[str, ...] = (),
    ) -> None:
        self.births = births
        self.servers = tuple(f"/job:ps/task:{i}" for i in range(servers))
        self.workers = tuple(f"/job:worker/task:{i}" for i in range(replicas))
        self.policy = AllOf() if take is None else FirstOf(take)
        self.version = version
        self.rows, self.combine = rows, combine
        if combine:
            summing("float64", 1, 1, 1).steps[0].address()  # compiled, or servers would do so beside the test
        self.ways: dict[tuple[str, str], deque[Any]] = {}
        self.client: list[Any] = []
        self.used: list[tuple[int, int, int]] = []  # (replica, version, batch) of each tower that ended
        self.applies: dict[int, FakePlan] = {}  # by server
        self.spoiled: set[int] = set()  # replicas whose updates are not finite
        self.alive = True
        self.hosts = {task: FakeHost(task) for task in (*self.servers, *self.workers)}
        self.nodes = {task: self._node(host) for task, host in self.hosts.items()}
        self.towers = [FakePlan([NUMBER] * (1 + (1 + rows) * servers), self._tower(r)) for r in range(replicas)]
        for task in self.servers:
            self.hosts[task].put("w", -float(version))
            self.hosts[task].put("step", np.int64(version))

    def _node(self, host: FakeHost) -> Iterations:
        def send(peer: str, epoch: str, message: Any) -> None:
            self.ways.setdefault((host.task, peer), deque()).append(message)

        return Iterations(host, send, lambda epoch: self.alive)  # type: ignore[arg-type]

    def _tower(self, replica: int) -> Callable[[list[Any], int], list[Any]]:
        def compute(feeds: list[Any], number: int) -> list[Any]:
            batch, *told = feeds
            values, named = told[: len(self.servers)], told[len(self.servers) :]
            assert all(other == batch for other in named), f"rows for {named} of {batch}"
            assert all(value == -number for value in values), f"version {number} of {values}"
            self.used.append((replica, number, int(batch)))
            gradient = np.array(np.nan if replica in self.spoiled else 1.0)
            return [np.array(float(batch)), *(gradient for _ in self.servers), np.isfinite(gradient)]

        return compute

    async def begin(self) -> None:
        for number in range(len(self.servers)):
            await self.begin_server(number)
        for number in range(len(self.workers)):
            await self.begin_replica(number)

    async def begin_server(self, number: int, run: int = RUN, client: str = "somebody", epoch: str = "epoch") -> None:
        host = self.hosts[self.servers[number]]
        members = 1 if self.combine else self.policy.size(len(self.workers)) or 0

        def apply(feeds: list[Any], _: int) -> list[Any]:
            *parts, version = feeds
            host.get("w", NUMBER)[...] -= np.mean(parts)
            host.get("step", COUNT)[...] = version
            return []

        gather = FakePlan([NUMBER], lambda feeds, _: [host.get("w", NUMBER).copy(), feeds[0]])
        self.applies[number] = FakePlan([*[NUMBER] * members, COUNT], apply)
        plans = [self.applies[number], gather]
        role = BeginServer(
            run=run,
            container="",
            group="trainer",
            version=self.version,
            client=client,
            server=number,
            servers=self.servers,
            replicas=self.workers,
            policy=policy_to_data(self.policy),
            staleness=self.policy.staleness,
            apply=0,
            applied=(*((member, 0) for member in range(members)), (-1, -1)),
            combined=(False,) if self.combine else (),
            versions=("step",),
            values=() if self.rows else (("", "w"),),
            gather=1 if self.rows else -1,
            seed=0,
            births=self.births,
            together=together(self.policy, len(self.workers)),
        )
        await self.nodes[host.task].answer(role, epoch, plans.__getitem__)  # type: ignore[arg-type]

    async def begin_replica(self, number: int) -> None:
        role = BeginReplica(
            run=RUN,
            container="",
            group="trainer",
            replica=number,
            replicas=len(self.workers),
            servers=self.servers,
            version=self.version,
            staleness=self.policy.staleness,
            plan=number,
            feeds=((-1, 0), *((server, i) for i in range(1 + self.rows) for server in range(len(self.servers)))),
            ask=-1,
            wants=((0,) if self.rows else (),) * len(self.servers),
            told=1,
            parts=tuple((server,) for server in range(len(self.servers))),
            finite=((len(self.servers),),) * len(self.servers),
            seed=0,
        )
        await self.nodes[self.workers[number]].answer(role, "epoch", self.towers.__getitem__)  # type: ignore[arg-type]

    # ── the network ──

    def tell(self, task: str, message: Any) -> None:
        """Have the client post something, which arrives at once."""
        self.nodes[task].hear(CLIENT, message)

    def give(self, replica: int, *numbers: int) -> None:
        for number in numbers:
            self.tell(self.workers[replica], Batch(RUN, replica, number, (np.array(float(number)),)))

    def give_together(self, replica: int, first: int, *others: int) -> None:
        values, *more = [(np.array(float(number)),) for number in (first, *others)]
        self.tell(self.workers[replica], Batch(RUN, replica, first, values, tuple(more)))

    def allow(self, version: int, seen: int = 0, totals: tuple[int, ...] | None = None) -> None:
        self.tell(self.servers[0], Allow(RUN, version, seen, totals))

    def deliver(self, sender: str, receiver: str) -> None:
        """Deliver the oldest message on one way."""
        message = self.ways[sender, receiver].popleft()
        if receiver == CLIENT:
            self.client.append(message)
        else:
            self.nodes[receiver].hear(sender, message)

    def settle(self, *, without: Sequence[str] = ()) -> None:
        """Deliver all that there is, in the order of ways, but to and from those named."""
        while open_ways := [w for w, left in self.ways.items() if left and not set(w) & set(without)]:
            for way in open_ways:
                self.deliver(*way)

    def break_way(self, sender: str, receiver: str) -> None:
        """Lose what is on a way; who posts there is told that it may post again."""
        self.ways.setdefault((sender, receiver), deque()).clear()
        self.nodes[sender].broken(receiver, "epoch" if receiver == CLIENT else "")

    # ── what came of it ──

    def state(self) -> list[tuple[float, int]]:
        """(w, version) of each server."""
        hosts = [self.hosts[task] for task in self.servers]
        return [(float(host.get("w", NUMBER)), int(host.get("step", COUNT))) for host in hosts]

    def reports(self) -> list[Report]:
        """What the client was told of versions, each once, in order."""
        found = {message.version: message for message in self.client if isinstance(message, Report)}
        assert sorted(found) == list(range(self.version, self.version + len(found)))
        return [found[version] for version in sorted(found)]

    def ended(self) -> Ended | None:
        return next((message for message in self.client if isinstance(message, Ended)), None)

    async def aclose(self) -> None:
        for node in self.nodes.values():
            await node.aclose()


W = TypeVar("W", bound=World)


@asynccontextmanager
async def begun(made: W) -> AsyncIterator[W]:
    """A world that runs, for half a minute at most."""
    async with asyncio.timeout(30):
        await made.begin()
        try:
            yield made
        finally:
            await made.aclose()
