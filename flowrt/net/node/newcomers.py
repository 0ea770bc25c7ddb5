"""At a node's door: newcomers, who ask to be tasks of its cluster, and what is known of those that became such.

Law: which task a newcomer is, is a master's to say (`flowrt.net.master.joining`); a node holds the newcomer's
connection until one has. It notes who has joined, and says to a master that knows it otherwise what it knows: the first
to be heard is right. Only who names its task itself, while no session runs, needs no master.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import BrokenStream, ClosedError, GraphError, RemoteError
from flowrt.net.door.addresses import is_task_at
from flowrt.net.wire.messages import (
    UNASKED,
    Answer,
    Enlist,
    Enlisted,
    Introduce,
    Introduced,
    Recruit,
    Recruited,
    Refused,
    Waits,
    to_data,
)

if TYPE_CHECKING:
    from flowrt.net.door.transport import Connection
    from flowrt.net.node.reign import Reign

ANY_TASK = -1  # what a newcomer says that would be the first free one
MOST_SAID = 200  # characters of what is said of one that cannot be
Address: TypeAlias = tuple[str, int]
Known: TypeAlias = tuple[str, str, int]


class Newcomers:
    """Those who wait at this node, and the addresses of tasks that ``joined``."""

    def __init__(self) -> None:
        self.joined: dict[str, Address] = {}
        self._waiting: dict[int, tuple[Recruit, asyncio.Future[Enlisted | Refused]]] = {}
        self._numbers = itertools.count()

    async def attend(self, enlist: Enlist, connection: Connection, reigns: Sequence[Reign]) -> None:
        """Tell a newcomer which task it is, as the master of the newest of ``reigns`` says, or one that comes."""
        task = f"/job:{enlist.job}/task:{max(enlist.task, 0)}"
        if enlist.task < ANY_TASK or not is_task_at(task, enlist.host, enlist.port):
            raise BrokenStream(f"a newcomer cannot be {task} at {enlist.host}:{enlist.port}"[:MOST_SAID])
        number = next(self._numbers)
        recruit = Recruit(number, enlist.job, enlist.task, enlist.host, enlist.port)
        answer: asyncio.Future[Enlisted | Refused] = asyncio.get_running_loop().create_future()
        self._waiting[number] = recruit, answer
        try:
            if reigns:
                reigns[-1].tell(recruit)
            elif enlist.task >= 0:
                answer.set_result(self._take_in(enlist))
            else:
                await connection.send(to_data(Waits()))
            if await _stays(connection, answer):
                await connection.send(to_data(answer.result()))
        finally:
            del self._waiting[number]

    def _take_in(self, enlist: Enlist) -> Enlisted | Refused:
        task = f"/job:{enlist.job}/task:{enlist.task}"
        known = self._note(task, (enlist.host, enlist.port))
        return Refused(GraphError.__name__, taken(*known)) if known else Enlisted(task)

    def show(self, reign: Reign) -> None:
        """Tell a master that has come of all who wait."""
        for recruit, answer in self._waiting.values():
            if not answer.done():
                reign.tell(recruit)

    def hear(self, said: Recruited) -> None:
        """A master has said what becomes of a newcomer."""
        _, answer = self._waiting.get(said.number, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(Refused(said.error, said.text) if said.error else Enlisted(said.task))

    def introduce(self, said: Introduce, reign: Reign, reigns: Iterable[Reign]) -> bool:
        """Do as the master of a ``reign`` says, of all that there are; whether nothing is known otherwise."""
        place, before = (said.host, said.port), self.joined.get(said.task)
        if not is_task_at(said.task, *place):
            raise BrokenStream(f"{said.task} cannot be at {said.host}:{said.port}"[:MOST_SAID])
        known = self._note(said.task, place, said.was)
        if not known:
            reign.addresses[said.task] = place
            for other in reigns if before != place else ():
                if other is not reign:
                    other.tell(Introduced(said.task, *place))
        if said.request != UNASKED:
            reign.tell(Answer(said.request, known))
        return not known

    def _note(self, task: str, place: Address, was: tuple[Any, ...] = ()) -> Known | tuple[()]:
        """Note who has joined; answers what is known otherwise, if anything is."""
        before = self.joined.get(task)
        if before is not None and before not in (place, was):
            return (task, *before)
        other = next((other for other, at in self.joined.items() if at == place and other != task), None)
        if other is not None:
            return (other, *place)
        self.joined[task] = place
        return ()


async def _stays(connection: Connection, answer: asyncio.Future[Any]) -> bool:
    """Wait for an answer; False if who waits for it ends the connection before."""
    listening = asyncio.ensure_future(connection.receive())
    try:
        await asyncio.wait([listening, answer], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await listening  # raises why it ended
    except (RemoteError, ClosedError):
        return False
    finally:
        listening.cancel()
        await asyncio.wait([listening])
    return answer.done()


def taken(task: str, host: str, port: int) -> str:
    """Why a task cannot be another's."""
    return f"{task} is {host}:{port}; give another --task, or none for the first that is free"
