"""A trainer whose batches nodes read themselves, and a client process that begins it detached, or attaches to it.

    python tests/worlds/detached_client.py CLUSTER_FILE NAME TOTAL [COUNT [LEDGER]]    # COUNT reports, or (-1) all

Prints a line once its session is open, and for each report the step and the batches that it accounts for, as JSON.
Every gradient and the rate are 1, so at step s every variable is -s. Each batch is its identity, and the loss tells it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

import flowrt as fr

INPUTS = {"x": fr.Spec("float64", (None,))}


@fr.data.source
def slow_rows(rows: Any, seconds: float) -> dict[str, Any]:
    """Each row is its number; it takes a while to read it."""
    time.sleep(seconds)
    return {"x": np.asarray(rows, np.float64)}


def source(total: int, seconds: float = 0.02) -> fr.data.Source:
    return fr.data.function(slow_rows, total, 1, shuffle=False, epochs=1, specs=INPUTS, seconds=seconds)


def built(replicas: int = 2, servers: int = 2, policy: Any = None) -> tuple[fr.Graph, fr.train.Replicated]:
    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        variables = [fr.Variable(np.zeros(()), name=f"w{i}") for i in range(servers)]
        return fr.add_n(variables), {"x": fr.mean(inputs["x"])}

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss, INPUTS, fr.optim.SGD(1.0), replicas=replicas, servers=servers, policy=policy or fr.train.FirstOf(1)
        )
    return graph, trainer


def used_by(*reports: fr.train.StepReport) -> list[int]:
    """The batches that reports account for."""
    return [identity for report in reports for some in report.batches.values() for identity in some]


async def main(file: str, name: str, total: int, count: int = -1, ledger: str | None = None) -> None:
    graph, trainer = built()
    async with fr.Session(graph, cluster=fr.ClusterSpec.from_file(file), name=name) as session:
        print("begins", flush=True)
        async for report in trainer.steps(session, source(total), detached=True, ledger=ledger):
            print(json.dumps([report.step, used_by(report)]), flush=True)
            count -= 1
            if not count:
                await asyncio.sleep(100)


if __name__ == "__main__":
    file, name, *numbers = sys.argv[1:5]
    asyncio.run(main(file, name, *map(int, numbers), *sys.argv[5:]))
