"""Tests that come to the same of the same files: where the suite is shared out, one that passed is not run again.

A module says of its tests, or of one, that they are ``settled``: they search all that can happen, or follow many cases
drawn from a seed, and no thread, clock, socket, hash or machine has a part in it. What passed is kept where kernels are
(`kept`), with the files behind the module: those that it imports and that these import, each by name. Where one process
runs what it was asked for, all of it runs.
"""

from __future__ import annotations

import ast
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kept import keep, recall
from places import MODULES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGAN = time.time()


def has_passed(module: Path, test: str) -> bool:
    """Whether a test of that module did, of the very files there are."""
    return test in _passed(module)


def note_passed(module: Path, test: str) -> None:
    """Keep that a test of that module did; not where a file behind it is younger than this process, which read it."""
    behind = files_behind(module)
    if all(path.stat().st_mtime < BEGAN for path in behind):
        _passed(module).add(test)
        files = sorted(str(path.relative_to(ROOT)) for path in behind)
        keep(_name(module), {"passed": sorted(_passed(module)), "files": files})


@cache
def _passed(module: Path) -> set[str]:
    found = recall(_name(module))
    return set() if found is None else set(found["passed"])


def _name(module: Path) -> str:
    return f"passed_{module.stem}"


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
