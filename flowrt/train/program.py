"""Plans of a trainer for the nodes of a session, and what each node is told to be when a run of them begins.

Law: pure but for registering. Parameter servers of a trainer that lie on one task are one server of a run. Of the
variables that lie on servers, replicas are told the values that their towers read; of those that a tower takes nothing
but rows of, which its batch tells, these are gathered on the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.device import Device
from flowrt.eager import evaluate
from flowrt.errors import GraphError
from flowrt.op import as_value
from flowrt.passes import Compiled, Ends
from flowrt.passes.fold_constants import fold_constants
from flowrt.passes.prune import prune, reads_of
from flowrt.runners import Runner, compile_for
from flowrt.sched.iteration.messages import BeginReplica, BeginServer, Look
from flowrt.sched.policies import policy_to_data
from flowrt.train.gathers import Asked, Gather, find_gathers
from flowrt.train.updates import of_rows, parts_of
from flowrt.valueclass import replace, valueclass

if TYPE_CHECKING:
    from flowrt.graph import Tensor
    from flowrt.plan import Plan
    from flowrt.session import Session
    from flowrt.train.replicated import Replicated, Tower

Name: TypeAlias = tuple[str, str]
Compile: TypeAlias = Callable[..., Compiled]


@valueclass
class Program:
    """A trainer on the nodes of a session. Replicas whose node is lost have no tower: None.

    A replica is told ``nbytes`` with every version, beside rows.
    """

    servers: tuple[str, ...]
    looks: tuple[Look, ...]
    begin_servers: tuple[Callable[..., BeginServer], ...]
    replicas: tuple[str, ...]
    begin_replicas: tuple[Callable[..., BeginReplica] | None, ...]
    nbytes: int


async def make_program(session: Session, trainer: Replicated) -> Program:
    """Compile what ``trainer`` is made of and give each node its plans: see `Maker`."""
    return await Maker(session, trainer).program()


class Maker:
    """Makes the program of ``trainer`` on the nodes of ``session``, and more of it as more of them come.

    It must not know the session, by which it is kept.
    """

    def __init__(self, session: Session, trainer: Replicated) -> None:
        runner, options = session._open_here(), session.options
        self._runner, self._trainer = runner, trainer
        compiler = partial(compile_for, runner, trainer.graph, optimize=options.optimize, placement=session._placement)
        self._make = partial(_Maker, trainer, runner, compiler, session._seed, options.optimize)
        self._maker: _Maker | None = None
        self._made: tuple[frozenset[str], Program] | None = None  # with what was lost then
        self._making = asyncio.Lock()

    async def program(self) -> Program:
        """The program for the nodes that are not `away`.

        Raises what compiling raises, and `GraphError` for what nodes cannot do by themselves.
        """
        async with self._making:
            lost = away(self._runner, self._trainer)
            if self._made is None or self._maker is None or not self._is_fixed(self._made[1]):
                if self._made is None or self._made[0] != lost:
                    self._maker = self._make()
                    self._made = lost, await self._maker.make()
            elif self._made[0] != lost:
                self._made = lost, await self._maker.add(self._made[1])
            return self._made[1]

    def _is_fixed(self, program: Program) -> bool:
        """Whether nothing of it could be elsewhere: what is lost is then as it was when it is back."""
        trainer = self._trainer
        return program.replicas == trainer.nodes and set(program.servers) <= set(trainer.servers)


class _Maker:
    def __init__(self, trainer: Replicated, runner: Runner, compiler: Compile, seed: int, optimize: bool) -> None:
        self._trainer = trainer
        self._runner = runner
        self._compile = compiler
        self._optimize = optimize
        self._common: dict[str, Any] = {
            "container": trainer.container,
            "group": trainer.name,
            "staleness": trainer.policy.staleness,
            "seed": seed,
        }
        self._shards = trainer.shards
        self._home = self._places([as_value(v) for v in (*trainer.variables, *(s.step for s in self._shards))])
        self._task_of = [self._home[_name(shard.step)] for shard in self._shards]
        self._servers = tuple(dict.fromkeys(self._task_of))
        self._values: list[tuple[Name, ...]] = []  # by server: what it tells replicas

    def _places(self, reads: Sequence[Tensor]) -> dict[Name, str]:
        """The task of each variable."""
        placed = self._compile(reads, [], [], ends=Ends.USED).placement
        return {read.op.resources[0]: Device.parse(placed[read.op.name]).host for read in reads}

    async def make(self) -> Program:
        trainer = self._trainer
        there = self._there()
        asked = {tower.replica: self._asked(tower) for tower in there}
        read = {r: self._reads(trainer.towers[r], asked[r]) for r in asked}
        self._values = [
            tuple(dict.fromkeys(name for reads in read.values() for name in reads if self._home[name] == task))
            for task in self._servers
        ]
        towers = {r: self._compile_tower(trainer.towers[r], asked[r], list(read[r].values())) for r in read}
        replicas = tuple(towers[t.replica].home if t.replica in towers else t.node for t in trainer.towers)
        begin_servers = await self._make_servers(replicas, next(iter(asked.values())))
        begin_replicas: list[Callable[..., BeginReplica] | None] = [None] * trainer.replicas
        for r, tower in towers.items():
            begin_replicas[r] = await self._make_replica(trainer.towers[r], asked[r], read[r], tower)
        looks = tuple(Look(trainer.container, trainer.name, self._steps_on(task)) for task in self._servers)
        sizes = {_name(variable): variable.spec.nbytes for variable in trainer.variables}
        nbytes = sum(sizes.get(name, 0) for told in self._values for name in told)
        return Program(self._servers, looks, begin_servers, replicas, tuple(begin_replicas), nbytes)

    async def add(self, program: Program) -> Program:
        """``program``, with the towers whose nodes have come since it was made."""
        begin = list(program.begin_replicas)
        for tower in self._there():
            if begin[tower.replica] is None:
                asked = self._asked(tower)
                reads = self._reads(tower, asked)
                compiled = self._compile_tower(tower, asked, list(reads.values()))
                begin[tower.replica] = await self._make_replica(tower, asked, reads, compiled)
        return replace(program, begin_replicas=tuple(begin))

    def _there(self) -> list[Tower]:
        """The towers whose nodes are."""
        gone = away(self._runner, self._trainer)
        return [tower for tower in self._trainer.towers if tower.node not in gone]

    def _steps_on(self, task: str) -> tuple[str, ...]:
        return tuple(self._shards[s].step.name for s in self._on(task))

    def _on(self, task: str) -> list[int]:
        """The trainer's servers that lie on a task."""
        return [server for server, where in enumerate(self._task_of) if where == task]

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _make_servers(self, replicas: tuple[str, ...], asked: Asked) -> tuple[Callable[..., BeginServer], ...]:
        version = self._trainer.version
        feeds = [*(part for s in self._shards for member in s.parts for part in member), version]
        plans = self._compile([], [shard.apply for shard in self._shards], feeds, ends=Ends.USED).plans
        if others := sorted(plans.keys() - set(self._servers)):
            raise GraphError(
                f"the updates of {self._trainer.name!r} need what lies on {', '.join(others)}, where none of its "
                f"servers {', '.join(self._servers)} is; place that on one of them, by fr.device"
            )
        apply = await self._runner.install(plans)
        return tuple(
            [
                partial(
                    BeginServer,
                    server=number,
                    servers=self._servers,
                    replicas=replicas,
                    policy=policy_to_data(self._trainer.policy),
                    floor=self._trainer.floor,
                    apply=apply,
                    applied=self._applied(task, plans[task]),
                    combined=tuple(rows for server in self._on(task) for rows in self._shards[server].combined),
                    versions=self._steps_on(task),
                    measures=self._trainer.policy.measures,
                    values=self._values[number],
                    gather=await self._make_gather(task, asked),
                    **self._common,
                )
                for number, task in enumerate(self._servers)
            ]
        )

    def _applied(self, task: str, plan: Plan) -> tuple[tuple[int, int], ...]:
        """What the plan that applies updates is fed on a task."""
        members = range(len(self._shards[0].parts))
        known = {self._trainer.version.op.name: (-1, -1)}
        for member in members:
            parts = [part for server in self._on(task) for part in self._shards[server].parts[member]]
            known |= {part.op.name: (member, place) for place, part in enumerate(parts)}
        if foreign := [feed.name for feed in plan.feeds if feed.name not in known]:
            raise GraphError(f"{foreign[0]!r}, the mean of another server's gradients, is used on {task}")
        return tuple(known[feed.name] for feed in plan.feeds)

    async def _make_gather(self, task: str, asked: Asked) -> int:
        """What takes the rows of a task's tables that a tower asks for."""
        gathers = self._gathers_on(task, asked)
        if not gathers:
            return -1
        feeds = [asked.values[i] for i in asked.wants(gathers)]
        return await self._install(self._compile([g.rows for g in gathers], [], feeds, ends=Ends.FETCHED), task)

    def _gathers_on(self, task: str, asked: Asked) -> list[Gather]:
        return [gather for gather in asked.gathers if self._home[_name(gather.table)] == task]

    async def _install(self, compiled: Compiled, task: str = "") -> int:
        if len(compiled.plans) > 1 or (task and task not in compiled.plans):
            raise GraphError(
                f"a replica or server of {self._trainer.name!r} needs what lies on another task: "
                f"{', '.join(compiled.plans)}"
            )
        return await self._runner.install(compiled.plans)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, tower: Tower) -> Asked:
        """What a tower has servers gather; nothing where its plans are to be as the program says."""
        inputs = tuple(tower.inputs.values())
        if tower.local is not None:
            return Asked.of(inputs, ())  # it takes rows of its own copies
        tables = self._trainer.variables if self._optimize else []
        on_servers = [table for table in tables if self._home[_name(table)] in self._servers]
        return Asked.of(inputs, find_gathers(_fetches(tower), inputs, on_servers))

    def _reads(self, tower: Tower, asked: Asked) -> dict[Name, Tensor]:
        """What a tower reads of variables that lie on servers, by their names."""
        local = tower.local
        fetches, targets = (_fetches(tower), ()) if local is None else (_parts(tower), local.load)
        step = prune(self._trainer.graph, fetches, targets, asked.feeds)
        reads = reads_of(fold_constants(step, evaluate) if self._optimize else step)
        found = {read.op.resources[0]: read for read in reads}
        return {name: read for name, read in found.items() if self._home.get(name) in self._servers}

    def _compile_tower(self, tower: Tower, asked: Asked, reads: Sequence[Tensor]) -> Compiled:
        """What computes with one batch: an update, or one local step, which reads nothing of servers."""
        if tower.local is None:
            return self._compile(_fetches(tower), [], [*asked.feeds, *reads], ends=Ends.FETCHED)
        return self._compile(_fetches(tower), [tower.local.step], asked.feeds, ends=Ends.FETCHED)

    async def _make_feeds(self, asked: Asked, reads: Iterable[Name], task: str) -> dict[str, Any]:
        """What a tower on a task is fed, and what it asks for."""
        feeds, rows = [(-1, i) for i in range(len(asked.values))], [len(told) for told in self._values]
        for name in (_name(gather.table) for gather in asked.gathers):
            server = self._servers.index(self._home[name])
            feeds.append((server, rows[server]))
            rows[server] += 1
        feeds += [self._told(name) for name in reads]
        ask = -1
        if asked.computed:
            ask = await self._install(self._compile(asked.computed, [], asked.inputs, ends=Ends.FETCHED), task)
        wants = tuple(asked.wants(self._gathers_on(server, asked)) for server in self._servers)
        return {"feeds": tuple(feeds), "ask": ask, "wants": wants}

    def _told(self, name: Name) -> tuple[int, int]:
        """Which server tells a variable's value, and where among its values."""
        server = self._servers.index(self._home[name])
        if name not in self._values[server]:
            raise GraphError(f"variable {name[1]!r} is read by one replica of {self._trainer.name!r}, not by others")
        return server, self._values[server].index(name)

    async def _make_local(self, tower: Tower, reads: Mapping[Name, Tensor], task: str) -> dict[str, Any]:
        """The plans around local steps, and what they are fed."""
        local = tower.local
        if local is None:
            return {}
        told = {read.op.name: self._told(name) for name, read in reads.items()}
        load = self._compile([], local.load, list(reads.values()), ends=Ends.USED)
        differ = self._compile([*_update(tower), local.finite], [], list(reads.values()), ends=Ends.FETCHED)
        start = self._compile([], local.start, [], ends=Ends.USED) if local.start else None
        return {
            "steps": self._trainer.local_steps,
            "start": -1 if start is None else await self._install(start, task),
            "load": await self._install(load, task),
            "loaded": tuple([told[feed.name] for feed in load.plans[task].feeds]),
            "differ": await self._install(differ, task),
            "differed": tuple(told.values()),
        }

    async def _make_replica(
        self, tower: Tower, asked: Asked, reads: Mapping[Name, Tensor], compiled: Compiled
    ) -> Callable[..., BeginReplica]:
        trainer, task = self._trainer, compiled.home
        parts = _parts(tower)
        order = {id(part): i for i, part in enumerate(parts)}
        checks = [server for server, finite in enumerate(tower.finite) if finite is not None]  # behind the parts
        return partial(
            BeginReplica,
            replica=tower.replica,
            replicas=trainer.replicas,
            servers=self._servers,
            plan=await self._install(compiled),
            told=1 + len(tower.metrics),
            parts=tuple(
                tuple(
                    order[id(part)]
                    for server in self._on(task)
                    for part in parts_of(gradient for gradient, _ in trainer.gradients_of(tower, server))
                )
                for task in self._servers
            ),
            finite=tuple(
                tuple(len(parts) + place for place, server in enumerate(checks) if server in self._on(task))
                for task in self._servers
            ),
            measured=self._measured(tower),
            **self._common,
            **await self._make_feeds(asked, reads if tower.local is None else (), task),
            **await self._make_local(tower, reads, task),
        )

    def _measured(self, tower: Tower) -> tuple[tuple[bool, ...], ...]:
        """For each server, which of its parts are of rows; nothing where nobody measures them."""
        if not self._trainer.policy.measures:
            return ()
        return tuple(
            tuple(
                rows
                for server in self._on(task)
                for rows in of_rows(gradient for gradient, _ in self._trainer.gradients_of(tower, server))
            )
            for task in self._servers
        )


def _fetches(tower: Tower) -> list[Tensor]:
    """What is fetched of what computes with one batch."""
    return [tower.loss, *tower.metrics.values(), *(_update(tower) if tower.local is None else ())]


def _update(tower: Tower) -> list[Tensor]:
    """Its update: the parts, and whether those of each server that has any are finite."""
    return [*_parts(tower), *(finite for finite in tower.finite if finite is not None)]


def _parts(tower: Tower) -> list[Tensor]:
    return parts_of(gradient for gradient, _ in tower.gradients)


def _name(variable: Any) -> Name:
    return variable.resource.container, variable.resource.name


def away(runner: Runner, trainer: Replicated) -> frozenset[str]:
    """The tasks that are lost, and, where enough replicas are left without them, those that are suspect."""
    lost, suspects = runner.lost, runner.suspects
    left = trainer.replicas - len(where_lost(trainer.nodes, lost | suspects))
    return lost | suspects if left >= trainer.least else lost


def where_lost(tasks: Sequence[str], lost: frozenset[str]) -> list[int]:
    """Which of ``tasks`` are among those that are ``lost``."""
    return [number for number, task in enumerate(tasks) if task in lost]
