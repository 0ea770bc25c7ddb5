"""The threads of a device: as many as are needed at once, and no more than there may be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowrt.base.errors import ClosedError
from flowrt.sched.host.lanes import Lanes


async def test_as_many_kernels_run_at_once_as_there_are_threads() -> None:
    lanes, meeting = Lanes(3), threading.Barrier(3)
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            places = [group.create_task(lanes.run(meeting.wait, 10)) for _ in range(3)]
        assert sorted(place.result() for place in places) == [0, 1, 2]
    finally:
        lanes.close()


async def test_what_comes_when_all_threads_are_busy_waits_its_turn() -> None:
    lanes, go_on, order = Lanes(2), threading.Event(), []
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(lanes.run(go_on.wait, 10))
            await asyncio.sleep(0)
            waiting = [group.create_task(lanes.run(order.append, number)) for number in range(5)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            assert len(lanes._started) == 2
            go_on.set()
        assert sorted(order) == list(range(5))
    finally:
        lanes.close()


async def test_lanes_are_wanted_while_somebody_waits_for_one() -> None:
    lanes, go_on = Lanes(1), threading.Event()
    try:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(lanes.run(lambda: go_on.wait(10) and lanes.wanted))
            await asyncio.sleep(0)
            other = group.create_task(lanes.run(lambda: lanes.wanted))
            await asyncio.sleep(0)
            assert lanes.wanted
            go_on.set()
        assert not other.result()
        assert not lanes.wanted
    finally:
        lanes.close()


async def test_kernels_that_run_one_after_another_need_one_thread() -> None:
    lanes = Lanes(4)
    try:
        threads = {await lanes.run(threading.get_ident) for _ in range(10)}
        assert len(threads) == 1
        assert threading.get_ident() not in threads
    finally:
        lanes.close()
    with pytest.raises(ClosedError):
        await lanes.run(threading.get_ident)
