"""Whole runs of client and nodes in virtual time, each with orders and faults that follow from a seed.

    scripts/chaos --schedules 100000 --seed 0            # all scenarios of tests/test_*schedules.py in turn
    scripts/chaos --schedules 1 --seed 4711 --only clients_die
    scripts/chaos --schedules 1000 --long                # schedules as long as the suite's

The classes are those that nodes and clients run; the network, the clock and what is computed are not. Schedules are
brief: a tenth of the steps between faults that come as close, some ten times as many a second. Printed: each scenario
and seed that breaks a promise, which the same seed breaks again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [str(folder) for folder in (ROOT / "tests", *(ROOT / "tests").rglob("*")) if folder.is_dir()]
sys.path[:0] = [str(ROOT), *TESTS, str(ROOT / "perf"), str(Path(__file__).parent)]

import records  # noqa: E402
import test_detached_schedules  # noqa: E402
import test_schedules  # noqa: E402
from sim_loop import simulate  # noqa: E402

from flowrt.train import watching  # noqa: E402

SCENARIOS = test_schedules.SCENARIOS | test_detached_schedules.SCENARIOS
MEMORY = Path("/dev/shm")  # where ledgers cost no disk's time
CYCLES = 50  # schedules between two looks for what nobody refers to, which else are a third of the time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--long", action="store_true", help="as long as the suite's, which are ten times as long")
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    length = test_schedules.LONG if options.long else test_schedules.BRIEF
    watching.TICK /= length.of_tests  # seconds between two looks at who is slow, which decide nothing
    if MEMORY.is_dir():
        tempfile.tempdir = str(MEMORY)
    gc.disable()
    gc.freeze()
    broken, began = [], time.monotonic()
    for number in range(options.schedules):
        if number % CYCLES == 0:
            gc.collect()
        name, seed = options.only[number % len(options.only)], options.seed + number // len(options.only)
        if (why := _try(name, seed, length)) is not None:
            broken.append(f"{name}, seed {seed}: {why}")
            print(broken[-1], flush=True)
    seconds = time.monotonic() - began
    kind = "long" if options.long else "brief"
    fault = f"{kind} schedules in virtual time: {', '.join(options.only)}"
    print(f"{options.schedules / seconds:.0f} schedules a second")
    figure = f"seeds {options.seed} to {seed}"
    row = records.row(32, fault, options.schedules, broken, figure)
    records.show([row])
    if options.json:
        records.write(options.json / f"schedules-{'long-' if options.long else ''}{options.seed}.json", [row])
    return 1 if broken else 0


def _try(name: str, seed: int, length: test_schedules.Length) -> str | None:
    """What broke, if anything."""
    rng = random.Random(seed)
    try:
        simulate(rng, lambda: SCENARIOS[name](rng, length))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
