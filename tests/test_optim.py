"""Optimisers against their formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import flowrt as fr

START = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
GOAL = np.array([[0.0, 1.0], [2.0, -1.0]], np.float32)
STEPS = 5


def gradient(p: np.ndarray) -> np.ndarray:
    """Of the sum of (p - GOAL)²."""
    return 2 * (p - GOAL)


def sgd(p: np.ndarray, v: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    return p - rate * gradient(p), v


def momentum(p: np.ndarray, v: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    v = 0.9 * v + gradient(p)
    return p - rate * v, v


def nesterov(p: np.ndarray, v: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    g = gradient(p)
    v = 0.9 * v + g
    return p - rate * (g + 0.9 * v), v


RULES = [
    (lambda rate: fr.optim.SGD(rate), sgd),
    (lambda rate: fr.optim.Momentum(rate, 0.9), momentum),
    (lambda rate: fr.optim.Momentum(rate, 0.9, nesterov=True), nesterov),
]


@pytest.mark.parametrize(("make", "rule"), RULES, ids=["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
async def test_each_step_follows_the_formula(
    make: Callable[[object], fr.optim.Optimizer], rule: Callable[..., object], dtype: str, as_tensor: bool
) -> None:
    with fr.Graph() as graph:
        p = fr.Variable(START.astype(dtype), name="p")
        loss = fr.sum(fr.square(p - fr.constant(GOAL.astype(dtype))))
        train = make(fr.constant(0.1) if as_tensor else 0.1).minimize(loss)
    expected = START.astype(dtype), np.zeros_like(START, dtype)
    async with fr.Session(graph) as session:
        for _ in range(STEPS):
            await session.run(train)
            expected = rule(*expected, 0.1)
            np.testing.assert_allclose(await session.run(p), expected[0], rtol=1e-5)


async def test_what_an_optimiser_remembers_is_a_variable_that_is_not_trained() -> None:
    with fr.Graph() as graph:
        p = fr.Variable(START, name="p")
        fr.optim.Momentum(0.1, 0.9).minimize(fr.sum(p))
    velocity = graph.variables[-1]
    assert velocity.name == "p/momentum"
    assert not velocity.trainable
    assert velocity.spec == p.spec


async def test_only_the_variables_asked_for_move() -> None:
    with fr.Graph() as graph:
        moved, still, frozen = (fr.Variable(START, name=n, trainable=n != "frozen") for n in ("a", "b", "frozen"))
        train = fr.optim.SGD(0.5).minimize(fr.sum(moved * still * frozen), variables=[moved])
    async with fr.Session(graph) as session:
        await session.run(train)
        np.testing.assert_allclose(await session.run(moved), START - 0.5 * START * START, rtol=1e-6)
        np.testing.assert_array_equal(await session.run([still, frozen]), [START, START])


def test_a_variable_the_loss_does_not_depend_on_has_no_gradient_and_stays() -> None:
    with fr.Graph():
        used, unused = fr.Variable(START, name="used"), fr.Variable(START, name="unused")
        pairs = fr.optim.SGD(0.1).compute_gradients(fr.sum(used))
    assert [variable for _, variable in pairs] == [used, unused]
    assert pairs[1][0] is None


def test_nothing_to_minimize_is_an_error_that_names_the_variables() -> None:
    with fr.Graph():
        fr.Variable(START, name="weights")
        with pytest.raises(fr.GraphError, match=r"test_optim\.py:\d+.*does not depend on 'weights'"):
            fr.optim.SGD(0.1).minimize(fr.sum(fr.constant(START)))
    with fr.Graph(), pytest.raises(fr.GraphError, match="no trainable variable"):
        fr.optim.SGD(0.1).minimize(fr.sum(fr.constant(START)))
    with fr.Graph(), pytest.raises(fr.GraphError, match="no gradients to apply"):
        fr.optim.SGD(0.1).apply_gradients([])


@pytest.mark.parametrize("norm", [1.0, 100.0])
async def test_gradients_are_clipped_by_their_common_norm(norm: float) -> None:
    grads = [START, np.array([3.0, 4.0], np.float32)]
    actual = np.sqrt(sum((g**2).sum() for g in grads))
    with fr.Graph() as graph:
        clipped, total = fr.optim.clip_by_global_norm([fr.constant(grads[0]), None, fr.constant(grads[1])], norm)
    assert clipped[1] is None
    async with fr.Session(graph) as session:
        first, second, measured = await session.run([clipped[0], clipped[2], total])
    np.testing.assert_allclose(measured, actual, rtol=1e-6)
    scale = min(1.0, norm / actual)
    np.testing.assert_allclose(first, grads[0] * scale, rtol=1e-5)
    np.testing.assert_allclose(second, grads[1] * scale, rtol=1e-5)
