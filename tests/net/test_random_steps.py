"""Random graphs over two nodes, step after step: what comes of each, and what it leaves, is what the graph means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from step_world import CLIENT, CLUSTER, DEAD, RandomGraph, evaluate, everywhere, meaning
from test_faults import World, world

from flowrt.base.errors import DeadTensorError, PlacementError
from flowrt.base.spec import spec_of
from flowrt.net.node.started import Started
from flowrt.passes import Prediction, StepTerms, Transfer, compile_step
from flowrt.sched.executor import Executor
from flowrt.sched.regions.regions import resource_of

if TYPE_CHECKING:
    from flowrt.net.node.plans import ReadyPlan
    from flowrt.passes import Compiled

DEVICES = (CLUSTER[0], CLUSTER[2])  # one on each node
STEPS, GRAPHS = 6, 60
SLOW = Prediction(lambda op, specs, kind: 1.0, {}, 1e9, 1e-4)  # by which whatever is sent is worth sending early


async def _agree(made: World, seed: int, prediction: Prediction | None) -> bool:
    """Whether steps of one random graph compute what it means; False where there are none to run."""
    graph = RandomGraph(seed, DEVICES, nodes=4 + seed % 12)
    try:
        compiled = compile_step(
            graph.graph,
            graph.fetches,
            graph.targets,
            list(graph.feeds),
            StepTerms(
                devices=DEVICES,
                default=DEVICES[0],
                supports=everywhere,
                evaluate=evaluate,
                client=CLIENT,
                prediction=prediction,
            ),
        )
    except PlacementError:
        return False  # random colocation may contradict random devices
    assert compiled.client is not None
    feeds = [[(transfer.edge, transfer.task) for transfer in ways] for ways in compiled.client.feeds]
    fetches = [f if not isinstance(f, Transfer) else (f.edge, f.task) for f in compiled.client.fetches]
    step = await made.master.register(compiled.plans, feeds, fetches)
    state = graph.initial
    for host in made.hosts.values():
        host.reset(None)
    homes = _homes(compiled)
    for name, (task, resource) in homes.items():
        made.hosts[task].variables.begin(resource, state[name].copy())
    for number in range(STEPS):
        fed = {tensor: value if value.dtype == bool else value + number for tensor, value in graph.feeds.items()}
        wanted, state = meaning(graph.graph, graph.fetches, graph.targets, fed, state)
        made.number += 1
        values = [np.asarray(value) for value in fed.values()]
        try:
            came = await made.master.run(step, values, number=made.number, seed=0)
        except DeadTensorError:
            assert any(value is DEAD for value in wanted), f"seed {seed}"
        else:
            for one, other in zip(compiled.client.answers(came), wanted, strict=True):
                assert np.array_equal(one, other), f"seed {seed}"
        for name, (task, resource) in homes.items():
            held = made.hosts[task].variables.value(resource, spec_of(state[name]))
            assert np.array_equal(held, state[name]), f"seed {seed}: {name}"
    await made.master.unregister(step)
    return True


def _homes(compiled: Compiled) -> dict[str, tuple[str, tuple[str, str]]]:
    """The task of each variable, and its name there."""
    return {
        str(node.attrs["resource"]): (task, resource_of(node))
        for task, plan in compiled.plans.items()
        for node in plan.nodes
        if "resource" in node.attrs
    }


@pytest.mark.parametrize("prediction", [None, SLOW], ids=["as it comes", "early"])
@pytest.mark.parametrize("block", range(3))
async def test_steps_over_two_nodes_compute_what_the_graph_means(
    block: int, prediction: Prediction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(GRAPHS * block, GRAPHS * (block + 1))
    print("seeds", seeds)
    runs = {"all": 0, "between": 0, "machine": 0}
    begin, start = Executor.begin, Started.start

    def note_begin(*of: Any) -> Any:
        runs["machine"] += 1
        return begin(*of)

    def note_start(steps: Started, told: Any, ready: ReadyPlan, *of: Any) -> None:
        runs["all"] += 1
        runs["between"] += bool(ready.comes or ready.goes)
        start(steps, told, ready, *of)

    monkeypatch.setattr(Executor, "begin", note_begin)
    monkeypatch.setattr(Started, "start", note_start)
    async with world() as made:
        assert sum([await _agree(made, seed, prediction) for seed in seeds]) >= GRAPHS // 2
    print(runs)
    assert 0.2 < runs["machine"] / runs["all"] < 0.8  # all ways are tried
    assert runs["between"] > 0.1 * runs["all"]
