"""A node of a cluster: ``python -m flowrt.worker --job ps --task 0 --cluster cluster.toml``.

``python -m flowrt.worker keys DIR`` makes keys for such nodes instead (`flowrt.cluster.keys`).

Without ``--job`` it is the task that its environment says (`ClusterSpec.from_env`). One that no cluster file names
joins by ``--join HOST:PORT``, of any node that is up, and is told which task it is.

Prints one line on stdout once it can be reached, and serves until SIGTERM or SIGINT. Then it says so to who uses it,
ends what its replicas are at, if that takes no longer than `LEAVE_SECONDS`, and exits with 0; a second signal ends it
at once. What keeps it from starting is one line on stderr, or on stdout where a parent reads that, and exit code 2, or
3 where the environment does not say which task it is. 1 is the exit code of a fault of flowrt's own.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import flowrt.ops  # noqa: F401 - fills the registry that plans name their ops from
from flowrt import progress
from flowrt.base.errors import FlowrtError, GraphError, ResourceError
from flowrt.base.valueclass import replace
from flowrt.cluster import fork_server
from flowrt.cluster.node_logs import JsonLines
from flowrt.cluster.worker_options import NoPlace, Settings, parse, parser, read_settings
from flowrt.finishing import first
from flowrt.kernels.store.building import build_standard_kernels
from flowrt.kernels.store.bundle import stamp
from flowrt.net.code import hashes_here
from flowrt.net.door.descriptors import take_descriptors
from flowrt.net.node.enlisting import enlist, host_towards
from flowrt.net.node.health import answering
from flowrt.net.node.node import NetworkNode
from flowrt.net.wire.messages import Enlist
from flowrt.sched.host.host import Host
from flowrt.session.blocking import loop_factory

if TYPE_CHECKING:
    import argparse

LEAVE_SECONDS = 3.0  # in which replicas may end what they are at
SWITCH_SECONDS = 0.001  # until a thread gives way to one that waits: as often as the event loop does in a turn
LAST_SECONDS = 5  # for the end of a node whose parent is gone
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until it is told to end; answers the exit code."""
    told = sys.argv[1:] if arguments is None else arguments
    if told[:1] == ["keys"]:
        from flowrt.cluster import keys  # which nodes that have some do without

        return keys.main(told[1:])
    if told[:1] == [fork_server.COMMAND]:
        _prepare()
        told = fork_server.serve(int(told[1]))
    given = parse(told)
    sys.setswitchinterval(SWITCH_SECONDS)
    take_descriptors()
    progress.draws = False  # the terminal is that of whoever started this node
    lines = _set_up_logging(given)
    try:
        if given.die_with_parent:
            _die_with_parent()  # also in what follows: modules of the user's may take long
        settings = read_settings(given)
        if lines is not None and settings.task:
            lines.node = settings.task
        if given.die_with_parent and _parent_is_gone():
            return 0
        for module in given.imports:
            bring(module)
        imports = hashes_here(given.imports)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings, imports, lines))
    except FlowrtError as error:
        text = f"flowrt worker: {error}" if lines is None else lines.say(str(error), level="error")
        try:
            print(text, file=sys.stdout if given.die_with_parent else sys.stderr, flush=True)
        except BrokenPipeError:  # the parent died meanwhile
            print(text, file=sys.stderr)
        return 3 if isinstance(error, NoPlace) else 2
    except Exception:
        _log.exception("the node failed")
        return 1
    return 0


def _prepare() -> None:
    """Do before nodes are forked what each of them would do."""
    loop_factory()  # imports what makes loops
    parser()
    stamp()
    "localhost".encode("idna")  # as addresses are, by a codec that is imported for it


def _set_up_logging(given: argparse.Namespace) -> JsonLines | None:
    """Have what is logged go to stderr; answers how to write it as JSON, where that is asked for."""
    who = (given.job or "node") if given.task is None else f"{given.job}:{given.task}"
    logging.basicConfig(level=given.log_level.upper(), format=f"%(levelname)s {who} %(message)s")
    if given.log_format != "json":
        return None
    lines = JsonLines(who)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(lines)
    logging.captureWarnings(True)
    return lines


async def serve(
    settings: Settings, imports: Mapping[str, str] = MappingProxyType({}), lines: JsonLines | None = None
) -> None:
    """Serve until a signal, or the parent's end where it matters; ``imports`` are told to masters."""
    told, gone = asyncio.Event(), asyncio.Event()  # it was told to end; its parent is gone
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as it is of SIGINT under nohup: then it stays ignored
            loop.add_signal_handler(number, _end, told)
    if settings.die_with_parent:
        loop.add_reader(0, _watch_parent, loop, gone)
    if settings.said:
        _say(lines, settings.said)
    standing = _Standing(settings.task)
    async with _answering(settings, standing, lines):
        build_standard_kernels()
        if settings.door is not None:
            standing.state = "joining"
            joining = asyncio.ensure_future(_join(settings, settings.door, lines))
            await first(joining, told.wait(), gone.wait())
            if joining.cancelled():
                return
            settings = joining.result()
            if lines is not None:
                lines.node = settings.task
        host = Host(settings.task, threads=settings.threads, devices=settings.devices, delay=settings.delay)
        try:
            node = NetworkNode(host, settings.token, imports, settings.tls)
            async with node.serving(settings.host, settings.port) as server:
                standing.serve(settings.task, node)
                name = f"[{settings.host}]" if ":" in settings.host else settings.host
                _say(lines, f"{settings.task} ready on {name}:{server.port}", task=settings.task, port=server.port)
                await first(told.wait(), gone.wait())
                standing.state = "leaving"
                await first(node.leave(LEAVE_SECONDS), gone.wait())
        finally:
            await host.aclose()


class _Standing:
    """What a node tells of itself by `flowrt.net.node.health`."""

    def __init__(self, task: str) -> None:
        self.state, self._task = "starting", task
        self._node: NetworkNode | None = None

    def serve(self, task: str, node: NetworkNode) -> None:
        self.state, self._task, self._node = "serving", task, node

    def look(self) -> dict[str, Any]:
        now = {} if self._node is None else self._node.statistics()
        return {
            "ready": self.state == "serving",
            "state": self.state,
            "task": self._task,
            "sessions": now.get("masters", 0),
            "peers": now.get("links", 0),
        }

    def measure(self) -> str:
        """Its numbers; no names but its own and its devices', as anybody may ask."""
        from flowrt.metrics import of_node  # which few nodes are asked for

        return of_node(self._task, self.state == "serving", {} if self._node is None else self._node.statistics())


@asynccontextmanager
async def _answering(settings: Settings, standing: _Standing, lines: JsonLines | None) -> AsyncIterator[None]:
    """Answer who asks after the node's health, where that is wanted."""
    if settings.health is None:
        yield
        return
    async with answering(*settings.health, standing.look, standing.measure) as port:
        _say(lines, f"answers /healthz, /readyz and /metrics on port {port}", health=port)
        yield


def _say(lines: JsonLines | None, message: str, **fields: Any) -> None:
    """Say on stdout how far the node is."""
    try:
        print(f"flowrt worker {message}" if lines is None else lines.say(message, **fields), flush=True)
    except BrokenPipeError:  # nobody listens any more, as where who started it was killed
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _end(told: asyncio.Event) -> None:
    """End in order, within a bounded time; told so again, at once."""
    if told.is_set():
        os._exit(0)
    told.set()
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, LEAVE_SECONDS + LAST_SECONDS)


async def _join(settings: Settings, door: tuple[str, int], lines: JsonLines | None) -> Settings:
    """With the task that the cluster gives a newcomer, and where it listens."""
    seen = await host_towards(door)
    host = settings.host or seen
    told = seen if host in ("0.0.0.0", "::") else host
    with _bound(host, settings.port) as port:
        asked = Enlist(settings.job, settings.number, told, port)
        task = await enlist(door, settings.token, asked, lambda: _say_waits(door, lines), settings.tls)
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


def _say_waits(door: tuple[str, int], lines: JsonLines | None) -> None:
    _say(lines, f"waits for a session: the node at {door[0]}:{door[1]} will tell it its task")


def bring(module: str) -> None:
    """Import a module of the user's, for what it defines: ops, policies, sources. Raises `GraphError` if that fails."""
    try:
        import_module(module)
    except Exception as error:
        raise GraphError(f"cannot import {module!r}, as --import asks: {type(error).__name__}: {error}") from error


def _die_with_parent() -> None:
    """Have the system kill us when the parent dies, where it can; the end of stdin is noticed everywhere."""
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise GraphError("--die-with-parent needs a pipe from the parent on stdin")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _parent_is_gone() -> bool:
    """Whether it died before the system knew that we end with it."""
    stdin = select.poll()
    stdin.register(0, 0)  # for its end alone, which is always told
    return bool(stdin.poll(0))


def _watch_parent(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        signal.alarm(LAST_SECONDS)
        gone.set()


def end(code: int) -> NoReturn:
    """End this process, and its memory with it: to take that apart would first copy what nodes share.

    But for users' modules, which may have files open that are then written.
    """
    if any(word.startswith("--im") for word in sys.argv):  # --import, perhaps cut short
        gc.freeze()  # to look for cycles takes as long as to import NumPy
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody may listen any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
