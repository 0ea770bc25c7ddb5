"""What fusing gains: a chain of ten elementwise ops, and optimisers' updates, fused and as written, beside the peers.

The chain is on 1M floats, the updates on one parameter of 4M; both on one thread. Peers run as processes of their own,
where scripts/peers has installed them: jax.jit, torch eager and torch's own fused optimisers. Least of all runs, since
others may use the machine; bytes are those a single pass must move.

    python perf/fusion.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine as this_machine
import numpy as np

SIZE, PARAMETER, RUNS = 1 << 20, 1 << 22, 40
PEERS = Path.home() / ".cache" / "flowrt-peers"

JAX = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
@jax.jit
def chain(x, y):
    for _ in range(2):
        x = jnp.maximum(x * 0.9 + y, 0.0)
        x = jnp.abs(x - 0.5) / (y * y + 1.0)
    return x
x, y = (jnp.asarray(np.linspace(-1, 1, SIZE, dtype=np.float32)[::s]) for s in (1, -1))
measure("chain", lambda: chain(x, y).block_until_ready())
"""
TORCH = """
import torch, numpy as np
torch.set_num_threads(1)
def chain(x, y):
    for _ in range(2):
        x = torch.relu(x * 0.9 + y)
        x = torch.abs(x - 0.5) / (y * y + 1.0)
    return x
x, y = (torch.from_numpy(np.linspace(-1, 1, SIZE, dtype=np.float32)[::s].copy()) for s in (1, -1))
measure("chain", lambda: chain(x, y))
for name, make in {"momentum": lambda p: torch.optim.SGD(p, 0.01, 0.9, fused=True),
                   "adam": lambda p: torch.optim.Adam(p, 1e-3, fused=True)}.items():
    p = torch.nn.Parameter(torch.zeros(PARAMETER)); p.grad = torch.full((PARAMETER,), 0.5)
    step = make([p]).step
    measure(name, step)
"""
MEASURE = """
import json, os, time
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
SIZE, PARAMETER, RUNS = %d, %d, %d
found = {}
def measure(name, call):
    for _ in range(5): call()
    best = 1e9
    for _ in range(RUNS):
        begin = time.perf_counter(); call(); best = min(best, time.perf_counter() - begin)
    found[name] = best
"""


def least(call: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def chain(x: Any, y: Any) -> Any:
    import flowrt as fr

    for _ in range(2):
        x = fr.relu(x * 0.9 + y)
        x = fr.abs(x - 0.5) / (y * y + 1.0)
    return x


def ours(optimize: bool) -> dict[str, float]:
    """Seconds of each case; what is fused is compiled before anything is timed."""
    import flowrt as fr
    from flowrt.kernels.background import wait_compiled

    found: dict[str, float] = {}
    options = fr.Options(optimize=optimize, threads=1)
    with fr.Graph() as graph:
        x, y = (fr.placeholder("float32", (None,)) for _ in "xy")
        z = chain(x, y)
    values = [np.ascontiguousarray(np.linspace(-1, 1, SIZE, dtype=np.float32)[::s]) for s in (1, -1)]
    with fr.BlockingSession(graph, options=options) as session:
        step = session.compile(z, [x, y])
        for _ in range(3):
            step(*values)
            wait_compiled(60)
        np.testing.assert_allclose(step(*values), reference(*values), rtol=1e-5, atol=1e-6)
        found["chain"] = least(lambda: step(*values))
    for name, optimizer in {"momentum": fr.optim.Momentum(0.01, 0.9), "adam": fr.optim.Adam(1e-3)}.items():
        with fr.Graph() as graph:
            gradient = fr.placeholder("float32", (PARAMETER,))
            weight = fr.Variable(fr.zeros(PARAMETER))
            move = optimizer.apply_gradients([(gradient, weight)])
        with fr.BlockingSession(graph, options=options) as session:
            step = session.compile(move, [gradient])
            value = np.full(PARAMETER, 0.5, np.float32)
            for _ in range(3):
                step(value)
                wait_compiled(60)
            found[name] = least(lambda step=step, value=value: step(value))
    return found


def reference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    for _ in range(2):
        x = np.maximum(x * np.float32(0.9) + y, 0)
        x = np.abs(x - np.float32(0.5)) / (y * y + 1)
    return x


def peer(name: str, source: str) -> dict[str, float]:
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        return {}
    program = MEASURE % (SIZE, PARAMETER, RUNS) + source + "\nprint(json.dumps(found))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}


MOVED = {"chain": 3 * 4 * SIZE, "momentum": 5 * 4 * PARAMETER, "adam": 7 * 4 * PARAMETER}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    sides = {"fused": ours(True), "as written": ours(False), "jax": peer("jax", JAX), "torch": peer("torch", TORCH)}
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "seconds": sides}))
        return
    print(this_machine.describe())
    for case, nbytes in MOVED.items():
        print(f"{case}: microseconds, GB/s of what one pass moves")
        for side, found in sides.items():
            if case in found:
                print(f"  {side:11} {1e6 * found[case]:8.0f}  {nbytes / found[case] / 1e9:5.1f}")


if __name__ == "__main__":
    sys.exit(main())
