"""Clients of a cluster that come, stop and die: how long nodes keep what they had, and what the next one finds."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from counting_client import HERE, PATH, cluster_file, counted, counting, ones
from process_world import running
from programs import python

import flowrt as fr
from flowrt.net.node.node import HEAL, RETURN

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from pathlib import Path

IDLE = """
import asyncio, sys, flowrt as fr
async def main():
    with fr.Graph() as graph:
        fr.constant(1.0)
    async with fr.Session(graph, cluster=fr.ClusterSpec.from_file(sys.argv[1])):
        print("open", flush=True)
        await asyncio.sleep(100)
asyncio.run(main())
"""


@asynccontextmanager
async def client(*command: str) -> AsyncIterator[Process]:
    """A client process that has said that it is where it should be."""
    async with running(*command, env=PATH) as process:
        assert process.stdout is not None
        assert await process.stdout.readline()
        yield process


async def kept(session: fr.Session) -> tuple[int, int]:
    """How many masters and drivers of runs the nodes have, at most."""
    runner: Any = session._runner
    nodes = (await runner._master.statistics()).values()
    return max(node["masters"] for node in nodes), max(node["iterations"] for node in nodes)


@pytest.mark.timeout(90)
async def test_nodes_let_a_killed_client_go_within_ten_seconds_and_a_stopped_one_not(tmp_path: Path) -> None:
    graph, trainer = counting(2)
    async with fr.LocalCluster(ps=2, worker=2) as cluster:
        file = cluster_file(cluster, tmp_path)
        loop = asyncio.get_running_loop()
        async with client(sys.executable, "-c", IDLE, file) as stopped, fr.Session(graph, cluster=cluster) as session:
            async with client(*python(), str(HERE / "counting_client.py"), file, "2") as killed:
                assert await kept(session) == (3, 1)
                stopped.send_signal(signal.SIGSTOP)
                killed.kill()
                await killed.wait()
                since = loop.time()
                while await kept(session) != (2, 0):
                    await asyncio.sleep(0.1)
                    assert loop.time() - since < HEAL, "as if the way to it were gone, and it might be well"
                assert RETURN < 10
            stopped.send_signal(signal.SIGCONT)
            assert await kept(session) == (2, 0)
            await counted(session, trainer)


@pytest.mark.timeout(60)
async def test_a_client_of_the_name_of_one_that_was_killed_goes_on_at_once(tmp_path: Path) -> None:
    graph, trainer = counting(2)
    async with fr.LocalCluster(ps=2, worker=2, imports=["patient_nodes"]) as cluster:  # which let nobody go
        file = cluster_file(cluster, tmp_path)
        async with client(*python(), str(HERE / "counting_client.py"), file, "2", "job") as killed:
            killed.kill()
            await killed.wait()
        async with fr.Session(graph, cluster=cluster, name="job") as session:
            at = await counted(session, trainer)
            steps = trainer.steps(session, ones())
            assert [(await anext(steps)).step for _ in range(3)] == [at + 1, at + 2, at + 3]
            await steps.aclose()
            assert await counted(session, trainer) == at + 3
            assert await kept(session) == (1, 0)
