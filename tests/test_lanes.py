from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from flowrt.errors import ClosedError
from flowrt.sched.lanes import Lanes, _cgroup_cores, usable_cores

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_function_runs_in_a_lane_and_its_answer_or_error_comes_back() -> None:
    lanes = Lanes(2, "test")
    name = await lanes.run(lambda: threading.current_thread().name)
    assert name.startswith("flowrt-test")
    with pytest.raises(ZeroDivisionError):
        await lanes.run(lambda: 1 // 0)
    lanes.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("flowrt-test")]


async def test_cancellation_is_delivered_once_the_function_returned_and_asks_it_to_stop() -> None:
    lanes = Lanes(1, "test")
    began, stop, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        assert stop.wait(10)
        ended.append(True)

    task = asyncio.ensure_future(lanes.run(work, stop=stop.set))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    lanes.close()


async def test_many_cancellations_are_one() -> None:
    lanes = Lanes(1, "test")
    release = threading.Event()
    task = asyncio.ensure_future(lanes.run(release.wait, 10))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    lanes.close()


async def test_who_came_first_is_served_first() -> None:
    """Two that come again and again take turns, also where one of them hands in more."""
    lanes, served = Lanes(1, "test"), []
    both = asyncio.Barrier(2)

    async def come(label: str, often: int) -> None:
        await both.wait()
        for _ in range(often):
            await lanes.run(served.append, label)

    async with asyncio.TaskGroup() as group:
        group.create_task(come("a", 30))
        group.create_task(come("b", 30))
    for number in range(1, 30):
        assert abs(served[:number].count("a") - served[:number].count("b")) <= 1
    lanes.close()


async def test_closed_lanes_finish_what_they_were_given_and_take_no_more() -> None:
    lanes, done = Lanes(1, "test"), []
    release = threading.Event()
    tasks = [asyncio.ensure_future(lanes.run(release.wait, 10))]
    tasks += [asyncio.ensure_future(lanes.run(done.append, number)) for number in range(5)]
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(release.set)
    await asyncio.to_thread(lanes.close)
    with pytest.raises(ClosedError):
        await lanes.run(done.append, 5)
    await asyncio.gather(*tasks)
    assert done == [0, 1, 2, 3, 4]


def test_lanes_outlive_a_loop_that_was_left() -> None:
    lanes, release = Lanes(1, "test"), threading.Event()
    loop = asyncio.new_event_loop()
    task = loop.create_task(lanes.run(release.wait, 10))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    release.set()
    assert asyncio.run(lanes.run(lambda: 7)) == 7
    lanes.close()


async def test_an_error_beside_a_cancellation_is_its_cause() -> None:
    lanes = Lanes(1, "test")
    release = threading.Event()

    def work() -> None:
        release.wait(10)
        raise ValueError("broken")

    task = asyncio.ensure_future(lanes.run(work, stop=release.set))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, ValueError)
    lanes.close()


def test_cores_are_those_of_the_affinity_cut_down_to_the_cgroups_quota(tmp_path: Path) -> None:
    assert usable_cores() >= 1
    mine = tmp_path / "cgroup"
    root = tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    assert _cgroup_cores(8, root, mine) == 8
    mine.write_text("0::/a/b\n")
    assert _cgroup_cores(8, root, mine) == 8
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert _cgroup_cores(8, root, mine) == 8
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert _cgroup_cores(8, root, mine) == 3
    (root / "cpu.max").write_text("rubbish\n")
    assert _cgroup_cores(8, root, mine) == 3
    (root / "a" / "b" / "cpu.max").write_text("50000 100000\n")
    assert _cgroup_cores(8, root, mine) == 1


def test_blas_has_one_thread_while_a_host_is_open_and_its_own_again_afterwards() -> None:
    script = """
import asyncio
import numpy
import flowrt as fr
from flowrt.kernels.pools import pool_threads
from flowrt.sched.host import Host

async def main():
    before = pool_threads()
    first, second = Host(threads=1), Host(threads=1)
    with fr.Graph() as graph:
        y = fr.matmul(fr.ones((300, 300)), fr.ones((300, 300)))
    async with fr.Session(graph, options=fr.Options(optimize=False)) as session:
        await session.run(y)
        assert set(pool_threads().values()) <= {1}, pool_threads()
    await first.aclose()
    await first.aclose()
    assert set(pool_threads().values()) <= {1}, pool_threads()
    await second.aclose()
    after = pool_threads()
    assert all(threads == before.get(package, before.get("numpy")) for package, threads in after.items()), after
    print(before)

asyncio.run(main())
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
