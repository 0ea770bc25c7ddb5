"""Run as a program: every CUDA twin that the examples launch, compiled to PTX, which takes NVVM and no GPU.

Prints one JSON object: how many variants of each op were compiled, and what failed. With ``--assemble`` NVIDIA's own
assembler makes machine code for an H100 of each, too, which takes nvJitLink (flowrt[cuda13]) and still no GPU: that
refuses what PTX does not tell, as more shared memory than there is.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

from computed import computed
from fused_examples import programs
from kept import tell
from numba import cuda as numba_cuda
from numba import types
from numba.core import errors
from numba.cuda import dispatcher
from numba.np.numpy_support import from_dtype
from op_examples import EXAMPLES, Example

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec
from flowrt.kernels import cuda
from flowrt.kernels.language.table import KERNELS, Form
from flowrt.kernels.launch import LaunchStep, apply_kernel

ASSEMBLE = "--assemble" in sys.argv
CAPABILITY = (9, 0) if ASSEMBLE else (8, 0)  # of the GPU that it is compiled for


class World:
    """What was compiled so far."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.failures: list[str] = []
        self._seen: set[Any] = set()

    def visit(self, example: Example) -> None:
        for node, arrays, found in computed(example):
            if (node.op.name, "cuda") in KERNELS:
                specs = ([Spec(a.dtype, a.shape) for a in some] for some in (arrays, found))
                self.compile(node.op.name, *specs, node.attrs)

    def compile(self, op: str, inputs: list[Spec], outputs: list[Spec], attrs: Any) -> None:
        try:
            application = apply_kernel(op, inputs, outputs, attrs, "cuda")
        except FlowrtError:
            return  # no twin for these dtypes
        for step in application.steps:
            assert isinstance(step, LaunchStep)
            signature = _signature(step)
            key = step.kernel.expression or step.kernel.function, signature
            if key in self._seen:
                continue
            self._seen.add(key)
            entry = cuda.entry_of(step)
            try:
                ptx, _ = numba_cuda.compile(entry.py_func, signature, cc=CAPABILITY, device=False, abi="numba")
                assert ".entry" in ptx or ".visible" in ptx
                if ASSEMBLE:
                    assemble(ptx)
                self.compiled[op] += 1
            except Exception as error:
                self.failures.append(f"{op} of {signature}: {type(error).__name__}: {str(error)[:400]}")


def assemble(ptx: str) -> None:
    """Have NVIDIA's assembler make machine code. Raises with what it says where it does not."""
    from cuda.bindings import nvjitlink

    options = [f"-arch=sm_{''.join(map(str, CAPABILITY))}"]
    link, code = nvjitlink.create(len(options), options), ptx.encode() + b"\0"
    try:
        nvjitlink.add_data(link, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(link)
        assert nvjitlink.get_linked_cubin_size(link)
    except nvjitlink.nvJitLinkError as error:
        said = bytearray(nvjitlink.get_error_log_size(link))
        nvjitlink.get_error_log(link, said)
        raise RuntimeError(said.decode(errors="replace")) from error
    finally:
        nvjitlink.destroy(link)


def _signature(step: LaunchStep) -> Any:
    """The types of what an entry is launched with."""
    dtypes = [from_dtype(dtype) for dtype in step.dtypes]
    if step.kernel.form is Form.SCALARS:
        block = types.Array(types.int64, 1, "C")
        if step.kernel.expression is not None:
            arrays = [types.Array(dtype, 1, "C") for dtype in dtypes]
            return types.void(block, types.int64, types.Tuple(arrays[: step.reads]), types.Tuple(arrays[step.reads :]))
        return types.void(block, types.int64, *(types.Array(dtype, 1, "C") for dtype in dtypes))
    ranks = [len(view.shape) for view in step.call.views]
    arrays = [types.Array(dtype, rank, "C") for dtype, rank in zip(dtypes, ranks, strict=True)]
    words = [types.float64 if isinstance(word, float) else types.int64 for word in step.call.words]
    run = [types.Array(types.int64, 1, "C")] if step.kernel.takes_run else []
    return types.void(*arrays, *words, *run)


def main() -> None:
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)  # there is none to ask
    gc.freeze()  # compilers make much that stays: to look through it again and again took an eighth of their time
    gc.set_threshold(100_000, 20, 100)
    world = World()
    for example in EXAMPLES:
        if max((a.size for a in example.arrays), default=0) <= 1000:
            world.visit(example)
    for op, arrays, outputs, attrs in programs():
        world.compile(op, [Spec(a.dtype, a.shape) for a in arrays], outputs, attrs)
    tell({"compiled": world.compiled, "failures": world.failures})


if __name__ == "__main__":
    warnings.simplefilter("ignore", errors.NumbaWarning)
    main()
