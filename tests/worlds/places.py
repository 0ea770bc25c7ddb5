"""Where the project's folders lie, and where a process that a test starts finds flowrt and the tests' own modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TESTS = ROOT / "tests"
MODULES = [str(folder) for folder in (TESTS, *sorted(TESTS.rglob("*"))) if folder.is_dir() and folder.name[0] != "_"]
PYTHONPATH = os.pathsep.join([str(ROOT), *MODULES])
ON_GPU = os.environ.get("FLOWRT_TEST_ON_GPU") == "1"  # whether what would be simulated is tried on a GPU: scripts/gpu


def file_of(module: str) -> str:
    """The file of a module of the tests, wherever among them it lies."""
    return str(next(TESTS.rglob(f"{module}.py")))


def environment(*, simulated: bool) -> dict[str, str]:
    """What a process finds that is to compute on GPUs, simulated ones or not."""
    return {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(simulated and not ON_GPU)), "PYTHONPATH": PYTHONPATH}


def told_by(module: str, *, simulated: bool, seconds: float) -> Any:
    """What a module of the tests prints as JSON, as a process: the simulator is chosen before Numba is imported."""
    done = subprocess.run(
        [sys.executable, file_of(module)],
        env=environment(simulated=simulated),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
