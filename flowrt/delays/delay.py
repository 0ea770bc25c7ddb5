"""What a delay is: seconds by which replicas are slower, drawn for each step, and where, when and whom they strike.

A delay is a frozen value. It is drawn from with a generator that is an argument, for all replicas of a step at once:
the same generator gives the same seconds, in a simulation and on nodes. It must not know clocks, nodes or policies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import field, fields
from math import inf, isfinite
from numbers import Real
from typing import Any, ClassVar, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, user_site
from flowrt.base.plain import is_number
from flowrt.base.valueclass import replace, valueclass

Seconds = NDArray[np.float64]
PLACES = ("input", "compute", "push", "server", "frozen")
LINK = "link"  # where a `Link` strikes, and nothing else does


class Delay:
    """Seconds by which replicas are slower. Delays add up: ``Constant(0.8) + Exponential(0.2)``, or ``0.8 + …``.

    Every delay takes ``at=``, where it strikes:

    - ``"compute"``: the replica's update is finished so much later;
    - ``"input"``: reading each batch takes so long, while the ones before it are computed with;
    - ``"push"``: the update is on its way so much longer;
    - ``"server"``: the parameter server applies each version so much later;
    - ``"frozen"``: for so long nothing of the node answers, at the beginning of a step.
    """

    __slots__ = ()

    @property
    def parts(self) -> tuple[Term, ...]:
        """What it is the sum of."""
        raise NotImplementedError

    def sample(
        self,
        rng: np.random.Generator,
        step: int,
        replicas: int,
        now: float = 0.0,
        at: Collection[str] = PLACES,
    ) -> Seconds:
        """Seconds [replicas] that a step takes longer at the places ``at``; ``now`` is the run's seconds so far.

        What is drawn does not hang on ``at``, nor on when and whom it strikes.
        """
        total = np.zeros(replicas)
        for part in self.parts:
            seconds = part.draw(rng, step, replicas)
            if part.at in at and part.strikes(step, now):
                np.add(total, seconds, out=total, where=part.struck(replicas))
        return total

    def during(self, first: float = 0, stop: float = inf, *, unit: str = "steps") -> Delay:
        """Itself in steps ``first`` ≤ step < ``stop``, versions of the variables from 0; and nothing in others.

        With ``unit="seconds"`` in what begins at those seconds of the run.
        """
        return add(part.limited(first, stop, unit) for part in self.parts)

    def on(self, *replicas: int) -> Delay:
        """Itself for these replicas, and nothing for others."""
        return add(part.only(replicas) for part in self.parts)

    def __add__(self, other: object) -> Delay:
        return add((*self.parts, *as_delay(other).parts)) if isinstance(other, (Delay, Real)) else NotImplemented

    def __radd__(self, other: object) -> Delay:
        return as_delay(other) + self if isinstance(other, Real) else NotImplemented

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return " + ".join(map(str, self.parts))

    def __repr__(self) -> str:
        return f"fr.delays.parse({str(self)!r})"


@valueclass
class Term(Delay):
    """A delay that is no sum.

    Args:
        at: Where it strikes.
        replicas: Whom it strikes; all without any.
        steps: The steps it strikes in, up to and without the last.
        clock: The seconds of a run it strikes in, likewise.
    """

    at: str = field(default="compute", kw_only=True)
    replicas: tuple[int, ...] = field(default=(), kw_only=True)
    steps: tuple[float, float] = field(default=(0, inf), kw_only=True)
    clock: tuple[float, float] = field(default=(0, inf), kw_only=True)

    WORD: ClassVar[str] = ""  # in text
    MAY_STRIKE: ClassVar[tuple[str, ...]] = PLACES

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Delay.__repr__  # type: ignore[method-assign]
        kinds[cls.WORD] = cls

    def __post_init__(self) -> None:
        self.check_place()
        self.check()

    def check_place(self) -> None:
        """Refuse a place where it cannot strike."""
        if self.at not in self.MAY_STRIKE:
            self.refuse(f"at={self.at!r} is no place where it strikes; expected {', '.join(self.MAY_STRIKE)}")

    def check(self) -> None:
        """Refuse what makes no sense of its own: what it takes are seconds, where nothing else is said."""
        self.take_seconds(*self.takes())

    def draw(self, rng: np.random.Generator, step: int, replicas: int) -> Seconds | float:
        """Seconds [replicas] of a step, whenever and whomever it strikes."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Term, ...]:
        return (self,)

    # ── when and whom ────────────────────────────────────────────────────────────────────────────────────────────────

    def strikes(self, step: int, now: float) -> bool:
        """Whether it strikes anybody then."""
        return self.steps[0] <= step < self.steps[1] and self.clock[0] <= now < self.clock[1]

    def struck(self, replicas: int) -> Any:
        """Whom it strikes, by replica."""
        return np.isin(np.arange(replicas), self.replicas) if self.replicas else True

    def limited(self, first: float, stop: float, unit: str) -> Self:
        """Itself, within what it is limited to, then."""
        name = {"steps": "steps", "seconds": "clock"}.get(unit)
        if name is None:
            self.refuse(f"unit={unit!r}: expected steps or seconds")
        if not (is_number(first) and is_number(stop) and first < stop):
            self.refuse(f"during({first!r}, {stop!r}): expected two numbers, the second the higher one, none below 0")
        if unit == "steps" and any(isfinite(end) and end != int(end) for end in (first, stop)):
            self.refuse(f'during({first!r}, {stop!r}): steps are whole numbers; unit="seconds" would take these')
        since, until = getattr(self, name)
        return replace(self, **{name: (max(since, _trim(first)), min(until, _trim(stop)))})

    def only(self, replicas: tuple[int, ...]) -> Self:
        """Itself, for those of whom it strikes."""
        if not replicas or not all(is_number(r) and r == r // 1 for r in replicas):
            self.refuse(f"on({', '.join(map(repr, replicas))}): expected replicas, numbered from 0")
        chosen = [int(r) for r in replicas if not self.replicas or r in self.replicas]
        if not chosen:
            self.refuse(f"on({', '.join(map(repr, replicas))}): it strikes {self.replicas} alone")
        return replace(self, replicas=tuple(sorted(set(chosen))))

    # ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def described(self) -> str:
        """Itself as text, without where, when and whom."""
        return f"{self.WORD}:{','.join(number_text(getattr(self, name)) for name in self.takes())}"

    @classmethod
    def takes(cls) -> list[str]:
        """The names of what it takes."""
        return [each.name for each in fields(cls) if not each.kw_only]

    @classmethod
    def of_rows(cls, rows: list[list[Any]]) -> Term:
        """The delay that takes what a text gives: ``a,b;c,d`` is two rows. Raises `TypeError` for too many or few."""
        if len(rows) > 1:
            raise TypeError
        return cls(*rows[0])

    def __str__(self) -> str:
        where = "" if self.at in ("compute", LINK) else f" at {self.at}"
        whom = f" on {','.join(map(str, self.replicas))}" if self.replicas else ""
        return f"{self.described}{where}{whom}{_window(self.steps, '')}{_window(self.clock, 's')}"

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_seconds(self, *names: str) -> None:
        """Check that these fields are seconds, and keep them as floats."""
        self.take(lambda number: number >= 0, "a finite number of seconds, 0 or more", *names)

    def take(self, fits: Callable[[float], bool], wanted: str, *names: str) -> None:
        """Check fields that are finite numbers, and keep them as floats."""
        for name in names:
            value = getattr(self, name)
            if not is_number(value, -inf) or not isfinite(value) or not fits(float(value)):
                self.refuse(f"{name} is {wanted}, got {value!r}")
            object.__setattr__(self, name, float(value))

    def refuse(self, what: str) -> NoReturn:
        """Raise `GraphError` at the user's line."""
        raise GraphError(f"{user_site()}: a delay, {type(self).__name__}: {what}")


kinds: dict[str, type[Term]] = {}
"""What delays there are, by their words."""


@valueclass
class Sum(Delay):
    """Delays that strike one after another."""

    summands: tuple[Term, ...]

    __repr__ = Delay.__repr__

    @property
    def parts(self) -> tuple[Term, ...]:
        return self.summands


def as_delay(value: Any) -> Delay:
    """``value``, of which a number is that many seconds. Raises `GraphError` for anything else."""
    if isinstance(value, Delay):
        return value
    if isinstance(value, Real):
        constant: Any = kinds["constant"]
        return cast("Delay", constant(value))
    raise GraphError(f"{user_site()}: expected a delay or a number of seconds, got {value!r}")


def add(parts: Iterable[Term]) -> Delay:
    """The delay of these parts."""
    first, *rest = parts
    return Sum((first, *rest)) if rest else first


def number_text(number: float) -> str:
    """``number`` as text that reads as the same number."""
    return repr(number).removesuffix(".0")


def _trim(end: float) -> float:
    """A bound of a window as a plain number, whole where it can be."""
    return int(end) if isfinite(end) and end == int(end) else float(end)


def _window(window: tuple[float, float], unit: str) -> str:
    first, stop = (f"{number_text(end)}{unit}" if isfinite(end) and end else "" for end in window)
    return f" during {first}:{stop}" if first or stop else ""
