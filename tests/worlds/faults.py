"""Training over a cluster of processes while something goes wrong: what is to come of it is known to the bit.

    scripts/faults                      # every scenario with some seeds: minutes
    scripts/faults --seeds 20 cuts      # one of them

Of each scenario the bits of the variables are those of an undisturbed run (all updates count), or the ledger that they
are is true (see `training_world.ledger`); and it ends, in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_plans import CLIENT
from link_world import Links, Weather, bad_links, token_of
from places import PYTHONPATH, file_of
from training_world import Settings, Trained, check_ledger, state, train

import flowrt as fr

if TYPE_CHECKING:
    from asyncio.subprocess import Process

SMALL = Settings("approach", replicas=3, servers=2, steps=60)
LARGE = Settings("approach", replicas=2, servers=2, size=6 << 20, steps=4)  # 24 MiB a variable
ROWS = Settings("rows", replicas=2, servers=2, steps=60)
FIRST = Settings("ledger", replicas=3, servers=2, keep=2, size=4096, steps=200)
HEAVY = Settings("approach", replicas=2, keep=1, size=4 << 20, steps=60)  # 32 MiB of variables
Scenario = Callable[[random.Random, Path], Awaitable[None]]
Array = Any


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


async def through(weather: Weather, settings: Settings, rng: random.Random, folder: Path) -> None:
    """Links that are slow, jitter, and carry odd pieces change no bit."""
    with by_tcp():
        async with _cluster(settings) as cluster, bad_links(cluster, folder, rng, weather) as links:
            await _assert_undisturbed(settings, await train(settings, links.spec))


async def cuts(
    settings: Settings, rng: random.Random, folder: Path, count: int = 20, weather: Weather | None = None
) -> None:
    """Connections between any two tasks are reset, at any moment."""

    def cut(links: Links) -> None:
        pair = rng.choice(links.pairs())
        asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.02), links.cut, *pair)

    await _troubled(cut, settings, rng, folder, count, weather)


async def holds(settings: Settings, rng: random.Random, folder: Path, count: int = 10) -> None:
    """Connections carry nothing for a while."""

    def hold(links: Links) -> None:
        links.hold(*rng.choice(links.pairs()))
        asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.3), links.let_go)

    await _troubled(hold, settings, rng, folder, count)


async def partitions(
    settings: Settings, rng: random.Random, folder: Path, count: int = 4, longest: float = 6.0
) -> None:
    """Tasks, and the client, are cut off for a while, one after another, on the way to all others."""
    tasks = [f"/job:worker/task:{rng.randrange(settings.replicas)}", "/job:ps/task:0", "/job:ps/task:1", CLIENT]
    rng.shuffle(tasks)

    def part(links: Links) -> None:
        links.part(task := tasks.pop())
        asyncio.get_running_loop().call_later(rng.uniform(0.0, longest), links.rejoin, task)

    await _troubled(part, settings, rng, folder, len(tasks))


async def stops(settings: Settings, rng: random.Random, folder: Path, count: int = 5, longest: float = 0.5) -> None:
    """Nodes are stopped for a while by SIGSTOP, and go on."""
    loop = asyncio.get_running_loop()
    async with _cluster(settings) as cluster:

        def stop(_: Any) -> None:
            process = rng.choice(list(cluster.processes.values()))
            process.send_signal(signal.SIGSTOP)
            loop.call_later(rng.uniform(0.0, longest), process.send_signal, signal.SIGCONT)

        await _assert_right(settings, await train(settings, cluster, _now_and_then(stop, settings, rng, count)))


async def killed_replica(rng: random.Random, folder: Path) -> None:
    """A replica's process is killed: the others go on, and what it had pushed counts whole or not at all."""
    settings, at = FIRST, rng.randrange(5, 50)
    async with _cluster(settings) as cluster:

        def kill(report: dict[str, Any]) -> None:
            if report["step"] == at:
                cluster.processes[f"/job:worker/task:{rng.randrange(settings.replicas)}"].kill()

        check_ledger(settings, await train(settings, cluster, kill))


async def killed_clients(rng: random.Random, folder: Path, rounds: int = 4, ahead: int = 0) -> None:
    """Client after client is killed at any moment, or asked to end: the next finds one version, and a true one."""
    settings = replace(FIRST, steps=10**6, size=1 << 14, ahead=ahead)
    async with _cluster(settings) as cluster:
        for number in range(rounds):
            mine = replace(settings, first=number * settings.size // rounds)
            async with client(mine, cluster, folder) as process:
                await anext(reports(process))
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                process.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
                await process.wait()
            check_ledger(settings, await state(settings, cluster))


async def stopped_client(rng: random.Random, folder: Path, ahead: int = 50, longest: float = 3.0) -> None:
    """While the client is stopped the nodes go on as far as it has allowed; then it has every report."""
    settings = replace(FIRST, steps=200, ahead=ahead, size=1 << 11)
    async with _cluster(settings) as cluster, client(settings, cluster, folder) as process:
        told = reports(process)
        for _ in range(20):
            await anext(told)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.0, longest))
        process.send_signal(signal.SIGCONT)
        steps = [report["step"] async for report in told]
        assert steps[:-1] == list(range(21, settings.steps + 1)), steps
        check_ledger(settings, await state(settings, cluster))


async def bounded_memory(rng: random.Random, folder: Path, settings: Settings, *, slow: bool) -> None:
    """A replica that reads nothing, or slowly, costs a server the versions on their way to it, and no more each step.

    The window is two versions of what a server holds, and 16 MiB.
    """
    undisturbed, before = 10, dict[str, int]()

    async with AsyncExitStack() as stack:
        if slow:
            stack.enter_context(by_tcp())
        cluster = await stack.enter_async_context(_cluster(settings))
        spec: Any = cluster
        if slow:
            links = await stack.enter_async_context(bad_links(cluster, folder, rng))
            spec = links.spec
        one = cluster.processes["/job:worker/task:1"]

        def tell(report: dict[str, Any]) -> None:
            if report["step"] == undisturbed:
                before.update(peaks(cluster))
                if slow:
                    links.throttle("/job:worker/task:1", Weather(rate=5e6))
                else:
                    one.send_signal(signal.SIGSTOP)
            elif report["step"] == settings.steps - 10:
                if slow:
                    links.throttle("/job:worker/task:1", links.weather)
                else:
                    one.send_signal(signal.SIGCONT)

        await train(settings, spec, tell)
        after, window = peaks(cluster), 2 * 4 * settings.size * 2 // settings.servers + (16 << 20)
        growth = {task: after[task] - before[task] for task in after}
        assert max(growth.values()) <= window, {task: f"{n >> 20} of {window >> 20} MiB" for task, n in growth.items()}


def peaks(cluster: fr.LocalCluster) -> dict[str, int]:
    """The most memory that each node has had, in bytes."""
    found = {}
    for task, process in cluster.processes.items():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        found[task] = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    return found


SCENARIOS: dict[str, Scenario] = {
    "slow": lambda rng, folder: through(Weather(0.002, 0.004, pieces=100), SMALL, rng, folder),
    "slow_large": lambda rng, folder: through(Weather(0.001, rate=100e6), LARGE, rng, folder),
    "slow_rows": lambda rng, folder: through(Weather(0.002, 0.004, pieces=100), ROWS, rng, folder),
    "cuts": lambda rng, folder: cuts(SMALL, rng, folder),
    "cuts_large": lambda rng, folder: cuts(LARGE, rng, folder, 3),
    "cuts_rows": lambda rng, folder: cuts(ROWS, rng, folder),
    "cuts_first": lambda rng, folder: cuts(FIRST, rng, folder),
    "holds": lambda rng, folder: holds(SMALL, rng, folder),
    "holds_first": lambda rng, folder: holds(FIRST, rng, folder),
    "partitions": lambda rng, folder: partitions(SMALL, rng, folder),
    "partitions_first": lambda rng, folder: partitions(FIRST, rng, folder),
    "stops": lambda rng, folder: stops(SMALL, rng, folder),
    "stops_first": lambda rng, folder: stops(FIRST, rng, folder),
    "killed_replica": killed_replica,
    "killed_clients": killed_clients,
    "killed_clients_ahead": lambda rng, folder: killed_clients(rng, folder, ahead=50),
    "stopped_client": stopped_client,
    "memory_of_a_stopped": lambda rng, folder: bounded_memory(rng, folder, HEAVY, slow=False),
    "memory_of_a_slow": lambda rng, folder: bounded_memory(rng, folder, HEAVY, slow=True),
}


# ── what it is done with ─────────────────────────────────────────────────────────────────────────────────────────────


def _cluster(settings: Settings) -> fr.LocalCluster:
    return fr.LocalCluster(ps=settings.servers, worker=settings.replicas, threads=1)


@contextmanager
def by_tcp() -> Iterator[None]:
    """Nodes that are started meanwhile, and sessions, talk by TCP, also on one host."""
    before = os.environ.get("FLOWRT_TRANSPORT")
    os.environ["FLOWRT_TRANSPORT"] = "tcp"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLOWRT_TRANSPORT"]
        else:
            os.environ["FLOWRT_TRANSPORT"] = before


async def _troubled(
    trouble: Callable[[Links], None],
    settings: Settings,
    rng: random.Random,
    folder: Path,
    count: int,
    weather: Weather | None = None,
) -> None:
    with by_tcp():
        async with _cluster(settings) as cluster, bad_links(cluster, folder, rng, weather) as links:
            tell = _now_and_then(lambda _: trouble(links), settings, rng, count)
            await _assert_right(settings, await train(settings, links.spec, tell))


def _now_and_then(
    trouble: Callable[[Any], None], settings: Settings, rng: random.Random, count: int
) -> Callable[[dict[str, Any]], None]:
    """What makes trouble at ``count`` of the reports."""
    at = set(rng.sample(range(1, settings.steps), count))
    return lambda report: trouble(report) if report["step"] in at else None


async def _assert_right(settings: Settings, trained: Trained) -> None:
    if settings.model == "ledger":
        check_ledger(settings, trained)
    else:
        await _assert_undisturbed(settings, trained)


async def _assert_undisturbed(settings: Settings, trained: Trained) -> None:
    alone = await train(settings)
    assert trained.step == alone.step == settings.steps
    assert trained.digest == alone.digest
    assert all(report["kept"] == tuple(range(settings.replicas)) for report in trained.reports)


@asynccontextmanager
async def client(settings: Settings, cluster: fr.LocalCluster, folder: Path) -> AsyncIterator[Process]:
    """A client in a process of its own."""
    told = replace(settings, jobs=cluster.spec.jobs, token_file=token_of(cluster, folder)).to_json()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, file_of("training_world"), told),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def reports(process: Process) -> AsyncIterator[dict[str, Any]]:
    """What a client's process prints."""
    assert process.stdout is not None
    async for line in process.stdout:
        yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=3, help="of each")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each run")
    options = parser.parse_args()
    print(f"{'scenario':22}{'seed':>6}{'seconds':>9}  outcome", flush=True)
    seeds = range(options.seed, options.seed + options.seeds)
    right = [_try(name, seed, options.limit) for name in options.scenarios for seed in seeds]
    return 0 if all(right) else 1


def _try(name: str, seed: int, limit: float) -> bool:
    """Run a scenario and print what came of it; whether all was right."""

    async def bounded(folder: str) -> None:
        async with asyncio.timeout(limit):
            await SCENARIOS[name](random.Random(seed), Path(folder))

    began, outcome = time.monotonic(), "right"
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(bounded(folder))
        except (Exception, BaseExceptionGroup) as error:
            outcome = f"{type(error).__name__}: {str(error)[:300]}"
    print(f"{name:22}{seed:6}{time.monotonic() - began:9.1f}  {outcome}", flush=True)
    return outcome == "right"


if __name__ == "__main__":
    sys.exit(main())
