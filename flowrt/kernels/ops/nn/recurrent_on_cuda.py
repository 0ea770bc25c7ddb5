"""Recurrent layers on CUDA: the inputs of all steps are multiplied at once, then each step is a product and a launch.

A thread has one unit of one example: its four sums, the gates, and the state. What is kept of a step lies by example,
gate by gate: i, f, g, o, the c before and tanh(c).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, Form, RegisteredKernel, View, kernel, natural, require_kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.launch import Application, LaunchStep, copy_step
from flowrt.kernels.ops.nn.recurrent_steps import GATES


def lstm_cell(sums: Any, h_sums: Any, h: Any, c: Any, bias: Any, y: Any, next_c: Any, before: Any, kept: Any) -> None:
    """One step, from the products of its inputs, and of the h before."""
    batch, units = h.shape
    one = y.dtype.type(1)
    for entry in range(cuda.grid(1), batch * units, cuda.gridsize(1)):
        b, u = entry // units, entry % units
        at_f, at_g, at_o = units + u, 2 * units + u, 3 * units + u
        i, f = sums[b, u] + h_sums[b, u] + bias[u], sums[b, at_f] + h_sums[b, at_f] + bias[at_f]
        g, o = sums[b, at_g] + h_sums[b, at_g] + bias[at_g], sums[b, at_o] + h_sums[b, at_o] + bias[at_o]
        i, f = one / (one + math.exp(-i)), one / (one + math.exp(-f))
        g, o = math.tanh(g), one / (one + math.exp(-o))
        was = c[b, u]
        now = f * was + i * g
        level = math.tanh(now)
        kept[b, u], kept[b, at_f], kept[b, at_g] = i, f, g
        kept[b, at_o], kept[b, 4 * units + u], kept[b, 5 * units + u] = o, was, level
        before[b, u] = h[b, u]
        next_c[b, u] = now
        y[b, u] = o * level


def lstm_cell_grad(dh: Any, dy: Any, dc: Any, kept: Any, ds: Any, dc_before: Any) -> None:
    """One step backwards: from what the steps after it are due to its h and c, and its own y."""
    batch, units = dy.shape
    one = ds.dtype.type(1)
    for entry in range(cuda.grid(1), batch * units, cuda.gridsize(1)):
        b, u = entry // units, entry % units
        back = dy[b, u] + dh[b, u]
        i, f, g = kept[b, u], kept[b, units + u], kept[b, 2 * units + u]
        o, was, level = kept[b, 3 * units + u], kept[b, 4 * units + u], kept[b, 5 * units + u]
        inside = dc[b, u] + back * o * (one - level * level)
        ds[b, u] = inside * g * i * (one - i)
        ds[b, units + u] = inside * was * f * (one - f)
        ds[b, 2 * units + u] = inside * i * (one - g * g)
        ds[b, 3 * units + u] = back * level * o * (one - o)
        dc_before[b, u] = inside * f


CELL, CELL_GRAD = (
    RegisteredKernel(function.__name__, "cuda", function, natural) for function in (lstm_cell, lstm_cell_grad)
)


def _row(shape: Sequence[int], number: int) -> View:
    """One of the matrices that an operand is of."""
    matrix = View.dense(shape[1:])
    return View(matrix.shape, matrix.strides, number * matrix.size)


def _step(
    made: RegisteredKernel, operands: Sequence[int], views: Sequence[View], dtype: np.dtype[Any], reads: int
) -> LaunchStep:
    return LaunchStep(made, tuple(operands), (dtype,) * len(operands), Call(tuple(views)), reads)


def _product(
    operands: Sequence[int], views: Sequence[View], flags: tuple[int, int], dtype: np.dtype[Any]
) -> LaunchStep:
    """A product of two matrices, into a third."""
    alone = tuple(view.reshape((1, 1, *view.shape)) if not view.offset else _as_batch(view) for view in views)
    return LaunchStep(
        require_kernel("matmul", "cuda", (dtype,) * 3), tuple(operands), (dtype,) * 3, Call(alone, flags), 2
    )


def _as_batch(view: View) -> View:
    dense = View.dense((1, 1, *view.shape))
    return View(dense.shape, dense.strides, view.offset)


@kernel("lstm_steps", "cuda", form=Form.PROGRAM)
def apply_lstm_steps_on_cuda(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The launches of a layer: y, the last h and c, each step's h before, and what is kept."""
    (steps, batch, width), units, dtype = inputs[0].concrete, inputs[1].concrete[1], inputs[0].dtype
    x, h, c, w_x, w_h, bias, y, last_h, last_c, before, kept, sums, h_sums = range(13)
    state, every, wide = View.dense((batch, units)), (steps, batch, units), (steps, batch, GATES * units)
    rows = View.dense((steps * batch, width)), View.dense((width, GATES * units)), View.dense((steps * batch, wide[2]))
    weights, made_by = View.dense((units, wide[2])), View.dense((batch, wide[2]))
    made: list[LaunchStep] = [_product((x, w_x, sums), rows, (0, 0), dtype)] if steps else []
    for t in range(steps):
        from_h = (y, _row(every, t - 1)) if t else (h, state)
        made.append(_product((from_h[0], w_h, h_sums), (from_h[1], weights, made_by), (0, 0), dtype))
        operands = (sums, h_sums, from_h[0], last_c if t else c, bias, y, last_c, before, kept)
        views = (_row(wide, t), made_by, from_h[1], state, View.dense((wide[2],)))
        written = (_row(every, t), state, _row(every, t), _row(outputs[4].concrete, t))
        made.append(_step(CELL, operands, (*views, *written), dtype, 5))
    ends = [(y, _row(every, steps - 1), last_h)] if steps else [(h, state, last_h), (c, state, last_c)]
    made += [copy_step(source, target, dtype, view, state, device) for source, view, target in ends]
    return Application(tuple(made), (Spec(dtype, wide), Spec(dtype, wide[1:])))


@kernel("lstm_steps_grad", "cuda", form=Form.PROGRAM)
def apply_lstm_steps_grad_on_cuda(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The launches of a layer's gradient: of the sums before the gates, of h and of c."""
    every, kept_of, dtype = inputs[0].concrete, inputs[4].concrete, inputs[0].dtype
    (steps, batch, units), wide = every, outputs[0].concrete
    dy, dh, dc, w_h, kept, ds, d_h, d_c = range(8)
    state, weights = View.dense((batch, units)), View.dense((units, GATES * units))
    made: list[LaunchStep] = []
    for t in reversed(range(steps)):
        due = (dh, dc) if t == steps - 1 else (d_h, d_c)
        views = (state, _row(every, t), state, _row(kept_of, t), _row(wide, t), state)
        made.append(_step(CELL_GRAD, (due[0], dy, due[1], kept, ds, d_c), views, dtype, 4))
        made.append(_product((ds, w_h, d_h), (_row(wide, t), weights, state), (0, 1), dtype))
    if not steps:
        made += [copy_step(source, target, dtype, state, state, device) for source, target in ((dh, d_h), (dc, d_c))]
    return Application(tuple(made), ())
