"""Whether a node lives and is ready, for those who ask by HTTP: ``GET /healthz`` and ``GET /readyz``.

``GET /metrics`` has its numbers as Prometheus reads them.

Law: it answers 200 or 503 and an object of JSON, or numbers, changes nothing, and tells no secret. One request a
connection, small and soon; what is anything else is refused or cut. Anybody may ask, so of many who say nothing the
first to come give way: they take few descriptors, and keep nobody waiting who asks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from flowrt.base.errors import ResourceError

SECONDS = 5.0  # that a request may take
BYTES = 8192  # that its head may have
CONNECTIONS = 16
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@asynccontextmanager
async def answering(
    host: str, port: int, look: Callable[[], Mapping[str, Any]], measure: Callable[[], str]
) -> AsyncIterator[int]:
    """Answer at ``host:port`` (0: any free one), while the block runs, what ``look`` sees; yields the port.

    What it sees has ``ready``, ``measure`` answers the metrics; an empty ``host`` is every address. Raises
    `ResourceError` where it cannot listen.
    """
    asking: dict[asyncio.StreamWriter, None] = {}  # who came first, first

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(asking) >= CONNECTIONS:
            _let_go(asking)
        asking[writer] = None
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(SECONDS):
                writer.write(_answer(await reader.readuntil(b"\r\n\r\n"), look, measure))
                await writer.drain()
        asking.pop(writer, None)
        writer.close()

    try:
        server = await asyncio.start_server(attend, host or None, port, limit=BYTES)
    except (OSError, OverflowError) as error:
        raise ResourceError(f"cannot answer --health on {host}:{port}: {error}; port 0 takes any free one") from error
    async with server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            while asking:
                _let_go(asking)


def _let_go(asking: dict[asyncio.StreamWriter, None]) -> None:
    """End the connection of who came first."""
    first = next(iter(asking))
    del asking[first]
    first.transport.abort()


def _answer(request: bytes, look: Callable[[], Mapping[str, Any]], measure: Callable[[], str]) -> bytes:
    method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    seen, body, numbers = look(), dict[str, Any](), ""
    if method not in (b"GET", b"HEAD"):
        status, body = 405, {"error": "ask by GET"}
    elif path == b"/healthz":
        status, body = 200, {"live": True, **seen}
    elif path == b"/readyz":
        status, body = 200 if seen["ready"] else 503, dict(seen)
    elif path == b"/metrics":
        status, numbers = 200, measure()
    else:
        status, body = 404, {"error": "there are /healthz, /readyz and /metrics"}
    content = numbers.encode() or json.dumps(body).encode() + b"\n"
    kind = PROMETHEUS if numbers else "application/json"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else content)
