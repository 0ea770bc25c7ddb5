"""Softmax and the losses made of it for rows of few classes, as many at a time as stay in a core's nearest cache.

A loop over the ten entries of one row would take most of its time to begin and to end. So rows are turned around first:
a *line* holds one class's entry of every row, and loops go along lines. ``room`` holds lines of entries, and a second
time of weights; ``found`` four lines of what is known of each row: the largest entry, in one of the first two, which
take turns; the sum of the exponentials in the other; and what a loss needs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrt.kernels import squares
from flowrt.kernels.table import jitable

SHORT = 32  # entries of rows that are turned around
KNOWN = 4  # lines of what is known of rows


@jitable
def largest_of_lines(lines: Any, classes: int, count: int, found: Any) -> Any:
    """Put each row's largest entry (or NaN) into one of the first two lines of ``found``; the answer is which."""
    for i in range(count):
        found[0, i] = lines[i]
    for j in range(1, classes):
        old, new = found[(j - 1) % 2], found[j % 2]
        for i in range(count):
            entry = lines[np.uint64(j * count + i)]
            new[i] = entry if (entry > old[i]) | (entry != entry) else old[i]
    return (classes - 1) % 2


@jitable
def scale_lines(lines: Any, classes: int, count: int, scale: Any) -> None:
    for j in range(classes):
        for i in range(count):
            lines[np.uint64(j * count + i)] *= scale[i]


class _Turning:
    """Helpers that turn rows of entries of ``itemsize`` bytes around, and back."""

    def __init__(self, itemsize: int) -> None:
        turn = squares.turning(itemsize)

        @jitable
        def to_lines(rows: Any, lines: Any) -> None:
            count, classes, kind = rows.shape[0], rows.shape[1], lines.dtype.type
            if rows.itemsize == lines.itemsize and rows.dtype.type(0.5) != 0:  # of the lines' type, which are of floats
                turn(lines, rows.ctypes.data, classes, lines.ctypes.data, count, classes, count)
                return
            for j in range(classes):
                for i in range(count):
                    lines[np.uint64(j * count + i)] = kind(rows[np.uint64(i), np.uint64(j)])

        @jitable
        def to_rows(lines: Any, rows: Any) -> None:
            count, classes = rows.shape[0], rows.shape[1]
            turn(lines, lines.ctypes.data, count, rows.ctypes.data, classes, count, classes)

        self.to_lines, self.to_rows = to_lines, to_rows


def powers_in_lines(exp: Any, itemsize: int) -> Callable[..., Any]:
    to_lines = _Turning(itemsize).to_lines

    def powers(rows: Any, lines: Any, found: Any) -> Any:
        """Put the exponentials of rows, less the largest of each, into ``lines``, and their sums into ``found``.

        The answer is which of the lines of ``found`` holds the largest; the sums are in the other of the first two.
        """
        count, classes = rows.shape[0], rows.shape[1]
        to_lines(rows, lines)
        turn = largest_of_lines(lines, classes, count, found)
        top, total = found[turn], found[1 - turn]
        for i in range(count):
            total[i] = 0
        for j in range(classes):
            for i in range(count):
                lines[np.uint64(j * count + i)] -= top[i]
        for t in range(classes * count):
            lines[np.uint64(t)] = exp(lines[np.uint64(t)])
        for j in range(classes):
            for i in range(count):
                total[i] += lines[np.uint64(j * count + i)]
        return turn

    return jitable(powers)


def short_softmax_by(exp: Any, itemsize: int) -> Callable[..., Any]:
    powers, to_rows = powers_in_lines(exp, itemsize), _Turning(itemsize).to_rows

    def softmax(rows: Any, out: Any, room: Any, found: Any) -> None:
        scale = found[1 - powers(rows, room[0], found)]
        for i in range(rows.shape[0]):
            scale[i] = 1 / scale[i]
        scale_lines(room[0], rows.shape[1], rows.shape[0], scale)
        to_rows(room[0], out)

    return jitable(softmax)


def short_log_softmax_by(exp: Any, log: Any, itemsize: int) -> Callable[..., Any]:
    powers, turning = powers_in_lines(exp, itemsize), _Turning(itemsize)
    to_lines, to_rows = turning.to_lines, turning.to_rows

    def log_softmax(rows: Any, out: Any, room: Any, found: Any) -> None:
        count, classes, lines = rows.shape[0], rows.shape[1], room[0]
        turn = powers(rows, lines, found)
        top, rest = found[turn], found[1 - turn]
        for i in range(count):
            rest[i] = log(rest[i])
        to_lines(rows, lines)
        for j in range(classes):
            for i in range(count):
                lines[np.uint64(j * count + i)] = (lines[np.uint64(j * count + i)] - top[i]) - rest[i]
        to_rows(lines, out)

    return jitable(log_softmax)


def short_class_loss_by(exp: Any, log: Any, itemsize: int) -> Callable[..., Any]:
    powers = powers_in_lines(exp, itemsize)

    def loss(rows: Any, labels: Any, out: Any, room: Any, found: Any) -> None:
        """The loss of each row, whose label is one of its classes."""
        turn = powers(rows, room[0], found)
        top, rest, told = found[turn], found[1 - turn], found[2]
        for i in range(rows.shape[0]):
            told[i] = rows[np.uint64(i), np.uint64(labels[np.uint64(i)])]
        for i in range(rows.shape[0]):
            out[i] = (top[i] - told[i]) + log(rest[i])

    return jitable(loss)


def short_class_slope_by(exp: Any, itemsize: int) -> Callable[..., Any]:
    powers, to_rows = powers_in_lines(exp, itemsize), _Turning(itemsize).to_rows

    def slope(rows: Any, labels: Any, dy: Any, out: Any, room: Any, found: Any) -> None:
        scale = found[1 - powers(rows, room[0], found)]
        for i in range(rows.shape[0]):
            scale[i] = dy[i] / scale[i]
        scale_lines(room[0], rows.shape[1], rows.shape[0], scale)
        to_rows(room[0], out)
        for i in range(rows.shape[0]):
            out[np.uint64(i), np.uint64(labels[np.uint64(i)])] -= dy[i]

    return jitable(slope)


def short_loss_by(exp: Any, log: Any, itemsize: int) -> Callable[..., Any]:
    powers, to_lines = powers_in_lines(exp, itemsize), _Turning(itemsize).to_lines

    def loss(rows: Any, weights: Any, out: Any, room: Any, found: Any) -> None:
        count, classes, entries, asked = rows.shape[0], rows.shape[1], room[0], room[1]
        turn = powers(rows, entries, found)
        top, rest, cost = found[turn], found[1 - turn], found[2]
        for i in range(count):
            rest[i] = log(rest[i])
            cost[i] = 0
        to_lines(rows, entries)
        to_lines(weights, asked)
        for j in range(classes):
            for i in range(count):
                weight = asked[np.uint64(j * count + i)]
                more = weight * (rest[i] - (entries[np.uint64(j * count + i)] - top[i]))
                cost[i] += more if weight != 0 else found.dtype.type(0)  # of the impossible ask nothing
        for i in range(count):
            out[i] = cost[i]

    return jitable(loss)


def short_slope_by(exp: Any, itemsize: int) -> Callable[..., Any]:
    powers, turning = powers_in_lines(exp, itemsize), _Turning(itemsize)
    to_lines, to_rows = turning.to_lines, turning.to_rows

    def slope(rows: Any, weights: Any, dy: Any, out: Any, room: Any, found: Any) -> None:
        count, classes, entries, asked = rows.shape[0], rows.shape[1], room[0], room[1]
        scale, weight = found[1 - powers(rows, entries, found)], found[2]
        to_lines(weights, asked)
        for i in range(count):
            weight[i] = 0
        for j in range(classes):
            for i in range(count):
                weight[i] += asked[np.uint64(j * count + i)]
        for i in range(count):
            scale[i] = dy[i] * weight[i] / scale[i]
        for j in range(classes):
            for i in range(count):
                at = np.uint64(j * count + i)
                entries[at] = entries[at] * scale[i] - dy[i] * asked[at]
        to_rows(entries, out)

    return jitable(slope)
