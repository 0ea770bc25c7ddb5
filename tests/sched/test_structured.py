"""The rows that loops stack: one more costs the same however many there are, and none is lost to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.sched.loops.structured import StackedRows

PAIR = Spec("int64", (None, 2))


def rows_of(*numbers: int) -> StackedRows:
    rows = StackedRows()
    for number in numbers:
        rows = rows.and_rows([np.array([number, -number])])
    return rows


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_become_one_array_in_either_order_with_zeros_behind(reverse: bool) -> None:
    made = rows_of(1, 2, 3).stacked(PAIR, 5, reverse)
    wanted = [3, 2, 1, 0, 0] if reverse else [1, 2, 3, 0, 0]
    np.testing.assert_array_equal(made, [[n, -n] for n in wanted])


def test_no_rows_become_an_array_of_their_shape() -> None:
    assert StackedRows().stacked(PAIR, 0, False).shape == (0, 2)


def test_rows_that_follow_each_other_share_one_list() -> None:
    rows = rows_of(1, 2)
    assert rows.and_rows([np.array([3, -3])]).shared is rows.shared


def test_rows_followed_by_two_different_ones_keep_them_apart() -> None:
    rows = rows_of(1)
    one, other = rows.and_rows([np.array([2, -2])]), rows.and_rows([np.array([3, -3])])
    np.testing.assert_array_equal(rows.stacked(PAIR, 1, False)[:, 0], [1])
    np.testing.assert_array_equal(one.stacked(PAIR, 2, False)[:, 0], [1, 2])
    np.testing.assert_array_equal(other.stacked(PAIR, 2, False)[:, 0], [1, 3])


def test_rows_of_different_shapes_are_no_array() -> None:
    rows = StackedRows().and_rows([np.zeros(2)]).and_rows([np.zeros(1)])
    with pytest.raises(SpecError, match=r"different shapes: \['\[1\]', '\[2\]'\]"):
        rows.stacked(Spec("float64", None), 2, False)


@pytest.mark.parametrize("length", [0, 1, 4])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tapes", [False, True])
async def test_a_scan_that_writes_a_variable_stacks_rows_of_any_number(length: int, reverse: bool, tapes: bool) -> None:
    def turn(carry: Any, row: Any) -> Any:
        with fr.control_dependencies([total.assign_add(row)]):
            return carry + row, carry * row

    with fr.Graph() as graph:
        total = fr.Variable(np.zeros(2), name="total")
        xs = fr.placeholder("float64", (None, 2))
        last, stacked = fr.scan(turn, fr.constant(np.ones(2)), xs, reverse=reverse)
    fed = np.arange(2.0 * length).reshape(length, 2)
    carry, wanted = np.ones(2), []
    for row in fed[::-1] if reverse else fed:
        wanted.append(carry * row)
        carry = carry + row
    async with fr.Session(graph, options=fr.Options(tapes=tapes, threads=1)) as session:
        got = await session.run([last, stacked], {xs: fed})
        sums = await session.run(total)
    np.testing.assert_array_equal(got[0], carry)
    np.testing.assert_array_equal(got[1], np.reshape(wanted[::-1] if reverse else wanted, (length, 2)))
    np.testing.assert_array_equal(sums, fed.sum(axis=0))
