"""How far replicas' times are from their usual ones, what slowed all of a version apart; and by that, how much did.

Law: pure. Times are counted in bins of `WIDTH`, in logarithms; what is usual lies in the middle one.
"""

from __future__ import annotations

from math import exp
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import valueclass

Array: TypeAlias = "np.ndarray[Any, Any]"

WIDTH = 0.02  # of a bin, in logarithms: 2 %
BINS = 400
MIDDLE = 200  # bins reach from 1/50 to 50 times what is usual
REACH = 150  # factors, from 1/20 to 20
LINDY = 1 - exp(-WIDTH)  # the chance to come in a bin, where nothing is known
UNKNOWN = 0.1  # times as much as one that was seen, that counts
WIDEST = 40.0  # bins, of what smooths a density
STEPS = 16  # in which factors are tried over as many bins as most times spread over
MARGIN = 25  # bins around factors that seem likely, in which others are tried, too, and as many as times spread over

FACTORS = np.arange(-REACH, REACH + 1)
PLACES = np.arange(BINS)
AWAY, CAME, CUT = range(3)  # what became of a replica in a version: nothing, or when, or not by when
MARK = 1 << 16  # is added to a place for each of these

ANY = np.exp(-np.abs(FACTORS) * WIDTH / 0.7)
ANY /= ANY.sum()  # how likely each factor is, where nothing is known
SURPRISE = 0.03  # how likely one is that has nothing to do with earlier ones


@valueclass
class Spread:
    """The distribution of times around their usual ones.

    Args:
        hazards: [bins]: the chance to come in a bin, if not before, smoothed.
        reached: [bins]: the chance to come in it or before, as it was.
        log_density: [bins]: the logarithm of the chance to come in it, smoothed as the number of times deserves.
        log_alive: [bins]: the same of coming later than in its middle.
        deviation: Of what chances to come are smoothed by, in bins.
    """

    hazards: Array
    reached: Array
    log_density: Array
    log_alive: Array
    deviation: float

    @classmethod
    def unknown(cls) -> Spread:
        """Nothing is known of them."""
        return cls(np.full(BINS, LINDY), (PLACES + 0.5) / BINS, np.zeros(BINS), np.zeros(BINS), 0.0)

    @classmethod
    def of(cls, came: Array, cut: Array) -> list[Spread]:
        """By how much weight came in each bin, and how much was cut off in it: Kaplan and Meier's, see `arrivals`.

        Both [readings, bins]: of several at once.

        Smoothed, as the gaps between few times that are far from each other mean nothing, neither factors nor hopes
        must be fitted to them, and the last of some will not be the last of more: the density as widely as Silverman
        says ("Density Estimation", 1986, 3.31), chances to have come as Azzalini does (Biometrika 68, 1981). The
        deviation is that of the shortest half, which lies in one mode where there are several (Grübel, "The Length of
        the Shorth", Ann. Stat. 16, 1988).
        """
        alive = np.ones((len(came), BINS + 1))
        np.cumprod(1 - (came + UNKNOWN * LINDY) / (not_before(came, cut) + UNKNOWN), axis=1, out=alive[:, 1:])
        reached = 1 - alive[:, 1:]
        density, wide = alive[:, :-1] - alive[:, 1:], np.empty_like(came)
        counts = np.maximum(np.add.reduce(came, axis=1), 1.0).tolist()
        deviations = []
        for row, count in enumerate(counts):
            deviation = _shortest_half(reached[row]) / 1.35
            density[row] = _smoothed(density[row], 0.9 * deviation * count**-0.2)
            deviations.append(deviation * 1.3 * count ** (-1 / 3))
            wide[row] = smoothed_counts(came[row], deviations[row])
        later = np.maximum(1 - np.cumsum(density, axis=1) + 0.5 * density, 1e-9)
        hazards = (wide + UNKNOWN * LINDY) / (not_before(wide, cut) + UNKNOWN)
        return list(map(cls, hazards, reached, np.log(density + 1e-9), np.log(later), deviations))

    def evidence(self, came: Array, missing: Array, tried: slice) -> Array:
        """For factors, the logarithm of how likely each makes that these came in their bins, and those in none."""
        factors = FACTORS[tried]
        likely: Array = np.add.reduce(self.log_density.take(came[:, None] - factors, mode="clip"))
        if len(missing):
            likely += np.add.reduce(self.log_alive.take(missing[:, None] - factors, mode="clip"))
        return likely

    def evidences(self, marked: Array, tried: slice) -> Array:
        """[versions, tried]: the same of versions, by the places of replicas and their fates times `MARK`.

        Summed without BLAS, whose threads would wait for each other longer than this takes.
        """
        fates = (marked + MARK // 2) // MARK
        bins = (marked - MARK * fates)[:, :, None] - FACTORS[tried]
        bins.clip(0, BINS - 1, out=bins)
        bins += BINS * fates[:, :, None]
        likely = np.concatenate([np.zeros(BINS), self.log_density, self.log_alive]).take(bins)
        summed: Array = np.add.reduce(likely, axis=1)
        return summed

    def likely_factors(self, logs: Array) -> slice:
        """Those of `FACTORS` that are worth a try where some are thought to have these logarithms, more or less.

        Of times that spread far, every so manieth will do.
        """
        first, last = (min(max(int(log / WIDTH), -REACH), REACH) + REACH for log in (logs.min(), logs.max()))
        few, most = np.searchsorted(self.reached, (0.05, 0.95)).tolist()
        margin = MARGIN + most - few
        return slice(max(first - margin, 0), min(last + margin + 1, len(FACTORS)), 1 + (most - few) // STEPS)


def believe(evidence: Array, usual: Array) -> Array:
    """[..., factors]: how likely each of them is, by Bayes' rule, where ``usual`` says how often it was."""
    weights: Array = np.exp(evidence - np.maximum.reduce(evidence, axis=-1, keepdims=True)) * usual
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return weights


def not_before(came: Array, cut: Array) -> Array:
    """[..., bins]: how much had not come before each bin; what is cut off in one, nobody knows where in it."""
    risk: Array = (came + cut)[..., ::-1].cumsum(axis=-1)[..., ::-1] - 0.5 * cut
    return risk


def _shortest_half(reached: Array) -> int:
    """In how few bins half of all came."""
    begins = reached[: reached.searchsorted(0.5) + 1]
    return int((reached.searchsorted(begins + 0.5) - PLACES[: len(begins)]).min())


def _smoothed(density: Array, deviation: float) -> Array:
    """By a normal distribution of this standard deviation, in bins, one at least."""
    deviation = min(max(deviation, 1.0), WIDEST)
    steps = np.arange(-int(3 * deviation), int(3 * deviation) + 1)
    kernel = np.exp(-0.5 * (steps / deviation) ** 2)
    return np.convolve(density, kernel / kernel.sum(), "same")


def smoothed_counts(counts: Array, deviation: float) -> Array:
    """[..., bins], by their means over as many bins as have that standard deviation."""
    reach = round(0.5 * (1 + 12 * deviation**2) ** 0.5 - 0.5)
    if not reach:
        return counts
    sums = np.zeros((*counts.shape[:-1], BINS + 2 * reach + 1))  # of what lies before, the ends drawn out
    np.cumsum(counts, axis=-1, out=sums[..., reach + 1 : reach + 1 + BINS])
    sums[..., reach + 1 + BINS :] = sums[..., reach + BINS, None]
    means: Array = (sums[..., 2 * reach + 1 :] - sums[..., :BINS]) / (2 * reach + 1)
    return means
