"""Run as a program with the CUDA simulator on: what threads of twins do to memory that other threads use, too.

The simulator's threads take turns, so a barrier that is missing, which a GPU would make noise of, changes nothing here:
`watched_memory` looks for it. Prints one JSON object: the faults of each case; the barriers that were come to; those
that no case would miss; and what is found of kernels that are wrong.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from computed import RUN, computed
from example import Example, integers, normal
from kept import tell
from numba import cuda as numba_cuda
from op_examples import EXAMPLES
from watched_memory import Watch, Watched, install

import flowrt.ops as fr
from flowrt.base.spec import Spec
from flowrt.kernels.cuda import twins
from flowrt.kernels.language.table import KERNELS, Form
from flowrt.ops import entropy, index, nn, running, slices
from flowrt.ops.moments import sums_about

if TYPE_CHECKING:
    from collections.abc import Iterator

    Case = tuple[str, list[Any], list[Spec], Any]

LONG, WIDE, TALL, MATRIX = normal(2, 600), normal(5, 40), normal(40, 5), normal(11, 9)
SHARES, CLASSES, ROWS = np.abs(WIDE), integers(5, low=0, high=40), integers(24, low=0, high=6)
MOST = 150  # entries of an example: the simulator runs Python
FLAGS = {"transpose_a": False, "transpose_b": False}

SHARED = (
    *(Example("sum", lambda x, a=axis: fr.sum(x, axis=a), (x,)) for axis, x in ((0, LONG.T), (1, LONG), (1, WIDE))),
    Example("max", lambda x: fr.max(x, axis=0), (TALL,)),
    Example("argmax", lambda x: fr.argmax(x, axis=1), (WIDE,)),
    Example("argmin", lambda x: fr.argmin(x, axis=0), (TALL,)),
    Example("cumsum", lambda x: fr.cumsum(x, axis=1), (WIDE,)),
    Example("cumsum", lambda x: fr.cumsum(x, axis=0, reverse=True), (TALL,)),
    Example("linear_recurrence", lambda x: running.linear_recurrence(x, x, 1), (WIDE,)),
    Example("linear_recurrence", lambda x: running.linear_recurrence(x, x, 0, True, True), (TALL,)),
    Example("softmax", fr.nn.softmax, (WIDE,)),
    Example("log_softmax", lambda x: fr.nn.log_softmax(x, axis=0), (TALL,)),
    Example("class_cross_entropy", fr.nn.softmax_cross_entropy, (WIDE, CLASSES)),
    Example("class_cross_entropy_slope", entropy.class_cross_entropy_slope, (WIDE, CLASSES, normal(5))),
    Example("cross_entropy", fr.nn.softmax_cross_entropy, (WIDE, SHARES)),
    Example("cross_entropy_slope", entropy.cross_entropy_slope, (WIDE, SHARES, normal(5))),
    *(Example("moments", lambda x, a=axis: nn.moments(x, a), (x,)) for axis, x in ((0, LONG.T), (1, WIDE))),
    *(Example("sums_about", sums_about, (x, x, x[:1] * 0)) for x in (LONG.T, TALL)),
    Example("scatter_add", lambda u, i: index.scatter_add(u, i, (6, 2)), (normal(24, 2), ROWS)),
    Example("group_rows", lambda i: slices.group_rows(i, 6, 24), (ROWS,)),
    Example("matmul", fr.matmul, (MATRIX, normal(9, 13))),
)


def cases() -> Iterator[Case]:
    """What several threads have a part in, and several blocks; and of each other twin that is no expression a case."""
    small = {each.op: each for each in EXAMPLES if sum(a.size for a in each.arrays) <= MOST}
    for example in (*SHARED, *small.values()):
        for node, arrays, found in computed(example):
            made = KERNELS.get((node.op.name, "cuda"), ())
            if node.op.name == example.op and any(each.form is Form.ARRAYS for each in made):
                yield example.op, arrays, [Spec(a.dtype, a.shape) for a in found], node.attrs
    bits = np.full((5, 20), 0x3F80, np.uint16)  # ones
    yield "matmul_bfloat16", [bits, bits.T.copy()], [Spec("float32", (5, 5))], FLAGS
    groups = twins.run_kernel("group_rows", [ROWS, np.int64(24)], [Spec("int32", (74,))], {"size": 6, "absent": False})
    for op, tables in (("add", 1), ("assign", 1), ("momentum", 2), ("adam", 3)):
        yield f"{op}_rows", [normal(24, 3), *groups, np.ones(8, np.float32)], [Spec("float32", (6, 3))] * tables, {}


def launched(case: Case, ignored: str = "") -> Watch:
    op, arrays, specs, attrs = case
    with install(Watch(ignored)) as watch:
        twins.run_kernel(op, arrays, specs, attrs, RUN.copy())
    return watch


def wrong() -> list[list[str]]:
    """What is found of kernels whose threads wait apart, read what nobody wrote, and write what others write."""

    @numba_cuda.jit
    def waiting(out: Any) -> None:
        if numba_cuda.threadIdx.x > 0:
            numba_cuda.syncthreads()

    @numba_cuda.jit
    def reading(out: Any) -> None:
        held = numba_cuda.shared.array(4, np.float64)
        held[numba_cuda.threadIdx.x] = 1.0
        out[numba_cuda.grid(1)] = held[numba_cuda.threadIdx.x + 1]

    @numba_cuda.jit
    def writing(out: Any) -> None:
        out[0] = numba_cuda.blockIdx.x

    found = []
    for kernel in (waiting, reading, writing):
        with install(Watch()) as watch:
            kernel[2, 3](Watched(np.zeros(6), watch))
        watch.end()
        found.append(sorted(fault.partition(" ")[2] for fault in watch.faults))
    return found


def main() -> None:
    faults, barriers, missed = dict[str, list[str]](), set[str](), set[str]()
    for case in list(cases()):
        watch = launched(case)
        faults[f"{case[0]} of {', '.join(str(list(a.shape)) for a in case[1])}"] = sorted(watch.faults)
        barriers |= watch.barriers
        missed |= {barrier for barrier in watch.barriers - missed if launched(case, barrier).faults}
    tell({"faults": faults, "barriers": sorted(barriers), "needless": sorted(barriers - missed), "wrong": wrong()})


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # a device does not warn of inf and NaN, as NumPy does
    main()
