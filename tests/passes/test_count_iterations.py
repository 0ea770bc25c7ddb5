"""Loops whose condition only compares a counter: their iterations are counted ahead, and only where that is sure."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.device import Device
from flowrt.passes import StepTerms, compile_step
from flowrt.session.runners import supports

DEVICE = Device.parse("/job:local/task:0/device:cpu:0")
COMPARE = {"less": fr.less, "less_equal": fr.less_equal, "greater": fr.greater, "greater_equal": fr.greater_equal}


def limits(graph: fr.Graph, fetch: Any, feeds: list[Any]) -> list[int | None]:
    """The limits of a step's loops that have no condition, None for those that have one."""
    made = compile_step(graph, [fetch], [], feeds, StepTerms(devices=[DEVICE], default=DEVICE, supports=supports))
    (plan,) = made.plans.values()
    loops = [node for node in plan.nodes if node.op == "loop"]
    return [node.attrs["limit"] if node.attrs["cond"] is None else None for node in loops]


def by_hand(name: str, dtype: str, start: int, step: int, bound: int) -> int | None:
    """The turns that NumPy takes, None where they are more than 300 or where the counter wraps."""
    value, iterations = start, 0
    while {"less": value < bound, "less_equal": value <= bound, "greater": value > bound}.get(name, value >= bound):
        value, iterations = value + step, iterations + 1
        if iterations > 300 or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return None
    return iterations


def counting(name: str, first: Any, by: Any, bound: Any, swapped: bool, subtracted: bool) -> Any:
    """The iterations of a loop that counts, as a tensor."""
    test = COMPARE[{"l": name.replace("less", "greater"), "g": name.replace("greater", "less")}[name[0]]]
    last = fr.while_loop(
        lambda i: test(bound, i) if swapped else COMPARE[name](i, bound),
        lambda i: i - by if subtracted else by + i,
        first,
    )
    return last.op.outputs[1]


def test_iterations_are_counted_as_they_are_taken() -> None:
    rng = random.Random(20)
    counted = 0
    for number in range(120):
        name, dtype = rng.choice(list(COMPARE)), rng.choice(["int8", "int32", "int64"])
        start, step, bound = rng.randint(-99, 99), rng.randint(-5, 5), rng.choice([rng.randint(-99, 99), 127, -128])
        swapped, subtracted = rng.random() < 0.5, rng.random() < 0.5
        with fr.Graph() as graph:
            numbers = [np.asarray(n, dtype) for n in (start, -step if subtracted else step, bound)]
            iterations = counting(name, *numbers, swapped, subtracted)
        (limit,) = limits(graph, iterations, [])
        case = f"case {number}: {name} {dtype} {start} {step} {bound} {swapped} {subtracted}"
        wanted = by_hand(name, dtype, start, step, bound)
        assert limit == wanted if wanted is not None else limit is None or limit > 300, case
        counted += limit is not None
    assert counted > 40


@pytest.mark.parametrize(("name", "step", "bound"), [("less", 1, 127), ("greater", -1, -128)])
def test_a_counter_may_come_to_the_last_number_of_its_dtype(name: str, step: int, bound: int) -> None:
    with fr.Graph() as graph:
        iterations = counting(name, *[np.asarray(n, "int8") for n in (0, step, bound)], False, False)
    assert limits(graph, iterations, []) == [abs(bound)]


def test_nothing_is_counted_where_a_step_or_an_iteration_may_decide_otherwise() -> None:
    with fr.Graph() as graph:
        n, start, x = fr.constant(5), fr.constant(0), fr.placeholder("int64", ())

        def until(test: Any, by: Any = 1, first: Any = start) -> Any:
            return fr.while_loop(test, lambda i: i + by, first)

        plain = until(lambda i: i < n)
        others = [
            until(lambda i: i < x),
            until(lambda i: i < n, by=x),
            until(lambda i: i < n, first=x),
            until(lambda i: fr.logical_and(i < n, i > -9)),
            until(lambda i: fr.not_equal(i, n)),
            until(lambda i: i < n, by=0),
            until(lambda i: i < 2.5, first=np.float32(0), by=np.float32(1)),
            fr.while_loop(lambda i: i < n, lambda i: i * 2 + 1, start),
            fr.while_loop(lambda i: i < n, lambda i: i * 2, fr.constant(1)),
            fr.while_loop(lambda i: i < n, lambda i: i + 1, start, maximum_iterations=3),
        ]
        none = until(lambda i: i < 0, by=0)
    assert (limits(graph, plain, []), limits(graph, none, [])) == ([5], [0])
    assert [limits(graph, other, [x]) for other in others] == [[None]] * len(others)
    assert [limits(graph, plain, [fed]) for fed in (n, start)] == [[None], [None]]
    with fr.BlockingSession(graph) as session:
        assert [int(session.run(plain, feeds)) for feeds in ({}, {n: 9}, {start: 7}, {n: -1})] == [5, 9, 7, 0]


@pytest.mark.parametrize("iterations", [0, 1, 7])
async def test_gradients_through_counted_loops_are_those_of_loops_that_only_a_value_ends(iterations: int) -> None:
    with fr.Graph() as graph:
        x, n = fr.placeholder("float64", (3,)), fr.placeholder("int64", ())

        def inside(y: Any, end: Any) -> Any:
            return fr.while_loop(lambda j, y: j < end, lambda j, y: (j + 1, fr.sin(y) * x), (np.int64(0), y))[1]

        def both(end: Any, two: Any) -> Any:
            body = lambda i, y: (i + 1, inside(y + 0.5, two) + y)  # noqa: E731
            last = fr.while_loop(lambda i, y: i < end, body, (np.int64(0), x))[1]
            return fr.sum(last * last), fr.gradients([fr.sum(last * last)], [x])[0]

        fetches = [*both(np.int64(iterations), np.int64(2)), *both(n, n - iterations + 2)]
    fed = {x: np.array([0.3, -0.7, 1.1]), n: np.int64(iterations)}
    for tapes in (True, False):
        async with fr.Session(graph, options=fr.Options(tapes=tapes, threads=1)) as session:
            value, slope, other_value, other_slope = await session.run(fetches, fed)
        np.testing.assert_allclose(value, other_value, rtol=1e-12)
        np.testing.assert_allclose(slope, other_slope, rtol=1e-12)


def test_a_loop_that_may_not_run_takes_no_memory_for_all_its_iterations() -> None:
    with fr.Graph() as graph:
        chosen, x = fr.placeholder("bool", ()), fr.placeholder("float64", ())

        def long() -> Any:
            return fr.while_loop(lambda i, y: i < 10**11, lambda i, y: (i + 1, fr.sin(y)), (np.int64(0), x))[1]

        slope = fr.gradients([fr.cond(chosen, long, lambda: x * 2)], [x])[0]
    with fr.BlockingSession(graph) as session:
        assert session.run(slope, {chosen: False, x: 1.0}) == 2


@pytest.mark.parametrize(("shape", "most"), [((1024,), 4096), ((0, 5), 2**40), ((None, 2), 1)], ids=str)
def test_a_loop_inside_a_branch_is_counted_where_it_stacks_little(shape: Any, most: int) -> None:
    counted = []
    for iterations in (most, most + 1):
        with fr.Graph() as graph:
            chosen, x = fr.placeholder("bool", ()), fr.placeholder("float32", shape)

            def long(x: Any = x, end: int = iterations) -> Any:
                return fr.while_loop(lambda i, y: i < end, lambda i, y: (i + 1, fr.sin(y)), (np.int64(0), x))[1]

            slope = fr.gradients([fr.cond(chosen, long, lambda x=x: x * 2)], [x])[0]
        made = compile_step(
            graph, [slope], [], [chosen, x], StepTerms(devices=[DEVICE], default=DEVICE, supports=supports)
        )
        (plan,) = made.plans.values()
        bodies = [node.attrs[name] for node in plan.nodes for name in ("if_true", "if_false") if name in node.attrs]
        loops = [node for body in bodies for node in body.nodes if node.op == "loop" and node.attrs["cond"] is not None]
        counted.append(not loops)
        with graph:
            alone = fr.gradients([long()], [x])[0]
        assert iterations in limits(graph, alone, [x])  # it runs in any case
    assert counted == {4096: [True, False], 2**40: [True, True], 1: [False, False]}[most]


def test_more_iterations_than_a_word_holds_are_not_counted() -> None:
    last = 2**63 - 1
    with fr.Graph() as graph:
        ends = fr.while_loop(lambda i: i < last, lambda i: i + 1, fr.constant(-last - 1))
        fewer = fr.while_loop(lambda i: i < last, lambda i: i + 1, fr.constant(0))
    assert limits(graph, ends, []) == [None]
    assert limits(graph, fewer, []) == [last]
