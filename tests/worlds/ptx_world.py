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
        self.ops: set[str] = set()  # whose steps are among these, perhaps as those of another op
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
        self.ops.add(op)
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

    def compile_moved(self) -> None:
        """What moves rows of variables where they lie, which no example asks for by itself."""
        moving = {"add": 0, "assign": 0, "momentum": 1, "adagrad": 1, "rmsprop": 2, "adam": 2}
        for dtype, kept in (("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")):
            given = [Spec(dtype, (7, 5)), Spec("int32", (23,)), Spec(kept, (8,))]
            for op, slots in moving.items():
                self.compile(f"{op}_rows", given, [Spec(dtype, (6, 5)), *[Spec(kept, (6, 5))] * slots], {})

    def compile_large(self) -> None:
        """What goes over more entries than 31 bits count: broadcast, transposed and dense."""
        for inputs in (((1 << 16, 1 << 16), (1 << 16, 1)), ((1 << 31,), ()), ((1 << 32,), (1 << 32,))):
            self.compile("add", [Spec("float32", shape) for shape in inputs], [Spec("float32", inputs[0])], {})
        turned = Spec("float32", (1 << 8, 1 << 20, 1 << 4)), Spec("float32", (1 << 4, 1 << 8, 1 << 20))
        self.compile("transpose", [turned[0]], [turned[1]], {"axes": (2, 0, 1)})


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
    world.compile_moved()
    world.compile_large()
    found = {"compiled": world.compiled, "ops": sorted(world.ops)}
    tell({**found, "failures": world.failures, "widened": sorted(world.widened)})


if __name__ == "__main__":
    warnings.simplefilter("ignore", errors.NumbaWarning)
    main()
