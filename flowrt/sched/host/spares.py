"""Memory that lies ready for copies of variables: who must copy one before it is written waits for the copy alone.

New memory costs three times what it costs to copy something there, as the system fills it with zeros page by page. Law:
who knows that variables will be kept has it made before, beside what goes on; what lies ready is let go where others
need memory, and once nothing is kept any more. A copy may be begun before anybody writes: who then does goes on with
it. Any thread may ask.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.sched.host.segments import has_own_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowrt.base.spec import Spec
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.snapshots import Snapshot
    from flowrt.sched.host.variables import Name

Array: TypeAlias = "np.ndarray[Any, Any]"
TOUCHED = 4 << 20  # bytes at once


class Spares:
    """What lies ready, by the variable that it is for."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ready: dict[Name, Array] = {}
        self._begun: dict[Name, _BegunCopy] = {}
        memory.enlist(self)

    def make(self, name: Name, spec: Spec, going: Callable[[], bool]) -> None:
        """Have memory ready for a copy, if ``going`` says so to the end. Raises `ResourceError` where it does not fit.

        This takes a while; the calling thread should be one that does nothing else.
        """
        made = touched(self._memory, spec, going)
        if made is not None:
            self._ready[name] = made

    def copy(self, name: Name, array: Array) -> Array:
        """A copy of what a variable holds, to lie there from now on."""
        begun = self._begun.get(name)
        if begun is not None and begun.source.ctypes.data == array.ctypes.data and begun.take():
            begun.finish()
            return begun.made
        made = self._ready.pop(name, None)
        if made is None or not _alike(made, array):
            return self._memory.lasting_copy(array)
        np.copyto(made, array)
        return made

    def outdate(self, names: Iterable[Name]) -> None:
        """Some rows of these variables are about to be written, and kept: copies that are begun are of nothing then."""
        for name in names:
            begun = self._begun.get(name)
            if begun is not None and begun.take():
                self._ready[name] = begun.made

    def copy_ahead(self, name: Name, saved: Snapshot, use: Callable[[Array], None], going: Callable[[], bool]) -> None:
        """Copy what is saved of a variable where memory lies ready for that, and have that copy be used by ``use``.

        Unless ``going`` says otherwise meanwhile, or who writes the variable has the copy, as one of them has it; or
        rows of it are written.
        """
        made = self._ready.pop(name, None)
        if made is None or not _alike(made, saved.source):
            return
        begun = self._begun[name] = _BegunCopy(made, saved.source)
        try:
            if saved.is_touched:  # who touches it from here on finds the copy begun
                self.outdate([name])
            while begun.go_on():
                if not going():
                    return
            if begun.take():
                use(made)
        finally:
            self._begun.pop(name, None)

    @property
    def has_any(self) -> bool:
        """Whether memory lies ready for any variable."""
        return bool(self._ready)

    @property
    def idle_bytes(self) -> int:
        """Nothing: what lies ready is about to be used, and gives way to nobody but who finds no memory."""
        return 0

    def let_go(self) -> None:
        """Have nothing ready any more."""
        self._ready.clear()


@dataclass(eq=False, slots=True)
class _BegunCopy:
    """A copy under way: ``done`` of its bytes are copied. Who writes the variable may take it, and finish it."""

    made: Array
    source: Array
    done: int = 0
    taken: bool = False
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def go_on(self) -> bool:
        """Copy some more; False once all is, or it is taken."""
        with self.mutex:
            if self.taken or self.done == self.made.nbytes:
                return False
            end = min(self.done + TOUCHED, self.made.nbytes)
            _bytes(self.made)[self.done : end] = _bytes(self.source)[self.done : end]
            self.done = end
            return True

    def take(self) -> bool:
        """Have it from now on, if nobody has."""
        with self.mutex:
            taken, self.taken = self.taken, True
            return not taken

    def finish(self) -> None:
        """Copy what is left, once it is taken."""
        _bytes(self.made)[self.done :] = _bytes(self.source)[self.done :]


def _alike(made: Array, array: Array) -> bool:
    return (made.shape, made.dtype) == (array.shape, array.dtype)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def touched(memory: Memory, spec: Spec, going: Callable[[], bool]) -> Array | None:
    """Memory for a variable, all of whose pages are there; None where ``going`` does not say so to the end.

    As for `Spares.make`, whose errors it raises.
    """
    made = memory.apart(spec.concrete, spec.dtype)
    pages = _bytes(made)
    for start in range(0, 0 if has_own_slot(made) else made.nbytes, TOUCHED):  # a slot's pages are there
        if not going():
            return None
        pages[start : start + TOUCHED] = 0
    return made if going() else None
