"""Who is alive, who is suspected, who is lost: what the master believes of each task.

Law: pure; ``now`` is an argument, in seconds of any monotonic clock. Nobody chooses a timeout: how long a task may be
silent follows from how long it used to be. Its silences are taken to be a least one and an exponential tail, both
estimated as they come, and φ is minus the decimal logarithm of the chance that a task that is well is silent for as
long as this one is: the φ accrual failure detector (Hayashibara, Défago, Yared and Katayama, SRDS 2004), whose normal
distribution has too thin a tail for machines under load. A φ of `SUSPICION` makes a task suspect, to be skipped and
named, and alive again at the next sign of life. `LOST` times that silence, or not to be reached, makes it lost, until
it joins again. Whatever was measured, there is a least silence that says something, and a most that is borne.

A heartbeat is answered by a node's loop while its kernels run elsewhere, so a long kernel is slow and never suspect.
Whoever did not look for a while was asleep itself: that time is nobody's silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from flowrt.base.valueclass import valueclass

BEAT = 0.5  # seconds between heartbeats, where nobody says otherwise
SUSPICION = 5.0  # φ: one in 10^5 silences of a task that is well is as long
LEAST, MOST = 4, 20  # beats of silence below which nobody is suspect, and from which everybody is
LOST = 15  # times the silence that makes a task suspect
FEW, MANY = 8, 128  # silences that an estimate counts as known before the first one, and that it remembers


class Belief(Enum):
    """What is believed of a task."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@valueclass
class Change:
    """A task's new standing, and why."""

    task: str
    standing: Belief
    cause: str


@dataclass(slots=True)
class _Seen:
    heard: float
    mean: float  # of its silences, as are all below
    variance: float = 0.0
    known: int = FEW
    longest: float = 0.0  # of those that have ended since the last look
    standing: Belief = Belief.ALIVE

    def hear(self, now: float) -> None:
        if now > self.heard:
            if now - self.heard > self.longest:
                self.longest = now - self.heard
            self.heard = now

    def learn(self, silent: float) -> None:
        """Count a silence among the usual ones."""
        self.known = min(self.known + 1, MANY)
        apart, weight = silent - self.mean, 1 / self.known
        self.mean += weight * apart
        self.variance = (1 - weight) * (self.variance + weight * apart * apart)

    @property
    def suspicious(self) -> float:
        """The silence whose φ is `SUSPICION`: an exponential tail has the deviation for its mean."""
        return self.mean + (SUSPICION * math.log(10) - 1) * math.sqrt(self.variance)


class Liveness:
    """The standing of each task that joined. Every event answers the changes it made.

    ``beat`` is how often, in seconds, each task gives a sign of life if it is well, and `look` is called.
    """

    def __init__(self, beat: float, now: float) -> None:
        self.beat = beat
        self._awake = now
        self._seen: dict[str, _Seen] = {}

    def joined(self, task: str, now: float) -> None:
        """A connection to ``task`` stands: it is alive, whatever it was."""
        self._seen[task] = _Seen(now, self.beat)

    def heard(self, task: str, now: float) -> list[Change]:
        """``task`` gave a sign of life. One that is lost stays lost: it must join again."""
        self._wake(now)
        seen = self._seen[task]
        seen.hear(now)
        if seen.standing is not Belief.SUSPECT:
            return []
        seen.standing = Belief.ALIVE
        return [Change(task, Belief.ALIVE, "it answers again")]

    def broke(self, task: str, cause: str) -> list[Change]:
        """The connection to ``task`` is gone, and there will not be another."""
        seen = self._seen[task]
        if seen.standing is Belief.LOST:
            return []
        seen.standing = Belief.LOST
        return [Change(task, Belief.LOST, cause)]

    def look(self, now: float) -> list[Change]:
        """Judge the silent ones. To be called every ``beat`` seconds."""
        self._wake(now)
        for seen in self._seen.values():
            self._learn(seen)
        return [change for task, seen in self._seen.items() for change in self._judge(task, seen, now - seen.heard)]

    def standing(self, task: str) -> Belief:
        """What the task is believed to be."""
        return self._seen[task].standing

    def having(self, standing: Belief) -> frozenset[str]:
        """The tasks of that standing."""
        return frozenset(task for task, seen in self._seen.items() if seen.standing is standing)

    def patience(self, task: str) -> float:
        """For how many seconds the task may be silent before it is suspect."""
        return self._patience(self._seen[task])

    def _wake(self, now: float) -> None:
        """What this side slept is nobody's silence."""
        overslept = now - self._awake - self.beat
        if now > self._awake:
            self._awake = now
        if overslept > 0:
            for seen in self._seen.values():
                seen.heard += overslept

    def _learn(self, seen: _Seen) -> None:
        """Learn of a beat's longest silence: what comes in quick succession tells nothing of how late a beat may be.

        A silence that made it suspect counts as one that just did, else a node that was stopped for a minute might be
        stopped for another, and nobody would notice.
        """
        if seen.longest:
            seen.learn(min(max(seen.longest, self.beat), self._patience(seen)))
            seen.longest = 0.0

    def _patience(self, seen: _Seen) -> float:
        return min(max(seen.suspicious, LEAST * self.beat), MOST * self.beat)

    def _judge(self, task: str, seen: _Seen, silent: float) -> Iterable[Change]:
        if seen.standing is Belief.LOST or silent < LEAST * self.beat:
            return []
        patience = self._patience(seen)
        if silent >= LOST * patience:
            return self.broke(task, f"it has been silent for {silent:.1f} s")
        if seen.standing is Belief.SUSPECT or silent < patience:
            return []
        seen.standing = Belief.SUSPECT
        return [Change(task, Belief.SUSPECT, f"it has been silent for {silent:.1f} s")]
