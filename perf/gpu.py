"""Steps on a GPU beside torch.compile and JAX on the same one, in one run; where there is none, "not measured".

The sides are those of compare.py, with ``--device cuda``: each a process of its own, all started together and measured
in turns, whose first losses must be those of flowrt on this machine's cores. All products are of float32 (no TF32). The
roofline is the least that the multiplications of a step take at the GPU's peak, which --peak tells. The host's cost of
a replayed step is one call of its CUDA graph. What --minutes leave no time for is named, not measured. (This file is
not called cuda.py, as sides run in this folder: NVIDIA's package is.)

    CUDA=1 scripts/peers torch jax         # once; then, with flowrt[cuda13] or [cuda12] installed,
    python perf/gpu.py --peak 67e12        # an H100's float32 operations a second
    python perf/gpu.py --write             # and write docs/performance.md
    FLOWRT_PEERS=DIR python perf/gpu.py    # by DIR/torch/bin/python and DIR/jax/bin/python, whichever they are
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import machine as this_machine
import numpy as np
from compare import READY_SECONDS, Case, Failed, Process, Result, agree, begin, run_case
from section import put
from sides import harness as h

import flowrt as fr

PEERS = {"torch": ("compile", "eager"), "jax": ("",)}
ON_GPU = ("--device", "cuda")
THREADS = 2
HEADING = "## On a GPU"
COLUMNS = "| workload | flowrt | torch.compile | JAX | best peer ÷ flowrt (lowest to highest round) | roofline |"


def _case(name: str, workload: str, what: str, **peers: Sequence[str]) -> Case:
    return Case(name, workload, what, {**PEERS, **peers}, 0.9, ON_GPU)


CASES = (
    _case("null", "W2", "null step: 8 floats there, x * 2 + 1, and back", jax=("jit",)),
    _case("mlp", "W3", "W3, MLP, batch 128"),
    _case("cnn", "W4", "W4, CNN, batch 64", torch=("compile_nhwc", "eager_nhwc"), jax=("nhwc",)),
    _case(
        "residual",
        "residual",
        "residual block with batch_norm, batch 32",
        torch=("compile_nhwc", "eager_nhwc"),
        jax=("nhwc",),
    ),
    _case("lstm", "W5", "W5, LSTM, 64 steps of batch 32", torch=("", "compile"), jax=("scan",)),
    _case("embedding", "W7", "W6, 200,000 embeddings, sparse AdaGrad", torch=("",)),
    _case(
        "gpt", "gpt", f"GPT of {h.GPT_LAYERS} layers, width {h.GPT_WIDTH}, {h.GPT_BATCH} texts of {h.GPT_LENGTH} words"
    ),
)


def products(name: str) -> float:
    """The multiplications and additions of a step's products; of the backward pass twice those of the forward."""
    match name:
        case "mlp":
            forward = 128 * sum(a * b for a, b in itertools.pairwise(h.MLP_SIZES))
        case "cnn":
            forward = h.CNN_BATCH * (32 * 32 * 27 * 32 + 16 * 16 * 288 * 64 + 4096 * 128 + 1280)
        case "lstm":
            units = h.LSTM_UNITS
            forward = h.LSTM_STEPS * h.LSTM_BATCH * units * (4 * (h.LSTM_IN + units) + h.LSTM_CLASSES)
        case "gpt":
            n, words = h.GPT_WIDTH, h.GPT_BATCH * h.GPT_LENGTH
            forward = words * (h.GPT_LAYERS * (12 * n * n + 2 * h.GPT_LENGTH * n) + n * h.GPT_WORDS)
        case _:
            forward = 0
    return 6.0 * forward


class Begun:
    """The sides of all cases, and flowrt on this machine's cores beside each, starting together: most of the time that
    a GPU is held is theirs to compile."""

    def __init__(self, cases: Sequence[Case]) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX else takes most of the GPU's memory
        self._sides = {case.name: begin(case, THREADS) for case in cases}
        self._hosts = {case.name: Process("flowrt", "", replace(case, arguments=()), THREADS) for case in cases}

    def measured(self, case: Case, rounds: int, seconds: float) -> Result:
        """A case measured. Raises `Failed` where flowrt's losses on the GPU are not those of the host."""
        result = run_case(case, THREADS, rounds, seconds, self._sides[case.name])
        there, here = result.first, self._hosts[case.name].answer(READY_SECONDS)["first"]
        if not agree(there, here):
            raise Failed(f"losses on the GPU, {there}, are not the host's, {here}")
        return result

    def wait(self, until: float) -> None:
        """Have all be ready by then, so that none compiles beside what is measured; who is not is left out."""
        for process in self._all():
            with suppress(Failed):  # whose case says so
                process.expect(min(READY_SECONDS, max(1.0, until - time.monotonic())))

    def close(self) -> None:
        """End them all."""
        for process in self._all():
            process.kill()

    def _all(self) -> Iterator[Process]:
        yield from (process for sides in self._sides.values() for process in sides.values())
        yield from self._hosts.values()


def row(result: Result, peak: float) -> str:
    """A line of the table."""
    by_peer = {
        peer: min((p for p in result.peers if p.name.startswith(peer)), key=lambda p: p.median, default=None)
        for peer in PEERS
    }
    told = [f"{side.name}: {_micros(side.median)}" if side else "not measured" for side in by_peer.values()]
    best = result.best
    ratios = result.ratios(best) if best else [math.nan]
    ratio = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})" if best else "no peer"
    bound = _micros(products(result.case.name) / peak) if peak and products(result.case.name) else "-"
    cells = [result.case.what, _micros(result.flowrt.median), *told, ratio, bound]
    return f"| {' | '.join(cells)} |"


def _micros(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} µs"


def host_cost(rounds: int = 1000) -> tuple[float, float]:
    """Medians of the seconds that the host takes to have a recorded step begin, and until it has heard of its end.

    The step is one addition of 256 numbers, by the very calls of a session's (`flowrt.kernels.cuda.driver`).
    """
    from flowrt.kernels.cuda.driver import CudaDriver

    driver, spec = CudaDriver(0), fr.Spec("float32", (256,))
    kernel = driver.prepare("add", [spec, spec], [spec], {})
    operands = [driver.allocate(spec.nbytes) for _ in range(3)]
    for memory in operands:
        driver.write(memory, np.ones(256, np.float32))
    kernel.launch(operands, np.zeros(4, np.int64))
    driver.finish()
    recorded = driver.record([(kernel, operands)])
    begun, ended = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        recorded.replay()
        begun.append(time.perf_counter() - start)
        driver.finish()
        ended.append(time.perf_counter() - start)
    found = np.zeros(256, np.float32)
    driver.read(operands[2], found)
    assert (found == 2).all(), found
    driver.close()
    return statistics.median(begun), statistics.median(ended)


def why_not() -> str:
    """Why nothing can be measured here; nothing where it can."""
    from flowrt.kernels.cuda import present

    if present.SIMULATED:
        return "simulated GPUs tell nothing of speed"
    try:
        return "" if present.count() else "there is no GPU"
    except fr.ResourceError as error:
        return str(error)


def table(cases: Sequence[Case], rounds: int, seconds: float, peak: float, minutes: float) -> Iterator[str]:
    """The lines of the table, one after the other as they are measured."""
    reason, began = why_not(), time.monotonic()
    yield COLUMNS
    yield "|---" * (COLUMNS.count("|") - 1) + "|"
    if reason:
        yield from (f"| {case.what} | not measured: {reason} | - | - | - | - |" for case in cases)
        yield from ("", f"The host's cost of a replayed step: not measured: {reason}.")
        return
    with closing(Begun(cases)) as begun:
        begun.wait(began + 60 * minutes / 2)
        for case in cases:
            try:
                if time.monotonic() > began + 60 * minutes:
                    raise Failed("there was no time left")
                result = begun.measured(case, rounds, seconds)
            except Failed as error:
                yield f"| {case.what} | not measured: {error} | - | - | - | - |"
            else:
                yield row(result, peak)
                yield from (f"<!-- {name} was left out: {why} -->" for name, why in result.failed.items())
    issued, ended = map(_micros, host_cost())
    yield from ("", f"The host's cost of a replayed step: {issued} to begin it, {ended} with hearing of its end.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(case.name for case in CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in a round")
    parser.add_argument(
        "--peak", type=float, default=0.0, help="the GPU's float32 operations a second, for the roofline"
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="after which no workload is begun to be measured")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    given = parser.parse_args()
    chosen = [case for case in CASES if not given.cases or case.name in given.cases]
    lines = [this_machine.describe(), ""]
    print(lines[0])
    for line in table(chosen, given.rounds, given.seconds, given.peak, given.minutes):
        print(line, flush=True)
        lines.append(line)
    if given.write:
        put(HEADING, lines)


if __name__ == "__main__":
    main()
