"""Injected delays strike real nodes: where they say, for as many versions as they say, and nobody else."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sim_loop import simulate

import flowrt as fr
from flowrt.sched.drivers.messages import Update
from flowrt.sched.drivers.striking import Slowness, size_of
from flowrt.sched.drivers.tasks import Tasks, sleep_until

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = {"x": fr.Spec("float32", (None, 3))}
LATE = 0.15
PLACES = ("compute", "push", "input", "frozen", "link", "server")  # each strikes in steps of its own
WINDOWS = {place: (4 + 10 * i, 7 + 10 * i) for i, place in enumerate(PLACES)}
STEPS = 10 * len(PLACES)


def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
    w = fr.Variable(np.zeros((3, 1), np.float32), name="w")
    return fr.mean(fr.square(inputs["x"] @ w))


def batches() -> Iterator[dict[str, np.ndarray]]:
    while True:
        yield {"x": np.ones((8, 3), np.float32)}


def struck(place: str) -> str:
    first, stop = WINDOWS[place]
    delay = "link:1e9,0.075" if place == "link" else f"{LATE} at {place}"  # there and back
    return f"{delay} during {first}:{stop}"


def check_saved(statistics: fr.train.Statistics, path: Path) -> None:
    """What the trainer saw can be simulated."""
    statistics.save(path)
    trace = fr.delays.Trace(path)
    assert trace.seconds.shape[1] == 2
    first, stop = WINDOWS["compute"]
    assert (trace.seconds[first:stop, 1] >= 0.9 * LATE).all()
    assert trace.seconds[first:stop, 0].min() < LATE / 2, "a step may be long for other causes, but not short if struck"
    simulated = fr.simulate(fr.train.AllOf(), trace, replicas=2, steps=STEPS)
    np.testing.assert_allclose(simulated.seconds, trace.seconds.max(axis=1)[np.arange(STEPS) % len(trace.seconds)])
    assert {"input", "pull", "compute", "push", "wait", "server"} <= set(pq.read_schema(path).names)


async def test_delays_strike_nodes_where_and_when_they_say(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=2)
    delays = {
        "/job:worker/task:1": " + ".join(struck(place) for place in PLACES if place != "server"),
        "/job:ps/task:0": struck("server"),
    }
    async with (
        fr.LocalCluster(ps=1, worker=2, delays=delays) as cluster,
        fr.Session(graph, cluster=cluster) as session,
    ):
        steps = trainer.steps(session, batches())
        seconds = [(await anext(steps)).seconds for _ in range(STEPS)]
        await steps.aclose()
    check_saved(trainer.statistics(), tmp_path / "seconds.parquet")
    print({place: np.round(seconds[10 * i : 10 * i + 10], 3).tolist() for i, place in enumerate(PLACES)})
    for i, place in enumerate(PLACES):
        tens = seconds[10 * i : 10 * i + 10]
        ahead = place in ("input", "link")  # read or sent ahead: late for other steps, or hidden while these are long
        assert sum(tens) >= (0.9 if ahead else 0.9 * 3) * LATE, place
        assert ahead or sum(second >= 0.9 * LATE for second in tens[4:]) >= 3, place
        assert statistics.median(tens) < LATE / 2, place


# ── in virtual time ──────────────────────────────────────────────────────────────────────────────────────────────────


def heard(delay: str, sizes: list[int], *, peer: str = "/job:ps/task:0", pause: float = 0.0) -> list[tuple[int, float]]:
    """Which of some messages are heard when, that come to a worker with ``delay`` one after another."""
    found: list[tuple[int, float]] = []

    async def work() -> None:
        loop, tasks = asyncio.get_running_loop(), Tasks()
        slowness = Slowness(fr.delays.parse(delay), "/job:worker/task:0", tasks, loop.time)
        for number, size in enumerate(sizes):
            message = Update(1, number, 0, 0, (np.zeros(size, np.uint8),), (), ())
            slowness.receive(peer, message, lambda number=number: found.append((number, loop.time())))
            await asyncio.sleep(pause)
        await asyncio.sleep(1000)
        await tasks.aclose()

    simulate(random.Random(1), work)
    return found


def test_a_slow_link_carries_so_many_bytes_a_second_in_order_and_later_by_its_latency() -> None:
    head = size_of(Update(1, 0, 0, 0, (), (), ()))
    sizes = [1000, 2000, 10, 5000]
    ends = np.cumsum([size + head for size in sizes]) / 1000 + 0.5
    found = heard("link:1000,0.5", sizes)
    assert [number for number, _ in found] == [0, 1, 2, 3]
    assert [when for _, when in found] == pytest.approx(ends, abs=1e-3)


def test_a_slow_link_does_not_slow_a_node_to_itself_nor_steps_that_it_does_not_strike() -> None:
    assert heard("link:1,9", [10, 10], peer="/job:worker/task:0") == [(0, 0.0), (1, pytest.approx(0, abs=1e-3))]
    found = heard("link:1000000,3 during 1:2", [10, 10, 10], pause=10.0)
    assert [when for _, when in found] == pytest.approx([0, 13, 20], abs=1e-2)


def test_messages_keep_their_order_where_a_link_is_well_again() -> None:
    found = heard("link:1000000,50 during 0:1", [10, 10, 10], pause=10.0)
    assert [number for number, _ in found] == [0, 1, 2]
    assert [when for _, when in found] == pytest.approx([50, 50, 50], abs=1e-2)


def test_nodes_with_the_same_delay_draw_the_same_common_factor() -> None:
    seconds: list[list[float]] = []

    async def work() -> None:
        delay = fr.delays.parse("correlated:(lognormal:1,0.5),(0.1) + exponential:0.01 at push")
        clock = asyncio.get_running_loop().time
        slowness = [Slowness(delay, f"/job:worker/task:{i}", Tasks(), clock) for i in range(3)]
        nodes = [each.of(seed=5, number=i, count=3) for i, each in enumerate(slowness)]
        seconds.extend([node.seconds(version, "compute") for node in nodes] for version in range(20))
        pushed = [[node.seconds(version, "push") for node in nodes] for version in range(20)]
        assert len(np.unique(pushed)) == 60

    simulate(random.Random(1), work)
    factors = np.array(seconds)
    assert (factors == factors[:, :1]).all()
    assert len(np.unique(factors)) == 20


def test_a_delay_is_never_shorter_than_it_says_though_timers_are_early() -> None:
    seconds: list[float] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await sleep_until(0.99 * began + 1.0, lambda: 0.99 * loop.time())
        seconds.append(0.99 * (loop.time() - began))

    simulate(random.Random(1), work)
    assert seconds == [pytest.approx(1.0)]
