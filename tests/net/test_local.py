"""Between processes of one host: a Unix socket chosen by itself, and memory that a receiver sees as it was written."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from cluster_plans import Writer
from local_world import FLOATS, Ends, another_process, neighbours, until
from wire_world import HEAD, MIB, TOKEN, on_both_loops, outcome, proof_for, sockets

import flowrt as fr
from flowrt.base.errors import BrokenStream, NodeLost
from flowrt.base.spec import Spec
from flowrt.net.door.transport import Bounds, Connection, connect, serve
from flowrt.net.stream import local as local_module
from flowrt.net.stream import shared
from flowrt.net.stream.local import Local
from flowrt.net.wire.frames import LentPlace, frame
from flowrt.net.wire.handshake import name_told_as
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.segments import FIRST, LARGE, PAGE, SEALS, Segments, has_own_slot
from flowrt.sched.running import own
from flowrt.sched.units import PAST_CACHES, Action, find_units

pytestmark = pytest.mark.skipif(not Local(Memory()).segments, reason="needs Linux' files in memory")


def family(connection: Connection) -> int:
    return int(connection._stream.socket.family)


# ── the way ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_neighbours_talk_over_a_unix_socket_without_being_told() -> None:
    async with neighbours() as ends:
        assert {family(ends.client), family(ends.server)} == {socket.AF_UNIX}
        assert await ends.carry({"x": np.arange(5), "y": ("a", 1.5)}) is not None
        assert "process" in ends.server.peer
        assert ends.client.peer == f"127.0.0.1:{ends.door.port}"


@on_both_loops
async def test_who_does_not_share_talks_to_the_port() -> None:
    with closing(Local(Memory())) as local:
        for theirs, mine in ((local, None), (None, local)):
            async with (
                serve("127.0.0.1", 0, TOKEN, _nothing, local=theirs) as door,
                await connect("127.0.0.1", door.port, TOKEN, local=mine) as client,
            ):
                assert family(client) == socket.AF_INET


async def _nothing(connection: Connection) -> None:
    async for _ in connection:
        pass


@on_both_loops
async def test_a_way_through_something_in_between_is_kept() -> None:
    """Whoever put a proxy before a node wants its connections to go through it."""
    with closing(Local(Memory())) as local:
        async with serve("127.0.0.1", 0, TOKEN, _nothing, local=local) as door:
            await _talk_through_a_proxy(door.port)


async def _talk_through_a_proxy(node: int) -> None:
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", node)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    proxy = await asyncio.start_server(lambda r, w: pumps.append(asyncio.ensure_future(between(r, w))), "127.0.0.1", 0)
    async with proxy:
        port = proxy.sockets[0].getsockname()[1]
        with closing(Local(Memory())) as local:
            async with await connect("127.0.0.1", port, TOKEN, local=local) as client:
                assert family(client) == socket.AF_INET
        await asyncio.gather(*pumps)


@on_both_loops
async def test_the_socket_asks_for_the_token_too() -> None:
    with closing(Local(Memory())) as local:
        async with serve("127.0.0.1", 0, TOKEN, _nothing, local=local):
            door = socket.socket(socket.AF_UNIX)
            door.connect(f"\0flowrt-{name_told_as(TOKEN, local.told)}")
            reader, writer = await asyncio.open_unix_connection(sock=door)
            writer.write(f"{HEAD}\r\n\r\n".encode())
            writer.write(proof_for(await reader.readuntil(b"\r\n\r\n"), "another"))
            assert b" 401 " in await reader.readline()
            await reader.read()
            writer.close()


@pytest.mark.parametrize(("way", "found"), [("tcp", socket.AF_INET), ("unix", socket.AF_UNIX)])
def test_the_way_can_be_told(way: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_TRANSPORT", way)

    async def talk() -> None:
        async with neighbours() as ends:
            assert family(ends.client) == found
            array = np.arange(FLOATS, dtype="float32")
            assert np.array_equal((await ends.carry({"x": array}))["x"], array)
            assert ends.locals[0].shared_bytes == 0

    asyncio.run(talk())


@on_both_loops
async def test_a_peer_that_takes_nothing_is_given_up() -> None:
    async with neighbours(bounds=Bounds(unacknowledged=1.0, inbox_messages=1, grace=0.1)) as ends:
        async with asyncio.timeout(20):
            while not isinstance(error := await outcome(ends.client.send({"x": np.zeros(LARGE // 8 - 1)})), NodeLost):
                assert error is None
        assert "has taken nothing for" in str(error)


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_arrays_of_any_layout_arrive_as_they_were() -> None:
    rng = np.random.default_rng(7)
    async with neighbours() as ends:
        for turn in range(40):
            arrays = [_some_array(rng) for _ in range(rng.integers(1, 5))]
            came = await ends.carry({"number": turn, "arrays": arrays})
            assert came["number"] == turn
            for sent, got in zip(arrays, came["arrays"], strict=True):
                assert got.dtype == sent.dtype
                assert np.array_equal(got, sent)
        assert ends.locals[0].shared_bytes > 0


def _some_array(rng: np.random.Generator) -> Any:
    """Small, empty, large; of floats and not; in order, turned around or with gaps."""
    rows = int(rng.choice([0, 1, 7, 300, 1000]))
    array = rng.normal(size=(rows, 500)).astype(rng.choice(["float32", "float64", "int32", "uint8", "bool"]))
    return [array, array.T, array[::2], array[:, 1:-1]][rng.integers(4)]


@on_both_loops
async def test_a_large_array_is_seen_where_it_was_written_and_cannot_be_changed_there() -> None:
    async with neighbours() as ends:
        array = np.arange(FLOATS, dtype="float32")
        came = await ends.carry({"x": array})
        assert ends.locals[0].shared_bytes == array.nbytes
        assert ends.locals[0].socket_bytes < 200
        assert not came["x"].flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            came["x"][0] = 1


@on_both_loops
async def test_what_was_sent_may_be_changed_at_once() -> None:
    async with neighbours() as ends:
        array = np.arange(FLOATS, dtype="float32")
        await ends.client.send({"x": array})
        array[:] = -1
        assert np.array_equal((await ends.server.receive())["x"], np.arange(FLOATS, dtype="float32"))


@on_both_loops
async def test_a_very_large_array_is_copied_between_the_turns_of_others() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "AT_ONCE", LARGE)
        async with neighbours() as ends:
            array = np.arange(20 * LARGE // 4, dtype="float32")
            sending = asyncio.ensure_future(ends.client.send({"x": array}))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not sending.done()
            sending.cancel()
            await ends.client.send({"small": 1})
            assert await ends.server.receive() == {"small": 1}, "what was given up is not sent"
            await until(sending.done)
            await ends.client.send({"x": array})
            array[:] = 0
            assert np.array_equal((await ends.server.receive())["x"], np.arange(20 * LARGE // 4, dtype="float32"))
            assert ends.locals[0].shared_bytes == array.nbytes


@on_both_loops
async def test_integers_are_copied_as_they_say_where_to_look() -> None:
    async with neighbours() as ends:
        came = await ends.carry({"x": np.arange(FLOATS)})
        assert came["x"].flags.writeable
        await until(lambda: not ends.lent)


@on_both_loops
async def test_who_gives_arrays_away_gets_them_writable_and_alone() -> None:
    async with neighbours(own=True) as ends:
        array = np.arange(FLOATS, dtype="float32")
        first, second = [(await ends.carry({"x": array}))["x"] for _ in range(2)]
        first += 1
        assert np.array_equal(first, array + 1)
        assert np.array_equal(second, array)
        many = [(await ends.carry({"x": array + i}))["x"] for i in range(shared.MOST_OWN + 5)]
        assert all(np.array_equal(each, array + i) and each.flags.writeable for i, each in enumerate(many))
        assert ends.lent == shared.MOST_OWN, "beyond that they are copied"


@on_both_loops
async def test_memory_is_used_again_when_the_last_reader_let_go() -> None:
    async with neighbours() as ends:
        segments = ends.locals[0].segments
        assert segments is not None
        array = np.arange(FLOATS, dtype="float32")
        for turn in range(20):
            came = await ends.carry({"x": array + turn})
            part = came["x"][3:7]
            del came
            assert part[0] == 3 + turn
            assert ends.lent == 1
            del part
            await until(lambda: not ends.lent)
        assert len(segments._segments) == 1


@on_both_loops
async def test_arrays_outlive_the_connection_and_what_made_them() -> None:
    array = np.arange(FLOATS, dtype="float32")
    async with neighbours() as ends:
        kept = (await ends.carry({"x": array}))["x"]
        for turn in range(30):
            await ends.carry({"x": array * turn})
    assert np.array_equal(kept, array)


@on_both_loops
async def test_what_a_peer_keeps_is_not_used_again_though_its_connection_ends() -> None:
    array = np.arange(FLOATS, dtype="float32")
    mine, theirs = Local(Memory()), Local(Memory())
    kept = []

    async def keep(connection: Connection) -> None:
        kept.extend([message["x"] async for message in connection])

    async with serve("127.0.0.1", 0, TOKEN, keep, local=theirs) as door:
        for turn in range(5):
            async with await connect("127.0.0.1", door.port, TOKEN, local=mine) as client:
                await client.send({"x": array + turn})
            await until(lambda: len(kept) == turn + 1)  # noqa: B023
        assert all(np.array_equal(each, array + turn) for turn, each in enumerate(kept))
        assert len(mine._channels) == 5
        kept.clear()
        await until(lambda: not (mine._channels or theirs._channels))
    mine.close()
    theirs.close()


@on_both_loops
async def test_what_is_computed_once_is_read_where_it_was_computed() -> None:
    async with neighbours() as ends:
        output = ends.memory.output((FLOATS,), np.dtype("float32"))
        output[:] = 1
        whole = (await ends.carry({"x": output}))["x"]
        part = (await ends.carry({"x": output[1024:].reshape(-1, 2)}))["x"]
        skewed = (await ends.carry({"x": output[1:]}))["x"]
        output[:] = 2  # which nobody does: so it is seen that it is the same memory
        assert (whole == 2).all()
        assert (part == 2).all()
        assert (skewed == 1).all(), "what begins within a line is copied"
        address = output.ctypes.data
        del output
        others = [ends.memory.output((FLOATS,), np.dtype("float32")) for _ in range(4)]
        assert address not in [other.ctypes.data for other in others], "it is still read"
        assert (whole == 2).all()


@on_both_loops
async def test_a_variable_is_copied_where_it_is_sent_and_seen_where_it_is_posted() -> None:
    async with neighbours() as ends:
        variable = ends.memory.lasting((FLOATS,), np.dtype("float32"))
        variable[:] = 1
        sent = (await ends.carry({"x": variable}))["x"]
        ends.client.post_frame(frame({"x": variable}))
        posted = (await ends.server.receive())["x"]
        assert (posted == 1).all()
        variable[:] = 2
        assert (sent == 1).all()
        assert (posted == 2).all()
        del sent, posted
        await until(lambda: not ends.lent)


@on_both_loops
async def test_memory_is_counted_the_same_wherever_it_lies() -> None:
    async with neighbours() as ends:
        memory, floats = ends.memory, np.dtype("float32")
        before = memory.held
        output, variable = memory.output((FLOATS, 3), floats), memory.lasting((FLOATS + 1,), floats)
        assert memory.held == before + output.nbytes + variable.nbytes
        assert has_own_slot(output)
        assert not has_own_slot(output[1:])
        assert own([output], []) == [output]
        del output, variable
        assert memory.held == before


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both_loops
async def test_where_there_is_no_memory_to_share_arrays_are_sent() -> None:
    async with neighbours(limit=3 * LARGE) as ends:
        array = np.arange(FLOATS, dtype="float32")
        kept = [(await ends.carry({"x": array + turn}))["x"] for turn in range(4)]
        assert all(np.array_equal(each, array + turn) for turn, each in enumerate(kept))
        assert ends.lent == 1
        assert ends.locals[0].socket_bytes > 3 * array.nbytes


@on_both_loops
async def test_a_reader_that_keeps_everything_is_sent_the_rest() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "MOST_LENT", 3)
        async with neighbours() as ends:
            array = np.arange(FLOATS, dtype="float32")
            kept = [(await ends.carry({"x": array + turn}))["x"] for turn in range(6)]
            assert all(np.array_equal(each, array + turn) for turn, each in enumerate(kept))
            assert ends.lent == 3
            kept.clear()
            await until(lambda: not ends.lent)


@on_both_loops
async def test_memory_that_nobody_uses_any_more_goes_back_to_the_system() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "LINGER", 0.02)
        async with neighbours() as ends:
            segments = ends.locals[0].segments
            assert segments is not None
            kept = [(await ends.carry({"x": np.ones(FLOATS, "float32")}))["x"] for _ in range(20)]
            assert segments.nbytes >= 20 * 4 * FLOATS
            first = kept[0]
            kept.clear()
            await until(lambda: segments.nbytes == FIRST)
            assert (first == 1).all()
            del first
            await until(lambda: segments.nbytes == 0)
            channel = ends.server._stream.channel
            assert channel is not None
            await until(lambda: not channel._mapped)
            assert (await ends.carry({"x": np.ones(FLOATS, "float32")}))["x"].all()


@on_both_loops
async def test_memory_that_was_received_or_computed_in_goes_back_once_nobody_uses_it() -> None:
    await goes_back(lambda local, memory: memory.received(np.dtype("float32"), (FLOATS,)))
    await goes_back(lambda local, memory: memory.output((FLOATS,), np.dtype("float32")))


async def goes_back(make: Callable[[Local, Memory], Any]) -> None:
    """What ``make`` makes in a lane is in memory that is kept for a while, and then is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "LINGER", 0.02)
        memory = Memory()
        local = Local(memory, way="tcp")
        try:
            with ThreadPoolExecutor(1) as lane:
                kept = lane.submit(make, local, memory).result()
            kept[:] = 1
            await until(lambda: local.buffers._sweep >= 3)
            assert (kept == 1).all()
            assert local.buffers.nbytes
            del kept
            await until(lambda: not local.buffers.nbytes)
        finally:
            local.close()


@on_both_loops
async def test_a_client_that_keeps_much_keeps_it_in_memory_of_its_own() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "MOST_OWN_BYTES", 10 * FLOATS)
        async with neighbours(own=True) as ends:
            kept = [(await ends.carry({"x": np.full(FLOATS, turn, "float32")}))["x"] for turn in range(6)]
            await until(lambda: ends.lent == 2)
            assert [array.sum() for array in kept] == [turn * FLOATS for turn in range(6)]


def test_segments_count_in_memory_and_are_let_go_for_others() -> None:
    memory = Memory(limit=8 * LARGE)
    segments = Segments(memory)
    floats = np.dtype("float32")
    array = segments.empty((LARGE,), floats)
    assert array is not None
    assert memory.held == array.nbytes
    assert segments.empty((LARGE + 1,), floats) is None
    del array
    assert memory.held == 0
    assert segments.nbytes == 4 * LARGE, "kept for the next"
    rest = memory.empty((6 * LARGE,), np.dtype(np.uint8))
    assert segments.nbytes == 0
    assert memory.held == rest.nbytes
    segments.close()
    assert segments.empty((1,), floats) is None


def test_slots_never_overlap_and_gaps_come_together_again() -> None:
    rng = np.random.default_rng(3)
    segments = Segments(Memory())
    alive: list[Any] = []
    for turn in range(400):
        if alive and rng.random() < 0.5:
            del alive[rng.integers(len(alive))]
        else:
            array = segments.empty((int(rng.integers(1, 3 * LARGE)),), np.dtype(np.uint8))
            assert array is not None
            array[:] = turn % 251
            alive.append((array, turn % 251))
            del array
        assert all((each == value).all() for each, value in alive[-3:])
    assert all((each == value).all() for each, value in alive)
    alive.clear()
    assert segments.idle_bytes == segments.nbytes
    segments.close()


def test_segments_are_not_much_larger_than_what_is_taken_of_them() -> None:
    """What is kept for values to come counts where a task's memory is bounded, too."""
    segments, alive, floats = Segments(Memory()), [], np.dtype("float64")
    for count in range(1, 25):
        alive.append(segments.empty((1_000_000,), floats))
        assert segments.nbytes <= max(FIRST, 1.25 * count * 8_003_584), count
    segments.close()


def test_memory_for_what_is_announced_is_made_ahead_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes may announce terabytes: they take no memory, and no time, before they come."""
    monkeypatch.setattr("flowrt.sched.host.segments.AHEAD", 4 * MIB)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    before, buffers = resident(), Segments(Memory(), shared=False)
    announced = buffers.empty((512 * MIB,), np.dtype("uint8"))
    assert announced is not None
    assert resident() - before < 64 * MIB
    announced[-1] = 1
    assert announced[-1] == 1
    buffers.close()


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mapped_by_name() -> set[str]:
    """The files of /dev/shm that this process has mapped: a process that is killed would leave them there for good."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}


def test_of_a_killed_process_arrays_stay_and_what_it_kept_comes_back() -> None:
    before, named = sockets(), mapped_by_name()

    async def talk() -> None:
        local = Local(Memory())
        array = np.arange(FLOATS, dtype="float32")
        async with another_process() as (process, port), await connect("127.0.0.1", port, TOKEN, local=local) as client:
            await client.send({"x": array})
            answer = (await client.receive())["x"]
            channel = client._stream.channel
            assert channel is not None
            assert len(channel._lent) == 1
            process.kill()
            with pytest.raises(NodeLost):
                await client.receive()
            await until(lambda: not channel._lent)
            assert np.array_equal(answer, 2 * array)
            assert mapped_by_name() == named
        del answer
        await until(lambda: not local._channels)
        local.close()

    asyncio.run(talk())
    assert sockets() == before


async def test_nodes_and_client_read_a_large_variable_from_memory_whoever_dies() -> None:
    count = 9 << 20  # of 36 MiB
    with fr.Graph() as graph:
        with fr.device("/job:ps/task:0"):
            held = fr.Variable(fr.zeros((count,)), name="held", trainable=False)
            change = held.assign(held + 1.0)
        with fr.device("/job:worker/task:0"):
            ends = fr.concat([held[:1], held[-1:]])
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        kept = []
        for value in range(1, 4):
            await session.run(change)
            assert (await session.run(ends) == value).all()
            kept.append(await session.run(held))
        kept[1] += 10
        await session.run(change)
        assert [(array[0], array[-1]) for array in kept] == [(1, 1), (12, 12), (3, 3)]
        runner: Any = session._runner
        told = await runner._master.statistics()
        assert told["/job:ps/task:0"]["bytes_shared"] == 6 * 4 * count
        assert sum(each["bytes_by_socket"] for each in told.values()) < MIB
        running = asyncio.ensure_future(outcome(session.run(ends)))
        cluster.processes["/job:worker/task:0"].kill()
        await running
        assert (await session.run(held) == 4).all()
    assert [(array[0], array[-1]) for array in kept] == [(1, 1), (12, 12), (3, 3)]


def test_a_large_variable_that_is_only_sent_is_copied_past_the_caches() -> None:
    def units(floats: int) -> list[Action]:
        w, spec = Writer("/job:ps/task:0"), Spec("float32", (floats,))
        w.send(w.node("read_variable", out=spec, container="", resource="v", dtype="float32", shape=(floats,)), 0, "c")
        return [unit.action for unit in find_units(w.plan())]

    assert units(PAST_CACHES // 4) == [Action.READ, Action.EFFECT]
    assert units(PAST_CACHES // 4 - 1) == [Action.TAPE, Action.EFFECT]


# ── hostile peers ────────────────────────────────────────────────────────────────────────────────────────────────────


async def misled(lie: Callable[[Ends], Any]) -> str:
    """What the server says of a client that lies; who else comes is still served."""
    async with neighbours() as ends:
        array = np.arange(FLOATS, dtype="float32")
        kept = await ends.carry({"x": array})
        await asyncio.gather(outcome(_told(ends, lie)), return_exceptions=True)
        error = await outcome(ends.server.receive())
        assert isinstance(error, BrokenStream), error
        assert np.array_equal(kept["x"], array)
        async with await connect("127.0.0.1", ends.door.port, TOKEN, local=ends.locals[0]) as other:
            await other.send({"x": array})
        return str(error)


async def _told(ends: Ends, lie: Callable[[Ends], Any]) -> None:
    place = lie(ends)
    if isinstance(place, LentPlace):
        channel = ends.client._stream.channel
        assert channel is not None
        channel.lend = lambda data, changing: place  # type: ignore[method-assign]
        await ends.client.send({"x": np.zeros(FLOATS, "float32")})


def say(*messages: bytes, file: int | None = None) -> Callable[[Ends], None]:
    def lie(ends: Ends) -> None:
        channel = ends.client._stream.channel
        assert channel is not None
        for message in messages:
            if file is None:
                channel._side.send(message)
            else:
                socket.send_fds(channel._side, [message], [file])

    return lie


PLACES = {
    "a segment never shown": LentPlace(77, 0, 9),
    "beyond the end": LentPlace(1, 1 << 40, 9),
    "partly beyond": LentPlace(1, (4 << 20) - PAGE, 9),
    "wrapping around": LentPlace(1, (1 << 64) - PAGE, 9),
    "not at a line": LentPlace(1, 32, 9),
    "lent already": LentPlace(1, 0, 1),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_where_nothing_is_breaks_the_stream(name: str) -> None:
    error = asyncio.run(misled(lambda ends: PLACES[name]))
    assert "memory" in error or "twice" in error


@pytest.mark.parametrize("seed", range(3))
def test_no_random_place_reaches_outside_of_what_was_shown(seed: int) -> None:
    rng = np.random.default_rng(seed)

    async def talk() -> None:
        for _ in range(15):
            offset = int(rng.choice([0, PAGE, 1 << 20, 1 << 22, 1 << 31, 1 << 63])) + int(rng.integers(-1, 2)) * PAGE
            place = LentPlace(int(rng.integers(0, 4)), offset % (1 << 64), int(rng.integers(0, 4)))
            async with neighbours() as ends:
                kept = await ends.carry({"x": np.arange(FLOATS, dtype="float32")})
                sending = asyncio.ensure_future(outcome(_told(ends, lambda ends: place)))  # noqa: B023
                try:
                    async with asyncio.timeout(0.2):
                        found = await outcome(ends.server.receive())
                except TimeoutError:
                    found = BrokenStream("no array came where one was said to be here")
                if not isinstance(found, BrokenStream):
                    assert found["x"].sum() >= 0
                await sending
                assert kept["x"][5] == 5

    asyncio.run(talk())


@pytest.mark.parametrize(
    "message",
    [
        b"R" + struct.pack("<Q", 1),
        b"R" + struct.pack("<2Q", 2**64 - 1, 0),
        b"R123",
        b"S",
        b"S" + struct.pack("<IQ", 5, 1 << 20),
        b"nonsense",
        b"x" * 10_000,
    ],
)
def test_who_says_what_nobody_says_breaks_the_stream(message: bytes) -> None:
    """Giving back what is not lent, or twice, is of that."""
    asyncio.run(misled(say(message)))


def _file(nbytes: int, sealed: int = SEALS, allocated: bool = True) -> int:
    file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    if allocated and nbytes:
        os.posix_fallocate(file, 0, nbytes)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, sealed)
    return file


FILES: dict[str, Callable[[], int]] = {
    "too short": lambda: _file(1 << 19),
    "empty": lambda: _file(0),
    "that may shrink": lambda: _file(1 << 20, 0),
    "that may grow": lambda: _file(1 << 20, fcntl.F_SEAL_SHRINK),
    "with holes": lambda: _file(1 << 20, allocated=False),
    "that is a pipe": lambda: os.pipe2(os.O_CLOEXEC)[0],
    "of a device": lambda: os.open("/dev/zero", os.O_RDONLY),
    "on a disk": lambda: os.open(__file__, os.O_RDONLY),
}


@pytest.mark.parametrize("what", FILES)
def test_no_segment_is_a_file(what: str) -> None:
    file = FILES[what]()
    try:
        message = b"S" + struct.pack("<IQ", 5, 1 << 20)
        assert "segment" in asyncio.run(misled(say(message, file=file)))
    finally:
        os.close(file)


def test_a_segment_is_shown_once() -> None:
    file = _file(1 << 20)
    try:
        message = b"S" + struct.pack("<IQ", 5, 1 << 20)
        assert "twice" in asyncio.run(misled(say(message, message, file=file)))
    finally:
        os.close(file)
