"""What the scheduler asks of a device.

Law: a device has one lane. Whatever touches its memory is called there, so values on it need no lock, and one that was
answered is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowrt.base.plan import Plan
    from flowrt.sched.devices.driver import Array
    from flowrt.sched.host.memory import MemoryStatistics
    from flowrt.sched.host.variables import Variables
    from flowrt.sched.units import Unit

T = TypeVar("T")


class Issuing(Protocol):
    """Carries out units of one plan on one device."""

    def carry_out(self, unit: Unit, inputs: Sequence[Any], words: Array) -> list[Any]:
        """The outputs of a unit whose variables are held, once all of it is done; called in the device's lane."""


class OpenDevice(Protocol):
    """What the scheduler asks of a device, whichever it is."""

    @property
    def name(self) -> str:
        """Its name on its task: ``cuda:0``."""

    def statistics(self) -> MemoryStatistics:
        """What is held in its memory, at most so far, and its limit."""

    async def run(self, function: Callable[..., T], *args: Any, stop: Callable[[], None] | None = None) -> T:
        """Call ``function`` in the device's lane and wait for it: see `Lanes.run`."""

    async def take(self, value: Any, where: str) -> Any:
        """A value of this task's in this device's memory, or of the host's few sizes as they are there.

        Errors name ``where`` it is wanted.
        """

    async def aclose(self) -> None:
        """Wait for its lane, and let everything go."""


class ApartDevice(OpenDevice, Protocol):
    """What is asked beside of one that has memory of its own."""

    def call(self, function: Callable[..., T], *args: Any, stop: Callable[[], None]) -> T:
        """As `run`, for a thread that may wait: see `Lanes.call`."""

    async def give(self, value: Any) -> Array:
        """A value of this device's in the host's memory."""

    def read(self, value: Any) -> Array:
        """The same, in the device's lane."""

    def issuer(self, plan: Plan, variables: Variables) -> Issuing:
        """What carries out those units of a plan that are issued on the device, in its lane."""
