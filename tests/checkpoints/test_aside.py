"""Who steps aside runs where others leave a core idle, and rests where they do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from flowrt.checkpoints import aside

if TYPE_CHECKING:
    from collections.abc import Callable


def aloof(work: Callable[[], None]) -> None:
    """Do something in a thread of its own, as niceness lasts."""
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_who_was_put_off_rests_longer_and_who_was_not_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rests: list[float] = []
    told = tmp_path / "schedstat"
    monkeypatch.setattr(aside, "_WAITED", told)
    monkeypatch.setattr(aside, "time", SimpleNamespace(sleep=rests.append))

    def work() -> None:
        told.write_text("7000000 5000000 3\n")
        step_aside = aside.Aside()
        for put_off in (5_000_000, 15_000_000, 15_000_000, 915_000_000):
            told.write_text(f"9000000 {put_off} 4\n")
            step_aside()
        told.unlink()  # as where nothing is told
        step_aside()

    aloof(work)
    assert rests == pytest.approx([0.01 * aside.REST, aside.LONGEST])


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a niceness of its own on Linux alone")
def test_the_thread_that_steps_aside_is_nicer_and_no_other() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def work() -> None:
        aside.Aside()
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    aloof(work)
    assert seen == [max(before, aside.NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not tell")
def test_the_kernel_tells_how_long_a_thread_was_put_off() -> None:
    first = aside._put_off()
    assert 0 <= first <= aside._put_off()
