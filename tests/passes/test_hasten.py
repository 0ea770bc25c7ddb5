"""Updates come as early as may be: the order stays one that the edges allow, and gradients are not kept to the end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from step_world import CPU, everywhere
from test_footprint import training

import flowrt as fr
from flowrt.passes import StepTerms, compile_step
from flowrt.passes.hasten import hasten
from flowrt.passes.order_state import order_state
from flowrt.passes.prune import prune
from flowrt.session.session import Options

WIDTH, LAYERS = 128, 10


async def test_gradients_of_a_deep_network_are_not_alive_together() -> None:
    graph, x, (loss, train, _) = training(WIDTH, LAYERS, stddev=0.1)
    parameters = 4 * WIDTH * WIDTH * LAYERS
    async with fr.Session(graph, options=Options(threads=1)) as session:
        told = await session.explain([loss, train], {x: (4, WIDTH)})
        assert told.peak_bytes is not None
        assert told.peak_bytes - told.tasks[0].held_bytes < parameters / 3


async def test_losses_are_the_same_whatever_the_order() -> None:
    graph, x, (loss, train, _) = training(WIDTH, LAYERS, stddev=0.1)
    found = []
    for optimize in (True, False):
        async with fr.Session(graph, options=Options(threads=1, optimize=optimize, seed=1)) as session:
            fed = {x: np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)}
            found.append([(await session.run([loss, train], fed))[0] for _ in range(4)])
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert found[0][3] < found[0][0]


def test_an_update_comes_right_behind_its_gradient() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        v, w = fr.Variable(np.ones(2, np.float32), name="v"), fr.Variable(np.ones(2, np.float32), name="w")
        both = fr.sqrt(x)
        first, second = fr.exp(both), fr.tanh(both)
        further = fr.log(first), fr.sin(second)
        updates = [v.assign(fr.negative(further[0])), w.assign(fr.square(further[1]))]
    made = compile_step(graph, [both], updates, [x], StepTerms(devices=[CPU], default=CPU, supports=everywhere))
    (plan,) = made.plans.values()
    found = [node.op for node in plan.nodes]
    assert found == ["sqrt", "exp", "log", "negative", "assign", "tanh", "sin", "square", "assign"]


def test_what_no_update_needs_alone_stays_in_its_order() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        v = fr.Variable(np.ones(2, np.float32), name="v")
        first, second = fr.exp(x), fr.tanh(x)
        fetches = [fr.negative(first), fr.square(second)]
        update = v.assign(fr.add(*fetches))
    hastened = hasten(order_state(prune(graph, fetches, [update], [x])))
    assert [node.op.name for node in hastened.nodes.values()] == ["exp", "tanh", "negative", "square", "add", "assign"]


@pytest.mark.parametrize("seed", [*range(20), 30, 62])  # in these, groups wait for others that have moved
def test_every_node_stays_behind_what_it_waits_for(seed: int) -> None:
    rng = random.Random(seed)
    with fr.Graph() as graph:
        variables = [fr.Variable(np.ones(2, np.float32), name=f"v{i}") for i in range(4)]
        values: list[Any] = [fr.constant(np.ones(2, np.float32)), *(v + 0.0 for v in variables)]
        writes: list[Any] = []
        for _ in range(rng.randrange(5, 40)):
            before = rng.sample(writes, min(len(writes), rng.randrange(2)))
            with fr.control_dependencies(before):
                if rng.random() < 0.3 and len(writes) < len(variables):
                    writes.append(variables[len(writes)].assign(rng.choice(values)))
                else:
                    values.append(fr.add(rng.choice(values), rng.choice(values)))
        fetches = rng.sample(values, 2)
    step = order_state(prune(graph, fetches, writes, []))
    hastened = hasten(step)
    assert dict(hastened.nodes) == step.nodes, f"seed {seed}"
    seen: set[int] = set()
    for i, node in hastened.nodes.items():
        assert seen.issuperset(node.before), f"seed {seed}: {node.where()}"
        seen.add(i)
