"""How long a replica on a task waits with each update: an experimenter's straggler, constant or drawn.

Pure: the generator of random numbers is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from flowrt.errors import GraphError
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from random import Random

Draw: TypeAlias = "Callable[[Random, tuple[float, ...]], float]"

_DRAWS: dict[str, tuple[int, Draw]] = {  # by distribution: how many numbers it takes, and one draw
    "constant": (1, lambda rng, n: n[0]),
    "exponential": (1, lambda rng, n: rng.expovariate(1 / n[0]) if n[0] else 0.0),
    "uniform": (2, lambda rng, n: rng.uniform(n[0], n[1])),
    "lognormal": (2, lambda rng, n: n[0] * math.exp(rng.gauss(0.0, n[1]))),
}


@valueclass
class Delay:
    """A distribution of seconds.

    ``0.2`` (always), ``exponential:0.05`` (the mean), ``uniform:0.1,0.3`` (lowest, highest) or ``lognormal:0.05,0.5``
    (the median, and the standard deviation of the logarithm).
    """

    distribution: str
    numbers: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> Delay:
        """The delay that ``text`` spells. Raises `GraphError` for anything else."""
        name, colon, rest = text.strip().partition(":")
        distribution, given = (name, rest) if colon else ("constant", name)
        try:
            numbers = tuple(float(part) for part in given.split(","))
        except ValueError:
            numbers = ()
        expected = _DRAWS.get(distribution, (0,))[0]
        legal = all(math.isfinite(n) and n >= 0 for n in numbers)
        if not expected or len(numbers) != expected or not legal or not _ordered(distribution, numbers):
            raise GraphError(
                f"{text!r} is not a delay; write seconds as 0.2, exponential:MEAN, uniform:LOWEST,HIGHEST "
                "or lognormal:MEDIAN,SIGMA"
            )
        return Delay(distribution, numbers)

    def sample(self, rng: Random) -> float:
        """The next delay, in seconds."""
        return _DRAWS[self.distribution][1](rng, self.numbers)

    def __str__(self) -> str:
        numbers = ",".join(f"{n:g}" for n in self.numbers)
        return numbers if self.distribution == "constant" else f"{self.distribution}:{numbers}"


def _ordered(distribution: str, numbers: tuple[float, ...]) -> bool:
    return distribution != "uniform" or numbers[0] <= numbers[1]
