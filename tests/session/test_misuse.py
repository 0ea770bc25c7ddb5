"""Sessions of the wrong kind, opened or called the wrong way: the error says which way is right."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr

ONES = np.ones(3, np.float32)
BATCHES = [{"x": np.ones((4, 3), np.float32)}] * 3

with fr.Graph() as GRAPH:
    X = fr.placeholder("float32", (3,), name="x")
    with fr.name_scope("model"):
        SCALE = fr.placeholder("float32", (), name="scale")
    SCALED = X * SCALE
    HELD = fr.Variable(ONES)


def small() -> fr.Graph:
    with fr.Graph() as graph:
        fr.constant(1.0, name="one")
    return graph


# ── opening ──


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            lambda: fr.Session(small()),
            r"open fr\.Session with `async with`.*without await, use `with fr\.BlockingSession",
        ),
        (lambda: fr.LocalCluster(worker=1), r"open fr\.LocalCluster with `async with`"),
    ],
)
def test_with_where_async_with_is_meant(what: Callable[[], Any], says: str) -> None:
    with pytest.raises(fr.GraphError, match=rf"test_misuse.py:\d+: {says}"), what():
        pass


async def test_with_for_a_producer() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, "float32", ())
    async with fr.Session(graph) as session:
        says = r"open session\.producing\(\.\.\.\) with `async with`"
        with pytest.raises(fr.GraphError, match=says), session.producing(queue, []):
            pass


async def test_async_with_where_with_is_meant() -> None:
    with pytest.raises(fr.GraphError, match=r"test_misuse.py:\d+: open fr\.BlockingSession with `with`.*fr\.Session"):
        async with fr.BlockingSession(small()):  # type: ignore[attr-defined]
            pass


async def test_a_session_says_whether_it_is_not_open_yet_or_closed() -> None:
    session = fr.Session(GRAPH)
    with pytest.raises(fr.ClosedError, match=r"misuse.py:\d+: the session is not open yet; use it inside `async with"):
        await session.run(X, {X: ONES})
    async with session:
        step = session.compile(SCALED, [X, SCALE])
        await step(ONES, 2.0)
    with pytest.raises(fr.ClosedError, match="the session is closed"):
        await session.run(X, {X: ONES})
    with pytest.raises(fr.ClosedError, match="the session is closed"):
        await step(ONES, 2.0)


def test_a_blocking_session_says_so_too() -> None:
    session = fr.BlockingSession(GRAPH)
    with pytest.raises(fr.ClosedError, match=r"not open yet; use it inside `with fr.BlockingSession"):
        session.run(X, {X: ONES})
    with session:
        step = session.compile(SCALED, [X, SCALE])
        step(ONES, 2.0)
    with pytest.raises(fr.ClosedError, match="the session is closed"):
        session.run(X, {X: ONES})
    with pytest.raises(fr.ClosedError, match="the session is closed"):
        step(ONES, 2.0)


def test_a_session_of_another_event_loop_says_so() -> None:
    session = fr.Session(GRAPH)

    async def use() -> None:
        with pytest.raises(fr.GraphError, match=r"opened on another event loop.*fr.BlockingSession"):
            await session.run(SCALED, {X: ONES, SCALE: 2.0}, timeout=1)

    with asyncio.Runner() as runner:
        runner.run(session.__aenter__())
        asyncio.run(use())
        runner.run(session.__aexit__(None, None, None))


def test_what_only_the_other_kind_has_is_named() -> None:
    with pytest.raises(AttributeError, match=r"fr\.BlockingSession has no 'producing'; fr\.Session has"):
        fr.BlockingSession(GRAPH).producing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fr.BlockingSession(GRAPH).nonsense  # noqa: B018


@pytest.mark.parametrize("feeds", [ONES, [ONES], (), "x", 3])
def test_feeds_that_map_nothing_are_told_what_they_are_to_be(feeds: Any) -> None:
    with fr.BlockingSession(GRAPH) as blocking:
        with pytest.raises(fr.GraphError, match=rf"feeds map tensors to values.*; got a {type(feeds).__name__}$"):
            blocking.run(X, feeds)
        with pytest.raises(fr.GraphError, match=r"only tensors can be fed, not 'x'; feed \{x: value\}"):
            blocking.run(X, {"x": ONES})


# ── trainers ──


def trained() -> tuple[fr.Graph, Any, Any]:
    def model(inputs: Any) -> Any:
        return inputs["x"] @ fr.Variable(np.ones((3, 1), np.float32), name="w")

    spec, where = {"x": fr.Spec("float32", (None, 3))}, {"server_device": "", "worker_device": ""}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            lambda inputs: fr.mean(fr.square(model(inputs))),
            inputs=spec,
            optimizer=fr.optim.SGD(0.1),
            replicas=1,
            **where,
        )
        return graph, trainer, trainer.share(model, inputs=spec)


def test_a_trainer_and_its_predictor_name_the_session_they_take() -> None:
    graph, trainer, predict = trained()
    with fr.BlockingSession(graph) as session:
        calls = [
            lambda: trainer.steps(session, BATCHES),
            lambda: predict(session, x=BATCHES[0]["x"]),
            lambda: predict(graph, x=BATCHES[0]["x"]),
        ]
        for call in calls:
            with pytest.raises(fr.GraphError, match=r"test_misuse.py:\d+: .* takes an open fr\.Session"):
                call()
        value = session.run(predict.outputs, {predict.inputs["x"]: BATCHES[0]["x"]})  # the way around
    assert value.shape == (4, 1)


async def test_steps_are_iterated_over_with_async_for() -> None:
    graph, trainer, predict = trained()
    async with fr.Session(graph) as session:
        reports = trainer.steps(session, BATCHES)
        with pytest.raises(fr.GraphError, match=r"async for report in trainer.steps"):
            list(reports)
        assert [report.step async for report in reports] == [1, 2, 3]
        assert (await predict(session, x=BATCHES[0]["x"])).shape == (4, 1)


# ── calls by keyword ──


async def answers(*values: Any, **named: Any) -> list[Any]:
    """What both kinds of session answer, at the first call, while they learn, and when they call directly."""
    got = []
    async with fr.Session(GRAPH) as session:
        step = session.compile(SCALED, [X, SCALE])
        for _ in range(16):
            got.append(await step(*values, **named))
            await step(ONES, np.float32(2))
    with fr.BlockingSession(GRAPH) as blocking:
        call = blocking.compile(SCALED, [X, SCALE])
        for _ in range(16):
            got.append(call(*values, **named))
            call(ONES, np.float32(2))
    return got


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((), {"x": ONES, "scale": np.float32(3)}),
        ((), {"model/scale": 3.0, "x": [1, 1, 1]}),
        ((ONES,), {"scale": np.float32(3)}),
    ],
)
async def test_a_compiled_step_takes_its_feeds_by_name(values: Any, named: Any) -> None:
    for got in await answers(*values, **named):
        np.testing.assert_array_equal(got, 3 * ONES)


@pytest.mark.parametrize(
    ("values", "named", "says"),
    [
        ((ONES,), {"y": 1.0}, "no feed of the step is named 'y'; its feeds are 'x', 'model/scale'$"),
        ((ONES, 1.0), {"x": ONES}, "the step is given 'x' twice"),
        ((), {"scale": 1.0, "model/scale": 1.0}, "is given 'model/scale' twice"),
        ((), {"scale": 1.0}, "no value for 'x'"),
        ((ONES, 1.0, 2.0), {"y": 1.0}, "no feed of the step is named 'y'"),
        ((ONES, 1.0, 2.0), {}, "takes 2 values, got 3"),
    ],
)
async def test_a_wrong_call_is_told_in_a_line(values: Any, named: Any, says: str) -> None:
    async with fr.Session(GRAPH) as session:
        step = session.compile(SCALED, [X, SCALE])
        with fr.BlockingSession(GRAPH) as blocking:
            call = blocking.compile(SCALED, [X, SCALE])
            for _ in range(16):
                call(ONES, np.float32(2))
                await step(ONES, np.float32(2))
            with pytest.raises(fr.FeedError, match=says) as told:
                call(*values, **named)
            with pytest.raises(fr.FeedError, match=says):
                await step(*values, **named)
        assert len(str(told.value)) < 200


MASKED = np.ma.masked_array(ONES, mask=[False, True, False])


async def test_what_is_masked_is_no_value_and_an_array_in_which_nothing_is_masked_is_one() -> None:
    says = r"entries of the array are masked; fill them, with .filled\(value\)"
    for ask in (fr.sum, fr.constant, fr.tanh, lambda array: fr.add(ONES, array)):
        with pytest.raises(fr.SpecError, match=says):
            ask(MASKED)
    async with fr.Session(GRAPH) as session:
        step = session.compile(SCALED, [X, SCALE])
        for _ in range(16):
            await step(ONES, 2.0)
        for array in (MASKED.filled(1), np.ma.masked_array(ONES)):
            np.testing.assert_array_equal(await step(array, 2.0), 2 * ONES)
        with pytest.raises(fr.FeedError, match=says) as told:
            await step(MASKED, 2.0)
        assert "\n" not in str(told.value)
        with pytest.raises(fr.FeedError, match=says):
            await session.run(SCALED, {X: MASKED, SCALE: 2.0})


async def test_feeds_of_one_name_in_several_scopes_are_told_by_their_whole_names() -> None:
    with fr.Graph() as graph:
        feeds = []
        for scope in ("a", "b"):
            with fr.name_scope(scope):
                feeds.append(fr.placeholder("float32", (), name="x"))
        x = fr.placeholder("float32", (), name="x")
        total, difference = 100.0 * feeds[0] + 10.0 * feeds[1] + x, feeds[0] - feeds[1]
    async with fr.Session(graph) as session:
        step = session.compile(total, [*feeds, x])
        assert await step(**{"b/x": 2.0, "x": 3.0, "a/x": 1.0}) == 123
        two = session.compile(difference, feeds)
        with pytest.raises(fr.FeedError, match="no feed of the step is named 'x'; its feeds are 'a/x', 'b/x'"):
            await two(x=1.0)


async def test_a_feed_may_be_named_like_a_parameter() -> None:
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", (), name=name) for name in ("self", "values", "named")]
        total = fr.add_n(feeds)
    async with fr.Session(graph) as session:
        assert await session.compile(total, feeds)(named=1.0, self=2.0, values=3.0) == 6
    with fr.BlockingSession(graph) as blocking:
        assert blocking.compile(total, feeds)(named=1.0, self=2.0, values=3.0) == 6


@pytest.mark.parametrize("what", [GRAPH, X, X.op, SCALED, HELD, fr.Session(GRAPH)], ids=repr)
@pytest.mark.parametrize("copy_it", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_belongs_to_a_graph_is_not_pickled_and_the_error_says_what_to_do(copy_it: Any, what: Any) -> None:
    if copy_it is copy.copy and isinstance(what, (fr.Session, type(X.op))):
        pytest.skip("names the same graph")
    with pytest.raises(fr.GraphError, match=r"test_misuse.py:\d+: a graph is neither pickled nor copied"):
        copy_it(what)


@pytest.mark.parametrize(
    "make", [lambda v: fr.optim.Adam([v], lr=0.1), lambda v: fr.optim.SGD(iter([v])), fr.optim.SGD]
)
def test_an_optimiser_of_variables_is_told_what_it_is_made_of(make: Callable[[Any], Any]) -> None:
    pattern = (
        r"test_misuse.py:\d+: an optimiser is made of numbers, as in fr.optim.(Adam|SGD)\(lr=0.1\), and moves what "
    )
    with pytest.raises(fr.GraphError, match=pattern + "minimize"):
        make((HELD,))


def test_what_other_optimisers_are_asked_for_is_answered() -> None:
    optimizer = fr.optim.AdamW(0.1)
    with pytest.raises(
        AttributeError, match=r"'AdamW' object has no attribute 'zero_grad'; write session.run\(optimizer"
    ):
        optimizer.zero_grad()
    assert not hasattr(optimizer, "anything")
    for same in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(same) == repr(optimizer)


def test_keywords_of_other_sessions_are_answered() -> None:
    with fr.BlockingSession(GRAPH) as session:
        with pytest.raises(fr.SpecError, match=r"run\(.*test_misuse.py:\d+\): .*'feed_dict'; write feeds="):
            session.run(SCALED, feed_dict={X: ONES, SCALE: 2.0})  # type: ignore[call-arg]
        with pytest.raises(fr.SpecError, match=r"compile\(.*'inputs'; write feeds="):
            session.compile(SCALED, inputs=[X, SCALE])  # type: ignore[call-arg]
    with pytest.raises(fr.SpecError, match=r"BlockingSession\(graph.*missing a required argument: 'graph'"):
        fr.BlockingSession()  # type: ignore[call-arg]


async def test_a_graph_with_jobs_says_that_its_session_needs_a_cluster() -> None:
    with fr.Graph() as graph, fr.device("/job:ps"):
        v = fr.Variable(ONES)
    with pytest.raises(fr.PlacementError, match=r"no device /job:ps; .*fr.LocalCluster\(.*cluster=cluster"):
        async with fr.Session(graph) as session:
            await session.run(v)


async def test_what_is_no_value_no_tensor_or_one_too_many_is_told_with_the_way_out() -> None:
    async with fr.Session(GRAPH) as session:
        with pytest.raises(fr.GraphError, match=r"'x:0' cannot be fetched; .*graph.get_tensor_by_name\('x:0'\)"):
            await session.run("x:0")
        with pytest.raises(fr.FeedError, match=r"feed 'x:0' \(.*\): expected float32\[3\], got None"):
            await session.run(X, {X: None})
        with pytest.raises(fr.FeedError, match=r"the step takes 2 values, got 1; its feeds are 'x', 'model/scale'"):
            await session.compile(SCALED, [X, SCALE])(ONES)


def test_an_op_without_tensors_is_refused_in_the_users_line_alone() -> None:
    def own(x, *, factor=1):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(fr.GraphError, match="annotate its tensors") as caught:
        fr.op(own)
    assert len(caught.traceback) == 1


@pytest.mark.parametrize(
    "use",
    [lambda op: fr.add(op, 1), lambda op: fr.sum(op), lambda op: 2.0 * op, lambda op: op - op, lambda op: op.shape],
    ids=["add", "sum", "product", "difference", "shape"],
)
def test_an_operation_that_is_taken_for_a_value_says_how_to_read_one(use: Callable[[Any], Any]) -> None:
    with fr.Graph():
        wrote = fr.Variable(np.zeros(3, "float32"), name="w").assign_add(np.ones(3, "float32"))
        with pytest.raises((fr.GraphError, AttributeError), match=r"'w/assign_add'.* has no value: .*\.read\(\)"):
            use(wrote)
        assert not hasattr(wrote, "shape")
        assert copy.copy(wrote).name == wrote.name
