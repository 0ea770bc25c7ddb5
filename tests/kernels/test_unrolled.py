"""Loops over small tensors and loops inside them as one kernel: unrolled, read in Python, compiled, and stopped."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from loop_world import step_of

import flowrt as fr
import flowrt.sched.loops.nesting
from flowrt.kernels.composite.iteration import InnerLoop, LaneValues, Lookup, ScalarIteration, make_iteration
from flowrt.kernels.composite.scalar_loop import ScalarLoopStep, read_program
from flowrt.kernels.language.expression import Expression
from flowrt.kernels.store import background
from flowrt.sched.loops.scalar_loops import apply_scalar_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array: TypeAlias = np.ndarray[Any, Any]


def is_unrolled(graph: fr.Graph) -> bool:
    node = [n for n in graph.nodes if n.op.name == "loop"][-1]
    return apply_scalar_loop([t.spec for t in node.inputs], [t.spec for t in node.outputs], node.attrs) is not None


# ── a program, read in Python ────────────────────────────────────────────────────────────────────────────────────────


def take_iteration(iteration: ScalarIteration, inputs: Sequence[Any]) -> list[Any]:
    """What an iteration answers."""
    values = list(inputs)
    for part in iteration.parts:
        if isinstance(part, Expression):
            with np.errstate(all="ignore"):
                values += part.function()(*values)
        elif isinstance(part, Lookup):
            values += look_up(part, values)
        elif isinstance(part, LaneValues):
            values += take_lanes(part, values)
        else:
            values += run_inside(part, values)
    return [values[i] for i in iteration.results]


def take_lanes(lanes: LaneValues, values: Sequence[Any]) -> list[Any]:
    """What entries alike come to: the results of every member, lane by lane."""
    apply, found = lanes.expression.function(), []
    for lane in range(lanes.count):
        with np.errstate(all="ignore"):
            found.append(apply(*(values[taken[lane % len(taken)]] for taken in lanes.taken)))
    return [value for results in zip(*found, strict=True) for value in results]


def look_up(lookup: Lookup, values: Sequence[Any]) -> list[Any]:
    """What a lookup finds; a table's address is the table."""
    table = np.array([values[i] for i in lookup.entries]) if lookup.entries else values[lookup.table].ravel()
    if lookup.index is None:
        return [table[n] for n in lookup.offsets]
    at, size = int(values[lookup.index]), int(values[lookup.size])
    at += size if at < 0 else 0
    if 0 <= at < size:
        return [table[at * lookup.pitch + n] for n in lookup.offsets]
    assert lookup.guard is not None
    assert not values[lookup.guard]
    return [lookup.dtype.type(0)] * len(lookup.offsets)


def run_inside(loop: InnerLoop, values: Sequence[Any]) -> list[Any]:
    bounds = [n for n in (loop.limit, None if loop.count is None else max(int(values[loop.count]), 0)) if n is not None]
    most = 0 if loop.guard is not None and not values[loop.guard] else min(bounds) if bounds else math.inf
    state, captured, done = [values[i] for i in loop.first], [values[i] for i in loop.captured], 0
    while done < most and (loop.cond is None or take_iteration(loop.cond, [*state, *captured])[0]):
        state, done = take_iteration(loop.body, [*state, *captured]), done + 1
    return [*state, np.int64(done)]


def run_program(step: ScalarLoopStep, inputs: Sequence[Array]) -> list[Array]:
    """What the loop's program carries last, for its inputs: a loop that neither scans nor stacks."""
    program = read_program(step.program.text())
    assert program == step.program
    carried = sum(program.carried)
    first = [x for i in step.first for x in inputs[i].ravel()]
    rest = [x for i, width in zip(step.captured, program.captured, strict=True) for x in inputs[i].ravel()[:width]]
    constants: list[Any] = [c[()] for c in step.constants]
    for number, operand in program.tables:
        constants[number] = inputs[step.captured[operand]]
    where = {table.ctypes.data: table for table in step.held}
    rest += [where.get(int(c), c) if c.shape == () and c.dtype == np.int64 else c for c in constants]
    numbers = range(carried, carried + len(rest))
    inside = InnerLoop(program.cond, program.body, tuple(range(carried)), tuple(numbers), step.limit, None, None)
    flat = run_inside(inside, [*first, *rest])
    shapes, found = [inputs[i].shape for i in step.first], []
    for i, shape in zip(step.first, shapes, strict=True):
        size = math.prod(shape)
        found.append(np.array(flat[:size], inputs[i].dtype).reshape(shape))
        flat = flat[size:]
    return found


# ── random bodies ────────────────────────────────────────────────────────────────────────────────────────────────────

LARGE, SMALL, ROWS = np.arange(300) * 7 % 101, np.array([5, -3, 8, 2]), np.arange(400).reshape(200, 2) % 13 - 6
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "divided": lambda a, b: (a - b) // 3,
    "rest": lambda a, b: a % 7 - b,
    "larger": fr.maximum,
    "either": lambda a, b: fr.where(a > b, a, b + 1),
    "turned": lambda a, b: fr.concat([b[1:], a[:1]], axis=0),
    "joined": lambda a, b: fr.concat([a[1:], b[:1]], axis=0),
    "spread": lambda a, b: fr.zeros_like(a) + fr.sum(b) - fr.max(a),
    "outer": lambda a, b: fr.sum(fr.transpose(fr.expand_dims(a, 0) * fr.expand_dims(b, 1)), axis=0) % 5,
    "constant": lambda a, b: a * 0 + np.arange(3, 3 - 5 * a.shape[0], -5),
    "both": lambda a, b: fr.astype(fr.logical_and(a > 0, b > 0), "int64"),
    "taken": lambda a, b: fr.take(a + b, b % 2) - fr.take(b, np.arange(a.shape[0]) // 2 - 1),
    "looked up": lambda a, b: fr.take(LARGE, a % 300) - fr.take(SMALL, fr.concat([a[1:] % 3, b[:1] % 4 - 4], axis=0)),
    "row": lambda a, b: a - fr.sum(fr.take(ROWS, a[0] % 200)) + fr.take(ROWS, fr.sum(b) % 2 - 1, axis=1)[3],
    "clipped": lambda a, b: fr.minimum(fr.maximum(a, -20), 20 + b * 0),
}


SIZES = (2, 40)  # of vectors: of entries one by one, and lane by lane


def draw(rng: random.Random, known: int, depth: int) -> tuple[Any, ...]:
    """Some lines, each of which makes one vector of two of those before it."""
    lines: list[tuple[Any, ...]] = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["op", "op", "while", "cond"] if depth else ["op"])
        a, b = (rng.randrange(known + len(lines)) for _ in range(2))
        if kind == "op":
            lines.append((rng.choice(list(OPS)), a, b))
        elif kind == "while":
            body = draw(rng, known + len(lines) + 1, depth - 1)
            lines.append((kind, a, b, rng.randint(0, 3), rng.random() < 0.4, body))
        else:
            lines.append((kind, a, b, *(draw(rng, known + len(lines), depth - 1) for _ in range(2))))
    return tuple(lines)


def follow(lines: Sequence[Any], values: Sequence[Any]) -> Any:
    """What the lines make of ``values`` in the end, kept small: tensors in a graph, arrays at once."""
    known = list(values)
    for kind, a, b, *more in lines:
        x, y, before = known[a], known[b], list(known)
        if kind == "while":
            known.append(loop_of(*more, x, y, before))
        elif kind == "cond":
            ways = [lambda lines=lines, before=before: follow(lines, before) for lines in more]
            known.append(fr.cond(fr.sum(x - y) > 0, *ways))
        else:
            known.append(OPS[kind](x, y))
    return known[-1] % 1001


def loop_of(iterations: int, limited: bool, body: Sequence[Any], x: Any, y: Any, before: Sequence[Any]) -> Any:
    return fr.while_loop(
        lambda i, v: fr.logical_and(i < iterations, fr.sum(v) < 900) if iterations else fr.less(i + y[0] * 0, 2),
        lambda i, v: (i + 1, follow(body, [*before, v])),
        (np.int64(0), x),
        maximum_iterations=2 if limited else None,
    )[1]


def random_loop(seed: int, size: int) -> tuple[fr.Graph, list[Any], Any, list[Array], Array]:
    """A graph whose loop has a random body, its feeds, the fetch, what to feed and what to get."""
    rng = random.Random(seed)
    body = draw(rng, 2, 2)
    fed = [np.array([rng.randint(-9, 9) for _ in range(size)]) for _ in range(2)]
    iterations = rng.randint(1, 4)

    def made(x: Any, y: Any) -> Any:
        return loop_of(iterations, False, body, x, y, [y])

    with fr.Graph() as graph:
        feeds = [fr.placeholder("int64", (size,)) for _ in fed]
        last = made(*feeds)
    return graph, feeds, last, fed, np.asarray(made(*fed))


@pytest.mark.parametrize("size", SIZES)
def test_random_bodies_come_to_programs_that_compute_the_same(size: int) -> None:
    unfit = 0
    for seed in range(80 if size < 8 else 40):
        graph, _, _, fed, wanted = random_loop(seed, size)
        if not is_unrolled(graph):
            unfit += 1
            continue
        node = [n for n in graph.nodes if n.op.name == "loop"][-1]
        given = [np.int64(0), fed[0], *[fed[1]] * (len(node.inputs) - 2)]
        got = run_program(step_of(graph), [np.asarray(x) for x in given])
        np.testing.assert_array_equal(got[1], wanted, err_msg=f"seed {seed}")
    assert unfit < 20


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that can be one kernel are compiled rather than ordered."""
    monkeypatch.setattr(background, "was_tried", lambda symbol: True)


def compiled(graph: fr.Graph, fetches: Any, feeds: list[Any], *fed: Any) -> Any:
    with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
        step = session.compile(fetches, feeds)
        answers = [step(*fed) for _ in range(2)]
    np.testing.assert_equal(answers[0], answers[1])
    return answers[0]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("seed", "size"), [(3, 2), (17, 2), (29, 2), (41, 2), (3, 40), (9, 40)])
def test_random_bodies_compute_the_same_when_they_are_compiled(seed: int, size: int) -> None:
    graph, feeds, last, fed, wanted = random_loop(seed, size)
    assert is_unrolled(graph)
    np.testing.assert_array_equal(compiled(graph, last, feeds, *fed), wanted)


@pytest.mark.usefixtures("at_once")
def test_a_loop_of_scalars_in_a_loop_of_scalars_is_one_kernel() -> None:
    with fr.Graph() as graph:
        n = fr.placeholder("int64", ())

        def common(a: Any, b: Any) -> Any:
            return fr.while_loop(lambda a, b: fr.not_equal(b, np.int64(0)), lambda a, b: (b, a % b), (a, b))[0]

        total = fr.while_loop(lambda i, s: i < 50, lambda i, s: (i + 1, s + common(i * 12, n)), (np.int64(1), n * 0))[1]
    step = step_of(graph)
    assert [type(part) for part in step.program.body.parts].count(InnerLoop) == 1
    assert int(compiled(graph, total, [n], np.int64(360))) == sum(math.gcd(12 * i, 360) for i in range(1, 50))


@pytest.mark.usefixtures("at_once")
def test_a_loop_in_a_branch_takes_no_iteration_where_the_branch_is_not_chosen() -> None:
    def iteration(i: Any, v: Any) -> Any:
        def never_ends() -> Any:
            return fr.while_loop(lambda w: w < 9.0, lambda w: w * 1.0, v)

        return i + 1, fr.cond(v > 100.0, lambda: v, lambda: fr.cond(v < 0.0, never_ends, lambda: v * 2.0))

    with fr.Graph() as graph:
        x = fr.placeholder("float64", ())
        last = fr.while_loop(lambda i, v: i < 10, iteration, (np.int32(0), x))[1]
    assert is_unrolled(graph)
    assert float(compiled(graph, last, [x], np.float64(1.5))) == 192.0


@pytest.mark.usefixtures("at_once")
def test_a_loop_inside_that_no_iteration_changes_is_run_when_the_first_iteration_needs_it() -> None:
    with fr.Graph() as graph:
        n, m, x = fr.placeholder("int64", ()), fr.placeholder("int64", ()), fr.placeholder("float64", ())

        def inside() -> tuple[Any, Any]:  # without end where n is below 0
            start = (np.int64(0), np.int64(1), np.ones(9))
            iteration = lambda i, a, v: (i + 1, (a * 3 + i) % 1009, v * x + 1.0)  # noqa: E731
            return fr.while_loop(lambda i, a, v: fr.not_equal(i, n), iteration, start)[1:]

        def iteration(i: Any, s: Any, v: Any) -> Any:
            a, w = inside()
            return i + 1, (s * 7 + a) % 1013, v + w

        last = fr.while_loop(lambda i, s, v: i < m, iteration, (np.int64(0), np.int64(0), np.zeros(9)))[1:]
    assert is_unrolled(graph)
    for iterations, outer in ((5, 6), (0, 3), (-1, 0)):
        a, w, s = 1, 1.0, 0
        for i in range(iterations):
            a, w = (a * 3 + i) % 1009, w * 0.5 + 1.0
        for _ in range(outer):
            s = (s * 7 + a) % 1013
        got = compiled(graph, last, [n, m, x], np.int64(iterations), np.int64(outer), np.float64(0.5))
        assert int(got[0]) == s
        np.testing.assert_allclose(got[1], np.full(9, outer * w), rtol=1e-15)


@pytest.mark.usefixtures("at_once")
def test_a_state_of_three_numbers_is_carried_scanned_and_stacked_as_scalars() -> None:
    def iteration(state: Any, row: Any) -> Any:
        product = fr.matmul(m, fr.expand_dims(state, 1))[:, 0]
        following = state + 0.1 * (product - fr.mean(state) * fr.tanh(row))
        return following, fr.stack([following[2], fr.max(following)])

    rng = np.random.default_rng(7)
    first, rows, matrix = rng.normal(size=3), rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float64", shape) for shape in ((3,), (5, 3), (3, 3))]
        m = feeds[2]
        last, stacked = fr.scan(iteration, feeds[0], feeds[1], reverse=True)
        slopes = fr.gradients([fr.sum(last * last) + fr.sum(stacked)], feeds)
    assert is_unrolled(graph)  # the loop backwards
    got = compiled(graph, [last, stacked, *slopes], feeds, first, rows, matrix)
    assert all(a.shape == b.shape for a, b in zip(got[2:], (first, rows, matrix), strict=True))

    def loss(first: Array, rows: Array, matrix: Array) -> tuple[Array, Array, float]:
        state, kept = first, np.zeros((5, 2))
        for t in reversed(range(5)):
            state = state + 0.1 * (matrix @ state - state.mean() * np.tanh(rows[t]))
            kept[t] = state[2], state.max()
        return state, kept, float((state * state).sum() + kept.sum())

    wanted = loss(first, rows, matrix)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-12)
    for number, slope in enumerate(got[2:]):
        for at in np.ndindex(slope.shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [first.copy(), rows.copy(), matrix.copy()]
                moved[number][at] += step
                ends.append(loss(*moved)[2])
            assert slope[at] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("endless", ["inside", "outside"])
async def test_loops_inside_one_kernel_see_that_they_are_to_end(endless: str) -> None:
    def inside(y: Any) -> Any:
        if endless == "inside":
            return fr.while_loop(lambda y: y > 0.0, lambda y: y * 0.5, y)
        return fr.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (np.int64(0), y))[1]

    with fr.Graph() as graph:
        x = fr.placeholder("float32", ())
        last = fr.while_loop(lambda y: y > 0.0, inside, x)
    assert is_unrolled(graph)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        with pytest.raises(fr.StepTimeout):
            await session.run(last, {x: np.float32(np.inf)}, timeout=0.05)


@pytest.mark.usefixtures("at_once")
def test_a_small_layer_is_unrolled_as_passes_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    known = flowrt.sched.loops.nesting.apply_scalar_loop
    monkeypatch.setattr(
        flowrt.sched.loops.nesting, "apply_scalar_loop", lambda *a: found.append(known(*a)) or found[-1]
    )
    rng = np.random.default_rng(5)
    first, weights, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 4), (4, 4), (4,)))

    def layer(v: Any) -> Any:
        return fr.tanh(fr.matmul(fr.nn.relu(fr.matmul(v, w) + b), w)) + fr.sum(v * v) * 0.5

    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", shape) for shape in ((2, 4), (4, 4), (4,))]
        _, w, b = feeds
        last = fr.while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, layer(v)), (np.int32(0), feeds[0]))[1]
    got = compiled(graph, last, feeds, first, weights, bias)
    assert found
    assert None not in found
    wanted = first.astype(np.float64)
    for _ in range(4):
        wanted = np.tanh(np.maximum(wanted @ weights + bias, 0) @ weights) + (wanted * wanted).sum() * 0.5
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


# ── what is unrolled ─────────────────────────────────────────────────────────────────────────────────────────────────


def loop_over(shape: tuple[int, ...], iteration: Callable[[Any], Any]) -> fr.Graph:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", shape)
        fr.while_loop(lambda i, v: i < 9, lambda i, v: (i + 1, iteration(v)), (np.int32(0), x))
    return graph


def test_loops_are_unrolled_where_that_is_worth_it() -> None:
    square = np.eye(4, dtype=np.float32)
    assert is_unrolled(loop_over((64,), lambda v: v * 0.5 + v * v))
    assert is_unrolled(loop_over((4, 4), lambda v: fr.matmul(v, square, transpose_b=True)))
    assert is_unrolled(loop_over((8,), fr.tanh))
    assert is_unrolled(loop_over((200,), lambda v: fr.tanh(v) * fr.sin(v)))
    assert not is_unrolled(loop_over((1000,), lambda v: v * 0.5))
    assert not is_unrolled(loop_over((16, 16), lambda v: fr.matmul(v, v)))
    assert not is_unrolled(loop_over((4,), lambda v: fr.cumsum(v)))
    assert not is_unrolled(loop_over((), lambda v: v + fr.random.uniform(())))
    assert not is_unrolled(loop_over((0,), fr.negative))


def test_divisors_are_known_to_the_kernel_and_factors_are_not() -> None:
    def constants(divisor: int, factor: float) -> tuple[int | None, ...]:
        with fr.Graph() as graph:
            x = fr.placeholder("float32", ())
            fr.while_loop(lambda i, v: i < 90, lambda i, v: (i // divisor, v * factor), (np.int32(99), x))
        return step_of(graph).program.constants

    assert constants(3, 0.5) == constants(3, 0.25) != constants(5, 0.5)
    assert sorted(constants(3, 0.5), key=str) == [3, 90, None]


def test_an_iteration_names_only_values_that_come_before() -> None:
    body = make_iteration(["int64"], [[("add", (0, 0), "int64")]], [1])
    for loop in (
        InnerLoop(None, body, (1,), (), 3, None, None),
        InnerLoop(None, body, (0,), (0,), 3, None, None),
        InnerLoop(None, body, (0,), (), None, None, 5),
    ):
        with pytest.raises(fr.GraphError, match="loop"):
            make_iteration(["int64"], [loop], [0])
    with pytest.raises(fr.GraphError, match="cannot answer"):
        make_iteration(["int64"], [], [1])
    assert (
        make_iteration(["int64"], [InnerLoop(None, body, (0,), (), 3, None, None)], [1, 2]).answers == (np.int64,) * 2
    )
