"""Adaptive, told nothing, against every fixed number m of updates: recorded traces, made-up scenes, and shifts.

All is simulated in virtual time by the very classes that nodes run. What counts is the time until the worth of the
steps adds up to half of what all updates of all steps would be worth, where a step that keeps k updates is worth
k / (k + B), for three gradient noise scales B. The best m is found afterwards, by trying all of them; under a shift, in
which other replicas become slow in the middle of that, no m is right for the whole of it.

The traces are of 64 and 8 GPUs, whose ranks' computing times are taken for replicas' (see `flowrt.delays.parquet`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from experiment import Finding, run
from numpy.typing import NDArray

import flowrt as fr
from flowrt.simulation import Simulation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
SCALES = (1.0, 8.0, 64.0)
OVERHEAD = 0.05  # of the median time, from a set to the next version
Seconds = NDArray[np.float64]


def scenes(n: int, steps: int, rng: np.random.Generator) -> Iterator[tuple[str, Seconds]]:
    """Names, and seconds [steps, n]. Those that begin with "shift" change in mid-run."""
    # what is counted takes about half of the steps: its middle is at a quarter of them
    usual = 1 + 0.05 * rng.standard_normal((steps, n)).clip(-2, 2)
    few, middle = max(1, n // 8), steps // 4
    yield "all alike", usual
    yield "exponential tail", 0.8 + rng.exponential(0.2, (steps, n))
    yield "heavy tail (Pareto 1.8)", 0.6 + 0.2 * (rng.pareto(1.8, (steps, n)) + 1)
    yield "log-normal, own and common", usual * rng.lognormal(0, 0.2, (steps, 1)) * rng.lognormal(0, 0.2, (steps, n))
    slow = usual.copy()
    slow[:, :few] *= 3
    yield "some always slow", slow
    yield "all slow together at times", usual * np.where(rng.random((steps, 1)) < 0.2, 1.5, 1.0)
    yield "pauses of 5 s, one step in 50", usual + 5.0 * (rng.random((steps, n)) < 0.02)
    yield "bursts of 20 slow steps", np.where(_bursts(steps, n, rng), 4.0, 1.0) * usual
    common = np.random.default_rng(steps).pareto(2.0, (steps, 1)) + 1
    yield "all slow together, heavy tail", usual * common
    shift = usual.copy()
    shift[:middle, :few] *= 3
    shift[middle:, few : few + max(1, n // 4)] *= 2.2
    yield "shift: others become slow", shift
    recover = usual.copy()
    recover[:middle, : max(1, n // 2)] *= 3
    yield "shift: half recover", recover
    die = usual.copy()
    die[middle:, : max(1, n // 4)] = 1000.0
    yield "shift: a quarter hang", die


def _bursts(steps: int, n: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    slow = np.zeros((steps, n), bool)
    for step in range(1, steps):
        slow[step] = np.where(slow[step - 1], rng.random(n) > 0.05, rng.random(n) < 0.006)
    return slow


def traces(folder: Path) -> Iterator[tuple[str, Seconds]]:
    """The recorded ones that there are."""
    for path in sorted(folder.glob("*.parquet")):
        yield path.stem, fr.delays.Trace(path).seconds


def compare(seconds: Seconds, steps: int) -> dict[str, Any]:
    """By noise scale: the best m, and the times of Adaptive and AllOf over its own."""
    n = seconds.shape[1]
    run: Any = {"replicas": n, "steps": steps, "overhead": OVERHEAD * float(np.median(seconds))}
    fixed = [fr.simulate(fr.train.FirstOf(m), seconds, **run) for m in range(1, n + 1)]
    found = {}
    for scale in SCALES:
        worth = 0.5 * steps * n / (n + scale)
        times = [_with_scale(one, scale).seconds_to(worth) for one in fixed]
        best = int(np.argmin(times))
        adaptive = fr.simulate(fr.train.Adaptive(), seconds, noise_scale=scale, **run)
        found[f"{scale:g}"] = {
            "best_m": best + 1,
            "adaptive": adaptive.seconds_to(worth) / times[best],
            "all": times[-1] / times[best],
            "kept": float(adaptive.kept.mean()),
        }
    return found


def _with_scale(one: Simulation, scale: float) -> Simulation:
    """The same steps, which no number takes to be otherwise by their noise."""
    return Simulation(one.seconds, one.kept, one.kept / (one.kept + scale))


def measure(options: argparse.Namespace) -> Finding:
    """Compare on all of them."""
    figures: dict[str, dict[str, Any]] = {}
    print(f"\n{'':32s}" + "".join(f"{f'B = {scale:g}':>24s}" for scale in SCALES))
    print(f"{'time over that of the best m':32s}" + f"{'adaptive    all     m':>24s}" * len(SCALES))
    made = scenes(options.replicas, options.steps, np.random.default_rng(options.seed))
    for name, seconds in (*traces(options.traces), *made):
        figures[name] = found = compare(seconds, options.steps)
        cells = [f"{f['adaptive']:12.3f} {f['all']:6.2f} {f['best_m']:4d}" for f in found.values()]
        print(f"{name:32s}" + "".join(f"{cell:>24s}" for cell in cells), flush=True)
    return Finding(_sentence(figures), figures, lambda plot: _draw(plot, figures), (7.5, 5.0))


def _sentence(figures: dict[str, dict[str, Any]]) -> str:
    groups: dict[str, list[float]] = {}
    for name, found in figures.items():
        kind = "trace" if name.startswith("trace") else "shift" if name.startswith("shift") else "scene"
        groups.setdefault(kind, []).extend(f["adaptive"] for f in found.values())
    said = {
        "trace": "on the recorded traces",
        "scene": "in scenes that stay as they are",
        "shift": "where replicas change in mid-run",
    }
    parts = [f"{min(groups[k]):.2f} to {max(groups[k]):.2f} {said[k]}" for k in said if k in groups]
    return f"Adaptive, told nothing, takes this many times as long as the best fixed m: {', '.join(parts)}."


def _draw(plot: Figure, figures: dict[str, dict[str, Any]]) -> None:
    axes = plot.gca()
    names = list(figures)[::-1]
    axes.axvspan(0, 1.05, color="tab:green", alpha=0.08, lw=0)
    axes.axvline(1, color="black", lw=0.8)
    for scale, marker in zip(SCALES, "ov^", strict=True):
        found = [figures[name][f"{scale:g}"] for name in names]
        axes.plot([f["all"] for f in found], names, marker, color="silver", ms=5)
        axes.plot([f["adaptive"] for f in found], names, marker, color="tab:blue", ms=5, label=f"B = {scale:g}")
    axes.plot([], [], "o", color="silver", label="waiting for all")
    axes.set(xlabel="time to the same worth, over that of the best fixed m", xscale="log", xlim=(0.5, 8))
    axes.set_xticks([0.5, 0.7, 1, 1.5, 2, 3, 5, 8], ["0.5", "0.7", "1", "1.5", "2", "3", "5", "8"])
    axes.minorticks_off()
    axes.legend(loc="lower right")


def _add(parser: argparse.ArgumentParser) -> None:
    where = ROOT.parent / "shared" / "data" / "stragglers"
    parser.add_argument(
        "--traces", type=Path, default=where, help="the folder of recorded traces (default: %(default)s)"
    )


if __name__ == "__main__":
    run(__file__, measure, replicas=16, steps=600, add=_add)
