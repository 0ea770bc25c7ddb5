"""The variables of one task, by (container, name), and who may touch them when.

Law: a region takes all variables it reads and writes at once or waits for all, so no two holders can wait for each
other; who asked first goes first where two requests conflict. Holders may be on any thread, waiters on any loop. A
variable that is only sent elsewhere is lent instead of copied, and not held meanwhile: who writes all of it while
somebody still looks at it writes elsewhere, and who writes some of it makes a copy first, and writes that. Of one that
is only saved, some rows may be written where they lie, once what they hold is kept (`snapshots`).

Direct calls (`kernels.run.direct`) take and give back what they need by themselves, between two instructions of
Python's, and know nothing of the lock: so who changes something here says so in a word as long as it has the lock.
They take nothing while it is set, or while someone waits, and give nothing back while it is set. So that they need not
look at every variable, those that one takes are known `Together`, with a word in which direct calls say that they hold
them, and one that tells them whether anyone else holds what they may not have meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.run.direct import BLOCKED, CHANGES_WORD, HOLDERS, RIVALS, RIVALS_AT, TAKING, TOGETHER_WORDS, WAITING
from flowrt.sched.host.snapshots import Snapshot

if TYPE_CHECKING:
    from flowrt.sched.host.memory import Memory

T = TypeVar("T")
Name: TypeAlias = tuple[str, str]
Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(slots=True)
class Slot:
    """A variable's memory, and how many hold it, direct calls apart. ``value`` is None until it is first assigned."""

    spec: Spec
    value: np.ndarray[Any, Any] | None = None
    device: str = ""  # in whose memory it lies, once a plan says so
    readers: int = 0
    writers: int = 0
    lent: weakref.ref[np.ndarray[Any, Any]] | None = None  # the bytes as which it was lent last
    snapshots: tuple[weakref.ref[Snapshot], ...] = ()  # of the value

    @property
    def is_lent(self) -> bool:
        """Whether somebody looks at the value as it is."""
        return self.lent is not None and self.lent() is not None

    @property
    def is_saved(self) -> bool:
        """Whether somebody reads what the value was."""
        return any(snapshot() is not None for snapshot in self.snapshots)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Together:
    """Variables that direct calls take at once. ``memory`` is theirs, None once it is not any more."""

    reads: frozenset[Name]
    writes: frozenset[Name]
    memory: tuple[np.ndarray[Any, Any], ...] | None = None
    words: Any = field(default_factory=lambda: (ctypes.c_int64 * TOGETHER_WORDS)())
    rivals: list[tuple[weakref.ref[Together], Any]] = field(default_factory=list)  # them, and their words
    _table: Any = None  # of where the rivals' words are

    def excludes(self, reads: frozenset[Name], writes: frozenset[Name]) -> bool:
        """Whether nobody may hold those as long as these are held."""
        mine = self.writes
        return not (mine.isdisjoint(reads) and mine.isdisjoint(writes) and writes.isdisjoint(self.reads))

    def meet(self, other: Together) -> None:
        """Look at another from now on, before these are taken, if they exclude each other."""
        if not other.excludes(self.reads, self.writes):
            return
        self.rivals = [*(rival for rival in self.rivals if rival[0]() is not None), (weakref.ref(other), other.words)]
        self._table = (ctypes.c_int64 * len(self.rivals))(*(ctypes.addressof(words) for _, words in self.rivals))
        self.words[RIVALS_AT], self.words[RIVALS] = ctypes.addressof(self._table), len(self.rivals)


@dataclass(eq=False, slots=True)
class _Request:
    reads: frozenset[Name]
    writes: frozenset[Name]
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]
    held: bool = False


class Variables:
    """All variables of a task. ``words`` are what direct calls look at: see `kernels.run.direct`."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._slots: dict[Name, Slot] = {}
        self._together: list[weakref.ref[Together]] = []  # those of plans that may still be run by
        self._waiting: list[_Request] = []
        self.lent: set[Name] = set()  # what somebody may look at who does not hold it
        self._lock = threading.Lock()
        self.words = (ctypes.c_int64 * 3)()

    @property
    def changes(self) -> int:
        """How often memory was replaced or forgotten."""
        return self.words[CHANGES_WORD]

    def inventory(self) -> dict[Name, Spec]:
        """The variables that have a value."""
        with self._lock:
            return {name: slot.spec for name, slot in self._slots.items() if slot.value is not None}

    def declare(self, name: Name, spec: Spec, device: str = "") -> None:
        """Make room for a variable, in the memory of ``device`` if it is told; one that exists is the same, there."""
        with self._lock:
            slot = self._slots.setdefault(name, Slot(spec))
            if slot.value is None:
                slot.spec, slot.device = spec, device
            slot.device = slot.device or device
        if (slot.spec.dtype, slot.spec.dims) != (spec.dtype, spec.dims):
            raise self._mismatch(name, slot.spec, spec)
        if device and slot.device != device:
            raise GraphError(
                f"variable {name[1]!r} lies on {slot.device} of {self._task}, and this step has it on {device}; "
                "ask for the same device, use another container, or session.reset() the old one"
            )

    def reset(self, container: str | None) -> None:
        """Forget the variables of a container, or of all."""
        self._alone(self._forget, lambda name: container in (None, name[0]))

    def forget(self, names: Iterable[Name]) -> None:
        """Forget the values of some variables, which nobody holds."""
        self._alone(self._forget, frozenset(names).__contains__)

    def _forget(self, chosen: Callable[[Name], bool]) -> None:
        for name, slot in self._slots.items():
            if chosen(name):
                slot.value = None
        self._outdate()

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

    def lend(self, name: Name, spec: Spec) -> np.ndarray[Any, Any]:
        """The memory of a variable that is held to be read: as it is now, for as long as anything refers to the answer.

        So does whatever sees a part of it.
        """
        slot, value = self._slots.get(name), self.value(name, spec)
        assert slot is not None
        lent: Array | None = None if slot.lent is None else slot.lent()
        if lent is None or not np.may_share_memory(lent, value):
            # what sees a part of an array keeps, of all that this is a view of, the last: here that is ``lent``
            lent = np.frombuffer(value.reshape(-1).view(np.uint8).data, np.uint8)
            lent.flags.writeable = False
            slot.lent = weakref.ref(lent)
        self.lent.add(name)
        self._alone(self._outdate_writers, name)
        seen: Array = lent.view(value.dtype).reshape(value.shape)
        return seen

    def snapshot(self, name: Name, spec: Spec, memory: Memory) -> Snapshot:
        """What a variable that is held to be read holds now; ``memory`` is for what is kept of it."""
        slot, made = self._slots[name], Snapshot(self.value(name, spec), memory)
        slot.snapshots = (*(ref for ref in slot.snapshots if ref() is not None), weakref.ref(made))
        self.lent.add(name)
        self._alone(self._outdate_writers, name)
        return made

    def _outdate_writers(self, name: Name) -> None:
        """Have direct calls that would write what is lent go the way on which it is parted from."""
        if any(name in together.writes for together in self._known_together()):
            self._outdate()

    def still_lent(self, names: frozenset[Name]) -> frozenset[Name]:
        """Those variables, all held to be written, that somebody still looks at, or saves; no others are lent then."""
        found = set()
        for name in names & self.lent:
            if self._is_lent(name):
                found.add(name)
            else:
                self._forget_lookers(name)
        return frozenset(found)

    def _is_lent(self, name: Name) -> bool:
        slot = self._slots.get(name)
        return slot is not None and slot.value is not None and (slot.is_lent or slot.is_saved)

    def part(
        self, names: frozenset[Name], copy: Callable[[Name, Array], Array], by_rows: frozenset[Name] = frozenset()
    ) -> frozenset[Name]:
        """Have variables that are held to be written, and still lent, lie elsewhere: in what ``copy`` makes of them.

        Those of which only some rows are written, ``by_rows``, stay where they are if they are no more than saved.
        They are answered: what such rows hold is to be kept (`keep_rows`) before they are written.
        """
        lent = self.still_lent(names)
        staying = frozenset(name for name in lent & by_rows if not self._slots[name].is_lent)
        for name in lent - staying:
            value = self._slots[name].value
            assert value is not None
            self.begin(name, copy(name, value))
        return staying

    def _forget_lookers(self, name: Name) -> None:
        self._slots[name].lent, self._slots[name].snapshots = None, ()
        self.lent.discard(name)

    def keep_rows(self, names: Iterable[Name], rows: Array) -> None:
        """Keep what these rows of variables hold, for those who save them."""
        for name in names:
            for reference in self._slots[name].snapshots:
                if (snapshot := reference()) is not None:
                    snapshot.keep(rows)

    def begin(self, name: Name, value: Any) -> None:
        """Give a variable that is held to be written its first memory, or other memory: of its device's."""
        self._alone(self._put, self._slots[name], value)
        self._forget_lookers(name)

    def _put(self, slot: Slot, value: np.ndarray[Any, Any]) -> None:
        slot.spec, slot.value = Spec(value.dtype, value.shape), value
        self._outdate()

    def _outdate(self) -> None:
        for together in self._known_together():
            together.memory = None
        self.words[CHANGES_WORD] += 1

    def _mismatch(self, name: Name, have: Spec, want: Spec) -> GraphError:
        return GraphError(
            f"variable {name[1]!r} exists on {self._task} as {have}, not {want}; "
            "rename it, use another container, or session.reset() the old one"
        )

    def try_hold(self, reads: frozenset[Name], writes: frozenset[Name]) -> bool:
        """Take the variables if that needs no waiting."""
        return self._alone(self._take, reads, writes, None)

    def release(self, reads: frozenset[Name], writes: frozenset[Name]) -> None:
        """Give back what `try_hold` took."""
        self._alone(self._give_back, reads, writes)

    def _give_back(self, reads: frozenset[Name], writes: frozenset[Name]) -> None:
        self._mark(reads, writes, -1)
        self._grant()

    def grant(self) -> None:
        """Give those who wait what a direct call has given back."""
        self._alone(self._grant)

    def together(self, reads: frozenset[Name], writes: frozenset[Name]) -> Together | None:
        """What direct calls take these by, for as long as somebody has it; None while others hold some of them."""
        return self._alone(self._join, reads, writes)

    def _join(self, reads: frozenset[Name], writes: frozenset[Name]) -> Together | None:
        if any(self._is_lent(name) for name in writes & self.lent):
            return None
        known = list(self._known_together())
        found = next((one for one in known if (one.reads, one.writes) == (reads, writes)), None)
        if found is None:
            if not self._are_free(reads, writes):
                return None  # whoever gives them back would not find that they were noted
            found = Together(reads, writes)
            known.append(found)
            self._together = [weakref.ref(one) for one in known]
            for one in known:
                one.meet(found)
                if one is not found:
                    found.meet(one)
        if found.memory is None:
            slots = (self._slots[name] for name in (*reads, *writes))
            found.memory = tuple(slot.value for slot in slots if slot.value is not None)
        return found

    def _known_together(self) -> Iterator[Together]:
        return filter(None, (known() for known in self._together))

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
        with self._lock:
            self.words[TAKING] = 1
            try:
                return change(*arguments)
            finally:
                self.words[TAKING] = 0

    def _take(self, reads: frozenset[Name], writes: frozenset[Name], before: _Request | None) -> bool:
        """Take everything if it is free and nobody who asked earlier wants it."""
        if not self._are_free(reads, writes):
            return False
        if any(one.words[HOLDERS] and one.excludes(reads, writes) for one in self._known_together()):
            return False
        for other in self._waiting:
            if other is before:
                break
            if writes & (other.reads | other.writes) or reads & other.writes:
                return False
        self._mark(reads, writes, 1)
        return True

    def _are_free(self, reads: Iterable[Name], writes: Iterable[Name]) -> bool:
        """Whether nobody but direct calls holds any of them in another's way."""
        slots = self._slots
        if any(slots[n].writers for n in reads if n in slots):
            return False
        return not any(slots[n].writers or slots[n].readers for n in writes if n in slots)

    def _mark(self, reads: frozenset[Name], writes: frozenset[Name], change: int) -> None:
        slots = self._slots
        for name in reads:
            if name in slots:
                slots[name].readers += change
        for name in writes:
            if name in slots:
                slots[name].writers += change
        for one in self._known_together():
            if one.excludes(reads, writes):
                one.words[BLOCKED] += change

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
