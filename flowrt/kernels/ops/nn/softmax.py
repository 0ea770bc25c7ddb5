"""Softmax and the losses made of it, row by row; along another axis than the last, a block of columns at a time.

Rows are taken as many at a time as stay in a core's nearest cache, and their exponentials in one loop over all of
them: a loop over the ten entries of one row would hardly vectorise. So short rows are turned around first, and a loop
takes an entry of each (`few_classes`). Of float32 the exponential is the one that vectorises, for numbers that are 0 at
most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.elementary.exponential import exp64, fading32
from flowrt.kernels.elementary.logarithm import log32, log64
from flowrt.kernels.language.reductions import add_loosely, larger_loosely
from flowrt.kernels.language.table import Call, View, jitable, single
from flowrt.kernels.launch import in_ways
from flowrt.kernels.ops.index import around, within
from flowrt.kernels.ops.nn.few_classes import (
    KNOWN,
    SHORT,
    short_class_loss_by,
    short_class_slope_by,
    short_log_softmax_by,
    short_loss_by,
    short_slope_by,
    short_softmax_by,
)

NOT_A_CLASS = 3  # of launch.FAILURES
COLUMNS = 1024  # at a time, as in `reduce`
BESIDE = 128  # columns that one thread takes at least: of fewer it would read too little of each line of memory
ENTRIES = 2048  # of rows at a time
STRETCH = 256  # entries whose sum may be held in their own type

Ways: TypeAlias = dict[str, Callable[..., Any]]
"""The kernels of one op: for columns, for short rows, and for long ones."""


def _along(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """Operands as (before, axis, after), or (before, 1, axis) where nothing is after. Units: rows, or some columns."""
    before, count, after = around(inputs[0].concrete, attrs["axis"])
    view = View.dense((before, 1, count) if after == 1 else (before, count, after))
    tops, totals, room = (View.dense(spec.concrete) for spec in _memory(inputs, outputs, attrs))
    return Call((view, view, tops, totals, room), units=before * -(-after // BESIDE))


def _memory(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    """For each column of a block, or row of some, its largest entry, twice to take turns, and the sum of its
    exponentials; and for as many exponentials as are computed at a time, if of rows."""
    _, count, after = around(inputs[0].concrete, attrs["axis"])
    width, dtype = min(after, COLUMNS) if after > 1 else rows_together(count), outputs[0].dtype
    room = (1, *_room(count)) if after == 1 else (1, 1, 1)
    return Spec(dtype, (2, width)), Spec("float64", (width,)), Spec(dtype, room)


def _room(count: int) -> tuple[int, int]:
    """For the rows of ``count`` entries that are taken at a time: turned around where they are short."""
    return (count, rows_together(count)) if count <= SHORT else (1, max(count, ENTRIES))


@jitable
def rows_together(count: int) -> int:
    """How many rows of ``count`` entries are taken at a time."""
    return max(ENTRIES // max(count, 1), 1)


@jitable
def largest_in(row: Any, kind: Any) -> Any:
    """The largest entry (or NaN), as an entry of the array ``kind``."""
    top = kind.dtype.type(row[0])
    for j in range(row.size):
        top = larger_loosely(top, kind.dtype.type(row[j]))
    return top


@jitable
def sum_of(row: Any, start: int, count: int) -> Any:
    """The sum of ``count`` entries from ``start`` on: short stretches in their own type, these in float64."""
    total = 0.0
    for low in range(start, start + count, STRETCH):
        some = row.dtype.type(0)
        for j in range(low, min(low + STRETCH, start + count)):
            some = add_loosely(some, row[np.uint64(j)])
        total += some
    return total


@jitable
def largest_in_columns(x: Any, o: int, start: int, width: int, tops: Any) -> Any:
    """Put each column's largest entry (or NaN) into one of the rows of ``tops``; the answer is which."""
    row = x[o, 0]
    for t in range(width):
        tops[0, t] = row[np.uint64(start + t)]
    for j in range(1, x.shape[1]):
        row, old, new = x[o, j], tops[(j - 1) % 2], tops[j % 2]
        for t in range(width):
            entry = tops.dtype.type(row[np.uint64(start + t)])
            new[t] = entry if (entry > old[t]) | (entry != entry) else old[t]
    return (x.shape[1] - 1) % 2


@jitable
def over_columns(block: Any, x: Any, y: Any, tops: Any, totals: Any, begin: int, end: int) -> None:
    """Compute the units from ``begin`` to ``end``, of `BESIDE` columns, as many of these as ``totals`` has room for."""
    unit, units = begin, -(-x.shape[2] // BESIDE)
    while unit < end:
        o, first = unit // units, unit % units
        some = min(units - first, end - unit)
        stop = min((first + some) * BESIDE, x.shape[2])
        for start in range(first * BESIDE, stop, totals.size):
            block(x, y, o, start, min(totals.size, stop - start), tops, totals)
        unit += some


@jitable
def less_largest(row: Any, out: Any) -> None:
    """Put the entries of a row, less the largest of them, into ``out``: of its type, in which none wraps."""
    top = largest_in(row, out)
    for j in range(row.size):
        out[j] = out.dtype.type(row[j]) - top


def powers_by(exp: Any) -> Callable[..., Any]:
    def powers_of(entries: Any, count: int) -> None:
        """Put their exponentials in the place of ``count`` entries: of rows that lie one after another."""
        for t in range(count):
            entries[np.uint64(t)] = exp(entries[np.uint64(t)])

    return jitable(powers_of)


def columns_by(exp: Any) -> Callable[..., Any]:
    def exponentials(x: Any, y: Any, o: int, start: int, width: int, tops: Any, totals: Any) -> Any:
        """Put the exponentials of some columns, less the largest of each, into ``y``, and their sums into ``totals``.

        The answer is which of the rows of ``tops`` holds the largest.
        """
        turn = largest_in_columns(x, o, start, width, tops)
        top = tops[turn]
        for t in range(width):
            totals[t] = 0.0
        for j in range(x.shape[1]):
            row, out = x[o, j], y[o, j]
            for t in range(width):
                at = np.uint64(start + t)
                out[at] = exp(y.dtype.type(row[at]) - top[t])
            for t in range(width):
                totals[t] += out[np.uint64(start + t)]
        return turn

    return jitable(exponentials)


def _ways_by(block: Any, short_rows: Any, long: Callable[..., None]) -> Ways:
    """The kernels of a block of columns, of some short rows, and of long ones."""

    def columns(x: Any, y: Any, tops: Any, totals: Any, room: Any, begin: int, end: int) -> None:
        if x.size > 0:
            over_columns(block, x, y, tops, totals, begin, end)

    def short(x: Any, y: Any, tops: Any, totals: Any, room: Any, begin: int, end: int) -> None:
        for first in range(begin, end if x.size > 0 else begin, rows_together(x.shape[2])):
            stop = min(first + rows_together(x.shape[2]), end)
            short_rows(x[first:stop, 0], y[first:stop, 0], room, tops)

    return {"columns": columns, "short": short, "long": long}


def softmax_by(exp: Any) -> Ways:
    """The kernel of softmax, given the exponential."""
    exponentials = columns_by(exp)

    @jitable
    def block(x: Any, y: Any, o: int, start: int, width: int, tops: Any, totals: Any) -> None:
        scale = tops[1 - exponentials(x, y, o, start, width, tops, totals)]
        for t in range(width):
            scale[t] = 1.0 / totals[t]
        for j in range(x.shape[1]):
            out = y[o, j]
            for t in range(width):
                out[np.uint64(start + t)] *= scale[t]

    powers_of = powers_by(exp)

    def long(x: Any, y: Any, tops: Any, totals: Any, room: Any, begin: int, end: int) -> None:
        for first in range(begin, end, rows_together(x.shape[2])):
            stop = min(first + rows_together(x.shape[2]), end)
            for i in range(first, stop):
                less_largest(x[i, 0], y[i, 0])
            powers_of(y[first, 0], (stop - first) * x.shape[2])
            for i in range(first, stop):
                out = y[i, 0]
                scale = y.dtype.type(1.0 / sum_of(out, 0, out.size))
                for j in range(out.size):
                    out[j] *= scale

    return _ways_by(block, short_softmax_by(exp), long)


def log_softmax_by(exp: Any, log: Any) -> Ways:
    exponentials, powers_of = columns_by(exp), powers_by(exp)

    @jitable
    def block(x: Any, y: Any, o: int, start: int, width: int, tops: Any, totals: Any) -> None:
        turn = exponentials(x, y, o, start, width, tops, totals)
        top, rest = tops[turn], tops[1 - turn]
        for t in range(width):
            rest[t] = log64(totals[t])
        for j in range(x.shape[1]):
            row, out = x[o, j], y[o, j]
            for t in range(width):
                at = np.uint64(start + t)
                out[at] = (y.dtype.type(row[at]) - top[t]) - rest[t]

    def long(x: Any, y: Any, tops: Any, totals: Any, room: Any, begin: int, end: int) -> None:
        for first in range(begin, end, rows_together(x.shape[2])):
            stop = min(first + rows_together(x.shape[2]), end)
            for i in range(first, stop):
                out, start = y[i, 0], (i - first) * x.shape[2]
                less_largest(x[i, 0], out)
                for j in range(out.size):
                    room[0, 0, np.uint64(start + j)] = out[j]
            powers_of(room[0, 0], (stop - first) * x.shape[2])
            for i in range(first, stop):
                out = y[i, 0]
                rest = y.dtype.type(math.log(sum_of(room[0, 0], (i - first) * out.size, out.size)))
                for j in range(out.size):
                    out[j] -= rest

    return _ways_by(block, short_log_softmax_by(exp, log), long)


def examples(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """Operands as (examples, classes) where they have the classes, else as (examples,). Each example is a unit."""
    shape = inputs[0].concrete
    count, views = math.prod(shape[:-1]), []
    for spec in (*inputs, *outputs):
        has_classes = len(spec.concrete) == len(shape)
        views.append(View.dense((count, shape[-1]) if has_classes else (count,)))
    return Call(tuple(views), units=count)


def _examples_with_room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    call = examples(inputs, outputs, attrs)
    return replace(call, views=(*call.views, *(View.dense(s.concrete) for s in _powers(inputs, outputs, attrs))))


def _powers(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    """For exponentials, for the weights of short rows, and for what is known of rows taken together."""
    dtype, classes = inputs[0].dtype, inputs[0].concrete[-1]
    return Spec(dtype, (2, *_room(classes))), Spec(dtype, (KNOWN, rows_together(classes)))


def class_cross_entropy_by(exp: Any, log: Any) -> Ways:
    powers_of, short_loss = powers_by(exp), short_class_loss_by(exp, log)

    def short(logits: Any, labels: Any, y: Any, room: Any, found: Any, begin: int, end: int, run: Any) -> None:
        if not within(labels, logits.shape[1], begin, end):
            run[0] = NOT_A_CLASS
            return
        for first in range(begin, end, rows_together(logits.shape[1])):
            stop = min(first + rows_together(logits.shape[1]), end)
            short_loss(logits[first:stop], labels[first:stop], y[first:stop], room, found)

    def long(logits: Any, labels: Any, y: Any, room: Any, found: Any, begin: int, end: int, run: Any) -> None:
        classes = logits.shape[1]
        if not within(labels, classes, begin, end):
            run[0] = NOT_A_CLASS
            return
        for first in range(begin, end, rows_together(classes)):
            stop = min(first + rows_together(classes), end)
            for i in range(first, stop):
                row, start, top = logits[i], (i - first) * classes, largest_in(logits[i], y)
                y[i] = top - row[int(labels[i])]
                for j in range(classes):
                    room[0, 0, np.uint64(start + j)] = row[j] - top
            powers_of(room[0, 0], (stop - first) * classes)
            for i in range(first, stop):
                y[i] += math.log(sum_of(room[0, 0], (i - first) * classes, classes))

    return {"short": short, "long": long}


@jitable
def scale_powers(row: Any, by: Any) -> Any:
    """Divide a row of exponentials by their sum, and multiply it."""
    scale = row.dtype.type(by / sum_of(row, 0, row.size))
    for j in range(row.size):
        row[j] *= scale


def class_cross_entropy_slope_by(exp: Any) -> Ways:
    powers_of, short_slope = powers_by(exp), short_class_slope_by(exp)

    def short(logits: Any, labels: Any, dy: Any, y: Any, room: Any, found: Any, begin: int, end: int, run: Any) -> None:
        if not within(labels, logits.shape[1], begin, end):
            run[0] = NOT_A_CLASS
            return
        for first in range(begin, end, rows_together(logits.shape[1])):
            stop = min(first + rows_together(logits.shape[1]), end)
            short_slope(logits[first:stop], labels[first:stop], dy[first:stop], y[first:stop], room, found)

    def long(logits: Any, labels: Any, dy: Any, y: Any, room: Any, found: Any, begin: int, end: int, run: Any) -> None:
        classes = logits.shape[1]
        if not within(labels, classes, begin, end):
            run[0] = NOT_A_CLASS
            return
        for first in range(begin, end, rows_together(classes)):
            stop = min(first + rows_together(classes), end)
            for i in range(first, stop):
                less_largest(logits[i], y[i])
            powers_of(y[first], (stop - first) * classes)
            for i in range(first, stop):
                scale_powers(y[i], dy[i])
                y[i, int(labels[i])] -= dy[i]

    return {"short": short, "long": long}


def cross_entropy_slope_by(exp: Any) -> Ways:
    powers_of, short_slope = powers_by(exp), short_slope_by(exp)

    def short(logits: Any, labels: Any, dy: Any, y: Any, room: Any, found: Any, begin: int, end: int) -> None:
        for first in range(begin, end, rows_together(logits.shape[1])):
            stop = min(first + rows_together(logits.shape[1]), end)
            short_slope(logits[first:stop], labels[first:stop], dy[first:stop], y[first:stop], room, found)

    def long(logits: Any, labels: Any, dy: Any, y: Any, room: Any, found: Any, begin: int, end: int) -> None:
        classes = logits.shape[1]
        for first in range(begin, end if classes > 0 else begin, rows_together(classes)):
            stop = min(first + rows_together(classes), end)
            for i in range(first, stop):
                less_largest(logits[i], y[i])
            powers_of(y[first], (stop - first) * classes)
            for i in range(first, stop):
                out, weights, each = y[i], labels[i], dy[i]
                scale_powers(out, each * sum_of(weights, 0, classes))
                for j in range(classes):
                    out[j] -= each * weights[j]

    return {"short": short, "long": long}


@jitable
def cost_of(row: Any, weights: Any, top: Any, rest: Any) -> Any:
    """The sum of each weight times what lies between its entry and ``rest`` above ``top``, added up as in `sum_of`."""
    total, zero = 0.0, row.dtype.type(0)
    for low in range(0, row.size, STRETCH):
        some = zero
        for j in range(low, min(low + STRETCH, row.size)):
            at = np.uint64(j)
            cost = weights[at] * (rest - (row[at] - top))
            some = add_loosely(some, cost if weights[at] != 0 else zero)  # of the impossible ask nothing
        total += some
    return total


def cross_entropy_by(exp: Any, log: Any) -> Ways:
    powers_of, short_loss = powers_by(exp), short_loss_by(exp, log)

    def short(logits: Any, labels: Any, y: Any, room: Any, found: Any, begin: int, end: int) -> None:
        for first in range(begin, end, rows_together(logits.shape[1])):
            stop = min(first + rows_together(logits.shape[1]), end)
            short_loss(logits[first:stop], labels[first:stop], y[first:stop], room, found)

    def long(logits: Any, labels: Any, y: Any, room: Any, found: Any, begin: int, end: int) -> None:
        classes = logits.shape[1]
        for first in range(begin, end, rows_together(classes)):
            stop = min(first + rows_together(classes), end)
            for i in range(first, stop if classes > 0 else first):
                row, start, top = logits[i], (i - first) * classes, largest_in(logits[i], y)
                y[i] = top
                for j in range(classes):
                    room[0, 0, np.uint64(start + j)] = row[j] - top
            powers_of(room[0, 0], (stop - first) * classes)
            for i in range(first, stop):
                rest = y.dtype.type(math.log(sum_of(room[0, 0], (i - first) * classes, classes)))
                y[i] = cost_of(logits[i], labels[i], y[i], rest)

    return {"short": short, "long": long}


def _way_of_rows(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> str:
    return "short" if 0 < inputs[0].concrete[-1] <= SHORT else "long"


def _way_along(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> str:
    _, count, after = around(inputs[0].concrete, attrs["axis"])
    return "columns" if after != 1 else "short" if count <= SHORT else "long"


for _dtypes, _exp, _log in ((None, exp64, log64), (single, fading32, log32)):
    for _op, _ways in (("softmax", softmax_by(_exp)), ("log_softmax", log_softmax_by(_exp, _log))):
        in_ways(_op, _way_along, _ways, layout=_along, local=_memory, dtypes=_dtypes)
    for _op, _ways in (
        ("class_cross_entropy", class_cross_entropy_by(_exp, _log)),
        ("class_cross_entropy_slope", class_cross_entropy_slope_by(_exp)),
        ("cross_entropy", cross_entropy_by(_exp, _log)),
        ("cross_entropy_slope", cross_entropy_slope_by(_exp)),
    ):
        in_ways(_op, _way_of_rows, _ways, layout=_examples_with_room, local=_powers, dtypes=_dtypes)
