"""Plans of a trainer for the nodes of a session, and what each node is told to be when a run of them begins.

Law: pure but for registering. Plans are made once, for all nodes that are there; which of them a run takes, and who
tells what, is put together of these for each run (`_Servers`). Parameter servers of a trainer that lie on one task are
one server of a run. Of the variables that lie on servers, replicas are told the values that their towers read; of those
that a tower takes nothing but rows of, which its batch tells, these are gathered on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import replace, valueclass
from flowrt.finishing import pipelined
from flowrt.passes import Compiled, Ends, StandIn, StandIns
from flowrt.passes.fold_constants import fold_constants
from flowrt.passes.prune import prune, reads_of
from flowrt.sched.drivers.beginning import BeginReplica, BeginServer
from flowrt.sched.drivers.inquiries import Look
from flowrt.sched.policies import policy_to_data, together
from flowrt.session.eager import evaluate
from flowrt.train.built import name_of
from flowrt.train.gathers import Asked, Gather, find_gathers
from flowrt.train.holding import Compile, Guide, Leading, Name, find_places, held_compiler, holders_at
from flowrt.train.updates import of_rows, parts_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.graph import Tensor
    from flowrt.session.runners import Runner
    from flowrt.train.built import Built, Tower
    from flowrt.train.compression import PackingChoice
    from flowrt.train.local import LocalTower
    from flowrt.train.updates import Gradient


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


@valueclass
class _Tower:
    """A tower whose plans are installed, by their numbers there; -1 for none. ``reads`` are of what servers tell."""

    built: Tower
    asked: Asked
    reads: Mapping[Name, Tensor]
    home: str
    plan: int
    ask: int
    start: int = -1
    load: int = -1
    loaded: tuple[str, ...] = ()  # the names of what that is fed
    differ: int = -1
    merge: int = -1


class ProgramParts:
    """All that programs of ``trainer`` are put together of, on the nodes of ``runner``."""

    def __init__(self, trainer: Built, runner: Runner, compiler: Compile, seed: int, optimize: bool) -> None:
        self._trainer = trainer
        self._runner = runner
        self._compile = compiler
        self._compile_held = held_compiler(trainer, compiler)
        self._optimize = optimize
        self._common: dict[str, Any] = {
            "container": trainer.container,
            "group": trainer.name,
            "staleness": trainer.policy.staleness,
            "seed": seed,
        }
        self.shards = trainer.shards
        self._twice = trainer.copies > 1
        placed = find_places(trainer, compiler)
        self.holders = holders_at(trainer, placed)
        self.task_of = [placed[name_of(shard.step)].host for shard in self.shards]
        self._tasks = self.holders.tasks
        told = trainer.held, [shard.step for shard in self.shards]
        self.home_of = {name_of(variable): placed[name_of(variable)].host for each in told for variable in each}
        self.towers: dict[int, _Tower] = {}
        self._applies: dict[str, tuple[int, Plan]] = {}
        self._gathers: dict[tuple[str, frozenset[str]], int] = {}  # by task, and the tasks whose tables it is for

    async def make(self) -> None:
        """Give each node that is there its plans, if it has none."""
        lost, gone = self._runner.lost, away(self._runner, self._trainer)
        await pipelined(
            self._add_tower(tower)
            for tower in self._trainer.towers
            if tower.node not in gone and tower.replica not in self.towers
        )
        self.towers = dict(sorted(self.towers.items()))
        await self._make_applies([task for task in self._tasks if task not in self._applies and task not in lost])
        asked = next(iter(self.towers.values())).asked
        for task in self._applies:
            for homes in [{task}, {task, self.holders.before(task)}] if self._twice else [{task}]:
                if (task, frozenset(homes)) not in self._gathers:
                    self._gathers[task, frozenset(homes)] = await self._make_gather(task, frozenset(homes), asked)

    @property
    def is_fixed(self) -> bool:
        """Whether nothing of it could be elsewhere: what is lost is then as it was when it is back."""
        there = all(tower.home == tower.built.node for tower in self.towers.values())
        return there and set(self._tasks) <= set(self._trainer.servers)

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────────────────

    def program(self, gone: frozenset[str], packing: PackingChoice) -> Program:
        """The program of a run whose servers are on the tasks that are not ``gone``."""
        trainer, run = self._trainer, _Servers(self, gone)
        replicas = tuple(self.towers[t.replica].home if t.replica in self.towers else t.node for t in trainer.towers)
        gradients = [self._gradients(trainer.towers[0], run, task) for task in run.tasks]
        begin_servers = tuple(
            [
                packing.of_server(self._begin_server(run, number, replicas), each)
                for number, each in enumerate(gradients)
            ]
        )
        begin_replicas = [
            packing.of_replica(self._begin_replica(run, self.towers[t.replica]), gradients)
            if t.replica in self.towers
            else None
            for t in trainer.towers
        ]
        looks = tuple(Look(trainer.container, trainer.name, self._steps(run.told_by(task))) for task in run.tasks)
        sizes = {name_of(variable): variable.spec.nbytes for variable in trainer.held}
        nbytes = sum(sizes.get(name, 0) for told in run.values for name in told)
        return Program(run.tasks, looks, begin_servers, replicas, tuple(begin_replicas), nbytes)

    def _steps(self, shards: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.shards[s].step.name for s in shards)

    def own(self, task: str) -> list[int]:
        """The trainer's servers that lie on a task."""
        return [server for server, where in enumerate(self.task_of) if where == task]

    def held(self, task: str) -> list[int]:
        """The trainer's servers that a task has the variables of."""
        return [*self.own(task), *(self.own(self.holders.before(task)) if self._twice else ())]

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fed(self) -> list[Tensor]:
        """What applying is fed."""
        return [*(part for s in self.shards for member in s.parts for part in member), self._trainer.version]

    async def _make_applies(self, tasks: Sequence[str]) -> None:
        """Make what moves the variables that are held on each of ``tasks``."""
        if self._twice:
            await pipelined(map(self._add_apply, tasks))
        elif tasks:
            plans = self._compile_held([], [shard.apply for shard in self.shards], self._fed(), ends=Ends.USED).plans
            if others := sorted(plans.keys() - set(self._tasks)):
                raise self._elsewhere(others, f"none of its servers {', '.join(self._tasks)} is; place that on one of")
            number = await self._runner.install(plans)
            self._applies = {task: (number, plan) for task, plan in plans.items()}

    async def _add_apply(self, task: str) -> None:
        """Make what moves the variables of a task, and those of another that it holds too."""
        applies = [self.shards[server].apply for server in self.held(task)]
        plans = self._compile_held([], applies, self._fed(), ends=Ends.USED, stand_ins=self._as_if(task)).plans
        if others := sorted(plans.keys() - {task}):
            raise self._elsewhere(others, f"copies={self._trainer.copies} has no copy of it; place that beside all of")
        self._applies[task] = await self._runner.install(plans), plans[task]

    def _as_if(self, task: str) -> StandIns:
        """A task in place of the one whose variables it holds too."""
        return {self.holders.before(task): (StandIn(task, frozenset(self._trainer.graph.resources)),)}

    def guide(self, task: str, gone: frozenset[str]) -> Guide:
        """How a task comes to hold what it should, while the servers of a run that are not ``gone`` go on."""
        run, holders = _Servers(self, gone), self.holders
        led: dict[str, list[str]] = {}  # by who leads: whose variables it tells
        for home, leader in ((task, holders.after(task)), (holders.before(task), holders.before(task))):
            led.setdefault(leader, []).append(home)
        leaders = [
            Leading(
                leader,
                tuple([(name, spec) for home in homes for name, (spec, _) in holders.variables[home].items()]),
                run.parts(leader, [server for home in homes for server in self.own(home)]),
            )
            for leader, homes in led.items()
        ]
        number, plan = self._applies[task]
        about = self._common["container"], self._common["group"]
        applied = self._applied(task, self.held(task), plan)
        parts = [part.spec for server in self.held(task) for part in self.shards[server].parts[0]]
        dense = sum(part.nbytes for part in parts if part.dims is not None and None not in part.dims)
        return Guide(task, *about, tuple(leaders), number, applied, self._common["seed"], dense)

    def _elsewhere(self, others: Sequence[str], why: str) -> GraphError:
        return GraphError(
            f"the updates of {self._trainer.name!r} need what lies on {', '.join(others)}, where {why} them, by "
            "fr.device"
        )

    def _begin_server(self, run: _Servers, number: int, replicas: tuple[str, ...]) -> Callable[..., BeginServer]:
        task, measures = run.tasks[number], self._trainer.policy.measures
        shards = run.on(task)
        apply, plan = self._applies[task]
        asked = next(iter(self.towers.values())).asked
        combined = [tuple(self.shards[server].combined) for server in shards]
        return partial(
            BeginServer,
            server=number,
            servers=run.tasks,
            replicas=replicas,
            policy=policy_to_data(self._trainer.policy),
            floor=self._trainer.floor,
            apply=apply,
            applied=self._applied(task, shards, plan),
            combined=tuple(rows for parts in combined for rows in parts),
            versions=self._steps(shards),
            measures=measures,
            counted=sum(len(parts) for parts, server in zip(combined, shards, strict=True) if run.tells(task, server)),
            values=run.values[number],
            gather=self._gathers[task, run.homes(task)] if self._gathers_on(run, task, asked) else -1,
            keeps=self._twice,
            together=together(self._trainer.policy, self._trainer.replicas, self._trainer.floor),
            **self._common,
        )

    def _applied(self, task: str, shards: Sequence[int], plan: Plan) -> tuple[tuple[int, int], ...]:
        """What the plan that applies updates is fed on a task."""
        members = range(len(self.shards[0].parts))
        known = {self._trainer.version.op.name: (-1, -1)}
        for member in members:
            parts = [part for server in shards for part in self.shards[server].parts[member]]
            known |= {part.op.name: (member, place) for place, part in enumerate(parts)}
        if foreign := [feed.name for feed in plan.feeds if feed.name not in known]:
            raise GraphError(f"{foreign[0]!r}, the mean of another server's gradients, is used on {task}")
        return tuple(known[feed.name] for feed in plan.feeds)

    async def _make_gather(self, task: str, homes: frozenset[str], asked: Asked) -> int:
        """What takes, on a task, the rows that a tower asks for of tables that are at home on ``homes``."""
        gathers = [gather for gather in asked.gathers if self.home(gather.table) in homes]
        if not gathers:
            return -1
        feeds, standing = [asked.values[i] for i in asked.wants(gathers)], {}
        if self._twice:
            standing = {"stand_ins": self._as_if(task)}
        compiled = self._compile_held([g.rows for g in gathers], [], feeds, ends=Ends.FETCHED, **standing)
        return await self._install(compiled, task)

    def home(self, variable: Any) -> str:
        """The task that a variable is at home on."""
        return self.home_of[name_of(variable)]

    def _gathers_on(self, run: _Servers, task: str, asked: Asked) -> list[Gather]:
        return [gather for gather in asked.gathers if run.teller(self.home(gather.table)) == task]

    async def _install(self, compiled: Compiled, task: str = "") -> int:
        home = task or compiled.home
        if strange := [(node, other) for other, plan in compiled.plans.items() if other != home for node in plan.nodes]:
            node, other = next((one for one in strange if one[0].site), strange[0])
            raise GraphError(
                f"what {self._trainer.name!r} computes on {home} needs {node.where()}, which lies on {other}; loss_fn "
                "reads variables, and the optimiser alone moves them: answer what else is to be kept as a metric, and "
                "assign it in the loop's body"
            )
        return await self._runner.install(compiled.plans)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, tower: Tower) -> Asked:
        """What a tower has servers gather; nothing where its plans are to be as the program says."""
        inputs = tuple(tower.inputs.values())
        if tower.local is not None:
            return Asked.of(inputs, ())  # it takes rows of its own copies
        tables = self._trainer.held if self._optimize else []
        on_servers = [table for table in tables if self.home(table) in self._tasks]
        return Asked.of(inputs, find_gathers(_fetches(tower), inputs, on_servers))

    def _reads(self, tower: Tower, asked: Asked) -> dict[Name, Tensor]:
        """What a tower reads of variables that lie on servers, by their names."""
        local = tower.local
        fetches, targets = (_fetches(tower), ()) if local is None else (_parts(tower), local.load)
        step = prune(self._trainer.graph, fetches, targets, asked.feeds)
        reads = reads_of(fold_constants(step, evaluate) if self._optimize else step)
        found = {read.op.resources[0]: read for read in reads}
        return {name: read for name, read in found.items() if self.home_of.get(name) in self._tasks}

    def _compile_tower(self, tower: Tower, asked: Asked, reads: Sequence[Tensor]) -> Compiled:
        """What computes with one batch: an update, or one local step, which reads nothing of servers."""
        if tower.local is None:
            return self._compile(_fetches(tower), [], [*asked.feeds, *reads], ends=Ends.FETCHED)
        return self._compile(_fetches(tower), [tower.local.step], asked.feeds, ends=Ends.FETCHED)

    async def _add_tower(self, tower: Tower) -> None:
        asked = self._asked(tower)
        reads = self._reads(tower, asked)
        known = {name for other in self.towers.values() for name in other.reads}
        if self._applies and (new := reads.keys() - known):  # those are made, and may tell others already
            raise GraphError(
                f"variable {min(new)[1]!r} is read by one replica of {self._trainer.name!r}, not by others"
            )
        compiled = self._compile_tower(tower, asked, list(reads.values()))
        ask = -1
        if asked.computed:
            wants = self._compile(asked.computed, [], asked.inputs, ends=Ends.FETCHED)
            ask = await self._install(wants, compiled.home)
        made = _Tower(tower, asked, reads, compiled.home, await self._install(compiled), ask)
        self.towers[tower.replica] = made if tower.local is None else await self._make_local(made, tower.local)

    async def _make_local(self, tower: _Tower, local: LocalTower) -> _Tower:
        """A tower with the plans around its local steps."""
        reads, task = list(tower.reads.values()), tower.home
        load = self._compile([], local.load, reads, ends=Ends.USED)
        differ = self._compile([*_update(tower.built), local.finite], local.mark, reads, ends=Ends.FETCHED)
        start, merge = (
            self._compile([], nodes, fed, ends=Ends.USED) if nodes else None
            for nodes, fed in ((local.start, ()), (local.merge, reads))
        )
        return replace(
            tower,
            start=-1 if start is None else await self._install(start, task),
            load=await self._install(load, task),
            loaded=tuple([feed.name for feed in load.plans[task].feeds]),
            differ=await self._install(differ, task),
            merge=-1 if merge is None else await self._install(merge, task),
        )

    def _begin_replica(self, run: _Servers, made: _Tower) -> Callable[..., BeginReplica]:
        trainer, tower = self._trainer, made.built
        parts = _parts(tower)
        order = {id(part): i for i, part in enumerate(parts)}
        checks = [server for server, finite in enumerate(tower.finite) if finite is not None]  # behind the parts
        return partial(
            BeginReplica,
            replica=tower.replica,
            replicas=trainer.replicas,
            servers=run.tasks,
            plan=made.plan,
            told=len(_told(tower)),
            parts=tuple(
                tuple(order[id(part)] for part in parts_of(self._gradients(tower, run, task))) for task in run.tasks
            ),
            finite=tuple(
                tuple(len(parts) + place for place, server in enumerate(checks) if server in run.on(task))
                for task in run.tasks
            ),
            measured=self._measured(run, tower),
            **self._feeds(run, made),
            **self._local(run, made),
            **self._common,
        )

    def _gradients(self, tower: Tower, run: _Servers, task: str) -> list[Gradient]:
        """Those of a tower that are for a server."""
        pairs = (pair for server in run.on(task) for pair in self._trainer.gradients_of(tower, server))
        return [gradient for gradient, _ in pairs]

    def _feeds(self, run: _Servers, made: _Tower) -> dict[str, Any]:
        """What a tower is fed, and what it asks for."""
        asked = made.asked
        feeds, rows = [(-1, i) for i in range(len(asked.values))], [len(told) for told in run.values]
        for gather in asked.gathers:
            server = run.tasks.index(run.teller(self.home(gather.table)))
            feeds.append((server, rows[server]))
            rows[server] += 1
        feeds += [run.told(name) for name in (made.reads if made.built.local is None else ())]
        wants = tuple(asked.wants(self._gathers_on(run, task, asked)) for task in run.tasks)
        return {"feeds": tuple(feeds), "ask": made.ask, "wants": wants}

    def _local(self, run: _Servers, made: _Tower) -> dict[str, Any]:
        """The plans around local steps, and what they are fed."""
        if made.built.local is None:
            return {}
        told = {read.op.name: run.told(name) for name, read in made.reads.items()}
        return {
            "steps": self._trainer.local_steps,
            "start": made.start,
            "load": made.load,
            "loaded": tuple([told[name] for name in made.loaded]),
            "differ": made.differ,
            "differed": tuple(told.values()),
            "overlap": self._trainer.overlap,
            "merge": made.merge,
        }

    def _measured(self, run: _Servers, tower: Tower) -> tuple[tuple[bool, ...], ...]:
        """For each server, which of its parts are of rows, of those whose squares count; nothing where none do."""
        if not self._trainer.policy.measures:
            return ()
        return tuple(
            tuple(
                rows
                for server in run.on(task)
                if run.tells(task, server)
                for rows in of_rows(gradient for gradient, _ in self._trainer.gradients_of(tower, server))
            )
            for task in run.tasks
        )


class _Servers:
    """Who does what in a run whose servers are on the tasks that are not ``gone``.

    What is at home on a task that is gone is told by the one that holds it too. A task is first of what it tells, then
    of what it holds beside that.
    """

    def __init__(self, maker: ProgramParts, gone: frozenset[str]) -> None:
        self._maker, self._gone = maker, gone
        self.tasks = tuple(task for task in maker.holders.tasks if task not in gone)
        read = dict.fromkeys(name for tower in maker.towers.values() for name in tower.reads)
        self.values = [tuple(n for n in read if self.teller(maker.home_of[n]) == task) for task in self.tasks]
        self._told = {name: (s, place) for s, told in enumerate(self.values) for place, name in enumerate(told)}

    def teller(self, home: str) -> str:
        """The task that tells what is at home on one."""
        return self._maker.holders.after(home) if home in self._gone else home

    def tells(self, task: str, server: int) -> bool:
        """Whether a task tells what one of the trainer's servers has."""
        return self.teller(self._maker.task_of[server]) == task

    def homes(self, task: str) -> frozenset[str]:
        """Those of whose variables a task tells."""
        return frozenset(home for home in self._maker.holders.tasks if self.teller(home) == task)

    def on(self, task: str) -> list[int]:
        """The trainer's servers that a task has the variables of."""
        return sorted(self._maker.held(task), key=lambda server: not self.tells(task, server))

    def parts(self, task: str, servers: Sequence[int]) -> tuple[int, ...]:
        """Where the parts of some of the trainer's servers are in an update that comes to a task."""
        places, count = dict[int, range](), 0
        for server in self.on(task):
            places[server] = range(count, count + len(self._maker.shards[server].parts[0]))
            count = places[server].stop
        return tuple(place for server in servers for place in places[server])

    def told_by(self, task: str) -> list[int]:
        """Those of the trainer's servers whose variables a task tells."""
        return [server for server in self.on(task) if self.tells(task, server)]

    def told(self, name: Name) -> tuple[int, int]:
        """Which server tells a variable's value, and where among its values."""
        return self._told[name]


def _fetches(tower: Tower) -> list[Tensor]:
    """What is fetched of what computes with one batch."""
    return [*_told(tower), *(_update(tower) if tower.local is None else ())]


def _told(tower: Tower) -> list[Tensor]:
    """What reports tell the means of."""
    return [tower.loss, *tower.metrics.values(), *([] if tower.skips is None else [tower.skips])]


def _update(tower: Tower) -> list[Tensor]:
    """Its update: the parts, and whether those of each server that has any are finite."""
    return [*_parts(tower), *(finite for finite in tower.finite if finite is not None)]


def _parts(tower: Tower) -> list[Tensor]:
    return parts_of(gradient for gradient, _ in tower.gradients)


def away(runner: Runner, trainer: Built) -> frozenset[str]:
    """The tasks that are lost, and, where enough replicas are left without them, those that are suspect."""
    lost, suspects = runner.lost, runner.suspects
    left = trainer.replicas - len(where_lost(trainer.nodes, lost | suspects))
    return lost | suspects if left >= trainer.least else lost


def births_of(runner: Runner, tasks: Sequence[str]) -> tuple[str, ...]:
    """Which process each of ``tasks`` is; empty of one that nobody can name."""
    births = runner.births
    return tuple([births.get(task, "") for task in tasks])


def where_lost(tasks: Sequence[str], lost: frozenset[str]) -> list[int]:
    """Which of ``tasks`` are among those that are ``lost``."""
    return [number for number, task in enumerate(tasks) if task in lost]
