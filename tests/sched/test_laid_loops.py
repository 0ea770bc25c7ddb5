"""The iterations of loops are shared by a crew as tapes are: the same bits, the same failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.sched.tape import pace, schedule

Build = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def shared_eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if every launch took long."""
    monkeypatch.setattr(schedule, "GAIN", float("inf"))
    monkeypatch.setattr(schedule, "WORTHWHILE", 0.0)
    monkeypatch.setattr(schedule, "TINY", 0.0)
    monkeypatch.setattr(schedule, "CHUNK", 1e-9)
    monkeypatch.setattr(schedule, "OVERHEAD", 0.0)
    monkeypatch.setattr(pace, "WORTHWHILE", 0.0)
    monkeypatch.setattr(pace, "ITERATION", 0.0)
    monkeypatch.setattr(pace, "CLOCK", 0)


def _x(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


W = _x(40, 40) / 10


def _cell(x: Any) -> Any:
    """A recurrence, and its slopes."""
    w = fr.constant(W)
    last, ys = fr.scan(lambda h, row: (fr.tanh(row @ w + h @ w), h * row), fr.zeros((30, 40)), x)
    return [last, ys, *fr.gradients(fr.sum(last) + fr.sum(ys * ys), [x, w])]


def _nested(x: Any) -> Any:
    """A loop in a loop, and one in a branch."""

    def inner(h: Any) -> Any:
        return fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, fr.sin(v @ fr.constant(W)) + h), (0, h))[1]

    def iteration(h: Any, row: Any) -> Any:
        h = fr.tanh(inner(h) + row)
        return fr.cond(fr.sum(h) > 0, lambda: inner(h), lambda: h * 0.5), fr.max(h)

    return list(fr.scan(iteration, fr.zeros((30, 40)), x))


def _two(x: Any) -> Any:
    """Two loops that need nothing of each other, then one that needs both."""

    def run(reverse: bool) -> Any:
        iteration = lambda h, row: (fr.tanh(h @ fr.constant(W) + row),) * 2  # noqa: E731
        return fr.scan(iteration, fr.zeros((30, 40)), x, reverse=reverse)[1]

    return fr.scan(lambda h, rows: (h + rows[0] * rows[1], None), fr.zeros((30, 40)), (run(False), run(True)))[0]


def _answers(build: Build, threads: int, x: np.ndarray[Any, Any], times: int = 8) -> list[Any]:
    with fr.Graph() as graph:
        feed = fr.placeholder("float32", x.shape)
        fetches = build(feed)
    with fr.BlockingSession(
        graph, options=fr.Options(threads=threads, optimize=False)
    ) as session:  # nothing to wait for
        step = session.compile(fetches, [feed])
        return [step(x) for _ in range(times)]


@pytest.mark.parametrize("build", [_cell, _nested, _two])
def test_iterations_give_the_same_bits_on_any_number_of_threads(build: Build) -> None:
    x = _x(6, 30, 40)
    (expected,) = _answers(build, 1, x, 1)
    for threads in (2, 3):
        for answer in _answers(build, threads, x):
            for got, want in zip(answer, expected, strict=True):
                np.testing.assert_array_equal(got, want)


def test_iterations_are_shared_where_launches_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    decide = pace.Pace.decide
    monkeypatch.setattr(pace.Pace, "decide", lambda self, seconds: (decide(self, seconds), made.append(self))[0])
    monkeypatch.setattr(pace, "_seconds", lambda nanoseconds: (nanoseconds * 1e-7).tolist())  # as of a slow machine
    _answers(_cell, 2, _x(6, 30, 40))
    assert any(one.division is not None and one.division.loops for one in made)
    assert any(task.own for one in made if one.division is not None for task in one.division.schedule.tasks)


def test_threads_may_run_one_step_with_loops_at_once() -> None:
    x = _x(6, 30, 40)
    ((expected, *_),) = _answers(_cell, 1, x, 1)
    with fr.Graph() as graph:
        feed = fr.placeholder("float32", x.shape)
        fetches = _cell(feed)
    with (
        fr.BlockingSession(graph, options=fr.Options(threads=2, optimize=False)) as session,
        ThreadPoolExecutor(3) as pool,
    ):
        step = session.compile(fetches, [feed])
        for last, *_ in pool.map(lambda _: step(x), range(60)):
            np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_names_the_node_inside_and_the_turn(threads: int) -> None:
    with fr.Graph() as graph:
        table, n = fr.placeholder("float32", (5, 40)), fr.placeholder("int64", ())
        wide = fr.placeholder("float32", (30, 40))
        body = lambda i, s: (i + 1, s @ fr.constant(W) + fr.take(table, i))  # noqa: E731
        total = fr.while_loop(lambda i, s: i < n, body, (0, wide))[1]
    with fr.BlockingSession(graph, options=fr.Options(threads=threads)) as session:
        step = session.compile(total, [table, n, wide])
        for _ in range(6):
            step(_x(5, 40), np.asarray(5), _x(30, 40))
            with pytest.raises(
                fr.FlowrtError, match=r"take .*test_laid_loops.py.* in iteration 6 of loop .*out of range"
            ):
                step(_x(5, 40), np.asarray(8), _x(30, 40))
