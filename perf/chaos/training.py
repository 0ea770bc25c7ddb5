"""Small training whose right result is known: what counts moves every number of two variables by one, so each of them
is minus the step, on whichever server it lies. A third one is moved by what is in the batches, so it tells which were
used, and in which order, to whoever trains the same history again. What reports tell is checked one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

import flowrt as fr

VARIABLES = 2
DIFFERENT = 1000  # batches, which then come again
Array = np.ndarray[Any, Any]


def build(replicas: int, policy: Any, servers: int = 1, size: int = 64, **options: Any) -> tuple[fr.Graph, Any]:
    """A graph and a trainer; batches are `ones`."""

    def loss(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
        x, y = fr.mean(inputs["x"]), fr.mean(inputs["y"])
        told = fr.Variable(np.linspace(0.0, 1.0, size), name="told")
        counted = [fr.sum(fr.Variable(np.zeros(size), name=f"w{i}")) * x for i in range(VARIABLES)]
        return fr.add_n([*counted, fr.sum(fr.cos(told)) * y])

    with fr.Graph() as graph:
        inputs = {name: fr.Spec("float64", (None,)) for name in ("x", "y")}
        rate = fr.optim.SGD(1.0)
        trainer = fr.train.Replicated(loss, inputs, rate, replicas=replicas, policy=policy, servers=servers, **options)
    return graph, trainer


def batches(first: int = 0) -> Iterator[dict[str, Array]]:
    """Batches without end, from one on; each is told by its number alone."""
    for number in count(first):
        yield {"x": np.ones(4), "y": _numbers(number % DIFFERENT)}


def source() -> fr.data.Source:
    """The same batches, which workers read themselves."""
    told = np.concatenate([_numbers(number) for number in range(DIFFERENT)])
    return fr.data.arrays({"x": np.ones(len(told)), "y": told}, batch=4, shuffle=False)


def _numbers(number: int) -> Array:
    return np.random.default_rng(number).normal(size=4)


async def state(session: fr.Session, trainer: Any) -> tuple[int, dict[str, Array]]:
    """The step, and the variables by name."""
    step, values = await session.run([trainer.step, trainer.variables])
    return int(step), dict(zip([v.resource.name for v in trainer.variables], map(np.asarray, values), strict=True))


class Receipts:
    """What reports have told so far. `violations` says what broke the promise that a batch ends once, in order."""

    def __init__(self) -> None:
        self.steps = 0
        self.kept: dict[int, int] = {}  # by replica, how many counted
        self.late: dict[int, int] = {}
        self.violations: list[str] = []
        self._run = 0
        self._newest: dict[int, int] = {}  # by replica, the last batch of the run with a receipt

    def add(self, report: fr.train.StepReport) -> None:
        """Take a report in."""
        if report.rolled_back is not None:
            self.steps = report.rolled_back.step
        if self.steps and report.step != self.steps + 1:
            self.violations.append(f"step {report.step} was reported after step {self.steps}")
        self.steps = report.step
        for replica in report.kept:
            self.kept[replica] = self.kept.get(replica, 0) + 1
        for replica in report.late:
            self.late[replica] = self.late.get(replica, 0) + 1
        assert report.measured is not None
        if report.measured[0].run != self._run:
            self._run, self._newest = report.measured[0].run, {}
        for replica, batch, *_ in report.measured[0].receipts:
            if batch <= self._newest.get(replica, 0):
                self.violations.append(f"step {report.step}: batch {batch} of replica {replica} ended twice")
            self._newest[replica] = batch

    async def check(self, session: fr.Session, trainer: Any) -> None:
        """See that the variables on all servers are what the reports say, to the bit."""
        step, values = await state(session, trainer)
        if step != self.steps:
            self.violations.append(f"the servers are at step {step}, {self.steps} were reported")
        for name in [f"w{i}" for i in range(VARIABLES)]:
            if not (values[name] == -float(step)).all():
                found = sorted(set(values[name].tolist()))[:4]
                self.violations.append(f"{name} is {found} after {step} steps, each of which takes 1 off")
