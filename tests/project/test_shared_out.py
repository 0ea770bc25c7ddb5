"""Where files of tests are shared out to processes, each test is told of, whatever becomes of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from places import TESTS

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "good": "import pytest, os\n@pytest.mark.parametrize('n', range(30))\ndef test_runs(n):\n    print(os.getpid())\n",
    "bad": """
import subprocess, pytest
def test_fails():
    subprocess.run(["echo", "said by a child"])
    assert [1] == [2]
def test_is_skipped():
    pytest.skip("not here")
@pytest.fixture
def lent():
    yield
    raise ValueError("not given back")
def test_leaves(lent):
    pass
""",
    "killed": """
import os, signal
def test_before():
    pass
def test_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)
def test_after():
    pass
""",
}


def run(folder: Path, *options: str) -> str:
    for name, text in FILES.items():
        (folder / f"test_{name}.py").write_text(text)
    given = {**os.environ, "PYTHONPATH": str(TESTS / "worlds")}
    command = [sys.executable, "-m", "pytest", "-p", "shared_out", "--shared", *options]
    done = subprocess.run(command, cwd=folder, env=given, stdout=subprocess.PIPE, text=True, timeout=50)
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_what_passed_failed_was_skipped_or_never_ended_is_told(tmp_path: Path) -> None:
    said = run(tmp_path)
    for told in (
        "FAILED test_bad.py::test_fails - assert [1] == [2]",
        "said by a child",
        "ERROR test_bad.py::test_leaves - ValueError: not given back",
        "FAILED test_killed.py::test_ends_its_process - its process ended",
        "FAILED test_killed.py::test_after - its process ended",
        "3 failed, 32 passed, 1 skipped, 1 error",
        "the processes that shared the tests ended with [",
    ):
        assert told in said, said


def test_after_a_failure_that_was_one_too_many_nothing_more_is_run(tmp_path: Path) -> None:
    said = run(tmp_path, "-x")
    assert "stopping after 1 failures" in said, said
    assert "3 failed" not in said, said
