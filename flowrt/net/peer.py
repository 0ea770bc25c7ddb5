"""One task of a cluster as its master sees it: two connections, one to command it, one for tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowrt.device import Device
from flowrt.errors import BrokenStream, FlowrtError, NodeLost, RemoteError
from flowrt.net.link import Link, Store
from flowrt.net.messages import CLIENT, Answer, Carry, Drive, Refused, Serve, Welcome, as_error, from_data, to_data
from flowrt.net.transport import Connection, connect

RETRY = 0.2  # seconds between two tries to reach a node that is not up yet


class Peer:
    """One task, as its master sees it."""

    def __init__(self, task: str, address: str, devices: Sequence[str], control: Connection, link: Link) -> None:
        self.task = task
        self.address = address
        self.devices = [Device.parse(f"{task}/device:{name}") for name in devices]
        self.control = control
        self.link = link
        self.replies: dict[int, asyncio.Future[Answer]] = {}
        self.error: FlowrtError | None = None  # why it does not serve any more

    def check(self) -> None:
        """Raise why the peer does not serve any more, if so."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def lose(self, error: FlowrtError) -> None:
        """Give the peer up: whoever waits for a reply has ``error``."""
        self.error = error
        for reply in self.replies.values():
            if not reply.done():
                reply.set_exception(type(error)(*error.args))
        self.link.close()


async def meet(task: str, host: str, port: int, token: str, drive: Drive, store: Store, patience: float) -> Peer:
    """Open both connections to a task that is to obey. Raises `RemoteError`, naming it, where that cannot be.

    For ``patience`` seconds a node that cannot be reached is believed to be starting.
    """
    try:
        control = await _reach(host, port, token, drive, patience)
        try:
            met = await _be_welcomed(task, control, patience)
            carrying = await connect(host, port, token, to_data(Carry(CLIENT, drive.epoch)), timeout=patience)
        except BaseException:
            await control.aclose()
            raise
    except RemoteError as error:
        raise type(error)(f"{task}: {error}") from error
    return Peer(task, f"{host}:{port}", met.devices, control, Link(carrying, task, store))


async def _reach(host: str, port: int, token: str, drive: Drive, patience: float) -> Connection:
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while True:
        try:
            return await connect(host, port, token, to_data(drive), timeout=max(RETRY, until - loop.time()))
        except NodeLost:
            if loop.time() + RETRY > until:
                raise
        await asyncio.sleep(RETRY)


async def _be_welcomed(task: str, control: Connection, patience: float) -> Serve:
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
        case Welcome():
            return met
        case Refused(error, text):
            raise as_error(error, text)
        case _:
            raise BrokenStream(f"{control.peer} began with {type(first).__name__}")
