"""Products of matrices, batches of them and einsum: whole steps on all threads, beside NumPy's BLAS, torch and JAX.

Sides take turns, each in a process of its own, so that nobody's idle threads spin beside another. GFLOP/s of the least
time, and the fastest peer's least time over flowrt's: above 1, flowrt is faster.

    python perf/products.py [large|skinny|batched|einsum|CASE ...] [--threads 2] [--rounds 3] [--seconds 0.3]

A case is written ``float32 ij,jk->ik 512x512 512x64``.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import machine as this_machine

HERE = Path(__file__).resolve().parent
PEERS = Path.home() / ".cache" / "flowrt-peers"
PAUSE = 0.05  # seconds: OpenBLAS' threads spin for a while after a product
TRIES, OTHERS = 4, 0.05  # a measurement is repeated where others took more than this share of the processors
TICKS = os.sysconf("SC_CLK_TCK")


def product(m: int, k: int, n: int, flags: str = "NN", dtype: str = "float32") -> str:
    a, b = ("pi", f"{k}x{m}") if flags[0] == "T" else ("ip", f"{m}x{k}"), ("jp", f"{n}x{k}")
    b = b if flags[1] == "T" else ("pj", f"{k}x{n}")
    return f"{dtype} {a[0]},{b[0]}->ij {a[1]} {b[1]}"


def batch(count: int, m: int, k: int, n: int, flags: str = "NN", dtype: str = "float32") -> str:
    a, b = ("zpi", f"{count}x{k}x{m}") if flags[0] == "T" else ("zip", f"{count}x{m}x{k}"), ("zjp", f"{count}x{n}x{k}")
    b = b if flags[1] == "T" else ("zpj", f"{count}x{k}x{n}")
    return f"{dtype} {a[0]},{b[0]}->zij {a[1]} {b[1]}"


GROUPS = {
    "large": [
        product(size, size, size, flags, dtype)
        for dtype in ("float32", "float64")
        for size, flags in ((1024, "NN"), (2048, "NN"), (2048, "NT"), (2048, "TN"))
    ],
    "huge": [product(4096, 4096, 4096, "NN", dtype) for dtype in ("float32", "float64")],
    "skinny": [
        product(m, k, n, flags)
        for m, k, n in ((8192, 512, 512), (128, 4096, 4096), (4096, 4096, 128), (512, 8192, 512), (2048, 64, 2048))
        for flags in ("NN", "NT", "TN")
    ],
    "batched": [
        batch(count, m, k, n, flags)
        for count, m, k, n in (
            (10000, 4, 4, 4), (4096, 8, 8, 8), (1024, 16, 16, 16), (512, 32, 32, 32), (64, 64, 64, 64),
            (192, 128, 64, 128), (192, 128, 128, 64), (16, 256, 256, 256), (1000, 3, 3, 1), (256, 1, 64, 64),
            (96, 17, 33, 65), (2048, 10, 20, 5),
        )
        for flags in ("NN", "NT", "TN")
    ],
    "einsum": [
        "float32 bqhd,bkhd->bhqk 8x128x8x64 8x128x8x64",
        "float32 bhqk,bkhd->bqhd 8x8x128x128 8x128x8x64",
        "float32 bsd,dhk->bshk 8x128x512 512x8x64",
        "float32 bi,bj->bij 256x64 256x64",
        "float32 bi,ij->bj 256x300 300x200",
        "float32 bi,bi->b 4096x256 4096x256",
        "float32 ij,kj->ik 512x512 512x512",
        "float32 bij,bjk->bik 64x64x64 64x64x64",
        "float32 ibj,jbk->bik 64x64x64 64x64x64",
        "float32 nhwc,cd->nhwd 8x28x28x64 64x128",
    ],
}  # fmt: skip


def work(case: str) -> int:
    """Multiply-adds twice."""
    _, equation, *shapes = case.split()
    sizes: dict[str, int] = {}
    for names, shape in zip(equation.split("->")[0].split(","), shapes, strict=True):
        sizes.update(zip(names, map(int, shape.split("x")), strict=True))
    return 2 * math.prod(sizes.values())


def busy() -> float:
    """Seconds in which processors computed, all together."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


class Side:
    """A library's process, which measures one case at a time."""

    def __init__(self, name: str, threads: int) -> None:
        python = PEERS / name / "bin" / "python"
        python = python if python.exists() and name not in ("flowrt", "numpy") else Path(sys.executable)
        count = str(threads)
        surroundings = {**os.environ, "THREADS": count, "OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count}
        command = [str(python), "-m", "sides.products", name]
        self.name, self.best, self.sum = name, math.inf, 0.0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=surroundings, cwd=HERE
        )

    def measure(self, case: str, seconds: float) -> float:
        """The least seconds of a run, of runs beside which nobody else computed, if such are found."""
        least = math.inf
        for _ in range(TRIES):
            before = time.monotonic(), busy() - self._used()
            least = min(least, self._measured(case, seconds))
            share = (busy() - self._used() - before[1]) / (time.monotonic() - before[0]) / (os.cpu_count() or 1)
            if share < OTHERS:
                break
        return least

    def _used(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def _measured(self, case: str, seconds: float) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, case, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        time.sleep(PAUSE)
        found, _, self.sum = map(float, answer.split())
        return found

    def close(self) -> None:
        self._process.communicate()


def line(case: str, sides: list[Side], rounds: int, seconds: float) -> str:
    best = dict.fromkeys((side.name for side in sides), math.inf)
    for _ in range(rounds):
        for side in sides:
            best[side.name] = min(best[side.name], side.measure(case, seconds))
    own, others = best["flowrt"], [best[side.name] for side in sides[1:]]
    wrong = [s.name for s in sides if not math.isclose(s.sum, sides[0].sum, rel_tol=1e-3)]
    rates = "".join(f"{work(case) / each / 1e9:9.1f}" for each in best.values())
    ratio = f"{min(others) / own:8.2f}" if others else ""
    return f"{case:52}{1e6 * own:10.1f}{rates}{ratio}" + (f"  other results: {wrong}" if wrong else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["large", "skinny", "batched", "einsum"])
    parser.add_argument("--peers", nargs="*", default=["numpy", "torch", "jax"])
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1)
    a = parser.parse_args()
    sides = [Side(name, a.threads) for name in ("flowrt", *a.peers)]
    print(f"{this_machine.describe()}, {a.threads} threads")
    print(f"{'':52}{'us':>10}" + "".join(f"{side.name:>9}" for side in sides) + f"{'ratio':>8}")
    for case in [each for name in a.cases for each in GROUPS.get(name, [name])]:
        print(line(case, sides, a.rounds, a.seconds), flush=True)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
