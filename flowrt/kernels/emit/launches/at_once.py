"""The machine code behind `at_once`: a C function of Python's that checks arrays, makes others and runs kernels.

As `emit.direct` does, it reads words and the fields of NumPy arrays, and calls Python and NumPy by the addresses it
finds there, with the GIL held, which it may let go while the kernels run. The bases, the run's words and the results'
addresses lie on its stack, and the arrays it was called with are its caller's until it answers.
"""

from __future__ import annotations

from typing import Any

from numba import types

from flowrt.kernels.emit.entries import call_entry, set_word, word_at
from flowrt.kernels.emit.launches.direct import call, fits, let_go, make, room_for_outputs, stack
from flowrt.kernels.emit.lowering import Lowered, linked_object
from flowrt.kernels.launch import RUN_WORDS, STATUS
from flowrt.kernels.run import at_once as here
from flowrt.kernels.run import direct as at

_DATA = at.ARRAY_DATA // 8
_SIZE = 2  # which word of a tuple is its length

_table = stack(here.MOST_SLOTS + RUN_WORDS)  # of bases, and the run's words behind it


def _fill(head: int, plan: int, values: int, table: int) -> Any:
    """Put the inputs' addresses into the table; False where an argument is no such array as it is to be."""
    record = plan + 8 * at.RECORDS
    for _ in range(word_at(plan, at.ARGUMENTS)):
        value = word_at(values, word_at(record, at.MAKER))
        if not fits(head, record, value):
            return False
        set_word(table, word_at(record, at.CELL), word_at(value, _DATA))
        record += 8 * (at.DIMS + word_at(record, at.RANK))
    pair = word_at(plan, here.FIXED_AT)
    for _ in range(word_at(plan, here.FIXED)):
        set_word(table, word_at(pair, 0), word_at(pair, 1))
        pair += 16
    return True


def _place(plan: int, made: int, table: int) -> None:
    """Put the addresses of the arrays that are made into the table."""
    record = plan + 8 * at.RECORDS
    for _ in range(word_at(plan, at.ARGUMENTS)):
        record += 8 * (at.DIMS + word_at(record, at.RANK))
    for number in range(word_at(plan, at.OUTPUTS)):
        set_word(table, word_at(record, at.CELL), word_at(word_at(made, number), _DATA))
        record += 8 * (at.DIMS + word_at(record, at.RANK))


def _run(head: int, plan: int, table: int) -> Any:
    """Run the kernels; answers the run's status."""
    lets_others = word_at(plan, at.LETS_OTHERS)
    state = call(word_at(head, at.LET_OTHERS), (0,)) if lets_others != 0 else 0
    step = word_at(plan, here.STEPS)
    for _ in range(word_at(plan, at.LAUNCHES)):
        call_entry(word_at(step, 0), table, word_at(step, 1), 0, word_at(step, 2))
        step += 24
    if lets_others != 0:
        call(word_at(head, at.RESUME), (state,))
    return word_at(word_at(table, 0), STATUS)


def _answer(head: int, plan: int, made: int) -> Any:
    """The outputs; scratch is let go."""
    count = word_at(plan, here.ANSWERS)
    let_go(head, made + 8 * count, word_at(plan, at.OUTPUTS) - count)
    if count == 1:
        return word_at(made, 0)
    box = call(word_at(head, at.NEW_BOX), (count,))
    if box == 0:
        let_go(head, made, count)
        return 0
    for number in range(count):
        call(word_at(head, at.SET), (box, number, word_at(made, number)))
    return box


def _not_done(head: int) -> Any:
    answer = word_at(head, here.NOT_DONE)
    call(word_at(head, at.RETAIN), (answer,))
    return answer


def _at_once(self: int, values: int, count: int, names: int) -> Any:
    head, table, made = word_at(self, _DATA), _table(), room_for_outputs()
    plan = head + 8 * at.FIRST_LEAF
    named = 0 if names == 0 else word_at(names, _SIZE)
    if count != word_at(plan, here.BY_POSITION) or named != word_at(plan, here.BY_NAME):
        return not_done(head)
    run = table + 8 * here.MOST_SLOTS
    set_word(table, 0, run)
    for number in range(RUN_WORDS):
        set_word(run, number, 0)
    if not fill(head, plan, values, table):
        return not_done(head)
    if not make(head, plan, made):
        return 0
    place(plan, made, table)
    if run_all(head, plan, table) != 0:
        let_go(head, made, word_at(plan, at.OUTPUTS))
        return not_done(head)
    return answer(head, plan, made)


fill, place, run_all, answer, not_done = (Lowered(function) for function in (_fill, _place, _run, _answer, _not_done))


def emit_at_once(symbol: str) -> bytes:
    """The object code of the C function ``symbol(self, values, count, names)``."""
    signature = types.intp(types.intp, types.intp, types.intp, types.intp)
    return linked_object(_at_once, signature, symbol, None)
