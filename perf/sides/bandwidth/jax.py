"""JAX's side of bandwidth.py: one compiled function a case."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(os.environ["THREADS"])])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from sides.bandwidth.cases import Array, Case, report  # noqa: E402

jax.config.update("jax_platforms", "cpu")


def normal(x: Any, axes: Any) -> Any:
    centred = x - jnp.mean(x, axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axes, keepdims=True) + 1e-5)


def pooled(x: Any, start: float, reduction: Any, window: int, stride: int, padding: Any = "VALID") -> Any:
    return jax.lax.reduce_window(x, start, reduction, (1, window, window, 1), (1, stride, stride, 1), padding)


def lstm(x: Any, h: Any, c: Any, w_x: Any, w_h: Any, bias: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ w_h, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (h, c), x @ w_x + bias)[1]


def dropout(x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x / 0.9, 0.0)


def class_entropy(x: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1)[:, 0]


EDGES = ((0, 0), (1, 1), (1, 1), (0, 0))
PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "batch_norm": lambda x, scale, offset: normal(x, tuple(range(x.ndim - 1))) * scale + offset,
    "layer_norm": lambda x, scale, offset: normal(x, -1) * scale + offset,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "dropout": dropout,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "class_entropy": class_entropy,
    "entropy": lambda x, labels: -jnp.sum(labels * jax.nn.log_softmax(x), -1),
    "max_pool": lambda x: pooled(x, -jnp.inf, jax.lax.max, 2, 2),
    "avg_pool": lambda x: pooled(x, 0.0, jax.lax.add, 2, 2) / 4,
    "max_pool_3_by_2": lambda x: pooled(x, -jnp.inf, jax.lax.max, 3, 2, EDGES),
    "sum_0": lambda x: x.sum(0),
    "sum_1": lambda x: x.sum(1),
    "sum_all": lambda x: x.sum(),
    "mean_0": lambda x: x.mean(0),
    "mean_1": lambda x: x.mean(1),
    "mean_all": lambda x: x.mean(),
    "max_0": lambda x: x.max(0),
    "max_1": lambda x: x.max(1),
    "max_all": lambda x: x.max(),
    "var_0": lambda x: x.var(0),
    "var_1": lambda x: x.var(1),
    "var_all": lambda x: x.var(),
    "cumsum_0": lambda x: x.cumsum(0),
    "cumsum_1": lambda x: x.cumsum(1),
    "bias_add": jnp.add,
    "take": lambda table, ids: table[ids],
    "scatter_add": lambda updates, ids: jnp.zeros((8192, updates.shape[1])).at[ids].add(updates),
    "segment_sum": lambda x, ids: jax.ops.segment_sum(x, ids, 2048),
    "lstm": lstm,
    "concat_0": lambda x, y: jnp.concatenate([x, y], 0),
    "concat_1": lambda x, y: jnp.concatenate([x, y], 1),
    "pad": lambda x: jnp.pad(x, EDGES),
    "transpose": lambda x: x.T.copy(),
    "to_nchw": lambda x: x.transpose(0, 3, 1, 2),
    "heads": lambda x: x.transpose(0, 2, 1, 3),
}


def make(case: Case, values: Sequence[Array]) -> tuple[Callable[[], Any], Callable[[], Sequence[Any]]]:
    given, program = [jnp.asarray(a) for a in values], PROGRAMS[case.program]

    def forward(*given: Any) -> Sequence[Any]:
        return [program(*given)]

    def backward(*given: Any) -> Sequence[Any]:
        *taken, dy = given

        def of(*sources: Any) -> Any:
            placed = list(taken)
            for n, source in zip(case.of, sources, strict=True):
                placed[n] = source
            return program(*placed)

        y, back = jax.vjp(of, *(taken[n] for n in case.of))
        return [y, *back(dy)]

    compiled = jax.jit(backward if case.of else forward)
    return lambda: jax.block_until_ready(compiled(*given)), lambda: compiled(*given)


if __name__ == "__main__":
    report(make)
