"""Reductions of many entries to few results, in parts whose number follows from the sizes alone.

Each part is a unit of work: a stretch of a row, or some of the rows above a line of results. What they come to is then
combined in order, so that a result is the same on any number of threads. Where results are many, they are the units
themselves and nothing is parted (`reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.reductions import along_row
from flowrt.kernels.language.table import Attrs, Call, Form, View, host_only, kernel
from flowrt.kernels.launch import Application, apply_kernel

if TYPE_CHECKING:
    from flowrt.kernels.language.reductions import Reducer

PART, PARTS = 1 << 14, 32  # entries that are worth a unit of work, and how many units are enough
OUTER, RESULTS = 8, 2048  # from so many groups of results, or results in a group, they are units enough
COLUMNS = 1024  # reduced at a time: long rows are read from end to end, what is held of them stays in the nearest cache


@valueclass
class Reduced:
    """What is reduced: its five ``sizes``, whether the ``last`` is reduced, and how its ``entries`` lie.

    These are copied into the form where the reduced axes lie in more than two groups.
    """

    sizes: tuple[int, ...]
    last: bool
    entries: View

    def seen(self, shape: Sequence[int]) -> View:
        """The entries for a kernel that takes them in this ``shape``."""
        return View.dense(shape) if self.entries.contiguous else self.entries


FormOf = Callable[[Sequence[Spec], Attrs], Reduced]


def count_parts(sizes: Sequence[int], last: bool) -> int:
    """How many parts there are for each group of results: 1 where the results are units enough."""
    outer, across, _, rows, tail = sizes
    if across > 1 or outer >= OUTER or (not last and tail >= RESULTS):
        return 1
    return max(1, min(PARTS, rows * tail // PART, tail if last else rows))


def _groups(sizes: Sequence[int], last: bool) -> tuple[tuple[int, int, int], int]:
    """The sizes as (outer, rows, columns), of which rows or else columns are reduced, and how many results are in one
    group of the outer ones."""
    outer, _, _, rows, tail = sizes
    return (outer, rows, tail), 1 if last else tail


def reducing_parts(reducer: Reducer, start: int | None, reduce_rows: Any) -> Callable[..., Any]:
    """The entry that reduces each part by itself."""
    first = start is None
    neutral = 0 if start is None else start
    reduce_along, take = along_row(reducer), reducer.take

    def reduce_parts(x: Any, y: Any, parts: Any, found: Any, last: int, begin: int, end: int) -> None:
        count, rows, columns = parts.shape[1], x.shape[1], x.shape[2]
        for unit in range(begin, end):
            o, part = unit // count, unit % count
            if last != 0:
                row, stop = x[o, 0], columns * (part + 1) // count
                at = columns * part // count
                held = take(row[at], found) if first else found.dtype.type(neutral)
                parts[o, part, 0] = reduce_along(row, at, stop, held, found)
                continue
            some = x[o][rows * part // count : rows * (part + 1) // count]
            for t in range(0, columns, found.shape[1]):
                width = min(columns - t, found.shape[1])
                for i in range(width):
                    found[0, i] = take(some[0, np.uint64(t + i)], found) if first else neutral
                reduced, out = found[reduce_rows(some, t, width, found, 0)], parts[o, part]
                for i in range(width):
                    out[np.uint64(t + i)] = reduced[i]

    return reduce_parts


def reducing_together(reducer: Reducer, finish: Callable[..., Any]) -> Callable[..., Any]:
    """The entry that combines the parts of each result, taking turns as in `reduce.row_reduction`."""
    combine = reducer.combine

    def reduce_together(x: Any, y: Any, parts: Any, found: Any, last: int, begin: int, end: int) -> None:
        entries, kept, at = x.shape[1] * x.shape[2] if last != 0 else x.shape[1], y.shape[1], begin
        while at < end:
            o, t = at // kept, at % kept
            width = min(min(kept - t, end - at), found.shape[1])
            for i in range(width):
                found[0, i] = parts[o, 0, np.uint64(t + i)]
            for part in range(1, parts.shape[1]):
                old, new, more = found[(part - 1) % 2], found[part % 2], parts[o, part]
                for i in range(width):
                    new[i] = combine(old[i], more[np.uint64(t + i)])
            reduced = found[(parts.shape[1] - 1) % 2]
            for i in range(width):
                y[o, np.uint64(t + i)] = finish(reduced[i], entries)
            at += width

    return reduce_together


@valueclass
class Parted:
    """A reduction: how entries are combined, from what, what the result is made of, the dtype they are held in, and the
    helper that reduces rows."""

    reducer: Reducer
    start: int | None
    finish: Callable[..., Any]
    wide: Callable[[np.dtype[Any]], Any]
    reduce_rows: Callable[..., Any]


def register_parted(op: str, at_once: str, form: FormOf, how: Parted) -> None:
    """Enter the CPU's kernels of a reduction: in parts, where those ``at_once`` do not do."""
    in_parts = f"{op}_in_parts"

    def layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        found = form(inputs, attrs)
        (outer, rows, columns), kept = _groups(found.sizes, found.last)
        count = count_parts(found.sizes, found.last)
        memory = ((outer, kept), (outer, count, kept), (2, min(kept, COLUMNS)))
        views = (found.seen((outer, rows, columns)), *map(View.dense, memory))
        return Call(views, (int(found.last),), outer * count, copied=((outer, rows, columns),))

    def ending(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        call = layout(inputs, outputs, attrs)
        return replace(call, units=call.views[1].size)

    def memory(number: int) -> Any:
        def declare(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
            return [Spec(how.wide(inputs[0].dtype), layout(inputs, outputs, attrs).views[number].shape)]

        return declare

    def apply(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs, device: str) -> Application:
        found = form(inputs, attrs)
        chosen = in_parts if count_parts(found.sizes, found.last) > 1 else at_once
        return apply_kernel(chosen, inputs, outputs, attrs, device)

    together = reducing_together(how.reducer, how.finish)
    kernel(in_parts, layout=layout, scratch=memory(2), local=memory(3), then=((together, ending),))(
        reducing_parts(how.reducer, how.start, how.reduce_rows)
    )
    kernel(op, form=Form.PROGRAM)(apply)
    host_only(at_once, in_parts, why="ways of a processor to go about a reduction, which has a twin")
