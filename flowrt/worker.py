"""A node of a cluster: ``python -m flowrt.worker --job ps --task 0 --cluster cluster.toml``.

One that no cluster file names joins by ``--join HOST:PORT``, of any node that is up, and is told which task it is.

Prints one line on stdout once it can be reached, and serves until SIGTERM or SIGINT. Then it says so to who uses it,
ends what its replicas are at, if that takes no longer than `LEAVE_SECONDS`, and exits with 0; a second signal ends it
at once. What keeps it from starting is one line on stderr, or on stdout where a parent reads that, and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import flowrt.ops  # noqa: F401 - fills the registry that plans name their ops from
from flowrt import progress
from flowrt.blocking import loop_factory
from flowrt.cluster import ClusterSpec, is_loopback, own_token, parse_address
from flowrt.errors import AuthenticationError, FlowrtError, GraphError, ResourceError
from flowrt.kernels.building import build_standard_kernels
from flowrt.net.code import hashes_here
from flowrt.net.enlisting import enlist, host_towards
from flowrt.net.messages import Enlist
from flowrt.net.node import Node
from flowrt.net.tokens import load_token
from flowrt.sched.host import Host
from flowrt.valueclass import replace, valueclass

if TYPE_CHECKING:
    from flowrt.delays import Delay

LEAVE_SECONDS = 3.0  # in which replicas may end what they are at
LAST_SECONDS = 5  # for the end of a node whose parent is gone
_PR_SET_PDEATHSIG = 1


@valueclass
class Settings:
    """What a node is told when it starts; with a ``door``, the ``task`` that it is, it is told there.

    Until then that is one it asks for, or -1, of a ``job``, and the ``host`` may be empty.
    """

    task: str
    host: str
    port: int
    token: str
    threads: int | None
    delay: Delay | None
    die_with_parent: bool
    door: tuple[str, int] | None = None
    job: str = ""
    number: int = -1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is told to end; answers the exit code."""
    given = _parser().parse_args(arguments)
    who = given.job if given.task is None else f"{given.job}:{given.task}"
    logging.basicConfig(level=given.log_level.upper(), format=f"%(levelname)s {who} %(message)s")
    progress.draws = False  # the terminal is that of whoever started this node
    try:
        settings = read_settings(given)
        for module in given.imports:
            bring(module)
        imports = hashes_here(given.imports)
        if settings.die_with_parent:
            _die_with_parent()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, imports))
    except FlowrtError as error:
        print(f"flowrt worker: {error}", file=sys.stdout if given.die_with_parent else sys.stderr)
        return 2
    return 0


async def serve(settings: Settings, imports: Mapping[str, str] = MappingProxyType({})) -> None:
    """Serve until a signal, or the parent's end where it matters; ``imports`` are told to masters."""
    told, gone = asyncio.Event(), asyncio.Event()  # it was told to end; its parent is gone
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is of SIGINT under nohup: then it stays ignored
            loop.add_signal_handler(number, _end, told)
    if settings.die_with_parent:
        loop.add_reader(0, _watch_parent, loop, gone)
    build_standard_kernels()
    if settings.door is not None:
        joining = asyncio.ensure_future(_join(settings, settings.door))
        await _first(joining, told.wait(), gone.wait())
        if joining.cancelled():
            return
        settings = joining.result()
    host = Host(settings.task, threads=settings.threads, delay=settings.delay)
    try:
        node = Node(host, settings.token, imports)
        async with node.serving(settings.host, settings.port) as server:
            name = f"[{settings.host}]" if ":" in settings.host else settings.host
            print(f"flowrt worker {settings.task} ready on {name}:{server.port}", flush=True)
            await _first(told.wait(), gone.wait())
            await _first(node.leave(LEAVE_SECONDS), gone.wait())
    finally:
        await host.aclose()


def _end(told: asyncio.Event) -> None:
    """End in order, within a bounded time; told so again, at once."""
    if told.is_set():
        os._exit(0)
    told.set()
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS + LAST_SECONDS)


async def _join(settings: Settings, door: tuple[str, int]) -> Settings:
    """With the task that the cluster gives a newcomer, and where it listens."""
    seen = await host_towards(door)
    host = settings.host or seen
    told = seen if host in ("0.0.0.0", "::") else host
    with _bound(host, settings.port) as port:
        asked = Enlist(settings.job, settings.number, told, port)
        task = await enlist(door, settings.token, asked, lambda: _say_waits(door))
    return replace(settings, task=task, host=host, port=port)


@contextmanager
def _bound(host: str, port: int) -> Iterator[int]:
    """Keep a port for this node, which does not listen there yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ResourceError(f"cannot listen on {host}:{port}: {error}; port 0 takes any free one") from error
        yield held.getsockname()[1]


def _say_waits(door: tuple[str, int]) -> None:
    print(f"flowrt worker waits for a session: the node at {door[0]}:{door[1]} will tell it its task", flush=True)


async def _first(*works: Awaitable[Any]) -> None:
    """Wait until one of ``works`` is done, and end the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def bring(module: str) -> None:
    """Import a module of the user's, for what it defines: ops, policies, sources. Raises `GraphError` if that fails."""
    try:
        import_module(module)
    except Exception as error:
        raise GraphError(f"cannot import {module!r}, as --import asks: {type(error).__name__}: {error}") from error


def read_settings(given: argparse.Namespace) -> Settings:
    """What the command line and the cluster file say together. Raises a `FlowrtError` that says what is wrong."""
    if given.join:
        return _newcomer(given)
    if given.task is None:
        raise GraphError("--task says which of the job's tasks this node is; or let it --join a cluster, to be told")
    task = f"/job:{given.job}/task:{given.task}"
    cluster = _cluster(given)
    if cluster is None:
        host, port = parse_address(given.bind, lowest=0)
    else:
        tasks = cluster.tasks()
        if task not in tasks:
            raise GraphError(f"{task} is not in the cluster, which has {', '.join(tasks)}")
        host, port = parse_address(given.bind, lowest=0) if given.bind else tasks[task]
    return Settings(
        task,
        host,
        port,
        _token(given, cluster, host),
        given.threads,
        _delay(given.delay),
        given.die_with_parent,
    )


def _newcomer(given: argparse.Namespace) -> Settings:
    """The settings of a node that joins."""
    if given.cluster:
        raise GraphError("--join is for a node that no cluster file names: give --cluster or --join, not both")
    door = parse_address(given.join)
    host, port = parse_address(given.bind, lowest=0) if given.bind else ("", 0)
    token = _token(given, None, host or door[0])
    number = -1 if given.task is None else given.task
    return Settings(
        "", host, port, token, given.threads, _delay(given.delay), given.die_with_parent, door, given.job, number
    )


def _delay(text: str | None) -> Delay | None:
    """The delay that is given: as text, or in a file."""
    if not text:
        return None
    from flowrt import delays  # for experiments alone

    try:
        return delays.parse(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise GraphError(f"--delay {text}: {error}") from error
    except GraphError as error:
        raise GraphError(f"--delay: {str(error).partition(': ')[2]}") from error  # the line is not the user's


def _cluster(given: argparse.Namespace) -> ClusterSpec | None:
    """The cluster, where one is given; its masters tell a node that knows only its own address."""
    if given.cluster:
        return ClusterSpec.from_file(given.cluster)
    return None if given.bind else ClusterSpec.from_env()


def _token(given: argparse.Namespace, cluster: ClusterSpec | None, host: str) -> str:
    path = given.token_file or (cluster and cluster.token_file) or os.environ.get("FLOWRT_TOKEN_FILE")
    if path:
        return load_token(path)
    if not is_loopback(host):
        raise AuthenticationError(f"listening on {host}, beyond this machine, needs a secret: give --token-file")
    return own_token()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flowrt.worker",
        description="A node of a flowrt cluster: computes what masters ask for, and keeps variables between them.",
        epilog="A cluster file is TOML with the addresses of each job's tasks: "
        'ps = ["127.0.0.1:7001"], worker = ["127.0.0.1:7002", "127.0.0.1:7003"], and perhaps token_file = "PATH". '
        "A node that is in no such file takes part by --join HOST:PORT, the address of any node that is up; if no "
        "session runs it waits for one. On SIGTERM or SIGINT a node says that it leaves, ends the batch that it is at, "
        "and ends with exit code 0; a second signal ends it at once. 2 says that it could not start.",
    )
    add = parser.add_argument
    add("--job", required=True, help="the job this node has a task of, as in ps")
    add(
        "--task", type=_count, help="which of the job's tasks it is, from 0; with --join, by default the first free one"
    )
    add(
        "--join",
        metavar="HOST:PORT",
        help="take part in the cluster of the node that listens there, though no cluster file names this one; it "
        "listens at --bind, by default at any port of the address by which that node sees it",
    )
    add("--cluster", metavar="FILE", help="the cluster file; by default what FLOWRT_CLUSTER or TF_CONFIG says")
    add("--bind", metavar="HOST:PORT", help="where to listen, if not at the task's address; port 0 is any free one")
    add(
        "--token-file",
        metavar="FILE",
        help="holds the secret that masters and nodes share, readable by its owner alone; by default the cluster "
        "file's, FLOWRT_TOKEN_FILE's, or (on this machine only) this user's own, made at the first use",
    )
    add(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module of yours first, for the ops, kernels, policies and sources that it defines; may be given "
        "again",
    )
    add("--threads", type=_positive, metavar="N", help="kernel threads; by default the cores it may use")
    add(
        "--delay",
        metavar="TEXT",
        help="for experiments: be slow, by so many seconds a step: 0.2, exponential:MEAN, lognormal:MEDIAN,SIGMA, "
        "link:BYTES_PER_SECOND, … and sums of them, each perhaps with `at input` (push, server, frozen), `on REPLICA` "
        "or `during 100:200`; or @FILE that holds it. See flowrt.delays",
    )
    levels = ("debug", "info", "warning", "error")
    add("--log-level", default="warning", choices=levels, help="what to write to stderr (default: %(default)s)")
    add("--die-with-parent", action="store_true", help="end when stdin, a pipe that the parent holds, ends")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _die_with_parent() -> None:
    """Have the system kill us when the parent dies, where it can; the end of stdin is noticed everywhere."""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise GraphError("--die-with-parent needs a pipe from the parent on stdin")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _watch_parent(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        signal.alarm(LAST_SECONDS)
        gone.set()


if __name__ == "__main__":
    sys.exit(main())
