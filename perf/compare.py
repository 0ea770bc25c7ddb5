"""flowrt beside TensorFlow, PyTorch, JAX and PyTensor on the same work, interleaved in one run.

Every side is a process of its own (see sides/) that builds the workload, runs five steps whose results must agree with
flowrt's, and then measures when it is told to: one after the other, round after round, so that whatever else the
machine does touches all alike. The ratio of a round is the peer's median over flowrt's; what counts is the median of
the ratios against the fastest peer. Peers are installed by scripts/peers; those that are missing are left out.

    python perf/compare.py                     # everything installed, two threads
    python perf/compare.py mlp cnn --rounds 9
    python perf/compare.py --write             # and write docs/performance.md
    python perf/compare.py heat adam --write   # the rows of these, into a table of their own
    python perf/compare.py --before DIR        # beside flowrt itself as the tree DIR has it
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import machine as this_machine
from section import PAGE, others, put_rows
from side_process import HERE, Case, Failed, Process, command, environment, home

READY_SECONDS = 240.0  # PyTensor and torch.compile compile for a while
PAUSE_SECONDS = 0.25  # threads of the side before spin that long
TOLERANCE = 2e-3  # of the first results: float32, five steps


def _dispatch(shape: str) -> Iterator[Case]:
    about = f"10,000 scalar adds, {shape}, as written"
    arguments = ("--shape", shape)
    yield Case(f"dispatch-{shape}", "W1", about, {"tf": ["callable"]}, 5.0, arguments, "M/s")
    single = {"tf": ["single_threaded"]}
    yield Case(
        f"dispatch-{shape}-single", "W1", f"{about}; the single-threaded executor", single, 3.0, arguments, "M/s"
    )


MLP = {"tf": ["callable", "function", "xla"], "torch": ["eager", "compile"], "jax": [""], "pytensor": [""]}
CASES = (
    *[case for shape in ("chain", "parallel", "fan") for case in _dispatch(shape)],
    Case(
        "overhead",
        "W2",
        "feed 8 floats, x * 2 + 1, fetch",
        {
            "tf": ["callable", "callable_nothreads", "function"],
            "torch": ["eager"],
            "jax": ["jit", "aot"],
            "pytensor": ["", "trusted"],
        },
        1.0,
    ),
    Case("mlp", "W3", "MLP training step, batch 128", MLP, 1.3),
    Case("mlp-32", "W3", "MLP training step, batch 32", MLP, 1.3, ("--batch", "32")),
    Case(
        "cnn",
        "W4",
        "CNN training step, batch 64",
        {
            "tf": ["callable", "function", "xla"],
            "torch": ["eager_nhwc", "eager_nchw", "compile_nhwc"],
            "jax": ["nhwc", "nchw"],
        },
        1.2,
    ),
    Case(
        "lstm",
        "W5",
        "LSTM training step, 64 steps of batch 32",
        {"tf": ["callable", "callable_unrolled", "xla"], "torch": [""], "jax": ["scan", "scan8"], "pytensor": [""]},
        1.2,
    ),
    Case("loop", "W5b", "while_loop of two scalars, against TensorFlow's executor", {"tf": ["", "v2"]}, 50, (), "M/s"),
    Case(
        "loop-compiled",
        "W5b",
        "while_loop of two scalars, against compilers",
        {"jax": [""], "tf": ["xla"], "pytensor": [""]},
        0.5,
        (),
        "M/s",
    ),
    Case(
        "embedding",
        "W7",
        "200,000 embeddings, sparse AdaGrad step",
        {"tf": ["callable", "function"], "torch": [""], "jax": [""]},
        1.3,
    ),
    Case(
        "normed",
        "normed",
        "four layers with layer_norm and gelu, batch 256, Adam",
        {"torch": ["eager"], "jax": [""]},
        1.0,
    ),
    Case(
        "residual",
        "residual",
        "residual block with batch_norm and strides, batch 32",
        {"torch": ["eager_nhwc"], "jax": ["nhwc"]},
        1.0,
    ),
    Case("gru", "gru", "a GRU written with scan, 64 steps of batch 32", {"torch": [""], "jax": ["scan"]}, 1.0),
    Case("power", "power", "while_loop of 200 products of 256x256 with a vector", {"torch": [""], "jax": [""]}, 1.0),
    Case(
        "bodies",
        "bodies",
        "1,024 bodies that attract each other, 10 steps in a while_loop",
        {"torch": ["compile", "eager"], "jax": [""]},
        1.0,
    ),
    Case(
        "heat",
        "heat",
        "five-point stencil on 1024x1024, 50 steps in a while_loop",
        {"torch": ["compile", "eager"], "jax": [""]},
        1.0,
    ),
    Case("columns", "columns", "softmax over axis 0 of [4096, 256]", {"torch": ["eager", "compile"], "jax": [""]}, 1.0),
    Case("pooled", "pooled", "max_pool of [32, 32, 32, 64] and its gradient", {"torch": ["eager"], "jax": [""]}, 1.0),
    Case(
        "adam",
        "adam-large",
        "Adam of 20 parameters of 1,000,000",
        {"torch": ["fused", "foreach"], "jax": [""]},
        1.0,
        topic="updates",
    ),
    Case("many-rows", "many_rows", "50,000 embeddings of 128, bags of 32, sparse Adam", {"torch": [""]}, 1.0),
    Case(
        "start",
        "W3",
        "process start to the end of the first MLP step, caches warm",
        {"tf": ["callable", "function"], "torch": ["eager"], "jax": [""], "pytensor": [""]},
        2.0,
        (),
        "s",
    ),
)
COLUMNS = "| workload | flowrt | best peer | ratio (lowest to highest round) | asked | memory grew: flowrt, peer |"
CHOSEN = "## Single workloads beside peers"


@dataclass(slots=True)
class Measured:
    """One side of one case: seconds per call, round by round, and how its memory grew."""

    name: str
    rounds: list[list[float]] = field(default_factory=list)
    growth: float | None = None

    @property
    def medians(self) -> list[float]:
        return [statistics.median(r) for r in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.medians)


@dataclass(slots=True)
class Result:
    """What came of a case."""

    case: Case
    work: int
    flowrt: Measured
    peers: list[Measured]
    failed: dict[str, str]
    first: Sequence[float] = ()  # what flowrt's first steps answered

    def ratios(self, peer: Measured) -> list[float]:
        return [p / f for p, f in zip(peer.medians, self.flowrt.medians, strict=True)]

    @property
    def best(self) -> Measured | None:
        return min(self.peers, key=lambda peer: peer.median, default=None)


def sides(case: Case) -> list[tuple[str, str]]:
    """The peers to compare with, as (peer, variant): those that are installed."""
    return [(peer, variant) for peer, variants in case.peers.items() if home(peer).exists() for variant in variants]


def begin(case: Case, threads: int) -> dict[str, Process]:
    """All sides of a case, by name, started together."""
    made = [Process(peer, variant, case, threads) for peer, variant in [("flowrt", ""), *sides(case)]]
    return {process.name: process for process in made}


def run_case(
    case: Case, threads: int, rounds: int, seconds: float, begun: Mapping[str, Process] | None = None
) -> Result:
    """A case measured in turns. Sides that have not `begun` start one after another, each once the last is ready."""
    if case.unit == "s":
        return run_start(case, threads, rounds)
    processes: dict[str, Process] = {}
    ready: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    try:
        for peer, variant in [("flowrt", ""), *sides(case)]:
            name = f"{peer} {variant}".strip()
            process = begun[name] if begun else Process(peer, variant, case, threads)
            processes[process.name] = process
            try:
                ready[process.name] = process.answer(READY_SECONDS)
            except Failed as why:
                failed[process.name] = str(why)
        if "flowrt" in failed:
            raise Failed(failed["flowrt"])
        for name, message in list(ready.items()):
            if not agree(message["first"], ready["flowrt"]["first"]):
                failed[name] = f"other results: {message['first']}, not {ready['flowrt']['first']}"
                del ready[name]
        measured = {name: Measured(name) for name in ready}
        for _ in range(rounds):
            for name in ready:
                time.sleep(PAUSE_SECONDS)
                measured[name].rounds.append(processes[name].measure(seconds))
        for name in ready:
            measured[name].growth = processes[name].end().get("rss_growth_mib")
        peers = [side for name, side in measured.items() if name != "flowrt"]
        own = ready["flowrt"]
        return Result(case, int(own["work"]), measured["flowrt"], peers, failed, own["first"])
    finally:
        for process in {**processes, **(begun or {})}.values():
            process.kill()


def agree(first: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-4) for a, b in zip(first, others, strict=True))


def run_start(case: Case, threads: int, rounds: int) -> Result:
    """Whole processes, from start to the end of their first step; the first of each side only warms caches."""
    names = [("flowrt", ""), *sides(case)]
    measured = {side: Measured(f"{side[0]} {side[1]}".strip()) for side in names}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for side in names:
            began = time.perf_counter()
            line = command(*side, case, threads, "--first-only")
            done = subprocess.run(line, cwd=HERE, env=environment(*side), capture_output=True, text=True)
            seconds = time.perf_counter() - began
            if done.returncode:
                failed[measured[side].name] = (done.stderr.strip().splitlines() or ["failed"])[-1]
            elif number:
                measured[side].rounds.append([seconds])
    flowrt = measured.pop(("flowrt", ""))
    if flowrt.name in failed:
        raise Failed(failed[flowrt.name])
    return Result(case, 1, flowrt, [m for m in measured.values() if m.name not in failed], failed)


def figure(seconds: float, result: Result) -> str:
    """One side's time, or rate, with its unit."""
    if result.case.unit == "M/s":
        return f"{result.work / seconds / 1e6:.3g} M/s"
    if result.case.unit == "s":
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


def grown(side: Measured) -> str:
    return "-" if side.growth is None or math.isnan(side.growth) else f"{side.growth:.0f} MiB"


def row(result: Result) -> str:
    """A case against its fastest peer."""
    best = result.best
    if best is None:
        return f"| {result.case.what} | {figure(result.flowrt.median, result)} | no peer | - | - | - |"
    ratios = result.ratios(best)
    return (
        f"| {result.case.what} | {figure(result.flowrt.median, result)} | {best.name}: "
        f"{figure(best.median, result)} | **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to "
        f"{max(ratios):.2f}) | {result.case.target:g} | {grown(result.flowrt)}, {grown(best)} |"
    )


def table(results: Sequence[Result]) -> Iterator[str]:
    """A Markdown table: every case against its fastest peer, then every side of it."""
    yield COLUMNS
    yield "|---|---|---|---|---|---|"
    yield from map(row, results)
    yield ""
    yield "Every side, fastest first:"
    yield ""
    for result in results:
        order = sorted([result.flowrt, *result.peers], key=lambda side: side.median)
        listed = ", ".join(f"{side.name} {figure(side.median, result)}" for side in order)
        yield f"- {result.case.what}: {listed}"
        for name, why in result.failed.items():
            yield f"  - {name} was left out: {why}"


def versions(*peers: str) -> str:
    """The peers' versions, as installed; of all but ray if none is named."""
    packages = {"tf": "tensorflow-cpu", "torch": "torch", "jax": "jax", "pytensor": "pytensor", "ray": "ray"}
    found = []
    for peer in peers or ("tf", "torch", "jax", "pytensor"):
        package = packages[peer]
        if home(peer).exists():
            code = f"from importlib.metadata import version; print(version({package!r}))"
            done = subprocess.run([str(home(peer)), "-c", code], capture_output=True, text=True)
            found.append(f"{package} {done.stdout.strip() or '?'}")
    return ", ".join(found) or "no peer is installed; run scripts/peers"


def page(results: Sequence[Result], settings: str) -> str:
    lines = [
        "# How fast it is",
        "",
        "Made by `python perf/compare.py --write`; do not edit. Every ratio is the fastest peer's time over flowrt's,",
        "measured in turns in one run; above 1, flowrt is faster. All sides agree on the results of their first steps.",
        "",
        *settings.splitlines(),
        "",
        *table(results),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(case.name for case in CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring, per side and round")
    parser.add_argument("--write", action="store_true", help="write its part of docs/performance.md")
    parser.add_argument("--before", type=Path, metavar="DIR", help="compare with flowrt as that tree has it, not peers")
    a = parser.parse_args()
    if a.before and (a.write or not (a.before / "flowrt" / "__init__.py").exists()):
        parser.error("--before wants the root of another tree of flowrt, and writes no page")
    unknown = set(a.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
    settings = (
        f"Machine: {this_machine.describe()}.\n"
        f"Peers: {versions()}.\n"
        f"Every side on {a.threads} threads; {a.rounds} rounds of {a.seconds} s."
    )
    print(settings, flush=True)
    results = []
    for case in CASES:
        if not a.cases or case.name in a.cases:
            case = replace(case, peers={"before": [str(a.before.resolve())]}) if a.before else case
            print(f"{case.name} …", file=sys.stderr, flush=True)
            try:
                results.append(run_case(case, a.threads, a.rounds, a.seconds))
            except Failed as why:
                print(f"{case.name}: flowrt's side failed: {why}", flush=True)
                continue
            if a.write and a.cases:  # at once: what ends the program early leaves what was measured
                about = [*settings.splitlines(), "Made by `python perf/compare.py CASES --write`."]
                put_rows(CHOSEN, about, COLUMNS, {case.what: row(results[-1])})
    print("\n".join(table(results)))
    if a.write and not a.cases:
        PAGE.write_text("\n".join([page(results, settings), *filter(None, [others()])]), encoding="utf-8")


if __name__ == "__main__":
    main()
