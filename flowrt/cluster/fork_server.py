"""A process that has imported what a node needs, and becomes nodes by forking.

Imports are four fifths of what the start of a node costs, and most of the memory that it has then: so they are paid for
once for all nodes. A node is no child of the process that asked for it, which learns of its end by a socket of that
node's own; the server lets go of the process only when that was heard, so that no signal ever meets a stranger.

It takes pidfds, which Linux has. Elsewhere each node is a process of its own from the start.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from weakref import WeakSet

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

COMMAND = "forks"  # what ``python -m flowrt.worker`` is told to become a fork server
_ROOM = " " * 2000  # in a server's command, for the commands of its nodes
_LARGEST = 1 << 16  # bytes of what a server is asked
_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_", "NPY_", "NUMBA_")
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Asks a server for nodes, in any event loop; whoever opened it closes it, after the nodes."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self._place = dict(environ), (sys.executable, os.getcwd())
        self._nodes: WeakSet[ForkedNode] = WeakSet()
        self._forking = 0
        self._asked, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with asked:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flowrt.worker", COMMAND, str(asked.fileno()), _ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[asked.fileno()],
                start_new_session=True,  # as for nodes: an interrupt at the terminal is for us alone
                env=environ,
            )

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether it runs where and as we do, with the same variables as far as imports read them."""
        changed = {name for name, _ in self._environ.items() ^ environ.items()}
        same = self._place == (sys.executable, os.getcwd()) and not any(name.startswith(_EARLY) for name in changed)
        return same and self.lives

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def idles(self) -> bool:
        """Whether no node of it lives, or is on its way."""
        return not self._forking and all(node.returncode is not None for node in self._nodes)

    async def fork(self, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedNode:
        """A node that is told ``arguments``, with these variables, and this process's stderr.

        Raises `OSError` if the server cannot make it.
        """
        request = json.dumps([list(arguments), dict(environ)]).encode()
        if len(request) > _LARGEST:
            raise OSError(f"what a node is told takes {len(request)} bytes, at most {_LARGEST} are possible")
        with ExitStack() as ours:  # what is left of it when this ends is closed
            with ExitStack() as its:
                stdin, held = _pipe(its, ours)
                told, stdout = _pipe(ours, its)
                end, status = socket.socketpair()
                ours.enter_context(end)
                its.enter_context(status)
                socket.send_fds(self._asked, [request], [stdin.fileno(), stdout.fileno(), 2, status.fileno()])
            self._forking += 1
            try:
                node = await ForkedNode.began(held, told, end)
            finally:
                self._forking -= 1
            self._nodes.add(node)
            ours.pop_all()
        return node

    def close(self) -> None:
        """End it at once, and what nodes there still are."""
        self._asked.close()
        self._process.kill()
        self._process.wait()


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Both ends of a pipe, each for its owner to close."""
    source, sink = os.pipe()
    ends = os.fdopen(source, "rb", buffering=0), os.fdopen(sink, "wb", buffering=0)
    reading.enter_context(ends[0])
    writing.enter_context(ends[1])
    return cast("tuple[BinaryIO, BinaryIO]", ends)


class ForkedNode(asyncio.Protocol):
    """A node's process, used as one of `asyncio.subprocess` is, and protocol of the socket that tells of it."""

    def __init__(self, stdin: BinaryIO) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = asyncio.StreamReader()
        self._said = b""
        self._printing: asyncio.ReadTransport | None = None
        self._known, self._ended = asyncio.Event(), asyncio.Event()

    @classmethod
    async def began(cls, stdin: BinaryIO, stdout: BinaryIO, end: socket.socket) -> ForkedNode:
        """The node of a socket and the ends of its pipes, which it takes over. Raises `OSError` if none is made."""
        loop, node = asyncio.get_running_loop(), cls(stdin)
        await loop.connect_accepted_socket(lambda: node, end)
        try:
            await node._known.wait()
            if not node.pid:
                raise OSError("the fork server made no node")
            printing = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(node.stdout), stdout)
            node._printing = printing[0]
        except BaseException:
            node._telling.close()
            raise
        return node

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._telling = transport

    def data_received(self, data: bytes) -> None:
        self._said += data
        lines = self._said.split(b"\n")
        if len(lines) > 1:
            self.pid = int(lines[0])
            self._known.set()
        if len(lines) > 2:
            self._end(int(lines[1]))
            self._telling.close()  # from here on its number may be another's

    def connection_lost(self, error: Exception | None) -> None:
        if self.returncode is None:
            self._end(-signal.SIGKILL)  # with its server
        self._known.set()

    def _end(self, code: int) -> None:
        self.returncode = code
        if self._printing is not None and not self._printing.is_reading():
            self._printing.close()  # nobody reads what it printed; else it ends by itself
        self._ended.set()

    async def wait(self) -> int:
        """Its exit code, once it has ended; the negative number of the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises `ProcessLookupError` for a process that has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServers:
    """The fork servers that nodes come from, each started when it is needed. Those used longest ago stand in front."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._servers: list[ForkServer] = []

    def serving(self, environ: Mapping[str, str]) -> ForkServer | None:
        """One for nodes with these variables; None where there can be no more, as all have nodes that live."""
        found = next((server for server in self._servers if server.serves(environ)), None)
        if found is None:
            if not self._most or not _has_pidfds() or not self._make_room():
                return None
            found = ForkServer(environ)
        else:
            self._servers.remove(found)
        self._servers.append(found)
        return found

    def _make_room(self) -> bool:
        """Close those that ended and, if there is no room yet for one more, another that has no nodes now."""
        idle = [server for server in self._servers if not server.lives or server.idles]
        idle.sort(key=lambda server: server.lives)
        while idle and (not idle[0].lives or len(self._servers) == self._most):
            self._servers.remove(server := idle.pop(0))
            server.close()
        return len(self._servers) < self._most

    def close(self) -> None:
        while self._servers:
            self._servers.pop().close()


_kept: list[ForkServers] = []


@contextmanager
def kept() -> Iterator[None]:
    """Have the clusters that this process opens meanwhile share fork servers: who opens many pays for imports once."""
    servers = ForkServers(most=4)
    _kept.append(servers)
    try:
        yield
    finally:
        _kept.remove(servers)
        servers.close()


def kept_servers() -> ForkServers | None:
    """Those that clusters share now."""
    return _kept[-1] if _kept else None


@cache
def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def serve(number: int) -> list[str]:
    """Fork for whoever asks at this socket, and end with them: returns in nodes alone, with what each is told."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    gc.collect()
    gc.freeze()  # what nodes have in common stays so: a collection would write into all of it
    with socket.socket(fileno=number) as asked:
        return _Forking(asked).run()


class _Child:
    """A node, to its server: let go of once it has ended, and who asked for it has heard so or is gone."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid, self.status, self.handle = pid, status, os.pidfd_open(pid)
        self.ended = self.heard = False

    def end(self) -> None:
        """Tell its exit code, which the system keeps, and its number with it."""
        self.ended = True
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with suppress(OSError):
            self.status.send(b"%d\n" % code)

    def close(self) -> None:
        self.status.close()
        os.close(self.handle)


class _Forking:
    """The server's own side: who asks it, and what became of the nodes that it made."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._children: list[_Child] = []
        self._events = selectors.PollSelector()
        self._events.register(asked, selectors.EVENT_READ)

    def run(self) -> list[str]:
        """Answers in a node alone, with what it is told."""
        while True:
            for key, _ in self._events.select():
                if key.fileobj is self._asked:
                    told = self._fork()
                    if told is not None:
                        return told
                else:
                    self._follow(key.data, key.fileobj)

    def _fork(self) -> list[str] | None:
        request, files, _, _ = socket.recv_fds(self._asked, _LARGEST, 4, socket.MSG_CMSG_CLOEXEC)
        if not request:
            os._exit(0)  # nobody will ask any more
        if len(files) < 4:  # there may be no more files: its socket's end says so
            for file in files:
                os.close(file)
            return None
        told, environ = json.loads(request)
        status = socket.socket(fileno=files[3])
        try:
            pid = os.fork()
        except OSError:  # there may be no more processes: its socket's end says so
            status.close()
            pid = -1
        if pid == 0:
            for child in self._children:
                child.close()
            status.close()
            _become(told, environ, files[:3])
            return list(told)
        for file in files[:3]:
            os.close(file)
        if pid > 0:
            self._watch(_Child(pid, status))
        return None

    def _watch(self, child: _Child) -> None:
        with suppress(OSError):  # who asked for it may be gone
            child.status.sendall(b"%d\n" % child.pid)
        self._children.append(child)
        self._events.register(child.handle, selectors.EVENT_READ, child)
        self._events.register(child.status, selectors.EVENT_READ, child)

    def _follow(self, child: _Child, event: FileDescriptorLike) -> None:
        """Its process has ended, or whoever asked for it has closed their end."""
        self._events.unregister(event)
        if event is child.status:
            child.heard = True
        else:
            child.end()
        if child.ended and child.heard:
            os.waitpid(child.pid, 0)
            self._children.remove(child)
            child.close()


def _become(told: Sequence[str], environ: Mapping[str, str], files: Sequence[int]) -> None:
    """Be in this process what a node is that was started by itself."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # its nodes must not all draw the same; Python's own does that by itself
    sys.argv[1:] = told
    _show([sys.executable, "-m", "flowrt.worker", *told])


def _show(command: Sequence[str]) -> None:
    """Have this process be listed with that command, which is written over the one that it was started with."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # as proc(5) numbers them, 48 and 49
    if 0 < start < end:
        line = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
