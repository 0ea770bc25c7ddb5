"""The CUDA simulator takes a minute in a process of its own, so it starts before all tests and is asked after them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SIMULATOR = pytest.StashKey["subprocess.Popen[str]"]()


def _is_simulated(item: pytest.Item) -> bool:
    return "simulated" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_simulated)


def pytest_runtestloop(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(map(_is_simulated, session.items)):
        return
    session.config.stash[SIMULATOR] = subprocess.Popen(
        [sys.executable, str(HERE / "cuda_world.py")],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    process = config.stash.get(SIMULATOR, None)
    if process is not None:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `cuda_world` found. It is a process of its own: the simulator is chosen before Numba is imported."""
    process = request.config.stash[SIMULATOR]
    out, errors = process.communicate(timeout=580)  # with nothing compiled yet
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found
