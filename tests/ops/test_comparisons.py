"""Tensors compare entry by entry, as arrays do, and hash by identity; looking for one among others takes `is`."""

from __future__ import annotations

import copy
import operator
from typing import Any

import numpy as np
import pytest

import flowrt as fr

VALUE = np.array([1.0, 2.0, np.nan], np.float32)
OTHERS: list[Any] = [
    1,
    2.0,
    True,
    np.float64(2),
    np.int8(1),
    np.array(2.0),
    np.float32([1, 3, 3]),
    np.int64([[1], [2]]),
    [1, 2, 3],
    (1.0, 0.0, np.nan),
]


@pytest.mark.parametrize("compare", [operator.eq, operator.ne], ids=["equal", "not equal"])
def test_tensors_compare_entry_by_entry_with_numbers_arrays_and_lists_on_either_side(compare: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        v = fr.Variable(VALUE)
        made = [compare(x, other) for other in OTHERS]
        made += [compare(other, x) for other in OTHERS]
        made += [compare(v, other) for other in OTHERS]
        made += [compare(x, v), compare(v, x), compare(x, x), compare(v, v)]
    with fr.BlockingSession(graph) as session:
        got = session.run(made, {x: VALUE})
    want = [compare(VALUE, other) for other in OTHERS] * 3 + [compare(VALUE, VALUE)] * 4
    for mine, judge in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, judge, strict=True)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("int8", 300), ("uint8", -1), ("uint8", 256), ("int32", 2**40), ("float32", 1e300), ("float32", -1e300)],
)
@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.ge])
def test_a_number_that_the_dtype_cannot_hold_is_compared_with_what_it_is(dtype: str, number: Any, compare: Any) -> None:
    value = np.array([0, 1, 44], dtype)
    with fr.Graph() as graph:
        x = fr.placeholder(dtype, (3,))
        made = compare(x, number)
    with fr.BlockingSession(graph) as session:
        assert session.run(made, {x: value}).tolist() == [compare(entry, number) for entry in (0, 1, 44)]


def test_nothing_that_has_no_entries_equals_a_tensor() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        v = fr.Variable(VALUE)
        count = len(graph.nodes)
        for tensor in (x, v):
            for other in (None, "float32", b"x", x.op, graph, object(), {"x": 1}, int, np.str_("x")):
                assert (tensor == other) is False
                assert (tensor != other) is True
                assert (other == tensor) is False
        assert (x.op == x.op, x.op == v.initializer, None in [x, v], "x" in [x]) == (True, False, False, False)
        assert len(graph.nodes) == count


@pytest.mark.parametrize("other", [[None], ["a"], np.array(["a"]), 1j, [1.0, 2.0], np.ones(4)])
def test_what_has_entries_that_do_not_compare_names_the_line(other: Any) -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (3,))
        with pytest.raises(fr.SpecError, match=r"^equal \(\S*test_comparisons.py:\d+\)"):
            _ = x == other


def test_a_comparison_is_a_condition() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("int32", ())
        chosen = fr.cond(x == 1, lambda: x + 10, lambda: x)
        counted = fr.while_loop(lambda i: i != x, lambda i: i + 1, np.int32(-3))
    with fr.BlockingSession(graph) as session:
        assert session.run([chosen, counted], {x: 1}) == [11, 1]
        assert session.run([chosen, counted], {x: 2}) == [2, 2]


def test_tensors_and_variables_are_keys_by_identity() -> None:
    with fr.Graph():
        x, y = fr.placeholder("float32", (3,)), fr.placeholder("float32", (3,))
        v, w = fr.Variable(VALUE), fr.Variable(VALUE)
        everything = [x, y, v, w, x + y, v.read()]
        named = {tensor: number for number, tensor in enumerate(everything)}
        assert [named[tensor] for tensor in everything] == list(range(6))
        assert len({*everything, *everything}) == 6
        assert {(x, v): 1}[(x, v)] == 1
        assert (y, v) not in {(x, v): 1}
        assert copy.copy({x: 1})[x] == 1


def test_looking_for_a_tensor_in_a_list_says_what_to_ask_with() -> None:
    with fr.Graph():
        x, y = fr.placeholder("float32", (3,)), fr.placeholder("float32", (3,))
        assert y in [y, x]  # Python asks for identity first
        with pytest.raises(fr.GraphError, match=r"test_comparisons.py:\d+: .*fr.cond.*`a is b`"):
            _ = x in [y]
        with pytest.raises(fr.GraphError, match=r"test_comparisons.py:\d+: .*fr.cond"):
            bool(x > y)
