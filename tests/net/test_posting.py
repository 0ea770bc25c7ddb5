"""What tasks post to each other: in order, without waiting, and with word of what may be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from wire_world import MIB, on_both_loops_and_ways, outcome, pair

from flowrt.base.device import CLIENT
from flowrt.base.errors import BrokenStream, ClosedError, SpecError
from flowrt.base.valueclass import valueclass
from flowrt.net.door.tokens import new_token
from flowrt.net.door.transport import Bounds
from flowrt.net.master.master import Master
from flowrt.net.node.node import NetworkNode
from flowrt.net.stream.outbox import Outbox, Outgoing
from flowrt.net.wire.frames import frame
from flowrt.net.wire.messages import POSTED, register_kinds
from flowrt.sched.host.host import Host

A, B = "/job:a/task:0", "/job:b/task:0"


@valueclass
class Note:
    """A message of the tests' own."""

    number: int
    values: tuple[Any, ...] = ()


register_kinds(Note)


# ── on a connection ──────────────────────────────────────────────────────────────────────────────────────────────────


class Written:
    """What an outbox writes, where a transport would be."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, piece: Any) -> None:
        self.pieces.append(piece)


async def test_a_frame_that_is_given_up_as_its_turn_comes_is_passed_over() -> None:
    transport, taken = Written(), asyncio.get_running_loop().create_future()
    outbox = Outbox(transport)  # type: ignore[arg-type]
    outbox.pause()
    outbox.put(Outgoing([b"given up"], None, taken))
    outbox.put(Outgoing([b"next"]))
    taken.cancel()  # who waits has not been told yet, and withdraws nothing
    outbox.blocked = False
    outbox.go_on()
    assert transport.pieces == [b"next"]
    assert len(outbox) == 0


@on_both_loops_and_ways
async def test_frames_wait_while_the_kernel_takes_no_more_and_it_is_told_once_all_are_written() -> None:
    transport, begun, future = Written(), list[int](), asyncio.get_running_loop().create_future
    outbox = Outbox(transport)  # type: ignore[arg-type]
    frames = [Outgoing([b"%d" % n, b"."], lambda n=n: begun.append(n), future()) for n in range(3)]
    outbox.put(frames[0])
    assert (transport.pieces, begun, len(outbox), outbox.idle, outbox.drained.is_set()) == (
        [b"0", b"."],
        [0],
        0,
        True,
        True,
    )
    outbox.pause()
    assert (outbox.idle, outbox.drained.is_set()) == (False, False)
    outbox.put(frames[1])
    outbox.put(frames[2])
    outbox.withdraw(frames[1])
    outbox.withdraw(frames[1])  # which is not there any more
    assert (len(outbox), begun) == (1, [0])
    outbox.blocked = False
    outbox.go_on()
    assert (transport.pieces, begun, outbox.idle, outbox.drained.is_set()) == (
        [b"0", b".", b"2", b"."],
        [0, 2],
        True,
        True,
    )
    assert [frame.taken is not None and frame.taken.done() for frame in frames] == [True, False, True]


async def test_who_waits_is_refused_what_nobody_waits_for_is_written_and_with_the_stream_all_go() -> None:
    transport, future = Written(), asyncio.get_running_loop().create_future
    outbox = Outbox(transport)  # type: ignore[arg-type]
    outbox.pause()
    waits, posted, other = (
        Outgoing([b"waits"], None, future()),
        Outgoing([b"posted"]),
        Outgoing([b"other"], None, future()),
    )
    outbox.put(waits)
    outbox.put(posted)
    outbox.refuse(lambda: ClosedError("closed"))
    assert (len(outbox), waits.taken is not None and isinstance(waits.taken.exception(), ClosedError)) == (1, True)
    outbox.put(other)
    outbox.clear()
    assert (len(outbox), outbox.drained.is_set(), outbox.idle) == (0, True, False)
    assert other.taken is not None
    assert other.taken.done()
    outbox.blocked, transport.closing, begun = False, True, list[int]()
    outbox.put(Outgoing([b"late"], lambda: begun.append(1)))
    assert (transport.pieces, begun, len(outbox), outbox.idle) == ([], [], 0, True)


async def test_a_frame_that_was_begun_is_whole_before_the_next() -> None:
    transport = Written()
    outbox = Outbox(transport)  # type: ignore[arg-type]
    taken = asyncio.get_running_loop().create_future()

    def pieces() -> Iterator[bytes]:
        yield b"a"
        outbox.pause()
        yield b"b"
        yield b"c"

    outbox.put(Outgoing(pieces(), None, taken))
    outbox.put(Outgoing([b"d"]))
    assert (transport.pieces, len(outbox), taken.done()) == ([b"a", b"b"], 2, False)
    outbox.blocked = False
    outbox.go_on()
    assert (transport.pieces, len(outbox), taken.done()) == ([b"a", b"b", b"c", b"d"], 0, True)
    outbox.pause()
    outbox.put(Outgoing([b"e"]))
    outbox.blocked = False
    outbox.put(Outgoing([b"f"]))  # as the kernel takes more
    assert transport.pieces[-2:] == [b"e", b"f"]


async def test_what_is_posted_and_what_is_sent_arrives_in_one_order() -> None:
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in rng.choice([0, 10, 3000, MIB, 9 * MIB], 60)]
    async with pair(Bounds(slice_bytes=1 << 18)) as (client, server), asyncio.TaskGroup() as tasks:
        for number, size in enumerate(sizes):
            message = {"number": number, "x": np.full(size, number, np.uint8)}
            if number % 3:
                client.post_frame(frame(message))
            else:
                tasks.create_task(client.send(message))
                await asyncio.sleep(0)
        for number, size in enumerate(sizes):
            got = await server.receive()
            assert (got["number"], got["x"].size) == (number, size)
            assert (got["x"] == number).all()


@on_both_loops_and_ways
async def test_what_a_stopped_peer_is_posted_waits_uncopied_up_to_a_bound() -> None:
    bounds = Bounds(outbox_messages=10, socket_bytes=1 << 14, grace=0.1)
    async with pair(bounds) as (client, server):
        server._stream.transport.pause_reading()
        array = np.zeros(MIB, np.uint8)
        client.post_frame(frame(array))
        assert client.waiting == 1
        client.post_frame(frame(array))
        array[:] = 7  # not taken yet, so this is what arrives
        for number in range(8):
            client.post_frame(frame(number))
        with pytest.raises(SpecError):
            client.post_frame(frame({1: 2}))
        assert not client.closed
        with pytest.raises(BrokenStream, match="does not read, and 10 messages wait"):
            client.post_frame(frame("one too many"))
        assert client.closed


@on_both_loops_and_ways
async def test_what_is_posted_as_the_kernel_takes_more_does_not_overtake_what_waits() -> None:
    async with pair(Bounds(socket_bytes=1 << 14)) as (client, server):
        stream, posted = client._stream, 0

        def post() -> None:
            nonlocal posted
            client.post_frame(frame({"number": posted, "x": np.zeros(3000, np.uint8)}))
            posted += 1

        def resume(go_on: Callable[[], None] = stream.resume_writing) -> None:
            go_on()
            if posted < 300:
                post()

        stream.resume_writing = resume  # type: ignore[method-assign]
        server._stream.transport.pause_reading()
        while client.waiting < 20:
            post()
        server._stream.transport.resume_reading()
        got = 0
        while got < posted:
            assert (await server.receive())["number"] == got
            got += 1
        assert posted > 21


@on_both_loops_and_ways
async def test_what_was_posted_is_written_before_the_connection_closes() -> None:
    async with pair(Bounds(grace=20.0)) as (client, server):
        for number in range(4):
            client.post_frame(frame({"number": number, "x": np.zeros(4 * MIB, np.uint8)}))
        closing = asyncio.ensure_future(client.aclose())
        assert [message["number"] async for message in server] == [0, 1, 2, 3]
        await server.aclose()
        await closing
        with pytest.raises(ClosedError):
            client.post_frame(frame(1))


@on_both_loops_and_ways
async def test_who_listens_is_told_of_messages_as_they_come_and_then_of_the_end() -> None:
    async with pair() as (client, server):
        heard: list[Any] = []
        server.post_frame(frame("before"))
        server.post_frame(frame("they listen"))
        listening = asyncio.ensure_future(outcome(client.listen(heard.append)))
        while len(heard) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for number in range(3000):
            server.post_frame(frame(number))
        await server.aclose()
        await client.aclose()
        assert heard == ["before", "they listen", *range(3000)][: len(heard)]
        assert isinstance(await listening, (ClosedError, BrokenStream)) or len(heard) == 3002


@on_both_loops_and_ways
async def test_what_a_listener_raises_ends_its_listening() -> None:
    async with pair() as (client, server):

        def refuse(message: Any) -> None:
            raise BrokenStream(f"{message} is not for me")

        server.post_frame(frame(1))
        server.post_frame(frame(2))
        with pytest.raises(BrokenStream, match="1 is not for me"):
            await client.listen(refuse)
        assert await client.receive() == 2


# ── between tasks ────────────────────────────────────────────────────────────────────────────────────────────────────


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.broke: list[tuple[str, str]] = []
        self.over: list[str] = []

    def hear(self, peer: str, message: Any) -> None:
        self.heard.append((peer, message))

    def broken(self, peer: str, epoch: str) -> None:
        self.broke.append((peer, epoch))

    def reset(self, container: str | None) -> None:
        """Of a host's residents."""

    async def aclose(self) -> None:
        """Of a host's residents."""

    def ended(self, epoch: str) -> None:
        self.over.append(epoch)


class Town:
    """Two nodes in this process that listen, and their master, which does too."""

    def __init__(self, master: Master, nodes: dict[str, NetworkNode], ears: dict[str, Ear]) -> None:
        self.master, self.nodes, self.ears = master, nodes, ears

    def post(self, sender: str, receiver: str, message: Any) -> None:
        remote = self.nodes[sender].host.remote
        assert remote is not None
        remote.post(receiver, self.master.epoch, message)


@asynccontextmanager
async def town() -> AsyncIterator[Town]:
    token = new_token()
    ears = {task: Ear() for task in (A, B, CLIENT)}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(30))
        nodes, addresses = {}, {}
        for task in (A, B):
            host = Host(task, threads=1)
            stack.push_async_callback(host.aclose)
            nodes[task] = NetworkNode(host, token)
            host.iterations = ears[task]
            server = await stack.enter_async_context(nodes[task].serving("127.0.0.1", 0))
            addresses[task] = ("127.0.0.1", server.port)
        master = await stack.enter_async_context(Master(addresses, token))
        with master.listeners.listening(ears[CLIENT]):
            yield Town(master, nodes, ears)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_tasks_and_the_client_post_to_each_other_and_to_themselves() -> None:
    async with town() as made:
        for sender, receiver in ((A, B), (B, A), (A, A), (A, CLIENT), (B, CLIENT)):
            notes = [Note(number, (np.full(size, number, np.uint8),)) for number, size in enumerate((3, 9 * MIB, 0, 5))]
            for note in notes:
                made.post(sender, receiver, note)
            ear = made.ears[receiver]
            await until(lambda ear=ear: len(ear.heard) == 4)  # type: ignore[misc]
            assert [peer for peer, _ in ear.heard] == [sender] * 4
            for (_, got), note in zip(ear.heard, notes, strict=True):
                assert type(got) in POSTED
                assert got.number == note.number
                assert np.array_equal(got.values[0], note.values[0])
            ear.heard.clear()
        made.master.post(B, Note(7))
        await until(lambda: made.ears[B].heard == [(CLIENT, Note(7))])
        assert not any(ear.broke for ear in made.ears.values())
        await made.master.aclose()
        await until(lambda: all(ear.over == [made.master.epoch] for ear in made.ears.values()))
        made.post(A, B, Note(8))  # to nobody any more


async def test_who_posted_on_a_link_that_broke_is_told_and_may_post_again() -> None:
    async with town() as made:
        made.post(A, B, Note(1))
        await until(lambda: len(made.ears[B].heard) == 1)
        (link,) = made.nodes[A]._links._links.values()
        link._connection.cut()
        await until(lambda: made.ears[A].broke == [(B, "")])
        made.post(A, B, Note(2))
        await until(lambda: len(made.ears[B].heard) == 2)
        assert made.ears[B].broke == []


async def test_a_client_that_was_away_and_the_nodes_it_came_back_to_are_told() -> None:
    async with town() as made:
        epoch = made.master.epoch
        made.master.peers[A].control.cut()
        made.post(A, CLIENT, Note(1))
        await until(lambda: made.ears[CLIENT].broke == [(A, "")] and made.ears[A].broke == [(CLIENT, epoch)])
        made.post(A, CLIENT, Note(2))
        made.master.post(A, Note(3))
        await until(lambda: (A, Note(2)) in made.ears[CLIENT].heard and made.ears[A].heard == [(CLIENT, Note(3))])
        assert made.ears[A].over == []


async def test_what_is_posted_to_a_task_that_cannot_be_reached_is_said_to_be_lost_after_a_while() -> None:
    async with town() as made:
        (reign,) = made.nodes[A]._reigns.values()
        reign.addresses = {**reign.addresses, B: ("127.0.0.1", 1)}
        made.post(A, B, Note(1))
        made.post(A, B, Note(2))
        assert made.ears[A].broke == []
        await until(lambda: made.ears[A].broke == [(B, "")])
        assert made.nodes[A]._links._posted == {}


async def test_a_task_whose_way_breaks_as_it_is_given_its_plans_is_met_once_more() -> None:
    async with town() as made:
        peers, met = made.master.peers, list[Any]()

        async def join(peer: Any) -> None:
            met.append(peer)
            if len(met) == 1:
                peer.control.cut()
                await until(lambda: peer.error is not None)  # it was reached again, as another
                met.append(peers[A])

        peers._join = join
        peers._apply(peers._liveness.broke(A, "as if it had been silent"))
        await peers.wait_changed(peers.lost, peers.suspects)
        assert A not in peers.lost
        first, again, *others = met
        assert others == [peers[A]]
        assert first.error is not None
        assert again.error is not None
        assert peers[A].error is None
