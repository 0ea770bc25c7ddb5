"""Links that misbehave: connections to the nodes of a cluster that are slowed, cut into pieces, held or broken.

What TCP mends of loss and reordering, a program sees as bytes that come late, in odd pieces, and not at all for a
while; that is what is made here, and connections that break. (`scripts/faults` loses and reorders packets themselves.)
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cluster_plans import CLIENT

from flowrt.base.valueclass import valueclass
from flowrt.cluster.cluster import ClusterSpec
from flowrt.net.door.tokens import save_token

if TYPE_CHECKING:
    import random

    from flowrt.cluster.cluster import LocalCluster

Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_CHUNK = 1 << 16
_MOST_UNDERWAY = 1 << 20  # bytes on a link, each way: beyond that it takes no more, as a router would not


@valueclass
class Weather:
    """What a link does to what it carries, each way: seconds of ``delay`` and at most so much ``jitter`` more, bytes a
    second, and of how many bytes, at most, the pieces are in which it comes."""

    delay: float = 0.0
    jitter: float = 0.0
    rate: float = float("inf")
    pieces: int = _CHUNK


class Links:
    """All connections to the nodes of a cluster, between whom they are, and what becomes of them.

    ``spec`` has the addresses by which all tasks reach one another through these links.
    """

    def __init__(self, rng: random.Random, weather: Weather) -> None:
        self.rng = rng
        self.weather = weather
        self.spec: ClusterSpec
        self._wires: list[_Wire] = []
        self._apart: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    def cut(self, one: str | None = None, other: str | None = None) -> int:
        """Reset the connections of a task, of a pair, or all; answers how many there were."""
        wires = list(self._among(one, other))
        for wire in wires:
            wire.cut()
        return len(wires)

    def hold(self, one: str | None = None, other: str | None = None) -> None:
        """Carry nothing more on these connections, until `let_go`."""
        for wire in self._among(one, other):
            wire.open.clear()

    def let_go(self) -> None:
        """Carry on everywhere."""
        for wire in self._wires:
            wire.open.set()

    def part(self, task: str) -> None:
        """Cut a task off: its connections, and those that are opened to it or by it, carry nothing."""
        self._apart.add(task)
        self.hold(task)

    def rejoin(self, task: str) -> None:
        """Let a task be reached again; what was carried before is lost with its connections."""
        self._apart.discard(task)
        self.cut(task)

    def throttle(self, task: str, weather: Weather) -> None:
        """Have the connections of a task, as they are, carry as ``weather`` says."""
        for wire in self._among(task, None):
            wire.weather = weather

    def pairs(self) -> list[tuple[str, str]]:
        """Between whom there are connections."""
        return sorted({tuple(sorted(wire.ends)) for wire in self._wires})  # type: ignore[misc]

    @property
    def carried(self) -> int:
        """Bytes so far."""
        return sum(wire.carried for wire in self._wires)

    def _among(self, one: str | None, other: str | None) -> Iterable[_Wire]:
        wanted = {task for task in (one, other) if task is not None}
        return [wire for wire in self._wires if wanted <= wire.ends and not wire.over]

    async def before(self, task: str, place: tuple[str, int], cluster: LocalCluster) -> int:
        """Listen in place of a task; answers the port."""

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends = {task, who_connects(writer.get_extra_info("peername")[1], cluster)}
            work = asyncio.get_running_loop().create_task(self._attend(ends, place, (reader, writer)))
            self._tasks.add(work)
            work.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(begin, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def aclose(self) -> None:
        """Reset what is carried, and listen no more."""
        for server in self._servers:
            server.close()
        for work in self._tasks:
            work.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _attend(self, ends: set[str], place: tuple[str, int], near: Stream) -> None:
        try:
            far = await asyncio.open_connection(*place)
        except OSError:
            near[1].transport.abort()
            return
        wire = _Wire(ends, self.weather, near, far)
        self._wires.append(wire)
        if ends & self._apart:
            wire.open.clear()
        try:
            await wire.carry(self)
        finally:
            wire.cut()


class _Wire:
    """One connection: two sockets, and a pump each way."""

    def __init__(self, ends: set[str], weather: Weather, *streams: Stream) -> None:
        self.ends = ends
        self.open = asyncio.Event()
        self.open.set()
        self.over = False
        self.carried = 0
        self.weather = weather
        self._streams = streams

    def cut(self) -> None:
        """End both sides by a reset."""
        self.over = True
        self.open.set()
        for _, writer in self._streams:
            end = writer.get_extra_info("socket")
            if end is not None and end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def carry(self, links: Links) -> None:
        (one, to_one), (other, to_other) = self._streams
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(one, to_other, links))
                pumps.create_task(self._pump(other, to_one, links))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, links: Links) -> None:
        """Carry one way, until its sender has ended it. Raises `OSError` where either side is gone."""
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_UNDERWAY // _CHUNK)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deliver(underway, writer, links))
            loop = asyncio.get_running_loop()
            data = b"-"
            while data:
                data = await reader.read(_CHUNK)
                late = self.weather.delay + links.rng.random() * self.weather.jitter
                await underway.put((loop.time() + late, data))

    async def _deliver(
        self, underway: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, links: Links
    ) -> None:
        loop, free = asyncio.get_running_loop(), 0.0
        while True:
            due, data = await underway.get()
            if not data:
                writer.write_eof()
                return
            while data:
                weather = self.weather
                size = links.rng.randint(1, weather.pieces) if weather.pieces < _CHUNK else _CHUNK
                piece, data = data[:size], data[size:]
                free = max(loop.time(), free) + len(piece) / weather.rate
                if (late := max(due, free) - loop.time()) > 0:
                    await asyncio.sleep(late)
                await self.open.wait()
                writer.write(piece)
                self.carried += len(piece)
                await writer.drain()


@asynccontextmanager
async def bad_links(
    cluster: LocalCluster, folder: Path, rng: random.Random, weather: Weather | None = None
) -> AsyncIterator[Links]:
    """Links before the nodes of ``cluster``; sessions that are given their `spec` go through them, and so do nodes."""
    assert os.environ.get("FLOWRT_TRANSPORT") == "tcp", "on one host, nodes would find other ways than these"
    links, jobs = Links(rng, weather or Weather()), dict[str, list[str]]()
    try:
        for task, place in cluster.spec.tasks().items():
            port = await links.before(task, place, cluster)
            jobs.setdefault(task.split("/")[1][4:], []).append(f"127.0.0.1:{port}")
        links.spec = ClusterSpec(jobs, token_of(cluster, folder))
        yield links
    finally:
        await links.aclose()


def token_of(cluster: LocalCluster, folder: Path) -> str:
    """A file with the cluster's token."""
    path = folder / "token"
    if not path.exists():
        save_token(path, cluster.token)
    return str(path)


def who_connects(port: int, cluster: LocalCluster) -> str:
    """The task whose process has the socket at this local port; what is no node's is the client's."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, *_, inode = line.split()[:10]
        if int(local.partition(":")[2], 16) == port:
            wanted = f"socket:[{inode}]"
            for task, process in cluster.processes.items():
                if wanted in _sockets(process.pid):
                    return task
    return CLIENT


def _sockets(pid: int) -> set[str]:
    found = set()
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found.add(os.readlink(f"{folder}/{name}"))
    return found
