"""flowrt's side of perf/loops.py."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side
from sides.loops import data as d

import flowrt as fr


def _compiled(a: Settings, build: Callable[..., Any], *values: np.ndarray, work: int) -> Side:
    """A step that computes ``build`` of the values, all of them fed."""
    h.imported()
    with fr.Graph() as graph:
        feeds = [fr.placeholder(v.dtype, v.shape) for v in values]
        fetches = build(*feeds)
    session = fr.BlockingSession(graph, options=fr.Options(threads=a.threads)).__enter__()
    atexit.register(session.__exit__, None, None, None)
    step = session.compile(fetches, feeds)
    return Side(lambda: first(step(*values)), work=work)


def first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, (tuple, list)) else answer


def scalars(a: Settings) -> Side:
    def build(n: Any) -> Any:
        zero = fr.constant(0, "int32")
        return fr.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (zero, zero))[1]

    return _compiled(a, build, np.asarray(d.TURNS, np.int32), work=d.TURNS)


def rotation(a: Settings) -> Side:
    def build(x: Any, m: Any) -> Any:
        return fr.while_loop(lambda i, y: i < d.TURNS, lambda i, y: (i + 1, y @ m), (0, x))[1]

    return _compiled(a, build, np.ones((1, d.SIDE), np.float32), d.rotation(), work=d.TURNS)


def power(a: Settings) -> Side:
    def build(x: Any, m: Any) -> Any:
        def turn(i: Any, v: Any) -> Any:
            w = fr.reshape(m @ fr.reshape(v, (d.MATRIX, 1)), (d.MATRIX,))
            return i + 1, w / fr.sqrt(fr.sum(w * w))

        return fr.sum(fr.abs(fr.while_loop(lambda i, v: i < d.POWER_TURNS, turn, (0, x))[1]))

    return _compiled(a, build, np.ones(d.MATRIX, np.float32), d.symmetric(), work=d.POWER_TURNS)


def newton(a: Settings) -> Side:
    def build(c: Any) -> Any:
        def goes_on(i: Any, x: Any) -> Any:
            return fr.logical_and(i < d.NEWTON_TURNS, fr.max(fr.abs(x * x * x - c)) >= 0.0)

        return fr.while_loop(goes_on, lambda i, x: (i + 1, x - (x * x * x - c) / (3 * x * x)), (0, c))[1]

    return _compiled(a, build, d.numbers(), work=d.NEWTON_TURNS)


def collatz(a: Settings) -> Side:
    def build(most: Any) -> Any:
        def follow(n: Any) -> Any:
            def turn(x: Any, k: Any) -> Any:
                return fr.cond(fr.equal(x % 2, 0), lambda: x // 2, lambda: 3 * x + 1), k + 1

            return fr.while_loop(lambda x, k: fr.not_equal(x, 1), turn, (n, fr.constant(0, "int32")))[1]

        start = (fr.constant(1, "int32"), fr.constant(0, "int32"))
        return fr.while_loop(lambda n, s: n < most, lambda n, s: (n + 1, s + follow(n)), start)[1]

    return _compiled(a, build, np.asarray(d.COLLATZ, np.int32), work=d.COLLATZ)


def chase(a: Settings) -> Side:
    def build(table: Any, n: Any) -> Any:
        zero = fr.constant(0, "int32")
        turn = lambda i, at: (i + 1, fr.take(table, (at + i) % d.TABLE))  # noqa: E731
        return fr.while_loop(lambda i, at: i < n, turn, (zero, zero))[1]

    return _compiled(a, build, d.table(), np.asarray(d.LONG, np.int32), work=d.LONG)


def histogram(a: Settings) -> Side:
    def build(numbers: Any) -> Any:
        def turn(bins: Any, number: Any) -> Any:
            bins = bins + fr.astype(fr.equal(fr.arange(d.BINS), number), "int32")
            return bins, fr.max(bins)

        return fr.scan(turn, fr.zeros((d.BINS,), "int32"), numbers)[1]

    return _compiled(a, build, d.binned(), work=d.LONG)


def sines(a: Settings) -> Side:
    def build(x: Any) -> Any:
        turn = lambda i, v: (i + 1, v * 0.99 + fr.sin(v) * 0.1)  # noqa: E731
        return fr.while_loop(lambda i, v: i < d.SINES, turn, (0, x))[1]

    return _compiled(a, build, d.few(), work=d.SINES)


def squares(a: Settings) -> Side:
    def build(m: Any) -> Any:
        turn = lambda i, v: (i + 1, fr.tanh(v @ m))  # noqa: E731
        return fr.while_loop(lambda i, v: i < d.SQUARES, turn, (0, m))[1]

    return _compiled(a, build, d.square(), work=d.SQUARES)


def branching(a: Settings) -> Side:
    def build(x: Any, y: Any) -> Any:
        def turn(i: Any, v: Any) -> Any:
            return i + 1, fr.cond(fr.sum(v) > 0, lambda: v - x, lambda: v + y)

        return fr.while_loop(lambda i, v: i < d.BRANCHING, turn, (0, x))[1]

    x, _ = d.rows()
    return _compiled(a, build, np.abs(x[0]), np.abs(x[1]), work=d.BRANCHING)


def mapped(a: Settings) -> Side:
    return _compiled(
        a,
        lambda xs, m: fr.map_fn(lambda x: fr.tanh(fr.reshape(fr.reshape(x, (1, d.WIDTH)) @ m, (d.WIDTH,))), xs),
        *d.rows(),
        work=d.ROWS,
    )


def _gates(z: Any, units: int, count: int) -> list[Any]:
    return [z[:, n * units : (n + 1) * units] for n in range(count)]


def _lstm(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def build(x: Any, w: Any, u: Any) -> Any:
        def turn(carry: Any, row: Any) -> Any:
            hidden, c = carry
            i, f, g, o = _gates(row @ w + hidden @ u, size.units, 4)
            c = fr.sigmoid(f) * c + fr.sigmoid(i) * fr.tanh(g)
            hidden = fr.sigmoid(o) * fr.tanh(c)
            return (hidden, c), hidden

        zero = fr.zeros((size.batch, size.units))
        return _with_gradients(fr.sum(fr.scan(turn, (zero, zero), x)[1]), [w, u], gradient)

    return lambda a: _compiled(a, build, *d.cell(size, 4), work=size.steps)


def _gru(size: d.Cell, gradient: bool) -> Callable[[Settings], Side]:
    def build(x: Any, w: Any, u: Any) -> Any:
        def turn(hidden: Any, row: Any) -> Any:
            z, r, n = _gates(row @ w, size.units, 3)
            hz, hr, hn = _gates(hidden @ u, size.units, 3)
            update = fr.sigmoid(z + hz)
            fresh = fr.tanh(n + fr.sigmoid(r + hr) * hn)
            hidden = (1 - update) * fresh + update * hidden
            return hidden, hidden

        return _with_gradients(fr.sum(fr.scan(turn, fr.zeros((size.batch, size.units)), x)[1]), [w, u], gradient)

    return lambda a: _compiled(a, build, *d.cell(size, 3), work=size.steps)


def _with_gradients(loss: Any, weights: Sequence[Any], gradient: bool) -> Any:
    return [loss, *fr.gradients(loss, list(weights))] if gradient else loss


def decoder(a: Settings) -> Side:
    def build(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
        def token(t: Any, row: Any, cache: Any) -> Any:
            kept, here = [], (fr.arange(d.TOKENS) == t)[:, None]
            for layer in range(d.LAYERS):
                q, k, v = (part[:, None] for part in _gates(row @ qkv[layer], d.MODEL, 3))
                keys, values = fr.where(here, k, cache[layer, 0]), fr.where(here, v, cache[layer, 1])
                scores = fr.matmul(q, keys[:, : t + 1], transpose_b=True) * d.MODEL**-0.5
                row = row + (fr.nn.softmax(scores) @ values[:, : t + 1])[:, 0] @ out[layer]
                row = row + fr.tanh(row @ up[layer]) @ down[layer]
                kept.append(fr.stack([keys, values]))
            return t + 1, fr.tanh(row), fr.stack(kept)

        cache = fr.zeros((d.LAYERS, 2, d.BATCH, d.TOKENS, d.MODEL))
        return fr.sum(fr.while_loop(lambda t, *_: t < d.TOKENS, token, (0, x, cache))[1])

    return _compiled(a, build, *d.decoder(), work=d.TOKENS)


WORKLOADS: dict[str, Callable[[Settings], Side]] = {
    "scalars": scalars, "rotation": rotation, "power": power, "newton": newton, "collatz": collatz,
    "branching": branching, "mapped": mapped, "chase": chase, "histogram": histogram, "sines": sines,
    "squares": squares, "decoder": decoder,
    "lstm": _lstm(d.CELL, False), "lstm-back": _lstm(d.CELL, True), "large": _lstm(d.LARGE, False),
    "large-back": _lstm(d.LARGE, True), "gru": _gru(d.GRU, False), "gru-back": _gru(d.GRU, True),
}  # fmt: skip

if __name__ == "__main__":
    h.main(WORKLOADS)
