"""A device that has memory of its own, behind what somebody has written who knows it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from flowrt.base.errors import DeviceLost
from flowrt.sched.devices.blame import Naming
from flowrt.sched.devices.issuing import Issuer
from flowrt.sched.devices.memory import Arena, DeviceArray
from flowrt.sched.devices.replaying import may_size
from flowrt.sched.host.lanes import Lanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowrt.base.plan import Plan
    from flowrt.sched.devices.driver import Array, Driver
    from flowrt.sched.host.memory import Memory, MemoryStatistics
    from flowrt.sched.host.variables import Variables

T = TypeVar("T")
_log = logging.getLogger(__name__)


class DriverDevice:
    """A device that somebody has written a `Driver` for, which its lane alone calls.

    What is read from it is counted in the ``host``'s memory; ``limit`` bounds its own, in bytes.
    """

    def __init__(self, name: str, driver: Driver, host: Memory, limit: int | None = None) -> None:
        self.name = name
        self._driver = driver
        self._arena = Arena(self, driver, limit)
        self._lanes, self._host = Lanes(1, name), host
        self._lost = ""  # why nothing is computed here any more

    def statistics(self) -> MemoryStatistics:
        return self._arena.statistics()

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        return await self._lanes.run(self._guarded, function, *args, stop=stop)

    def call(self, function: Callable[..., T], *args: Any, stop: Callable[[], None]) -> T:
        answer: T = self._lanes.call(self._guarded, function, *args, stop=stop)
        return answer

    def _guarded(self, function: Callable[..., T], *args: Any) -> T:
        """Call it, unless the device is lost; it is from when the driver says so."""
        if not self._lost:
            try:
                return function(*args)
            except DeviceLost as error:
                self._lost = f"{self.name} is lost: {error}"
                _log.error("%s", self._lost)
                raise DeviceLost(self._lost) from error
        raise DeviceLost(self._lost)

    async def take(self, value: Any, where: str) -> Any:
        if isinstance(value, DeviceArray):
            if value.device is self:
                return value
            value = await value.device.give(value)
        elif may_size(value):  # what may decide sizes stays where those who infer shapes see it
            return value
        return await self.run(self._arena.hold, value, where)

    async def give(self, value: Any) -> Array:
        if value.brought is not None:
            return self.read(value)
        return await self.run(self.read, value)

    def read(self, value: DeviceArray) -> Array:
        array = self._host.output(value.shape, value.dtype)
        self._arena.read(value, array)
        return array

    def issuer(self, plan: Plan, variables: Variables) -> Issuer:
        return Issuer(plan, self._arena, variables)

    async def aclose(self) -> None:
        try:
            await self._lanes.run(self._let_go)
        finally:
            self._lanes.close()

    def _let_go(self) -> None:
        with Naming((self.name,), ", closed"):
            if not self._lost:
                self._arena.settle()
            self._driver.close()
