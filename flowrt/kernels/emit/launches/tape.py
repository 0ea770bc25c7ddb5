"""The loops that run tapes: one thread alone, and several that share one. Imported only where they must be compiled.

Law: nothing here waits for a thread that holds no chunk. A tape's tasks become *chunks*; those ready are offered in one
list, and whoever takes one, by one compare-and-swap of the slot's ticket, runs it: of the task's chunks the next in
its own part, so that in one launch after another a thread meets the same stretches of memory. Who finishes a task's
last chunk offers the tasks that waited for it alone. The caller goes on until all chunks are finished; helpers come and
go. After a failure the chunks left are taken and not run, so that every run ends in one way.

A helper with nothing to do watches the board for a while, then sleeps in a read of the crew's pipe, and is counted
among the sleepers: who offers chunks takes sleepers from the count and writes a byte for each.
"""

from __future__ import annotations

import time
from typing import Any

from llvmlite import ir
from numba import types

from flowrt.kernels.emit.abi import emitted
from flowrt.kernels.emit.entries import RUN_WORDS, call_entry, object_code, set_word, word_at
from flowrt.kernels.emit.launches.atomic import add, least, load, pause, replace, store
from flowrt.kernels.emit.lowering import Lowered
from flowrt.kernels.run import board as at

_WORD = ir.IntType(64)
_SPINS = 32  # pauses between two looks at the clock
_PATIENT = 256  # pauses before the core is offered to others
_SKIPPED, _DECIDED = 1 << 40, 1 << 41  # what was decided for a launch's chunks, beside how many are left

_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_yield = types.ExternalFunction("sched_yield", types.int32())
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_MONOTONIC = time.CLOCK_MONOTONIC


@emitted(types.intp())
def _two_words(builder: Any) -> Any:
    """The address of two words on this thread's stack."""
    with builder.goto_entry_block():
        place = builder.alloca(_WORD, 2)
    return builder.ptrtoint(place, _WORD)


@Lowered
def _now() -> Any:
    """Nanoseconds."""
    place = _two_words()
    _clock(_MONOTONIC, place)
    return word_at(place, 0) * 1_000_000_000 + word_at(place, 1)


@Lowered
def _recruit(board: int, wanted: int) -> Any:
    """Take up to ``wanted`` helpers from the sleepers' count."""
    many = load(board, at.ASLEEP)
    while many > 0:
        taken = min(many, wanted)
        seen = replace(board, at.ASLEEP, many, many - taken)
        if seen == many:
            return taken
        many = seen
    return 0


@Lowered
def _wake(board: int, wanted: int) -> None:
    taken = _recruit(board, min(wanted, 512))
    if taken > 0:
        _write(word_at(board, at.WRITE_END), board + 8 * at.BYTES, taken)


@Lowered
def _offer(board: int, slot: int, share: int, task: int) -> None:
    """Put a task's chunks in the list and wake who is wanted for them, or leave it to the caller."""
    entry = word_at(share, at.TASKS) + 8 * at.TASK_WORDS * task
    chunks, tasks = word_at(entry, at.TASK_CHUNKS), word_at(share, at.TASK_COUNT)
    if word_at(entry, at.TASK_OWN) != 0:  # such tasks wait for one another
        store(share, at.OWN, task + 1)
        return
    ticket = add(slot, 0, chunks << at.COUNT_BITS)
    first, taken = (ticket >> at.COUNT_BITS) & at.COUNT_MASK, ticket & at.COUNT_MASK
    offered = at.COUNTERS_END + at.TASK_COUNTERS * tasks + first
    for chunk in range(chunks):
        store(share, offered + chunk, task + 1)
    waiting = first + chunks - taken
    if waiting > 1 and load(board, at.ASLEEP) > 0:
        _wake(board, waiting - 1)


@Lowered
def _take(slot: int) -> Any:
    """The ticket with which a chunk of the slot was taken; -1 where none is offered."""
    ticket = load(slot, 0)
    while (ticket & at.COUNT_MASK) != ((ticket >> at.COUNT_BITS) & at.COUNT_MASK):
        seen = replace(slot, 0, ticket, ticket + 1)
        if seen == ticket:
            return ticket
        ticket = seen
    return -1


@Lowered
def _limit(units: int, chunk: int, chunks: int) -> Any:
    """The first unit of a chunk."""
    limit = units // chunks * chunk + units % chunks * chunk // chunks
    if units >= chunks * at.EVEN_UNITS and chunk < chunks:
        limit -= limit % at.ALIGNED_UNITS
    return limit


@Lowered
def _stamp(stamps: int, launch: int, words: int, began: int, ended: int) -> None:
    """Write down what the thread of these words ran, if there is room."""
    number = add(stamps, at.STAMPED, 1)
    if number < word_at(stamps, at.MOST_STAMPS):
        first = at.FIRST_STAMP + at.STAMP_FIELDS * number
        set_word(stamps, first + at.STAMP_LAUNCH, launch)
        set_word(stamps, first + at.STAMP_WORDS, words)
        set_word(stamps, first + at.STAMP_BEGAN, began)
        set_word(stamps, first + at.STAMP_ENDED, ended)


@Lowered
def _run_launch(share: int, words: int, launch: int, begin: int, end: int) -> None:
    """Run a range of a launch on the bases that follow these words, and tell of a failure."""
    node, times = word_at(share, at.NODES) + 8 * at.NODE_WORDS * launch, word_at(share, at.TIMES)
    began = _now() if times != 0 else 0
    call_entry(word_at(node, 0), words + 8 * RUN_WORDS, word_at(node, 1), begin, end)
    if times != 0:
        ended, stamps = _now(), word_at(share, at.STAMPS)
        add(times, launch, ended - began)
        if stamps != 0:
            _stamp(stamps, launch, words, began, ended)
    status, others = word_at(words, 0), word_at(words, RUN_WORDS - 1)
    if status != 0 or load(others, 0) != 0:
        least(share, at.FAILED, (launch << at.STATUS_BITS) | (status & 0xFFFFFFFF))


@Lowered
def _run_task(share: int, words: int, entry: int, chunk: int) -> None:
    first, stop, chunks = (word_at(entry, at.TASK_FIRST), word_at(entry, at.TASK_STOP), word_at(entry, at.TASK_CHUNKS))
    nodes = word_at(share, at.NODES)
    if chunks > 1:
        units = word_at(nodes, at.NODE_WORDS * first + 2)
        _run_launch(share, words, first, _limit(units, chunk, chunks), _limit(units, chunk + 1, chunks))
        return
    for launch in range(first, stop):
        _run_launch(share, words, launch, 0, word_at(nodes, at.NODE_WORDS * launch + 2))
        if load(share, at.FAILED) != at.NOTHING_FAILED:
            return


@Lowered
def _may_run(share: int, left: int, chunks: int) -> Any:
    """Whether a chunk is to be run: all of a launch's chunks or none, so that what it writes is never half-written.

    Whoever comes first decides for the launch, by whether something has failed until then.
    """
    healthy = load(share, at.FAILED) == at.NOTHING_FAILED
    if chunks == 1:
        return healthy
    state = load(share, left)
    while state < _SKIPPED:
        seen = replace(share, left, state, state | (_DECIDED if healthy else _SKIPPED))
        if seen == state:
            return healthy
        state = seen
    return state >= _DECIDED


@Lowered
def _pick(board: int, share: int, begun: int, chunks: int, lane: int) -> Any:
    """The chunk that ``lane`` is to run of a task of which it took one: the next in its own part, then of others'."""
    if chunks == 1:
        return 0
    if chunks > at.MOST_PLACES:
        return add(share, begun, 1)
    first, state = chunks * lane // word_at(board, at.THREADS), load(share, begun)
    while True:
        chunk = first
        while (state >> chunk) & 1:
            chunk = chunk + 1 if chunk + 1 < chunks else 0
        seen = replace(share, begun, state, state | (1 << chunk))
        if seen == state:
            return chunk
        state = seen


@Lowered
def _run_chunk(board: int, slot: int, share: int, words: int, ticket: int, lane: int) -> None:
    """Run the chunk that ``lane`` took with ``ticket``, and offer what has waited for it alone."""
    tasks = word_at(share, at.TASK_COUNT)
    place = at.COUNTERS_END + at.TASK_COUNTERS * tasks + (ticket & at.COUNT_MASK)
    task = load(share, place) - 1
    while task < 0:  # whoever offers it has yet to write it down
        pause()
        task = load(share, place) - 1
    entry = word_at(share, at.TASKS) + 8 * at.TASK_WORDS * task
    counters = at.COUNTERS_END + at.TASK_COUNTERS * task
    chunks, left = word_at(entry, at.TASK_CHUNKS), counters + at.LEFT
    chunk = _pick(board, share, counters + at.BEGUN, chunks, lane)
    if _may_run(share, left, chunks):
        _run_task(share, words, entry, chunk)
    if chunks == 1 or (add(share, left, -1) & at.COUNT_MASK) == 1:
        _offer_followers(board, slot, share, entry)
    add(share, at.FINISHED, 1)  # from here on the share may be gone


@Lowered
def _offer_followers(board: int, slot: int, share: int, entry: int) -> None:
    """Offer what has waited for a task alone, now that it is done."""
    followers = word_at(share, at.FOLLOWERS)
    for number in range(word_at(entry, at.FOLLOWERS_FROM), word_at(entry, at.FOLLOWERS_STOP)):
        follower = word_at(followers, number)
        if add(share, at.COUNTERS_END + at.TASK_COUNTERS * follower + at.WAITS, -1) == 1:
            _offer(board, slot, share, follower)


@Lowered
def _run_own(board: int, slot: int, share: int, words: int, task: int) -> None:
    """Run a task that is the caller's own."""
    entry = word_at(share, at.TASKS) + 8 * at.TASK_WORDS * task
    store(share, at.OWN, 0)
    if load(share, at.FAILED) == at.NOTHING_FAILED:
        _run_task(share, words, entry, 0)
    _offer_followers(board, slot, share, entry)
    add(share, at.FINISHED, 1)


@Lowered
def _begin(share: int) -> None:
    """Set a share's counters for a new run."""
    tasks, count = word_at(share, at.TASKS), word_at(share, at.TASK_COUNT)
    for task in range(count):
        counters = at.COUNTERS_END + at.TASK_COUNTERS * task
        set_word(share, counters + at.WAITS, word_at(tasks, at.TASK_WORDS * task + at.TASK_WAITS))
        set_word(share, counters + at.LEFT, word_at(tasks, at.TASK_WORDS * task + at.TASK_CHUNKS))
        set_word(share, counters + at.BEGUN, 0)
    for chunk in range(word_at(share, at.CHUNKS)):
        set_word(share, at.COUNTERS_END + at.TASK_COUNTERS * count + chunk, 0)
    set_word(share, at.FAILED, at.NOTHING_FAILED)
    set_word(share, at.FINISHED, 0)
    set_word(share, at.OWN, 0)


@Lowered
def _copy_row(share: int, lane: int) -> Any:
    """A helper's own words and bases, made from the caller's."""
    size = word_at(share, at.ROW_WORDS)
    own = word_at(share, at.ROWS) + 8 * size * (lane - 1)
    caller = word_at(share, at.ROW)
    for position in range(size):
        set_word(own, position, word_at(caller, position))
    set_word(own, 0, 0)
    set_word(own, RUN_WORDS, own)
    local = word_at(share, at.LOCAL) + (lane - 1) * word_at(share, at.LOCAL_BYTES)
    set_word(own, RUN_WORDS + at.LOCAL_BASE, local)
    return own


@Lowered
def _free_slot(board: int) -> Any:
    """A slot that is this run's from now on; 0 where others have them all."""
    for number in range(word_at(board, at.SLOTS)):
        slot = board + 8 * (at.SLOT + at.SLOT_WORDS * number)
        if load(slot, at.TAKEN) == 0 and replace(slot, at.TAKEN, 0, 1) == 0:
            return slot
    return 0


@Lowered
def _run_shared(board: int, slot: int, share: int) -> None:
    """Run the launches of a tape, or of one iteration of a loop, together with whoever comes."""
    _begin(share)
    words, total = word_at(share, at.ROW), word_at(share, at.CHUNKS)
    set_word(slot, at.SHARE, share)
    run = ((word_at(slot, at.TICKET) >> (2 * at.COUNT_BITS)) + 1) & at.RUN_MASK
    store(slot, at.TICKET, run << (2 * at.COUNT_BITS))
    tasks = word_at(share, at.TASKS)
    for task in range(word_at(share, at.TASK_COUNT)):
        if word_at(tasks, at.TASK_WORDS * task + at.TASK_WAITS) == 0:
            _offer(board, slot, share, task)
    spins = 0
    while load(share, at.FINISHED) != total:
        ticket = _take(slot)
        if ticket >= 0:
            _run_chunk(board, slot, share, words, ticket, 0)
            spins = 0
            continue
        own = load(share, at.OWN)
        if own != 0:
            _run_own(board, slot, share, words, own - 1)
            spins = 0
            continue
        pause()
        spins += 1
        if spins > _PATIENT:
            _yield()


def _shared(board: int, share: int, span: int, unused: int) -> None:
    """Run the launches of ``span`` with a crew; says what failed as `_alone` does."""
    nodes, words = word_at(share, at.NODES), word_at(share, at.ROW)
    slot = _free_slot(board)
    if slot == 0:
        _run_alone(nodes, words + 8 * RUN_WORDS, span, word_at(share, at.TIMES))
        return
    add(board, at.CALLERS, 1)
    _run_shared(board, slot, share)
    add(board, at.CALLERS, -1)
    failed = word_at(share, at.FAILED)
    if failed != at.NOTHING_FAILED:
        set_word(span, 0, failed >> at.STATUS_BITS)
        set_word(words, 0, (failed << at.STATUS_BITS) >> at.STATUS_BITS)
    else:
        set_word(span, 0, word_at(span, 1))
        set_word(words, 0, 0)
    store(slot, at.TAKEN, 0)


@Lowered
def claim(share: int) -> Any:
    """A slot for the iterations of a loop that is shared; 0 where there is none, or where they are only timed."""
    return _free_slot(word_at(share, at.BOARD)) if word_at(share, at.TASK_COUNT) > 0 else 0


@Lowered
def run_iteration(share: int, slot: int, bases: int) -> Any:
    """Run the launches of one iteration, with a crew or timed; how many have run: all, or those before what failed."""
    span = share + 8 * at.SPAN
    if slot == 0:
        set_word(span, 0, 0)
        _run_alone(word_at(share, at.NODES), bases, span, word_at(share, at.TIMES))
        return word_at(span, 0)
    _run_shared(word_at(share, at.BOARD), slot, share)
    failed = word_at(share, at.FAILED)
    if failed == at.NOTHING_FAILED:
        return word_at(span, 1)
    status = (failed << at.STATUS_BITS) >> at.STATUS_BITS
    if status != 0:
        set_word(word_at(bases, 0), 0, status)
    return failed >> at.STATUS_BITS


@Lowered
def leave(share: int, slot: int, iterations: int) -> None:
    """Give a slot back, after so many iterations."""
    set_word(share, at.ITERATIONS, word_at(share, at.ITERATIONS) + iterations)
    if slot != 0:
        store(slot, at.TAKEN, 0)


@Lowered
def _anything(board: int) -> Any:
    """Whether a helper has a reason to stay awake."""
    for number in range(word_at(board, at.SLOTS)):
        ticket = load(board, at.SLOT + at.SLOT_WORDS * number)
        if (ticket & at.COUNT_MASK) != ((ticket >> at.COUNT_BITS) & at.COUNT_MASK):
            return True
    return load(board, at.CLOSED) != 0


@Lowered
def _sleep(board: int) -> None:
    add(board, at.ASLEEP, 1)
    if _anything(board) and _recruit(board, 1) == 1:
        return  # else someone has counted on this helper, and its byte is under way
    buffer = board + 8 * (at.BYTES + 63)
    while _read(word_at(board, at.READ_END), buffer, 1) < 0 and load(board, at.CLOSED) == 0:
        _yield()  # a signal came between


def _help(board: int, lane: int, unused: int, unused_too: int) -> None:
    """A helper's life: ``lane`` counts the crew's from 1; the callers are the others."""
    slots, threads = word_at(board, at.SLOTS), word_at(board, at.THREADS)
    number, spins, since, words, known, known_slot = lane % slots, 0, 0, 0, -1, -1
    while load(board, at.CLOSED) == 0:
        slot = board + 8 * (at.SLOT + at.SLOT_WORDS * number)
        ticket = -1
        if lane + load(board, at.CALLERS) <= threads:  # never more at work than threads
            ticket = _take(slot)
        if ticket >= 0:
            share, run = word_at(slot, at.SHARE), ticket >> (2 * at.COUNT_BITS)
            if run != known or number != known_slot:
                words = _copy_row(share, lane)
                known, known_slot = run, number
            _run_chunk(board, slot, share, words, ticket, lane)
            spins = 0
            continue
        number = (number + 1) % slots
        if number != lane % slots:
            continue
        pause()
        spins += 1
        if spins % _SPINS == 1:
            now = _now()
            if spins == 1:
                since = now
            elif now - since > word_at(board, at.PATIENCE):
                _sleep(board)
                spins = 0


@Lowered
def _run_alone(nodes: int, bases: int, span: int, times: int) -> None:
    """Run launches one after another.

    ``span`` points at two words: the first launch to run and one past the last. The last of the run's words is the
    address of a word by which others stop the loop. After each launch the loop looks at that word and at the run's
    status; where one is set, it stops and leaves that launch's position in the first word of ``span``. ``times`` may
    point at a word for each launch, to which its nanoseconds are added.
    """
    run, launch, stop = word_at(bases, 0), word_at(span, 0), word_at(span, 1)
    others = word_at(run, RUN_WORDS - 1)
    while launch < stop:
        node = nodes + 8 * at.NODE_WORDS * launch
        began = _now() if times != 0 else 0
        call_entry(word_at(node, 0), bases, word_at(node, 1), 0, word_at(node, 2))
        if times != 0:
            set_word(times, launch, word_at(times, launch) + _now() - began)
        if word_at(run, 0) != 0 or word_at(others, 0) != 0:
            break
        launch += 1
    set_word(span, 0, launch)


def _alone(nodes: int, bases: int, span: int, times: int) -> None:
    """Run launches on one thread: see `_run_alone`."""
    _run_alone(nodes, bases, span, times)


LOOPS = {"alone": _alone, "shared": _shared, "help": _help}


def emit_loop(name: str, symbol: str) -> bytes:
    """The object code of one of `LOOPS`, whose entry is named ``symbol``."""
    return object_code(LOOPS[name], symbol)
