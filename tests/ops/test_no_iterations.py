"""Loops that happen to take no iteration: what they carry is as it began, and gradients flow by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.sched.loops.structured import StackedRows

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS: list[dict[str, Any]] = [{}, {"optimize": False}, {"tapes": False}]
X, W, ROWS = np.full((3, 2), 0.7), np.full((3, 2), 0.5), np.full((4, 3, 2), 0.6)

INSIDE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scan": lambda v, w, rows: fr.scan(lambda c, r: (fr.sin(c) * r + w, c * w), v, rows)[0],
    "while": lambda v, w, rows: fr.while_loop(lambda j, u: j < 2, lambda j, u: (j + 1, fr.sin(u) * w), (0, v))[1],
    "map": lambda v, w, rows: fr.sum(fr.map_fn(lambda r: fr.sin(r) * w * v, rows), 0),
    "cond": lambda v, w, rows: fr.cond(fr.sum(v) > 0, lambda: fr.sin(v) * w, lambda: INSIDE["scan"](v, w, rows)),
}


@pytest.mark.parametrize("sizes", [(3, 2), (None, 2)], ids=str)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_gradient_goes_by_a_loop_around_another(inside: str, sizes: tuple[int | None, ...]) -> None:
    with fr.Graph() as graph:
        x, w = fr.placeholder("float64", sizes), fr.placeholder("float64", sizes)
        rows, n = fr.placeholder("float64", (None, *sizes)), fr.placeholder("int64", ())
        slopes = []
        for most in (n, np.int64(0)):
            y = fr.while_loop(
                lambda i, v, most=most: fr.less(i, most), lambda i, v: (i + 1, INSIDE[inside](v, w, rows)), (0, x)
            )[1]
            slopes.append([s for s in fr.gradients(fr.sum(fr.sin(y)), [x, w, rows]) if s is not None])
    for options in WAYS:
        with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
            for found in session.run(slopes, {x: X, w: W, rows: ROWS, n: 0}):
                for got, want in zip(found, (np.cos(X), np.zeros_like(W), np.zeros_like(ROWS)), strict=False):
                    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=str(options))


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_what_maps_no_rows_has_gradients_of_either_order(options: dict[str, Any]) -> None:
    with fr.Graph() as graph:
        rows, w = fr.placeholder("float64", (None, 3)), fr.placeholder("float64", (3,))
        y = fr.map_fn(lambda row: fr.sin(row) * w, rows)
        first = fr.gradients(fr.sum(y * y), [rows, w])
        second = fr.gradients([fr.sum(slope * slope) for slope in first], [rows, w])
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        found = session.run([y, *first, *second], {rows: np.zeros((0, 3)), w: np.ones(3)})
    for got, shape in zip(found, [(0, 3), (0, 3), (3,), (0, 3), (3,)], strict=True):
        np.testing.assert_array_equal(got, np.zeros(shape))


def test_no_rows_have_the_shape_that_a_stretch_of_no_turns_told() -> None:
    rows = StackedRows().and_rows(np.zeros((0, 4, 2)), (4, 2))
    assert rows.stacked(Spec("float64", (None, None, 2)), 0, False).shape == (0, 4, 2)
    assert rows.and_rows([np.ones((5, 2))]).stacked(Spec("float64", (None, None, 2)), 1, False).shape == (1, 5, 2)
