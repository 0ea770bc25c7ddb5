"""All steps of a recurrent layer in one launch. A unit of work is a block of the batch's rows: whoever computes it runs
all time steps for it, so that threads never wait for each other.

The weights are packed into column panels once for all steps, by each thread for itself: they stay in its cache.
Elementwise work is cut into loops over few arrays: LLVM vectorises a loop only where it has few pairs to compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from flowrt.kernels.exponential import sigmoid32, tanh32
from flowrt.kernels.micro import START_BIAS, START_STORED, START_ZERO, Geometry, native
from flowrt.kernels.panels import address, banding, packing, repeat_last, stage, table_size
from flowrt.kernels.table import Call, View, host_only, jitable, kernel
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
def panelling(geometry: Geometry) -> Callable[..., None]:
    """``pack_all(w, step, across, depth, count, panels)``: a matrix as column panels, one after another."""
    pack, full = packing(geometry), geometry.vectors * geometry.width

    @jitable
    def pack_all(w: Any, step: int, across: int, depth: int, count: int, panels: Any) -> None:
        wide = full // w.itemsize
        for j in range(0, count, wide):
            source, target = address(w) + j * across * w.itemsize, address(panels) + j * depth * w.itemsize
            pack(w, source, step, across, depth, min(wide, count - j), target)

    return pack_all


def lstm_forward(geometry: Geometry, sigmoid: Callable[..., Any], tanh: Callable[..., Any]) -> Callable[..., None]:
    """The kernel of `lstm_steps` for tiles of one geometry."""
    pack_all, band = panelling(geometry), banding(geometry)
    full = geometry.vectors * geometry.width

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

    def lstm_steps(
        x: Any,
        h: Any,
        c: Any,
        w_x: Any,
        w_h: Any,
        bias: Any,
        y: Any,
        last_h: Any,
        last_c: Any,
        before: Any,
        kept: Any,
        from_x: Any,
        from_h: Any,
        edges: Any,
        x_table: Any,
        h_table: Any,
        taps: Any,
        stage: Any,
        places: Any,
        blocks: int,
        begin: int,
        end: int,
    ) -> None:
        batch, units, width, size = h.shape[0], h.shape[1], x.shape[2], x.itemsize
        first, last = batch * begin // blocks, batch * end // blocks
        count, sums, wide = last - first, 4 * units, full // x.itemsize
        pack_all(w_x, sums, 1, width, sums, from_x)
        pack_all(w_h, sums, 1, units, sums, from_h)
        for k in range(sums):
            edges[k] = bias[k]
        fill(x_table, count, width, KEPT * units)
        fill(h_table, count, units, KEPT * units)
        taps[0] = taps[1] = 0
        for r in range(first, last):
            put(last_h[r], h[r])
            put(last_c[r], c[r])
        for t in range(x.shape[0]):
            for r in range(first, last):
                put(before[t, r], last_h[r])
            a = address(x) + (t * batch + first) * width * size
            b = address(before) + (t * batch + first) * units * size
            to = address(kept) + (t * batch + first) * KEPT * units * size
            for j in range(0, sums, wide):
                columns, edge = min(wide, sums - j), address(edges) + j * size
                where, reach = (a, address(from_x) + j * width * size, to + j * size), (1, width, 1, wide)
                band(x, where, x_table, count, taps, reach, columns, stage, places, (START_BIAS, edge, 0))
                where, reach = (b, address(from_h) + j * units * size, to + j * size), (1, units, 1, wide)
                band(x, where, h_table, count, taps, reach, columns, stage, places, (START_STORED, edge, 0))
            for r in range(first, last):
                gates(kept[t, r], last_c[r], y[t, r])
                put(last_h[r], y[t, r])

    return lstm_steps


def lstm_backward(geometry: Geometry) -> Callable[..., None]:
    """The kernel of `lstm_steps_grad` for tiles of one geometry."""
    pack_all, band = panelling(geometry), banding(geometry)
    full = geometry.vectors * geometry.width

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

    def lstm_steps_grad(
        dy: Any,
        dh: Any,
        dc: Any,
        c: Any,
        w_h: Any,
        kept: Any,
        ds: Any,
        dh0: Any,
        dc0: Any,
        panels: Any,
        table: Any,
        taps: Any,
        stage: Any,
        places: Any,
        blocks: int,
        begin: int,
        end: int,
    ) -> None:
        batch, units, size = c.shape[0], c.shape[1], c.itemsize
        first, last = batch * begin // blocks, batch * end // blocks
        count, sums, wide = last - first, 4 * units, full // c.itemsize
        pack_all(w_h, 1, sums, sums, units, panels)
        fill(table, count, sums, units)
        taps[0] = taps[1] = 0
        for r in range(first, last):
            put(dh0[r], dh[r])
            put(dc0[r], dc[r])
        for t in range(dy.shape[0] - 1, -1, -1):
            for r in range(first, last):
                before = kept[t - 1, r, 4] if t > 0 else c[r]
                ungates(kept[t, r], before, dy[t, r], dh0[r], dc0[r], ds[t, r])
            a = address(ds) + (t * batch + first) * sums * size
            to = address(dh0) + first * units * size
            for j in range(0, units, wide):
                where, reach = (a, address(panels) + j * sums * size, to + j * size), (1, sums, 1, wide)
                how = (START_ZERO, address(panels), 0)
                band(c, where, table, count, taps, reach, min(wide, units - j), stage, places, how)

    return lstm_steps_grad


def _single(dtypes: Sequence[Any]) -> bool:
    return bool(np.dtype(dtypes[0]) == np.float32)


@jitable
def sigmoid64(x: Any) -> Any:
    """``1 / (1 + exp(-x))`` of a float64."""
    return 1 / (1 + math.exp(-x))


@jitable
def tanh64(x: Any) -> Any:
    """The hyperbolic tangent of a float64."""
    return math.tanh(x)


_stepped = Stepped(native())
_forward = kernel("lstm_steps", layout=_stepped.forward, local=_stepped.forward_local)
_forward(lstm_forward(native(), sigmoid64, tanh64))
_forward_single = kernel("lstm_steps", layout=_stepped.forward, local=_stepped.forward_local, dtypes=_single)
_forward_single(lstm_forward(native(), sigmoid32, tanh32))
_backward = kernel("lstm_steps_grad", layout=_stepped.backward, local=_stepped.backward_local)
_backward(lstm_backward(native()))
host_only("lstm_steps", "lstm_steps_grad")
