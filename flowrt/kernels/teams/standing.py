"""Teams: threads of a CUDA block that reduce the entries of one result together, and where each of them stands.

Where entries of a result lie side by side its team does, too; where neighbours in memory come to results side by side,
teams' first threads do, then their second ones: neighbours read neighbours. A team puts together what its threads found
in the same order every time. What few teams would take long for is cut into parts, which another launch joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.table import jitable
from flowrt.kernels.language.twin import THREADS, cuda

AT_ONCE = 4  # entries that a thread asks for before it waits for the first
FEWEST, MOST = 4 * AT_ONCE, 8 * AT_ONCE  # entries of a thread's: where there would be more than most, there are parts
NEIGHBOURS = 8  # that memory is read by: 32 bytes of float32
ENOUGH, BUSY = 264, 1056  # blocks from which a large GPU has work for all its processors, and for all their threads


@valueclass
class Teams:
    """``width`` threads a team, a power of 2, neighbours in it ``apart``: side by side, or all of the block's teams
    between them; so many ``parts`` of each result, each a team's."""

    width: int
    apart: int
    parts: int

    @property
    def words(self) -> tuple[int, int]:
        """What `stand` is told."""
        return self.width, self.apart

    def blocks(self, lines: int) -> int:
        """How many blocks have a team for each of so many lines."""
        return -(-lines // (THREADS // self.width))


def teams_for(results: int, count: int, *, along: bool) -> Teams:
    """Teams for so many results of ``count`` entries each, which lie ``along`` a row or a row apart."""
    most = THREADS if along else max(THREADS // NEIGHBOURS, 1)
    width = min(max(1 << (count // AT_ONCE).bit_length() >> 1, 1), most)
    while width > 1 and count < FEWEST * width and results * width > ENOUGH * THREADS:
        width //= 2
    blocks = max(-(-results * width // THREADS), 1)
    parts = min(-(-BUSY // blocks), count // (FEWEST * width)) if count > MOST * width else 1
    return Teams(width, 1 if along else THREADS // width, parts)


@jitable
def divided(number: int, by: int) -> tuple[Any, Any]:
    """The quotient and the remainder of what is not negative, which a device finds much sooner than of any integers."""
    if by == 1:  # as sizes often are that other shapes have
        return np.int64(number), np.int64(0)
    quotient = np.int64(np.uint64(number) // np.uint64(by))
    return quotient, number - quotient * by


@jitable
def stand(width: int, apart: int) -> tuple[Any, Any, Any]:
    """The thread's team, by number in its block, its rank there, and how many teams a block has."""
    place, teams = cuda.threadIdx.x, divided(THREADS, width)[0]
    if apart == 1:
        return place * teams // THREADS, place & (width - 1), teams
    return place & (apart - 1), place * width // THREADS, teams


def reduce_team(combine: Callable[..., Any]) -> Callable[..., Any]:
    """What makes one of all that a team's threads found, for each of them; all threads of the block call it."""

    def reduce(held: Any, found: Any, rank: int, width: int, apart: int) -> Any:
        place, half = cuda.threadIdx.x, width >> 1
        held[place] = found
        cuda.syncthreads()
        while half > 0:
            if rank < half:
                held[place] = combine(held[place], held[place + half * apart])
            cuda.syncthreads()
            half >>= 1
        whole = held[place - rank * apart]
        cuda.syncthreads()
        return whole

    return jitable(reduce)


@jitable
def added(x: Any, y: Any) -> Any:
    return x + y


add_team = reduce_team(added)
