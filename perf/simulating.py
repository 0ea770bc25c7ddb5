"""How long a simulation takes: milliseconds for each simulated step of a thousand replicas, and so for ten thousand.

python perf/simulating.py
python perf/simulating.py --replicas 100 --steps 1000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import machine

import flowrt as fr

DELAYS = "correlated:(lognormal:1,0.05),(lognormal:1,0.1) + pauses:50,2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300, help="simulated in each round")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    n = a.replicas
    print(machine.describe())
    print(f"{n} replicas, {a.rounds} rounds of {a.steps} steps; {DELAYS}")
    for policy in (fr.train.AllOf(), fr.train.FirstOf(max(1, round(0.95 * n))), fr.train.Adaptive(), fr.train.Async()):
        seconds = []
        for seed in range(a.rounds):
            began = time.perf_counter()
            fr.simulate(policy, DELAYS, replicas=n, steps=a.steps, seed=seed, overhead=0.05)
            seconds.append((time.perf_counter() - began) / a.steps)
        middle = statistics.median(seconds)
        print(
            f"{policy!s:24s} {1e3 * middle:7.3f} ms a step ({1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f}), "
            f"10,000 steps {1e4 * middle:.0f} s"
        )


if __name__ == "__main__":
    main()
