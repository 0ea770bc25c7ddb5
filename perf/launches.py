"""Where the time of a step goes, launch by launch: one thread, warm, medians.

Runs flowrt's side of a workload of compare.py, and then its largest tape with the clock read around every launch.
GB/s is of the bytes that a launch touches, by the operands it declares; what lies in a cache is touched faster.

    python perf/launches.py W3 [--top 20] [--batch 128]
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import machine as this_machine
import numpy as np
from sides import harness
from sides.steps.flowrt import WORKLOADS

from flowrt.kernels.run import direct
from flowrt.kernels.store.background import wait_compiled
from flowrt.sched.tape.tape import Tape


def timed(tape: Tape, step: Any, repeat: int) -> np.ndarray[Any, Any]:
    """The nanoseconds of every launch in each of ``repeat`` runs of the step."""
    rows: list[np.ndarray[Any, Any]] = []
    inner = tape._loop

    def loop(nodes: int, bases: int, span: int, _: int) -> None:
        rows.append(np.zeros(tape.launches, np.int64))
        inner(nodes, bases, span, rows[-1].ctypes.data)

    tape._loop = loop  # type: ignore[method-assign]
    for _ in range(repeat):
        step()
    return np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=30)
    a = parser.parse_args()
    print(this_machine.describe())
    direct.available = lambda: False  # type: ignore[assignment]  # or the tape's own loop would not be asked
    side = WORKLOADS[a.workload](harness.Settings(a.workload, "", 1, a.batch, "chain"))
    began = time.perf_counter()
    for _ in range(3):
        side.step()
    wait_compiled(300)
    while time.perf_counter() < began + 1:
        side.step()
    found = [(tape, timed(tape, side.step, a.repeat)) for tape in gc.get_objects() if type(tape) is Tape]
    tape, rows = max((pair for pair in found if len(pair[1])), key=lambda pair: pair[0].launches)
    times = np.median(rows, axis=0)
    print(f"{tape.launches} launches, {times.sum() / 1e6:.3f} ms together")
    for number in np.argsort(-times)[: a.top]:
        launch = tape.recording.launches[number]
        node = tape._plan.nodes[launch.node]
        touched = sum(stretch.end - stretch.begin for stretch in launch.stretches())
        microseconds, share, speed = times[number] / 1e3, 100 * times[number] / times.sum(), touched / times[number]
        print(
            f"{microseconds:9.1f} us {share:5.1f}% {speed:7.1f} GB/s {launch.step.units:7d} units  "
            f"{node.op} {node.name} {[str(s) for s in node.outputs]}"
        )


if __name__ == "__main__":
    main()
