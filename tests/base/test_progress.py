"""What a user is told who waits: once, after two seconds, what it is and how far it has come."""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import re
import select
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT
from programs import python

import flowrt as fr
from flowrt import progress
from flowrt.kernels.store import compiling
from flowrt.kernels.store.compiling import batch, compiled, note_made, note_missing, only_looks
from flowrt.progress import Activity
from flowrt.session import checkpoints as checkpoint

if TYPE_CHECKING:
    from pathlib import Path


class Told(io.StringIO):
    """A stream that tells when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.told.set()
        return count

    def wait(self) -> str:
        assert self.told.wait(20)
        return self.getvalue()

    def wait_for(self, line: str) -> None:
        while line not in self.getvalue():
            self.told.clear()
            assert line in self.getvalue() or self.told.wait(20)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The standard error of a program that has not set up logging, whose user is told at once."""
    told = Told()
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=told))  # pytest has its own ideas of the true one
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.delenv("FLOWRT_QUIET", raising=False)
    return told


def watching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "flowrt-progress"]


def test_long_work_says_once_what_it_is_and_how_far(stream: Told) -> None:
    with Activity("restoring", of=12) as activity:
        assert stream.wait() == "flowrt: restoring, 0 of 12\n"
        activity.done = 5
    with activity:  # goes on
        pass
    assert stream.getvalue().count("\n") == 1
    stream.told.clear()
    activity.of = 25
    with activity:
        assert stream.wait().endswith("0 of 12\nflowrt: restoring, 5 of 25\n")
    assert watching() == []


def test_who_looks_is_asked_before_anything_is_told(stream: Told) -> None:
    def look(activity: Activity) -> None:
        activity.done, activity.left = 1, "not up yet b"

    with Activity("waiting for nodes", 2, look=look):
        assert stream.wait() == "flowrt: waiting for nodes, 1 of 2: not up yet b\n"


def test_short_work_says_nothing_and_leaves_no_thread(stream: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 1000.0)
    with Activity("saving"):
        assert len(watching()) == 1
    assert stream.getvalue() == ""
    assert watching() == []


def test_a_quiet_user_is_told_nothing(stream: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_QUIET", "1")
    with Activity("saving"):
        assert watching() == []
    assert stream.getvalue() == ""


def test_a_program_that_has_set_up_logging_gets_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    monkeypatch.delenv("FLOWRT_QUIET", raising=False)
    found: list[logging.LogRecord] = []
    came = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)
            came.set()

    logger, handler = logging.getLogger("flowrt"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with Activity("saving", 3):
            assert came.wait(20)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert [(r.name, r.levelname, r.getMessage()) for r in found] == [("flowrt", "INFO", "saving, 0 of 3")]


def test_of_activities_within_one_another_the_inner_one_is_told(stream: Told) -> None:
    with Activity("initialising") as outer:
        with Activity("compiling", 3) as inner:
            assert (outer._is_latest(), inner._is_latest()) == (False, True)
            stream.wait_for("flowrt: compiling, 0 of 3\n")
        assert outer._is_latest()
        stream.wait_for("flowrt: initialising\n")


async def test_saving_and_restoring_tell_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Told(Activity):
        def __exit__(self, *error: object) -> None:
            if self._look is not None:
                self._look(self)
            told.append(str(self))
            super().__exit__(*error)

    monkeypatch.setattr(checkpoint, "Activity", Told)
    with fr.Graph() as graph:
        for name in "ab":
            fr.Variable(np.zeros(1 << 19, np.float32), name=name)
    for _ in range(2):
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
            await session.save()
    saving, reading, restoring, _ = told
    assert saving.startswith(f"saving step 0 in {tmp_path}, MiB, ")
    assert saving.endswith(" of 4")
    assert reading == f"restoring step 0 from {tmp_path}"
    assert restoring == f"restoring step 0 from {tmp_path}, variables, 2 of 2"


IN_A_TERMINAL = """
import sys
from flowrt import progress
progress.SECONDS = 0.0
with progress.Activity("compiling kernels", of=12) as activity:
    activity.done = 5
    print("begun", flush=True)
    sys.stdin.readline()
"""


def test_a_terminal_shows_a_bar_until_the_work_is_over() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    environment.pop("FLOWRT_QUIET", None)
    child = subprocess.Popen(
        [*python(), "-c", IN_A_TERMINAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    with child:
        try:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == b"begun\n"
            while not (b"5/12" in shown and b"compiling kernels" in shown):
                assert select.select([ours], [], [], 30)[0], shown
                shown += os.read(ours, 1 << 12)
            child.stdin.write(b"\n")
            child.stdin.close()
            assert child.wait(20) == 0
        finally:
            child.kill()
            os.close(ours)


# ── kernels ──


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> compiling._Count:
    count = compiling._Count()
    monkeypatch.setattr(compiling, "_count", count)
    monkeypatch.setattr(compiling, "PAUSE", math.inf)  # whatever follows does so closely
    monkeypatch.setenv("FLOWRT_QUIET", "1")
    return count


def told(count: compiling._Count) -> tuple[int, int | None]:
    return count._activity.done, count._activity.of


def compile_all(symbols: str, there: set[str]) -> None:
    """Ask for objects as `store` does."""
    for symbol in symbols:
        if symbol in there:
            continue
        if only_looks():
            note_missing(symbol)
            continue
        with compiled(symbol):
            there.add(symbol)


def test_a_batch_counts_what_is_missing_once_something_is(counted: compiling._Count) -> None:
    there = set("bd")
    with batch(lambda: compile_all("bdb", there)):
        compile_all("bdb", there)
    assert told(counted) == (0, None)  # nothing was missing, nobody was asked
    with batch(lambda: compile_all("abacd", there)):
        with compiled("a"):
            assert told(counted) == (0, 2)
            there.add("a")
        compile_all("abacd", there)
        assert told(counted) == (2, 2)
    with batch(lambda: compile_all("eb", there)):  # follows closely
        compile_all("eb", there)
    assert told(counted) == (3, 3)
    with compiled("f"):
        assert told(counted) == (3, 4)


def test_what_another_process_compiles_meanwhile_is_counted(counted: compiling._Count) -> None:
    there = set("x")
    with batch(lambda: compile_all("abc", there)):
        with compiled("a"):
            note_made("b")
        note_made("b")
        note_made("x")  # which nobody had to compile
        assert told(counted) == (2, 3)
    note_made("c")  # in no batch
    assert told(counted) == (2, 3)


def test_a_later_compilation_is_counted_anew(counted: compiling._Count, monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled("a"):
        pass
    monkeypatch.setattr(compiling, "PAUSE", -1.0)
    with compiled("b"):
        assert told(counted) == (0, 1)


def test_batches_of_several_threads_are_one_activity(counted: compiling._Count) -> None:
    together = threading.Barrier(3)

    def work(symbols: str) -> Any:
        there: set[str] = set()
        with batch(lambda: compile_all(symbols, there)):
            compile_all(symbols[0], there)
            together.wait(20)
            seen = told(counted)
            together.wait(20)
            compile_all(symbols, there)
        return seen

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, ["abc", "cde", "fg"])) == [(3, 7)] * 3
    assert told(counted) == (8, 7) or told(counted)[1] == 7
    assert counted._busy == 0


COLD = """
import flowrt.progress
flowrt.progress.SECONDS = 0.0
import numpy as np
import flowrt as fr
with fr.Graph() as graph:
    x = fr.placeholder("float32", (2, 3))
    y = fr.cumsum(fr.exp(x), axis=1)
with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
    for _ in range(3):
        session.run(y, {x: np.zeros((2, 3), np.float32)})
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("quiet", ["0", "1"])
def test_a_cold_first_step_tells_how_many_kernels_are_compiled(quiet: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLOWRT_CACHE": str(tmp_path), "FLOWRT_BUILD": "never"}
    done = subprocess.run(
        [*python(), "-c", COLD],
        env=environment | {"FLOWRT_QUIET": quiet},
        stderr=subprocess.PIPE,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    if quiet == "1":
        assert done.stderr == ""
        return
    told = re.fullmatch(r"flowrt: compiling kernels, once on this machine, 0 of (\d+)\n", done.stderr)
    assert told is not None, done.stderr
    assert int(told[1]) == len(list(tmp_path.glob("*.o"))) >= 3
