"""Recurrent layers on CUDA: the inputs of all steps are multiplied at once, then each step is a launch.

A thread has one unit of one example: the four sums over the units before, the gates, and the state, whose entry nobody
else reads in that step. What is kept of a step lies by example, gate by gate: i, f, g, o, the c before and tanh(c).
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


def lstm_cell(
    sums: Any, h: Any, c: Any, w_h: Any, bias: Any, y: Any, next_h: Any, next_c: Any, before: Any, kept: Any
) -> None:
    """One step, from the products of its inputs."""
    batch, units = h.shape
    one = y.dtype.type(1)
    for entry in range(cuda.grid(1), batch * units, cuda.gridsize(1)):
        b, u = entry // units, entry % units
        i, f = sums[b, u] + bias[u], sums[b, units + u] + bias[units + u]
        g, o = sums[b, 2 * units + u] + bias[2 * units + u], sums[b, 3 * units + u] + bias[3 * units + u]
        for k in range(units):
            at = h[b, k]
            i += at * w_h[k, u]
            f += at * w_h[k, units + u]
            g += at * w_h[k, 2 * units + u]
            o += at * w_h[k, 3 * units + u]
        i, f = one / (one + math.exp(-i)), one / (one + math.exp(-f))
        g, o = math.tanh(g), one / (one + math.exp(-o))
        was = c[b, u]
        now = f * was + i * g
        level = math.tanh(now)
        kept[b, u], kept[b, units + u], kept[b, 2 * units + u] = i, f, g
        kept[b, 3 * units + u], kept[b, 4 * units + u], kept[b, 5 * units + u] = o, was, level
        before[b, u] = h[b, u]
        next_c[b, u] = now
        y[b, u] = o * level


def lstm_cell_grad(later: Any, dh: Any, dy: Any, dc: Any, w_h: Any, kept: Any, ds: Any, dc_before: Any) -> None:
    """One step backwards: from the sums' gradients of the step after it, or behind the last of its own h's."""
    batch, units = dy.shape
    one = ds.dtype.type(1)
    for entry in range(cuda.grid(1), batch * units, cuda.gridsize(1)):
        b, u = entry // units, entry % units
        back = dy[b, u] + dh[b, u]
        for k in range(later.shape[1]):
            back += later[b, k] * w_h[u, k]
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
    x, h, c, w_x, w_h, bias, y, last_h, last_c, before, kept, sums = range(12)
    state, every, wide = View.dense((batch, units)), (steps, batch, units), (steps, batch, GATES * units)
    rows = View.dense((steps * batch, width)), View.dense((width, GATES * units)), View.dense((steps * batch, wide[2]))
    made: list[LaunchStep] = [_product((x, w_x, sums), rows, (0, 0), dtype)] if steps else []
    for t in range(steps):
        from_h = (y, _row(every, t - 1)) if t else (h, state)
        from_c = last_c if t else c
        operands = (sums, from_h[0], from_c, w_h, bias, y, last_h, last_c, before, kept)
        views = (_row(wide, t), from_h[1], state, View.dense((units, wide[2])), View.dense((wide[2],)))
        written = (_row(every, t), state, state, _row(every, t), _row(outputs[4].concrete, t))
        made.append(_step(CELL, operands, (*views, *written), dtype, 5))
    ends = [(y, _row(every, steps - 1), last_h)] if steps else [(h, state, last_h), (c, state, last_c)]
    made += [copy_step(source, target, dtype, view, state, device) for source, view, target in ends]
    return Application(tuple(made), (Spec(dtype, wide),))


@kernel("lstm_steps_grad", "cuda", form=Form.PROGRAM)
def apply_lstm_steps_grad_on_cuda(
    inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any], device: str
) -> Application:
    """The launches of a layer's gradient: of the sums before the gates, of h and of c."""
    every, kept_of, dtype = inputs[0].concrete, inputs[4].concrete, inputs[0].dtype
    (steps, batch, units), wide = every, outputs[0].concrete
    dy, dh, dc, w_h, kept, ds, d_h, d_c, none, zeros = range(10)
    state, weights = View.dense((batch, units)), View.dense((units, GATES * units))
    made: list[LaunchStep] = [_filled(zeros, (batch, units), dtype)] if steps else []
    for t in reversed(range(steps)):
        last = t == steps - 1
        later = (none, View.dense((batch, 0))) if last else (ds, _row(wide, t + 1))
        operands = (later[0], dh if last else zeros, dy, dc if last else d_c, w_h, kept, ds, d_c)
        views = (later[1], state, _row(every, t), state, weights, _row(kept_of, t), _row(wide, t), state)
        made.append(_step(CELL_GRAD, operands, views, dtype, 6))
    if steps:
        made.append(_product((ds, w_h, d_h), (_row(wide, 0), weights, state), (0, 1), dtype))
    else:
        made += [copy_step(source, target, dtype, state, state, device) for source, target in ((dh, d_h), (dc, d_c))]
    return Application(tuple(made), (Spec(dtype, (0,)), Spec(dtype, (batch, units))))


def _filled(operand: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> LaunchStep:
    """Zeros."""
    dense = View.dense((math.prod(shape),))
    return LaunchStep(
        require_kernel("fill", "cuda", [dtype]), (operand,), (dtype,), Call((dense,), (0.0,), dense.size), 0
    )
