"""Who watches the door: of a stranger, the head of one HTTP request and a proof are read, and no more.

Law: the head is bounded in bytes, the proof has its very length, both have one deadline, and nothing is decoded. What
follows a head before it is answered is refused. Over TLS the same begins once that is agreed upon, in the same time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from flowrt.base.valueclass import valueclass
from flowrt.net.door import heads
from flowrt.net.wire.handshake import PROOF

if TYPE_CHECKING:
    import socket

    from flowrt.net.wire.handshake import HandshakeTerms

NO_PROOF = "it went without a proof that it has our token; it may have another one"


@valueclass
class Reply:
    """What a stranger is answered; with ``terms`` it may go on, and prove that it has the token."""

    status: str
    headers: dict[str, str]
    terms: HandshakeTerms | None = None
    side: socket.socket | None = None

    def let_go(self) -> None:
        """It comes to nothing."""
        if self.side is not None:
            self.side.close()


class Door(Protocol):
    """Who serves behind gates."""

    def enter(self, gate: Gate, transport: asyncio.Transport) -> None:
        """A stranger is here, and may `Gate.talk_over` this transport once it is as secure as it must be."""

    def leave(self, gate: Gate) -> None:
        """It is a stranger no more, or gone."""

    def answer(self, head: heads.Head, transport: asyncio.Transport) -> Reply:
        """What to say to a request."""

    def admit(self, transport: asyncio.Transport, reply: Reply, proof: bytes) -> str | None:
        """Take a stranger in whose proof is right, and whose transport's reading is paused; else, the status."""

    def failed(self, transport: asyncio.Transport, how: str) -> None:
        """A stranger broke a rule, which ``how`` says in one of few ways."""


class Gate(asyncio.BufferedProtocol):
    """Reads what a stranger says, and hands its transport on to who serves, unread from there on."""

    def __init__(self, door: Door, deadline: float) -> None:
        self._door = door
        self._deadline = deadline
        self._buffer = memoryview(bytearray(heads.MOST + 1))
        self._read = 0  # bytes in it
        self._reply: Reply | None = None
        self._over = False
        self._accepted: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None  # the same, once anything may be said
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accepted = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._deadline, self.refuse, "408 Request Timeout")
        self._door.enter(self, self._accepted)

    def talk_over(self, transport: asyncio.Transport) -> None:
        """Go on, over ``transport``."""
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(256)) if self._over else self._buffer[self._read :]

    def buffer_updated(self, nbytes: int) -> None:
        self._read += nbytes
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over and self._reply is not None and self._transport is not None:
            self._door.failed(self._transport, NO_PROOF)
        self._leave()

    def leave(self) -> None:
        """Close without a word."""
        self._leave().abort()

    def refuse(self, status: str, headers: dict[str, str] | None = None) -> None:
        """Say no, and close; without a word where it was let go on, and has yet to: two heads at once are none."""
        goes_on, transport = self._reply is not None and self._read < PROOF, self._leave()
        if self._transport is None:  # TLS is not agreed upon yet
            transport.abort()
            return
        if status.startswith("4"):
            wants = (headers or {}).get("Upgrade")
            self._door.failed(transport, f"{status}, to {wants}" if wants else status)
        if not goes_on:
            no = {"Connection": "close", "Content-Length": "0"} | (headers or {})
            transport.write(heads.written(f"HTTP/1.1 {status}", no))
        transport.close()

    def _look(self) -> None:
        if self._over:
            return
        if self._transport is None:
            self._refuse_plain_text()
        elif self._reply is None:
            self._look_at_head(bytes(self._buffer[: self._read]), self._transport)
        elif self._read == PROOF:
            self._look_at_proof(self._reply, self._transport)

    def _refuse_plain_text(self) -> None:
        """Say that TLS is asked for here, to who began with something else."""
        self._transport = self._accepted
        self.refuse("426 Upgrade Required", {"Upgrade": "TLS/1.3"})

    def _look_at_head(self, head: bytes, transport: asyncio.Transport) -> None:
        end = head.find(heads.END)
        if len(head) > heads.MOST:
            self.refuse("431 Request Header Fields Too Large")
        elif head[:4] != b"GET "[: len(head)] or -1 < end < len(head) - len(heads.END):
            self.refuse("400 Bad Request")
        elif end > 0:
            try:
                asked = heads.read(head)
            except ValueError:
                self.refuse("400 Bad Request")
            else:
                self._answer(self._door.answer(asked, transport), transport)

    def _answer(self, reply: Reply, transport: asyncio.Transport) -> None:
        if not reply.status.startswith("101"):
            self.refuse(reply.status, reply.headers)
            return
        transport.write(heads.written(f"HTTP/1.1 {reply.status}", reply.headers))
        if reply.terms is None:  # it was sent elsewhere
            self._leave().close()
            return
        self._reply = reply
        self._buffer, self._read = memoryview(bytearray(PROOF)), 0

    def _look_at_proof(self, reply: Reply, transport: asyncio.Transport) -> None:
        transport.pause_reading()
        refusal = self._door.admit(transport, reply, bytes(self._buffer))
        if refusal is None:
            self._reply = None  # what it holds is the connection's
            self._leave()
        else:
            self.refuse(refusal)

    def _leave(self) -> asyncio.Transport:
        """Look at nothing more."""
        assert self._accepted is not None
        self._over = True
        if self._reply is not None:
            self._reply.let_go()
        if self._timer is not None:
            self._timer.cancel()
        self._door.leave(self)
        return self._transport or self._accepted
