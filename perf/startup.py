"""What starting costs: processes that import NumPy, import flowrt, do a first training step, or are a cluster's node.

The step is that of an MLP, 784-256-128-10, with momentum, on a batch of 128. Wall seconds from the start of the process
to its end, a node's to the line that says it is ready; and CPU seconds, which other work on the machine disturbs less:
medians with their spread. Caches are warm: the bundle of standard kernels is built first, if there is none, and Python
may keep bytecode.

With --cold, what compiling costs besides: the same first step, and reductions of three dtypes along three axes, each by
a process that finds no kernel.

    python perf/startup.py
    python perf/startup.py --cold --repeat 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import machine as this_machine

FIRST_STEP = """
import numpy as np
import flowrt as fr
rng = np.random.default_rng(0)
with fr.Graph() as graph:
    x, y = fr.placeholder("float32", (None, 784)), fr.placeholder("int32", (None,))
    z = x
    for i, (m, n) in enumerate(((784, 256), (256, 128), (128, 10))):
        w = fr.Variable((0.05 * rng.standard_normal((m, n))).astype(np.float32), name=f"w{i}")
        z = z @ w + fr.Variable(np.zeros(n, np.float32), name=f"b{i}")
        z = fr.relu(z) if i < 2 else z
    loss = fr.mean(fr.nn.softmax_cross_entropy(z, y))
    train = fr.optim.Momentum(0.001, 0.9).minimize(loss)
with fr.BlockingSession(graph) as session:
    step = session.compile([loss, train], [x, y])
    images, labels = rng.standard_normal((128, 784)).astype(np.float32), rng.integers(0, 10, 128).astype(np.int32)
    first, _ = step(images, labels)
assert 1 < first < 4, first
"""
NO_COMPILER = """
assert not {"numba", "llvmlite"} & set(__import__("sys").modules)
"""
REDUCTIONS = """
import numpy as np
import flowrt as fr
for dtype in ("float32", "float64", "int64"):
    x = np.arange(1, 61).reshape(3, 4, 5).astype(dtype)
    for axis in range(3):
        for reduce, judge in ((fr.sum, np.sum), (fr.max, np.max), (fr.argmax, np.argmax)):
            assert (reduce(x, axis=axis) == judge(x, axis=axis)).all()
"""
NODE = ("-m", "flowrt.worker", "--job", "worker", "--task", "0", "--bind", "127.0.0.1:0", "--die-with-parent")
PROGRAMS = {
    "python": "pass",
    "numpy": "import numpy",
    "flowrt": "import flowrt",
    "first step": FIRST_STEP + NO_COMPILER,
}
COLD = {"first step, cold": FIRST_STEP, "reductions, cold": REDUCTIONS}


def spent(program: str) -> tuple[float, float]:
    """(wall, CPU) seconds of a process that runs ``program``."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", program], env=environment())
    return ended(process, began, None)


def spent_cold(program: str) -> tuple[float, float]:
    """The same where no kernel is compiled yet, nor compiled beside it."""
    with tempfile.TemporaryDirectory(prefix="flowrt-") as folder:
        began = time.perf_counter()
        cold = environment() | {"FLOWRT_CACHE": folder, "FLOWRT_BUILD": "never", "FLOWRT_QUIET": "1"}
        return ended(subprocess.Popen([sys.executable, "-c", program], env=cold), began, None)


def spent_by_node() -> tuple[float, float]:
    """(wall, CPU) seconds of a node until it says that it is ready; CPU seconds are all it spends."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *NODE], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        line = process.stdout.readline()
        ready = time.perf_counter()
        assert line, "the node ended before it was ready"
        process.terminate()
        return ended(process, began, ready)


def ended(process: subprocess.Popen[str], began: float, ready: float | None) -> tuple[float, float]:
    _, status, usage = os.wait4(process.pid, 0)
    wall = (ready or time.perf_counter()) - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.args
    return wall, usage.ru_utime + usage.ru_stime


def environment() -> dict[str, str]:
    """This process's, but that Python keeps the bytecode of what it compiles, as it does for installed packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="compile, too, in folders that are empty")
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, "-m", "flowrt.standard", "build"], check=True, stdout=subprocess.DEVNULL)
    for program in PROGRAMS.values():
        command = [sys.executable, "-c", program.partition("assert")[0]]
        subprocess.run(command, env=environment(), check=True)  # what is kept on disk is there
    spent_by_node()
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PROGRAMS, "node ready")}
    for _ in range(arguments.repeat):  # interleaved, so that what else runs disturbs all alike
        for name, program in PROGRAMS.items():
            runs[name].append(spent(program))
        runs["node ready"].append(spent_by_node())
        for name, program in COLD.items() if arguments.cold else ():
            runs.setdefault(name, []).append(spent_cold(program))
    results = {
        name: {"wall": summary([wall for wall, _ in pairs]), "CPU": summary([cpu for _, cpu in pairs])}
        for name, pairs in runs.items()
    }
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "seconds": results}))
        return
    print(this_machine.describe())
    print("from the start of a process to its end, or to being ready, seconds: median (least to most)")
    for name, row in results.items():
        shown = [f"{what} {r['median']:.3f} ({r['least']:.3f} to {r['most']:.3f})" for what, r in row.items()]
        print(f"{name:16} {'   '.join(shown)}")


if __name__ == "__main__":
    main()
