"""How many kernels are to be compiled, and how many have been: what is told to a user who waits for them.

Law: nothing is counted until something has to be compiled. Then whoever asked for it is asked what else it will need,
and names all of it while its thread only *looks*: nothing is compiled then, and the addresses that are answered are
none. What the helper can compile of it, too, is shared with it. Compilations that follow closely on one another, in
whatever threads, are one activity.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from flowrt.base.errors import FlowrtError
from flowrt.kernels.store import background
from flowrt.kernels.store.background import CompileOrder
from flowrt.progress import Activity

WHAT = "compiling kernels, once on this machine"
PAUSE = 3.0  # seconds without a compilation, at most, within one activity


class _Thread(threading.local):
    """What this thread is at."""

    survey: Callable[[], object] | None = None  # names what its batch needs, if nobody has asked yet
    batches = False  # whether its batch is counted as one that compiles
    seen: dict[str, str] | None = None  # what it has found to be missing, where it only looks, and its requests


class _Count:
    """The compilations of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._activity = Activity(WHAT)
        self._known: set[str] = set()
        self._done: set[str] = set()
        self._busy = 0  # batches that compile, and compilations outside of one
        self._ended = float("-inf")

    def enter(self, needed: set[str]) -> None:
        """Begin to compile something of what is ``needed``."""
        with self._lock:
            if self._busy == 0:
                if time.monotonic() - self._ended > PAUSE:
                    self._activity, self._known, self._done = Activity(WHAT), set(), set()
                self._add(needed)
                self._activity.__enter__()
            self._busy += 1
            self._add(needed)

    def done(self, symbol: str) -> None:
        """One more is compiled."""
        with self._lock:
            self._add({symbol})
            self._finish(symbol)

    def found(self, symbol: str) -> None:
        """That is compiled, by whomever."""
        with self._lock:
            if symbol in self._known:
                self._finish(symbol)

    def leave(self) -> None:
        """End what `enter` began."""
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self._ended = time.monotonic()
                self._activity.__exit__()

    def _finish(self, symbol: str) -> None:
        self._done.add(symbol)
        self._activity.done = len(self._done)

    def _add(self, needed: set[str]) -> None:
        self._known |= needed
        self._activity.of = len(self._known)


_thread = _Thread()
_count = _Count()


@contextmanager
def batch(survey: Callable[[], object]) -> Iterator[None]:
    """Count what is compiled in the block as one; ``survey()`` asks for all that the block will ask for."""
    before = _thread.survey, _thread.batches
    _thread.survey, _thread.batches = survey, False
    try:
        yield
    finally:
        if _thread.batches:
            _count.leave()
        _thread.survey, _thread.batches = before


@contextmanager
def compiled(symbol: str) -> Iterator[None]:
    """Compile one object in the block."""
    alone = _thread.survey is None and not _thread.batches
    if not _thread.batches:
        needed = _needed()
        _count.enter({symbol, *needed})
        _thread.batches = not alone
        background.share([CompileOrder(*each) for each in needed.items() if each[1] and each[0] != symbol])
    try:
        yield
    finally:
        _count.done(symbol)
        if alone:
            _count.leave()
        background.go_on()


def only_looks() -> bool:
    """Whether this thread wants to know what is missing, and nothing compiled."""
    return _thread.seen is not None


def note_missing(symbol: str, request: str = "") -> None:
    """Something would have to be compiled, if the thread did not only look; another process could do so by ``request``,
    if that says anything."""
    if _thread.seen is not None:
        _thread.seen[symbol] = request


def note_made(symbol: str) -> None:
    """Something need not be compiled: if the batch counted it, another process has done so meanwhile."""
    if _thread.batches:
        _count.found(symbol)


def _needed() -> dict[str, str]:
    """What the present batch will have to compile, in the order in which it asks for it, and the requests."""
    survey, _thread.survey = _thread.survey, None
    if survey is None:
        return {}
    seen: dict[str, str] = {}
    _thread.seen = seen
    try:
        with suppress(FlowrtError):  # who asks in earnest is told
            survey()
    finally:
        _thread.seen = None
    return seen
