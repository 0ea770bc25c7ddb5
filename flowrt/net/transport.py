"""The door: who may open a connection to a node, and how one is opened.

A connection begins as HTTP, ``GET /flowrt`` with ``Upgrade: flowrt/2`` and a bearer token, and after the answer 101 is
handed to `flowrt.net.connection`. Law: of a stranger nothing is read but an HTTP head of at most 8 KiB, within a
deadline; nothing of msgpack is decoded before the token is checked; a refusal says which rule it broke and no more. Who
has said nothing yet gives way to who comes: strangers, however many, keep nobody out who speaks at once, and take no
place of those with the token. The token keeps strangers out; it hides nothing from who can read the network: beyond one
machine, use a private one.

Beside its port a node may listen at a Unix socket (`flowrt.net.local`), where the same rules hold. Who comes to the
port from the same host, by its own account and with nothing in between, is sent there.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

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
from flowrt.net.bounds import Bounds
from flowrt.net.connection import Connection
from flowrt.net.frames import allocate_array
from flowrt.net.gate import Gate
from flowrt.net.local import ask, is_unix, open_side, peer_of
from flowrt.net.shared import Channel
from flowrt.net.tokens import checked

if TYPE_CHECKING:
    import socket

    from flowrt.codec import Allocate
    from flowrt.net.local import Local

__all__ = ["PROTOCOL", "Bounds", "Connection", "Server", "connect", "serve"]

Hello: TypeAlias = Mapping[str, Any]
OnConnection: TypeAlias = Callable[[Connection], Awaitable[None]]

PROTOCOL = "flowrt/2"
PATH = "/flowrt"
HOST = "Flowrt-Host"  # where a client says which host it is on
PEER = "Flowrt-Peer"  # where a node says who came to it, so that the client sees whether that was itself
SIDE = "Flowrt-Side"  # a client's ticket, and whether the node has the side socket that it is for
UNIX = "flowrt-unix"  # what a neighbour is to change to: its name is where an answer's location is
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
    local: Local | None = None,
    max_connections: int = 1024,
    max_strangers: int = STRANGERS,
    handshake: float = 10.0,
) -> AsyncIterator[Server]:
    """Listen on ``host:port`` (0: any free one) and run ``on_connection`` for each authenticated connection.

    Of these there are ``max_connections`` at most. Of ``max_strangers`` at the door (or a quarter of the descriptors
    that the process may have, if that is less) the one that came first has to leave when another comes. With ``local``,
    others of this host are served at a Unix socket.

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
            local,
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
        local: Local | None,
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
        self._local = local
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._told = float("-inf")  # when the log was last told of a throng
        self._handshake = handshake
        self._tasks = tasks
        self._attending: set[asyncio.Task[None]] = set()
        self._strangers: dict[Gate, None] = {}  # who came first, first
        self._web = web.Server(
            self._answer, access_log=None, logger=_http_log, keepalive_timeout=handshake, lingering_time=0.0
        )
        self._listener: asyncio.Server | None = None
        self._local_listener: asyncio.Server | None = None

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
        door = None if self._local is None else self._local.listen()
        if door is not None:
            self._local_listener = await loop.create_unix_server(self._gate, sock=door, backlog=self._max_strangers)

    def _gate(self) -> Gate:
        return Gate(self._web, self._strangers, self._handshake, self._make_way)

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
        if self._local_listener is not None:
            self._local_listener.close()
        for gate in list(self._strangers):
            gate.refuse("503 Service Unavailable")
        for task in self._attending:
            task.cancel()
        if self._attending:
            await asyncio.wait(self._attending)
        await self._web.shutdown(self._bounds.grace)
        await self._listener.wait_closed()
        if self._local_listener is not None:
            await self._local_listener.wait_closed()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """What aiohttp calls for each request; lasts as long as the connection."""
        refusal = self._refusal(request)
        transport = request.transport
        if refusal is not None or transport is None:
            no = web.Response(status=refusal or 503, headers={"Upgrade": PROTOCOL} if refusal == 426 else None)
            no.force_close()
            return no
        if self._is_neighbour(request, transport):
            assert self._local is not None
            place = {"Upgrade": UNIX, "Location": self._local.name, PEER: _address(transport)}
            there = web.StreamResponse(status=101, headers=place | {"Connection": "Upgrade"})
            there.force_close()
            await there.prepare(request)
            return there
        side = self._side_of(request, transport)
        headers = {"Upgrade": PROTOCOL, "Connection": "Upgrade"} | ({SIDE: "yes"} if side is not None else {})
        answer = web.StreamResponse(status=101, headers=headers)
        await answer.prepare(request)
        before = transport.get_protocol()
        connection = _connection(transport, _address(transport), self._bounds, self._allocate, self._local, side)
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

    def _is_neighbour(self, request: web.BaseRequest, transport: asyncio.Transport) -> bool:
        """Whether who asks at the port should ask at the Unix socket."""
        here = self._local is not None and self._local_listener is not None and not is_unix(transport)
        return here and request.headers.get(HOST) == self._local.host  # type: ignore[union-attr]

    def _side_of(self, request: web.BaseRequest, transport: asyncio.Transport) -> socket.socket | None:
        """The side socket that a client of the Unix socket has opened."""
        ticket = request.headers.get(SIDE)
        if ticket is None or self._local is None or not is_unix(transport):
            return None
        return self._local.claim(ticket)

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
    local: Local | None = None,
) -> Connection:
    """Open a connection to the node at ``host:port``; the caller closes it. With ``local``, a node of the same host is
    talked to at its Unix socket.

    Raises `NodeLost` if the node cannot be reached within ``timeout`` seconds, `AuthenticationError` if it refuses the
    token, `VersionMismatch` if it speaks another protocol, and `BrokenStream` if it is no flowrt node.
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout):
            client = _Client(host, port, checked(token), dict(hello or {}), bounds or Bounds(), allocate, local)
            return await client.shake_hands()
    except TimeoutError as error:
        raise NodeLost(f"{where} did not answer within {timeout:g} s; is a node running there?") from error
    except aiohttp.ClientConnectionError as error:
        raise NodeLost(f"cannot connect to {where}: {_reason(error)}") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise BrokenStream(f"{where} does not answer like a flowrt node: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """Who opens a connection."""

    host: str
    port: int
    token: str
    hello: Hello
    bounds: Bounds
    allocate: Allocate
    local: Local | None

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def headers(self) -> dict[str, str]:
        return {"Upgrade": PROTOCOL, "Connection": "Upgrade", "Authorization": f"Bearer {self.token}"}

    async def shake_hands(self) -> Connection:
        neighbour = self.local is not None and self.local.host != ""
        connection = await self._at_port(neighbour)
        if connection is None:  # it was sent on, and came to nothing there
            connection = await self._at_port(neighbour=False)
        assert connection is not None
        try:
            await connection.send(self.hello)
            await _introduce(connection, self.hello, await connection.receive())
        except BaseException:
            connection.cut()  # a goodbye would end what the hello may have begun
            await connection.aclose()
            raise
        return connection

    async def _at_port(self, neighbour: bool) -> Connection | None:
        """Ask at the port, and where it says so at the Unix socket; None if nothing comes of that."""
        headers = self.headers()
        if neighbour and self.local is not None:
            headers[HOST] = self.local.host
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
            ) as session,
            session.get(f"http://{self.authority}{PATH}", headers=headers, allow_redirects=False) as answer,
        ):
            if neighbour and answer.status == 101 and answer.headers.get("Upgrade") == UNIX:
                came_straight = answer.headers.get(PEER) == _own_address(answer)
                name = answer.headers.get("Location", "")
                answer.close()
            else:
                refusal = _meaning(answer.status, answer.headers, self.where)
                if refusal is not None:
                    raise refusal
                return self._take_over(answer)
        return await self._at_socket(name) if came_straight and re.fullmatch("[0-9a-f]{1,64}", name) else None

    async def _at_socket(self, name: str) -> Connection | None:
        assert self.local is not None
        side, ticket = (self.local.segments is not None and open_side(name)) or (None, "")
        headers = {"Host": self.authority} | self.headers() | ({SIDE: ticket} if ticket else {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        try:
            answer = await ask(name, f"GET {PATH} HTTP/1.1\r\n{lines}\r\n")
            if answer is None:
                return None
            refusal = _meaning(answer.status, answer.headers, self.where)
            if refusal is not None:
                answer.transport.abort()
                raise refusal
            claimed, side = (side, None) if SIDE.lower() in answer.headers else (None, side)
            return _connection(answer.transport, self.where, self.bounds, self.allocate, self.local, claimed)
        finally:
            if side is not None:
                side.close()

    def _take_over(self, answer: aiohttp.ClientResponse) -> Connection:
        """The connection under ``answer``, taken from aiohttp, which is told that it is lost and so lets go of it."""
        under = answer.connection
        if under is None or under.transport is None or under.protocol is None:
            raise NodeLost(f"{self.where} closed the connection during the handshake")
        before = under.protocol
        connection = Connection(under.transport, self.where, self.bounds, self.allocate, self.local)
        before.connection_lost(None)
        return connection


def _own_address(answer: aiohttp.ClientResponse) -> str:
    """The address that we have for ourselves; empty if the connection is gone."""
    under = answer.connection
    if under is None or under.transport is None:
        return ""
    return _named(under.transport.get_extra_info("sockname"))


def _meaning(status: int, headers: Mapping[str, str], where: str) -> FlowrtError | None:
    """The error that an answer other than 101 stands for."""
    theirs = headers.get("Upgrade") or headers.get("upgrade") or "another protocol"
    match status:
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
        case _:
            return BrokenStream(f"{where} does not answer like a flowrt node: status {status}")


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _connection(
    transport: asyncio.Transport,
    where: str,
    bounds: Bounds,
    allocate: Allocate,
    local: Local | None,
    side: socket.socket | None,
) -> Connection:
    """A connection whose door is open; with ``side``, memory may be seen by both ends."""
    channel = None if side is None or local is None else Channel(side, local)
    return Connection(transport, where, bounds, allocate, local, channel)


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
    """The other end, for people."""
    if is_unix(transport):
        return f"process {peer_of(transport.get_extra_info('socket'))[0]} of this host"
    return _named(transport.get_extra_info("peername"))


def _named(address: tuple[Any, ...] | None) -> str:
    host, port = (address or ("unknown", 0))[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: BaseException) -> str:
    """The cause in the system's words, without aiohttp's."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number in errno.errorcode else str(error)
