"""Gated recurrent units: a layer that is a `scan` of its cell, so that every order of derivative is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import common_dtype
from flowrt.base.spec import is_float
from flowrt.ops.elementwise import add, astype, multiply, sigmoid, subtract, tanh
from flowrt.ops.inference import described, settled
from flowrt.ops.linalg import matmul
from flowrt.ops.loops import scan
from flowrt.ops.recurrent import known_sizes

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand

GATES = 3  # r, z, n


@located("gru")
def gru(
    x: Operand, h: Operand, w_x: Operand, w_h: Operand, bias: Operand, *, reset_after: bool = True
) -> tuple[TensorOrArray, TensorOrArray]:
    """A layer of gated recurrent units over all time steps: (outputs, h).

    ``x`` is [time, batch, in]; ``h`` is the state before the first step, [batch, units]; ``w_x`` is [in, 3 units],
    ``w_h`` [units, 3 units], with the gates in the order r, z, n, as PyTorch has them (Keras: z, r, n). ``bias`` is
    [3 units], or [2, 3 units]: what is added to ``x @ w_x``, and to ``h @ w_h``. At each step::

        r_x, z_x, n_x = split(x @ w_x + b_x)
        r_h, z_h, n_h = split(h @ w_h + b_h)
        r, z = sigmoid(r_x + r_h), sigmoid(z_x + z_h)
        h = (1 - z) * tanh(n_x + r * n_h) + z * h

    That is the layer of PyTorch, cuDNN and Keras. Where not ``reset_after``, it is as it was published: r is multiplied
    with the h that n_h is made of. ``outputs`` are the h of every step, [time, batch, units]; the h answered is that
    after the last one. Cho et al., "Learning phrase representations using RNN encoder-decoder", 2014.
    """
    x, h, w_x, w_h, bias = _of_one_dtype(x, h, w_x, w_h, bias)
    units = _units(*map(described, (x, h, w_x, w_h, bias)))
    b_x, b_h = (bias[0], bias[1]) if described(bias).rank == 2 else (bias, None)

    def gate(sums: Any, n: int) -> Any:
        return sums[..., n * units : (n + 1) * units]

    def of_state(state: Any, first: int, last: int) -> Any:
        """What the state adds to some gates."""
        part = slice(first * units, last * units)
        sums = matmul(state, w_h if last - first == GATES else w_h[:, part])
        return sums if b_h is None else add(sums, b_h[part])

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        own = of_state(state, 0, GATES if reset_after else 2)
        r, z = (sigmoid(add(gate(now, n), gate(own, n))) for n in (0, 1))
        new = multiply(r, gate(own, 2)) if reset_after else of_state(multiply(r, state), 2, GATES)
        state = add(multiply(subtract(1, z), tanh(add(gate(now, 2), new))), multiply(z, state))
        return state, state

    last, outputs = scan(step, h, add(matmul(x, w_x), b_x))
    return outputs, last


def _of_one_dtype(*operands: Any) -> list[Any]:
    found = settled(*operands)
    kinds = [described(value).dtype for value in found]
    dtype = common_dtype(kinds)
    if not is_float(dtype):
        raise SpecError(f"gru computes on floats, got {described(found[0])}; use astype")
    return [value if kind == dtype else astype(value, dtype) for value, kind in zip(found, kinds, strict=True)]


def _units(x: Spec, h: Spec, w_x: Spec, w_h: Spec, bias: Spec) -> int:
    """How many units the layer has."""
    units = w_h.dims[0] if w_h.dims else None
    if units is None:
        raise SpecError(f"w_h of gru must be of known sizes, got {w_h}; declare its shape")
    _, batch, width = known_sizes("gru", "x", x, (None, None, None))
    known_sizes("gru", "h", h, (batch, units))
    known_sizes("gru", "w_x", w_x, (width, GATES * units))
    known_sizes("gru", "w_h", w_h, (units, GATES * units))
    known_sizes("gru", "bias", bias, (GATES * units,) if bias.dims is None or bias.rank != 2 else (2, GATES * units))
    return units
