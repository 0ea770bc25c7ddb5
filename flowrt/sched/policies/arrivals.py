"""What is known of when each replica's update comes, from those that came and from those that were not waited for.

Law: pure; a version that was applied answers new knowledge. A time that was cut off says that it is longer, no more.

A time is read as the version's own factor, the same for all replicas, times what is usual for the replica, times
chance; in logarithms all three add up. Times are counted in bins of `WIDTH`, which are moved along when everything
becomes faster or slower for good. For each replica, and each bin, it is counted how often the replica had not come
before it, and how often it came in it, older versions less and less: the quotient is the chance to come then, if not
before (Kaplan and Meier, "Nonparametric Estimation from Incomplete Observations", J. Am. Stat. Assoc. 53, 1958; in its
actuarial form). Where a replica was seen seldom, the chance is that of all replicas at as many times their usual time;
and where nobody ever was, what has taken t goes on for another t or so, as what has no scale does.

How much of the spread is common to all replicas is estimated too: with little of it, as of independent delays, however
heavy their tails, one late replica says nothing of the others; with much, all are late together, and nobody is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import replace, valueclass

Array: TypeAlias = "np.ndarray[Any, Any]"

WIDTH = 0.02  # of a bin, in logarithms: 2 %
BINS = 400
MIDDLE = 200  # where times that were seen of late lie: bins reach from 1/50 to 50 times that
STRAY = 20  # bins that they may be away from there
LATE = 0.1  # how much of "of late" is the last version

OWN = 0.5 ** (1 / 12)  # what a replica's times count for a version later: half of it after 12
POOL = 0.5 ** (1 / 60)  # what those of all do
TRUST = 3.0  # what is known of all replicas counts as much as so many versions of its own
LINDY = 1 - exp(-WIDTH)  # the chance to come in a bin, where nothing is known

FOLLOW = 0.2  # of the factor of one version is taken to last
COMMON = 0.25  # the variance of the logarithm of versions' factors, before any was seen
STEADY = 0.03  # how much one version counts in that, at least
SAMPLE = 64  # replicas that it is estimated from, at most

YOUNG = 16  # versions until which each is looked at as it comes
BATCH = 4  # versions that are looked at together from then on, and one more for every
CROWD = 64  # replicas

Version: TypeAlias = (
    "tuple[list[int], list[float], list[int], float]"  # who came, after what seconds, who did not by when
)


def _factors() -> Array:
    """Factors that a version may have, in bins: each one near 1, fewer far from it."""
    side = [1]
    while side[-1] < 110:
        side.append(max(side[-1] + 1, int(side[-1] * 1.15)))
    return np.array([*(-step for step in reversed(side)), 0, *side])


FACTORS = _factors()
LOGS = FACTORS * WIDTH
SPANS = np.abs(LOGS)
GAPS = np.gradient(FACTORS.astype(float))
GRID = np.exp(WIDTH * np.arange(BINS + 1))
PLACES = np.arange(BINS)
BLUR = np.array([1, 4, 6, 4, 1]) / 16


@valueclass
class Arrivals:
    """What is known; see the head of the file.

    Args:
        versions: How many were looked at.
        fresh: Those that are not yet.
        origin: The logarithm of the seconds at which the first bin begins.
        late: The logarithm of the seconds that updates took of late.
        own: [2, replicas, bins]: how often a replica came in a bin, and how often it had not come before it.
        pool: [2, bins], the same of all replicas, where ``MIDDLE`` is each one's own usual time.
        usual: [replicas]: the logarithm of the median of its seconds.
        alive: [replicas, bins + 1]: the chance not to have come by the left end of a bin.
        common: The variance of the logarithm of versions' factors.
        log_density: [bins]: the logarithm of the chance that a replica comes in a bin, relative to its usual one.
        log_alive: [bins]: the same of its coming later than in the middle of that bin.
    """

    versions: int
    fresh: tuple[Version, ...]
    origin: float
    late: float
    own: Array
    pool: Array
    usual: Array
    alive: Array
    common: float
    log_density: Array
    log_alive: Array

    @classmethod
    def start(cls, replicas: int, seconds: float) -> Arrivals:
        """Nothing is known, but that ``seconds`` are a usual time."""
        none = np.zeros(BINS)
        return cls(
            versions=0,
            fresh=(),
            origin=_log(seconds) - MIDDLE * WIDTH,
            late=_log(seconds),
            own=np.zeros((2, replicas, BINS), np.float32),
            pool=np.zeros((2, BINS)),
            usual=np.full(replicas, _log(seconds)),
            alive=np.ones((replicas, BINS + 1), np.float32),
            common=COMMON,
            log_density=none,
            log_alive=none,
        )

    @property
    def replicas(self) -> int:
        """How many replicas it knows of."""
        return len(self.usual)

    def of(self, replicas: int) -> Arrivals:
        """The same, of so many replicas at least; of new ones what is known of all holds."""
        more = replicas - self.replicas
        if more <= 0:
            return self
        own = np.pad(self.own, ((0, 0), (0, more), (0, 0)))
        middle = self.origin + MIDDLE * WIDTH
        return replace(self, own=own, usual=np.append(self.usual, np.full(more, middle)))._foresee()

    # ── what is to come ──────────────────────────────────────────────────────────────────────────────────────────────

    def expected(
        self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
    ) -> tuple[Array, Array]:
        """Times after ``now``, rising, and how many of ``able``, which have not come by now, will have come by each.

        ``came`` have, after so many ``seconds``. Both in seconds since the version was opened.
        """
        if (most := max((*came, *able))) >= self.replicas:
            return self.of(most + 1).expected(came, seconds, able, now)
        factor = self._factor_of(came, seconds, able, now)
        place = min(max((_log(now) - self.origin - factor) / WIDTH + 1e-6, 0.0), BINS - 1.5)
        at = int(place)
        pending = np.array(able)
        left, right = self.alive[pending, at], self.alive[pending, at + 1]
        surely = np.zeros(self.replicas, np.float32)
        surely[pending] = 1 / np.maximum(left + np.float32(place - at) * (right - left), np.float32(1e-20))
        return GRID[at + 1 :] * exp(self.origin + factor), len(able) - surely @ self.alive[:, at + 1 :]

    def _factor_of(self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float) -> float:
        """The logarithm of the factor of the version that is open."""
        if self.versions > 1 and self.common < 1e-4:  # 1 %: not worth a look
            return 0.0
        step = 1 + (len(came) + len(able)) // SAMPLE
        some = np.array(came[::step]), np.array(able[::step])
        return self._believe(self._evidence(*some, np.log(np.maximum(seconds[::step], 1e-9)), _log(now)))

    def _evidence(self, came: Array, missing: Array, logs: Array, cut: float) -> Array:
        """For each of `FACTORS`, the logarithm of how likely it makes what came, and others have not by ``cut``."""
        places = self._relative(came, logs)
        likely: Array = np.add.reduce(self.log_density.take(places[:, None] - FACTORS, mode="clip"))
        if len(missing):
            places = self._relative(missing, cut)
            likely += np.add.reduce(self.log_alive.take(places[:, None] - FACTORS, mode="clip"))
        return likely

    def _relative(self, replicas: Array, logs: Array | float) -> Array:
        """In which bins times lie, where each replica's usual one is in the middle."""
        bins: Array = ((logs - self.usual[replicas]) / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        return bins

    def _believe(self, evidence: Array) -> float:
        """The mean of the logarithm of the factor by Bayes' rule.

        Factors are supposed to fall off as Laplace's distribution does, which takes to rare large ones.
        """
        weights = evidence - SPANS * sqrt(2 / max(self.common, 1e-8))
        weights -= np.maximum.reduce(weights)
        np.exp(weights, out=weights)
        weights *= GAPS
        return float(weights @ LOGS / np.add.reduce(weights))

    # ── what came ────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, came: list[int], seconds: list[float], missing: list[int], closed: float) -> Arrivals:
        """After a version whose set was fixed ``closed`` seconds after its opening, when ``missing`` had not come."""
        fresh = (*self.fresh, (came, seconds, missing, closed))
        if self.versions >= YOUNG and len(fresh) < BATCH + self.replicas // CROWD:
            return replace(self, fresh=fresh)
        most = max(max((*came, *missing)) for came, _, missing, _ in fresh)
        known = self.of(most + 1)
        known = replace(known, own=known.own * np.float32(OWN ** len(fresh)))  # counted in, in place, from here on
        for number, version in enumerate(fresh, start=1):
            known = known._take(*version, np.float32(OWN ** (len(fresh) - number)))
        return replace(known, fresh=())._foresee()._follow()

    def _take(
        self, came: list[int], seconds: list[float], missing: list[int], closed: float, weight: np.float32
    ) -> Arrivals:
        """With a version, which is counted by ``weight``."""
        there, gone = np.array(came), np.array(missing, np.int64)
        logs, cut = np.log(np.maximum(seconds, 1e-9)), _log(closed)
        factor, common = self._factor_and_common(there, gone, logs, cut) if self.versions else (0.0, self.common)
        origin, passing = self.origin + FOLLOW * factor, (1 - FOLLOW) * factor
        logs, cut = logs - passing, cut - passing
        arrived = ((logs - origin) / WIDTH).astype(np.int64).clip(0, BINS - 1)
        ended = min(max(int((cut - origin) / WIDTH), 0), BINS - 1)
        self._count(there, arrived, gone, ended, weight)
        return replace(
            self,
            versions=self.versions + 1,
            origin=origin,
            late=self.late + LATE * (float(logs[len(logs) // 2]) + passing - self.late),
            common=common,
            pool=self._count_pool(self._relative(there, logs), self._relative(gone, cut)),
        )

    def _factor_and_common(self, came: Array, missing: Array, logs: Array, cut: float) -> tuple[float, float]:
        """The logarithm of a version's factor, and the variance of such.

        Where less than half of the replicas came it may be either, so nothing is learned of the variance.
        """
        step = 1 + (len(came) + len(missing)) // SAMPLE
        evidence = self._evidence(came[::step], missing[::step], logs[::step], cut)
        factor, square = self._believe(evidence), _square(evidence)
        share = max(STEADY, 1 / (self.versions + 3))
        if len(came) >= len(missing):
            return factor, self.common + share * (square - self.common)
        return factor, self.common * (1 - share) if self.common > 0 else self.common

    def _count(self, came: Array, arrived: Array, missing: Array, ended: int, weight: np.float32) -> None:
        """Count in which bin each came, and in which ones before that it had not."""
        self.own[0, came, arrived] += weight
        self.own[1, came] += weight * (arrived[:, None] >= PLACES)
        self.own[1, missing, :ended] += weight
        self.own[1, missing, ended] += weight / 2  # somewhere in that bin, nobody knows where

    def _count_pool(self, arrived: Array, ended: Array) -> Array:
        """As `_count`, of all, each relative to its usual bin; among the counts that it had, older by a version now."""
        pool = self.pool * POOL
        came, cut = (np.bincount(bins.clip(0, BINS - 1), minlength=BINS) for bins in (arrived, ended))
        pool[0] += came
        pool[1] += (came + cut)[::-1].cumsum()[::-1] - 0.5 * cut
        return pool

    def _foresee(self) -> Arrivals:
        """With what follows of the counts."""
        of_all = (self.pool[0] + LINDY) / (self.pool[1] + 1)
        alive = np.ones(BINS + 1)
        np.cumprod(1 - of_all, out=alive[1:])
        density = np.convolve(alive[:-1] - alive[1:], BLUR, "same")
        log_alive = np.log(np.maximum(0.5 * (alive[1:] + alive[:-1]), 1e-30))
        bins = np.rint((self.usual - self.origin) / WIDTH).astype(np.int64)
        shifted = of_all.take(PLACES - (bins - MIDDLE)[:, None], mode="clip")
        chances = (self.own[0] + TRUST * shifted) / (self.own[1] + TRUST)
        own = np.ones((self.replicas, BINS + 1), np.float32)
        np.cumprod(1 - chances, axis=1, out=own[:, 1:], dtype=np.float32)
        return replace(
            self,
            alive=own,
            usual=self.origin + WIDTH * (own > 0.5).sum(axis=1),
            log_density=np.log(np.maximum(density, 1e-12)),
            log_alive=log_alive,
        )

    def _follow(self) -> Arrivals:
        """With bins moved so that times of late lie in the middle of them."""
        off = int((self.late - self.origin) / WIDTH) - MIDDLE
        if abs(off) <= STRAY:
            return self
        places = PLACES + off
        own = self.own.take(places, axis=2, mode="clip")
        own[0][:, (places < 0) | (places >= BINS)] = 0
        own[1][:, places >= BINS] = 0
        return replace(
            self,
            origin=self.origin + off * WIDTH,
            own=own,
            alive=self.alive.take(np.arange(BINS + 1) + off, axis=1, mode="clip"),
        )


def _square(evidence: Array) -> float:
    """The square of the logarithm of a version's factor less what chance adds to that.

    It is of the evidence alone, so that it does not confirm what was believed before.
    """
    weights = np.exp(evidence - evidence.max()) * GAPS
    weights /= weights.sum()
    mean = float(weights @ LOGS)
    return mean * mean - float(weights @ (LOGS - mean) ** 2)


def _log(seconds: float) -> float:
    return log(max(seconds, 1e-9))
