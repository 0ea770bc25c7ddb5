"""The links that a node opens to other tasks: one to each address, opened when it is first needed.

Law: what is posted to a task while the link is being opened waits for it, in order and within a bound. A link that
breaks, or cannot be opened, loses what was posted on it: who posts is told, once posting makes sense again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Self, TypeAlias

from flowrt.base.errors import FlowrtError, LinkBroken, NodeLost, NoDescriptors, RemoteError
from flowrt.net.link import LinkStore, TensorLink
from flowrt.net.peer import RETRY, connected, is_refused
from flowrt.net.wire.messages import Carry, Serve, from_data

Address: TypeAlias = tuple[str, int]

WAITING = 1 << 12  # messages that wait for a link to be opened; the oldest are lost first, as if it had broken
SELDOM = 1.0  # seconds between two tries, at most
GIVEN_UP = 30.0  # seconds after which a peer that cannot be reached is taken for gone
_log = logging.getLogger(__name__)


class Links:
    """The links of ``task`` to others while the block runs.

    ``broken`` is told of a peer whose posts may be lost, and of the link that broke, if one was opened; ``gone`` of one
    that is not there any more, at an address: its host refuses, or another process has its place, or it was `GIVEN_UP`.
    It is told the birth of the process, too: empty where that is whichever was there.
    """

    def __init__(
        self,
        task: str,
        token: str,
        store: LinkStore,
        broken: Callable[[str, TensorLink | None], None],
        gone: Callable[[str, Address, str], None] = lambda peer, address, birth: None,
    ) -> None:
        self._task = task
        self._token = token
        self._store = store
        self._broken = broken
        self._gone = gone
        self._met: dict[str, tuple[Address, str]] = {}  # by peer: where it was met last, and the birth of that process
        self._since: dict[Address, float] = {}  # when the tries to reach it began, of those that cannot be
        self._links: dict[Address, TensorLink] = {}
        self._opening: dict[Address, asyncio.Lock] = {}
        self._posted: dict[Address, list[Any]] = {}  # by link that is being opened
        self._pauses: dict[Address, float] = {}  # before the next try, of those that could not be reached last
        self._openers: set[asyncio.Task[None]] = set()
        self._closed = True  # until the block runs

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._closed = False
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        self._posted.clear()
        for link in list(self._links.values()):
            link.close()
        for opener in self._openers:
            opener.cancel()
        await self._tasks.__aexit__(None, None, None)

    def __len__(self) -> int:
        return len(self._links)

    async def to(self, peer: str, address: Address) -> TensorLink:
        """The link to ``peer``. Raises `LinkBroken` if it cannot be reached: who is lost is for the master to say."""
        standing = self.standing(address)
        if standing is not None:
            return standing
        async with self._opening.setdefault(address, asyncio.Lock()):
            link = self.standing(address)
            if link is None:
                link = self._links[address] = await self._open(peer, address)
        return link

    def post(self, peer: str, address: Address, message: Any) -> None:
        """Send a message when the link to ``peer`` is there, which may be now."""
        waiting = self._posted.get(address) if self._posted else None
        if waiting is not None:
            waiting.append(message)
            if len(waiting) > WAITING:
                del waiting[0]
        elif (link := self._links.get(address)) is not None and link.post(message):
            return
        elif not self._closed:
            self._posted[address] = [message]
            opener = self._tasks.create_task(self._open_and_post(peer, address))
            self._openers.add(opener)
            opener.add_done_callback(self._openers.discard)

    def standing(self, address: Address) -> TensorLink | None:
        """The link to an address, if there is one now."""
        link = self._links.get(address)
        return None if link is None or link.closed else link

    async def _open_and_post(self, peer: str, address: Address) -> None:
        try:
            link = await self.to(peer, address)
        except (FlowrtError, MemoryError) as error:
            level = logging.ERROR if isinstance(error, NoDescriptors) and address not in self._pauses else logging.INFO
            _log.log(level, "%s: nothing can be posted to %s: %s", self._task, peer, error)
            pause = self._pauses[address] = min(2 * self._pauses.get(address, RETRY / 2), SELDOM)
            now = asyncio.get_running_loop().time()
            if is_refused(error) or now - self._since.setdefault(address, now) > GIVEN_UP:
                self._gone(peer, address, self._forget(peer, address))
            await asyncio.sleep(pause)
            self._posted.pop(address, None)
            self._tell_broken(peer)
        else:
            self._pauses.pop(address, None)
            self._since.pop(address, None)
            for message in self._posted.pop(address, ()):
                link.post(message)

    async def _open(self, peer: str, address: Address) -> TensorLink:
        try:
            connection = await connected(address, self._token, Carry(self._task, ""), self._store)
        except NodeLost as error:
            raise LinkBroken(f"{peer}: {error}") from error
        except RemoteError as error:
            raise type(error)(f"{peer}: {error}") from error
        met = from_data(connection.peer_hello)
        if not isinstance(met, Serve) or met.task != peer or self._closed:
            await connection.aclose()
            raise LinkBroken(f"{connection.peer} is not {peer}")
        (_, before), self._met[peer] = self._met.get(peer, (address, met.birth)), (address, met.birth)
        if before != met.birth:
            self._gone(peer, address, before)
        link = TensorLink(connection, peer, self._store)
        self._tasks.create_task(self._run(link, address))
        return link

    def _forget(self, peer: str, address: Address) -> str:
        """The birth of who was met at an address last; empty where that is told already, or was elsewhere."""
        where, birth = self._met.get(peer, (address, ""))
        if where != address:
            return ""
        self._met.pop(peer, None)
        return birth

    async def _run(self, link: TensorLink, address: Address) -> None:
        try:
            await link.run()
        except Exception:
            _log.exception("%s: the link to %s failed", self._task, link.peer)
        finally:
            if self._links.get(address) is link:
                del self._links[address]
            self._tell_broken(link.peer, link)

    def _tell_broken(self, peer: str, link: TensorLink | None = None) -> None:
        if not self._closed:
            self._broken(peer, link)
