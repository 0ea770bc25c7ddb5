"""Replicated training while something goes wrong every now and then, by a schedule that follows from a seed.

    scripts/chaos                                                  # three minutes of everything
    scripts/chaos --minutes 10 --replicas 32 --faults kill --every 29
    scripts/chaos --faults kill server client --every 2 --seed 7
    scripts/chaos --faults client --detached                       # training that goes on without a client

Faults: `kill` (SIGKILL of a worker, which is started again), `stop` (SIGSTOP of a worker for a while), `net` (a worker
cut off for a while, both ways or one way, in namespaces of the network: Linux, root), `server` (SIGKILL of a parameter
server, which is started again) and `client` (SIGKILL of the client; another of the same session name goes on).

Printed: steps a second beside those of the same cluster undisturbed, how long after each fault who was struck counted
again, and every violation: a batch that ended twice, a step that was lost, variables that are not, to the bit and on
every server, what the reports say, or not what they come to where the ledger is trained again. Workers sleep for the
time of a step, so that cores are not what is measured. Where servers die, and there is one copy of all, the client has
checkpoints to go back to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(HERE)]

import network  # noqa: E402
import records  # noqa: E402
import replaying  # noqa: E402
from client import Settings  # noqa: E402
from nodes import Cluster  # noqa: E402
from observing import Observed, Report  # noqa: E402

import flowrt as fr  # noqa: E402
from flowrt.net.door.tokens import save_token  # noqa: E402

STOPPED, CUT = (1.0, 20.0), (2.0, 12.0)  # seconds for which a worker is, at least and at most
STALL = 1.0  # seconds for which a server's death stops training, at most, where another one has all it had
SPEED, EVERY = 0.985, 20.0  # of the undisturbed, where faults are so many seconds apart
PATIENCE = 60.0  # seconds in which who was struck has to count again


class Chaos:
    """Faults that strike a cluster and its client. ``struck`` has what each was, and came to."""

    def __init__(self, options: argparse.Namespace, net: network.Network | None, folder: Path) -> None:
        self.options, self.net, self.folder = options, net, folder
        self.rng = random.Random(options.seed)
        self.struck: list[dict[str, Any]] = []
        self.observed = Observed(detached=options.detached)
        self._busy: set[str] = set()  # who was struck, and does not count again yet
        self._client: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> dict[str, Any]:
        """Train, calm, with faults, and calm again; answers what was seen."""
        options = self.options
        workers = {f"/job:worker/task:{r}": options.step for r in range(options.replicas)}
        cluster = Cluster(
            self.net,
            ps=options.servers,
            worker=options.replicas,
            threads=1,
            restart=True,
            delays=workers,
            startup=60.0 + options.replicas,
        )
        async with cluster as self.cluster:
            self._settings = self._make_settings()
            save_token(self._settings.token_file, self.cluster.token)
            await self._start_client()
            try:
                await self.observed.until(lambda report: report["step"] >= 20, PATIENCE)
                await asyncio.sleep(options.calm)
                begin = time.monotonic()
                await self._strike_for(60 * options.minutes)
                end = time.monotonic()
                await asyncio.sleep(options.calm)
                last = time.monotonic()
            finally:
                await self._end_client()
        await self._replay()
        calm = self.observed.rate([(begin - options.calm, begin), (last - options.calm, last)])
        return {
            "calm": calm,
            "disturbed": self.observed.rate([(begin, end)]),
            "struck": self.struck,
            "ended": self._read_ledger(),
        }

    def _read_ledger(self) -> dict[str, int]:
        """How the batches ended; what does not fit is a violation."""
        ledger, observed = fr.Ledger(self.folder / "ledger"), self.observed
        observed.violations += ledger.violations
        counts = {state: ledger.count(state) for state in ("kept", "late", "refused", "lost", "unused", "handed")}
        if counts["handed"]:
            observed.violations.append(f"{counts['handed']} batches are accounted for nowhere")
        if counts["kept"] != self.options.keep * observed.steps:
            observed.violations.append(f"{counts['kept']} batches made {observed.steps} steps of {self.options.keep}")
        if ledger.version != observed.steps:
            observed.violations.append(f"the ledger is at {ledger.version}, {observed.steps} steps were reported")
        return counts

    async def _replay(self) -> None:
        """Have the ledger trained again on nodes of its own."""
        options = self.options
        tasks = {"ps": options.servers, "worker": options.replicas}
        async with fr.LocalCluster(**tasks, threads=1, startup=60.0 + options.replicas) as cluster:
            self.observed.violations += await replaying.differences(self._settings, cluster)

    # ── the client ──

    def _make_settings(self) -> Settings:
        options, folder = self.options, self.folder
        alone = "server" in options.faults and options.trainer.get("copies", 1) == 1
        return Settings(
            self.cluster.spec.jobs,
            str(folder / "token"),
            options.replicas,
            options.keep,
            options.servers,
            str(folder / "ledger"),
            str(folder / "final.npz"),
            str(folder / "checkpoints") if alone else "",
            options.detached,
            self.cluster.tls,
            options.trainer,
        )

    async def _start_client(self) -> None:
        self._client = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "client.py"), self._settings.to_json()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            env={**os.environ, "FLOWRT_CHAOS_LOG": self.options.log_level},
        )
        self._reading = asyncio.create_task(self.observed.read(self._client))

    async def _end_client(self) -> None:
        """Ask it to end, and hear what it found."""
        assert self._client is not None
        assert self._reading is not None
        if self._client.stdin is not None:
            self._client.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE):
                await self._client.wait()
                await self._reading
        finally:
            if self._client.returncode is None:
                self._client.kill()
                await self._client.wait()
        if self._client.returncode:
            self.observed.violations.append(f"the client ended with {self._client.returncode}")

    # ── faults ──

    async def _strike_for(self, seconds: float) -> None:
        """Strike one after another, until all that were struck count again."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self.options.every * self.rng.uniform(0.5, 1.5)))
                if time.monotonic() < until:
                    group.create_task(self._strike())

    async def _strike(self) -> None:
        fault = self.rng.choice(self.options.faults)
        job = {"server": "ps", "client": "client"}.get(fault, "worker")
        whom = [network.CLIENT] if job == "client" else [t for t in self.cluster.processes if f":{job}/" in t]
        free = [task for task in whom if task not in self._busy]
        struck, most = len(whom) - len(free), self.options.replicas - self.options.keep if job == "worker" else 1
        if struck >= most:  # so that enough are left
            return
        task = self.rng.choice(free)
        self._busy.add(task)
        try:
            began, before = time.monotonic(), self.observed.newest
            back = await FAULTS[fault](self, task)
            counted = await self._counts_again(task, back, before)
        except TimeoutError:
            self.observed.violations.append(f"{task} did not count again within {PATIENCE:g} s after {fault}")
            counted = float("inf")
        else:
            self.struck.append(
                {
                    "fault": fault,
                    "task": task,
                    "away": round(back - began, 2),
                    "counted after": round(counted - self._able(task, back), 2),
                    "stall": round(self.observed.longest(began, counted), 2),
                }
            )
            print(json.dumps(self.struck[-1]), flush=True)
        finally:
            self._busy.discard(task)

    def _able(self, task: str, back: float) -> float:
        """When a worker could count that was back then: not while there is no client."""
        return max(back, self.observed.resumed) if ":worker/" in task else back

    async def _counts_again(self, task: str, back: float, before: Report) -> float:
        """When a worker's update counts, a server has all it should, or a step is made, after it was back."""
        if ":worker/" in task:
            sign = partial(_kept, int(task.rpartition(":")[2]))
        elif ":ps/" in task:
            sign = partial(_whole, task, before)
        else:
            sign = bool
        report = await self.observed.until(lambda report: report["at"] > back and sign(report), PATIENCE)
        return float(report["at"])

    async def _kill(self, task: str) -> float:
        """Kill a process; it is back when another one runs in its place."""
        started = self.cluster.started_again(task)
        self.cluster.processes[task].kill()
        async with asyncio.timeout(PATIENCE):
            return await started

    async def _stop(self, task: str) -> float:
        process = self.cluster.processes[task]
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.uniform(*STOPPED))
        finally:
            process.send_signal(signal.SIGCONT)
        return time.monotonic()

    async def _cut_off(self, task: str) -> float:
        assert self.net is not None
        self.net.cut(task, self.rng.choice([network.BOTH, network.TO, network.FROM]))
        try:
            await asyncio.sleep(self.rng.uniform(*CUT))
        finally:
            self.net.heal(task)
        return time.monotonic()

    async def _kill_client(self, task: str) -> float:
        """Kill the client, and start another one; it is back when that runs."""
        assert self._client is not None
        assert self._reading is not None
        if self._client.returncode is not None:
            self.observed.violations.append(f"the client ended by itself with {self._client.returncode}")
        else:
            self._client.kill()
        await self._client.wait()
        await self._reading
        self.observed.again()
        await self._start_client()
        return time.monotonic()


def _kept(replica: int, report: Report) -> bool:
    return replica in report["kept"]


def _whole(task: str, before: Report, report: Report) -> bool:
    """Whether a server that was lost after a report has again what it should have."""
    lost = report["losses"].get(task, 0) > before["losses"].get(task, 0) or report["client"] != before["client"]
    return lost and not report["gone"]


FAULTS: dict[str, Callable[[Chaos, str], Any]] = {
    "kill": Chaos._kill,
    "stop": Chaos._stop,
    "net": Chaos._cut_off,
    "server": Chaos._kill,
    "client": Chaos._kill_client,
}


TOLD = {  # the promise, the fault, and the seconds within which who was struck is to count again
    "kill": (1, "SIGKILL of a worker", 10.0),
    "stop": (33, "SIGSTOP of a worker", 2.0),
    "net": (33, "a worker cut off, both ways or one way", 10.0),
    "server": (41, "SIGKILL of a parameter server", 10.0),
    "client": (30, "SIGKILL of the client", 10.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="for which faults strike")
    add("--seed", type=int, default=0)
    add("--faults", nargs="+", choices=FAULTS, help="by default all that this machine and two servers allow")
    add("--every", type=float, default=29.0, help="seconds between two faults, on average")
    add("--calm", type=float, default=15.0, help="seconds without faults before and after, that they are compared with")
    add("--replicas", type=int, default=8)
    add("--keep", type=int, help="how many of them make a step; by default three of four")
    add("--servers", type=int, default=2)
    add("--step", type=float, default=0.1, help="seconds that an update takes to compute")
    add("--log-level", default="ERROR", help="what the client writes to stderr")
    add("--trainer", type=json.loads, default={}, help='options of the trainer as JSON: {"copies": 2}')
    add("--detached", action="store_true", help="training needs no client; not with the fault `server`")
    add("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    options = parser.parse_args()
    options.keep = options.keep or max(1, options.replicas * 3 // 4)
    options.faults = options.faults or ["kill", "stop", *(["net"] if network.can_enter() else []), "client"]
    if options.detached and "server" in options.faults:
        parser.error("a detached run ends with a parameter server")
    if "net" in options.faults:
        network.enter()
    logging.basicConfig(level=logging.ERROR)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process that is started compiles what it imports
    seen = _run(options)
    rows = _rows(options, seen)
    records.show(rows)
    if options.json:
        kind = "detached" if options.detached else "copies" if options.trainer.get("copies") == 2 else "chaos"
        name = f"{kind}-{'-'.join(sorted(options.faults))}-{options.replicas}-{options.seed}.json"
        records.write(options.json / name, rows)
    return 1 if any(row["violations"] for row in rows) else 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    tasks = [f"/job:ps/task:{i}" for i in range(options.servers)]
    tasks += [f"/job:worker/task:{i}" for i in range(options.replicas)]
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        if "net" not in options.faults:
            chaos = Chaos(options, None, Path(folder))
            seen = asyncio.run(chaos.run())
        else:
            with network.Network(tasks) as net:
                chaos = Chaos(options, net, Path(folder))
                seen = asyncio.run(chaos.run())
    return seen | {"violations": chaos.observed.violations, "steps": chaos.observed.steps}


def _rows(options: argparse.Namespace, seen: dict[str, Any]) -> list[records.Row]:
    """What was tried of each promise."""
    struck = seen["struck"]
    speed = seen["disturbed"] / seen["calm"]
    figure = f"{seen['disturbed']:.2f} steps a second, {seen['calm']:.2f} without faults: {100 * speed:.1f}%"
    workers = f"{options.replicas} workers" + ", detached" * options.detached
    copies = ", two copies" if options.trainer.get("copies", 1) == 2 else ""
    every = f"{' or '.join(options.faults)} every {options.every:g} s, {workers}{copies}"
    counts = {"steps": seen["steps"]} | {f"batches {end}": count for end, count in seen["ended"].items()}
    rows = [records.row(32, every, len(struck), seen["violations"], counts=counts)]
    if options.every >= EVERY:
        slow = [figure] if speed < SPEED else []
        rows.append(records.row(39, f"{every}, for {options.minutes:g} min", len(struck), slow, figure))
    else:
        print(figure)
    for fault in options.faults:
        of = [one for one in struck if one["fault"] == fault]
        promise, text, most = TOLD[fault]
        after, stalls = [one["counted after"] for one in of], [one["stall"] for one in of]
        late = [f"{one['task']} counted again after {one['counted after']} s" for one in of]
        late = [told for told, seconds in zip(late, after, strict=True) if seconds > most]
        if fault == "server" and copies and "client" not in options.faults:
            stalled = [f"{one['task']} stopped training for {one['stall']} s" for one in of if one["stall"] > STALL]
            rows.append(records.row(34, f"{text}, {workers}", len(of), stalled, samples={"stall": stalls}))
        if of:
            samples = {"counted again after": after}
            if fault in ("client", "server") or not {"client", "server"}.intersection(options.faults):
                samples |= {"longest time without a step": stalls}
            rows.append(records.row(promise, f"{text}, {workers}{copies}", len(of), late, samples=samples))
    return rows


if __name__ == "__main__":
    sys.exit(main())
