"""Layers beside PyTorch's: attention, convolutions transposed, products of int8; answers alone, and with gradients.

What both answer is compared. The least of the CPU seconds of a process is what counts, since others may use the
machine; PyTorch runs as a process of its own, where scripts/peers has installed it. `gru` is a case of `compare.py`.

    python perf/layers.py [--threads 1] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import machine as this_machine
import numpy as np

TORCH = Path(os.environ.get("FLOWRT_PEERS") or Path.home() / ".cache" / "flowrt-peers") / "torch" / "bin" / "python"
SECONDS = 1.0

# The shapes of what a case is given, and its settings: causal for attention, strides for a convolution.
CASES: Mapping[str, tuple[str, list[tuple[int, ...]], int]] = {
    "attention of 64": ("attention", [(16, 8, 64, 32)] * 3, 1),
    "attention of 256": ("attention", [(4, 8, 256, 64)] * 3, 1),
    "attention of 1,024": ("attention", [(2, 4, 1024, 64)] * 3, 1),
    "attention of 1,024, not causal": ("attention", [(2, 4, 1024, 64)] * 3, 0),
    "attention of 4,096": ("attention", [(1, 2, 4096, 64)] * 3, 1),
    "transposed, small": ("transposed", [(4, 16, 16, 16), (4, 4, 16, 16)], 2),
    "transposed, a generator's": ("transposed", [(32, 8, 8, 128), (4, 4, 64, 128)], 2),
    "transposed, large": ("transposed", [(1, 64, 64, 32), (4, 4, 32, 32)], 2),
    **{f"int8, {m} rows of {k}": ("int8", [(m, k), (k, k)], 0) for m, k in ((1, 256), (1, 4096), (32, 1024))},
    "int8, 256 rows of 1024": ("int8", [(256, 1024), (1024, 1024)], 0),
}

PEER = """
import json, sys, time, warnings
import numpy as np, torch
warnings.simplefilter("ignore")
cases, threads, seconds = json.loads(sys.argv[1])
torch.set_num_threads(threads)
F, found = torch.nn.functional, {}
def data(shapes):
    return [np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate(shapes)]
def best(call):
    for _ in range(4): call()
    least, until = 1e9, time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.process_time(); call(); least = min(least, time.process_time() - begin)
    return least
for name, (kind, shapes, how) in cases.items():
    values = [torch.from_numpy(a) for a in data(shapes)]
    if kind == "attention":
        forward = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=bool(how))
    elif kind == "transposed":
        values = [values[0].permute(0, 3, 1, 2), values[1].permute(3, 2, 0, 1)]
        values = [a.contiguous(memory_format=torch.channels_last) for a in values]
        forward = lambda x, w: F.conv_transpose2d(x, w, stride=how, padding=1)
    else:
        linear = torch.nn.Linear(shapes[1][1], shapes[1][0], bias=False)
        linear.weight.data = values.pop()
        layer = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear})
        forward = layer
    with torch.inference_mode():
        times = [best(lambda: forward(*values))]
        total = float(forward(*values).double().abs().sum())
        if kind == "int8":
            times.append(best(lambda: linear(*values)))
    if kind != "int8":
        given = [a.detach().clone().requires_grad_() for a in values]
        def both():
            y = forward(*given)
            return torch.autograd.grad((y * y).sum(), given)
        times.append(best(both))
    found[name] = times, total
print(json.dumps(found))
"""


def best(call: Callable[[], Any]) -> float:
    for _ in range(8):  # the first runs of a tape are timed, to divide it
        call()
    least, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        begin = time.process_time()
        call()
        least = min(least, time.process_time() - begin)
    return least


def ours(kind: str, shapes: list[tuple[int, ...]], how: int, threads: int) -> tuple[list[float], float]:
    """Seconds of the answers alone and with gradients (of int8: of the product of floats), and what answers come to."""
    import flowrt as fr

    values = [np.random.default_rng(n).normal(size=s).astype("float32") for n, s in enumerate(shapes)]
    floats = kind == "int8"
    if floats:
        kept, scale = fr.quantize.quantize(values[1], axis=0)
    with fr.Graph() as graph:
        given = [fr.placeholder("float32", shape) for shape in shapes]
        if kind == "attention":
            y = fr.nn.attention(*given, causal=bool(how))
        elif kind == "transposed":
            y = fr.nn.conv2d_transpose(*given, how)
        else:
            rows, row_scale = fr.quantize.quantize(given[0], axis=0)
            y = fr.quantize.quantized_matmul(rows, kept, row_scale, scale.T, transpose_b=True)
        other = fr.matmul(*given, transpose_b=True) if floats else fr.gradients(fr.sum(y * y), given)
    some = 1 if floats else len(values)
    with fr.BlockingSession(graph, options=fr.Options(threads=threads)) as session:
        alone, both = session.compile(y, given[:some]), session.compile(other, given)
        total = float(np.abs(alone(*values[:some]), dtype=np.float64).sum())
        return [best(lambda: alone(*values[:some])), best(lambda: both(*values))], total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the beginnings of names")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    cases = {n: c for n, c in CASES.items() if n.startswith(tuple(arguments.cases or ("",)))}
    told = json.dumps([cases, arguments.threads, SECONDS])
    done = subprocess.run([TORCH, "-c", PEER, told], capture_output=True, text=True, check=True)
    peers = json.loads(done.stdout.splitlines()[-1])
    print(f"{this_machine.describe()}, {arguments.threads} threads; milliseconds: flowrt, torch, torch / flowrt")
    for name, case in cases.items():
        mine, total = ours(*case, arguments.threads)
        theirs, other = peers[name]
        if not np.isclose(total, other, rtol=2e-2 if case[0] == "int8" else 1e-4):
            raise SystemExit(f"{name}: answers {total}, not {other}")
        second = "floats" if case[0] == "int8" else "with gradients"
        for what, a, b in zip(("alone", second), mine, theirs, strict=True):
            print(f"  {name:32} {what:15} {1e3 * a:8.3f} {1e3 * b:8.3f}  {b / a:5.2f}", flush=True)


if __name__ == "__main__":
    main()
