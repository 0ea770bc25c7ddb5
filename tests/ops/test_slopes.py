"""First and second slopes of elementwise ops where numbers end: limits at ±inf, NaN, very large and very small."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import flowrt as fr

NAN, INF = math.nan, math.inf
AT = (-INF, -1e30, 1e30, INF, NAN)
Slopes = tuple[float, ...]
FLAT: Slopes = (0, 0, 0, 0, NAN)
STEP: Slopes = (0, 0, 1, 1, NAN)
GROWING: Slopes = (0, 0, INF, INF, NAN)

LIMITS: dict[str, tuple[Any, Slopes, Slopes]] = {
    "exp": (fr.exp, GROWING, GROWING),
    "expm1": (fr.expm1, GROWING, GROWING),
    "erf": (fr.erf, FLAT, FLAT),
    "square": (fr.square, (-INF, -2e30, 2e30, INF, NAN), (2, 2, 2, 2, 2)),
    "reciprocal": (fr.reciprocal, FLAT, FLAT),
    "tanh": (fr.tanh, FLAT, FLAT),
    "sigmoid": (fr.sigmoid, FLAT, FLAT),
    "atan": (fr.atan, FLAT, FLAT),
    "sinh": (fr.sinh, (INF,) * 4 + (NAN,), (-INF, -INF, INF, INF, NAN)),
    "cosh": (fr.cosh, (-INF, -INF, INF, INF, NAN), (INF,) * 4 + (NAN,)),
    "softplus": (fr.nn.softplus, STEP, FLAT),
    "silu": (fr.nn.silu, STEP, FLAT),
    "gelu": (fr.nn.gelu, STEP, FLAT),
    "gelu by tanh": (lambda x: fr.nn.gelu(x, approximate=True), STEP, FLAT),
    "elu": (fr.nn.elu, STEP, FLAT),
    "maximum": (lambda x: fr.maximum(x, 0), (0, 0, 1, 1, 1), (0, 0, 0, 0, 0)),
    "minimum": (lambda x: fr.minimum(x, 0), (1, 1, 0, 0, 1), (0, 0, 0, 0, 0)),
}


def slopes(function: Any, at: list[Any], dtype: str) -> list[Any]:
    """The first slopes by each argument, then the second by the first."""
    with fr.Graph() as graph:
        xs = [fr.placeholder(dtype, x.shape) for x in at]
        first = fr.gradients(fr.sum(function(*xs)), xs)
        second = fr.gradients(fr.sum(first[0]), xs[:1])
    with fr.BlockingSession(graph) as session:
        fed = dict(zip(xs, at, strict=True))
        return [np.zeros(at[0].shape) if s is None else session.run(s, fed) for s in (*first, *second)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LIMITS)
def test_slopes_at_the_ends_are_their_limits(name: str, dtype: str) -> None:
    function, first, second = LIMITS[name]
    found = slopes(function, [np.array(AT, dtype)], dtype)
    for mine, limit in zip(found, (first, second), strict=True):
        np.testing.assert_allclose(mine, np.array(limit, dtype), rtol=1e-6, atol=1e-29, err_msg=f"{name} at {AT}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_silu_has_its_slopes_everywhere(dtype: str) -> None:
    x = np.array([-50, -39, -3, -0.5, 0, 1e-30, 0.5, 3, 39, 41, 50], dtype)
    s = 1 / (1 + np.exp(-x.astype(np.longdouble)))
    first, second = slopes(fr.nn.silu, [x], dtype)
    tight = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(first, s * (1 + x * (1 - s)), rtol=tight, atol=1e-15)
    np.testing.assert_allclose(second, s * (1 - s) * (2 + x * (1 - 2 * s)), rtol=tight, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", ["1", "least", "most", "infinite"])
def test_distances_and_angles_have_slopes_of_any_size(size: str, dtype: str) -> None:
    ends = np.finfo(dtype)
    far = {"1": 1.0, "least": float(ends.tiny) * 4, "most": float(ends.max) / 8, "infinite": INF}[size]
    x, y = np.array([far, far * 3 if far < INF else 1.0], dtype), np.array([1.0 if far == INF else 0.0, far * 4], dtype)
    along, across, _ = slopes(fr.hypot, [x, y], dtype)
    turn_y, turn_x, _ = slopes(fr.atan2, [y, x], dtype)
    length = np.array([far, far * 5], dtype)
    cosines, sines = ([1, 0], [0, 1]) if far == INF else ([1, 0.6], [0, 0.8])
    none = float(ends.tiny)  # what stands for 1 over the infinite
    np.testing.assert_allclose([along, across], [cosines, sines], rtol=1e-6, atol=none)
    np.testing.assert_allclose(turn_y, cosines / length, rtol=1e-6, atol=none)
    np.testing.assert_allclose(turn_x, -np.array(sines) / length, rtol=1e-6, atol=none)


CORNERS: dict[str, tuple[Any, tuple[float, ...], tuple[float, ...]]] = {  # of what, where, and the slopes there
    "maximum of equal ones": (fr.maximum, (2, 2), (1, 0)),
    "minimum of equal ones": (fr.minimum, (2, 2), (1, 0)),
    "what lies on a bound": (lambda x, low: fr.clip(x, low, 3), (2, 2), (1, 0)),
    "the largest of equal ones": (lambda *xs: fr.max(fr.stack(xs)), (2, 2, 1), (0.5, 0.5, 0)),
    "relu at 0": (fr.nn.relu, (0,), (0,)),
    "abs at 0": (fr.abs, (0,), (0,)),
    "0 to the power 0": (fr.pow, (0, 0), (0, 0)),
    "0 to the power 1": (fr.pow, (0, 1), (1, 0)),
    "remainder": (fr.remainder, (7.5, 2), (1, -3)),
    "remainder of less than 0": (fr.remainder, (-7.5, 2), (1, 4)),
    "remainder of a divisor less than 0": (fr.remainder, (7.5, -2), (1, 4)),
}


def test_slopes_at_corners_are_those_that_are_documented() -> None:
    with fr.Graph() as graph:
        xs = {name: [fr.placeholder("float64", ()) for _ in at] for name, (_, at, _) in CORNERS.items()}
        made = {name: fr.gradients(CORNERS[name][0](*each), each) for name, each in xs.items()}
    feeds = {x: value for name, each in xs.items() for x, value in zip(each, CORNERS[name][1], strict=True)}
    with fr.BlockingSession(graph) as session:
        found = session.run(made, feeds)
    for name, (_, at, wanted) in CORNERS.items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=f"{name} at {at}")
