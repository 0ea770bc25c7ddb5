"""Rows of a table and their sum or mean as one node: when, and that it computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_world import CPU, everywhere

import flowrt as fr
from flowrt.ops.index import bag, take
from flowrt.ops.source import placeholder
from flowrt.passes import StepTerms, compile_step
from flowrt.session.session import Options


def ops_of(fetches: list[Any], feeds: list[Any], targets: Any = (), supports: Any = everywhere) -> list[str]:
    made = compile_step(
        fetches[0].graph, fetches, targets, feeds, StepTerms(devices=[CPU], default=CPU, supports=supports)
    )
    (plan,) = made.plans.values()
    return [node.op for node in plan.nodes]


def bags() -> tuple[list[Any], Any]:
    """A table and indices, and rows of it; call it where a graph is active."""
    table, ids = placeholder("float32", (9, 5), name="table"), placeholder("int32", (None, 4), name="ids")
    return [table, ids], fr.nn.embedding_lookup(table, ids)


def test_the_mean_or_sum_of_a_bag_of_rows_is_one_node() -> None:
    with fr.Graph():
        feeds, rows = bags()
        cases = [fr.mean(rows, axis=1), fr.sum(rows, axis=-2), fr.sum(rows, axis=(0, 1))]
    assert [ops_of([case], feeds) for case in cases] == [["bag"]] * 3
    asked: set[tuple[Any, ...]] = set()
    ops_of(cases[:1], feeds, supports=lambda *what: asked.add((what[0], *map(str, what[1]), what[2])) or True)
    assert ("bag", "float32", "int32", "float32", "cpu") in asked


def test_rows_that_someone_else_reads_and_other_sums_stay_apart() -> None:
    with fr.Graph():
        feeds, rows = bags()
        mean = fr.mean(rows, axis=1)
        others = [
            fr.mean(rows, axis=0),
            fr.mean(rows, axis=2),
            fr.sum(rows, axis=1, keepdims=True),
            fr.max(rows, axis=1),
        ]
        column = fr.sum(fr.take(feeds[0], feeds[1] % 5, axis=1), axis=2)
        counts = fr.sum(fr.take(fr.astype(feeds[0], "int32"), feeds[1]), axis=1)
    assert sorted(ops_of([mean, rows], feeds)) == ["mean", "take"]
    assert ops_of([rows], feeds) == ["take"]
    assert ops_of([mean], feeds, [rows.op]) == ["take", "mean"]
    assert sorted(ops_of([mean, fr.sum(rows, axis=1)], feeds)) == ["mean", "sum", "take"]
    for other in (*others, column, counts):
        assert "bag" not in ops_of([other], feeds)


def test_what_waits_for_the_rows_waits_for_the_bag() -> None:
    with fr.Graph():
        v = fr.Variable(np.ones((9, 5), np.float32), name="v")
        ids = placeholder("int32", (2, 4), name="ids")
        rows = fr.take(v, ids)
        write = v.assign(np.zeros((9, 5), np.float32))
        with fr.control_dependencies([write]):
            mean = fr.mean(rows, axis=1)  # the write waits for the rows, and this waits for the write
        plain = fr.mean(fr.take(v, ids % 5), axis=1)
    assert "bag" not in ops_of([mean], [ids])
    assert "bag" in ops_of([plain], [ids], [write])
    both = [op for op in ops_of([mean, plain], [ids]) if op in ("bag", "mean", "take")]
    assert sorted(both) == ["bag", "mean", "take"]


async def test_bags_compute_what_rows_and_their_mean_do() -> None:
    table = np.random.default_rng(0).normal(size=(50, 21)).astype(np.float32)
    ids = np.random.default_rng(1).integers(-50, 50, (130, 9))
    with fr.Graph() as graph:
        v = fr.Variable(table, name="v")
        given = placeholder("int64", (None, 9), name="ids")
        mean = fr.mean(fr.nn.embedding_lookup(v, given), axis=1)
        loss = fr.sum(mean**2)
        slope = fr.gradients(loss, v)[0]
    for options in (Options(), Options(optimize=False), Options(tapes=False)):
        async with fr.Session(graph, options=options) as session:
            got, slopes = await session.run([mean, slope], {given: ids})
            np.testing.assert_allclose(got, table[ids].mean(1), rtol=1e-5, atol=1e-6)
            expected = np.zeros_like(table)
            np.add.at(expected, ids, np.repeat(2 * table[ids].mean(1) / 9, 9, 0).reshape(130, 9, 21))
            np.testing.assert_allclose(np.asarray(slopes), expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(fr.FlowrtError, match="an index is out of range"):
                await session.run(mean, {given: ids + 50})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [1, 19, 130])
async def test_bags_are_to_the_bit_the_sums_of_rows_that_are_fetched_too(columns: int, dtype: str) -> None:
    """Of few rows and many, which are summed in parts; and of single entries, which are summed as those of a row."""
    rng = np.random.default_rng(columns)
    table = rng.normal(size=(50, columns)).astype(dtype)
    for shape, axis in [((40, 9), 1), ((9, 33), 1), ((4, 3, 5), (1, 2)), ((2, 70), 1), ((40_000,), 0), ((5, 0), 1)]:
        ids = rng.integers(-50, 50, shape)
        with fr.Graph() as graph:
            given = placeholder("int64", (None,) * len(shape))
            rows = fr.take(fr.Variable(table, name="v"), given)
            totals = [fr.sum(rows, axis=axis), fr.mean(rows, axis=axis)]
        async with fr.Session(graph) as session:
            *apart, _ = await session.run([*totals, rows], {given: ids})
            for total, want in zip(totals, apart, strict=True):
                assert ops_of([total], [given]) == ["read_variable", "bag"]
                np.testing.assert_array_equal(await session.run(total, {given: ids}), want)


def test_absent_rows_are_zeros_to_a_bag() -> None:
    table = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 9, (20, 11))
    absent = np.iinfo(np.int64).min
    ids[:, ::3] = absent
    ids[3] = absent
    for width in (5, 1):
        some = table[:, :width]
        want = fr.sum(take(some, ids, 0, True), axis=1)
        np.testing.assert_array_equal(bag(some, ids, 1, False, True), want)
