"""Nodes written as cheaper ones that mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_fuse import ops, plan_of

import flowrt as fr
from flowrt.passes.simplify import POWERS

Array = np.ndarray[Any, Any]


def answered(function: Callable[[Any], Any], x: Array, *, optimize: bool = True) -> Array:
    with fr.Graph() as graph:
        feed = fr.placeholder(x.dtype, x.shape)
        y = function(feed)
    with fr.BlockingSession(graph, options=fr.Options(optimize=optimize)) as session:
        return np.array(session.run(y, {feed: x}))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_power_by_a_number_is_the_power(power: float, dtype: str) -> None:
    info = np.finfo(dtype)
    powers = np.linspace(np.log2(float(info.tiny)) - 20, np.log2(float(info.max)) - 0.1, 999)
    x = np.concatenate([2.0**powers, np.linspace(0.1, 9, 99), [0.0, 1.0, np.inf, np.nan]]).astype(dtype)
    if power == round(power):
        x = np.concatenate([x, -x])
    with np.errstate(all="ignore"):
        judge = np.power(x.astype(np.longdouble), np.longdouble(power)).astype(dtype)
    found = answered(lambda x: x**power, x)
    with np.errstate(all="ignore"):
        error = np.abs(found.astype(np.longdouble) - judge)
        wrong = ~((found == judge) | (np.isnan(found) & np.isnan(judge)) | (error <= 3 * np.spacing(np.abs(judge))))
    assert not wrong.any(), (x[wrong][:5], found[wrong][:5], judge[wrong][:5])


def test_slopes_of_a_power_are_powers() -> None:
    x = np.linspace(0.5, 3, 20)
    found = answered(lambda x: fr.gradients(fr.sum(x**-1.5), [x])[0], x)
    np.testing.assert_allclose(found, -1.5 * x**-2.5, rtol=1e-14)


def test_other_powers_are_left_alone() -> None:
    for function in (lambda x: x**2.5, lambda x: 2.0**x, lambda x: x ** np.ones(9, "float32")):
        assert ops(plan_of(function, (9,))) == [["pow"]]
    assert answered(lambda x: x**2, np.array([-3, 2**31], "int64")).tolist() == [9, 2**62]
    assert answered(lambda x: x**-1, np.array([-1, 1, 2], "int32")).tolist() == [-1, 1, 0]


@pytest.mark.parametrize(
    ("function", "view"),
    [
        (lambda x: x[None], True),
        (lambda x: x[:, None, :, None], True),
        (lambda x: x[..., None], True),
        (lambda x: x[None, ..., None, :], True),
        (lambda x: x[:, None, :2], False),
        (lambda x: x[None, 0], False),
    ],
)
def test_an_index_that_only_puts_axes_in_copies_nothing(function: Callable[[Any], Any], view: bool) -> None:
    x = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(answered(function, x), function(x))
    assert (["expand_dims"] in ops(plan_of(function, x.shape))) == view


def test_powers_in_a_loop_are_simplified_too() -> None:
    def turned(x: Any) -> Any:
        return fr.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, (x[None] ** 2)[0] ** 0.5 + 1.0), (0, x))[1]

    x = np.abs(np.random.default_rng(0).normal(size=300))
    np.testing.assert_allclose(answered(turned, x), x + 3, rtol=1e-14)
    np.testing.assert_allclose(answered(turned, x, optimize=False), x + 3, rtol=1e-14)
