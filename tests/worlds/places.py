"""Where the project's folders lie, and where a process that a test starts finds flowrt and the tests' own modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TESTS = ROOT / "tests"
MODULES = [str(folder) for folder in (TESTS, *sorted(TESTS.rglob("*"))) if folder.is_dir() and folder.name[0] != "_"]
PYTHONPATH = os.pathsep.join([str(ROOT), *MODULES])


def file_of(module: str) -> str:
    """The file of a module of the tests, wherever among them it lies."""
    return str(next(TESTS.rglob(f"{module}.py")))
