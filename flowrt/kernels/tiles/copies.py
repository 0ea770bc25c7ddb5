"""Which entry copies a view of one operand to a window of another, and the entries for what a plain loop is bad at.

Law: pure planning, then the loops. Axes that lie behind one another in both views count as one. What is left of
them decides: where the source's neighbours are not the target's, squares that fit a machine's registers are turned
around; where rows are short, repeated or backwards, they are copied row by row, or turned around too where that fits;
all else is elementwise. What is put in the midst of a filling is copied while the filling is written. Entries are moved
as unsigned integers of their size, whatever they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.table import Call, Form, View, broadcast, host_only, jitable, kernel
from flowrt.kernels.tiles import micro
from flowrt.kernels.tiles.panels import address
from flowrt.kernels.tiles.rowmoves import move_rows
from flowrt.kernels.tiles.squares import LANES, turn

COPY_OP, TRANSPOSE_OP, ROWS_OP, BOX_OP = "copy", "copy_transposed", "copy_rows", "copy_box"
SHORT = 32  # entries of a row that a loop over rows is better for than the elementwise entry
LONG = 1024  # the same of rows whose entries are neighbours
BAND, COLUMNS = 64, 256  # rows and columns of the target that are one unit of work: lines of cache are read whole
OUTER = 3  # axes around the two that a loop is over
LEVELS = 4  # axes of a box, those merged that have nothing around them
NARROW = 24  # entries of a filled row below which a fill and a copy are quicker

Axis: TypeAlias = "tuple[int, int, int]"
"""How many, and the steps from one to the next in the source and in the target."""


@valueclass
class Copy:
    """A copy as an op, the dtype it moves entries as, and the call."""

    op: str
    dtype: np.dtype[Any]
    call: Call


def merged(views: Sequence[View]) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes and strides of equally shaped views, last axis first, merged into as few axes as their strides allow."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for axis in reversed(range(len(views[0].shape))):
        n, strides = views[0].shape[axis], tuple(v.strides[axis] for v in views)
        if n == 1:
            continue
        if dims and all(s == m * dims[-1][0] for s, m in zip(strides, dims[-1][1], strict=True)):
            dims[-1] = (dims[-1][0] * n, dims[-1][1])
        else:
            dims.append((n, strides))
    return dims


def plan_copy(source: View, target: View, dtype: np.dtype[Any]) -> Copy:
    """How to copy ``source`` to ``target``, of one shape."""
    axes = [(n, x, y) for n, (x, y) in merged((source, target))]
    plain = Copy(COPY_OP, dtype, Call((source, target)))
    if source.size == 0 or not axes or axes[0][2] != 1 or len(axes) > OUTER + 2:
        return plain
    columns, across, _ = axes[0]
    moved = np.dtype(f"uint{8 * dtype.itemsize}")
    lanes = transposed_width(dtype.itemsize) // dtype.itemsize
    rows = next((i for i, (n, x, _) in enumerate(axes) if i and x == 1 and n >= lanes), 0)
    if rows and columns >= lanes and across != 0:
        bands = -(-axes[rows][0] // BAND) * -(-columns // COLUMNS)
        return _over(TRANSPOSE_OP, moved, source, target, axes, rows, bands)
    if across in (0, -1) or (len(axes) > 1 and columns < (LONG if across == 1 else SHORT)):
        most = max(range(1, len(axes)), key=lambda i: axes[i][0], default=0)
        return _over(ROWS_OP, moved, source, target, axes, most, axes[most][0] if most else 1)
    return plain


def _over(
    op: str, dtype: np.dtype[Any], source: View, target: View, axes: Sequence[Axis], rows: int, units: int
) -> Copy:
    """The call whose loops are over the first axis and the axis ``rows`` (or none, if 0), within all others."""
    columns, across, _ = axes[0]
    many, down, below = axes[rows] if rows else (1, 0, 0)
    others = [axis for i, axis in enumerate(axes) if i not in (0, rows)]
    outer = math.prod(n for n, _, _ in others)
    words = [many, down, below, columns, across]
    for axis in (*others, *[(1, 0, 0)] * (OUTER - len(others))):
        words += axis
    views = tuple(View((1,), (1,), view.offset) for view in (source, target))
    return Copy(op, dtype, Call(views, tuple(words), outer * units))


def plan_box(source: View, target: View, size: int, value: Any, dtype: np.dtype[Any]) -> Copy | None:
    """How to copy ``source`` to a box within ``size`` entries and ``value`` around it, in one go.

    None where that is not all there is to it, or would be slow.
    """
    axes = merged((source, target))
    if source.size == 0 or not source.contiguous:
        return None
    if not axes or axes[0][1][1] != 1:
        axes.insert(0, (1, (1, 1)))
    steps = [strides[1] for _, strides in axes] + [size]
    words: list[int] = []
    for (many, _), step, above in zip(axes, steps, steps[1:], strict=False):
        if step <= 0 or above % step:
            return None
        whole, before = above // step, target.offset // step % (above // step)
        if before + many > whole:
            return None
        words += [whole, before, many]
    if len(axes) > LEVELS or words[0] < NARROW:
        return None
    moved = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = int(np.array([value]).astype(dtype).view(f"int{8 * dtype.itemsize}")[0])
    words += [1, 0, 1] * (LEVELS - len(axes))
    views = View.dense((source.size,)), View.dense((size,))
    return Copy(BOX_OP, moved, Call(views, (bits, *words), size // words[0]))


def transposed_width(itemsize: int) -> int:
    """Bytes of the vectors that make a square: as wide as the machine's, but no more than sixteen entries."""
    return min(micro.native().width, 16 * itemsize)


@jitable
def outer_place(at: int, outer: Any) -> Any:
    """Where in source and target the ``at``-th combination of the outer axes begins, in entries."""
    n, x, y, m, p, q, _, s, t = outer
    i, j, k = at % n, at // n % m, at // n // m
    return i * x + j * p + k * s, i * y + j * q + k * t


def transposing(width: int) -> Callable[..., None]:
    """The entry that turns squares of one vector's lanes around, band by band."""
    turn, move = micro.transpose(width), micro.move()

    @jitable
    def transpose_band(x: Any, source: int, target: int, rows: int, columns: int, across: int, below: int) -> None:
        """Row i of the target is what lies i entries behind the source; its neighbours are ``across`` apart there."""
        size, lanes = x.itemsize, width // x.itemsize
        whole_rows, whole = rows // lanes * lanes, columns // lanes * lanes
        line = max(64 // size, lanes)  # of cache, which is then read and written whole
        for first in range(0, whole_rows, line):
            stop = min(first + line, whole_rows)
            for j in range(0, whole, lanes):
                for i in range(first, stop, lanes):
                    turn(x, (source + (i + j * across) * size, across, target + (i * below + j) * size, below))
        rest = (source + whole * across * size, 1, across, target + whole * size, below, whole_rows, columns - whole)
        move(x, rest)
        under = source + whole_rows * size, target + whole_rows * below * size
        move(x, (under[0], 1, across, under[1], below, rows - whole_rows, columns))

    def copy_transposed(
        x: Any, y: Any, rows: int, down: int, below: int, columns: int, across: int,
        n: int, xn: int, yn: int, m: int, xm: int, ym: int, k: int, xk: int, yk: int, begin: int, end: int,
    ) -> None:  # fmt: skip
        size, from_start, to_start = x.itemsize, address(x), address(y)
        bands, parts = (rows + BAND - 1) // BAND, (columns + COLUMNS - 1) // COLUMNS
        for unit in range(begin, end):
            i, j = unit % bands * BAND, unit // bands % parts * COLUMNS
            source, target = outer_place(unit // bands // parts, (n, xn, yn, m, xm, ym, k, xk, yk))
            source, target = source + i + j * across, target + i * below + j
            height, width = min(rows - i, BAND), min(columns - j, COLUMNS)
            transpose_band(x, from_start + source * size, to_start + target * size, height, width, across, below)

    return copy_transposed


@jitable
def copy_row(x: Any, y: Any, source: int, target: int, columns: int, across: int) -> None:
    if across == 0:
        value = x[source]
        for j in range(columns):
            y[np.uint64(target + j)] = value
    elif across == -1:
        for j in range(columns):
            y[np.uint64(target + j)] = x[np.uint64(source - j)]
    else:
        for j in range(columns):
            y[np.uint64(target + j)] = x[np.uint64(source + j * across)]


_move = micro.move()


def copy_rows(
    x: Any, y: Any, rows: int, down: int, below: int, columns: int, across: int,
    n: int, xn: int, yn: int, m: int, xm: int, ym: int, k: int, xk: int, yk: int, begin: int, end: int,
) -> None:  # fmt: skip
    size, from_start, to_start = x.itemsize, address(x), address(y)
    place = begin
    while place < end:
        first = place % rows
        many = min(rows - first, end - place)
        source, target = outer_place(place // rows, (n, xn, yn, m, xm, ym, k, xk, yk))
        source, target = source + first * down, target + first * below
        if across == 1:
            move_rows(
                x,
                (from_start + source * size, down * size, to_start + target * size, below * size, columns * size, many),
            )
        elif down == 1 and below == columns and columns < SHORT and many >= LANES:  # neighbours come from far, or one
            turn(x, from_start + source * size, across, to_start + target * size, below, many, columns)
        elif columns < SHORT:
            _move(x, (from_start + source * size, down, across, to_start + target * size, below, many, columns))
        else:
            for i in range(many):
                copy_row(x, y, source + i * down, target + i * below, columns, across)
        place += many


@jitable
def fill_up(y: Any, begin: int, end: int, value: int) -> None:
    for i in range(begin, end):
        y[np.uint64(i)] = value


def copy_box(
    x: Any, y: Any, value: int, whole: int, before: int, columns: int, n: int, down: int, rows: int,
    m: int, under: int, some: int, k: int, behind: int, others: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Units are rows of the target; what lies between two of the source's is filled at once."""
    place, filled = begin, begin * whole
    while place < end:
        first, outer = place % n, place // n
        stop = min(n, first + end - place)
        i, j = outer % m - under, outer // m - behind
        if 0 <= i < some and 0 <= j < others:
            for row in range(max(first, down), min(stop, down + rows)):
                source, target = ((j * some + i) * rows + row - down) * columns, (outer * n + row) * whole + before
                fill_up(y, filled, target, value)
                for c in range(columns):
                    y[np.uint64(target + c)] = x[np.uint64(source + c)]
                filled = target + columns
        place += stop - first
    fill_up(y, filled, end * whole, value)


def _alone(dtype: Any) -> Callable[[Sequence[Any]], bool]:
    return lambda dtypes: np.dtype(dtypes[0]) == dtype


def _planned(*unused: Any) -> Call:
    raise AssertionError("a copy is planned by its views")


for _device in ("cpu", "cuda"):
    kernel(COPY_OP, _device, layout=broadcast, form=Form.SCALARS, moved=(0, 1))(lambda x: x)
for _dtype in (np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)):
    kernel(TRANSPOSE_OP, layout=_planned, dtypes=_alone(_dtype))(transposing(transposed_width(_dtype.itemsize)))
kernel(ROWS_OP, layout=_planned)(copy_rows)
kernel(BOX_OP, layout=_planned)(copy_box)
host_only(TRANSPOSE_OP, ROWS_OP, BOX_OP, why="ways of a processor to copy, which has a twin")
