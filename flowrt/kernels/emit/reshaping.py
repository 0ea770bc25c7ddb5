"""What reshaping an array inside a kernel comes to, in LLVM's terms: Numba calls a function of its own run time for it,
which no object may.

Arrays that lie one entry after another, in order, as all that a kernel is given do, get the strides of their new
shape. Of others it says that they cannot be reshaped without a copy, which raises in the kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from flowrt.kernels.emit.abi import ONE, WORD

SYMBOL = "numba_attempt_nocopy_reshape"
_FLAG = ir.IntType(32)


@cache
def reshaping(triple: str, layout: str) -> str:
    """A module that defines the function, as text."""
    module = ir.Module("reshaping")
    module.triple, module.data_layout = triple, layout
    words = WORD.as_pointer()
    function = ir.Function(
        module, ir.FunctionType(_FLAG, [WORD, words, words, WORD, words, words, WORD, _FLAG]), SYMBOL
    )
    rank, dims, strides, new_rank, new_dims, new_strides, size, _ = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    expected = cgutils.alloca_once_value(builder, size)
    with _from_the_last(builder, rank) as axis:
        dim, stride = _at(builder, dims, axis), _at(builder, strides, axis)
        apart = builder.icmp_signed("!=", stride, builder.load(expected))
        with builder.if_then(builder.and_(apart, builder.icmp_signed("!=", dim, ONE))):
            builder.ret(_FLAG(0))
        builder.store(builder.mul(builder.load(expected), dim), expected)
    step = cgutils.alloca_once_value(builder, size)
    with _from_the_last(builder, new_rank) as axis:
        builder.store(builder.load(step), builder.gep(new_strides, [axis]))
        builder.store(builder.mul(builder.load(step), _at(builder, new_dims, axis)), step)
    builder.ret(_FLAG(1))
    return str(module)


class _from_the_last:
    """``with _from_the_last(builder, rank) as axis:`` emits a loop over the axes, the last one first."""

    def __init__(self, builder: Any, rank: Any) -> None:
        self._builder, self._rank = builder, rank
        self._loop = cgutils.for_range(builder, rank)

    def __enter__(self) -> Any:
        iteration = self._loop.__enter__()
        return self._builder.sub(self._builder.sub(self._rank, ONE), iteration.index)

    def __exit__(self, *exc: Any) -> None:
        self._loop.__exit__(*exc)


def _at(builder: Any, words: Any, position: Any) -> Any:
    return builder.load(builder.gep(words, [position]))
