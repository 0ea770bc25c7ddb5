"""Tests that come to the same of the same files: where the suite is shared out, one that passed is not run again.

A module says of its tests, or of one, that they are ``settled``: they search all that can happen, or follow many cases
drawn from a seed, and no thread, clock, socket, hash or machine has a part in it. What passed is kept where kernels are
(`kept`), with the files `behind` the module. Where one process runs what it was asked for, all of it runs.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from behind import files_behind
from kept import keep, recall
from places import ROOT

if TYPE_CHECKING:
    from pathlib import Path

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
