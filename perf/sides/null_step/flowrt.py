"""flowrt's side of perf/null_step.py: `fr.train.Replicated` on a `fr.LocalCluster`, as a program would write it, on
uvloop.

ahead    the same with ``ahead=8``: the nodes need not wait for the client
tcp      the same by sockets, as between hosts
bfloat16 by sockets, what workers send in half the bytes
int8     by sockets, what workers send in a quarter of the bytes
shares   by sockets, without a server: each worker holds a share of the variables, as in an all-reduce
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import uvloop
from sides import processes as p
from sides.cluster import messages, roles
from sides.null_step import data as d

import flowrt as fr

AHEAD = 8
PACKED = ("bfloat16", "int8")
SOCKETS = ("tcp", "shares", *PACKED)


def build(a: p.Settings) -> tuple[fr.Graph, fr.train.Replicated, fr.Tensor]:
    """The graph, its trainer, and what is compared in the end."""
    rows = a.workload in d.TABLES
    inputs = {"ids": fr.Spec("int32", (d.ROWS_A_STEP,))} if rows else {"one": fr.Spec("float32", ())}
    shares, on = (a.workers, "/job:worker/task:{}") if a.variant == "shares" else (1, "/job:ps/task:{}")

    def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
        if rows:
            table = fr.Variable(fr.ones((d.TABLES[a.workload], d.WIDTH)), name="table")
            return 0.5 * fr.sum(fr.square(fr.nn.embedding_lookup(table, given["ids"])))
        size = max(1, d.floats(a.workload) // shares)
        squares = [fr.sum(fr.square(fr.Variable(fr.ones((size,)), name=f"w{share}"))) for share in range(shares)]
        return 0.5 * fr.add_n(squares) * given["one"]

    with fr.Graph() as graph:
        rate = d.ROW_RATE if rows else d.RATE
        where: dict[str, Any] = {"servers": shares, "server_device": on}
        where["compression"] = a.variant if a.variant in PACKED else None
        trainer = fr.train.Replicated(loss_fn, inputs, fr.optim.SGD(rate), replicas=a.workers, **where)
        variable = trainer.variables[-1]
        with fr.colocate_with(variable):
            probed = (
                fr.take(variable, fr.constant(d.probes(a.workload, a.workers)), axis=0)[:, 0] if rows else variable[-1:]
            )
    return graph, trainer, probed


def batches(a: p.Settings) -> Iterator[dict[str, Any]]:
    """One for each worker and step, without end."""
    if a.workload not in d.TABLES:
        return itertools.repeat({"one": np.float32(1)})
    ids = d.ids(a.workload, a.workers)
    return ({"ids": ids[worker, turn]} for turn in itertools.cycle(range(d.BATCHES)) for worker in range(a.workers))


async def serve(a: p.Settings) -> None:
    if a.variant in SOCKETS:
        os.environ["FLOWRT_TRANSPORT"] = "tcp"
    graph, trainer, probed = build(a)
    ahead = AHEAD if a.variant == "ahead" else 0
    servers = {} if a.variant == "shares" else {"ps": 1}
    async with fr.LocalCluster(**servers, worker=a.workers) as cluster, fr.Session(graph, cluster=cluster) as session:
        reports = trainer.steps(session, batches(a), ahead=ahead)

        async def right(steps: int) -> bool:
            step, found = await session.run([trainer.step, probed])
            # With ahead, the variables are a few versions further than what was reported.
            return steps <= step <= steps + ahead and d.right(a.workload, a.workers, int(step), found)

        try:
            await p.serve_beside(
                lambda n: p.timed_reports(reports, n),
                roles(cluster),
                right,
                messages=lambda: messages(cluster, session),
                fewest=p.FEWEST + ahead,
            )
        finally:
            await reports.aclose()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(p.settings()))
