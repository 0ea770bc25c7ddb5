"""Masters and nodes as real processes on loopback, running plans written by hand."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
from cluster_plans import PS, WORKERS, counter, dead, echo, failing, relay, waiting
from places import PYTHONPATH
from process_world import alive, ended, ignores, running
from programs import python

from flowrt.base.errors import (
    AuthenticationError,
    DeadTensorError,
    GraphError,
    InternalError,
    NodeLost,
    QueueClosedError,
    RemoteError,
    ResourceError,
)
from flowrt.base.spec import Spec
from flowrt.cluster.cluster import LocalCluster
from flowrt.net.door.tokens import load_token, new_token
from flowrt.net.master.master import Master, Registered
from flowrt.net.node import node as node_module
from flowrt.net.node import plans as plans_module
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.base.plan import Plan

SCALAR = Spec("float64", ())
LARGE = Spec("float64", (1 << 20,))  # 8 MiB
OPEN = Spec("float64", (None,))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(ps=1, worker=2, log_level="error") as cluster:
        yield cluster


@asynccontextmanager
async def driving(cluster: LocalCluster, **options: Any) -> AsyncIterator[Master]:
    async with Master(cluster.spec.tasks(), cluster.token, **options) as master:
        yield master


class Numbers:
    """Runs steps under numbers of their own."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.next = 0

    async def __call__(self, step: Registered, *feeds: np.ndarray) -> list[np.ndarray]:
        self.next += 1
        return await self.master.run(step, feeds, number=self.next, seed=0)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Look again and again until ``condition`` holds."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - it looks into other processes
            await asyncio.sleep(0)


async def nothing_open(master: Master) -> bool:
    return all(s["steps"] == s["open_steps"] == s["bytes_expected"] == 0 for s in (await master.statistics()).values())


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_master_meets_every_task(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        assert [str(d) for d in master.peers.devices] == [f"{task}/device:cpu:0" for task in (PS, *WORKERS)]
        assert master.peers.lost == frozenset()


async def test_values_small_and_large_go_through_two_tasks_and_back(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run = Numbers(master)
        for spec, value in ((SCALAR, np.asarray(3.0)), (LARGE, np.arange(1 << 20, dtype=np.float64))):
            step = await master.register(**relay(PS, WORKERS[0], spec))
            quadruple, fed = await run(step, value)
            np.testing.assert_array_equal(quadruple, 4 * value)
            np.testing.assert_array_equal(fed, value)
        assert await nothing_open(master)


async def test_sizes_may_be_known_only_by_the_value(cluster: LocalCluster) -> None:
    async with driving(cluster, transfer_budget=1 << 20) as master:
        run, step = Numbers(master), await master.register(**relay(WORKERS[0], WORKERS[1], OPEN))
        for size in (0, 1, 512, 513, 1 << 20):
            (out, _) = await run(step, np.full(size, 2.0))
            np.testing.assert_array_equal(out, np.full(size, 8.0))


async def test_a_step_of_which_no_task_has_a_part_ends(cluster: LocalCluster) -> None:
    async with driving(cluster) as master, asyncio.timeout(10):
        run = Numbers(master)
        (fetched,) = await run(await master.register({}, [[]], [0]), np.arange(3.0))
        np.testing.assert_array_equal(fetched, np.arange(3.0))
        assert await run(await master.register({}, [], [])) == []


async def test_many_steps_run_at_once(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run = Numbers(master)
        steps = [await master.register(**relay(PS, w, SCALAR)) for w in WORKERS]
        steps += [await master.register(**relay(WORKERS[0], WORKERS[1], LARGE))]
        values = [np.asarray(float(i)) if i % 3 < 2 else np.full(1 << 20, float(i)) for i in range(30)]
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run(steps[i % 3], value)) for i, value in enumerate(values)]
        for value, done in zip(values, runs, strict=True):
            np.testing.assert_array_equal(done.result()[0], 4 * value)
        assert await nothing_open(master)


async def test_variables_outlive_their_master(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run, steps = Numbers(master), {n: await master.register(**s) for n, s in counter(PS, "kept").items()}
        assert await run(steps["assign"], np.arange(3.0)) == []
        await run(steps["assign_add"], np.ones(3))
    async with driving(cluster) as master:
        assert (await master.inventory())["kept", "v"] == Spec("float64", (3,))
        run, read = Numbers(master), await master.register(**counter(PS, "kept")["read"])
        np.testing.assert_array_equal((await run(read))[0], [1.0, 2.0, 3.0])
        await master.reset("kept")
        assert ("kept", "v") not in await master.inventory()
        with pytest.raises(GraphError, match=f"on {PS}: .*has no value"):
            await run(read)


async def test_a_dead_fetch_names_its_switch(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run, step = Numbers(master), await master.register(**dead(PS))
        assert (await run(step, np.asarray(True)))[0] == 1.0
        with pytest.raises(DeadTensorError, match="switch 'choice'"):
            await run(step, np.asarray(False))


async def test_a_failure_on_one_task_ends_the_step_on_all(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run, step = Numbers(master), await master.register(**failing(WORKERS[0], WORKERS[1]))
        with pytest.raises(QueueClosedError, match=f"^on {WORKERS[0]}: "):
            await run(step)
        assert await nothing_open(master)
        await master.reset("")


async def test_a_plan_that_a_node_cannot_run_is_refused_when_registered(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        plan = echo(PS, SCALAR)
        wrong = {"plans": {WORKERS[0]: plan["plans"][PS]}, "feeds": [[(0, PS)]], "fetches": []}
        with pytest.raises(InternalError, match=f"on {WORKERS[0]}: .*a plan of {PS}"):
            await master.register(**wrong)


async def test_a_cancelled_step_leaves_nothing_anywhere(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run = Numbers(master)
        steps = [await master.register(**waiting(*pair)) for pair in ((WORKERS[0], PS), (PS, WORKERS[1]))]

        async def all_wait() -> bool:
            return sum(s["steps"] for s in (await master.statistics()).values()) == 4

        for cancel_at_once in (True, False):
            runs = [asyncio.ensure_future(run(step)) for step in steps]
            if not cancel_at_once:
                await until(all_wait)
            for task in runs:
                task.cancel()
            assert [type(r) for r in await asyncio.gather(*runs, return_exceptions=True)] == [
                asyncio.CancelledError
            ] * 2
            assert await nothing_open(master)


async def test_a_step_is_cancelled_at_any_of_its_waits(cluster: LocalCluster) -> None:
    async with driving(cluster) as master:
        run, step = Numbers(master), await master.register(**relay(PS, WORKERS[0], Spec("float64", (1 << 16,))))
        value = np.ones(1 << 16)
        for turns in range(0, 120, 4):
            task = asyncio.ensure_future(run(step, value))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError | list)
        assert await nothing_open(master)
        np.testing.assert_array_equal((await run(step, value))[0], 4 * value)


async def test_steps_cancelled_at_random_moments_leave_nothing(cluster: LocalCluster) -> None:
    rng = random.Random(7)
    loop = asyncio.get_running_loop()
    async with driving(cluster, transfer_budget=1 << 20) as master:
        run = Numbers(master)
        pairs = ((PS, WORKERS[0]), (WORKERS[0], WORKERS[1]), (WORKERS[1], PS))
        steps = [await master.register(**relay(*pair, OPEN)) for pair in pairs]
        whole = 0
        for _ in range(30):
            values = [np.full(rng.choice([1, 600, 1 << 14, 1 << 18]), float(i)) for i in range(12)]
            runs = [asyncio.ensure_future(run(rng.choice(steps), value)) for value in values]
            for task in rng.sample(runs, 6):
                loop.call_later(rng.random() * 0.03, task.cancel)
            for value, ended in zip(values, await asyncio.gather(*runs, return_exceptions=True), strict=True):
                if not isinstance(ended, asyncio.CancelledError):
                    assert not isinstance(ended, BaseException), ended
                    np.testing.assert_array_equal(ended[0], 4 * value)
                    whole += 1
        assert whole >= 180
        assert await nothing_open(master)


async def test_a_node_answers_while_it_makes_a_plan_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(plan: Plan, host: Host) -> Executor:
        begun.set()
        assert go_on.wait(10)
        return Executor(plan, host)

    monkeypatch.setattr(plans_module, "Executor", slow)
    host, token = Host(PS), new_token()
    try:
        async with (
            node_module.NetworkNode(host, token).serving("127.0.0.1", 0) as server,
            Master({PS: ("127.0.0.1", server.port)}, token) as master,
            asyncio.TaskGroup() as tasks,
        ):
            registering = tasks.create_task(master.register(**echo(PS, SCALAR)))
            try:
                await asyncio.to_thread(begun.wait, 10)
                assert (await master.statistics())[PS]["plans"] == 0
            finally:
                go_on.set()
            assert (await Numbers(master)(await registering, np.asarray(2.0)))[0] == 4.0
    finally:
        await host.aclose()


# ── masters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_newer_master_of_the_same_name_takes_over(cluster: LocalCluster) -> None:
    async with driving(cluster, name="job") as old:
        step = await old.register(**waiting(WORKERS[0], WORKERS[1]))
        stuck = asyncio.ensure_future(Numbers(old)(step))
        async with driving(cluster, name="job") as new, driving(cluster, name="other") as other:
            with pytest.raises(RemoteError, match="session 'job' has a newer master"):
                await stuck
            assert await nothing_open(new)
            for master in (new, other):
                echoed = await master.register(**echo(WORKERS[0], SCALAR))
                assert (await Numbers(master)(echoed, np.asarray(2.0)))[0] == 4.0
        with pytest.raises(RemoteError):
            await Numbers(old)(step)


async def test_an_epoch_that_ended_never_returns(cluster: LocalCluster) -> None:
    async with driving(cluster, name="job") as old:
        again = Master(cluster.spec.tasks(), cluster.token, name="job")
        again.epoch = old.epoch
        with pytest.raises(RemoteError, match="newer master"):
            await again.open()
        assert await nothing_open(old)
    again = Master(cluster.spec.tasks(), cluster.token, name="job")
    again.epoch = old.epoch
    with pytest.raises(RemoteError, match="newer master"):
        await again.open()


async def test_a_masters_sudden_death_ends_its_steps(cluster: LocalCluster) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from cluster_plans import *
        from flowrt.net.master.master import Master

        async def main():
            addresses = {t: (h, int(p)) for t, h, p in (a.split(",") for a in sys.argv[2:])}
            async with Master(addresses, sys.argv[1]) as master:
                step = await master.register(**waiting(WORKERS[0], PS))
                print("running", flush=True)
                await master.run(step, [], number=1, seed=0)

        asyncio.run(main())
    """)
    places = [f"{task},{host},{port}" for task, (host, port) in cluster.spec.tasks().items()]
    path = os.environ | {"PYTHONPATH": PYTHONPATH}
    async with (
        running(*python(), "-c", program, cluster.token, *places, env=path) as process,
        driving(cluster) as master,
    ):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"running\n"

        async def runs() -> bool:
            return (await master.statistics())[WORKERS[0]]["steps"] == 1

        await until(runs)
        process.kill()
        await until(lambda: nothing_open(master), 10.0)


async def test_a_wrong_token_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(AuthenticationError, match=r"/job:.*/task:.*refused the token"):
        await Master(cluster.spec.tasks(), new_token()).open()


async def test_a_job_of_which_no_node_is_up_is_named_in_time(cluster: LocalCluster, unused_tcp_port: int) -> None:
    addresses = cluster.spec.tasks() | {"/job:chief/task:0": ("127.0.0.1", unused_tcp_port)}
    with pytest.raises(NodeLost, match=f"/job:chief/task:0: .*127.0.0.1:{unused_tcp_port}: Connection refused"):
        async with asyncio.timeout(10):
            await Master(addresses, cluster.token, patience=0.5).open()


async def test_an_address_of_another_task_is_found_out(cluster: LocalCluster) -> None:
    tasks = cluster.spec.tasks()
    with pytest.raises(RemoteError, match=f"{WORKERS[0]}: .* is {PS}: the cluster's addresses"):
        await Master({WORKERS[0]: tasks[PS]}, cluster.token).open()


# ── nodes that come and go ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_killed_node_fails_its_own_steps_and_no_others() -> None:
    async with LocalCluster(ps=1, worker=2) as cluster, driving(cluster) as master:
        run = Numbers(master)
        mine = await master.register(**waiting(WORKERS[0], WORKERS[1]))
        others = await master.register(**relay(PS, WORKERS[1], SCALAR))
        stuck = asyncio.ensure_future(run(mine))

        async def both_wait() -> bool:
            return sum(s["steps"] for s in (await master.statistics()).values()) == 2

        await until(both_wait)
        host, port = cluster.spec.tasks()[WORKERS[0]]
        cluster.processes[WORKERS[0]].kill()
        with pytest.raises(NodeLost, match=rf"{WORKERS[0]} \({host}:{port}\) was lost: "):
            async with asyncio.timeout(10):
                await stuck
        assert master.peers.lost == {WORKERS[0]}
        assert await nothing_open(master)
        assert (await run(others, np.asarray(1.0)))[0] == 4.0
        with pytest.raises(NodeLost, match=WORKERS[0]):
            await run(mine)
        assert [d.host for d in master.peers.devices] == [PS, WORKERS[1]]


async def test_a_stopped_node_is_suspected_and_a_cancelled_step_does_not_wait_for_it() -> None:
    async with LocalCluster(worker=2) as cluster, driving(cluster) as master:
        run, step = Numbers(master), await master.register(**waiting(WORKERS[0], WORKERS[1]))
        stuck = asyncio.ensure_future(run(step))
        pid = cluster.processes[WORKERS[0]].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):  # lost it would be after 30 s only
                while WORKERS[0] not in master.peers.suspects:
                    await master.wait_changed(master.peers.lost, master.peers.suspects)
            stuck.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait([stuck])
        finally:
            os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            while master.peers.suspects:
                await master.wait_changed(master.peers.lost, master.peers.suspects)
        await until(lambda: nothing_open(master))
        assert master.peers.lost == frozenset()


async def test_a_local_cluster_leaves_no_process_however_it_ends() -> None:
    pids: list[int] = []

    async def go_wrong() -> None:
        async with LocalCluster(worker=2, grace=0.5) as cluster:
            pids.extend(process.pid for process in cluster.processes.values())
            os.kill(pids[0], signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await go_wrong()
    assert len(pids) == 2
    assert not any(map(alive, pids))


async def test_an_interrupt_at_the_terminal_reaches_the_parent_alone(cluster: LocalCluster) -> None:
    groups = {os.getpgid(process.pid) for process in cluster.processes.values()}
    assert os.getpgid(0) not in groups


async def test_a_cluster_cancelled_while_it_starts_leaves_no_process() -> None:
    cluster = LocalCluster(worker=2)
    starting = asyncio.ensure_future(cluster.__aenter__())

    async def started() -> bool:
        return len(cluster.processes) == 2

    await until(started)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(alive(process.pid) for process in cluster.processes.values())


@pytest.fixture
def worker_command(tmp_path: Path) -> list[str]:
    token = tmp_path / "token"
    token.write_text(new_token())
    token.chmod(0o600)
    return [sys.executable, "-m", "flowrt.worker", "--job=ps", "--task=0", f"--token-file={token}"]


async def test_a_port_in_use_is_one_line_and_exit_code_2(cluster: LocalCluster, worker_command: list[str]) -> None:
    (_, taken) = cluster.spec.tasks()[PS]
    async with running(*worker_command, f"--bind=127.0.0.1:{taken}", stderr=subprocess.PIPE) as worker:
        out, err = await worker.communicate()
    assert (worker.returncode, out) == (2, b"")
    assert err.decode().startswith(f"flowrt worker: cannot listen on 127.0.0.1:{taken}: Address already in use")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("interruptible")
async def test_a_signal_ends_a_worker_with_exit_code_0(worker_command: list[str], number: signal.Signals) -> None:
    async with running(*worker_command, "--bind=127.0.0.1:0", stderr=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert (await worker.stdout.readline()).startswith(b"flowrt worker /job:ps/task:0 ready on 127.0.0.1:")
        worker.send_signal(number)
        assert await worker.communicate() == (b"", b"")
    assert worker.returncode == 0


@pytest.mark.usefixtures("interruptible")
async def test_a_worker_whose_parent_ignores_interrupts_ignores_them(worker_command: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    async with running(*worker_command, "--bind=127.0.0.1:0", stderr=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert b" ready on " in await worker.stdout.readline()
        assert ignores(worker.pid, signal.SIGINT)
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        await worker.communicate()
    assert worker.returncode == 0


async def test_nodes_do_not_outlive_a_parent_that_is_killed() -> None:
    program = textwrap.dedent("""
        import asyncio
        from flowrt.cluster.cluster import LocalCluster

        async def main():
            async with LocalCluster(ps=1, worker=1) as cluster:
                print(*(p.pid for p in cluster.processes.values()), flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """)
    async with running(sys.executable, "-c", program) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in (await parent.stdout.readline()).split()]
        assert len(pids) == 2
        nodes = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
        await parent.wait()
        for node in nodes:
            await ended(node)


async def test_a_program_that_is_killed_while_its_nodes_start_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = textwrap.dedent("""
        import asyncio
        from flowrt.cluster import cluster

        async def never_ready(task, process):
            print(process.pid, flush=True)
            await asyncio.Event().wait()

        cluster.ready = never_ready
        asyncio.run(cluster.LocalCluster(worker=1).__aenter__())
    """)
    async with running(sys.executable, "-c", program) as parent:
        assert parent.stdout is not None
        node = os.pidfd_open(int(await parent.stdout.readline()))
        parent.kill()
        await parent.wait()
        await ended(node)
    assert os.listdir(tmp_path) == []


async def test_a_node_goes_on_whom_nobody_listens_to(worker_command: list[str], unused_tcp_port: int) -> None:
    task, place = "/job:ps/task:0", ("127.0.0.1", unused_tcp_port)
    token = load_token(worker_command[-1].partition("=")[2])
    heard, said = os.pipe()
    os.close(heard)
    command = [*worker_command, f"--bind=127.0.0.1:{unused_tcp_port}"]
    async with running(*command, stdout=said, stderr=subprocess.PIPE) as worker:
        os.close(said)
        async with Master({task: place}, token, patience=30.0):
            worker.send_signal(signal.SIGTERM)
        _, err = await worker.communicate()
    assert worker.returncode == 0
    assert b"Error" not in err


async def test_a_node_is_told_its_token_by_stdin_and_says_if_that_is_none() -> None:
    command = [*python(), "-m", "flowrt.worker", "--job=ps", "--task=0", "--bind=127.0.0.1:0", "--token-file=-"]
    for text, expected in ((b"a token\n", 2), (b"", 2), (b"x" * 2000, 2)):
        async with running(*command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            _, err = await worker.communicate(text)
        assert (worker.returncode, err) == (expected, b"flowrt worker: the first line of stdin is no token\n")


async def test_a_node_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ResourceError, match="/job:worker/task:0 did not start"):
        async with LocalCluster(worker=1):
            pass
