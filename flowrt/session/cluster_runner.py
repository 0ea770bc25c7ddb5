"""Runs compiled steps on the nodes of a cluster, through their master; and what is done about nodes that come back."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.device import CLIENT, Device
from flowrt.base.errors import (
    FlowrtError,
    GraphError,
    InternalError,
    LinkBroken,
    NodeLost,
    RemoteError,
    path_of,
    user_site,
)
from flowrt.passes.needs import can_do_without
from flowrt.placement import Auto
from flowrt.progress import Activity
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.tracer import now
from flowrt.sched.runs.tracing import note_moved
from flowrt.sched.warming import warm
from flowrt.session.options import check_for_cluster

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from flowrt.base.plan import Plan
    from flowrt.base.spec import Spec
    from flowrt.graph import Graph
    from flowrt.net.door.tls import Keys
    from flowrt.net.master.master import Master
    from flowrt.net.master.meeting import Spares
    from flowrt.passes import Arrangement, Compiled, StandIn, StandIns
    from flowrt.placement import Rules
    from flowrt.sched.host.memory import MemoryStatistics
    from flowrt.sched.host.rendezvous import Listener
    from flowrt.sched.host.tracer import Tracer
    from flowrt.sched.tape.direct import Numbers
    from flowrt.session.inside import Inside
    from flowrt.session.options import Options
    from flowrt.session.runners import Array, CopyKeeper, Name, Registered, Runner

_log = logging.getLogger(__name__)
TRIES = 3  # to give variables their values, as one node or another is lost
PATIENCE = 5.0  # seconds that a node which was lost then is waited for, as one is that starts: see `Master`


class ClusterRunner:
    """Runs steps on the nodes of a cluster, through their master."""

    def __init__(
        self, master: Master, unfollow: Callable[[], None], spares: Spares, *, soft_placement: bool = False
    ) -> None:
        self._unfollow = unfollow  # the cluster, which tells where nodes are that it starts again
        self._spares = spares
        self.client: str | None = CLIENT
        self.tapes, self.soft_placement = True, soft_placement
        self._master = master
        self._compiler = Lanes(1, "compiler")
        self.tracer: Tracer | None = None
        self.helpers = 0, 0
        self._fresh: set[Registered] = set()  # steps that have not run yet
        self.keepers: list[CopyKeeper] = []
        self._stand_ins: StandIns = {}
        self.arrangement: Arrangement | None = None

    @property
    def devices(self) -> Sequence[Device]:
        return self._master.peers.devices

    @property
    def known_devices(self) -> Sequence[Device]:
        return self._master.peers.known_devices

    @property
    def stand_ins(self) -> StandIns:
        now: dict[str, tuple[StandIn, ...]] = {}
        for keeper in self.keepers:
            now |= {task: (*now.get(task, ()), *others) for task, others in keeper.stand_ins().items()}
        self._stand_ins = self._stand_ins if now == self._stand_ins else now
        return self._stand_ins

    @property
    def lost(self) -> frozenset[str]:
        return self._master.peers.lost

    @property
    def losses(self) -> Mapping[str, int]:
        return self._master.peers.losses

    @property
    def births(self) -> Mapping[str, str]:
        return self._master.peers.births

    def why_lost(self, task: str) -> FlowrtError:
        return self._master.peers.why_lost(task)

    def spares(self, tasks: Collection[str]) -> bool:
        return self._spares(tasks, self.devices)

    def expect(self, tasks: Iterable[str]) -> None:
        self._master.peers.expect(tasks)

    @property
    def suspects(self) -> frozenset[str]:
        return self._master.peers.suspects

    @property
    def leaving(self) -> frozenset[str]:
        return self._master.peers.leaving

    async def register(self, compiled: Compiled) -> Registered:
        client = compiled.client
        if client is None:
            raise InternalError("a step for a cluster was compiled without a client")
        feeds = [[(t.edge, t.task) for t in transfers] for transfers in client.feeds]
        fetches = [t if isinstance(t, int) else (t.edge, t.task) for t in client.fetches]
        # here, once, rather than side by side on the nodes of this machine
        await self._compile(list(compiled.plans.values()))
        registered = await self._master.register(compiled.plans, feeds, fetches)
        self._fresh.add(registered)
        return registered

    async def _compile(self, plans: list[Plan]) -> None:
        wanted = [True]
        await self._compiler.run(warm, plans, lambda: bool(wanted), stop=wanted.clear)

    def run(
        self, registered: Registered, feeds: Sequence[Array], *, number: int, seed: int
    ) -> Coroutine[Any, Any, list[Array]]:
        running = self._run_fresh if registered in self._fresh else self._master.run
        if self.tracer is not None:
            return self._run_traced(self.tracer, running(registered, feeds, number=number, seed=seed), number)
        return running(registered, feeds, number=number, seed=seed)

    async def _run_traced(self, tracer: Tracer, run: Coroutine[Any, Any, list[Array]], number: int) -> list[Array]:
        began = now()
        try:
            return await run
        finally:
            tracer.note("step", -1, began, now(), number, track="")

    async def _run_fresh(
        self, registered: Registered, feeds: Sequence[Array], *, number: int, seed: int
    ) -> list[Array]:
        self._fresh.discard(registered)
        with Activity(
            f"waiting for a step's first run, for which nodes may have to compile: {', '.join(registered.tasks)}"
        ):
            return await self._master.run(registered, feeds, number=number, seed=seed)

    async def unregister(self, registered: Registered) -> None:
        await self._master.unregister(registered)

    def run_now(
        self, registered: Registered, feeds: Sequence[Array], number: int, seed: int, within: float
    ) -> list[Array] | None:
        return None

    def direct_plan(
        self, registered: Registered, feeds: Sequence[Array], numbers: Numbers, seed: int, within: float
    ) -> Any:
        return None

    def copy(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def way(self, one: str, other: str) -> str:
        return self._master.way(one, other)

    def held_beside(self, registered: Registered | None) -> int:
        return 0

    def memory(self) -> Mapping[str, MemoryStatistics]:
        raise GraphError(f"{user_site()}: only the memory of this process is known here, and not that of nodes")

    async def statistics(self, within: float) -> Mapping[str, Mapping[str, Any]]:
        return await self._master.statistics(within)

    async def inventory(self, wanted: Collection[Name] | None = None) -> Mapping[tuple[str, str], Spec]:
        return await self._master.inventory(wanted)

    def begin(self, arrays: Mapping[Name, Array], tables: Mapping[Name, Array]) -> Collection[Name]:
        return ()  # they are sent to where they lie

    async def install(self, plans: Mapping[str, Plan]) -> int:
        await self._compile(list(plans.values()))
        return (await self._master.register(plans, (), ())).plan

    async def command(self, task: str, message: Any) -> Any:
        return await self._master.command(task, message)

    def trace(self, tracer: Tracer | None) -> None:
        self.tracer = tracer

    def post(self, task: str, message: Any) -> None:
        if self.tracer is not None:
            note_moved(self.tracer, "post", CLIENT, task, message)
        self._master.post(task, message)

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        return self._master.listeners.listening(listener)

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str]) -> None:
        await self._master.wait_changed(lost, suspects)

    async def reset(self, container: str | None) -> None:
        await self._master.reset(container)

    async def aclose(self) -> None:
        self._unfollow()
        self._compiler.close()
        await self._master.aclose()


async def open_cluster(
    graph: Graph, rules: Rules | None, cluster: Any, name: str, tls: str | os.PathLike[str] | None, options: Options
) -> ClusterRunner:
    """The runner of a session on a `ClusterSpec` or `LocalCluster`; its master is connected to every node that is up.

    It waits for those that ``graph`` needs. ``tls`` is the folder of this side's keys, if not the cluster's own.
    """
    from flowrt.net.master.master import Master  # a session in one process needs no network

    spec = getattr(cluster, "spec", cluster)
    if not hasattr(spec, "tasks"):
        raise GraphError(f"{user_site()}: a session's cluster is an fr.ClusterSpec or fr.LocalCluster, not {cluster!r}")
    check_for_cluster(options)
    tasks = spec.tasks()
    asked = () if rules is None else tuple(tasks) if isinstance(rules, Auto) else tuple(rules.devices.values())
    token, keys = _secrets(cluster, tls)
    spares = partial(can_do_without, graph, asked)
    master = Master(tasks, token, tls=keys, name=name, spares=spares)

    def look(activity: Activity) -> None:
        absent = master.peers.absent
        activity.done, activity.left = len(tasks) - len(absent), f"not up yet {', '.join(absent)}"

    with Activity("waiting for nodes", len(tasks), look=look):
        await master.open()
    return ClusterRunner(master, _follow(cluster, master), spares, soft_placement=options.soft_placement)


async def again_where_lost(runner: Runner, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do ``work``; anew where the way to a node broke, or it was lost, and is spared, or back with nothing of what it
    held."""
    away = runner.lost
    for left in reversed(range(TRIES)):
        try:
            await work()
            return
        except (LinkBroken, NodeLost):
            if not left or not await _are_enough(runner, away):
                raise


async def _are_enough(runner: Runner, away: frozenset[str]) -> bool:
    """Whether all are there but those that were ``away``, or are spared, sooner or later."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (runner.lost <= away or runner.spares(runner.lost)):
                await runner.wait_changed(runner.lost, runner.suspects)
    except TimeoutError:
        return False
    return True


class Comebacks:
    """Looks, where a step failed, whether a node that was lost is back, and holds nothing of what it held.

    It knows which process each task was when all variables had values. While a trainer runs, it is the trainer that
    puts variables back.
    """

    def __init__(self) -> None:
        self._births: Mapping[str, str] = {}
        self._looking = asyncio.Lock()

    def note(self, births: Mapping[str, str]) -> None:
        """All variables have values, on these processes; there are none of a session in one process."""
        self._births = births

    async def look(self, session: Inside, error: FlowrtError, counted: bool) -> None:
        """Raise `NodeLost` if a step of ``session`` failed with ``error`` for a node that is back.

        Where that has lost what it held, and the session has checkpoints, all variables are put back to the newest one
        first, for the steps to come. Steps that are not ``counted`` do not ask for that: opening and restoring do.
        """
        if not (counted and self._births):
            return
        async with self._looking:
            runner = session._open()
            births = runner.births
            back = [task for task, birth in births.items() if self._births.get(task, birth) != birth]
            if not back:
                return
            what = f"{' and '.join(back)} had ended, and is back"
            have = await runner.inventory()
            empty = [key for key in session._held() if key not in have]
            if not empty:
                self._births = births
                if isinstance(error, (RemoteError, InternalError)):
                    raise NodeLost(f"{what}; run the step again") from error
                return
            what += f" without what it held, as the variable {empty[0][1]!r}"
            if session._iterating:
                raise NodeLost(f"{what}; training puts that back: run the step again") from error
            if session.checkpoints is None:
                raise NodeLost(
                    f"{what}; open the session again to begin anew, or give it checkpoints=fr.Checkpoints(path), which "
                    "are then restored"
                ) from error
            try:
                await session.checkpoints.go_back(session)
            except FlowrtError as refused:
                raise NodeLost(f"{what}, and could not be given it: {refused}") from refused
            self._births = births
            restored = f"{what}; all variables are put back to step {session.checkpoints.step}"
            _log.warning("%s", restored)
            raise NodeLost(f"{restored}: run the step again") from error


def _follow(cluster: Any, master: Master) -> Callable[[], None]:
    """Tell the master where the cluster says that nodes are, if it starts them elsewhere; answers how to end that."""
    if not hasattr(cluster, "follow"):
        return lambda: None
    loop = asyncio.get_running_loop()

    def tell(task: str, place: tuple[str, int]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(master.moved, task, place)  # the cluster's loop may be another

    end: Callable[[], None] = cluster.follow(tell)
    return end


def _secrets(cluster: Any, tls: str | os.PathLike[str] | None) -> tuple[str, Keys | None]:
    """The token and keys of a session: what a folder of keys holds serves a spec that names no token of its own."""
    folder = tls or getattr(cluster, "tls", None) or os.environ.get("FLOWRT_TLS")
    if not folder:
        return cluster.token, None
    from flowrt.net.door.tls import TOKEN, Keys
    from flowrt.net.door.tokens import load_token

    keys = Keys(path_of(folder, "a folder of keys"))
    named = hasattr(cluster, "spec") or cluster.token_file or os.environ.get("FLOWRT_TOKEN_FILE")
    return (cluster.token if named or not (keys.folder / TOKEN).exists() else load_token(keys.folder / TOKEN)), keys
