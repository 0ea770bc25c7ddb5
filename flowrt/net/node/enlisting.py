"""How a node that no cluster file names becomes a task: it asks any node that is up, and waits for what that says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from flowrt.base.errors import AuthenticationError, BrokenStream, ClosedError, NodeLost, RemoteError, as_error
from flowrt.net.door.addresses import UNREACHABLE
from flowrt.net.door.transport import Connection, connect
from flowrt.net.peer import RETRY
from flowrt.net.wire.messages import Enlist, Enlisted, Refused, Serve, Waits, from_data, to_hello

if TYPE_CHECKING:
    from flowrt.net.door.tls import Keys
    from flowrt.net.node.newcomers import Address

REACH = 5.0  # seconds in which the node that is asked has to answer


async def host_towards(door: Address) -> str:
    """The address of this machine that the node at ``door`` sees. Raises `NodeLost` where none is up there."""
    try:
        async with asyncio.timeout(REACH):
            _, writer = await asyncio.open_connection(*door)
    except UNREACHABLE as error:
        raise _nobody(door, error) from error
    host: str = writer.get_extra_info("sockname")[0]
    writer.close()
    return host


async def enlist(door: Address, token: str, asked: Enlist, waits: Callable[[], None], tls: Keys | None = None) -> str:
    """The task that this node is to be; ``waits`` is called where that takes a session, and none runs.

    Asks the node at ``door``; should that go while this waits, again once it is back. Raises `NodeLost` where none is
    up there, `AuthenticationError` for the wrong token, `VersionMismatch` for another version, and what a master says
    of a task that cannot be had.
    """
    waited = False

    def wait() -> None:
        nonlocal waited
        if not waited:
            waits()
        waited = True

    while True:
        try:
            connection = await connect(*door, token, to_hello(asked), timeout=REACH, tls=tls)
            async with connection:
                return await _be_told(connection, wait)
        except AuthenticationError as error:
            raise AuthenticationError(f"{error}: give --token-file the cluster's") from error
        except (NodeLost, ClosedError) as error:
            if not waited:
                raise _nobody(door, error) from error
            await asyncio.sleep(RETRY)


async def _be_told(connection: Connection, waits: Callable[[], None]) -> str:
    if not isinstance(from_data(connection.peer_hello), Serve):
        raise BrokenStream(f"{connection.peer} is no node; give --join the address of one")
    while True:
        match from_data(await connection.receive()):
            case Waits():
                waits()
            case Enlisted(task):
                return task
            case Refused(error, text):
                raise as_error(error, text)
            case other:
                raise RemoteError(f"{connection.peer} answered {type(other).__name__} to a newcomer")


def _nobody(door: Address, error: BaseException) -> NodeLost:
    where = f"{door[0]}:{door[1]}"
    return NodeLost(f"no node answers at {where}: {error}; give --join the address that a node says it is ready on")
