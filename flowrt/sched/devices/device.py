"""The devices of a host, opened: the host's own, and those that have memory of their own.

Law: a device has one lane. Whatever touches its memory is called there, so values on it need no lock, and one that was
answered is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from flowrt.base.spec import Spec
from flowrt.sched.devices.kinds import open_drivers
from flowrt.sched.devices.memory import Arena, DeviceArray
from flowrt.sched.devices.names import HOST
from flowrt.sched.host.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowrt.sched.devices.driver import Array, Driver
    from flowrt.sched.host.memory import Memory, MemoryStatistics

T = TypeVar("T")


class Device(Protocol):
    """What the scheduler asks of a device, whichever it is."""

    @property
    def name(self) -> str:
        """Its name on its task: ``cuda:0``."""

    def statistics(self) -> MemoryStatistics:
        """What is held in its memory, at most so far, and its limit."""

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        """Call ``function`` in the device's lane and wait for it: see `Lanes.run`."""

    async def take(self, value: Any, where: str) -> Any:
        """A value of this task's in this device's memory; errors name ``where`` it is wanted."""

    async def give(self, value: Any) -> Array:
        """A value of this device's in the host's memory."""

    async def aclose(self) -> None:
        """Wait for its lane, and let everything go."""


class HostDevice:
    """The host's cores and memory, which tapes, feeds and other tasks use as they are."""

    name = HOST

    def __init__(self, lanes: Lanes, memory: Memory) -> None:
        self._lanes, self._memory = lanes, memory

    def statistics(self) -> MemoryStatistics:
        return self._memory.statistics()

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        return await self._lanes.run(function, *args, stop=stop)

    async def take(self, value: Any, where: str) -> Any:
        return await value.device.give(value) if isinstance(value, DeviceArray) else value

    async def give(self, value: Any) -> Array:
        array: Array = value
        return array

    async def aclose(self) -> None:
        self._lanes.close()


class DriverDevice:
    """A device that somebody has written a `Driver` for; ``driver`` and ``arena`` are for its lane alone.

    What is read from it is counted in the ``host``'s memory; ``limit`` bounds its own, in bytes.
    """

    def __init__(self, name: str, driver: Driver, host: Memory, limit: int | None = None) -> None:
        self.name = name
        self.driver = driver
        self.arena = Arena(self, limit)
        self._lanes, self._host = Lanes(1, name), host

    def statistics(self) -> MemoryStatistics:
        return self.arena.statistics()

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        return await self._lanes.run(function, *args, stop=stop)

    async def take(self, value: Any, where: str) -> Any:
        if isinstance(value, DeviceArray):
            if value.device is self:
                return value
            value = await value.device.give(value)
        return await self.run(self.put, value, where)

    async def give(self, value: Any) -> Array:
        return await self.run(self._read, value)

    def put(self, array: Array, where: str) -> DeviceArray:
        """A copy of an array of the host's; in the lane."""
        made = self.arena.empty(Spec(array.dtype, array.shape), where)
        self.driver.write(made.storage.memory, np.ascontiguousarray(array))
        return made

    def _read(self, value: DeviceArray) -> Array:
        array = self._host.output(value.shape, value.dtype)
        self.driver.read(value.storage.memory, array)
        return array

    async def aclose(self) -> None:
        try:
            await self.run(self._let_go)
        finally:
            self._lanes.close()

    def _let_go(self) -> None:
        self.arena.settle()
        self.driver.close()


def open_devices(
    asked: Iterable[str] | None, lanes: Lanes, memory: Memory, limit: int | None = None
) -> dict[str, Device]:
    """The devices of a host, by name: those ``asked`` for that are here, by default its own alone.

    What cannot be found or opened is left out, and the log says so.
    """
    own = HostDevice(lanes, memory)
    drivers = {} if asked is None else open_drivers(asked)
    found: dict[str, Device] = {
        name: own if driver is None else DriverDevice(name, driver, memory, limit) for name, driver in drivers.items()
    }
    return found or {own.name: own}
