"""What modules of this package say, as far as it decides code that they make: not where they lie, and no comment.

Pure but for reading them. A module's statements are left as they are. Of an import only the names count that it brings,
in any order, and of a module's name as a text the last part, so that no kernel is compiled anew where a file has moved;
docstrings and comments do not count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache

from flowrt.base.package import PACKAGE

_STRING = rb'(?:"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\')'
_PARTS = re.compile(
    rb"^[ ]*(?P<docstring>r?%s)[ ]*$" % _STRING
    + rb"|^[ ]*(?:from [\w.]+ )?import (?P<names>\([^)]*\)|[^\n(]*)$"
    + rb"|(?P<comment>[ ]*#[^\n]*)"
    + rb"|(?P<string>%s)" % _STRING,
    re.MULTILINE | re.DOTALL,
)
_NAME = re.compile(rb"\bflowrt(?:\.\w+)*\.(\w+)")


@cache
def sources(modules: Iterable[str]) -> bytes:
    """What the modules of these dotted names say, one after another."""
    return b"".join(map(_said, modules))


@cache
def revision(module: str) -> str:
    """A short digest of the same of one module."""
    return hashlib.blake2b(_said(module), digest_size=8).hexdigest()


def _said(module: str) -> bytes:
    text = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_bytes()
    names: list[bytes] = []

    def kept(part: re.Match[bytes]) -> bytes:
        if part["names"]:
            plain = re.sub(rb"#[^\n]*", b"", part["names"])
            names.extend(name.strip() for name in plain.strip(b"() ").split(b","))
        return _NAME.sub(rb"\1", part["string"] or b"")

    code = _PARTS.sub(kept, text)
    lines = [line for line in code.splitlines() if line.strip()]
    return b"\n".join([b", ".join(sorted(filter(None, names))), *lines, b""])
