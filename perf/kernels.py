"""Matrix products and convolutions: GFLOP/s of one thread, as a share of a core's peak and beside NumPy's BLAS.

    python perf/kernels.py [matmul] [conv]

Times are the least of many runs by the thread's own clock, so that others on the machine disturb them least. The peak
is that of multiply-adds in registers alone, measured beside each line, since clocks rise and fall.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import machine
import numpy as np
from peak import peak
from threadpoolctl import threadpool_limits

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.base.spec import Spec, sliding
from flowrt.kernels.launch import RUN_WORDS, prepare

Array = np.ndarray[Any, Any]
SECONDS = 0.3
MATMULS = [  # rows, terms, columns, transposed a, transposed b; some in both dtypes
    (128, 784, 256, 0, 0), (784, 128, 256, 1, 0), (128, 256, 128, 0, 0), (128, 128, 256, 0, 1), (128, 128, 10, 0, 0),
    (32, 784, 256, 0, 0), (32, 64, 512, 0, 0), (32, 128, 512, 0, 0), (64, 4096, 128, 0, 0), (4096, 64, 128, 1, 0),
    (512, 512, 512, 0, 0), (1024, 1024, 1024, 0, 0), (1024, 1024, 1024, 1, 0), (1024, 1024, 1024, 0, 1),
    (1024, 1024, 1024, 1, 1), (1100, 1100, 1100, 0, 0), (2048, 2048, 2048, 0, 0), (1, 1024, 1024, 0, 0),
    (1024, 1024, 1, 0, 0),
]  # fmt: skip
CONVOLUTIONS = [  # images, height and width, channels, window, channels of the result, stride, dilation, groups
    (64, 32, 3, 3, 32, 1, 1, 1), (64, 16, 32, 3, 64, 1, 1, 1), (16, 32, 64, 3, 64, 1, 1, 1),
    (16, 16, 128, 3, 128, 1, 1, 1), (16, 4, 512, 3, 512, 1, 1, 1), (16, 32, 64, 1, 128, 1, 1, 1),
    (16, 32, 64, 5, 64, 1, 1, 1), (8, 56, 64, 3, 64, 2, 1, 1), (8, 32, 64, 3, 64, 1, 2, 1), (8, 112, 3, 7, 64, 2, 1, 1),
    (1, 224, 3, 7, 64, 2, 1, 1), (1, 56, 64, 3, 64, 1, 1, 1), (16, 28, 33, 3, 47, 1, 1, 1),
    (16, 32, 64, 3, 64, 1, 1, 8), (16, 32, 64, 3, 64, 1, 1, 64), (16, 32, 64, 3, 64, 2, 1, 64),
]  # fmt: skip


def least(run: Callable[[], object]) -> float:
    """The least seconds of a run."""
    found, end = math.inf, time.perf_counter() + SECONDS
    run()
    while found == math.inf or time.perf_counter() < end:
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


def random(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def matmuls(dtype: str) -> None:
    print(f"{'matmul of ' + dtype:24} {'us':>9} {'GFLOP/s':>8} {'peak':>8} {'share':>8} {'NumPy':>8}")
    for m, k, n, flag_a, flag_b in MATMULS:
        a = random(*((k, m) if flag_a else (m, k)), dtype=dtype)
        b = random(*((n, k) if flag_b else (k, n)), dtype=dtype)
        before = peak(dtype)
        seconds, out = kernel("matmul", [a, b], (m, n), {"transpose_a": bool(flag_a), "transpose_b": bool(flag_b)})
        best = max(before, peak(dtype))
        left, right = a.T if flag_a else a, b.T if flag_b else b
        numpy_seconds = least(lambda left=left, right=right: left @ right)
        np.testing.assert_allclose(out, left @ right, rtol=1e-3, atol=1e-3)
        rate, blas = (2 * m * k * n / each / 1e9 for each in (seconds, numpy_seconds))
        name = f"{m}x{k}x{n} {'NT'[flag_a]}{'NT'[flag_b]}"
        print(f"{name:24} {seconds * 1e6:9.1f} {rate:8.1f} {best:8.1f} {rate / best:8.0%} {blas:8.1f}")


def convolutions() -> None:
    print(f"{'convolution (GFLOP/s)':50} {'forward':>8} {'images':>8} {'filters':>8}   share of the peak")
    for batch, size, channels, window, outputs, stride, dilation, groups in CONVOLUTIONS:
        x, filters = random(batch, size, size, channels), random(window, window, channels // groups, outputs)
        side, _ = sliding((size, size), (window, window), stride, dilation, "SAME")
        assert side.count is not None
        dy = random(batch, side.count, side.count, outputs)
        attrs = {"strides": stride, "padding": "SAME", "dilations": dilation, "groups": groups}
        shapes, before = [np.array(a.shape) for a in (x, filters)], peak()
        rates = [
            2 * dy.size * window * window * (channels // groups) / kernel(op, inputs, shape, attrs)[0] / 1e9
            for op, inputs, shape in (
                ("conv2d", [x, filters], dy.shape),
                ("conv2d_input_grad", [dy, filters, shapes[0]], x.shape),
                ("conv2d_filter_grad", [x, dy, shapes[1]], filters.shape),
            )
        ]
        best = max(before, peak())
        name = (
            f"{batch}x{size}x{size}x{channels} {window}x{window} to {outputs} by {stride} spread {dilation} in {groups}"
        )
        shares = " ".join(f"{rate / best:4.0%}" for rate in rates)
        print(f"{name:50} {rates[0]:8.1f} {rates[1]:8.1f} {rates[2]:8.1f}   {shares}")


def main() -> None:
    asked = sys.argv[1:] or ["matmul", "conv"]
    print(machine.describe())
    with threadpool_limits(1):
        if "matmul" in asked:
            matmuls("float32")
            matmuls("float64")
        if "conv" in asked:
            convolutions()


if __name__ == "__main__":
    main()
