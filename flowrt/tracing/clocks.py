"""How far another process's clock is ahead of this one's, by questions and answers (Cristian 1989; NTP's on-wire rule).

A question left at ``asked``, the answer that says the other's time came at ``answered``, both by the clock here: the
other's time was read in between, so it is ahead by what it said less the middle of the two, give or take half the round
trip. Of many, those of the shortest round trips are believed. Two processes of one machine read one clock: where no
answer contradicts that, they are taken to. Pure; nanoseconds throughout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from flowrt.base.valueclass import valueclass

WINDOW = 10_000_000_000  # of each such stretch of time the best answer is believed, as clocks drift


@valueclass
class ClockSample:
    """At ``at``, by the clock here, the other one was ahead by ``ahead``, give or take ``uncertainty``."""

    at: int
    ahead: int
    uncertainty: int


def clock_sample(asked: int, said: int, answered: int) -> ClockSample:
    """What one question and its answer say."""
    return ClockSample((asked + answered) // 2, said - (asked + answered) // 2, (answered - asked + 1) // 2)


class Alignment:
    """How another process's clock is read here. ``uncertainty`` is by how much that may be wrong."""

    def __init__(self, samples: Iterable[ClockSample] = ()) -> None:
        best: dict[int, ClockSample] = {}
        shared = True
        for sample in samples:
            shared = shared and abs(sample.ahead) <= sample.uncertainty
            window = sample.at // WINDOW
            if window not in best or sample.uncertainty < best[window].uncertainty:
                best[window] = sample
        kept = sorted(best.values(), key=lambda sample: sample.at)
        self.is_shared = shared
        self.uncertainty = 0 if shared else max(sample.uncertainty for sample in kept)
        self._there = [sample.at + sample.ahead for sample in kept]
        self._ahead = [0 if shared else sample.ahead for sample in kept] or [0]

    @property
    def ahead(self) -> int:
        """By how much the other clock was ahead when it was last asked."""
        return self._ahead[-1]

    def here(self, there: int) -> int:
        """What the clock here showed when the other one showed this: between two answers, as if it drifted evenly."""
        after = bisect_right(self._there, there)
        if after == 0 or after >= len(self._there):
            return there - self._ahead[max(0, min(after, len(self._ahead)) - 1)]
        begin, end = self._there[after - 1], self._there[after]
        drift = (self._ahead[after] - self._ahead[after - 1]) * (there - begin) // max(1, end - begin)
        return there - self._ahead[after - 1] - drift
