"""What a thread runs in compiled code just now, so that an interrupt need not wait for its end.

Law: Python calls the handler of a signal between two steps of the main thread's Python, and a loop that values count
may have no end. Runs in a caller's thread are therefore known here by that thread: those from Python are noted, and of
direct calls the plans say who runs by them. Who wants a run stopped asks for it while it holds the GIL. What must be
done whole by Python, as holding variables and letting them go, is `Unbroken`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` makes enumerations of, at ten times the cost
import signal
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.kernels.run.direct import BUSY
from flowrt.sched.host.lanes import main_thread, this_thread
from flowrt.sched.tape.tape import cancel

if TYPE_CHECKING:
    import numpy as np

    from flowrt.sched.tape.tape import RunBuffer

_noted: dict[int, np.ndarray[Any, Any]] = {}
_plans: weakref.WeakKeyDictionary[RunBuffer, weakref.ref[np.ndarray[Any, Any]]] = weakref.WeakKeyDictionary()


class Noted:
    """``with Noted(words):`` the thread runs tapes with these words; a signal's handler may run others there."""

    __slots__ = ("_before", "_words")

    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        self._words = words

    def __enter__(self) -> None:
        thread = this_thread()
        self._before = _noted.get(thread)
        _noted[thread] = self._words

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            _noted.pop(this_thread(), None)
        else:
            _noted[this_thread()] = self._before


class Unbroken:
    """``with Unbroken():`` a Ctrl-C that means what it does by default is raised behind the block, not inside."""

    __slots__ = ("_came", "_ours")

    def __enter__(self) -> None:
        self._came = False
        self._ours = this_thread() == main_thread().ident and _interrupt() is signal.default_int_handler
        if self._ours:
            _signal.signal(signal.SIGINT, self._wait)

    def __exit__(self, *error: object) -> None:
        if self._ours:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came:
                raise KeyboardInterrupt

    def _wait(self, *signal: object) -> None:
        self._came = True


def is_default() -> bool:
    """Whether Ctrl-C means what it does by default, at once or behind what is `Unbroken`."""
    handler = _interrupt()
    return handler is signal.default_int_handler or type(getattr(handler, "__self__", None)) is Unbroken


def _interrupt() -> Any:
    return _signal.getsignal(signal.SIGINT)


def note_plan(buffer: RunBuffer, plan: np.ndarray[Any, Any]) -> None:
    """A direct call may run in ``buffer`` by the plan of these words."""
    _plans[buffer] = weakref.ref(plan)


def present_run(thread: int) -> Callable[[], None] | None:
    """What stops the tape that ``thread`` runs now, after its present node, and no other; None where it runs none."""
    words = _noted.get(thread)
    if words is not None:
        return partial(cancel, words)
    for buffer, known in list(_plans.items()):
        plan = known()
        if plan is not None and plan[BUSY] == thread:
            return _stop_direct(buffer, plan, thread)
    return None


def _stop_direct(buffer: RunBuffer, plan: np.ndarray[Any, Any], thread: int) -> Callable[[], None]:
    number = buffer.number

    def stop() -> None:
        if plan[BUSY] == thread and buffer.number == number:
            buffer.stop()

    return stop
