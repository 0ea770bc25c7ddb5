"""How the drivers of a host that is all there is reach each other and their client: through the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flowrt.device import CLIENT
from flowrt.sched.iteration.iterations import Iterations

if TYPE_CHECKING:
    from flowrt.sched.host import Host
    from flowrt.sched.rendezvous import Listener


class Loopback:
    """What is posted is heard in the loop's next turn, in order."""

    def __init__(self, host: Host) -> None:
        self.iterations = Iterations(host, self.post)
        self._task = host.task
        self._listeners: list[Listener] = []

    def post(self, peer: str, epoch: str, message: Any) -> None:
        """Send a message to a driver, or to the client."""
        asyncio.get_running_loop().call_soon(self._deliver, peer, message)

    def _deliver(self, peer: str, message: Any) -> None:
        if peer != CLIENT:
            self.iterations.hear(self._task, message)
            return
        for listener in tuple(self._listeners):
            listener.hear(self._task, message)

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Have ``listener`` told of what is posted to the client, while the block runs."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
