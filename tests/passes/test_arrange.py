"""Devices by prediction: what of a graph is weighed, and that constraints, rules and kernels go before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from step_world import everywhere

import flowrt as fr
from flowrt.base.device import Device
from flowrt.base.errors import PlacementError
from flowrt.passes import Arrangement, Prediction, arranged
from flowrt.passes.place import place
from flowrt.passes.prune import prune
from flowrt.sched.regions.cost import predict

WORKERS = tuple(Device("worker", task, "cpu", 0) for task in range(2))
GPU = Device("worker", 1, "cuda", 0)


def arrangement(
    graph: fr.Graph,
    *,
    devices: Sequence[Device] = WORKERS,
    measured: dict[str, float] | None = None,
    bandwidth: float = 1e9,
    supports: Callable[..., bool] = everywhere,
    rules: dict[str, str] | None = None,
) -> Arrangement:
    prediction = Prediction(lambda op, specs, kind: predict(op, specs), measured or {}, bandwidth, 2e-4)
    return arranged(
        graph, devices=devices, default=devices[0], supports=supports, rules=rules or {}, prediction=prediction
    )


def placed(graph: fr.Graph, fetches: Sequence[Any], targets: Sequence[Any], found: Arrangement, **how: Any) -> Any:
    step = prune(graph, fetches, targets, [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"])
    settings = {"devices": WORKERS, "default": WORKERS[0], "supports": everywhere, "rules": {}} | how
    where = place(step, wishes=found.devices, **settings)
    return {step.nodes[i].name: device for i, device in where.items()}


def towers(size: int, widths: Sequence[float] = (1, 1)) -> tuple[fr.Graph, Any, Any]:
    """A graph of towers beside each other that are joined at their ends, its loss and its training operation."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (64, size), name="x")
        ends = []
        for number, width in enumerate(widths):
            h = x
            for layer in range(3):
                shape = (size, int(size * width)) if layer == 0 else (int(size * width),) * 2
                w = fr.Variable(fr.random.normal(shape, seed=layer), name=f"tower{number}/w{layer}")
                h = fr.matmul(h, w, name=f"tower{number}/product{layer}")
            ends.append(fr.sum(h))
        loss = fr.add_n(ends)
        train = fr.optim.Momentum(0.1, 0.9).minimize(loss)
    return graph, loss, train


def test_towers_part_with_all_that_is_theirs() -> None:
    graph, loss, train = towers(1024)
    found = arrangement(graph, supports=lambda op, dtypes, kind: kind == "cpu")
    assert found.seconds < 0.6 * found.alone
    assert set(arrangement(graph, supports=lambda op, dtypes, kind: False).devices.values()) == {WORKERS[0]}
    where = placed(graph, [loss], [train], found)
    homes = [{where[name] for name in where if f"tower{n}/" in name} for n in range(2)]
    assert homes in ([{WORKERS[0]}, {WORKERS[1]}], [{WORKERS[1]}, {WORKERS[0]}])


def test_what_is_small_stays_on_the_first_device() -> None:
    graph, loss, train = towers(16)
    found = arrangement(graph)
    assert set(found.devices.values()) == {WORKERS[0]}
    assert found.seconds == found.alone
    assert set(placed(graph, [loss], [train], found).values()) == {WORKERS[0]}


def test_a_slow_network_keeps_together_what_hands_much_over() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (512, 512), name="x")
        halves = [x @ fr.Variable(fr.random.normal((512, 512), seed=n), name=f"w{n}") for n in range(2)]
        fr.add(*halves)
    assert len(set(arrangement(graph, bandwidth=1e10).devices.values())) == 2
    assert len(set(arrangement(graph, bandwidth=1e7).devices.values())) == 1


def test_what_was_measured_goes_before_what_is_guessed() -> None:
    graph, _, _ = towers(16)
    slow = arrangement(graph, measured={"tower?/product*": 0.01, "gradients/*": 0.0})
    assert slow.alone >= 6 * 0.01
    assert slow.seconds < 0.6 * slow.alone
    assert len(set(slow.devices.values())) == 2


def test_what_starts_variables_has_no_say() -> None:
    with fr.Graph() as graph:
        many = [fr.random.normal((2048, 2048), seed=n) @ np.ones((2048, 64), "float32") for n in range(2)]
        table = fr.Variable(fr.add_n(many), name="table")
        fr.sum(table)
    found = arrangement(graph)
    assert found.alone < 1e-3
    assert set(found.devices.values()) == {WORKERS[0]}


def test_constraints_rules_and_kernels_go_before() -> None:
    graph, loss, train = towers(1024)
    found = arrangement(graph, rules={"tower0/*": "/job:worker/task:1"})
    where = placed(graph, [loss], [train], found, rules={"tower0/*": "/job:worker/task:1"})
    assert {where[name] for name in where if name.startswith("tower0/")} == {WORKERS[1]}
    assert {where[name] for name in where if name.startswith("tower1/product")} == {WORKERS[0]}

    def no_products(op: str, dtypes: Any, kind: str) -> bool:
        return kind == "cpu" or op != "matmul"

    devices = (*WORKERS, GPU)
    found = arrangement(graph, devices=devices, supports=no_products)
    where = placed(graph, [loss], [train], found, devices=devices, supports=no_products)
    assert GPU not in {where[name] for name in where if "product" in name}


def test_a_device_that_is_not_there_is_named() -> None:
    with fr.Graph() as graph, fr.device("/job:worker/task:7"):
        fr.add(1.0, 2.0)
    with pytest.raises(PlacementError, match="there is no device /job:worker/task:7"):
        arrangement(graph)


def test_loops_count_as_often_as_they_come_and_parts_of_tables_stay_spread() -> None:
    with fr.Graph() as graph:
        rows = fr.placeholder("float32", (400, 64), name="rows")
        for number in range(2):
            w = fr.Variable(fr.random.normal((64, 64), seed=number), name=f"w{number}")
            fr.scan(lambda h, row, w=w: (fr.tanh(fr.reshape(h @ w, (1, 64)) + row), h[0, 0]), fr.zeros((1, 64)), rows)
        long = arrangement(graph)
    with fr.Graph() as graph:
        row = fr.placeholder("float32", (4, 64), name="rows")
        w = fr.Variable(fr.random.normal((64, 64), seed=0), name="w0")
        fr.scan(lambda h, row: (fr.tanh(fr.reshape(h @ w, (1, 64)) + row), h[0, 0]), fr.zeros((1, 64)), row)
        short = arrangement(graph)
    assert long.alone > 50 * short.alone
    assert len(set(long.devices.values())) == 2


def test_unknown_sizes_and_an_empty_graph_are_fine() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", None, name="x")
        fr.sum(fr.placeholder("float32", (None, 4)) @ np.ones((4, 4), "float32")) + fr.sum(x)
    assert set(arrangement(graph).devices.values()) == {WORKERS[0]}
    assert arrangement(fr.Graph()).seconds == 0


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0}, {"bandwidth": -1.0}, {"bandwidth": "1GB"}, {"latency": float("nan")}, {"latency": None}]
)
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlacementError, match=rf"test_arrange.py:\d+: {next(iter(wrong))} of fr.placement.Auto"):
        fr.placement.Auto(**wrong)
