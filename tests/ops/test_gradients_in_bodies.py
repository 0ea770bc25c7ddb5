"""Gradients taken inside loops and branches, of what was built there or around them, and those of `Variable.read`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

X = np.array([1.0, 2.0, 3.0, 4.0]) / 3
A = np.random.default_rng(0).normal(size=(4, 4))
OPTIONS = [{}, {"optimize": False}, {"tapes": False}]

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "powers": lambda x: fr.sum(x**3),
    "product": lambda x: fr.sum(fr.square(fr.sin(fr.reshape(x, (1, 4)) @ A))),
    "while": lambda x: fr.sum(fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, fr.sin(v) * x), (0, x))[1]),
    "scan": lambda x: fr.sum(fr.scan(lambda c, row: (fr.sin(c) * row + x, c * row), x, A)[0]),
    "cond": lambda x: fr.cond(fr.sum(x) > 0, lambda: fr.sum(x**4), lambda: fr.sum(x)),
    "rows": lambda x: fr.sum(fr.take(x, [0, 1, 1, 3]) ** 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_hessian_is_built_row_by_row(name: str) -> None:
    """In a body from the slope outside; the judge builds each row beside it."""
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (4,))
        (slope,) = fr.gradients(FUNCTIONS[name](x), [x])
        mapped = fr.map_fn(lambda i: fr.gradients(fr.take(slope, i), [x])[0], fr.arange(4))
        plain = fr.stack([fr.gradients(slope[i], [x])[0] for i in range(4)])
    for options in OPTIONS:
        with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
            got, want = session.run([mapped, plain], {x: X})
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12, err_msg=str(options))


def in_a_scan(x: Any, wave: Any) -> Any:
    return fr.scan(lambda c, r: (c + fr.gradients(wave * r, [x])[0], None), x, X)[0]


def in_a_while(x: Any, wave: Any) -> Any:
    def turn(i: Any, v: Any) -> Any:
        return i + 1, v + fr.gradients(fr.sum(wave * x) * fr.take(X, i), [x])[0]

    return fr.while_loop(lambda i, v: i < 4, turn, (0, x))[1]


def in_two_maps(x: Any, wave: Any) -> Any:
    def row(i: Any) -> Any:
        slope = fr.gradients(fr.take(wave, i), [x])[0]
        return fr.map_fn(lambda j: fr.gradients(fr.take(slope, j), [x])[0], fr.arange(4))

    return fr.map_fn(row, fr.arange(4))


CUBE = np.zeros((4, 4, 4))
CUBE[range(4), range(4), range(4)] = -np.sin(X)
BODIES: dict[str, tuple[Callable[[Any, Any], Any], np.ndarray[Any, Any]]] = {
    "scan": (in_a_scan, X + np.cos(X) * X.sum()),
    "while": (in_a_while, X + X.sum() * (np.sin(X) + X * np.cos(X))),
    "cond": (lambda x, wave: fr.cond(fr.sum(x) > 0, lambda: fr.gradients(wave, [x])[0], lambda: x), np.cos(X)),
    "two maps": (in_two_maps, CUBE),
    "of a tensor between": (
        lambda x, wave: fr.map_fn(lambda r: fr.gradients(wave * wave * r, [wave])[0], X),
        2 * np.sin(X) * X[:, None],
    ),
    "weighed": (lambda x, wave: fr.map_fn(lambda row: fr.gradients(wave, [x], [row])[0], A), A * np.cos(X)),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_may_differentiate_what_was_built_around_it(name: str) -> None:
    build, want = BODIES[name]
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (4,))
        made = build(x, fr.sin(x))
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(made, {x: X}), want, rtol=1e-10, atol=1e-12)


def test_a_gradient_in_a_body_is_differentiated_like_anything_else() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (4,))
        (slope,) = fr.gradients(fr.sum(x**4), [x])
        hessian = fr.map_fn(lambda i: fr.gradients(fr.take(slope, i), [x])[0], fr.arange(4))
        (third,) = fr.gradients(fr.sum(hessian * A), [x])
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(third, {x: X}), np.diag(A) * 24 * X, rtol=1e-10)


def test_rows_of_a_variable_have_a_dense_gradient_in_a_body() -> None:
    with fr.Graph() as graph:
        w = fr.Variable(X, name="w")
        loss = fr.sum(fr.take(w, [0, 1, 1]) ** 2)
        made = fr.map_fn(lambda r: fr.gradients(loss * r, [w])[0], np.arange(3.0))
    with fr.BlockingSession(graph) as session:
        want = np.arange(3.0)[:, None] * (2 * X * [1, 2, 0, 0])
        np.testing.assert_allclose(session.run(made), want, rtol=1e-12)


# ── reads ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def after_a_write(w: Any) -> Any:
    with fr.control_dependencies([w.assign_add(np.ones(4))]):
        return w.read()


READS: dict[str, tuple[Callable[[Any], Any], Any]] = {  # a loss of w, and its derivative where w begins as X
    "alone": (lambda w: fr.sum(w.read() ** 3), 3 * X**2),
    "beside the variable": (lambda w: fr.sum(w.read() * w), 2 * X),
    "twice": (lambda w: fr.sum(w.read() * fr.sin(w.read())), np.sin(X) + X * np.cos(X)),
    "after a write": (lambda w: fr.sum(after_a_write(w) ** 2), 2 * (X + 1)),
    "of rows": (lambda w: fr.sum(fr.take(w.read(), [0, 1, 1]) ** 2), 2 * X * [1, 2, 0, 0]),
    "used in a loop": (lambda w: scanned(w.read()), 3 * np.ones(4)),
}


def scanned(read: Any) -> Any:
    return fr.sum(fr.map_fn(lambda row: read * row, np.arange(3.0)))


@pytest.mark.parametrize("name", READS)
def test_a_read_has_the_gradient_of_its_variable(name: str) -> None:
    build, want = READS[name]
    with fr.Graph() as graph:
        w = fr.Variable(X, name="w")
        slope = fr.identity(fr.gradients(build(w), [w])[0])
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(slope), want, rtol=1e-12)


def test_reads_are_differentiated_again_and_inside_bodies() -> None:
    with fr.Graph() as graph:
        w = fr.Variable(X, name="w")
        (slope,) = fr.gradients(fr.sum(w.read() ** 3), [w])
        (second,) = fr.gradients(fr.sum(slope), [w])
        around = w.read()
        rows = fr.map_fn(lambda i: fr.gradients(fr.take(around, i) ** 2, [w])[0], fr.arange(4))
        within = fr.map_fn(lambda r: fr.gradients(fr.sum(w.read() ** 2) * r, [w])[0], np.arange(3.0))
    with fr.BlockingSession(graph) as session:
        got = [*session.run([second, rows]), session.run(within)]
    for mine, want in zip(got, [6 * X, np.diag(2 * X), np.arange(3.0)[:, None] * 2 * X], strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-12)


def test_minimize_moves_a_variable_that_is_read() -> None:
    with fr.Graph() as graph:
        w, b = fr.Variable(X, name="w"), fr.Variable(np.zeros(4), name="b")
        train = fr.optim.SGD(0.1).minimize(fr.sum(fr.square(w.read() + b)))
    with fr.BlockingSession(graph) as session:
        session.run(train)
        np.testing.assert_allclose(session.run(w), 0.8 * X, rtol=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda w: fr.map_fn(lambda row: w.read() * row, np.arange(3.0)),
        lambda w: fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * w.read()), (0, np.ones(4)))[1],
        lambda w: fr.cond(fr.constant(True), lambda: w.read(), lambda: np.ones(4)),
    ],
)
def test_a_body_that_reads_anew_says_that_no_gradient_goes_through_it(build: Callable[[Any], Any]) -> None:
    with fr.Graph():
        w = fr.Variable(X, name="w")
        loss = fr.sum(build(w))
        with pytest.raises(GraphError, match=r"test_gradients_in_bodies\.py:\d+.*a variable itself may be used"):
            fr.gradients(loss, [w])
        assert fr.gradients(loss, [fr.Variable(1.0, name="other")]) == [None]


MOST_AXES = (2, 1, 1, 3, 1, 1, 1, 2)
TURNS: dict[str, Callable[[Any, Any], Any]] = {
    "while": lambda x, w: fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, fr.tanh(v * w) + v), (0, x))[1],
    "at most": lambda x, w: fr.while_loop(
        lambda i, v: i < 2, lambda i, v: (i + 1, fr.sin(v) * w), (0, x), maximum_iterations=4
    )[1],
    "scan": lambda x, w: fr.scan(lambda v, s: (fr.tanh(v * w) * s, fr.sum(v)), x, np.float32([1, 2, 3]))[0],
    "a loop in a loop": lambda x, w: TURNS["while"](TURNS["while"](x, w), w),
    "nested": lambda x, w: fr.scan(lambda v, s: (TURNS["while"](v, w) * s, s), x, np.float32([0.5, 2]))[0],
}


@pytest.mark.parametrize("name", TURNS)
def test_what_turns_keep_of_the_most_axes_is_stacked_flat(name: str) -> None:
    draws = np.random.default_rng(0)
    given = [draws.standard_normal(MOST_AXES).astype(np.float32) for _ in range(2)]
    for options in OPTIONS:
        found = []
        for shape in (MOST_AXES, (12,)):
            with fr.Graph() as graph:
                x, w = fr.placeholder("float32", shape), fr.placeholder("float32", shape)
                slopes = fr.gradients(TURNS[name](x, w), [x, w])
                again = fr.gradients(fr.sum(fr.square(slopes[0])), [x])
            with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
                values = session.run([*slopes, *again], {x: given[0].reshape(shape), w: given[1].reshape(shape)})
            found.append([value.reshape(-1) for value in values])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_a_gradient_that_would_stack_too_many_axes_says_so_by_name() -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2, *[1] * 6, None))
        y = fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, fr.sin(v) * v), (0, x), name="turns")[1]
        with pytest.raises(SpecError, match=r"'turns' .*test_gradients_in_bodies.py.*at most 8.*tell all its sizes"):
            fr.gradients(y, [x])


def test_what_a_loop_makes_of_parts_of_other_sizes_is_made_again_on_the_way_back() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (4,))

        def body(n: fr.Tensor, total: fr.Tensor) -> tuple[fr.Tensor, fr.Tensor]:
            part = fr.exp(2.0 * fr.boolean_mask(x, fr.arange(4) <= n))
            return n + 1, total + fr.sum(part * part)

        _, total = fr.while_loop(lambda n, total: n < 3, body, (np.int64(0), np.float64(0)))
        (slope,) = fr.gradients([total], [x])
    given = np.array([0.1, 0.2, 0.3, 0.4])
    with fr.BlockingSession(graph) as session:
        np.testing.assert_allclose(session.run(slope, {x: given}), 4 * np.exp(4 * given) * [3, 2, 1, 0])


def test_what_a_loop_forgets_of_its_first_values_has_no_slope() -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder("float64", (2,)), fr.placeholder("float64", (2,))
        _, last, _ = fr.while_loop(lambda n, a, b: n < 2, lambda n, a, b: (n + 1, 2.0 * b, b), (np.int64(0), x, y))
        slopes = fr.gradients([fr.sum(last)], [x, y])
    with fr.BlockingSession(graph) as session:
        found = session.run(slopes, {x: np.ones(2), y: np.ones(2)})
    np.testing.assert_array_equal(found, [[0, 0], [2, 2]])
