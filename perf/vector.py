"""Kernels that should run at the speed of memory or of the vector units: one thread, against NumPy and memcpy.

Elementwise functions in Gelem/s over 64 Ki entries, everything else in GB/s of what it must read and write. The least
of many short runs; every result is checked against NumPy's.

    python perf/vector.py exp softmax
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf.machine import describe  # isort: skip  (before NumPy)

import numpy as np

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.base.spec import Spec
from flowrt.kernels.launch import RUN_WORDS, prepare

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)


@dataclass(frozen=True, slots=True)
class Case:
    """An op on arrays; ``judge`` is the same in NumPy, None where NumPy has no such function."""

    name: str
    op: str
    inputs: tuple[Array, ...]
    output: Spec
    attrs: dict[str, Any]
    judge: Callable[..., Any] | None = None
    per_entry: bool = False

    @property
    def work(self) -> int:
        if self.per_entry:
            return self.output.size
        moved = sum(a.nbytes for a in self.inputs) + self.output.size * self.output.dtype.itemsize
        return int(moved)


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def like(array: Array) -> Spec:
    return Spec(array.dtype, array.shape)


def curves() -> Iterator[Case]:
    x = RNG.uniform(0.1, 3, 1 << 16).astype(np.float32)
    judges: dict[str, Any] = {name: getattr(np, name) for name in ("exp", "expm1", "log", "log1p", "tanh", "sqrt")}
    judges |= {"sigmoid": lambda v: 1 / (1 + np.exp(-v)), "softplus": lambda v: np.logaddexp(v, np.float32(0))}
    judges |= {"erf": None, "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan": np.arctan, "sinh": np.sinh}
    for name, judge in judges.items():
        yield Case(name, name, (x,), like(x), {}, judge, True)
    yield Case("pow", "pow", (x, x), like(x), {}, np.power, True)
    wide = x.astype(np.float64)
    for name in ("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "softplus"):
        yield Case(f"{name} float64", name, (wide,), like(wide), {}, judges[name], True)
    for op, numbers in (("random_normal", {"mean": 0.0, "stddev": 1.0}), ("random_uniform", {"low": 0.0, "high": 1.0})):
        how = {**numbers, "seed": 1, "stream": 2}
        yield Case(op, op, (np.array(x.shape), np.zeros(0, np.int64)), like(x), how, None, True)
    yield Case("add", "add", (x, x), like(x), {}, np.add, True)


def reductions() -> Iterator[Case]:
    x = normal(1024, 1024)
    for op in ("sum", "mean", "max", "min", "argmax"):
        for axis in (0, 1, None):
            judge = lambda v, o=op, a=axis: getattr(np, o)(v, a)  # noqa: E731
            found = np.asarray(judge(x))
            yield Case(f"{op} {axis}", op, (x,), like(found), {"axis": axis, "keepdims": False}, judge)
    flags = x > 3
    for axis in (0, 1):
        how = {"axis": axis, "keepdims": False}
        yield Case(f"any {axis}", "any", (flags,), Spec("bool", (1024,)), how, lambda v, a=axis: v.any(a))
        how = {"axis": axis, "reverse": False}
        yield Case(f"cumsum {axis}", "cumsum", (x,), like(x), how, lambda v, a=axis: v.cumsum(a))
    images = normal(64, 32, 32, 32)
    how = {"axis": (0, 1, 2), "keepdims": False}
    yield Case("sum to channels", "sum", (images,), Spec("float32", (32,)), how, lambda v: v.sum((0, 1, 2)))


def losses() -> Iterator[Case]:
    def softmax(x: Array, axis: int) -> Array:
        powers = np.exp(x - x.max(axis, keepdims=True))
        return powers / powers.sum(axis, keepdims=True)

    for shape, axis in (((128, 10), -1), ((512, 1000), -1), ((16, 100, 512), 1)):
        x = normal(*shape)
        yield Case(f"softmax {shape} {axis}", "softmax", (x,), like(x), {"axis": axis}, lambda v, a=axis: softmax(v, a))
        if axis == -1:
            labels = RNG.integers(0, shape[1], shape[0]).astype(np.int32)
            each = Spec("float32", shape[:1])
            entropy = lambda v, k: -np.log(softmax(v, -1))[np.arange(k.size), k]  # noqa: E731
            yield Case(f"cross entropy {shape}", "class_cross_entropy", (x, labels), each, {}, entropy)


def pooling() -> Iterator[Case]:
    x, dy = normal(64, 32, 32, 32), normal(64, 16, 16, 32)
    how = {"window": 2, "strides": None, "padding": "VALID"}
    largest = lambda v: v.reshape(64, 16, 2, 16, 2, 32).max((2, 4))  # noqa: E731
    middle = lambda v: v.reshape(64, 16, 2, 16, 2, 32).mean((2, 4))  # noqa: E731
    yield Case("max_pool2d 2x2", "max_pool2d", (x,), like(dy), how, largest)
    yield Case("max_pool2d 2x2 gradient", "max_pool2d_spread", (x, dy), like(x), how)
    yield Case("avg_pool2d 2x2", "avg_pool2d", (x,), like(dy), how, middle)
    yield Case("avg_pool2d 2x2 gradient", "avg_pool2d_spread", (dy, np.array(x.shape)), like(x), how)
    wide = {"window": 3, "strides": 2, "padding": "SAME"}
    yield Case("max_pool2d 3x3 by 2", "max_pool2d", (x,), like(dy), wide)
    yield Case("max_pool2d 3x3 by 2 gradient", "max_pool2d_spread", (x, dy), like(x), wide)


def moves() -> Iterator[Case]:
    x, ids = normal(1024, 1024), RNG.integers(0, 1024, 1024).astype(np.int32)
    yield Case("copy", "copy", (x,), like(x), {}, np.copy)
    yield Case("transpose", "transpose", (x,), like(x), {"axes": None}, lambda v: np.ascontiguousarray(v.T))
    for shape, axes in (((4096, 1024), (1, 0)), ((64, 32, 32, 64), (0, 3, 1, 2)), ((128, 96, 160), (2, 1, 0))):
        y, turn = normal(*shape), lambda v, a=axes: np.ascontiguousarray(v.transpose(a))
        out = Spec("float32", tuple(shape[a] for a in axes))
        yield Case(f"transpose {shape} {axes}", "transpose", (y,), out, {"axes": axes}, turn)
    column, size = normal(1024, 1), np.array([1024, 1024])
    yield Case("broadcast_to", "broadcast_to", (column, size), like(x), {}, lambda v, _: np.repeat(v, 1024, 1))
    back = {"key": ((None, None, None), (None, None, -1))}
    yield Case("getitem [:, ::-1]", "getitem", (x,), like(x), back, lambda v: v[:, ::-1].copy())
    yield Case("add_n", "add_n", (x, x, x), like(x), {}, lambda a, b, c: a + b + c)
    both = Spec("float32", (1024, 2048))
    yield Case("concat 1", "concat", (x, x), both, {"axis": 1}, lambda a, b: np.concatenate([a, b], 1))
    for axis in (0, 1):
        yield Case(f"take {axis}", "take", (x, ids), like(x), {"axis": axis}, lambda v, i, a=axis: v.take(i, a))
    hot = lambda i: (i[:, None] == np.arange(1024)).astype(np.float32)  # noqa: E731
    yield Case("one_hot", "one_hot", (ids,), like(x), {"depth": 1024, "dtype": "float32"}, hot)


def least(work: Callable[[], Any], seconds: float) -> float:
    """The shortest of the runs that fit ``seconds``, and of ten at least."""
    best, stop, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 10 or time.perf_counter() < stop:
        begin = time.perf_counter()
        work()
        best, runs = min(best, time.perf_counter() - begin), runs + 1
    return best


def measure(case: Case, seconds: float) -> tuple[float, float]:
    """Seconds that flowrt and NumPy take (NaN where NumPy has no such function)."""
    prepared = prepare(case.op, [like(a) for a in case.inputs], [case.output], case.attrs)
    out, run = np.empty(case.output.concrete, case.output.dtype), np.zeros(RUN_WORDS, np.int64)
    scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
    addresses = [a.ctypes.data for a in (*case.inputs, out, *scratch)]
    mine = least(lambda: prepared.run(run.ctypes.data, addresses), seconds)
    judge = case.judge
    if judge is None:
        return mine, float("nan")
    margin = 1e-4 if out.dtype.kind == "f" else 0
    np.testing.assert_allclose(out, judge(*case.inputs), margin, margin * 10)
    return mine, least(lambda: judge(*case.inputs), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side of each case")
    options = parser.parse_args()
    block = normal(1 << 21)
    target = np.empty_like(block)
    copying = 2 * block.nbytes / least(lambda: np.copyto(target, block), options.seconds) / 1e9
    print(describe())
    print(f"one thread; memcpy of {block.nbytes >> 20} MiB reads and writes {copying:.1f} GB/s")
    print(f"{'':32}{'flowrt':>9}{'NumPy':>9}{'ratio':>8}")
    for make in (curves, reductions, losses, pooling, moves):
        for case in make():
            if not options.names or case.name.startswith(tuple(options.names)):
                mine, other = measure(case, options.seconds)
                unit = "Gelem/s" if case.per_entry else "GB/s"
                rates = f"{case.work / mine / 1e9:9.2f}{case.work / other / 1e9:9.2f}{other / mine:8.1f}"
                print(f"{case.name:32}{rates}  {unit}", flush=True)


if __name__ == "__main__":
    main()
