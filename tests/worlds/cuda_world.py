"""Run as a program, on a simulated GPU or another: every example with a CUDA twin, on the device and on the host.

Prints one JSON object: how many applications each op was compared on, and what differed.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from computed import RUN, computed
from fused_examples import programs
from kept import tell
from numba import cuda as numba_cuda
from numba import float64, int32
from op_examples import EXAMPLES, Example

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec, as_dtype
from flowrt.kernels.cuda import fused, twins
from flowrt.kernels.cuda.walk import walk_over
from flowrt.kernels.language.table import KERNELS
from flowrt.kernels.launch import prepare, run_kernel

if TYPE_CHECKING:
    from flowrt.graph import Node

KEEPING = ("lstm_steps", "lstm_steps_grad")


class World:
    """What was compared so far."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.differences: list[str] = []
        self._seen: set[Any] = set()

    def visit(self, example: Example) -> None:
        for node, arrays, found in computed(example):
            self._compare(example, node, arrays, found)

    def _compare(self, example: Example, node: Node, arrays: list[Any], found: Any) -> None:
        key = (node.op.name, str(node.attrs), tuple((a.dtype.str, a.shape, a.tobytes()) for a in arrays))
        if (node.op.name, "cuda") not in KERNELS or key in self._seen or node.op.name in KEEPING:
            return
        self._seen.add(key)
        specs = [Spec(a.dtype, a.shape) for a in found]
        try:
            made = twins.run_kernel(node.op.name, arrays, specs, node.attrs, RUN.copy())
            for mine, host in zip(made, found, strict=True):
                assert (mine.dtype, mine.shape) == (host.dtype, host.shape)
                margin = max(example.margin, 1e-5)
                for one, other in zip(told(node.op.name, mine), told(node.op.name, host), strict=True):
                    np.testing.assert_allclose(one, other, rtol=margin, atol=margin, equal_nan=True)
        except Exception as error:
            self.differences.append(f"{example}: {type(error).__name__}: {error}")
        self.compared[node.op.name] += 1

    def compare_fused(self) -> None:
        """What passes make of several ops, which no example asks for by itself."""
        for op, arrays, specs, attrs in programs():
            there, here = (run(op, arrays, specs, attrs) for run in (twins.run_kernel, run_kernel))
            for mine, host in zip(there, here, strict=True):
                if not np.allclose(mine, host, rtol=1e-5, atol=1e-6):
                    self.differences.append(f"{op} {attrs}: {mine} is not {host}")
            self.compared[op] += 1

    def compare_layers(self) -> None:
        """What keeps values for its gradient as it likes: both together."""
        rng = np.random.default_rng(0)
        for steps, batch, width, units in ((3, 2, 4, 5), (1, 1, 1, 1), (0, 2, 3, 2)):
            shapes = [(steps, batch, width), (batch, units), (batch, units), (width, 4 * units), (units, 4 * units)]
            given = [rng.normal(size=shape).astype(np.float32) for shape in (*shapes, (4 * units,))]
            back = [rng.normal(size=shape).astype(np.float32) for shape in ((steps, batch, units), *shapes[1:3])]
            found = [_layer(run, given, back) for run in (twins.run_kernel, run_kernel)]
            for mine, host in zip(*found, strict=True):
                if not np.allclose(mine, host, rtol=1e-4, atol=1e-5):
                    self.differences.append(f"lstm of {steps, batch, width, units}: {mine} is not {host}")
        self.compared.update(KEEPING)


def told(op: str, made: Any) -> list[Any]:
    """What an op says by its output: all of it, but of groups what is theirs. The rest nobody sets, nor reads."""
    if op != "group_rows":
        return [made]
    count, many = (made.size - 2) // 3, int(made[0])
    rows, occurrences = count + 2, 2 * count + 2
    return [made[: many + 2], made[rows : rows + many], made[occurrences : occurrences + made[1 + many]]]


def _layer(run: Any, given: list[Any], back: list[Any]) -> list[Any]:
    """What a layer answers, and its gradients of the sums, of h and of c."""
    (steps, batch, _), units = given[0].shape, given[1].shape[1]
    every, state = Spec("float32", (steps, batch, units)), Spec("float32", (batch, units))
    kept, sums = (Spec("float32", (steps, batch, n * units)) for n in (6, 4))
    made = run("lstm_steps", given, [every, state, state, every, kept], {})
    return [*made[:4], *run("lstm_steps_grad", [*back, given[4], made[4]], [sums, state, state], {})]


def differ(op: str, inputs: list[Any], spec: Spec, attrs: dict[str, Any]) -> float:
    """How far device and host are apart at most, where the work is more than the threads there are."""
    mine, host = (run(op, inputs, [spec], attrs, RUN.copy())[0] for run in (twins.run_kernel, run_kernel))
    return float(np.max(np.abs(mine.astype(np.float64) - host)).round(5))


def long() -> dict[str, float]:
    rng = np.random.default_rng(0)
    a, b, flags = rng.normal(size=(11, 9)), rng.normal(size=(9, 13)), {"transpose_a": False, "transpose_b": False}
    key = {"mean": 0.0, "stddev": 1.0, "seed": 1, "stream": 2, "first": 3}
    close = {"low": 0.69999, "high": 0.7, "seed": 1, "stream": 2, "first": 3}  # some round up to 0.7, as a float32
    return {
        "add": differ("add", [a, a[:1]], Spec("float64", (11, 9)), {}),
        "fill": differ("pad", [a], Spec("float64", (15, 13)), {"paddings": ((2, 2), (2, 2)), "value": 2.5}),
        "sum": differ("sum", [a], Spec("float64", (11,)), {"axis": 1, "keepdims": False}),
        "matmul": differ("matmul", [a, b], Spec("float64", (11, 13)), flags),
        "random_uniform": differ("random_uniform", [np.int64([400]), np.int64([5])], Spec("float32", (400,)), close),
        "random_normal": differ("random_normal", [np.int64([301]), np.int64([5])], Spec("float32", (301,)), key),
    }


def moved(dtype: str) -> dict[str, float]:
    """How far rows of variables of a dtype are apart at most, moved where they lie on the device and on the host."""
    rng, found = np.random.default_rng(0), {}
    values, indices = (
        (rng.normal(size=(7, 5)) * 8).round() / 8,
        np.array([2, 0, 2, -1, 5, 2, 0]),
    )  # whose sums are exact
    values, settings = values.astype(as_dtype(dtype)), np.abs(rng.normal(size=8)).astype(np.float32)
    (groups,) = run_kernel("group_rows", [indices, np.int64([7])], [Spec("int32", (23,))], {"size": 6, "absent": False})
    for op, slots in (("add", 0), ("assign", 0), ("momentum", 1), ("adagrad", 1), ("rmsprop", 2), ("adam", 2)):
        tables = [rng.random((6, 5)).astype(as_dtype(dtype)), *(rng.random((6, 5)).astype("f") for _ in range(slots))]
        operands, here = [values, groups, settings], [table.copy() for table in tables]
        specs, outputs = ([Spec(a.dtype, a.shape) for a in some] for some in (operands, tables))
        gpu = twins.open_gpu(0)
        copies = twins.CudaCopies(gpu)
        there = twins.PreparedSteps(f"{op}_rows", specs, outputs, {})
        scratch = [gpu.allocate(max(spec.nbytes, 1)) for spec in there.scratch]
        memory = [copies.put(np.ascontiguousarray(a).reshape(-1).view(np.uint8)) for a in (*operands, *tables)]
        there.launch([*memory, *scratch], copies.put(RUN.copy()), gpu.launching)
        for moved_there, table in zip(memory[len(operands) :], tables, strict=True):
            copies.read(moved_there, table.reshape(-1).view(np.uint8))
        gpu.close(copies.events)
        host = prepare(f"{op}_rows", specs, outputs, {})
        local = [np.empty(spec.concrete, spec.dtype) for spec in host.scratch]
        host.run(RUN.copy().ctypes.data, [a.ctypes.data for a in (*operands, *here, *local)])
        pairs = [[a.astype(np.float32) for a in both] for both in zip(tables, here, strict=True)]
        found[op] = max(float(np.abs(a - b).max().round(5)) for a, b in pairs)
    return found


def grouped() -> list[list[list[int]]]:
    """The rows that occur and the range of each, then all occurrences, on the device and on the host."""
    indices = np.array([2, 0, 2, -(1 << 63), -1, 5, 2, 0] * 5)
    spec, attrs = Spec("int32", (3 * indices.size + 2,)), {"size": 6, "absent": True}
    found = []
    for run in (twins.run_kernel, run_kernel):
        for values in (indices.size, indices.size // 4):
            (groups,) = run("group_rows", [indices, np.array(values)], [spec], attrs)
            found.append([part.tolist() for part in told("group_rows", groups)])
    return found


def beside() -> list[float]:
    """What threads find in the first of two shared arrays that one line asks for, and in one that nobody writes."""

    @numba_cuda.jit
    def kernel(out: Any) -> None:
        i = numba_cuda.threadIdx.x
        one, two = numba_cuda.shared.array(2, float64), numba_cuda.shared.array(2, np.float64)
        one[i], two[i] = i, 10 + i
        numba_cuda.syncthreads()
        out[i], out[2 + i] = one[1 - i], numba_cuda.shared.array(2, int32)[i]

    out = np.zeros(4)
    kernel[1, 2](out)
    return [float(found) for found in out]


def asked() -> str:
    """In which order a thread loads (l) and stores (s) entries of a sum that it computes together."""
    wide, row = Spec("float32", (64, 8)), Spec("float32", (8,))
    (prepared,) = twins.PreparedSteps("add", [wide, row], [wide], {})._steps
    lines = fused.text_of(fused.expression_of(prepared.step), walk_over(prepared.step.call.views).ways)
    body = [line.strip() for line in lines if line.startswith(" " * 8)]
    return "".join("s" if line.startswith("x") else "l" for line in body if "[" in line)


def refused() -> str:
    try:
        twins.run_kernel("matmul_bias", [np.ones((2, 2))] * 3, [Spec("float64", (2, 2))], {})
    except GraphError as error:
        return str(error)
    return ""


def turns() -> list[str]:
    """What threads of a block do in which order, which end at barriers of their own number, and how one fails."""
    order: list[str] = []

    @numba_cuda.jit
    def stepping(rounds: Any) -> None:
        i = numba_cuda.threadIdx.x
        for n in range(rounds[i]):
            order.append(f"{i}.{n}")
            numba_cuda.syncthreads()
        if rounds[i] < 0:
            raise ValueError("wrong")

    before = threading.active_count()
    stepping[1, 3](np.array([2, 1, 3]))
    try:
        stepping[1, 3](np.array([1, -1, 1]))
    except ValueError as error:
        order.append(str(error))
    return [*order, f"{threading.active_count() - before} left"]


def main() -> None:
    world = World()
    for example in EXAMPLES:
        if max((a.size for a in example.arrays), default=0) <= 1000:  # the simulator runs Python
            world.visit(example)
    world.compare_fused()
    world.compare_layers()
    found = {"compared": world.compared, "differences": world.differences, "long": long(), "refused": refused()}
    found["moved"] = {dtype: moved(dtype) for dtype in ("float32", "bfloat16", "float16")}
    found["turns"] = turns()
    found["grouped"], found["beside"], found["asked"] = grouped(), beside(), asked()
    tell(found)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a device does not warn of inf and NaN, as NumPy does
    main()
