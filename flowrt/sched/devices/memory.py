"""A device's memory as the scheduler counts it: what is held, by which tensors, and what is refused.

Law: memory is allocated in the device's lane, and let go of wherever the last that refers to it goes, also where Python
collects garbage; so what is gone waits in a queue, which the lane empties before it allocates. A device has its limit,
or the one that is set for it, whichever is less.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrt.base.errors import ResourceError
from flowrt.base.spec import Spec
from flowrt.sched.devices.blame import Naming
from flowrt.sched.host.memory import MemoryStatistics, amount

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowrt.base.plan import PlanNode
    from flowrt.sched.devices.device import ApartDevice
    from flowrt.sched.devices.driver import Array, Driver

LARGEST = 8  # tensors that a refusal names


class DeviceKeeper(Protocol):
    """Who keeps memory of a device's for later that it could let go."""

    def let_go(self) -> None:
        """Drop what is idle now; in the lane."""


class Storage:
    """Memory of a device's, taken back once nobody refers to it. Its ``number`` is no other's, ever."""

    __slots__ = ("arena", "arrays", "memory", "nbytes", "number")

    def __init__(self, arena: Arena, number: int, memory: Any, nbytes: int) -> None:
        self.arena, self.number, self.memory, self.nbytes = arena, number, memory, nbytes
        self.arrays: set[int] = set()  # those that are seen in it

    def __del__(self) -> None:
        self.arena.take_back(self.number, self.memory, self.nbytes)


class DeviceArray:
    """A tensor in a device's memory. It never changes, but for a variable's that nobody else refers to.

    ``brought`` is the same in the host's memory, where that came with it; it is the same while this is referred to.
    """

    __slots__ = ("__weakref__", "brought", "dtype", "nbytes", "shape", "storage")

    def __init__(self, storage: Storage, spec: Spec) -> None:
        self.storage = storage
        self.shape, self.dtype, self.nbytes = spec.concrete, spec.dtype, spec.nbytes
        self.brought: Array | None = None
        storage.arrays.add(id(self))

    def __del__(self) -> None:
        self.storage.arrays.discard(id(self))

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, self.shape)

    @property
    def device(self) -> ApartDevice:
        """The device that has it."""
        return self.storage.arena.device

    @property
    def is_alone(self) -> bool:
        """Whether no other array is seen in its memory."""
        return len(self.storage.arrays) == 1

    def seen_as(self, spec: Spec) -> DeviceArray:
        """The same memory under another shape."""
        return DeviceArray(self.storage, spec)


class Arena:
    """The memory of one device, behind its ``driver``. All but `statistics` and `take_back` are for its lane."""

    def __init__(self, device: ApartDevice, driver: Driver, limit: int | None = None) -> None:
        self.device, self.driver = device, driver
        self.limit = min((bound for bound in (self.driver.limit, limit) if bound is not None), default=None)
        self.keepers: weakref.WeakSet[DeviceKeeper] = weakref.WeakSet()
        self._held = self._peak = 0
        self._numbers = itertools.count()
        self._alive: dict[int, tuple[Spec, str]] = {}  # what each storage was made for, and by whom
        self._gone: deque[tuple[int, Any, int]] = deque()

    def statistics(self) -> MemoryStatistics:
        """Bytes held now, at most so far, and the limit. From any thread."""
        return MemoryStatistics(self._held - sum(gone[2] for gone in tuple(self._gone)), self._peak, self.limit)

    def empty(self, spec: Spec, where: str) -> DeviceArray:
        """A new array for what ``where`` names. Raises `ResourceError` where it does not fit."""
        with Naming((where,)):
            memory = self._memory(spec, where)
        number = next(self._numbers)
        self._alive[number] = spec, where
        self._held += spec.nbytes
        self._peak = max(self._peak, self._held)
        return DeviceArray(Storage(self, number, memory, spec.nbytes), spec)

    def hold(self, array: Array, where: str) -> DeviceArray:
        """A copy of an array of the host's, for what ``where`` names. Raises as `empty`."""
        made = self.empty(Spec(array.dtype, array.shape), where)
        with self.naming(made, "brought to"):
            self.driver.write(made.storage.memory, np.ascontiguousarray(array))
        return made

    def here(self, value: DeviceArray | Array, node: PlanNode) -> DeviceArray:
        """A value that ``node`` takes or makes in the device's memory: of an array of the host's, a copy."""
        return value if isinstance(value, DeviceArray) else self.hold(value, node.where())

    def read(self, value: DeviceArray, array: Array) -> None:
        """Fill an array of the host's with a value; from any thread where that was brought."""
        if value.brought is None:
            with self.naming(value, "read from"):
                self.driver.read(value.storage.memory, array)
        else:
            np.copyto(array, value.brought)

    def naming(self, value: DeviceArray, done: str) -> Naming:
        """Has what goes wrong inside name for whom a value was made, and what was ``done`` with it on the device."""
        return Naming((self._alive[value.storage.number][1],), f", {done} {self.device.name}")

    def _memory(self, spec: Spec, where: str) -> Any:
        self.settle()
        try:
            return self._allocate(spec)
        except MemoryError:
            self._reclaim()
        try:
            return self._allocate(spec)
        except MemoryError as error:
            why = f" ({error})" if str(error) else ""
            raise ResourceError(self._shortage(spec, where, why, self._held, self._alive.values())) from error

    def _allocate(self, spec: Spec) -> Any:
        if self.limit is not None and self._held + spec.nbytes > self.limit:
            raise MemoryError
        return self.driver.allocate(max(1, spec.nbytes))

    def _reclaim(self) -> None:
        """Have who keeps idle memory let it go."""
        for keeper in tuple(self.keepers):
            keeper.let_go()
        self.settle()

    def check(self, tensors: Iterable[tuple[Spec, str, int, int]]) -> None:
        """Raise `ResourceError` where these do not fit beside what is held: specs, for whom, from and to which moment.

        They are in the order of their first moments. What is idle is let go first.
        """
        if self.limit is None:
            return
        self._reclaim()
        alive: list[tuple[int, Spec, str]] = []
        held = self._held
        for spec, where, first, last in tensors:
            held -= sum(gone.nbytes for until, gone, _ in alive if until < first)
            alive = [tensor for tensor in alive if tensor[0] >= first]
            if held + spec.nbytes > self.limit:
                among = [*self._alive.values(), *((its, made) for _, its, made in alive)]
                raise ResourceError(self._shortage(spec, where, "", held, among))
            held += spec.nbytes
            alive.append((last, spec, where))

    def take_back(self, number: int, memory: Any, nbytes: int) -> None:
        """Hear that nobody refers to a storage any more. From any thread, in the midst of anything."""
        self._gone.append((number, memory, nbytes))

    def settle(self) -> None:
        """Give the driver back what is gone."""
        while self._gone:
            number, memory, nbytes = self._gone.popleft()
            self.driver.free(memory)
            self._held -= nbytes
            del self._alive[number]

    def _shortage(self, spec: Spec, where: str, why: str, taken: int, alive: Iterable[tuple[Spec, str]]) -> str:
        limit = f", and it may hold {amount(self.limit)}" if self.limit is not None else ""
        largest = heapq.nlargest(LARGEST, alive, key=lambda held: held[0].nbytes)
        held = "; ".join(f"{made}: {its}, {amount(its.nbytes)}" for its, made in largest) or "none"
        return (
            f"{where}: no memory on {self.device.name} for {amount(spec.nbytes)} more, of {spec}{why}: "
            f"{amount(taken)} are held{limit}. Its largest tensors: {held}"
        )
