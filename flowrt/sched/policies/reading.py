"""One reading of the times at which updates came: what is usual, for whom, and how much slows all of a version at once.

Law: pure; the times of late answer a new reading, which builds on the last one only to begin with.

A time is read as the version's own factor, the same for all replicas, times what is usual for the replica, times
chance; in logarithms all three add up. Readings differ in what of that there is, see `ReadingKind`.

Factors are taken apart first by medians, which do not mind a few stragglers (Tukey, "Exploratory Data Analysis", 1977,
ch. 11). Then by likelihood: how times spread around what is usual says how likely each factor makes what came, and how
often factors occur is what makes all of that most likely (Laird, "Nonparametric Maximum Likelihood Estimation of a
Mixing Distribution", J. Am. Stat. Assoc. 73, 1978).

Without their versions' factors times are counted in bins: how often a replica had not come before a bin, and how often
it came in it, older versions less and less: the quotient is the chance to come then, if not before (Kaplan and Meier,
"Nonparametric Estimation from Incomplete Observations", J. Am. Stat. Assoc. 53, 1958; in its actuarial form). Where a
replica was seen seldom, the chance is that of all replicas at as many times their usual time; and where nobody ever
was, what has taken t goes on for another t or so, as what has no scale does.
"""

from __future__ import annotations

from enum import Enum
from math import log
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.spread import (
    ANY,
    BINS,
    CAME,
    CUT,
    FACTORS,
    LINDY,
    MARK,
    MIDDLE,
    PLACES,
    REACH,
    SURPRISE,
    WIDTH,
    Spread,
    believe,
    smoothed_counts,
)

Array: TypeAlias = "np.ndarray[Any, Any]"

OWN = 0.5 ** (1 / 12)  # what a replica's times count for a version later: half of it after 12
POOL = 0.5 ** (1 / 60)  # what those of all do
USUAL = 0.5 ** (1 / 40)  # what a version's factor does
DOUBT = 0.5  # versions of its own that what has no scale counts as much as, where its usual time is asked for
TRUST = 3.0  # what is known of all replicas counts as much as so many versions of its own
SAMPLE = 64  # replicas that a factor is estimated from, at most
COARSE = 3  # of so many factors, one is tried where versions are judged
NONE = 0.5  # how likely it is that nothing slowed all of a version: what chance explains needs no factor


class ReadingKind(Enum):
    """What there is of what is usual for a replica, and of what slows all of a version."""

    ALIKE = (False, False)
    """All replicas have the same times: as of independent delays, however heavy their tails."""
    OWN = (True, False)
    """Each replica has its own."""
    COMMON = (True, True)
    """Each replica has its own, and versions have factors."""

    @property
    def own(self) -> bool:
        return self.value[0]

    @property
    def common(self) -> bool:
        return self.value[1]


@valueclass
class TimesReading:
    """What the times of late come to; see the head of the file.

    Args:
        kind: What there is.
        factors: [versions]: the logarithm of what slowed all of a version.
        frequent: [factors]: how often each of `FACTORS` was.
        spread: How times lie around replicas' usual ones.
        usual: [replicas]: the logarithm of the median of its seconds.
        origin: The logarithm of the seconds at which the first bin begins.
        alive: [replicas, bins + 1]: the chance not to have come by the left end of a bin.
    """

    kind: ReadingKind
    factors: Array
    frequent: Array
    spread: Spread
    usual: Array
    origin: float
    alive: Array

    @classmethod
    def start(cls, kind: ReadingKind, replicas: int, usual: float) -> TimesReading:
        """Nothing is known, but the logarithm of a ``usual`` time."""
        return cls(
            kind=kind,
            factors=np.zeros(0),
            frequent=ANY if kind.common else 1.0 * (FACTORS == 0),
            spread=Spread.unknown(),
            usual=np.full(replicas, usual),
            origin=usual - MIDDLE * WIDTH,
            alive=np.ones((replicas, BINS + 1)),
        )

    def widened(self, more: int) -> TimesReading:
        """The same, with so many more replicas, whose usual time is in the middle; to be fitted."""
        usual = np.append(self.usual, np.full(more, self.origin + MIDDLE * WIDTH))
        return replace(self, usual=usual, alive=np.ones((len(usual), BINS + 1)))

    # ── of a version ─────────────────────────────────────────────────────────────────────────────────────────────────

    def relative(self, replicas: Array, logs: Array | float) -> Array:
        """In which bins times lie, where each replica's usual one is in the middle."""
        bins: Array = ((logs - self.usual[replicas]) / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        return bins

    def bin_at(self, now: float, factor: float) -> int:
        """The bin of so many seconds, in a version with that logarithm of a factor."""
        return min(max(round((log(max(now, 1e-9)) - self.origin - factor) / WIDTH), 0), BINS - 1)

    def to_expect(self) -> Array:
        """[factors]: how likely each is before a version shows anything: as it was frequent, or close to that."""
        if not self.kind.common:
            return self.frequent
        near = 0.5 * self.frequent
        near[1:] += 0.25 * self.frequent[:-1]
        near[:-1] += 0.25 * self.frequent[1:]
        near *= 1 - SURPRISE
        near += SURPRISE * ANY
        return near

    def likelihoods(self, logs: Array, fates: Array) -> Array:
        """[versions]: the logarithm of how likely it was, for all that was known, that they are as they are."""
        tried = slice(0, None, COARSE) if self.kind.common else slice(REACH, REACH + 1)
        prior = np.add.reduceat(self.to_expect(), np.arange(0, len(FACTORS), COARSE)) if self.kind.common else 1.0
        evidence = self.spread.evidences(self._sample(logs, fates), tried)
        most = evidence.max(axis=1)
        found: Array = most + np.log((prior * np.exp(evidence - most[:, None])).sum(axis=1))
        return found

    # ── of all that are kept ─────────────────────────────────────────────────────────────────────────────────────────

    def fit(self, logs: Array, fates: Array) -> TimesReading:
        """By these versions [versions, replicas], the last of them the newest."""
        known = replace(self, factors=np.zeros(len(logs)))
        if self.kind.common:
            known = known._polish(logs, fates)._deconvolve(logs, fates)
        return known._settle(logs, fates)

    def _polish(self, logs: Array, fates: Array) -> TimesReading:
        """With versions' factors by medians, and those spread around 1.

        Half of the replicas must have come, but for those that had not yet to; how times spread is taken from these
        versions alone, as one in which only the first ones came would confirm whatever is thought of the others.
        """
        offsets = logs - self.usual
        came = np.sort(np.where(fates == CAME, offsets, np.inf), axis=1)
        there, rows = (fates == CAME).sum(axis=1), np.arange(len(came))
        first = came[rows, (there - 1) // 2]
        late = ((fates == CUT) & (offsets >= first[:, None])).sum(axis=1)
        enough = there > late
        due = np.where(enough, there + late, there)
        factors = 0.5 * (came[rows, (due - 1) // 2] + came[rows, due // 2])
        middle = float(np.median(factors[enough] if enough.any() else factors))
        known = replace(self, factors=factors - middle, usual=self.usual + middle)
        return known._pooled(logs, fates, enough if enough.any() else ~enough)

    def _deconvolve(self, logs: Array, fates: Array) -> TimesReading:
        """With versions' factors by likelihood, as times spread and factors were frequent until now."""
        some = self.spread.likely_factors(self.factors)
        tried = slice(some.start, some.stop)
        usual = (1 - SURPRISE) * (NONE * (FACTORS == 0) + (1 - NONE) * self.frequent) + SURPRISE * ANY
        evidence = self.spread.evidences(self._sample(logs, fates), some).repeat(some.step, axis=1)
        beliefs = believe(evidence[:, : some.stop - some.start], usual[tried])
        weights = _weights(USUAL, len(logs))
        frequent = np.zeros(len(FACTORS))
        frequent[tried] = (weights[:, None] * beliefs).sum(axis=0) / weights.sum()
        return replace(self, factors=(beliefs * (FACTORS[tried] * WIDTH)).sum(axis=1), frequent=frequent)

    def _settle(self, logs: Array, fates: Array) -> TimesReading:
        """With what is usual for each replica, how times spread around that, and so when each is expected.

        What is usual is by its own times alone: who was never waited for would else be thought to come as the others
        do, as soon as nobody waits any more.
        """
        origin = float(np.median(self.usual)) - MIDDLE * WIDTH
        came, cut = self._counted(logs, fates, origin)
        there = _at_risk(came, cut)
        alone = np.cumprod(1 - (came + DOUBT * LINDY) / (there + DOUBT), axis=1)
        middles = np.where(there[:, 0] > 0, (alone > 0.5).sum(axis=1), MIDDLE)
        usual = np.broadcast_to(origin + WIDTH * middles, self.usual.shape)
        known = replace(self, origin=origin, usual=usual)._pooled(logs, fates, np.ones(len(logs)))
        of_all = known.spread.hazards.take(PLACES - (middles - MIDDLE)[:, None], mode="clip")
        came = smoothed_counts(came, known.spread.deviation)
        there = _at_risk(came, cut)
        alive = np.ones((len(came), BINS + 1))
        np.cumprod(1 - (came + TRUST * of_all) / (there + TRUST), axis=1, out=alive[:, 1:])
        return replace(known, alive=np.broadcast_to(alive, (len(usual), BINS + 1)))

    def _counted(self, logs: Array, fates: Array, origin: float) -> tuple[Array, Array]:
        """[replicas, bins]: how much came in each bin after ``origin``, and was cut off; of one if all are alike."""
        rows = len(self.usual) if self.kind.own else 1
        places = ((logs - self.factors[:, None] - origin) / WIDTH).astype(np.int64)
        places.clip(0, BINS - 1, out=places)
        places += BINS * (np.arange(len(self.usual)) % rows)
        places += rows * BINS * fates
        weights = np.repeat(_weights(OWN if self.kind.own else POOL, len(logs)), len(self.usual))
        _, came, cut = np.bincount(places.ravel(), weights, 3 * rows * BINS).reshape(3, rows, BINS)
        return came, cut

    def _sample(self, logs: Array, fates: Array) -> Array:
        """[versions, replicas]: places around what is usual, of so many replicas as tell what slowed all.

        `MARK` times the fate is added, and they are sorted: the numbers that replicas have change no bit.
        """
        step = 1 + len(self.usual) // SAMPLE
        places = ((logs - self.usual)[:, ::step] / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        return np.sort(places.clip(-MARK // 4, MARK // 4) + MARK * fates[:, ::step], axis=1)

    def _pooled(self, logs: Array, fates: Array, versions: Array) -> TimesReading:
        """With how times spread around what is usual, by the factors of these ``versions`` as they are known."""
        places = ((logs - self.usual - self.factors[:, None]) / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        places.clip(0, BINS - 1, out=places)
        places += BINS * fates
        weights = np.repeat(versions * _weights(POOL, len(logs)), len(self.usual))
        _, came, cut = np.bincount(places.ravel(), weights, 3 * BINS).reshape(3, BINS)
        return replace(self, spread=Spread.of(came, cut))


def _at_risk(came: Array, cut: Array) -> Array:
    """[replicas, bins]: how much had not come before each bin; what is cut off in one, nobody knows where in it."""
    risk: Array = (came + cut)[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * cut
    return risk


def _weights(keep: float, versions: int) -> Array:
    """[versions]: what each counts, if a version later it counts ``keep`` of that."""
    return keep ** np.arange(versions)[::-1]
