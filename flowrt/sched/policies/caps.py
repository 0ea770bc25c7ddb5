"""What versions of late would have come to, had they been closed as soon as so many updates were there.

Law: pure. Of each number m of updates, what would have come of closing at the m-th, or where the version was closed if
that was before, is known exactly, whatever is believed of times. So the best m of late is a lower bound for the worth
per second that can be had; and where closing at m would have been better than what was decided, by more than chance
explains, m is followed: prediction with expert advice, with each m as an expert (Littlestone and Warmuth, "The Weighted
Majority Algorithm", Information and Computation 108, 1994), whose past counts less and less, as the best one may change
(Herbster and Warmuth, "Tracking the Best Expert", Machine Learning 32, 1998).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import valueclass

Array: TypeAlias = "np.ndarray[Any, Any]"

KEEP = 0.95  # what worth and seconds count for a version later: they go back some 20
TRUST = 0.97  # what it counts for, a version later, that m was better or worse than what was decided
SIGMAS = 2.0  # standard errors by which it must have been better


def worth_of(updates: Any, scale: float) -> Any:
    """What a step with so many ``updates`` is worth, at this noise scale."""
    return updates / (updates + scale)


@valueclass
class Caps:
    """By number of updates m, from 0 on, older versions counting less and less.

    Args:
        versions: How many there were.
        kept: The versions that kept m updates. What that was worth depends on the noise as it is known now.
        seconds: What all would have taken, had they been closed at the m-th update.
        ahead: By how much more worth they would have had then, a second being worth what it usually is; of those
            versions in which nothing but what is believed of times decided.
        spread: The sum of the squares of that.
    """

    versions: int
    kept: Array
    seconds: Array
    ahead: Array
    spread: Array

    @classmethod
    def start(cls) -> Caps:
        """Of no version."""
        return cls(0, *np.zeros((4, 2)))

    def rate(self, scale: float) -> float:
        """Worth per second: that of what was decided, or of the best m, if that is more."""
        more = self.kept[:0:-1].cumsum()[::-1]  # versions that kept m or more
        worth = worth_of(np.arange(len(self.kept)), scale)
        gained = (more * (worth[1:] - worth[:-1])).cumsum()
        return float((gained / np.maximum(self.seconds[1:], 1e-12)).max())

    def best(self, least: int) -> int | None:
        """The m, ``least`` or more, that was better than what was decided, if one surely was."""
        surplus = (self.ahead - SIGMAS * np.sqrt(self.spread))[least:]
        return least + int(surplus.argmax()) if len(surplus) and surplus.max() > 0 else None

    def learn(self, came: Sequence[float], able: int, closed: float, seconds: float) -> Caps:
        """After a version that was ``closed`` with those that ``came`` after so many seconds, when ``able`` had not.

        ``seconds`` is what it took in all.
        """
        fade = min(KEEP, 1 - 2 / (self.versions + 3))  # the first versions, of which little was known, soon
        size = max(len(self.kept), len(came) + able + 1)
        kept, spent = fade * _padded(self.kept, size, 0.0), fade * _padded(self.seconds, size)
        kept[len(came)] += 1
        spent += _capped(came, closed, seconds, size)
        return Caps(self.versions + 1, kept, spent, _padded(self.ahead, size), _padded(self.spread, size))

    def judge(self, came: Sequence[float], closed: float, scale: float, rate: float) -> Caps:
        """After that version, if what is believed of times decided it alone, with a second worth ``rate``."""
        size = len(self.kept)
        saved = -_capped(came, closed, 0.0, size)
        lost = worth_of(len(came), scale) - worth_of(np.minimum(np.arange(size), len(came)), scale)
        won = rate * saved - lost
        ahead, spread = TRUST * self.ahead + won, TRUST**2 * self.spread + won**2
        return Caps(self.versions, self.kept, self.seconds, ahead, spread)


def _padded(values: Array, size: int, more: float | None = None) -> Array:
    """So many values: ``more`` of one, else of the last one, as waiting for who was not there changed nothing."""
    missing = size - len(values)
    return np.append(values, [values[-1] if more is None else more] * missing) if missing else values


def _capped(came: Sequence[float], closed: float, seconds: float, size: int) -> Array:
    """[m]: what a version that took ``seconds`` would have, closed at the m-th update."""
    capped = np.full(size, seconds)
    capped[1 : len(came) + 1] -= closed - np.array(came)
    return capped
