"""The policies that the protocol is searched with: the shipped ones, and some that are as odd as a policy may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b

import numpy as np

from flowrt.base.errors import GraphError
from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies import (
    Adaptive,
    AllOf,
    Close,
    Deadline,
    FirstOf,
    LocalSteps,
    Offer,
    Policy,
    Record,
    WaitUntil,
)
from flowrt.sched.policies.adaptive import Lesson


@dataclass(frozen=True)
class Patient(Policy):
    """Waits a second after whatever comes, then keeps the newest two: not all that are there, nor the first."""

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        ends = offers[-1].seconds + 1.0
        return WaitUntil(ends) if now < ends else Close(tuple(offer.replica for offer in offers[-2:]))


@dataclass(frozen=True)
class AllOfThoseLeft(Policy):
    """Waits for everybody who is not lost, so it depends on being told of who is."""

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        if able:
            return WaitUntil(offers=len(offers) + len(able))
        return Close(tuple(offer.replica for offer in offers))


@dataclass(frozen=True)
class Alternating(Policy):
    """Keeps one update of a version and two of the next, and looks at what it is told of them."""

    keeps: int = 1

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        if len(offers) < self.keeps:
            return WaitUntil(offers=self.keeps)
        return Close(tuple(offer.replica for offer in offers[: self.keeps]))

    def after(self, record: Record) -> Policy:
        there, missing = {offer.replica for offer in record.offers}, {replica for replica, _ in record.missing}
        if len(record.kept) != self.keeps or not there.issuperset(record.kept) or there & missing:
            raise GraphError(f"a record that cannot be: {record}")
        return Alternating(3 - self.keeps)


@valueclass
class TellingApart(Adaptive):
    """`Adaptive`, told apart by all that it has seen, of which what it decides follows: a search must visit each."""

    seen: bytes = field(default=b"", init=False)
    """A digest of it."""

    def after(self, record: Record) -> TellingApart:
        known = Adaptive.after(self, record)  # super() knows no slotted class
        assert isinstance(known, TellingApart)
        return known._told_apart()

    def _told_apart(self) -> TellingApart:
        if self._lesson is None:
            return self
        assert not self._lesson.unlearnt, "what it has seen is all in its history"
        digest, history = blake2b(digest_size=16), self._lesson.history
        known = history.arrivals
        parts = (part for reading in known.readings for part in (replace(reading, spread=None), reading.spread))
        rest = replace(history, arrivals=None, caps=None)
        for value in (rest, history.caps, replace(known, readings=()), *parts):
            for fact in (getattr(value, part.name) for part in fields(value)):
                digest.update(fact.tobytes() if isinstance(fact, np.ndarray) else repr(fact).encode())
        return replace(self, seen=digest.digest())

    def renamed(self, order: tuple[int, ...]) -> TellingApart:
        """The same where replicas have other numbers."""
        if self._lesson is None:
            return self
        known, rows = self._lesson.history.arrivals.of(len(order)), list(order)
        assert not known.fresh, "versions that are yet to be looked at name replicas, too"
        assert not self._lesson.unlearnt, "and so do those that are yet to be learnt from"
        known = replace(
            known,
            logs=known.logs[:, rows],
            fates=known.fates[:, rows],
            readings=tuple(
                replace(reading, usual=reading.usual[rows], alive=reading.alive[rows]) for reading in known.readings
            ),
        )
        lesson = object.__new__(Lesson)
        lesson.unlearnt = ()
        lesson.history = replace(self._lesson.history, arrivals=known)  # in the place of what is worked out once
        return replace(self, _lesson=lesson)._told_apart()


@dataclass(frozen=True)
class Hasty(Policy):
    """Keeps the first update, however stale, and cuts off whoever falls further behind than ``bound`` versions."""

    bound: int

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return Close((offers[0].replica,))

    def size(self, replicas: int) -> int:
        return 1

    @property
    def staleness(self) -> int:
        return self.bound


POLICIES: tuple[Policy, ...] = (
    *(AllOf(), FirstOf(2), Deadline(1.0), Deadline(1.0, at_least=2), LocalSteps(4, FirstOf(2), grace=1.0)),
    *(Patient(), AllOfThoseLeft(), Alternating(), TellingApart(at_least=2)),
)
