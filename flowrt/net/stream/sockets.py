"""What a connection's socket is told, and what the kernel knows of the other end.

Law: the kernel of a peer answers for it, also when its process is stopped or does not read; a peer whose kernel answers
nothing, however often it is asked, is gone, or the way to it is. So the kernel is made to ask (once a second where
nothing else is on its way), and is asked what came of it. `TCP_USER_TIMEOUT` alone cannot tell the two apart: it cuts
who does not read as well, and what is idle it never looks at. Of a Unix socket there is nothing to ask: both ends are
one kernel's, which tells at once of a process that is gone; and that a peer takes nothing, we have to see ourselves.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress
from typing import Any

from flowrt.base.errors import NodeLost

ASK_SECONDS = 1  # between two probes of an idle connection
TRIES = 3  # that must have gone unanswered: one packet may be lost on any way
_RTO_MAX_MS = 44  # Linux 6.15: the longest wait before something is sent again; two minutes otherwise
_RETRANSMITS, _PROBES, _LAST_DATA, _LAST_ACK = 2, 3, 19, 20  # places in Linux' tcp_info
_INFO = struct.Struct("8B13I")
_NO_WAY = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


def broken_by(cause: object, text: str) -> NodeLost:
    """The error of a connection that broke; see `was_silent`."""
    error = NodeLost(text)
    error.__cause__ = cause if isinstance(cause, OSError) else None
    return error


def unreachable(peer: str, seconds: float) -> NodeLost:
    """The error of a connection whose other end has answered nothing for so long."""
    text = f"{peer} has answered nothing for {seconds:.1f} s: it, or the way to it, is gone"
    return broken_by(TimeoutError(errno.ETIMEDOUT, "no answer"), text)


def was_silent(failure: BaseException | None) -> bool:
    """Whether a connection broke because nothing came back on it: the way is gone, and its peer may be well.

    Elsewhere the peer's kernel has ended it, which tells that its process is gone, or has done so itself.
    """
    cause = None if failure is None else failure.__cause__
    return isinstance(cause, OSError) and cause.errno in _NO_WAY


def tune(connection: socket.socket, unacknowledged: float, silence: float, buffers: int | None) -> None:
    """Small messages at once; a peer that is gone is noticed within ``silence`` seconds, one that takes nothing within
    ``unacknowledged``; ``buffers`` bytes in the kernel each way, where that is not left to it."""
    if buffers is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
    if connection.family == socket.AF_UNIX:
        return
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": ASK_SECONDS,
        "TCP_KEEPINTVL": ASK_SECONDS,
        "TCP_KEEPCNT": max(TRIES, round(silence / ASK_SECONDS)),
        "TCP_USER_TIMEOUT": int(unacknowledged * 1000),
    }.items():
        if hasattr(socket, name):
            connection.setsockopt(tcp, getattr(socket, name), value)
    if hasattr(socket, "TCP_INFO"):
        with suppress(OSError):
            connection.setsockopt(tcp, _RTO_MAX_MS, ASK_SECONDS * 1000)


def unanswered(connection: Any) -> float:
    """For how many seconds the other end's kernel has answered nothing that it was asked; 0 where that is not known."""
    if not hasattr(socket, "TCP_INFO") or connection.family == socket.AF_UNIX:
        return 0.0
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(data) < _INFO.size:
        return 0.0
    info = _INFO.unpack(data)
    if info[_RETRANSMITS] + info[_PROBES] < TRIES:
        return 0.0
    milliseconds: int = min(info[_LAST_DATA], info[_LAST_ACK])
    return milliseconds / 1000


class Standstill:
    """For how long what is to be written has not become less, in looks of `ASK_SECONDS`: so our own sleep is not
    the peer's."""

    def __init__(self) -> None:
        self._left = 0
        self._looks = 0

    def seconds(self, left: int) -> float:
        """``left`` bytes wait to be taken: for how many seconds the very same."""
        self._looks = self._looks + 1 if left and left == self._left else 0
        self._left = left
        return float(self._looks * ASK_SECONDS)
