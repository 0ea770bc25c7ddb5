"""Programs over rows of a few entries, computed coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_world import compile_here

import flowrt as fr
from flowrt.kernels.fusion import coordinates, fused
from flowrt.kernels.fusion.coordinates import by_coordinates

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Small programs, too; whether each that was asked for became one of coordinates."""
    found: list[bool] = []

    def recording(*given: Any) -> Any:
        made = by_coordinates(*given)
        found.append(made is not None)
        return made

    monkeypatch.setattr(coordinates, "FEW", 1)
    monkeypatch.setattr(fused, "by_coordinates", recording)
    return found


def apart(x: Any) -> Any:
    return fr.expand_dims(x, 0) - fr.expand_dims(x, 1)


def np_apart(x: Array) -> Array:
    return np.asarray(x[None] - x[:, None])


def pull(x: Any) -> Any:
    d = apart(x)
    squares = fr.sum(d * d, -1) + 0.01
    return fr.sum(d * fr.expand_dims(fr.rsqrt(squares) / squares, -1), 1)


def np_pull(x: Array) -> Array:
    d = np_apart(x)
    return np.asarray(np.sum(d / (np.sum(d * d, -1, keepdims=True) + 0.01) ** 1.5, 1))


def directions(x: Any) -> Any:
    d = apart(x)
    return d * fr.rsqrt(fr.sum(d * d, -1, keepdims=True) + 0.01)


def np_directions(x: Array) -> Array:
    d = np_apart(x)
    return np.asarray(d / np.sqrt(np.sum(d * d, -1, keepdims=True) + 0.01))


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Array], Array]]] = {
    "a sum for each coordinate": (pull, np_pull),
    "a result with coordinates": (directions, np_directions),
    "one of all entries": (lambda x: fr.max(directions(x), (0, 2)), lambda x: np_directions(x).max((0, 2))),
    "a sum of everything": (
        lambda x: fr.sum(directions(x), keepdims=True),
        lambda x: np_directions(x).sum(keepdims=True),
    ),
    "means of points": (
        lambda x: fr.mean(apart(x) - fr.mean(directions(x), -1, keepdims=True), (1, 2)),
        lambda x: (np_apart(x) - np_directions(x).mean(-1, keepdims=True)).mean((1, 2)),
    ),
    "the nearest": (
        lambda x: fr.min(fr.mean(fr.square(apart(x)), -1), 1),
        lambda x: (np_apart(x) ** 2).mean(-1).min(1),
    ),
    "means of columns": (lambda x: fr.mean(directions(x), 0), lambda x: np_directions(x).mean(0)),
    "distances": (lambda x: fr.sqrt(fr.sum(apart(x) * apart(x), -1)), lambda x: np.sqrt((np_apart(x) ** 2).sum(-1))),
    "the farthest coordinate": (
        lambda x: fr.max(fr.abs(apart(x)), -1) - fr.min(apart(x), -1) * 2.0,
        lambda x: abs(np_apart(x)).max(-1) - np_apart(x).min(-1) * 2.0,
    ),
}


def answered(function: Callable[[Any], Any], x: Array, times: int = 1) -> Array:
    with fr.Graph() as graph:
        feed = fr.placeholder(x.dtype, x.shape)
        y = function(feed)
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [feed])
        return np.array([step(x) for _ in range(times)][-1])


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_of_points_answers_as_numpy(name: str, width: int, written: list[bool]) -> None:
    """Its members are launches of their own here, since nobody has compiled it."""
    function, judge = FUNCTIONS[name]
    x = np.random.default_rng(width).normal(size=(7, width))
    np.testing.assert_allclose(answered(function, x), judge(x), rtol=1e-11, atol=1e-13)
    assert any(written)


def test_its_slopes_are_those_of_differences(written: list[bool]) -> None:
    x = np.random.default_rng(5).normal(size=(6, 3))
    weights = np.random.default_rng(6).normal(size=(6, 3))

    def slope(x: Any) -> Any:
        return fr.gradients(fr.sum(pull(x) * weights), [x])[0]

    found, h = answered(slope, x), 1e-6
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = h
        judge = np.sum((np_pull(x + step) - np_pull(x - step)) * weights) / (2 * h)
        assert found[at] == pytest.approx(judge, rel=1e-6, abs=1e-7)
    assert any(written)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fr.sum(fr.astype(apart(x) * 4.0, "int8") * 2, -1),  # a wider dtype than that of what is added
        lambda x: fr.sum(fr.square(fr.concat([apart(x), apart(x)], -1)), -1),  # rows of six entries
    ],
)
def test_other_programs_of_rows_are_left_as_they_are(function: Callable[[Any], Any], written: list[bool]) -> None:
    x = np.random.default_rng(7).normal(size=(5, 3))
    with fr.Graph() as graph:
        feed = fr.placeholder("float64", x.shape)
        y = function(feed)
    with fr.BlockingSession(graph, options=fr.Options(optimize=False)) as session:
        judge = session.run(y, {feed: x})
    np.testing.assert_allclose(answered(function, x), judge, rtol=1e-11, atol=1e-13)
    assert written
    assert not any(written)


def test_compiled_it_answers_the_same(monkeypatch: pytest.MonkeyPatch, written: list[bool]) -> None:
    compile_here(monkeypatch)
    x = np.random.default_rng(8).normal(size=(130, 3)).astype("float32")
    found = answered(pull, x, times=4)
    np.testing.assert_allclose(found, np_pull(x.astype("float64")), rtol=1e-4, atol=1e-3)
    assert any(written)
