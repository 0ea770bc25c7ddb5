"""CUDA twins, compiled and launched through numba-cuda.

Device memory is `flowrt.kernels.cuda_gpu.GpuArray`. In Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``, set before Numba
is imported) NumPy arrays stand for it, and kernels are Python: a check of logic on tiny arrays. An application is the
same steps and blocks as on CPUs: scalar expressions read the block's odometer, twins get arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numba import cuda

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.cuda_copies import CudaCopies, Gpu
from flowrt.kernels.cuda_functions import bound, place_of
from flowrt.kernels.language.table import Form, View
from flowrt.kernels.language.twin import SIMULATED, THREADS
from flowrt.kernels.launch import RUN_WORDS, LaunchStep, Operand, apply_kernel, check
from flowrt.kernels.simulator import SimulatedGpu

Put: TypeAlias = Callable[[np.ndarray[Any, Any]], Any]  # answers a copy of an array in device memory

BLOCKS = 2 if SIMULATED else 4096  # at most; twins and the scalar entries loop over what is left


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def scalar_entry(function: Callable[..., Any], inputs: int) -> Any:
    """A launcher of a scalar expression of that many inputs along any strides."""
    scalar, place = cuda.jit(device=True)(bound(function)), place_of

    def of_one(block: Any, count: int, x: Any, y: Any) -> None:
        for i in range(cuda.grid(1), count, cuda.gridsize(1)):
            y[place(block, i, 1, 2, y.itemsize)] = scalar(x[place(block, i, 0, 2, x.itemsize)])

    def of_two(block: Any, count: int, a: Any, b: Any, y: Any) -> None:
        for i in range(cuda.grid(1), count, cuda.gridsize(1)):
            left, right = a[place(block, i, 0, 3, a.itemsize)], b[place(block, i, 1, 3, b.itemsize)]
            y[place(block, i, 2, 3, y.itemsize)] = scalar(left, right)

    def of_three(block: Any, count: int, a: Any, b: Any, c: Any, y: Any) -> None:
        for i in range(cuda.grid(1), count, cuda.gridsize(1)):
            first, second = a[place(block, i, 0, 4, a.itemsize)], b[place(block, i, 1, 4, b.itemsize)]
            y[place(block, i, 3, 4, y.itemsize)] = scalar(first, second, c[place(block, i, 2, 4, c.itemsize)])

    def of_four(block: Any, count: int, a: Any, b: Any, c: Any, d: Any, y: Any) -> None:
        for i in range(cuda.grid(1), count, cuda.gridsize(1)):
            first, second = a[place(block, i, 0, 5, a.itemsize)], b[place(block, i, 1, 5, b.itemsize)]
            third, fourth = c[place(block, i, 2, 5, c.itemsize)], d[place(block, i, 3, 5, d.itemsize)]
            y[place(block, i, 4, 5, y.itemsize)] = scalar(first, second, third, fourth)

    entries = {1: of_one, 2: of_two, 3: of_three, 4: of_four}
    if inputs not in entries:
        raise GraphError(f"a scalar expression on CUDA takes 1 to 4 inputs, not {inputs}; split it")
    return cuda.jit(entries[inputs])


@cache
def array_entry(function: Callable[..., Any]) -> Any:
    """A twin, compiled for each kind of arguments it is launched with."""
    return cuda.jit(bound(function))


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


class PreparedSteps:
    """An op's steps on operands of fixed specs, ready to be issued on memory that holds them."""

    def __init__(
        self, op: str, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], put: Put
    ) -> None:
        application = apply_kernel(op, inputs, outputs, attrs, "cuda")
        self.scratch = (*application.scratch, *application.local)
        self._specs = (*inputs, *outputs, *self.scratch)
        steps = [step for step in application.steps if isinstance(step, LaunchStep)]
        assert len(steps) == len(application.steps), "loops and branches are the host's"
        self.takes_run = any(step.kernel.takes_run for step in steps)
        self.may_fail = any(step.kernel.may_fail for step in steps)
        places = [Operand(number) for number in range(len(self._specs))]
        self._steps = [(step, *_prepared(step, places, put)) for step in steps]

    def may_overwrite(self, output: int, operand: int) -> bool:
        """Whether an output may lie where an input does: one launch writes each entry when it has read the input's."""
        writers = [step for step, _, _ in self._steps if output in step.operands]
        readers = [step for step, _, _ in self._steps if operand in step.operands]
        if not readers:
            return False  # copied first, or not read at all
        return len(writers) == 1 and readers == writers and writers[0].may_overwrite(output, operand)

    def launch(self, memory: Sequence[Any], run: Any, on: tuple[Any, ...] = ()) -> None:
        """Issue them; ``memory`` are device arrays of bytes, ``run`` the run's words in device memory, if taken.

        ``on`` are the further arguments of Numba's launches: the stream.
        """
        arrays = [_typed(held, spec) for held, spec in zip(memory, self._specs, strict=True)]
        for step, work, block in self._steps:
            operands = [arrays[number] for number in step.operands]
            if not work:
                continue
            if block is not None:
                grid = min(BLOCKS, -(-work // THREADS)), THREADS, *on
                given = [_as_numbas(array) for array in operands]
                if step.kernel.expression is not None:
                    given = [tuple(given[: step.reads]), tuple(given[step.reads :])]
                entry_of(step)[grid](_as_numbas(block), work, *given)
                continue
            seen = [_viewed(flat, view) for flat, view in zip(operands, step.call.views, strict=True)]
            given = [_as_numbas(array) for array in (*seen, *([run] if step.kernel.takes_run else []))]
            seen, last = given[: len(seen)], given[len(seen) :]
            entry_of(step)[min(BLOCKS, work), THREADS, *on](*seen, *step.call.words, *last)


def _as_numbas(array: Any) -> Any:
    """An array of a GPU's as Numba has its own, which it takes in tuples too."""
    return array if SIMULATED else cuda.as_cuda_array(array, sync=False)


def entry_of(step: LaunchStep) -> Any:
    """What a step launches."""
    if step.kernel.expression is not None:
        from flowrt.kernels.cuda_fused import fused_entry

        return fused_entry(step.kernel.expression)
    if step.kernel.form is Form.SCALARS:
        return scalar_entry(step.kernel.function, len(step.operands) - 1)
    return array_entry(step.kernel.function)


def _prepared(step: LaunchStep, places: Sequence[Operand], put: Put) -> tuple[int, Any]:
    """How much work a step has, and what a scalar expression reads its operands' strides from."""
    if step.kernel.form is Form.SCALARS:
        return step.call.views[-1].size, put(step.block(places))
    return max(view.size for view in step.call.views), None  # twins are given a block for each, as far as `BLOCKS` goes


def _typed(memory: Any, spec: Spec) -> Any:
    """Bytes as a flat array of the spec's dtype."""
    return memory[: spec.nbytes].view(spec.dtype)


def _viewed(flat: Any, view: View) -> Any:
    return flat[view.offset : view.offset + view.size].reshape(view.shape)


def open_gpu(index: int) -> Gpu:
    """The GPU of that number, for the thread that calls."""
    if SIMULATED:
        return SimulatedGpu()
    from flowrt.kernels.cuda_gpu import CudaGpu

    return CudaGpu(index)


def run_kernel(
    op: str,
    inputs: Sequence[np.ndarray[Any, Any]],
    outputs: Sequence[Spec],
    attrs: Mapping[str, Any],
    words: np.ndarray[Any, Any] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """Compute ``op`` on the device: as `flowrt.kernels.launch.run_kernel` does on the host, arrays to arrays."""
    gpu = open_gpu(0)
    copies = CudaCopies(gpu)
    try:
        prepared = PreparedSteps(op, [Spec(a.dtype, a.shape) for a in inputs], outputs, attrs, copies.put)
        run = copies.put(np.zeros(RUN_WORDS, np.int64) if words is None else words)
        given = [copies.put(np.ascontiguousarray(a).reshape(-1).view(np.uint8)) for a in inputs]
        made = [gpu.allocate(max(spec.nbytes, 1)) for spec in (*outputs, *prepared.scratch)]
        prepared.launch([*given, *made], run, gpu.launching)
        check(_fetched(copies, run.view(np.uint8), Spec("int64", (RUN_WORDS,))), op, lambda: op)
        return [_fetched(copies, memory, spec) for memory, spec in zip(made, outputs, strict=False)]
    finally:
        gpu.close(copies.events)


def _fetched(copies: CudaCopies, memory: Any, spec: Spec) -> np.ndarray[Any, Any]:
    """What lies in a GPU's memory."""
    found = np.empty(spec.concrete, spec.dtype)
    copies.read(memory, found.reshape(-1).view(np.uint8))
    return found
