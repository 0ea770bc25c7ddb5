"""What a scan's iterations share is computed once, around it: the same numbers, fewer products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr

STEPS, BATCH, INPUTS, UNITS = 5, 3, 4, 2


def _values(seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(seed)
    shapes = (STEPS, BATCH, INPUTS), (INPUTS, UNITS), (UNITS, UNITS), (UNITS,), (STEPS, BATCH, UNITS)
    return tuple(rng.normal(size=shape) for shape in shapes)


def _ops(plan: Any) -> list[str]:
    return [node.op for node in plan.nodes]


def _recurrence(x: Any, w: Any, u: Any, b: Any, reverse: bool) -> Any:
    def iteration(h: Any, row: Any) -> tuple[Any, Any]:
        h = fr.tanh(row @ w + h @ u + b)
        return h, h

    return fr.scan(iteration, fr.zeros((BATCH, UNITS), "float64"), x, reverse=reverse)[1]


def _by_hand(
    x: Any, w: Any, u: Any, b: Any, weights: Any, reverse: bool
) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """The states, and the slopes of their weighted sum."""
    order = list(range(STEPS))[:: -1 if reverse else 1]
    states, h, before = np.zeros((STEPS, BATCH, UNITS)), np.zeros((BATCH, UNITS)), {}
    for t in order:
        before[t] = h
        h = states[t] = np.tanh(x[t] @ w + h @ u + b)
    dx, dw, du, db, dh = np.zeros_like(x), np.zeros_like(w), np.zeros_like(u), np.zeros_like(b), np.zeros_like(h)
    for t in reversed(order):
        dz = (dh + weights[t]) * (1 - states[t] ** 2)
        dx[t], dw, du, db, dh = dz @ w.T, dw + x[t].T @ dz, du + before[t].T @ dz, db + dz.sum(0), dz @ u.T
    return states, [dx, dw, du, db]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tapes", [False, True])
def test_a_recurrence_and_its_gradients_are_those_computed_iteration_by_iteration(reverse: bool, tapes: bool) -> None:
    *given, weights = _values()
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float64", v.shape) for v in given]
        states = _recurrence(*feeds, reverse)
        slopes = fr.gradients(fr.sum(states * weights), feeds)
    with fr.BlockingSession(graph, options=fr.Options(tapes=tapes)) as session:
        got = session.run([states, *slopes], dict(zip(feeds, given, strict=True)))
    states_by_hand, slopes_by_hand = _by_hand(*given, weights, reverse)
    for a, b in zip(got, [states_by_hand, *slopes_by_hand], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_products_of_rows_are_ahead_of_the_loop_and_products_of_gradients_behind_it() -> None:
    *given, weights = _values()
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float64", v.shape) for v in given]
        states = _recurrence(*feeds, False)
        fr.gradients(fr.sum(states * weights), feeds)
    loops = [node for node in graph.nodes if node.op.name == "loop"]
    products = [_ops(node.attrs["body"]).count("matmul") for node in loops]
    assert products == [1, 1]  # of the state alone, and of its slope
    assert all("sum_to" not in _ops(node.attrs["body"]) for node in loops)
    whole = [node.outputs[0].shape for node in graph.nodes if node.op.name == "matmul"]
    assert (STEPS, BATCH, UNITS) in whole
    assert whole.count((INPUTS, UNITS)) == whole.count((UNITS, UNITS)) == 1


def test_a_matrix_may_be_viewed_in_the_body_and_a_row_may_be_a_vector() -> None:
    x, w, *_ = _values(1)
    with fr.Graph() as graph:
        matrix = fr.constant(w)
        rows = fr.constant(x[0])
        out = fr.map_fn(lambda row: row @ fr.transpose(fr.transpose(matrix)[:1]), rows)
        made = [node.op.name for node in graph.nodes]
    assert made.count("matmul") == 1
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(out), x[0] @ w[:, :1])


def test_what_turns_change_stays_in_the_loop() -> None:
    x, w, *_ = _values(2)
    square = w[:UNITS]
    with fr.Graph() as graph:
        start = fr.constant(square)
        out = fr.scan(lambda m, row: (m @ square, row @ m), start, fr.constant(x[..., :UNITS]))[1]
    assert not any(node.op.name == "matmul" for node in graph.nodes)
    want, m = [], square
    for row in x[..., :UNITS]:
        want.append(row @ m)
        m = m @ square
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(out), np.stack(want))


def test_no_rows_make_no_products_and_no_slopes() -> None:
    with fr.Graph() as graph:
        x, w = fr.placeholder("float64", (None, BATCH, INPUTS)), fr.placeholder("float64", (INPUTS, UNITS))
        ys = fr.map_fn(lambda row: row @ w, x)
        (slope,) = fr.gradients(fr.sum(ys), [w])
    with fr.BlockingSession(graph) as session:
        got = session.run([ys, slope], {x: np.zeros((0, BATCH, INPUTS)), w: np.ones((INPUTS, UNITS))})
    assert got[0].shape == (0, BATCH, UNITS)
    np.testing.assert_array_equal(got[1], np.zeros((INPUTS, UNITS)))


@pytest.mark.parametrize(
    ("cuts", "together"),
    [([(0, 2), (2, 3), (3, 6)], True), ([(3, 6), (0, 3)], True), ([(0, 3), (2, 6)], False), ([(0, 2), (3, 6)], False)],
)
def test_slopes_of_parts_side_by_side_are_put_together_and_others_added(
    cuts: list[tuple[int, int]], together: bool
) -> None:
    value = np.random.default_rng(3).normal(size=(2, 6))
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (2, 6))
        total = fr.add_n([(n + 1.0) * fr.sum(fr.square(x[:, a:b])) for n, (a, b) in enumerate(cuts)])
        (slope,) = fr.gradients(total, [x])
    assert any(node.op.name == "concat" for node in graph.nodes) == together
    want = np.zeros_like(value)
    for n, (a, b) in enumerate(cuts):
        want[:, a:b] += 2 * (n + 1) * value[:, a:b]
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(slope, {x: value}), want)
