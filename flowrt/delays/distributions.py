"""Delays drawn from distributions, and what else slows a node."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.delays.delay import LINK, Delay, Seconds, Term, as_delay, number_text


@valueclass
class Constant(Term):
    """Always ``seconds``."""

    seconds: float

    WORD: ClassVar[str] = "constant"

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> float:
        return self.seconds

    @property
    def described(self) -> str:
        return number_text(self.seconds)


@valueclass
class Exponential(Term):
    """Exponential of mean ``mean``: what comes at any moment alike, however long it has not."""

    mean: float

    WORD: ClassVar[str] = "exponential"

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return rng.exponential(self.mean, replicas)


@valueclass
class ShiftedExponential(Term):
    """``least``, and beyond it an exponential of mean ``mean``: the usual model of a machine in a cluster.

    Lee et al., "Speeding Up Distributed Machine Learning Using Codes", arXiv 1512.02673, §III-D.
    """

    least: float
    mean: float

    WORD: ClassVar[str] = "shifted"

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return self.least + rng.exponential(self.mean, replicas)


@valueclass
class Uniform(Term):
    """Uniform from ``lowest`` to ``highest``."""

    lowest: float
    highest: float

    WORD: ClassVar[str] = "uniform"

    def check(self) -> None:
        self.take_seconds("lowest", "highest")
        if self.lowest > self.highest:
            self.refuse(f"lowest {self.lowest:g} is above highest {self.highest:g}")

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return rng.uniform(self.lowest, self.highest, replicas)


@valueclass
class Pareto(Term):
    """Pareto from ``least`` on: longer than t with probability (least / t) ** ``shape``.

    Heavy tails: with a shape of 2 or less the variance is infinite, with 1 or less the mean.
    """

    least: float
    shape: float

    WORD: ClassVar[str] = "pareto"

    def check(self) -> None:
        self.take_seconds("least")
        self.take(lambda shape: shape > 0, "a finite number above 0", "shape")

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return self.least * (1.0 + rng.pareto(self.shape, replicas))


@valueclass
class LogNormal(Term):
    """Log-normal: the median, and the standard deviation ``sigma`` of the natural logarithm."""

    median: float
    sigma: float

    WORD: ClassVar[str] = "lognormal"

    def check(self) -> None:
        self.take_seconds("median")
        self.take(lambda sigma: sigma >= 0, "a finite number, 0 or more", "sigma")

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return self.median * np.exp(self.sigma * rng.standard_normal(replicas))


@valueclass
class Correlated(Term):
    """A factor that a step has for all replicas, drawn from ``common``, times what each draws from ``own``.

    ``Correlated(LogNormal(1, 0.3), Exponential(0.2))``: in some steps all are slow. Nodes with the same delay draw the
    same factor. Where, when and whom the two strike is theirs no more, but the whole's.
    """

    common: Delay
    own: Delay

    WORD: ClassVar[str] = "correlated"

    def check(self) -> None:
        for name in ("common", "own"):
            object.__setattr__(self, name, as_delay(getattr(self, name)))

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        factor = self.common.sample(rng, step, 1)
        return factor * self.own.sample(rng, step, replicas)

    @property
    def described(self) -> str:
        return f"{self.WORD}:({self.common}),({self.own})"


@valueclass
class Pauses(Term):
    """A pause of ``seconds`` in one of ``every`` steps of a replica, at random: of the collector, or by a neighbour."""

    every: float
    seconds: float

    WORD: ClassVar[str] = "pauses"

    def check(self) -> None:
        self.take(lambda every: every >= 1, "a finite number of steps, 1 or more", "every")
        self.take_seconds("seconds")

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds:
        return np.where(rng.random(replicas) * self.every < 1.0, self.seconds, 0.0)


@valueclass
class Link(Term):
    """A slow way to a node: so many bytes a second in each direction, and each message later by ``latency`` seconds.

    Messages go one after another, whomever they come from. What counts is what a run of a trainer posts: batches,
    updates, versions, reports. A simulation sends no bytes: there give what they take, as in
    ``Constant(2 * size / bytes_per_second)``.
    """

    bytes_per_second: float
    latency: float = 0.0
    at: str = field(default=LINK, kw_only=True)

    WORD: ClassVar[str] = "link"
    MAY_STRIKE: ClassVar[tuple[str, ...]] = (LINK,)

    def check(self) -> None:
        self.take(lambda rate: rate > 0, "a finite number above 0", "bytes_per_second")
        self.take_seconds("latency")

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> float:
        return 0.0
