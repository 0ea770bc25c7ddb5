"""What goes along one axis, entry by entry: where the largest is, running sums and products (`ops/reduce`, `running`).

Rows if the axis is the last (or all there is), else columns, a block of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.reductions import larger_loosely, smaller_loosely
from flowrt.kernels.language.table import Attrs, Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.reduce import COLUMNS, SHORT, axes_taken, plus, times
from flowrt.kernels.teams.standing import divided, stand, teams_for
from flowrt.kernels.tiles.squares import LANES, transpose_lines, transpose_rows

SEARCHED = 64
TOGETHER = 256  # short rows that are searched or added up side by side


def _position_sizes(inputs: Sequence[Spec], attrs: Attrs) -> tuple[int, int, int]:
    shape = inputs[0].concrete
    if attrs["axis"] is None:
        return 1, inputs[0].size, 1
    axis = axes_taken(inputs, attrs)[0]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _position_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Rows if the axis is the last (or all there is), else columns. Each result is a unit of work."""
    outer, count, inner = _position_sizes(inputs, attrs)
    sizes, last = ((outer, 1, count), 1) if inner == 1 else ((outer, count, inner), 0)
    local = (View.dense(spec.concrete) for spec in _position_local(inputs, outputs, attrs))
    return Call((View.dense(sizes), View.dense((outer, inner)), *local), (last,), outer * inner)


def _position_local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """The best of each column or short row and where it is: in 32 bits where they suffice, as wide as most entries.

    The third line of the best is for an entry of each short row.
    """
    _, count, inner = _position_sizes(inputs, attrs)
    columns = TOGETHER if inner == 1 else min(inner, COLUMNS)
    return [Spec(inputs[0].dtype, (3, columns)), Spec("int32" if count < 2**31 else "int64", (2, columns))]


@jitable
def exceeds(x: Any, y: Any) -> Any:
    """Whether x is found before y as the largest: NaN is, before all numbers."""
    return (x > y) | ((x != x) & (y == y))


@jitable
def undercuts(x: Any, y: Any) -> Any:
    """Whether x is found before y as the smallest: NaN is, before all numbers."""
    return (x < y) | ((x != x) & (y == y))


@jitable
def first_equal(row: Any, value: Any) -> Any:
    """Where ``value`` (or NaN, if it is) first is in a row that holds it; by blocks, whose search vectorises."""
    start = 0
    for block in range(row.size // SEARCHED):
        there = False
        for t in range(SEARCHED):
            entry = row[np.uint64(block * SEARCHED + t)]
            there |= (entry == value) | (entry != entry)
        if there:
            break
        start += SEARCHED
    while start < row.size - 1 and row[start] != value and row[start] == row[start]:
        start += 1
    return start


def position(beats: Any, in_row: Any) -> Callable[..., Any]:
    """The kernel that finds where the first entry is that no other beats."""

    @jitable
    def beat(entries: Any, start: int, k: int, width: int, best: Any, where: Any) -> None:
        """Have the entries of line ``k`` beat the best before them, taking turns as in `row_reduction`."""
        here = where.dtype.type(k)
        old, new, before, after = best[(k - 1) % 2], best[k % 2], where[(k - 1) % 2], where[k % 2]
        for i in range(width):
            after[i] = here if beats(entries[np.uint64(start + i)], old[i]) else before[i]
        for i in range(width):
            new[i] = entries[np.uint64(start + i)] if beats(entries[np.uint64(start + i)], old[i]) else old[i]

    @jitable
    def find_in_short(rows: Any, out: Any, best: Any, where: Any) -> None:
        """In rows whose loops would take most of their time to begin: an entry of each at a time."""
        width, count = rows.shape[0], rows.shape[1]
        for i in range(width):
            best[0, i], where[0, i] = rows[i, 0], 0
        for k in range(1, count):
            for i in range(width):
                best[2, i] = rows[i, k]
            beat(best[2], 0, k, width, best, where)
        for i in range(width):
            out[i] = where[(count - 1) % 2, i]

    def find(x: Any, y: Any, best: Any, where: Any, last: int, begin: int, end: int) -> None:
        if last != 0:
            if x.shape[2] <= SHORT:
                for o in range(begin, end, best.shape[1]):
                    stop = min(o + best.shape[1], end)
                    find_in_short(x[o:stop, 0], y[o:stop, 0], best, where)
                return
            for o in range(begin, end):
                row = x[o, 0]
                top = row[0]
                for t in range(row.size):
                    top = in_row(top, row[t])
                y[o, 0] = first_equal(row, top)
            return
        at, inner = begin, y.shape[1]
        while at < end:
            o, start = at // inner, at % inner
            width = min(min(inner - start, end - at), best.shape[1])
            row, out = x[o, 0], y[o]
            for i in range(width):
                best[0, i], where[0, i] = row[np.uint64(start + i)], 0
            for k in range(1, x.shape[1]):
                beat(x[o, k], start, k, width, best, where)
            for i in range(width):
                out[np.uint64(start + i)] = where[(x.shape[1] - 1) % 2, i]
            at += width

    return find


argmax = position(exceeds, larger_loosely)
argmin = position(undercuts, smaller_loosely)
kernel("argmax", layout=_position_layout, local=_position_local)(argmax)
kernel("argmin", layout=_position_layout, local=_position_local)(argmin)


def _lines_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """The input as (before, axis, after), the result flat; a team for each line."""
    outer, count, inner = _position_sizes(inputs, attrs)
    teams = teams_for(outer * inner, count, along=inner == 1)
    views = View.dense((outer, count, inner)), View.dense((outputs[0].size,))
    return Call(views, teams.words, blocks=teams.blocks(outer * inner))


def position_on_cuda(beats: Any) -> Callable[..., Any]:
    def find(x: Any, y: Any, width: int, apart: int) -> None:
        """Of equal entries the first: of two, the one behind must beat the other."""
        values, places = cuda.shared.array(THREADS, x.dtype), cuda.shared.array(THREADS, np.int64)
        (team, rank, teams), lines, me = stand(width, apart), x.shape[0] * x.shape[2], cuda.threadIdx.x
        line = cuda.blockIdx.x * teams
        while line < lines:
            o, i = divided(min(line + team, lines - 1), x.shape[2])
            best = min(rank, x.shape[1] - 1)
            k = rank + width
            while k < x.shape[1]:
                if beats(x[o, k, i], x[o, best, i]):
                    best = k
                k += width
            values[me], places[me] = x[o, best, i], best
            cuda.syncthreads()
            half = width >> 1
            while half > 0:
                if rank < half:
                    other = me + half * apart
                    behind = beats(values[other], values[me])
                    before = not beats(values[me], values[other])
                    if behind if places[other] > places[me] else before:
                        values[me], places[me] = values[other], places[other]
                cuda.syncthreads()
                half >>= 1
            if rank == 0 and line + team < lines:
                y[line + team] = places[me]
            line += cuda.gridDim.x * teams

    return find


kernel("argmax", "cuda", layout=_lines_on_cuda)(position_on_cuda(exceeds))
kernel("argmin", "cuda", layout=_lines_on_cuda)(position_on_cuda(undercuts))


def _running_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """The entries as (before, axis, after); a team for each line."""
    outer, count, inner = _position_sizes(inputs, attrs)
    view, teams = View.dense((outer, count, inner)), teams_for(outer * inner, count, along=inner == 1)
    return Call((view, view), (int(attrs["reverse"]), *teams.words), blocks=teams.blocks(outer * inner))


def running_on_cuda(combine: Any, neutral: int) -> Callable[..., Any]:
    def run(x: Any, y: Any, reverse: int, width: int, apart: int) -> None:
        """A team goes along a line in stretches of as many entries as it has threads, each behind all before."""
        held = cuda.shared.array(THREADS, y.dtype)
        (team, rank, teams), count, inner = stand(width, apart), x.shape[1], x.shape[2]
        line, lines, me = cuda.blockIdx.x * teams, x.shape[0] * inner, cuda.threadIdx.x
        while line < lines:
            o, i = divided(min(line + team, lines - 1), inner)
            before, start = y.dtype.type(neutral), 0
            while start < count:
                k = start + rank
                at = count - 1 - k if reverse != 0 else k
                total = y.dtype.type(neutral)
                if k < count:
                    total = y.dtype.type(x[o, at, i])
                held[me] = total
                cuda.syncthreads()
                step = 1
                while step < width:
                    if rank >= step:
                        total = y.dtype.type(combine(total, held[me - step * apart]))
                    cuda.syncthreads()
                    held[me] = total
                    cuda.syncthreads()
                    step <<= 1
                if k < count and line + team < lines:
                    y[o, at, i] = combine(before, total)
                before = y.dtype.type(combine(before, held[me + (width - 1 - rank) * apart]))
                cuda.syncthreads()
                start += width
            line += cuda.gridDim.x * teams

    return run


kernel("cumsum", "cuda", layout=_running_on_cuda)(running_on_cuda(plus, 0))
kernel("cumprod", "cuda", layout=_running_on_cuda)(running_on_cuda(times, 1))


def _running_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Rows or columns as in `_position_layout`; each is a unit of work."""
    outer, count, inner = _position_sizes(inputs, attrs)
    view = View.dense((outer, 1, count) if inner == 1 else (outer, count, inner))
    (lines,) = _running_local(inputs, outputs, attrs)
    return Call((view, view, View.dense(lines.concrete)), (int(inner == 1), int(attrs["reverse"])), outer * inner)


def _running_local(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """For short rows that are turned around; of one entry where there are none."""
    outer, count, inner = _position_sizes(inputs, attrs)
    short = inner == 1 and 1 < count <= SHORT and outer >= LANES
    return [Spec(outputs[0].dtype, (count, TOGETHER) if short else (1, 1))]


def _short_rows(combine: Any) -> Callable[..., Any]:
    @jitable
    def run_short_rows(rows: Any, out: Any, lines: Any, reverse: int) -> None:
        """Of each row, all rows at once: ``lines`` is room for them turned around."""
        transpose_rows(rows, lines)
        last = rows.shape[1] - 1
        for j in range(1, rows.shape[1]):
            before = lines[last + 1 - j if reverse != 0 else j - 1]
            line = lines[last - j if reverse != 0 else j]
            for i in range(rows.shape[0]):
                line[i] = combine(line[i], before[i])
        transpose_lines(lines, out)

    return run_short_rows


def _four_rows(combine: Any, neutral: int) -> Callable[..., Any]:
    @jitable
    def run_four_rows(x: Any, y: Any, row: int, rows: int, reverse: int) -> None:
        """Of four rows side by side: a single one would wait for each result. The last stands in for missing."""
        here, last = x.shape[2] - 1 if reverse != 0 else 0, rows - 1
        step = -1 if reverse != 0 else 1
        p, q, s, u = row, min(row + 1, last), min(row + 2, last), min(row + 3, last)
        a = b = c = d = y.dtype.type(neutral)
        for _ in range(x.shape[2]):
            at = np.uint64(here)
            a, b = y.dtype.type(combine(a, x[p, 0, at])), y.dtype.type(combine(b, x[q, 0, at]))
            c, d = y.dtype.type(combine(c, x[s, 0, at])), y.dtype.type(combine(d, x[u, 0, at]))
            y[p, 0, at], y[q, 0, at], y[s, 0, at], y[u, 0, at] = a, b, c, d
            here += step

    return run_four_rows


def running(combine: Any, neutral: int) -> Callable[..., Any]:
    """The kernel of running results, of which each is combined with the next entry."""
    run_short_rows, run_four_rows = _short_rows(combine), _four_rows(combine, neutral)

    @jitable
    def run_row(row: Any, out: Any, reverse: int) -> None:
        here, step, a = row.size - 1 if reverse != 0 else 0, -1 if reverse != 0 else 1, out.dtype.type(neutral)
        for _ in range(row.size):
            a = out.dtype.type(combine(a, row[np.uint64(here)]))
            out[np.uint64(here)] = a
            here += step

    def run(x: Any, y: Any, lines: Any, last: int, reverse: int, begin: int, end: int) -> None:
        if lines.shape[0] > 1:
            for row in range(begin, end, TOGETHER):
                stop = min(row + TOGETHER, end)
                run_short_rows(x[row:stop, 0], y[row:stop, 0], lines, reverse)
            return
        if last != 0:
            for row in range(begin, end, 4):
                if row == end - 1:
                    run_row(x[row, 0], y[row, 0], reverse)
                else:
                    run_four_rows(x, y, row, end, reverse)
            return
        at, inner, count = begin, x.shape[2], x.shape[1]
        while at < end:
            o, start = at // inner, at % inner
            width = min(inner - start, end - at)
            for k in range(count):
                here = count - 1 - k if reverse != 0 else k
                source, out = x[o, here], y[o, here]
                before = y[o, here + 1 if reverse != 0 else max(here - 1, 0)] if k > 0 else out
                for i in range(width):
                    t = np.uint64(start + i)
                    out[t] = source[t] if k == 0 else combine(before[t], source[t])
            at += width

    return run


kernel("cumsum", layout=_running_layout, local=_running_local)(running(plus, 0))
kernel("cumprod", layout=_running_layout, local=_running_local)(running(times, 1))


def _recurring(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Rows or columns as in `_position_layout`; each is a unit of work."""
    outer, count, inner = _position_sizes(inputs, attrs)
    views = (View.dense((outer, count, inner)),) * 3
    return Call(views, (int(attrs["reverse"]), int(attrs["own"])), outer * inner)


@kernel("linear_recurrence", layout=_recurring)
def linear_recurrence(factors: Any, terms: Any, y: Any, reverse: int, own: int, begin: int, end: int) -> None:
    at, count, inner = begin, y.shape[1], y.shape[2]
    while at < end:
        o, start = at // inner, at % inner
        width = min(inner - start, end - at)
        for k in range(count):
            here = np.uint64(count - 1 - k if reverse != 0 else k)
            before = here if k == 0 else np.uint64(count - k if reverse != 0 else k - 1)
            there = here if own != 0 else before
            for i in range(width):
                t = np.uint64(start + i)
                y[o, here, t] = terms[o, here, t]
                if k > 0:
                    y[o, here, t] += factors[o, there, t] * y[o, before, t]
        at += width


def _recurring_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """The entries as (before, axis, after); a team for each line."""
    outer, count, inner = _position_sizes(inputs, attrs)
    teams = teams_for(outer * inner, count, along=inner == 1)
    words = int(attrs["reverse"]), int(attrs["own"]), *teams.words
    return Call((View.dense((outer, count, inner)),) * 3, words, blocks=teams.blocks(outer * inner))


@kernel("linear_recurrence", "cuda", layout=_recurring_on_cuda)
def linear_recurrence_on_cuda(factors: Any, terms: Any, y: Any, reverse: int, own: int, width: int, apart: int) -> None:
    """As running sums are: what goes on from one entry to the next, factor and term, is put together with what did."""
    factor_of, term_of = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, y.dtype)
    (team, rank, teams), count, inner = stand(width, apart), y.shape[1], y.shape[2]
    line, lines, me = cuda.blockIdx.x * teams, y.shape[0] * inner, cuda.threadIdx.x
    while line < lines:
        o, i = divided(min(line + team, lines - 1), inner)
        before, start = y.dtype.type(0), 0
        while start < count:
            k = start + rank
            at = count - 1 - k if reverse != 0 else k
            factor, term = y.dtype.type(0 if k < count else 1), y.dtype.type(0)
            if k < count:
                term = terms[o, at, i]
                if k > 0:
                    factor = factors[o, at if own != 0 else at + 1 if reverse != 0 else at - 1, i]
            factor_of[me], term_of[me] = factor, term
            cuda.syncthreads()
            step = 1
            while step < width:
                if rank >= step:
                    other = me - step * apart
                    term = y.dtype.type(term + factor * term_of[other])
                    factor = y.dtype.type(factor * factor_of[other])
                cuda.syncthreads()
                factor_of[me], term_of[me] = factor, term
                cuda.syncthreads()
                step <<= 1
            if k < count and line + team < lines:
                y[o, at, i] = term + factor * before
            last = me + (width - 1 - rank) * apart
            before = y.dtype.type(term_of[last] + factor_of[last] * before)
            cuda.syncthreads()
            start += width
        line += cuda.gridDim.x * teams
