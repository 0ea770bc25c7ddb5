"""Index expressions mean what NumPy's do, also where only a step knows an index, several, or a bound of a slice."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS = (None, -9, -4, -1, 0, 2, 3, 9)
VALUES = np.arange(24.0).reshape(4, 3, 2) + 1

KEYS: dict[str, Callable[[Any], Any]] = {
    "an index": lambda t: t,
    "from the end": lambda t: -t,
    "of the second axis": lambda t: (slice(None), t),
    "of the last axis": lambda t: (..., t),
    "two indices": lambda t: (t + 1, t),
    "beside a slice": lambda t: (t, slice(1, None), None),
    "beside a slice by it": lambda t: (slice(t, None), 1, slice(None, -t)),
    "two slices by it": lambda t: (slice(t, t + 2), slice(None, None, -1), slice(None, t)),
    "behind a new axis": lambda t: (None, ..., slice(t, None)),
    "a window beyond the end": lambda t: slice(t + 1, t + 9),
    "all of it": lambda t: (t, t, t - 1),
    "two arrays": lambda t: (np.array([0, 2]) + t, np.array([0, -2]) + t),
    "arrays that are known": lambda t: ([3, 0, 1], [[0], [-1]]),
    "arrays that broadcast": lambda t: (np.array([[0], [2]]) + t, np.array([0, 1]), slice(None, t)),
    "an array beside an index": lambda t: (t, np.array([0, 1]) * t),
    "an index beside an array": lambda t: (slice(None, None, -1), np.array([2, 0]) * t, -1),
    "arrays behind slices": lambda t: (slice(t, None), np.array([0, 2]) * t, np.array([0, 1])),
    "arrays behind a new axis": lambda t: (None, [1, 0], np.array([1, 2]) * t, None),
    "arrays beside an index": lambda t: (np.array([1, 0]) * t, t, np.array([0, 1]), ...),
    "arrays of all axes": lambda t: (..., np.array([1, -2]) * t, np.array([0, 1]), [1, 0]),
    "arrays of none": lambda t: (..., np.array([], np.int64) * t, np.array([], np.int64)),
}


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"tapes": False}], ids=str)
@pytest.mark.parametrize("step", [None, 2, -1, -3])
def test_a_slice_whose_bounds_are_fed_is_clipped_as_numpys(step: int | None, options: dict[str, Any]) -> None:
    with fr.Graph() as graph:
        x, start, stop = (fr.placeholder(*spec) for spec in (("int32", (None,)), ("int64", ()), ("int8", ())))
        cut = [x[start:stop:step], x[start::step], x[:stop:step]]
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        for size, first, last in itertools.product((0, 1, 4), BOUNDS[1:], BOUNDS[1:]):
            array = np.arange(size, dtype="int32")
            got = session.run(cut, {x: array, start: np.int64(first), stop: np.int8(last)})  # type: ignore[arg-type]
            for found, wanted in zip(got, (array[first:last:step], array[first::step], array[:last:step]), strict=True):
                np.testing.assert_array_equal(found, wanted, err_msg=f"{size}: {first}, {last}")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", KEYS)
def test_a_part_that_a_step_names_has_numpys_shape_and_its_gradient_is_put_back(name: str, known: bool) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", VALUES.shape if known else (None, None, None))
        t = fr.placeholder("int64", ())
        part = x[KEYS[name](t)]
        (slope,) = fr.gradients(fr.sum(fr.square(part)), [x])
    key = KEYS[name](1)
    wanted, placed = VALUES[key], np.zeros(VALUES.shape)
    placed[key] = 2 * VALUES[key]
    assert len(part.shape) == wanted.ndim
    with fr.BlockingSession(graph) as session:
        found = session.run([part, slope], {x: VALUES, t: 1})
    np.testing.assert_array_equal(found[0], wanted)
    np.testing.assert_array_equal(found[1], placed)


@pytest.mark.parametrize("ids", [[2, -1, 2], np.array([[0, 3]]), np.array([], "int64"), []], ids=str)
def test_integers_in_an_array_list_or_tensor_take_entries(ids: Any) -> None:
    with fr.Graph() as graph:
        x, table = fr.placeholder("float64", VALUES.shape), fr.Variable(VALUES)
        given = fr.placeholder("int64", (None,) * np.ndim(ids))
        plain = np.asarray(ids, "int64")
        built = [x[ids], x[given], x[:, 1:, plain % 2], x[..., given % 2, None], table[given]]
        (rows,) = fr.gradients(fr.sum(table[given]), [table])
    assert isinstance(rows, fr.IndexedSlices)
    wanted = [VALUES[plain], VALUES[plain], VALUES[:, 1:, plain % 2], VALUES[..., plain % 2, None], VALUES[plain]]
    with fr.BlockingSession(graph) as session:
        for found, want in zip(session.run(built, {x: VALUES, given: plain}), wanted, strict=True):
            np.testing.assert_array_equal(found, want)


def test_arrays_of_indices_count_what_they_name_more_than_once_and_are_of_any_integers() -> None:
    rows, columns = np.int8([1, -1, 1, 1]), np.uint64([2, 0, 2, 0])
    with fr.Graph() as graph:
        x, i, j = (fr.placeholder(*spec) for spec in (("float64", (4, None, 2)), ("int8", (4,)), ("uint64", (None,))))
        taken = x[i, j]
        (slope,) = fr.gradients(fr.sum(taken), [x])
    assert taken.shape == (4, 2)
    placed = np.zeros(VALUES.shape)
    np.add.at(placed, (rows, columns), 1)
    with fr.BlockingSession(graph) as session:
        found = session.run([taken, slope], {x: VALUES, i: rows, j: columns})
        np.testing.assert_array_equal(found[0], VALUES[rows, columns])
        np.testing.assert_array_equal(found[1], placed)
        for far in ([3, 0, 0, 0], [0, 0, 0, 2**64 - 1]):
            with pytest.raises(fr.FlowrtError, match=r"test_indexing.py:\d+\): an index is out of range"):
                session.run(taken, {x: VALUES, i: rows, j: np.uint64(far)})


def test_bounds_that_are_known_while_the_graph_is_built_leave_no_size_open() -> None:
    with fr.Graph():
        x, y = fr.placeholder("float32", (8, None)), fr.placeholder("float32", (5, None))
        rows = fr.shape_of(y)[0]
        assert x[:rows].shape == (5, None)
        assert x[np.int8(2) : rows - 1 : 2].shape == (1, None)
        assert x[: fr.shape_of(y)[1]].shape == (None, None)


def test_a_bound_may_be_unsigned_and_far_beyond_the_end() -> None:
    with fr.Graph() as graph:
        x, t = fr.constant(VALUES), fr.placeholder("uint64", ())
        parts = [x[:t], x[t:], x[t::-1]]
    with fr.BlockingSession(graph) as session:
        got = session.run(parts, {t: np.uint64(2**64 - 1)})
    np.testing.assert_array_equal(got[0], VALUES)
    assert got[1].shape == (0, 3, 2)
    np.testing.assert_array_equal(got[2], VALUES[::-1])


def test_a_known_bound_beyond_64_bits_beside_one_that_a_step_names_is_clipped() -> None:
    with fr.Graph() as graph:
        x, t = fr.constant(VALUES), fr.placeholder("int64", ())
        parts = [x[-(2**70) : t], x[t : 2**70], x[t : -(2**70) : -1], x[2**70 : t]]
    with fr.BlockingSession(graph) as session:
        got = session.run(parts, {t: np.int64(2)})
    for found, wanted in zip(got, (VALUES[:2], VALUES[2:], VALUES[2::-1], VALUES[:0]), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_index_out_of_range_fails_the_step() -> None:
    with fr.Graph() as graph:
        x, t = fr.constant(VALUES), fr.placeholder("int64", ())
        entry = x[:, t]
    with fr.BlockingSession(graph) as session:
        for index in (3, -4):
            with pytest.raises(fr.FlowrtError, match=r"test_indexing.py:\d+\): an index is out of range"):
                session.run(entry, {t: index})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (lambda t: np.array([True, False, True]), r"a mask is shaped as the axes that it chooses from, .*not \(3,\)"),
        (lambda t: (np.ones(4, bool), np.ones(3, bool)), "one mask stands in an index, beside slices alone"),
        (lambda t: (np.ones(4, bool), t), "one mask stands in an index, beside slices alone"),
        (lambda t: t > 1, "or a mask of bools, not <Tensor"),
        (lambda t: 1.0, "index with integers"),
        (lambda t: [[1], [1, 2]], "is not a tensor: setting an array element with a sequence"),
        (lambda t: np.ones(3, complex), "is not a tensor: its dtype would be complex128"),
        (lambda t: slice(None, t > 1), "a slice is from integer to integer"),
        (lambda t: slice(None, 1.5), "a slice is from integer to integer"),
        (lambda t: slice(None, fr.stack([t, t])), "a slice is from integer to integer"),
        (lambda t: slice(None, None, t), "a slice is by an int that is known while the graph is built"),
        (lambda t: (t, t, t, t), "4 indices do not fit"),
        (lambda t: (..., t, ...), "1 indices do not fit"),
        (lambda t: ([0, 1], slice(None), [0, 1]), r"must follow one another, as in x\[:, i, j\]"),
        (lambda t: (0, slice(None), [0, 1]), "put the axes of x in another order first, by fr.transpose"),
    ],
)
def test_what_is_no_index_names_the_line_and_the_way(key: Callable[[Any], Any], says: str) -> None:
    with fr.Graph():
        x, t = fr.placeholder("float32", (4, 3, 2)), fr.placeholder("int64", ())
        with pytest.raises(fr.GraphError, match=rf"test_indexing.py:\d+\)?: .*{says}"):
            x[key(t)]


def decoded(steps: Any, first: Any, weight: Any, keys: Any) -> Any:
    """A decoder, whose every step attends to those before it."""

    def step(t: Any, state: Any, keys: Any) -> tuple[Any, Any, Any]:
        keys = fr.where(fr.arange(4)[:, None] == t, state @ weight, keys)
        seen = keys[: t + 1]
        return t + 1, fr.tanh(state + fr.nn.softmax(seen @ state) @ seen), keys

    return fr.while_loop(lambda t, state, keys: t < steps, step, (0, first, keys))[1]


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"tapes": False}], ids=str)
def test_gradients_go_through_a_loop_that_takes_more_in_each_iteration(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    state, weight = rng.normal(size=3), rng.normal(size=(3, 3))
    with fr.Graph() as graph:
        steps, first, w = (fr.placeholder(*spec) for spec in (("int64", ()), ("float64", (3,)), ("float64", (3, 3))))
        end = fr.sum(fr.sin(decoded(steps, first, w, fr.zeros((4, 3), "float64"))))
        (slope,) = fr.gradients(end, [w])
        (bend,) = fr.gradients(fr.sum(fr.square(slope)), [w])
    along = rng.normal(size=weight.shape)
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        for count in (0, 1, 4):
            moved = (weight + 1e-5 * along, weight - 1e-5 * along)
            near = [session.run([end, slope], {steps: count, first: state, w: value}) for value in moved]
            found = session.run([slope, bend], {steps: count, first: state, w: weight})
            rise = (near[0][0] - near[1][0]) / 2e-5
            turn = (np.square(near[0][1]).sum() - np.square(near[1][1]).sum()) / 2e-5
            np.testing.assert_allclose((found[0] * along).sum(), rise, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose((found[1] * along).sum(), turn, rtol=1e-6, atol=1e-9)


def test_draws_of_a_size_that_differs_are_the_same_on_the_way_back() -> None:
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float64", (4,))

        def step(t: Any, total: Any, kept: Any) -> tuple[Any, Any, Any]:
            draws = fr.random.uniform((t + 1,), dtype="float64")
            drawn = fr.sum(fr.one_hot(fr.arange(t + 1), 4, "float64") * fr.expand_dims(draws, 1), 0)
            return t + 1, total + fr.sum(fr.square(x[: t + 1]) * draws), kept + drawn

        start = (0, np.float64(0), fr.zeros((4,), "float64"))
        _, total, drawn = fr.while_loop(lambda t, total, kept: t < 4, step, start)
        (slope,) = fr.gradients(total, [x])
    with fr.BlockingSession(graph) as session:
        found, wanted = session.run([slope, drawn], {x: np.ones(4)})
    np.testing.assert_allclose(found, 2 * wanted)


def test_what_is_taken_of_a_shape_is_known_where_that_is() -> None:
    with fr.Graph():
        shape = fr.shape_of(fr.placeholder("float32", (None, 2, 6)))
        assert fr.ones(fr.take(shape, [2, 0, -2]), "float32").shape == (6, None, 2)
        assert fr.ones(fr.take(shape, 1), "float32").shape == (2,)
        where = fr.placeholder("int64", (2,))
        assert fr.ones(fr.take(shape, where), "float32").shape == (None, None)
        assert fr.take(shape, 3).shape == ()  # out of range: the step's error
