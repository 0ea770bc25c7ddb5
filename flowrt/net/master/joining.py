"""Which tasks newcomers are: a master says it to the nodes that ask, and introduces the newcomers to all others.

Law: a newcomer is the first task of its job that no node is, or that whose place it has. A task that joined may be
another's once its node is gone; one that a cluster file names is that only for a newcomer that asks for it. Masters of
one cluster agree by its nodes, which are asked one after another, always in the same order, and know who was first.
Where somebody else starts the nodes, and starts them again, they are what that says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import FlowrtError, GraphError, RemoteError, name_error
from flowrt.net.node.newcomers import Address, Known, taken
from flowrt.net.wire.messages import UNASKED, Introduce, Introduced, Recruit, Recruited

if TYPE_CHECKING:
    from flowrt.net.master.peers import Peers
    from flowrt.net.peer import Peer

Ask: TypeAlias = "Callable[[str, Introduce], Coroutine[Any, Any, Any]]"


class Joining:
    """What a master of ``peers`` has to do with newcomers; ``ask`` asks a task and answers what it says."""

    def __init__(self, peers: Peers, ask: Ask, numbers: Iterable[int]) -> None:
        self._peers = peers
        self._ask = ask
        self._numbers = iter(numbers)
        self._one_by_one = asyncio.Lock()

    async def recruit(self, peer: Peer, recruit: Recruit) -> None:
        """Say to the node that asks which task its newcomer is."""
        said = Recruited(recruit.number, "")
        try:
            async with self._one_by_one:
                said = Recruited(recruit.number, await self._place(recruit))
        except FlowrtError as error:
            said = Recruited(recruit.number, "", *name_error(error))
        finally:
            self._peers.post(peer, said)

    async def _place(self, recruit: Recruit) -> str:
        place, peers = (recruit.host, recruit.port), self._peers
        while True:
            task = choose(recruit.job, recruit.task, place, peers.addresses, peers.vacant, peers.joined, peers.jobs)
            if peers.addresses.get(task) == place and task not in peers.joined:  # as its cluster file says
                return task
            known = await self._introduce(task, place)
            if known is None:
                peers.welcome(task, place)
                return task
            peers.welcome(known[0], known[1:])  # another master was faster

    async def _introduce(self, task: str, place: Address) -> Known | None:
        """Have all nodes know who has joined; answers what one of them knows otherwise."""
        was = self._peers.addresses.get(task, ())
        told: set[str] = set()
        while others := sorted({*self._peers.serving()} - told):  # more may be met while these answer
            told.add(other := others[0])
            if other in self._peers.suspects:
                self._peers.post(self._peers[other], Introduce(UNASKED, task, *place, was))  # it reads that if it wakes
                continue
            try:
                known = await self._ask(other, Introduce(next(self._numbers), task, *place, was))
            except RemoteError:
                continue  # it is told of all tasks when it comes again
            if known:
                return known[0], known[1], known[2]
        return None

    def learn(self, said: Introduced) -> None:
        """Another master says who has joined."""
        place = said.host, said.port
        for other in self._peers.serving():
            self._peers.post(self._peers[other], Introduce(UNASKED, said.task, *place, place))
        self._peers.welcome(said.task, place)

    def moved(self, task: str, place: Address) -> None:
        """Who starts the nodes says that ``task`` is at ``place`` now, for the first time or again."""
        was = self._peers.addresses.get(task, place)
        for other in self._peers.serving():
            if other != task:
                self._peers.post(self._peers[other], Introduce(UNASKED, task, *place, was))
        self._peers.welcome(task, place)


def choose(
    job: str,
    number: int,
    place: Address,
    addresses: Mapping[str, Address],
    vacant: Collection[str],
    joined: Collection[str],
    jobs: Collection[str],
) -> str:
    """The task that a newcomer at ``place`` is: ``number`` of its job, if that is not negative, else the first free.

    ``addresses`` are the tasks that there are, of which nobody is the ``vacant`` ones, and no cluster file names those
    that ``joined``. Raises `GraphError` where it cannot be one.
    """
    if job not in jobs:
        raise GraphError(
            f"job {job!r} is not in the cluster, which has {', '.join(sorted(jobs))}; give --job one of these"
        )
    here = next((task for task, at in addresses.items() if at == place), None)
    wanted = f"/job:{job}/task:{number}"
    if here is not None and (here == wanted or (number < 0 and here.startswith(f"/job:{job}/task:"))):
        return here
    if here is not None:
        raise GraphError(f"{place[0]}:{place[1]} is {here}; give another --bind, or port 0 for any that is free")
    if number >= 0:
        if wanted in addresses and wanted not in vacant:
            raise GraphError(taken(wanted, *addresses[wanted]))
        return wanted
    tasks = (f"/job:{job}/task:{free}" for free in itertools.count())
    return next(task for task in tasks if task not in addresses or (task in vacant and task in joined))
