"""The project's files behind a module: itself, those that it imports anywhere and those that these import, by name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from places import MODULES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def files_behind(module: Path) -> frozenset[Path]:
    """The project's files that decide what a module does. A package's own `__init__` is one where it is named."""
    found: set[Path] = set()
    left = [module]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += filter(None, map(_file_of, _imported(path)))
    return frozenset(found)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _file_of(name: str) -> Path | None:
    """The project's file of that module, or None for what is another's, or no module."""
    for folder in (str(ROOT), *MODULES):
        place = Path(folder, *name.split("."))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None
