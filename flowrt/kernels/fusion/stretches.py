"""How a program that reduces is cut into units of work, and where the totals of each lie.

Law: pure; it follows from sizes alone, so that totals are the same bits on any number of threads. A unit is a stretch
of elements in the order of memory, which has totals of its own. Where columns are reduced whose rows are short, several
rows go side by side, each with totals of its own, since a loop over few elements takes most of its time to begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from flowrt.kernels.language.table import Call, View, Word

STRETCH, STRETCHES = 1 << 14, 32  # elements that are worth a unit of work, and how many units are enough
WIDE = 256  # elements of a row that is long enough

Shape: TypeAlias = "tuple[int, ...]"


def stretches(
    shape: Sequence[int], kept: Sequence[Sequence[int]], along: int = 1, many: int = 1
) -> tuple[int, tuple[Word, ...]]:
    """How many units of work there are, each with totals of its own, and the words that tell the entry about them.

    ``kept`` are the shapes of what totals come to; each entry has ``many`` totals. A unit is some stretches of
    ``along`` elements, which the words count.
    """
    total, sizes = math.prod(shape), [math.prod(k) for k in kept]
    length = -(-max(STRETCH, -(-total // STRETCHES), 16 * many * max(sizes)) // max(along, 1))
    every = total // max(along, 1)
    words: list[Word] = [length, every]
    for size in sizes:
        words += [many * size, size / total if total else math.nan]
    return max(1, -(-every // length)), tuple(words)


def in_stretches(shape: Shape, kept: Sequence[Shape], views: Sequence[View]) -> Call:
    """The application to ``views`` of that shape, which is reduced to the shapes ``kept``, along their axes of 1."""
    many = side_by_side(shape, kept, views)
    units, words = stretches(shape, kept, many=many)
    if many == 1:
        seen = [*views, *(View.dense(k).broadcast_to(shape) for k in kept)]
    else:
        width = many * math.prod(kept[0])
        rows = (-(-math.prod(shape) // width), width)
        seen = [View(rows, View.dense(rows).strides if any(v.strides) else (0, 0), v.offset) for v in views]
        seen += [View(rows, (0, 1))] * len(kept)  # the last row may end early, as the units do
    return Call(tuple(seen), words, units)


def side_by_side(shape: Shape, kept: Sequence[Shape], views: Sequence[View]) -> int:
    """How many rows go side by side: more than one where all that is read and written lies in the order of memory."""
    columns, total = math.prod(kept[0]), math.prod(shape)
    of_columns = any(kept[0] == (1,) * first + shape[first:] for first in range(len(shape)))
    if not of_columns or any(k != kept[0] for k in kept) or columns < 2 or not total:
        return 1
    if any(any(view.strides) and not view.contiguous for view in views):
        return 1
    return max(1, min(WIDE, total) // columns)


def totals_for_each(call: Call, number: int, size: int) -> int:
    """How many totals each result of reduction ``number`` is made of, which has ``size`` results."""
    return call.units * (int(call.words[2 + 2 * number]) // size if size else 1)
