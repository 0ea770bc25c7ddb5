from __future__ import annotations

from typing import Any

import flowrt as fr


async def test_explain_names_passes_placement_tapes_and_what_broke_them() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,), name="x")
        queue = fr.FIFOQueue(1, "float32", shapes=[(4,)], name="q")
        put = queue.enqueue(fr.tanh(x) + 1.0)
        y = fr.exp(queue.dequeue())
    async with fr.Session(graph) as session:
        text = str(await session.explain([put, y], [x]))
        for part in ("prune", "order_state", "/job:local/task:0/device:cpu:0", "tanh", "tape of", "bytes of arena"):
            assert part in text
        assert "broken by enqueue 'q/enqueue' (" in text
        assert "test_explain.py:" in text
    async with fr.Session(graph, options=fr.Options(tapes=False)) as session:
        assert "no tapes" in str(await session.explain(y))


async def test_explain_says_how_values_travel_between_tasks(monkeypatch: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (1000, 100), name="x")
        rows = fr.placeholder("float32", (None, 10), name="rows")
        with fr.device("/job:ps/task:0"):
            y = fr.tanh(x)
            z = rows + 1.0
        with fr.device("/job:worker/task:0"):
            total = fr.sum(y) + fr.sum(z)
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        told = (await session.explain([total, y])).transfers
        whole = str(await session.explain([total, y]))
    assert all(line in whole for line in told)
    ways = [line.rpartition(": ")[2] for line in told if "390.6 KiB" in line]
    assert ways == ["shared memory"] * 3, "x to the server; y to the worker and to the client"
    assert next(line for line in told if "float32[]" in line).endswith(
        "/job:worker/task:0 to /job:client/task:0: Unix socket"
    )
    assert any(line.endswith("shared memory from 256.0 KiB, else Unix socket") for line in told)
    monkeypatch.setenv("FLOWRT_TRANSPORT", "tcp")  # this process's: what the client has to do with goes by port
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        assert all(line.endswith(": TCP") for line in (await session.explain([total, y])).transfers)


async def test_explain_says_which_loops_are_one_kernel_and_what_keeps_others_from_it() -> None:
    def loop(turn: Any, start: Any) -> Any:
        return fr.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, turn(y)), (fr.constant(0), start))[1]

    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        loops = [
            loop(lambda y: y * 0.5, fr.constant(1.0)),
            loop(lambda y: y * 0.5, fr.ones((1000,))),
            loop(lambda y: fr.tanh(fr.sin(fr.exp(fr.cos(fr.tanh(y))))), fr.ones((7,))),
            loop(lambda y: fr.cumsum(y, 0), fr.ones((10,))),
            loop(lambda y: y * 0.5, x),
        ]
    async with fr.Session(graph) as session:
        told = [str(await session.explain(y)) for y in loops]
    assert "loop 'while_loop' (" in told[0]
    for text, part in zip(told, ("one kernel", "1000 entries", "costly", "has cumsum", "depends on the"), strict=True):
        assert part in next(line for line in text.splitlines() if line.startswith("  loop"))


async def test_explain_says_what_of_a_loop_runs_op_by_op_as_its_slices_change_with_values() -> None:
    def rows_of(seen: Any) -> Any:
        def more(t: Any, rows: Any) -> Any:
            return t + 1, rows + fr.mean(seen(t, rows), axis=0)

        return fr.while_loop(lambda t, _: t < 5, more, (fr.constant(1), fr.ones((8, 100))))[1]

    with fr.Graph() as graph:
        sliced = rows_of(lambda t, rows: rows[:t])
        masked = rows_of(lambda t, rows: fr.where(fr.arange(8)[:, None] < t, rows, 0.0))
    async with fr.Session(graph) as session:
        told = [str(await session.explain(rows)) for rows in (sliced, masked)]
    assert "2 tapes an iteration, and 2 operations one after another until their sizes come again" in told[0]
    assert "slice" in told[0].partition("not one tape: ")[2].splitlines()[0]
    assert "several launches an iteration: " in told[1]


async def test_explain_says_what_an_iteration_takes_and_what_breaks_its_tapes() -> None:
    def loop(turn: Any, start: Any) -> Any:
        return fr.while_loop(
            lambda i, _: i < 9, lambda i, y: (i + 1, turn(i, y)), (fr.constant(0), start), name="turns"
        )

    with fr.Graph() as graph:
        queue = fr.FIFOQueue(9, "float32", shapes=[(64, 64)], name="q")

        def put(i: Any, y: Any) -> Any:
            with fr.control_dependencies([queue.enqueue(y)]):
                return y @ y

        loops = [
            loop(lambda i, y: y * 0.5, fr.constant(1.0)),
            loop(lambda i, y: y @ y, fr.ones((64, 64))),
            loop(lambda i, y: y @ y + fr.mean(y[: i + 1] @ y), fr.ones((64, 64))),
            loop(put, fr.ones((64, 64))),
        ]
    async with fr.Session(graph) as session:
        told = [(await session.explain(y[1])).tasks[0].loops for y in loops]
    assert [len(each) for each in told] == [1] * 4
    kernel, launches, pieces, framed = (each[0] for each in told)
    assert _microseconds(kernel) < 0.1
    product = _microseconds(launches)
    assert product > 5, "2 * 64 ** 3 operations"
    assert "tapes an iteration" in pieces
    assert "slice" in pieces.partition("which break them (")[2].partition("; the tapes")[0]
    assert _microseconds(pieces) > product
    assert "which the machine runs" not in framed
    assert "among them enqueue 'turns" in framed
    assert abs(_microseconds(framed) - product) < 1


def _microseconds(text: str) -> float:
    return float(text.partition(" µs")[0].rpartition(" ")[2])


async def test_explain_says_why_the_body_of_a_loop_is_not_computed_as_one() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        less = fr.map_fn(lambda r: r - fr.max(x), x)
        guarded = fr.map_fn(lambda r: fr.cond(fr.shape_of(x)[0] > 5, lambda: x[5] + r, lambda: r), x)
        joined = fr.while_loop(lambda y: fr.shape_of(y)[0] > 9, lambda y: y / fr.max(y), x)
    async with fr.Session(graph) as session:
        for made, why in ((less, "maximum of no entries"), (guarded, "index 5"), (joined, "maximum of no entries")):
            (task,) = (await session.explain(made, feeds={x: (0,)})).tasks
            assert why in task.loops[0]
