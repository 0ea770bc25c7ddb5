"""Nodes that no cluster file names: they ask one that is up, are told which task they are, and are used."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from process_world import begun_node, until_lost
from test_ranges_of_replicas import WORKERS, batches, trainer_of

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.cluster.cluster import LocalCluster
from flowrt.net.door.tokens import new_token, save_token
from flowrt.net.master.joining import choose

if TYPE_CHECKING:
    from pathlib import Path

PS = "/job:ps/task:0"
HERE = "127.0.0.1"
THERE = {PS: (HERE, 1), WORKERS[0]: (HERE, 2), WORKERS[1]: (HERE, 3), WORKERS[3]: (HERE, 4)}


@pytest.mark.parametrize(
    ("number", "port", "vacant", "task"),
    [
        (-1, 9, (), 2),
        (-1, 3, (), 1),
        (-1, 9, (1,), 2),
        (1, 9, (1,), 1),
        (-1, 4, (1, 3), 3),
        (2, 9, (), 2),
        (7, 9, (), 7),
        (3, 9, (3,), 3),
        (1, 3, (), 1),
    ],
)
def test_a_newcomer_is_the_first_task_that_no_node_is(number: int, port: int, vacant: Any, task: int) -> None:
    free = {WORKERS[other] for other in vacant}
    joined = {WORKERS[3]}
    assert choose("worker", number, (HERE, port), THERE, free, joined, {"ps", "worker"}) == f"/job:worker/task:{task}"


@pytest.mark.parametrize(
    ("job", "number", "port", "says"),
    [
        ("wroker", -1, 9, "job 'wroker' is not in the cluster, which has ps, worker; give --job one of these"),
        ("worker", 1, 9, f"{WORKERS[1]} is 127.0.0.1:3; give another --task, or none for the first that is free"),
        ("worker", -1, 1, f"127.0.0.1:1 is {PS}; give another --bind, or port 0 for any that is free"),
        ("ps", -1, 4, f"127.0.0.1:4 is {WORKERS[3]}; give another --bind, or port 0 for any that is free"),
    ],
)
def test_what_a_newcomer_cannot_be_is_said_with_the_way_out(job: str, number: int, port: int, says: str) -> None:
    with pytest.raises(GraphError, match=re.escape(says)):
        choose(job, number, (HERE, port), THERE, {WORKERS[3]}, {WORKERS[3]}, {"ps", "worker"})


def at(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


@asynccontextmanager
async def newcomer(door: tuple[str, int], token: Path, *more: str) -> AsyncIterator[Any]:
    """A process that joins at ``door``; it ends with the block."""
    process = await begun_node(f"--token-file={token}", "--job=worker", f"--join={at(door)}", *more)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        process.stdin.close()
        async with asyncio.timeout(20):
            await process.wait()


async def line(process: Any) -> str:
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


@pytest.fixture
def key(tmp_path: Path) -> Any:
    """Where a token is, and how to put one there."""

    def write(token: str) -> Path:
        path = tmp_path / f"token-{token[:6]}"
        if not path.exists():
            save_token(path, token)
        return path

    return write


@pytest.mark.timeout(180)
async def test_nodes_that_are_added_at_once_are_different_tasks() -> None:
    async with LocalCluster(ps=1, worker=1) as cluster, asyncio.timeout(120):
        added = await asyncio.gather(*[cluster.add("worker") for _ in range(3)])
        assert sorted(added) == [f"/job:worker/task:{number}" for number in (1, 2, 3)]
        assert cluster.spec.tasks().keys() == cluster.processes.keys() == {PS, WORKERS[0], *added}


@pytest.mark.timeout(180)
async def test_a_node_that_is_added_trains_in_the_running_iteration_and_one_that_is_removed_is_not_missed() -> None:
    graph, trainer = trainer_of((1, 3), fr.train.AllOf())
    async with LocalCluster(ps=1, worker=1) as cluster, asyncio.timeout(120):
        async with fr.Session(graph, cluster=cluster) as session:
            steps = trainer.steps(session, batches())
            assert (await anext(steps)).kept == (0,)
            assert await cluster.add("worker") == WORKERS[1]
            assert cluster.spec.tasks().keys() == {PS, *WORKERS[:2]}
            async for report in steps:
                if report.kept == (0, 1):
                    break
            steps = trainer.steps(session, batches())
            removing = asyncio.ensure_future(cluster.remove(WORKERS[0]))
            async for report in steps:
                assert not report.lost
                if report.kept == (1,):
                    break
            await removing
            assert cluster.spec.tasks().keys() == {PS, WORKERS[1]}
            assert await cluster.add("worker") == WORKERS[0]
            async for report in steps:
                if report.kept == (0, 1):
                    break
            await steps.aclose()
            step, w = await session.run([trainer.step, trainer.variables[0]])
            assert (w == -step).all()
        async with fr.Session(graph, cluster=cluster) as session:
            await until_lost(session._open_here())  # who answers late on a busy machine comes later
        for ask in (cluster.remove, cluster.respawn):
            with pytest.raises(GraphError, match="worker/task:7 is not in the cluster"):
                await ask("/job:worker/task:7")


@pytest.mark.timeout(180)
async def test_newcomers_wait_for_a_session_and_are_told_different_tasks_by_whomever_they_ask(key: Any) -> None:
    graph, trainer = trainer_of((3, 4), fr.train.AllOf())
    async with LocalCluster(ps=1, worker=1) as cluster, asyncio.timeout(120):
        places, token = cluster.spec.tasks(), key(cluster.token)
        async with newcomer(places[PS], token) as one, newcomer(places[WORKERS[0]], token) as other:
            for process in (one, other):
                assert (await line(process)).startswith("flowrt worker waits for a session: the node at 127.0.0.1:")
            async with fr.Session(graph, cluster=cluster) as session:
                steps = trainer.steps(session, batches())
                assert (await anext(steps)).kept == (0, 1, 2)
                ready = sorted([await line(one), await line(other)])
                assert [said.split()[2] for said in ready] == list(WORKERS[1:3])
                async with newcomer(places[PS], token, "--bind=127.0.0.1:0") as third:
                    assert WORKERS[3] in await line(third)
                    async for report in steps:
                        if report.kept == (0, 1, 2, 3):
                            break
                    third.terminate()
                    assert await third.wait() == 0
                async for report in steps:
                    if report.kept == (0, 1, 2):
                        break
                async with newcomer(places[WORKERS[0]], token) as fourth:
                    assert WORKERS[3] in await line(fourth), "that number is free again"
                    async for report in steps:
                        if 3 in report.kept:
                            break
                await steps.aclose()
            async with fr.Session(graph, cluster=cluster) as session, fr.Session(graph, cluster=cluster) as beside:
                known = session._open_here()  # who joined is, if not always met as a session opens
                while not {device.host for device in known.devices} >= {PS, *WORKERS[:3]}:
                    await known.wait_changed(known.lost, known.suspects)
                async with newcomer(places[PS], token) as last:
                    task = (await line(last)).split()[2]
                    assert task in WORKERS
                    for opened in (session, beside):
                        runner = opened._open_here()
                        while task not in {device.host for device in runner.devices}:
                            await runner.wait_changed(runner.lost, runner.suspects)


async def test_who_joined_and_is_gone_keeps_no_session_from_opening(key: Any) -> None:
    """All of a job that no cluster file names may be gone before the first session comes."""
    with fr.Graph() as graph, fr.device(PS):
        y = fr.constant(2.0) * 3.0
    async with LocalCluster(ps=1) as cluster, asyncio.timeout(60):
        async with newcomer(cluster.spec.tasks()[PS], key(cluster.token), "--task=0") as process:
            assert WORKERS[0] in await line(process)
            process.kill()
            await process.wait()
        async with fr.Session(graph, cluster=cluster) as session:
            assert await session.run(y) == 6.0


@pytest.mark.parametrize("reason", ["nobody", "token", "job", "task", "both", "neither"])
async def test_who_cannot_join_is_told_why_and_what_to_do(reason: str, key: Any) -> None:
    graph, _ = trainer_of(1)
    async with LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster):
        door, token = cluster.spec.tasks()[PS], key(cluster.token)
        arguments, says = {
            "nobody": (["--join=127.0.0.1:9"], "no node answers at 127.0.0.1:9: .*; give --join the address"),
            "token": ([f"--token-file={key(new_token())}"], "refused the token; .*: give --token-file the cluster's"),
            "job": (["--job=wroker"], "job 'wroker' is not in the cluster, which has ps, worker; give --job"),
            "task": (["--task=0"], f"{WORKERS[0]} is 127.0.0.1:.*; give another --task, or none"),
            "both": (["--cluster=x.toml"], "give --cluster or --join, not both"),
            "neither": (["--join="], "--task says which of the job's tasks this node is; or let it --join"),
        }[reason]
        async with newcomer(door, token, *arguments) as process:
            assert re.search(says, await line(process))
            async with asyncio.timeout(20):
                assert await process.wait() == 2
