"""What is known of when each replica's update comes, from those that came and from those that were not waited for.

Law: pure; a version that was applied answers new knowledge. A time that was cut off says that it is longer, no more.

The versions of late are kept, and read in several ways whenever some were added: see `reading`. The reading that made
them likeliest before it knew of them is believed, older versions counting less and less (Dawid, "Present Position and
Potential Developments: the Prequential Approach", J. R. Stat. Soc. A 147, 1984), where two do equally well the simpler
one. So where little is common to all, as of independent delays, however heavy their tails, one late replica says
nothing of the others; where much is, all are late together, and nobody is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.reading import SAMPLE, ReadingKind, TimesReading, fitted
from flowrt.sched.policies.spread import BINS, CAME, CUT, FACTORS, MIDDLE, WIDTH, believe

Array: TypeAlias = "np.ndarray[Any, Any]"

WINDOW = 64  # versions that are kept
CASES = 7  # of about the same chance, that the factor of an open version is summed up by
KINDS = (ReadingKind.ALIKE, ReadingKind.OWN, ReadingKind.COMMON)
SIMPLER = np.array([0.0, -1.0, -3.0])  # logarithms of what is thought of them before anything was seen
FORGET = 0.97  # of what they showed counts a version later
SHOCK = 4.0  # how much less likely than the best one a version makes a reading, at most
UNLIKELY = 0.02  # how likely the beginning of a version is where the reading is doubted that is believed
SURE = 10.0  # how much less likely one is than the best one, at most: things may change

YOUNG = 8  # versions until which each is looked at as it comes; then one more together for as many again, until
BATCH = 4  # versions are looked at together, and one more for every
CROWD = 64  # replicas
SELDOM = 4  # readings that are not believed build on every so many of those

FINE = 16  # bins that are looked at one by one; beyond them at every so manieth of what they are away


def _ahead() -> Array:
    """Bins that are looked at, counted from now."""
    ahead = [1]
    while ahead[-1] < BINS:
        ahead.append(ahead[-1] + max(1, ahead[-1] // FINE))
    return np.array(ahead)


AHEAD = _ahead()
AHEAD_OF = np.minimum(np.arange(BINS)[:, None] + AHEAD, BINS)  # [bins, times]: the same, by the bin of now
GRID = np.exp(WIDTH * AHEAD)  # times, where it is 1 now

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
        readings: By `KINDS`.
        scores: [readings]: the logarithm of how likely each is, but for what they have in common.
    """

    versions: int
    fresh: tuple[Version, ...]
    logs: Array
    fates: Array
    readings: tuple[TimesReading, ...]
    scores: Array

    @classmethod
    def start(cls, replicas: int, seconds: float) -> Arrivals:
        """Nothing is known, but that ``seconds`` are a usual time."""
        return cls(
            versions=0,
            fresh=(),
            logs=np.zeros((0, replicas)),
            fates=np.zeros((0, replicas), np.int64),
            readings=tuple([TimesReading.start(kind, replicas, _log(seconds)) for kind in KINDS]),
            scores=SIMPLER,
        )

    @property
    def replicas(self) -> int:
        """How many replicas it knows of."""
        return len(self.readings[0].usual)

    @property
    def reading(self) -> TimesReading:
        """The one that is believed."""
        return self.readings[self.scores.argmax()]

    def of(self, replicas: int) -> Arrivals:
        """The same, of so many replicas at least; of new ones what is known of all holds."""
        return self._widened(replicas)._fitted(KINDS) if replicas > self.replicas else self

    def _widened(self, replicas: int) -> Arrivals:
        more = replicas - self.replicas
        if more <= 0:
            return self
        return replace(
            self,
            logs=np.pad(self.logs, ((0, 0), (0, more))),
            fates=np.pad(self.fates, ((0, 0), (0, more))),
            readings=tuple([reading.widened(more) for reading in self.readings]),
        )

    # ── what is to come ──────────────────────────────────────────────────────────────────────────────────────────────

    def expected(
        self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
    ) -> tuple[Array, Array, Array, Array]:
        """Times after ``now``, rising; chances of cases; and in each, how many of ``able``, which have not come by now,
        will have by each of the times, and the chance that none will, both [cases, times].

        ``came`` have, after so many ``seconds``. Both in seconds since the version was opened.
        """
        if (most := max(max(came), max(able))) >= self.replicas:
            return self.of(most + 1).expected(came, seconds, able, now)
        reading = self._reading_of(came, seconds, able, now)
        pending = reading.alive.take(able, axis=0) if reading.kind.own else reading.alive[:1]
        alike = len(able) // len(pending)  # replicas that a row stands for
        chances, factors = self._cases(reading, came, seconds, able, now)
        at = [reading.bin_at(now, factor) for factor in factors]
        left = pending.take(AHEAD_OF[at], axis=1)
        left /= np.maximum(pending.take(at, axis=1), 1e-20)[:, :, None]
        more = len(able) - alike * np.add.reduce(left)
        none = np.multiply.reduce(left)
        return max(now, 1e-9) * GRID, np.array(chances), more, none if alike == 1 else none**alike

    def _reading_of(
        self, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
    ) -> TimesReading:
        """The reading that is believed where the open version is what it is.

        All are weighed again where that one hardly allows that nobody came before the first one did: what slows all
        is seen in the first version that it slows.
        """
        reading = self.reading
        if reading.kind.common:
            return reading
        before = reading.alive[:, reading.bin_at(seconds[0], 0.0)]
        if np.multiply.reduce(before) > UNLIKELY or np.multiply.reduce(before.take([*came, *able])) > UNLIKELY:
            return reading
        logs, fates = self._rows([(list(came), list(seconds), list(able), now)])
        likely = [float(reading.likelihoods(logs, fates)[0]) for reading in self.readings]
        return self.readings[int((self.scores + likely).argmax())]

    def _cases(
        self, reading: TimesReading, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
    ) -> tuple[list[float], list[float]]:
        """Chances, and the logarithms of factors that stand for all; one where they are all but the same."""
        if not reading.kind.common:
            return [1.0], [0.0]
        factors, beliefs = factor_of(reading, came, seconds, able, now)
        mean = float(beliefs @ factors)
        if float(beliefs @ (factors - mean) ** 2) < 1.0:
            return [1.0], [mean * WIDTH]
        case = ((beliefs.cumsum() - 0.5 * beliefs) * CASES).astype(np.int64)
        chances, sums = np.bincount(case, beliefs), np.bincount(case, beliefs * factors)
        some = chances > 1e-6
        chances = chances[some]
        return chances.tolist(), (WIDTH * sums[some] / chances).tolist()

    # ── what came ────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, came: list[int], seconds: list[float], missing: list[int], closed: float) -> Arrivals:
        """After a version whose set was fixed ``closed`` seconds after its opening, when ``missing`` had not come."""
        fresh = (*self.fresh, (came, seconds, missing, closed))
        if self.waits(1):
            return replace(self, fresh=fresh)
        known = self._widened(1 + max(max((*came, *missing)) for came, _, missing, _ in fresh))._append(fresh)
        every = _is_due(known.versions) or known.replicas > self.replicas
        return known._fitted(KINDS if every else (known.reading.kind,))

    def waits(self, more: int) -> bool:
        """Whether so many versions more are still too few to look at."""
        return len(self.fresh) + more < min(1 + self.versions // YOUNG, BATCH + self.replicas // CROWD)

    def _append(self, fresh: tuple[Version, ...]) -> Arrivals:
        """With these among the versions that are kept, the oldest of which make room; readings are judged by them."""
        logs, fates = self._rows(fresh)
        return replace(
            self,
            versions=self.versions + len(fresh),
            fresh=(),
            logs=np.concatenate([self.logs, logs])[-WINDOW:],
            fates=np.concatenate([self.fates, fates])[-WINDOW:],
            scores=self._judged(logs, fates) if self.versions else self.scores,
        )

    def _rows(self, versions: Sequence[Version]) -> tuple[Array, Array]:
        """[versions, replicas]: the logarithms of times, and fates."""
        logs = np.zeros((len(versions), self.replicas))
        fates = np.zeros((len(versions), self.replicas), np.int64)
        for row, (came, seconds, missing, closed) in enumerate(versions):
            logs[row, came], fates[row, came] = np.log(np.maximum(seconds, 1e-9)), CAME
            logs[row, missing], fates[row, missing] = _log(closed), CUT
        return logs, fates

    def _judged(self, logs: Array, fates: Array) -> Array:
        likely = np.array([reading.likelihoods(logs, fates) for reading in self.readings])
        shown = np.maximum(likely - likely.max(axis=0), -SHOCK).sum(axis=1)
        scores = SIMPLER + FORGET ** len(logs) * (self.scores - SIMPLER) + shown
        bounded: Array = np.maximum(scores - scores.max(), -SURE)
        return bounded

    def _fitted(self, kinds: Sequence[ReadingKind]) -> Arrivals:
        """With the readings of these kinds by the versions that are kept."""
        fits = fitted([reading for reading in self.readings if reading.kind in kinds], self.logs, self.fates)
        known = {reading.kind: reading for reading in (*self.readings, *fits)}
        return replace(self, readings=tuple(known.values()))


def _is_due(versions: int) -> bool:
    """Whether readings that are not believed build on that many versions: on twice as many each time, then seldom."""
    return not versions & (versions - 1) if versions <= YOUNG else versions % (SELDOM * BATCH) < BATCH


def factor_of(
    reading: TimesReading, came: Sequence[int], seconds: Sequence[float], able: Sequence[int], now: float
) -> tuple[Array, Array]:
    """Factors, and how likely each is that of the version that is open."""
    step = 1 + (len(came) + len(able)) // SAMPLE
    logs = np.log(np.maximum(seconds[::step], 1e-9))
    there = reading.relative(np.array(came[::step]), logs)
    gone = reading.relative(np.array(able[::step], np.int64), _log(now))
    tried = reading.spread.likely_factors((there - MIDDLE) * WIDTH)
    return FACTORS[tried], believe(reading.spread.evidence(there, gone, tried), reading.to_expect()[tried])


def _log(seconds: float) -> float:
    return log(max(seconds, 1e-9))
