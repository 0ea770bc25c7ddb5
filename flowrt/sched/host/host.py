"""One task: the devices it computes on, and the state that outlives steps and sessions.

Who makes a `Host` closes it. In-process sessions own a private one; ``python -m flowrt.worker`` serves one to masters.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import ClosedError, GraphError
from flowrt.base.valueclass import valueclass
from flowrt.kernels.ops.slices import rows_of
from flowrt.kernels.run import pools
from flowrt.sched.devices.names import HOST
from flowrt.sched.devices.opening import open_devices
from flowrt.sched.host.credit import Credit
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.queues import FIFO, Queue
from flowrt.sched.host.rendezvous import Budget, Remote, Rendezvous, Resident, StepKey
from flowrt.sched.host.spares import Spares
from flowrt.sched.host.variables import Name, Variables

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np

    from flowrt.base.attributes import Attr
    from flowrt.base.spec import Spec
    from flowrt.delays import Delay
    from flowrt.sched.devices.device import ApartDevice
    from flowrt.sched.host.tracer import Tracer

AHEAD = 4  # of the transfer budget, the part for values that nobody can use yet


@valueclass
class RunContext:
    """What one run of a step is told beside its feeds: who it is, and what random ops derive their keys from."""

    key: StepKey
    number: int = 0
    seed: int = 0


class Host:
    """A task's lanes, variables, queues and rendezvous.

    ``threads`` defaults to the cores the process may use; ``transfer_budget`` bounds, in bytes, the tensors on their
    way here and, with a quarter of it, those that nobody can use yet; ``memory_limit`` bounds what it holds;
    ``devices`` are those it looks for beside its own, each of which holds at most ``device_memory_limit`` bytes;
    ``delay`` makes it slow, for experiments with stragglers.
    """

    def __init__(
        self,
        task: str = "/job:local/task:0",
        *,
        threads: int | None = None,
        transfer_budget: int = 256 << 20,
        memory_limit: int | None = None,
        devices: Sequence[str] | None = None,
        device_memory_limit: int | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.task = task
        self.memory = Memory(memory_limit)
        self.lanes = Lanes(threads, empty=self.memory.empty)
        self.devices = open_devices(devices, self.lanes, self.memory, device_memory_limit)
        self.variables = Variables(task)
        self.spares = Spares(self.memory)
        self.rendezvous = Rendezvous()
        ahead = transfer_budget // AHEAD
        self.budget = Budget(max(1, transfer_budget - ahead))
        self.credit = Credit(ahead, lambda call: asyncio.get_running_loop().call_soon(call))
        self.remote: Remote | None = None
        self.iterations: Resident | None = None  # who hears what other tasks post
        self.delay = delay
        self.tracer: Tracer | None = None  # who notes what is done here, while that is traced
        self.direct_gate = (ctypes.c_int64 * 1)(1)  # whether plans that nodes run by themselves may be called directly
        self.closed = False
        pools.limit()
        self._queues: dict[Name, Queue] = {}

    def queue(
        self, name: Name, capacity: int, specs: Sequence[Spec] = (), order: Sequence[Attr] = FIFO, seed: int = 0
    ) -> Queue:
        """The queue of that name, made at its first use; ``specs`` are those of an element's components.

        ``seed`` is for an ``order`` at random that has none of its own.
        """
        found = self._queues.get(name)
        if found is None:
            found = self._queues[name] = Queue(name[1], capacity, specs, order, seed)
        held, asked = (found.capacity, found.specs, found.order), (capacity, tuple(specs), tuple(order))
        if held != asked:
            have, want = (_queue_form(*form) for form in (held, asked))
            raise GraphError(
                f"queue {name[1]!r} exists on {self.task} with {have}, not with {want}; "
                "rename it, use another container, or session.reset() the old one"
            )
        return found

    def trace(self, tracer: Tracer | None) -> None:
        """Have ``tracer`` note all that is done here from now on, or nobody. Direct calls tell nobody what they do."""
        self.tracer = tracer
        self.direct_gate[0] = tracer is None

    @property
    def helpers(self) -> tuple[int, int]:
        """How many threads help a tape, and the bytes they have to compute in."""
        return self.lanes.crew.threads - 1, self.lanes.crew.local_bytes

    def apart(self, name: str) -> ApartDevice:
        """A device that has memory of its own."""
        device: Any = self.devices[name]
        apart: ApartDevice = device
        return apart

    async def fetch(self, value: Any) -> Any:
        """A value of any device's, in the host's own memory."""
        return await self.devices[HOST].take(value, "")

    def inventory(self) -> dict[Name, Spec]:
        """The variables that have a value here."""
        return self.variables.inventory()

    def statistics(self) -> dict[str, Any]:
        """What is held in the memory of each device, and how full the queues are, in numbers by name."""
        memory = {name: device.statistics() for name, device in self.devices.items()}
        return {
            "memory": {name: {"held": s.held, "peak": s.peak, "limit": s.limit} for name, s in memory.items()},
            "queues": {"/".join(filter(None, name)): _in_numbers(queue) for name, queue in self._queues.items()},
        }

    def keep_rows(self, names: Collection[Name], groups: np.ndarray[Any, Any]) -> None:
        """Rows of variables that are saved are about to be written, those of ``groups`` as `group_rows` makes them."""
        self.variables.keep_rows(names, rows_of(groups))

    def reset(self, container: str | None = None) -> None:
        """Forget the variables, queues and runs of trainers of a container, or of all; who waits on them is told."""
        self.variables.reset(container)
        for name in [n for n in self._queues if container is None or n[0] == container]:
            self._queues.pop(name).close(cancel_pending_enqueues=True)
        if self.iterations is not None:
            self.iterations.reset(container)

    def check_open(self) -> None:
        """Raise `ClosedError` once the host is closed."""
        if self.closed:
            raise ClosedError(f"{self.task} is closed")

    async def aclose(self) -> None:
        """Wait for the lanes and let everything go. Closing twice is closing once."""
        if not self.closed:
            self.closed = True
            self.reset()
            if self.iterations is not None:
                await self.iterations.aclose()
            for device in self.devices.values():
                await device.aclose()
            pools.restore()


def _in_numbers(queue: Queue) -> dict[str, int]:
    now = queue.statistics()
    return {
        "size": now.size,
        "capacity": now.capacity,
        "waiting_enqueues": now.waiting_enqueues,
        "waiting_dequeues": now.waiting_dequeues,
    }


def _queue_form(capacity: int, specs: Sequence[Spec], order: Sequence[Attr]) -> str:
    otherwise = "" if order == FIFO else f" in order {' '.join(map(str, order))}"
    return f"capacity {capacity} for ({', '.join(map(str, specs))}){otherwise}"
