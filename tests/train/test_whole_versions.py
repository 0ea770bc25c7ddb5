"""On processes: all servers are at one version, whoever dies or stops, whenever; or nobody trains on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from counting_client import HERE, PATH, cluster_file, counted, counting, ones
from process_world import running
from programs import python

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path


@asynccontextmanager
async def started_again(cluster: fr.LocalCluster, server: int, folder: Path) -> AsyncIterator[None]:
    """A parameter server is killed, and another one is at its address."""
    process = cluster.processes[f"/job:ps/task:{server}"]
    process.kill()
    await process.wait()
    place = cluster.spec.jobs["ps"][server]
    options = [f"--task={server}", f"--bind={place}", f"--cluster={folder / 'cluster.toml'}", "--threads=1"]
    async with running(*python(), "-m", "flowrt.worker", "--job=ps", *options) as node:
        assert node.stdout is not None
        assert b"ready" in await node.stdout.readline()
        yield


async def to_its_end(steps: AsyncIterator[fr.train.StepReport]) -> None:
    async with asyncio.timeout(20):
        async for _ in steps:
            pass


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("servers", "how"), [(2, signal.SIGTERM), (3, signal.SIGKILL)])
async def test_a_client_that_dies_leaves_all_servers_at_one_version(servers: int, how: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("FLOWRT_SEED", 1122))
    print(f"seed {seed}")
    rng, before = random.Random(seed), 0
    graph, trainer = counting(servers)
    async with fr.LocalCluster(ps=servers, worker=2) as cluster:
        client = [*python(), str(HERE / "counting_client.py"), cluster_file(cluster, tmp_path), str(servers)]
        for _ in range(3):
            async with running(*client, env=PATH, stderr=asyncio.subprocess.DEVNULL) as process:
                assert process.stdout is not None
                assert await process.stdout.readline() == b"training\n"
                await asyncio.sleep(rng.uniform(0.0, 0.05))
                process.send_signal(how)
                await process.wait()
            async with asyncio.timeout(20), fr.Session(graph, cluster=cluster) as session:
                async for report in trainer.steps(session, ones()):
                    assert report.step > before
                    before = report.step
                    break
                assert await counted(session, trainer) == before


@pytest.mark.timeout(60)
async def test_of_clients_that_begin_at_once_one_trains() -> None:
    seed = int(os.environ.get("FLOWRT_SEED", 1122))
    print(f"seed {seed}")
    rng, trainers, trained = random.Random(seed), [counting(2) for _ in range(3)], 0

    async def train(session: fr.Session, trainer: fr.train.Replicated) -> int:
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        steps = trainer.steps(session, ones())
        try:
            for _ in range(3):
                await anext(steps)
        except fr.FlowrtError as error:
            assert "being trained by" in str(error) or "meanwhile" in str(error)  # noqa: PT017
            return 0
        finally:
            await steps.aclose()
        return 3

    async with fr.LocalCluster(ps=2, worker=2) as cluster, contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(fr.Session(graph, cluster=cluster)) for graph, _ in trainers]
        for _ in range(8):
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(train(s, t)) for s, (_, t) in zip(sessions, trainers, strict=True)]
            trained += sum(run.result() for run in runs)
            assert await counted(sessions[0], trainers[0][1]) == trained
        assert trained >= 8 * 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("server", [0, 1])
async def test_a_server_that_is_back_without_its_state_is_noticed(server: int, tmp_path: Path) -> None:
    (g1, one), (g2, two) = counting(2), counting(2)
    async with fr.LocalCluster(ps=2, worker=2) as cluster:
        cluster_file(cluster, tmp_path)
        async with fr.Session(g1, cluster=cluster) as session:
            steps = one.steps(session, ones())
            for _ in range(5):
                await anext(steps)
            async with started_again(cluster, server, tmp_path):
                with pytest.raises(fr.FlowrtError, match=f"/job:ps/task:{server}"):
                    await to_its_end(steps)
                async with asyncio.timeout(20), fr.Session(g2, cluster=cluster) as later:
                    with pytest.raises(fr.FlowrtError, match=rf"task:{server} at none .*session\.reset\(\)"):
                        await anext(two.steps(later, ones()))
                    await later.reset()
                async with asyncio.timeout(20), fr.Session(g2, cluster=cluster) as later:
                    async for report in two.steps(later, ones()):
                        assert report.step == 1
                        break
                    assert await counted(later, two) == 1
