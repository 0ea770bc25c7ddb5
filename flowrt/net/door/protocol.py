"""What both ends of a connection that opens speak: names, and what is the same on either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import AuthenticationError, BrokenStream
from flowrt.net.stream.connection import Connection
from flowrt.net.stream.shared import Channel

if TYPE_CHECKING:
    import asyncio
    import socket

    from flowrt.net.stream.bounds import Means
    from flowrt.net.wire.handshake import Opening

Hello: TypeAlias = Mapping[str, Any]

PROTOCOL = "flowrt/4"
PATH = "/flowrt"
HOST = "flowrt-host"  # where a client says which host it is on
PEER = "flowrt-peer"  # where a node says who came to it, so that the client sees whether that was itself
SIDE = "flowrt-side"  # a client's ticket, and whether the node has the side socket that it is for
PROVES = "flowrt-proof"  # the node's
UNIX = "flowrt-unix"  # what a neighbour is to change to: its name is where an answer's location is


def connection_over(transport: asyncio.Transport, where: str, means: Means, side: socket.socket | None) -> Connection:
    """A connection whose door is open; with ``side``, memory may be seen by both ends."""
    channel = None if side is None or means.local is None else Channel(side, means.local)
    return Connection(transport, where, means, channel)


async def introduce(connection: Connection, mine: Hello, theirs: Any, opening: Opening, token: str) -> None:
    """Let each end know what the other says of itself, if the other says what it has sealed in its ``opening``."""
    wrong: BrokenStream | AuthenticationError | None = None
    if not isinstance(theirs, dict):
        wrong = BrokenStream(f"{connection.peer} began with {type(theirs).__name__} instead of a hello")
    elif not opening.is_of(token, theirs):
        wrong = AuthenticationError(f"{connection.peer} says something else of itself than what it has sealed")
    if wrong is not None:
        await connection.aclose()
        raise wrong
    connection.hello, connection.peer_hello = mine, theirs
