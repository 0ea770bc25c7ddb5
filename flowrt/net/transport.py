"""The door: who may open a connection to a node, and how one is opened.

A connection begins as HTTP, ``GET /flowrt`` with ``Upgrade: flowrt/2`` and a bearer token, and after the answer 101 is
handed to `flowrt.net.connection`. Law: of a stranger nothing is read but an HTTP head of at most 8 KiB, within a
deadline; nothing of msgpack is decoded before the token is checked; a refusal says which rule it broke and no more. Who
has said nothing yet gives way to who comes: strangers, however many, keep nobody out who speaks at once, and take no
place of those with the token. The token keeps strangers out; it hides nothing from who can read the network: beyond one
machine, use a private one.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import os
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import aiohttp
from aiohttp import web

from flowrt.errors import (
    AuthenticationError,
    BrokenStream,
    ClosedError,
    FlowrtError,
    NodeLost,
    RemoteError,
    ResourceError,
    VersionMismatch,
)
from flowrt.net.connection import Bounds, Connection
from flowrt.net.frames import allocate_array
from flowrt.net.tokens import checked

if TYPE_CHECKING:
    from flowrt.codec import Allocate

__all__ = ["PROTOCOL", "Bounds", "Connection", "Server", "connect", "serve"]

Hello: TypeAlias = Mapping[str, Any]
OnConnection: TypeAlias = Callable[[Connection], Awaitable[None]]

PROTOCOL = "flowrt/2"
PATH = "/flowrt"
HEAD = 8 << 10  # bytes of HTTP that a stranger may send
STRANGERS = 256  # at the door at once
TOLD_SECONDS = 60.0  # between two lines of the log that tell of a throng
_log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)  # aiohttp logs a traceback per malformed request; strangers may not fill disks


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def serve(
    host: str,
    port: int,
    token: str,
    on_connection: OnConnection,
    *,
    hello: Hello | None = None,
    bounds: Bounds | None = None,
    allocate: Allocate = allocate_array,
    max_connections: int = 1024,
    max_strangers: int = STRANGERS,
    handshake: float = 10.0,
) -> AsyncIterator[Server]:
    """Listen on ``host:port`` (0: any free one) and run ``on_connection`` for each authenticated connection.

    Of these there are ``max_connections`` at most. Of ``max_strangers`` at the door (or a quarter of the descriptors
    that the process may have, if that is less) the one that came first has to leave when another comes.

    ``on_connection`` owns its connection, which is closed when it returns. What it raises because its connection ended
    is logged; anything else ends the server and leaves this block. On leaving, every connection is closed and every
    ``on_connection`` cancelled and awaited. Raises `AuthenticationError` without a token, `ResourceError` if the port
    cannot be had.
    """
    if not token and not _is_loopback(host):
        raise AuthenticationError(f"listening on {host}, beyond this machine, needs a token; see --token-file")
    checked(token)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        server = Server(
            host,
            token,
            on_connection,
            dict(hello or {}),
            bounds or Bounds(),
            allocate,
            max_connections,
            max_strangers,
            handshake,
            tasks,
        )
        try:
            await server._open(port)
            yield server
        except BaseException as error:  # raised below, so that it leaves bare and not in a group
            failure = error
        finally:
            await server._aclose()
    if failure is not None:
        raise failure


class Server:
    """An open port, made by `serve`."""

    def __init__(
        self,
        host: str,
        token: str,
        on_connection: OnConnection,
        hello: Hello,
        bounds: Bounds,
        allocate: Allocate,
        max_connections: int,
        max_strangers: int,
        handshake: float,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.host = host
        self.port = 0
        self._bearer = f"Bearer {token}".encode()
        self._on_connection = on_connection
        self._hello = hello
        self._bounds = bounds
        self._allocate = allocate
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._told = float("-inf")  # when the log was last told of a throng
        self._handshake = handshake
        self._tasks = tasks
        self._attending: set[asyncio.Task[None]] = set()
        self._strangers: dict[_Gate, None] = {}  # who came first, first
        self._web = web.Server(
            self._answer, access_log=None, logger=_http_log, keepalive_timeout=handshake, lingering_time=0.0
        )
        self._listener: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Open connections, strangers included."""
        return len(self._strangers) + len(self._web.connections)

    async def _open(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._gate, self.host, port, backlog=self._max_strangers)
        except (OSError, OverflowError) as error:
            reason = _reason(error)
            raise ResourceError(f"cannot listen on {self.host}:{port}: {reason}; port 0 takes any free one") from error
        self.port = self._listener.sockets[0].getsockname()[1]

    def _gate(self) -> _Gate:
        return _Gate(self._web, self._strangers, self._handshake, self._make_way)

    def _make_way(self) -> None:
        """Have a stranger leave, if there are too many for another one."""
        if len(self._strangers) < max(1, min(self._max_strangers, _descriptors() // 4)):
            return
        next(iter(self._strangers)).leave()
        now = asyncio.get_running_loop().time()
        if now - self._told > TOLD_SECONDS:
            self._told = now
            _log.warning(
                "port %d: %d connections say nothing; the oldest give way", self.port, len(self._strangers) + 1
            )

    async def _aclose(self) -> None:
        if self._listener is None:
            return
        self._listener.close()
        for gate in list(self._strangers):
            gate.refuse("503 Service Unavailable")
        for task in self._attending:
            task.cancel()
        if self._attending:
            await asyncio.wait(self._attending)
        await self._web.shutdown(self._bounds.grace)
        await self._listener.wait_closed()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """What aiohttp calls for each request; lasts as long as the connection."""
        refusal = self._refusal(request)
        transport = request.transport
        if refusal is not None or transport is None:
            no = web.Response(status=refusal or 503, headers={"Upgrade": PROTOCOL} if refusal == 426 else None)
            no.force_close()
            return no
        answer = web.StreamResponse(status=101, headers={"Upgrade": PROTOCOL, "Connection": "Upgrade"})
        await answer.prepare(request)
        before = transport.get_protocol()
        connection = Connection(transport, _address(transport), self._bounds, self._allocate)
        task = self._tasks.create_task(self._attend(connection))
        self._attending.add(task)
        task.add_done_callback(self._attending.discard)
        await connection.wait_closed()
        before.connection_lost(None)
        return answer

    def _refusal(self, request: web.BaseRequest) -> int | None:
        """The HTTP status to refuse ``request`` with. What a browser could be tricked into is refused first."""
        if "Origin" in request.headers or not self._knows_itself_as(request.headers.get("Host", "")):
            return 403
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._bearer):
            return 401
        if request.method != "GET" or request.path != PATH:
            return 404
        if request.headers.get("Upgrade") != PROTOCOL:
            return 426
        return 503 if len(self._attending) >= self._max_connections else None

    def _knows_itself_as(self, host: str) -> bool:
        """On loopback, whether a Host header names this machine: a foreign name there was rebound to it."""
        name = host.rsplit(":", 1)[0] if re.search(r":\d+$", host) else host
        name = name.strip("[]")
        return not _is_loopback(self.host) or _is_loopback(name) or name == self.host

    async def _attend(self, connection: Connection) -> None:
        async with connection:
            try:
                await self._greet(connection)
                await self._on_connection(connection)
            except (RemoteError, ClosedError) as error:
                if not connection.closed:
                    raise
                _log.info("%s", error)

    async def _greet(self, connection: Connection) -> None:
        """Hear the other side's hello first: what is sent before it listens here would be lost in its HTTP client."""
        try:
            async with asyncio.timeout(self._handshake):
                theirs = await connection.receive()
                await connection.send(self._hello)
        except TimeoutError:
            await connection.aclose()
            raise BrokenStream(f"{connection.peer} said no hello within {self._handshake:g} s") from None
        await _introduce(connection, self._hello, theirs)


class _Gate(asyncio.Protocol):
    """Reads the head of a stranger's request, bounded in bytes and time, and hands it to aiohttp unread."""

    def __init__(
        self, server: web.Server, strangers: dict[_Gate, None], deadline: float, make_way: Callable[[], None]
    ) -> None:
        self._server = server
        self._strangers = strangers
        self._deadline = deadline
        self._make_way = make_way
        self._head = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._make_way()
        self._strangers[self] = None
        self._timer = asyncio.get_running_loop().call_later(self._deadline, self.refuse, "408 Request Timeout")

    def data_received(self, data: bytes) -> None:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if len(self._head) > HEAD:
            self.refuse("431 Request Header Fields Too Large")
        elif self._head[:4] != b"GET "[: len(self._head)] or -1 < end < len(self._head) - 4:
            self.refuse("400 Bad Request")
        elif end > 0:
            self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def leave(self) -> None:
        """Close without a word."""
        self._leave().abort()

    def refuse(self, status: str) -> None:
        """Answer without aiohttp and close."""
        transport = self._leave()
        transport.write(f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        transport.close()

    def _hand_over(self) -> None:
        """Let aiohttp answer. Reading stays off: what follows the head is for the connection that may come of it."""
        transport = self._leave()
        transport.pause_reading()
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(self._head)

    def _leave(self) -> asyncio.Transport:
        assert self._transport is not None
        self._strangers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        return self._transport


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def connect(
    host: str,
    port: int,
    token: str,
    hello: Hello | None = None,
    *,
    timeout: float = 10.0,  # noqa: ASYNC109 - the name every entry point of flowrt gives it
    bounds: Bounds | None = None,
    allocate: Allocate = allocate_array,
) -> Connection:
    """Open a connection to the node at ``host:port``; the caller closes it.

    Raises `NodeLost` if the node cannot be reached within ``timeout`` seconds, `AuthenticationError` if it refuses the
    token, `VersionMismatch` if it speaks another protocol, and `BrokenStream` if it is no flowrt node.
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout):
            return await _shake_hands(host, port, checked(token), dict(hello or {}), bounds or Bounds(), allocate)
    except TimeoutError as error:
        raise NodeLost(f"{where} did not answer within {timeout:g} s; is a node running there?") from error
    except aiohttp.ClientConnectionError as error:
        raise NodeLost(f"cannot connect to {where}: {_reason(error)}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise BrokenStream(f"{where} does not answer like a flowrt node: {error}") from error


async def _shake_hands(
    host: str, port: int, token: str, hello: Hello, bounds: Bounds, allocate: Allocate
) -> Connection:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
    headers = {"Upgrade": PROTOCOL, "Connection": "Upgrade", "Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
        ) as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        refusal = _meaning(answer, f"{host}:{port}")
        if refusal is not None:
            raise refusal
        connection = _take_over(answer, f"{host}:{port}", bounds, allocate)
    try:
        await connection.send(hello)
        await _introduce(connection, hello, await connection.receive())
    except BaseException:
        connection.cut()  # a goodbye would end what the hello may have begun
        await connection.aclose()
        raise
    return connection


def _meaning(answer: aiohttp.ClientResponse, where: str) -> FlowrtError | None:
    """The error that an answer other than 101 stands for."""
    theirs = answer.headers.get("Upgrade", "another protocol")
    match answer.status:
        case 101 if theirs == PROTOCOL:
            return None
        case 401:
            return AuthenticationError(f"{where} refused the token; both ends need the same one")
        case 403:
            return AuthenticationError(f"{where} does not know itself by that name; connect to the host it is bound to")
        case 101 | 426:
            return VersionMismatch(f"{where} speaks {theirs}, this side {PROTOCOL}; run the same version on both")
        case 503:
            return NodeLost(f"{where} has no room for another connection, or is closing")
        case status:
            return BrokenStream(f"{where} does not answer like a flowrt node: status {status}")


def _take_over(answer: aiohttp.ClientResponse, where: str, bounds: Bounds, allocate: Allocate) -> Connection:
    """The connection under ``answer``, taken from aiohttp, which is told that it is lost and so lets go of it."""
    under = answer.connection
    if under is None or under.transport is None or under.protocol is None:
        raise NodeLost(f"{where} closed the connection during the handshake")
    before = under.protocol
    connection = Connection(under.transport, where, bounds, allocate)
    before.connection_lost(None)
    return connection


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _introduce(connection: Connection, mine: Hello, theirs: Any) -> None:
    if not isinstance(theirs, dict):
        await connection.aclose()
        raise BrokenStream(f"{connection.peer} began with {type(theirs).__name__} instead of a hello")
    connection.hello, connection.peer_hello = mine, theirs


def _descriptors() -> int:
    """How many this process may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(transport: asyncio.Transport) -> str:
    host, port = (transport.get_extra_info("peername") or ("unknown", 0))[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: BaseException) -> str:
    """The cause in the system's words, without aiohttp's."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number in errno.errorcode else str(error)
