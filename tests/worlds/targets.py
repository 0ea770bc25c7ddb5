"""Every elementwise function and fused group, cut into every range, as code for several processors.

    scripts/targets                        # this machine's, AVX-512, AVX2 and SSE2: ten minutes at most
    scripts/targets znver4 haswell         # LLVM's names

Each processor's kernels are compiled by a process of their own, which Numba's settings tell of it, and kept as any are.
An entry must be the same bits in each range that loops of vectors tell apart, contiguous, strided and in place, as it
is alone; programs that fold the same at every cut of their units. Where the time is over before all is tried, the same
share was of each kind, and what is left is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

FEATURES = {
    "native": "",
    "skylake-avx512": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "haswell": "avx2 fma bmi2",
    "x86-64": "sse2",
}
"""What a processor of this name has that another may lack, in Linux's words."""
SECONDS = 280.0  # of each; what is not tried by then is told
MOST_UNITS = 40

Work: TypeAlias = Callable[[], tuple[int, list[str]]]
"""Tries one op, group or fold: how many cuts, and those that differ."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(FEATURES), metavar="TARGET")
    parser.add_argument("--groups", type=int, default=12, help="random fused groups, of float32 and of float64")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each target")
    parser.add_argument("--this", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.this:
        print(json.dumps(tried(options.groups, time.monotonic() + options.seconds)))
        return 0
    print(f"{'target':16}{'bytes':>6}{'ops':>5}{'groups':>8}{'folds':>7}{'cuts':>12}{'differing':>11}{'seconds':>9}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda name: row(name, options), options.targets))
    return 0 if all(found) else 1


def row(name: str, options: argparse.Namespace) -> bool:
    """Try a target and print what came of it; whether all was right."""
    from flowrt.kernels.store.surroundings import processor_features

    missing = set(FEATURES.get(name, "").split()) - processor_features()
    if missing:
        print(f"{name:16} not run: this machine has no {', '.join(sorted(missing))}", flush=True)
        return True
    started = time.monotonic()
    told = {} if name == "native" else {"NUMBA_CPU_NAME": name}
    command = [sys.executable, __file__, "--this", "--groups", str(options.groups), "--seconds", str(options.seconds)]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode:
        print(f"{name:16} failed with {done.returncode}: {done.stderr[-2000:]}", flush=True)
        return False
    found = json.loads(done.stdout.splitlines()[-1])
    counts = f"{found['bytes']:6}{found['ops']:5}{found['groups']:8}{found['folds']:7}"
    left = [f"{count} {kind}" for kind, count in found["left"].items() if count]
    late = f", cut short: {', '.join(left)} are left" if left else ""
    print(f"{name:16}{counts}{found['cuts']:12,}{len(found['wrong']):11,}{seconds:9.0f}{late}", flush=True)
    for cut in found["wrong"][:5]:
        print(f"    {cut}")
    return not found["wrong"]


def tried(groups: int, until: float) -> dict[str, Any]:
    """What came of everything on the processor that this process compiles for."""
    from cut_world import DTYPES, differences, elementwise_ops, every_cut, random_group

    from flowrt.kernels.tiles.micro import native

    works = {
        "ops": [partial(differences, what, every_cut) for dtype in DTYPES for what in elementwise_ops(dtype)],
        "groups": [
            partial(lambda seed, dtype: differences(random_group(seed, dtype), every_cut), seed, dtype)
            for seed in range(groups)
            for dtype in DTYPES
        ],
        "folds": reducing(),
    }
    left, wrong = dict.fromkeys(works, 0), list[str]()
    found: dict[str, Any] = {"bytes": native().width, **left, "cuts": 0, "left": left, "wrong": wrong}
    for kind, work in in_turns(works):
        if time.monotonic() > until:
            left[kind] += 1
            continue
        cuts, differing = work()
        found[kind] += 1
        found["cuts"] += cuts
        wrong += differing
    return found


def in_turns(works: Mapping[str, Sequence[Work]]) -> list[tuple[str, Work]]:
    """All of them, so that of each kind the same share is done whenever the time is over, of whatever dtypes."""
    shares: list[tuple[float, str, Work]] = []
    for kind, ones in works.items():
        mixed = random.Random(0).sample(ones, len(ones))
        shares += [((number + 0.5) / len(ones), kind, work) for number, work in enumerate(mixed)]
    return [(kind, work) for _, kind, work in sorted(shares, key=lambda share: share[0])]


def reducing() -> list[Work]:
    """The examples of fused programs and of products with an epilogue."""
    from op_examples_fused import EPILOGUES, FUSED

    return [partial(_reduced, example) for example in (*FUSED, *EPILOGUES)]


def _reduced(example: Any) -> tuple[int, list[str]]:
    """How many cuts of an example were tried, and those that differ."""
    from cut_world import application_of, are_same, at_once, computed, run_in_ranges, seeded

    rng, cuts, wrong = seeded(example), 0, list[str]()
    for node, inputs, outputs in computed(example.run, example.arrays):
        application = application_of(node, inputs, outputs)
        whole = run_in_ranges(application, inputs, outputs, at_once, rng)
        most = min(max(step.units for step in application.steps), MOST_UNITS)
        for begin, end in itertools.combinations(range(most + 1), 2):
            parts = run_in_ranges(application, inputs, outputs, lambda n, a=begin, b=end: _around(a, b, n), rng)
            cuts += 1
            wrong += [] if are_same(parts, whole) else [f"{example} [{begin}, {end})"]
    return cuts, wrong


def _around(begin: int, end: int, units: int) -> list[tuple[int, int]]:
    """A range of units first, as far as there are so many, then what is around it."""
    begin, end = min(begin, units), min(end, units)
    return [(begin, end), (end, units), (0, begin)]


if __name__ == "__main__":
    sys.exit(main())
