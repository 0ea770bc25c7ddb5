"""The door: who may open a connection to a node. How one is opened is `flowrt.net.door.connecting`'s.

A connection begins as HTTP, ``GET /flowrt`` with ``Upgrade: flowrt/4``, and goes on as `flowrt.net.wire.handshake`
says: the answer 101 proves that the node has the token, then the client proves the same, and the stream is handed to
`flowrt.net.stream.connection`. Law: of a stranger nothing is read but an HTTP head of at most 8 KiB and a proof of 32
bytes, within a deadline; nothing of msgpack is decoded before the proof is checked; a refusal says which rule it broke
and no more. Who has said nothing yet gives way to who comes: strangers, however many, keep nobody out who speaks at
once, and take no place of those with the token; nor does one address take all places. Beyond this machine all of this
is said over TLS, to whose certificates the proofs are bound (`flowrt.net.door.tls`), and who fails there too often is
not listened to for a while. Over loopback nothing hides what follows from who may read it there.

Beside its port a node may listen at a Unix socket (`flowrt.net.stream.local`), where the same rules hold, without TLS.
Who comes to the port from the same host, by its own account and with nothing in between, is sent there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import AuthenticationError, BrokenStream, ClosedError, RemoteError, ResourceError
from flowrt.net.door.addresses import is_loopback, named
from flowrt.net.door.connecting import connect, reason
from flowrt.net.door.descriptors import most_descriptors
from flowrt.net.door.failures import Failures
from flowrt.net.door.gate import Gate, Reply
from flowrt.net.door.protocol import HOST, PATH, PEER, PROTOCOL, PROVES, SIDE, UNIX, Hello, connection_over, introduce
from flowrt.net.door.secured import Secured, Taking
from flowrt.net.door.tls import channel_of, keys_at, told_of
from flowrt.net.door.tokens import checked
from flowrt.net.stream.bounds import Bounds, Means
from flowrt.net.stream.connection import Connection
from flowrt.net.stream.local import is_unix, peer_of
from flowrt.net.wire.frames import allocate_array
from flowrt.net.wire.handshake import NONCE, HandshakeTerms, Opening, is_same

if TYPE_CHECKING:
    import socket

    from flowrt.base.codec import Allocate
    from flowrt.net.door.heads import Head
    from flowrt.net.door.tls import Keys, Vouched
    from flowrt.net.stream.local import Local

__all__ = ["PROTOCOL", "Bounds", "Connection", "OpenPort", "connect", "serve"]

OnConnection: TypeAlias = Callable[[Connection], Awaitable[None]]

STRANGERS = 256  # at the door at once
TOLD_SECONDS = 60.0  # between two lines of the log that tell the same of strangers
TOLD_MOST = 8  # lines in which different things are told of them meanwhile
_log = logging.getLogger(__name__)


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
    tls: Keys | None = None,
    max_connections: int = 1024,
    max_from_one: int = 512,
    max_strangers: int = STRANGERS,
    handshake: float = 10.0,
) -> AsyncIterator[OpenPort]:
    """Listen on ``host:port`` (0: any free one) and run ``on_connection`` for each authenticated connection.

    Of these there are ``max_connections`` at most, and ``max_from_one`` from one address. Of ``max_strangers`` at the
    door (or a quarter of the descriptors that the process may have, if that is less) the one that came first has to
    leave when another comes. With ``local``, others of this host are served at a Unix socket; with ``tls``, the port
    speaks that alone, as it does beyond this machine without.

    ``on_connection`` owns its connection, which is closed when it returns. What it raises because its connection ended
    is logged; anything else ends the server and leaves this block. On leaving, every connection is closed and every
    ``on_connection`` cancelled and awaited. Raises `AuthenticationError` without a token, and on all networks
    without ``tls``, `ResourceError` if the port cannot be had.
    """
    if not token and not is_loopback(host):
        raise AuthenticationError(f"listening on {host}, beyond this machine, needs a token; see --token-file")
    checked(token)
    ways = keys_at(host, tls)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as tasks:
        server = OpenPort(
            host=host,
            token=token,
            on_connection=on_connection,
            hello=dict(hello or {}),
            means=Means(bounds or Bounds(), allocate, local),
            tls=ways,
            max_connections=max_connections,
            max_from_one=max_from_one,
            max_strangers=max_strangers,
            handshake=handshake,
            tasks=tasks,
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


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class OpenPort:
    """An open port, made by `serve`, which says what there is to choose."""

    host: str
    token: str
    on_connection: OnConnection
    hello: Hello
    means: Means
    tls: Keys | Vouched | None
    max_connections: int
    max_from_one: int
    max_strangers: int
    handshake: float
    tasks: asyncio.TaskGroup
    port: int = 0
    _told: dict[str, float] = field(default_factory=dict)  # what the log was told lately, and when
    _attending: set[asyncio.Task[None]] = field(default_factory=set)
    _from: Counter[str] = field(default_factory=Counter)  # connections by address
    _securing: set[asyncio.Task[None]] = field(default_factory=set)
    _strangers: dict[Gate, None] = field(default_factory=dict)  # who came first, first
    _failures: Failures = field(default_factory=Failures)
    _listener: asyncio.Server | None = None
    _local_listener: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Open connections, strangers included."""
        return len(self._strangers) + len(self._attending)

    async def _open(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._gate if self.tls is None else self._secured_gate, self.host, port, backlog=self.max_strangers
            )
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot listen on {self.host}:{port}: {reason(error)}; port 0 takes any free one"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]
        door = None if self.means.local is None else self.means.local.listen(self.token)
        if door is not None:
            self._local_listener = await loop.create_unix_server(self._gate, sock=door, backlog=self.max_strangers)

    def _gate(self) -> Gate:
        return Gate(self, self.handshake)

    def _secured_gate(self) -> Taking:
        """A gate that nobody talks at before TLS is agreed upon."""

        def accept(connection: socket.socket) -> None:
            gate, transport = self._gate(), Secured(connection)
            transport.set_protocol(gate)
            gate.connection_made(transport)
            if not transport.is_closing():
                task = self.tasks.create_task(self._secure(gate, transport))
                self._securing.add(task)
                task.add_done_callback(self._securing.discard)

        return Taking(accept)

    async def _aclose(self) -> None:
        if self._listener is None:
            return
        self._listener.close()
        if self._local_listener is not None:
            self._local_listener.close()
        for gate in list(self._strangers):
            gate.refuse("503 Service Unavailable")
        ending = self._attending | self._securing
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        await self._listener.wait_closed()
        if self._local_listener is not None:
            await self._local_listener.wait_closed()

    # ── strangers, at their gates ──

    def enter(self, gate: Gate, transport: asyncio.Transport) -> None:
        """Listen to a stranger: at a port that speaks TLS, once that is agreed upon."""
        if self._is_shunned(transport):
            gate.leave()
            return
        self._make_way()
        self._strangers[gate] = None
        if not isinstance(transport, Secured):
            gate.talk_over(transport)

    def leave(self, gate: Gate) -> None:
        """A stranger is none any more."""
        self._strangers.pop(gate, None)

    def answer(self, head: Head, transport: asyncio.Transport) -> Reply:
        """Prove to who asks that we have the token, or send it away."""
        refusal = self._refusal(head, transport)
        if refusal is not None:
            return Reply(refusal, {"Upgrade": PROTOCOL} if refusal.startswith("426") else {})
        if (local := self._neighbour(head, transport)) is not None:
            place = {"Upgrade": UNIX, "Connection": "Upgrade", "Location": local.told, PEER: _address(transport)}
            return Reply("101 Switching Protocols", place)
        client = Opening.read(head.headers)
        assert client is not None
        node = Opening.of(self.token, secrets.token_bytes(NONCE), self.hello)
        terms = HandshakeTerms(client, node, channel_of(transport, node=True))
        side = self._side_of(head, transport)
        headers = {"Upgrade": PROTOCOL, "Connection": "Upgrade"} | ({SIDE: "yes"} if side is not None else {})
        headers |= node.headers() | {PROVES: terms.node_proof(self.token).hex()}
        return Reply("101 Switching Protocols", headers, terms, side)

    def admit(self, transport: asyncio.Transport, reply: Reply, proof: bytes) -> str | None:
        """Attend to who has the token; answers the status to refuse it with, if so."""
        assert reply.terms is not None
        if not is_same(reply.terms.client_proof(self.token), proof):
            return "401 Unauthorized"
        address = _host_of(transport)
        if self._is_full(address):
            return "503 Service Unavailable"
        connection = connection_over(transport, _address(transport), self.means, reply.side)
        self._from[address] += 1
        task = self.tasks.create_task(self._attend(connection, reply.terms.client))
        self._attending.add(task)
        task.add_done_callback(lambda task: self._forget(task, address))
        return None

    def failed(self, transport: asyncio.Transport, how: str) -> None:
        """Note that somebody was refused, or fails at TLS."""
        self._failures.note(_host_of(transport), self._now())
        self._tell(how, f"refused {_address(transport)}, perhaps among others: {how}")

    def _forget(self, task: asyncio.Task[None], address: str) -> None:
        self._attending.discard(task)
        self._from[address] -= 1
        if not self._from[address]:
            del self._from[address]

    def _is_shunned(self, transport: asyncio.Transport) -> bool:
        """Whether who comes from there fails so often that it is not heard.

        Never where somebody is connected from there; nor on loopback, where a handshake costs little and the address is
        everybody's.
        """
        address = _host_of(transport)
        if not self._failures.refuses(address, self._now()) or address in self._from or is_loopback(address):
            return False
        return not is_unix(transport)

    def _make_way(self) -> None:
        """Have a stranger leave, if there are too many for another one."""
        if len(self._strangers) < max(1, min(self.max_strangers, most_descriptors() // 4)):
            return
        next(iter(self._strangers)).leave()
        self._tell("throng", f"{len(self._strangers) + 1} connections say nothing; the oldest give way")

    def _tell(self, what: str, text: str) -> None:
        """Say so in the log, but not often: strangers may not fill disks."""
        now = self._now()
        self._told = {told: when for told, when in self._told.items() if now - when <= TOLD_SECONDS}
        if what not in self._told and len(self._told) < TOLD_MOST:
            self._told[what] = now
            _log.warning("port %d: %s", self.port, text)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _secure(self, gate: Gate, transport: Secured) -> None:
        """Agree upon TLS with a stranger; one that begins with anything else is heard, and told that."""
        assert self.tls is not None
        begun = False
        try:
            begun = await transport.begins_tls()
            if begun:
                await transport.agree(self.tls.contexts().node)
                gate.talk_over(transport)
            transport.resume_reading()
        except OSError as error:
            if begun:
                self.failed(transport, told_of(error))
            gate.leave()

    def _refusal(self, head: Head, transport: asyncio.Transport) -> str | None:
        """The HTTP status to refuse a request with. What a browser could be tricked into is refused first."""
        if head.path is None:
            return "400 Bad Request"
        if "origin" in head.headers or not self._knows_itself_as(head.headers.get("host", "")):
            return "403 Forbidden"
        if Opening.read(head.headers) is None:
            return "401 Unauthorized"
        if head.path != PATH:
            return "404 Not Found"
        if head.headers.get("upgrade") != PROTOCOL:
            return "426 Upgrade Required"
        return "503 Service Unavailable" if self._is_full(_host_of(transport)) else None

    def _is_full(self, address: str) -> bool:
        return len(self._attending) >= self.max_connections or self._from[address] >= self.max_from_one

    def _neighbour(self, head: Head, transport: asyncio.Transport) -> Local | None:
        """Whose Unix socket is to be asked at by who asks at the port, if that is on this host."""
        local = self.means.local
        if local is None or self._local_listener is None or is_unix(transport):
            return None
        return local if head.headers.get(HOST) == local.host else None

    def _side_of(self, head: Head, transport: asyncio.Transport) -> socket.socket | None:
        """The side socket that a client of the Unix socket has opened."""
        ticket = head.headers.get(SIDE)
        if ticket is None or self.means.local is None or not is_unix(transport):
            return None
        return self.means.local.claim(ticket)

    def _knows_itself_as(self, host: str) -> bool:
        """On loopback, whether a Host header names this machine: a foreign name there was rebound to it."""
        name = host.rsplit(":", 1)[0] if re.search(r":\d+$", host) else host
        name = name.strip("[]")
        return not is_loopback(self.host) or is_loopback(name) or name == self.host

    # ── those who have the token ──

    async def _attend(self, connection: Connection, client: Opening) -> None:
        async with connection:
            try:
                await self._greet(connection, client)
                await self.on_connection(connection)
            except (RemoteError, ClosedError) as error:
                if not connection.closed:
                    raise
                _log.info("%s", error)

    async def _greet(self, connection: Connection, client: Opening) -> None:
        """Hear what the other side says of itself, which it has sealed, and say the same of this one."""
        try:
            async with asyncio.timeout(self.handshake):
                theirs = await connection.receive()
                await connection.send(self.hello)
        except TimeoutError:
            await connection.aclose()
            raise BrokenStream(f"{connection.peer} said no hello within {self.handshake:g} s") from None
        await introduce(connection, self.hello, theirs, client, self.token)


def _host_of(transport: asyncio.Transport) -> str:
    """The other end's host; empty for this one's own, of which there is nothing else to tell."""
    return "" if is_unix(transport) else str((transport.get_extra_info("peername") or ("unknown",))[0])


def _address(transport: asyncio.Transport) -> str:
    """The other end, for people."""
    if is_unix(transport):
        return f"process {peer_of(transport.get_extra_info('socket'))[0]} of this host"
    return named(transport.get_extra_info("peername"))
