"""The devices of a host, opened: the host's own, and those that have memory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.sched.devices.names import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowrt.sched.devices.device import OpenDevice
    from flowrt.sched.host.lanes import Lanes
    from flowrt.sched.host.memory import Memory, MemoryStatistics

T = TypeVar("T")


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
        return value if isinstance(value, np.ndarray) else await value.device.give(value)

    async def aclose(self) -> None:
        self._lanes.close()


def open_devices(
    asked: Iterable[str] | None, lanes: Lanes, memory: Memory, limit: int | None = None
) -> dict[str, OpenDevice]:
    """The devices of a host, by name: those ``asked`` for that are here, by default its own alone.

    What cannot be found or opened is left out, and the log says so.
    """
    own = HostDevice(lanes, memory)
    if asked is None:
        return {own.name: own}
    from flowrt.sched.devices.driven import DriverDevice  # which most programs do without
    from flowrt.sched.devices.kinds import open_drivers

    return {
        name: own if driver is None else DriverDevice(name, driver, memory, limit)
        for name, driver in open_drivers(asked).items()
    }
