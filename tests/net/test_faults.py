"""Nodes, links and memory under fault: what one message or connection suffers is not suffered by others."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, WORKERS, Writer, counter, echo, relay, waiting
from process_world import running
from wire_world import pair

from flowrt.base.errors import GraphError, LinkBroken, NodeLost, ResourceError, TakenOver
from flowrt.base.spec import Spec
from flowrt.cluster.cluster import LocalCluster
from flowrt.net import link as link_module
from flowrt.net import peer as peer_module
from flowrt.net.door import connecting as connecting_module
from flowrt.net.door.tokens import new_token
from flowrt.net.master import peers as peers_module
from flowrt.net.master.master import Master, Registered
from flowrt.net.node import node as node_module
from flowrt.net.node import plans as plans_module
from flowrt.net.node.node import NetworkNode
from flowrt.net.stream.sockets import unreachable
from flowrt.net.wire.messages import Resume
from flowrt.sched.host.host import Host

TASKS = (PS, WORKERS[0])
MIB = 1 << 20
SMALL = Spec("float64", (3,))
OPEN = Spec("float64", (None,))
LARGE = Spec("float64", (4 * MIB,))  # 32 MiB
LIMIT = 24 * MIB


@dataclass
class World:
    """Nodes in this process, and a master that drives them."""

    master: Master
    hosts: dict[str, Host]
    nodes: dict[str, NetworkNode]
    addresses: dict[str, tuple[str, int]]
    token: str
    number: int = 0

    async def run(self, step: Registered, *feeds: Any) -> list[np.ndarray]:
        self.number += 1
        return await self.master.run(step, [np.asarray(f, np.float64) for f in feeds], number=self.number, seed=0)

    async def wait_steps(self, count: int) -> None:
        """Wait until so many steps are in progress on all nodes together."""
        async with asyncio.timeout(10):
            while sum(node.statistics()["steps"] for node in self.nodes.values()) != count:  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def assert_well(self) -> None:
        """Every node serves, keeps its variable, and nothing is left of what went wrong."""
        assert self.master.peers.lost == frozenset()
        for task in TASKS:
            read = await self.master.register(**counter(task, "c")["read"])
            np.testing.assert_array_equal((await self.run(read))[0], np.ones(3))
        step = await self.master.register(**relay(*TASKS, SMALL))
        np.testing.assert_array_equal((await self.run(step, np.ones(3)))[0], np.full(3, 4.0))
        await self.wait_steps(0)
        for task, node in self.nodes.items():
            found = node.statistics()
            assert (found["open_steps"], found["bytes_expected"], found["masters"]) == (0, 0, 1), task


@asynccontextmanager
async def world(*tasks: str, **limits: int | None) -> AsyncIterator[World]:
    """Two nodes, ``ps`` and ``worker``, or these, with these memory limits, each holding a variable of ones."""
    token, tasks = new_token(), tasks or TASKS
    hosts = {task: Host(task, threads=1, memory_limit=limits.get(task.split("/")[1][4:])) for task in tasks}
    nodes = {task: NetworkNode(host, token) for task, host in hosts.items()}
    try:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            served = {
                task: await stack.enter_async_context(node.serving("127.0.0.1", 0)) for task, node in nodes.items()
            }
            addresses = {task: ("127.0.0.1", serving.port) for task, serving in served.items()}
            async with Master(addresses, token, name="job") as master:
                made = World(master, hosts, nodes, addresses, token)
                for task in tasks:
                    await made.run(await master.register(**counter(task, "c")["assign"]), np.ones(3))
                yield made
    finally:
        for host in hosts.values():
            await host.aclose()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def wide(task: str, spec: Spec) -> dict[str, Any]:
    """A step whose small feed becomes a large output."""
    w = Writer(task)
    shape = w.node("constant", out=Spec("int64", (1,)), value=np.asarray(spec.dims))
    w.send(w.node("broadcast_to", w.recv(0, CLIENT, Spec("float64", ())), shape, out=spec), 1, CLIENT)
    return {"plans": {task: w.plan()}, "feeds": [[(0, task)]], "fetches": [(1, task)]}


def laden(task: str) -> dict[str, Any]:
    """A plan that holds a large constant."""
    w = Writer(task)
    w.send(w.node("constant", out=LARGE, value=np.ones(LARGE.concrete)), 0, CLIENT)
    return {"plans": {task: w.plan()}, "feeds": [], "fetches": [(0, task)]}


async def test_a_tensor_beyond_memory_ends_its_own_step_and_nothing_else() -> None:
    async with world(worker=LIMIT) as made:
        worker, large = WORKERS[0], np.ones(LARGE.concrete)
        received = await made.master.register(**echo(worker, OPEN))
        sent = await made.master.register(**relay(PS, worker, OPEN))
        for step, edge in ((received, "recv_0"), (sent, "recv_0")):
            with pytest.raises(ResourceError, match=rf"on {worker}: recv '{edge}'.*no memory.*32.0 MiB") as caught:
                await made.run(step, large)
            assert "plans.py:1" in str(caught.value)
            await made.assert_well()
        made_there = await made.master.register(**wide(worker, LARGE))
        with pytest.raises(ResourceError, match=f"on {worker}: "):
            await made.run(made_there, 1.0)
        await made.assert_well()
        with pytest.raises(ResourceError, match=f"on {worker}: a plan for {worker}: no memory"):
            await made.master.register(**laden(worker))
        await made.assert_well()


async def test_a_fetch_beyond_the_clients_memory_fails_that_step_alone() -> None:
    async with world() as made:
        made.master._memory.limit = LIMIT
        step = await made.master.register(**wide(PS, LARGE))
        with pytest.raises(ResourceError, match=rf"of {PS}: no memory to receive float64\[4194304\]"):
            await made.run(step, 1.0)
        await made.assert_well()


async def test_memory_that_runs_out_anywhere_is_told_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own refusal, in places that do not count: encoding, copying to a queue, reading a plan."""
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, LARGE))
        with monkeypatch.context() as patch:
            patch.setattr(plans_module, "plan_from_parts", once_without_memory(plans_module.plan_from_parts))
            with pytest.raises(ResourceError, match="out of memory"):
                await made.master.register(**echo(PS, SMALL))
        await made.assert_well()
        with monkeypatch.context() as patch:
            patch.setattr(link_module, "to_data", once_without_memory(link_module.to_data))
            with pytest.raises(ResourceError, match="out of memory"):
                await made.run(step, np.ones(LARGE.concrete))
        await made.assert_well()


def once_without_memory(real: Callable[[Any], Any]) -> Any:
    """The function, without memory when it is first called for the parts of a plan or for a value."""
    failed = False

    def fail_once(message: Any) -> Any:
        nonlocal failed
        if not failed and type(message).__name__ in ("Value", "generator"):
            failed = True
            raise MemoryError("none left")
        return real(message)

    return fail_once


async def test_a_tensor_is_let_go_with_its_last_reader() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, LARGE))
        await made.run(step, np.ones(LARGE.concrete))
        gc.collect()
        async with asyncio.timeout(10):  # who read it from shared memory says so
            while any(host.memory.held >= 4 * MIB for host in made.hosts.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert made.master._memory.held < MIB


# ── what a message may hold ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_step_has_more_small_feeds_and_fetches_than_one_message_holds() -> None:
    async with world() as made:
        count = 700
        w = Writer(PS)
        for i in range(count):
            w.send(w.recv(i, CLIENT, SMALL), count + i, CLIENT)
        feeds, fetches = [[(i, PS)] for i in range(count)], [(count + i, PS) for i in range(count)]
        step = await made.master.register({PS: w.plan()}, feeds, fetches)
        got = await made.run(step, *(np.full(3, i) for i in range(count)))
        assert [value[0] for value in got] == list(range(count))


async def test_thousands_of_variables_are_listed() -> None:
    async with world() as made:
        for i in range(3000):
            name = "many", f"v{i}"
            made.hosts[PS].variables.declare(name, Spec("float64", (2,)))
            made.hosts[PS].variables.begin(name, np.zeros(2))
        found = await made.master.inventory()
        assert sum(container == "many" for container, _ in found) == 3000


async def test_a_huge_error_text_arrives_cut_short() -> None:
    async with world() as made:
        w = Writer(PS)
        w.node("read_variable", out=SMALL, fresh=False, resource="v" * MIB, container="", dtype="float64", shape=(3,))
        step = await made.master.register({PS: w.plan()}, [], [])
        with pytest.raises(GraphError, match=r"v…$"):
            await made.run(step)
        await made.assert_well()


# ── connections that break ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["the master's", "the node's"])
@pytest.mark.parametrize("which", ["control", "link"])
async def test_a_connection_that_breaks_fails_the_steps_in_progress_and_loses_nobody(end: str, which: str) -> None:
    async with world() as made:
        stuck = await made.master.register(**waiting(WORKERS[0], PS))
        run = asyncio.ensure_future(made.run(stuck))
        await made.wait_steps(2)
        if end == "the master's":
            peer = made.master.peers[WORKERS[0]]
            (peer.control if which == "control" else peer.link._connection).cut()
        else:
            (reign,) = made.nodes[WORKERS[0]]._reigns.values()
            (reign.connection if which == "control" else reign.client.result()._connection).cut()
        with pytest.raises(LinkBroken, match=rf"{WORKERS[0]} .* ended the step"):
            async with asyncio.timeout(10):
                await run
        await made.assert_well()
        assert made.master.peers.suspects == frozenset()


async def test_who_fetches_from_a_node_whose_connection_breaks_or_that_is_lost_is_told_that() -> None:
    async with world() as made:
        key = made.master.epoch, 1000
        for why, end in (
            (LinkBroken, lambda peer: peer.control.cut()),
            (NodeLost, lambda peer: peer.lose(NodeLost("it is gone"))),
        ):
            peer = await made.master.peers.reach(WORKERS[0])
            pull = asyncio.ensure_future(peer.link.pull(key, 1, OPEN))
            while not peer.link._replies:  # noqa: ASYNC110
                await asyncio.sleep(0)
            end(peer)
            with pytest.raises(why):
                async with asyncio.timeout(10):
                    await pull


@pytest.mark.parametrize("moment", ["the hello", "the welcome", "the link"])
async def test_a_try_to_come_back_that_fails_midway_does_not_end_the_reign(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the way is open for a moment only."""
    tries = 0

    async def fail_first(*args: Any, **options: Any) -> Any:
        nonlocal tries
        ours = moment != "the hello" or args[1].get("kind") == "Resume"
        tries += ours
        if ours and tries == 1:
            raise NodeLost("closed again")
        return await real(*args, **options)

    async with world() as made:
        stuck = await made.master.register(**waiting(WORKERS[0], PS))
        run = asyncio.ensure_future(made.run(stuck))
        await made.wait_steps(2)
        module, name, tries = {
            "the hello": (connecting_module, "introduce", 0),
            "the welcome": (peer_module, "_be_welcomed", 0),
            "the link": (peer_module, "connect", -1),  # which is the second connection
        }[moment]
        real = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail_first)
            made.master.peers[WORKERS[0]].control.cut()
            with pytest.raises(LinkBroken):
                async with asyncio.timeout(10):
                    await run
        assert tries > 1
        await made.assert_well()


async def test_a_link_between_two_nodes_that_breaks_is_opened_again() -> None:
    async with world() as made:
        step = await made.master.register(**relay(*TASKS, LARGE))
        await made.run(step, np.ones(LARGE.concrete))
        (link,) = made.nodes[WORKERS[0]]._links._links.values()
        link._connection.cut()
        await link._connection.wait_closed()
        (got, _) = await made.run(step, np.ones(LARGE.concrete))
        assert (got == 4.0).all()
        await made.assert_well()


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set, it lets masters reach nodes again whose connections broke."""
    go_on, meet = asyncio.Event(), peers_module.meet

    async def meet_later(*args: Any) -> Any:
        if any(isinstance(arg, Resume) for arg in args):
            await go_on.wait()
        return await meet(*args)

    monkeypatch.setattr(peers_module, "meet", meet_later)
    return go_on


async def test_who_comes_back_to_a_node_that_obeys_another_master_is_told_so(reach: asyncio.Event) -> None:
    async with world() as made:
        step = await made.master.register(**echo(WORKERS[0], SMALL))
        for task in TASKS:
            made.master.peers[task].control.cut()
        run = asyncio.ensure_future(made.run(step, np.ones(3)))
        for node in made.nodes.values():
            async with asyncio.timeout(10):
                while not all(reign.connection.closed for reign in node._reigns.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0)
        async with Master(made.addresses, made.token, name="job") as newer:
            reach.set()
            with pytest.raises(TakenOver, match="session 'job' has a newer master"):
                await run
            assert made.master.peers.lost == frozenset()
            assert newer.peers.lost == frozenset()
            with pytest.raises(TakenOver):
                await made.master.register(**echo(PS, SMALL))


async def test_a_node_that_gave_its_master_up_does_not_speak_of_another(
    reach: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETURN", 0.0)
    monkeypatch.setattr(node_module, "SOON", 0.0)
    async with world() as made:
        node, peer = made.nodes[WORKERS[0]], made.master.peers[WORKERS[0]]
        peer.control.cut()
        async with asyncio.timeout(10):
            while node._reigns:  # noqa: ASYNC110
                await asyncio.sleep(0)
        reach.set()
        with pytest.raises(NodeLost, match="does not know this session any more"):
            await made.master.peers.reach(WORKERS[0])
        assert made.master.peers.lost == {WORKERS[0]}


async def test_a_node_keeps_what_a_master_has_to_whom_the_way_is_gone_without_a_word(
    reach: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETURN", 0.0)
    monkeypatch.setattr(node_module, "SOON", 0.0)
    async with world() as made:
        node = made.nodes[WORKERS[0]]
        (reign,) = node._reigns.values()
        reign.connection._stream.fail(unreachable("the master", 5.0))
        async with asyncio.timeout(10):
            while not made.master.peers[WORKERS[0]].severed:  # noqa: ASYNC110
                await asyncio.sleep(0)
        reach.set()
        await made.master.peers.reach(WORKERS[0])
        assert made.master.peers.lost == frozenset()


async def test_a_node_that_was_started_anew_is_lost(reach: asyncio.Event) -> None:
    token = new_token()
    old, new = Host(PS, threads=1), Host(PS, threads=1)
    try:
        async with asyncio.timeout(30):
            async with NetworkNode(old, token).serving("127.0.0.1", 0) as server:
                port = server.port
                master = Master({PS: ("127.0.0.1", port)}, token)
                await master.open()
            async with NetworkNode(new, token).serving("127.0.0.1", port):
                reach.set()
                with pytest.raises(NodeLost, match="does not know this session any more"):
                    await master.peers.reach(PS)
                assert master.peers.lost == {PS}
            await master.aclose()
    finally:
        for host in (old, new):
            await host.aclose()


VANISHING = """
import asyncio, os, subprocess
from flowrt.net.stream.sockets import was_silent
from flowrt.net.door.transport import connect, serve

def ip(*words):
    subprocess.run(["ip", *words], check=True)

def sockets():
    links = [f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)

async def main():
    ends = asyncio.Queue()

    async def attend(connection):
        await ends.put(connection)
        await connection.wait_closed()

    ip("link", "set", "lo", "up")
    async with serve("127.0.0.1", 0, "token", attend) as server:
        rest = sockets()
        client = await connect("127.0.0.1", server.port, "token")
        served = await ends.get()
        ip("link", "set", "lo", "down")
        async with asyncio.timeout(10):
            await asyncio.gather(client.wait_closed(), served.wait_closed())
        print(client.failure, served.failure, was_silent(client.failure), was_silent(served.failure), sep="\\n")
        await client.aclose()
        while sockets() > rest:
            await asyncio.sleep(0)

asyncio.run(main())
"""


async def in_a_network_of_its_own(program: str) -> list[str]:
    """What a program prints that may take its network down."""
    for alone in (["unshare", "-n"], ["unshare", "-rn"]):
        with suppress(OSError):
            async with running(*alone, "ip", "link") as probe:
                if await probe.wait() == 0:
                    break
    else:
        pytest.skip("needs network namespaces: unshare and ip, and root or user namespaces")
    async with asyncio.timeout(30), running(*alone, sys.executable, "-c", program) as process:
        out, _ = await process.communicate()
        assert process.returncode == 0
    return out.decode().splitlines()


async def test_who_vanished_is_found_by_an_idle_connection_and_who_stands_still_is_waited_for() -> None:
    async with pair() as (client, server), asyncio.TaskGroup() as tasks:
        server._stream.transport.pause_reading()
        sending = tasks.create_task(client.send(np.ones(4 * MIB)))
        found = await in_a_network_of_its_own(VANISHING)
        assert all("has answered nothing for 5" in line for line in found[:2])
        assert found[2:] == ["True", "True"]
        assert not sending.done()
        server._stream.transport.resume_reading()
        assert (await server.receive()).size == 4 * MIB


async def test_a_node_that_stops_with_its_connection_full_is_back_when_it_goes_on() -> None:
    """Sends that are given up leave the connection whole, and what was never sent waits nowhere."""
    async with LocalCluster(worker=2) as cluster, Master(cluster.spec.tasks(), cluster.token) as master:
        w, count = Writer(WORKERS[0]), 250
        for i in range(count):
            w.send(w.recv(i, CLIENT, Spec("float64", (512,))), count + i, CLIENT)
        feeds, fetches = [[(i, WORKERS[0])] for i in range(count)], [(2 * count - 1, WORKERS[0])]
        step = await master.register({WORKERS[0]: w.plan()}, feeds, fetches)
        values = [np.full(512, float(i)) for i in range(count)]
        pid = cluster.processes[WORKERS[0]].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                while WORKERS[0] not in master.peers.suspects:
                    await master.wait_changed(master.peers.lost, master.peers.suspects)
            control = master.peers[WORKERS[0]].control
            number = 0
            async with asyncio.timeout(20):
                while control.waiting < 2 or number < 40:
                    number += 1
                    run = asyncio.ensure_future(master.run(step, values, number=number, seed=0))
                    for _ in range(20):
                        await asyncio.sleep(0)
                    run.cancel()
                    await asyncio.wait([run])
            assert control.waiting < 10  # an abort and a ping, and not one for each step that it was never told of
        finally:
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while master.peers.suspects:
                await master.wait_changed(master.peers.lost, master.peers.suspects)
            (got,) = await master.run(step, values, number=number + 1, seed=0)
        np.testing.assert_array_equal(got, values[-1])
        assert master.peers.lost == frozenset()
