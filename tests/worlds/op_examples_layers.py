"""Examples of layers and of what is made for them; see `op_examples`."""

from __future__ import annotations

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
]
