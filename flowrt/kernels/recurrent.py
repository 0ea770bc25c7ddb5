"""All steps of a recurrent layer in one launch. A unit of work is a block of the batch's rows: whoever computes it runs
all time steps for it, so that threads never wait for each other.

The weights are packed into column panels once for all steps, by each thread for itself: they stay in its cache.
Elementwise work is cut into loops over few arrays: LLVM vectorises a loop only where it has few pairs to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrt.kernels.exponential import sigmoid32, sigmoid64, tanh32, tanh64
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry, native
from flowrt.kernels.panels import address, banding, panelling, repeat_last, stage, table_size
from flowrt.kernels.table import Call, View, host_only, jitable, kernel, single
from flowrt.spec import Spec

ROWS = 16  # of the batch in a block: enough to use a panel several times while it is near
KEPT, GATES = 6, 4  # what is kept of each step: i, f, g, o, c and tanh(c)
ONE = np.float32(1)  # float64 where what it meets is


def _view(spec: Spec, vectors: int = 1) -> View:
    """An operand as it is; where each step has several ``vectors`` they have an axis of their own."""
    shape = spec.concrete
    return View.dense(shape if vectors == 1 else (*shape[:-1], vectors, shape[-1] // vectors))


def _whole(count: int, part: int) -> int:
    """``count`` rounded up to a multiple of ``part``."""
    return -(-count // part) * part


class Stepped:
    """How both kernels are laid out for tiles of one geometry."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def forward(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        views = [_view(spec) for spec in (*inputs, *outputs[:-1])]
        views.append(_view(outputs[-1], KEPT))
        return self._call(views, self.forward_local(inputs, outputs, attrs))

    def backward(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
        views = [_view(spec) for spec in inputs[:-1]]
        views += [_view(inputs[-1], KEPT), _view(outputs[0], GATES), *map(_view, outputs[1:])]
        return self._call(views, self.backward_local(inputs, outputs, attrs))

    def _call(self, views: Sequence[View], local: Sequence[Spec]) -> Call:
        blocks = max(-(-views[1].shape[0] // ROWS), 1)  # of h, or its gradient
        return Call((*views, *map(_view, local)), (blocks,), blocks)

    def forward_local(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]
    ) -> tuple[Spec, ...]:
        """The weights and the bias in panels, then tables."""
        x, h, w_x = inputs[0].concrete, inputs[1].concrete, inputs[3].concrete
        dtype = inputs[0].dtype
        columns = _whole(w_x[1], self.geometry.columns(dtype))
        panels = Spec(dtype, (x[2] * columns,)), Spec(dtype, (h[1] * columns,)), Spec(dtype, (columns,))
        return (*panels, *self._tables(h[0], dtype, 2))

    def backward_local(
        self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]
    ) -> tuple[Spec, ...]:
        """The transposed weights in panels, then tables."""
        w_h, dtype = inputs[4].concrete, inputs[0].dtype
        panels = Spec(dtype, (w_h[1] * _whole(w_h[0], self.geometry.columns(dtype)),))
        return (panels, *self._tables(outputs[1].concrete[0], dtype, 1))

    def _tables(self, rows: int, dtype: Any, count: int) -> tuple[Spec, ...]:
        table = Spec("int64", (table_size(self.geometry, rows),))
        return (*[table] * count, Spec("int64", (2,)), *stage(self.geometry, dtype))


@jitable
def put(target: Any, source: Any) -> None:
    """Copy a row."""
    for k in range(target.size):
        target[k] = source[k]


@jitable
def fill(table: Any, count: int, step: int, across: int) -> None:
    """A table of ``count`` rows that lie ``step`` apart, their results ``across``."""
    half = table.size // 2
    for r in range(count):
        table[r], table[half + r] = r * step, r * across
    repeat_last(table, count)


@cache
def multiplying(geometry: Geometry) -> Callable[..., None]:
    """``multiply(like, (rows, panels, results), j, shape, table, start, edges, memory)``: a product's column panel.

    It is the one from column ``j`` on; ``shape`` is (count, depth, columns): of rows, of numbers in a row, of columns.
    Rows and results lie as ``table`` says, from two addresses on; sums begin with ``start``, the bias with ``edges``.
    """
    band, full = banding(geometry), geometry.vectors * geometry.width

    @jitable
    def multiply(like: Any, at: Any, j: int, shape: Any, table: Any, start: int, edges: int, memory: Any) -> None:
        (rows, panels, results), (count, depth, columns), (taps, stage, places) = at, shape, memory
        size, wide = like.itemsize, full // like.itemsize
        where, how = (rows, panels + j * depth * size, results + j * size), (start, edges + j * size, 0)
        reach = 1, depth, 1, wide
        band(like, where, table, count, taps, reach, min(wide, columns - j), stage, places, how)

    return multiply


def gating(sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    @jitable
    def gates(row: Any, cell: Any, y: Any) -> None:
        """From the sums to the gates, the cell after what it was before, and the output of one example."""
        i, f, g, o, kept, bent = row[0], row[1], row[2], row[3], row[4], row[5]
        for k in range(i.size):
            i[k] = sigmoid(i[k])
        for k in range(f.size):
            f[k] = sigmoid(f[k])
        for k in range(g.size):
            g[k] = tanh(g[k])
        for k in range(o.size):
            o[k] = sigmoid(o[k])
        for k in range(cell.size):
            cell[k] = f[k] * cell[k] + i[k] * g[k]
        for k in range(cell.size):
            kept[k] = cell[k]
        for k in range(cell.size):
            bent[k] = tanh(cell[k])
        for k in range(cell.size):
            y[k] = o[k] * bent[k]

    return gates


def lstm_forward(geometry: Geometry, sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """The kernel of `lstm_steps` for tiles of one geometry."""
    pack_all, multiply, gates = panelling(geometry), multiplying(geometry), gating(sigmoid, tanh)
    full = geometry.vectors * geometry.width

    @jitable
    def prepare(weights: Any, panels: Any, tables: Any, count: int) -> None:
        """Pack both weights and the bias, and fill in the tables of ``count`` rows."""
        (w_x, w_h, bias), (from_x, from_h, edges), (x_table, h_table) = weights, panels, tables
        width, units, sums = w_x.shape[0], w_h.shape[0], bias.size
        pack_all(w_x, address(w_x), sums, 1, width, sums, address(from_x))
        pack_all(w_h, address(w_h), sums, 1, units, sums, address(from_h))
        put(edges, bias)
        fill(x_table, count, width, KEPT * units)
        fill(h_table, count, units, KEPT * units)

    @jitable
    def add_up(x: Any, h: Any, kept: Any, count: int, panels: Any, tables: Any, memory: Any) -> None:
        """The sums of one step, from the rows of ``x`` and ``h`` on, panel by panel while what it comes to is near."""
        (from_x, from_h, edges), (x_table, h_table) = panels, tables
        to, bias, sums = address(kept), address(edges), GATES * h.size
        for j in range(0, sums, full // x.itemsize):
            shape = count, x.size, sums
            multiply(x, (address(x), address(from_x), to), j, shape, x_table, START_BIAS, bias, memory)
            shape = count, h.size, sums
            multiply(x, (address(h), address(from_h), to), j, shape, h_table, START_STORED, bias, memory)

    def lstm_steps(arrays: Any, words: Any, begin: int, end: int) -> None:
        x, h, c = arrays[:3]
        y, last_h, last_c, before, kept = arrays[6:11]
        panels, tables, memory = arrays[11:14], arrays[14:16], arrays[16:]
        first, last = h.shape[0] * begin // words[0], h.shape[0] * end // words[0]
        prepare(arrays[3:6], panels, tables, last - first)
        memory[0][0] = memory[0][1] = 0
        for r in range(first, last):
            put(last_h[r], h[r])
            put(last_c[r], c[r])
        for t in range(x.shape[0]):
            for r in range(first, last):
                put(before[t, r], last_h[r])
            add_up(x[t, first], before[t, first], kept[t, first], last - first, panels, tables, memory)
            for r in range(first, last):
                gates(kept[t, r], last_c[r], y[t, r])
                put(last_h[r], y[t, r])

    return lstm_steps


@jitable
def ungates(row: Any, before: Any, dy: Any, dh: Any, dc: Any, ds: Any) -> None:
    """From what is known of one example's h and c after a step to its sums' gradients and that of c before."""
    i, f, g, o, bent = row[0], row[1], row[2], row[3], row[5]
    di, df, dg, do = ds[0], ds[1], ds[2], ds[3]
    for k in range(dh.size):
        dh[k] += dy[k]
    for k in range(dh.size):
        do[k] = dh[k] * bent[k] * (o[k] * (ONE - o[k]))
    for k in range(dc.size):
        dc[k] += dh[k] * o[k] * (ONE - bent[k] * bent[k])
    for k in range(dc.size):
        di[k] = dc[k] * g[k] * (i[k] * (ONE - i[k]))
    for k in range(dc.size):
        df[k] = dc[k] * before[k] * (f[k] * (ONE - f[k]))
    for k in range(dc.size):
        dg[k] = dc[k] * i[k] * (ONE - g[k] * g[k])
    for k in range(dc.size):
        dc[k] *= f[k]


def lstm_backward(geometry: Geometry) -> Callable[..., None]:
    """The kernel of `lstm_steps_grad` for tiles of one geometry."""
    pack_all, multiply, full = panelling(geometry), multiplying(geometry), geometry.vectors * geometry.width

    def lstm_steps_grad(arrays: Any, words: Any, begin: int, end: int) -> None:
        dy, dh, dc, c, w_h, kept, ds, dh0, dc0, panels, table = arrays[:11]
        memory, units, sums = arrays[11:], w_h.shape[0], w_h.shape[1]
        first, last = c.shape[0] * begin // words[0], c.shape[0] * end // words[0]
        pack_all(w_h, address(w_h), 1, sums, sums, units, address(panels))
        fill(table, last - first, sums, units)
        memory[0][0] = memory[0][1] = 0
        for r in range(first, last):
            put(dh0[r], dh[r])
            put(dc0[r], dc[r])
        for t in range(dy.shape[0] - 1, -1, -1):
            for r in range(first, last):
                before = kept[t - 1, r, 4] if t > 0 else c[r]
                ungates(kept[t, r], before, dy[t, r], dh0[r], dc0[r], ds[t, r])
            at = address(ds[t, first]), address(panels), address(dh0[first])
            for j in range(0, units, full // c.itemsize):
                multiply(c, at, j, (last - first, sums, units), table, START_ZERO, address(panels), memory)

    return lstm_steps_grad


_stepped = Stepped(native())
_forward = kernel("lstm_steps", layout=_stepped.forward, local=_stepped.forward_local)
_forward(lstm_forward(native(), sigmoid64, tanh64))
_forward_single = kernel("lstm_steps", layout=_stepped.forward, local=_stepped.forward_local, dtypes=single)
_forward_single(lstm_forward(native(), sigmoid32, tanh32))
_backward = kernel("lstm_steps_grad", layout=_stepped.backward, local=_stepped.backward_local)
_backward(lstm_backward(native()))
host_only("lstm_steps", "lstm_steps_grad")
