"""A training loop as a program of types has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import flowrt as fr

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


def batches(images: Images, labels: Labels, size: int, epochs: int) -> Iterator[tuple[Images, Labels]]:
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield images[chosen], labels[chosen]


def dense(x: fr.Tensor, units: int, name: str) -> fr.Tensor:
    with fr.name_scope(name):
        inputs = x.shape[-1]
        assert inputs is not None
        w = fr.Variable(fr.random.normal((inputs, units), stddev=inputs**-0.5, seed=1), name="w")
        b = fr.Variable(np.zeros(units, "float32"), name="b")
        return x @ w + b


def network(images: fr.Tensor) -> fr.Tensor:
    hidden = fr.relu(dense(images, 32, "hidden"))
    hidden = fr.nn.dropout(hidden, 0.1, seed=3)
    return dense(hidden, 10, "out")


def bounded(x: fr.Tensor) -> fr.Tensor:
    rows = fr.map_fn(lambda row: 2 * row, fr.stack([x, x]))
    return fr.cond(x > 1.0, lambda: fr.minimum(x, 1.0), lambda: fr.sum(rows))


def build() -> tuple[fr.Graph, fr.Tensor, fr.Tensor, fr.Tensor, fr.Tensor, fr.Operation]:
    with fr.Graph(seed=0) as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        y = fr.placeholder("int32", (None,), name="y")
        logits = network(x)
        loss = fr.mean(fr.nn.softmax_cross_entropy(logits, y), name="loss")
        right = fr.mean(fr.astype(fr.equal(fr.argmax(logits, axis=1), y), "float32"))
        rate = fr.maximum(0.1 * loss, 0.01)
        held = bounded(rate)
        both = fr.group(held, right)
        assert both.op.name == "no_op"
        train = fr.optim.Momentum(0.1, 0.9, nesterov=True).minimize(loss)
        grads = fr.gradients(loss, list(graph.variables))
        norm = fr.sqrt(fr.add_n([fr.sum(fr.square(g)) for g in grads if isinstance(g, fr.Tensor)]))
        assert norm.shape == ()
        assert rate.dtype == np.float32
    return graph, x, y, loss, right, train


async def main() -> float:
    rng = np.random.default_rng(1)
    images = rng.normal(size=(256, 64)).astype(np.float32)
    labels = images[:, :10].argmax(1).astype(np.int32)
    graph, x, y, loss, right, train = build()
    async with fr.Session(graph, options=fr.Options(seed=1)) as session:
        step = session.compile([loss, train], feeds=[x, y])
        value = 0.0
        for xs, ys in batches(images, labels, 64, 2):
            value, _ = await step(xs, ys)
        accuracy: float = await session.run(right, {x: images, y: labels}, timeout=60)
        whole = await session.run({"loss": loss, "right": right}, feeds={x: images, y: labels})
        print(value, accuracy, whole["loss"])
        return accuracy


def blocking() -> npt.NDArray[np.float32]:
    graph, x, y, loss, _, train = build()
    with fr.BlockingSession(graph) as session:
        step = session.compile([loss, train], [x, y])
        step(np.zeros((4, 64), "float32"), np.zeros(4, "int32"))
        found: npt.NDArray[np.float32] = session.run(loss, {x: np.zeros((1, 64)), y: [1]})
    return found


def eager(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    y = fr.nn.softmax(x, axis=-1)
    print(y.shape[0] + 1, y.tolist(), float(fr.sum(y)), y.sum(axis=0), (y > 0.5).any())
    np.testing.assert_allclose(y, fr.exp(x) / fr.sum(fr.exp(x), axis=-1, keepdims=True))
    table = fr.concat([y, 2 * y], axis=1)
    total = 0.0
    for row in table:
        total += float(row.max())
    return fr.astype(table, np.float32)


if __name__ == "__main__":
    print(asyncio.run(main()), blocking(), eager(np.ones((2, 3), np.float32)))
