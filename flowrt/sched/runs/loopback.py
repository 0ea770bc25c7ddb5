"""How the drivers of a host that is all there is reach each other and their client: through the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from flowrt.base.device import CLIENT
from flowrt.sched.host.rendezvous import Listeners
from flowrt.sched.runs.iterations import Iterations

if TYPE_CHECKING:
    from flowrt.sched.host.host import Host


class Loopback:
    """What is posted is heard in the loop's next turn, in order, by a driver or by the client's ``listeners``."""

    def __init__(self, host: Host) -> None:
        self.iterations = Iterations(host, self.post)
        self._task = host.task
        self.listeners = Listeners()

    def post(self, peer: str, epoch: str, message: Any) -> None:
        """Send a message to a driver, or to the client."""
        asyncio.get_running_loop().call_soon(self._deliver, peer, message)

    def _deliver(self, peer: str, message: Any) -> None:
        if peer == CLIENT:
            self.listeners.hear(self._task, message)
        else:
            self.iterations.hear(self._task, message)
