"""The head of an HTTP message, all of HTTP that is spoken at a node's door, as aiohttp's parsers read it.

Law: what could be read in two ways is refused: what these refuse, a header that comes twice, and a head with a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrt.base.valueclass import valueclass
from flowrt.net.door.quietly import without_its_own_code

with without_its_own_code("aiohttp"):  # a client and its contexts of TLS, which take longer than all of `flowrt.net`
    from aiohttp.http_exceptions import HttpProcessingError
    from aiohttp.http_parser import HttpRequestParser, HttpResponseParser
    from aiohttp.streams import EMPTY_PAYLOAD

MOST = 8 << 10  # bytes
END = b"\r\n\r\n"
_NOBODY: Any = None  # protocol and loop, by which a body would come: there is none


@valueclass
class Head:
    """What it begins with, and the headers, by name in small letters."""

    headers: Mapping[str, str]
    path: str | None = None  # what is asked for by GET; None where it is no such request
    status: int = 0  # what is answered; 0 where it is no answer


def read(data: bytes) -> Head:
    """The head that ``data`` is, in a running loop; raises `ValueError` for what is none."""
    answers = data.startswith(b"HTTP/")
    parser = (HttpResponseParser if answers else HttpRequestParser)(
        _NOBODY, _NOBODY, MOST, max_line_size=MOST, max_field_size=MOST
    )
    try:
        heads, _, rest = parser.feed_data(data)
    except HttpProcessingError as error:
        raise ValueError(error.message.partition("\n")[0].rstrip(":")) from None  # the rest is what a stranger said
    if len(heads) != 1 or rest or heads[0][1] is not EMPTY_PAYLOAD:
        raise ValueError("that is no head alone")
    message: Any = heads[0][0]
    headers = {name.lower(): value for name, value in message.headers.items()}
    if len(headers) != len(message.headers):
        raise ValueError("a header comes twice")
    if answers:
        return Head(headers, status=message.code)
    return Head(headers, path=message.path if message.method == "GET" else None)


def written(first: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a head."""
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + END
