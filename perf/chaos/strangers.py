"""What strangers at every port of a cluster do to training: bytes of all kinds from who has no token.

    .venv/bin/python perf/chaos/strangers.py [--seconds 20] [--seed 1] [--at-once 12]

What clients send is recorded first, through proxies, and said again as it is, cut short, and with bits flipped, beside
random bytes, heads without end, and connections that say nothing. Printed: what training makes of it to the bit, the
longest time without a step, and what the nodes hold afterwards that they did not hold before.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "perf"), str(Path(__file__).parent)]

import records  # noqa: E402
from training import Receipts, batches, build  # noqa: E402

import flowrt as fr  # noqa: E402
from flowrt.net.door.tokens import save_token  # noqa: E402

REPLICAS, SERVERS = 2, 1
RECORDED = 20000  # bytes of each connection
REST = 12.0  # seconds after which whoever was let go on is gone
MEMORY, DESCRIPTORS = 16 << 20, 16  # that a node may hold more: connections between nodes are among them
STALL = 2.0  # seconds without a step


@asynccontextmanager
async def recording(cluster: fr.LocalCluster, said: list[bytes], folder: Path) -> AsyncIterator[fr.ClusterSpec]:
    """The cluster through proxies, which keep what clients say."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                kept += data[: RECORDED - len(kept)]
                writer.write(data)
                await writer.drain()
        writer.close()

    async def proxy(host: str, port: int) -> asyncio.Server:
        async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, port)
            kept = bytearray()
            await asyncio.gather(pump(reader, back, kept), pump(there, writer, bytearray(RECORDED)))
            said.append(bytes(kept))

        return await asyncio.start_server(attend, "127.0.0.1", 0)

    proxies = {task: await proxy(*place) for task, place in cluster.spec.tasks().items()}
    save_token(folder / "token", cluster.token)
    places = {task: f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for task, server in proxies.items()}
    yield fr.ClusterSpec.at(places, str(folder / "token"))
    for server in proxies.values():
        server.close()


def message(rng: random.Random, said: list[bytes]) -> bytes:
    """What a stranger says."""
    known = bytearray(rng.choice(said))
    match rng.randrange(8):
        case 0:
            return rng.randbytes(rng.randrange(5000))
        case 1:
            return b"GET /" + b"A" * 100_000 + b" HTTP/1.1\r\n\r\n"
        case 2:
            return b"GET /flowrt HTTP/1.1\r\n" + b"X: y\r\n" * 5000
        case 3:
            return b"\x16\x03\x01" + rng.randbytes(300)
        case 4:
            return b"POST / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n" + rng.randbytes(1000)
        case 5:
            for _ in range(rng.randrange(1, 4)):
                known[rng.randrange(len(known))] ^= 1 << rng.randrange(8)
            return bytes(known)
        case 6:
            return bytes(known[: rng.randrange(len(known))])
    return bytes(known) * 2


async def disturb(rng: random.Random, place: tuple[str, int], said: list[bytes]) -> None:
    """Come to a port, say something, listen for a while, and go in one way or another."""
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(*place)
        try:
            async with asyncio.timeout(rng.choice([0.01, 0.1, 1.0])):
                writer.write(message(rng, said))
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
        finally:
            if rng.random() < 0.3:
                writer.transport.abort()
            writer.close()


def ended(cluster: fr.LocalCluster) -> list[str]:
    """The nodes that are not there any more."""
    return [task for task, process in cluster.processes.items() if process.returncode is not None]


def held(cluster: fr.LocalCluster, gone: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """The bytes of memory and the descriptors of each node, but for those that are ``gone``."""
    found = {}
    for task, process in cluster.processes.items():
        if task in gone:
            continue
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        found[task] = pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{process.pid}/fd"))
    return found


async def strike(seconds: float, seed: int, at_once: int, folder: Path) -> records.Row:
    """Train while strangers come, and see what is left."""
    rng, said, stalls, came = random.Random(seed), list[bytes](), [0.0], 0
    graph, trainer = build(REPLICAS, fr.train.AllOf(), SERVERS)
    receipts, over = Receipts(), False
    async with fr.LocalCluster(ps=SERVERS, worker=REPLICAS, threads=1) as cluster:
        async with recording(cluster, said, folder) as spec, fr.Session(graph, cluster=spec) as session:
            async for report in trainer.steps(session, batches()):
                if report.step == 10:
                    break
        places, before = list(cluster.spec.tasks().values()), held(cluster)

        async def come() -> None:
            nonlocal came
            while not over:
                await disturb(rng, rng.choice(places), said)
                came += 1

        async with fr.Session(graph, cluster=cluster) as session, asyncio.TaskGroup() as strangers:
            for _ in range(at_once):
                strangers.create_task(come())
            began = last = time.monotonic()
            async for report in trainer.steps(session, batches()):
                receipts.add(report)
                now = time.monotonic()
                stalls.append(now - last)
                last = now
                if now - began > seconds:
                    break
            await receipts.check(session, trainer)
            over = True
        await asyncio.sleep(REST)
        gone = ended(cluster)
        violations, after = [*receipts.violations, *(f"{task} ended" for task in gone)], held(cluster, gone)
    more = [(after[task][0] - before[task][0], after[task][1] - before[task][1]) for task in after]
    if max(stalls) > STALL or any(memory > MEMORY or descriptors > DESCRIPTORS for memory, descriptors in more):
        violations.append(f"{max(stalls):.1f} s without a step; nodes hold {more} bytes and descriptors more")
    counts = {"connections": came, "steps": receipts.steps}
    samples = {"longest time without a step": [max(stalls)]}
    return records.row(17, "random, recorded, cut and altered bytes", came, violations, samples=samples, counts=counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12, help="strangers")
    parser.add_argument("--json", type=Path, help="a folder to write what was seen to, for docs/reliability.md")
    given: Any = parser.parse_args()
    os.environ["FLOWRT_TRANSPORT"] = "tcp"
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        row = asyncio.run(strike(given.seconds, given.seed, given.at_once, Path(folder)))
    records.show([row])
    if given.json:
        records.write(given.json / f"strangers-{given.seed}.json", [row])
    return 1 if row["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
