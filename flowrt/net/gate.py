"""Who watches the door: of a stranger, the head of one HTTP request is read, bounded in bytes and time, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

HEAD = 8 << 10  # bytes of HTTP that a stranger may send


class Gate(asyncio.Protocol):
    """Reads the head of a stranger's request, bounded in bytes and time, and hands it on unread."""

    def __init__(
        self,
        handler: Callable[[], asyncio.Protocol],
        strangers: dict[Gate, None],
        deadline: float,
        make_way: Callable[[], None],
    ) -> None:
        self._handler = handler
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
        """Let who serves answer. Reading stays off: what follows the head is for the connection that may come of it."""
        transport = self._leave()
        transport.pause_reading()
        handler = self._handler()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        handler.data_received(self._head)

    def _leave(self) -> asyncio.Transport:
        assert self._transport is not None
        self._strangers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        return self._transport
