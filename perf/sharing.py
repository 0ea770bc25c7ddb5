"""What it costs to get bytes from one process to another of the same host: by memory, by Unix socket, by port.

Two processes; the receiver answers each message, and looks at one entry of every page of what came, so that pages it
has not seen are paid for. `copied` arrays lie in the sender's ordinary memory, `placed` ones where a node's outputs
and variables lie, which the other process may see. The yardstick is a copy of the same bytes inside of the sender, in
turns with the others.

    python perf/sharing.py --sizes 64 256 --repeat 15
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import uvloop

from flowrt.net.door.tokens import new_token
from flowrt.net.door.transport import Connection, connect, serve
from flowrt.net.stream.local import WAYS, Local
from flowrt.sched.host.memory import Memory
from perf.machine import describe

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

    Array = np.ndarray[Any, Any]

SMALL = 1024
PAGE = 1024  # floats of a page
FLOAT = np.dtype("float32")


def receiver(pipe: Pipe, token: str) -> None:
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answer_all(pipe, token))


async def answer_all(pipe: Pipe, token: str) -> None:
    async def answer(connection: Connection) -> None:
        async for message in connection:
            await connection.send({"sum": float(message["x"][::PAGE].sum())})

    with closing(Local(Memory(), way="shared")) as local:
        async with serve("127.0.0.1", 0, token, answer, local=local) as door:
            pipe.send(door.port)
            await asyncio.to_thread(pipe.recv)


async def measure(options: argparse.Namespace, port: int, token: str) -> list[dict[str, Any]]:
    memory = Memory()
    async with AsyncExitStack() as stack:
        senders = {}
        for way in WAYS:
            local = stack.enter_context(closing(Local(memory, way=way)))
            connection = await stack.enter_async_context(await connect("127.0.0.1", port, token, local=local))
            senders[way] = carrier(connection)
            if way == "shared":
                stack.callback(setattr, memory, "segments", None)
                shared = local
        rows = [await compare("1 KiB", np.ones(SMALL // 4, FLOAT), senders, options.trips, options.repeat)]
        for size in options.sizes:
            array = np.ones(int(size * (1 << 18)), FLOAT)
            assert shared.segments is not None
            placed = shared.segments.empty(array.shape, FLOAT)
            assert placed is not None
            placed[:] = 1
            yard = np.ones_like(array)
            ways: dict[str, Callable[[Array], Awaitable[None]]] = {
                "memcpy": copier(yard),
                **{f"{way}, copied": sender for way, sender in senders.items()},
                "shared, placed": lambda _, placed=placed: senders["shared"](placed),  # type: ignore[misc]
            }
            rows.append(await compare(f"{size:g} MiB", array, ways, 1, options.repeat))
        return rows


def carrier(connection: Connection) -> Callable[[Array], Awaitable[None]]:
    async def carry(array: Array) -> None:
        await connection.send({"x": array})
        answer = await connection.receive()
        assert answer["sum"] == len(array[::PAGE])

    return carry


def copier(target: Array) -> Callable[[Array], Awaitable[None]]:
    async def copy(array: Array) -> None:
        np.copyto(target, array)

    return copy


async def compare(
    name: str, array: Array, ways: dict[str, Callable[[Array], Awaitable[None]]], trips: int, repeat: int
) -> dict[str, Any]:
    """Seconds of one transfer by each way, in turns; the first two warm memory up."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeat + 2):
        for way, carry in ways.items():
            start = time.perf_counter()
            for _ in range(trips):
                await carry(array)
            if turn >= 2:
                taken[way].append((time.perf_counter() - start) / trips)
    return {"case": name, "bytes": array.nbytes, "seconds": taken}


def show(row: dict[str, Any]) -> str:
    lines = [row["case"]]
    for way, seconds in row["seconds"].items():
        middle = statistics.median(seconds)
        rate = "" if row["bytes"] <= SMALL else f"  {row['bytes'] / middle / 2**30:6.2f} GiB/s"
        spread = f"({min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f})"
        lines.append(f"  {way:15} {middle * 1e3:9.3f} ms {spread:24}{rate}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 64, 256], metavar="MIB", help="arrays, in MiB")
    parser.add_argument("--repeat", type=int, default=11, help="transfers of each size (default 11)")
    parser.add_argument("--trips", type=int, default=200, help="round trips of 1 KiB each time (default 200)")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    options = parser.parse_args()
    token, context = new_token(), multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receiver, args=(theirs, token), daemon=True)
    child.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(measure(options, ours.recv(), token))
        ours.send(None)
        child.join(timeout=10)
    finally:
        child.kill()
        child.join()
    if options.json:
        print(json.dumps({"machine": describe(), "rows": rows}))
        return
    print(describe())
    for row in rows:
        print(show(row))


if __name__ == "__main__":
    main()
