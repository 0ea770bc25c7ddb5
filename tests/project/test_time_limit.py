"""A test that hangs in an event loop ends in time, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import TESTS

if TYPE_CHECKING:
    from pathlib import Path

BUSY = """
import asyncio
import pytest
import time

def spin(loop):  # an alarm meets this callback
    time.sleep(0.01)
    loop.call_soon(spin, loop)

async def never():
    await asyncio.Event().wait()
"""
WAITS = """
async def test_that_waits():
    spin(asyncio.get_running_loop())
    await never()
"""
CLEANS_UP = """
async def test_that_waits():
    spin(asyncio.get_running_loop())
    try:
        await never()
    finally:
        await never()
"""
TEARS_DOWN = """
@pytest.fixture
def closed():
    yield
    time.sleep(60)

async def test_that_waits(closed):
    await never()
"""
AFTER = """
@pytest.mark.timeout(40)
async def test_after():
    await asyncio.sleep(0)
"""


def run(folder: Path, test: str) -> str:
    """What pytest says of a file with that test, which may take a second, and one after it, which may take longer."""
    (folder / "test_hanging.py").write_text(BUSY + test + AFTER)
    options = "-p", "time_limit", "-o", "asyncio_mode=auto", "--timeout", "1", "-p", "no:cacheprovider"
    given = {**os.environ, "PYTHONPATH": str(TESTS / "worlds")}
    command = [sys.executable, "-m", "pytest", *options, "."]
    return subprocess.run(command, cwd=folder, env=given, stdout=subprocess.PIPE, text=True, timeout=50).stdout


@pytest.mark.parametrize("test", [WAITS, CLEANS_UP], ids=["waits", "cleans up"])
def test_a_coroutine_that_waits_in_a_busy_loop_ends_in_time_at_its_line(test: str, tmp_path: Path) -> None:
    said = run(tmp_path, test)
    assert "FAILED test_hanging.py::test_that_waits - TimeoutError" in said, said
    assert "await never()" in said, said
    assert "1 failed, 1 passed" in said, said


def test_what_is_torn_down_after_a_failure_ends_in_time(tmp_path: Path) -> None:
    said = run(tmp_path, TEARS_DOWN)
    assert "FAILED test_hanging.py::test_that_waits - TimeoutError" in said, said
    assert "ERROR test_hanging.py::test_that_waits - Failed: Timeout (>1.0s)" in said, said
    assert "1 failed, 1 passed, 1 error" in said, said
