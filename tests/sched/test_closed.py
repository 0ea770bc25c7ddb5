"""Plans that are run over and over by one call: the same as their executor runs, number by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import FlowrtError, ResourceError, SpecError
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.kernels.launch import REPEATED
from flowrt.kernels.run.direct import available
from flowrt.sched.drivers.closed import Closed, _fits

if TYPE_CHECKING:
    from flowrt.sched.executor import Executor

SEED = 5


def built() -> tuple[fr.Graph, list[Any]]:
    """Rows of a table, their sum, a draw, and a table that moves with every run."""
    with fr.Graph() as graph:
        table = fr.Variable(np.arange(12, dtype=np.float32).reshape(6, 2))
        moved = fr.Variable(np.zeros(3, np.float32), name="moved")
        rows = fr.take(table, fr.placeholder("int32", (None,), name="rows"))
        drawn = fr.random.uniform((3,), seed=1)
        with fr.control_dependencies([moved.assign_add(drawn)]):
            fetches = [fr.identity(rows), fr.sum(rows), fr.identity(drawn)]
    return graph, fetches


async def executor_of(session: fr.Session, fetches: list[Any]) -> tuple[Executor, Any]:
    (fed,) = [node.outputs[0] for node in session.graph.nodes if node.name == "rows"]
    await session.run(fetches, {fed: np.int32([0])})
    registered: Executor = session._step(fetches, (fed,)).registered
    return registered, fed


async def test_runs_are_those_of_the_executor_with_the_numbers_that_are_told() -> None:
    graph, fetches = built()
    async with fr.Session(graph) as session:
        executor, _ = await executor_of(session, fetches)
        closed, rows = Closed(executor, SEED), np.int32([5, 0, 5])
        for number in (*range(1, 40), 3, 3, REPEATED + 3, 70):
            found, expected = closed.run_now([rows], number), executor.run_now([rows], number, SEED)
            if found is None or expected is None:
                continue  # kernels were not there yet
            for one, other in zip(found, expected, strict=True):
                assert (type(one), one.dtype, one.shape) == (np.ndarray, other.dtype, other.shape)
                np.testing.assert_array_equal(one, other)
        for other in ([1], [2, 2, 2, 2], [5, 0, 5]):
            found = closed.run_now([np.int32(other)], 9)
            if found is not None:
                np.testing.assert_array_equal(found[0], np.arange(12).reshape(6, 2)[other])


@pytest.mark.skipif(not available(), reason="no step is run by a direct call here")
async def test_what_is_fetched_of_the_feeds_is_they_and_costs_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder("float32", (None,), name="rows"), fr.placeholder("float32", (), name="y")
        fetches = [x + y, x, fr.sum(x), y]
    async with fr.Session(graph) as session:
        given = [np.float32([1, 2]), np.float32(3)]
        await session.run(fetches, {x: given[0], y: given[1]})
        closed = Closed(session._step(fetches, (x, y)).registered, SEED)
        given = [np.asarray(value) for value in given]
        with monkeypatch.context() as context:  # as where kernels are not there yet
            context.setattr(closed.executor, "run_now", lambda *how: None)
            assert closed.run_now(given, 0) is None
        for number in range(40):
            found = closed.run_now(given, number)
            if found is None:
                continue  # kernels were not there yet
            for one, expected in zip(found, ([4, 5], [1, 2], 3, 3), strict=True):
                np.testing.assert_array_equal(one, expected)
        assert found is not None
        assert found[1] is given[0]
        assert found[3] is given[1]
        monkeypatch.setattr(closed.executor, "run_now", lambda *how: pytest.fail("it was run plainly"))
        assert closed.run_now(given, 41) is not None


async def test_two_callers_of_one_plan_have_numbers_of_their_own() -> None:
    graph, fetches = built()
    async with fr.Session(graph) as session:
        executor, _ = await executor_of(session, fetches)
        first, second, rows = Closed(executor, SEED), Closed(executor, SEED + 1), np.int32([1])
        for number in range(60):
            draws = [
                (closed.run_now([rows], n) or [None])[-1] for closed, n in ((first, 7), (second, 7), (first, number))
            ]
            again = [executor.run_now([rows], n, seed) for n, seed in ((7, SEED), (7, SEED + 1), (number, SEED))]
            for found, expected in zip(draws, again, strict=True):
                if found is not None and expected is not None:
                    np.testing.assert_array_equal(found, expected[-1])


async def test_a_failure_names_the_node_and_later_runs_go_well() -> None:
    graph, fetches = built()
    async with fr.Session(graph) as session:
        executor, _ = await executor_of(session, fetches)
        closed = Closed(executor, SEED)
        for _ in range(20):
            assert closed.run_now([np.int32([1])], 1) is not None
            with pytest.raises(FlowrtError, match="an index is out of range"):
                closed.run_now([np.int32([9])], 1)


async def test_what_does_not_fit_is_refused_whether_or_not_a_direct_call_runs_the_rest() -> None:
    graph, fetches = built()
    async with fr.Session(graph) as session:
        executor, _ = await executor_of(session, fetches)
        closed = Closed(executor, SEED, "replica 3 of 'job'")
        for _ in range(20):
            with pytest.raises(SpecError, match=r"rows .* of replica 3 of 'job': expected int32.*, float32\[1\] came"):
                closed.run_now([np.float32([1])], 1)
            with pytest.raises(ResourceError, match=r"of replica 3 of 'job' was not received: no room"):
                closed.run_now(["no room"], 1)  # type: ignore[list-item]
            assert closed.run_now([np.int32([1])], 1) is not None


def test_what_is_received_fits_if_it_is_an_array_of_the_dtype_and_shape_that_come_there() -> None:
    feed = PlanFeed("x", Spec("float32", (None, 2)), "")
    assert _fits(np.zeros((3, 2), "float32"), feed)
    for other in (np.zeros((3, 2)), np.zeros((3, 1), "float32"), np.float32(1), "no room"):
        assert not _fits(other, feed)
