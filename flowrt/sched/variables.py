"""The variables of one task, by (container, name), and who may touch them when.

Law: a region takes all variables it reads and writes at once or waits for all, so no two holders can wait for each
other; who asked first goes first where two requests conflict. Holders may be on any thread, waiters on any loop.

Direct calls (`kernels.direct`) take and give back what they need by themselves, between two instructions of Python's,
and know nothing of the mutex: so who changes something here says so in a word as long as it has the mutex. They take
nothing while it is set, or while someone waits, and give nothing back while it is set.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from flowrt.errors import GraphError
from flowrt.kernels.direct import CHANGES_WORD, READERS, TAKING, WAITING, WRITING
from flowrt.spec import Spec

T = TypeVar("T")
Name: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class Slot:
    """A variable's memory, and who holds it. ``value`` is None until it is first assigned."""

    spec: Spec
    value: np.ndarray[Any, Any] | None = None
    marks: Any = field(default_factory=lambda: (ctypes.c_int64 * 2)())  # readers; whether it is held to be written


@dataclass(eq=False, slots=True)
class _Request:
    reads: frozenset[Name]
    writes: frozenset[Name]
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]
    held: bool = False


class Variables:
    """All variables of a task. ``words`` are what direct calls look at: see `kernels.direct`."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._slots: dict[Name, Slot] = {}
        self._waiting: list[_Request] = []
        self._mutex = threading.Lock()
        self.words = (ctypes.c_int64 * 3)()

    @property
    def changes(self) -> int:
        """How often memory was replaced or forgotten."""
        return self.words[CHANGES_WORD]

    def inventory(self) -> dict[Name, Spec]:
        """The variables that have a value."""
        with self._mutex:
            return {name: slot.spec for name, slot in self._slots.items() if slot.value is not None}

    def declare(self, name: Name, spec: Spec) -> None:
        """Make room for a variable; one that exists must have the same spec."""
        with self._mutex:
            slot = self._slots.setdefault(name, Slot(spec))
            if slot.value is None:
                slot.spec = spec
        if (slot.spec.dtype, slot.spec.dims) != (spec.dtype, spec.dims):
            raise self._mismatch(name, slot.spec, spec)

    def reset(self, container: str | None) -> None:
        """Forget the variables of a container, or of all."""
        self._alone(self._forget, container)

    def _forget(self, container: str | None) -> None:
        for name, slot in self._slots.items():
            if container is None or name[0] == container:
                slot.value = None
        self.words[CHANGES_WORD] += 1

    def find(self, name: Name, spec: Spec) -> np.ndarray[Any, Any] | None:
        """A held variable's memory, None if it has no value yet; raises `GraphError` where it is not of ``spec``.

        Specs are compared at every access: after `reset` another graph may have given the name to something else.
        """
        slot = self._slots.get(name)
        value = None if slot is None else slot.value
        if value is not None and (value.shape != spec.dims or value.dtype != spec.dtype):
            raise self._mismatch(name, Spec(value.dtype, value.shape), spec)
        return value

    def value(self, name: Name, spec: Spec) -> np.ndarray[Any, Any]:
        """`find` for a variable that must have a value."""
        value = self.find(name, spec)
        if value is None:
            raise GraphError(
                f"variable {name[1]!r} has no value on {self._task}: a session initialises the variables of its own "
                "graph, so was it reset, or made by another graph?"
            )
        return value

    def begin(self, name: Name, value: np.ndarray[Any, Any]) -> None:
        """Give a variable that is held to be written its first memory."""
        self._alone(self._put, self._slots[name], value)

    def _put(self, slot: Slot, value: np.ndarray[Any, Any]) -> None:
        slot.spec, slot.value = Spec(value.dtype, value.shape), value
        self.words[CHANGES_WORD] += 1

    def _mismatch(self, name: Name, have: Spec, want: Spec) -> GraphError:
        return GraphError(
            f"variable {name[1]!r} exists on {self._task} as {have}, not {want}; "
            "rename it, use another container, or session.reset() the old one"
        )

    def try_hold(self, reads: frozenset[Name], writes: frozenset[Name]) -> bool:
        """Take the variables if that needs no waiting."""
        return self._alone(self._take, reads, writes, None)

    def release(self, reads: Iterable[Name], writes: Iterable[Name]) -> None:
        """Give back what `try_hold` took."""
        self._alone(self._give_back, reads, writes)

    def _give_back(self, reads: Iterable[Name], writes: Iterable[Name]) -> None:
        self._mark(reads, writes, -1)
        self._grant()

    def grant(self) -> None:
        """Give those who wait what a direct call has given back."""
        self._alone(self._grant)

    def marks(self, name: Name) -> Any:
        """The words that say who holds a variable."""
        return self._slots[name].marks

    @asynccontextmanager
    async def hold(self, reads: frozenset[Name], writes: frozenset[Name]) -> AsyncIterator[None]:
        """Hold the variables inside the block, waiting for their present holders first."""
        loop = asyncio.get_running_loop()
        request = _Request(reads, writes, loop, loop.create_future())
        self._alone(self._ask, request)
        try:
            if not request.held:
                await request.granted
            yield
        finally:
            self._alone(self._end, request)

    def _ask(self, request: _Request) -> None:
        request.held = self._take(request.reads, request.writes, None)
        if not request.held:
            self._waiting.append(request)
            self.words[WAITING] = len(self._waiting)

    def _end(self, request: _Request) -> None:
        if request.held:
            self._give_back(request.reads, request.writes)
        else:
            self._done_waiting(request)
            self._grant()

    def _alone(self, change: Callable[..., T], *arguments: Any) -> T:
        """Change something while nobody else does, direct calls included."""
        with self._mutex:
            self.words[TAKING] = 1
            try:
                return change(*arguments)
            finally:
                self.words[TAKING] = 0

    def _take(self, reads: frozenset[Name], writes: frozenset[Name], before: _Request | None) -> bool:
        """Take everything if it is free and nobody who asked earlier wants it."""
        slots = self._slots
        if any(slots[n].marks[WRITING] for n in reads if n in slots):
            return False
        if any(slots[n].marks[WRITING] or slots[n].marks[READERS] for n in writes if n in slots):
            return False
        for other in self._waiting:
            if other is before:
                break
            if writes & (other.reads | other.writes) or reads & other.writes:
                return False
        self._mark(reads, writes, 1)
        return True

    def _mark(self, reads: Iterable[Name], writes: Iterable[Name], change: int) -> None:
        slots = self._slots
        for name in reads:
            if name in slots:
                slots[name].marks[READERS] += change
        for name in writes:
            if name in slots:
                slots[name].marks[WRITING] += change

    def _done_waiting(self, request: _Request) -> None:
        self._waiting.remove(request)
        self.words[WAITING] = len(self._waiting)

    def _grant(self) -> None:
        for request in list(self._waiting):
            if self._take(request.reads, request.writes, request):
                self._done_waiting(request)
                request.held = True
                request.loop.call_soon_threadsafe(_wake, request.granted)


def _wake(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)
