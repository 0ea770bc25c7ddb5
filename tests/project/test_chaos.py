"""What is said of training that was troubled: that a promise was broken where it was, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT

sys.path[:0] = [str(ROOT / "perf" / "chaos")]

import records  # noqa: E402
from observing import Observed  # noqa: E402
from training import Receipts  # noqa: E402


def report(step: int, *receipts: tuple[int, int]) -> Any:
    """A report with receipts of (replica, batch)."""
    measured = (SimpleNamespace(run=1, receipts=receipts),)
    return SimpleNamespace(step=step, kept=[r for r, _ in receipts], late=[], rolled_back=None, measured=measured)


class Printing(SimpleNamespace):
    """A client that prints lines, and ends."""

    def __init__(self, *lines: bytes) -> None:
        super().__init__(stdout=self._told(lines))

    async def _told(self, lines: tuple[bytes, ...]) -> Any:
        for line in lines:
            yield line


def told(step: int, at: float) -> bytes:
    return json.dumps({"step": step, "at": at, "kept": [0]}).encode() + b"\n"


def test_a_batch_that_ends_twice_and_a_step_that_is_passed_over_are_violations() -> None:
    receipts = Receipts()
    receipts.add(report(5, (0, 1), (1, 1)))
    receipts.add(report(6, (0, 2)))
    assert receipts.violations == []
    receipts.add(report(8, (0, 2), (1, 2)))
    assert receipts.violations == ["step 8 was reported after step 6", "step 8: batch 2 of replica 0 ended twice"]
    assert receipts.kept == {0: 3, 1: 2}


async def test_a_client_that_dies_in_a_word_is_followed_by_one_that_goes_on_after_it() -> None:
    observed = Observed()
    await observed.read(Printing(told(1, 1.0), told(2, 2.0), told(3, 3.0)[:9]))
    observed.again()
    await observed.read(Printing(told(4, 7.0), told(5, 7.5), b'{"violations": []}\n'))
    assert observed.violations == []
    assert (observed.steps, observed.resumed) == (5, 7.0)
    assert observed.rate([(0.0, 4.0), (7.0, 8.0)]) == 3 / 5
    assert observed.longest(1.5, 8.0) == 5.0
    observed.again()
    await observed.read(Printing(told(5, 8.0), told(7, 9.0), b'{"violations": ["w0"]}\n'))
    assert observed.violations == ["step 5 was made after step 5", "step 7 was made after step 5", "w0"]


async def test_who_goes_back_to_a_checkpoint_says_so_and_goes_on_from_there() -> None:
    observed = Observed()
    await observed.read(Printing(told(1, 1.0), told(2, 2.0), told(3, 3.0)))
    again = json.dumps({"step": 2, "at": 4.0, "kept": [0], "back": True}).encode() + b"\n"
    await observed.read(Printing(again, told(3, 5.0)))
    assert observed.violations == []
    assert observed.steps == 3
    receipts = Receipts()
    for number, back in ((8, None), (9, None), (7, SimpleNamespace(step=6)), (8, None)):
        one = report(number)
        one.rolled_back = back
        receipts.add(one)
    assert receipts.violations == []


async def test_who_does_not_come_within_the_time_is_waited_for_no_longer() -> None:
    with pytest.raises(TimeoutError):
        await Observed().until(lambda _: True, 0.01)
    observed = Observed()
    found = asyncio.ensure_future(observed.until(lambda report: report["step"] == 2, 5))
    await asyncio.sleep(0)
    await observed.read(Printing(told(1, 1.0), told(2, 2.0)))
    assert (await found)["at"] == 2.0


def test_the_page_names_what_was_broken() -> None:
    rows = [records.row(5, "cut off", 3, [], "fine"), records.row(1, "killed", 2, ["w1 is late"], "slow")]
    page = records.document([{"command": "c", "machine": "m", "day": "d", "rows": rows}])
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert lines == [
        f"| {records.PROMISES[1]} | killed | 2 | 1: w1 is late | slow |",
        f"| {records.PROMISES[5]} | cut off | 3 | 0 | fine |",
    ]


def test_records_of_one_fault_add_up() -> None:
    seen = [([1.0, 3.0], 7), ([2.0], 5)]
    rows = [
        records.row(1, "killed", len(seconds), [], f"seed {kept}", samples={"back": seconds}, counts={"kept": kept})
        for seconds, kept in seen
    ]
    made = [
        {"command": f"c --seed {seed} --quick", "machine": "m", "day": "d", "rows": [one]}
        for seed, one in enumerate(rows)
    ]
    page = records.document(made)
    told = "back 2.00 s (median), 3.00 s (most); 12 kept; seed 7, seed 5"
    assert f"| {records.PROMISES[1]} | killed | 3 | 0 | {told} |" in page.splitlines()
    assert page.splitlines()[-1] == "- `c --quick` with `--seed` 0, 1 (d; m)"
