"""Direct calls that let other threads run meanwhile: who holds what, and what may come between."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from session_world import assert_quiet, holders, host_of

import flowrt as fr
from flowrt.kernels.run import direct
from flowrt.op import lookup
from flowrt.session import step as steps

READERS, WRITING = range(2)
LARGE = 1 << 17  # elements: enough for a crew
PLAIN = fr.Options(optimize=False, threads=2)  # waits for no kernel of the helper process
pytestmark = pytest.mark.timeout(60)


class Slow:
    """y = x after some 60 ms; v grows by 1, or is added to y."""

    def __init__(self) -> None:
        with fr.Graph() as self.graph:
            self.x = fr.placeholder("float64", (2,), name="x")
            self.v = fr.Variable(np.float64(1), name="v")
            self.y = lookup("world_slow")(self.x)
            self.grow = self.v.assign_add(fr.sum(self.y) * 0.0 + 1.0)
            self.seen = self.y + self.v
            self.read = self.v.read()


def feed(value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full(2, value)


class Marks:
    """How many hold the one variable of a session, now: to read it, to write it."""

    def __init__(self, session: fr.BlockingSession) -> None:
        self._variables = host_of(session._session).variables
        (self._name,) = self._variables._slots

    def __getitem__(self, mark: int) -> int:
        return holders(self._variables, self._name)[mark]


@contextmanager
def in_the_middle(step: Callable[..., Any], *values: Any, of: Any, mark: int = WRITING) -> Iterator[Any]:
    """Inside the block ``step`` runs in another thread, and holds the variable with the marks ``of``.

    It is begun again where it was over before this thread had a processor to see that.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step, *values)
        while not of[mark]:
            if running.done():
                running.result()
                running = pool.submit(step, *values)
        yield running
        running.result()


def warmed(session: fr.BlockingSession, fetches: Any, x: Any, value: Any) -> Any:
    step = session.compile(fetches, [x])
    for _ in range(5):
        step(value)
    return step


def test_other_threads_run_while_a_step_does() -> None:
    m = Slow()
    with fr.BlockingSession(m.graph) as session:
        grow, held, met = warmed(session, m.grow, m.x, feed()), Marks(session), 0
        for _ in range(20):
            with in_the_middle(grow, feed(), of=held):
                assert sum(range(1000)) == 499500
                met += held[WRITING]
            if met:
                break
        assert met
        assert_quiet(session._session)


def test_who_wants_what_a_step_writes_waits_for_its_end() -> None:
    m = Slow()
    with fr.BlockingSession(m.graph) as session, ThreadPoolExecutor(3) as pool:
        grow, read = warmed(session, m.grow, m.x, feed()), session.compile(m.read)
        before, grown = float(read()), itertools.count(1)
        for _ in range(3):
            with in_the_middle(lambda: (next(grown), grow(feed())), of=Marks(session)):
                later = [pool.submit(read), pool.submit(session.run, m.v), pool.submit(grow, feed())]
            now = before + next(grown)
            assert now - 1 <= float(later[0].result()) <= now
            assert now - 1 <= float(later[1].result()) <= now
            later[2].result()
            assert float(read()) == now
        assert_quiet(session._session)


def test_readers_run_side_by_side() -> None:
    m = Slow()
    with fr.BlockingSession(m.graph) as session, ThreadPoolExecutor(1) as pool:
        seen, read, held = warmed(session, m.seen, m.x, feed()), session.compile(m.read), Marks(session)
        for _ in range(3):
            read()
        most = 0
        for _ in range(20):
            with in_the_middle(seen, feed(), of=held, mark=READERS):
                answers = [float(read()) for _ in range(3)]
                more = pool.submit(seen, feed(2.0))
                while 0 < held[READERS] < 2:
                    pass
                most = max(most, held[READERS])
            assert answers == [1.0] * 3
            assert more.result().tolist() == seen(feed(2.0)).tolist()
            if most == 2:
                break
        assert most == 2
        assert_quiet(session._session)


@pytest.mark.parametrize("what", ["reset", "assign", "close"])
def test_what_happens_to_a_session_meanwhile_leaves_a_running_step_whole(what: str) -> None:
    m = Slow()
    session = fr.BlockingSession(m.graph).__enter__()
    step = warmed(session, m.seen, m.x, feed())
    expected = step(feed())
    with in_the_middle(step, feed(), of=Marks(session), mark=READERS) as running:
        if what == "reset":
            session.reset()
        elif what == "assign":
            session.run(m.grow, {m.x: feed()})
        else:
            session.__exit__(None, None, None)
        gc.collect()
    assert running.result().tolist() == expected.tolist()
    if what == "reset":
        with pytest.raises(fr.GraphError, match="has no value"):
            step(feed())
    elif what == "assign":
        assert step(feed()).tolist() == (expected + 1).tolist()
    else:
        with pytest.raises(fr.ClosedError):
            step(feed())
        return
    assert_quiet(session._session)
    session.__exit__(None, None, None)


@pytest.mark.parametrize("waited_for", [False, True])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_comes_when_the_step_is_over_and_leaves_nothing_held(waited_for: bool) -> None:
    m = Slow()
    with fr.BlockingSession(m.graph) as session, ThreadPoolExecutor(2) as pool:
        grow, held = warmed(session, m.grow, m.x, feed()), Marks(session)
        main, waiting = threading.get_ident(), host_of(session._session).variables._waiting

        def interrupt() -> float:
            """Answers how far it had come when the interrupted step was over."""
            while True:  # on a busy machine the step may be over before anybody waits for it
                while not held[WRITING]:
                    time.sleep(0)
                seen = pool.submit(session.run, m.v) if waited_for else None
                while seen is not None and not waiting and held[WRITING]:
                    time.sleep(0)
                if seen is None or waiting:
                    signal.pthread_kill(main, signal.SIGINT)
                    return float(session.run(m.v) if seen is None else seen.result())

        told = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            deque(map(grow, itertools.repeat(feed())), maxlen=0)
        reached = told.result()
        assert float(session.run(m.v)) == reached
        grow(feed())
        assert float(session.run(m.v)) == reached + 1
        assert_quiet(session._session)


class Large:
    """Many elements: y = 2x + 1, a total, and what fails for negative entries."""

    def __init__(self) -> None:
        with fr.Graph() as self.graph:
            self.x = fr.placeholder("float32", (None,), name="x")
            self.total = fr.Variable(np.float32(0), name="total")
            self.y = fr.tanh(self.x) * 2.0 + 1.0
            self.checked = lookup("world_checked")(self.y)
            self.grow = self.total.assign_add(self.x[0] + fr.min(self.checked) * 0.0)


def large(value: float, size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.full(size, value, np.float32)


def of(value: float) -> float:
    return float(np.tanh(np.float32(value)) * 2 + 1)


@pytest.mark.parametrize("shared", [False, True])
def test_a_long_step_takes_no_detour_once_it_is_known(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct.available():
        pytest.skip("this interpreter or NumPy has another layout")
    slow, many, detours = Slow(), Large(), []
    graph, x, fetches, value = (
        (many.graph, many.x, many.grow, large(1)) if shared else (slow.graph, slow.x, slow.grow, feed())
    )
    with fr.BlockingSession(graph, options=PLAIN) as session:
        step = warmed(session, fetches, x, value)
        arrays = steps.Step.arrays
        monkeypatch.setattr(steps.Step, "arrays", lambda self, values: detours.append(values) or arrays(self, values))
        for _ in range(3):
            step(value)
        assert not detours
        (executor,) = [made.registered for made in session._session._steps.values() if made.registered.tapes._tapes][
            -1:
        ]
        (tape,) = executor.tapes._tapes.values()
        assert (tape.pace is not None and tape.pace.division is not None) is shared


def test_threads_that_share_a_crew_and_a_step_lose_no_update() -> None:
    m = Large()
    with fr.BlockingSession(m.graph, options=PLAIN) as session:
        step = warmed(session, [m.y, m.grow], m.x, large(0))

        def work(number: int) -> None:
            x = large(number)
            for _ in range(25):
                y, _ = step(x)
                np.testing.assert_allclose(y, of(number), rtol=1e-5)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert session.run(m.total) == 25 * (0 + 1 + 2 + 3)
        assert_quiet(session._session)


def test_steps_that_share_some_of_their_variables_lose_no_update() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (), name="x")
        a, b, c = (fr.Variable(np.zeros(3), name=name) for name in "abc")
        both, other, all_three = [a, b], [b, c], [a, b, c]
        grow = [[v.assign_add(fr.broadcast_to(x, (3,))) for v in some] for some in (both, other, [a])]
    with fr.BlockingSession(graph, options=PLAIN) as session:
        steps = [session.compile(form, [x]) for form in grow]
        read = session.compile(all_three)
        whole: list[bool] = []

        def work(number: int) -> None:
            for turn in range(300):
                steps[(number + turn) % 3](np.float64(number))
                seen = read()
                whole.append(all(value.tolist() == [value[0]] * 3 for value in seen))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(1, 5)))
        assert all(whole)
        assert [float(value[0]) for value in read()] == [100.0 * 2 * 10, 100.0 * 2 * 10, 100.0 * 10]
        assert_quiet(session._session)


async def test_tasks_and_threads_share_a_session() -> None:
    m = Large()
    async with fr.Session(m.graph, options=PLAIN) as session:
        step = session.compile([m.y, m.grow], [m.x])

        async def work(number: int) -> None:
            for _ in range(25):
                y, _ = await step(large(number))
                np.testing.assert_allclose(y, of(number), rtol=1e-5)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(work(number))
        assert await session.run(m.total) == 25 * (0 + 1 + 2 + 3)
        assert_quiet(session)


def test_a_shared_tape_that_fails_is_named_and_holds_nothing() -> None:
    m = Large()
    with fr.BlockingSession(m.graph, options=PLAIN) as session:
        step = warmed(session, [m.y, m.grow], m.x, large(1))
        grown = float(session.run(m.total))
        for _ in range(10):
            with pytest.raises(fr.FlowrtError, match=r"world_checked.*an index is out of range"):
                step(large(-3))
            assert_quiet(session._session)
        assert session.run(m.total) == grown
        np.testing.assert_allclose(step(large(1))[0], of(1), rtol=1e-5)


def test_feeds_of_other_sizes_in_between_are_right() -> None:
    m = Large()
    rng = np.random.default_rng(0)
    with fr.BlockingSession(m.graph, options=PLAIN) as session:
        step = warmed(session, m.y, m.x, large(1))
        for size in (LARGE, *rng.integers(1, LARGE, 5), LARGE, 1, LARGE, LARGE):
            x = rng.standard_normal(int(size)).astype(np.float32)
            np.testing.assert_allclose(step(x), np.tanh(x) * 2 + 1, rtol=1e-4, atol=1e-5)


def test_outputs_are_counted_and_refused_where_there_is_no_room() -> None:
    m = Large()
    with fr.BlockingSession(m.graph, options=replace(PLAIN, memory_limit=32 << 20)) as session:
        step = warmed(session, m.y, m.x, large(1))
        memory = host_of(session._session).memory
        before = memory.held
        kept = [step(large(1))]
        assert memory.held == before + 4 * LARGE
        with pytest.raises(fr.ResourceError, match="outputs"):
            kept.extend(step(large(1)) for _ in range(100))
        kept.clear()
        gc.collect()
        assert memory.held == before
        np.testing.assert_allclose(step(large(1)), of(1), rtol=1e-5)


def test_no_reference_is_lost_or_kept() -> None:
    m = Slow()
    with fr.BlockingSession(m.graph) as session:
        step, x = warmed(session, [m.y, m.grow], m.x, feed()), feed()
        (slot,) = host_of(session._session).variables._slots.values()
        (together,) = host_of(session._session).variables._together
        counted = (x, slot.value, together(), together().memory, step, session)
        gc.collect()
        before = [sys.getrefcount(value) for value in counted]
        for _ in range(3):
            step(x)
        gc.collect()
        assert [sys.getrefcount(value) for value in counted] == before
