"""Products of floats of 16 bits, and losses that are scaled for them."""

from __future__ import annotations

from contextlib import aclosing, nullcontext
from typing import Any

import numpy as np
import pytest

import flowrt as fr

KINDS = ("bfloat16", "float16")


def rounded(x: Any, kind: str) -> Any:
    """A float32 as the nearest float of that kind stands for it."""
    if kind == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_of_rounded_operands_and_added_up_in_float32(kind: str) -> None:
    a, b = normal(5, 300), normal(300, 4, seed=1)
    with fr.mixed_precision(kind):
        found = fr.matmul(a, b)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, rounded(a, kind) @ rounded(b, kind), rtol=1e-5, atol=1e-5)
        assert np.abs(found - a @ b).max() > 1e-4
        with fr.mixed_precision("float32"):
            np.testing.assert_allclose(fr.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)
        x, filters = normal(1, 4, 4, 2), normal(3, 3, 2, 3, seed=1)
        seen = fr.nn.conv2d(x, filters)
    np.testing.assert_allclose(seen, fr.nn.conv2d(rounded(x, kind), rounded(filters, kind)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fr.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)


def test_other_ops_and_other_dtypes_are_left_alone() -> None:
    x, wide = normal(3, 3), np.random.default_rng(0).normal(size=(3, 3))
    with fr.mixed_precision():
        assert (fr.exp(x) == fr.exp(x.copy())).all()
        np.testing.assert_allclose(fr.matmul(wide, wide), wide @ wide, rtol=1e-12)
        assert (fr.matmul(np.arange(9).reshape(3, 3), np.eye(3, dtype=int)) == np.arange(9).reshape(3, 3)).all()


@pytest.mark.parametrize("kind", KINDS)
async def test_gradients_of_products_are_products_of_what_is_stored_wherever_they_are_built(kind: str) -> None:
    a, b, dy = normal(5, 6), normal(6, 4, seed=1), normal(5, 4, seed=2)
    with fr.Graph() as graph:
        x, w, weight = (fr.placeholder("float32", array.shape) for array in (a, b, dy))
        with fr.mixed_precision(kind):
            y = x @ w
        dx, dw = fr.gradients(y, [x, w], weight)
    async with fr.Session(graph) as session:
        found = await session.run([dx, dw], {x: a, w: b, weight: dy})
    left, right, back = (rounded(array, kind) for array in (a, b, dy))
    np.testing.assert_allclose(found[0], back @ right.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], left.T @ back, rtol=1e-5, atol=1e-6)


async def test_second_derivatives_flow_past_what_is_stored() -> None:
    found = []
    for kind in (None, "bfloat16"):
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (3, 3))
            with fr.mixed_precision(kind) if kind else nullcontext():
                y = fr.sum(fr.square(x @ x))
            (dx,) = fr.gradients(y, [x])
            (ddx,) = fr.gradients(fr.sum(fr.square(dx)), [x])
        async with fr.Session(graph) as session:
            found.append(await session.run(ddx, {x: normal(3, 3)}))
    np.testing.assert_allclose(found[0], found[1], rtol=0.1, atol=0.1 * np.abs(found[0]).max())


def test_what_is_no_such_float_is_refused_at_the_users_line() -> None:
    says = r"test_precision.py:\d+: mixed precision is of 'bfloat16' or 'float16', not 'int8'"
    with pytest.raises(fr.GraphError, match=says), fr.mixed_precision("int8"):
        pass


# ── training ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy_on_digits(kind: str | None, optimizer: fr.optim.Optimizer) -> float:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16 - 0.3).astype(np.float32), labels.astype(np.int32)
    with fr.Graph(seed=1) as graph:
        x, y = fr.placeholder("float32", (None, 64)), fr.placeholder("int32", (None,))
        with fr.mixed_precision(kind) if kind else nullcontext():
            hidden = fr.nn.relu(x @ fr.Variable(fr.random.normal((64, 128), stddev=0.18, seed=1), name="w"))
            logits = hidden @ fr.Variable(fr.random.normal((128, 10), stddev=0.09, seed=2), name="v")
        update = optimizer.minimize(fr.mean(fr.nn.softmax_cross_entropy(logits, y)))
        answers = fr.argmax(logits, axis=-1)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    train, test = order[:1437], order[1437:]
    with fr.BlockingSession(graph) as session:
        step = session.compile(update, feeds=[x, y])
        for _ in range(250):
            chosen = rng.choice(train, 128)
            step(images[chosen], labels[chosen])
        return float(np.mean(session.run(answers, {x: images[test]}) == labels[test]))


def test_digits_are_learnt_as_well_in_16_bits() -> None:
    momentum = fr.optim.Momentum(0.1, 0.9)
    usual = accuracy_on_digits(None, momentum)
    assert usual >= 0.96
    assert accuracy_on_digits("bfloat16", momentum) >= usual - 0.01
    assert accuracy_on_digits("float16", fr.LossScaled(momentum, 2.0**24, grow_every=20)) >= usual - 0.01
    assert accuracy_on_digits("float16", fr.LossScaled(momentum, 2.0**10, grow_every=None)) >= usual - 0.01


def a_model(optimizer: fr.optim.Optimizer) -> tuple[fr.Graph, Any, Any]:
    """A graph whose variables have gradients of x; one of them, a table, of rows."""
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float32", (None, 3))
        w = fr.Variable(np.ones((3, 2), np.float32), name="w")
        table = fr.Variable(np.ones((4, 2), np.float32), name="table")
        update = optimizer.minimize(fr.sum(fr.square(x @ w)) + fr.sum(fr.take(table, [1, 2]) * fr.sum(x)))
    return graph, x, update


@pytest.mark.parametrize("grow_every", [None, 3])
def test_a_scaled_step_has_the_name_that_it_is_given(grow_every: int | None) -> None:
    with fr.Graph():
        w = fr.Variable(np.ones(2, np.float32))
        scaled = fr.LossScaled(fr.optim.SGD(0.1), grow_every=grow_every)
        assert scaled.minimize(fr.sum(w), name="move").name == "move"


@pytest.mark.parametrize("inner", [fr.optim.Adam(0.1), fr.optim.Momentum(0.1, 0.9), fr.optim.SGD(0.1)])
async def test_a_step_of_gradients_that_are_not_finite_moves_nothing_and_halves_the_scale(inner: Any) -> None:
    scaled = fr.LossScaled(inner, 2.0**10, grow_every=3)
    graph, x, update = a_model(scaled)
    assert scaled.variable is not None
    scale = scaled.variable
    others = [v for v in graph.variables if not v.name.startswith("loss_scale")]
    well, ill = np.full((2, 3), 0.1, np.float32), np.full((2, 3), np.inf, np.float32)
    async with fr.Session(graph) as session:
        seen = []
        for batch in (well, well, well, well, ill, well, well, ill, ill, well):
            before = await session.run(others)
            await session.run(update, {x: batch})
            after = await session.run(others)
            moved = [bool((one != other).any()) for one, other in zip(before, after, strict=True)]
            assert all(moved) if batch is well else not any(moved)
            seen.append(float(await session.run(scale)) / 2**10)
    assert seen == [1, 1, 2, 2, 1, 1, 1, 0.5, 0.25, 0.25]


async def test_what_a_scaled_loss_moves_is_what_the_loss_moves() -> None:
    found = []
    for optimizer in (fr.optim.Adam(0.1), fr.LossScaled(fr.optim.Adam(0.1), 2.0**12)):
        graph, x, update = a_model(optimizer)
        async with fr.Session(graph) as session:
            for seed in range(4):
                await session.run(update, {x: normal(2, 3, seed=seed)})
            found.append(await session.run([v for v in graph.variables if v.name in ("w", "table")]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


async def test_the_scale_keeps_gradients_that_float16_would_lose() -> None:
    moved = []
    for optimizer in (fr.optim.SGD(1.0), fr.LossScaled(fr.optim.SGD(1.0), 2.0**12, grow_every=None)):
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (1, 2))
            w = fr.Variable(np.zeros((2, 1), np.float32), name="w")
            with fr.mixed_precision("float16"):
                update = optimizer.minimize(fr.sum(x @ w) * 1e-8)
        async with fr.Session(graph) as session:
            await session.run(update, {x: np.ones((1, 2), np.float32)})
            moved.append(float(np.abs(await session.run(w)).max()))
    assert moved[0] == 0
    assert moved[1] == pytest.approx(1e-8, rel=1e-3)


@pytest.mark.parametrize("scale", [3.0, 0.0, float("nan"), 2.0**40, np.array("a"), np.array([2.0])])
def test_scales_that_would_round_are_refused(scale: Any) -> None:
    with pytest.raises(fr.GraphError, match=r"test_precision.py:\d+: a loss is scaled by a power of two"):
        fr.LossScaled(fr.optim.SGD(0.1), scale)


@pytest.mark.parametrize("scale", [np.int64(1024), np.int32(1024), np.array(1024.0), np.float32(1024)])
def test_numpys_numbers_are_scales(scale: Any) -> None:
    assert fr.LossScaled(fr.optim.SGD(0.1), scale).scale == 1024


def replicated(optimizer: fr.optim.Optimizer, policy: Any = None) -> tuple[fr.Graph, Any]:
    def loss_fn(inputs: dict[str, Any]) -> Any:
        w = fr.Variable(fr.random.normal((5, 3), seed=1), name="w")
        with fr.mixed_precision("float16"):
            return fr.mean(fr.nn.softmax_cross_entropy(inputs["x"] @ w, inputs["y"]))

    with fr.Graph(seed=1) as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"x": fr.Spec("float32", (None, 5)), "y": fr.Spec("int32", (None,))},
            optimizer=optimizer,
            replicas=2,
            policy=policy or fr.train.AllOf(),
            server_device="cpu:0",
            worker_device="cpu:0",
        )
    return graph, trainer


async def test_replicas_train_with_a_scale_that_stays_as_it_is() -> None:
    found = []
    for optimizer in (fr.optim.SGD(0.1), fr.LossScaled(fr.optim.SGD(0.1), 2.0**10, grow_every=None)):
        graph, trainer = replicated(optimizer)
        batches = ({"x": normal(8, 5), "y": np.zeros(8, np.int32)} for _ in range(8))
        async with fr.Session(graph) as session, aclosing(trainer.steps(session, batches)) as reports:
            found.append([report.loss async for report in reports])
    assert len(found[0]) == 4
    assert found[0][-1] < found[0][0]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)


async def test_replicas_find_the_scale_that_float16_holds() -> None:
    scaled = fr.LossScaled(fr.optim.SGD(0.1), 2.0**24, grow_every=100)
    graph, trainer = replicated(scaled)
    batches = ({"x": normal(8, 5), "y": np.zeros(8, np.int32)} for _ in range(60))
    async with fr.Session(graph) as session, aclosing(trainer.steps(session, batches)) as reports:
        found = [report async for report in reports]
        assert scaled.variable is not None
        scale = float(await session.run(scaled.variable))
    skipped = [report.skipped for report in found]
    assert 0 < sum(skipped) < 20
    assert skipped == sorted(skipped, reverse=True), "the first, until the scale is small enough"
    assert scale == 2.0 ** (24 - sum(skipped))
    assert found[-1].loss < found[0].loss


def test_a_scale_that_each_replica_would_change_by_itself_is_refused() -> None:
    with pytest.raises(fr.GraphError, match=r"test_precision.py:\d+: replicas .* grow_every=None"):
        replicated(fr.LossScaled(fr.optim.SGD(0.1)), fr.train.LocalSteps(2))
