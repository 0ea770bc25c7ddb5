"""Processes of one host for tests of the memory that they share: both ends of a connection, and a process to kill."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from wire_world import TOKEN

from flowrt.net.door.transport import Bounds, Connection, OpenPort, connect, serve
from flowrt.net.stream.local import Local
from flowrt.sched.host.memory import Memory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

Array = np.ndarray[Any, Any]
FLOATS = 1 << 17  # of 4 bytes: half a MiB


@dataclass(slots=True)
class Ends:
    """A connection that both ends may share memory over: the client's, the server's."""

    client: Connection
    server: Connection
    locals: tuple[Local, Local]
    memory: Memory  # the client's
    door: OpenPort

    async def carry(self, message: Any) -> Any:
        """What comes of a message that the client sends."""
        received, _ = await asyncio.gather(self.server.receive(), self.client.send(message))
        return received

    @property
    def lent(self) -> int:
        """How many arrays the client has lent."""
        channel = self.client._stream.channel
        assert channel is not None
        return len(channel._lent)


@asynccontextmanager
async def neighbours(
    *, own: bool = False, limit: int | None = None, bounds: Bounds | None = None
) -> AsyncIterator[Ends]:
    """``own`` is the server's, ``limit`` that of the client's memory."""
    ends: asyncio.Queue[Connection] = asyncio.Queue()

    async def hand_out(connection: Connection) -> None:
        await ends.put(connection)
        await asyncio.Event().wait()  # until the server is left

    memory = Memory(limit)
    mine, theirs = Local(memory), Local(Memory(), own=own)
    try:
        async with (
            serve("127.0.0.1", 0, TOKEN, hand_out, bounds=bounds, local=theirs) as door,
            await connect("127.0.0.1", door.port, TOKEN, bounds=bounds, local=mine) as client,
        ):
            yield Ends(client, await ends.get(), (mine, theirs), memory, door)
    finally:
        mine.close()
        theirs.close()


async def until(condition: Callable[[], Any]) -> None:
    """Give others turns until something is so that has no event."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def echo_until_killed(pipe: Pipe) -> None:
    """A process that keeps what it receives, and sends back twice that."""
    asyncio.run(_echo(pipe))


async def _echo(pipe: Pipe) -> None:
    local, kept = Local(Memory()), []

    async def answer(connection: Connection) -> None:
        async for message in connection:
            kept.append(message)
            await connection.send({"x": 2 * message["x"]})

    async with serve("127.0.0.1", 0, TOKEN, answer, local=local) as door:
        pipe.send(door.port)
        await asyncio.Event().wait()


@asynccontextmanager
async def another_process() -> AsyncIterator[tuple[Any, int]]:
    """A process of `echo_until_killed` and its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo_until_killed, args=(theirs,), daemon=True)
    process.start()
    try:
        yield process, await asyncio.to_thread(ours.recv)
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
