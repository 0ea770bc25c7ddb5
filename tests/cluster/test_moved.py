"""Nodes that somebody else starts again at another address: open sessions learn where, and go on with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from process_world import begun_node
from test_ranges_of_replicas import WORKERS, batches, trainer_of

import flowrt as fr
from flowrt.cluster.cluster import ClusterSpec, LocalCluster, parse_address
from flowrt.net.door.tokens import save_token

if TYPE_CHECKING:
    from pathlib import Path

MOVES = WORKERS[1]


class Elsewhere:
    """A cluster that knows better than its specification where nodes are."""

    def __init__(self, spec: ClusterSpec, token: str) -> None:
        self.spec, self.token = spec, token
        self.tells: list[Callable[[str, tuple[str, int]], None]] = []

    def follow(self, tell: Callable[[str, tuple[str, int]], None]) -> Callable[[], None]:
        self.tells.append(tell)
        return lambda: self.tells.remove(tell)


@asynccontextmanager
async def again(token: Path) -> AsyncIterator[str]:
    """Another node of the task: its address."""
    process = await begun_node("--job=worker", "--task=1", "--bind=127.0.0.1:0", f"--token-file={token}")
    try:
        yield (await process.stdout.readline()).decode().split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()


async def counts_again(session: fr.Session, trainer: Any, losses: int) -> None:
    """Train until the replica on the node that moved was lost so often, and counts."""
    runner = session._open_here()
    steps = trainer.steps(session, batches())
    async for report in steps:
        if runner.losses.get(MOVES) == losses and MOVES not in session.lost and 1 in report.kept:
            break
    await steps.aclose()


@pytest.mark.parametrize("before", ["dead", "alive"])
async def test_whoever_is_started_again_elsewhere_counts_in_every_session(before: str, tmp_path: Path) -> None:
    graph, trainer = trainer_of(2, fr.train.FirstOf(1))
    with fr.Graph() as other_graph, fr.device(MOVES):
        y = fr.constant(1.0) + 1.0
    async with LocalCluster(ps=1, worker=2) as cluster, asyncio.timeout(50):
        save_token(tmp_path / "token", cluster.token)
        known = Elsewhere(cluster.spec, cluster.token)
        async with (
            fr.Session(graph, cluster=known, name="told") as session,
            fr.Session(other_graph, cluster=cluster, name="untold") as untold,
        ):
            assert await untold.run(y) == 2.0
            for losses in (1, 2):
                async with again(tmp_path / "token") as address:
                    if before == "dead" and losses == 1:
                        cluster.processes[MOVES].kill()
                    (tell,) = known.tells
                    tell(MOVES, parse_address(address))
                    await counts_again(session, trainer, losses)
                    runner = untold._open_here()
                    while runner.losses.get(MOVES) != losses or MOVES in runner.lost:
                        await runner.wait_changed(runner.lost, runner.suspects)
                    assert await untold.run(y) == 2.0
        assert known.tells == []


async def test_a_node_that_is_where_it_was_is_left_alone() -> None:
    async with LocalCluster(ps=1, worker=2) as cluster:
        known = Elsewhere(cluster.spec, cluster.token)
        with fr.Graph() as graph, fr.device(MOVES):
            y = fr.constant(1.0) + 1.0
        async with fr.Session(graph, cluster=known) as session:
            for task, place in cluster.spec.tasks().items():
                known.tells[0](task, place)
            assert await session.run(y) == 2.0
            assert session._open_here().losses == {}
