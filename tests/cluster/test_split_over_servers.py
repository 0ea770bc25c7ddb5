"""Tables that are split by rows over servers: whatever rows a step asks for, to the bit what the whole one gives."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import flowrt as fr

Array = np.ndarray[Any, Any]
ROWS = 400


async def stepped(partition: Any, cluster: Any, columns: int, dtype: str, make: Any) -> list[Array]:
    """What steps on rows drawn unevenly come to: of none, of one part alone, many times the same, in two lookups."""
    with fr.Graph(seed=5) as graph:
        ids, others = fr.placeholder("int64", (None,)), fr.placeholder("int32", (None, 9))
        with fr.device("/job:ps" if cluster else ""):
            start = fr.random.normal((ROWS, columns), seed=3, dtype=dtype)
            table = fr.Variable(start, name="table", partition=partition)
        rows, bags = fr.take(table, ids), fr.mean(fr.nn.embedding_lookup(table, others), axis=1)
        loss = fr.sum(fr.square(rows)) + fr.sum(bags * bags * bags)
        steps = [make().minimize(loss), table.scatter_add(ids, fr.sin(rows))]
    given, seen = np.random.default_rng(7), []
    draws = [(40, 0, ROWS), (0, 0, 1), (1, 399, ROWS), (64, 0, 9), (300, 0, ROWS), (3, 398, ROWS), (64, -ROWS, 0)]
    async with fr.Session(graph, cluster) as session:
        for count, low, high in draws:
            fed = {
                ids: given.integers(low, high, count),
                others: given.integers(low, high, (count // 2, 9)).astype("int32"),
            }
            for step in steps:
                seen += await session.run([rows, bags, step], fed)
        seen.append(await session.run(table))
        with pytest.raises(fr.FlowrtError, match="an index is out of range"):
            await session.run([rows, steps[0]], {ids: np.array([0, ROWS]), others: np.zeros((0, 9), "int32")})
        seen.append(await session.run(table))
        await session.reset()
    return [array for array in seen if array is not None]


async def test_steps_on_rows_of_two_servers_are_those_on_the_whole_to_the_bit() -> None:
    kinds: list[tuple[int, str, Any]] = [
        (70, "float32", lambda: fr.optim.Adam(0.1)),
        (3, "float64", lambda: fr.optim.Momentum(0.1, 0.9)),
        (1, "float32", lambda: fr.optim.SGD(0.1)),  # rows of fewer bytes than all ids, where there are many parts
    ]
    async with asyncio.timeout(120), fr.LocalCluster(ps=2, worker=1) as cluster:
        for columns, dtype, make in kinds:
            want = await stepped(None, None, columns, dtype, make)
            for partition in (2, (0, 1, 7, 399, 400)):
                got = await stepped(partition, cluster, columns, dtype, make)
                for mine, judge in zip(got, want, strict=True):
                    np.testing.assert_array_equal(mine, judge)
