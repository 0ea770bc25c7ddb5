"""What the wire costs: round trips and arrays between two processes, as a share of plain blocking sockets.

Four processes on loopback: a blocking server and a flowrt server receive; one process sends to both in turn, so both
are measured under the same load, with equal socket buffers. An array counts as sent when the receiver's answer of a few
bytes has come back. Both receive into memory they already hold, as flowrt's pool does; ``--fresh`` lets flowrt allocate
each array anew.

    python perf/transport.py --sizes 1 64 256 --repeat 15

With ``--tls``, the same over TLS, in turns with both: what it keeps of the throughput without, for blocking sockets of
Python's and for flowrt, and how long each side computes. At best the busier side computes the cipher beside what it
does without TLS, where each has a core that is never idle: what that would keep is shown, by the figures of ``openssl
speed``. With ``--gbits 10`` all of them send no faster than a network of that many gigabits a second.

With ``--steps``, a value through steps of a session instead of the link alone: from a server to a worker of which the
client fetches two entries (pass), or to the client (fetch), a scalar through both and back (steps), and a step of a
model with many variables that is placed by hand (model); beside bare sockets, gloo, TensorFlow, ray and a copy in
memory, in turns in one run. The value may have changed before every step, and once it does, which is checked.

    python perf/transport.py --steps pass-64MiB fetch-1KiB steps
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from flowrt.cluster.keys import make_keys
from flowrt.net.door.tls import Keys
from flowrt.net.door.tokens import new_token
from flowrt.net.door.transport import Bounds, Connection, connect, serve
from flowrt.net.wire.frames import allocate_array
from perf.machine import describe

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe

SLICE = 4 << 20  # bytes per call of the floor, as flowrt writes; the whole array in one call takes up to twice as long
SMALL = 1024
CIPHERS = ("aes-256-gcm", "aes-128-gcm", "chacha20-poly1305")  # of TLS 1.3; Python's prefers them in this order
SO_MAX_PACING_RATE = 47  # bytes a second that the kernel sends at most; of Linux, and not in Python's socket module


def run_on(loop: str, main: Awaitable[Any]) -> Any:
    """Run ``main`` on uvloop or on asyncio's own loop."""
    if loop == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    else:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)  # type: ignore[arg-type]


# ── the floor: blocking sockets ──────────────────────────────────────────────────────────────────────────────────────


def prepare(stream: socket.socket, buffers: int | None) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if buffers is not None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffers)
    return stream


def pace(stream: socket.socket, gbits: float | None) -> None:
    """Have ``stream`` send no faster than a network of ``gbits``."""
    if gbits is not None:
        stream.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(gbits * 1e9 / 8))


def receive_exactly(stream: socket.socket, room: memoryview) -> bool:
    at = 0
    while at < len(room):
        count = stream.recv_into(room[at : at + SLICE])
        if not count:
            return False
        at += count
    return True


def floor_server(pipe: Pipe, largest: int, buffers: int | None, keys: str | None = None) -> None:
    """Answer each (8 bytes of length, bytes) with as many bytes if it is small, and with 8 if not."""
    room = memoryview(np.ones(largest, "uint8")).cast("B")
    head = memoryview(bytearray(8))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        stream = prepare(listener.accept()[0], buffers)
    if keys is not None:
        stream = Keys(keys).contexts().node.wrap_socket(stream, server_side=True)
    with stream:
        while receive_exactly(stream, head):
            length = int.from_bytes(head, "little")
            receive_exactly(stream, room[:length])
            stream.sendall(room[:length] if length <= SMALL else head)


def floor_send(stream: socket.socket, data: memoryview, answer: memoryview) -> None:
    if len(data) <= SMALL:
        stream.sendall(len(data).to_bytes(8, "little") + data)
    else:
        stream.sendall(len(data).to_bytes(8, "little"))
        for at in range(0, len(data), SLICE):
            stream.sendall(data[at : at + SLICE])
    receive_exactly(stream, answer)


# ── flowrt ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def flowrt_server(pipe: Pipe, loop: str, token: str, buffers: int | None, fresh: bool, keys: str | None) -> None:
    with suppress(KeyboardInterrupt):
        run_on(loop, answer_all(pipe, token, buffers, fresh, keys))


async def answer_all(pipe: Pipe, token: str, buffers: int | None, fresh: bool, keys: str | None) -> None:
    done = asyncio.Event()

    async def answer(connection: Connection) -> None:
        async for message in connection:
            array = message["x"]
            await connection.send(message if array.nbytes <= SMALL else {"got": array.nbytes})
        done.set()

    async with serve(
        "127.0.0.1",
        0,
        token,
        answer,
        bounds=Bounds(socket_bytes=buffers),
        allocate=allocate_array if fresh else reuse(),
        tls=None if keys is None else Keys(keys),
    ) as server:
        pipe.send(server.port)
        await done.wait()


def reuse() -> Callable[[Any, tuple[int, ...]], Any]:
    """An allocator that answers the memory of an earlier array of that shape, touched before."""
    held: dict[tuple[int, ...], Any] = {}

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Any:
        if shape not in held:
            held[shape] = np.ones(shape, dtype)
        return held[shape]

    return allocate


def computed(pid: int) -> float:
    """The seconds that all threads of a process have computed so far."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def cipher_seconds(name: str, nbytes: int) -> float | None:
    """What one core takes to encrypt so many bytes, or None where there is no openssl to ask."""
    if shutil.which("openssl") is None:
        return None
    command = ["openssl", "speed", "-mr", "-seconds", "1", "-bytes", str(1 << 14), "-evp", name]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return nbytes / float(said.strip().splitlines()[-1].split(":")[-1])


async def measure(
    options: argparse.Namespace,
    ports: list[int],
    streams: list[socket.socket],
    token: str,
    keys: str | None,
    pids: list[int],
) -> list[dict[str, Any]]:
    """``ports`` are those of a node, and of one that speaks TLS, if that is measured; ``pids`` are of all servers."""
    cases = [("1 KiB", SMALL, options.trips, 20)]
    cases += [(f"{size} MiB", size << 20, 1, options.repeat) for size in options.sizes]
    async with AsyncExitStack() as stack:
        ways = []
        for port, tls in zip(ports, (None, keys), strict=False):
            connection = await connect(
                "127.0.0.1",
                port,
                token,
                bounds=Bounds(socket_bytes=options.buffers),
                tls=None if tls is None else Keys(tls),
            )
            pace(connection._stream.socket, options.gbits)
            ways.append(await stack.enter_async_context(connection))
        return [await compare(*case, streams, ways, pids) for case in cases]


async def compare(
    name: str,
    length: int,
    trips: int,
    repeat: int,
    streams: list[socket.socket],
    ways: list[Connection],
    pids: list[int],
) -> dict[str, Any]:
    """Median seconds of one transfer by each way, taken in turns, and what both sides compute in them."""
    array = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)
    answer = memoryview(bytearray(length if length <= SMALL else 8))
    floors: list[list[float]] = [[] for _ in streams]
    taken: list[list[float]] = [[] for _ in ways]
    busy: list[list[tuple[float, float]]] = [[] for _ in pids]  # seconds computed here and there

    def now(number: int) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), computed(pids[number])

    for turn in range(repeat + 2):
        times = []
        for number, way in enumerate([*streams, *ways]):
            before = now(number)
            for _ in range(trips):
                if isinstance(way, socket.socket):
                    floor_send(way, array.data, answer)
                else:
                    await way.send({"x": array})
                    await way.receive()
            taken_here, *both = (after - was for after, was in zip(now(number), before, strict=True))
            times.append(taken_here)
            if turn >= 2:
                busy[number].append((both[0] / trips, both[1] / trips))
        if turn >= 2:  # the first two warm memory and socket buffers up
            for kept, seconds in zip([*floors, *taken], times, strict=True):
                kept.append(seconds / trips)
    ours, floor = taken[0], floors[0]
    row: dict[str, Any] = {
        "case": name,
        "bytes": length,
        "floor_s": statistics.median(floor),
        "flowrt_s": statistics.median(ours),
        "share": statistics.median(floor) / statistics.median(ours),
        "best_share": min(floor) / min(ours),
        "spread_s": [min(ours), max(ours)],
        "floor_spread_s": [min(floor), max(floor)],
        "busy_s": [[statistics.median(side) for side in zip(*those, strict=True)] for those in busy],
    }
    for tls, secured in zip(taken[1:], floors[1:], strict=True):
        row |= {"tls_s": statistics.median(tls), "tls_spread_s": [min(tls), max(tls)]}
        row |= {"tls_floor_s": statistics.median(secured), "tls_floor_spread_s": [min(secured), max(secured)]}
        row["tls_keeps"] = statistics.median(ours) / statistics.median(tls)
        row["tls_floor_keeps"] = statistics.median(floor) / statistics.median(secured)
    return row


# ── the script ───────────────────────────────────────────────────────────────────────────────────────────────────────


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    token = new_token()
    folder = tempfile.TemporaryDirectory() if options.tls else None
    keys = None if folder is None else folder.name
    if keys is not None:
        make_keys(keys, ["127.0.0.1"])
    both = [None] if keys is None else [None, keys]
    pipes, floors = ([(which, context.Pipe()) for which in both] for _ in range(2))
    settings = options.loop, token, options.buffers, options.fresh
    largest = max(options.sizes) << 20
    children = [  # as `busy_s` has them
        *(
            context.Process(target=floor_server, args=(pipe, largest, options.buffers, which), daemon=True)
            for which, (_, pipe) in floors
        ),
        *(
            context.Process(target=flowrt_server, args=(pipe, *settings, which), daemon=True)
            for which, (_, pipe) in pipes
        ),
    ]
    for child in children:
        child.start()
    try:
        with ExitStack() as stack:
            streams = []
            for which, (end, _) in floors:
                stream = prepare(socket.create_connection(("127.0.0.1", end.recv())), options.buffers)
                pace(stream, options.gbits)
                if which is not None:
                    stream = Keys(which).contexts().client.wrap_socket(stream)
                streams.append(stack.enter_context(stream))
            ports = [end.recv() for _, (end, _) in pipes]
            pids = [child.pid or 0 for child in children]
            rows: list[dict[str, Any]] = run_on(options.loop, measure(options, ports, streams, token, keys, pids))
        for child in children:
            child.join(timeout=10)
    finally:
        for child in children:
            child.kill()
            child.join()
        if folder is not None:
            folder.cleanup()
    return rows


def show(row: dict[str, Any]) -> str:
    low, high = row["spread_s"]
    rate = "" if row["bytes"] <= SMALL else f"  {row['bytes'] / row['flowrt_s'] / 1e9:5.2f} GB/s"
    if "tls_s" in row:
        low_tls, high_tls = row["tls_spread_s"]
        rate += f"  TLS {row['tls_s'] * 1e3:.3f} ms ({low_tls * 1e3:.3f} to {high_tls * 1e3:.3f})"
        rate += f" keeps {row['tls_keeps']:.0%}"
        rate += f"  floor over TLS {row['tls_floor_s'] * 1e3:.3f} ms keeps {row['tls_floor_keeps']:.0%}"
    return (
        f"{row['case']:>8}  floor {row['floor_s'] * 1e3:9.3f} ms  flowrt {row['flowrt_s'] * 1e3:9.3f} ms "
        f"({low * 1e3:.3f} to {high * 1e3:.3f})  share {row['share']:.2f} (of the best {row['best_share']:.2f}){rate}"
    )


def show_busy(row: dict[str, Any]) -> Iterator[str]:
    """How long both sides compute for a transfer, and what TLS could keep that costs the cipher alone."""
    names, indent = ("floor", "floor over TLS", "flowrt", "flowrt over TLS"), " " * 10
    for name, (here, there) in zip(names, row["busy_s"], strict=True):
        yield f"{indent}{name:<17} computes {here * 1e3:6.2f} ms to send, {there * 1e3:6.2f} ms to receive"
    busier = max(row["busy_s"][2])
    for name in CIPHERS:
        more = cipher_seconds(name, row["bytes"])
        if more is not None:
            yield f"{indent}{name:<17} {more * 1e3:6.2f} ms a side: at best keeps {busier / (busier + more):.0%}"


def through_steps(options: argparse.Namespace) -> None:
    """What a value costs through steps; see `passing`."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import passing
    import section
    from compare import versions

    about = f"{describe()}. Peers: {versions('tf', 'torch', 'ray')}. {options.rounds} rounds of {options.seconds:g} s."
    print(about, flush=True)
    for case in options.steps or passing.WHAT:
        heading = f"### Through a step: {passing.WHAT[case]}"
        lines = list(passing.measure(case, options.sides or list(passing.SIDES), options.rounds, options.seconds))
        print("\n".join(["", heading, "", *lines]), flush=True)
        if options.write:
            section.put(heading, [about, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 256], metavar="MIB", help="arrays, in MiB")
    parser.add_argument("--repeat", type=int, default=15, help="transfers of each size (default 15)")
    parser.add_argument("--trips", type=int, default=200, help="round trips of 1 KiB per turn, of 20 turns")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument(
        "--buffers", type=int, default=None, metavar="BYTES", help="socket buffers of both (default: auto)"
    )
    parser.add_argument("--fresh", action="store_true", help="flowrt allocates every received array anew")
    parser.add_argument("--tls", action="store_true", help="also over TLS")
    parser.add_argument("--gbits", type=float, help="send no faster than such a network (default: unbounded)")
    parser.add_argument("--steps", nargs="*", metavar="CASE", help="through steps: pass-SIZE, fetch-SIZE, steps, model")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="with --steps: which sides (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="with --steps")
    parser.add_argument("--seconds", type=float, default=0.7, help="with --steps: of measuring, per side and round")
    parser.add_argument("--write", action="store_true", help="with --steps: into docs/performance.md")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the table")
    options = parser.parse_args()
    if options.steps is not None:
        through_steps(options)
        return
    rows = run(options)
    if options.json:
        print(json.dumps({"machine": describe(), "loop": options.loop, "fresh": options.fresh, "rows": rows}))
        return
    print(describe())
    pace_said = "" if options.gbits is None else f", no faster than {options.gbits:g} Gbit/s"
    buffers = options.buffers or "automatic"
    print(f"loop {options.loop}, socket buffers {buffers}, fresh memory {options.fresh}{pace_said}")
    for row in rows:
        print(show(row))
        if options.tls and row["bytes"] > SMALL:
            print(*show_busy(row), sep="\n")


if __name__ == "__main__":
    main()
