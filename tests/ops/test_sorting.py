"""Entries in order: beside NumPy's stable sort at all sizes, in loops and steps, and with their slopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_examples_sorting import numpys_order, sorted_by_numpy

import flowrt as fr
from flowrt.kernels.ops.sorting.lines import PLACES_BESIDE, SMALL, VALUES_BESIDE
from flowrt.ops import sorting

Array = np.ndarray[Any, Any]
LIMITS = {*PLACES_BESIDE.values(), *VALUES_BESIDE.values()}
SIZES = [1, 2, 15, 17, 33, 100, 256, 257, *sorted(LIMITS), max(LIMITS) + 1]
DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "int64", "float32", "float64"]


def drawn(dtype: str, *sizes: int, seed: int = 0) -> Array:
    """Entries of which some are equal; of floats NaN and both zeros, too."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "f":
        x = rng.normal(size=sizes).astype(dtype)
        some = rng.choice(np.array([0.0, -0.0, np.nan, np.inf, 1.0], dtype), sizes)
        return np.where(rng.random(sizes) < 0.3, some, x)
    held = (0, 1) if kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    wide = rng.integers(*held, sizes, dtype if kind != "b" else "int8", endpoint=True).astype(dtype)
    return np.where(rng.random(sizes) < 0.5, wide, rng.integers(0, 2, sizes).astype(dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("descending", [False, True])
def test_lines_of_any_length_are_ordered_as_numpy_orders_them(dtype: str, size: int, descending: bool) -> None:
    for x, axis in ((drawn(dtype, size), 0), (drawn(dtype, 9, size), -1), (drawn(dtype, size, 19), 0)):
        np.testing.assert_array_equal(fr.argsort(x, axis, descending), numpys_order(x, axis, descending))
        found, wanted = fr.sort(x, axis, descending), sorted_by_numpy(x, axis, descending)
        np.testing.assert_array_equal(found, wanted)
        numbers = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers])  # -0.0 as it stood


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, SMALL, SMALL + 1, 150, 400])
@pytest.mark.parametrize("arranged", [np.array, np.sort, sorted_by_numpy])
def test_the_first_of_each_row_are_those_of_the_row_in_descending_order(dtype: str, k: int, arranged: Any) -> None:
    """Of rows in ascending order each entry is a candidate."""
    x = arranged(drawn(dtype, 3, 400))
    values, indices = fr.top_k(x, k)
    np.testing.assert_array_equal(indices, numpys_order(x, -1, True)[:, :k])
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_entries_are_found_where_numpy_finds_them(dtype: str, side: str) -> None:
    for size in (0, 1, 2, 3, 64, 1000):
        x, values = np.sort(drawn(dtype, size)), drawn(dtype, 200, seed=1)
        np.testing.assert_array_equal(fr.searchsorted(x, values, side), np.searchsorted(x, values, side))


def test_what_is_looked_for_takes_a_dtype_that_holds_both() -> None:
    assert fr.searchsorted(np.arange(5), 2.5) == 3
    assert fr.searchsorted(np.float32([0.5, 1.5]), np.int64([1, 2])).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_differs_is_numpys(dtype: str) -> None:
    x = drawn(dtype, 7, 30)
    for found, wanted in zip(fr.unique(x, True, True, True), np.unique(x, True, True, True), strict=True):
        np.testing.assert_array_equal(found, wanted)


def run(fetches: Any, feeds: Any) -> Any:
    with fr.BlockingSession(next(iter(feeds)).graph) as session:
        return session.run(fetches, feeds)


def test_in_a_step_there_are_as_many_as_its_values_say() -> None:
    with fr.Graph() as graph:
        x, mask = fr.placeholder("float32", (None, 3)), fr.placeholder("bool", (None,))
        fetches = [
            *fr.unique(x, return_inverse=True, return_counts=True),
            *fr.nonzero(x > 0),
            x[mask],
            fr.boolean_mask(x, x > 0),
            fr.boolean_mask(x, [True, False, True], axis=1),
        ]
    many = (None,)
    assert [t.shape for t in fetches] == [many, (None, 3), many, many, many, (None, 3), many, (None, None)]
    with fr.BlockingSession(graph) as session:
        for rows in (4, 0, 9, 4):
            a, m = drawn("float32", rows, 3, seed=rows), drawn("bool", rows, seed=rows)
            wanted = [*np.unique(a, False, True, True), *np.nonzero(a > 0), a[m], a[a > 0], a[:, [0, 2]]]
            for found, judge in zip(session.run(fetches, {x: a, mask: m}), wanted, strict=True):
                np.testing.assert_array_equal(found, judge)


KEYS: list[Callable[[Any], Any]] = [
    lambda m: m[0],
    lambda m: m[1],
    lambda m: m[2],
    lambda m: (slice(None), m[1][0]),
    lambda m: (..., m[2][0, 0]),
    lambda m: (slice(1, None), m[2][1]),
    lambda m: (None, m[0], ..., slice(None, None, -1)),
    lambda m: (..., m[1][0], slice(None, 1)),
    lambda m: (slice(1, None), ..., m[1][0], None, slice(None, 2)),
]


@pytest.mark.parametrize("key", KEYS)
def test_a_mask_chooses_as_numpys_does(key: Callable[[Any], Any]) -> None:
    x = drawn("int32", 3, 4, 5)
    masks = [drawn("bool", *x.shape[:rank], seed=rank) for rank in (1, 2, 3)]
    with fr.Graph():
        given, by = fr.placeholder("int32", (3, 4, 5)), [fr.placeholder("bool", m.shape) for m in masks]
        fetches = [given[key(by)], given[key(masks)]]
    for found in run(fetches, {given: x, **dict(zip(by, masks, strict=True))}):
        np.testing.assert_array_equal(found, x[key(masks)])


def test_slopes_go_back_to_where_entries_stood() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    with fr.Graph():
        given = fr.placeholder("float64", (None, 6))
        weight = fr.arange(6.0, dtype="float64")
        ys = [
            fr.sum(fr.square(fr.sort(given, 1, descending=True)) * weight),
            fr.sum(fr.square(fr.sort(given, None))),
            fr.sum(fr.square(fr.top_k(given, 2)[0]) * weight[:2]),
            fr.sum(fr.square(given[given > 0])),
            fr.sum(fr.unique(given) ** 3),
        ]
        slopes = [fr.gradients(y, given)[0] for y in ys]
        second = [fr.gradients(fr.sum(slope * slope), given)[0] for slope in slopes[:4]]
    ranks = np.argsort(np.argsort(-x, 1), 1)
    factors = [ranks, np.ones_like(x), np.where(ranks < 2, ranks, 0), x > 0]
    found = run([slopes, second], {given: x})
    for slope, curve, factor in zip(found[0], found[1], factors, strict=False):
        np.testing.assert_allclose(slope, 2 * factor * x)
        np.testing.assert_allclose(curve, 8 * np.square(factor) * x)
    np.testing.assert_allclose(found[0][4], 3 * x**2)


def test_equal_entries_have_the_slopes_of_their_own_places() -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (4,))
        slope = fr.gradients(fr.sum(fr.sort(x) * [1, 2, 3, 4]), x)[0]
    assert run(slope, {x: np.float32([5, 1, 5, 1])}).tolist() == [3, 1, 4, 2]


def test_in_loops_and_branches_the_best_are_kept() -> None:
    """A beam: of each state's continuations the best three of all go on."""
    scores = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    with fr.Graph():
        given = fr.placeholder("float32", (5, 8))

        def step(t: Any, totals: Any, path: Any) -> tuple[Any, Any, Any]:
            values, flat = fr.top_k(fr.reshape(totals[:, None] + given[t], (-1,)), 3)
            return t + 1, values, fr.concat([path[flat // 8][:, 1:], (flat % 8)[:, None]], 1)

        start = fr.constant(0), fr.constant(np.float32([0, -np.inf, -np.inf])), fr.zeros((3, 5), "int64")
        _, totals, path = fr.while_loop(lambda t, *_: t < 5, step, start)
        mapped = fr.map_fn(lambda row: fr.sort(row)[-2:], given)
        least = fr.cond(given[0, 0] > 100, lambda: fr.unique(given), lambda: fr.sort(given, None))
    found = run([totals, path, mapped, least], {given: scores})
    best = np.argsort(-scores, 1)[:, 0]
    assert found[1][0].tolist() == best.tolist()
    np.testing.assert_allclose(found[0][0], scores.max(1).sum(), rtol=1e-6)
    assert (np.diff(found[0]) <= 0).all()
    np.testing.assert_array_equal(found[2], np.sort(scores, 1)[:, -2:])
    np.testing.assert_array_equal(found[3], np.sort(scores, None))


def test_a_graph_that_sorts_survives_as_bytes() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        fr.top_k(x, 2, name="best")
        fr.random.randint((3,), 0, 2**64, "uint64", seed=1, name="drawn")
        fr.identity(fr.unique(x), name="different")
    again = fr.Graph.from_bytes(graph.to_bytes())
    names = ["best:0", "best:1", "drawn:0", "different:0"]
    both = []
    for each in (graph, again):
        fetches = [each.get_tensor_by_name(name) for name in names]
        both.append(run(fetches, {each.get_tensor_by_name("x:0"): np.float32([3, 1, 3])}))
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)
    assert both[0][0].tolist() == [3, 3]


X = np.ones((3, 4), np.float32)
MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.sort(X, 2), r"sort \(.*test_sorting.py:\d+\): axis 2 is not among the 2 axes"),
    (lambda: fr.argsort(1.0), "axis -1 is not there: a scalar has none"),
    (lambda: fr.sort(X, (0, 1)), r"axis is an integer or None, got \(0, 1\)"),
    (lambda: fr.top_k(X, 5), r"k is 5, and rows of float32\[3,4\] have only 4 entries"),
    (lambda: fr.top_k(X, -1), "an integer from 0 up, got -1"),
    (lambda: fr.top_k(1.0, 0), "a scalar has no rows"),
    (lambda: fr.searchsorted(1.0, 1.0), "a scalar has no order"),
    (lambda: fr.searchsorted(X, X[:2]), "a row of values for each row of"),
    (lambda: fr.searchsorted(X, 1.0), "a row of values for each row of"),
    (lambda: fr.searchsorted(X[0], 1.0, "middle"), 'side is "left" or "right", got \'middle\''),
    (lambda: fr.nonzero(1.0), "a tensor with axes"),
    (lambda: fr.boolean_mask(X, [1, 0, 1]), "a mask is of bools"),
    (lambda: fr.boolean_mask(X, [True, False]), r"a mask from axis 0 on of float32\[3,4\]"),
    (lambda: fr.boolean_mask(X, True), "a mask has axes"),
    (lambda: fr.boolean_mask(X, [True] * 3, 1), "shaped as its axes from there"),
    (lambda: sorting.true_places(X), "a mask is a vector of bools"),
    (lambda: fr.sort(X, reverse=True), "unexpected keyword argument 'reverse'; write descending="),
    (lambda: fr.searchsorted(X[0], X[0], right=True), "unexpected keyword argument 'right'; write side="),
]


@pytest.mark.parametrize(("call", "says"), MISFITS)
def test_what_does_not_fit_says_why(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(fr.SpecError, match=says):
        call()


def test_a_mask_of_another_size_fails_the_step() -> None:
    with fr.Graph():
        x, mask = fr.placeholder("float32", (None, 3)), fr.placeholder("bool", (None,))
        chosen = x[mask]
    with pytest.raises(fr.SpecError, match=r"test_sorting.py:\d+"):
        run(chosen, {x: X[:, :3], mask: np.array([True])})
