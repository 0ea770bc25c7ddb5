"""Float32 numbers in fewer bytes, for the way between hosts: what a replica sends, and what a server makes of it.

A bfloat16 here is the nearest one, of two the even one; a finite number stays finite, if need be as the largest there
is, and one that is not stays so. A unit of work is a *block* of numbers, each computed by itself, so how the work is
cut and shared changes no bit. Of a launch's operands the sizes alone say how many numbers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, host_only, jitable, kernel
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.ops.precision import INFINITE, REST, bits_of, of_bfloat16, to_bfloat16

BLOCK = 1024
"""The numbers of a block."""
REST_OF_HALF, INFINITE_HALF = np.uint16(0x7FFF), np.uint16(0x7F80)


def _blocks(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(tuple(View.dense(spec.concrete) for spec in inputs))


@jitable
def to_finite_bfloat16(x: Any) -> Any:
    bits = to_bfloat16(x)
    overflows = np.uint16(bits & REST_OF_HALF) == INFINITE_HALF and np.uint32(bits_of(x) & REST) < INFINITE
    return np.uint16(bits - np.uint16(1)) if overflows else bits


@kernel("narrow_blocks", layout=_blocks)
def narrow(numbers: Any, bits: Any, size: Any, begin: int, end: int) -> None:
    """The bfloat16s of some blocks of numbers."""
    for i in range(begin * BLOCK, min(end * BLOCK, size[0])):
        bits[np.uint64(i)] = to_finite_bfloat16(numbers[np.uint64(i)])


@kernel("widen_blocks", layout=_blocks)
def widen(bits: Any, numbers: Any, size: Any, begin: int, end: int) -> None:
    """The numbers that some blocks of bfloat16s are."""
    for i in range(begin * BLOCK, min(end * BLOCK, size[0])):
        numbers[np.uint64(i)] = of_bfloat16(bits[np.uint64(i)])


OPERANDS: Mapping[str, tuple[str, ...]] = {
    "narrow_blocks": ("float32", "uint16", "int64"),
    "widen_blocks": ("uint16", "float32", "int64"),
}
"""By kernel, the dtypes of what it takes: arrays, and how many numbers there are."""
for _name in OPERANDS:
    host_only(_name, why="what comes from the network, or goes there, is in the host's memory")


@cache
def launch_of(name: str) -> LaunchStep:
    """The launch of one of these kernels on arrays of any size."""
    (step,) = apply_kernel(name, [Spec(dtype, (1,)) for dtype in OPERANDS[name]], [], {}).steps
    assert isinstance(step, LaunchStep)
    return step
