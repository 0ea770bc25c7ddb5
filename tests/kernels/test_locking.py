"""Locks in the kernel cache: who holds one and stands still hangs nobody, and who waits can be interrupted."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from places import ROOT
from programs import python

from flowrt.base.errors import StepCancelled
from flowrt.kernels.store import locking
from flowrt.kernels.store.locking import locked, while_wanted
from flowrt.kernels.store.objects import object_code
from flowrt.standard.__main__ import _yield_to_everybody

if TYPE_CHECKING:
    from pathlib import Path

LONG = 1000.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path))
    return tmp_path


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Somebody holds that lock for as long as the block runs."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float, after: float = 0.0) -> None:
    monkeypatch.setattr(locking, "_patience", seconds)
    monkeypatch.setattr(locking, "IMPATIENCE", after)


def test_who_waits_for_one_that_stands_still_makes_the_object_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, 0.2)
    with holding(folder / "flowrt_x.lock"), holding(folder / "flowrt_y.lock"):
        began = time.monotonic()
        assert object_code("flowrt_x", lambda: b"mine") == b"mine"
        assert time.monotonic() - began >= 0.2
        assert locking._patience == 0.0  # who holds one lock may hold many: the next is not waited for as long
        assert object_code("flowrt_y", lambda: b"mine") == b"mine"
        assert object_code("flowrt_x", lambda: pytest.fail("compiled again")) == b"mine"
        assert sorted(entry.name for entry in folder.glob("flowrt_*")) == [
            *("flowrt_x.lock", "flowrt_x.o", "flowrt_y.lock", "flowrt_y.o")  # the locks are their holder's to remove
        ]


def test_nobody_waits_for_the_builder_that_takes_idle_time_nor_it_for_anybody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "_stands_back", False)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    _yield_to_everybody()
    be_patient(monkeypatch, LONG)
    with holding(folder / "flowrt_x.lock"):
        assert object_code("flowrt_x", lambda: b"mine") == b"mine"
    assert object_code("flowrt_y", lambda: b"held" if (folder / "flowrt_y.lock").exists() else b"mine") == b"mine"
    assert object_code("flowrt_y", lambda: pytest.fail("compiled again")) == b"mine"


def test_patience_comes_back_with_a_holder_that_lets_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_patience", LONG)
    waits, path = threading.Event(), folder / "x.lock"

    def wanted() -> bool:
        waits.set()
        return True

    def wait_for_it() -> None:
        with while_wanted(wanted), locked(path) as alone:
            assert alone

    with ThreadPoolExecutor(1) as pool:
        with holding(path):
            done = pool.submit(wait_for_it)
            assert waits.wait(20)
        done.result(20)
    assert locking._patience == locking.PATIENCE


def test_who_waits_takes_what_another_wrote_before_it_stood_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, LONG)
    object_code("flowrt_x", lambda: b"theirs")
    (folder / "flowrt_x.o").rename(folder / "kept")
    waits = threading.Event()

    def wanted() -> bool:
        waits.set()
        return True

    def ask() -> bytes:
        with while_wanted(wanted):
            return object_code("flowrt_x", lambda: b"mine")

    with holding(folder / "flowrt_x.lock"), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        assert waits.wait(20)
        (folder / "kept").rename(folder / "flowrt_x.o")
        assert asked.result(20) == b"theirs"


def test_who_waits_gives_up_what_nobody_wants_any_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch, LONG)
    with holding(folder / "flowrt_x.lock"), while_wanted(lambda: False), pytest.raises(StepCancelled):
        object_code("flowrt_x", lambda: b"mine")
    with while_wanted(lambda: False), pytest.raises(StepCancelled):
        object_code("flowrt_x", lambda: pytest.fail("compiled what nobody wants"))


def test_a_lock_file_that_cannot_be_opened_is_none(folder: Path) -> None:
    (folder / "flowrt_x.lock").symlink_to(folder / "elsewhere")
    assert object_code("flowrt_x", lambda: b"mine") == b"mine"
    (folder / "flowrt_y.lock").mkdir()
    assert object_code("flowrt_y", lambda: b"mine") == b"mine"


def test_the_lock_of_a_holder_that_was_killed_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_patience", LONG)
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(99)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, folder / "flowrt_x.lock"], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        assert object_code("flowrt_x", lambda: b"mine") == b"mine"


WAITING = """
import asyncio, fcntl, os, sys, time
import numpy as np
import flowrt as fr
from flowrt.kernels.store import locking
from flowrt.kernels.launch import apply_kernel
from flowrt.kernels.language.variants import symbol_of
from flowrt.kernels.store.folder import cache_folder

locking._patience = 1000.0

class Telling:
    monotonic, told = staticmethod(time.monotonic), False

    @classmethod
    def sleep(cls, seconds):
        if not cls.told:
            cls.told = True
            print("waits", flush=True)
        time.sleep(seconds)

@fr.op
def slow_to_come(x: fr.Spec) -> fr.Spec:
    return x

@fr.kernel("slow_to_come")
def slow_to_come_kernel(x, y):
    y[0] = x[0] + 41.5

spec = fr.Spec("float32", (3,))
(step,) = apply_kernel("slow_to_come", [spec], [spec], {}).steps
cache_folder().mkdir(parents=True, exist_ok=True)
lock = os.open(cache_folder() / f"{symbol_of(step.variant())}.lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
one = np.ones(3, np.float32)
with fr.Graph() as graph:
    y = slow_to_come(fr.constant(one))

async def main(way):
    if way == "eager in a task":
        slow_to_come(one)
    async with fr.Session(graph) as session:
        await session.run(y)

locking.time = Telling
try:
    match sys.argv[1]:
        case "eager":
            slow_to_come(one)
        case "blocking session":
            with fr.BlockingSession(graph) as session:
                session.run(y)
        case way:
            asyncio.run(main(way))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("way", ["eager", "blocking session", "session in a task", "eager in a task"])
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_wait_for_a_lock(way: str, folder: Path) -> None:
    child = subprocess.Popen(
        [*python(), "-c", WAITING, way],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    with child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "waits\n"
            child.send_signal(signal.SIGINT)
            while not select.select([child.stdout], [], [], 5)[0]:
                child.send_signal(signal.SIGINT)
            assert child.stdout.read() == "interrupted\n"
            assert child.wait(20) == 0
        finally:
            child.kill()
