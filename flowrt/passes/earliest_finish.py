"""Which device each part of a computation is best done by: predicted by simulation, chosen greedily, then improved.

Law: pure, and about numbers alone. Work is *items* with a duration on each device, joined by edges that carry bytes.
Items of one *unit* share a device. The greedy choice gives each item, the most urgent first, to the device where it
is finished earliest (Topcuoglu, Hariri and Wu, "Performance-Effective and Low-Complexity Task Scheduling for
Heterogeneous Computing", IEEE TPDS 13(3), 2002, section 4; so does the TensorFlow white paper, 2015, section 3.2.1).
What takes no time and waits for nothing, as the reading of a variable, goes where it is first used. Then units, and
groups of them, are moved as long as the simulated time falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flowrt.base.valueclass import valueclass

MOST_VISITS = 500_000  # items, and inputs of items, that are simulated while a choice is improved: half a second
LEAST_GAIN = 0.05  # of the time on one device, for which it is worth using others


@valueclass
class WorkItem:
    """A bit of work of a ``unit``: ``seconds`` by device, infinite where it cannot be; what it takes ``inputs`` of,
    (item, bytes), which come before it."""

    unit: int
    seconds: tuple[float, ...]
    inputs: tuple[tuple[int, float], ...] = ()


@valueclass
class Work:
    """Pieces, each after what it takes inputs of, and how long so many bytes take from one device to another."""

    items: tuple[WorkItem, ...]
    devices: int
    crossing: Callable[[int, int, float], float]

    @property
    def able(self) -> list[list[int]]:
        """By unit, the devices that all of its items can be on."""
        units = 1 + max((item.unit for item in self.items), default=-1)
        found = [[True] * self.devices for _ in range(units)]
        for item in self.items:
            for device, seconds in enumerate(item.seconds):
                found[item.unit][device] &= math.isfinite(seconds)
        return [[device for device, fits in enumerate(row) if fits] for row in found]


@valueclass
class Choice:
    """The device of each unit, the simulated seconds, and those on one device ``alone``."""

    devices: tuple[int, ...]
    seconds: float
    alone: float = math.inf


def choose(work: Work) -> Choice:
    """The best choice that is found; one device alone where others would hardly gain anything.

    Deterministic: the same work has the same answer. Units that fit no device get the first.
    """
    order = _by_urgency(work)
    able = [fits or [0] for fits in work.able]
    alone = min((_alone(work, able, order, device) for device in range(work.devices)), key=lambda made: made.seconds)
    greedy = _greedy(work, able, order)
    best = min((_improved(work, able, order, made) for made in (alone, greedy)), key=lambda made: made.seconds)
    chosen = best if best.seconds < (1 - LEAST_GAIN) * alone.seconds else alone
    return Choice(chosen.devices, chosen.seconds, alone.seconds)


def simulate(work: Work, devices: Sequence[int], order: Sequence[int] | None = None) -> float:
    """The seconds until all is done: each device does one item after the other, in the ``order`` of urgency.

    What a item makes crosses once to each device that uses it; a device sends one thing after the other.
    """
    return max(_finishes(work, devices, order or _by_urgency(work)), default=0.0)


def _finishes(work: Work, devices: Sequence[int], order: Sequence[int]) -> list[float]:
    free, sending = [0.0] * work.devices, [0.0] * work.devices
    arrived: dict[tuple[int, int], float] = {}
    ends = [0.0] * len(work.items)
    for number in order:
        item = work.items[number]
        here = devices[item.unit]
        begins = free[here]
        for source, nbytes in item.inputs:
            there = devices[work.items[source].unit]
            came = ends[source]
            if there != here:
                key = source, here
                if key not in arrived:
                    sending[there] = max(sending[there], came) + work.crossing(there, here, nbytes)
                    arrived[key] = sending[there]
                came = arrived[key]
            begins = max(begins, came)
        ends[number] = free[here] = begins + item.seconds[here]
    return ends


def _by_urgency(work: Work) -> list[int]:
    """The items by what is left from each to the end, on average over devices: an order in which all inputs come
    before."""
    left = [0.0] * len(work.items)
    after = [0.0] * len(work.items)
    some = work.devices > 1
    for number in reversed(range(len(work.items))):
        item = work.items[number]
        known = [seconds for seconds in item.seconds if math.isfinite(seconds)]
        left[number] = after[number] + (sum(known) / len(known) if known else 0.0)
        for source, nbytes in item.inputs:
            across = work.crossing(0, 1, nbytes) if some else 0.0
            after[source] = max(after[source], left[number] + across)
    return sorted(range(len(work.items)), key=lambda number: (-left[number], number))


def _alone(work: Work, able: Sequence[Sequence[int]], order: Sequence[int], device: int) -> Choice:
    """All on one device, but for what cannot be there."""
    devices = [device if device in fits else fits[0] for fits in able]
    return Choice(tuple(devices), simulate(work, devices, order))


def _greedy(work: Work, able: Sequence[Sequence[int]], order: Sequence[int]) -> Choice:
    devices: list[int | None] = [None if len(fits) > 1 else fits[0] for fits in able]
    free, ends = [0.0] * work.devices, [0.0] * len(work.items)
    for number in order:
        item = work.items[number]
        chosen = devices[item.unit]
        if chosen is None and not item.inputs and not any(item.seconds):
            continue  # goes where it is first used

        def ending(device: int, item: WorkItem = item) -> float:
            begins = free[device]
            for source, nbytes in item.inputs:
                there = devices[work.items[source].unit]
                across = 0.0 if there in (None, device) else work.crossing(there or 0, device, nbytes)
                begins = max(begins, ends[source] + across)
            return begins + item.seconds[device]

        if chosen is None:
            chosen = min(able[item.unit], key=lambda device: (ending(device), device))
            devices[item.unit] = chosen
        for source, _ in item.inputs:
            unit = work.items[source].unit
            if devices[unit] is None:
                devices[unit] = chosen if chosen in able[unit] else able[unit][0]
        ends[number] = free[chosen] = ending(chosen)
    made = [fits[0] if device is None else device for device, fits in zip(devices, able, strict=True)]
    return Choice(tuple(made), simulate(work, made, order))


def _improved(work: Work, able: Sequence[Sequence[int]], order: Sequence[int], begun: Choice) -> Choice:
    """``begun`` after moves of units, and of groups that only feed one another, each of which saved time."""
    devices, seconds = list(begun.devices), begun.seconds
    groups = [*_branches(work), *_pairs(work), *([unit] for unit in range(len(able)))]
    left = MOST_VISITS // (1 + sum(1 + len(item.inputs) for item in work.items))
    moved = True
    while moved:
        moved = False
        for group in groups:
            before = [devices[unit] for unit in group]
            for device in sorted({device for unit in group for device in able[unit]}):
                if all(devices[unit] == device for unit in group):
                    continue
                if left <= 0:
                    return Choice(tuple(devices), seconds)
                left -= 1
                kept = [devices[unit] for unit in group]
                for unit in group:
                    devices[unit] = device if device in able[unit] else devices[unit]
                found = simulate(work, devices, order)
                if found < seconds * (1 - 1e-9):
                    seconds, moved = found, True
                else:
                    for unit, old in zip(group, kept, strict=True):
                        devices[unit] = old
            moved |= before != [devices[unit] for unit in group]
    return Choice(tuple(devices), seconds)


def _pairs(work: Work) -> list[list[int]]:
    """The units of which one uses what the other makes."""
    found = {(work.items[source].unit, item.unit) for item in work.items for source, _ in item.inputs}
    return [[maker, user] for maker, user in sorted(found) if maker != user]


def _branches(work: Work) -> list[list[int]]:
    """Units that are used by one alone, each with all that lead to it, the most first: a branch moves as a whole."""
    users: dict[int, set[int]] = {}
    for item in work.items:
        for source, _ in item.inputs:
            users.setdefault(work.items[source].unit, set()).add(item.unit)
    only = {unit: next(iter(used)) for unit, used in users.items() if len(used - {unit}) == 1 and unit not in used}
    branches: dict[int, set[int]] = {}
    for unit in only:
        top, seen = unit, {unit}
        while only.get(top, top) not in seen:
            top = only[top]
            seen.add(top)
            branches.setdefault(top, {top}).add(unit)
    return sorted([sorted(branch) for branch in branches.values()], key=lambda branch: (-len(branch), branch))
