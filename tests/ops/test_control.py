"""Loops and branches: Python's own are the judge, whether a tape runs them, the machine, or the primitives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loop_world import assert_guarded, guarded
from session_world import assert_quiet, every_way

import flowrt as fr
import flowrt.passes
from flowrt.base.device import Device
from flowrt.base.spec import Spec
from flowrt.ops.structure import flatten
from flowrt.passes.lower import lower
from flowrt.sched.loops.scalar_loops import apply_scalar_loop

Array = np.ndarray[Any, Any]
DEVICE = Device.parse("/job:local/task:0/device:cpu:0")


@pytest.fixture(params=["tape", "machine", "lowered"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fr.Options:
    """The three ways to run a loop."""
    if request.param == "lowered":
        monkeypatch.setattr(flowrt.passes, "lower", lambda plan: lower(plan, everything=True))
    return fr.Options(tapes=request.param != "machine", threads=1)


async def run(graph: fr.Graph, fetches: Any, feeds: Any, options: fr.Options) -> Any:
    async with fr.Session(graph, options=options) as session:
        answer = await session.run(fetches, feeds)
        assert_quiet(session)
        return answer


# ── what loops answer ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("turns", [0, 1, 2, 7])
async def test_a_while_loop_turns_as_long_as_its_condition_holds(turns: int, options: fr.Options) -> None:
    with fr.Graph() as graph:
        n, x = fr.placeholder("int64", ()), fr.placeholder("float64", (3,))
        i, y = fr.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * 2.0 + x), (0, x))
    fed = np.array([1.0, -2.0, 0.5])
    got = await run(graph, [i, y], {n: turns, x: fed}, options)
    wanted = fed
    for _ in range(turns):
        wanted = wanted * 2 + fed
    assert int(got[0]) == turns
    np.testing.assert_array_equal(got[1], wanted)


async def test_variables_that_change_places_do_so_at_once(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (2,))
        made = fr.while_loop(
            lambda i, a, b, c, k: i < 5, lambda i, a, b, c, k: (i + 1, b, c, a, k), (0, x, x * 2.0, x * 3.0, x)
        )
    got = await run(graph, made[1:], {x: np.array([1.0, 10.0])}, options)
    assert [float(a[0]) for a in got] == [3.0, 1.0, 2.0, 1.0]


async def test_a_loop_ends_with_its_maximum_even_where_its_condition_holds_on(options: fr.Options) -> None:
    with fr.Graph() as graph:
        n = fr.placeholder("int64", ())
        made = [
            fr.while_loop(lambda i: i >= 0, lambda i: i + 1, np.int64(0), maximum_iterations=most) for most in (4, n, 0)
        ]
    assert [int(i) for i in await run(graph, made, {n: 6}, options)] == [4, 6, 0]


async def test_loops_of_scalars_of_any_dtype_compute_what_arrays_do(options: fr.Options) -> None:
    """One kernel on a tape: dtypes wrap and round as everywhere."""
    for dtype in ("int8", "uint16", "int32", "float32", "float64"):
        with fr.Graph() as graph:
            x = fr.placeholder(dtype, ())
            step = np.asarray(3, dtype)
            i, y, odd = fr.while_loop(
                lambda i, y, odd: i < 9,
                lambda i, y, odd: (i + 1, y * step + x, fr.logical_not(odd)),  # noqa: B023
                (0, x, False),
            )
        fed = np.asarray(7, dtype)
        got = await run(graph, [i, y, odd], {x: fed}, options)
        wanted = fed[None]
        for _ in range(9):
            wanted = wanted * step + fed
        assert got[1] == wanted[0]
        assert (int(got[0]), bool(got[2])) == (9, True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
async def test_a_scan_carries_and_stacks(length: int, reverse: bool, options: fr.Options) -> None:
    with fr.Graph() as graph:
        xs, w = fr.placeholder("float64", (length, 2)), fr.placeholder("float64", (2,))
        carry, ys = fr.scan(
            lambda c, row: ({"sum": c["sum"] + row, "turn": c["turn"] + 1}, (c["sum"] * w, None)),
            {"sum": w, "turn": 0},
            xs,
            reverse=reverse,
        )
    rows, weight = np.arange(length * 2.0).reshape(length, 2), np.array([2.0, -1.0])
    got, (stacked, nothing) = await run(graph, [carry, [ys[0], ys[0]]], {xs: rows, w: weight}, options)
    total, wanted = weight, np.zeros((length, 2))
    for t in reversed(range(length)) if reverse else range(length):
        wanted[t], total = total * weight, total + rows[t]
    np.testing.assert_array_equal(got["sum"], total)
    np.testing.assert_array_equal(stacked, wanted)
    np.testing.assert_array_equal(nothing, wanted)
    assert int(got["turn"]) == length
    assert ys[1] is None


async def test_scalars_are_scanned_and_stacked_too(options: fr.Options) -> None:
    with fr.Graph() as graph:
        xs = fr.placeholder("float32", (None,))
        total, sums = fr.scan(lambda c, x: (c + x, c + x), np.float32(0), xs)
    fed = np.arange(6, dtype=np.float32)
    got = await run(graph, [total, sums], {xs: fed}, options)
    np.testing.assert_array_equal(got[1], np.cumsum(fed))
    assert got[0] == fed.sum()


@pytest.mark.parametrize("n", [0, 3, 6])
async def test_loops_and_branches_nest(n: int, options: fr.Options) -> None:
    def inner(a: Any, b: Any) -> Any:
        return fr.while_loop(lambda k, t: k < a, lambda k, t: (k + 1, t + fr.cond(t > 9, lambda: k, lambda: a)), (0, b))

    with fr.Graph() as graph:
        limit = fr.placeholder("int64", ())
        _, out = fr.while_loop(
            lambda a, b: a < limit,
            lambda a, b: (a + 1, fr.cond(fr.equal(a % 2, 0), lambda: inner(a, b)[1], lambda: b - a)),
            (np.int64(0), np.int64(1)),
        )
    a, b = 0, 1
    while a < n:
        if a % 2 == 0:
            k, t = 0, b
            while k < a:
                k, t = k + 1, t + (k if t > 9 else a)
            b = t
        else:
            b -= a
        a += 1
    assert int(await run(graph, out, {limit: n}, options)) == b


@pytest.mark.parametrize("value", [-3, 0, 4, 50])
async def test_case_takes_the_first_that_holds(value: int, options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("int64", ())
        y = fr.case([(x < 0, lambda: (-x, 1)), (x < 10, lambda: (x * x, 2))], lambda: (x, 3))
    wanted = (-value, 1) if value < 0 else (value * value, 2) if value < 10 else (value, 3)
    assert tuple(map(int, await run(graph, y, {x: value}, options))) == wanted


async def test_a_loop_variable_may_change_its_shape_where_the_program_says_so() -> None:
    for tapes in (True, False):
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (2, 3))
            grown = fr.while_loop(
                lambda i, y: i < 3,
                lambda i, y: (i + 1, fr.concat([y, x], axis=0)),  # noqa: B023
                (0, x),
                shape_invariants=((), (None, 3)),
            )[1]
            after = fr.sum(grown * 2.0)
        fed = np.arange(6, dtype=np.float32).reshape(2, 3)
        got = await run(graph, [grown, after], {x: fed}, fr.Options(tapes=tapes, threads=1))
        np.testing.assert_array_equal(got[0], np.concatenate([fed] * 4))
        assert got[1] == 8 * fed.sum()


def test_on_plain_arrays_they_run_at_once() -> None:
    assert fr.while_loop(lambda i: i < 5, lambda i: i + 2, np.int64(0)) == 6
    assert fr.cond(np.bool_(False), lambda: 1, lambda: 2) == 2
    total, squares = fr.scan(lambda c, x: (c + x, x * x), 0, np.arange(4))
    assert total == 6
    np.testing.assert_array_equal(squares, [0, 1, 4, 9])


F = np.float32([1, 2, 3])
AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "a number of a branch": lambda x: fr.cond(x[0] > 0, lambda: 1.0, lambda: x[1]),
    "an entry of a branch": lambda x: fr.cond(x[0] > 0, lambda: (x[0], 1), lambda: (x[1], 2)),
    "a case": lambda x: fr.case([(x[0] > 5, lambda: x[0])], lambda: x[1]),
    "a loop's number": lambda x: fr.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, 2), (np.int64(0), x[0])),
    "a loop's of NumPy": lambda x: fr.while_loop(
        lambda i, k, y: i < 2, lambda i, k, y: (i + 1, k + np.int64(1), y * np.float64(2)), (0, np.int32(3), x)
    ),
    "a scan's numbers": lambda x: fr.scan(lambda c, r: (1.0, (c, r, 2)), 0.0, x),
    "a scan in reverse of none": lambda x: fr.scan(lambda c, r: (c, r), x[0], x[:0], reverse=True),
    "mapped numbers": lambda x: fr.map_fn(lambda r: 1.0, x),
    "rows that are strong": lambda x: fr.map_fn(lambda r: fr.multiply(r, np.int8([1])), x),
}


@pytest.mark.parametrize("what", AT_ONCE)
async def test_on_plain_arrays_they_answer_arrays_of_a_graphs_dtypes(what: str) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        built = AT_ONCE[what](x)
    async with fr.Session(graph) as session:
        wanted = flatten(await session.run(built, {x: F}))[1]
    found = flatten(AT_ONCE[what](F))[1]
    assert all(type(array) is np.ndarray for array in found)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other, strict=one.ndim > 0)
        assert one.dtype == other.dtype


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a text of a branch": (lambda x: fr.cond(x[0] > 0, lambda: "a", lambda: "b"), "'a' is not a tensor"),
    "one for two": (lambda x: fr.while_loop(lambda i, y: i < 2, lambda i, y: i + 1, (0, x)), "must have the same form"),
    "no pair": (lambda x: fr.scan(lambda c, r: c + r, 0.0, x), r"answers \(carry, y\), got tensor"),
    "nothing for one": (
        lambda x: fr.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, None), (0, x)),
        r"answers \(tensor, operation or None\); they must have the same form",
    ),
    "nothing to carry": (lambda x: fr.scan(lambda c, r: (None, r), 0.0, x), "must have the same form"),
    "another kind": (
        lambda x: fr.while_loop(lambda i, k: i < x[1], lambda i, k: (i + 1, k / 2), (0, 1)),
        r"loop variable 1 begins as int64\[\] and the body makes it float\d+\[\]; a loop variable keeps its dtype",
    ),
    "a fraction to carry": (lambda x: fr.scan(lambda c, r: (c / 2, r), 0, x), "0 begins as int64.* keeps its dtype"),
    "two for one": (lambda x: fr.scan(lambda c, r: ((c, c), r), 0.0, x), "must have the same form"),
    "no number of iterations": (
        lambda x: fr.while_loop(lambda i: i < 2, lambda i: i + 1, 0, maximum_iterations="x"),
        "cannot take these",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_body_must_not_answer_is_refused_at_once_as_in_a_graph(what: str) -> None:
    call, says = WRONG[what]
    with fr.Graph(), pytest.raises(fr.SpecError, match=says):
        call(fr.placeholder("float32", (3,)))
    with pytest.raises(fr.SpecError, match=rf"test_control.py:\d+\): .*{says}"):
        call(F)
    with pytest.raises(fr.SpecError, match=r"test_control.py:\d+\): .*same shape"):
        fr.scan(lambda c, r: (c, F[: int(r)]), 0.0, F)


@every_way
async def test_a_body_that_sizes_rule_out_and_that_does_not_run_is_no_error(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        made = guarded(x)
        wrong = fr.cond(fr.shape_of(x)[0] >= 0, lambda: x[0], lambda: np.float32(-1))
    async with fr.Session(graph, options=options) as session:
        for size in (0, 3, 0, 7, 3):
            fed = np.arange(size, dtype=np.float32) + 1
            assert_guarded(await session.run(made, {x: fed}), fed)
        with pytest.raises(fr.SpecError, match=r"test_control.py:\d+\): index 0 is out of range for axis 0"):
            await session.run(wrong, {x: fed[:0]})


@every_way
async def test_rows_of_no_iteration_have_the_sizes_that_what_fits_them_tells(options: fr.Options) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, None))
        chosen = fr.map_fn(lambda r: fr.cond(fr.shape_of(x)[0] > 1, lambda: r - fr.max(x), lambda: r), x)
        nested = fr.map_fn(lambda r: fr.map_fn(lambda e: r - e * fr.max(x), r), x)
        made = [*fr.map_fn(lambda r: (r - fr.max(x), fr.concat([r, r]) * fr.max(x)), x), chosen, nested]
    async with fr.Session(graph, options=options) as session:
        for rows in (0, 2, 0):
            found = await session.run(made, {x: np.zeros((rows, 4), np.float32)})
            assert [one.shape for one in found] == [(rows, 4), (rows, 8), (rows, 4), (rows, 4, 4)]


# ── state and effects inside ─────────────────────────────────────────────────────────────────────────────────────────


@every_way
async def test_variables_and_queues_are_used_turn_by_turn(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v, n = fr.Variable(np.int64(0)), fr.placeholder("int64", ())
        queue = fr.FIFOQueue(100, "int64", shapes=())

        def turn(i: Any, seen: Any) -> Any:
            with fr.control_dependencies([v.assign_add(i)]):
                now = v.read()
            with fr.control_dependencies([queue.enqueue(now * 10)]):
                return i + 1, seen + now

        _, seen = fr.while_loop(lambda i, seen: i < n, turn, (0, 0))
        with fr.control_dependencies([seen]):
            after = v.read()
        taken = queue.dequeue()
    async with fr.Session(graph, options=options) as session:
        assert [int(a) for a in await session.run([seen, after], {n: 4})] == [0 + 1 + 3 + 6, 6]
        assert [int(await session.run(taken)) for _ in range(4)] == [0, 10, 30, 60]
        assert [int(a) for a in await session.run([seen, after], {n: 0})] == [0, 6]
        assert_quiet(session)


@every_way
async def test_only_the_branch_that_is_taken_has_its_effects(options: fr.Options) -> None:
    with fr.Graph() as graph:
        v, x = fr.Variable(np.int64(5)), fr.placeholder("int64", ())
        change = fr.cond(x > 0, lambda: v.assign(x), lambda: v.assign_sub(np.int64(1)))
        with fr.control_dependencies([change]):
            after = v.read()
    async with fr.Session(graph, options=options) as session:
        assert [int(await session.run(after, {x: value})) for value in (7, -1, -1, 3)] == [7, 6, 5, 3]


async def test_a_loop_that_never_ends_is_cancelled() -> None:
    for width in ((), (3,)):  # one kernel, and nested launches
        with fr.Graph() as graph:
            x = fr.placeholder("float32", width)
            out = fr.while_loop(lambda y: fr.sum(y) > -1.0, lambda y: fr.abs(y), x)
        async with fr.Session(graph, options=fr.Options(threads=1)) as session:
            with pytest.raises(fr.StepTimeout):
                await session.run(out, {x: np.ones(width, np.float32)}, timeout=0.05)
            assert_quiet(session)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────

WAVES: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda x, w: fr.sum(fr.scan(lambda c, row: (fr.tanh(c * w + row), c * row), w, x)[1]),
    "while": lambda x, w: fr.sum(fr.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, fr.sin(y) * w + y), (0, x))[1]),
    "limited": lambda x, w: fr.sum(
        fr.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, fr.sin(y) * w), (0, x), maximum_iterations=5)[1]
    ),
    "cond in scan": lambda x, w: fr.sum(
        fr.scan(lambda c, row: (fr.cond(fr.sum(row) > 0, lambda: c * row, lambda: fr.sin(c) + w), c * c), w, x)[1]
    ),
    "scan in while": lambda x, w: fr.sum(
        fr.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, fr.scan(lambda c, r: (c * r + w, c), y, x)[0]), (0, w))[
            1
        ]
    ),
}


@pytest.mark.parametrize("name", WAVES)
async def test_first_and_second_gradients_are_finite_differences(name: str) -> None:
    rng = np.random.default_rng(7)
    point, weight = rng.normal(size=(4, 2)), rng.normal(size=2)
    along, across = rng.normal(size=(4, 2)), rng.normal(size=2)
    with fr.Graph() as graph:
        x, w = fr.placeholder("float64", (4, 2)), fr.placeholder("float64", (2,))
        loss = WAVES[name](x, w)
        slopes = fr.gradients(loss, [x, w])
        slope = fr.add_n([fr.sum(s * d) for s, d in zip(slopes, (along, across), strict=True)])
        bends = fr.gradients(slope, [x, w])
        bend = fr.add_n([fr.sum(s * d) for s, d in zip(bends, (along, across), strict=True)])
    found = []
    for options in (fr.Options(threads=1), fr.Options(tapes=False, threads=1)):
        async with fr.Session(graph, options=options) as session:

            async def at(step: float, fetch: Any, session: fr.Session = session) -> float:
                return float(await session.run(fetch, {x: point + step * along, w: weight + step * across}))

            first, second = await at(0, slope), await at(0, bend)
            assert first == pytest.approx((await at(1e-6, loss) - await at(-1e-6, loss)) / 2e-6, rel=1e-6, abs=1e-7)
            assert second == pytest.approx((await at(1e-6, slope) - await at(-1e-6, slope)) / 2e-6, rel=1e-6, abs=1e-6)
            found.append((first, second))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


async def test_a_step_without_the_gradient_does_not_stack_for_it() -> None:
    with fr.Graph() as graph:
        x, w = fr.placeholder("float64", (50, 2)), fr.placeholder("float64", (2,))
        loss = WAVES["scan in while"](x, w)
        before = len(loss.op.inputs[0].op.outputs)
        slope = fr.gradients(loss, w)[0]
        assert len(loss.op.inputs[0].op.outputs) > before
    made = [
        flowrt.passes.compile_step(
            graph,
            [fetch],
            [],
            [x, w],
            flowrt.passes.StepTerms(devices=[DEVICE], default=DEVICE, supports=lambda op, dtypes, kind: True),
        )
        for fetch in (loss, slope)
    ]
    stacks = [[len(n.outputs) for n in plan.nodes if n.op == "loop"] for one in made for plan in one.plans.values()]
    assert stacks[0] == [before]
    assert max(stacks[1]) > before
    got = await run(graph, loss, {x: np.ones((50, 2)), w: np.zeros(2)}, fr.Options(threads=1))
    assert float(got) == 0


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────────


def on_another_device(x: Any) -> Any:
    with fr.device("/job:ps/task:1"):
        return x * 2.0


def scalar() -> Any:
    return fr.placeholder("float32", ())


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (
        lambda x: fr.while_loop(lambda y: y < 1, lambda y: fr.astype(y, "float64"), x),
        r"use fr.astype\(x, 'float32'\)",
    ),
    "shape": (lambda x: fr.while_loop(lambda y: fr.sum(y) < 1, lambda y: fr.stack([y, y]), x), "shape_invariants"),
    "form": (lambda x: fr.while_loop(lambda a, b: a < b, lambda a, b: a, (x, x)), "must have the same form"),
    "condition": (lambda x: fr.while_loop(lambda y: y, lambda y: y, x), "a bool scalar, got float32"),
    "constant condition": (lambda x: fr.while_loop(lambda y: y is not x, lambda y: y, x), "answers True, whatever"),
    "constant choice": (lambda x: fr.cond(x is None, lambda: x, lambda: -x), "Python's False, decided before"),
    "branches": (lambda x: fr.cond(x > 0, lambda: (x, x), lambda: x), "must be alike"),
    "branch dtypes": (lambda x: fr.cond(x > 0, lambda: x, lambda: fr.astype(x, "int32")), "give them one dtype"),
    "pred": (lambda x: fr.cond(x, lambda: x, lambda: x), "bool scalar, got float32"),
    "another device": (
        lambda x: fr.cond(x > 0, lambda: on_another_device(x), lambda: x),
        "inside a loop or branch, all of which runs on one device",
    ),
    "scan of a scalar": (lambda x: fr.scan(lambda c, y: (c, c), 0, x), "has none"),
    "variable": (lambda x: fr.cond(x > 0, lambda: fr.Variable(1.0).read(), lambda: x), "outside the loop or branch"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_the_line_and_the_fix(name: str) -> None:
    build, message = MISFITS[name]
    with fr.Graph(), pytest.raises(fr.GraphError, match=message) as caught:
        build(scalar())
    assert "test_control.py" in str(caught.value)


def test_a_tensor_of_a_body_is_no_use_outside_it() -> None:
    leaked: list[Any] = []
    with fr.Graph():
        x = scalar()
        fr.cond(x > 0, lambda: leaked.append(x * 2.0) or x, lambda: x)
        with pytest.raises(fr.GraphError, match="belongs to another graph"):
            x + leaked[0]


def test_no_gradient_goes_through_state_or_through_loops_made_by_hand() -> None:
    with fr.Graph():
        x, v = scalar(), fr.Variable(np.float32(1))
        y = fr.cond(x > 0, lambda: x * v.read(), lambda: x)
        with pytest.raises(fr.GraphError, match="reads or changes state"):
            fr.gradients(y, x)
        by_hand = fr.exit(fr.next_iteration(fr.enter(x, "hand")))
        with pytest.raises(fr.GraphError, match=r"fr\.while_loop"):
            fr.gradients(by_hand, x)


async def test_a_failure_inside_names_the_loop(options: fr.Options) -> None:
    with fr.Graph() as graph:
        table, n = fr.placeholder("float32", (3,)), fr.placeholder("int64", ())
        total = fr.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + fr.take(table, i)), (0, np.float32(0)))[1]
    with pytest.raises(fr.FlowrtError, match=r"test_control\.py.*index is out of range"):
        await run(graph, total, {table: np.ones(3, np.float32), n: 5}, options)


async def test_a_dead_side_is_dead_and_says_why() -> None:
    with fr.Graph() as graph:
        x = scalar()
        dead, _ = fr.switch(fr.cond(x > 0, lambda: x, lambda: -x), x > 0)
    with pytest.raises(fr.DeadTensorError, match="took the other side"):
        await run(graph, dead, {x: 1.0}, fr.Options(threads=1))


# ── as data ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_graph_with_loops_survives_its_bytes() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (4, 2), name="x")
        w = fr.Variable(np.array([0.5, -1.0]), name="w")
        loss = fr.sum(fr.scan(lambda c, row: (fr.cond(fr.sum(c) > 0, lambda: c * row, lambda: c + w), c), w, x)[1])
        slope = fr.identity(fr.gradients(loss, w)[0], name="slope")
    again = fr.Graph.from_bytes(graph.to_bytes())
    fed = np.linspace(-1, 1, 8).reshape(4, 2)
    wanted = await run(graph, slope, {x: fed}, fr.Options(threads=1))
    got = await run(
        again, again.get_tensor_by_name("slope:0"), {again.get_tensor_by_name("x:0"): fed}, fr.Options(threads=1)
    )
    np.testing.assert_array_equal(got, wanted)


async def test_a_cluster_runs_loops_on_its_nodes() -> None:
    async with asyncio.timeout(50), fr.LocalCluster(worker=1) as cluster:
        with fr.Graph() as graph:
            n, v = fr.placeholder("int64", ()), fr.Variable(np.int64(0))

            def turn(i: Any) -> Any:
                with fr.control_dependencies([v.assign_add(i)]):
                    return i + 1

            i = fr.while_loop(lambda i: i < n, turn, np.int64(0))
            squares = fr.scan(lambda c, x: (c + x, c * x), n, fr.arange(4))[1]
            with fr.control_dependencies([i]):
                total = v.read()
        async with fr.Session(graph, cluster=cluster) as session:
            got = await session.run([i, total, squares], {n: 5})
    assert (int(got[0]), int(got[1])) == (5, 10)
    np.testing.assert_array_equal(got[2], [0, 5, 12, 24])


async def test_branches_of_scalars_are_chosen_turn_by_turn(options: fr.Options) -> None:
    def collatz(n: int) -> tuple[int, int]:
        turns, most = 0, n
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            turns, most = turns + 1, max(turns, most, n)
        return turns, most

    def turn(x: Any, turns: Any, most: Any) -> Any:
        def odd() -> Any:
            up = 3 * x + 1
            return fr.cond(up > most, lambda: (up, up), lambda: (up, most))

        x, most = fr.cond(fr.equal(x % 2, 0), lambda: (x // 2, most), odd)
        return x, turns + 1, most

    with fr.Graph() as graph:
        n = fr.placeholder("int32", ())
        _, turns, most = fr.while_loop(lambda x, turns, most: fr.not_equal(x, 1), turn, (n, np.int32(0), n))
    for start in (1, 2, 7, 27):
        got = await run(graph, [turns, most], {n: np.int32(start)}, options)
        assert tuple(map(int, got)) == collatz(start)


def test_a_loop_with_branches_of_scalars_alone_is_one_kernel() -> None:
    def turn(x: Any, t: Any) -> Any:
        return fr.cond(x > 1.0, lambda: x * 0.5, lambda: fr.sqrt(x) + t), t + 1

    with fr.Graph() as graph:
        x = fr.placeholder("float32", ())
        last, _ = fr.while_loop(lambda x, t: t < 9, turn, (x, np.float32(0)))
    (node,) = [node for node in graph.nodes if node.op.name == "loop"]
    specs = [Spec(t.dtype, t.shape) for t in node.inputs]
    assert apply_scalar_loop(specs, [Spec(t.dtype, t.shape) for t in node.outputs], node.attrs) is not None
    assert last.shape == ()
