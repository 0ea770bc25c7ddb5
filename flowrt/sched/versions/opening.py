"""Whether a trainer's parameter servers hold one version of its variables, and what is to be done where they do not.

Before a run begins, every server is asked what it holds, and the answers decide: go, apply on the servers that are
behind what the others have applied already, end a run whose client is gone, or refuse. What the variables say counts,
for a restored checkpoint has moved them: what is left of an earlier run only helps where it fits them.

A dead client leaves servers apart by one version at most, and those behind still hold the updates that they were
ordered to apply, or are about to be: a version is ordered only once every server has applied the one before it, and
only updates that all hold. Anything more is a server that came back without its state, or a checkpoint restored in
part, and no server can make it good.

It must not know messages or sessions. Answers age, so whoever asks and acts on them sees to this:

- A run begins on server 0 before the others, and it is asked last: a run that others say goes on, and it does not know
  of any more, has ended.
- Whoever acts names the run and the version that was decided about; a server that has gone on since does nothing, and
  one that has ended a run obeys no order of it, but only what was decided here.
- Where versions are apart, another client may have trained between two answers: only what was answered twice is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from flowrt.base.valueclass import valueclass


@valueclass
class Left:
    """What a server keeps of the newest run of the trainer that it took part in.

    Args:
        run: Its number.
        version: The version that the server's shard is at.
        held: The updates that it holds: (replica, the version that it was computed from).
        order: On server 0, the set that was ordered and that some server may not have applied, with its version; on
            others, where server 0 may be lost, the set that they were ordered last.
        weights: Those of the updates in that order, where it is no mean.
        versions: Those that they were computed from, where not all from the one that they are applied to.
        ended: Whether it goes on no more: nothing is being applied, and nothing will be.
        client: Who drives it, for people; empty once that client is gone. Only what server 0 says of it counts.
        broke: Whether it began to apply that version and could not end it.
        unseen: On server 0, the reports of what was applied that the run's client is not known to have had, in order;
            on others, where server 0 may be lost, what is known there of the newest.
        server: Which of the run's servers it was.
        detached: On server 0, of which name sessions may attach to the run, as it needs no client; empty otherwise.
    """

    run: int
    version: int
    held: frozenset[tuple[int, int]] = frozenset()
    order: tuple[int, tuple[int, ...]] | None = None
    ended: bool = True
    client: str = ""
    broke: bool = False
    weights: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()
    unseen: tuple[Any, ...] = ()
    server: int = 0
    detached: str = ""


@valueclass
class Said:
    """What one server answers: its name, the version its variables are at (None without any), and what is ``left``."""

    server: str
    version: int | None
    left: Left | None = None


@valueclass
class Go:
    """All servers are at ``version``: a run may begin there. ``unseen`` are the reports that nobody may have had."""

    version: int
    unseen: tuple[Any, ...] = ()


@valueclass
class Going:
    """``run`` is a detached one of this session: its client is to attach to it, and has the ``unseen`` reports then."""

    run: int
    unseen: tuple[Any, ...] = ()


@valueclass
class End:
    """``run`` has no client any more and is to be ended on ``server``; then ask the servers again.

    Server 0 has all servers apply what was ordered, and ends the run on them, before it answers. Another one ends it
    by itself, which is right only where server 0 has ended it, or knows nothing of it any more.
    """

    run: int
    server: int


@valueclass
class Apply:
    """In ``run``, ``servers`` are to apply to ``version`` what the others have: the updates of ``replicas``.

    Then ask the servers again.
    """

    run: int
    version: int
    replicas: tuple[int, ...]
    servers: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()


@valueclass
class Refuse:
    """No run may begin; ``text`` says why, and what helps."""

    text: str


Opening: TypeAlias = "Go | Going | End | Apply | Refuse"


def decide(trainer: str, said: Sequence[Said], detached: str = "") -> Opening:
    """What is to be done before a run of ``trainer`` begins, from what each of its servers says, server 0 first.

    ``detached`` is the name of the session, if it would attach to a run that needs no client.
    """
    first = said[0].left
    if first is not None and detached and first.detached == detached:
        return Going(first.run)
    for server, left in enumerate(one.left for one in said):
        if left is None or left.ended:
            continue
        if server == 0 and left.client and left.detached:
            return Refuse(
                f"{trainer} is being trained, detached, for {left.client}: attach to it from a session named "
                f"{left.detached!r} by trainer.steps(session, source, detached=True), or end it by "
                "`await trainer.stop(session)`"
            )
        if server == 0 and left.client:
            return Refuse(
                f"{trainer} is being trained by {left.client}, and one client at a time trains it: "
                "wait until that one ends, or end it"
            )
        return End(left.run, server)
    broke = [one.server for one in said if one.left is not None and one.left.broke and one.left.version == one.version]
    if broke:
        return Refuse(f"{trainer}: an update could not be applied whole on {', '.join(broke)}; {_FIX}")
    versions = [one.version or 0 for one in said]
    if min(versions) == max(versions):
        return Go(versions[0], _unseen(said, versions[0]))
    return _missing(said, versions) or Refuse(_apart(trainer, said))


def _unseen(said: Sequence[Said], version: int) -> tuple[Any, ...]:
    """What was reported and nobody may have had of how the variables came to ``version``; nothing if otherwise.

    Server 0 of that run knows; without it, the others know of what they were ordered.
    """
    first = said[0].left
    if first is None or first.version != version:
        return ()
    if first.server == 0:
        return first.unseen
    left = [one.left for one in said if one.left is not None and one.left.run == first.run]
    known = {report.version: report for one in left for report in one.unseen if report.version < version}
    return tuple([known[at] for at in sorted(known)])


def _missing(said: Sequence[Said], versions: list[int]) -> Apply | None:
    """What the servers that are behind have to apply to be where the others are; None where that cannot be known."""
    least, first = min(versions), said[0].left
    left = [one.left for one in said if one.left is not None and first is not None and one.left.run == first.run]
    knows = next((one for one in left if one.order is not None and one.order[0] == least), None)
    if first is None or knows is None or knows.order is None or max(versions) != least + 1:
        return None
    replicas = knows.order[1]
    updates = list(zip(replicas, knows.versions or (least,) * len(replicas), strict=True))
    for one, version in zip(said, versions, strict=True):
        if one.left is None or one.left.run != first.run or one.left.version != version:
            return None
        if version == least and not one.left.held.issuperset(updates):
            return None
    behind = tuple(i for i, version in enumerate(versions) if version == least)
    return Apply(first.run, least, replicas, behind, knows.weights, knows.versions)


_FIX = "go back to a checkpoint by session.restore(), or, to begin anew, forget all variables by session.reset()"


def _apart(trainer: str, said: Sequence[Said]) -> str:
    """The text of the error about servers that are not at one version."""
    where = ", ".join(_place(one) for one in said)
    return f"the parameter servers of {trainer} are not at one version: {where}; {_FIX}"


def _place(one: Said) -> str:
    if not one.version and one.left is None:
        return f"{one.server} at none (nothing is left of what it held; was it started again?)"
    return f"{one.server} at {one.version}"
