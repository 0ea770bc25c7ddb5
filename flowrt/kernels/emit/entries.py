"""From a kernel's Python function to machine code: imported, as Numba is, only when it must compile.

Every entry has the one ABI ``void(bases, block, begin, end)``. ``bases`` is the run's table of addresses; its slot 0
holds the run's words. ``block`` is int64 words: for each operand its slot in ``bases`` and its byte offset, then what
the form needs (dims; for SCALARS the odometer and strides), then the attribute words, and the sizes
and addresses of the code that the launch calls (`Call.tiles`). ``begin`` and ``end`` are the range of the application's
units to compute.

An object calls nothing of Python's or Numba's, so that it runs without the interpreter and loads without Numba. Where
a kernel raises, its entry sets the run's status instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import numpy_support
from numba.np.arrayobj import make_array, populate_array

from flowrt.kernels.emit.abi import ENTRY, emitted
from flowrt.kernels.emit.abi import WORD as _WORD
from flowrt.kernels.emit.abi import operand_address as _operand_address
from flowrt.kernels.emit.abi import pointer as _pointer
from flowrt.kernels.emit.abi import word as _word
from flowrt.kernels.emit.elementwise import scalar_loops
from flowrt.kernels.emit.halves import bind_conversions
from flowrt.kernels.emit.lowering import Lowered, bind, is_bound, linked_object
from flowrt.kernels.emit.reductions import bind_reductions
from flowrt.kernels.emit.rows import row_loops
from flowrt.kernels.emit.tile import implementation
from flowrt.kernels.language.composing import one_function
from flowrt.kernels.language.table import JITABLES, Form, RegisteredKernel
from flowrt.kernels.tiles.micro import STUBS

RUN_WORDS = 4
REDUCED = 2048  # entries that are combined with those of all operands while they are in a core's nearest cache
RAISED = 4  # of launch.FAILURES


def _array(context: Any, builder: Any, kind: Any, address: Any, dims: Sequence[Any]) -> Any:
    """A C-contiguous Numba array over memory that someone else owns."""
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides: list[Any] = []
    step = ir.Constant(_WORD, size)
    for dim in reversed(dims):
        strides.insert(0, step)
        step = builder.mul(step, dim)
    array = make_array(kind)(context, builder)
    data = builder.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data=data, shape=list(dims), strides=strides, itemsize=ir.Constant(_WORD, size), meminfo=None)
    return array._getvalue()


def _arguments(kernel: RegisteredKernel, dtypes: Sequence[Any], ranks: Sequence[int], words: str, guarded: int) -> Any:
    """An intrinsic (bases, block, begin, end) → the tuple of what the function of ``kernel`` takes."""
    kinds_of = zip(map(numpy_support.from_dtype, dtypes), ranks, strict=True)
    arrays = [types.Array(dtype, rank, "C", readonly=n < guarded) for n, (dtype, rank) in enumerate(kinds_of)]
    scalars = _word_kinds(iter(words))
    limits = [types.intp] * (2 if kernel.takes_range else 0)
    tail = [types.Array(types.int64, 1, "C")] if kernel.takes_run else []
    kinds = [*arrays, *scalars]
    cuts = [0, len(arrays), *([len(kinds) - words.count("t")] if kernel.takes_tiles else []), len(kinds)]
    heads = [types.Tuple(kinds[a:b]) for a, b in pairwise(cuts)] if kernel.takes_tuples else kinds
    answer = types.Tuple([*heads, *limits, *tail])

    @intrinsic
    def arguments(typing_context: Any, bases: Any, block: Any, begin: Any, end: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, *range_of_units = args
            position, items = 2 * len(arrays), []
            for i, kind in enumerate(arrays):
                dims = [_word(builder, block, position + d) for d in range(kind.ndim)]
                position += kind.ndim
                items.append(_array(context, builder, kind, _operand_address(builder, bases, block, i), dims))
            following = itertools.count(position)
            items += [_word_value(context, builder, kind, block, following) for kind in scalars]
            if kernel.takes_tuples:
                parts = [items[a:b] for a, b in pairwise(cuts)]
                items = [context.make_tuple(builder, kind, part) for kind, part in zip(heads, parts, strict=True)]
            items += range_of_units if limits else ()
            for kind in tail:
                address = builder.load(_pointer(builder, bases, _WORD))
                items.append(_array(context, builder, kind, address, [ir.Constant(_WORD, RUN_WORDS)]))
            return context.make_tuple(builder, answer, items)

        return answer(*ENTRY.args), codegen

    return arguments


def _word_kinds(words: Iterator[str]) -> list[Any]:
    """The types of the words, a letter each: floats, integers, and tuples of them in brackets."""
    kinds: list[Any] = []
    for letter in words:
        if letter == ")":
            break
        kinds.append(
            types.Tuple(_word_kinds(words)) if letter == "(" else types.float64 if letter == "f" else types.int64
        )
    return kinds


def _word_value(context: Any, builder: Any, kind: Any, block: Any, following: Iterator[int]) -> Any:
    """A word of that type, made of those of the block at the positions ``following``."""
    if isinstance(kind, types.BaseTuple):
        parts = [_word_value(context, builder, part, block, following) for part in kind]
        return context.make_tuple(builder, kind, parts)
    value = _word(builder, block, next(following))
    return builder.bitcast(value, ir.DoubleType()) if kind is types.float64 else value


@emitted(types.intp(types.intp, types.intp))
def word_at(builder: Any, address: Any, position: Any) -> Any:
    """The int64 at ``position`` of the words at ``address``."""
    return builder.load(builder.gep(_pointer(builder, address, _WORD), [position]))


def _reduction(function: Callable[..., Any], dtype: Any) -> Callable[..., None]:
    """An entry that combines any number of vectors into the first operand, pair by pair.

    Its block: how many inputs, the vectors' length, then slot and offset of the output and of each input. The range is
    one of the vectors' elements.
    """
    kind = types.Array(numpy_support.from_dtype(np.dtype(dtype)), 1, "C")
    combine = Lowered(function)

    @intrinsic
    def vector(typing_context: Any, bases: Any, block: Any, operand: Any, length: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, operand, length = args
            place = builder.add(builder.mul(operand, ir.Constant(_WORD, 2)), ir.Constant(_WORD, 2))
            words = builder.gep(_pointer(builder, block, _WORD), [place])
            base = builder.load(builder.gep(_pointer(builder, bases, _WORD), [builder.load(words)]))
            offset = builder.load(builder.gep(words, [ir.Constant(_WORD, 1)]))
            return _array(context, builder, kind, builder.add(base, offset), [length])

        return kind(types.intp, types.intp, types.intp, types.intp), codegen

    def entry(bases: int, block: int, begin: int, end: int) -> None:
        count, length = word_at(block, 0), word_at(block, 1)
        out, first = vector(bases, block, 0, length), vector(bases, block, 1, length)
        for start in range(begin, end, REDUCED):
            many = min(end - start, REDUCED)
            for i in range(many):
                out[np.uint64(start + i)] = first[np.uint64(start + i)]
            for number in range(2, count + 1):
                more = vector(bases, block, number, length)
                for i in range(many):
                    out[np.uint64(start + i)] = combine(out[np.uint64(start + i)], more[np.uint64(start + i)])

    return entry


def bind_helpers() -> None:
    """Let compiled kernels call the families' plain helpers, the reductions and the register tiles."""
    bind_conversions()
    for helper in JITABLES:
        if not is_bound(helper):
            bind(helper, Lowered(helper, inlined=True))
    for stub, made in STUBS.items():
        if not is_bound(stub):
            bind(stub, Lowered(_calling(implementation(made))))
    bind_reductions()


def _calling(code: Any) -> Callable[..., None]:
    return lambda like, words: code(like, words)


def emit(
    kernel: RegisteredKernel, dtypes: Sequence[Any], ranks: Sequence[int], words: str, guarded: int, symbol: str
) -> bytes:
    """The object code of one variant of ``kernel``, whose entry is named ``symbol``."""
    bind_helpers()
    if kernel.form is Form.ARRAYS:
        body = Lowered(kernel.function)
        arguments = _arguments(kernel, dtypes, ranks, words, guarded)

        def entry(bases: int, block: int, begin: int, end: int) -> None:
            body(*arguments(bases, block, begin, end))
    elif kernel.form is Form.REDUCE:
        entry = _reduction(kernel.function, dtypes[0])
    elif kernel.form is Form.ROWS:
        assert kernel.expression is not None
        rows = row_loops(kernel.expression, ranks)

        def entry(bases: int, block: int, begin: int, end: int) -> None:
            rows(bases, block, begin, end)
    else:
        scalars = scalar_loops(kernel.expression or one_function(kernel.function, dtypes, kernel.op), ranks)

        def entry(bases: int, block: int, begin: int, end: int) -> None:
            scalars(bases, block, begin, end)

    return object_code(entry, symbol)


@emitted(types.void(types.intp, types.intp, types.intp))
def set_word(builder: Any, address: Any, position: Any, value: Any) -> None:
    """Make ``value`` the int64 at ``position`` of the words at ``address``."""
    builder.store(value, builder.gep(_pointer(builder, address, _WORD), [position]))


@emitted(types.void(*[types.intp] * 5))
def call_entry(builder: Any, entry: Any, bases: Any, block: Any, begin: Any, end: Any) -> None:
    """Call the entry at an address for a range of its units."""
    kind = ir.FunctionType(ir.VoidType(), [_WORD] * 4)
    builder.call(_pointer(builder, entry, kind), [bases, block, begin, end])


def object_code(entry: Callable[..., None], symbol: str) -> bytes:
    """The object that holds ``entry`` under the name ``symbol``, and nothing else to be seen.

    Where it raises, it says so in the run's status.
    """
    return linked_object(entry, ENTRY, symbol, _say_raised)


def _say_raised(builder: Any, arguments: Sequence[Any]) -> None:
    run = builder.load(_pointer(builder, arguments[0], _WORD))
    builder.store(ir.Constant(_WORD, RAISED), _pointer(builder, run, _WORD))
