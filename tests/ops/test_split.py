"""Variables that are split by rows: to the bit what the whole would be."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_world import compiled

import flowrt as fr
from flowrt.base.partitioning import Partition, padded_room, padded_rows
from flowrt.ops.routing import route_rows
from flowrt.sched.units import Action, find_units

Array = np.ndarray[Any, Any]
OPTIMIZERS: list[Callable[[], fr.optim.Optimizer]] = [
    lambda: fr.optim.SGD(0.1),
    lambda: fr.optim.Momentum(0.1, 0.9, nesterov=True),
    lambda: fr.optim.AdaGrad(0.1),
    lambda: fr.optim.RMSProp(0.1, momentum=0.5),
    lambda: fr.optim.AdamW(0.1),
]
STARTS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(33, dtype="float32").reshape(11, 3),
    "zeros": lambda: fr.zeros((11, 3)),
    "function": lambda: lambda: fr.full((11, 3), 2.5),
    "normal": lambda: fr.random.normal((11, 3), seed=1),
    "truncated": lambda: fr.random.truncated_normal((11, 3), seed=1),
    "computed": lambda: fr.random.uniform((11, 3), seed=1) * fr.random.normal((3,), seed=2) - fr.ones((11, 1)),
    "float64": lambda: fr.tanh(fr.random.normal((11, 3), dtype="float64", seed=4)),
    "cast": lambda: fr.random.normal((11, 3), seed=4).astype("float64"),
    "unseeded": lambda: fr.random.normal((11, 3)),
    "other": lambda: fr.transpose(fr.random.normal((3, 11), seed=2)),
    "no columns": lambda: np.zeros((11, 0), "float32"),
    "vector": lambda: fr.random.uniform((11,), seed=3),
}


def run(build: Callable[[], Any]) -> Any:
    """What a session of the graph that ``build`` makes answers for what that answers."""
    with fr.Graph(seed=7) as graph:
        fetches = build()
    with fr.BlockingSession(graph) as session:
        return session.run(fetches)


@pytest.mark.parametrize("partition", [1, 2, 3, 11, (0, 1, 11), [0, 10, 11]], ids=str)
@pytest.mark.parametrize("start", STARTS)
def test_each_part_starts_from_the_rows_that_the_whole_would_have(start: str, partition: Any) -> None:
    want = run(lambda: fr.Variable(STARTS[start](), name="w"))
    got, parts = run(lambda: (w := fr.Variable(STARTS[start](), name="w", partition=partition), list(w.parts)))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.concatenate(parts), want)
    assert got.dtype == want.dtype


def test_parts_that_make_no_sense_say_the_fix() -> None:
    with fr.Graph() as graph:
        with pytest.raises(fr.SpecError, match=r"test_split.*2 rows cannot be split into 3 parts; ask for 1 to 2"):
            fr.Variable(np.zeros((2, 3)), partition=3)
        with pytest.raises(fr.SpecError, match="a scalar has no rows to be split by"):
            fr.Variable(1.0, partition=1)
        with pytest.raises(fr.SpecError, match="the bounds of rows must rise"):
            fr.Variable(np.zeros((3, 3)), partition=(0, 2, 1, 3))
    assert not graph.variables
    assert not graph.partitions


def test_what_a_program_sees_is_one_variable() -> None:
    with fr.Graph() as graph:
        w = fr.Variable(fr.zeros((5, 2)), name="w", partition=2)
        fr.optim.Adam(0.1).minimize(fr.sum(fr.take(w, [1, 4])))
    assert (w.name, w.shape, w.dtype, w.trainable, len(w)) == ("w", (5, 2), np.float32, True, 5)
    assert isinstance(w, fr.Variable)
    assert graph.partitions["w"] == w.partition
    assert [(p.name, p.rows) for p in graph.partitions.values()] == [
        ("w", (0, 2, 5)),
        ("w/first_moment", (0, 2, 5)),
        ("w/second_moment", (0, 2, 5)),
        ("w/steps", ()),
    ]
    assert fr.Graph.from_bytes(graph.to_bytes()).partitions == graph.partitions


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "dense"])
def test_training_comes_to_the_same_bits_however_it_is_split(make: Any, whole: bool) -> None:
    def train(partition: Any) -> list[Array]:
        with fr.Graph() as graph:
            ids = fr.placeholder("int32", (None, 2))
            w = fr.Variable(fr.random.normal((11, 4), seed=3), name="w", partition=partition)
            loss = fr.sum(fr.square(fr.nn.embedding_lookup(w, ids))) + fr.sum(fr.take(w, ids[:, 0]))
            step = make().minimize(loss + fr.sum(fr.sin(w)) if whole else loss)
        given = np.random.default_rng(5)
        with fr.BlockingSession(graph) as session:
            seen = []
            for count in (4, 0, 1, 7):
                batch = given.integers(-11, 11, (count, 2)).astype("int32")
                seen += [session.run([loss, step], {ids: batch})[0], session.run(w)]
            return seen

    want = train(None)
    for partition in (3, (0, 1, 11)):
        for mine, judge in zip(train(partition), want, strict=True):
            np.testing.assert_array_equal(mine, judge)


def test_writes_are_sent_to_the_parts() -> None:
    start, more = np.arange(22, dtype="float32").reshape(11, 2), np.ones((11, 2), "float32")
    ids, rows = np.array([3, 10, -1, 3]), np.arange(8, dtype="float32").reshape(4, 2)

    def write(partition: Any) -> list[Array]:
        with fr.Graph() as graph:
            fed = fr.placeholder("float32", (11, 2))
            w = fr.Variable(start, name="w", partition=partition)
            writes = [w.assign_add(more), w.scatter_add(ids, rows), w.scatter_sub(ids, rows), w.assign_sub(fed)]
            writes += [w.scatter_update(ids, rows), w.scatter_add(ids[:0], rows[:0]), w.assign(fed), w.initializer]
            with fr.control_dependencies([w.scatter_add([0], [[1.0, 1.0]])]):
                after = w.read()
        with fr.BlockingSession(graph) as session:
            return [session.run([write, w], {fed: more})[1] for write in writes] + [session.run(after), session.run(w)]

    for mine, judge in zip(write((0, 4, 10, 11)), write(None), strict=True):
        np.testing.assert_array_equal(mine, judge)


@pytest.mark.parametrize("bad", [11, -12, 1 << 40, -(1 << 63)])
def test_a_row_out_of_range_fails_as_in_the_whole(bad: int) -> None:
    for partition in (None, 3):
        with fr.Graph() as graph:
            ids = fr.placeholder("int64", (None,))
            w = fr.Variable(np.ones((11, 2), "float32"), name="w", partition=partition)
            found, moved = fr.take(w, ids), w.scatter_add(ids, fr.ones((1, 2)))
        with fr.BlockingSession(graph) as session:
            for fetch in (found, moved):
                with pytest.raises(fr.FlowrtError, match=r"test_split.*an index is out of range"):
                    session.run(fetch, {ids: [bad]})
            np.testing.assert_array_equal(session.run(w), np.ones((11, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(4, 3), (4,), (1, 3), (4, 2, 3)], ids=str)
@pytest.mark.parametrize("ids", [0, [], [0, -1, 0], [[0, 0], [-1, 0]], np.zeros((0, 2), "int64")], ids=str)
def test_parts_of_one_row_and_ids_of_any_shape_are_as_the_whole(ids: Any, shape: Any, dtype: str) -> None:
    given = np.asarray(ids, "int64")

    def work(partition: int | None) -> list[Any]:
        with fr.Graph(seed=3) as graph:
            fed = fr.placeholder("int64", (None,) * given.ndim)
            w = fr.Variable(fr.random.normal(shape, dtype=dtype), name="w", partition=partition)
            rows = fr.nn.embedding_lookup(w, fed)
            step, put = fr.optim.Adam(0.1).minimize(fr.sum(fr.square(rows))), w.scatter_update(fed, rows * 2)
        with fr.BlockingSession(graph) as session:
            return [session.run([rows, write], {fed: given})[0] for write in (step, put)] + [session.run(w)]

    for mine, judge in zip(work(shape[0]), work(None), strict=True):
        np.testing.assert_array_equal(mine, judge)
        assert mine.dtype == judge.dtype


def test_the_gradient_of_a_variable_that_is_split_is_one_and_clipping_counts_it_once() -> None:
    def clipped(partition: Any) -> Any:
        w = fr.Variable(np.arange(10, dtype="float32").reshape(5, 2), name="w", partition=partition)
        b = fr.Variable(np.ones(2, "float32"), name="b")
        loss = fr.sum(fr.square(fr.take(w, [0, 4, 0]) * b))
        dw, db = fr.gradients(loss, [w, b])
        assert dw.shape == (5, 2)
        (cw, cb), norm = fr.optim.clip_by_global_norm([dw, db], 1.0)
        return norm, *map(fr.identity, (dw, db, cw, cb))

    for mine, judge in zip(run(lambda: clipped((0, 1, 5))), run(lambda: clipped(None)), strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-6)


def test_a_gradient_of_the_whole_moves_the_parts() -> None:
    def moved(partition: Any) -> Any:
        w = fr.Variable(np.zeros((5, 2), "float32"), name="w", partition=partition)
        slices = fr.IndexedSlices(np.ones((3, 2), "float32"), [4, 0, 4], (5, 2))
        return w, fr.optim.SGD(1.0).apply_gradients([(slices, w)])

    def twice(partition: Any) -> Array:
        with fr.Graph() as graph:
            w, step = moved(partition)
        with fr.BlockingSession(graph) as session:
            session.run(step)
            return session.run(w)

    np.testing.assert_array_equal(twice(2), twice(None))


def test_lookups_work_in_branches_and_loops() -> None:
    def loop(partition: Any) -> Any:
        w = fr.Variable(np.arange(10, dtype="float32").reshape(5, 2), name="w", partition=partition)
        turns = fr.while_loop(
            lambda i, x: i < 5, lambda i, x: (i + 1, x + fr.take(w, fr.reshape(i, (1,)))), (0, fr.zeros((1, 2)))
        )
        chosen = fr.cond(turns[0] > 3, lambda: fr.take(w, [4, 0]), lambda: fr.take(w, [1, 2]))
        gradient = fr.gradients(fr.sum(fr.square(turns[1])) + fr.sum(chosen), [w])[0]
        return turns[1], chosen, fr.identity(gradient)

    for mine, judge in zip(run(lambda: loop(3)), run(lambda: loop(None)), strict=True):
        np.testing.assert_array_equal(mine, judge)


def test_explain_says_which_variables_are_put_together() -> None:
    with fr.Graph() as graph:
        w = fr.Variable(fr.zeros((6, 2)), name="w", partition=2)
        rows, whole = fr.take(w, [1, 5]), fr.sum(w)
    with fr.BlockingSession(graph) as session:
        assert "put_together: bytes of w 48" in str(session.explain(whole))
        assert "put_together" not in str(session.explain(rows))


def test_bytes_whose_parts_do_not_add_up_are_refused() -> None:
    with fr.Graph() as graph:
        fr.Variable(fr.zeros((6, 2)), name="w", partition=2)
    found = graph.partitions["w"]
    for broken in (
        Partition("w", found.spec, (0, 2, 6), found.shards),
        Partition("w", found.spec, found.rows, ("w/part_0", "w")),
        Partition("w", found.spec, (), found.shards),
    ):
        graph.partitions["w"] = broken
        with pytest.raises(fr.FlowrtError):
            fr.Graph.from_bytes(graph.to_bytes())


def test_a_step_on_parts_that_lie_together_is_one_tape() -> None:
    with fr.Graph():
        ids = fr.placeholder("int64", (None,))
        w = fr.Variable(fr.zeros((6, 2)), name="w", partition=3)
        rows = fr.take(w, ids)
        step = fr.optim.Adam(0.1).minimize(fr.sum(fr.square(rows)))
    (plan,) = compiled([rows], [step], feeds=[ids]).plans.values()
    assert [unit.action for unit in find_units(plan)] == [Action.TAPE]
    ops = Counter(node.op for node in plan.nodes)
    assert (ops["take_parts"], ops["group_part"], ops["adam_rows"], ops["part_of"]) == (1, 3, 3, 0)


def test_numbers_of_rows_are_padded_to_few_that_fit() -> None:
    padded = [padded_rows(count) for count in range(1 << 16)]
    assert all(count <= rows <= count + max(count // 5, 7) for count, rows in enumerate(padded))
    assert padded == sorted(padded)
    assert len(set(padded)) < 80
    given = np.random.default_rng(0)
    for parts in (1, 2, 3, 8):
        for count in (0, 1, 9, 100, 4096):
            dealt = given.multinomial(count, given.dirichlet([0.3] * parts))
            assert sum(map(padded_rows, dealt.tolist())) <= padded_room(count, parts) or not count


def test_parts_that_are_dealt_about_as_many_have_as_many_rows_each_so_that_sizes_come_again() -> None:
    given, bounds = np.random.default_rng(4), np.arange(9) * 100

    def ends(indices: Array) -> tuple[int, ...]:
        return tuple(np.diff(np.asarray(route_rows(indices, bounds, padded=True)[0])).tolist())

    drawn = {ends(given.integers(0, 800, 1024)) for _ in range(100)}
    assert all(len(set(rows)) == 1 for rows in drawn)
    assert len(drawn) <= 4
    skewed = ends(np.append(np.zeros(1000, "int64"), np.arange(24) * 33))
    assert skewed == tuple(map(padded_rows, [1004, 3, 3, 3, 3, 3, 3, 2]))


def test_rows_are_taken_of_a_table_that_is_not_copied_for_it() -> None:
    rows, width = 1 << 16, 64  # 16 MiB
    with fr.Graph(seed=1) as graph:
        ids = fr.placeholder("int64", (None,))
        w = fr.Variable(fr.zeros((rows, width)), name="w", partition=2)
        found = fr.take(w, ids)
        step = fr.optim.Momentum(0.1, 0.9).minimize(fr.sum(found - 1.0))
    room = fr.Options(memory_limit=(16 + 16 + 4) << 20)  # the table, its momentum, and no half of either
    with fr.BlockingSession(graph, options=room) as session:
        for count in (7, 8):
            session.run(step, {ids: np.arange(count) * (rows // 8)})
        np.testing.assert_allclose(session.run(found, {ids: [0, rows - 1]})[:, 0], [-0.29, 0.0], rtol=1e-6)


@pytest.mark.parametrize("ids", [[5, 1, 5], [1], None], ids=str)
def test_the_gradient_of_a_split_variable_is_fetched_in_a_session_that_is_open(ids: list[int] | None) -> None:
    def build(**split: Any) -> Any:
        table = fr.Variable(np.arange(12, dtype=np.float32).reshape(6, 2), name="t", **split)
        used = table * 1.0 if ids is None else fr.take(table, ids)
        return fr.gradients(fr.sum(fr.square(used)), [table])

    (want,) = run(build)
    (got,) = run(lambda: build(partition=3))
    assert [None if part is None else type(part) for part in got.parts] == [type(want)] * 3
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(got)), want)


def test_a_part_that_nothing_flows_to_has_no_gradient_in_the_answer() -> None:
    def build() -> Any:
        table = fr.Variable(np.ones((4, 2), np.float32), name="t", partition=2)
        return fr.gradients(fr.sum(table.parts[1] * 3.0), [table])

    (got,) = run(build)
    assert got.parts[0] is None
    np.testing.assert_array_equal(got, [[0, 0], [0, 0], [3, 3], [3, 3]])


def test_in_a_body_the_gradient_of_a_split_variable_is_that_of_the_whole() -> None:
    def build() -> Any:
        table = fr.Variable(np.ones((4, 2), np.float32), name="t", partition=2)
        (slope,) = fr.gradients(fr.sum(fr.square(fr.take(table, [3]))), [table])
        return fr.cond(fr.constant(True), lambda: slope, lambda: fr.zeros((4, 2)))

    np.testing.assert_array_equal(run(build), [[0, 0], [0, 0], [0, 0], [2, 2]])
