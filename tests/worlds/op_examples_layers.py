"""Examples of layers and of what is made for them; see `op_examples`."""

from __future__ import annotations

from typing import Any

import numpy as np
from example import Example, normal

import flowrt.ops as fr
from flowrt.ops import attention


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Attention in float64; ``mask`` is added to the scores. What sees nothing is answered with zeros."""
    scores = q.astype(np.float64) @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    scores = scores if mask is None else scores + mask
    power = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    return (power / np.maximum(power.sum(-1, keepdims=True), 1e-300) @ v).astype(q.dtype)


def recurrent(x: np.ndarray, h: np.ndarray, w_x: np.ndarray, w_h: np.ndarray, bias: np.ndarray, after: bool) -> Any:
    """A layer of gated recurrent units."""
    b_x, b_h = bias if bias.ndim == 2 else (bias, 0 * bias)
    outputs, units = np.zeros((len(x), *h.shape), x.dtype), h.shape[1]
    for t, now in enumerate(x):
        given, own = now @ w_x + b_x, h @ w_h + b_h
        r, z = (1 / (1 + np.exp(-part)) for part in np.split((given + own)[:, : 2 * units], 2, 1))
        reset = r * own[:, 2 * units :] if after else (r * h) @ w_h[:, 2 * units :] + b_h[2 * units :]
        h = outputs[t] = (1 - z) * np.tanh(given[:, 2 * units :] + reset) + z * h
    return outputs, h


def _gru(steps: int, batch: int, width: int, units: int, both: bool, after: bool) -> Example:
    shapes = [(steps, batch, width), (batch, units), (width, 3 * units), (units, 3 * units)]
    shapes.append((2, 3 * units) if both else (3 * units,))
    return Example(
        "loop",
        lambda *given: fr.nn.gru(*given, reset_after=after),
        tuple(normal(*shape, seed=seed) for seed, shape in enumerate(shapes)),
        lambda *given: recurrent(*given, after),
        margin=1e-5,
        open_sizes=False,  # the weights' are known
        note=f"gru-{steps}-{both}-{after}",
    )


MANY = attention.KEPT + 1
LAYERS = [
    Example(
        "softmax",
        fr.nn.attention,
        (normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 5, 2, seed=2)),
        attended,
        note="attention",
    ),
    Example(
        "weighted",
        fr.nn.attention,
        (normal(attention.BLOCK + 1, 2), normal(MANY, 2, seed=1), normal(MANY, 1, seed=2), normal(MANY, seed=3)),
        attended,
        margin=1e-5,
        open_sizes=False,  # else it is one block
    ),
    *[_gru(3, 2, 4, 5, both, after) for both in (False, True) for after in (False, True)],
    _gru(0, 2, 4, 5, False, True),
    _gru(2, 0, 4, 5, True, False),
]
