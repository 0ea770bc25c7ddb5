"""Expressions of several ops as one CUDA kernel: every thread computes all of them of an entry, in registers.

The same `Expression` is a loop of LLVM's on CPUs. Here it is a chain of device functions, each of which adds a value to
a tuple of those before it: Numba makes one function of all, in which no tuple is left. What the members compute are the
very functions that they are registered with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from flowrt.base.errors import GraphError
from flowrt.kernels.cuda_functions import bound, place_of

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression, Member

Device = Callable[..., Any]


@cache
def fused_entry(expression: Expression) -> Any:
    """A launcher of an expression that reduces nothing, along any strides.

    It is given a step's block, how many entries there are, and two tuples: of inputs, and of results.
    """
    operands = len(expression.inputs) + len(expression.results)
    read = _read(len(expression.inputs), operands)
    for member in expression.members:
        read = _then(read, member)
    write = _write(expression.results, len(expression.inputs), operands)

    def fused(block: Any, count: int, inputs: Any, results: Any) -> None:
        for i in range(cuda.grid(1), count, cuda.gridsize(1)):
            write(block, i, read(block, i, inputs), results)

    return cuda.jit(fused)


def _read(inputs: int, operands: int) -> Device:
    """What answers the entries of all inputs."""

    def nothing(block: Any, i: int, arrays: Any) -> Any:
        return ()

    found: Device = cuda.jit(device=True)(nothing)
    for number in range(inputs):
        found = _and_entry(found, number, operands)
    return found


def _and_entry(before: Device, number: int, operands: int) -> Device:
    def entries(block: Any, i: int, arrays: Any) -> Any:
        x = arrays[number]
        return (*before(block, i, arrays), x[place_of(block, i, number, operands, x.itemsize)])

    made: Device = cuda.jit(device=True)(entries)
    return made


def _then(before: Device, member: Member) -> Device:
    """What answers the values before, and the member's."""
    apply, cast = _member(member), np.dtype(member.dtype).type

    def values(block: Any, i: int, arrays: Any) -> Any:
        known = before(block, i, arrays)
        return (*known, cast(apply(known)))

    made: Device = cuda.jit(device=True)(values)
    return made


def _member(member: Member) -> Device:
    """A member's function of the tuple of values."""
    function, operands = _scalar(member.function), member.operands
    a, b, c, d = (*operands, *[0] * (4 - len(operands)))

    def of_one(known: Any) -> Any:
        return function(known[a])

    def of_two(known: Any) -> Any:
        return function(known[a], known[b])

    def of_three(known: Any) -> Any:
        return function(known[a], known[b], known[c])

    def of_four(known: Any) -> Any:
        return function(known[a], known[b], known[c], known[d])

    entries = {1: of_one, 2: of_two, 3: of_three, 4: of_four}
    if len(operands) not in entries:
        raise GraphError(f"{member.op} takes {len(operands)} values; on CUDA a member takes 1 to 4")
    made: Device = cuda.jit(device=True)(entries[len(operands)])
    return made


def _write(results: Sequence[int], first: int, operands: int) -> Device:
    """What writes the entries of all results."""

    def nothing(block: Any, i: int, known: Any, arrays: Any) -> None:
        pass

    found: Device = cuda.jit(device=True)(nothing)
    for number, value in enumerate(results):
        found = _and_result(found, number, value, first + number, operands)
    return found


def _and_result(before: Device, number: int, value: int, operand: int, operands: int) -> Device:
    def write(block: Any, i: int, known: Any, arrays: Any) -> None:
        before(block, i, known, arrays)
        y = arrays[number]
        y[place_of(block, i, operand, operands, y.itemsize)] = known[value]

    made: Device = cuda.jit(device=True)(write)
    return made


@cache
def _scalar(function: Callable[..., Any]) -> Any:
    return cuda.jit(device=True)(bound(function))
