"""Where in one block of memory each value of a tape lies.

Law: pure; lifetimes in, offsets out. Two values whose lifetimes share a moment never share a byte. The order is greedy
by size, each into the tightest gap that holds it: Pisarchyk & Lee, "Efficient memory management for deep neural net
inference" (2020), where it came closest to the lower bound, the most bytes alive at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

Lifetime: TypeAlias = tuple[int, int, int]  # bytes, first and last moment alive


def lay_out(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each lifetime, all multiples of `ALIGNMENT`, and the bytes needed altogether."""
    count = len(lifetimes)
    sizes = [aligned(nbytes) for nbytes, _, _ in lifetimes]
    offsets = [0] * count
    firsts, lasts, starts, ends = (np.zeros(count, np.int64) for _ in range(4))  # of those placed so far
    total = 0
    for placed, number in enumerate(sorted(range(count), key=lambda i: -sizes[i])):
        size, (_, first, last) = sizes[number], lifetimes[number]
        if not size:
            break
        beside = np.nonzero((firsts[:placed] <= last) & (lasts[:placed] >= first))[0]
        beside = beside[np.argsort(starts[beside], kind="stable")]
        offset = _tightest_gap(size, starts[beside].tolist(), ends[beside].tolist())
        offsets[number] = offset
        firsts[placed], lasts[placed], starts[placed], ends[placed] = first, last, offset, offset + size
        total = max(total, offset + size)
    return offsets, total


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _tightest_gap(size: int, starts: Sequence[int], ends: Sequence[int]) -> int:
    """The start of the smallest gap that holds ``size`` among blocks sorted by start, else the end of them all."""
    best, room, end = -1, 0, 0
    for start, stop in zip(starts, ends, strict=True):
        gap = start - end
        if gap >= size and (best < 0 or gap < room):
            best, room = end, gap
        end = max(end, stop)
    return end if best < 0 else best


def most_alive(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes alive at one moment, each value rounded up to `ALIGNMENT`: no layout can need less."""
    changes: dict[int, int] = {}
    for nbytes, first, last in lifetimes:
        changes[first] = changes.get(first, 0) + aligned(nbytes)
        changes[last + 1] = changes.get(last + 1, 0) - aligned(nbytes)
    most = alive = 0
    for moment in sorted(changes):
        alive += changes[moment]
        most = max(most, alive)
    return most
