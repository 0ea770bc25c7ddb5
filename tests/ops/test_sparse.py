"""Gradients that are slices of tables, what consumes them, and the writes of single rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_world import compiled

import flowrt as fr
from flowrt.base.errors import FlowrtError, GraphError, SpecError
from flowrt.kernels import launch
from flowrt.ops.slices import ABSENT, group_rows
from flowrt.sched.warming import warm

SIZE, WIDTH = 23, 3
WAYS = {
    "machine": fr.Options(optimize=False, tapes=False, threads=1),
    "tape": fr.Options(optimize=False, threads=1),
    "optimized": fr.Options(),
}
Array = np.ndarray[Any, Any]


def table(seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(SIZE, WIDTH)).astype(np.float32)


def summed(values: Array, indices: Array, size: int = SIZE) -> Array:
    out = np.zeros((size, *values.shape[1:]), values.dtype)
    np.add.at(out, indices, values)
    return out


# ── grouping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def told(groups: Array) -> list[tuple[int, list[int]]]:
    """(row, its occurrences) of what `group_rows` answers."""
    count = (len(groups) - 2) // 3
    starts, rows, order = groups[1:], groups[count + 2 :], groups[2 * count + 2 :]
    return [(int(rows[g]), order[starts[g] : starts[g + 1]].tolist()) for g in range(groups[0])]


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 30, 1 << 40])
def test_equal_indices_are_grouped_in_order_of_first_occurrence(size: int) -> None:
    rng = np.random.default_rng(size)
    for count in (0, 1, 2, 3, 64, 1000):
        drawn = rng.integers(-size, size, count) if count % 2 else rng.integers(-size, size, count) // 97 * 97
        indices = np.clip(drawn, -size, size - 1)
        expected: dict[int, list[int]] = {}
        for place, at in enumerate(indices.tolist()):
            expected.setdefault(at % size, []).append(place)
        assert told(group_rows(indices, count, size)) == list(expected.items()), (size, count)


def test_a_value_may_stand_for_several_indices_in_a_row() -> None:
    assert told(group_rows(np.int32([4, 4, 2, 4, 2, 0]), 3, 5)) == [(4, [0, 0, 1]), (2, [1, 2]), (0, [2])]


def test_indices_that_are_no_rows_are_left_out() -> None:
    indices = np.int64([ABSENT, 2, ABSENT, 2])
    ones = np.ones((4, 1), np.float32)
    assert told(group_rows(indices, 4, 5, absent=True)) == [(2, [1, 3])]
    np.testing.assert_array_equal(fr.take(np.ones((3, 2), np.float32), indices[:2], absent=True), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(fr.scatter_add(ones, indices, (3, 1), absent=True), [[0], [0], [2]])
    np.testing.assert_array_equal(fr.IndexedSlices(ones, indices, (3, 1), absent=True), [[0], [0], [2]])


@pytest.mark.parametrize("index", [5, -6, 1 << 33, ABSENT])
def test_an_index_out_of_range_fails(index: int) -> None:
    with pytest.raises(FlowrtError, match="an index is out of range"):
        group_rows(np.int64([0, index]), 2, 5)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_gradient_of_a_variables_rows_is_slices_that_answer_as_such() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        ids = fr.placeholder("int32", (2, None))
        slope = fr.gradients(fr.take(v, ids) ** 2, v)[0]
        dense = slope * 2.0
    assert isinstance(slope, fr.IndexedSlices)
    assert slope.spec == fr.Spec("float32", (SIZE, WIDTH))
    given = np.int32([[3, 0, 3], [-1, 3, 0]])
    async with fr.Session(graph) as session:
        got, doubled = await session.run([slope, dense], {ids: given})
    assert isinstance(got, fr.IndexedSlices)
    np.testing.assert_array_equal(got.indices, given.ravel())
    np.testing.assert_allclose(got.values, 2 * table()[given.ravel()])
    np.testing.assert_allclose(np.asarray(got), summed(2 * table()[given.ravel()], given.ravel()), rtol=1e-6)
    np.testing.assert_allclose(doubled, 2 * np.asarray(got), rtol=1e-6)


def uses(v: Any, ids: Any) -> dict[str, Any]:
    return {
        "twice": fr.sum(fr.take(v, ids) ** 2) + fr.sum(fr.take(v, ids[:1]) * 3.0),
        "ids of two dtypes": fr.sum(fr.take(v, ids) ** 2) + fr.sum(fr.take(v, np.int64([[1, 1]])) * 3.0),
        "beside a dense use": fr.sum(fr.take(v, ids) ** 2) + fr.sum(v * v),
        "of columns": fr.sum(fr.take(v, ids % WIDTH, axis=1) ** 2),
        "of another tensor": fr.sum(fr.take(v * 2.0, ids) ** 2),
        "mean of bags": fr.sum(fr.mean(fr.take(v, ids), axis=1) ** 2),
        "mean across bags": fr.sum(fr.mean(fr.take(v, ids), axis=0) ** 2),
        "sum of all": fr.sum(fr.sum(fr.take(v, ids), axis=(0, 1)) ** 2),
        "mean of columns": fr.sum(fr.mean(fr.take(v, ids), axis=2) ** 2),
        "kept sum": fr.sum(fr.sum(fr.take(v, ids), axis=-2, keepdims=True) ** 3),
        "none": fr.sum(fr.take(v, ids[:0]) ** 2),
    }


IDS = np.int32([[3, 0, 3, 22], [-1, 3, 0, 7]])


@pytest.mark.parametrize("use", uses(table(), IDS))
async def test_slices_mean_what_the_dense_gradient_does_and_move_a_variable_alike(use: str) -> None:
    with fr.Graph() as graph:
        v, held = fr.Variable(table(), name="v"), fr.Variable(table(), name="held")
        dense = fr.identity(held)
        ids = fr.placeholder("int32", (None, 4))
        mine, judge = fr.gradients(uses(v, ids)[use], v)[0], fr.gradients(uses(dense, ids)[use], dense)[0]
        assert isinstance(judge, fr.Tensor)
        rates = fr.optim.SGD(0.5)
        train = rates.apply_gradients([(mine, v), (judge, held)])
    for options in WAYS.values():
        async with fr.Session(graph, options=options) as session:
            got, expected = await session.run([mine, judge], {ids: IDS})
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-6, atol=1e-6)
            await session.run(train, {ids: IDS})
            np.testing.assert_allclose(*await session.run([v, held]), rtol=1e-6, atol=1e-6)


async def test_slices_are_differentiated_again_as_tensors() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        slope = fr.gradients(fr.sum(fr.take(v, IDS) ** 3), v)[0]
        second = fr.gradients(fr.sum(slope * slope), v)[0]
    rows = IDS.ravel()
    dense = summed(3 * table()[rows] ** 2, rows)
    async with fr.Session(graph) as session:
        got = np.asarray(await session.run(second))
    np.testing.assert_allclose(got, summed(2 * dense[rows] * 6 * table()[rows], rows), rtol=1e-5, atol=1e-5)


async def test_shards_get_the_gradients_of_their_own_rows() -> None:
    whole, ids = table(), np.int32([[4, 1, 22, 4], [0, 1, 7, 5]])
    with fr.Graph() as graph:
        shards = [fr.Variable(whole[i::3], name=f"shard{i}") for i in range(3)]
        found = fr.nn.embedding_lookup(shards, ids)
        slopes = fr.gradients(fr.sum(found**2), shards)
    assert all(isinstance(slope, fr.IndexedSlices) for slope in slopes)
    async with fr.Session(graph) as session:
        rows, got = await session.run([found, slopes])
    np.testing.assert_array_equal(rows, whole[ids])
    for i, slope in enumerate(got):
        np.testing.assert_allclose(np.asarray(slope), summed(2 * whole[ids.ravel()], ids.ravel())[i::3], rtol=1e-6)
        assert np.sum(slope.indices != ABSENT) == np.sum(ids % 3 == i)
        np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(slope))), np.asarray(slope))


def test_slices_of_arrays_are_their_dense_sum_outside_a_graph() -> None:
    slices = fr.IndexedSlices(np.ones((2, 2, 3), np.float32), [[1, 0], [1, 4]], (5, 3))
    assert slices.values.shape == (4, 3)
    np.testing.assert_array_equal(np.asarray(slices), [[1] * 3, [2] * 3, [0] * 3, [0] * 3, [1] * 3])
    np.testing.assert_array_equal(slices + 1.0, np.asarray(slices) + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fr.IndexedSlices(np.ones((2, 3)), [0, 1, 2], (5, 3)), r"must be float64\[3,3\], got float64\[2,3\]"),
        (lambda: fr.IndexedSlices(np.ones((2, 3)), [0.5, 1], (5, 3)), "indices must be integers"),
        (lambda: fr.IndexedSlices(np.ones((2, 3)), [0, 1], ()), "shape must be known and have an axis"),
    ],
)
def test_slices_that_do_not_fit_say_so(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"test_sparse\.py:\d+.*{message}"):
        make()


# ── optimisers ───────────────────────────────────────────────────────────────────────────────────────────────────────

Slots = dict[str, Array]


def momentum(p: Array, g: Array, s: Slots, t: int) -> Array:
    s["v"] = 0.9 * s.get("v", 0 * g) + g
    return s["v"]


def nesterov(p: Array, g: Array, s: Slots, t: int) -> Array:
    return g + 0.9 * momentum(p, g, s, t)


def adagrad(p: Array, g: Array, s: Slots, t: int) -> Array:
    s["a"] = s.get("a", 0 * g + 0.1) + g**2
    return g / (np.sqrt(s["a"]) + 1e-7)


def rmsprop(p: Array, g: Array, s: Slots, t: int) -> Array:
    s["s"] = 0.8 * s.get("s", 0 * g) + 0.2 * g**2
    s["v"] = 0.7 * s.get("v", 0 * g) + g / (np.sqrt(s["s"]) + 1e-3)
    return s["v"]


def adam(p: Array, g: Array, s: Slots, t: int) -> Array:
    s["m"] = 0.9 * s.get("m", 0 * g) + 0.1 * g
    s["s"] = 0.999 * s.get("s", 0 * g) + 0.001 * g**2
    return s["m"] / (1 - 0.9**t) / (np.sqrt(s["s"] / (1 - 0.999**t)) + 1e-8)


NAMES = ["sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw"]
RULES: list[tuple[Callable[[Any], fr.optim.Optimizer], Callable[..., Array]]] = [
    (fr.optim.SGD, lambda p, g, s, t: g),
    (lambda rate: fr.optim.Momentum(rate, 0.9), momentum),
    (lambda rate: fr.optim.Momentum(rate, 0.9, nesterov=True), nesterov),
    (fr.optim.AdaGrad, adagrad),
    (lambda rate: fr.optim.RMSProp(rate, 0.8, 0.7, 1e-3), rmsprop),
    (fr.optim.Adam, adam),
    (lambda rate: fr.optim.AdamW(rate, weight_decay=0.05), lambda p, g, s, t: adam(p, g, s, t) + 0.05 * p),
]


@pytest.mark.parametrize(("make", "rule"), RULES, ids=NAMES)
async def test_only_rows_that_occur_move_and_each_once_by_its_sum(
    make: Callable[[Any], fr.optim.Optimizer], rule: Callable[..., Array]
) -> None:
    """A row that does not occur keeps its value and its slots; Adam's count of steps is the table's."""
    rng = np.random.default_rng(5)
    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        ids, weights = fr.placeholder("int32", (None,)), fr.placeholder("float32", (None, WIDTH))
        train = make(fr.constant(0.1)).minimize(fr.sum(fr.take(v, ids) * weights))
    steps = []
    for count in (9, 1, 30, 0, 12):
        drawn = rng.integers(-SIZE, SIZE, count).astype(np.int32)
        steps.append((drawn, rng.normal(size=(count, WIDTH)).astype(np.float32)))
    for options in (WAYS["machine"], WAYS["optimized"]):
        expected, slots = table().astype(np.float64), [Slots() for _ in range(SIZE)]
        async with fr.Session(graph, options=options) as session:
            for t, (drawn, given) in enumerate(steps, 1):
                await session.run(train, {ids: drawn, weights: given})
                slope = summed(given.astype(np.float64), drawn)
                for row in set((drawn % SIZE).tolist()):
                    moved = rule(expected[row], slope[row], slots[row], t)
                    expected[row] = expected[row] - np.float32(0.1) * moved
                np.testing.assert_allclose(await session.run(v), expected, rtol=2e-5, atol=2e-5)


RATES: dict[str, Callable[[], Any]] = {
    "number": lambda: 0.1,
    "tensor": lambda: fr.constant(0.1, "float64"),
    "variable": lambda: fr.Variable(np.float64(0.1), name="rate", trainable=False),
}


@pytest.mark.parametrize(("make", "rule"), RULES, ids=NAMES)
async def test_double_precision_is_kept_by_all_settings(
    make: Callable[[Any], fr.optim.Optimizer], rule: Callable[..., Array]
) -> None:
    start, ids = table().astype(np.float64), np.array([0, 2, 2, 4])
    with fr.Graph() as graph:
        tables = {name: fr.Variable(start, name=name) for name in (*RATES, "dense")}
        pairs = [(tables[name], rate(), fr.take(tables[name], ids)) for name, rate in RATES.items()]
        pairs.append((tables["dense"], 0.1, fr.take(fr.identity(tables["dense"]), ids)))
        train = [make(rate).minimize(fr.sum(1.5 * fr.square(rows)), [v]) for v, rate, rows in pairs]
    expected, slots = start[[0, 2, 4]], Slots()
    async with fr.Session(graph) as session:
        for t in (1, 2, 3):
            await session.run(train)
            slope = 3 * expected * [[1], [2], [1]]
            expected = expected - 0.1 * rule(expected, slope, slots, t)
        for name, got in (await session.run(tables)).items():
            np.testing.assert_allclose(got[[0, 2, 4]], expected, rtol=1e-12, err_msg=name)


async def test_tables_of_scalars_move_too() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(np.ones(5, np.float64), name="v")
        train = fr.optim.AdaGrad(0.5).minimize(fr.sum(fr.take(v, [1, 1, 4]) ** 2))
    async with fr.Session(graph) as session:
        await session.run(train)
        got = await session.run(v)
    slope = np.array([0, 4, 0, 0, 2.0])
    np.testing.assert_allclose(got, 1 - 0.5 * slope / (np.sqrt(0.1 + slope**2) + 1e-7), rtol=1e-7)


async def test_a_step_that_fails_on_an_index_has_moved_nothing() -> None:
    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        ids = fr.placeholder("int32", (2,))
        write = v.scatter_update(ids, np.zeros((2, WIDTH), np.float32), name="put")
    for options in WAYS.values():
        async with fr.Session(graph, options=options) as session:
            with pytest.raises(FlowrtError, match="an index is out of range"):
                await session.run(write, {ids: [0, SIZE]})
            np.testing.assert_array_equal(await session.run(v), table())


async def test_slices_are_clipped_by_the_norm_of_their_sums() -> None:
    with fr.Graph() as graph:
        v, w = fr.Variable(table(), name="v"), fr.Variable(np.ones(2, np.float32), name="w")
        loss = fr.sum(fr.take(v, [3, 3, 5]) * 2.0) + fr.sum(w)
        clipped, norm = fr.optim.clip_by_global_norm(fr.gradients(loss, [v, w]), 1.0)
    assert isinstance(clipped[0], fr.IndexedSlices)
    async with fr.Session(graph) as session:
        (slices, other), length = await session.run([clipped, norm])
    assert length == pytest.approx(np.sqrt(WIDTH * (16 + 4) + 2), rel=1e-6)
    np.testing.assert_allclose(np.asarray(slices)[3], 4 / length, rtol=1e-6)
    np.testing.assert_allclose(other, 1 / length, rtol=1e-6)


async def test_an_optimiser_that_knows_no_slices_gets_the_dense_gradient() -> None:
    class Signs(fr.optim.Optimizer):
        def _move(self, variable: fr.Variable, gradient: Any) -> list[Any]:
            return [variable.assign_sub(fr.sign(gradient))]

    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        train = Signs(1.0).minimize(fr.sum(fr.take(v, [2, 2])))
    async with fr.Session(graph) as session:
        await session.run(train)
        moved = table() - await session.run(v)
    np.testing.assert_allclose(moved[2], 1, rtol=1e-6)
    assert not moved[[0, 1, *range(3, SIZE)]].any()


async def test_replicas_average_the_gradients_of_a_table() -> None:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        return fr.sum(fr.take(fr.Variable(table(), name="v"), inputs["ids"]))

    with fr.Graph() as graph:
        spec = {"ids": fr.Spec("int32", (2,))}
        trainer = fr.train.Replicated(loss_fn, spec, fr.optim.SGD(1.0), 2, server_device="", worker_device="")
    async with fr.Session(graph) as session:
        async for _ in trainer.steps(session, [{"ids": [1, 1]}, {"ids": [1, 2]}]):
            pass
        moved = table() - await session.run(trainer.variables[0])
    np.testing.assert_allclose(moved[:4, 0], [0, 1.5, 0.5, 0], atol=1e-6)


# ── writes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
async def test_rows_are_added_subtracted_and_put(options: fr.Options) -> None:
    start = np.arange(12, dtype=np.int64).reshape(4, 3)
    with fr.Graph() as graph:
        names = ("added", "taken", "put")
        v = {name: fr.Variable(start, name=name) for name in names}
        ids, rows = np.int32([[1, -1], [1, 0]]), np.arange(12).reshape(2, 2, 3) * 10
        writes = [v["added"].scatter_add(ids, rows), v["taken"].scatter_sub(ids, rows)]
        writes.append(v["put"].scatter_update(ids, rows))
    change = summed(rows.reshape(4, 3), ids.ravel(), 4)
    async with fr.Session(graph, options=options) as session:
        await session.run(writes)
        got = await session.run(v)
    np.testing.assert_array_equal(got["added"], start + change)
    np.testing.assert_array_equal(got["taken"], start - change)
    np.testing.assert_array_equal(got["put"], [rows[1, 1], rows[1, 0], start[2], rows[0, 1]])


@pytest.mark.parametrize(("dtype", "at"), [("float32", "int32"), ("float64", "int64"), ("int16", "int64")])
async def test_rows_of_any_width_are_added_each_as_often_as_it_occurs(dtype: str, at: str) -> None:
    """Whole blocks of vectors, single vectors and what is left of a row; groups of one, of few and of many values."""
    rng = np.random.default_rng(3)
    for width in (1, 8, 77, 150):
        start, rows = (rng.integers(-99, 99, (n, width)).astype(dtype) for n in (40, 300))
        ids = np.where(rng.random(300) < 0.3, 7, rng.integers(-40, 40, 300)).astype(at)
        with fr.Graph() as graph:
            v = fr.Variable(start, name="v")
            write = v.scatter_add(ids, rows)
        expected = start.copy()
        np.add.at(expected, ids, rows)
        async with fr.Session(graph) as session:
            await session.run(write)
            np.testing.assert_array_equal(await session.run(v), expected)  # sums of small integers are exact


async def test_additions_of_rows_commute_and_other_writes_must_be_ordered() -> None:
    one = np.ones((1, WIDTH), np.float32)
    with fr.Graph() as graph:
        v = fr.Variable(table(), name="v")
        both = fr.group(v.scatter_add([1], one), v.scatter_sub([2], one), v.assign_add(table()))
        unordered = fr.group(v.scatter_add([1], one), v.scatter_update([2], one))
        old = fr.take(v, [1, 2]) + 0.0
    async with fr.Session(graph) as session:
        before, _ = await session.run([old, both])
        np.testing.assert_array_equal(before, table()[[1, 2]])  # a plain read is of the value before the step's writes
        np.testing.assert_allclose(await session.run(old), 2 * table()[[1, 2]] + [[1], [-1]], rtol=1e-6)
        with pytest.raises(GraphError, match="in an order that nothing decides"):
            await session.run(unordered)


def test_rows_that_do_not_fit_a_variable_say_so() -> None:
    with fr.Graph():
        v, flags = fr.Variable(table(), name="v"), fr.Variable(np.zeros((2, 2), bool), name="flags")
        counts = fr.Variable(np.zeros((2, 2), np.uint8), name="counts")
        with pytest.raises(SpecError, match=r"test_sparse\.py:\d+.*must be float32\[1,3\], got float32\[1,2\]"):
            v.scatter_add([0], np.ones((1, 2), np.float32))
        with pytest.raises(SpecError, match="bools are not added"):
            flags.scatter_add([0], [[True, True]])
        with pytest.raises(SpecError, match="use scatter_add"):
            counts.scatter_sub([0], np.ones((1, 2), np.uint8))
        with pytest.raises(SpecError, match="shape must be known and have an axis"):
            fr.Variable(1.0, name="scalar").scatter_add([0], [1.0])


def test_kernels_that_move_rows_are_found_before_a_cluster_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with fr.Graph():
        v = fr.Variable(np.ones((4, 3), np.float32))
        train = fr.optim.Adam(0.1).minimize(fr.sum(fr.nn.embedding_lookup(v, fr.constant([0, 2, 2]))))
    found: set[str] = set()

    def asked_for(variant: Any) -> int:
        found.add(variant.kernel.op)
        return real(variant)

    real = launch.entry_address
    monkeypatch.setattr(launch, "entry_address", asked_for)
    for plan in compiled([], [train]).plans.values():
        warm([plan])
    assert {"group_rows", "adam_rows"} <= found


@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 4, 3)], ids=str)
def test_an_unsigned_index_beyond_all_signed_ones_is_out_of_range(shape: tuple[int, ...]) -> None:
    x, axis = np.zeros(shape, np.float32), len(shape) // 3
    for beyond in (2**63, 2**63 + 1, 2**64 - 1):
        with pytest.raises(fr.FlowrtError, match="out of range"):
            fr.take(x, np.uint64([1, beyond]), axis=axis)
    np.testing.assert_array_equal(fr.take(x + 1, np.uint64([1, 3]), axis=axis), np.take(x + 1, [1, 3], axis))
    assert fr.one_hot(np.uint64([2**63, 1, 2**64 - 1]), 2).tolist() == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda slices: pickle.loads(pickle.dumps(slices))])
def test_the_slices_that_a_step_answers_are_copied_and_pickled_as_the_arrays_they_are(copied: Any) -> None:
    with fr.Graph() as graph:
        table = fr.Variable(np.ones((4, 2), np.float32))
        (slope,) = fr.gradients(fr.sum(fr.square(table[[0, 2, 0]])), [table])
    with fr.BlockingSession(graph) as session:
        found = session.run(slope)
    again = copied(found)
    assert again.shape == (4, 2)
    np.testing.assert_array_equal(again.indices, [0, 2, 0])
    np.testing.assert_array_equal(np.asarray(again), [[4, 4], [0, 0], [2, 2], [0, 0]])
    with pytest.raises(fr.GraphError, match=r"test_sparse.py:\d+: a graph is neither pickled nor copied"):
        pickle.dumps(slope)


def test_branches_of_which_one_answers_slices_are_told_apart() -> None:
    with fr.Graph():
        table = fr.Variable(np.ones((4, 2), np.float32))
        (slope,) = fr.gradients(fr.sum(fr.square(table[[0, 2]])), [table])
        with pytest.raises(fr.SpecError, match=r"answers \{values: tensor, indices: tensor\} and false_fn tensor"):
            fr.cond(fr.placeholder("bool", ()), lambda: slope, lambda: fr.zeros((4, 2)))
