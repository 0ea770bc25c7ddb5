"""Equal rows among many, found on CUDA by comparing each with all: no thread waits for another, no order is chance's.

What is found of n rows lies in five lines of a table: the rows themselves (-1: none), the first of the equal ones, how
many equal ones are before, how many there are, and the place of their first occurrence where equal ones lie side by
side. Each launch fills some of it for those that follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import jitable
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.teams.standing import Teams, add_team, divided, reduce_team, stand, teams_for

ROW, FIRST, BEFORE, MANY, PLACE = range(5)


def found_of(count: int) -> Spec:
    """The table for so many rows."""
    return Spec("int64", (5, max(count, 1)))


def teams_comparing(count: int) -> Teams:
    """The teams that compare each of so many rows, and the end, with those before it."""
    return teams_for(count + 1, count, along=True)


@jitable
def smaller_one(x: Any, y: Any) -> Any:
    return x if x < y else y


first_of_team = reduce_team(smaller_one)


@jitable
def compare_rows(found: Any, count: int, width: int, apart: int) -> None:
    """Find the first of the equal ones, how many are before, and how many there are."""
    held = cuda.shared.array(THREADS, np.int64)
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < count:
        own = min(line + team, count - 1)
        row, first, before, many, at = found[ROW, own], count, 0, 0, rank
        while at < count:
            if found[ROW, at] == row:
                first, many = min(first, at), many + 1
                before += 1 if at < own else 0
            at += width
        first = first_of_team(held, first, rank, width, apart)
        before, many = add_team(held, before, rank, width, apart), add_team(held, many, rank, width, apart)
        if rank == 0 and line + team < count:
            found[FIRST, own], found[BEFORE, own], found[MANY, own] = first, before, many
        line += cuda.gridDim.x * teams


@jitable
def number_rows(groups: Any, found: Any, count: int, width: int, apart: int) -> None:
    """Find the place of the first of equal ones; tell ``groups``, if they have room, of those that are the first."""
    held, room = cuda.shared.array(THREADS, np.int64), (groups.size - 2) // 3
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < count + 1:
        own = min(line + team, count)
        number, place, at = 0, 0, rank
        while at < own:
            if found[ROW, at] >= 0 and found[FIRST, at] == at:
                number, place = number + 1, place + found[MANY, at]
            at += width
        number, place = add_team(held, number, rank, width, apart), add_team(held, place, rank, width, apart)
        if rank == 0 and line + team < count + 1:
            if own == count:
                groups[0], groups[1 + number] = number, place
            elif found[ROW, own] >= 0 and found[FIRST, own] == own:
                found[PLACE, own] = place
                groups[1 + number], groups[room + 2 + number] = place, found[ROW, own]
        line += cuda.gridDim.x * teams


@jitable
def place_rows(groups: Any, found: Any, count: int, repeat: int) -> None:
    """Tell ``groups`` where equal rows occur, side by side: every so many rows have one number."""
    i = cuda.grid(1)
    while i < count:
        if found[ROW, i] >= 0:
            at = 2 * count + 2 + found[PLACE, found[FIRST, i]] + found[BEFORE, i]
            groups[at] = divided(i, repeat)[0]
        i += cuda.gridsize(1)
