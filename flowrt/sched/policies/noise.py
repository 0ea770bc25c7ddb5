"""How noisy the updates of replicas are: the gradient noise scale, from sums of squares that servers measure.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1: the expected square of
the mean of k updates is |G|² + V / k, with G the gradient and V the variance of one update, summed over its numbers.
So the squares of the updates themselves and that of their mean tell both, and B = V / |G|² is the number of updates
from which on more of them make a step little better: by the quadratic model there, a step with k updates is worth
k / (k + B) of one along the true gradient (eq. 2.7).

Both are averaged over versions before they are divided: one version's are so noisy that they may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan

from flowrt.base.valueclass import valueclass

KEEP = 0.98  # what an average keeps of itself with each version, told of or not: it goes back some 50
DOUBT = 1.0  # versions measured that count as much as what is supposed before
SMALLEST = 1e-3
LARGEST = 1e6  # replicas' updates; noise beyond it is all there is


@valueclass
class NoiseScale:
    """Averages over the versions that were measured; those of one update alone tell nothing.

    Args:
        weight: The weight of what was seen; 0 for nothing.
        gradient: The sum of |G|², by weight.
        variance: The sum of V, by weight.
    """

    weight: float = 0.0
    gradient: float = 0.0
    variance: float = 0.0

    @property
    def value(self) -> float:
        """B, in replicas' updates; NaN while nothing was measured."""
        if not self.weight:
            return nan
        if self.variance <= 0:
            return 0.0
        return min(self.variance / self.gradient, LARGEST) if self.gradient > 0 else LARGEST

    def believed(self, supposed: float) -> float:
        """B, drawn towards what is ``supposed`` where little of it was measured, or nothing of late."""
        if not self.weight:
            return supposed
        known = self.weight / (self.weight + DOUBT)
        return float(supposed ** (1 - known) * max(self.value, SMALLEST) ** known)

    def learn(self, squares: Sequence[float], mean: float) -> NoiseScale:
        """After a version: the ``squares`` of its updates, and that of their ``mean``."""
        count = len(squares)
        one = sum(squares) / count if count else nan
        if count < 2 or not (isfinite(one) and isfinite(mean)):
            return NoiseScale(self.weight * KEEP, self.gradient * KEEP, self.variance * KEEP)
        return NoiseScale(
            self.weight * KEEP + 1,
            self.gradient * KEEP + (count * mean - one) / (count - 1),
            self.variance * KEEP + (one - mean) * count / (count - 1),
        )
