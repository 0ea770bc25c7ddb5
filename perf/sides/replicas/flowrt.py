"""flowrt's side of perf/replicas.py.

""       every step waits for all replicas
first    it keeps the first updates, of all but one
"""

from __future__ import annotations

import asyncio

import uvloop
from sides import processes as p
from sides.cluster import messages, roles
from sides.replicas import data as d

import flowrt as fr

INPUTS = {"images": fr.Spec("float32", (None, 64)), "labels": fr.Spec("int32", (None,))}


def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
    w1, b1, w2, b2 = (fr.Variable(value, name=name) for name, value in zip("abcd", d.weights(), strict=True))
    logits = fr.nn.relu(given["images"] @ w1 + b1) @ w2 + b2
    return fr.mean(fr.nn.softmax_cross_entropy(logits, given["labels"]))


async def serve(a: p.Settings) -> None:
    policy = fr.train.FirstOf(a.workers - 1) if a.variant == "first" else fr.train.AllOf()
    with fr.Graph() as graph:
        optimizer = fr.optim.Momentum(d.RATE, d.MOMENTUM)
        trainer = fr.train.Replicated(loss_fn, INPUTS, optimizer, replicas=a.workers, policy=policy)
    delays = {f"/job:worker/task:{a.workers - 1}": str(d.DELAY)} if a.workload == "straggler" else {}
    judge = d.Judge(a.workload, a.workers, waits=a.variant != "first")
    cluster = fr.LocalCluster(ps=1, worker=a.workers, delays=delays)
    async with cluster, fr.Session(graph, cluster=cluster) as session:
        reports = trainer.steps(session, ({"images": x, "labels": y} for x, y in d.batches()))

        async def right(steps: int) -> bool:
            step, found = await session.run([trainer.step, trainer.variables])
            return int(step) == steps and judge.right(steps, list(found))

        try:
            await p.serve_beside(
                lambda n: p.timed_reports(reports, n),
                roles(cluster),
                right,
                d.FIRST[a.workload],
                judge.notes,
                lambda: messages(cluster, session),
            )
        finally:
            await reports.aclose()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(p.settings()))
