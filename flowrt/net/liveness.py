"""Who is alive, who is suspected, who is lost: what the master believes of each task.

Law: pure; ``now`` is an argument, in seconds of any monotonic clock. Silent for ``suspect`` seconds: suspect, to be
skipped and named, and alive again at the next sign of life. Silent for ``lost`` seconds, or not to be reached: lost,
until it joins again. A heartbeat is answered by a node's loop while its kernels run elsewhere, so a long kernel is slow
and never suspect. Whoever did not look for a while was asleep itself: that time is nobody's silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from flowrt.valueclass import valueclass


class Standing(Enum):
    """What is believed of a task."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@valueclass
class Timing:
    """In seconds: between heartbeats, and of silence until a task is suspect and lost."""

    beat: float = 0.5
    suspect: float = 2.0
    lost: float = 30.0


@valueclass
class Change:
    """A task's new standing, and why."""

    task: str
    standing: Standing
    cause: str


@dataclass(slots=True)
class _Seen:
    heard: float
    standing: Standing = Standing.ALIVE


class Liveness:
    """The standing of each task that joined. Every event answers the changes it made."""

    def __init__(self, timing: Timing, now: float) -> None:
        self.timing = timing
        self._looked = now
        self._seen: dict[str, _Seen] = {}

    def joined(self, task: str, now: float) -> None:
        """A connection to ``task`` stands: it is alive, whatever it was."""
        self._seen[task] = _Seen(now)

    def heard(self, task: str, now: float) -> list[Change]:
        """``task`` gave a sign of life. One that is lost stays lost: it must join again."""
        seen = self._seen[task]
        seen.heard = max(now, seen.heard)
        if seen.standing is not Standing.SUSPECT:
            return []
        seen.standing = Standing.ALIVE
        return [Change(task, Standing.ALIVE, "it answers again")]

    def broke(self, task: str, cause: str) -> list[Change]:
        """The connection to ``task`` is gone, and there will not be another."""
        seen = self._seen[task]
        if seen.standing is Standing.LOST:
            return []
        seen.standing = Standing.LOST
        return [Change(task, Standing.LOST, cause)]

    def look(self, now: float) -> list[Change]:
        """Judge the silent ones. To be called every ``timing.beat`` seconds."""
        overslept = now - self._looked - 2 * self.timing.beat
        self._looked = now
        if overslept > 0:
            for seen in self._seen.values():
                seen.heard += overslept
        return [change for task, seen in self._seen.items() for change in self._judge(task, seen, now - seen.heard)]

    def standing(self, task: str) -> Standing:
        """What the task is believed to be."""
        return self._seen[task].standing

    def having(self, standing: Standing) -> frozenset[str]:
        """The tasks of that standing."""
        return frozenset(task for task, seen in self._seen.items() if seen.standing is standing)

    def _judge(self, task: str, seen: _Seen, silent: float) -> Iterable[Change]:
        if seen.standing is Standing.LOST or silent < self.timing.suspect:
            return []
        if silent >= self.timing.lost:
            return self.broke(task, f"it has been silent for {silent:.1f} s")
        if seen.standing is Standing.SUSPECT:
            return []
        seen.standing = Standing.SUSPECT
        return [Change(task, Standing.SUSPECT, f"it has been silent for {silent:.1f} s")]
