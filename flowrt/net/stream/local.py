"""The way between processes of one host: a Unix socket beside a node's port, and who may use it.

Law: the socket's name is in the abstract namespace, random, and found only by who has the token, of what is told to
who is on this host by its own account; so nothing lies in a folder and nothing is left behind. Either end talks only to
a process of its own user, as the kernel says, and proves that it has the token. Where anything about it fails, there is
still the port.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowrt.net.wire.handshake import name_told_as
from flowrt.sched.host.segments import AVAILABLE, Segments

if TYPE_CHECKING:
    from flowrt.sched.host.memory import Memory

WAYS = ("shared", "unix", "tcp")  # the best first
BACKLOG = 128
LINGER = 0.5  # seconds after which memory that nobody used goes back to the system; twice that at most
UNCLAIMED = 64  # side sockets that nobody has asked for yet; the oldest give way
TICKET = 16  # bytes
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@cache
def this_host() -> str:
    """What processes say that can reach each other by Unix sockets; empty where there are none such.

    A digest of the kernel's start, the network it shows us, and the user.
    """
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {network} {os.geteuid()}".encode()).hexdigest()[:32]


def preferred_way() -> str:
    """How processes of one host are to talk, at best: FLOWRT_TRANSPORT is shared (the default), unix or tcp."""
    way = os.environ.get("FLOWRT_TRANSPORT", "")
    return way if way in WAYS else WAYS[0]


def way_between(one: tuple[str, str], other: tuple[str, str]) -> str:
    """How two processes talk to each other, of `WAYS`, as their hosts and best ways tell."""
    if not one[0] or one[0] != other[0]:
        return "tcp"
    return max(one[1], other[1], key=WAYS.index)


class OtherEnd(Protocol):
    """The other end of what is shared: `shared.Channel`."""

    def segment_gone(self, number: int) -> None: ...

    def part(self) -> None: ...


class Local:
    """What a process has for others of its host: a Unix socket, once it listens, and memory that they may map.

    ``own`` says that arrays from others are given away, so that they must be writable and nobody else's. ``way`` is the
    best one to use of `WAYS`, by default what the environment says.
    """

    def __init__(self, memory: Memory, *, own: bool = False, way: str | None = None) -> None:
        way = way or preferred_way()
        self.host = this_host() if way != "tcp" else ""
        self.segments = Segments(memory) if way == "shared" and self.host and AVAILABLE else None
        self.buffers = memory.buffers = Segments(memory, shared=False)
        self.buffers.grown = self._mind
        self.way = "shared" if self.segments is not None else "unix" if self.host else "tcp"
        self.own = own
        self._memory = memory
        self.shared_bytes = 0  # of arrays sent by memory
        self.socket_bytes = 0  # sent by sockets of any kind
        self.messages = 0  # sent
        self.told = ""  # what anybody may hear of the name of the Unix socket
        self._side: socket.socket | None = None
        self._unclaimed: dict[bytes, socket.socket] = {}
        self._channels: set[OtherEnd] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):  # whoever only asks what there is has none
            self._loop = asyncio.get_running_loop()
        if self.segments is not None:
            self.segments.gone = self._tell_gone

    # ── listening ──

    def listen(self, token: str) -> socket.socket | None:
        """A socket to be asked at, which the caller closes; None where there is none such."""
        if not self.host:
            return None
        self.told = secrets.token_hex(16)
        name = name_told_as(token, self.told)
        door = _listening(_address(name), socket.SOCK_STREAM)
        if door is not None and self.segments is not None:
            self._side = _listening(_side_address(name), socket.SOCK_SEQPACKET)
        return door

    def claim(self, ticket: str) -> socket.socket | None:
        """The side socket that a client opened with this ticket, before it asked; the caller closes it."""
        while self._side is not None:
            try:
                side, _ = self._side.accept()
            except OSError:
                break
            self._register(side)
        return self._unclaimed.pop(bytes.fromhex(ticket), None) if _is_ticket(ticket) else None

    def _register(self, side: socket.socket) -> None:
        side.setblocking(False)
        try:
            ticket = side.recv(TICKET + 1) if _is_ours(side) else b""
        except OSError:
            ticket = b""
        if len(ticket) != TICKET or ticket in self._unclaimed:
            side.close()
            return
        while len(self._unclaimed) >= UNCLAIMED:
            self._unclaimed.pop(next(iter(self._unclaimed))).close()
        self._unclaimed[ticket] = side

    # ── memory ──

    def enter(self, channel: OtherEnd) -> None:
        """Have ``channel`` be told what becomes of segments, and what is made from now on lie in some."""
        self._memory.segments = self.segments
        self._channels.add(channel)

    def leave(self, channel: OtherEnd) -> None:
        """Forget a channel that is closed."""
        self._channels.discard(channel)

    def _mind(self) -> None:
        """There is memory that will not be used any more one day. Any thread may say so."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self.rest)

    def rest(self) -> None:
        """Something is not used any more, or will not be: if it stays so, it goes."""
        if self._sweeping is None and not self._closed:
            self._sweeping = asyncio.get_running_loop().call_later(LINGER, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        idle = self.segments is not None and self.segments.sweep()
        self.buffers.sweep()
        if idle or self.buffers.nbytes:  # nobody tells when what lies in a buffer is not used any more
            self.rest()

    def _tell_gone(self, number: int) -> None:
        for channel in list(self._channels):
            channel.segment_gone(number)

    def close(self) -> None:
        """Let everything go; what others have mapped stays theirs."""
        if self._side is not None:
            self._side.close()
        for side in self._unclaimed.values():
            side.close()
        self._unclaimed.clear()
        self._closed = True
        self._memory.segments = None
        self.buffers.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self.segments is not None:
            self.segments.gone = lambda number: None
            self.segments.close()
        for channel in list(self._channels):
            channel.part()


# ── the client's side ──


def open_side(name: str) -> tuple[socket.socket, str] | None:
    """A side socket to who listens under ``name``, and the ticket to be shown for it; None where there is none."""
    ticket = secrets.token_bytes(TICKET)
    side = _connected(_side_address(name), socket.SOCK_SEQPACKET)
    if side is None:
        return None
    try:
        side.send(ticket)
    except OSError:
        side.close()
        return None
    return side, ticket.hex()


def door_of(name: str) -> socket.socket | None:
    """A connection to who listens under ``name``; None where nobody of this user does."""
    return _connected(_address(name), socket.SOCK_STREAM)


# ── sockets ──


def peer_of(connection: Any) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def is_unix(transport: asyncio.BaseTransport) -> bool:
    """Whether it is one of a Unix socket."""
    under = transport.get_extra_info("socket")
    return under is not None and under.family == socket.AF_UNIX


def _is_ours(connection: socket.socket) -> bool:
    return peer_of(connection)[1] == os.geteuid()


def _address(name: str) -> str:
    return f"\0flowrt-{name}"


def _side_address(name: str) -> str:
    return f"\0flowrt-{name}-side"


def _is_ticket(text: str) -> bool:
    return len(text) == 2 * TICKET and all(letter in "0123456789abcdef" for letter in text)


def _listening(address: str, kind: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def _connected(address: str, kind: int) -> socket.socket | None:
    """A connection to a process of this user; None where there is none at the address, or not at once."""
    connection = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    with suppress(OSError, ValueError):
        connection.connect(address)
        if _is_ours(connection):
            return connection
    connection.close()
    return None
