"""A trainer whose variables count its steps down, and a client process that trains it until it is killed.

    python tests/worlds/counting_client.py CLUSTER_FILE SERVERS [NAME [LEDGER]]    # says "training" when it does

Every gradient and the rate are 1, so at step s each entry of every variable is -s, whichever updates were kept: servers
that are apart, and a step that is counted twice or not, are seen in any of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from places import ROOT

import flowrt as fr
from flowrt.net.door.tokens import save_token

HERE = Path(__file__).parent
PATH = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
ENTRIES = 200_000  # so that to apply an update takes a while


def cluster_file(cluster: fr.LocalCluster, folder: Path) -> str:
    """A file by which another process finds the cluster."""
    save_token(str(folder / "token"), cluster.token)
    lines = [f'token_file = "{folder / "token"}"', *(f"{job} = {list(to)}" for job, to in cluster.spec.jobs.items())]
    (folder / "cluster.toml").write_text("\n".join(lines).replace("'", '"'))
    return str(folder / "cluster.toml")


def counting(servers: int) -> tuple[fr.Graph, fr.train.Replicated]:
    """A trainer with a variable on each of ``servers``, and two replicas."""

    def loss(inputs: dict[str, fr.Tensor]) -> Any:
        variables = [fr.Variable(np.zeros(ENTRIES), name=f"w{i}") for i in range(servers)]
        return fr.add_n([fr.sum(variable) for variable in variables]) * fr.mean(inputs["x"])

    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float64", (None,))}
        rate, first = fr.optim.SGD(1.0), fr.train.FirstOf(1)
        trainer = fr.train.Replicated(loss, inputs, rate, replicas=2, policy=first, servers=servers)
    return graph, trainer


def ones() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones(4)}


async def counted(session: fr.Session, trainer: fr.train.Replicated) -> int:
    """The step, which all entries of all variables must tell."""
    variables, step = await session.run([trainer.variables, trainer.step])
    assert {float(end) for w in variables for end in (w.min(), w.max())} == {-float(step)}, (step, variables)
    return int(step)


async def main(file: str, servers: int, name: str = "", ledger: str | None = None) -> None:
    graph, trainer = counting(servers)
    async with fr.Session(graph, cluster=fr.ClusterSpec.from_file(file), name=name) as session:
        async for report in trainer.steps(session, ones(), ahead=3, ledger=ledger):
            if report.step % 3 == 0:
                print("training", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
