"""JAX's side: jax.jit with donated parameters and state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side


def _pinned(a: Settings) -> None:
    if a.threads == 1:  # XLA sizes its pool by the processor's cores
        os.sched_setaffinity(0, {0})
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")  # products of float32 are of float32
    if a.device and jax.default_backend() != "gpu":
        raise SystemExit("this JAX sees no GPU: CUDA=1 scripts/peers jax installs one that may")


def overhead(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    h.imported()
    on_device = jnp.asarray(h.VECTOR)

    def f(x: Any) -> Any:
        return x * 2.0 + 1.0

    if a.variant == "aot":
        compiled = jax.jit(f).lower(on_device).compile()
        return Side(lambda: np.asarray(compiled(on_device)), notes="device array in, made once")
    jitted = jax.jit(f)
    return Side(lambda: np.asarray(jitted(h.VECTOR)))


def loop(a: Settings) -> Side:
    import jax

    h.imported()

    @jax.jit
    def f(n: Any) -> Any:
        start = (np.int32(0), np.int32(0))
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + c[0]), start)[1]

    n = np.int32(h.ITERATIONS)
    return Side(lambda: int(f(n)), work=h.ITERATIONS)


def _trained(
    loss_of: Callable[..., Any], parameters: list[np.ndarray], rate: float, batch: tuple[np.ndarray, ...]
) -> Side:
    """Steps of SGD with momentum on one batch."""
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(p: Any, m: Any, *batch: Any) -> Any:
        loss, g = jax.value_and_grad(loss_of)(p, *batch)
        m = [h.MOMENTUM * a + b for a, b in zip(m, g, strict=True)]
        return [a - rate * b for a, b in zip(p, m, strict=True)], m, loss

    p = [jnp.asarray(v) for v in parameters]
    m = [jnp.zeros_like(v) for v in p]

    def step() -> float:
        nonlocal p, m
        p, m, loss = train(p, m, *batch)
        jax.block_until_ready(p)
        return float(loss)

    return Side(step)


def _trained_by_adam(loss_of: Callable[..., Any], parameters: list[np.ndarray], batch: tuple[np.ndarray, ...]) -> Side:
    """Steps of Adam, as optax has it, on one batch."""
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(p: Any, m: Any, s: Any, t: Any, *batch: Any) -> Any:
        loss, g = jax.value_and_grad(loss_of)(p, *batch)
        m = [h.BETA1 * a + (1 - h.BETA1) * b for a, b in zip(m, g, strict=True)]
        s = [h.BETA2 * a + (1 - h.BETA2) * b * b for a, b in zip(s, g, strict=True)]
        one, two = 1 - h.BETA1**t, 1 - h.BETA2**t
        p = [
            a - h.ADAM_RATE * (b / one) / (jnp.sqrt(c / two) + h.ADAM_EPSILON) for a, b, c in zip(p, m, s, strict=True)
        ]
        return p, m, s, loss

    p = [jnp.asarray(v) for v in parameters]
    m, s = ([jnp.zeros_like(v) for v in p] for _ in range(2))
    steps = itertools.count(1)

    def step() -> float:
        nonlocal p, m, s
        p, m, s, loss = train(p, m, s, np.float32(next(steps)), *batch)
        jax.block_until_ready(p)
        return float(loss)

    return Side(step)


def mlp(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters = h.mlp_batch(a.batch), h.mlp()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        z = jax.nn.relu(x @ p[0] + p[1])
        z = jax.nn.relu(z @ p[2] + p[3])
        logp = jax.nn.log_softmax(z @ p[4] + p[5])
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return _trained(loss_of, parameters, h.MLP_RATE, batch)


def cnn(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    layout = a.variant.upper()
    nhwc = layout == "NHWC"
    batch, parameters = h.cnn_batch(layout), h.cnn(layout)
    h.imported()
    dims = ("NHWC", "HWIO", "NHWC") if nhwc else ("NCHW", "OIHW", "NCHW")
    window = (1, 2, 2, 1) if nhwc else (1, 1, 2, 2)

    def conv(x: Any, k: Any, b: Any) -> Any:
        z = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)
        return jax.nn.relu(z + (b if nhwc else b[:, None, None]))

    def pool(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        k1, b1, k2, b2, w3, b3, w4, b4 = p
        z = pool(conv(pool(conv(x, k1, b1)), k2, b2))
        z = jax.nn.relu(z.reshape(z.shape[0], -1) @ w3 + b3)
        logp = jax.nn.log_softmax(z @ w4 + b4)
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return _trained(loss_of, parameters, h.CNN_RATE, batch)


def lstm(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters = h.lstm_batch(), h.lstm()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        wx, wh, b, wo, bo = p

        def cell(state: Any, xt: Any) -> Any:
            hidden, c = state
            i, f, g, o = jnp.split(xt + hidden @ wh, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (hidden, c), hidden

        zero = jnp.zeros((x.shape[1], h.LSTM_UNITS), jnp.float32)
        unroll = 8 if a.variant == "scan8" else 1
        outputs = jax.lax.scan(cell, (zero, zero), x @ wx + b, unroll=unroll)[1]
        logp = jax.nn.log_softmax(outputs @ wo + bo)
        return -jnp.take_along_axis(logp, y[..., None], 2).mean()

    return _trained(loss_of, parameters, h.LSTM_RATE, batch)


def embedding(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batches, parameters = itertools.cycle(h.embedding_batches()), h.embeddings()
    h.imported()

    def head(rows: Any, w: Any, b: Any, y: Any) -> Any:
        z = rows.mean(1) @ w + b
        return jnp.mean(jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))))

    def adagrad(v: Any, acc: Any, g: Any) -> Any:
        acc = acc + g * g
        return v - h.EMBEDDING_RATE * g / (jnp.sqrt(acc) + h.EPSILON), acc

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(p: Any, acc: Any, ids: Any, y: Any) -> Any:
        """Gradients of the gathered rows; duplicates summed with unique and segment_sum; scattered in place."""
        table, w, b = p
        loss, (rows, gw, gb) = jax.value_and_grad(head, (0, 1, 2))(table[ids], w, b, y)
        u, inverse = jnp.unique(ids.reshape(-1), size=ids.size, fill_value=table.shape[0], return_inverse=True)
        g = jax.ops.segment_sum(rows.reshape(-1, h.WIDTH), inverse.reshape(-1), ids.size)
        c = acc[0].at[u].get(mode="fill", fill_value=1.0) + g * g
        moved = -h.EMBEDDING_RATE * g / (jnp.sqrt(c) + h.EPSILON)
        table = table.at[u].add(moved, mode="drop", unique_indices=True)
        first = acc[0].at[u].set(c, mode="drop", unique_indices=True)
        (w, aw), (b, ab) = adagrad(w, acc[1], gw), adagrad(b, acc[2], gb)
        return [table, w, b], [first, aw, ab], loss

    p = [jnp.asarray(v) for v in parameters]
    acc = [jnp.full(v.shape, h.ACCUMULATOR) for v in p]

    def step() -> float:
        nonlocal p, acc
        p, acc, loss = train(p, acc, *next(batches))
        jax.block_until_ready(p)
        return float(loss)

    return Side(step)


def normed(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters = h.normed_batch(), h.normed()
    h.imported()

    def loss_of(p: Any, z: Any, y: Any) -> Any:
        *hidden, w, b = p
        for v, c, scale, offset in zip(*[iter(hidden)] * 4, strict=True):
            z = z @ v + c
            z = (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5) * scale + offset
            z = jax.nn.gelu(z, approximate=False)
        logp = jax.nn.log_softmax(z @ w + b)
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return _trained_by_adam(loss_of, parameters, batch)


def residual(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters = h.residual_batch(), h.residual()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        def layer(x: Any, which: int, strides: int = 1) -> Any:
            k, scale, offset = p[3 * which : 3 * which + 3]
            z = jax.lax.conv_general_dilated(
                x, k, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return (z - z.mean((0, 1, 2))) * jax.lax.rsqrt(z.var((0, 1, 2)) + 1e-5) * scale + offset

        z = jax.nn.relu(layer(x, 0))
        z = jax.nn.relu(layer(jax.nn.relu(layer(z, 1, 2)), 2) + layer(z, 3, 2))
        logp = jax.nn.log_softmax(z.mean((1, 2)) @ p[12] + p[13])
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return _trained(loss_of, parameters, h.RESIDUAL_RATE, batch)


def gru(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters = h.lstm_batch(), h.gru()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        w_x, w_h, b_x, b_h, w_out, b_out = p

        def cell(state: Any, given: Any) -> Any:
            r, z, n = jnp.split(given, 3, axis=1)
            own_r, own_z, own_n = jnp.split(state @ w_h + b_h, 3, axis=1)
            z = jax.nn.sigmoid(z + own_z)
            state = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + own_r) * own_n) + z * state
            return state, state

        zero = jnp.zeros((x.shape[1], h.LSTM_UNITS), jnp.float32)
        logp = jax.nn.log_softmax(jax.lax.scan(cell, zero, x @ w_x + b_x)[1] @ w_out + b_out)
        return -jnp.take_along_axis(logp, y[..., None], 2).mean()

    return _trained(loss_of, parameters, h.GRU_RATE, batch)


def power(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    matrix, first = h.power()
    h.imported()

    @jax.jit
    def f(m: Any, v: Any) -> Any:
        def turn(c: Any) -> Any:
            w = m @ c[1]
            norm = jnp.sqrt(jnp.sum(w * w))
            return c[0] + 1, w / norm, norm

        return jax.lax.while_loop(lambda c: c[0] < h.POWER_TURNS, turn, (np.int32(0), v, np.float32(0)))[2]

    return Side(lambda: float(f(matrix, first)))


def bodies(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    given = h.points()
    h.imported()

    @jax.jit
    def f(x: Any, v: Any, m: Any) -> Any:
        def turn(_: Any, c: Any) -> Any:
            x, v = c
            d = x[None] - x[:, None]
            squares = jnp.sum(d * d, -1) + h.SOFTENING
            pull = m * jax.lax.rsqrt(squares) / squares
            v = v + jnp.sum(d * pull[..., None], 1) * h.POINT_TIME
            return x + v * h.POINT_TIME, v

        _, v = jax.lax.fori_loop(0, h.POINT_TURNS, turn, (x, v))
        return jnp.sum(m[:, None] * v * v)

    return Side(lambda: float(f(*given)))


def heat(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    first = h.grid()
    h.imported()

    @jax.jit
    def f(u: Any) -> Any:
        def turn(_: Any, u: Any) -> Any:
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4.0 * u[1:-1, 1:-1]
            return u + h.GRID_RATE * jnp.pad(around, 1)

        u = jax.lax.fori_loop(0, h.GRID_TURNS, turn, u)
        return jnp.sum(u * u)

    return Side(lambda: float(f(first)))


def columns(a: Settings) -> Side:
    _pinned(a)
    import jax

    given = h.columns()
    h.imported()

    @jax.jit
    def f(x: Any, weights: Any) -> Any:
        return jax.nn.softmax(x, 0) * weights

    return Side(lambda: np.asarray(f(*given)))


def pooled(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    given = h.pooled()
    h.imported()

    def weighted(x: Any, slopes: Any) -> Any:
        largest = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.sum(largest * largest * slopes)

    f = jax.jit(jax.grad(weighted))
    return Side(lambda: np.asarray(f(*given)))


def gpt(a: Settings) -> Side:
    _pinned(a)
    import jax
    import jax.numpy as jnp

    batch, parameters, mask = h.gpt_batch(), h.gpt(), h.gpt_mask()
    heads, width = h.GPT_HEADS, h.GPT_WIDTH
    h.imported()

    def norm(z: Any, scale: Any, offset: Any) -> Any:
        return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5) * scale + offset

    def attend(z: Any, w_qkv: Any, w_out: Any) -> Any:
        parted = (z @ w_qkv).reshape(*z.shape[:2], 3, heads, width // heads)
        q, k, v = (parted[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        scores = q @ k.transpose(0, 1, 3, 2) * (heads / width) ** 0.5 + mask
        mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3)
        return mixed.reshape(z.shape) @ w_out

    def loss_of(p: Any, words: Any, following: Any) -> Any:
        table, places, *layers, scale, offset, w = p
        z = table[words] + places
        for s1, o1, w_qkv, w_out, s2, o2, w_up, w_down in zip(*[iter(layers)] * 8, strict=True):
            z = z + attend(norm(z, s1, o1), w_qkv, w_out)
            z = z + jax.nn.gelu(norm(z, s2, o2) @ w_up, approximate=False) @ w_down
        logp = jax.nn.log_softmax(norm(z, scale, offset) @ w)
        return -jnp.take_along_axis(logp, following[..., None], 2).mean()

    return _trained_by_adam(loss_of, parameters, batch)


if __name__ == "__main__":
    h.main(h.named(globals()))
