"""Expressions, of one op or of several, as one CUDA kernel each: a thread computes all of it, in registers.

The same `Expression` is a loop of LLVM's on CUDA's host. Here it is one flat function, whose text is written for the
members and for how the operands lie, as Numba compiles a function in as long as it is deep. What the members compute
are the very functions that they are registered with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from flowrt.kernels.cuda.functions import on_device
from flowrt.kernels.language.bits import on_bits
from flowrt.kernels.language.expression import Expression, Member

if TYPE_CHECKING:
    from flowrt.kernels.cuda.walk import Ways
    from flowrt.kernels.launch import LaunchStep

LOADS = 4  # that a thread has under way at once, so that a GPU's memory is busy
LONG = 12  # members, from which a thread computes one entry at a time: there are only so many registers


def expression_of(step: LaunchStep) -> Expression:
    """What a step computes entry by entry."""
    kernel, reads = step.kernel, step.reads
    if kernel.expression is not None:
        return on_bits(kernel.expression)
    member = Member(kernel.function, tuple(range(reads)), step.dtypes[-1], kernel.op, kernel.cost)
    return Expression(step.dtypes[:reads], (member,), (reads,))


def entries_together(expression: Expression, ways: Ways) -> int:
    """How many entries a thread computes at a time: it asks for all that these need before it waits for any."""
    read = sum(not ways.is_single(n) for n in range(len(expression.inputs)))
    long = expression.costly or len(expression.members) >= LONG
    return 1 if long else max(LOADS // max(read, 1), 1)


@cache
def entrywise(expression: Expression, ways: Ways) -> Callable[..., Any]:
    """The function of an expression that reduces nothing: of how many entries there are, of the operands, and of the
    numbers that `Ways.names` tells."""
    known: dict[str, Any] = {"cuda": cuda, "np": np, "word": np.uint32 if ways.narrow else np.int64}
    for number, member in enumerate(expression.members, len(expression.inputs)):
        known[f"function{number}"] = on_device(member.function)
        known[f"dtype{number}"] = np.dtype(member.dtype).type
    exec("\n".join(text_of(expression, ways)), known)
    made: Callable[..., Any] = known["entries"]
    return made


def text_of(expression: Expression, ways: Ways) -> Iterator[str]:
    """The lines of the kernel: a thread has entries that are a block apart, so that neighbours read neighbours.

    No store lies between the loads of entries that are computed together, or they would wait for one another.
    """
    inputs, together = len(expression.inputs), entries_together(expression, ways)
    operands = [f"x{n}" for n in range(inputs + len(expression.results))]
    yield f"def entries({', '.join(['count', *operands, *ways.names()])}):"
    yield f"    first = word(cuda.blockIdx.x * cuda.blockDim.x * {together} + cuda.threadIdx.x)"
    for n in filter(ways.is_single, range(inputs)):
        yield f"    v{n} = x{n}[0]"
    if together > 1:
        yield f"    while word(first + cuda.blockDim.x * {together - 1}) < count:"
        yield from (f"        {line}" for line in _entries(expression, ways, together))
        yield f"        first = word(first + cuda.blockDim.x * cuda.gridDim.x * {together})"
    yield "    while first < count:"
    yield from (f"        {line}" for line in _entries(expression, ways, 1))
    yield f"        first = word(first + cuda.blockDim.x{'' if together > 1 else ' * cuda.gridDim.x'})"


def _entries(expression: Expression, ways: Ways, together: int) -> Iterator[str]:
    """Lines that read some entries, compute them, and write them."""
    inputs, copies = len(expression.inputs), range(together)
    for copy in copies:
        yield f"at_{copy} = word(first + cuda.blockDim.x * {copy})"
        yield from _coordinates(ways, copy)
        for n in range(inputs):
            if not ways.is_single(n):
                yield f"v{n}_{copy} = x{n}[{_place(ways, n, copy)}]"
    for copy in copies:
        for number, member in enumerate(expression.members, inputs):
            taken = ", ".join(_value(ways, n, inputs, copy) for n in member.operands)
            yield f"v{number}_{copy} = dtype{number}(function{number}({taken}))"
    for copy in copies:
        for operand, number in enumerate(expression.results, inputs):
            yield f"x{operand}[{_place(ways, operand, copy)}] = {_value(ways, number, inputs, copy)}"


def _value(ways: Ways, number: int, inputs: int, copy: int) -> str:
    return f"v{number}" if number < inputs and ways.is_single(number) else f"v{number}_{copy}"


def _coordinates(ways: Ways, copy: int) -> Iterator[str]:
    """Lines that find an entry's place on each axis of the odometer."""
    left = f"at_{copy}"
    for axis in range(ways.axes - 1):
        size, rest = f"size{axis}", f"rest{axis}_{copy}"
        product = f"np.uint64({left}) * np.uint64(factor{axis}) >> np.uint64(shift{axis})"
        yield f"{rest} = word({product if ways.narrow else f'{left} // {size}'})"
        yield f"c{axis}_{copy} = word({left} - {rest} * {size})"
        left = rest
    if ways.axes:
        yield f"c{ways.axes - 1}_{copy} = {left}"


def _place(ways: Ways, operand: int, copy: int) -> str:
    """The number of an operand's entry."""
    strides = ways.strides[operand]
    if strides is None:
        return f"np.uint64(at_{copy})"
    steps = [
        f"c{axis}_{copy}" if stride == 1 else f"c{axis}_{copy} * by{operand}_{axis}"
        for axis, stride in enumerate(strides)
        if stride
    ]
    begin = [] if ways.narrow or not steps else [f"from{operand}"]
    return f"np.uint64({' + '.join([*begin, *steps]) or 0})"
