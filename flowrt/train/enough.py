"""Whether enough replicas are there to train, who is awaited else, and what people are told of both."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from flowrt.base.errors import FlowrtError, NodeLost
from flowrt.progress import Activity
from flowrt.train.program import where_lost

if TYPE_CHECKING:
    from flowrt.session.runners import Runner
    from flowrt.train.built import Built

NAMED = 4  # nodes that are awaited and told by name
_log = logging.getLogger(__name__)


async def wait_for_replicas(trainer: Built, runner: Runner, changed: Callable[[], Awaitable[None]]) -> None:
    """Wait until as many replicas are there as train, where they come and go; ``changed`` awaits other nodes.

    Raises `NodeLost` where too few are left and none come, and what ``changed`` does.
    """
    if not (missing := _missing(trainer, runner)):
        return
    if not trainer.floor:
        raise NodeLost(f"training cannot begin: {too_few(trainer, where_lost(trainer.nodes, runner.lost))}")
    _log.warning("%s waits for replicas: %s", trainer.name, missing)

    def look(activity: Activity) -> None:
        activity.left = _missing(trainer, runner)

    with Activity(f"{trainer.name} waits for replicas", look=look):
        while _missing(trainer, runner):
            await changed()


async def tell_silent(trainer: Built, runner: Runner) -> None:
    """Tell people, until cancelled, whom training waits for as too few replicas answer that are there."""
    told: list[str] = []
    while True:
        lost, suspects = runner.lost, runner.suspects
        there = [task for task in trainer.nodes if task not in lost]
        silent = [task for task in there if task in suspects]
        waits = len(there) - len(silent) < trainer.least <= len(there)
        if waits and silent != told:
            _log.warning("%s waits for %s: nothing is heard of them", trainer.name, _named(silent))
        told = silent if waits else []
        await runner.wait_changed(lost, suspects)


class Late:
    """Replicas that are back in a run, and count from the version after the one that was open then on.

    Where that one waits for nodes of which nothing is heard, and the next would not, ``fail`` is told ``why``: the run
    is to be begun anew. A run that servers drive alone goes on as it is, and so does one whose replicas come and go.
    """

    def __init__(self, trainer: Built, runner: Runner, fail: Callable[[NodeLost], None]) -> None:
        self.why: NodeLost | None = None
        self.driven = not trainer.floor
        self._trainer, self._runner, self._fail = trainer, runner, fail
        self._back: dict[int, int] = {}  # by replica, the version that was open when it came

    def note(self, replica: int, version: int) -> None:
        """A replica has begun again, while that version was open."""
        self._back[replica] = version
        self.look(version)

    def look(self, version: int) -> None:
        """That version is open now, or others are silent than before."""
        silent = self._back and where_lost(self._trainer.nodes, self._runner.suspects - self._runner.leaving)
        if silent and self.why is None and self.matter(version):
            self.why = NodeLost(f"training stopped at step {version + 1}: it waits for nodes that answer nothing")
            self._fail(self.why)

    def matter(self, version: int) -> bool:
        """Whether too few answer for that version, which is open, and enough with those who are back."""
        silent = {*where_lost(self._trainer.nodes, self._runner.lost | self._runner.suspects)}
        answer = {*range(self._trainer.replicas)} - silent
        late = {replica for replica, since in self._back.items() if since == version}
        return self.driven and len(answer) >= self._trainer.least > len(answer - late)


def _missing(trainer: Built, runner: Runner) -> str:
    """How many replicas are there, and who is awaited; empty where as many are there as train."""
    gone = where_lost(trainer.nodes, runner.lost | runner.leaving if trainer.floor else runner.lost)
    there = trainer.replicas - len(gone)
    if there >= trainer.least:
        return ""
    awaited = _named([trainer.nodes[replica] for replica in gone])
    return f"{there} of at least {trainer.least} are there; awaited are {awaited}"


def _named(tasks: Sequence[str]) -> str:
    more = f" and {len(tasks) - NAMED} more" if len(tasks) > NAMED else ""
    return ", ".join(tasks[:NAMED]) + more


def explained(trainer: Built, error: FlowrtError, gone: Sequence[int], version: int) -> FlowrtError:
    """Why a run has ended at ``version``, with the nodes of the replicas that are ``gone``; where these alone are no
    reason, with what else ``error`` tells, as of memory that was short."""
    if not isinstance(error, NodeLost) or not gone:
        return error
    why = too_few(trainer, gone) if trainer.replicas - len(gone) < trainer.least else error
    return NodeLost(f"training stopped at step {version + 1}: {why}")


def too_few(trainer: Built, gone: Sequence[int]) -> str:
    """That a trainer's policy cannot be met without the replicas that are ``gone``."""
    names = ", ".join(trainer.nodes[replica] or f"replica {replica}" for replica in gone)
    lost = f"{len(gone)} {'was' if len(gone) == 1 else 'were'} lost: {names}"
    return f"{trainer.policy} needs {trainer.least} of {trainer.replicas} replicas, and {lost}"
