"""The main job as a newcomer runs it: its answers, its options, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from importlib.util import find_spec
from typing import Any

import pytest
from places import ROOT
from programs import python

if not all(map(find_spec, ("sklearn", "rich"))):  # found, not imported: the script does that, in its own process
    pytest.skip("scikit-learn and rich are not installed", allow_module_level=True)

SCRIPT = ROOT / "scripts" / "digits.py"
SLOW = re.compile(r" is (slow|frozen|suspect|alive): | as fast as usual again, by ")


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*python(), str(SCRIPT), *arguments, stdout=pipe, stderr=pipe)


async def answer(*arguments: str) -> tuple[int | None, str, str]:
    process = await start(*arguments)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def said(err: str) -> list[str]:
    """The lines that do not tell of who is slow or silent, as on a busy machine anybody may be."""
    return [line for line in err.splitlines() if not SLOW.search(line)]


def figures(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])["policies"]


async def test_here_it_learns_to_read_digits() -> None:
    status, out, err = await answer("--local", "--json", "--policy", "first")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 1
    first = figures(out)["first"]
    assert first.keys() == {"median_step_s", "p95_step_s", "steps_per_s", "kept", "late", "lost", "accuracy"}
    assert first["accuracy"] >= 0.96
    assert sum(first["kept"].values()) == 3 * 60


async def test_on_nodes_it_shows_progress_then_a_table_then_the_line() -> None:
    options = "--replicas", "3", "--steps", "200", "--slow", "worker:1=5"
    status, out, err = await answer(*options, "--policy", "first")
    assert (status, said(err)) == (0, [])
    assert "step  200 of 200" in out
    assert "late: 1" in out
    assert "median step" in out
    first = figures(out)["first"]
    assert first["kept"] == {"0": 200, "1": 0, "2": 200}
    assert first["late"]["1"] >= 5  # it begins with a version whenever it gets to see one before the next
    assert first["lost"] == []
    assert first["median_step_s"] < 2


@pytest.mark.usefixtures("interruptible")
async def test_interrupted_it_ends_quietly_and_its_nodes_with_it() -> None:
    process = await start("--policy", "first", "--steps", "100000")
    assert process.stdout is not None
    while b"step   10 of" not in await process.stdout.readline():
        assert process.returncode is None
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, said(err.decode())) == (130, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--take", "5"], "--take must be from 1 to 4"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--slow", "worker:7=1"], "write worker:N=DELAY with N from 0 to 3"),
        (["--slow", "worker:0=1", "--slow", "worker:1=1"], "the yardstick needs 3 workers without a delay"),
        (["--local", "--slow", "worker:0=1"], "--local starts none"),
    ],
)
async def test_options_that_make_no_sense_are_refused(arguments: list[str], message: str) -> None:
    status, out, err = await answer(*arguments)
    assert (status, out) == (2, "")
    assert message in err
