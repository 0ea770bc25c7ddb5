"""How long a node's event loop is held up while it makes a large plan ready, and while it lets one go.

A node as `python -m flowrt.worker` starts it, with a clock that looks every half millisecond on its event loop how
late it is, and writes that where this process reads it.
A master in this process registers plans with it and takes them back, round after round: a chain of as many operations
as a message may hold (the limits of `flowrt.base.codec`), one of 60,000, as many constants as a message may hold
arrays, and one that is refused at its last node. Beside them what the machine itself does to such a clock: of an idle
node, and while another thread of it counts in Python, which gives the interpreter up every five milliseconds.

    python perf/decoding.py                  # five rounds of each: a minute
    python perf/decoding.py chain refused --rounds 20
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from flowrt import worker
from flowrt.base import codec
from flowrt.base.errors import FlowrtError, SpecError
from flowrt.base.plan import Plan, PlanFeed, PlanNode, plan_to_parts
from flowrt.base.spec import Spec
from flowrt.cluster.node_process import ready
from flowrt.net.door.tokens import new_token, save_token
from flowrt.net.master.master import Master
from perf.machine import describe

Figures: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

TASK, TOKEN = "/job:worker/task:0", "token"
TICK = 0.0005  # seconds between two looks at the clock
ASKED = 0.010
SPEC = Spec("float32", (16,))
PAUSE = 0.5  # seconds of the floors, and in which a lane frees what it frees
WORST, COUNT = 0, 1  # places in what both processes see


def node(folder: Path) -> int:
    """A node as ``python -m flowrt.worker`` is, with a clock beside it."""
    serve, told = worker.serve, figures(folder)

    async def serve_and_tick(*settings: Any) -> None:
        ticking = asyncio.ensure_future(tick(told))
        await serve(*settings)
        ticking.cancel()

    worker.serve = serve_and_tick
    return worker.main(["--job=worker", "--task=0", "--bind=127.0.0.1:0", f"--token-file={folder / TOKEN}"])


async def tick(told: Figures) -> None:
    """Look at the clock for ever."""
    last = time.perf_counter()
    while True:
        await asyncio.sleep(TICK)
        now = time.perf_counter()
        told[WORST] = max(told[WORST], now - last - TICK)
        last = now
        if told[COUNT]:
            told[COUNT] = 0.0
            threading.Thread(target=_count).start()


def _count() -> None:
    end = time.perf_counter() + PAUSE
    while time.perf_counter() < end:
        pass


def figures(folder: Path) -> Figures:
    """What both processes see: the longest wait so far, and whether a thread is to count."""
    return np.memmap(folder / "figures", np.float64, "r+", shape=(2,))


# ── plans ──


def chain(nodes: int) -> Plan:
    """So many operations, each on what the one before made."""
    made = [PlanNode("tanh", f"tanh_{k}", (k,), (SPEC,), {}, site=f"train.py:{k}") for k in range(nodes)]
    return Plan(TASK, tuple(made), (PlanFeed("x", SPEC, "train.py:1"),), (nodes,))


def constants(nodes: int) -> Plan:
    """So many constants."""
    value = np.zeros(4, np.float32)
    made = [PlanNode("constant", f"c_{k}", (), (Spec("float32", (4,)),), {"value": value}) for k in range(nodes)]
    return Plan(TASK, tuple(made), (), (nodes - 1,))


def refused(nodes: int) -> Plan:
    """A chain whose last operation nobody knows."""
    plan = chain(nodes)
    return replace(plan, nodes=(*plan.nodes[:-1], replace(plan.nodes[-1], op="nobody_knows")))


def largest(make: Callable[[int], Plan], most: int) -> Plan:
    """The plan of as many nodes as one message may hold, to a hundredth."""
    few = 1000
    while most - few > most // 100:
        middle = (few + most) // 2
        try:
            codec.pack_parts(plan_to_parts(make(middle)))
            few = middle
        except SpecError:
            most = middle
    return make(few)


PLANS: dict[str, Callable[[], Plan]] = {
    "chain-60000": lambda: chain(60_000),
    "chain": lambda: largest(chain, 400_000),
    "constants": lambda: largest(constants, codec.PLAN.arrays),
    "refused": lambda: refused(60_000),
}


# ── measuring ──


@asynccontextmanager
async def driven() -> AsyncIterator[tuple[Figures, Master]]:
    """What a node tells of its loop, and a master of it."""
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), new_token()
        save_token(folder / TOKEN, token)
        np.zeros(2).tofile(folder / "figures")
        command = [sys.executable, __file__, "--node", name]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            host, _, port = (await ready(TASK, process)).rpartition(":")
            async with Master({TASK: (host, int(port))}, token) as master:
                await asyncio.sleep(PAUSE)  # in which it ends what it began with
                yield figures(folder), master
        finally:
            process.terminate()
            await process.wait()


async def worst(told: Figures, work: Awaitable[Any]) -> float:
    """The longest wait on the node's loop while ``work`` is done."""
    told[WORST] = 0.0
    await work
    return float(told[WORST])


def row(what: str, waits: list[float]) -> str:
    over = sum(wait > ASKED for wait in waits)
    middle, most = statistics.median(waits), max(waits)
    return f"| {what} | {1e3 * middle:.1f} ms | {1e3 * most:.1f} ms | {over} of {len(waits)} |"


async def measure(name: str, rounds: int) -> None:
    plan = PLANS[name]()
    ready: list[float] = []
    gone: list[float] = []
    async with driven() as (told, master):

        async def register() -> None:
            with suppress(FlowrtError):
                registered.append(await master.register({TASK: plan}, [], []))

        async def let_go() -> None:
            for one in registered:
                await master.unregister(one)
            registered.clear()
            await master.statistics()
            await asyncio.sleep(PAUSE)

        for _ in range(rounds):
            registered: list[Any] = []
            ready.append(await worst(told, register()))
            gone.append(await worst(told, let_go()))
    print(row(f"{name}: {len(plan.nodes):,} operations made ready", ready))
    print(row(f"{name}: let go", gone), flush=True)


async def floors(rounds: int) -> None:
    """What such a clock shows of a node that does nothing, and beside a thread that never waits."""
    idle, busy = [], []
    async with driven() as (told, _):
        for _ in range(rounds):
            idle.append(await worst(told, asyncio.sleep(PAUSE)))
            told[COUNT] = 1.0
            busy.append(await worst(told, asyncio.sleep(PAUSE)))
    print(row("nothing", idle))
    print(row("another thread counts", busy), flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=", ".join(PLANS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.node is not None:
        raise SystemExit(node(given.node))
    print(f"{describe()}.\n")
    print("| what the node does | longest wait, median | most | rounds over 10 ms |\n|---|---|---|---|")
    asyncio.run(floors(given.rounds))
    for name in given.plans:
        asyncio.run(measure(name, given.rounds))


if __name__ == "__main__":
    main()
