"""A cluster whose nodes are actors of Ray: placed by it, and started again by it when they end.

A node that Ray starts again is the task that it was, at another port and perhaps on another host. The cluster learns
that from the actor, counts it as the task's next *epoch*, and tells it to every session that is open on it (`follow`);
these give up whoever was there before. There is no placement group: each actor asks for its own resources, and one that
ends takes no other along. The token goes to the actors through Ray, as an argument.

Two clusters on one Ray do not meet: each has a namespace of its own, and a token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from flowrt.base.errors import ClosedError, GraphError, ResourceError, user_site
from flowrt.base.tracebacks import brief, unmark
from flowrt.base.valueclass import valueclass
from flowrt.cluster.cluster import ClusterSpec, parse_address
from flowrt.cluster.node_process import keys_folder
from flowrt.cluster.tasks import check_is_among, check_job, checked_delays, checked_imports, checked_tasks, split_task
from flowrt.finishing import to_the_end
from flowrt.launch.ray_driver import connect_to_ray
from flowrt.launch.ray_node import KEYS, RayNode, save_keys
from flowrt.misuse import AsyncOnly
from flowrt.net.door.tokens import new_token
from flowrt.progress import Activity
from flowrt.sched.host.await_all import await_all

if TYPE_CHECKING:
    import os

    from flowrt.delays import Delay

Tell: TypeAlias = "Callable[[str, tuple[str, int]], None]"
HEARD = 1.0  # seconds until it has come here that a node was stopped
_RAYS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # what Ray calls them; others are custom resources
_log = logging.getLogger(__name__)


@valueclass
class StartedNode:
    """A node as it was started last: where it is, its process and its actor's, and how often Ray has started it."""

    address: str
    host: str
    pid: int
    actor: int
    epoch: int


class Cluster(AsyncOnly):
    """Nodes as actors of Ray: ``async with fr.launch.ray.Cluster(ps=1, worker=8) as cluster:``.

    Where the process is not connected to Ray yet, `ray.init` is called with ``address``, and undone at the end.

    Args:
        name: What the cluster is called on Ray; by default something that no other is. With a name and no jobs it is
            the detached cluster that runs by this name.
        detached: Whether the nodes go on when the block, or this process, ends; `end` ends them.
        resources: What each node of a job, or a task, asks Ray for: ``{"worker": {"num_cpus": 2, "num_gpus": 1, "ssd":
            1}, "/job:ps/task:0": {"memory": 8 << 30}}``; by default one CPU.
        threads: Kernel threads of each node; by default as many as the CPUs that it asks for.
        delays, imports, warm, log_level, grace: As `flowrt.LocalCluster` has them.
        startup: Seconds in which Ray has to answer at its address, and then in which all nodes have to be up.
        tls: Whether nodes talk over TLS; a folder, with the keys in that. By default where Ray has more than one host,
            with keys that are made for this cluster; the actors get them as they get the token.
        runtime_env: Ray's environment of the actors.
        jobs: How many tasks of each job.

    Raises `GraphError` for tasks that make no sense and `ResourceError` if nodes do not come up, naming them and what
    Ray lacks.
    """

    WHAT = "fr.launch.ray.Cluster"

    def __init__(
        self,
        name: str | None = None,
        *,
        detached: bool = False,
        resources: Mapping[str, Mapping[str, float]] | None = None,
        threads: int | None = None,
        delays: Mapping[str, str | float | Delay] | None = None,
        imports: Sequence[str] = (),
        warm: Callable[[], Awaitable[None]] | None = None,
        log_level: str = "error",
        startup: float = 120.0,
        grace: float = 5.0,
        tls: bool | str | os.PathLike[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        address: str | None = None,
        **jobs: int,
    ) -> None:
        self._ray = _import_ray()
        self._attaches = name is not None and not jobs
        self._tasks = [] if self._attaches else checked_tasks(jobs)
        self._delays = checked_delays(delays, self._tasks)
        self._resources = _checked_resources(resources or {}, jobs, self._tasks)
        self._imports = checked_imports(imports)
        self._detached = detached or self._attaches
        self._threads, self._warm, self._log_level = threads, warm, log_level
        self._startup, self._grace = startup, grace
        self._tls, self._runtime_env, self._address = tls, runtime_env, address
        self.tls: str | None = None  # the folder of the keys
        self._keys = ExitStack()  # what holds that folder
        self.name = name or secrets.token_hex(4)
        self.token = new_token()
        self.nodes: dict[str, StartedNode] = {}
        self._actors: dict[str, Any] = {}
        self._incarnations: dict[str, str] = {}
        self._ending: set[str] = set()  # tasks whose nodes this process ends
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._followers: list[Tell] = []
        self._changed = asyncio.Event()
        self._spec: ClusterSpec | None = None
        self._began = False  # whether Ray was, by us
        self._job = ""  # what this process is to Ray, until `ray.shutdown`
        self._home = ""

    @property
    def spec(self) -> ClusterSpec:
        """Where the nodes are now."""
        if self._spec is None:
            raise ClosedError(
                "the cluster is not open; use it inside `async with fr.launch.ray.Cluster(...) as cluster:`"
            )
        return self._spec

    def follow(self, tell: Tell) -> Callable[[], None]:
        """Have ``tell(task, (host, port))`` called for each node, now and whenever it is elsewhere; answers the end."""
        self._followers.append(tell)
        for task, place in self.spec.tasks().items():
            tell(task, place)
        return partial(self._followers.remove, tell)

    # ── opening and closing ──

    @brief
    async def __aenter__(self) -> Self:
        try:
            await self._begin_ray()
            if self._warm is not None:
                await self._warm()
            await self._start()
        except BaseException:
            await to_the_end(self._reap(end=not self._attaches))
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        unmark(error)
        await to_the_end(self._reap(end=not self._detached))

    async def end(self) -> None:
        """End all nodes, also of a detached cluster. What is open on it finds them lost.

        Raises `ClosedError` where `ray.shutdown` was called meanwhile, and they go on.
        """
        if self._actors and self._detached:
            self._check_connected()
        await to_the_end(self._reap(end=True))

    async def _begin_ray(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            await connect_to_ray(ray, self._address, self._startup)
            self._began = True
        self._job = ray.get_runtime_context().get_job_id()
        here = ray.util.get_node_ip_address()
        hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        alone = hosts == {here} and not self._tls
        self._home = here if alone or self._tls is False else ""
        if not self._home and not self._attaches:
            self.tls = keys_folder(True if self._tls is None else self._tls, self._keys)

    async def _start(self) -> None:
        if self._attaches:
            await self._find()
        elif any(self._named()):
            raise ResourceError(
                f"{user_site()}: a cluster {self.name!r} runs on this Ray already; {self.WHAT}({self.name!r}) without "
                "jobs takes part in it, another name starts another one"
            )
        else:
            self._actors = {task: self._create(task) for task in self._tasks}
        self._spec = ClusterSpec.at(await self._all_up(sorted(self._tasks, key=split_task)))
        for task in self._tasks:
            self._watches[task] = asyncio.create_task(self._watch(task))

    @property
    def _is_connected(self) -> bool:
        """Whether `ray.shutdown` was not called meanwhile. Whatever is asked of Ray after it connects anew."""
        return bool(self._ray.is_initialized()) and self._ray.get_runtime_context().get_job_id() == self._job

    def _check_connected(self) -> None:
        if not self._is_connected:
            raise ClosedError(f"{user_site()}: ray.shutdown() ended the connection to Ray, {self._left()}")

    def _left(self) -> str:
        """What `ray.shutdown` leaves of the nodes."""
        if self._detached:
            return f"and the nodes go on; {self.WHAT}({self.name!r}) finds them"
        return "and the nodes with it"

    async def _reap(self, *, end: bool) -> None:
        """Let go of everything; where it is to ``end``, the nodes: asked first, then forced."""
        self._spec = None
        if end and self._actors and not self._is_connected:
            _log.warning("ray.shutdown() ended the connection to Ray, %s", self._left())
        elif end:
            await self._end(list(self._actors))
        await self._end_watches(list(self._watches))
        self._actors.clear()
        self.nodes.clear()
        self._keys.close()
        self.tls = None
        if self._began:
            self._began = False
            self._ray.shutdown()

    async def _end(self, tasks: Sequence[str]) -> None:
        self._ending.update(tasks)
        stops = [asyncio.ensure_future(self._stop(task)) for task in tasks if task in self.nodes]
        if stops:
            await asyncio.wait(stops)
        await self._end_watches(tasks, HEARD)
        self._ending.difference_update(tasks)
        for task in tasks:
            self._ray.kill(self._actors.pop(task), no_restart=True)
            self.nodes.pop(task, None)

    async def _end_watches(self, tasks: Sequence[str], patience: float = 0.0) -> None:
        """Wait no more for news of nodes; of those that were stopped, for so long until it has come that they were.

        Ray tells the user of a call that is open when an actor is killed.
        """
        watches = [self._watches.pop(task) for task in tasks if task in self._watches]
        if watches:
            _, left = await asyncio.wait(watches, timeout=patience)
            for watch in left:
                watch.cancel()
            await asyncio.wait(watches)

    async def _stop(self, task: str) -> None:
        try:
            async with asyncio.timeout(self._grace + 2.0):  # it may be about to be started again
                await self._actors[task].stop.remote(self._grace)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            _log.info("%s did not stop by itself: %s", task, error)

    # ── actors ──

    def _create(self, task: str) -> Any:
        asked = self._asked(task)
        custom = {name: amount for name, amount in asked.items() if name not in _RAYS}
        threads = self._threads or max(1, int(asked.get("num_cpus", 1)))
        actor = self._ray.remote(RayNode).options(
            **{name: asked[name] for name in _RAYS if name in asked},
            resources=custom,
            name=task,
            namespace=f"flowrt-{self.name}",
            lifetime="detached" if self._detached else None,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",
            runtime_env=self._runtime_env and dict(self._runtime_env),
        )
        options = {"threads": threads, "log-level": self._log_level}
        paths = sys.path if self._imports else ()
        delay = str(self._delays.get(task, ""))
        keys = {} if self.tls is None else {name: (Path(self.tls) / name).read_bytes() for name in KEYS}
        return actor.remote(task, self.token, self._home, options, self._imports, paths, delay, keys)

    def _asked(self, task: str) -> Mapping[str, float]:
        """What a node asks Ray for."""
        return {"num_cpus": 1} | dict(self._resources.get(task, self._resources.get(split_task(task)[0], {})))

    def _named(self) -> list[str]:
        """The tasks of the cluster that Ray knows by this name."""
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == f"flowrt-{self.name}"]

    async def _find(self) -> None:
        """The actors of a cluster that runs."""
        self._tasks = self._named()
        if not self._tasks:
            raise ResourceError(
                f"{user_site()}: no cluster {self.name!r} runs on this Ray; start one by fr.launch.ray.Cluster("
                f"{self.name!r}, detached=True, ps=1, worker=2)"
            )
        get = partial(self._ray.get_actor, namespace=f"flowrt-{self.name}")
        self._actors = {task: get(task) for task in self._tasks}
        self.token, keys = await self._actors[self._tasks[0]].secret.remote()
        if keys:
            self.tls = self._keys.enter_context(TemporaryDirectory(prefix="flowrt-keys-"))
            save_keys(self.tls, keys)

    # ── who is there ──

    async def _all_up(self, tasks: Sequence[str]) -> dict[str, str]:
        """The addresses of nodes that were just started. Raises `ResourceError` that names who is missing, and why."""

        def look(activity: Activity) -> None:
            missing = [task for task in tasks if task not in self.nodes]
            activity.done, activity.left = len(tasks) - len(missing), f"not up yet {', '.join(missing)}"

        try:
            with Activity("waiting for Ray to start nodes", len(tasks), look=look):
                async with asyncio.timeout(self._startup) as within:
                    await await_all(map(self._up, tasks))
        except TimeoutError as error:
            if not within.expired():
                raise
            raise ResourceError(self._missing([task for task in tasks if task not in self.nodes])) from error
        return {task: self.nodes[task].address for task in tasks}

    async def _up(self, task: str) -> None:
        said = await self._news(task, "")
        if "failure" in said:
            raise ResourceError(said["failure"])
        self._note(task, said)

    async def _news(self, task: str, known: str) -> dict[str, Any]:
        """What the actor says that is not of the incarnation that is ``known``."""
        said: dict[str, Any] = await self._actors[task].serves.remote(known)
        return said

    def _note(self, task: str, said: Mapping[str, Any]) -> None:
        """A node serves, for the first time or again."""
        self._incarnations[task] = said["incarnation"]
        epoch = self.nodes[task].epoch + 1 if task in self.nodes else 0
        self.nodes[task] = StartedNode(said["address"], said["host"], said["pid"], said["actor"], epoch)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, task: str) -> None:
        """Learn where the node is whenever Ray has started it again."""
        known = self._incarnations[task]
        while self._is_connected:
            try:
                said = await self._news(task, known)
            except self._ray.exceptions.RayError as error:
                _log.warning("%s is not started again by Ray: %s", task, error)
                return
            known = said["incarnation"]
            if "ended" in said:
                if task not in self._ending:
                    _log.warning("%s was ended by another process", task)
                return
            if "failure" in said:
                _log.warning("Ray started %s again, and %s", task, said["failure"])
                continue
            self._note(task, said)
            self._publish(task)
            _log.warning("Ray started %s again, at %s", task, said["address"])

    def _publish(self, task: str) -> None:
        """Let sessions know where a node is."""
        address = self.nodes[task].address
        self._spec = self.spec.placing(task, address)
        for tell in list(self._followers):
            tell(task, parse_address(address))

    def _missing(self, tasks: Sequence[str]) -> str:
        """Why nodes did not come up in time."""
        free, all_there = self._ray.available_resources(), self._ray.cluster_resources()
        them = f"{', '.join(tasks)} did not come up within {self._startup:g} s"
        for task in tasks:
            wanted = {_RAYS.get(name, name): amount for name, amount in self._asked(task).items() if amount}
            lacking = [name for name, amount in wanted.items() if free.get(name, 0) < amount]
            if lacking:
                short = ", ".join(f"{free.get(name, 0):g} of {all_there.get(name, 0):g} {name}" for name in lacking)
                each = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
                return f"{them}: {task} asks Ray for {each}, and free are {short}; give Ray more, or lower resources="
        return f"{them}: Ray has room; see the logs of its actors of these names in flowrt-{self.name}"

    # ── nodes that come and go ──

    async def add(self, job: str) -> str:
        """Start another node, as the first task of ``job`` that there is not; answers which that is, once it serves.

        Sessions that are open meet it. Raises `GraphError` for what cannot name a job, `ResourceError` if it does not
        come up.
        """
        check_job(job)
        task = self.spec.next_task(job, self._actors)
        self._check_connected()
        self._actors[task] = self._create(task)
        try:
            await self._all_up([task])
        except BaseException:
            await to_the_end(self._end([task]))
            raise
        self._publish(task)
        self._watches[task] = asyncio.create_task(self._watch(task))
        return task

    async def remove(self, task: str) -> None:
        """Have a node leave, as `SIGTERM` has it do, and its actor end. `spec` forgets it.

        Raises `GraphError` for a task that is not there, and for the last one.
        """
        self._check(task)
        if len(self._actors) == 1:
            raise GraphError(f"{task} is the last node of the cluster; leave its block to end it")
        await to_the_end(self._end([task]))
        self._spec = self.spec.placing(task, "")

    async def respawn(self, task: str) -> None:
        """Have Ray start a node again, which may be dead, hung or well, and wait until it serves.

        It has nothing of what the old one had. Raises `GraphError` for a task that is not there, `ResourceError` for
        one that does not come up.
        """
        self._check(task)
        epoch = self.nodes[task].epoch
        self._ray.kill(self._actors[task], no_restart=False)
        try:
            async with asyncio.timeout(self._startup):
                while self.nodes[task].epoch == epoch:
                    await self._changed.wait()
        except TimeoutError as error:
            raise ResourceError(self._missing([task])) from error

    def _check(self, task: str) -> None:
        _ = self.spec
        self._check_connected()
        there = [other for other in self._watches if other not in self._ending]
        check_is_among(task, there)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f'{user_site()}: fr.launch.ray needs Ray, which is not installed: pip install "flowrt[ray]"'
        ) from error
    return ray


def _checked_resources(
    resources: Mapping[str, Mapping[str, float]], jobs: Mapping[str, int], tasks: Sequence[str]
) -> dict[str, Mapping[str, float]]:
    """What nodes ask for, by job or task. Raises `GraphError` for another's, and for what is no amount."""
    form = 'write resources={"worker": {"num_cpus": 2, "num_gpus": 1}}'
    for whose, asked in resources.items():
        if whose not in jobs and whose not in tasks:
            raise GraphError(f"{user_site()}: resources are given for {whose!r}, which is no job or task here; {form}")
        if not isinstance(asked, Mapping) or not all(
            isinstance(amount, int | float) and amount >= 0 for amount in asked.values()
        ):
            raise GraphError(f"{user_site()}: {asked!r} is not what {whose} may ask Ray for; {form}")
    return dict(resources)
