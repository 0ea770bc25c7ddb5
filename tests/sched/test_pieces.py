"""Loops whose slices change with values: computed in pieces, to the same bits as node by node, and NumPy's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import PlanMaker, array, whole_region

import flowrt as fr
import flowrt.sched.tape.tapes
from flowrt.base.spec import Spec
from flowrt.sched.loops.pieces import Piece, find_pieces
from flowrt.sched.regional import FEW
from flowrt.sched.single import NodeRunner
from flowrt.sched.tape.recording import record
from flowrt.sched.tape.tapes import Tapes

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

Array = np.ndarray[Any, Any]
CAPACITY, WIDTH, LAYERS = 6, 4, 3
TOKENS = 40
BOUNDS: dict[str, Any] = {
    "growing": lambda t: slice(None, t + 1),
    "none at first": lambda t: slice(None, t),
    "shrinking": lambda t: slice(t, None),
    "from the end": lambda t: slice(-t - 1, None),
    "but the last": lambda t: slice(None, -t - 1),
    "a window": lambda t: slice(t - 2, t + 1),
    "beyond": lambda t: slice(t, t + 99),
}


def pieces_of(plan: Plan) -> Sequence[Piece]:
    return find_pieces(plan, whole_region(plan), [Spec(feed.spec.dtype, feed.spec.dims) for feed in plan.feeds])


def ops_of(plan: Plan, piece: Piece) -> list[str]:
    return [plan.nodes[n].op for n in piece.region.nodes]


def sliced_twice() -> Plan:
    """Two layers, each of which computes with the first rows of what the one before it made."""
    make = PlanMaker()
    x, count = make.feed("float32", (4, 3)), make.feed("int64", ())
    zero = make.constant(np.int64(0))
    for _ in range(2):
        part = make.node("slice_along", make.node("square", x), zero, count, axis=0)
        x = make.node("add", x, make.node("sum", make.node("negative", part), axis=(0,), keepdims=False))
    plan: Plan = make.plan(x)
    return plan


# ── what the pieces are ──


def test_pieces_are_by_turns_of_nodes_whose_shapes_are_known_and_of_others() -> None:
    plan = sliced_twice()
    pieces = pieces_of(plan)
    assert [piece.varies for piece in pieces] == [False, True, False, True, False]
    assert [ops_of(plan, piece) for piece in pieces] == [
        ["square"],
        ["constant", "slice_along", "negative", "sum"],
        ["add", "square"],
        ["constant", "slice_along", "negative", "sum"],
        ["add"],
    ]


def test_a_piece_takes_only_what_those_before_it_made() -> None:
    plan = sliced_twice()
    known = {*range(len(plan.feeds))}
    for piece in pieces_of(plan):
        assert known.issuperset(piece.region.inputs)
        known.update(piece.region.outputs)
    assert known.issuperset(plan.fetches)


def test_pieces_that_are_the_same_in_all_but_names_share_what_their_tapes_are_made_of() -> None:
    first, second = (piece for piece in pieces_of(sliced_twice()) if piece.varies)
    assert second.like is first.like is first.region is not second.region


def test_pieces_that_differ_in_an_attribute_share_nothing() -> None:
    make = PlanMaker()
    x, count = make.feed("float32", (4, 4)), make.feed("int64", ())
    zero = make.constant(np.int64(0))
    for axis in range(2):
        part = make.node("slice_along", x, zero, count, axis=axis)
        x = make.node("add", x, make.node("sum", part, axis=(axis,), keepdims=True))
    assert all(piece.like is piece.region for piece in pieces_of(make.plan(x)))


def test_all_is_one_piece_where_no_shape_varies() -> None:
    make = PlanMaker()
    x = make.feed("float32", (4,))
    (piece,) = pieces_of(make.plan(make.node("square", make.node("add", x, make.constant(2.0)))))
    assert not piece.varies


def test_what_is_laid_out_again_has_come_before() -> None:
    make = PlanMaker()
    x = make.feed("float32", (None,))
    plan = make.plan(make.node("square", x))
    region, tapes = whole_region(plan), Tapes(plan, bound=4)
    one, other = [array(1)], [array(2)]
    assert tapes.again(region, one) is None
    assert tapes.again(region, other) is None
    assert tapes.again(region, one) is tapes.made(region, one) is not None


def test_what_comes_again_after_too_many_others_is_not_laid_out() -> None:
    make = PlanMaker()
    x = make.feed("float32", (None,))
    plan = make.plan(make.node("square", x))
    region, tapes = whole_region(plan), Tapes(plan, bound=4)
    for _ in range(3):
        assert [tapes.again(region, [np.zeros(n, np.float32)]) for n in (1, 2, 3)] == [None] * 3


# ── what loops come to ──


def attended(x: Any, cache: Any, seen: slice, like: Any) -> Any:
    """A row that weighs those of a cache by how like they are; ``like`` is flowrt or what stands in for it."""
    rows = cache[seen]
    weights = like.exp(rows @ x / 2)
    return like.tanh(x + weights @ rows / (1 + like.sum(weights)))


def decoded(graph_steps: Any, first: Any, weights: Sequence[Any], bound: Any) -> Any:
    """What a decoder of some layers carries at the end: a row, and a cache for each layer."""

    def step(t: Any, x: Any, *caches: Any) -> Any:
        new = []
        for weight, cache in zip(weights, caches, strict=True):
            new.append(fr.where(fr.arange(CAPACITY)[:, None] == t, x @ weight, cache))
            x = attended(x, new[-1], bound(t), fr)
        return (t + 1, x, *new)

    caches = [fr.zeros((CAPACITY, WIDTH), "float64") for _ in weights]
    return fr.while_loop(lambda t, *_: t < graph_steps, step, (0, first, *caches))[1:]


def wanted(steps: int, x: Array, weights: Sequence[Array], bound: Any) -> list[Array]:
    caches = [np.zeros((CAPACITY, WIDTH)) for _ in weights]
    for t in range(steps):
        for weight, cache in zip(weights, caches, strict=True):
            if t < CAPACITY:
                cache[t] = x @ weight
            x = attended(x, cache, bound(t), np)
    return [x, *caches]


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_a_decoder_comes_to_numpys_numbers_and_to_the_same_bits_as_node_by_node(bound: Any) -> None:
    rng = np.random.default_rng(0)
    weights, x = [rng.normal(size=(WIDTH, WIDTH)) for _ in range(LAYERS)], rng.normal(size=WIDTH)
    with fr.Graph() as graph:
        steps, first = fr.placeholder("int64", ()), fr.placeholder("float64", (WIDTH,))
        made = decoded(steps, first, [fr.Variable(weight) for weight in weights], bound)
    with fr.BlockingSession(graph) as session, fr.BlockingSession(graph, options=fr.Options(tapes=False)) as single:
        for count in (0, 1, 4, CAPACITY + 2, 4, 4, CAPACITY + 2, CAPACITY + 2):
            found, alone = (s.run(made, {steps: count, first: x}) for s in (session, single))
            for got, same, right in zip(found, alone, wanted(count, x, weights, bound), strict=True):
                np.testing.assert_array_equal(got, same)
                np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-14)


def test_what_has_come_to_a_length_twice_computes_no_node_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    run = NodeRunner.run

    def counted(self: NodeRunner, *args: Any) -> Any:
        computed.append(self.node.op)
        return run(self, *args)

    monkeypatch.setattr(NodeRunner, "run", counted)
    with fr.Graph() as graph:
        steps, weight = fr.placeholder("int64", ()), fr.constant(np.eye(WIDTH))
        (made, *_) = decoded(steps, fr.ones((WIDTH,), "float64"), [weight] * LAYERS, BOUNDS["growing"])
    counts = []
    with fr.BlockingSession(graph) as session:
        for _ in range(3):
            session.run(made, {steps: CAPACITY})
            counts.append(computed.count("slice_along"))
            computed.clear()
    assert 0 < counts[0] < CAPACITY * LAYERS  # layers are alike
    assert counts[2] == 0


def test_batches_of_several_sizes_come_by_turns() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None, 3))

        def step(t: Any, rows: Any) -> Any:
            return t + 1, rows + fr.sum(rows[:, :t], axis=1, keepdims=True)

        made = fr.while_loop(lambda t, _: t < 3, step, (0, x))[1]
    rng = np.random.default_rng(1)
    with fr.BlockingSession(graph) as session:
        for size in (1, 2, 0, 1, 2, 0, 2, 1):
            right = fed = rng.normal(size=(size, 3))
            for t in range(3):
                right = right + right[:, :t].sum(axis=1, keepdims=True)
            np.testing.assert_allclose(session.run(made, {x: fed}), right, rtol=1e-12)


def test_branches_and_loops_inside_see_slices_that_grow() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (5,))

        def step(t: Any, rows: Any) -> Any:
            total = fr.cond(t % 2 == 0, lambda: fr.sum(rows[:t]), lambda: fr.max(rows[: t + 1]))
            twice = fr.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y + fr.sum(rows[k:t])), (0, total))[1]
            return t + 1, fr.where(fr.arange(5) == t, twice, rows)

        made = fr.while_loop(lambda t, _: t < 5, step, (0, x))[1]
    rng = np.random.default_rng(2)
    with fr.BlockingSession(graph) as session:
        for _ in range(4):
            fed = rng.normal(size=5)
            rows = fed.copy()
            for t in range(5):
                total = rows[:t].sum() if t % 2 == 0 else rows[: t + 1].max()
                rows[t] = total + sum(rows[k:t].sum() for k in range(2))
            np.testing.assert_allclose(session.run(made, {x: fed}), rows, rtol=1e-12)


def test_what_grows_from_one_iteration_to_the_next_is_carried_on() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None, 2))
        more = lambda t, rows: (t + 1, fr.concat([rows, fr.mean(rows, axis=0, keepdims=True) + t], axis=0))  # noqa: E731
        made = fr.while_loop(lambda t, _: t < 4, more, (0, x), shape_invariants=((), (None, 2)))[1]
    with fr.BlockingSession(graph) as session:
        for size in (1, 3, 1, 3, 3):
            rows = fed = np.random.default_rng(size).normal(size=(size, 2))
            for t in range(4):
                rows = np.concatenate([rows, rows.mean(axis=0, keepdims=True) + t])
            np.testing.assert_allclose(session.run(made, {x: fed}), rows, rtol=1e-12)


def test_an_error_names_the_node_of_its_own_layer_whoever_is_like_it() -> None:
    with fr.Graph() as graph:
        last, bad = fr.placeholder("int64", ()), fr.placeholder("int64", ())
        table = fr.Variable(np.arange(4.0), name="table")

        def step(t: Any, total: Any) -> Any:
            for name, index in (("good", t), ("failing", t + bad)):
                ids = fr.where(fr.arange(4) < 4, index, 0)[: t + 1]
                total = total + fr.sum(fr.take(table, ids, name=name))
            return t + 1, total

        made = fr.while_loop(lambda t, _: t < last, step, (0, np.float64(0)))[1]
    with fr.BlockingSession(graph) as session:
        for _ in range(3):
            assert session.run(made, {last: 4, bad: 0}) == 2 * sum(t * (t + 1) for t in range(4))
        with pytest.raises(fr.FlowrtError, match=r"/failing' \(.*test_pieces.py:\d+\): an index.*'table' has 4"):
            session.run(made, {last: 4, bad: 1})


async def test_a_loop_without_end_is_stopped() -> None:
    with fr.Graph() as graph:
        made = fr.while_loop(
            lambda t, _: t >= 0, lambda t, y: (t + 1, y[: t % 3 + 1] @ y[: t % 3 + 1] + y), (0, fr.ones(4))
        )
    async with fr.Session(graph) as session:
        for _ in range(2):
            with pytest.raises(fr.StepTimeout):
                await session.run(made, timeout=0.05)


# ── what steps come to ──


def token_by_token(weights: Sequence[Array], bound: Any) -> tuple[fr.Graph, list[Any], list[Any]]:
    """A decoder's step for one token, whose caches are variables; what it is fed, and what it answers."""
    with fr.Graph() as graph:
        t, x = fr.placeholder("int64", (), name="t"), fr.placeholder("float64", (WIDTH,), name="x")
        y, writes = x, []
        for weight in weights:
            cache = fr.Variable(fr.zeros((TOKENS, WIDTH), "float64"), trainable=False)
            new = fr.where(fr.arange(TOKENS)[:, None] == t, y @ fr.Variable(weight), cache)
            writes.append(cache.assign(new))
            y = attended(y, new[bound(t)] if bound else new[: t + 1], slice(None), fr)
        before = fr.sum(cache)  # as it was before this step, whatever runs when
        return graph, [t, x], [y, before, fr.group(*writes)]


@pytest.mark.parametrize("bound", [BOUNDS["growing"], BOUNDS["none at first"], BOUNDS["from the end"]])
def test_a_step_for_each_token_comes_to_numpys_numbers_however_many_there_are(bound: Any) -> None:
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=(WIDTH, WIDTH)) for _ in range(LAYERS)]
    graph, feeds, fetches = token_by_token(weights, bound)
    caches = [np.zeros((TOKENS, WIDTH)) for _ in weights]
    with fr.BlockingSession(graph) as session, fr.BlockingSession(graph, options=fr.Options(tapes=False)) as single:
        steps = [each.compile(fetches, feeds=feeds) for each in (session, single)]
        for _ in range(3):
            x = rng.normal(size=WIDTH)
            for t in range(TOKENS):
                (found, before, _), alone = (step(t, x) for step in steps)
                np.testing.assert_array_equal(found, alone[0])
                np.testing.assert_array_equal(before, alone[1])
                np.testing.assert_allclose(before, caches[-1].sum(), rtol=1e-9, atol=1e-12)
                for weight, cache in zip(weights, caches, strict=True):
                    cache[t] = x @ weight
                    x = attended(x, cache, bound(t), np)
                np.testing.assert_allclose(found, x, rtol=1e-9)
                x = found


def test_a_step_whose_sizes_are_ever_new_is_laid_out_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []

    def counted(plan: Plan, region: Any, specs: Any) -> Any:
        laid_out.append(len(region.nodes))
        return record(plan, region, specs)

    monkeypatch.setattr(flowrt.sched.tape.tapes, "record", counted)
    graph, feeds, fetches = token_by_token([np.eye(WIDTH)], None)
    with fr.BlockingSession(graph) as session:
        step = session.compile(fetches, feeds=feeds)
        for t in range(FEW + 1):
            step(t, np.ones(WIDTH))
        whole = max(laid_out)
        laid_out.clear()
        for t in range(FEW + 1, TOKENS):
            step(t, np.ones(WIDTH))
        assert not laid_out
        step(TOKENS - 1, np.ones(WIDTH))
        assert max(laid_out) == whole  # a size that comes again


def test_a_variable_that_is_written_is_read_before_by_pieces_that_run_after() -> None:
    with fr.Graph() as graph:
        t = fr.placeholder("int64", ())
        v = fr.Variable(np.arange(4.0), name="v")
        seen = fr.sum(v[:t])  # varies, and runs behind the write's own piece
        write = v.assign(v + 1.0)
        with fr.control_dependencies([write]):
            after = v.read()
            late = fr.sum(v[: t + 1]) + seen  # of v as it was
    held = np.arange(4.0)
    with fr.BlockingSession(graph) as session:
        step = session.compile([seen, late, after, write], feeds=[t])
        for number in (*range(FEW + 2), -1, -2, 50, 60, 2):
            found = step(number)
            first = held[:number].sum()
            assert found[0] == first
            assert found[1] == held[: number + 1].sum() + first
            held = held + 1
            np.testing.assert_array_equal(found[2], held)


def test_what_stands_around_a_loop_whose_slices_change_is_laid_out() -> None:
    rng = np.random.default_rng(4)
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (5, 3))
        w = fr.Variable(rng.normal(size=(3, 3)), name="w")
        rows = fr.tanh(x @ w)
        total = fr.while_loop(
            lambda t, _: t < 5, lambda t, y: (t + 1, y + fr.sum(fr.square(rows[:t]))), (0, np.float64(0))
        )[1]
        train = fr.optim.SGD(0.01).minimize(total)
    fed = rng.normal(size=(5, 3))
    with fr.BlockingSession(graph) as session, fr.BlockingSession(graph, options=fr.Options(tapes=False)) as single:
        for _ in range(3):
            (one, _), (other, _) = (each.run([total, train], {x: fed}) for each in (session, single))
            assert one == other
        np.testing.assert_array_equal(session.run(w), single.run(w))


def test_a_step_may_write_a_row_of_its_cache_and_then_read_the_rows_so_far() -> None:
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(WIDTH, WIDTH))
    with fr.Graph() as graph:
        t, x = fr.placeholder("int64", ()), fr.placeholder("float64", (WIDTH,))
        kept = fr.Variable(fr.zeros((TOKENS, WIDTH), "float64"), trainable=False)
        with fr.control_dependencies([kept.scatter_update(fr.reshape(t, (1,)), (x @ weight)[None])]):
            y = attended(x, kept.read(), slice(None, t + 1), fr)
    cache = np.zeros((TOKENS, WIDTH))
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, feeds=[t, x])
        for _ in range(3):
            for number in range(TOKENS):
                fed = rng.normal(size=WIDTH)
                cache[number] = fed @ weight
                wanted = attended(fed, cache, slice(None, number + 1), np)
                np.testing.assert_allclose(step(number, fed), wanted, rtol=1e-9)
        np.testing.assert_allclose(session.run(kept), cache, rtol=1e-9)
