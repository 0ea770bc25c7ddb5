"""Who is slow, and why: what some seconds of training showed, judged by what the others and the past show.

Law: pure arithmetic on `Medians`. A replica is slow by one part of its step, the one by which it is furthest behind:
the median of the others now, or its own past, whatever has become of all alike meanwhile. What is slow for all (server,
network, input, or computing, by comparison with the past or because most of a step is nothing else) is nobody's in
particular, and dropping a replica does not help it. To be named, an excess must be a good part of a step, larger than
what the part varies by without a cause, and have lasted: a view is medians over `attribution.RECENT` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import valueclass

Array: TypeAlias = "np.ndarray[Any, Any]"
CAUSES = ("input", "link", "compute", "frozen")
"""What a replica may be slow by, in the order of `Medians.parts`; for all, also "server"."""
INPUT, LINK, COMPUTE, HELD = range(len(CAUSES))
NAMED, FORGIVEN = 1.5, 1.25  # times what is usual: from here, and as long as that, it is slow
FOR_ALL = 2.0  # as `NAMED`, of a part that is slow for all
MOST = 0.6  # of a step, by which a part that is always slow is told
LEAST = 4e-3  # seconds of excess: what comes and goes with the turns that a busy system gives its processes
LEAST_FOR_ALL = 1e-2  # as `LEAST`: a system that is busy with other things delays all
SHARE = 0.05  # of a step as it is now: less makes none longer, while another replica is waited for
VARIES = 4.0  # standard deviations of excess, as the past tells them
FLOORS = {
    "input": 0.01,
    "link": 0.02,
    "server": 0.02,
}  # seconds of a part that may be most of a step without being slow
RATE = 100e6  # bytes a second, on a link or applied by a server, that are not slow
_HELP = {
    "input": "batches come late to all",
    "link": "the network is slow for all",
    "server": "the server is slow, for all",
    "compute": "computing takes all longer than before",
}


@valueclass
class Medians:
    """What a stretch of time showed: medians, in seconds, nan where there was nothing.

    Args:
        parts: [replicas, 4] for `CAUSES`.
        server: Of looking at an update and applying a set.
        step: Of a whole step, without waiting for the client.
        cut: [replicas, 4]; whether the part took at least so long: it was cut off, or still goes on. None: nowhere.
    """

    parts: Array
    server: float
    step: float
    cut: Array | None = None

    @classmethod
    def nothing(cls, replicas: int) -> Medians:
        """A view in which nothing was seen."""
        return cls(np.full((replicas, len(CAUSES)), np.nan), math.nan, math.nan)


@valueclass
class Slow:
    """A replica that is slow, or (None) something that is slow for all.

    Args:
        replica: Which one.
        cause: input, link, compute, frozen or server.
        factor: How many times as long as usual its step takes, or (None) that part of it; infinite where it is frozen.
        helps: Whether a policy that does not wait for it makes steps shorter.
        seconds: What that part takes, at least.
        usual: What it takes the others, or took before.
    """

    replica: int | None
    cause: str
    factor: float
    helps: bool
    seconds: float = math.nan
    usual: float = math.nan

    def __str__(self) -> str:
        took = f"{_shown(self.seconds)} where {_shown(self.usual)} is usual"
        if self.replica is None:
            what = "a server answers nothing" if math.isinf(self.factor) else f"{_HELP[self.cause]} ({took})"
            return f"{what}: dropping the slow will not help"
        advice = "" if self.helps else "; dropping it will not help"
        if self.cause == "frozen" and math.isinf(self.factor):
            return f"replica {self.replica} is frozen: its node answers nothing{advice}"
        why = "as its node stands still at times" if self.cause == "frozen" else f"by its {self.cause}"
        by = f"{self.factor:.3g} times as long as usual, {why} ({took})"
        return f"replica {self.replica} is slow: its steps take {by}{advice}"


def judge(
    recent: Medians,
    past: Medians,
    noise: Medians,
    *,
    frozen: Collection[int] = (),
    stopped: bool = False,
    named: Collection[Slow] = (),
    nbytes: int = 0,
) -> tuple[Slow, ...]:
    """Who is slow in ``recent``, those that were ``named`` before until they are nearly as fast as usual again.

    The nodes of ``frozen`` replicas answer nothing; ``stopped`` says that a server's does not.
    ``noise`` is by how much views of the past vary (standard deviations, as medians tell them); ``nbytes`` is what a
    replica is told of a version.
    """
    shared = _for_all(recent, past, noise, {slow.cause for slow in named if slow.replica is None}, nbytes)
    if stopped:
        shared = [Slow(None, "server", math.inf, False)]
    dead = [Slow(replica, "frozen", math.inf, len(recent.parts) > 1) for replica in sorted(frozen)]
    lone = _each(recent, past, noise, {slow.replica for slow in named})
    causes = {slow.cause for slow in shared}
    return (*shared, *dead, *(slow for slow in lone if slow.cause not in causes and slow.replica not in frozen))


def _for_all(recent: Medians, past: Medians, noise: Medians, named: Collection[str], nbytes: int) -> list[Slow]:
    found = []
    for cause in (*FLOORS, "compute"):
        now, before, varies = _common(recent, cause), _common(past, cause), _common(noise, cause)
        more = now - before
        times = 1 + (NAMED - 1) / 2 if cause in named else FOR_ALL
        least = max(LEAST_FOR_ALL, (times - 1) / 2 * past.step, SHARE * _number(recent.step), VARIES * _number(varies))
        grown = now >= times * before and more >= least
        floor = FLOORS.get(cause, math.inf) + nbytes / RATE
        most = now >= NAMED * floor and now >= MOST * recent.step
        if grown or most:
            usual = before if grown else float(np.fmin(before, floor))
            found.append(Slow(None, cause, now / max(usual, LEAST), False, now, usual))
    return found


def _common(view: Medians, cause: str) -> float:
    """What a part takes all but a third of the replicas, at least."""
    if cause == "server":
        return view.server
    seen = view.parts[:, CAUSES.index(cause)]
    seen = np.sort(seen[~np.isnan(seen)])
    return float(seen[(len(seen) - 1) // 3]) if len(seen) else math.nan


def _each(recent: Medians, past: Medians, noise: Medians, named: Collection[int | None]) -> list[Slow]:
    now, replicas = recent.parts, len(recent.parts)
    known = np.where(np.isnan(now), past.parts, now)
    changed = np.where(np.isnan(now), 0.0, now - past.parts)
    apart = np.fmax(now - np.fmin.reduce(known, 0), now - past.parts)  # from the quickest, and from the past
    least = max(LEAST, SHARE * _number(recent.step))
    candidates = np.nonzero((apart >= least).any(1))[0].tolist()
    if not candidates:
        return []
    varies = np.nan_to_num(middle(noise.parts)[0])
    alone = replicas == 1
    usual = past.parts if alone else middles_of_others(known)
    more_now = np.full_like(now, np.nan) if alone else now - usual
    later = changed if alone else changed - np.fmax(0.0, middles_of_others(changed))
    excess = np.fmax(more_now, np.where(np.isnan(now), np.nan, later))
    found = []
    for replica in candidates:
        if np.isnan(excess[replica]).all() or np.isnan(usual[replica]).all():
            continue
        rounds = float(np.nansum(usual[replica])) + _number(recent.server)
        cause = int(np.nanargmax(excess[replica]))
        more = float(excess[replica, cause])
        factor = 1 + more / rounds if rounds > 0 else math.inf
        if more >= max(least, VARIES * varies[cause]) and factor >= (FORGIVEN if replica in named else NAMED):
            seconds = float(now[replica, cause])
            found.append(Slow(replica, CAUSES[cause], factor, replicas > 1, seconds, seconds - more))
    return found


def middles_of_others(values: Array) -> Array:
    """For each along the first axis, the median of the others, as `middle` has it."""
    order = np.argsort(values, 0)  # nan last
    ordered, rank = np.take_along_axis(values, order, 0), np.argsort(order, 0)
    counted = ~np.isnan(values)
    others = counted.sum(0) - counted
    at = np.maximum(0, (others - 1) // 2)
    at += counted & (rank <= at)  # which leaves itself out
    return np.where(others > 0, np.take_along_axis(ordered, np.minimum(at, len(values) - 1), 0), np.nan)


def middle(values: Array, weights: Array | None = None, cut: Array | None = None) -> tuple[Array, Array]:
    """Along the first axis, the median of what is not nan, and whether it is only known to be at least that.

    ``cut`` says which of ``values`` went on for an unknown time: then it is the median of Kaplan and Meier (1958), or
    the largest value where fewer than half are known to have ended. ``weights`` are the values'. Nan where nothing is.
    """
    weights = np.ones(len(values)) if weights is None else weights
    order = np.argsort(values, 0)  # nan last
    ordered = np.take_along_axis(values, order, 0)
    weight = np.where(np.isnan(ordered), 0.0, weights[order])
    ended = weight if cut is None else np.where(np.take_along_axis(cut, order, 0), 0.0, weight)
    left = np.cumsum(weight[::-1], 0)[::-1]  # of what lasted at least so long
    survive = np.cumprod(1.0 - ended / np.where(left > 0, left, 1.0), 0)
    reached = survive <= 0.5 + 1e-9
    known = reached.any(0)
    last = np.maximum(0, (~np.isnan(ordered)).sum(0) - 1)
    at = np.where(known, np.argmax(reached, 0), last)
    return np.take_along_axis(ordered, at[None], 0)[0], np.logical_not(known)


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
