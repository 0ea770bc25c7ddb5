"""What the nodes of a cluster say that they have, those that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from flowrt.base import codec
from flowrt.base.errors import FlowrtError, NodeLost
from flowrt.base.plan import spec_from_data
from flowrt.net.wire.frames import NoRoom

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.net.master.peers import Peers

Name = tuple[str, str]


async def collect(
    asks: Mapping[str, Coroutine[Any, Any, Any]], peers: Peers, wanted: Collection[Name] | None = None
) -> dict[Name, Spec]:
    """The variables that tasks answer when they are asked, by (container, name).

    Who is suspect is not waited for once the others have all that are ``wanted``; without these, all are. Who is lost
    meanwhile has none.
    """
    found: dict[Name, Spec] = {}
    enough = None if wanted is None else frozenset(wanted)
    asked = {asyncio.ensure_future(ask): task for task, ask in asks.items()}
    try:
        while asked and not (enough is not None and enough <= found.keys() and peers.suspects >= {*asked.values()}):
            await _wait_for_news(asked, peers)
            for answer in [answer for answer in asked if answer.done()]:
                task = asked.pop(answer)
                if not (isinstance(answer.exception(), NodeLost) and task in peers.lost):
                    await _unpack(answer.result(), task, found)
    finally:
        await _end(asked)
    return found


async def answered(asks: Mapping[str, Coroutine[Any, Any, Any]], within: float) -> dict[str, Any]:
    """What tasks answer when they are asked, within so many seconds. Who does not, or fails, is left out."""
    asked = {asyncio.ensure_future(ask): task for task, ask in asks.items()}
    try:
        if asked:
            await asyncio.wait(asked, timeout=within)
        came = {task: answer for answer, task in asked.items() if answer.done()}
        return {task: a.result() for task, a in came.items() if not isinstance(a.exception(), FlowrtError)}
    finally:
        await _end(asked)


async def _end(asked: Collection[asyncio.Future[Any]]) -> None:
    """Cancel what has not answered, and wait until that is so."""
    for answer in asked:
        answer.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def _wait_for_news(asked: Collection[asyncio.Future[Any]], peers: Peers) -> None:
    """Wait for one of these answers, or for a change of who is there."""
    changed = asyncio.ensure_future(peers.wait_changed(peers.lost, peers.suspects))
    try:
        await asyncio.wait([*asked, changed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end([changed])


async def _unpack(packed: Any, task: str, found: dict[Name, Spec]) -> None:
    if isinstance(packed, NoRoom):
        raise packed.error(f"the variables of {task}")
    for container, name, spec in codec.unpack_parts(codec.bytes_of(packed)):
        found[container, name] = spec_from_data(spec)
        await asyncio.sleep(0)
