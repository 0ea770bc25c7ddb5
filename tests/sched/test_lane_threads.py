"""The threads of a device: as many as are needed at once, and no more than there may be."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import NoReturn

import pytest

import flowrt as fr
from flowrt.base.errors import ClosedError, ResourceError
from flowrt.sched.host.lanes import Crew, Lanes


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


def begin_at_most(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have the system give so many threads more, and then none."""
    start, left = threading.Thread.start, [None] * count

    def begin(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)


async def test_where_there_can_be_no_more_threads_the_first_does_all_and_none_at_all_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin_at_most(monkeypatch, 1)
    lanes, others = Lanes(3), Lanes(3)
    try:
        async with asyncio.timeout(20):
            first, *more = await asyncio.gather(*[lanes.run(threading.get_ident) for _ in range(6)])
            assert {first} == {*more}
            with pytest.raises(ResourceError, match="no more threads"):
                await others.run(threading.get_ident)
            monkeypatch.undo()
            assert await others.run(threading.get_ident) != threading.get_ident()  # there are some again
            assert others._busy == 0
    finally:
        lanes.close()
        others.close()


@pytest.mark.parametrize("count", [0, 1])
def test_a_crew_has_the_helpers_that_there_can_be(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    files = len(os.listdir("/dev/fd"))
    begin_at_most(monkeypatch, count)
    crew = Crew(4, "few")
    assert crew.board == crew.board != 0
    assert len(crew._helpers) == count
    crew.close()
    assert len(os.listdir("/dev/fd")) == files


def test_where_there_can_be_no_more_files_whoever_runs_a_tape_does_so_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe() -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pipe", pipe)
    crew = Crew(4, "none")
    assert crew.board == 0
    monkeypatch.undo()
    assert crew.board != 0
    crew.close()


def test_a_session_for_which_there_is_no_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_at_most(monkeypatch, 0)
    with pytest.raises(ResourceError, match="no more threads"), fr.BlockingSession(fr.Graph()):
        pass
