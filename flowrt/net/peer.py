"""One task of a cluster as its master sees it: two connections, one to command it, one for tensors."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping

from flowrt.base.device import CLIENT, Device
from flowrt.base.errors import BrokenStream, FlowrtError, NodeLost, RemoteError, as_error
from flowrt.net.door.transport import Connection, connect
from flowrt.net.link import LinkStore, TensorLink
from flowrt.net.wire.messages import Answer, Carry, Drive, Refused, Resume, Serve, Welcome, from_data, to_hello

SOON = 0.005  # seconds; one that was killed just now may still take connections, and is tried again soon
RETRY = 0.2  # seconds between two tries to reach a node that is not up yet


class Peer:
    """One task, as its master sees it."""

    def __init__(
        self,
        task: str,
        place: tuple[str, int],
        met: Serve,
        control: Connection,
        link: TensorLink,
        joined: Mapping[str, tuple[str, int]],
    ) -> None:
        self.task = task
        self.joined = joined  # as its node knew when it was met
        self.local = met.host, met.way  # the host that it is on, and the best way to talk to it there
        self.imports, self.birth = dict(met.imports), met.birth
        self.place = place
        self.address = f"{place[0]}:{place[1]}"
        self.devices = [Device.parse(f"{task}/device:{name}") for name in met.devices]
        self.control = control
        self.link = link
        self.replies: dict[int, asyncio.Future[Answer]] = {}
        self.error: FlowrtError | None = None  # why it does not serve any more
        self.severed = False  # a connection broke; whether the task can be reached again will be seen

    def check(self) -> None:
        """Raise why the peer does not serve any more, if so."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def sever(self, why: FlowrtError) -> None:
        """Have both connections end, without a goodbye: this is not the end of the session. ``why`` ends the pulls."""
        self.severed = True
        self.link.close(why)
        self.control.cut()

    def lose(self, error: FlowrtError) -> None:
        """Give the peer up: whoever waits for a reply or a value has ``error``."""
        self.error = error
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(type(error)(*error.args))
        self.link.close(error)


def is_gone(error: BaseException) -> bool:
    """Whether the node that `meet` could not reach certainly will not be: it refuses, or nobody listens there."""
    return not isinstance(error, NodeLost) or is_refused(error)


def is_refused(error: BaseException) -> bool:
    """Whether an error says that nobody listens at an address."""
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
    return any(isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED for cause in causes)


async def meet(
    task: str,
    place: tuple[str, int],
    token: str,
    hello: Drive | Resume,
    store: LinkStore,
    patience: float,
    answered: Callable[[str], None] = lambda task: None,
) -> Peer:
    """Open both connections to a task that is to obey. Raises `RemoteError`, naming it, where that cannot be.

    That it has ``answered``, whatever it says then, is told at once.

    For ``patience`` seconds a node that cannot be reached is believed to be starting; one that is to `Resume` has
    started, and is tried once.
    """
    try:
        if isinstance(hello, Resume):
            control = await connected(place, token, hello, store, patience)
        else:
            control = await _reach(place, token, hello, store, patience)
        answered(task)
        try:
            met, joined = await _be_welcomed(task, control, patience)
            carrying = await connected(place, token, Carry(CLIENT, hello.epoch), store)
        except BaseException:
            if isinstance(hello, Resume):
                control.cut()  # a goodbye would end the reign that is to go on
            await control.aclose()
            raise
    except RemoteError as error:
        raise type(error)(f"{task}: {error}") from error
    return Peer(task, place, met, control, TensorLink(carrying, task, store), joined)


async def connected(
    place: tuple[str, int], token: str, hello: Drive | Resume | Carry, store: LinkStore, seconds: float = 10.0
) -> Connection:
    """A connection to a node, over which values come to where ``store`` has room for them."""
    return await connect(
        *place, token, to_hello(hello), timeout=seconds, allocate=store.allocate, local=store.local, tls=store.tls
    )


async def _reach(place: tuple[str, int], token: str, drive: Drive, store: LinkStore, patience: float) -> Connection:
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while True:
        try:
            left = max(RETRY, until - loop.time())
            return await connected(place, token, drive, store, left)
        except NodeLost:
            if loop.time() + RETRY > until:
                raise
        await asyncio.sleep(RETRY)


async def _be_welcomed(task: str, control: Connection, patience: float) -> tuple[Serve, Mapping[str, tuple[str, int]]]:
    met = from_data(control.peer_hello)
    if not isinstance(met, Serve) or met.task != task:
        who = met.task if isinstance(met, Serve) else "no node"
        raise RemoteError(f"{control.peer} is {who}: the cluster's addresses are not the nodes' own")
    try:
        async with asyncio.timeout(patience):
            first = from_data(await control.receive())
    except TimeoutError:
        raise NodeLost(f"{control.peer} is still busy with an older session, after {patience:g} s") from None
    match first:
        case Welcome(joined):
            return met, {other: (str(host), int(port)) for other, (host, port) in joined.items()}
        case Refused(error, text):
            raise as_error(error, text)
        case _:
            raise BrokenStream(f"{control.peer} began with {type(first).__name__}")
