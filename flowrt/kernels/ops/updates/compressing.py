"""Float32 numbers in fewer bytes, for the way between hosts: what a replica sends, and what a server makes of it.

A bfloat16 here is the nearest one, of two the even one; a finite number stays finite, if need be as the largest there
is, and one that is not stays so.

As int8 a block of numbers is whole numbers from -127 to 127 times one float32, its *scale*: what is nearest, of the
block's numbers and what was *left* of those before. What that leaves is written beside it: 1-bit SGD's error feedback
(Seide et al., Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019). A block with a number
that is not finite has no finite scale. Where its largest number is tiny all of it is left, where that is huge more than
the rounding is.

A unit of work is a block, each computed by itself, so how the work is cut and shared changes no bit. Of a launch's
operands the sizes alone say how many numbers there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, host_only, jitable, kernel
from flowrt.kernels.launch import LaunchStep, apply_kernel
from flowrt.kernels.ops.precision import INFINITE, REST, bits_of, float_of, of_bfloat16, to_bfloat16

BLOCK = 1024
"""The numbers of a block."""
REST_OF_HALF, INFINITE_HALF = np.uint16(0x7FFF), np.uint16(0x7F80)
MOST = np.float32(127)
TINY, HUGE = np.float32(2.0**-116), np.float32(2.0**126)  # between them scales and their inverses are normal numbers
ROUND = np.float32(1.5 * 2**23)  # what a small number is added to, and taken from, to be rounded to a whole one
NOTHING, NO_NUMBER, LEAST = np.float32(0), np.float32(np.nan), np.uint32(0)


def _blocks(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs)))


# ── bfloat16 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@jitable
def to_finite_bfloat16(x: Any) -> Any:
    bits = to_bfloat16(x)
    overflows = np.uint16(bits & REST_OF_HALF) == INFINITE_HALF and np.uint32(bits_of(x) & REST) < INFINITE
    return np.uint16(bits - np.uint16(1)) if overflows else bits


@kernel("narrow_blocks", layout=_blocks)
def narrow(numbers: Any, size: Any, bits: Any, begin: int, end: int) -> None:
    """The bfloat16s of some blocks of numbers."""
    for i in range(begin * BLOCK, min(end * BLOCK, size[0])):
        bits[np.uint64(i)] = to_finite_bfloat16(numbers[np.uint64(i)])


@kernel("widen_blocks", layout=_blocks)
def widen(bits: Any, size: Any, numbers: Any, begin: int, end: int) -> None:
    """The numbers that some blocks of bfloat16s are."""
    for i in range(begin * BLOCK, min(end * BLOCK, size[0])):
        numbers[np.uint64(i)] = of_bfloat16(bits[np.uint64(i)])


# ── int8 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@jitable
def largest_bits(numbers: Any, kept: Any, keeps: bool, first: int, many: int) -> Any:
    """The bits of the largest magnitude of numbers with what was kept; of what is not finite they are the most."""
    found = LEAST
    for i in range(many):
        at = np.uint64(first + i)
        bits = np.uint32(bits_of(numbers[at] + (kept[at] if keeps else NOTHING)) & REST)
        found = bits if bits > found else found
    return found


@jitable
def to_whole(x: Any) -> Any:
    """The nearest whole number from -127 to 127, of two the even one."""
    least = x if x > -MOST else -MOST
    near = least if least < MOST else MOST
    return np.float32(np.float32(near + ROUND) - ROUND)


@kernel("quantize_blocks", layout=_blocks)
def quantize(numbers: Any, kept: Any, size: Any, codes: Any, scales: Any, left: Any, begin: int, end: int) -> None:
    """Some blocks of numbers, and of what was kept of those before, as int8; and what is left of them."""
    for block in range(begin, end):
        first = block * BLOCK
        many = min(BLOCK, size[0] - first)
        bits = largest_bits(numbers, kept, True, first, many)
        keeps = bits < INFINITE  # else a number is not finite, or is no more together with what was kept
        bits = bits if keeps else largest_bits(numbers, kept, False, first, many)
        largest = float_of(bits)
        bounded = largest if largest < HUGE else HUGE
        scale = np.float32(bounded / MOST) if bounded >= TINY else NOTHING
        inverse = np.float32(MOST / bounded) if bounded >= TINY else NOTHING
        scales[np.uint64(block)] = scale if bits < INFINITE else NO_NUMBER
        for i in range(many):
            at = np.uint64(first + i)
            number = np.float32(numbers[at] + (kept[at] if keeps else NOTHING))
            near = to_whole(number * inverse)
            codes[at] = np.int8(np.int32(near))
            sent = float_of(bits_of(near * scale))  # rounded by itself, as whoever gets it does
            left[at] = np.float32(number - sent)


@kernel("dequantize_blocks", layout=_blocks)
def dequantize(codes: Any, scales: Any, size: Any, numbers: Any, begin: int, end: int) -> None:
    """The numbers that some blocks of int8 are."""
    for block in range(begin, end):
        scale = scales[np.uint64(block)]
        for i in range(block * BLOCK, min((block + 1) * BLOCK, size[0])):
            numbers[np.uint64(i)] = np.float32(np.float32(codes[np.uint64(i)]) * scale)


OPERANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "narrow_blocks": (("float32",), ("uint16",)),
    "widen_blocks": (("uint16",), ("float32",)),
    "quantize_blocks": (("float32", "float32"), ("int8", "float32", "float32")),
    "dequantize_blocks": (("int8", "float32"), ("float32",)),
}
"""By kernel, the dtypes of the arrays that it reads, which their size follows, and of those that it fills."""
for _name in OPERANDS:
    host_only(_name, why="what comes from the network, or goes there, is in the host's memory")


@cache
def launch_of(name: str) -> LaunchStep:
    """The launch of one of these kernels on arrays of any size."""
    reads, fills = ([Spec(dtype, (1,)) for dtype in dtypes] for dtypes in OPERANDS[name])
    (step,) = apply_kernel(name, [*reads, Spec("int64", (1,))], fills, {}).steps
    assert isinstance(step, LaunchStep)
    return step
