"""What a service tells of itself: as a dict of numbers, and as Prometheus reads them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import numpy as np
import pytest

import flowrt as fr

TASK = "/job:local/task:0"
SILENT = "/job:worker/task:0"
LABEL = r'[a-z]+="(?:[^"\\\n]|\\[\\"n])*"'
VALUE = re.compile(r'="((?:[^"\\]|\\.)*)"')


def queued() -> tuple[fr.Graph, Any, Any]:
    """A graph with a queue of 3 elements, a large variable, and what puts an element in."""
    with fr.Graph() as graph:
        v = fr.Variable(np.zeros(1 << 16), name="v")
        queue = fr.FIFOQueue(3, ["float32"], shapes=[()], name='odd "name"\\')
        put = queue.enqueue(fr.constant(1.0, dtype="float32"))
    return graph, put, v


def read(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, the values, by the labels' values. Each line must be as the format's grammar has it."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for line in text.splitlines():
        if told := re.fullmatch(r"# HELP (flowrt_\w+) .+", line):
            found[told[1]] = {}
        elif told := re.fullmatch(r"# TYPE (flowrt_\w+) (gauge|counter)", line):
            assert told[1] in found
            assert told[1].endswith("_total") == (told[2] == "counter")
        else:
            told = re.fullmatch(rf"(flowrt_\w+)(?:{{((?:{LABEL},)*{LABEL})}})? (\S+)", line)
            assert told, line
            labels = tuple(
                re.sub(r"\\(.)", lambda c: {"n": "\n"}.get(c[1], c[1]), value) for value in VALUE.findall(told[2] or "")
            )
            assert labels not in found[told[1]]
            found[told[1]][labels] = float(told[3])
    assert text.endswith("\n")
    return found


@pytest.mark.asyncio
async def test_a_session_of_one_process_tells_of_memory_queues_and_runs() -> None:
    graph, put, _ = queued()
    async with fr.Session(graph) as session:
        before = (await fr.metrics.collect(session))["runs"]
        await session.run(put)
        await session.run(put)
        found = await fr.metrics.collect(session)
        assert found["runs"] == before + 2
        assert found["trainers"] == {}
        node = found["nodes"][TASK]
        assert (node["up"], node["losses"]) == (True, 0)
        assert node["memory"]["cpu:0"]["held"] >= 8 << 16
        assert node["memory"]["cpu:0"]["peak"] >= node["memory"]["cpu:0"]["held"]
        (queue,) = node["queues"].values()
        assert queue == {"size": 2, "capacity": 3, "waiting_enqueues": 0, "waiting_dequeues": 0}


@pytest.mark.asyncio
async def test_who_waits_for_a_queue_is_counted_while_it_does() -> None:
    graph, put, _ = queued()
    async with fr.Session(graph) as session:
        for _ in range(3):
            await session.run(put)
        waiting = asyncio.ensure_future(session.run(put))
        while not (queue := await queue_of(session))["waiting_enqueues"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert queue["size"] == 3
        waiting.cancel()
        await asyncio.wait([waiting])


async def queue_of(session: fr.Session) -> dict[str, int]:
    (queue,) = (await fr.metrics.collect(session))["nodes"][TASK]["queues"].values()
    return queue


@pytest.mark.asyncio
async def test_prometheus_reads_what_is_written() -> None:
    graph, put, _ = queued()
    async with fr.Session(graph, options=fr.Options(memory_limit=1 << 30)) as session:
        await session.run(put)
        found = await fr.metrics.collect(session)
    text = fr.metrics.prometheus(found)
    told = read(text)
    assert told["flowrt_runs_total"] == {(): found["runs"]}
    assert told["flowrt_node_up"] == {(TASK,): 1}
    memory = found["nodes"][TASK]["memory"]["cpu:0"]
    assert told["flowrt_memory_bytes"] == {(TASK, "cpu:0"): memory["held"]}
    assert told["flowrt_memory_limit_bytes"] == {(TASK, "cpu:0"): 1 << 30}
    assert told["flowrt_queue_size"] == {(TASK, 'odd "name"\\'): 1}
    assert "# TYPE flowrt_runs_total counter\n" in text
    assert "# TYPE flowrt_queue_size gauge\n" in text


def test_what_is_infinite_or_unknown_is_written_as_prometheus_has_it() -> None:
    replica = {"kept": 3, "late": 1, "refused": 0, "lost": 0, "median_seconds": 0.25, "p95_seconds": None}
    slow = [
        {"replica": None, "cause": "server", "factor": float("inf")},
        {"replica": 0, "cause": "link", "factor": 2.5},
    ]
    trainer = {"steps": 4, "dropped_batches": 2, "replicas": {0: replica}, "slow": slow}
    told = read(fr.metrics.prometheus({"runs": 0, "nodes": {}, "trainers": {"t\n": trainer}}))
    assert told["flowrt_train_latency_seconds"] == {("t\n", "0", "0.5"): 0.25}
    assert told["flowrt_train_slow"] == {("t\n", "all", "server"): float("inf"), ("t\n", "0", "link"): 2.5}
    assert told["flowrt_train_updates_total"][("t\n", "0", "late")] == 1


def test_what_is_no_answer_of_collect_is_refused() -> None:
    with pytest.raises(fr.GraphError, match=r"takes what fr\.metrics\.collect answers"):
        fr.metrics.prometheus({"a": 1})


def test_a_blocking_session_is_told_which_one_is_meant() -> None:
    graph, _, _ = queued()
    with fr.BlockingSession(graph) as session, pytest.raises(fr.GraphError, match=r"not an fr\.BlockingSession"):
        asyncio.run(fr.metrics.collect(session))


def loss_fn(inputs: dict[str, Any]) -> Any:
    return fr.mean(fr.square(inputs["x"] @ fr.Variable(np.ones((8, 1), np.float32), name="w")))


@pytest.mark.asyncio
async def test_a_cluster_tells_of_nodes_trainers_and_who_is_lost() -> None:
    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float32", (None, 8))}
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(0.01), replicas=2, policy=fr.train.FirstOf(1))
    batches = ({"x": np.ones((4, 8), np.float32)} for _ in range(1000))
    async with fr.LocalCluster(ps=1, worker=2) as cluster, fr.Session(graph, cluster=cluster) as session:
        async for report in trainer.steps(session, batches):
            if report.step == 10:
                break
        found = await fr.metrics.collect(session, trainer)
        assert set(found["nodes"]) == {"/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"}
        server = found["nodes"]["/job:ps/task:0"]
        assert server["messages"] > 10
        assert server["memory"]["cpu:0"]["limit"] is None
        told = found["trainers"]["replicated"]
        assert told["steps"] == 10
        assert sum(replica["kept"] for replica in told["replicas"].values()) == 10
        text = read(fr.metrics.prometheus(found))
        assert text["flowrt_node_bytes_sent_total"][("/job:ps/task:0", "socket")] == server["bytes_by_socket"]
        assert text["flowrt_train_steps_total"] == {("replicated",): 10}

        silent = cluster.processes[SILENT].pid
        os.kill(silent, signal.SIGSTOP)
        try:
            found, others = {"nodes": {}}, {"/job:ps/task:0": True, "/job:worker/task:1": True}
            while {task: node["up"] for task, node in found["nodes"].items()} != others | {SILENT: False}:
                found = await fr.metrics.collect(session, trainer, within=0.5)  # in which a busy machine may do nothing
        finally:
            os.kill(silent, signal.SIGCONT)
        assert {task: "messages" in node for task, node in found["nodes"].items()} == others | {SILENT: False}

        lost = "/job:worker/task:1"
        cluster.processes[lost].kill()
        while (found := await fr.metrics.collect(session, trainer))["nodes"][lost]["up"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert found["nodes"][lost] == {"up": False, "losses": 1}
        assert read(fr.metrics.prometheus(found))["flowrt_node_up"][(lost,)] == 0
