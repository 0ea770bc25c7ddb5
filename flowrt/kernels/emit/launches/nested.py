"""The machine code of loops and branches: entries that run the launches in their blocks.

Between iterations a loop looks at the run's status and at the word by which others stop it, as the tape's loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from flowrt.kernels.composite import nested
from flowrt.kernels.emit.abi import emitted, pointer
from flowrt.kernels.emit.entries import RUN_WORDS, call_entry, object_code, set_word, word_at
from flowrt.kernels.emit.launches.atomic import load
from flowrt.kernels.emit.launches.tape import claim, leave, run_iteration
from flowrt.kernels.emit.lowering import Lowered

_BYTE = ir.IntType(8)

LIMIT, COUNT_SLOT, ROWS, REVERSE, CONDS, COND_TABLE, PRED_SLOT = (
    nested.LOOP.index(name) for name in ("limit", "count_slot", "rows", "reverse", "conds", "cond_table", "pred_slot")
)
BODIES, BODY_TABLE, CARRIED, CARRIED_TABLE, SCANNED, SCANNED_TABLE = (
    nested.LOOP.index(name) for name in ("bodies", "body_table", "carried", "carried_table", "scanned", "scanned_table")
)
STACKED, STACKED_TABLE, DONE_SLOT, CONSTANTS, CREW, TRACE, ITERATION = (
    nested.LOOP.index(name)
    for name in ("stacked", "stacked_table", "done_slot", "constants", "crew_slot", "trace_slot", "iteration_slot")
)
TRUES, FALSES, BRANCH_PRED, BRANCH_CONSTANTS, BRANCH_TRACE = (
    nested.BRANCH.index(name) for name in ("trues", "falses", "pred_slot", "constants", "trace_slot")
)
CARRIED_WORDS, ROW_WORDS, LAUNCH_WORDS, CONSTANT_WORDS = (
    nested.CARRIED_WORDS, nested.ROW_WORDS, nested.LAUNCH_WORDS, nested.CONSTANT_WORDS
)  # fmt: skip


@emitted(types.intp(types.intp))
def _byte_at(builder: Any, address: Any) -> Any:
    return builder.zext(builder.load(pointer(builder, address, _BYTE)), ir.IntType(64))


@emitted(types.void(types.intp, types.intp, types.intp))
def _copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    to, of = (pointer(builder, address, _BYTE) for address in (target, source))
    cgutils.raw_memcpy(builder, to, of, count, 1)


@emitted(types.void(types.intp, types.intp))
def _clear_bytes(builder: Any, target: Any, count: Any) -> None:
    cgutils.memset(builder, pointer(builder, target, _BYTE), count, 0)


@Lowered
def _address(bases: int, block: int, at: int) -> int:
    """The address that the slot and offset at two words of the block mean."""
    return int(word_at(bases, word_at(block, at)) + word_at(block, at + 1))


@Lowered
def stopped(bases: int) -> bool:
    """Whether a launch failed or others want an end: looked at anew even in a loop that writes nothing."""
    run = word_at(bases, 0)
    return bool(load(run, 0) != 0 or load(word_at(run, RUN_WORDS - 1), 0) != 0)


@Lowered
def _run(bases: int, block: int, at: int) -> int:
    """Run the launches of a table, whose length and place stand at two words of the block; how many have run: all of
    them, or those before the one that stopped."""
    count, table = word_at(block, at), block + 8 * word_at(block, at + 1)
    for number in range(count):
        call_entry(word_at(table, 0), bases, block + 8 * word_at(table, 1), 0, word_at(table, 2))
        if stopped(bases):
            return int(number)
        table += 8 * LAUNCH_WORDS
    return int(count)


@Lowered
def _point_at_constants(bases: int, block: int, at: int) -> None:
    count, table = word_at(block, at), block + 8 * word_at(block, at + 1)
    for _ in range(count):
        set_word(bases, word_at(table, 0), word_at(table, 1))
        table += 8 * CONSTANT_WORDS


@Lowered
def _point_at_rows(bases: int, block: int, at: int, row: int) -> None:
    count, table = word_at(block, at), block + 8 * word_at(block, at + 1)
    for _ in range(count):
        set_word(bases, word_at(table, 0), _address(bases, table, 1) + row * word_at(table, 3))
        table += 8 * ROW_WORDS


def _branch(bases: int, block: int, begin: int, end: int) -> None:
    _point_at_constants(bases, block, BRANCH_CONSTANTS)
    if _byte_at(_address(bases, block, BRANCH_PRED)):
        set_word(bases, word_at(block, BRANCH_TRACE), -1 - _run(bases, block, TRUES))
    else:
        set_word(bases, word_at(block, BRANCH_TRACE), 1 + _run(bases, block, FALSES))


@Lowered
def _most_iterations(bases: int, block: int) -> int:
    """How many iterations there are at most, or -1 where only the condition ends the loop."""
    limit, rows = word_at(block, LIMIT), word_at(block, ROWS)
    most = limit if rows < 0 or (0 <= limit < rows) else rows
    if word_at(block, COUNT_SLOT) >= 0:
        count = max(word_at(_address(bases, block, COUNT_SLOT), 0), 0)
        most = count if most < 0 else min(count, most)
    return int(most)


@Lowered
def _begin(bases: int, block: int) -> None:
    count, table = word_at(block, CARRIED), block + 8 * word_at(block, CARRIED_TABLE)
    for _ in range(count):
        set_word(bases, word_at(table, 0), _address(bases, table, 2))
        table += 8 * CARRIED_WORDS


@Lowered
def _aim(bases: int, block: int, last: bool) -> None:
    """Have the next iteration write what it carries on to where it is to end, or to the other place."""
    count, table = word_at(block, CARRIED), block + 8 * word_at(block, CARRIED_TABLE)
    for _ in range(count):
        if word_at(table, 1) >= 0:
            set_word(bases, word_at(table, 1), _address(bases, table, 4 if last else 6))
        table += 8 * CARRIED_WORDS


@Lowered
def _carry_on(bases: int, block: int) -> None:
    count, table = word_at(block, CARRIED), block + 8 * word_at(block, CARRIED_TABLE)
    for _ in range(count):
        if word_at(table, 1) >= 0:
            set_word(bases, word_at(table, 0), word_at(bases, word_at(table, 1)))
        table += 8 * CARRIED_WORDS


@Lowered
def _end(bases: int, block: int, done: int) -> None:
    """Bring what was carried last to where it belongs; leave no row of a stack as it was found."""
    count, table = word_at(block, CARRIED), block + 8 * word_at(block, CARRIED_TABLE)
    for _ in range(count):
        present, out = word_at(bases, word_at(table, 0)), _address(bases, table, 4)
        if present != out:
            _copy_bytes(out, present, word_at(table, 8))
        table += 8 * CARRIED_WORDS
    count, table = word_at(block, STACKED), block + 8 * word_at(block, STACKED_TABLE)
    rows = max(word_at(block, ROWS), word_at(block, LIMIT))
    for _ in range(count if done < rows else 0):
        nbytes = word_at(table, 3)
        _clear_bytes(_address(bases, table, 1) + done * nbytes, (rows - done) * nbytes)
        table += 8 * ROW_WORDS
    set_word(_address(bases, block, DONE_SLOT), 0, done)


def _loop(bases: int, block: int, begin: int, end: int) -> None:
    most, reverse, conditional = _most_iterations(bases, block), word_at(block, REVERSE), word_at(block, PRED_SLOT) >= 0
    _point_at_constants(bases, block, CONSTANTS)
    _begin(bases, block)
    crew, launches, done, reached = word_at(bases, word_at(block, CREW)), word_at(block, BODIES), 0, 0
    slot = claim(crew) if crew != 0 else 0
    set_word(bases, word_at(block, TRACE), 0)
    while (most < 0 or done < most) and not stopped(bases):
        if conditional:
            reached = -1 - _run(bases, block, CONDS)
            if stopped(bases) or not _byte_at(_address(bases, block, PRED_SLOT)):
                break
        row = most - 1 - done if reverse else done
        _point_at_rows(bases, block, SCANNED, row)
        _point_at_rows(bases, block, STACKED, row)
        _aim(bases, block, ((most - done) & 1) == 1)
        reached = run_iteration(crew, slot, bases) if crew != 0 else _run(bases, block, BODIES)
        if reached < launches:
            reached += 1
            break
        _carry_on(bases, block)
        reached = 0
        done += 1
    if crew != 0:
        leave(crew, slot, done)
    if not stopped(bases):
        _end(bases, block, done)
    else:
        set_word(bases, word_at(block, TRACE), reached)
        set_word(bases, word_at(block, ITERATION), done)


ENTRIES: dict[str, Callable[[int, int, int, int], None]] = {"loop": _loop, "cond": _branch}


def emit_nested(kind: str, symbol: str) -> bytes:
    """The object code of the entry that runs loops or branches."""
    return object_code(ENTRIES[kind], symbol)
