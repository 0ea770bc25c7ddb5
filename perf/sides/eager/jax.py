"""JAX's side of perf/eager.py: functions of jax.numpy and jax.nn, each dispatched by itself."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sides import harness
from sides.eager import data as d

NAMES = ("x", "y", "scale", "offset", "w1", "b1", "w2", "b2", "logits", "whole", "large", "vector", "labels", "rows")
x, y, scale, offset, w1, b1, w2, b2, logits, whole, large, vector, labels, rows = (
    jnp.asarray(getattr(d, name)) for name in NAMES
)
image, filters, positive = jnp.asarray(d.image), jnp.asarray(d.filters), x > 0
keys = itertools.cycle(jax.random.split(jax.random.key(0), 64))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]


def network() -> Any:
    hidden = jax.nn.relu(x @ w1 + b1)
    return cross_entropy(jnp.tanh(hidden * 0.5) @ w2 + b2, labels).mean()


def layer_norm() -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + offset


OPS = {
    "network": network,
    "add": lambda: x + b1,
    "scale": lambda: x * 0.5,
    "mixed": lambda: x + whole,
    "strided": lambda: jax.nn.relu(x[:, ::2]),  # no array of its is strided
    "matmul": lambda: x @ w1,
    "einsum": lambda: jnp.einsum("ij,jk->ik", x, w1),
    "relu": lambda: jax.nn.relu(x),
    "softmax": lambda: jax.nn.softmax(x),
    "layer_norm": layer_norm,
    "cross_entropy": lambda: cross_entropy(logits, labels),
    "sum": lambda: jnp.sum(x, axis=-1),
    "reshape": lambda: jnp.reshape(x, (64, 32)),
    "transpose": lambda: jnp.transpose(x),
    "concat": lambda: jnp.concatenate([x, y], axis=-1),
    "take": lambda: jnp.take(x, rows, axis=0),
    "where": lambda: jnp.where(positive, x, 0.0),
    "conv2d": lambda: jax.lax.conv_general_dilated(
        image, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "max_pool": lambda: jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "normal": lambda: jax.random.normal(next(keys), (32, 64)),
    "large": lambda: large + vector,
}

if __name__ == "__main__":
    harness.main(d.sides(OPS, np.asarray))
