"""A model over HTTP, with batches and without: requests a second and their latency, beside aiohttp with PyTorch.

Clients, each of which asks again once it has its answer, are one process, and the server another, on a core each where
there are two. Sides take turns; figures are medians over rounds, and of all latencies. What a server computes for a
request, in processor time, hangs less on what else the machine does.

    python perf/serving.py [small|large ...] [--clients 1 16 64] [--rounds 3] [--seconds 1] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import machine as this_machine
import numpy as np
import section
import uvloop
from side_process import HERE, environment, home
from sides.serving import data as d

SIDES = (("flowrt", "batches"), ("flowrt", "at once"), ("flowrt", "int8"), ("flowrt", "alone"), ("torch", "plain"))
CALLED = {
    ("flowrt", "batches"): "flowrt, batches, 2 ms",
    ("flowrt", "at once"): "flowrt, batches, 0 ms",
    ("flowrt", "int8"): "flowrt, batches, 2 ms, int8",
    ("flowrt", "alone"): "flowrt, no batches",
    ("torch", "plain"): "aiohttp and torch",
}
WARM_UP_SECONDS = 0.5
TICKS = os.sysconf("SC_CLK_TCK")
HEADING = "## A model over HTTP"
EACH = (
    "A request has one row of 784 floats. Each cell: requests a second (of rounds); their median latency, and that of "
    "99 of 100; processor time of the server for one."
)


class Server:
    """A side's process."""

    def __init__(self, side: tuple[str, str], case: str, core: int | None) -> None:
        peer, variant = side
        self._process = subprocess.Popen(
            [str(home(peer)), "-m", f"sides.serving.{peer}", case, variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=HERE,
            env=environment(peer),
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"{' '.join(side)} did not start")
        self.port = int(json.loads(line)["port"])

    def computed(self) -> float:
        """Seconds of processor time so far."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Client(asyncio.Protocol):
    """Asks again once it has its answer, until it is told to stop."""

    def __init__(self, request: bytes, latencies: list[float]) -> None:
        self._request, self._latencies = request, latencies
        self._answer = b""
        self.last = b""
        self.stopped = False
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"{head!r} {body!r}"))
            return
        self._latencies.append(time.perf_counter() - self._began)
        self.last, self._answer = body, b""
        if self.stopped:
            self._transport.close()
            self.done.set_result(None)
        else:
            self._ask()

    def _ask(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._request)


def _length(head: bytes) -> int:
    (line,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(line.partition(b":")[2])


@dataclass(slots=True)
class Measured:
    """One side under so many clients, over all rounds."""

    rates: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        middle, late = np.quantile(self.latencies, [0.5, 0.99]) * 1e3
        spread = f"{min(self.rates):.0f} to {max(self.rates):.0f}"
        each = 1e6 * statistics.median(self.computed)
        return f"{statistics.median(self.rates):.0f} ({spread}); {middle:.1f}, {late:.1f} ms; {each:.0f} µs"


async def measure(server: Server, case: str, clients: int, seconds: float, near: bool, into: Measured) -> None:
    """So many clients for so long; answers are checked, of eight bits to be ``near``."""
    loop, latencies = asyncio.get_running_loop(), list[float]()
    given = d.rows()
    asking = [
        (await loop.create_connection(lambda: Client(d.request(given), latencies), "127.0.0.1", server.port))[1]
        for _ in range(clients)
    ]
    await asyncio.sleep(WARM_UP_SECONDS)
    latencies.clear()
    began, computed = time.perf_counter(), server.computed()
    await asyncio.sleep(seconds)
    took, computed, count = time.perf_counter() - began, server.computed() - computed, len(latencies)
    for client in asking:
        client.stopped = True
    await asyncio.gather(*[client.done for client in asking])
    for client in asking:
        answer = np.frombuffer(client.last[-40:], "float32")
        np.testing.assert_allclose(answer[None], d.expected(case, given), rtol=0, atol=0.02 if near else 1e-6)
    into.rates.append(count / took)
    into.computed.append(computed / max(count, 1))
    into.latencies += latencies[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(d.SIZES))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--write", action="store_true", help="write the table into docs/performance.md")
    a = parser.parse_args()
    said = [f"{this_machine.describe()}.", f"{a.rounds} rounds of {a.seconds} s. {EACH}"]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]})
    sides = [side for side in SIDES if home(side[0]).exists()]
    print("\n".join(said), flush=True)
    rows: dict[str, str] = {}
    for case in a.cases or d.SIZES:
        found = {(side, count): Measured() for count in a.clients for side in sides}
        for _ in range(a.rounds):
            for side in sides:
                server = Server(side, case, cores[-1] if len(cores) > 1 else None)
                try:
                    for count in a.clients:
                        uvloop.run(measure(server, case, count, a.seconds, side[1] == "int8", found[side, count]))
                finally:
                    server.end()
        for side in sides:
            name = f"{case}: {CALLED[side]}"
            rows[name] = f"| {name} | {' | '.join(str(found[side, count]) for count in a.clients)} |"
            print(rows[name], flush=True)
    if a.write:
        columns = f"| network: server | {' | '.join(f'clients: {count}' for count in a.clients)} |"
        section.put_rows(HEADING, [*said, "Made by `python perf/serving.py --write`."], columns, rows)


if __name__ == "__main__":
    sys.exit(main())
