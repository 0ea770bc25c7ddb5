"""Functions with a gradient of their own: what the rule says is the gradient, whatever the formula's would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr

POINT = np.array([0.5, -1.25, 100.0])


@fr.custom_gradient
def log1pexp(x: Any) -> Any:
    e = fr.exp(x)
    return fr.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


@fr.custom_gradient
def straight_through(x: Any) -> Any:
    return fr.round(x), lambda dy: dy


@fr.custom_gradient
def jointly(x: Any, y: Any) -> Any:
    """Two results whose gradients are made one vector of length 1."""

    def rule(dx: Any, dy: Any) -> Any:
        norm = fr.sqrt(fr.sum(dx * dx) + fr.sum(dy * dy))
        return dx / norm, dy / norm

    return {"twice": x * 2, "thrice": (y * 3,)}, rule


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


OPTIONS = [fr.Options(), fr.Options(optimize=False), fr.Options(optimize=False, tapes=False)]


def run(graph: fr.Graph, fetches: Any, feeds: Any, options: fr.Options = OPTIONS[0]) -> Any:
    with fr.BlockingSession(graph, options=options) as session:
        return session.run(fetches, feeds)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_rule_is_the_gradient_and_has_one(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None,))
        (slope,) = fr.gradients(log1pexp(x), [x])
        (curvature,) = fr.gradients(slope, [x])
        rounded = straight_through(x)
        (passed,) = fr.gradients(fr.sum(rounded * rounded), [x])
    first, second, third = run(graph, [slope, curvature, passed], {x: POINT}, options)
    np.testing.assert_allclose(first, sigmoid(POINT), rtol=1e-14)
    np.testing.assert_allclose(second, sigmoid(POINT) * (1 - sigmoid(POINT)), rtol=1e-12, atol=1e-40)
    np.testing.assert_array_equal(third, 2 * np.round(POINT))


@pytest.mark.parametrize("options", OPTIONS)
def test_several_results_share_one_rule(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder("float64", (3,)), fr.placeholder("float64", (3,))
        made = jointly(x, y)
        twice, (thrice,) = made["twice"], made["thrice"]
        both = fr.gradients(fr.sum(twice) + fr.sum(thrice * thrice), [x, y])
        of_the_first = fr.gradients(twice, [x, y])
        of_the_second = fr.gradients(thrice, [x, y])
    found = run(graph, [both, of_the_first, of_the_second], {x: POINT, y: POINT}, options)
    dx, dy = np.ones(3), 6 * POINT
    norm = np.sqrt(np.sum(dx * dx) + np.sum(dy * dy))
    np.testing.assert_allclose(found[0], [dx / norm, dy / norm], rtol=1e-14)
    np.testing.assert_allclose(found[1], [dx / np.sqrt(3), 0 * dx], rtol=1e-14)
    np.testing.assert_allclose(found[2], [0 * dx, dx / np.sqrt(3)], rtol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
def test_bodies_of_loops_and_branches_keep_the_rule(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (3,))
        _, last = fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, log1pexp(v)), [0, x])
        (through_loop,) = fr.gradients(last, [x])
        chosen = fr.cond(x[0] > 0, lambda: straight_through(x), lambda: x * 7)
        (through_branch,) = fr.gradients(chosen, [x])

        def scanned(carry: Any, row: Any) -> Any:
            made = jointly(carry, row)
            return made["twice"], made["thrice"][0]  # of the pair, each iteration uses both

        last, _ = fr.scan(scanned, fr.sum(x), x)
        (through_scan,) = fr.gradients(last, [x])
    loop, branch, scan = run(graph, [through_loop, through_branch, through_scan], {x: POINT}, options)
    v, slope = POINT, np.ones(3)
    for _ in range(3):
        slope, v = slope * sigmoid(v), np.logaddexp(0, v)
    np.testing.assert_allclose(loop, slope, rtol=1e-12)
    np.testing.assert_array_equal(branch, np.ones(3))
    np.testing.assert_array_equal(scan, np.ones(3))  # of the carry alone, so that its share of the norm is all


def test_a_graph_read_from_bytes_has_the_rule() -> None:
    with fr.Graph() as written:
        x, y = fr.placeholder("float64", (3,), name="x"), fr.placeholder("float64", (3,), name="y")
        made = jointly(x, y)
        loss = fr.add(fr.sum(made["twice"]), fr.sum(made["thrice"][0]), name="loss")
    assert loss.name == "loss:0"
    with fr.Graph.from_bytes(written.to_bytes()) as graph:
        x, y, loss = (graph.get_tensor_by_name(name) for name in ("x:0", "y:0", "loss:0"))
        slopes = fr.gradients(loss, [x, y])
    np.testing.assert_allclose(run(graph, slopes, {x: POINT, y: POINT}), np.full((2, 3), 6**-0.5), rtol=1e-14)


def test_what_the_rule_alone_needs_costs_a_step_nothing() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (3,))

        @fr.custom_gradient
        def named(value: Any) -> Any:
            aside = fr.exp(value, name="aside")
            return value * 2, lambda dy: dy * aside

        y = named(x)
        (slope,) = fr.gradients(y, [x])
    with fr.BlockingSession(graph) as session:
        assert "aside" not in str(session.explain(y))
        np.testing.assert_array_equal(session.run(y, {x: POINT}), POINT * 2)
        np.testing.assert_allclose(session.run(slope, {x: POINT}), np.exp(POINT), rtol=1e-14)


def test_outside_a_graph_it_is_the_plain_function() -> None:
    np.testing.assert_allclose(log1pexp(POINT), np.logaddexp(0, POINT), rtol=1e-14)
    with fr.Graph() as graph:
        constant = log1pexp(POINT)
    np.testing.assert_allclose(run(graph, constant, {}), np.logaddexp(0, POINT), rtol=1e-14)


def test_arguments_that_are_no_floats_and_keywords_are_left_alone() -> None:
    @fr.custom_gradient
    def chosen(x: Any, rows: Any, *, factor: float) -> Any:
        return (fr.take(x, rows) * factor, rows), lambda dy, drows: (fr.ones_like(x) * factor, drows)

    with fr.Graph() as graph:
        x, rows = fr.placeholder("float64", (3,)), fr.placeholder("int64", (2,))
        taken, same = chosen(x, rows, factor=3.0)
        slopes = fr.gradients(taken, [x, rows])
    assert slopes[1] is None
    values, kept, slope = run(graph, [taken, same, slopes[0]], {x: POINT, rows: [2, 0]})
    np.testing.assert_array_equal(values, 3 * POINT[[2, 0]])
    np.testing.assert_array_equal(kept, [2, 0])
    np.testing.assert_array_equal(slope, [3, 3, 3])


def test_a_variable_is_an_argument_like_any() -> None:
    with fr.Graph() as graph:
        w = fr.Variable(np.array([1.4, 2.6]))
        (slope,) = fr.gradients(fr.sum(straight_through(w) ** 2), [w])
    np.testing.assert_array_equal(run(graph, slope, {}), [2, 6])


def test_what_would_lose_a_gradient_is_refused() -> None:
    with fr.Graph():
        x, w = fr.placeholder("float64", (3,)), fr.Variable(np.ones(3), name="weights")

        def scaled(x: Any) -> Any:
            return x * w, lambda dy: dy

        with pytest.raises(fr.GraphError, match=r"scaled computes with .*weights.*no argument of it.*stop_gradient"):
            fr.custom_gradient(scaled)(x)
        half = w * 0.5
        with pytest.raises(fr.GraphError, match="no argument of it"):
            fr.custom_gradient(lambda x: (x * half, lambda dy: dy))(x)
        with pytest.raises(fr.GraphError, match=r"<Tensor 'weights.* no argument of it"):
            fr.while_loop(lambda v: fr.sum(v) < 9, lambda v: fr.custom_gradient(scaled)(v), [x])
        limit = fr.constant(np.ones(3))
        fr.custom_gradient(lambda x: (x * fr.stop_gradient(w) * limit, lambda dy: dy))(x)
        fr.while_loop(lambda v: fr.sum(v) < 9, fr.custom_gradient(lambda v: (v * limit, lambda dy: dy)), [x])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * 2, r"answers \(result, rule\)"),
        (lambda x: (x * 2, lambda dy: (dy, dy)), "answered 2 gradients for 1 positional argument"),
        (lambda x: (x * 2, lambda dy: fr.sum(dy)), r"answered float64\[\] for float64\[3\]"),
        (lambda x: (x * 2, lambda dy: fr.astype(dy, "float32")), "its tensor's shape and dtype"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_where_the_function_is_called(function: Any, message: str) -> None:
    with fr.Graph():
        x = fr.placeholder("float64", (3,))
        with pytest.raises(fr.GraphError, match=message) as caught:
            fr.custom_gradient(function)(x)
    assert "test_custom_gradient.py" in str(caught.value)


def test_a_rule_with_effects_is_refused() -> None:
    with fr.Graph():
        x, count = fr.placeholder("float64", (3,)), fr.Variable(0.0)

        def rule(dy: Any) -> Any:
            with fr.control_dependencies([count.assign_add(1.0)]):
                return fr.identity(dy)

        with pytest.raises(fr.GraphError, match="reads or changes state"):
            fr.custom_gradient(lambda x: (x * 2, rule))(x)
