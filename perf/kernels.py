"""Matrix products and convolutions: GFLOP/s of one thread, as a share of a core's peak and beside NumPy's BLAS.

    python perf/kernels.py [matmul] [conv]

Times are the least of many runs by the thread's own clock, so that others on the machine disturb them least. The peak
is what the widest tile reaches on operands in the nearest cache.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import machine
import numpy as np
from threadpoolctl import threadpool_limits

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.kernels.launch import RUN_WORDS, prepare
from flowrt.spec import Spec, sliding

Array = np.ndarray[Any, Any]
SECONDS = 0.3
MATMULS = [  # rows, terms, columns, transposed a, transposed b
    (128, 784, 256, 0, 0), (784, 128, 256, 1, 0), (128, 256, 128, 0, 0), (128, 128, 256, 0, 1), (128, 128, 10, 0, 0),
    (32, 784, 256, 0, 0), (32, 64, 512, 0, 0), (32, 128, 512, 0, 0), (64, 4096, 128, 0, 0), (4096, 64, 128, 1, 0),
    (512, 512, 512, 0, 0), (1024, 1024, 1024, 0, 0), (2048, 2048, 2048, 0, 0), (1, 1024, 1024, 0, 0),
    (1024, 1024, 1, 0, 0),
]  # fmt: skip
CONVOLUTIONS = [  # images, height and width, channels, window, channels of the result, stride
    (64, 32, 3, 3, 32, 1), (64, 16, 32, 3, 64, 1), (16, 32, 64, 3, 64, 1), (16, 16, 128, 3, 128, 1),
    (16, 4, 512, 3, 512, 1), (16, 32, 64, 1, 128, 1), (8, 56, 64, 3, 64, 2), (8, 112, 3, 7, 64, 2),
]  # fmt: skip


def least(run: Callable[[], object]) -> float:
    """The least seconds of a run."""
    found, end = math.inf, time.perf_counter() + SECONDS
    run()
    while time.perf_counter() < end:
        start = time.thread_time()
        run()
        found = min(found, time.thread_time() - start)
    return found


def kernel(op: str, inputs: Sequence[Array], output: tuple[int, ...], attrs: dict[str, Any]) -> tuple[float, Array]:
    """The least seconds of an op's kernel, and what it computes."""
    spec = Spec(inputs[0].dtype, output)
    prepared = prepare(op, [Spec(a.dtype, a.shape) for a in inputs], [spec], attrs)
    out = np.empty(output, inputs[0].dtype)
    scratch = [np.empty(s.concrete, s.dtype) for s in prepared.scratch]
    words = np.zeros(RUN_WORDS, np.int64)
    at = [a.ctypes.data for a in (*inputs, out, *scratch)]
    return least(lambda: prepared.run(words.ctypes.data, at)), out


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def peak() -> float:
    """GFLOP/s of a product of which all stays in the nearest cache."""
    seconds, _ = kernel("matmul", [random(96, 64), random(64, 96)], (96, 96), {"transpose_a": 0, "transpose_b": 0})
    many = 64
    batched, _ = kernel(
        "matmul", [random(many, 12, 256), random(256, 16)], (many, 12, 16), {"transpose_a": 0, "transpose_b": 0}
    )
    return max(2 * 96 * 64 * 96 / seconds, 2 * many * 12 * 256 * 16 / batched) / 1e9


def matmuls(best: float) -> None:
    print(f"{'matmul':24} {'us':>9} {'GFLOP/s':>8} {'of peak':>8} {'NumPy':>8}")
    for m, k, n, flag_a, flag_b in MATMULS:
        a, b = random(*((k, m) if flag_a else (m, k))), random(*((n, k) if flag_b else (k, n)))
        seconds, out = kernel("matmul", [a, b], (m, n), {"transpose_a": bool(flag_a), "transpose_b": bool(flag_b)})
        left, right = a.T if flag_a else a, b.T if flag_b else b
        numpy_seconds = least(lambda left=left, right=right: left @ right)
        np.testing.assert_allclose(out, left @ right, rtol=1e-3, atol=1e-3)
        rate = 2 * m * k * n / seconds / 1e9
        name = f"{m}x{k}x{n} {'NT'[flag_a]}{'NT'[flag_b]}"
        print(
            f"{name:24} {seconds * 1e6:9.1f} {rate:8.1f} {rate / best:8.0%} {2 * m * k * n / numpy_seconds / 1e9:8.1f}"
        )


def convolutions(best: float) -> None:
    print(f"{'convolution (GFLOP/s)':34} {'forward':>8} {'images':>8} {'filters':>8}   share of the peak")
    for batch, size, channels, window, outputs, stride in CONVOLUTIONS:
        x, filters = random(batch, size, size, channels), random(window, window, channels, outputs)
        side, _ = sliding((size, size), (window, window), stride, 1, "SAME")
        assert side.count is not None
        dy = random(batch, side.count, side.count, outputs)
        attrs = {"strides": stride, "padding": "SAME", "dilations": 1, "groups": 1}
        shapes = [np.array(a.shape) for a in (x, filters)]
        rates = [
            2 * dy.size * window * window * channels / kernel(op, inputs, shape, attrs)[0] / 1e9
            for op, inputs, shape in (
                ("conv2d", [x, filters], dy.shape),
                ("conv2d_input_grad", [dy, filters, shapes[0]], x.shape),
                ("conv2d_filter_grad", [x, dy, shapes[1]], filters.shape),
            )
        ]
        name = f"{batch}x{size}x{size}x{channels} {window}x{window} to {outputs} by {stride}"
        shares = " ".join(f"{rate / best:4.0%}" for rate in rates)
        print(f"{name:34} {rates[0]:8.1f} {rates[1]:8.1f} {rates[2]:8.1f}   {shares}")


def main() -> None:
    asked = sys.argv[1:] or ["matmul", "conv"]
    print(machine.describe())
    best = peak()
    print(f"one core's peak: {best:.0f} GFLOP/s in float32")
    with threadpool_limits(1):
        if "matmul" in asked:
            matmuls(best)
        if "conv" in asked:
            convolutions(best)


if __name__ == "__main__":
    main()
