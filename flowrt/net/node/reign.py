"""What one master has on a node, and who it says that the other tasks are."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import BrokenStream, ClosedError, InternalError, RemoteError, SpecError, TakenOver, name_error
from flowrt.net.door.addresses import is_task_at
from flowrt.net.links import WAITING
from flowrt.net.wire.messages import Answer, Drive, Pong, Refused, Resume, to_frame
from flowrt.net.wire.steps import Done

if TYPE_CHECKING:
    from flowrt.net.door.transport import Connection
    from flowrt.net.link import TensorLink
    from flowrt.net.node.plans import ReadyPlan
    from flowrt.net.node.started import Started


@dataclass(slots=True, eq=False)
class Reign:
    """What one master has here, from its welcome until its connection has ended and it does not come back."""

    drive: Drive | Resume
    connection: Connection
    addresses: dict[str, tuple[str, int]]
    steps: Started
    plans: dict[int, ReadyPlan] = field(default_factory=dict)
    client: asyncio.Future[TensorLink] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waiting: deque[Any] = field(default_factory=lambda: deque(maxlen=WAITING))  # posted before there was a client
    followed: asyncio.Event = field(default_factory=asyncio.Event)  # another master came, or this one again
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard: float = field(default_factory=lambda: asyncio.get_running_loop().time())  # its last sign of life

    @property
    def link(self) -> TensorLink | None:
        """The client's, if there is one."""
        return self.client.result() if self.client.done() and not self.client.cancelled() else None

    @property
    def standing(self) -> TensorLink | None:
        """The client's, if there is one, and it is not closed."""
        link = self.link
        return None if link is None or link.closed else link

    def tell(self, message: Any) -> None:
        """Tell the master, if it is there."""
        say(self.connection, message)

    def post(self, message: Any) -> None:
        """Send the client a message: it waits for one that is to come."""
        if (link := self.link) is not None:
            link.post(message)
        elif not self.client.done():
            self.waiting.append(message)


def say(connection: Connection, message: Any) -> None:
    """Send without waiting; of an answer that cannot be sent, why."""
    try:
        connection.post_frame(to_frame(message))
    except (RemoteError, ClosedError):
        return  # the reign is ending; whoever reads the connection says so
    except (SpecError, MemoryError) as error:  # it cannot be sent, this can
        with suppress(RemoteError, ClosedError):
            connection.post_frame(to_frame(_failed(message, error)))


def _failed(message: Answer | Done | Pong, error: Exception) -> Answer | Done:
    """What to say in place of ``message``."""
    name, text = name_error(error)
    if isinstance(message, Answer):
        return Answer(message.request, None, name, text)
    return Done(message.number, error=name, text=text)


def superseded(reign: Reign) -> Refused:
    """What the master hears whose nodes another one of its session took over."""
    session = reign.drive.session
    return Refused(TakenOver.__name__, f"session {session!r} has a newer master: another one took its nodes over")


def address_of(peer: str, reign: Reign) -> tuple[str, int]:
    """Where a peer is, as the master said. Raises `InternalError` for one that it has not named."""
    if peer not in reign.addresses:
        raise InternalError(f"{peer} was not introduced by the master of session {reign.drive.session!r}")
    return reign.addresses[peer]


def addresses_in(drive: Drive | Resume) -> tuple[dict[str, tuple[str, int]], dict[str, tuple[str, int]]]:
    """Where a master says that each task is, and those of them that joined."""
    try:
        addresses = {task: (host, port) for task, (host, port) in drive.peers.items()}
        if not all(is_task_at(task, *address) for task, address in addresses.items()):
            raise ValueError("some of them are no task, or nobody can be there")
        return addresses, {task: addresses[task] for task in drive.joined}
    except (KeyError, TypeError, ValueError) as error:
        text = f"a master introduced its peers as {str(drive.peers)[:80]}, and as joined {str(drive.joined)[:80]}"
        raise BrokenStream(text) from error
