"""One library's side of products.py: every line of its input names a case, which it answers with seconds of each run.

    python -m sides.products flowrt|numpy|torch|jax

A line is ``SECONDS CASE``; a case is an einsum equation's or a product's name as products.py writes them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

os.environ.pop("OPENBLAS_CORETYPE", None)  # read when NumPy is first imported

import numpy as np

Array = np.ndarray[Any, Any]
THREADS = int(os.environ["THREADS"])


def operands(case: str) -> tuple[str, list[Array]]:
    """The equation of a case, as ``float32 ij,jk 512x512 512x64`` has it, and its operands."""
    dtype, equation, *shapes = case.split()
    random = np.random.default_rng(0)
    sizes = [tuple(int(n) for n in shape.split("x")) for shape in shapes]
    return equation, [random.standard_normal(size).astype(dtype) for size in sizes]


def flags(equation: str) -> tuple[bool, bool] | None:
    """Which operands of a (batched) matrix product are transposed; None of another equation."""
    a, rest = equation.split(",")
    b, y = rest.split("->")
    if len(y) < 2:
        return None
    i, j, p = y[-2], y[-1], next((c for c in a if c in b and c not in y), "")
    if p and a[:-2] in ("", y[:-2]) and b[:-2] in ("", y[:-2]) and {a[-2:], b[-2:]} <= {i + p, p + i, p + j, j + p}:
        return a[-2:] == p + i, b[-2:] == j + p
    return None


def flowrt(equation: str, given: Sequence[Array]) -> Callable[[], Any]:
    import flowrt as fr

    options = fr.Options(threads=THREADS)
    with fr.Graph() as graph:
        feeds = [fr.placeholder(x.dtype.name, x.shape) for x in given]
        turned = flags(equation)
        y = fr.matmul(*feeds, transpose_a=turned[0], transpose_b=turned[1]) if turned else fr.einsum(equation, *feeds)
    step = kept.enter_context(fr.BlockingSession(graph, options=options)).compile([y], feeds)
    return lambda: step(*given)[0]


def numpy(equation: str, given: Sequence[Array]) -> Callable[[], Any]:
    turned = flags(equation)
    if turned is None:
        return lambda: np.einsum(equation, *given, optimize=True)
    a, b = (x.swapaxes(-1, -2) if flag else x for x, flag in zip(given, turned, strict=True))
    return lambda: a @ b


def torch(equation: str, given: Sequence[Array]) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(THREADS)
    tensors, turned = [torch.from_numpy(x) for x in given], flags(equation)
    if turned is None:
        return lambda: torch.einsum(equation, *tensors)
    a, b = (x.mT if flag else x for x, flag in zip(tensors, turned, strict=True))
    return lambda: a @ b


def jax(equation: str, given: Sequence[Array]) -> Callable[[], Any]:
    if THREADS == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax

    arrays = [jax.numpy.asarray(x) for x in given]
    compiled = jax.jit(lambda *arrays: jax.numpy.einsum(equation, *arrays))
    return lambda: jax.block_until_ready(compiled(*arrays))


kept = ExitStack()


def serve(make: Callable[[str, Sequence[Array]], Callable[[], Any]]) -> None:
    """Answer every line: seconds, and a sum over the result by which sides are compared."""
    made: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        seconds, case = line.strip().split(" ", 1)
        if case not in made:
            made[case] = make(*operands(case))
            for _ in range(4):
                result = made[case]()
        call = made[case]
        result = call()
        times, until = [], time.perf_counter() + float(seconds)
        while not times or time.perf_counter() < until:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        del call
        print(min(times), float(np.median(times)), float(np.abs(np.asarray(result, "float64")).sum()), flush=True)


if __name__ == "__main__":
    with kept:
        serve({"flowrt": flowrt, "numpy": numpy, "torch": torch, "jax": jax}[sys.argv[1]])
