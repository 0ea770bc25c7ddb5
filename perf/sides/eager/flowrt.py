"""flowrt's side of perf/eager.py: ops on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from sides import harness
from sides.eager import data as d

import flowrt as fr

strided, positive = d.x[:, ::2], d.x > 0


def network() -> Any:
    hidden = fr.relu(fr.add(fr.matmul(d.x, d.w1), d.b1))
    logits = fr.add(fr.matmul(fr.tanh(fr.multiply(hidden, 0.5)), d.w2), d.b2)
    return fr.mean(fr.nn.softmax_cross_entropy(logits, d.labels))


OPS = {
    "network": network,
    "add": lambda: fr.add(d.x, d.b1),
    "scale": lambda: fr.multiply(d.x, 0.5),
    "mixed": lambda: fr.add(d.x, d.whole),
    "strided": lambda: fr.relu(strided),
    "matmul": lambda: fr.matmul(d.x, d.w1),
    "einsum": lambda: fr.einsum("ij,jk->ik", d.x, d.w1),
    "relu": lambda: fr.relu(d.x),
    "softmax": lambda: fr.nn.softmax(d.x),
    "layer_norm": lambda: fr.nn.layer_norm(d.x, d.scale, d.offset),
    "cross_entropy": lambda: fr.nn.softmax_cross_entropy(d.logits, d.labels),
    "sum": lambda: fr.sum(d.x, axis=-1),
    "reshape": lambda: fr.reshape(d.x, (64, 32)),
    "transpose": lambda: fr.transpose(d.x),
    "concat": lambda: fr.concat([d.x, d.y], axis=-1),
    "take": lambda: fr.take(d.x, d.rows),
    "where": lambda: fr.where(positive, d.x, 0.0),
    "conv2d": lambda: fr.nn.conv2d(d.image, d.filters),
    "max_pool": lambda: fr.nn.max_pool2d(d.image, 2),
    "normal": lambda: fr.random.normal((32, 64)),
    "large": lambda: fr.add(d.large, d.vector),
}

if __name__ == "__main__":
    harness.main(d.sides(OPS, np.asarray))
