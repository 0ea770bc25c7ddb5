"""As many as are worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import user_site
from flowrt.base.valueclass import replace, valueclass
from flowrt.sched.policies.arrivals import GRID, Arrivals
from flowrt.sched.policies.caps import Caps, worth_of
from flowrt.sched.policies.noise import NoiseScale
from flowrt.sched.policies.policy import Close, Offer, Policy, Record, WaitUntil, check_at_least, least_of

Array: TypeAlias = "np.ndarray[Any, Any]"

BUDGET = 0.01  # of all worth may be spent on trying out whether waiting longer pays
APART = 8  # versions between two tries, if not all came, and two versions that are not closed at the best number
SAME = 0.1  # of the time, by which it may differ where the same is decided
TINY = 1e-12  # does not count
STEPS = np.diff(GRID, prepend=1.0)  # between times that are looked at, where it is 1 now
FAR = 8.0  # times as long as the first of the first versions' updates took, half of them are waited for at most
PATIENCE = 1.5  # times as long as half of the first versions' updates took, their others are waited for


@valueclass
class History:
    """What a run has shown so far.

    Args:
        versions: How many there were.
        arrivals: When updates come.
        noise: How noisy they are.
        caps: What each number of updates would have come to.
        spare: The worth that may be spent on trying out; below zero, too much was.
        since: Versions since a try for which not all came, or which did not pay.
        tries: Whether that is due.
        scale: The noise scale that is believed.
        rate: Worth per second, of late.
        cap: The number of updates at which it was surely better to close, of late, if there is one.
    """

    versions: int
    arrivals: Arrivals
    noise: NoiseScale
    caps: Caps
    spare: float
    since: int
    tries: bool
    scale: float = 1.0
    rate: float = 0.0
    cap: int | None = None

    def learn(self, record: Record, least: int, tried: bool, cap: int | None) -> History:
        """What is known after a version, where versions keep ``least`` updates at least.

        Something was ``tried`` out, or no more than ``cap`` were waited for, or what is believed of times decided it.
        """
        missing = [replica for replica, _ in record.missing]
        came, seconds = _split(record.offers)
        noise = self.noise.learn([offer.square for offer in record.offers], record.square)
        scale = noise.believed(float(self.arrivals.replicas))
        gained = worth_of(len(came), scale)
        lost = max(0.0, self.caps.rate(scale) * record.seconds - gained) if tried else 0.0
        spare = min(self.spare - lost + BUDGET * gained, 0.2)
        since = 1 if tried and (missing or lost) else self.since + 1  # where all came, and that paid, they may again
        caps = self.caps.learn(seconds, len(missing), record.closed, record.seconds)
        rate = caps.rate(scale)
        if cap is None and not tried:
            caps = caps.judge(seconds, record.closed, scale, rate)
        return History(
            versions=self.versions + 1,
            arrivals=self.arrivals.learn(came, seconds, missing, record.closed),
            noise=noise,
            caps=caps,
            spare=spare,
            since=since,
            tries=spare >= 0 and since >= APART,
            scale=scale,
            rate=rate,
            cap=caps.best(least),
        )

    def worth(self, updates: Any) -> Any:
        """What a step with so many ``updates`` is worth."""
        return worth_of(updates, self.scale)


class Lesson:
    """Versions that were applied, and what was known before them.

    What follows is worked out once replicas compute again, or when the next decision asks for it: before that, all of
    them wait to be told the new values. Versions of late are learnt from together, as many as `Arrivals` looks at.
    """

    def __init__(self, known: History, records: tuple[Record, ...], least: int) -> None:
        self._known, self._records, self._least = known, records, least
        self.unlearnt = records if not known.tries and known.arrivals.waits(len(records)) else ()

    def then(self, record: Record) -> Lesson:
        """With another version."""
        if self.unlearnt:
            return Lesson(self._known, (*self.unlearnt, record), self._least)
        return Lesson(self.history, (record,), self._least)

    @cached_property
    def history(self) -> History:
        """With those that are learnt from."""
        known = self._known
        for record in () if self.unlearnt else self._records:
            known = known.learn(record, self._least, self._known.tries, _cap_in(self._known, known.versions))
        return known

    @property
    def tries(self) -> bool:
        """Whether something is to be tried out in the open version."""
        return not self.unlearnt and self.history.tries

    @property
    def cap(self) -> int | None:
        """How many updates are waited for in it at most."""
        return _cap_in(self.history, self.history.versions + len(self.unlearnt))


def _cap_in(history: History, version: int) -> int | None:
    return history.cap if version % APART else None


@valueclass
class Adaptive(Policy):
    """Keep as many updates as are worth waiting for, ``at_least`` so many, by what the run has shown: no number needed.

    A step with k updates is worth k / (k + B), where B is the gradient noise scale, measured on the servers, in
    replicas' updates (McCandlish et al., arXiv 1812.06162). What counts is worth per second over the run, so a step is
    ended when no longer wait for more updates would gain as much as the same time usually does: optimal stopping of a
    renewal reward (Ross, "Applied Probability Models with Optimization Applications", 1970, ch. 7). How long each
    replica may take yet follows from what was seen of it, see `Arrivals`; what was not waited for is only known to take
    longer, so now and then a step waits as long as the most that may come would pay for, at 1 % of the worth in all;
    while all come then, and that pays, the next one does, too. What no belief is needed for is what closing at a fixed
    number of updates would have come to, see `Caps`: where that surely was better, it is done, but for one step in
    eight.

    The kept updates are averaged. It follows replicas that become slow, recover, come and go, within some ten steps.
    The wrong choice where every example must count as often as any other, since slow replicas' are dropped more often;
    where results are to be the same bits every time, since time decides; and for runs of a dozen steps, which it has
    spent before it knows much. Raises `GraphError` unless ``at_least`` is 1 or more.
    """

    at_least: int = 1
    _late: frozenset[int] | None = field(default=None, init=False, repr=False, compare=False)  # in the first version
    _lesson: Lesson | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_at_least(self, f"{user_site()}: Adaptive(at_least={self.at_least!r})")

    @property
    def measures(self) -> bool:
        """It weighs updates by their noise."""
        return True

    def least(self, replicas: int) -> int:
        """As many as it says; raises `GraphError` when there are fewer replicas than that."""
        return least_of(self, self.at_least, replicas)

    # ── now ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        """All that is there, or when it may be worth more to have waited."""
        if len(offers) < self.at_least:
            return WaitUntil(offers=self.at_least)
        if not able:
            return _close(offers, "nobody else can come")
        if self._lesson is None:
            return _decide_first(offers, able, now, self._late or frozenset())
        lesson = self._lesson
        if lesson.tries:
            return _try_out(lesson.history, offers, able, now)
        if lesson.unlearnt and (answer := _decide_as_before(lesson.unlearnt, offers, able, now)):
            return answer
        if lesson.cap is None:
            return _decide(lesson.history, offers, able, now)
        return _decide_up_to(lesson.cap, lesson.history, offers, able, now)

    # ── after it ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def after(self, record: Record) -> Adaptive:
        """The policy that knows of that version; of the first one, in which nodes still got ready, who was late."""
        if self._late is None:
            return replace(self, _late=frozenset([replica for replica, _ in record.missing]))
        if self._lesson is None:
            return replace(self, _lesson=Lesson(_start(record), (record,), self.at_least))
        return replace(self, _lesson=self._lesson.then(record))

    def prepare(self) -> None:
        """Learn from the last version."""
        if self._lesson is not None:
            _ = self._lesson.history


def _decide_first(offers: Sequence[Offer], able: Sequence[int], now: float, late: frozenset[int]) -> Close | WaitUntil:
    """Nothing is known yet: wait for all but who was ``late`` before, and not much longer than for half of them.

    Nor very much longer than for the first one, where times differ so much that half of them would be far too many.
    """
    replicas = len(offers) + len(able)
    half = (replicas + 1) // 2
    if len(offers) < half:
        until = FAR * offers[0].seconds
        if now < until:
            return WaitUntil(until, half)
        return _close(offers, f"kept {len(offers)} of {replicas}: {FAR:g} times as long as the first of them took")
    if late.issuperset(able):
        return _close(offers, f"kept {len(offers)} of {replicas}: the others were late in the first version, too")
    until = PATIENCE * offers[half - 1].seconds
    if now < until:
        return WaitUntil(until, len(offers) + 1)
    return _close(offers, f"kept {len(offers)} of {replicas}: {PATIENCE:g} times as long as half of them took")


def _try_out(history: History, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
    """Wait for the next as long as it would be worth if all came with it."""
    count, replicas = len(offers), len(offers) + len(able)
    until = offers[-1].seconds + (history.worth(replicas) - history.worth(count)) / history.rate
    if now < until:
        return WaitUntil(until, count + 1)
    return _close(offers, f"kept {count} of {replicas}: tried out who else comes")


def _decide_as_before(
    records: Sequence[Record], offers: Sequence[Offer], able: Sequence[int], now: float
) -> Close | WaitUntil | None:
    """As in these versions, from which nothing was learnt since; None where none of them was like this one."""
    count = len(offers)
    soonest, fewest = min([record.closed for record in records]), min([len(record.offers) for record in records])
    if count < fewest and now < soonest:
        return WaitUntil(soonest, fewest)
    pending = set(able)
    for record in records:
        if abs(now - record.closed) < SAME * now and pending == {replica for replica, _ in record.missing}:
            return _close(
                offers, f"kept {count} of {count + len(able)}: to wait for the same was not worth it just now"
            )
    return None


def _decide_up_to(
    cap: int, history: History, offers: Sequence[Offer], able: Sequence[int], now: float
) -> Close | WaitUntil:
    """As by what is believed, but for no more than ``cap``."""
    count = len(offers)
    if count >= cap:
        return _close(
            offers, f"kept {count} of {count + len(able)}: to wait for more than {cap} was not worth it of late"
        )
    answer = _decide(history, offers, able, now)
    return WaitUntil(answer.seconds, min(answer.offers, cap)) if isinstance(answer, WaitUntil) else answer


def _decide(history: History, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
    """Wait until the time at which most is gained, or for the next one, if either is more than waiting costs."""
    count, rate = len(offers), history.rate
    times, chances, more, none = history.arrivals.expected(*_split(offers), able, now)
    there, some = history.worth(count), np.maximum(1 - none, 1e-12)
    gains = _mean(chances, some * (history.worth(count + np.maximum(more / some, 1)) - there))
    costs = rate * (times - now)
    nett = gains - costs
    best = int(nett.argmax())
    if nett[best] > 0 and times[best] > now:
        return WaitUntil(float(times[best]), count + max(1, int(_mean(chances, more)[best])))
    if (until := _until_next(times, _mean(chances, none), history.worth(count + 1) - there, rate, now)) is not None:
        return WaitUntil(until, count + 1)
    best = int((gains / np.maximum(costs, 1e-300)).argmax())
    return _close(
        offers,
        f"kept {count} of {count + len(able)}: waiting {_brief(times[best] - now)} s more for "
        f"{_brief(_mean(chances, more)[best])} was worth {_brief(gains[best])} of {_brief(costs[best])}",
    )


def _until_next(times: Array, none: Array, gain: float, rate: float, now: float) -> float | None:
    """Until which of ``times`` to wait for the next one, which is worth ``gain``, if that pays at any.

    ``none`` are the chances that it will not have come by then.
    """
    hopes = (1 - none) * gain
    if (hopes - rate * now * (STEPS * none).cumsum()).max() <= 0:  # it takes that long at least
        return None
    nett = hopes - rate * _waits(times, none, now)
    best = int(nett.argmax())
    return float(times[best]) if nett[best] > 0 else None


def _mean(chances: Array, values: Array) -> Array:
    """Of [cases, times] by the chances of the cases."""
    mean: Array = chances @ values if len(chances) > 1 else values[0]
    return mean


def _waits(times: Array, none: Array, now: float) -> Array:
    """How long it takes until the next one comes, or one of ``times``; ``none`` are the chances that it is that.

    Between two times its chance to come, if it has not, stays the same.
    """
    times, none = np.concatenate(([now], times)), np.concatenate(([1.0], np.maximum(none, 1e-300)))
    logs, before = np.log(none), none[:-1]
    meanwhile = (before - none[1:] + TINY * before) / (logs[:-1] - logs[1:] + TINY)
    waits: Array = ((times[1:] - times[:-1]) * meanwhile).cumsum()
    return waits


def _start(record: Record) -> History:
    replicas = 1 + max([*(offer.replica for offer in record.offers), *(replica for replica, _ in record.missing)])
    times = [offer.seconds for offer in record.offers]
    return History(
        versions=0,
        arrivals=Arrivals.start(replicas, times[len(times) // 2]),
        noise=NoiseScale(),
        caps=Caps.start(),
        spare=0.0,
        since=0,
        tries=False,
    )


def _split(offers: Sequence[Offer]) -> tuple[list[int], list[float]]:
    return [offer.replica for offer in offers], [offer.seconds for offer in offers]


def _close(offers: Sequence[Offer], why: str) -> Close:
    return Close(tuple([offer.replica for offer in offers]), why)


def _brief(number: float) -> str:
    return f"{number:.2g}"
