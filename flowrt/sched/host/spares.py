"""Memory that lies ready for variables whose old values somebody keeps when they are written.

New memory costs three times what it costs to copy something there, as the system fills it with zeros page by page. Law:
who knows that variables will be kept has it made before, beside what goes on; what lies ready is let go where others
need memory, and once nothing is kept any more. Any thread may ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.sched.host.segments import has_own_slot

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.base.spec import Spec
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.host.variables import Name

Array: TypeAlias = "np.ndarray[Any, Any]"
TOUCHED = 4 << 20  # bytes at once


class Spares:
    """What lies ready, by the variable that it is for."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ready: dict[Name, Array] = {}
        memory.enlist(self)

    def make(self, name: Name, spec: Spec, going: Callable[[], bool]) -> None:
        """Have memory ready for a variable, if ``going`` says so to the end.

        Raises `ResourceError` where it does not fit. This takes a while; the calling thread should be one that does
        nothing else.
        """
        made = touched(self._memory, spec, going)
        if made is not None:
            self._ready[name] = made

    def memory(self, name: Name, array: Array) -> Array:
        """Memory for what a variable is to hold that holds ``array`` so far, as large as that."""
        made = self._ready.pop(name, None)
        if made is None or (made.shape, made.dtype) != (array.shape, array.dtype):
            return self._memory.lasting(array.shape, array.dtype)
        return made

    def copy(self, name: Name, array: Array) -> Array:
        """A copy of what a variable holds, to lie there from now on."""
        made = self.memory(name, array)
        np.copyto(made, array)
        return made

    @property
    def idle_bytes(self) -> int:
        """Nothing: what lies ready is about to be used, and gives way to nobody but who finds no memory."""
        return 0

    def let_go(self) -> None:
        """Have nothing ready any more."""
        self._ready.clear()


def touched(memory: Memory, spec: Spec, going: Callable[[], bool]) -> Array | None:
    """Memory for a variable, all of whose pages are there; None where ``going`` does not say so to the end.

    As for `Spares.make`, whose errors it raises.
    """
    made = memory.apart(spec.concrete, spec.dtype)
    pages = made.reshape(-1).view(np.uint8)
    for start in range(0, 0 if has_own_slot(made) else made.nbytes, TOUCHED):  # a slot's pages are there
        if not going():
            return None
        pages[start : start + TOUCHED] = 0
    return made if going() else None
