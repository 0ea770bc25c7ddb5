"""How long a large graph takes to build and until its first step is over, and what a step takes then, by its size.

Two programs: a chain of N operations, ``y = tanh(y * a + b)`` on 16 floats over and over; and N variables of 4 floats,
moved by Adam. Of each side and size a process of its own, side after side and round after round, so that whatever else
the machine does touches all alike: seconds from the first line of building to the end of building, to the end of the
first step, and of one of the steps after that: the median once they become no faster, as flowrt makes a better tape
beside the first steps, and how many seconds that took. Kernels are warm: each program is run once in small before.
Medians over rounds; of the first step the spread too, its growth for ten times the size, and how many times
flowrt's it is (the median of the rounds' ratios). JAX traces where flowrt and TensorFlow build, and TensorFlow's is the
graph of its ``tf.compat.v1`` sessions. Peers are installed by scripts/peers; what is missing is left out, and so is a
size that takes longer than the patience, or would by what the sizes before it took, and every larger one.

    python perf/building.py
    python perf/building.py chain --sizes 1000 10000 --rounds 3 --sides flowrt jax
    python perf/building.py variables --write                # and its table into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import machine as this_machine
import section
from compare import home, versions

HERE = Path(__file__).parent
SIZES = (1_000, 10_000, 100_000)
LARGEST = {"chain": 100_000, "variables": 100_000}
PARTS = ("built", "first", "step", "settled")
HEADING = "## Large graphs, to the end of their first step"
COLUMNS = "| graph | built | first step over (of so many rounds) | growth from a tenth | x flowrt | a later step |"


def measured(side: str, program: str, size: int, patience: float) -> dict[str, float] | None:
    """The seconds of one process; None where it takes too long, or the system ends it for its memory."""
    command = [str(home(side)), "-m", f"sides.building.{side}", program, str(size)]
    environment = {**os.environ, "FLOWRT_BUILD": "never", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, timeout=patience, text=True, env=environment)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise SystemExit(f"{side} {program} {size} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds_of(
    sides: Sequence[str], program: str, size: int, rounds: int, patience: float
) -> dict[str, list[dict[str, float]]]:
    """Each side's seconds of all rounds; fewer than ``rounds`` of a side that takes too long."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for done in range(rounds):
        for side in sides:
            if len(found[side]) == done and (times := measured(side, program, size, patience)) is not None:
                found[side].append(times)
    return found


@dataclass
class Side:
    """One side, and what it took for the last size: its first step, and how much longer than for a tenth of that."""

    name: str
    size: int = 0
    first: float = 0.0
    growth: float = 0.0
    gave_up: int = 0  # the size that took too long

    def expected(self, size: int) -> float:
        """The seconds that it will take for ``size``, going by what it took so far."""
        return self.first * self.growth ** math.log10(size / self.size) if self.growth else self.first

    def line(self, size: int, times: Sequence[dict[str, float]], ours: Sequence[dict[str, float]]) -> str:
        """What it took for ``size`` in each round, beside flowrt's."""
        middle = {part: statistics.median(seconds[part] for seconds in times) for part in PARTS}
        first = [seconds["first"] for seconds in times]
        if self.size:
            self.growth = (middle["first"] / self.first) ** (1 / math.log10(size / self.size))
        self.size, self.first = size, middle["first"]
        spread = f"{self.first:.2f} s ({min(first):.2f} to {max(first):.2f}; {len(first)})"
        ratios = [mine / here["first"] for mine, here in zip(first, ours, strict=False)]
        ratio = f"{statistics.median(ratios):.1f}" if ratios else ""
        growth = f"{self.growth:.1f}x" if self.growth else ""
        step = f"{middle['step'] * 1e3:.2f} ms, {middle['settled']:.1f} s after it"
        return f"{middle['built']:.2f} s | {spread} | {growth} | {ratio} | {step} |"


def rows(
    program: str, names: Sequence[str], sizes: Sequence[int], rounds: int, patience: float
) -> Iterator[tuple[str, str]]:
    """A row for each size and side, as (its first cell, itself)."""
    sides = [Side(name) for name in names]
    for size in sizes:
        tried = [side.name for side in sides if not side.gave_up and side.expected(size) <= patience]
        found = rounds_of(tried, program, size, rounds, patience)
        for side in sides:
            times = found.get(side.name, [])
            what = f"{program} of {size:,}, {side.name}"
            if len(times) == rounds:
                yield what, f"| {what} | {side.line(size, times, found.get('flowrt', ()))}"
                continue
            if side.name in tried:
                told = f"more than {patience:.0f} s, or than there is memory for"
            elif side.gave_up:
                told = f"left out: {side.gave_up:,} took too long"
            else:
                told = f"left out: {side.expected(size):.0f} s are expected"
            side.gave_up = side.gave_up or size
            yield what, f"| {what} | - | {told} | - | - | - |"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=sorted(LARGEST), help=" or ".join(LARGEST))
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--sides", nargs="*", default=["flowrt", "jax", "tf"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/performance.md")
    given = parser.parse_args()
    about = [
        f"{this_machine.describe()}.",
        f"Peers: {versions('jax', 'tf')}. Made by `python perf/building.py --write`.",
    ]
    print("\n".join([*about, "", COLUMNS]), flush=True)
    sides = [side for side in given.sides if home(side).exists()]
    for program in given.programs:
        sizes = [size for size in given.sizes if size <= LARGEST[program]]
        for what, row in rows(program, sides, sizes, given.rounds, given.patience):
            print(row, flush=True)
            if given.write:  # at once: what ends the program early leaves what was measured
                section.put_rows(HEADING, about, COLUMNS, {what: row})


if __name__ == "__main__":
    main()
