"""A helper process that compiles what a run can do without, or part of what it waits for: the parent's side of it.

Law: nobody waits for the helper, but who asks for that or comes to the object that it is making. It is started at the
first order, at most one at a time, and ends with this process; where it cannot be started, dies again and again or
cannot write the cache, what was ordered stays uncompiled and nothing else happens. Orders and answers are lines through
pipes.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flowrt.base.valueclass import valueclass
from flowrt.kernels.store.children import disown, end, start
from flowrt.kernels.store.folder import cache_folder
from flowrt.usable import usable_cores

LOOKED_EVERY = 0.02  # seconds between two looks at the pipe
MAX_STARTS = 4  # of helpers that died at their work
MAX_TRIES = 2  # of an order that a helper died at
WORTH_SHARING = 2  # orders: while one process starts its compiler, another may start its own
LOAD = Path("/proc/loadavg")
IN_FLIGHT = 8  # orders of a few KiB, so that writing them into a pipe of 64 KiB never waits
_log = logging.getLogger(__name__)


@valueclass
class CompileOrder:
    """What the helper is to compile: the symbol it will bear, and a line that says how to make it."""

    symbol: str
    request: str


@dataclass(slots=True)
class _State:
    """What this process has ordered, and the helper it has, if any."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    helper: subprocess.Popen[bytes] | None = None
    folder: Path | None = None  # the cache that the helper writes
    deaths: int = 0
    looked: float = 0.0
    read: bytes = b""
    pending: dict[str, CompileOrder] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)  # of the pending ones
    tries: Counter[str] = field(default_factory=Counter)
    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


_state = _State()


def submit(orders: Iterable[CompileOrder]) -> None:
    """Have the orders compiled some time, each once."""
    with _state.lock:
        _renew()
        known = _state.pending.keys() | _state.done | _state.failed
        _state.pending.update((o.symbol, o) for o in orders if o.symbol not in known)
        _send()


def share(orders: Sequence[CompileOrder]) -> None:
    """Have the helper compile, from the last on, what this process compiles from the first on: they meet in between.

    Nothing is shared where there is too little, where no core is idle, so that a helper would be waited for, and where
    the user wants no compiler beside the program.
    """
    if len(orders) >= WORTH_SHARING and os.environ.get("FLOWRT_BUILD") != "never" and _is_core_idle():
        submit(reversed(orders))


def _is_core_idle() -> bool:
    with suppress(OSError):  # some systems do not say
        running = LOAD.read_text().split()[3].partition("/")[0]  # now, with this thread
        return int(running) < usable_cores()
    return False


def go_on() -> None:
    """Take the helper's answers, and hand it what is next, without waiting."""
    with _state.lock:
        _receive(0)


def are_ready(orders: Sequence[CompileOrder]) -> bool:
    """Whether all that is compiled or never will be. A look at the pipe is taken now and then; nothing waits."""
    with _state.lock:
        now = time.monotonic()
        if now - _state.looked >= LOOKED_EVERY:
            _state.looked = now
            _receive(0)
        return all(o.symbol in _state.done or o.symbol in _state.failed for o in orders)


def is_waited_for() -> bool:
    """Whether to compile before the first use what a run could do without, so that runs do not differ in their bits.

    Sums are added up in another order by what is computed in one launch than by one launch after another.
    """
    return os.environ.get("FLOWRT_FUSED") == "wait"


def was_tried(symbol: str) -> bool:
    """Whether the helper has been at it already: to order it again would change nothing."""
    with _state.lock:
        _renew()
        return symbol in _state.done or symbol in _state.failed


def wait_compiled(timeout: float) -> bool:
    """Wait until nothing is on order any more, at most so many seconds; answers whether that is so."""
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        with _state.lock:
            if not _state.pending:
                return True
            _receive(min(left, 0.1))
    return not _state.pending


def close() -> None:
    """End the helper, if there is one. Another starts where something is ordered later."""
    with _state.lock:
        _state.pending.clear()
        _bury()


def _renew() -> None:
    """Begin anew where the cache is another folder than before."""
    folder = cache_folder()
    if _state.folder != folder:
        _bury()
        for known in (_state.pending, _state.done, _state.failed, _state.tries):
            known.clear()
        _state.folder = folder


def _send() -> None:
    """Hand the helper orders, as many as it may have at a time."""
    waiting = [o for o in _state.pending.values() if o.symbol not in _state.sent][: IN_FLIGHT - len(_state.sent)]
    if not waiting:
        return
    try:
        pipe = _started().stdin
        assert pipe is not None
        for order in waiting:
            _state.sent.add(order.symbol)
            pipe.write(f"{order.symbol} {order.request}\n".encode())
        pipe.flush()
    except OSError as error:
        _log.debug("no helper: %s", error)
        _lost()


def _started() -> subprocess.Popen[bytes]:
    if _state.helper is not None and _state.helper.poll() is not None:  # it had had nothing to do
        _bury()
    if _state.helper is None:
        _state.helper = start("flowrt.kernels.compiler", stdout=subprocess.PIPE)
    return _state.helper


def _receive(seconds: float) -> None:
    """Take the helper's answers, waiting at most so long for the first."""
    if _state.helper is None or not _state.pending:
        return
    pipe = _state.helper.stdout
    assert pipe is not None
    polled = select.poll()  # `select.select` is for few descriptors
    polled.register(pipe, select.POLLIN)
    while polled.poll(1000 * seconds):
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            _lost()
            return
        *lines, _state.read = (_state.read + data).split(b"\n")
        for line in lines:
            _answered(line.decode())
        seconds = 0
    _send()


def _answered(line: str) -> None:
    symbol, _, failure = line.partition(" ")
    _state.pending.pop(symbol, None)
    _state.sent.discard(symbol)
    if failure:
        _log.debug("%s was not compiled: %s", symbol, failure)
        _state.failed.add(symbol)
    else:
        _state.done.add(symbol)


def _lost() -> None:
    """The helper is gone: what it was at is tried once more, by another."""
    _bury()
    _state.deaths += 1
    given_up = list(_state.pending) if _state.deaths >= MAX_STARTS else []
    if not given_up and _state.pending:
        first = next(iter(_state.pending))
        _state.tries[first] += 1
        given_up = [first] if _state.tries[first] >= MAX_TRIES else []
    for symbol in given_up:
        _answered(f"{symbol} the helper died")
    _send()


def _bury() -> None:
    """End the helper and forget what it was given."""
    helper, _state.helper = _state.helper, None
    _state.read = b""
    _state.sent.clear()
    if helper is not None:
        end(helper)


def _forget() -> None:
    """A forked child has no helper: the parent's pipes are not its own."""
    global _state
    helper, _state = _state.helper, _State()
    if helper is not None:
        disown(helper)


atexit.register(close)
os.register_at_fork(after_in_child=_forget)
