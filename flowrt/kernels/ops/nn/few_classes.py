"""Softmax and the losses made of it for rows of few classes, as many at a time as stay in a core's nearest cache.

A loop over the ten entries of one row would take most of its time to begin and to end. So rows are transposed first:
a *line* holds one class's entry of every row, and loops go along lines. ``room`` holds lines of entries, and a second
time of weights; ``found`` four lines of what is known of each row: the largest entry, in one of the first two, which
take turns; the sum of the exponentials in the other; and what a loss needs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flowrt.kernels.language.table import jitable
from flowrt.kernels.tiles.squares import transpose_lines, transpose_rows

SHORT = 32  # entries of rows that are transposed
KNOWN = 4  # lines of what is known of rows


@jitable
def largest_of_lines(lines: Any, count: int, found: Any) -> Any:
    """Put each row's largest entry (or NaN) into one of the first two lines of ``found``; the answer is which."""
    for i in range(count):
        found[0, i] = lines[0, i]
    for j in range(1, lines.shape[0]):
        old, new = found[(j - 1) % 2], found[j % 2]
        for i in range(count):
            entry = lines[j, i]
            new[i] = entry if (entry > old[i]) | (entry != entry) else old[i]
    return (lines.shape[0] - 1) % 2


@jitable
def scale_lines(lines: Any, count: int, scale: Any) -> None:
    """Multiply entry i of every line by ``scale[i]``."""
    for j in range(lines.shape[0]):
        line = lines[j]
        for i in range(count):
            line[i] *= scale[i]


def powers_in_lines(exp: Any) -> Callable[..., Any]:
    """What all of these begin with, by way of this exponential."""

    def powers(rows: Any, lines: Any, found: Any) -> Any:
        """Put the exponentials of rows, less the largest of each, into ``lines``, and their sums into ``found``.

        The answer is which of the lines of ``found`` holds the largest; the sums are in the other of the first two.
        """
        count = rows.shape[0]
        transpose_rows(rows, lines)
        turn = largest_of_lines(lines, count, found)
        top, total = found[turn], found[1 - turn]
        for i in range(count):
            total[i] = 0
        for j in range(rows.shape[1]):
            line = lines[j]
            for i in range(count):
                line[i] = exp(line[i] - top[i])
            for i in range(count):
                total[i] += line[i]
        return turn

    return jitable(powers)


def short_softmax_by(exp: Any) -> Callable[..., Any]:
    """Softmax of rows of few classes, by way of this exponential."""
    powers = powers_in_lines(exp)

    def softmax(rows: Any, out: Any, room: Any, found: Any) -> None:
        scale = found[1 - powers(rows, room[0], found)]
        for i in range(rows.shape[0]):
            scale[i] = 1 / scale[i]
        scale_lines(room[0], rows.shape[0], scale)
        transpose_lines(room[0], out)

    return jitable(softmax)


def short_log_softmax_by(exp: Any, log: Any) -> Callable[..., Any]:
    """Logarithms of softmax of rows of few classes."""
    powers = powers_in_lines(exp)

    def log_softmax(rows: Any, out: Any, room: Any, found: Any) -> None:
        count, lines = rows.shape[0], room[0]
        turn = powers(rows, lines, found)
        top, rest = found[turn], found[1 - turn]
        for i in range(count):
            rest[i] = log(rest[i])
        transpose_rows(rows, lines)
        for j in range(rows.shape[1]):
            line = lines[j]
            for i in range(count):
                line[i] = (line[i] - top[i]) - rest[i]
        transpose_lines(lines, out)

    return jitable(log_softmax)


def short_class_loss_by(exp: Any, log: Any) -> Callable[..., Any]:
    """Cross entropies of rows of few classes with the class that each is of."""
    powers = powers_in_lines(exp)

    def loss(rows: Any, labels: Any, out: Any, room: Any, found: Any) -> None:
        """The loss of each row, whose label is one of its classes."""
        turn = powers(rows, room[0], found)
        top, rest, told = found[turn], found[1 - turn], found[2]
        for i in range(rows.shape[0]):
            told[i] = rows[np.uint64(i), np.uint64(labels[np.uint64(i)])]
        for i in range(rows.shape[0]):
            out[i] = (top[i] - told[i]) + log(rest[i])

    return jitable(loss)


def short_class_slope_by(exp: Any) -> Callable[..., Any]:
    """The gradients of such entropies by the rows."""
    powers = powers_in_lines(exp)

    def slope(rows: Any, labels: Any, dy: Any, out: Any, room: Any, found: Any) -> None:
        scale = found[1 - powers(rows, room[0], found)]
        for i in range(rows.shape[0]):
            scale[i] = dy[i] / scale[i]
        scale_lines(room[0], rows.shape[0], scale)
        transpose_lines(room[0], out)
        for i in range(rows.shape[0]):
            out[np.uint64(i), np.uint64(labels[np.uint64(i)])] -= dy[i]

    return jitable(slope)


def short_loss_by(exp: Any, log: Any) -> Callable[..., Any]:
    """Cross entropies of rows of few classes with a weight for each class."""
    powers = powers_in_lines(exp)

    def loss(rows: Any, weights: Any, out: Any, room: Any, found: Any) -> None:
        count, lines, asked = rows.shape[0], room[0], room[1]
        turn = powers(rows, lines, found)
        top, rest, cost = found[turn], found[1 - turn], found[2]
        for i in range(count):
            rest[i] = log(rest[i])
            cost[i] = 0
        transpose_rows(rows, lines)
        transpose_rows(weights, asked)
        for j in range(rows.shape[1]):
            line, weights_of = lines[j], asked[j]
            for i in range(count):
                more = weights_of[i] * (rest[i] - (line[i] - top[i]))
                line[i] = more if weights_of[i] != 0 else found.dtype.type(0)  # of the impossible ask nothing
            for i in range(count):
                cost[i] += line[i]
        for i in range(count):
            out[i] = cost[i]

    return jitable(loss)


def short_slope_by(exp: Any) -> Callable[..., Any]:
    """The gradients of such entropies by the rows."""
    powers = powers_in_lines(exp)

    def slope(rows: Any, weights: Any, dy: Any, out: Any, room: Any, found: Any) -> None:
        count, lines, asked = rows.shape[0], room[0], room[1]
        scale, weight = found[1 - powers(rows, lines, found)], found[2]
        transpose_rows(weights, asked)
        for i in range(count):
            weight[i] = 0
        for j in range(rows.shape[1]):
            weights_of = asked[j]
            for i in range(count):
                weight[i] += weights_of[i]
        for i in range(count):
            scale[i] = dy[i] * weight[i] / scale[i]
        for j in range(rows.shape[1]):
            line, weights_of = lines[j], asked[j]
            for i in range(count):
                line[i] = line[i] * scale[i] - dy[i] * weights_of[i]
        transpose_lines(lines, out)

    return jitable(slope)
