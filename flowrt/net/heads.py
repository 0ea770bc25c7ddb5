"""The head of an HTTP message, all of HTTP that is spoken here: bytes ↔ a first line and headers.

Law: what could be read in two ways is refused: a header that comes twice, a line that goes on, odd characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flowrt.valueclass import valueclass

MOST = 8 << 10  # bytes
END = b"\r\n\r\n"
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_REQUEST = re.compile(r"GET (/[\x21-\x7e]*) HTTP/1\.[01]")
_STATUS = re.compile(r"HTTP/1\.[01] (\d{3})(?: .*)?")


@valueclass
class Head:
    """What it begins with, and the headers, by name in small letters."""

    first: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str | None:
        """What a request asks for; None where it is no request."""
        asked = _REQUEST.fullmatch(self.first)
        return None if asked is None else asked[1]

    @property
    def status(self) -> int:
        """What is answered; 0 where it is no answer."""
        answered = _STATUS.fullmatch(self.first)
        return 0 if answered is None else int(answered[1])


def read(data: bytes) -> Head:
    """The head that ``data`` is; raises `ValueError` for what is none."""
    first, *lines = data.removesuffix(END).decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None or header[1].lower() in headers:
            raise ValueError("that is no header, or comes twice")
        headers[header[1].lower()] = header[2]
    return Head(first, headers)


def written(first: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a head."""
    lines = [first, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + END
