"""Small training whose right result is known: what counts moves every number of the variables by one, so each of them
is minus the step, on whichever server it lies; and what reports tell of batches is checked one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import flowrt as fr

VARIABLES = 2
Array = np.ndarray[Any, Any]


def build(replicas: int, policy: Any, servers: int = 1, size: int = 64, **options: Any) -> tuple[fr.Graph, Any]:
    """A graph and a trainer; batches are `ones`."""

    def loss(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        x = fr.mean(inputs["x"])
        return fr.add_n([fr.sum(fr.Variable(np.zeros(size), name=f"w{i}")) * x for i in range(VARIABLES)])

    with fr.Graph() as graph:
        inputs = {"x": fr.Spec("float64", (None,))}
        rate = fr.optim.SGD(1.0)
        trainer = fr.train.Replicated(loss, inputs, rate, replicas=replicas, policy=policy, servers=servers, **options)
    return graph, trainer


def ones() -> Iterator[dict[str, Array]]:
    """Batches without end."""
    while True:
        yield {"x": np.ones(4)}


class Receipts:
    """What reports have told so far. `violations` says what broke the promise that a batch ends once, in order."""

    def __init__(self) -> None:
        self.steps = 0
        self.kept: dict[int, int] = {}  # by replica, how many counted
        self.late: dict[int, int] = {}
        self.violations: list[str] = []
        self._newest: dict[int, int] = {}  # by replica, the last batch with a receipt

    def add(self, report: fr.train.StepReport) -> None:
        """Take a report in."""
        if self.steps and report.step != self.steps + 1:
            self.violations.append(f"step {report.step} was reported after step {self.steps}")
        self.steps = report.step
        for replica in report.kept:
            self.kept[replica] = self.kept.get(replica, 0) + 1
        for replica in report.late:
            self.late[replica] = self.late.get(replica, 0) + 1
        assert report.measured is not None
        for replica, batch, *_ in report.measured[0].receipts:
            if batch <= self._newest.get(replica, 0):
                self.violations.append(f"step {report.step}: batch {batch} of replica {replica} ended twice")
            self._newest[replica] = batch

    async def check(self, session: fr.Session, trainer: Any) -> None:
        """See that the variables on all servers are what the reports say, to the bit."""
        step, values = await session.run([trainer.step, trainer.variables])
        if step != self.steps:
            self.violations.append(f"the servers are at step {step}, {self.steps} were reported")
        for number, value in enumerate(values):
            if not (value == -float(step)).all():
                found = sorted(set(value.tolist()))[:4]
                self.violations.append(f"w{number} is {found} after {step} steps, each of which takes 1 off")
