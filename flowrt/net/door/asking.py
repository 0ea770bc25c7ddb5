"""How a stranger asks to be let in: it sends the head of a request, and reads that of the answer, and no more."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import BrokenStream, NodeLost
from flowrt.base.valueclass import valueclass
from flowrt.net.door import heads
from flowrt.net.door.secured import secured_to
from flowrt.net.stream.local import door_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@valueclass
class Arrived:
    """What was answered, and the way that it came; its reading is paused."""

    transport: asyncio.Transport
    head: heads.Head


async def ask_at(
    host: str, port: int, head: bytes, where: str, tls: ssl.SSLContext | None = None, keyed: bool = False
) -> Arrived:
    """Send a head to who listens at ``host:port``, ``where`` for people. Raises `OSError` where that fails.

    ``keyed`` says whether this end shows a certificate where it is asked for one.
    """
    failure: OSError | None = None
    for address in await _addresses(host, port):
        try:
            return await _answered(_Asking(head, where, keyed), partial(_connect, address, port, tls, host))
        except ssl.SSLError:
            raise
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


async def ask_socket(name: str, head: bytes, where: str) -> Arrived | None:
    """Send a head to who listens at the Unix socket ``name``; None where nobody of this user does."""
    door = door_of(name)
    if door is None:
        return None
    loop = asyncio.get_running_loop()
    try:
        return await _answered(_Asking(head, where), partial(loop.create_unix_connection, sock=door))
    except BaseException:
        door.close()
        raise


async def _connect(
    address: str, port: int, tls: ssl.SSLContext | None, host: str, asking: Callable[[], _Asking]
) -> tuple[asyncio.Transport, _Asking]:
    if tls is None:
        return await asyncio.get_running_loop().create_connection(asking, address, port)
    transport, protocol = await secured_to(address, port, tls, host), asking()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    transport.resume_reading()
    return transport, protocol


async def _addresses(host: str, port: int) -> list[str]:
    """Where a host is; asyncio's errors for several at once would not tell why."""
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def _answered(
    asking: _Asking, connect: Callable[[Callable[[], _Asking]], Awaitable[tuple[Any, _Asking]]]
) -> Arrived:
    transport, _ = await connect(lambda: asking)
    try:
        return Arrived(transport, await asking.answer)
    except BaseException:
        transport.abort()
        raise


class _Asking(asyncio.BufferedProtocol):
    """Sends the head of a request and reads that of the answer; nothing follows it before we have spoken."""

    def __init__(self, head: bytes, where: str, keyed: bool = True) -> None:
        self.answer: asyncio.Future[heads.Head] = asyncio.get_running_loop().create_future()
        self._head = head
        self._where = where
        self._keyed = keyed
        self._read = b""
        self._buffer = memoryview(bytearray(heads.MOST + 1))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._head)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._read += self._buffer[:nbytes]
        if self.answer.done():
            return
        if self._read.endswith(heads.END):
            self._transport.pause_reading()
            self._settle()
        elif heads.END in self._read or len(self._read) > heads.MOST or self._read[:5] != b"HTTP/"[: len(self._read)]:
            self._fail(BrokenStream(f"{self._where} does not answer like a flowrt node"))

    def _settle(self) -> None:
        try:
            self.answer.set_result(heads.read(self._read))
        except ValueError as error:
            self._fail(BrokenStream(f"{self._where} does not answer like a flowrt node: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        hint = "" if self._keyed else "; if it was started with --tls, this side needs it, too"
        closed = NodeLost(f"{self._where} closed the connection during the handshake{hint}")
        self._fail(exc if isinstance(exc, ssl.SSLError) else closed)

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # seen: who is cancelled at the same moment never looks at it
