"""What policies compute for a version, on server 0: CPU seconds of simulated runs over those of `FirstOf` all.

In simulated runs the policy's code is in the processor's caches; on a node, which does other things meanwhile, it takes
some three times as long. What `Adaptive` does depends on whether times have anything in common, hence four scenes.

    python perf/deciding.py                   # 6 and 16 replicas
    python perf/deciding.py 64 --versions 600
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # flowrt as it lies here

import machine  # before NumPy, see there
import numpy as np
from numpy.typing import NDArray

import flowrt as fr

TURNS = 5


def scenes(versions: int, n: int, rng: np.random.Generator) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Names, and seconds [versions, n]."""
    usual = 1 + 0.03 * rng.standard_normal((versions, n)).clip(-3, 3)
    yield "alike", usual
    yield "one slow", usual * np.where(np.arange(n) == 0, 5.0, 1.0)
    yield "log-normal", rng.lognormal(0, 0.5, (versions, n))
    yield "slow together", usual * rng.lognormal(0, 0.4, (versions, 1))


def spent(policy: fr.train.Policy, seconds: NDArray[np.float64]) -> float:
    """CPU seconds of a version."""
    versions, n = seconds.shape
    began = time.process_time()
    fr.simulate(policy, seconds, replicas=n, steps=versions)
    return (time.process_time() - began) / versions


def main() -> None:
    """Measure, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replicas", type=int, nargs="*", default=[6, 16])
    parser.add_argument("--versions", type=int, default=300)
    options = parser.parse_args()
    print(machine.describe())
    for n in options.replicas:
        for name, seconds in scenes(options.versions, n, np.random.default_rng(n)):
            turns = [spent(fr.train.Adaptive(), seconds) - spent(fr.train.FirstOf(n), seconds) for _ in range(TURNS)]
            print(f"{n} replicas, {name}: Adaptive {1e3 * min(turns):.3f} to {1e3 * max(turns):.3f} ms a version")


if __name__ == "__main__":
    main()
