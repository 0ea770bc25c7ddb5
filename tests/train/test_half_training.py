"""Training with floats of 16 bits: computed in them from weights of float32, kept in them, and on several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import flowrt as fr

Array = np.ndarray[Any, Any]

HALVES = ("bfloat16", "float16")
both = pytest.mark.parametrize("half", HALVES)


def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(labels))  # as they stand the last are of other hands
    return (images[mixed] / 16).astype("float32"), labels[mixed].astype("int32")


def logits_of(images: Any, half: str) -> Any:
    """Two layers, every tensor of which is of 16 bits but the variables."""
    x = fr.astype(images, half)
    for number, (rows, columns) in enumerate(((64, 64), (64, 10))):
        start = fr.random.normal((rows, columns), stddev=(2 / rows) ** 0.5, seed=number)
        weights, bias = (
            fr.Variable(start, name=f"w{number}"),
            fr.Variable(np.zeros(columns, "float32"), name=f"b{number}"),
        )
        x = x if number == 0 else fr.nn.relu(x)
        x = x @ fr.astype(weights, half) + fr.astype(bias, half)
    assert x.dtype == fr.Spec(half).dtype
    return x


def loss_of(logits: Any, labels: Any) -> Any:
    return fr.mean(fr.nn.softmax_cross_entropy(fr.astype(logits, "float32"), labels))


def batches(images: Array, labels: Array, epochs: int) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(1400)
        yield from ({"x": images[rows], "y": labels[rows]} for rows in np.split(order, 28))


@both
async def test_digits_are_learnt_in_16_bits_from_weights_of_float32(half: str) -> None:
    images, labels = digits()
    with fr.Graph() as graph:
        x, y = fr.placeholder("float32", (None, 64)), fr.placeholder("int32", (None,))
        logits = logits_of(x, half)
        update = fr.optim.Momentum(0.1, 0.9).minimize(loss_of(logits, y))
        hits = fr.mean(fr.astype(fr.equal(fr.argmax(logits, -1), fr.astype(y, "int64")), "float32"))
    async with fr.Session(graph) as session:
        for batch in batches(images, labels, 10):
            await session.run(update, {x: batch["x"], y: batch["y"]})
        assert await session.run(hits, {x: images[1400:], y: labels[1400:]}) >= 0.95


async def test_replicas_on_two_processes_learn_them_too() -> None:
    images, labels = digits()
    inputs = {"x": fr.Spec("float32", (None, 64)), "y": fr.Spec("int32", (None,))}

    def loss_fn(fed: dict[str, Any]) -> Any:
        return loss_of(logits_of(fed["x"], "bfloat16"), fed["y"])

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.Momentum(0.1, 0.9), replicas=2)
        answer = trainer.share(lambda fed: fr.argmax(logits_of(fed["x"], "bfloat16"), -1), {"x": inputs["x"]})
    async with fr.LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with aclosing(trainer.steps(session, batches(images, labels, 14))) as steps:
            async for report in steps:
                assert np.isfinite(report.loss)
        told = await session.run(answer.outputs, {answer.inputs["x"]: images[1400:]})
    assert report.step == 14 * 28 // 2
    assert np.mean(told == labels[1400:]) >= 0.95


@both
async def test_variables_of_16_bits_are_moved_by_the_mean_of_what_replicas_send(half: str) -> None:
    inputs = {"x": fr.Spec(half, (None, 3))}
    dtype = fr.Spec(half).dtype

    def loss_fn(fed: dict[str, Any]) -> Any:
        w = fr.Variable(np.ones(3, dtype), name="w")
        return fr.astype(fr.sum(fed["x"] * w), "float32")

    rows = [np.array([[1, 0.5, 0.25 * n]], dtype) for n in range(4)]
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.25), replicas=2)
    async with fr.LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async for _ in trainer.steps(session, ({"x": row} for row in rows)):
            pass
        (w,) = await session.run(trainer.variables)
    assert w.dtype == dtype
    np.testing.assert_array_equal(w.astype("float32"), [0.5, 0.75, 1 - 0.25 * (0.125 + 0.625)])
