"""JAX's side of perf/loops.py: jax.jit with lax.while_loop, lax.scan, lax.cond, lax.map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sides import harness as h
from sides.harness import Settings, Side
from sides.loops import data as d

I32 = np.int32


def _compiled(function: Callable[..., Any], *values: Any, work: int) -> Side:
    h.imported()
    on_device, jitted = [jnp.asarray(v) for v in values], jax.jit(function)

    def step() -> Any:
        answer = jitted(*on_device)
        jax.block_until_ready(answer)
        return np.asarray(answer[0] if isinstance(answer, tuple) else answer)

    return Side(step, work=work)


def scalars(a: Settings) -> Side:
    def f(n: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + c[0]), (I32(0), I32(0)))[1]

    return _compiled(f, I32(d.TURNS), work=d.TURNS)


def rotation(a: Settings) -> Side:
    def f(x: Any, m: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < d.TURNS, lambda c: (c[0] + 1, c[1] @ m), (0, x))[1]

    return _compiled(f, np.ones((1, d.SIDE), np.float32), d.rotation(), work=d.TURNS)


def power(a: Settings) -> Side:
    def f(x: Any, m: Any) -> Any:
        def turn(c: Any) -> Any:
            w = m @ c[1]
            return c[0] + 1, w / jnp.sqrt(jnp.sum(w * w))

        return jnp.sum(jnp.abs(jax.lax.while_loop(lambda c: c[0] < d.POWER_TURNS, turn, (0, x))[1]))

    return _compiled(f, np.ones(d.MATRIX, np.float32), d.symmetric(), work=d.POWER_TURNS)


def newton(a: Settings) -> Side:
    def f(numbers: Any) -> Any:
        def goes_on(c: Any) -> Any:
            i, x = c
            return (i < d.NEWTON_TURNS) & (jnp.max(jnp.abs(x * x * x - numbers)) >= 0.0)

        def turn(c: Any) -> Any:
            i, x = c
            return i + 1, x - (x * x * x - numbers) / (3 * x * x)

        return jax.lax.while_loop(goes_on, turn, (0, numbers))[1]

    return _compiled(f, d.numbers(), work=d.NEWTON_TURNS)


def collatz(a: Settings) -> Side:
    def follow(n: Any) -> Any:
        def turn(c: Any) -> Any:
            return jax.lax.cond(c[0] % 2 == 0, lambda x: x // 2, lambda x: 3 * x + 1, c[0]), c[1] + 1

        return jax.lax.while_loop(lambda c: c[0] != 1, turn, (n, I32(0)))[1]

    def f(most: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] + 1, c[1] + follow(c[0])), (I32(1), I32(0)))[1]

    return _compiled(f, I32(d.COLLATZ), work=d.COLLATZ)


def chase(a: Settings) -> Side:
    def f(table: Any, n: Any) -> Any:
        turn = lambda c: (c[0] + 1, table[(c[1] + c[0]) % d.TABLE])  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < n, turn, (I32(0), I32(0)))[1]

    return _compiled(f, d.table(), I32(d.LONG), work=d.LONG)


def histogram(a: Settings) -> Side:
    def turn(bins: Any, number: Any) -> Any:
        bins = bins + (jnp.arange(d.BINS) == number).astype(jnp.int32)
        return bins, jnp.max(bins)

    return _compiled(lambda x: jax.lax.scan(turn, jnp.zeros(d.BINS, jnp.int32), x)[1], d.binned(), work=d.LONG)


def sines(a: Settings) -> Side:
    def f(x: Any) -> Any:
        turn = lambda c: (c[0] + 1, c[1] * 0.99 + jnp.sin(c[1]) * 0.1)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < d.SINES, turn, (0, x))[1]

    return _compiled(f, d.few(), work=d.SINES)


def squares(a: Settings) -> Side:
    def f(m: Any) -> Any:
        turn = lambda c: (c[0] + 1, jnp.tanh(c[1] @ m))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < d.SQUARES, turn, (0, m))[1]

    return _compiled(f, d.square(), work=d.SQUARES)


def branching(a: Settings) -> Side:
    def f(x: Any, y: Any) -> Any:
        def turn(c: Any) -> Any:
            return c[0] + 1, jax.lax.cond(jnp.sum(c[1]) > 0, lambda v: v - x, lambda v: v + y, c[1])

        return jax.lax.while_loop(lambda c: c[0] < d.BRANCHING, turn, (0, x))[1]

    x, _ = d.rows()
    return _compiled(f, np.abs(x[0]), np.abs(x[1]), work=d.BRANCHING)


def mapped(a: Settings) -> Side:
    return _compiled(lambda xs, m: jax.lax.map(lambda x: jnp.tanh(x @ m), xs), *d.rows(), work=d.ROWS)


def _with_gradients(loss: Callable[..., Any], gradient: bool) -> Callable[..., Any]:
    return jax.value_and_grad(loss, (1, 2)) if gradient else loss


def _lstm(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def loss(x: Any, w: Any, u: Any) -> Any:
        def turn(carry: Any, row: Any) -> Any:
            hidden, c = carry
            i, f, g, o = jnp.split(row @ w + hidden @ u, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (hidden, c), hidden

        zero = jnp.zeros((size.batch, size.units), jnp.float32)
        return jnp.sum(jax.lax.scan(turn, (zero, zero), x)[1])

    return lambda a: _compiled(_with_gradients(loss, gradient), *d.cell(size, 4), work=size.steps)


def _gru(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def loss(x: Any, w: Any, u: Any) -> Any:
        def turn(hidden: Any, row: Any) -> Any:
            z, r, n = jnp.split(row @ w, 3, axis=1)
            hz, hr, hn = jnp.split(hidden @ u, 3, axis=1)
            update = jax.nn.sigmoid(z + hz)
            fresh = jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn)
            hidden = (1 - update) * fresh + update * hidden
            return hidden, hidden

        return jnp.sum(jax.lax.scan(turn, jnp.zeros((size.batch, size.units), jnp.float32), x)[1])

    return lambda a: _compiled(_with_gradients(loss, gradient), *d.cell(size, 3), work=size.steps)


def decoder(a: Settings) -> Side:
    """Over all of its cache, most of it masked: shapes may not change."""

    def f(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
        def token(t: Any, carried: Any) -> Any:
            (row, cache), seen = carried, jnp.arange(d.TOKENS) <= t
            for layer in range(d.LAYERS):
                q, k, v = jnp.split(row @ qkv[layer], 3, axis=1)
                cache = cache.at[layer, :, :, t].set(jnp.stack([k, v]))
                keys, values = cache[layer]
                scores = jnp.where(seen, jnp.einsum("bm,btm->bt", q, keys) * d.MODEL**-0.5, -1e9)
                row = row + jnp.einsum("bt,btm->bm", jax.nn.softmax(scores), values) @ out[layer]
                row = row + jnp.tanh(row @ up[layer]) @ down[layer]
            return jnp.tanh(row), cache

        cache = jnp.zeros((d.LAYERS, 2, d.BATCH, d.TOKENS, d.MODEL), jnp.float32)
        return jnp.sum(jax.lax.fori_loop(0, d.TOKENS, token, (x, cache))[0])

    return _compiled(f, *d.decoder(), work=d.TOKENS)


WORKLOADS: dict[str, Callable[[Settings], Side]] = {
    "scalars": scalars, "rotation": rotation, "power": power, "newton": newton, "collatz": collatz,
    "branching": branching, "mapped": mapped, "chase": chase, "histogram": histogram, "sines": sines,
    "squares": squares, "decoder": decoder,
    "lstm": _lstm(d.CELL, False), "lstm-back": _lstm(d.CELL, True), "large": _lstm(d.LARGE, False),
    "large-back": _lstm(d.LARGE, True), "gru": _gru(d.GRU, False), "gru-back": _gru(d.GRU, True),
}  # fmt: skip

if __name__ == "__main__":
    h.main(WORKLOADS)
