"""A node of a cluster: ``python -m flowrt.worker --job ps --task 0 --cluster cluster.toml``.

Prints one line on stdout once it can be reached, serves until SIGTERM or SIGINT, and then exits with 0. What keeps it
from starting is one line on stderr, or on stdout where a parent reads that, and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import flowrt.ops  # noqa: F401 - fills the registry that plans name their ops from
from flowrt import progress
from flowrt.blocking import loop_factory
from flowrt.cluster import ClusterSpec, is_loopback, own_token, parse_address
from flowrt.errors import AuthenticationError, FlowrtError, GraphError
from flowrt.kernels.building import build_standard_kernels
from flowrt.net.code import hashes_here
from flowrt.net.node import Node
from flowrt.net.tokens import load_token
from flowrt.sched.host import Host
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.delays import Delay

LAST_SECONDS = 5  # for the end of a node whose parent is gone
_PR_SET_PDEATHSIG = 1


@valueclass
class Settings:
    """What a node is told when it starts."""

    task: str
    host: str
    port: int
    token: str
    threads: int | None
    delay: Delay | None
    die_with_parent: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is told to end; answers the exit code."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=given.log_level.upper(), format=f"%(levelname)s {given.job}:{given.task} %(message)s")
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
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is of SIGINT under nohup: then it stays ignored
            loop.add_signal_handler(number, stop.set)
    if settings.die_with_parent:
        loop.add_reader(0, _watch_parent, loop, stop)
    build_standard_kernels()
    host = Host(settings.task, threads=settings.threads, delay=settings.delay)
    try:
        async with Node(host, settings.token, imports).serving(settings.host, settings.port) as server:
            name = f"[{settings.host}]" if ":" in settings.host else settings.host
            print(f"flowrt worker {settings.task} ready on {name}:{server.port}", flush=True)
            await stop.wait()
    finally:
        await host.aclose()


def bring(module: str) -> None:
    """Import a module of the user's, for what it defines: ops, policies, sources. Raises `GraphError` if that fails."""
    try:
        import_module(module)
    except Exception as error:
        raise GraphError(f"cannot import {module!r}, as --import asks: {type(error).__name__}: {error}") from error


def read_settings(given: argparse.Namespace) -> Settings:
    """What the command line and the cluster file say together. Raises a `FlowrtError` that says what is wrong."""
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
        "It ends with exit code 0 on SIGTERM or SIGINT; 2 says that it could not start.",
    )
    add = parser.add_argument
    add("--job", required=True, help="the job this node has a task of, as in ps")
    add("--task", required=True, type=_count, help="which of the job's tasks it is, from 0")
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


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        signal.alarm(LAST_SECONDS)
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
