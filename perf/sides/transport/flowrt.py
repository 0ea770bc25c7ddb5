"""flowrt's side of perf/transport.py's steps: a compiled step of a session with a server and a worker.

""      by the best way that there is between processes of one host
tcp     by sockets, as between hosts
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from sides import processes as p
from sides.transport import data as d

import flowrt as fr

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


def build(workload: str) -> tuple[fr.Graph, list[fr.Tensor], fr.Tensor, Any]:
    """The graph, what a step is fed, what it fetches, and what gives the held value another value."""
    with fr.Graph() as graph:
        if workload == "model":
            return graph, *model(), None
        number = fr.placeholder("float32", (), name="number")
        if workload == "steps":
            with fr.device(PS):
                added = number + 1
            with fr.device(WORKER):
                return graph, [number], added + 1, None
        with fr.device(PS):
            held = fr.Variable(fr.full((d.floats(workload),), d.VALUE), name="held", trainable=False)
            change = held.assign(fr.full((d.floats(workload),), 1.0) * number)
        if workload.startswith("fetch"):
            return graph, [], held.read(), (number, change)
        with fr.device(WORKER):
            return graph, [], fr.concat([held[:1], held[-1:]]), (number, change)


def model() -> tuple[list[fr.Tensor], fr.Tensor]:
    """What it is fed, and the loss, which comes with a step."""
    with fr.device(PS):
        layers = [fr.Variable(fr.eye(d.WIDTH), name=f"layer_{i}") for i in range(d.LAYERS)]
    with fr.device(WORKER):
        out = x = fr.placeholder("float32", (d.ROWS, d.WIDTH), name="x")
        for layer in layers:
            out = fr.tanh(out @ layer)
        loss = fr.mean(fr.square(out))
        train = fr.optim.SGD(d.RATE).minimize(loss)
        with fr.control_dependencies([train]):
            return [x], fr.identity(loss)


async def serve(a: p.Settings) -> None:
    if a.variant:
        os.environ["FLOWRT_TRANSPORT"] = a.variant
    graph, feeds, fetched, change = build(a.workload)
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        step: Callable[..., Awaitable[Any]] = session.compile(fetched, feeds)
        given: list[Any] = [d.inputs() if a.workload == "model" else np.float32(1)] if feeds else []

        async def run(count: int) -> list[float]:
            clock, out = time.perf_counter, []
            before = clock()
            for _ in range(count):
                await step(*given)
                after = clock()
                out.append(after - before)
                before = after
            return out

        async def right(_: int) -> bool:
            found = await step(*given)
            if a.workload == "model":
                return d.loss_is_right(found)
            if change is None:
                return bool(found == d.VALUE)
            for value in (1.0, d.VALUE):  # what arrives is what the server holds now
                await session.run(change[1], {change[0]: np.float32(value)})
                found = await step(*given)
                if found[0] != value or found[-1] != value:
                    return False
            return d.right(found)

        pids = {task: process.pid for task, process in cluster.processes.items()}
        await p.serve_beside(run, {"server": pids[PS], "worker 0": pids[WORKER], "client": os.getpid()}, right)


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        runner.run(serve(p.settings()))
