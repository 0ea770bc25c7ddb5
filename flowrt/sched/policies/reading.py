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

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
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
    not_before,
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
        evidence = self.spread.evidences(self._sample(logs, fates), tried)
        if not self.kind.common:
            return evidence[:, 0]
        prior = np.add.reduceat(self.to_expect(), np.arange(0, len(FACTORS), COARSE))
        most = evidence.max(axis=1)
        found: Array = most + np.log((prior * np.exp(evidence - most[:, None])).sum(axis=1))
        return found

    # ── of all that are kept ─────────────────────────────────────────────────────────────────────────────────────────

    def explained(self, logs: Array, fates: Array) -> TimesReading:
        """With the factors of these versions [versions, replicas], the last of them the newest, where it has some."""
        if not self.kind.common:
            return replace(self, factors=np.zeros(len(logs)))
        return self._polish(logs, fates)._deconvolve(logs, fates)

    def _polish(self, logs: Array, fates: Array) -> TimesReading:
        """With versions' factors by medians, and those spread around 1.

        Half of the replicas must have come, but for those that had not yet to; how times spread is taken from these
        versions alone, as one in which only the first ones came would confirm whatever is thought of the others.
        """
        offsets = logs - self.usual
        is_there = fates == CAME
        came = np.where(is_there, offsets, np.inf)
        came.sort(axis=1)
        there, rows = np.add.reduce(is_there, axis=1), np.arange(len(came))
        first = came[rows, (there - 1) // 2]
        late = np.add.reduce((fates == CUT) & (offsets >= first[:, None]), axis=1)
        enough = there > late
        due = np.where(enough, there + late, there)
        factors = 0.5 * (came[rows, (due - 1) // 2] + came[rows, due // 2])
        if not enough.any():
            enough = ~enough
        middle = _median(factors[enough])
        factors -= middle
        usual = self.usual + middle
        (spread,) = _spreads(logs, fates, usual[None], factors[None], enough)
        return replace(self, factors=factors, usual=usual, spread=spread)

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

    def _sample(self, logs: Array, fates: Array) -> Array:
        """[versions, replicas]: places around what is usual, of so many replicas as tell what slowed all.

        `MARK` times the fate is added, and they are sorted: the numbers that replicas have change no bit.
        """
        step = 1 + len(self.usual) // SAMPLE
        places = ((logs - self.usual)[:, ::step] / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
        return np.sort(places.clip(-MARK // 4, MARK // 4) + MARK * fates[:, ::step], axis=1)


def fitted(readings: Sequence[TimesReading], logs: Array, fates: Array) -> list[TimesReading]:
    """The ``readings`` by these versions [versions, replicas], the last of them the newest.

    After factors, what is usual for each replica, how times spread around that, and so when each is expected; for all
    readings at once, as one step of NumPy's takes no longer for three.

    What is usual is by its own times alone: who was never waited for would else be thought to come as the others do, as
    soon as nobody waits any more.
    """
    known = [reading.explained(logs, fates) for reading in readings]
    rows = _Rows.of(tuple([reading.kind.own for reading in known]), logs.shape[1])
    factors = np.array([reading.factors for reading in known])
    origins = np.array([_median(reading.usual) - MIDDLE * WIDTH for reading in known])
    came, cut = _counted(logs, fates, factors, origins, rows)
    there = not_before(came, cut)
    alone = np.cumprod(1 - (came + DOUBT * LINDY) / (there + DOUBT), axis=1)
    middles = np.where(there[:, 0] > 0, np.add.reduce(alone > 0.5, axis=1), MIDDLE)
    usual = origins[:, None] + WIDTH * middles.take(rows.of_replica)
    spreads = _spreads(logs, fates, usual, factors, 1.0)
    of_all = np.array([spread.hazards for spread in spreads])
    shifted = (PLACES - (middles - MIDDLE)[:, None]).clip(0, BINS - 1) + BINS * rows.of_reading[:, None]
    for part, spread in zip(rows.parts, spreads, strict=True):
        came[part] = smoothed_counts(came[part], spread.deviation)
    there = not_before(came, cut)
    alive = np.ones((len(came), BINS + 1))
    np.cumprod(1 - (came + TRUST * of_all.take(shifted)) / (there + TRUST), axis=1, out=alive[:, 1:])
    return [
        replace(
            reading,
            usual=usual[number],
            origin=float(origins[number]),
            spread=spreads[number],
            alive=np.broadcast_to(alive[rows.parts[number]], (logs.shape[1], BINS + 1)),
        )
        for number, reading in enumerate(known)
    ]


@valueclass
class _Rows:
    """What is counted for several readings at once: a row for each replica of those that tell them apart, else one.

    Args:
        parts: By reading, its rows.
        of_reading: [rows]: the reading.
        of_replica: [readings, replicas]: the row.
        keep: [readings, 1]: what is left of a version's weight one later.
    """

    parts: tuple[slice, ...]
    of_reading: Array
    of_replica: Array
    keep: Array

    @classmethod
    @lru_cache(64)
    def of(cls, owns: tuple[bool, ...], replicas: int) -> _Rows:
        """Of readings that tell ``replicas`` apart, or do not."""
        sizes = [replicas if own else 1 for own in owns]
        ends = np.cumsum(sizes).tolist()
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        return cls(
            parts=tuple([slice(start, end) for start, end in zip(starts, ends, strict=True)]),
            of_reading=np.arange(len(owns)).repeat(sizes),
            of_replica=np.array(starts)[:, None] + np.arange(replicas) % np.array(sizes)[:, None],
            keep=np.array([[OWN if own else POOL] for own in owns]),
        )


def _counted(logs: Array, fates: Array, factors: Array, origins: Array, rows: _Rows) -> tuple[Array, Array]:
    """[rows, bins]: how much came in each bin after its reading's origin, and was cut off."""
    places = ((logs - factors[:, :, None] - origins[:, None, None]) / WIDTH).astype(np.int64)
    places.clip(0, BINS - 1, out=places)
    places += BINS * rows.of_replica[:, None]
    count = len(rows.of_reading)
    places += count * BINS * fates
    weights = np.repeat(rows.keep ** _ages(len(logs)), logs.shape[1])
    _, came, cut = np.bincount(places.ravel(), weights, 3 * count * BINS).reshape(3, count, BINS)
    return came, cut


def _spreads(logs: Array, fates: Array, usual: Array, factors: Array, versions: Array | float) -> list[Spread]:
    """How times spread around what is ``usual`` [readings, replicas], by the ``factors`` [readings, versions].

    ``versions`` says what each version counts beside its age.
    """
    count = len(usual)
    places = ((logs - usual[:, None] - factors[:, :, None]) / WIDTH + (MIDDLE + 1e-6)).astype(np.int64)
    places.clip(0, BINS - 1, out=places)
    places += BINS * np.arange(count)[:, None, None]
    places += count * BINS * fates
    weights = np.repeat(versions * _weights(POOL, len(logs)), logs.shape[1])
    counts = np.bincount(places.ravel(), np.tile(weights, count), 3 * count * BINS).reshape(3, count, BINS)
    return Spread.of(counts[CAME], counts[CUT])


def _weights(keep: float, versions: int) -> Array:
    """[versions]: what each counts, if a version later it counts ``keep`` of that."""
    weights: Array = keep ** _ages(versions)
    return weights


def _ages(versions: int) -> Array:
    """[versions]: how many came after each."""
    return np.arange(versions)[::-1]


def _median(values: Array) -> float:
    """As `numpy.median`, in a fifth of its time for some values."""
    ordered = np.sort(values)
    return 0.5 * float(ordered[(len(values) - 1) // 2] + ordered[len(values) // 2])
