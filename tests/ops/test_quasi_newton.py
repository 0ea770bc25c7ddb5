"""L-BFGS against its algorithm in NumPy, and against SciPy's on losses with a known minimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path


def rosenbrock(x: Any) -> Any:
    return fr.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def steps_taken(loss: Any, variables: Sequence[Any], most: int) -> tuple[int, float, list[np.ndarray]]:
    """After how many steps no entry of a gradient is above 1e-6, the loss, and what the variables have come to."""
    with loss.graph as graph:
        largest = fr.max(fr.stack([fr.max(fr.abs(gradient)) for gradient in fr.gradients(loss, variables)]))
        step = fr.optim.LBFGS().minimize(loss, variables)
    with fr.BlockingSession(graph) as session:
        run = session.compile([largest, loss, step])
        for taken in range(most):
            slope, value, _ = run()
            if slope <= 1e-6:
                return taken, value, session.run(list(variables))
    raise AssertionError(f"not there after {most} steps")


# ── where it comes to ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [2, 100])
def test_rosenbrocks_valley_is_gone_through_in_about_as_many_steps_as_by_scipy(size: int) -> None:
    from scipy.optimize import minimize, rosen, rosen_der

    start = np.tile([-1.2, 1.0], size // 2)
    expected = minimize(rosen, start, jac=rosen_der, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-6})
    with fr.Graph():
        x = fr.Variable(start, name="x")
        loss = rosenbrock(x)
    taken, _, (found,) = steps_taken(loss, [x], 1000)
    np.testing.assert_allclose(found, np.ones(size), rtol=1e-6)
    assert taken <= 1.2 * expected.nit


@cache
def digits() -> tuple[np.ndarray, np.ndarray, Any]:
    """Images of some digits, their labels, and where SciPy ends when it fits a linear classifier to them."""
    from scipy.optimize import minimize
    from sklearn.datasets import load_digits

    images, labels = (found[:400] for found in load_digits(return_X_y=True))
    images = images / 16
    rows = np.arange(len(labels))

    def loss_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = flat[:640].reshape(64, 10)
        powers = np.exp(images @ w + flat[640:])
        shares = powers / powers.sum(1, keepdims=True)
        loss = -np.log(shares[rows, labels]).mean() + 1e-3 * (w * w).sum()
        shares[rows, labels] -= 1
        slope = images.T @ shares / len(labels) + 2e-3 * w
        return loss, np.concatenate([slope.ravel(), shares.mean(0)])

    options = {"ftol": 0, "gtol": 1e-6, "maxiter": 500}
    return images, labels, minimize(loss_and_slope, np.zeros(650), jac=True, method="L-BFGS-B", options=options)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_classifier_of_digits_comes_to_the_loss_that_scipy_finds(dtype: str) -> None:
    images, labels, expected = digits()
    with fr.Graph():
        w, b = fr.Variable(np.zeros((64, 10), dtype), name="w"), fr.Variable(np.zeros(10, dtype), name="b")
        losses = fr.nn.softmax_cross_entropy(fr.constant(images.astype(dtype)) @ w + b, labels.astype("int32"))
        loss = fr.mean(losses) + 1e-3 * fr.sum(w * w)
    taken, lowest, _ = steps_taken(loss, [w, b], 500)
    assert abs(lowest - expected.fun) < (1e-9 if dtype == "float64" else 1e-6)
    assert taken <= 1.3 * expected.nit


@pytest.mark.parametrize(
    ("start", "loss_of", "lowest"),
    [
        (5.0, lambda x: x - fr.log(x), 1.0),  # no number below 0
        (0.0, lambda x: fr.exp(x) - 1000.0 * x, np.log(1000.0)),  # far away
        (1e-3, lambda x: fr.cosh(1e4 * (x - 2e-3)), 2e-3),  # infinite at most distances
        (3.0, lambda x: fr.where(x > 1, 2 * x - 1, x * x), 0.0),  # a line for the most part
    ],
)
def test_a_minimum_is_found_where_the_first_distance_is_far_off(start: float, loss_of: Any, lowest: float) -> None:
    with fr.Graph() as graph:
        x = fr.Variable(np.float64([start]), name="x")
        step = fr.optim.LBFGS().minimize(fr.sum(loss_of(x)))
    with fr.BlockingSession(graph) as session:
        for _ in range(30):
            session.run(step)
        np.testing.assert_allclose(session.run(x), [lowest], rtol=1e-7, atol=1e-7)


# ── how it goes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def two_loops(gradient: np.ndarray, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Algorithm 7.4, as the book writes it; ``pairs`` are (s, y), oldest first."""
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (y @ s))
        q -= alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += s * (alpha - y @ q / (y @ s))
    return -q


@pytest.mark.parametrize("history", [1, 3, 10])
def test_gradients_that_are_applied_move_as_the_two_loop_recursion_says(history: int) -> None:
    rng = np.random.default_rng(0)
    curves = rng.uniform(0.5, 4.0, 6)
    at = rng.normal(size=6)
    with fr.Graph() as graph:
        a, b = fr.Variable(at[:2], name="a"), fr.Variable(at[2:].reshape(2, 2), name="b")
        gradients = [(a * curves[:2], a), (b * curves[2:].reshape(2, 2), b)]
        step = fr.optim.LBFGS(0.5, history=history).apply_gradients(gradients)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    with fr.BlockingSession(graph) as session:
        for number in range(8):
            gradient = curves * at
            length = 0.5 * (min(1, 1 / np.sqrt(gradient @ gradient)) if number == 0 else 1)
            move = length * two_loops(gradient, pairs[-history:])
            pairs.append((move, curves * move))
            at = at + move
            session.run(step)
            found = session.run([a, b])
            np.testing.assert_allclose(np.concatenate([found[0], found[1].ravel()]), at, rtol=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_every_step_fulfils_the_strong_wolfe_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with fr.Graph() as graph:
        x = fr.Variable(rng.normal(size=8), name="x")
        loss = fr.sum(fr.sin(3 * x) + 0.1 * x**2) + fr.sum(fr.tanh(fr.constant(rng.normal(size=(8, 8))) @ x[:, None]))
        step, (gradient,) = fr.optim.LBFGS().minimize(loss), fr.gradients(loss, [x])
    with fr.BlockingSession(graph) as session:
        at, value, slope = session.run([x, loss, gradient])
        for _ in range(12):
            session.run(step)
            next_at, next_value, next_slope = session.run([x, loss, gradient])
            move = next_at - at
            assert slope @ move < 0
            assert next_value <= value + 1e-4 * (slope @ move)
            assert abs(next_slope @ move) <= 0.9 * abs(slope @ move)
            at, value, slope = next_at, next_value, next_slope


@pytest.mark.parametrize("start", [0.0, np.nan])
def test_where_no_direction_goes_down_nothing_moves(start: float) -> None:
    with fr.Graph() as graph:
        x = fr.Variable(np.float32([start, 0.0]), name="x")
        step = fr.optim.LBFGS().minimize(fr.sum(x * x))
    with fr.BlockingSession(graph) as session:
        for _ in range(3):
            session.run(step)
        np.testing.assert_array_equal(session.run(x), np.float32([start, 0]))


def test_a_step_that_finds_nothing_lower_leaves_the_variable_and_a_later_one_goes_on() -> None:
    with fr.Graph() as graph:
        x, lr = fr.Variable(np.float64([1.0]), name="x"), fr.placeholder("float64", ())
        step = fr.optim.LBFGS(lr, evaluations=1).minimize(fr.sum(x**4))
    with fr.BlockingSession(graph) as session:
        session.run(step, {lr: 1e6})
        assert session.run(x) == 1
        session.run(step, {lr: 1.0})
        assert abs(session.run(x)) < 1


def test_a_change_along_which_the_loss_does_not_curve_upwards_is_not_remembered() -> None:
    with fr.Graph() as graph:
        x, slope = fr.Variable(np.float64([1.0]), name="x"), fr.placeholder("float64", (1,))
        step = fr.optim.LBFGS(1.0, history=2).apply_gradients([(slope, x)])
    with fr.BlockingSession(graph) as session:
        found = []
        for value in (0.5, 0.75, 0.25):  # up, though x went down; then half as steep
            session.run(step, {slope: [value]})
            found.append(session.run(x)[0])
    np.testing.assert_allclose(found, [0.5, -0.25, -0.25 - 0.25 * 0.75 / 0.5])


# ── which losses ─────────────────────────────────────────────────────────────────────────────────────────────────────


GOAL = np.float64([[1.0, 2.0], [-3.0, 0.5]])


@fr.custom_gradient
def squared(x: Any) -> Any:
    return x * x, lambda slope: 2.0 * x * slope


LOSSES: dict[str, Callable[[Any], Any]] = {
    "a scan": lambda x: (
        fr.scan(lambda sum_, row: (sum_ + fr.sum(row**4), None), np.float64(0), x - GOAL + 0.0)[0]
        + fr.sum((x - GOAL) ** 2)
    ),
    "a branch": lambda x: fr.cond(fr.sum(x) > 100, lambda: fr.sum(x), lambda: fr.sum((x - GOAL) ** 2)),
    "a loop": lambda x: fr.while_loop(
        lambda i, total: i < 3, lambda i, total: (i + 1, total + fr.sum((x - GOAL) ** 2)), (0, np.float64(0))
    )[1],
    "rows through identity": lambda x: fr.sum((fr.take(fr.identity(x), [0, 1, 1]) - GOAL[[0, 1, 1]]) ** 2),
    "what depends on values": lambda x: fr.sum(fr.where(x > GOAL, 2.0, 1.0) * (x - GOAL) ** 2),
    "a gradient of its own": lambda x: fr.sum(squared(x - GOAL)),
    "noise": lambda x: fr.sum(fr.random.uniform((2, 2), 1.0, 2.0, "float64", seed=1) * (x - GOAL) ** 2),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_any_ops_is_computed_again_at_other_points(loss: str) -> None:
    with fr.Graph():
        x = fr.Variable(np.float64([[2.0, -1.0], [0.5, 3.0]]), name="x")
        made = LOSSES[loss](x)
    _, _, (found,) = steps_taken(made, [x], 40)
    np.testing.assert_allclose(found, GOAL, atol=1e-6)


def test_what_a_loss_draws_is_drawn_once_a_step() -> None:
    with fr.Graph(seed=3) as graph:
        x = fr.Variable(np.zeros(100), name="x")
        noise = fr.random.normal(fr.shape_of(x), dtype="float64")
        loss = fr.sum((x - noise) ** 2)
        step = fr.optim.LBFGS().minimize(loss)
    with fr.BlockingSession(graph) as session:
        before, drawn, _ = session.run([loss, noise, step])
        after = np.sum((session.run(x) - drawn) ** 2)
    assert before > 50
    assert after < 0.9 * before


def test_a_variable_that_is_split_moves_as_a_whole_one() -> None:
    found = []
    for partition in (None, 3):
        with fr.Graph() as graph:
            x = fr.Variable(np.tile([-1.2, 1.0], 3), name="x", partition=partition)
            step = fr.optim.LBFGS().minimize(rosenbrock(fr.identity(x)))
        with fr.BlockingSession(graph) as session:
            for _ in range(10):
                session.run(step)
            found.append(session.run(x))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_only_the_variables_that_are_named_move_and_what_is_fed_stays() -> None:
    with fr.Graph() as graph:
        x, y = fr.Variable(np.float64(3.0), name="x"), fr.Variable(np.float64(2.0), name="y")
        goal = fr.placeholder("float64", ())
        step = fr.optim.LBFGS().minimize((x * y - goal) ** 2, [x])
    with fr.BlockingSession(graph) as session:
        for _ in range(15):
            session.run(step, {goal: 10.0})
        np.testing.assert_allclose(session.run([x, y]), [5, 2], rtol=1e-7)


def test_of_a_loss_with_several_entries_the_sum_is_minimised() -> None:
    with fr.Graph() as graph:
        x = fr.Variable(np.float64([3.0, -2.0]), name="x")
        step = fr.optim.LBFGS().minimize(fr.stack([fr.sum(x * x), 2 * x[0], -4 * x[1]]))
    with fr.BlockingSession(graph) as session:
        for _ in range(10):
            session.run(step)
        np.testing.assert_allclose(session.run(x), [-1, 2], rtol=1e-7)


def test_variables_of_several_dtypes_move_together() -> None:
    with fr.Graph() as graph:
        x, y = fr.Variable(np.float32([3.0]), name="x"), fr.Variable(np.float64([2.0, 1.0]), name="y")
        step = fr.optim.LBFGS().minimize(fr.sum((fr.astype(x, "float64") - y) ** 2) + fr.sum((y - 1) ** 2))
    with fr.BlockingSession(graph) as session:
        for _ in range(20):
            session.run(step)
        found = session.run([x, y])
    np.testing.assert_allclose(np.concatenate(found), [1, 1, 1], atol=1e-5)


# ── errors, and state ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_lbfgs_cannot_do_is_an_error_that_says_what_can_be_done() -> None:
    with fr.Graph():
        table = fr.Variable(np.ones((4, 2), np.float32), name="table")
        rows = fr.sum(fr.take(table, [1, 2]) ** 2)
        with pytest.raises(fr.GraphError, match=r"test_quasi_newton.py:\d+: LBFGS moves all of 'table'.* fr.identity"):
            fr.optim.LBFGS().minimize(rows)
        with pytest.raises(fr.GraphError, match=r"test_quasi_newton.py:\d+.* reads 'table' anew, .*; use the variable"):
            fr.optim.LBFGS().minimize(fr.sum(table.read() ** 2))
        seen = fr.FIFOQueue(8, "float32", (4, 2))

        def noting(count: Any, total: Any) -> Any:
            with fr.control_dependencies([seen.enqueue(fr.identity(table))]):
                return count + 1, fr.identity(total)

        noted = fr.stop_gradient(fr.while_loop(lambda count, _: count < 2, noting, (0, np.float32(0)))[1])
        with pytest.raises(
            fr.GraphError, match=r"test_quasi_newton.py:\d+.* has an effect, and so is not computed again"
        ):
            fr.optim.LBFGS().minimize(fr.sum(table**2) + noted)
        with pytest.raises(fr.GraphError, match="history is a whole number from 1 up, not 0"):
            fr.optim.LBFGS(history=0)
        with pytest.raises(fr.GraphError, match=r"evaluations is a whole number from 1 up, not 2\.5"):
            fr.optim.LBFGS(evaluations=2.5)  # type: ignore[arg-type]


async def test_training_that_is_restored_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWRT_FUSED", "wait")  # each step runs the same kernels

    def build() -> tuple[fr.Graph, Any, Any]:
        with fr.Graph() as graph:
            x = fr.Variable(np.tile([-1.2, 1.0], 3), name="x")
            return graph, x, fr.optim.LBFGS(history=4).minimize(rosenbrock(x))

    graph, x, step = build()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / "kept")) as session:
        for number in range(14):
            if number == 7:
                await session.save()
            await session.run(step)
        expected = await session.run(x)
    assert {variable.name for variable in graph.variables} == {
        "x",
        *(f"x/{kept}" for kept in ("point", "slope", "moves", "changes", "curvatures", "steps")),
    }
    graph, x, step = build()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / "kept")) as session:
        await session.restore()
        for _ in range(7):
            await session.run(step)
        np.testing.assert_array_equal(await session.run(x), expected)


async def test_variables_on_other_nodes_come_to_the_same_minimum() -> None:
    with fr.Graph() as graph:
        with fr.device("/job:ps"):
            x = fr.Variable(np.tile([-1.2, 1.0], 2), name="x")
        with fr.device("/job:worker"):
            loss = rosenbrock(x)
        step = fr.optim.LBFGS().minimize(loss)
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        for _ in range(60):
            await session.run(step)
        np.testing.assert_allclose(await session.run(x), np.ones(4), rtol=1e-6)
