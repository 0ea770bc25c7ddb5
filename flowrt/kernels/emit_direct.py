"""The machine code behind `direct`: a C function of Python's that checks arguments, runs a tape and makes its outputs.

It reads `direct`'s words and the fields of NumPy arrays, and calls Python and NumPy by the addresses it finds there, so
that the object itself refers to neither. Python calls it with the GIL held, and it keeps it: no other Python code runs
from the moment a plan is chosen to the moment its outputs are made, so that the plan's cells are its own. What could
run other code, an allocation of something that the garbage collector tracks, is done before that.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from flowrt.kernels import direct as at
from flowrt.kernels.abi import OPTIONS
from flowrt.kernels.emit import sealed, set_word, unguarded, word_at

_WORD = ir.IntType(64)
_OBJECT_TYPE = 1  # which word of an object is its type
_DATA, _DIMS, _DTYPE = at.ARRAY_DATA // 8, at.ARRAY_DIMS // 8, at.ARRAY_DTYPE // 8


@intrinsic
def call(typing_context: Any, function: Any, words: Any) -> Any:
    """Call the C function at an address with a tuple of words; answers its word.

    An ``int`` of C's is passed as a word too: callees read its low half from where a word would lie.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(_WORD, [_WORD] * len(given))
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)

    return types.intp(types.intp, words), codegen


@intrinsic
def _int_at(typing_context: Any, address: Any) -> Any:
    """C's ``int`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(pointer), _WORD)

    return types.intp(types.intp), codegen


@intrinsic
def stack_words(typing_context: Any) -> Any:
    """The address of `direct.MOST_OUTPUTS` words that live as long as the call."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = cgutils.alloca_once(builder, ir.ArrayType(_WORD, at.MOST_OUTPUTS))
        return builder.ptrtoint(words, _WORD)

    return types.intp(), codegen


def _fits(head: int, record: int, value: int) -> Any:
    """Whether ``value`` is a plain array of just the dtype and shape that the record says, aligned and in C order."""
    if word_at(value, _OBJECT_TYPE) != word_at(head, at.ARRAY_TYPE) or word_at(value, _DTYPE) != word_at(record, 0):
        return False
    rank, dims = word_at(record, 1), word_at(value, _DIMS)
    if _int_at(value + at.ARRAY_RANK) != rank or _int_at(value + at.ARRAY_FLAGS) & at.IN_ORDER != at.IN_ORDER:
        return False
    for axis in range(rank):  # noqa: SIM110 (no generators here)
        if word_at(dims, axis) != word_at(record, at.DIMS + axis):
            return False
    return True


def _enter(head: int, plan: int, values: int, count: int, made: int) -> Any:
    """Put the arguments and new outputs where the tape wants them; False if the arguments or the times do not fit."""
    held = word_at(plan, at.HELD)
    if count != word_at(plan, at.ARGUMENTS) or word_at(word_at(plan, at.GATE), 0) == 0:
        return False
    if word_at(held, 0) != 0 or word_at(held, 1) != word_at(plan, at.CHANGES):
        return False
    record = plan + 8 * at.RECORDS
    for position in range(count):
        value = word_at(values, position)
        if not fits(head, record, value):
            return False
        cell = word_at(record, 2)
        if cell != 0:
            set_word(cell, 0, word_at(value, _DATA))
        record += 8 * (at.DIMS + word_at(record, 1))
    return make(head, record, word_at(plan, at.OUTPUTS), made)


def _make(head: int, record: int, count: int, made: int) -> Any:
    """New arrays for the outputs, put down at ``made``; False, and none of them, where there is no memory."""
    for number in range(count):
        dtype, rank = word_at(record, 0), word_at(record, 1)
        call(word_at(head, at.RETAIN), (dtype,))  # the new array takes the reference
        dims = record + 8 * at.DIMS
        array = call(word_at(head, at.NEW_ARRAY), (word_at(head, at.ARRAY_TYPE), dtype, rank, dims, 0, 0, 0, 0))
        if array == 0:
            call(word_at(head, at.CLEAR), (0,))  # whoever is asked instead says it better
            let_go(head, made, number)
            return False
        set_word(made, number, array)
        set_word(word_at(record, 2), 0, word_at(array, _DATA))
        record += 8 * (at.DIMS + rank)
    return True


def _run(head: int, plan: int) -> Any:
    """Run the tape under the next number; whether it came to its end."""
    integer = call(word_at(head, at.NEXT), (word_at(plan, at.COUNTER),))
    number = call(word_at(head, at.AS_INT), (integer,))
    call(word_at(head, at.RELEASE), (integer,))
    span, words, launches = word_at(plan, at.SPAN), word_at(plan, at.WORDS), word_at(plan, at.LAUNCHES)
    set_word(span, 0, 0)
    set_word(span, 1, launches)
    set_word(words, at.STATUS, 0)
    set_word(words, at.STEP, word_at(word_at(plan, at.BASE), 0) + number)
    call(word_at(plan, at.LOOP), (word_at(plan, at.NODES), word_at(plan, at.BASES), span, 0))
    return word_at(span, 0) == launches


def _let_go(head: int, made: int, count: int) -> None:
    for number in range(count):
        call(word_at(head, at.RELEASE), (word_at(made, number),))


def _fail(head: int, plan: int, made: int) -> Any:
    """Have Python raise for the node that the tape stopped at."""
    let_go(head, made, word_at(plan, at.OUTPUTS))
    set_word(made, 0, call(word_at(head, at.INTEGER), (word_at(word_at(plan, at.SPAN), 0),)))
    set_word(made, 1, call(word_at(head, at.INTEGER), (word_at(word_at(plan, at.WORDS), at.STATUS),)))
    answer = call(word_at(head, at.CALL), (word_at(plan, at.FAIL), made, 2, 0))
    let_go(head, made, 2)
    return answer


def _leaf(head: int, made: int, number: int) -> Any:
    """A leaf of the answer: an array, a scalar for one without dimensions, None where an operation was fetched."""
    output = word_at(head, at.FIRST_LEAF + number)
    if output >= 0:
        return call(word_at(head, at.SCALAR), (word_at(made, output),))
    nothing = word_at(head, at.NONE)
    call(word_at(head, at.RETAIN), (nothing,))
    return nothing


def _fill(head: int, box: int, made: int) -> Any:
    """The answer of several leaves, in ``box`` or in the form that Python makes of it."""
    for number in range(word_at(head, at.LEAVES)):
        call(word_at(head, at.SET), (box, number, leaf(head, made, number)))
    if word_at(head, at.FINISH) == 0:
        return box
    set_word(made, 0, box)
    answer = call(word_at(head, at.CALL), (word_at(head, at.FINISH), made, 1, 0))
    call(word_at(head, at.RELEASE), (box,))
    return answer


def _direct(self: int, values: int, count: int) -> Any:
    head, made, box = word_at(self, _DATA), stack_words(), 0
    if word_at(head, at.NEW_BOX) != 0:
        box = call(word_at(head, at.NEW_BOX), (word_at(head, at.LEAVES),))
        if box == 0:
            return 0
    chosen = call(word_at(head, at.GET_LIST), (word_at(head, at.CHOICE), 0))
    plan = word_at(call(word_at(head, at.GET_TUPLE), (chosen, 0)), _DATA)
    if not enter(head, plan, values, count, made):
        if box != 0:
            call(word_at(head, at.RELEASE), (box,))
        return call(word_at(head, at.CALL), (word_at(head, at.FALLBACK), values, count, 0))
    if not run(head, plan):
        if box != 0:
            call(word_at(head, at.RELEASE), (box,))
        return fail(head, plan, made)
    return leaf(head, made, 0) if box == 0 else fill(head, box, made)


fits, let_go, run, leaf = (njit(function, **OPTIONS) for function in (_fits, _let_go, _run, _leaf))
make, fail, fill = (njit(function, **OPTIONS) for function in (_make, _fail, _fill))
enter = njit(_enter, **OPTIONS)


def emit_direct(symbol: str) -> bytes:
    """The object code of the C function ``symbol(self, values, count)``, of Python's kind METH_FASTCALL."""
    signature = types.intp(types.intp, types.intp, types.intp)
    inner = unguarded(_direct, signature)

    def outer(self: int, values: int, count: int) -> Any:
        return inner(self, values, count)

    return sealed(cfunc(signature, **OPTIONS)(outer), symbol)
