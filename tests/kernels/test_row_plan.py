"""What is computed when along a row: the plan says all that is wanted, in an order in which it can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.kernels.fusion.row_plan import Loop, RowPlan, plan_rows
from flowrt.kernels.language.composing import express

if TYPE_CHECKING:
    from flowrt.kernels.language.expression import Expression

F8 = "float64"
Array = np.ndarray[Any, Any]
SOFTMAX = (
    ("max", (0,), F8),
    ("subtract", (0, 1), F8),
    ("exp", (2,), F8),
    ("sum", (3,), F8),
    ("divide", (3, 4), F8),
)
FOLDS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
UNARY = ("exp", "negative", "square", "tanh")
BINARY = ("add", "subtract", "multiply", "maximum")


def test_exponentials_are_kept_and_differences_computed_again() -> None:
    plan = plan_rows(express((F8,), SOFTMAX, (2, 5)), [False], [False, False])
    assert plan == RowPlan(
        loops=(
            Loop(before=(), reads=(0,), again=(), computes=(), keeps=(), reductions=(1,), totals=(), writes=()),
            Loop(before=(), reads=(0,), again=(), computes=(2, 3), keeps=(3,), reductions=(4,), totals=(), writes=()),
            Loop(before=(), reads=(0,), again=(3,), computes=(2, 5), keeps=(), reductions=(), totals=(), writes=(0, 1)),
        ),
        behind=(),
        row_results=(),
        kept=(3,),
    )


def test_what_is_the_same_along_a_row_is_computed_once() -> None:
    members = (
        ("add", (1, 1), F8),
        ("multiply", (0, 2), F8),
        ("sum", (3,), F8),
        ("exp", (4,), F8),
        ("negative", (5,), F8),
    )
    plan = plan_rows(express((F8, F8), members, (6,)), [False, True], [True])
    (loop,) = plan.loops
    assert (loop.before, loop.computes, loop.reductions) == ((2,), (3,), (4,))
    assert (plan.behind, plan.row_results) == ((5, 6), (0,))


def test_folds_of_the_same_loop_share_it() -> None:
    members = (("max", (0,), F8), ("min", (0,), F8), ("subtract", (1, 2), F8), ("divide", (0, 3), F8))
    plan = plan_rows(express((F8,), members, (4,)), [False], [False])
    assert [loop.reductions for loop in plan.loops] == [(1, 2), ()]
    assert plan.loops[1].before == (3,)


def random_expression(rng: np.random.Generator) -> tuple[Expression, list[bool], list[bool]]:
    """An expression of two entries and one number a row, with results of both kinds and a total."""
    fixed, members = [False, False, True], []
    for _ in range(int(rng.integers(4, 20))):
        count = len(fixed)
        if rng.random() < 0.3:
            members.append((str(rng.choice(list(FOLDS))), (int(rng.integers(count)),), F8))
            fixed.append(True)
            continue
        op = str(rng.choice(UNARY if rng.random() < 0.5 else BINARY))
        taken = tuple(int(n) for n in rng.integers(count, size=1 if op in UNARY else 2))
        members.append((op, taken, F8))
        fixed.append(all(fixed[n] for n in taken))
    members.append(("sum", (0,), F8))
    fixed.append(True)
    results = tuple(int(n) for n in {len(fixed) - 1, *rng.integers(3, len(fixed), size=3)})
    reductions = ((int(rng.integers(len(fixed))), "sum"),)
    return express((F8,) * 3, tuple(members), results, "cpu", reductions), fixed[:3], [fixed[n] for n in results]


def in_one_go(expression: Expression, inputs: list[Any]) -> list[Any]:
    values = list(inputs)
    for member in expression.members:
        taken = [values[n] for n in member.operands]
        values.append(
            FOLDS[member.op](np.broadcast_to(taken[0], 7)) if member.reduces_row else _apply(member.op, taken)
        )
    return values


def _apply(op: str, taken: list[Any]) -> Any:
    return getattr(np, op)(*taken)


def by_plan(expression: Expression, plan: RowPlan, inputs: list[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """The results and totals by position, as an entry would compute them; nothing is at hand but what the plan says."""
    first = len(inputs)
    fixed: dict[int, Any] = {n: value for n, value in enumerate(inputs) if np.ndim(value) == 0}
    kept: dict[int, Any] = {}
    written: dict[int, Any] = {}
    totals: dict[int, Any] = {}
    for loop in plan.loops:
        assert not written, "nothing is read behind what is written"
        compute(expression, loop.before, fixed)
        values = {**fixed, **{n: inputs[n] for n in loop.reads}, **{n: kept[n] for n in loop.again}}
        compute(expression, loop.computes, values)
        kept |= {n: values[n] for n in loop.keeps}
        written |= {at: values[expression.results[at]] for at in loop.writes}
        totals |= {at: values[expression.reductions[at][0]] for at in loop.totals}
        for n in loop.reductions:
            member = expression.members[n - first]
            fixed[n] = FOLDS[member.op](np.broadcast_to(values[member.operands[0]], 7))
    compute(expression, plan.behind, fixed)
    written |= {at: fixed[expression.results[at]] for at in plan.row_results}
    return written, totals


def compute(expression: Expression, members: tuple[int, ...], values: dict[int, Any]) -> None:
    for n in members:
        member = expression.members[n - len(expression.inputs)]
        values[n] = _apply(member.op, [values[i] for i in member.operands])


@pytest.mark.parametrize("seed", range(200))
def test_random_plans_compute_what_the_expression_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expression, repeats, by_row = random_expression(rng)
    plan = plan_rows(expression, repeats, by_row)
    inputs: list[Any] = [rng.normal(size=7), rng.normal(size=7), rng.normal()]
    with np.errstate(all="ignore"):
        judge = in_one_go(expression, inputs)
        written, totals = by_plan(expression, plan, inputs)
    assert sorted(written) == list(range(len(expression.results))), f"seed {seed}"
    for at, found in written.items():
        np.testing.assert_array_equal(found, judge[expression.results[at]], err_msg=f"seed {seed}")
    for at, found in totals.items():
        np.testing.assert_array_equal(found, judge[expression.reductions[at][0]], err_msg=f"seed {seed}")
    assert len(totals) == len(expression.reductions)
