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
from numba.core import errors
from numba.cuda import dispatcher
from op_examples import EXAMPLES, Example

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.cuda import twins
from flowrt.kernels.language.table import KERNELS, Form
from flowrt.kernels.launch import LaunchStep, apply_kernel

ASSEMBLE = "--assemble" in sys.argv
CAPABILITY = (9, 0) if ASSEMBLE else (8, 0)  # of the GPU that it is compiled for


class World:
    """What was compiled so far."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.failures: list[str] = []
        self.widened: set[str] = set()  # expressions of float32 alone that compute in float64
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
            prepared = twins.PreparedStep(step)
            function, signature = prepared.function, prepared.signature()
            if (function, signature) in self._seen:
                continue
            self._seen.add((function, signature))
            try:
                ptx, _ = numba_cuda.compile(function, signature, cc=CAPABILITY, device=False, abi="numba")
                assert ".entry" in ptx or ".visible" in ptx
                if ASSEMBLE:
                    assemble(ptx)
                self.compiled[op] += 1
                if step.kernel.form is Form.SCALARS and {str(dtype) for dtype in step.dtypes} == {"float32"}:
                    self.widened |= {op} if ".f64" in ptx else set()
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


def main() -> None:
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)  # there is none to ask
    gc.freeze()  # compilers make much that stays: to look through it again and again took an eighth of their time
    gc.set_threshold(100_000, 20, 100)
    world = World()
    for example in EXAMPLES:
        if max((a.size for a in example.arrays), default=0) <= 1000:
            world.visit(example)
    for op, arrays, outputs, attrs in programs():
        world.compile(op, [spec_of(a) for a in arrays], outputs, attrs)
    tell({"compiled": world.compiled, "failures": world.failures, "widened": sorted(world.widened)})


if __name__ == "__main__":
    warnings.simplefilter("ignore", errors.NumbaWarning)
    main()
