"""Short steps run by one call of machine code: what it answers, and when it leaves a step to the longer way."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import session_world  # noqa: F401  (its ops)

import flowrt as fr
from flowrt.kernels.run import direct
from flowrt.op import lookup
from flowrt.sched.tape.tape import Tape
from flowrt.session import step as steps

X = np.arange(3, dtype=np.float32)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(params=[True, False], ids=["direct", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Once with direct calls, once as on an interpreter that has none."""
    if not request.param:
        monkeypatch.setattr(direct, "available", lambda: False)
    elif not direct.available():
        pytest.skip("this interpreter or NumPy has another layout")
    return bool(request.param)


class Model:
    """y = 2x + 1, a total that grows by the sum of x, draws, and what fails for negative entries."""

    def __init__(self) -> None:
        with fr.Graph() as self.graph:
            self.x = fr.placeholder("float32", (None,), name="x")
            self.total = fr.Variable(0.0, name="total")
            self.y = self.x * 2.0 + 1.0
            self.grow = self.total.assign_add(fr.sum(self.x))
            self.drawn = fr.random.uniform((2,)) + self.x[:1]
            self.checked = lookup("world_checked")(self.x)


def warm(step: Any, *values: Any) -> Any:
    """The answer of the first run that may be direct: the first is compiled in a lane, the second makes the plan."""
    for _ in range(2):
        step(*values)
    return step(*values)


def test_the_answer_has_the_form_of_the_fetches(way: bool) -> None:
    m = Model()
    low = fr.min
    with m.graph:
        least = low(m.x)
    with fr.BlockingSession(m.graph) as session:
        one = warm(session.compile(m.y, [m.x]), X)
        assert one.tolist() == [1, 3, 5]
        assert type(one) is np.ndarray
        assert one.base is None
        scalar = warm(session.compile(least, [m.x]), X)
        assert type(scalar) is np.float32
        assert scalar == 0
        assert warm(session.compile(m.grow, [m.x]), X) is None
        several = warm(session.compile([least, m.grow, m.y], [m.x]), X)
        assert type(several) is list
        assert [several[0], several[1], several[2].tolist()] == [0, None, [1, 3, 5]]
        assert type(warm(session.compile((m.y, least), [m.x]), X)) is tuple
        named = warm(session.compile({"a": least, "b": [m.grow, Pair(m.y, least)]}, [m.x]), X)
        assert list(named) == ["a", "b"]
        assert named["a"] == 0
        assert named["b"][0] is None
        assert type(named["b"][1]) is Pair
        assert named["b"][1].first.tolist() == [1, 3, 5]
        assert warm(session.compile([], [m.x]), X) == []
        assert session.run(m.total) == 3 * 9


def test_the_callable_is_machine_code_where_there_is_some(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile(m.y, [m.x])
        assert (type(step) is type(len)) is way
        warm(step, X)
        np.testing.assert_array_equal(step(x=X), step(X))
        with pytest.raises(fr.FeedError, match="no feed of the step is named 'z'"):
            step(z=X)


def test_a_step_says_what_it_is_and_is_not_pickled(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile(m.y, [m.x])
        assert copy.deepcopy(step) is step
        if way:
            assert "method step of StepWords" in repr(step)
            with pytest.raises(fr.GraphError, match=r"test_direct.py:\d+: a compiled step is not pickled"):
                pickle.dumps(step)


@pytest.fixture
def detours(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of the calls that were not direct ones."""
    arrays, taken = steps.Step.arrays, []

    def noted(self: Any, values: Any) -> Any:
        taken.append(values)
        return arrays(self, values)

    monkeypatch.setattr(steps.Step, "arrays", noted)
    return taken


def test_a_planned_step_takes_no_detour(way: bool, detours: list[Any]) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile([m.y, m.grow], [m.x])
        warm(step, X)
        detours.clear()
        for _ in range(5):
            step(X)
        assert len(detours) == (0 if way else 5)


def test_as_many_fetches_as_a_model_has_variables_are_planned_and_no_more(way: bool, detours: list[Any]) -> None:
    m = Model()
    with m.graph:
        each = [fr.identity(m.x[i : i + 1]) for i in range(direct.MOST_OUTPUTS + 1)]
    x = np.arange(direct.MOST_OUTPUTS + 1, dtype=np.float32)
    with fr.BlockingSession(m.graph) as session:
        for count, planned in ((direct.MOST_OUTPUTS, way), (direct.MOST_OUTPUTS + 1, False)):
            step = session.compile(each[:count], [m.x])
            warm(step, x)
            detours.clear()
            assert [value.tolist() for value in step(x)] == [[i] for i in range(count)]
            assert len(detours) == (0 if planned else 1)


def test_feeds_of_several_shapes_may_take_turns(way: bool, detours: list[Any]) -> None:
    m = Model()
    sizes = range(direct.MOST_PLANS)
    feeds = [np.full(size, size, np.float32) for size in sizes]
    with fr.BlockingSession(m.graph) as session:
        step, total = session.compile([m.y, m.grow], [m.x]), 0.0
        for turn in range(6):
            if turn == 3:
                detours.clear()
            for x in feeds:
                assert step(x)[0].tolist() == (x * 2 + 1).tolist()
                total += float(np.sum(x))
        assert len(detours) == (0 if way else 3 * len(feeds))
        more = np.ones(len(feeds), np.float32)
        for x in (more, more, more, *feeds, more):
            assert step(x)[0].tolist() == (x * 2 + 1).tolist()
            total += float(np.sum(x))
        assert session.run(m.total) == total


def test_a_step_that_is_planned_outdates_no_other(way: bool, detours: list[Any]) -> None:
    m = Model()
    with m.graph:
        shrink = m.total.assign_sub(fr.sum(m.x))
    with fr.BlockingSession(m.graph) as session:
        made = [session.compile(fetches, [m.x]) for fetches in (m.grow, shrink, [m.y, m.total])]
        for step in made:
            warm(step, X)
        detours.clear()
        for step in made:
            step(X)
        assert len(detours) == (0 if way else 3)
        assert session.run(m.total) == 0


def test_fetches_in_any_order_and_repeated_ones_are_planned_too(way: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    m = Model()
    with m.graph:
        square, same = m.x * m.x, m.x * 2.0 + 1.0
    with fr.BlockingSession(m.graph) as session:
        form = {"a": [square, m.y], "b": (m.y, m.grow, same)}
        step, backwards = session.compile(form, [m.x]), session.compile([square, m.y, m.total], [m.x])
        warm(step, X)
        warm(backwards, X)
        if way:
            monkeypatch.setattr(type(session._session), "_attempt", None)
        answer = step(X)
        assert [value.tolist() for value in answer["a"]] == [[0, 1, 4], [1, 3, 5]]
        first, grown, other = answer["b"]
        assert grown is None
        assert first.tolist() == other.tolist() == [1, 3, 5]
        memory = [*answer["a"], first, other]
        assert not any(np.shares_memory(a, b) for i, a in enumerate(memory) for b in memory[:i])
        assert [value.tolist() for value in backwards(X)] == [[0, 1, 4], [1, 3, 5], 4 * 3]


def test_scalars_lists_and_strided_arrays_are_made_arrays_and_planned(
    way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fr.Graph() as graph:
        x, a = fr.placeholder("float32", (3,)), fr.placeholder("float32", ())
        y = x * a
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x, a])
        warm(step, X, np.float32(2))
        warm(step, X, np.array(2, np.float32))
        if way:
            monkeypatch.setattr(type(session._session), "_attempt", None)
        for value in (np.float32(2), 2.0, 2, np.array(2, np.float32)):
            for vector in (X, [0, 1, 2], np.repeat(X, 2)[::2]):
                assert step(vector, value).tolist() == [0, 2, 4]
        with pytest.raises(fr.FeedError):
            step(X, np.float64(2))


def test_what_is_no_plain_array_of_the_plans_spec_takes_the_longer_way_and_is_right(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile(m.y, [m.x])
        warm(step, X)
        frozen = X.copy()
        frozen.setflags(write=False)
        backed = np.frombuffer(X.tobytes() + b"\0" * 4, np.uint8)[:12].view(np.float32)
        shifted = np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32)
        same = [[0, 1, 2], (0.0, 1.0, 2.0), frozen, backed, shifted, np.repeat(X, 2)[::2], X.astype(">f4")]
        same += [X.view(np.matrix).A1, np.ma.masked_array(X)]
        for value in same:
            assert step(value).tolist() == [1, 3, 5]
        for wrong in (X.astype(np.float64), X.astype(np.int32), X[None], np.float32(1), "a", None, object()):
            with pytest.raises(fr.FeedError):
                step(wrong)
        for count in ((), (X, X)):
            with pytest.raises(fr.FeedError, match="takes 1 value"):
                step(*count)
        assert step(X).tolist() == [1, 3, 5]


def test_every_length_of_an_open_axis_is_right_in_any_order(way: bool) -> None:
    m = Model()
    rng = np.random.default_rng(0)
    with fr.BlockingSession(m.graph) as session:
        step = session.compile(m.y, [m.x])
        for length in (*rng.integers(0, 6, 60), 0, 0, 0, 4, 4):
            x = rng.random(length, np.float32)
            np.testing.assert_array_equal(step(x), x * 2 + 1)


def test_answers_share_no_memory(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile([m.y, m.total], [m.x])
        answers = [step(X)[0] for _ in range(5)]
        answers[0][:] = 7
        assert all(a.tolist() == [1, 3, 5] for a in answers[1:])
        assert not any(np.shares_memory(a, b) for i, a in enumerate(answers) for b in answers[:i])
        assert all(a.flags.owndata and a.flags.writeable for a in answers)


def test_variables_are_those_of_now(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        grow, read = session.compile(m.grow, [m.x]), session.compile(m.total)
        for count in range(1, 6):
            grow(X)
            assert read() == 3 * count
        session.reset()
        for step, values in ((grow, (X,)), (read, ())):
            with pytest.raises(fr.GraphError, match="has no value"):
                step(*values)


def test_a_variable_that_is_held_is_waited_for(way: bool) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None,), name="x")
        v = fr.Variable(np.float64(1), name="v")
        slowly = v.assign(fr.sum(lookup("world_slow")(x)))
        read = v.read()
    with fr.BlockingSession(graph) as session:
        step = session.compile(read)
        assert warm(step) == 1
        thread = threading.Thread(target=session.run, args=(slowly, {x: np.zeros(8)}))
        thread.start()
        seen = {step() for _ in range(2000)}
        thread.join()
        assert seen <= {1, session.run(v)}
        assert step() == session.run(v) != 1


def test_threads_that_share_a_step_lose_no_update(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile([m.y, m.grow], [m.x])
        warm(step, X)
        wrong: list[Any] = []

        def work(number: int) -> None:
            x = np.full(3, number, np.float32)
            for _ in range(300):
                y, _ = step(x)
                if y.tolist() != [2 * number + 1] * 3:
                    wrong.append(y)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert session.run(m.total) == 3 * 3 + 300 * 3 * (0 + 1 + 2 + 3)


def test_runs_are_numbered_whichever_way_they_take() -> None:
    """What is drawn depends on a run's number alone."""
    m = Model()
    drawn: list[list[float]] = []
    for tapes in (True, False):
        with fr.BlockingSession(m.graph, options=fr.Options(seed=5, tapes=tapes)) as session:
            step, other = session.compile(m.drawn, [m.x]), session.compile(m.y, [m.x])
            mine = []
            for number in range(8):
                mine += step(X).tolist()
                if number % 3 == 0:
                    other(X)
                    session.run(m.y, {m.x: X})
            drawn.append(mine)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 16


async def test_an_awaited_step_is_numbered_alike() -> None:
    m = Model()
    async with fr.Session(m.graph, options=fr.Options(seed=5)) as session:
        step = session.compile(m.drawn, [m.x])
        awaited = [(await step(X)).tolist() for _ in range(6)]
    with fr.BlockingSession(m.graph, options=fr.Options(seed=5)) as session:
        step = session.compile(m.drawn, [m.x])
        assert [step(X).tolist() for _ in range(6)] == awaited


def test_a_node_that_fails_is_named_and_the_step_goes_on(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile([m.checked, m.y], [m.x])
        warm(step, X)
        before = sys.getrefcount(X.dtype)
        for _ in range(20):
            with pytest.raises(fr.FlowrtError, match=r"world_checked.*test_direct\.py.*an index is out of range"):
                step(-X)
        gc.collect()
        assert sys.getrefcount(X.dtype) <= before + 2
        assert step(X)[0].tolist() == [0, 1, 2]


def test_a_node_that_fails_is_named_though_others_run_by_the_plan_by_then(
    way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile([m.checked, m.y], [m.x])
        warm(step, X)
        failure = Tape.failure

        def later(*run: Any) -> Any:
            assert step(X)[0].tolist() == [0, 1, 2]
            return failure(*run)

        monkeypatch.setattr(Tape, "failure", later)
        with pytest.raises(fr.FlowrtError, match=r"world_checked.*an index is out of range"):
            step(-X)


def test_nothing_runs_once_the_session_is_closed(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        step = session.compile(m.y, [m.x])
        warm(step, X)
    with pytest.raises(fr.ClosedError):
        step(X)


def test_references_are_counted(way: bool) -> None:
    m = Model()
    with fr.BlockingSession(m.graph) as session:
        forms = [m.y, [m.y, m.grow, m.total], (m.y, m.total), {"y": m.y}, m.grow]
        compiled = [session.compile(form, [m.x]) for form in forms]
        for step in compiled:
            warm(step, X)
        gc.collect()
        counted = (X, X.dtype, np.ndarray, m, *compiled)
        before = [sys.getrefcount(value) for value in counted]
        for step in compiled:
            for _ in range(100):
                answer = step(X)
            with pytest.raises(fr.FeedError):
                step(None)
        alive = weakref.ref(compiled[0](X))
        assert alive() is None
        del answer
        gc.collect()
        assert [sys.getrefcount(value) for value in counted] == before


def test_a_callable_that_nobody_has_any_more_is_let_go(way: bool) -> None:
    kept: list[direct.Direct] = []
    kept.append(direct.Direct(lambda *values: kept[0].call, [0], None))
    gone = weakref.ref(kept[0])
    assert kept[0].call(1) is kept[0].call
    kept.clear()
    gc.collect()
    assert gone() is None


def test_a_layout_that_is_not_the_known_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_ABI", 1), ("ARRAY_DTYPE", direct.ARRAY_DIMS), ("ARRAY_DATA", direct.ARRAY_DIMS)):
        with monkeypatch.context() as patch:
            patch.setattr(direct, name, value)
            assert not direct.available.__wrapped__()


@pytest.mark.parametrize("fed", ["n", "shape"])
def test_another_value_that_decides_shapes_is_another_step(way: bool, fed: str) -> None:
    with fr.Graph() as graph:
        n, shape = fr.placeholder("int64", ()), fr.placeholder("int64", (2,))
        table = fr.Variable(np.arange(6.0), name="table")
        y = fr.sum(table[:n]) if fed == "n" else fr.reshape(table, shape) * 2.0
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, feeds=[n if fed == "n" else shape])
        for number in (1, 2, 3, 6) * 2:
            value = number if fed == "n" else np.array([number, 6 // number])
            wanted = np.arange(number).sum() if fed == "n" else 2 * np.arange(6.0).reshape(value)
            for _ in range(4):
                np.testing.assert_array_equal(step(value), wanted)
