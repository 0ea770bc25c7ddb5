"""Recurrent layers: one op runs all time steps, and keeps what its gradient needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.locating import fitting
from flowrt.base.spec import Spec, agree, is_float
from flowrt.graph import beside
from flowrt.ops.linalg import matmul
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.shape import reshape, stack
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

GATES, KEPT = 4, 6  # i, f, g, o; then also the cell before the step and the tanh of the one after it


@fitting
def lstm(
    x: Operand, h: Operand, c: Operand, w_x: Operand, w_h: Operand, bias: Operand, *, name: str | None = None
) -> tuple[TensorOrArray, TensorOrArray, TensorOrArray]:
    """A layer of long short-term memory over all time steps: (outputs, h, c).

    ``x`` is [time, batch, in]; ``h`` and ``c`` are the state before the first step, [batch, units]; ``w_x`` is
    [in, 4 units], ``w_h`` [units, 4 units], ``bias`` [4 units], with the gates in the order i, f, g, o. At each step::

        i, f, g, o = split(x @ w_x + h @ w_h + bias)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)

    ``outputs`` are the h of every step, [time, batch, units]; the h and c answered are those after the last one.
    Hochreiter and Schmidhuber, "Long short-term memory", 1997; Gers et al., "Learning to forget", 2000.
    """
    outputs, last_h, last_c, _, _ = lstm_steps(x, h, c, w_x, w_h, bias, name=name)
    return outputs, last_h, last_c


@op(promote=True)
def lstm_steps(
    x: Operand, h: Operand, c: Operand, w_x: Operand, w_h: Operand, bias: Operand, *, name: str | None = None
) -> tuple[Result, ...]:
    """`lstm`, and for its gradient the h before every step and what each step computed.

    That is i, f, g, o, the c before and tanh(c), for each step in the order in which kernels make and read them.
    """
    if not is_float(x.dtype):
        raise SpecError(f"lstm computes on floats, got {x}; use astype")
    units = _units(h, c, w_h, bias)
    steps, batch, width = known_sizes("lstm", "x", x, (None, None, None))
    batch = batch or known_sizes("lstm", "h", h, (batch, units))[0] or known_sizes("lstm", "c", c, (batch, units))[0]
    four = None if units is None else GATES * units
    for what, spec, sizes in (
        ("h", h, (batch, units)),
        ("c", c, (batch, units)),
        ("w_x", w_x, (width, four)),
        ("w_h", w_h, (units, four)),
        ("bias", bias, (four,)),
    ):
        known_sizes("lstm", what, spec, sizes)
    every, state = Spec(x.dtype, (steps, batch, units)), Spec(x.dtype, (batch, units))
    return every, state, state, every, Spec(x.dtype, (steps, batch, None if units is None else KEPT * units))


def _units(h: Spec, c: Spec, w_h: Spec, bias: Spec) -> int | None:
    """How many units the layer has, from whatever tells it."""
    for spec, axis, share in ((w_h, 0, 1), (h, 1, 1), (c, 1, 1), (w_h, 1, GATES), (bias, 0, GATES)):
        size = spec.dims[axis] if spec.dims is not None and len(spec.dims) > axis else None
        if size is not None:
            return size // share
    return None


def known_sizes(layer: str, what: str, spec: Spec, wanted: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """What is known of the sizes of an operand of a layer, which must be as ``wanted``."""
    if spec.dims is None:
        return wanted
    if not agree(spec.dims, wanted):
        raise SpecError(f"{what} of {layer} must be {Spec(spec.dtype, wanted)}, got {spec}")
    return tuple(n if m is None else m for n, m in zip(spec.dims, wanted, strict=True))


@lstm_steps.gradient
def lstm_steps_grad_rule(node: Node, dy: Tensor, dh: Tensor, dc: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    x, _, _, w_x, w_h, _ = node.inputs
    before, kept = node.outputs[3:]
    with beside(node):  # what is kept lies as the kernels of one machine make it
        d_gates, d_h, d_c = lstm_steps_grad(dy, dh, dc, w_h, kept)
    rows = _rows(d_gates)
    d_w_x, d_w_h = matmul(_rows(x), rows, True), matmul(_rows(before), rows, True)
    return matmul(d_gates, w_x, False, True), d_h, d_c, d_w_x, d_w_h, sum_(rows, 0)


def _rows(x: Tensor) -> Any:
    """All steps of all examples as the rows of one matrix."""
    sizes = shape_of(x)
    return reshape(x, stack([sizes[0] * sizes[1], sizes[2]]))


@op
def lstm_steps_grad(dy: Operand, dh: Operand, dc: Operand, w_h: Operand, kept: Operand) -> tuple[Result, ...]:
    """The gradients of the sums before the gates, [time, batch, 4 units], of h and of c, from those of the answers."""
    if kept.dims is None or kept.shape[2] is None:
        return Spec(kept.dtype, (None, None, None)), dh, dc
    steps, batch, width = kept.shape
    units = (width or 0) // KEPT
    return Spec(kept.dtype, (steps, batch, GATES * units)), *[Spec(kept.dtype, (batch, units))] * 2


@lstm_steps_grad.gradient
def lstm_steps_grad_grad(node: Node, *dy: Tensor) -> tuple[Any, ...]:
    raise GraphError(
        f"{user_site()}: lstm has no second derivatives ({node.name!r}); write the steps with fr.scan to get them"
    )
