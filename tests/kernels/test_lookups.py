"""Loops of scalars that read tables at computed indices: as one kernel, by the machine, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from loop_world import step_of

import flowrt as fr
from flowrt.kernels.composite.iteration import Lookup, make_iteration
from flowrt.kernels.store import background
from flowrt.sched.loops.scalar_loops import in_one_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = np.ndarray[Any, Any]
ABSENT = np.iinfo(np.int64).min  # of a gradient's rows: none, which reads zero


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that can be one kernel are compiled rather than ordered."""
    monkeypatch.setattr(background, "was_tried", lambda symbol: True)


def looped(iterations: int, iteration: Callable[[Any, Any], Any], first: Any) -> Any:
    """``iteration(number, carried)`` so many times."""
    return fr.while_loop(lambda i, v: i < iterations, lambda i, v: (i + 1, iteration(i, v)), (np.int64(0), first))[1]


def both_ways(build: Callable[..., Any], *fed: Array, optimize: bool = True) -> list[Any]:
    """What one kernel answers for what is fed, and what the machine does."""
    with fr.Graph() as graph:
        feeds = [fr.placeholder(value.dtype, value.shape) for value in fed]
        last = build(*feeds)
    step_of(graph)
    found = []
    for tapes in (True, False):
        with fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes, optimize=optimize)) as session:
            found.append(session.run(last, dict(zip(feeds, fed, strict=True))))
    return found


def agree(build: Callable[..., Any], wanted: Any, *fed: Array) -> None:
    for got in both_ways(build, *fed):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint8", "int64"])
def test_a_large_table_of_any_dtype_is_read_where_it_lies(dtype: str) -> None:
    table = (np.arange(5000) * 37 % 251 % (2 if dtype == "bool" else 251)).astype(dtype)
    rng = np.random.default_rng(3)
    steps = rng.integers(-5000, 5000, 40)

    def iteration(i: Any, v: Any) -> Any:
        return (v * 3 + fr.astype(fr.take(x, fr.take(where, i)), "int64")) % 1009

    wanted = 0
    for at in steps:
        wanted = (wanted * 3 + int(table[at])) % 1009
    with fr.Graph() as graph:
        x, where = fr.placeholder(dtype, table.shape), fr.placeholder("int64", steps.shape)
        last = looped(40, iteration, np.int64(0))
    step = step_of(graph)
    assert step.program.captured == (0, 0)  # neither is loaded before the iterations
    for tapes in (True, False):
        with fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes)) as session:
            assert int(session.run(last, {x: table, where: steps})) == wanted


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_indices_may_be_of_any_integer_dtype(dtype: str) -> None:
    table = np.arange(300, dtype=np.float32) ** 2
    sign = -1 if np.dtype(dtype).kind == "i" else 1
    wanted = sum(float(table[sign * i]) for i in range(100))
    agree(
        lambda x: looped(100, lambda i, v: v + fr.take(x, fr.astype(i * sign, dtype)), np.float32(0)),
        np.float32(wanted),
        table,
    )


def test_an_absent_row_reads_zero_and_is_out_of_range_where_none_may_be() -> None:
    table = np.arange(1, 401, dtype=np.float64)

    def iteration(i: Any, v: Any) -> Any:
        return v + fr.take(x, fr.where(fr.equal(i % 2, 0), i, np.int64(ABSENT)), absent=absent)

    with fr.Graph() as graph:
        x, last = fr.placeholder("float64", (400,)), {}
        for absent in (True, False):
            last[absent] = looped(10, iteration, np.float64(0))
    step_of(graph)
    for tapes in (True, False):
        with fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes)) as session:
            assert float(session.run(last[True], {x: table})) == 1 + 3 + 5 + 7 + 9
            with pytest.raises(fr.FlowrtError, match="an index is out of range"):
                session.run(last[False], {x: table})


def test_rows_and_columns_of_tables_are_read() -> None:
    rng = np.random.default_rng(5)
    rows, columns = rng.integers(-9, 9, (200, 3)), rng.integers(-9, 9, (2, 150))

    def iteration(i: Any, v: Any) -> Any:
        pair = fr.take(rows_fed, fr.stack([i, v[0] % 200]))
        column = fr.take(columns_fed, (v[1] - i) % 150, axis=1)
        return (pair[0] + pair[1] * 2 + fr.sum(column)) % 1000

    def build(*fed: Any) -> Any:
        nonlocal rows_fed, columns_fed
        rows_fed, columns_fed = fed
        return looped(25, iteration, fr.constant(np.array([1, 2, 3])))

    rows_fed = columns_fed = None
    v = np.array([1, 2, 3])
    for i in range(25):
        v = (rows[i] + rows[v[0] % 200] * 2 + columns[:, (v[1] - i) % 150].sum()) % 1000
    agree(build, v, rows, columns)


def test_small_tables_constants_and_what_is_carried_are_read_at_indices_and_as_they_are() -> None:
    known, table = np.array([4, 0, 2, 1, 3]), np.array([10, 20, 30, 40])

    def build(x: Any) -> Any:
        def iteration(i: Any, v: Any) -> Any:
            here = fr.take(known, v[0] % 5) + fr.take(v, i % 3) + fr.take(np.arange(500), v[1] % 500)
            return fr.stack([v[1] + here, v[2] + fr.take(x, i % 4) - x[2], fr.sum(x) + fr.take(v, i % 3 - 3)]) % 997

        return looped(30, iteration, fr.constant(np.array([1, 2, 3])))

    v = np.array([1, 2, 3])
    for i in range(30):
        here = known[v[0] % 5] + v[i % 3] + v[1] % 500
        v = np.array([v[1] + here, v[2] + table[i % 4] - table[2], table.sum() + v[i % 3 - 3]]) % 997
    agree(build, v, table)


def test_conditions_branches_and_loops_inside_look_up_too() -> None:
    """What is not chosen may be out of range."""
    rng = np.random.default_rng(9)
    chain = np.concatenate([rng.permutation(299) + 1, [0]])

    def build(x: Any) -> Any:
        def chased(i: Any, v: Any) -> Any:
            end = fr.while_loop(
                lambda at, n: fr.logical_and(fr.take(x, at) > 40, n < 4),
                lambda at, n: (fr.take(x, at), n + 1),
                (i, i * 0),
            )
            far = fr.cond(end[1] > 2, lambda: fr.take(x, end[0] + 900 - 300 * end[1]), lambda: end[0] + 1000)
            return v + far

        return looped(20, chased, np.int64(0))

    total = 0
    for i in range(20):
        at, n = i, 0
        while chain[at] > 40 and n < 4:
            at, n = int(chain[at]), n + 1
        total += int(chain[at + 900 - 300 * n]) if n > 2 else at + 1000
    agree(build, total, chain)


def test_one_hot_codes_are_made_entry_by_entry() -> None:
    def build(x: Any) -> Any:
        def iteration(i: Any, v: Any) -> Any:
            return v + fr.one_hot(fr.take(x, i), 6, "int64") + fr.one_hot(fr.astype(i, "int8"), 6, "int64")

        return looped(300, iteration, fr.constant(np.zeros(6, np.int64)))

    fed = np.arange(300) % 7 - 1
    numbers = np.concatenate([fed, np.arange(300).astype(np.int8)])
    agree(build, [int((numbers == k).sum()) for k in range(6)], fed)


# ── what is not in the table ─────────────────────────────────────────────────────────────────────────────────────────


def failing(kind: str) -> Callable[..., Any]:
    def iteration(x: Any, i: Any, v: Any) -> Any:
        if kind == "inside":
            return looped(5, lambda j, w: w + fr.take(x, 100 * i + j, name="peek"), v)
        if kind == "below":
            return v + fr.take(x, -20 * i, name="peek")
        return v + fr.cond(i > 16, lambda: fr.take(x, i * 20, name="peek"), lambda: fr.take(x, 19 * 17 - 20 * i))

    return lambda x: looped(40, lambda i, v: iteration(x, i, v), np.int64(0))


@pytest.mark.parametrize(
    ("kind", "iterations"),
    [("inside", "iteration 2 of iteration 4"), ("below", "iteration 18"), ("branch", "iteration 18")],
)
def test_an_index_out_of_range_fails_as_it_does_node_by_node(kind: str, iterations: str) -> None:
    fed = np.arange(301 if kind == "inside" else 320 if kind == "below" else 325)
    with fr.Graph() as graph:
        x = fr.placeholder("int64", fed.shape)
        last = failing(kind)(x)
    step_of(graph)
    said = []
    for tapes in (True, False):
        with (
            fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes)) as session,
            pytest.raises(fr.FlowrtError, match="an index is out of range") as caught,
        ):
            session.run(last, {x: fed})
        said.append(str(caught.value))
    assert "peek' (" in said[0]
    assert f" in {iterations} of loop 'while_loop'" in said[0]


def test_an_unsigned_index_that_int64_lacks_is_out_of_range() -> None:
    with fr.Graph() as graph:
        x, start = fr.placeholder("float32", (300,)), fr.placeholder("uint64", ())
        last = looped(3, lambda i, v: v + fr.take(x, start + fr.astype(i, "uint64")), np.float32(0))
    step_of(graph)
    with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
        assert float(session.run(last, {x: np.ones(300, np.float32), start: np.uint64(9)})) == 3
        for far in (2**63, 2**64 - 4):
            with pytest.raises(fr.FlowrtError, match=r"in iteration 1 of loop .* out of range"):
                session.run(last, {x: np.ones(300, np.float32), start: np.uint64(far)})


def test_a_step_that_failed_may_be_run_again() -> None:
    with fr.Graph() as graph:
        x, n = fr.placeholder("float32", (300,)), fr.placeholder("int64", ())
        last = fr.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, v + fr.take(x, i)), (np.int64(0), np.float32(0)))[
            1
        ]
    step_of(graph)
    with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
        step = session.compile(last, [x, n])
        for iterations in (7, 301, 300, 302, 5):
            if iterations > 300:
                with pytest.raises(fr.FlowrtError, match="in iteration 301 of loop"):
                    step(np.ones(300, np.float32), np.int64(iterations))
            else:
                assert float(step(np.ones(300, np.float32), np.int64(iterations))) == iterations


def test_gradients_through_lookups_are_added_up_in_the_table() -> None:
    rng = np.random.default_rng(2)
    table, where = rng.normal(size=400), rng.integers(0, 9, 30)
    with fr.Graph() as graph:
        x, at = fr.placeholder("float64", (400,)), fr.placeholder("int64", (30,))
        last = fr.scan(lambda v, i: (v * 0.5 + fr.take(x, i), ()), fr.constant(np.float64(0)), at)[0]
        (slope,) = fr.gradients([last], [x])
    wanted = np.zeros(400)
    np.add.at(wanted, where, 0.5 ** np.arange(29, -1, -1))
    for tapes in (True, False):
        with fr.BlockingSession(graph, options=fr.Options(threads=1, tapes=tapes)) as session:
            np.testing.assert_allclose(session.run(slope, {x: table, at: where}), wanted, rtol=1e-12)


# ── what is one kernel ───────────────────────────────────────────────────────────────────────────────────────────────


def test_tables_of_any_size_share_a_kernel_and_rows_that_are_long_do_not_fit() -> None:
    def program(size: int) -> Any:
        with fr.Graph() as graph:
            x = fr.placeholder("float32", (size,))
            looped(9, lambda i, v: v + fr.take(x, i), np.float32(0))
        return step_of(graph).program

    assert program(300) == program(100_000) == program(20)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (9, 300))
        looped(9, lambda i, v: v + fr.sum(fr.take(x, i)), np.float32(0))
    node = graph.nodes[-1]
    assert node.op.name == "loop"
    assert "a value of 300 entries" in str(in_one_kernel([t.spec for t in node.inputs], node.attrs))


def test_a_table_of_any_size_is_planned_without_memory_of_its_size() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("int8", (1 << 40, 50))  # whose places in int64 would be 400 TiB
        looped(9, lambda i, v: v + fr.sum(fr.astype(fr.take(x, i * 3) + x[-2, ::-1] + x[5:55, 7], "int64")), 0)
    lookups = [part for part in step_of(graph).program.body.parts if isinstance(part, Lookup)]
    assert sorted((part.pitch, part.offsets[0], part.offsets[-1]) for part in lookups) == [
        (0, 50 * 5 + 7, 50 * 54 + 7),
        (0, 50 * ((1 << 40) - 1) - 1, 50 * ((1 << 40) - 2)),
        (50, 0, 49),
    ]


def test_a_lookup_names_only_values_that_come_before() -> None:
    fits = {"table": 0, "size": 1, "index": 2, "guard": None, "pitch": 1, "offsets": (0,)}
    facts: dict[str, Any] = {**fits, "dtype": np.dtype("float32"), "number": 0}
    kinds = ["int64", "int64", "int64", "int32"]
    assert make_iteration(kinds, [Lookup(**facts)], [4]).answers == (np.float32,)
    for wrong in ({"index": 9}, {"index": 3}, {"table": 7}, {"guard": 8}, {"entries": (0, 1)}):
        with pytest.raises(fr.GraphError, match="lookup"):
            make_iteration(kinds, [Lookup(**{**facts, **wrong})], [0])
