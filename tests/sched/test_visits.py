"""Steps that are one region of another device's: what is such a step, and what becomes of those that come together."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr
from flowrt.base.errors import ClosedError
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.visits import VisitRunner

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = fr.Options(devices=("arena:0", "cpu:0"))
THREADS, STEPS = 4, 50


@pytest.fixture(autouse=True)
def arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    import_module("arena")


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each visit came about that is made."""
    made: list[str] = []
    for name in ("run", "run_now"):
        monkeypatch.setattr(VisitRunner, name, _noted(name, getattr(VisitRunner, name), made))
    return made


def _noted(name: str, method: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    def visit(*args: Any) -> Any:
        made.append(name)
        return method(*args)

    return visit


def on_device(x: Any) -> Any:
    with fr.device("arena:0"):
        return fr.exp(x)


def on_host(x: Any) -> Any:
    with fr.device("cpu:0"):
        return fr.log(x)


@pytest.mark.parametrize(
    ("compute", "is_visit"),
    [
        (on_device, True),
        (lambda x: [on_device(x), on_device(x + 1), x], True),
        (lambda x: on_host(on_device(x)), False),
        (lambda x: on_device(on_host(x)), False),
        (lambda x: [on_device(x), on_host(x)], False),
        (on_host, False),
    ],
    ids=["one result", "results and a feed", "host after", "host before", "host beside", "host alone"],
)
async def test_a_step_that_is_one_region_is_a_visit(
    compute: Callable[[Any], Any], is_visit: bool, visits: list[str]
) -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (3,))
        y = compute(x)
    given = np.float32([1, 2, 3])
    async with fr.Session(graph, options=BOTH) as session:
        found = await session.run(y, {x: given})
    assert np.isfinite(found).all()
    assert visits == ["run"] * is_visit


def test_a_thread_that_waits_visits_by_itself(visits: list[str]) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,))
        y = on_device(x)
    with fr.BlockingSession(graph, options=BOTH) as session:
        step = session.compile(y, [x])
        for size in (3, 3, 4, 3):
            np.testing.assert_allclose(step(np.zeros(size, np.float32)), np.ones(size))
    assert visits == ["run", "run_now", "run", "run_now"]  # sizes that are new are looked at first, whether they fit


def test_visits_that_write_the_same_variable_come_one_after_another() -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        count = fr.Variable(np.zeros(2, np.int64), name="count")
        add = count.assign_add(fr.constant([1, 2]))
    with fr.BlockingSession(graph, options=BOTH) as session, ThreadPoolExecutor(THREADS) as pool:
        step = session.compile(add)
        list(pool.map(lambda _: [step() for _ in range(STEPS)], range(THREADS)))
        assert list(session.run(count)) == [THREADS * STEPS, 2 * THREADS * STEPS]


async def test_a_visit_lets_go_of_the_variables_that_it_wrote(visits: list[str]) -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("int64", (2,))
        count = fr.Variable(np.zeros(2, np.int64), name="count")
        add = count.assign_add(x)
    async with fr.Session(graph, options=BOTH) as session:
        for _ in range(3):
            await session.run(add, {x: np.int64([1, 2])})
        assert list(await session.run(count)) == [3, 6]
    assert visits == ["run"] * 4


def test_a_lane_that_is_called_answers_raises_and_ends() -> None:
    lanes = Lanes(1)

    def nothing() -> None:
        pytest.fail("nobody interrupts")

    assert lanes.call(divmod, 7, 2, stop=nothing) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        lanes.call(divmod, 7, 0, stop=nothing)
    lanes.close()
    with pytest.raises(ClosedError, match="the lanes are closed"):
        lanes.call(divmod, 7, 2, stop=nothing)
