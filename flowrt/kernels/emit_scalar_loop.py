"""The machine code of loops of scalars: everything a turn touches is in registers.

The run's status and the word by which others stop it are looked at every `PATIENCE` turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import numpy_support

from flowrt.kernels.abi import WORD, pointer, word
from flowrt.kernels.compose import composed
from flowrt.kernels.emit import bind_helpers, object_code, set_word, word_at
from flowrt.kernels.emit_nested import stopped
from flowrt.kernels.scalar_loop import COUNT, DONE, LIMIT, OPERANDS, REVERSE, ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.kernels.scalar_loop import ScalarProgram

PATIENCE = 1 << 16


def _place(builder: Any, bases: Any, block: Any, at: int, row: Any, kind: Any, context: Any) -> Any:
    """A pointer to the scalar, or to the entry ``row``, of what lies at the slot and offset at word ``at``."""
    base = builder.load(builder.gep(pointer(builder, bases, WORD), [word(builder, block, at)]))
    start = pointer(builder, builder.add(base, word(builder, block, at + 1)), context.get_data_type(kind))
    return builder.gep(start, [row])


def _loads(dtypes: Sequence[Any], at: int, constants: int = 0) -> Any:
    """An intrinsic (bases, block, row) → the scalars at word ``at`` on, the last ``constants`` in the block itself."""
    kinds = [numpy_support.from_dtype(np.dtype(d)) for d in dtypes]
    answer = types.Tuple(kinds)

    @intrinsic
    def load(typing_context: Any, bases: Any, block: Any, row: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, row = args
            operands = len(kinds) - constants
            found = []
            for i, kind in enumerate(kinds):
                if i < operands:
                    place = _place(builder, bases, block, at + 2 * i, row, kind, context)
                else:
                    words = pointer(builder, block, WORD)
                    spot = builder.gep(words, [context.get_constant(types.intp, at + operands + i)])
                    place = builder.bitcast(spot, context.get_data_type(kind).as_pointer())
                found.append(context.unpack_value(builder, kind, place))
            return context.make_tuple(builder, answer, found)

        return answer(types.intp, types.intp, types.intp), codegen

    return load


def _stores(dtypes: Sequence[Any], at: int) -> Any:
    """An intrinsic (bases, block, row, values) that stores the scalars at word ``at`` on."""
    kinds = [numpy_support.from_dtype(np.dtype(d)) for d in dtypes]

    @intrinsic
    def store(typing_context: Any, bases: Any, block: Any, row: Any, values: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bases, block, row, values = args
            for i, value in enumerate(cgutils.unpack_tuple(builder, values) if kinds else ()):
                place = _place(builder, bases, block, at + 2 * i, row, kinds[i], context)
                context.pack_value(builder, kinds[i], value, place)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, values), codegen

    return store


def _splits(carried: int) -> tuple[Any, Any]:
    """Intrinsics that answer the first ``carried`` entries of a tuple, and the others."""

    def part(take: slice) -> Any:
        @intrinsic
        def split(typing_context: Any, values: Any) -> Any:
            answer = types.Tuple(values.types[take])

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                items = cgutils.unpack_tuple(builder, args[0]) if len(values.types) else []
                return context.make_tuple(builder, answer, items[take])

            return answer(values), codegen

        return split

    return part(slice(0, carried)), part(slice(carried, None))


@intrinsic
def _always(typing_context: Any, values: Any) -> Any:
    answer = types.Tuple([types.boolean])

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, answer, [cgutils.true_bit])

    return answer(values), codegen


def emit_scalar_loop(program: ScalarProgram, symbol: str) -> bytes:
    """The object code of the entry that runs loops of that program."""
    bind_helpers()
    body, carried, scanned = program.body, program.carried, program.scanned
    dtypes, results = body.dtypes, [body.dtypes[i] for i in body.results]
    out = OPERANDS + 2 * carried
    rows = out + 2 * carried
    stacks = rows + 2 * scanned
    rest = stacks + 2 * program.stacked
    load_state = _loads(dtypes[:carried], OPERANDS)
    load_rows = _loads(dtypes[carried : carried + scanned], rows)
    load_rest = _loads(dtypes[carried + scanned : len(body.inputs)], rest, program.constants)
    store_state, store_stacks = _stores(results[:carried], out), _stores(results[carried:], stacks)
    first_part, last_part = _splits(carried)
    turn = composed(body)
    goes_on = _always if program.cond is None else composed(program.cond)

    def entry(bases: int, block: int, begin: int, end: int) -> None:
        limit, length, reverse = word_at(block, LIMIT), word_at(block, ROWS), word_at(block, REVERSE)
        most = limit if length < 0 or 0 <= limit < length else length
        if word_at(block, COUNT) >= 0:
            count = max(word_at(word_at(bases, word_at(block, COUNT)) + word_at(block, COUNT + 1), 0), 0)
            most = count if most < 0 else min(count, most)
        rest = load_rest(bases, block, 0)
        state = load_state(bases, block, 0)
        done, going = 0, True
        while going:
            if stopped(bases):
                return
            until = done + PATIENCE
            if 0 <= most < until:
                until = most
                going = False
            while done < until:
                if not goes_on(state + rest)[0]:
                    going = False
                    break
                row = most - 1 - done if reverse else done
                answers = turn(state + load_rows(bases, block, row) + rest)
                state = first_part(answers)
                store_stacks(bases, block, row, last_part(answers))
                done += 1
        store_state(bases, block, 0, state)
        set_word(word_at(bases, word_at(block, DONE)) + word_at(block, DONE + 1), 0, done)

    return object_code(entry, symbol)
