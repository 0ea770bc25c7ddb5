"""Where in one block of memory each value of a tape lies.

Law: pure; lifetimes in, offsets out. Two values whose lifetimes share a moment never share a byte. The order is greedy
by size, each into the tightest gap that holds it: Pisarchyk & Lee, "Efficient memory management for deep neural net
inference" (2020), where it came closest to the lower bound, the most bytes alive at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np

from flowrt.kernels.run.board import BOARD_ALIGNMENT

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
MANY_LINES = 512  # values of a line each, from which looking for gaps between others takes longer than they are worth
MANY = 8192  # values of any size, from which that is so of each size of which there are as many: it would take minutes

Lifetime: TypeAlias = tuple[int, int, int]  # bytes, first and last moment alive


def lay_out(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each lifetime, all multiples of `ALIGNMENT`, and the bytes needed altogether."""
    count = len(lifetimes)
    sizes = [aligned(nbytes) for nbytes, _, _ in lifetimes]
    offsets = [0] * count
    firsts, lasts, starts, ends = (np.zeros(count, np.int64) for _ in range(4))  # of those placed so far
    total = 0
    order = sorted(range(count), key=lambda i: -sizes[i])
    alike = _many_alike(sizes)
    order = [number for number in order if sizes[number] not in alike]
    for placed, number in enumerate(order):
        size, (_, first, last) = sizes[number], lifetimes[number]
        if not size:
            break
        beside = ((firsts[:placed] <= last) & (lasts[:placed] >= first)).nonzero()[0]
        beside = beside[starts[beside].argsort(kind="stable")]
        offset = _tightest_gap(size, starts[beside], ends[beside])
        offsets[number] = offset
        firsts[placed], lasts[placed], starts[placed], ends[placed] = first, last, offset, offset + size
        total = max(total, offset + size)
    for size, values in alike.items():
        total = _lay_alike(values, size, lifetimes, offsets, total)
    return offsets, total


def _many_alike(sizes: Sequence[int]) -> dict[int, list[int]]:
    """The values of each size of which there are so many that they lie by themselves."""
    by_size: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        by_size.setdefault(size, []).append(number)
    others = sum(size > ALIGNMENT for size in sizes)
    apart = {size for size in by_size if size == ALIGNMENT or (size and others > MANY)}
    return {size: by_size[size] for size in sorted(apart, reverse=True) if len(by_size[size]) > MANY_LINES}


def _lay_alike(values: Sequence[int], size: int, lifetimes: Sequence[Lifetime], offsets: list[int], total: int) -> int:
    """Place values of one size behind all others, in as little memory as can be; answers where they end."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # last moment alive, offset
    for number in sorted(values, key=lambda number: lifetimes[number][1]):
        _, first, last = lifetimes[number]
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        if not free:
            free.append(total)
            total += size
        offsets[number] = heappop(free)
        heappush(busy, (last, offsets[number]))
    return total


def local_room(nbytes: int, threads: int) -> int:
    """Bytes in which each of so many threads finds ``nbytes`` of its own, in cache lines that nobody else uses."""
    return (-(-nbytes // BOARD_ALIGNMENT) * threads + 1) * BOARD_ALIGNMENT if nbytes and threads else 0


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _tightest_gap(size: int, starts: Any, ends: Any) -> int:
    """The start of the smallest gap that holds ``size`` among blocks sorted by start, else the end of them all."""
    if not starts.size:
        return 0
    reach = np.maximum.accumulate(ends)
    before = np.concatenate([[0], reach[:-1]])
    gaps = starts - before
    fitting = np.nonzero(gaps >= size)[0]
    return int(before[fitting[np.argmin(gaps[fitting])]] if fitting.size else reach[-1])
