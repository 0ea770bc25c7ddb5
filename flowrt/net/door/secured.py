"""TLS over a socket that OpenSSL itself reads and writes: a transport that copies nothing of its own.

asyncio's TLS, and uvloop's, takes every byte through memory of OpenSSL's once more, which costs a fifth of what a large
array takes. Here a record is encrypted out of the memory that `write` was given and goes straight to the kernel, and
what comes is decrypted into the memory that the protocol has for it.

Law: nothing is buffered here. What `write` was given stays as it is until the protocol is told to go on, or until
`get_write_buffer_size` is 0. A turn of the loop encrypts `BURST` bytes at most, and decrypts as many. The protocol is
an `asyncio.BufferedProtocol`; until it is set, and `resume_reading` called, nothing is read.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable

TLS = b"\x16"  # what that begins with
RECORD = 1 << 14  # bytes in one, at most
BURST = 1 << 20  # bytes in one turn of the loop: half a millisecond
_LATER = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError)


class Taking(asyncio.Protocol):
    """Takes the socket of a transport that was accepted just now, and has read nothing."""

    def __init__(self, use: Callable[[socket.socket], None]) -> None:
        self._use = use

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with suppress(OSError):  # there may be no descriptor left, or the other end gone
            self._use(socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())))
        cast("asyncio.Transport", transport).abort()  # which closes its descriptor, and not ours


async def secured_to(address: str, port: int, context: ssl.SSLContext, host: str) -> Secured:
    """Connect to an ``address`` of ``host``, and agree upon TLS with who listens there. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    transport = Secured(connection)
    try:
        await transport.agree(context, host)
    except BaseException:
        transport.abort()
        raise
    return transport


class Secured(asyncio.Transport):
    """TLS over ``connection``, which is the transport's from now on; in plain text until both ends `agree`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__({"peername": _peer_of(connection), "sockname": connection.getsockname()})
        self._loop = asyncio.get_running_loop()
        self._protocol = asyncio.BufferedProtocol()
        self._socket = connection
        self._fd = connection.fileno()
        self._left: deque[memoryview] = deque()  # what the kernel has not taken
        self._budget = BURST  # bytes that may still be written in this turn
        self._reading = False  # the loop tells of what comes
        self._blocked = False  # the loop tells when there is room to write
        self._waiter: asyncio.Future[None] | None = None  # who agrees, while the other end has its turn
        self._closing = self._over = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """``socket`` and ``ssl_object`` are one, once TLS is agreed upon."""
        if name == "socket" or (name == "ssl_object" and isinstance(self._socket, ssl.SSLSocket)):
            return self._socket
        return super().get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Have ``protocol``, a buffered one, told from now on."""
        assert isinstance(protocol, asyncio.BufferedProtocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # ── agreeing ──

    async def begins_tls(self) -> bool:
        """Whether the first byte that the other end sends begins TLS; it stays unread. Raises `OSError`."""
        while True:
            try:
                return self._socket.recv(1, socket.MSG_PEEK) == TLS
            except BlockingIOError:
                await self._turn_of(self._loop.add_reader, self._loop.remove_reader)

    async def agree(self, context: ssl.SSLContext, host: str | None = None) -> None:
        """Agree upon TLS, with ``host`` as its client. Raises `OSError`, which may be an `ssl.SSLError`."""
        secured = self._socket = context.wrap_socket(
            self._socket, server_side=host is None, server_hostname=host, do_handshake_on_connect=False
        )
        while True:
            try:
                secured.do_handshake()
                return
            except ssl.SSLWantReadError:
                await self._turn_of(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._turn_of(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLEOFError as error:
                raise ConnectionResetError("it was closed while TLS was agreed upon") from error

    async def _turn_of(self, watch: Callable[..., Any], unwatch: Callable[[int], Any]) -> None:
        if self._over:  # in the turn in which the other end was awaited no more; the descriptor is about to be closed
            raise _given_up()
        waiter = self._waiter = self._loop.create_future()
        watch(self._fd, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if not self._over:
                unwatch(self._fd)

    # ── reading ──

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if not (self._reading or self._closing):
            self._reading = True
            self._loop.add_reader(self._fd, self._receive)
            self._mind_pending()

    def _mind_pending(self) -> None:
        """Come back for what OpenSSL has read and nobody took: of that, the kernel does not tell."""
        if self._reading and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Take in what has come, as far as the protocol has one place for it."""
        if not self._reading:
            return
        buffer = memoryview(self._protocol.get_buffer(-1))[:BURST]
        count, got, size = 0, RECORD, len(buffer)
        failure: OSError | None = None
        try:
            while count < size and got >= RECORD:  # a short one is the last, most often: to look costs as much as it
                got = self._socket.recv_into(buffer[count:], size - count)
                count += got
        except _LATER:
            pass
        except OSError as error:
            failure = error
        if count:
            self._protocol.buffer_updated(count)  # also what came before a failure
        if failure is not None:
            self._end(failure)
        elif not got:
            self._hear_end()
        elif count == size:
            self._mind_pending()

    def _hear_end(self) -> None:
        if not self._closing:
            self._protocol.eof_received()
            self.close()

    # ── writing ──

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing: the protocol is told to pause whenever there is something that the kernel has not taken."""

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._left))

    def write(self, data: Any) -> None:
        if self._closing:
            return
        self._left.append(memoryview(data).cast("B"))
        if not self._blocked:
            self._send()

    def can_write_eof(self) -> bool:
        """TLS has no half of a connection that ends."""
        return False

    def write_eof(self) -> None:
        raise NotImplementedError

    def _send(self) -> None:
        """Write what is left until the kernel takes no more, or others should have the loop."""
        left = self._left
        try:
            while left and self._budget > 0:
                sent = self._socket.send(left[0])  # a record of it at most
                self._budget -= sent
                if sent < len(left[0]):
                    left[0] = left[0][sent:]
                else:
                    left.popleft()
        except _LATER:
            pass
        except OSError as error:
            self._end(error)
            return
        if left and not self._blocked:
            self._blocked = True
            self._loop.add_writer(self._fd, self._go_on)
            self._protocol.pause_writing()
        elif self._blocked and not left:
            self._blocked = False
            self._loop.remove_writer(self._fd)
            self._protocol.resume_writing()
        if self._closing and not left:
            self._say_end()

    def _go_on(self) -> None:
        self._budget = BURST
        self._send()

    # ── ending ──

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self.pause_reading()
            self._closing = True
            if not self._left:
                self._say_end()

    def abort(self) -> None:
        self._end(None)

    def _say_end(self) -> None:
        """Say that nothing follows; whether the other end says the same is not waited for."""
        if isinstance(self._socket, ssl.SSLSocket):
            with suppress(OSError, ValueError):
                self._socket.unwrap()
        self._end(None)

    def _end(self, error: OSError | None) -> None:
        if self._over:
            return
        waiting = self._waiter is not None
        if self._reading or waiting:  # else the descriptor may be another's: where TLS cannot begin, `ssl` closes it
            self._loop.remove_reader(self._fd)
        if self._blocked or waiting:
            self._loop.remove_writer(self._fd)
        self._reading = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(_given_up())
        self._closing = self._over = True
        self._left.clear()
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


def _given_up() -> ConnectionAbortedError:
    return ConnectionAbortedError("it was given up while TLS was agreed upon")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _peer_of(connection: socket.socket) -> Any:
    """The other end's address; None where it is gone already."""
    try:
        return connection.getpeername()
    except OSError:
        return None
