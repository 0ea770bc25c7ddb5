"""Variables of a trainer's servers that are held twice: who has them, who stands in, and how a node gets them again.

Law: a task is *whole* while it is known to hold what it should: its own variables, and those of the task before it. One
that was lost is whole again only once it was given both, whatever it may still have. While it is not, the task after it
stands in for it, if that is whole. Between two runs nothing moves, so that is when variables are copied, from node to
node; and that copies are equal is proved by their versions and hashes, not believed, where nobody here made them.
What one that is left out has made or not is decided once the others agree where to begin without it: should that run
not begin, it is of the next one only if it is at just that version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import FlowrtError, NodeLost, RemoteError
from flowrt.base.plan import Plan, PlanNode
from flowrt.finishing import pipelined, together
from flowrt.passes import Client, Compiled, StandIn, StandIns
from flowrt.sched.drivers.following import FollowNobody
from flowrt.sched.drivers.inquiries import Hash, Lacking, Look
from flowrt.sched.drivers.messages import Stop
from flowrt.sched.runs.iterations import left_from_data
from flowrt.session.cluster_runner import PATIENCE
from flowrt.train.following import Following

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.sched.versions.opening import Left
    from flowrt.session.session import Session
    from flowrt.train.built import Built
    from flowrt.train.holding import Guide, Holders, Name

Versions: TypeAlias = dict[str, int | None]  # by task; None where it has none
Lead: TypeAlias = "Callable[[str, frozenset[str]], Awaitable[Guide]]"
AT_ONCE_BYTES = 16 << 20  # that are copied between two runs, in some 20 ms; more of them while steps go on
REST_SECONDS = 1.0  # for which a run waits for a server that was left out to end the one before
_log = logging.getLogger(__name__)


class Copies:
    """The variables of ``trainer`` on the nodes of ``session``, which ``holders`` hold: a `CopyKeeper`.

    ``lead`` says how a task comes to hold what it should, of those that are not gone: see `ProgramParts.guide`.
    """

    def __init__(self, session: Session, trainer: Built, holders: Holders, lead: Lead) -> None:
        self.trainer, self.tasks = trainer, holders.tasks
        self._session, self._holders, self._lead = session, holders, lead
        self._runner = session._open_here()
        self._runner.keepers.append(self)
        self._whole: dict[str, int] = {}  # by task: how often it had been lost when it was made whole
        self._made = self._whole  # what that is once a run begins with those that were made whole last
        self._parted: set[str] = set()  # those that a run was to begin without, while it is not known to have begun
        self._agreed = 0  # the version that the others were at
        self._out: frozenset[str] = frozenset()  # those that had not what they should as the session opened
        self._twice: frozenset[str] = frozenset()  # those of which others had a copy then
        self._any = False  # somebody has something
        self._lacking: dict[str, tuple[int, frozenset[str]]] = {}  # by task: who lacks something, as that one knows
        self._wrote = False  # something was written without them before a run began
        self._losses: Mapping[str, int] = {}  # how often each had been lost when they were asked what they have
        self.missing: tuple[str, ...] = ()  # tasks whose variables nobody has any more
        self.moving = False  # variables may move at any time
        self.runs: set[int] = set()  # that this session began
        self.newest = 0  # of them
        self._telling: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()  # of those
        self._following: dict[str, Following] = {}  # by task that is to be made whole while the others go on
        self._rest: frozenset[str] = frozenset()  # those that do nothing of a run, as the next one begins
        self.doubtful = False  # something was written while they moved, which copies may have otherwise

    # ── who has what ─────────────────────────────────────────────────────────────────────────────────────────────────

    def is_whole(self, task: str) -> bool:
        """Whether a task is known to hold what it should."""
        runner, whole = self._runner, self._whole.get(task)
        return whole is not None and task not in runner.lost and runner.losses.get(task, 0) == whole

    @property
    def whole(self) -> tuple[str, ...]:
        """The tasks that hold what they should, and cannot be done without."""
        frozen = self.frozen
        return tuple(task for task in self.tasks if self.is_whole(task) and task not in frozen)

    @property
    def frozen(self) -> frozenset[str]:
        """The tasks that are suspect, and can be done without: what each of them has, others have that answer."""
        if not self._whole:
            return frozenset()
        silent, after, before = self._runner.suspects, self._holders.after, self._holders.before
        out = set(self.gone)
        frozen = silent.intersection(out)
        for task in [task for task in self.tasks if task in silent]:
            if after(task) not in silent and out.isdisjoint((task, after(task), before(task))):
                out.add(task)
                frozen |= {task}
        return frozen

    @property
    def _away(self) -> frozenset[str]:
        return self._runner.lost | self.frozen

    @property
    def gone(self) -> frozenset[str]:
        """The tasks that are not whole."""
        return frozenset(task for task in self.tasks if not self.is_whole(task))

    @property
    def known(self) -> bool:
        """Whether it is known who is whole: a run has begun."""
        return bool(self._whole)

    @property
    def survive(self) -> bool:
        """Whether all that is held is still held by a task that is whole."""
        return bool(self._whole) and all(
            self.is_whole(task) or self.is_whole(self._holders.after(task)) for task in self.tasks
        )

    # ── as the session opens ─────────────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Find out who has not what it should: until a run begins, others stand in for those.

        Where they cannot, or nobody has anything, who is not there yet is waited for, as it may have all.
        """
        tasks, runner = self.tasks, self._runner
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while not await self._find_out() and not runner.lost.isdisjoint(tasks):
                    await runner.wait_changed(runner.lost, runner.suspects)

    async def _find_out(self) -> bool:
        """Answers whether all is there, once it was given values."""
        try:
            await self.find_gone()
        except NodeLost:
            if not self.missing:
                raise
            self._out, self.missing = frozenset(), ()
            return False  # it is to be restored, or no run can begin
        return self._any

    # ── those that are back ──────────────────────────────────────────────────────────────────────────────────────────

    def bring_back(self) -> bool:
        """Have tasks that are there and not whole follow the others; answers whether one of them may take part again.

        That is once it has caught up, or cannot, in a run that is begun for it.
        """
        if not self.survive:
            return False
        back, losses = self.gone - self._away, self._runner.losses
        for task in [t for t, known in self._following.items() if t not in back or known.losses != losses.get(t, 0)]:
            self._let_go(self._following.pop(task))
        small = {task for task in back if self._is_small(task)}
        for task in back - small - self._following.keys():
            self._following[task] = Following(self._runner, task, self.newest, self._guide, self._leaders_at)
        return self.doubtful or bool(small) or any(following.done for following in self._following.values())

    def _is_small(self, task: str) -> bool:
        """Whether what a task should hold is copied between two runs in no time that matters."""
        held = (self._holders.variables[each] for each in (task, self._holders.before(task)))
        return sum(spec.nbytes for variables in held for spec, _ in variables.values()) <= AT_ONCE_BYTES

    async def _guide(self, task: str) -> Guide:
        """How a task follows, once it does nothing of a run any more."""
        await self._version_at_rest(task)
        return await self._lead(task, self.gone)

    async def _leaders_at(self, tasks: Sequence[str]) -> int:
        """The newest version that tasks are at."""
        return max([await self._version(task, self._holders.steps[task]) or 0 for task in tasks])

    def _let_go(self, *following: Following) -> None:
        """Have those end that follow, for which nobody waits."""
        for each in following:
            self._ending.add(ending := asyncio.ensure_future(each.end()))
            ending.add_done_callback(self._ending.discard)

    async def follow_no_more(self) -> None:
        """Nobody follows: no run goes on, or what they follow is written by others."""
        following = list(self._following.values())
        self._following.clear()
        self._let_go(*following)
        if self._ending:
            await asyncio.wait(set(self._ending))

    def stand_ins(self) -> StandIns:
        """See `CopyKeeper.stand_ins`."""
        lost, after = self._away, self._holders.after
        return {
            task: (StandIn(after(task), frozenset(self._holders.variables[task]), task in lost),)
            for task in (self.gone if self._whole else self._without)
            if self._has_all(after(task))
        }

    def _has_all(self, task: str) -> bool:
        """Whether a task has what it should, as far as is known."""
        return self.is_whole(task) if self._whole else task not in self._without | self._runner.lost

    @property
    def _without(self) -> frozenset[str]:
        """Before a run begins, those that had not what they should as the session opened, or were lost since."""
        losses, before = self._runner.losses, self._losses
        return self._out | {task for task in self._twice if losses.get(task, 0) > before.get(task, 0)}

    async def forget(self) -> None:
        """Variables are to be restored, where they are at home: nobody stands in for anybody."""
        await self.follow_no_more()
        self._whole.clear()
        self._out = self._twice = frozenset()

    async def spread(self) -> None:
        """Have all be held twice as it is at home, where it was restored: copies may be of versions that are undone."""
        await together(self._make_equal(task, self._holders.after(task)) for task in self.tasks)
        await self._tell_lacking(frozenset())

    # ── where a run begins ───────────────────────────────────────────────────────────────────────────────────────────

    async def find_gone(self) -> frozenset[str]:
        """The tasks that have not what they should; of each of these, the task after it has it.

        Raises `NodeLost` where nobody has it.
        """
        without = self._without if self._wrote else frozenset()
        lost, self._losses = self._away, dict(self._runner.losses)
        known = {task for task in self.tasks if self.is_whole(task)}
        for task in sorted(lost - self._runner.lost):
            self.tell_to_end(task, self.newest)
        own, copied = await self._ask_versions([task for task in self.tasks if task not in lost], known)
        self._rest = frozenset(own)
        self._any = any(version is not None for held in (own, copied) for version in held.values())
        lacking = self._said_to_lack(own)
        for task in lacking:  # whatever it has is not what counts
            own[task] = copied[task] = None
        after = self._holders.after
        self._twice = frozenset(task for task in own if own[task] == copied.get(after(task)) is not None)
        stale = {task for task in own if task not in known and (self._whole or task in without)}
        if not (stale or lacking) and all(version is None for version in own.values()):
            self._out = lost.intersection(self.tasks)
            return self._out  # nobody has any: that is `agree`'s to say
        gone = {task for task in self.tasks if own.get(task) is None} | stale | self._left_behind(own, copied)
        self._check_held(gone, copied)
        self._out = frozenset(gone)
        return self._out

    async def _ask_versions(self, tasks: Sequence[str], known: Collection[str]) -> tuple[Versions, Versions]:
        """What versions tasks have of what is theirs, and of what is the task's before them. Those ``known`` are whole.

        One that was left out, and does not come to rest, has none: it is left out again.
        """
        own, copied = Versions(), Versions()

        async def ask(task: str) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(REST_SECONDS if self._whole and task not in known else None):
                    version = await self._version_at_rest(task)
                    copied[task] = await self._version(task, self._holders.steps[self._holders.before(task)])
                    own[task] = version

        await pipelined(map(ask, tasks))
        return own, copied

    def _left_behind(self, own: Versions, copied: Versions) -> set[str]:
        """The tasks that were silent, or away, while another client trained, or this one without them."""
        known = [version for held in (own, copied) for version in held.values() if version is not None]
        newest, found = max(known, default=0), set[str]()
        for task in self.tasks:
            mine, other = own.get(task), copied.get(self._holders.after(task))
            if mine is not None and other is not None and mine < newest - 1 <= other:
                found.add(task)
            if task in self._parted and mine != self._agreed:  # what it has made or not is decided without it
                found.add(task)
        return found

    def _check_held(self, gone: Collection[str], copied: Versions) -> None:
        """Raise `NodeLost` where nobody has what one of those that are ``gone`` should hold."""
        after = self._holders.after
        self.missing = tuple(sorted(task for task in gone if after(task) in gone or copied.get(after(task)) is None))
        if self.missing:
            raise NodeLost(
                f"the variables of {self.trainer.name!r} on {', '.join(self.missing)} are lost: neither they nor "
                f"{', '.join(map(after, self.missing))} have them"
            )

    async def _version_at_rest(self, task: str) -> int | None:
        """As `_version`, of what is at home on a task, once it does nothing of a run that this session began."""
        while True:
            version, left = await self._look(task, self._holders.steps[task])
            if left is None or left.ended or left.run not in self.runs:
                return version
            await self._runner.command(task, Stop(left.run, at_once=True))

    async def _version(self, task: str, steps: tuple[str, ...]) -> int | None:
        """What version variables have on a task; None where one has no value."""
        version, _ = await self._look(task, steps)
        return version

    async def _look(self, task: str, steps: tuple[str, ...]) -> tuple[int | None, Left | None]:
        look = Look(self.trainer.container, self.trainer.name, steps)
        version, left, (number, lacking) = await self._runner.command(task, look)
        self._lacking[task] = number, frozenset(lacking)
        return None if version < 0 else int(version), left_from_data(left)

    def _said_to_lack(self, tasks: Iterable[str]) -> frozenset[str]:
        """The tasks of which the newest that is known of ``tasks`` says that they have not all that was written."""
        said = [self._lacking[task] for task in tasks if task in self._lacking]
        newest = max((number for number, _ in said), default=0)
        return frozenset(task for number, lacking in said if number == newest for task in lacking)

    async def _tell_lacking(self, lacking: frozenset[str]) -> None:
        """Have those that lack nothing know who does, which others ask them that come once that one is back."""
        know = [task for task in self.tasks if task not in lacking | self._runner.lost]
        if all(self._lacking.get(task, (0, frozenset()))[1] == lacking for task in know):
            return
        number = 1 + max((number for number, _ in self._lacking.values()), default=0)
        told = Lacking(self.trainer.container, self.trainer.name, number, tuple(sorted(lacking)))

        async def tell(task: str) -> None:
            with suppress(NodeLost):  # it has nothing any more
                await self._runner.command(task, told)
                self._lacking[task] = number, lacking

        await together(map(tell, know))

    def agreed(self, version: int, gone: frozenset[str]) -> None:
        """Those that are not ``gone`` are at ``version``: a run is to begin there, be the others elsewhere."""
        self._agreed = version
        self._parted |= gone

    async def make_whole(self, gone: frozenset[str]) -> frozenset[str]:
        """Give each task that is there what it should hold; answers those that are not.

        Those that are not ``gone`` are at one version, with what the ones that are should have. What this comes to
        counts once a run `began`: until then no version is made, and who was whole before still is.
        """
        runner, before = self._runner, self._holders.before
        losses = dict(runner.losses)
        again = {task for task in self.tasks if losses.get(task, 0) > self._losses.get(task, 0)}  # it came with nothing
        away = runner.lost | again | (gone & runner.suspects)
        there = set(self.tasks) & self._rest - away
        known = {task for task in there - gone if self.is_whole(task) and not self.doubtful}
        come = {task for task in there & gone & self._following.keys() if await self._arrives(task)}
        await self.follow_no_more()
        at_home = {task: asyncio.Event() for task in self.tasks if task in there & gone - come}  # once that was copied

        async def give(work: Coroutine[Any, Any, None], *tasks: str) -> None:
            """Copy something between tasks, of which those are left out that are lost again."""
            try:
                await work
            except RemoteError:
                again = {task for task in gone.intersection(tasks) if self._was_lost(task, losses)}
                if not again:
                    raise
                there.difference_update(again)

        async def take(task: str) -> None:
            await runner.command(task, FollowNobody(self.trainer.container, self.trainer.name))
            await self._copy(self._holders.variables[task], self._holders.after(task), task)

        async def restore(task: str) -> None:
            try:
                await give(take(task), task)
            finally:
                at_home[task].set()

        async def hold(task: str) -> None:
            for each in at_home.keys() & {before(task), task}:
                await at_home[each].wait()
            if before(task) in there:
                await give(self._make_equal(before(task), task), before(task), task)

        held = [hold(task) for task in self.tasks if task in there - known - come]
        await together([*map(restore, at_home), *held])
        if short := [task for task in self.tasks if task not in there and self._holders.after(task) not in there]:
            raise NodeLost(f"{', '.join(short)} was lost as another server was left out")
        await self._tell_lacking(frozenset(self.tasks) - there)
        self._made = {task: losses.get(task, 0) for task in there}
        self.doubtful = False
        return frozenset(self.tasks) - there

    def _was_lost(self, task: str, losses: Mapping[str, int]) -> bool:
        """Whether a task is lost, or was more often than that."""
        return task in self._runner.lost or self._runner.losses.get(task, 0) > losses.get(task, 0)

    async def _arrives(self, task: str) -> bool:
        """Whether a task that followed holds all that it should where a run is to begin."""
        return await self._following.pop(task).arrive(self._agreed)

    def begins(self, run: int) -> None:
        """A run is about to begin with those that were made whole."""
        self.runs.add(run)
        self.newest = run

    def began(self) -> None:
        """It has begun: versions may be made from now on, without those that are not whole."""
        self._whole, self._parted, self._out = self._made, set(), frozenset()

    async def _make_equal(self, task: str, other: str) -> None:
        """Have another task hold what a task does, too."""
        variables = self._holders.variables[task]
        ask = Hash(tuple(variables))
        others = await self._runner.command(other, ask)
        if not others or others != await self._runner.command(task, ask):
            _log.info("%s: %s copies what %s holds", self.trainer.name, other, task)
            await self._copy(variables, task, other)

    def tell_to_end(self, task: str, run: int) -> None:
        """Have a task that answers nothing end a run once it answers again, unless it is lost or the session ends."""
        if task not in self._telling:
            self._telling[task] = asyncio.ensure_future(self._tell_to_end(task, run))

    async def _tell_to_end(self, task: str, run: int) -> None:
        try:
            with suppress(FlowrtError):
                await self._runner.command(task, Stop(run, at_once=True))
        finally:
            del self._telling[task]

    # ── copying ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def will_write(self, names: frozenset[Name]) -> None:
        """See `CopyKeeper.will_write`."""
        held, before = self._holders.variables, self._holders.before
        out = self.gone if self._whole else self._without
        lacking = {task for task in out if not names.isdisjoint(held[task].keys() | held[before(task)].keys())}
        if lacking:
            await self._tell_lacking(self._said_to_lack(self.tasks) | lacking)

    async def copy_written(self, names: frozenset[Name]) -> None:
        """See `CopyKeeper.copy_written`. What moves meanwhile is made equal before the next run."""
        if all(
            names.issuperset(held) for held in self._holders.variables.values()
        ):  # as is restored: nobody lacks what was before
            await self._tell_lacking(self.gone if self._whole else self._without)
        if not (self._whole or self._any):
            return  # nobody has a copy yet, which the first run makes
        await self.follow_no_more()
        self._wrote |= any(not names.isdisjoint(self._holders.variables[task]) for task in self._without)
        self.doubtful |= self._made is not self._whole  # who was made whole just now is not known as such
        for task, variables in self._holders.variables.items():
            other = self._holders.after(task)
            written = {name: variables[name] for name in names & variables.keys()}
            if not (written and self._has_all(task) and self._has_all(other)):
                continue
            self.doubtful |= self.moving
            try:
                await self._copy(written, task, other)
            except RemoteError:
                if not self._has_all(task) or not (self._whole or other in self._runner.lost):
                    raise
                self.doubtful = True  # the other one is lost, or was not reached: it is made equal before the next run
                await self._tell_lacking(self._said_to_lack(self.tasks) | {other})

    async def _copy(self, variables: Mapping[Name, tuple[Spec, str]], task: str, other: str) -> None:
        """Copy variables from one task to another, from node to node; those that tell the version last.

        So that who looks at what a copy left that was cut off finds a task that has no version yet.
        """
        runner, session = self._runner, self._session
        steps = frozenset(name for names in self._holders.steps.values() for name in names)
        ordered = dict(sorted(variables.items(), key=lambda item: item[0][1] in steps))
        copying = _copying(ordered, sum(name not in steps for _, name in ordered), task, other)
        registered = await runner.register(Compiled(copying, Client("", (), ())))
        try:
            await runner.run(registered, [], number=session._numbers.aside(), seed=0)
        finally:
            await runner.unregister(registered)


def _copying(variables: Mapping[Name, tuple[Spec, str]], first: int, task: str, other: str) -> dict[str, Plan]:
    """Plans that send variables from one task, and make them those of another: so many ``first``, then the others."""
    sends: list[PlanNode] = []
    takes: list[PlanNode] = []
    for edge, ((container, name), (spec, device)) in enumerate(variables.items()):
        kind = {"dtype": spec.dtype.name, "shape": spec.dims}
        held: dict[str, Any] = {"resource": name, "container": container, **kind}
        read = PlanNode("read_variable", f"{name}/copied", (), (spec,), {**held, "fresh": False}, (), device)
        sends += [read, PlanNode("send", f"{name}/sent", (edge,), (), {"edge": edge, "peer": other})]
        takes.append(PlanNode("recv", f"{name}/came", (), (spec,), {"edge": edge, "peer": task, **kind}))
        before = tuple(range(1, 2 * first, 2)) if edge >= first else ()
        takes.append(PlanNode("assign", f"{name}/copy", (edge,), (), held, before, device))
    return {task: Plan(task, tuple(sends)), other: Plan(other, tuple(takes))}


def copies_known(session: Session, trainer: Built) -> Copies | None:
    """What is known of the variables of ``trainer`` on the nodes of ``session``."""
    known = (keeper for keeper in session._open_here().keepers if isinstance(keeper, Copies))
    return next((copies for copies in known if copies.trainer is trainer), None)
