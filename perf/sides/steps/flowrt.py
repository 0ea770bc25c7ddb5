"""flowrt's side: the programs a user would write, in a blocking session with compiled steps."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from sides import harness as h
from sides.harness import Settings, Side

import flowrt as fr


def _session(graph: fr.Graph, a: Settings, *, optimize: bool = True) -> fr.BlockingSession:
    """An open session, closed when the process ends."""
    devices: Any = {"devices": ("cpu:0", f"{a.device}:0")} if a.device else {}  # an older tree knows none
    options = fr.Options(optimize=optimize, threads=a.threads, **devices)
    session = fr.BlockingSession(graph, options=options).__enter__()
    atexit.register(session.__exit__, None, None, None)
    return session


def _device(a: Settings) -> AbstractContextManager[Any]:
    """What is built inside is on the device that is asked for, and raises where that cannot be."""
    return fr.device(f"{a.device}:0") if a.device else nullcontext()


def dispatch(a: Settings) -> Side:
    h.imported()
    reads = h.edges(a.shape)
    with fr.Graph() as graph:
        x, one = fr.placeholder("float32", (), name="x"), fr.constant(1.0, "float32")
        out: list[Any] = []
        for those in reads:
            sources = [out[j] for j in those] or [x]
            out.append(fr.add_n(sources) if len(sources) > 1 else fr.add(sources[0], one))
        ends = [out[j] for j in h.sinks(reads)]
        target = ends[0] if len(ends) == 1 else fr.add_n(ends)
    step, fed = _session(graph, a, optimize=False).compile(target, [x]), np.float32(1.0)
    return Side(lambda: step(fed), work=h.NODES, notes="optimize=False")


def overhead(a: Settings) -> Side:
    h.imported()
    with fr.Graph() as graph, _device(a):
        x = fr.placeholder("float32", (8,), name="x")
        y = x * 2.0 + 1.0
    step = _session(graph, a).compile(y, [x])
    return Side(lambda: step(h.VECTOR))


def loop(a: Settings) -> Side:
    h.imported()
    with fr.Graph() as graph:
        n = fr.placeholder("int32", (), name="n")
        zero = fr.constant(0, "int32")
        _, total = fr.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (zero, zero))
    step, fed = _session(graph, a).compile(total, [n]), np.int32(h.ITERATIONS)
    return Side(lambda: int(step(fed)), work=h.ITERATIONS)


def _trained(
    a: Settings,
    loss_of: Callable[..., Any],
    values: Sequence[np.ndarray],
    optimizer: fr.optim.Optimizer,
    batches: Callable[[], Sequence[np.ndarray]],
) -> Side:
    """Steps of ``optimizer`` on what ``batches`` answers; the first dimension of a batch is left open."""
    with fr.Graph() as graph, _device(a):
        feeds = [fr.placeholder(b.dtype, (None, *b.shape[1:])) for b in batches()]
        parameters = [fr.Variable(v, name=f"p{i}") for i, v in enumerate(values)]
        loss = loss_of(parameters, *feeds)
        train = optimizer.minimize(loss)
    step = _session(graph, a).compile([loss, train], feeds)
    return Side(lambda: float(step(*batches())[0]))


def mlp(a: Settings) -> Side:
    batch, values = h.mlp_batch(a.batch), h.mlp()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        z = fr.relu(x @ p[0] + p[1])
        z = fr.relu(z @ p[2] + p[3])
        return fr.mean(fr.nn.softmax_cross_entropy(z @ p[4] + p[5], y))

    return _trained(a, loss_of, values, fr.optim.Momentum(h.MLP_RATE, h.MOMENTUM), lambda: batch)


def cnn(a: Settings) -> Side:
    batch, values = h.cnn_batch(), h.cnn()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        k1, b1, k2, b2, w3, b3, w4, b4 = p
        z = fr.nn.max_pool2d(fr.relu(fr.nn.conv2d(x, k1) + b1))
        z = fr.nn.max_pool2d(fr.relu(fr.nn.conv2d(z, k2) + b2))
        z = fr.relu(fr.reshape(z, (-1, 8 * 8 * 64)) @ w3 + b3)
        return fr.mean(fr.nn.softmax_cross_entropy(z @ w4 + b4, y))

    return _trained(a, loss_of, values, fr.optim.Momentum(h.CNN_RATE, h.MOMENTUM), lambda: batch)


def lstm(a: Settings) -> Side:
    batch, values = h.lstm_batch(), h.lstm()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        w_x, w_h, bias, w_out, b_out = p
        zero = fr.zeros((h.LSTM_BATCH, h.LSTM_UNITS))
        outputs, _, _ = fr.nn.lstm(x, zero, zero, w_x, w_h, bias)
        return fr.mean(fr.nn.softmax_cross_entropy(outputs @ w_out + b_out, y))

    return _trained(a, loss_of, values, fr.optim.Momentum(h.LSTM_RATE, h.MOMENTUM), lambda: batch)


def embedding(a: Settings) -> Side:
    batches, values = itertools.cycle(h.embedding_batches()), h.embeddings()
    first = next(batches)
    pending = iter((first, first))  # one to look at its shapes, then the same again as the first batch
    h.imported()

    def loss_of(p: Any, ids: Any, y: Any) -> Any:
        table, w, b = p
        z = fr.mean(fr.nn.embedding_lookup(table, ids), axis=1) @ w + b
        return fr.mean(fr.nn.sigmoid_cross_entropy(z, y))

    optimizer = fr.optim.AdaGrad(h.EMBEDDING_RATE, h.ACCUMULATOR, h.EPSILON)
    return _trained(a, loss_of, values, optimizer, lambda: next(pending, None) or next(batches))


def normed(a: Settings) -> Side:
    batch, values = h.normed_batch(), h.normed()
    h.imported()

    def loss_of(p: Any, z: Any, y: Any) -> Any:
        *hidden, w, b = p
        for v, c, scale, offset in zip(*[iter(hidden)] * 4, strict=True):
            z = fr.gelu(fr.nn.layer_norm(z @ v + c, scale, offset))
        return fr.mean(fr.nn.softmax_cross_entropy(z @ w + b, y))

    return _trained(a, loss_of, values, fr.optim.Adam(h.ADAM_RATE), lambda: batch)


def residual(a: Settings) -> Side:
    batch, values = h.residual_batch(), h.residual()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        def layer(x: Any, which: int, strides: int = 1) -> Any:
            filters, scale, offset = p[3 * which : 3 * which + 3]
            return fr.nn.batch_norm(fr.nn.conv2d(x, filters, strides), scale, offset)[0]

        z = fr.relu(layer(x, 0))
        z = fr.relu(layer(fr.relu(layer(z, 1, 2)), 2) + layer(z, 3, 2))
        return fr.mean(fr.nn.softmax_cross_entropy(fr.mean(z, axis=(1, 2)) @ p[12] + p[13], y))

    return _trained(a, loss_of, values, fr.optim.Momentum(h.RESIDUAL_RATE, h.MOMENTUM), lambda: batch)


def gru(a: Settings) -> Side:
    batch, values = h.lstm_batch(), h.gru()
    h.imported()

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        w_x, w_h, b_x, b_h, w_out, b_out = p
        outputs, _ = fr.nn.gru(x, fr.zeros((h.LSTM_BATCH, h.LSTM_UNITS)), w_x, w_h, fr.stack([b_x, b_h]))
        return fr.mean(fr.nn.softmax_cross_entropy(outputs @ w_out + b_out, y))

    return _trained(a, loss_of, values, fr.optim.Momentum(h.GRU_RATE, h.MOMENTUM), lambda: batch)


def power(a: Settings) -> Side:
    matrix, first = h.power()
    h.imported()
    with fr.Graph() as graph:
        m, v = fr.placeholder("float32", matrix.shape), fr.placeholder("float32", first.shape)

        def turn(i: Any, v: Any, _: Any) -> Any:
            w = m @ v
            norm = fr.sqrt(fr.sum(fr.square(w)))
            return i + 1, w / norm, norm

        start = (fr.constant(0, "int32"), v, fr.constant(0.0, "float32"))
        _, _, value = fr.while_loop(lambda i, v, s: i < h.POWER_TURNS, turn, start)
    step = _session(graph, a).compile(value, [m, v])
    return Side(lambda: float(step(matrix, first)))


def bodies(a: Settings) -> Side:
    (x, v, m), shape = h.points(), (h.POINTS, 3)
    h.imported()
    with fr.Graph() as graph:
        px, pv = fr.placeholder("float32", shape), fr.placeholder("float32", shape)
        pm = fr.placeholder("float32", shape[:1])

        def turn(i: Any, x: Any, v: Any) -> Any:
            d = fr.expand_dims(x, 0) - fr.expand_dims(x, 1)
            squares = fr.sum(d * d, axis=-1) + h.SOFTENING
            pull = pm * fr.rsqrt(squares) / squares
            v = v + fr.sum(d * fr.expand_dims(pull, -1), axis=1) * h.POINT_TIME
            return i + 1, x + v * h.POINT_TIME, v

        start = (fr.constant(0, "int32"), px, pv)
        _, _, last = fr.while_loop(lambda i, x, v: i < h.POINT_TURNS, turn, start)
        energy = fr.sum(fr.expand_dims(pm, 1) * last * last)
    step = _session(graph, a).compile(energy, [px, pv, pm])
    return Side(lambda: float(step(x, v, m)))


def heat(a: Settings) -> Side:
    first = h.grid()
    h.imported()
    with fr.Graph() as graph:
        given = fr.placeholder("float32", first.shape)

        def turn(i: Any, u: Any) -> Any:
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4.0 * u[1:-1, 1:-1]
            return i + 1, u + h.GRID_RATE * fr.pad(around, ((1, 1), (1, 1)))

        _, last = fr.while_loop(lambda i, u: i < h.GRID_TURNS, turn, (fr.constant(0, "int32"), given))
        left = fr.sum(last * last)
    step = _session(graph, a).compile(left, [given])
    return Side(lambda: float(step(first)))


def columns(a: Settings) -> Side:
    x, weights = h.columns()
    h.imported()
    with fr.Graph() as graph:
        px, pw = fr.placeholder("float32", x.shape), fr.placeholder("float32", weights.shape)
        weighted = fr.nn.softmax(px, axis=0) * pw
    step = _session(graph, a).compile(weighted, [px, pw])
    return Side(lambda: step(x, weights))


def pooled(a: Settings) -> Side:
    x, slopes = h.pooled()
    h.imported()
    with fr.Graph() as graph:
        px, ps = fr.placeholder("float32", x.shape), fr.placeholder("float32", slopes.shape)
        largest = fr.nn.max_pool2d(px, 2)
        (back,) = fr.gradients(fr.sum(largest * largest * ps), [px])
    step = _session(graph, a).compile(back, [px, ps])
    return Side(lambda: step(x, slopes))


def many_rows(a: Settings) -> Side:
    batches, values = itertools.cycle(h.many_batches()), h.many_rows()
    first = next(batches)
    pending = iter((first, first))
    h.imported()

    def loss_of(p: Any, ids: Any, y: Any) -> Any:
        table, w, b = p
        z = fr.sum(fr.nn.embedding_lookup(table, ids), axis=1) @ w + b
        return fr.mean(fr.nn.sigmoid_cross_entropy(z, y))

    return _trained(a, loss_of, values, fr.optim.Adam(h.ADAM_RATE), lambda: next(pending, None) or next(batches))


def gpt(a: Settings) -> Side:
    batch, values = h.gpt_batch(), h.gpt()
    length, heads, width = h.GPT_LENGTH, h.GPT_HEADS, h.GPT_WIDTH
    h.imported()

    def attend(z: Any, w_qkv: Any, w_out: Any) -> Any:
        parted = fr.reshape(z @ w_qkv, (-1, length, 3, heads, width // heads))
        q, k, v = (fr.transpose(parted[:, :, i], (0, 2, 1, 3)) for i in range(3))
        mixed = fr.transpose(fr.nn.attention(q, k, v, causal=True), (0, 2, 1, 3))
        return fr.reshape(mixed, (-1, length, width)) @ w_out

    def loss_of(p: Any, words: Any, following: Any) -> Any:
        table, places, *layers, scale, offset, w = p
        z = fr.nn.embedding_lookup(table, words) + places
        for s1, o1, w_qkv, w_out, s2, o2, w_up, w_down in zip(*[iter(layers)] * 8, strict=True):
            z = z + attend(fr.nn.layer_norm(z, s1, o1), w_qkv, w_out)
            z = z + fr.gelu(fr.nn.layer_norm(z, s2, o2) @ w_up) @ w_down
        logits = fr.nn.layer_norm(z, scale, offset) @ w
        return fr.mean(fr.nn.softmax_cross_entropy(logits, following))

    return _trained(a, loss_of, values, fr.optim.Adam(h.ADAM_RATE), lambda: batch)


WORKLOADS = h.named(globals())

if __name__ == "__main__":
    h.main(WORKLOADS)
