"""What a node costs: 10,000 scalar adds as a chain, as 100 parallel chains and as a fan-in, every node as written.

Three figures per shape, in nodes per second: the step machine alone (its decisions, frees and deadness counted, no
kernels), a whole awaited step that the machine runs node by node, and a whole awaited step that runs as a tape. Results
are checked.

    python perf/dispatch.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import machine as this_machine
import numpy as np

import flowrt as fr
from flowrt.sched.machine import StepMachine
from flowrt.sched.topology import Topology

SHAPES = ("chain", "parallel", "fan")
CHAINS = 100


def build(shape: str, nodes: int) -> tuple[fr.Graph, fr.Tensor, fr.Tensor, float]:
    """(graph, feed, fetch, the fetch for a feed of 1.0); about ``nodes`` adds."""
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (), name="x")
        one = fr.constant(1.0)
        if shape == "chain":
            y = chain(x, one, nodes)
            expected = 1.0 + nodes
        elif shape == "parallel":
            length = nodes // CHAINS
            y = fr.add_n([chain(x, one, length) for _ in range(CHAINS)])
            expected = CHAINS * (1.0 + length)
        else:
            y = fr.add_n([fr.add(x, one) for _ in range(nodes)])
            expected = 2.0 * nodes
    return graph, x, y, expected


def chain(x: fr.Tensor, one: fr.Tensor, length: int) -> fr.Tensor:
    for _ in range(length):
        x = fr.add(x, one)
    return x


def topology(shape: str, nodes: int) -> Topology:
    """The same shape for the machine alone; value 0 is the feed, node i makes value i + 1."""
    length = nodes // CHAINS
    if shape == "chain":
        inputs = [(i,) for i in range(nodes)]
    elif shape == "parallel":
        inputs = [(0 if i % length == 0 else i,) for i in range(nodes)]
    else:
        inputs = [(0,)] * nodes
    last = [i for i in range(1, nodes + 1) if shape == "fan" or (i % length == 0 and shape == "parallel") or i == nodes]
    inputs.append(tuple(last))
    return Topology([0] * len(inputs), inputs, [1] * len(inputs), [()] * len(inputs), 1, frozenset([len(inputs)]))


def drive(shared: Topology) -> int:
    """One run of the machine with nothing behind it; answers how many values it freed."""
    machine = StepMachine(shared)
    said = machine.start()
    ready, freed = list(said.launch), len(said.free)
    while ready:
        said = machine.complete(ready.pop())
        ready += said.launch
        freed += len(said.free)
    assert machine.done
    assert not machine.dead(shared.values - 1)
    return freed


def rates(seconds: list[float], nodes: int) -> dict[str, float]:
    millions = sorted(nodes / s / 1e6 for s in seconds)
    return {"median": statistics.median(millions), "least": millions[0], "most": millions[-1]}


async def timed(call: Callable[[], Awaitable[object]], repeat: int) -> list[float]:
    await call()
    out = []
    for _ in range(repeat):
        begin = time.perf_counter()
        await call()
        out.append(time.perf_counter() - begin)
    return out


async def measure_step(shape: str, nodes: int, repeat: int, tapes: bool) -> dict[str, float]:
    graph, x, y, expected = build(shape, nodes)
    async with fr.Session(graph, options=fr.Options(optimize=False, tapes=tapes)) as session:
        step = session.compile(y, [x])
        one = np.array(1.0, np.float32)
        assert float(await step(one)) == expected
        return rates(await timed(lambda: step(one), repeat), nodes)


async def measure_machine(shape: str, nodes: int, repeat: int) -> dict[str, float]:
    shared = topology(shape, nodes)
    assert drive(shared) == shared.values - 1

    async def call() -> None:
        drive(shared)

    return rates(await timed(call, repeat), nodes)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
    arguments = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        results[shape] = {
            "machine alone": await measure_machine(shape, arguments.nodes, arguments.repeat),
            "step, machine": await measure_step(shape, arguments.nodes, max(3, arguments.repeat // 3), tapes=False),
            "step, tape": await measure_step(shape, arguments.nodes, arguments.repeat, tapes=True),
        }
    if arguments.json:
        print(json.dumps({"machine": this_machine.describe(), "nodes": arguments.nodes, "M nodes/s": results}))
        return
    print(this_machine.describe())
    print(f"{arguments.nodes} scalar adds, million nodes per second: median (least to most)")
    for shape, row in results.items():
        for what, r in row.items():
            print(f"{shape:9} {what:14} {r['median']:8.2f}  ({r['least']:.2f} to {r['most']:.2f})")


if __name__ == "__main__":
    asyncio.run(main())
