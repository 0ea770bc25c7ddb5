"""The machine code behind `direct`: a C function of Python's that checks arguments, runs a tape and makes its outputs.

It reads `direct`'s words and the fields of NumPy arrays, and calls Python and NumPy by the addresses it finds there, so
that the object itself refers to neither. Python calls it with the GIL held. What could let other Python code run, an
allocation that is counted or tracked by the garbage collector, is done first; then the plan is *claimed*: it is seen
that nothing stands in the way, and marked as run by and its variables as held, in one go under the GIL. From there to
the marks' removal, which is one go as well, the plan's cells and the variables are this call's own, so that it may let
the GIL go while the tape runs. Whatever it uses meanwhile it keeps a reference to.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from flowrt.kernels.emit.abi import emitted, pointer
from flowrt.kernels.emit.entries import set_word, word_at
from flowrt.kernels.emit.lowering import Lowered, linked_object
from flowrt.kernels.run import direct as at

_WORD = ir.IntType(64)
_NOT_RUN = -1  # instead of an answer
_REACHED, _STATUS, _NUMBER, _ERROR = 0, 1, 2, 3  # what is noted of a run; the last is three words
_yield = types.ExternalFunction("sched_yield", types.int32())
_this_thread = types.ExternalFunction("pthread_self", types.intp())
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


@emitted(types.intp(types.intp))
def _int_at(builder: Any, address: Any) -> Any:
    """C's ``int`` at an address."""
    return builder.sext(builder.load(pointer(builder, address, ir.IntType(32))), _WORD)


def stack(count: int) -> Any:
    """A function of the address of so many words that live as long as the call, and hold nothing yet."""

    @emitted(types.intp())
    def words(builder: Any) -> Any:
        with builder.goto_entry_block():  # unlike Numba's own `alloca_once` this fills them with no zeros
            return builder.ptrtoint(builder.alloca(ir.ArrayType(_WORD, count)), _WORD)

    return words


room_for_outputs, room_for_notes = stack(at.MOST_OUTPUTS), stack(_ERROR + 3)


def _fits(head: int, record: int, value: int) -> Any:
    """Whether ``value`` is a plain array of just the dtype and shape that the record says, aligned and in C order."""
    if word_at(value, _OBJECT_TYPE) != word_at(head, at.ARRAY_TYPE) or word_at(value, _DTYPE) != word_at(record, 0):
        return False
    rank, dims = word_at(record, at.RANK), word_at(value, _DIMS)
    if _int_at(value + at.ARRAY_RANK) != rank or _int_at(value + at.ARRAY_FLAGS) & at.IN_ORDER != at.IN_ORDER:
        return False
    for axis in range(rank):  # noqa: SIM110 (no generators here)
        if word_at(dims, axis) != word_at(record, at.DIMS + axis):
            return False
    return True


def _all_fit(head: int, plan: int, values: int, count: int) -> Any:
    if count != word_at(plan, at.ARGUMENTS):
        return False
    record = plan + 8 * at.RECORDS
    for position in range(count):
        if not fits(head, record, word_at(values, position)):
            return False
        record += 8 * (at.DIMS + word_at(record, at.RANK))
    return True


def _past(record: int, count: int) -> Any:
    """What follows so many records."""
    for _ in range(count):
        record += 8 * (at.DIMS + word_at(record, at.RANK))
    return record


def _make(head: int, plan: int, made: int) -> Any:
    """New arrays for the outputs, put down at ``made``; False, none of them and Python's error where there is one."""
    record = past(plan + 8 * at.RECORDS, word_at(plan, at.ARGUMENTS))
    for number in range(word_at(plan, at.OUTPUTS)):
        dtype, rank, maker = word_at(record, at.DTYPE), word_at(record, at.RANK), word_at(record, at.MAKER)
        if maker != 0:
            array = call(word_at(head, at.CALL), (maker, made, 0, 0))
        else:
            call(word_at(head, at.RETAIN), (dtype,))  # the new array takes the reference
            dims = record + 8 * at.DIMS
            array = call(word_at(head, at.NEW_ARRAY), (word_at(head, at.ARRAY_TYPE), dtype, rank, dims, 0, 0, 0, 0))
        if array == 0:
            let_go(head, made, number)
            return False
        set_word(made, number, array)
        record += 8 * (at.DIMS + rank)
    return True


def _let_go(head: int, made: int, count: int) -> None:
    for number in range(count):
        call(word_at(head, at.RELEASE), (word_at(made, number),))


def _claim(head: int, plan: int) -> Any:
    """Have the plan and its variables for this call alone; False, and nothing was done, where that cannot be now."""
    held, together = word_at(plan, at.HELD), word_at(plan, at.TOGETHER)
    if word_at(plan, at.BUSY) != 0 or word_at(word_at(plan, at.GATE), 0) == 0:
        return False
    if word_at(held, at.TAKING) != 0 or word_at(held, at.WAITING) != 0 or word_at(together, at.BLOCKED) != 0:
        return False
    if word_at(held, at.CHANGES_WORD) != word_at(plan, at.CHANGES):
        return False
    for number in range(word_at(together, at.RIVALS)):
        if word_at(word_at(word_at(together, at.RIVALS_AT), number), at.HOLDERS) != 0:
            return False
    set_word(together, at.HOLDERS, word_at(together, at.HOLDERS) + 1)
    call(word_at(head, at.RETAIN), (word_at(plan, at.MEMORY),))  # should someone reset the variables meanwhile
    set_word(plan, at.BUSY, _this_thread())
    return True


def _give_back(head: int, plan: int, noted: int) -> Any:
    """Undo a claim; False where an error of Python's came between."""
    held, together = word_at(plan, at.HELD), word_at(plan, at.TOGETHER)
    while word_at(held, at.TAKING) != 0:  # someone is at the marks: not for long
        state = call(word_at(head, at.LET_OTHERS), (0,))
        _yield()
        call(word_at(head, at.RESUME), (state,))
    set_word(together, at.HOLDERS, word_at(together, at.HOLDERS) - 1)
    waiting = word_at(held, at.WAITING)
    set_word(plan, at.BUSY, 0)
    call(word_at(head, at.RELEASE), (word_at(plan, at.MEMORY),))
    return waiting == 0 or granted(head, plan, noted)


def _granted(head: int, plan: int, noted: int) -> Any:
    """Tell those who wait; False with Python's error. An interrupt may come between: they are told all the same."""
    answer = call(word_at(head, at.CALL), (word_at(plan, at.GRANT), noted, 0, 0))
    if answer != 0:
        call(word_at(head, at.RELEASE), (answer,))
        return True
    error = noted + 8 * _ERROR
    call(word_at(head, at.FETCH_ERROR), (error, error + 8, error + 16))
    answer = call(word_at(head, at.CALL), (word_at(plan, at.GRANT), noted, 0, 0))
    if answer != 0:
        call(word_at(head, at.RELEASE), (answer,))
    call(word_at(head, at.RESTORE_ERROR), (word_at(error, 0), word_at(error, 1), word_at(error, 2)))
    return False


def _put(record: int, values: int, count: int) -> Any:
    """Put the addresses of arrays where their records say; answers what follows the records."""
    for position in range(count):
        cell = word_at(record, at.CELL)
        if cell != 0:
            set_word(cell, 0, word_at(word_at(values, position), _DATA))
        record += 8 * (at.DIMS + word_at(record, at.RANK))
    return record


def _run(head: int, plan: int, values: int, made: int, noted: int) -> None:
    """Run the tape of a claimed plan under the next number, and note how far it came."""
    put(put(plan + 8 * at.RECORDS, values, word_at(plan, at.ARGUMENTS)), made, word_at(plan, at.OUTPUTS))
    integer = call(word_at(head, at.NEXT), (word_at(plan, at.COUNTER),))
    number = call(word_at(head, at.AS_INT), (integer,))
    call(word_at(head, at.RELEASE), (integer,))
    span, words, lets_others = word_at(plan, at.SPAN), word_at(plan, at.WORDS), word_at(plan, at.LETS_OTHERS)
    set_word(span, 0, 0)
    set_word(span, 1, word_at(plan, at.LAUNCHES))
    set_word(words, at.STATUS, 0)
    set_word(words, at.STEP, word_at(word_at(plan, at.BASE), 0) + number)
    state = call(word_at(head, at.LET_OTHERS), (0,)) if lets_others != 0 else 0
    given = plan + 8 * at.GIVEN
    call(word_at(plan, at.LOOP), (word_at(given, 0), word_at(given, 1), word_at(given, 2), 0))
    if lets_others != 0:
        call(word_at(head, at.RESUME), (state,))
    set_word(noted, _REACHED, word_at(span, 0))
    set_word(noted, _STATUS, word_at(words, at.STATUS))
    set_word(noted, _NUMBER, word_at(words, at.STEP))


def _fail(head: int, plan: int, noted: int) -> Any:
    """Have Python raise for the node that the tape stopped at."""
    for place in range(_ERROR):
        set_word(noted, place, call(word_at(head, at.INTEGER), (word_at(noted, place),)))
    answer = call(word_at(head, at.CALL), (word_at(plan, at.FAIL), noted, _ERROR, 0))
    let_go(head, noted, _ERROR)
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


def _planned(head: int, plan: int, values: int, made: int) -> Any:
    """The answer by a plan that the arguments fit, 0 with Python's error, or `_NOT_RUN`."""
    box, noted = 0, room_for_notes()
    if word_at(head, at.NEW_BOX) != 0:
        box = call(word_at(head, at.NEW_BOX), (word_at(head, at.LEAVES),))
        if box == 0:
            return 0
    if not make(head, plan, made):
        put_away(head, box, made, 0)
        return 0
    if not claim(head, plan):
        put_away(head, box, made, word_at(plan, at.OUTPUTS))
        return _NOT_RUN
    run(head, plan, values, made, noted)
    undisturbed = give_back(head, plan, noted)
    if not undisturbed or word_at(noted, _REACHED) != word_at(plan, at.LAUNCHES):
        put_away(head, box, made, word_at(plan, at.OUTPUTS))
        return fail(head, plan, noted) if undisturbed else 0
    return leaf(head, made, 0) if box == 0 else fill(head, box, made)


def _put_away(head: int, box: int, made: int, count: int) -> None:
    let_go(head, made, count)
    if box != 0:
        call(word_at(head, at.RELEASE), (box,))


def _direct(self: int, values: int, count: int, names: int) -> Any:
    head, made = word_at(self, _DATA), room_for_outputs()
    answer = _NOT_RUN
    for place in range(at.MOST_PLANS if names == 0 else 0):  # what is given by keyword is put in order elsewhere
        chosen = call(word_at(head, at.GET_LIST), (word_at(head, at.CHOICE), place))
        plan = word_at(call(word_at(head, at.GET_TUPLE), (chosen, 0)), _DATA)
        if all_fit(head, plan, values, count):
            call(word_at(head, at.RETAIN), (chosen,))  # others may be chosen meanwhile
            answer = planned(head, plan, values, made)
            call(word_at(head, at.RELEASE), (chosen,))
            break
    if answer == _NOT_RUN:
        return call(word_at(head, at.CALL), (word_at(head, at.FALLBACK), values, count, names))
    return answer


fits, past, let_go, leaf, put = (Lowered(function) for function in (_fits, _past, _let_go, _leaf, _put))
all_fit, make, granted, run, fail, fill, put_away = (
    Lowered(function) for function in (_all_fit, _make, _granted, _run, _fail, _fill, _put_away)
)
claim, give_back, planned = (Lowered(function) for function in (_claim, _give_back, _planned))


def emit_direct(symbol: str) -> bytes:
    """The object code of the C function ``symbol(self, values, count, names)``, of Python's kind
    METH_FASTCALL | METH_KEYWORDS.
    """
    signature = types.intp(types.intp, types.intp, types.intp, types.intp)
    return linked_object(_direct, signature, symbol, None)
