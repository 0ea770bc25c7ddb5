"""Which tasks make up a cluster and where they are; and a cluster of processes on this machine.

A `ClusterSpec` is plain data. A `LocalCluster` owns its nodes: whatever happens, none outlives it, nor this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from flowrt.base.errors import AuthenticationError, ClosedError, GraphError, ResourceError, path_of
from flowrt.base.locating import checked_function, fitting
from flowrt.base.telling import telling
from flowrt.base.tracebacks import brief, unmark
from flowrt.cluster.environment import find
from flowrt.cluster.fork_server import ForkServers, kept_servers
from flowrt.cluster.hosts import expand_ranges
from flowrt.cluster.node_process import (
    arguments,
    being_started,
    close_stdin,
    end,
    environment,
    keys_folder,
    ready,
    tell_token,
)
from flowrt.cluster.tasks import (
    check_is_among,
    check_job,
    check_numbers,
    checked_delays,
    checked_devices,
    checked_imports,
    checked_tasks,
    split_task,
)
from flowrt.finishing import to_the_end
from flowrt.misuse import AsyncOnly
from flowrt.net.door.addresses import is_loopback
from flowrt.net.door.descriptors import out_of_descriptors
from flowrt.net.door.tokens import load_token, new_token, own_token
from flowrt.usable import usable_cores

if TYPE_CHECKING:
    from flowrt.cluster.node_process import Process
    from flowrt.cluster.tasks import Devices
    from flowrt.delays import Delay

_FORM = 'a cluster is jobs with the addresses of their tasks: ps = ["127.0.0.1:7001"]'
SOON, LATE = 0.1, 5.0  # seconds after its end that a node is started again, at first and at last
DIES = 1.0  # seconds in which a process that was killed has ended
LASTS = 10.0  # seconds after which the end of a node is not blamed on its start
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, init=False)
class ClusterSpec:
    """The addresses of a cluster's tasks, by job: ``ClusterSpec({"ps": ["127.0.0.1:7001"], "worker": [...]})``.

    An empty address is in the place of a task that there is not, so that those after it keep their numbers.
    Its token is in ``token_file``, else in the file that FLOWRT_TOKEN_FILE names, else in this user's own, which serves
    clusters within one machine. Raises `GraphError` for what is not a cluster.
    """

    jobs: Mapping[str, tuple[str, ...]]
    token_file: str | None
    task: str | None = field(default=None, compare=False)  # which one this process is, where its environment says that
    said: str = field(default="", compare=False)  # which variables did

    def __init__(self, jobs: Mapping[str, Sequence[str]], token_file: str | None = None) -> None:
        object.__setattr__(self, "jobs", _checked(jobs))
        object.__setattr__(self, "token_file", None if token_file is None else path_of(token_file, "a token file"))
        object.__setattr__(self, "task", None)
        object.__setattr__(self, "said", "")

    @classmethod
    def at(cls, addresses: Mapping[str, str], token_file: str | None = None) -> Self:
        """The cluster whose tasks are at these addresses; one whose address is empty is not there."""
        jobs: dict[str, list[str]] = {}
        for task, address in addresses.items():
            if address:
                job, number = split_task(task)
                there = jobs.setdefault(job, [])
                there += [""] * (number + 1 - len(there))
                there[number] = address
        return cls(jobs, token_file)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML file with a list of addresses per job, and perhaps a ``token_file``."""
        try:
            with open(path_of(path, "a cluster file"), "rb") as file:
                data = tomllib.load(file)
        except (OSError, ValueError) as error:
            raise GraphError(f"cannot read the cluster file {os.fspath(path)}: {error}") from error
        try:
            return cls._from_data(data)
        except GraphError as error:
            raise GraphError(f"cluster file {os.fspath(path)}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, jobs: str | None = None) -> Self:
        """Read the cluster that ``environ`` names, by default this process's, and which of its tasks this process is.

        The first of these that is there counts:

        - ``FLOWRT_CLUSTER``, the path of a cluster file or its content as JSON; ``FLOWRT_JOB`` and ``FLOWRT_TASK``
        - ``FLOWRT_HOSTS``, a host for each rank, as ``node[01-03,07],gpu-a[1-2]``; ``FLOWRT_RANK``
        - ``TF_CONFIG``
        - torchrun's ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` and ``LOCAL_WORLD_SIZE``; beyond one
          host with ``FLOWRT_HOSTS``, in the order of its ``GROUP_RANK``
        - Slurm's ``SLURM_JOB_NODELIST``, ``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_TASKS_PER_NODE``,
          ``SLURM_NTASKS_PER_NODE`` and ``SLURM_DISTRIBUTION``, or those of the step

        Ranks become tasks as ``jobs`` or ``FLOWRT_JOBS`` says: by default ``ps=1,worker``, so that rank 0 is the server
        and all others are workers. The first rank of each host listens at ``FLOWRT_PORT``, the others on it above that;
        by default at 7001, one above MASTER_PORT, or, with Slurm, one that follows from the job's number.

        Raises `GraphError` that says what is missing, and how to give it.
        """
        found = find(os.environ if environ is None else environ, jobs)
        try:
            spec = cls.from_file(found.cluster) if isinstance(found.cluster, str) else cls._from_data(found.cluster)
            if found.task is not None:
                check_is_among(found.task, spec.tasks())
        except GraphError as error:
            raise GraphError(f"{found.said}: {error}") from None
        object.__setattr__(spec, "task", found.task)
        object.__setattr__(spec, "said", found.said)
        return spec

    @classmethod
    def _from_data(cls, data: Any) -> Self:
        if not isinstance(data, Mapping):
            raise GraphError(_FORM)
        token_file = data.get("token_file")
        if not isinstance(token_file, str | None):
            raise GraphError(f"token_file is a path, not {token_file!r}")
        return cls({job: _expanded(tasks) for job, tasks in data.items() if job != "token_file"}, token_file)

    def tasks(self) -> dict[str, tuple[str, int]]:
        """The host and port of every task: ``{"/job:ps/task:0": ("127.0.0.1", 7001)}``."""
        return {
            f"/job:{job}/task:{number}": parse_address(address)
            for job, addresses in self.jobs.items()
            for number, address in enumerate(addresses)
            if address
        }

    def next_task(self, job: str, coming: Collection[str] = ()) -> str:
        """The first task of ``job`` that there is not, and that is not ``coming``."""
        taken = {*coming, *self.tasks()}
        return next(task for number in count() if (task := f"/job:{job}/task:{number}") not in taken)

    def placing(self, task: str, address: str) -> ClusterSpec:
        """The cluster in which ``task`` is at ``address``, or nowhere if that is empty; nobody else is there."""
        there = {
            f"/job:{job}/task:{number}": "" if at == address else at
            for job, addresses in self.jobs.items()
            for number, at in enumerate(addresses)
        }
        return ClusterSpec.at(there | {task: address}, self.token_file)

    @property
    def token(self) -> str:
        """The secret that its nodes and masters share; raises `AuthenticationError` where it cannot be had."""
        path = self.token_file or os.environ.get("FLOWRT_TOKEN_FILE")
        if path:
            return load_token(path)
        abroad = [host for host, _ in self.tasks().values() if not is_loopback(host)]
        if abroad:
            raise AuthenticationError(
                f"the cluster reaches beyond this machine, to {abroad[0]}, so its nodes and masters need a shared "
                "secret: set token_file in the cluster file, or FLOWRT_TOKEN_FILE"
            )
        return own_token()


def _checked(jobs: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    if not isinstance(jobs, Mapping):
        raise GraphError(f"got {jobs!r}; {_FORM}")
    seen: dict[tuple[str, int], str] = {}
    for job, addresses in jobs.items():
        check_job(job)
        if isinstance(addresses, str) or not isinstance(addresses, Sequence) or not any(addresses):
            raise GraphError(f"job {job!r}: expected a list of addresses, got {addresses!r}; {_FORM}")
        for number, address in enumerate(addresses):
            if address == "":
                continue
            task, place = f"/job:{job}/task:{number}", parse_address(address)
            if place in seen:
                raise GraphError(f"{seen[place]} and {task} have the same address, {address}")
            seen[place] = task
    if not seen:
        raise GraphError(f"a cluster needs a task; {_FORM}")
    return {job: tuple(addresses) for job, addresses in jobs.items()}


def _expanded(addresses: Any) -> Any:
    """Addresses, of which one may stand for many: ``node[01-08]:7001``."""
    if not isinstance(addresses, Sequence) or isinstance(addresses, str):
        return addresses
    try:
        each = [expand_ranges(address) if isinstance(address, str) else [address] for address in addresses]
    except ValueError as error:
        raise GraphError(str(error)) from error
    return list(chain.from_iterable(each))


def parse_address(address: Any, *, lowest: int = 1) -> tuple[str, int]:
    """``"host:port"`` or ``"[::1]:port"`` as a pair. Raises `GraphError` for anything else."""
    match = re.fullmatch(
        r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\s:\[\]/]+)):(\d{1,5})", address if isinstance(address, str) else ""
    )
    if match is None or not lowest <= int(match[3]) < 1 << 16:
        raise GraphError(f"{address!r} is not an address; write HOST:PORT, as in 127.0.0.1:7001")
    return match[1] or match[2], int(match[3])


class LocalCluster(AsyncOnly):
    """Nodes as processes on this machine: ``async with LocalCluster(ps=1, worker=3) as cluster:``.

    On Linux they are forked from one that imported what they need (`cluster/fork_server`), and end with it.

    Args:
        threads: Kernel threads of each node; by default the usable cores are divided among the nodes.
        delays: For experiments with stragglers, by how much a task is slower: ``{"/job:worker/task:3": 0.2}`` in
            seconds, or one of `flowrt.delays`, itself or as text.
        imports: Modules that nodes import first, for what these define, such as ops and kernels, policies and sources:
            found as this process would find them.
        devices: The devices that each node looks for, as ``("cpu:0", "cuda:0")``, or those of some tasks:
            ``{"/job:worker/task:0": ("cpu:0", "cuda:0")}``. By default its cores alone.
        warm: Awaited before the nodes start: a place to fill the kernel cache once.
        log_level: What the nodes write to this process's stderr.
        restart: Whether a node whose process ends is started again at its address, and how soon depends on how often.
        tls: Whether nodes talk over TLS where it is not by memory they share; a folder, with the keys in that.
        jobs: How many tasks of each job.

    Raises `GraphError` for tasks that make no sense and `ResourceError` if a node does not come up.
    """

    WHAT = "fr.LocalCluster"

    @fitting
    def __init__(
        self,
        *,
        threads: int | None = None,
        delays: Mapping[str, str | float | Delay] | None = None,
        imports: Sequence[str] = (),
        devices: Devices = None,
        warm: Callable[[], Awaitable[None]] | None = None,
        log_level: str = "error",
        startup: float = 60.0,
        grace: float = 5.0,
        restart: bool = False,
        tls: bool | str | os.PathLike[str] = False,
        **jobs: int,
    ) -> None:
        self._tasks = checked_tasks(jobs)
        self._delays = checked_delays(delays, self._tasks)
        self._imports = checked_imports(imports)
        self._devices = checked_devices(devices, self._tasks)
        check_numbers(threads=threads, startup=startup, grace=grace)
        self._warm = None if warm is None else checked_function(warm, "warm")
        self._threads = threads or max(1, usable_cores() // len(self._tasks))
        self._log_level, self._startup, self._grace = log_level, startup, grace
        self._restart = restart
        self._tls = tls if isinstance(tls, bool) else path_of(tls, "a folder of keys")
        self._keys = ExitStack()  # what holds keys that were made here
        self.tls: str | None = None  # the folder of the keys
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._respawning: dict[str, asyncio.Lock] = {}
        self._spec: ClusterSpec | None = None
        self.token = new_token()
        self.processes: dict[str, Process] = {}
        self._coming: set[str] = set()  # tasks that are being added
        self._servers = ForkServers(most=1 if len(self._tasks) > 1 else 0)  # of our own

    @telling
    def __repr__(self) -> str:
        jobs = Counter(split_task(task)[0] for task in self._tasks)
        counts = ", ".join(f"{job}={count}" for job, count in jobs.items())
        return f"fr.LocalCluster {counts}, {'not open' if self._spec is None else 'open'}"

    @property
    def spec(self) -> ClusterSpec:
        """Where the nodes are."""
        if self._spec is None:
            raise ClosedError("the cluster is not open; use it inside `async with fr.LocalCluster(...) as cluster:`")
        return self._spec

    @brief
    async def __aenter__(self) -> Self:
        try:
            self.tls = keys_folder(self._tls, self._keys)
            if self._warm is not None:
                await self._warm()
            async with asyncio.timeout(self._startup):
                await self._start()
        except BaseException as error:
            await to_the_end(self._reap())
            if isinstance(error, TimeoutError):
                raise ResourceError(f"the nodes did not come up within {self._startup:g} s") from error
            if out := out_of_descriptors(error):
                raise ResourceError(f"the nodes cannot be started: {out}") from error
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        unmark(error)
        self._spec = None
        await to_the_end(self._reap())

    @brief
    async def respawn(self, task: str) -> None:
        """Start a node again whose process has ended, at its address, and wait until it serves.

        It has nothing of what the old one had. Who starts it again already, as ``restart`` may, is waited for. Raises
        `GraphError` for a node that runs, `ResourceError` for one that does not come up.
        """
        check_is_among(task, self.spec.tasks())
        lock = self._respawning.setdefault(task, asyncio.Lock())
        if not lock.locked():
            await self._check_ended(task)
        async with lock:
            check_is_among(task, tasks := self.spec.tasks())  # it may have been removed meanwhile
            if self.processes[task].returncode is None:
                return
            close_stdin(self.processes[task])
            with self._folder() as folder:
                process = self.processes[task] = await self._spawn(task, folder, tasks[task][1])
                await self._ready(task, process)

    async def _check_ended(self, task: str) -> None:
        process = self.processes[task]
        with suppress(TimeoutError):
            async with asyncio.timeout(DIES):  # it may have been killed just now
                await process.wait()
        if process.returncode is None:
            raise GraphError(f"{task} runs; kill its process before it is started again")

    @brief
    async def add(self, job: str) -> str:
        """Start another node, as the first task of ``job`` that there is not; answers which that is, once it serves.

        Sessions that run meet it, as it joins the cluster by one of its nodes; `spec` names it to those to come. Raises
        `GraphError` for what cannot name a job, `ResourceError` if it does not come up.
        """
        check_job(job)
        task = self.spec.next_task(job, self._coming)
        self._coming.add(task)
        try:
            address = await self._come(task)
        finally:
            self._coming.remove(task)
        self._spec = self.spec.placing(task, address)
        if self._restart:
            self._keeping[task] = asyncio.create_task(self._keep(task))
        return task

    async def _come(self, task: str) -> str:
        """Start a node that joins by one that is there; answers its address once it serves."""
        up = [place for other, place in self.spec.tasks().items() if self.processes[other].returncode is None]
        with self._folder() as folder:
            process = self.processes[task] = await self._spawn(task, folder, door=up[0] if up else None)
            try:
                return await self._ready(task, process)
            except BaseException:
                del self.processes[task]
                raise

    async def _ready(self, task: str, process: Process) -> str:
        """The address of a node that was just started, once it serves; one that does not come up is ended."""
        try:
            async with asyncio.timeout(self._startup):
                return await ready(task, process)
        except BaseException as error:
            await to_the_end(end([process], self._grace))
            if isinstance(error, TimeoutError):
                raise ResourceError(f"{task} did not come up within {self._startup:g} s") from error
            raise

    @brief
    async def remove(self, task: str) -> None:
        """Have a node end: it leaves as `SIGTERM` has it do, or is killed after ``grace`` seconds. `spec` forgets it.

        Raises `GraphError` for a task that is not there, and for the last one.
        """
        check_is_among(task, self.processes)
        async with self._respawning.setdefault(task, asyncio.Lock()):  # who starts it again is waited for
            check_is_among(task, self.processes)
            if len(self.processes) == 1:
                raise GraphError(f"{task} is the last node of the cluster; leave its block to end it")
            if (keeping := self._keeping.pop(task, None)) is not None:
                keeping.cancel()
                await asyncio.wait([keeping])
            await to_the_end(end([self.processes[task]], self._grace))
            del self.processes[task]
            self._spec = self.spec.placing(task, "")

    async def _keep(self, task: str) -> None:
        """Start a node again whenever its process ends: at once, and each time later where it does not last."""
        pause = SOON
        while True:
            began, process = asyncio.get_running_loop().time(), self.processes[task]
            ended = await process.wait()
            lasted = asyncio.get_running_loop().time() - began
            pause = SOON if lasted > LASTS else min(2 * pause, LATE)
            _log.warning("%s ended with %d after %.1f s; it is started again in %.1f s", task, ended, lasted, pause)
            await asyncio.sleep(pause)
            if self.processes[task] is not process:  # somebody else has
                continue
            try:
                await self.respawn(task)
            except Exception as error:  # it is tried again, whatever it was
                _log.warning("%s was not started again: %s", task, error)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """What nodes are told by files: their delays, if any. It lasts until they are ready."""
        with tempfile.TemporaryDirectory(prefix="flowrt-") if self._delays else nullcontext("") as folder:
            yield Path(folder)

    async def _start(self) -> None:
        """Start all nodes, each on a port of its own choice, and wait until all have said theirs."""
        with self._folder() as folder:
            for task in self._tasks:
                self.processes[task] = await self._spawn(task, folder)
            self._spec = ClusterSpec.at({task: await ready(task, process) for task, process in self.processes.items()})
        if self._restart:
            self._keeping = {task: asyncio.create_task(self._keep(task)) for task in self.processes}

    def _where(self, task: str) -> tuple[Sequence[str], str]:
        """What is put before a node's command, and the address that it listens at: experiments put it elsewhere."""
        return (), "127.0.0.1"

    async def _spawn(self, task: str, folder: Path, port: int = 0, door: tuple[str, int] | None = None) -> Process:
        with being_started(task):
            process = await self._start_process(task, folder, port, door)
        tell_token(process, self.token)
        return process

    async def _start_process(self, task: str, folder: Path, port: int, door: tuple[str, int] | None) -> Process:
        before, host = self._where(task)
        options: dict[str, Any] = {"token-file": "-", "threads": self._threads, "log-level": self._log_level}
        if self.tls is not None:
            options["tls"] = self.tls
        if door is not None:
            options["join"] = f"{door[0]}:{door[1]}"
        if (devices := self._devices.get(task)) is not None:
            options["devices"] = ",".join(devices)
        delay = str(self._delays.get(task, ""))
        told = arguments(task, f"{host}:{port}", options, self._imports, delay, folder)
        variables = environment(self._threads, sys.path if self._imports else ())
        server = None if before else (kept_servers() or self._servers).serving(variables)
        if server is not None:
            with suppress(OSError):  # what a server cannot make is a process of its own from the start
                return await server.fork(told, variables)
        return await asyncio.create_subprocess_exec(
            *(*before, sys.executable, "-m", "flowrt.worker", *told),
            stdin=asyncio.subprocess.PIPE,  # held open: its end tells the node that we are gone
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is for us alone: we end the nodes in order
            env=variables,
        )

    async def _reap(self) -> None:
        """End every process: asked first, then forced."""
        keeping = self._keeping.values()
        for task in keeping:
            task.cancel()
        if keeping:
            await asyncio.wait(keeping)
        await end(list(self.processes.values()), self._grace, in_order=False)
        self._servers.close()
        self._keys.close()
