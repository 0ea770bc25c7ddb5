"""CUDA twins, compiled and launched through numba-cuda.

Device memory is `flowrt.kernels.cuda.gpu.GpuArray`. In Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``, set before Numba
is imported) NumPy arrays stand for it, and kernels are Python: a check of logic on tiny arrays. An application is the
same steps as on CPUs: expressions are told how their operands lie (`walk`), twins get arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, typeof, types
from numba.np.numpy_support import from_dtype

from flowrt.base.spec import Spec, spec_of, stored
from flowrt.kernels.cuda.copies import CudaCopies, Gpu, Libraries, LibraryLaunch
from flowrt.kernels.cuda.functions import bound
from flowrt.kernels.cuda.fused import entries_together, entrywise, expression_of
from flowrt.kernels.cuda.simulator import SimulatedGpu
from flowrt.kernels.cuda.walk import walk_over
from flowrt.kernels.language.table import Form, View
from flowrt.kernels.language.twin import SIMULATED, THREADS
from flowrt.kernels.launch import RUN_WORDS, LaunchStep, apply_kernel, check
from flowrt.kernels.nvidia.library import LibraryRefusal

_log = logging.getLogger(__name__)
BLOCKS = 2 if SIMULATED else 4096  # at most; kernels loop over what is left


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """A kernel, compiled for each kind of arguments it is launched with."""
    return cuda.jit(function)


@cache
def _twin(function: Callable[..., Any]) -> Callable[..., Any]:
    return bound(function)


class PreparedStep:
    """A step's kernel, and what it is launched with beside memory."""

    def __init__(self, step: LaunchStep) -> None:
        self.step, views = step, step.call.views
        if step.kernel.form is Form.SCALARS:
            work = views[-1].size
            expression, walk = expression_of(step), walk_over(views if work else [View.dense(())] * len(views))
            word: Any = np.uint32 if walk.ways.narrow else int
            self.function = entrywise(expression, walk.ways)
            self.numbers = (word(work), *map(word, walk.words))
            work = -(-work // entries_together(expression, walk.ways))
            self._starts = walk.starts
        else:
            self.function, self.numbers = _twin(step.kernel.function), tuple(map(_as_a_device_has, step.call.words))
            work = max(view.size for view in views)
        self.blocks = min(BLOCKS, step.call.blocks if step.call.blocks is not None else -(-work // THREADS))

    def launch(self, arrays: Sequence[Any], run: Any, on: tuple[Any, ...]) -> None:
        """Issue it on the arrays of all operands of its application, which are flat."""
        operands, step = [arrays[number] for number in self.step.operands], self.step
        if step.kernel.form is Form.SCALARS:
            count, *others = self.numbers
            seen = [flat[start:] for flat, start in zip(operands, self._starts, strict=True)]
            given = [count, *map(_as_numbas, seen), *others]
        else:
            seen = [_viewed(flat, view) for flat, view in zip(operands, step.call.views, strict=True)]
            given = [*map(_as_numbas, seen), *self.numbers, *([_as_numbas(run)] if step.kernel.takes_run else [])]
        _compiled(self.function)[self.blocks, THREADS, *on](*given)

    def signature(self) -> Any:
        """The types of what the kernel is given, as Numba has them."""
        step, words = self.step, [typeof(number) for number in self.numbers]
        if step.kernel.form is Form.SCALARS:
            flat = [types.Array(from_dtype(dtype), 1, "C") for dtype in step.dtypes]
            return types.void(words[0], *flat, *words[1:])
        ranks = [len(view.shape) for view in step.call.views]
        arrays = [types.Array(from_dtype(dtype), rank, "C") for dtype, rank in zip(step.dtypes, ranks, strict=True)]
        return types.void(*arrays, *words, *([types.Array(types.int64, 1, "C")] if step.kernel.takes_run else []))


# ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────────


class CalledStep:
    """A step that a library carries out, in the last of its application's scratch; its twin where that refuses."""

    blocks = 1

    def __init__(self, step: LaunchStep, called: LibraryLaunch) -> None:
        self.step, self._called = step, called
        self._twin: PreparedStep | None = None

    def launch(self, arrays: Sequence[Any], run: Any, on: tuple[Any, ...]) -> None:
        """As `PreparedStep.launch`."""
        if self._twin is None:
            try:
                self._called.launch([arrays[number] for number in self.step.operands], arrays[-1])
                return
            except LibraryRefusal as refusal:
                _log.warning("%s is left to flowrt's own kernel: %s", self.step.kernel.op, str(refusal))
                self._twin = PreparedStep(self.step)
        self._twin.launch(arrays, run, on)


class PreparedSteps:
    """An op's steps on operands of fixed specs, ready to be issued on memory that holds them.

    ``libraries`` carry out those of them that they can.
    """

    def __init__(
        self,
        op: str,
        inputs: Sequence[Spec],
        outputs: Sequence[Spec],
        attrs: Mapping[str, Any],
        libraries: Libraries | None = None,
    ) -> None:
        application = apply_kernel(op, inputs, outputs, attrs, "cuda")
        steps = [step for step in application.steps if isinstance(step, LaunchStep)]
        assert len(steps) == len(application.steps), "loops and branches are the host's"
        self.takes_run = any(step.kernel.takes_run for step in steps)
        self.may_fail = any(step.kernel.may_fail for step in steps)
        called = [libraries.prepare(step) if libraries else None for step in steps]
        workspace = max((each.workspace for each in called if each), default=0)
        shared = [Spec("uint8", (workspace,))] if workspace else []  # by all calls, which follow each other
        self.scratch = (*application.scratch, *application.local, *shared)
        self._specs = (*inputs, *outputs, *self.scratch)
        self._steps = [
            CalledStep(step, each) if each else PreparedStep(step) for step, each in zip(steps, called, strict=True)
        ]

    def may_overwrite(self, output: int, operand: int) -> bool:
        """Whether an output may lie where an input does: one launch writes each entry when it has read the input's."""
        steps = [prepared.step for prepared in self._steps]
        writers = [step for step in steps if output in step.operands]
        readers = [step for step in steps if operand in step.operands]
        if not readers:
            return False  # copied first, or not read at all
        return len(writers) == 1 and readers == writers and writers[0].may_overwrite(output, operand)

    def launch(self, memory: Sequence[Any], run: Any, on: tuple[Any, ...] = ()) -> None:
        """Issue them; ``memory`` are device arrays of bytes, ``run`` the run's words in device memory, if taken.

        ``on`` are the further arguments of Numba's launches: the stream.
        """
        arrays = [_typed(held, spec) for held, spec in zip(memory, self._specs, strict=True)]
        for prepared in self._steps:
            if prepared.blocks:
                prepared.launch(arrays, run, on)


def _as_numbas(array: Any) -> Any:
    """An array of a GPU's as Numba has its own."""
    return array if SIMULATED else cuda.as_cuda_array(array, sync=False)


def _as_a_device_has(word: Any) -> Any:
    """A number as kernels have it: a float of Python's is one of 64 bits there, while NumPy takes it for its own."""
    return np.float64(word) if SIMULATED and isinstance(word, float) else word


def _typed(memory: Any, spec: Spec) -> Any:
    """Bytes as a flat array of what kernels see of the spec's dtype."""
    return memory[: spec.nbytes].view(stored(spec.dtype))


def _viewed(flat: Any, view: View) -> Any:
    return flat[view.offset : view.offset + view.size].reshape(view.shape)


def open_gpu(index: int) -> Gpu:
    """The GPU of that number, for the thread that calls."""
    if SIMULATED:
        return SimulatedGpu()
    from flowrt.kernels.cuda.gpu import CudaGpu

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
        prepared = PreparedSteps(op, [spec_of(a) for a in inputs], outputs, attrs, gpu.libraries)
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
