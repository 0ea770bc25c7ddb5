"""What stands for a tensor has an array's usual methods, and they mean what NumPy's do."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)
METHODS: list[Callable[[Any], Any]] = [
    lambda x: x.T,
    lambda x: x.astype("int32"),
    lambda x: x.astype(np.float64),
    lambda x: x.reshape(3, 2),
    lambda x: x.reshape((3, 2)),
    lambda x: x.reshape([3, -1]),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(np.array([6, 1])),
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.sum(axis=(0, 1), keepdims=True),
    lambda x: x.sum(dtype="float64"),
    lambda x: x.mean(axis=1),
    lambda x: x.max(axis=0, keepdims=True),
    lambda x: x.min(),
    lambda x: np.sum(x, axis=1),
    lambda x: np.mean(x),
    lambda x: np.max(x, 0),
]


def test_a_tensor_and_a_variable_have_an_arrays_methods() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3))
        variable = fr.Variable(VALUE)
        built = [[method(value) for method in METHODS] for value in (x, variable)]
    with fr.BlockingSession(graph) as session:
        for found in session.run(built, {x: VALUE}):
            for answer, method in zip(found, METHODS, strict=True):
                wanted = method(VALUE)
                assert answer.dtype == wanted.dtype
                np.testing.assert_array_equal(answer, wanted)


def test_numpys_functions_name_their_namesakes_and_its_operators_work() -> None:
    with fr.Graph() as graph:
        x, variable = fr.placeholder("float32", (2, 3)), fr.Variable(VALUE)
        for value in (x, variable):
            for call, fix in (
                (lambda v: np.exp(v), "write fr.exp"),
                (lambda v: np.arcsin(v), r"write fr.asin\(x\)"),
                (lambda v: np.maximum(VALUE, v), "write fr.maximum"),
                (lambda v: np.add.reduce(v), "np.add.reduce takes arrays"),
                (lambda v: np.add(VALUE, 1, out=v), "np.add takes arrays"),
            ):
                with pytest.raises(GraphError, match=rf"test_operators.py:\d+: .*{fix}"):
                    call(value)
        answers = [
            VALUE - x,
            VALUE[:, :2].T @ x,
            operator.lt(VALUE, x),
            np.float64(2) >= x,
            np.subtract(x, 1),
            7 // (x + 1),
        ]
        kept = VALUE.copy()
        with pytest.raises(GraphError, match=r"np\.add takes arrays"):
            kept += x
    fed = VALUE[::-1] * 2
    wanted = [VALUE - fed, VALUE[:, :2].T @ fed, fed > VALUE, fed <= 2, fed - 1, 7 // (fed + 1)]
    with fr.BlockingSession(graph) as session:
        for found, want in zip(session.run(answers, {x: fed}), wanted, strict=True):
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found, want)


def test_rank_and_size_are_ints_where_they_are_known() -> None:
    with fr.Graph() as graph:
        known, x = fr.Variable(VALUE), fr.placeholder("float32", (None, 3))
        assert (known.ndim, known.size, x.ndim, np.ndim(x)) == (2, 6, 2, 2)
        queue = fr.FIFOQueue(1, "float32")
        with pytest.raises(fr.SpecError, match=r"test_operators.py:\d+: the rank of .* is not known"):
            _ = queue.dequeue().ndim
        size = x.size
        assert (size.dtype, size.shape) == (np.int64, ())
    with fr.BlockingSession(graph) as session:
        assert session.run(size, {x: VALUE}) == 6


def test_a_shape_may_be_sizes_that_a_step_computes() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3))
        rows = fr.shape_of(x)[0]
        built = [x.reshape(rows * 3), x.reshape(3, rows), x.reshape(fr.shape_of(x)[::-1])]
    with fr.BlockingSession(graph) as session:
        assert [a.shape for a in session.run(built, {x: VALUE})] == [(6,), (3, 2), (3, 2)]


def test_a_tensor_is_not_written_into() -> None:
    with fr.Graph():
        x = fr.Variable(VALUE)
        with pytest.raises(fr.GraphError, match=r"test_operators.py:\d+: sum of a tensor makes another one"):
            np.sum(x, out=np.zeros(()))


NUMBERS: list[Callable[[Any], Any]] = [float, int, complex, round, range, math.sqrt, "{:.3f}".format]


@pytest.mark.parametrize("convert", NUMBERS)
def test_what_wants_a_number_now_says_where_there_will_be_one(convert: Callable[[Any], Any]) -> None:
    with fr.Graph():
        for value in (fr.constant(3), fr.Variable(3)):
            with pytest.raises(GraphError, match=r"test_operators.py:\d+: .* no number while the graph is built"):
                convert(value)
            assert f"{value}" == repr(value)
            with pytest.raises(GraphError, match=r"a tensor never changes: fr\.where"):
                value[0] = 1
        with pytest.raises(fr.SpecError, match="stddev is a number"):
            fr.random.normal((3,), stddev=fr.constant(1.0))  # type: ignore[arg-type]
