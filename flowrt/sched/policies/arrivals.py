"""What is known of when each replica's update comes, from those that came and from those that were not waited for.

Law: pure; a version that was applied answers new knowledge. A time that was cut off says that it is longer, no more.

A time is read as the version's own factor, the same for all replicas, times what is usual for the replica, times
chance; in logarithms all three add up. The versions of late are kept, and taken apart again whenever some were added,
so that no old mistake is built upon. First by medians, which do not mind a few stragglers (Tukey, "Exploratory Data
Analysis", 1977, ch. 11). Then by likelihood: how times spread around what is usual says how likely each factor makes
what came, and how often factors occur is what makes all of that most likely (Laird, "Nonparametric Maximum Likelihood
Estimation of a Mixing Distribution", J. Am. Stat. Assoc. 73, 1978). So where little is common to all, as of independent
delays, however heavy their tails, one late replica says nothing of the others; where much is, all are late together,
and nobody is slow.

Without their versions' factors times are counted in bins, for each replica: how often it had not come before a bin, and
how often it came in it, older versions less and less: the quotient is the chance to come then, if not before (Kaplan
and Meier, "Nonparametric Estimation from Incomplete Observations", J. Am. Stat. Assoc. 53, 1958; in its actuarial
form). Where a replica was seen seldom, the chance is that of all replicas at as many times their usual time; and where
nobody ever was, what has taken t goes on for another t or so, as what has no scale does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.spread import (
    ANY,
    BINS,
    FACTORS,
    LINDY,
    MIDDLE,
    PLACES,
    SURPRISE,
    WIDTH,
    Spread,
    believe,
)

Array: TypeAlias = "np.ndarray[Any, Any]"

WINDOW = 64  # versions that are kept
OWN = 0.5 ** (1 / 12)  # what a replica's times count for a version later: half of it after 12
POOL = 0.5 ** (1 / 60)  # what those of all do
USUAL = 0.5 ** (1 / 40)  # what a version's factor does
DOUBT = 0.5  # versions of its own that what has no scale counts as much as, where its usual time is asked for
TRUST = 3.0  # what is known of all replicas counts as much as so many versions of its own
SAMPLE = 64  # replicas that a factor is estimated from while a version is open, at most
NONE = 0.5  # how likely it is that nothing slowed all of a version: what chance explains needs no factor
ROUNDS = 3  # times that factors are estimated by likelihood, each time with what follows of the last
CASES = 7  # of about the same chance, that the factor of an open version is summed up by

YOUNG = 16  # versions until which each is looked at as it comes
BATCH = 4  # versions that are looked at together from then on, and one more for every
CROWD = 64  # replicas

AWAY, CAME, CUT = range(3)  # what became of a replica in a version: nothing, or when, or not by when
GRID = np.exp(WIDTH * np.arange(1, BINS + 1))

Version: TypeAlias = (
    "tuple[list[int], list[float], list[int], float]"  # who came, after what seconds, who did not by when
)


@valueclass
class Arrivals:
    """What is known; see the head of the file.

    Args:
        versions: How many were looked at.
        fresh: Those that are not yet.
        logs: [versions, replicas]: the logarithm of the seconds after which one came, or was cut off.
        fates: [versions, replicas]: which of `AWAY`, `CAME` and `CUT` it was.
        factors: [versions]: the logarithm of what slowed all of a version.
        frequent: [factors]: how often each of `FACTORS` was.
        spread: How times lie around replicas' usual ones.
        usual: [replicas]: the logarithm of the median of its seconds.
        origin: The logarithm of the seconds at which the first bin begins.
        alive: [replicas, bins + 1]: the chance not to have come by the left end of a bin.
    """

    versions: int
    fresh: tuple[Version, ...]
    logs: Array
    fates: Array
    factors: Array
    frequent: Array
    spread: Spread
    usual: Array
    origin: float
    alive: Array

    @classmethod
    def start(cls, replicas: int, seconds: float) -> Arrivals:
        """Nothing is known, but that ``seconds`` are a usual time."""
        return cls(
            versions=0,
            fresh=(),
            logs=np.zeros((0, replicas), np.float32),
            fates=np.zeros((0, replicas), np.int8),
            factors=np.zeros(0),
            frequent=ANY,
            spread=Spread.unknown(),
            usual=np.full(replicas, _log(seconds)),
            origin=_log(seconds) - MIDDLE * WIDTH,
            alive=np.ones((replicas, BINS + 1), np.float32),
        )

    @property
    def replicas(self) -> int:
        """How many replicas it knows of."""
        return len(self.usual)

    def of(self, replicas: int) -> Arrivals:
        """The same, of so many replicas at least; of new ones what is known of all holds."""
        if replicas <= self.replicas:
            return self
        return self._widened(replicas)._foresee()

    def _widened(self, replicas: int) -> Arrivals:
        more = ((0, 0), (0, max(replicas - self.replicas, 0)))
        middle = np.full(more[1][1], self.origin + MIDDLE * WIDTH)
        return replace(
            self, logs=np.pad(self.logs, more), fates=np.pad(self.fates, more), usual=np.append(self.usual, middle)
        )

    # ── what is to come ──────────────────────────────────────────────────────────────────────────────────────────────

    def expected(
        self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
    ) -> tuple[Array, Array]:
        """Times after ``now``, rising, and how many of ``able``, which have not come by now, will have come by each.

        ``came`` have, after so many ``seconds``. Both in seconds since the version was opened.
        """
        if (most := max((*came, *able))) >= self.replicas:
            return self.of(most + 1).expected(came, seconds, able, now)
        chances, factors = _cases(self.factor_of(came, seconds, able, now))
        places = ((_log(now) - self.origin - factors) / WIDTH + 1e-6).clip(0, BINS - 1.5)
        at = places.astype(np.int64)
        right = (places - at)[:, None]
        pending = np.array(able)
        here = (1 - right) * self.alive[pending, at[:, None]] + right * self.alive[pending, at[:, None] + 1]
        surely = np.zeros((len(at), self.replicas), np.float32)
        surely[:, pending] = chances[:, None] / np.maximum(here, 1e-20)
        alive = np.einsum("cr,rb->cb", surely, self.alive)  # not by BLAS, as in `Spread.evidences`
        then = np.minimum(at[:, None] + 1 + PLACES, BINS - 1)
        cases = np.arange(len(at))[:, None]
        later = (1 - right) * alive[cases, then] + right * alive[cases, then + 1]
        return max(now, 1e-9) * GRID, len(able) - later.sum(axis=0)

    def factor_of(self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float) -> Array:
        """[factors]: how likely each is that of the version that is open."""
        step = 1 + (len(came) + len(able)) // SAMPLE
        there = self._relative(np.array(came[::step]), np.log(np.maximum(seconds[::step], 1e-9)))
        gone = self._relative(np.array(able[::step], np.int64), _log(now))
        return believe(self.spread.evidence(there, gone), self._to_expect())

    def _relative(self, replicas: Array, logs: Array | float) -> Array:
        """In which bins times lie, where each replica's usual one is in the middle."""
        bins: Array = ((logs - self.usual[replicas]) / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        return bins

    def _to_expect(self) -> Array:
        """[factors]: how likely each is before a version shows anything: as it was frequent, or close to that."""
        near = 0.5 * self.frequent
        near[1:] += 0.25 * self.frequent[:-1]
        near[:-1] += 0.25 * self.frequent[1:]
        near *= 1 - SURPRISE
        near += SURPRISE * ANY
        return near

    # ── what came ────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, came: list[int], seconds: list[float], missing: list[int], closed: float) -> Arrivals:
        """After a version whose set was fixed ``closed`` seconds after its opening, when ``missing`` had not come."""
        fresh = (*self.fresh, (came, seconds, missing, closed))
        if self.versions >= YOUNG and len(fresh) < BATCH + self.replicas // CROWD:
            return replace(self, fresh=fresh)
        known = self._widened(1 + max(max((*came, *missing)) for came, _, missing, _ in fresh))._append(fresh)._polish()
        for _ in range(ROUNDS):
            known = known._deconvolve()
        return known._foresee()

    def _append(self, fresh: tuple[Version, ...]) -> Arrivals:
        """With these among the versions that are kept, the oldest of which make room."""
        logs = np.zeros((len(fresh), self.replicas), np.float32)
        fates = np.zeros((len(fresh), self.replicas), np.int8)
        for row, (came, seconds, missing, closed) in enumerate(fresh):
            logs[row, came], fates[row, came] = np.log(np.maximum(seconds, 1e-9)), CAME
            logs[row, missing], fates[row, missing] = _log(closed), CUT
        return replace(
            self,
            versions=self.versions + len(fresh),
            fresh=(),
            logs=np.concatenate([self.logs, logs])[-WINDOW:],
            fates=np.concatenate([self.fates, fates])[-WINDOW:],
        )

    def _polish(self) -> Arrivals:
        """With versions' factors by medians, and those spread around 1.

        Half of the replicas must have come, but for those that had not yet to; how times spread is taken from these
        versions alone, as one in which only the first ones came would confirm whatever is thought of the others.
        """
        offsets = self.logs - self.usual
        came = np.sort(np.where(self.fates == CAME, offsets, np.inf), axis=1)
        there, rows = (self.fates == CAME).sum(axis=1), np.arange(len(came))
        first = came[rows, (there - 1) // 2]
        late = ((self.fates == CUT) & (offsets >= first[:, None])).sum(axis=1)
        enough = there > late
        due = np.where(enough, there + late, there)
        factors = 0.5 * (came[rows, (due - 1) // 2] + came[rows, due // 2])
        middle = float(np.median(factors[enough] if enough.any() else factors))
        known = replace(self, factors=factors - middle, usual=self.usual + middle)
        return known._pooled(enough if enough.any() else ~enough)

    def _deconvolve(self) -> Arrivals:
        """With versions' factors by likelihood, as times spread and factors were frequent until now."""
        versions, seen = len(self.logs), self.fates != AWAY
        places = self._bins(self.logs - self.usual) + BINS * (self.fates == CUT)
        places += 2 * BINS * np.arange(versions)[:, None]
        counts = np.bincount(places[seen], minlength=versions * 2 * BINS).reshape(versions, 2 * BINS)
        tried = self.spread.likely_factors(self.factors)
        usual = (1 - SURPRISE) * (NONE * (FACTORS == 0) + (1 - NONE) * self.frequent) + SURPRISE * ANY
        beliefs = believe(self.spread.evidences(counts, tried), usual[tried])
        weights = self._weights(USUAL)
        frequent = np.zeros(len(FACTORS))
        frequent[tried] = (weights[:, None] * beliefs).sum(axis=0) / weights.sum()
        factors = (beliefs * (FACTORS[tried] * WIDTH)).sum(axis=1)
        return replace(self, factors=factors, frequent=frequent)._pooled(np.ones(versions))

    def _pooled(self, versions: Array) -> Arrivals:
        """With how times spread around what is usual, by the factors of these ``versions`` as they are known."""
        places = self._bins(self.logs - self.usual - self.factors[:, None])
        weights = np.broadcast_to((versions * self._weights(POOL))[:, None], places.shape)
        came, cut = (
            np.bincount(places[there], weights[there], BINS) for there in (self.fates == CAME, self.fates == CUT)
        )
        return replace(self, spread=Spread.of(came, cut))

    def _foresee(self) -> Arrivals:
        """With what follows for each replica.

        What is usual for it is by its own times alone: who was never waited for would else be thought to come as the
        others do, as soon as nobody waits any more.
        """
        origin = float(np.median(self.usual)) - MIDDLE * WIDTH
        middles = np.rint((self.usual - origin) / WIDTH).astype(np.int64)
        came, cut = self._counted(origin)
        there = (came + cut)[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * cut  # cut off in a bin, nobody knows where
        of_all = self.spread.hazards.take(PLACES - (middles - MIDDLE)[:, None], mode="clip")
        alive = np.ones((self.replicas, BINS + 1), np.float32)
        np.cumprod(1 - (came + TRUST * of_all) / (there + TRUST), axis=1, out=alive[:, 1:])
        own = np.cumprod(1 - (came + DOUBT * LINDY) / (there + DOUBT), axis=1)
        usual = np.where(there[:, 0] > 0, (own > 0.5).sum(axis=1), MIDDLE)
        return replace(self, origin=origin, alive=alive, usual=origin + WIDTH * usual)

    def _counted(self, origin: float) -> tuple[Array, Array]:
        """[replicas, bins]: how much came, and was cut off, in each bin after ``origin``."""
        places = ((self.logs - self.factors[:, None] - origin) / WIDTH).astype(np.int64).clip(0, BINS - 1)
        places += BINS * np.arange(self.replicas)
        weights = np.broadcast_to(self._weights(OWN)[:, None], places.shape)
        came, cut = (
            np.bincount(places[there], weights[there], self.replicas * BINS).reshape(self.replicas, BINS)
            for there in (self.fates == CAME, self.fates == CUT)
        )
        return came, cut

    def _weights(self, keep: float) -> Array:
        """[versions]: what each counts, if a version later it counts ``keep`` of that."""
        return keep ** np.arange(len(self.logs))[::-1]

    def _bins(self, logs: Array) -> Array:
        """In which bins they lie, where none of 1 is in the middle."""
        bins: Array = (logs / WIDTH + (MIDDLE + 1e-6)).astype(np.int64).clip(0, BINS - 1)
        return bins


def _cases(beliefs: Array) -> tuple[Array, Array]:
    """Chances, and the logarithms of factors that stand for all of `FACTORS`; one where they are all but the same."""
    mean = float(beliefs @ FACTORS)
    if float(beliefs @ (FACTORS - mean) ** 2) < 1.0:
        return np.ones(1), np.array([mean * WIDTH])
    case = np.minimum((np.cumsum(beliefs) - 0.5 * beliefs) * CASES, CASES - 1).astype(np.int64)
    chances, sums = np.bincount(case, beliefs), np.bincount(case, beliefs * FACTORS)
    some = chances > 1e-6
    return chances[some], WIDTH * sums[some] / chances[some]


def _log(seconds: float) -> float:
    return log(max(seconds, 1e-9))
