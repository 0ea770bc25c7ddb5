"""The most that one core can compute: multiply-adds in registers alone, with nothing to load or to store."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from flowrt.kernels.tiles.micro import native

CHAINS = 12  # that do not wait for one another: more than latency times ports, few enough for 16 registers
TURNS = 100_000


@cache
def _loop(dtype: str) -> tuple[Callable[[int], None], int]:
    """A function of how many turns to run, and the operations of one turn."""
    size = np.dtype(dtype).itemsize
    lanes = native().width // size
    kind = f"<{lanes} x {'float' if size == 4 else 'double'}>"
    name = f"llvm.fma.v{lanes}f{8 * size}"
    body = [f"  %a{i} = phi {kind} [zeroinitializer, %entry], [%b{i}, %turn]" for i in range(CHAINS)]
    body += [f"  %b{i} = call {kind} @{name}({kind} %a{i}, {kind} %x, {kind} %x)" for i in range(CHAINS)]
    kept = [f"  store volatile {kind} %b{i}, {kind}* %place" for i in range(CHAINS)]
    text = "\n".join((
        f"declare {kind} @{name}({kind}, {kind}, {kind})",
        "define void @spin(i64 %turns) {",
        f"entry:\n  %place = alloca {kind}\n  store volatile {kind} zeroinitializer, {kind}* %place",
        f"  %x = load volatile {kind}, {kind}* %place\n  br label %turn",
        "turn:\n  %left = phi i64 [%turns, %entry], [%fewer, %turn]", *body,
        "  %fewer = sub i64 %left, 1\n  %more = icmp sgt i64 %fewer, 0\n  br i1 %more, label %turn, label %done",
        "done:", *kept, "  ret void\n}",
    ))  # fmt: skip
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(_compiled(text)), 2 * lanes * CHAINS


def _compiled(text: str) -> int:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=3)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target)
    engine.finalize_object()
    _KEPT.append(engine)
    return int(engine.get_function_address("spin"))


_KEPT: list[Any] = []  # the code lives as long as its engine


def peak(dtype: str = "float32", clock: Callable[[], float] = time.thread_time) -> float:
    """GFLOP/s of the calling thread, the best of a few milliseconds."""
    spin, operations = _loop(dtype)
    best = 0.0
    for _ in range(8):
        start = clock()
        spin(TURNS)
        best = max(best, operations * TURNS / (clock() - start) / 1e9)
    return best
