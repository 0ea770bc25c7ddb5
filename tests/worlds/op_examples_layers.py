"""Examples of layers and of what is made for them; see `op_examples`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from example import Example, integers, normal

import flowrt.ops as fr
from flowrt.ops import attention, quantize


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


def spread(
    x: np.ndarray, filters: np.ndarray, strides: Any, edges: Any, dilations: Any, groups: int, sizes: Any
) -> np.ndarray:
    """The transpose of a convolution: each entry of ``x`` times the filters, added where these lie in the result."""
    (top, _), (left, _) = edges
    (count, high, wide, channels), (rows, columns, few, _) = x.shape, filters.shape
    whole = np.zeros((count, sizes[0] + sum(edges[0]), sizes[1] + sum(edges[1]), few * groups), x.dtype)
    for i, j, r, c, n in itertools.product(*map(range, (high, wide, rows, columns, channels))):
        group = n // (channels // groups)
        at = i * strides[0] + r * dilations[0], j * strides[1] + c * dilations[1]
        whole[:, at[0], at[1], group * few : (group + 1) * few] += x[:, i, j, n, None] * filters[r, c, :, n]
    return whole[:, top : top + sizes[0], left : left + sizes[1]]


def _transposed(
    images: tuple[int, ...], filters: tuple[int, ...], edges: Any, sizes: tuple[int, int], note: str, **how: Any
) -> Example:
    """An example of `conv2d_transpose`; ``edges`` is what its padding comes to."""
    steps, spacing = how.get("strides", (1, 1)), how.get("dilations", (1, 1))
    return Example(
        "conv2d_input_grad",
        lambda x, w: fr.nn.conv2d_transpose(x, w, **how),
        (normal(*images), normal(*filters, seed=1)),
        lambda x, w: spread(x, w, steps, edges, spacing, how.get("groups", 1), sizes),
        margin=1e-5,
        note=f"transpose-{note}",
    )


NONE = ((0, 0), (0, 0))
TRANSPOSED = [
    _transposed((2, 3, 4, 2), (3, 3, 3, 2), ((1, 1), (1, 1)), (3, 4), "same"),
    _transposed((1, 3, 2, 2), (4, 4, 1, 2), ((1, 1), (1, 1)), (6, 4), "same-stride", strides=(2, 2)),
    _transposed((1, 2, 3, 2), (3, 2, 2, 2), ((0, 1), (0, 0)), (4, 6), "same-odd", strides=(2, 2)),
    _transposed((1, 2, 3, 4), (3, 2, 3, 4), NONE, (5, 8), "valid", strides=(2, 3), padding="VALID", groups=2),
    _transposed(
        (1, 2, 3, 1), (2, 3, 2, 1), ((1, 0), (2, 1)), (5, 4), "explicit",
        strides=(2, 1), dilations=(3, 2), padding=((1, 0), (2, 1)), output_padding=(0, 0),
    ),
    _transposed(
        (1, 2, 2, 2), (3, 3, 1, 2), ((1, 1), (1, 1)), (4, 5), "padded",
        strides=(2, 3), padding=((1, 1), (1, 1)), output_padding=(1, 1),
    ),
    _transposed((1, 2, 2, 1), (3, 3, 2, 1), ((1, 1), (1, 1)), (3, 3), "shape", strides=(2, 2), output_shape=(3, 3)),
    _transposed((0, 2, 2, 1), (3, 3, 2, 1), ((0, 1), (0, 1)), (4, 4), "none", strides=(2, 2)),
]  # fmt: skip


def _of_bytes(left: tuple[int, ...], right: tuple[int, ...], note: str) -> Example:
    return Example(
        "matmul_int8",
        quantize.matmul_int8,
        (integers(*left, low=-128, high=128, dtype="int8"), integers(*right, low=-128, high=128, dtype="int8", seed=1)),
        lambda a, b: a.astype("int32") @ b.astype("int32").swapaxes(-1, -2),
        note=note,
    )


BYTES = [
    _of_bytes((3, 70), (5, 70), "few"),
    _of_bytes((1, 1), (1, 1), "one"),
    _of_bytes((4, 1500), (67, 1500), "long"),
    _of_bytes((2, 20, 33), (9, 33), "many"),
    _of_bytes((40, 1025), (2, 1025), "many-long"),
    _of_bytes((2, 1, 3, 4), (5, 2, 4), "batches"),
    _of_bytes((2, 0), (3, 0), "no-terms"),
    _of_bytes((0, 3), (2, 3), "no-rows"),
]


@fr.custom_gradient
def squared(x: Any) -> tuple[Any, Any]:
    return fr.square(x), lambda dy: dy * x * 2.0


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
    *TRANSPOSED,
    *BYTES,
    Example("with_gradient", squared, (normal(3, 2),), np.square),
]
