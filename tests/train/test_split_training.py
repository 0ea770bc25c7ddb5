"""Replicated training of tables that are split over servers: to the bit that of the whole."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrt as fr

Array = np.ndarray[Any, Any]
ROWS, WIDTH, BAG, REPLICAS = 400, 8, 7, 2
INPUTS = {"ids": fr.Spec("int32", (None, BAG)), "y": fr.Spec("float32", (None, 1))}


def trainer(optimizer: Any, servers: int, partition: Any = None, **more: Any) -> tuple[fr.Graph, fr.train.Replicated]:
    def loss_fn(batch: dict[str, Any]) -> Any:
        table = fr.Variable(fr.random.normal((ROWS, WIDTH), seed=3), name="table", partition=partition)
        dense = fr.Variable(np.full((WIDTH, 1), 0.5, "float32"), name="dense")
        rows = fr.mean(fr.nn.embedding_lookup(table, batch["ids"]), axis=1)
        return fr.mean(fr.square(rows @ dense - batch["y"]))

    with fr.Graph(seed=1) as graph:
        made = fr.train.Replicated(loss_fn, INPUTS, optimizer, REPLICAS, servers=servers, **more)
    return graph, made


def batches(steps: int) -> Iterator[dict[str, Array]]:
    given = np.random.default_rng(0)
    for _ in range(steps * REPLICAS):
        ids = given.integers(0, ROWS, (16, BAG)).astype("int32")
        yield {"ids": ids, "y": given.normal(size=(16, 1)).astype("float32")}


async def trained(graph: fr.Graph, made: fr.train.Replicated, steps: int, cluster: Any = None) -> list[Any]:
    async with fr.Session(graph, cluster=cluster) as session:
        losses = [report.loss async for report in made.steps(session, batches(steps))]
        return [losses, *await session.run(made.variables)]


HERE = {"server_device": "", "worker_device": ""}
MAKERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: {"optimizer": fr.optim.Momentum(0.1, 0.9)},
    "adam": lambda: {"optimizer": fr.optim.Adam(0.1)},
    "local": lambda: {"optimizer": fr.optim.SGD(0.1), "policy": fr.train.LocalSteps(2)},
}


@pytest.mark.parametrize("kind", MAKERS)
async def test_a_table_that_is_split_over_servers_trains_to_the_same_bits(kind: str) -> None:
    async with asyncio.timeout(120):
        want = await trained(*trainer(servers=1, **MAKERS[kind](), **HERE), 6)
        for servers, partition in ((2, 2), (2, (0, 1, 399, 400)), (3, 3)):
            got = await trained(*trainer(servers=servers, partition=partition, **MAKERS[kind](), **HERE), 6)
            for mine, judge in zip(got, want, strict=True):
                np.testing.assert_array_equal(mine, judge)


def test_a_variable_above_the_bound_is_split_by_itself_over_the_servers() -> None:
    size = ROWS * WIDTH * 4
    for bound, parts in ((size, 1), (size - 1, 3), (None, 1)):
        graph, made = trainer(fr.optim.SGD(0.1), 3, split_above=bound)
        table, dense = made.variables
        assert [part.device for part in table.parts] == [f"/job:ps/task:{i}" for i in range(parts)]
        assert dense.device == f"/job:ps/task:{1 if parts == 1 else 0}"
        assert ("table" in graph.partitions) == (parts > 1)


def test_parts_go_to_the_servers_with_the_fewest_bytes() -> None:
    _, made = trainer(fr.optim.SGD(0.1), 2, partition=(0, 300, 350, 400))
    table, dense = made.variables
    assert [part.device[-1] for part in table.parts] == ["0", "1", "1"]
    assert dense.device[-1] == "1"


def test_versions_and_counts_of_several_servers_are_one_to_a_checkpoint() -> None:
    graph, _ = trainer(fr.optim.Adam(0.1), 2, partition=2)
    alone, _ = trainer(fr.optim.Adam(0.1), 1)
    mirrored = {p.name: p.shards for p in graph.partitions.values() if p.is_mirrored}
    assert mirrored == {
        "replicated/step": ("replicated/step", "replicated/step_1"),
        "table/steps": ("table/part_0/steps", "table/part_1/steps"),
    }
    held = {part for p in graph.partitions.values() for part in p.shards}
    seen = {v.name for v in graph.variables} - held | set(graph.partitions)
    assert seen == {v.name for v in alone.variables}


async def test_parts_lie_on_the_tasks_of_servers_and_rows_alone_travel() -> None:
    graph, made = trainer(fr.optim.Momentum(0.1, 0.9), 2, partition=2)
    with graph:
        ids = fr.placeholder("int32", (None,), name="asked")
        found = fr.take(made.variables[0], ids)
    want = await trained(*trainer(fr.optim.Momentum(0.1, 0.9), 1, **HERE), 4)
    async with asyncio.timeout(120), fr.LocalCluster(ps=2, worker=2) as cluster, fr.Session(graph, cluster) as session:
        losses = [report.loss async for report in made.steps(session, batches(4))]
        got = [losses, *await session.run(made.variables)]
        for mine, judge in zip(got, want, strict=True):
            np.testing.assert_array_equal(mine, judge)
        rows = await session.run(found, {ids: [0, 399, 7, 0]})
        np.testing.assert_array_equal(rows, want[1][[0, 399, 7, 0]])
        program = await made.program(session)
        assert program.nbytes == WIDTH * 4  # what a replica is told beside rows: the dense variable
        assert program.servers == ("/job:ps/task:0", "/job:ps/task:1")


def most_held(pid: int) -> int:
    """The most memory that a process has held so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what processes hold")
@pytest.mark.parametrize("start", ["zeros", "normal"])
async def test_nobody_ever_holds_more_than_its_part_of_a_table(start: str) -> None:
    rows, width, whole = 96 << 11, 128, 96 << 20  # bytes

    def loss_fn(batch: dict[str, Any]) -> Any:
        first = fr.zeros((rows, width)) if start == "zeros" else fr.random.normal((rows, width), seed=1)
        return fr.mean(fr.square(fr.take(fr.Variable(first, name="table"), batch["ids"]) - 1.0))

    with fr.Graph(seed=1) as graph:
        inputs = {"ids": fr.Spec("int64", (None,))}
        made = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(10.0), 1, servers=2, split_above=whole // 2)
    given = [{"ids": np.array([0, rows // 2, rows - 1, 0])} for _ in range(6)]
    for _ in range(2):  # where something is compiled the first time, which takes memory of its own
        async with fr.LocalCluster(ps=2, worker=1) as cluster:
            before = {task: most_held(process.pid) for task, process in cluster.processes.items()}
            async with fr.Session(graph, cluster=cluster) as session:
                losses = [report.loss async for report in made.steps(session, given)]
            grown = {task: most_held(process.pid) - before[task] for task, process in cluster.processes.items()}
        assert losses[-1] < losses[0]
        if max(grown.values()) < whole * 3 // 4:
            break
    # Half of it is 48 MiB. What else a server takes for its first steps was 2 MiB; a copy of its part would be 48 more.
    assert whole // 2 <= grown["/job:ps/task:0"] < whole * 3 // 4
    assert whole // 2 <= grown["/job:ps/task:1"] < whole * 3 // 4
    assert grown["/job:worker/task:0"] < whole // 4


@pytest.mark.parametrize("kind", ["momentum", "adam"])
async def test_a_checkpoint_is_restored_to_any_number_of_servers(kind: str, tmp_path: Path) -> None:
    splits: list[dict[str, Any]] = [
        {"servers": 2, "partition": 2},
        {"servers": 3, "partition": (0, 7, 200, 399, 400)},
        {"servers": 1},
    ]
    want = await trained(*trainer(servers=1, **MAKERS[kind](), **HERE), 9)
    async with asyncio.timeout(120):
        for turn, split in enumerate(splits):
            graph, made = trainer(**split, **MAKERS[kind](), **HERE)
            async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
                given = islice(batches(9), turn * 3 * REPLICAS, (turn + 1) * 3 * REPLICAS)
                losses = [report.loss async for report in made.steps(session, given)]
                assert losses == want[0][turn * 3 : turn * 3 + 3]
                await session.save()
                got = await session.run(made.variables)
        for mine, judge in zip(got, want[1:], strict=True):
            np.testing.assert_array_equal(mine, judge)
