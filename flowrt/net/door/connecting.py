"""The client's side of the door: how a connection to a node is opened; see `flowrt.net.door.transport`."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrt.base.errors import AuthenticationError, BrokenStream, FlowrtError, NodeLost, NoDescriptors, VersionMismatch
from flowrt.net.door import heads
from flowrt.net.door.addresses import UNREACHABLE, is_loopback, named
from flowrt.net.door.asking import Arrived, ask_at, ask_socket
from flowrt.net.door.descriptors import out_of_descriptors
from flowrt.net.door.protocol import HOST, PATH, PEER, PROTOCOL, PROVES, SIDE, UNIX, connection_over, introduce
from flowrt.net.door.tls import ASKING, channel_of, check_host, failure
from flowrt.net.door.tokens import checked
from flowrt.net.stream.bounds import Bounds, Means
from flowrt.net.stream.local import open_side
from flowrt.net.wire.frames import allocate_array
from flowrt.net.wire.handshake import NONCE, HandshakeTerms, Opening, is_same, name_told_as

if TYPE_CHECKING:
    import socket

    from flowrt.base.codec import Allocate
    from flowrt.net.door.protocol import Hello
    from flowrt.net.door.tls import Keys
    from flowrt.net.stream.connection import Connection
    from flowrt.net.stream.local import Local


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
    tls: Keys | None = None,
) -> Connection:
    """Open a connection to the node at ``host:port``; the caller closes it.

    With ``local``, a node of the same host is talked to at its Unix socket; with ``tls``, and wherever the port is
    beyond this machine, it is talked to over that: without keys of either end, the token vouches for it.

    Raises `NodeLost` if the node cannot be reached within ``timeout`` seconds, `AuthenticationError` if it has another
    token or no certificate of ours, `VersionMismatch` if it speaks another protocol, `BrokenStream` if it is no flowrt
    node, and `NoDescriptors` if this process may open nothing more.
    """
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout):
            means = Means(bounds or Bounds(), allocate, local)
            client = _Client(host, port, checked(token), dict(hello or {}), means, tls)
            return await client.shake_hands()
    except TimeoutError as error:
        raise NodeLost(f"{where} did not answer within {timeout:g} s; is a node running there?") from error
    except ssl.SSLError as error:
        meant = failure(error)
        raise type(meant)(f"{where}: {meant}") from error
    except UNREACHABLE as error:
        if out := out_of_descriptors(error):
            raise NoDescriptors(f"cannot connect to {where}: {out}") from error
        raise NodeLost(f"cannot connect to {where}: {reason(error)}") from error


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """Who opens a connection."""

    host: str
    port: int
    token: str
    hello: Hello
    means: Means
    tls: Keys | None

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def local(self) -> Local | None:
        return self.means.local

    async def shake_hands(self) -> Connection:
        neighbour = self.local is not None and self.local.host != ""
        opened = await self._at_port(neighbour)
        if opened is None:  # it was sent on, and came to nothing there
            opened = await self._at_port(neighbour=False)
        assert opened is not None
        connection, node = opened
        try:
            await connection.send(self.hello)
            await introduce(connection, self.hello, await connection.receive(), node, self.token)
        except BaseException:
            connection.cut()  # a goodbye would end what the hello may have begun
            await connection.aclose()
            raise
        return connection

    async def _at_port(self, neighbour: bool) -> tuple[Connection, Opening] | None:
        """Ask at the port, and where it says so at the Unix socket; None if nothing comes of that."""
        opening = self._opening()
        more = {HOST: self.local.host} if neighbour and self.local is not None else {}
        tls = self.tls.contexts().client if self.tls is not None else None if is_loopback(self.host) else ASKING
        answer = await ask_at(
            self.host, self.port, self._head(opening, more), self.where, tls, keyed=self.tls is not None
        )
        headers = answer.head.headers
        if neighbour and answer.head.status == 101 and headers.get("upgrade") == UNIX:
            came_straight = headers.get(PEER) == named(answer.transport.get_extra_info("sockname"))
            answer.transport.abort()
            return await self._at_socket(headers.get("location", "")) if came_straight else None
        return self._enter(answer, opening, None)

    async def _at_socket(self, told: str) -> tuple[Connection, Opening] | None:
        assert self.local is not None
        if not re.fullmatch("[0-9a-f]{1,64}", told):
            return None
        name, opening = name_told_as(self.token, told), self._opening()
        side, ticket = (self.local.segments is not None and open_side(name)) or (None, "")
        try:
            head = self._head(opening, {SIDE: ticket} if ticket else {})
            answer = await ask_socket(name, head, self.where)
            if answer is None:
                return None
            claimed, side = (side, None) if SIDE in answer.head.headers else (None, side)
            return self._enter(answer, opening, claimed)
        finally:
            if side is not None:
                side.close()

    def _opening(self) -> Opening:
        return Opening.of(self.token, secrets.token_bytes(NONCE), self.hello)

    def _head(self, opening: Opening, more: dict[str, str]) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host.encode("idna").decode("ascii")
        usual = {"Host": f"{host}:{self.port}", "Upgrade": PROTOCOL, "Connection": "Upgrade"}
        return heads.written(f"GET {PATH} HTTP/1.1", usual | opening.headers() | more)

    def _enter(self, answer: Arrived, opening: Opening, side: socket.socket | None) -> tuple[Connection, Opening]:
        """Prove that we have the token to a node that has done so; it hears nothing else before."""
        try:
            node, terms = self._checked(answer, opening)
        except BaseException:
            answer.transport.abort()
            if side is not None:
                side.close()
            raise
        answer.transport.write(terms.client_proof(self.token))
        return connection_over(answer.transport, self.where, self.means, side), node

    def _checked(self, answer: Arrived, opening: Opening) -> tuple[Opening, HandshakeTerms]:
        """What a node has begun with that has the token."""
        head, transport = answer.head, answer.transport
        refusal = _meaning(head.status, head.headers.get("upgrade", "another protocol"), self.where)
        if refusal is not None:
            raise refusal
        if self.tls is not None and transport.get_extra_info("ssl_object") is not None:
            check_host(transport, self.host)
        node = Opening.read(head.headers)
        if node is not None:
            terms = HandshakeTerms(opening, node, channel_of(transport, node=False))
            if is_same(terms.node_proof(self.token).hex().encode(), head.headers.get(PROVES, "").encode()):
                return node, terms
        raise _other_token(self.where)


def _other_token(where: str) -> AuthenticationError:
    return AuthenticationError(f"{where} refused the token; or it is no node of ours: both ends need the same one")


def _meaning(status: int, theirs: str, where: str) -> FlowrtError | None:
    """The error that an answer other than 101 stands for."""
    match status:
        case 101 if theirs == PROTOCOL:
            return None
        case 401:
            return _other_token(where)
        case 403:
            return AuthenticationError(f"{where} does not know itself by that name; connect to the host it is bound to")
        case 426 if theirs.startswith("TLS"):
            return AuthenticationError(f"{where} speaks TLS alone; give this side keys, too: --tls DIR, or tls=DIR")
        case 101 | 426:
            return VersionMismatch(f"{where} speaks {theirs}, this side {PROTOCOL}; run the same version on both")
        case 503:
            return NodeLost(f"{where} has no room for another connection, or is closing")
        case _:
            return BrokenStream(f"{where} does not answer like a flowrt node: status {status}")


def reason(error: BaseException) -> str:
    """The cause in the system's words."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number in errno.errorcode else str(error)
