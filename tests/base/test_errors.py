"""Bad input: each is an error of the right class that says where, what was expected, what came, and the fix."""

from __future__ import annotations

import asyncio
import copy
import pickle
from array import array
from typing import Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr
from flowrt.base.errors import BY_NAME, carried_site, user_site


@fr.op
def forgotten(x: fr.Spec) -> fr.Spec:
    """It has no kernel."""
    return x


def model() -> Any:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3), name="x")
        w = fr.Variable(np.ones((3, 2), np.float32), name="w")
        return graph, x, w, fr.matmul(x, w, name="scores")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.ones((2, 4), np.float32), r"expected float32\[\?,3\], got float32\[2,4\]"),
        (np.ones(3, np.float32), r"got float32\[3\]; give it a first axis with value\[None\]"),
        (np.ones((2, 3)), r"got float64\[2,3\]; convert it with \.astype\('float32'\)"),
        (np.ones((2, 3), np.int64), r"got int64\[2,3\]; convert it with \.astype\('float32'\)"),
        (np.ones((2, 3), complex), r"expected float32\[\?,3\], got complex128\[2, 3\]"),
        (np.float64(3), r"got float64\[\]; convert"),
        (np.ones((2, 3), object), r"got object\[2,? ?3\]; convert it with \.astype\('float32'\)"),
        ({"a": 1}, r"expected float32\[\?,3\], got \{'a': 1\}"),
        ([["a", "b", "c"]], r"got <U1\[1, 3\]"),
        ([[1, 2], [3]], r"\[\[1, 2\], \[3\]\] is not a value for float32\[\?,3\]"),
        (None, "got None"),
        ("text", r"got <U4\[\]"),
        (np.ones((1,) * 12, np.float32), r"got float32\[1, 1, 1"),
    ],
)
async def test_a_misshapen_or_mistyped_feed_names_feed_specs_and_fix(value: Any, says: str) -> None:
    graph, x, _, y = model()
    async with fr.Session(graph) as session:
        step = session.compile(y, [x])
        for call in (session.run(y, {x: value}), step(value)):
            with pytest.raises(fr.FeedError, match=rf"test_errors.py:\d+: feed 'x:0' \(.*test_errors.py:\d+\).*{says}"):
                await call
        assert (await step([[1, 1, 1]])).tolist() == [[3, 3]]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 2**40),
        ("int32", 1.5),
        ("int32", [1.0]),
        ("int64", 2**70),
        ("uint8", -1),
        ("uint8", 256),
        ("uint8", [np.int64(300)]),
        ("uint8", array("q", [300])),
        ("bool", 1),
        ("float32", 1e39),
        ("float32", [np.float64(1e39), 1]),
    ],
)
async def test_plain_data_is_not_bent_into_a_dtype(dtype: str, value: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(dtype, np.shape(value), name="x")
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match="'x:0'"):
            await session.run(x, {x: value})


async def test_a_missing_feed_names_the_placeholder_and_its_line() -> None:
    graph, x, _, y = model()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"placeholder 'x' \(.*test_errors.py:\d+\) needs a value: feed float32"):
            await session.run(y)
        step = session.compile(y, [x])
        for values in ((), ([[1, 2, 3]], [[1, 2, 3]])):
            with pytest.raises(fr.FeedError, match=rf"test_errors.py:\d+: the step takes 1 values, got {len(values)}"):
                await step(*values)


async def test_tensors_and_other_things_cannot_be_feed_values_or_fetches() -> None:
    graph, x, w, y = model()
    async with fr.Session(graph) as session:
        for value in (x, w, y.op, [x, x]):
            with pytest.raises(fr.FeedError, match="'x:0'"):
                await session.run(y, {x: value})
        for key in ("x", 3, y.op, graph):
            with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: only tensors can be fed"):
                await session.run(y, {key: 1})
        for fetch in ("x", 3, None, np.ones(2), graph, {1, 2}, [y, None]):
            with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: .* cannot be fetched; fetch tensors"):
                await session.run(fetch, {x: [[1, 2, 3]]})
        with pytest.raises(fr.GraphError, match="fed twice"):
            await session.run(y, {w: np.ones((3, 2)), w.__tensor__(): np.ones((3, 2))})
        with pytest.raises(fr.GraphError, match="fed twice"):
            session.compile(y, [x, x])


async def test_tensors_of_another_graph_are_refused() -> None:
    graph, x, _, y = model()
    _, other_x, other_w, other_y = model()
    async with fr.Session(graph) as session:
        for fetches, feeds in ((other_y, {}), ([y, other_w], {}), (other_y.op, {}), (y, {other_x: [[1, 2, 3]]})):
            with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: .* belongs to another graph than this"):
                await session.run(fetches, feeds)
        with pytest.raises(fr.GraphError, match="another graph"):
            session.compile(y, [other_x])
        assert (await session.run(y, {x: [[1, 1, 1]]})).tolist() == [[3, 3]]


def test_two_graphs_cannot_be_mixed() -> None:
    graph, x, *_ = model()
    _, other, *_ = model()
    for mix in (lambda: x + other, lambda: fr.matmul(x, other, transpose_b=True), lambda: fr.concat([x, other])):
        with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+.*another graph"):
            mix()
    with graph, pytest.raises(fr.GraphError, match="another graph"):
        fr.add(other, 1.0)
    second = fr.Graph()
    with graph, pytest.raises(fr.GraphError, match="leave it before entering"):
        second.__enter__()


async def test_a_graph_that_a_session_runs_takes_no_more_nodes() -> None:
    graph, x, w, _ = model()
    async with fr.Session(graph):
        for build in (lambda: x + 1.0, lambda: w.assign(np.zeros((3, 2)))):
            with pytest.raises(fr.GraphFinalizedError, match=r"test_errors.py:\d+"):
                build()


def test_a_tensor_is_neither_true_nor_an_array() -> None:
    _, x, w, _ = model()
    for value in (x, w):
        with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: the tensor .*fr.cond"):
            bool(value)
        with pytest.raises(fr.GraphError, match=r"fetch it with session.run"):
            np.asarray(value)
    with pytest.raises(fr.GraphError, match=r"use fr\.shape_of"):
        len(x)


def test_shapes_that_do_not_fit_name_op_line_and_both_specs() -> None:
    _, _, w, _ = model()
    with pytest.raises(fr.SpecError) as caught:
        fr.matmul(w, w, name="wrong")
    line = caught.traceback[0].lineno + 1
    assert f"matmul 'wrong' (tests/base/test_errors.py:{line})" in str(caught.value).replace(f"{ROOT}/", "")
    assert str(caught.value).count("float32[3,2]") == 2
    assert "transpose" in str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "flags", "hint"),
    [
        ((None, 784), (100, 10), (False, False), None),
        ((None, None, 4), (5, 6), (False, False), None),
        ((3, 2), (3, 2), (False, False), "transpose_"),
        ((None, 4), (10, 4), (False, False), "transpose_b=True would fit"),
        ((6, 4), (6, 5), (False, False), "transpose_a=True would fit"),
    ],
)
def test_a_hint_is_given_where_what_is_known_would_fit(a: Any, b: Any, flags: Any, hint: str | None) -> None:
    with fr.Graph():
        left, right = fr.placeholder("float32", a), fr.placeholder("float32", b)
        with pytest.raises(fr.SpecError) as caught:
            fr.matmul(left, right, *flags)
    assert (hint or "must be as long as") in str(caught.value)


@pytest.mark.parametrize("device", ["/job:ps/task:0", "/device:cuda:0", "/device:cpu:7", "/job:nobody"])
async def test_a_device_that_does_not_exist_names_the_node_and_those_that_do(device: str) -> None:
    with fr.Graph() as graph:
        with fr.device(device):
            y = fr.add(fr.constant(1.0), 2.0, name="lost")
        fine = fr.add(fr.constant(1.0), 2.0)
    async with fr.Session(graph, options=fr.Options(optimize=False)) as session:
        with pytest.raises(
            fr.PlacementError, match=rf"'[a-z_]+' \(.*test_errors.py:\d+\).*{device}.*/job:local/task:0"
        ):
            await session.run(y)
        assert await session.run(fine) == 3.0


def test_what_is_no_device_is_refused_where_it_is_written() -> None:
    with pytest.raises(fr.PlacementError, match="is not a device; write /job:worker/task:0"), fr.device("gpu zero"):
        pass
    with pytest.raises(fr.PlacementError, match=r"test_errors.py:\d+: '/nowhere' is not a device"):
        fr.placement.Rules({"*": "/nowhere"})
    for wrong in ([("a", "cpu:0")], None, {3: "cpu:0"}):
        with pytest.raises(
            fr.PlacementError, match=r"test_errors.py:\d+: devices are told by patterns of nodes' names"
        ):
            fr.placement.Rules(wrong)  # type: ignore[arg-type]
    with pytest.raises(fr.PlacementError, match=r"test_errors.py:\d+: profile are told by patterns"):
        fr.placement.Auto(profile=3)  # type: ignore[arg-type]


@fr.no_gradient
@fr.op
def errors_test_kernelless(x: fr.Spec) -> fr.Spec:
    """An op that no device can compute."""
    return x


async def test_an_op_without_a_kernel_is_a_placement_error() -> None:
    with fr.Graph() as graph:
        y = errors_test_kernelless(fr.constant([1.0]), name="void")
    async with fr.Session(graph) as session:
        with pytest.raises(fr.GraphError, match=r"'void' \(.*test_errors.py:\d+\).*(kernel|errors_test_kernelless)"):
            await session.run(y)


async def test_a_kernel_that_fails_names_op_node_and_line() -> None:
    for tapes in (True, False):
        with fr.Graph() as graph:
            indices = fr.placeholder("int64", (None,))
            y = fr.take(fr.constant([1.0, 2.0]), indices, name="look")
        async with fr.Session(graph, options=fr.Options(tapes=tapes)) as session:
            for wrong in ([0, 2], [-3]):
                with pytest.raises(
                    fr.FlowrtError, match=r"take 'look' \(.*test_errors.py:\d+\): an index is out of range"
                ):
                    await session.run(y, {indices: wrong})
            assert (await session.run(y, {indices: [1, 0]})).tolist() == [2, 1]


@pytest.mark.parametrize("seconds", [0, 0.0, -1])
async def test_a_timeout_that_is_over_at_once_is_a_step_timeout(seconds: float) -> None:
    with fr.Graph() as graph:
        got = fr.FIFOQueue(1, "float32").dequeue()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.StepTimeout):
            await session.run(got, timeout=seconds)


async def test_the_callers_line_is_carried_to_other_threads() -> None:
    site = user_site()
    assert site.file.endswith("test_errors.py")
    token = carried_site.set(site)
    try:
        assert await asyncio.to_thread(user_site) == site
    finally:
        carried_site.reset(token)


def test_errors_are_found_by_name_to_be_rebuilt_from_the_wire() -> None:
    assert BY_NAME["FeedError"] is fr.FeedError
    assert all(issubclass(kind, fr.FlowrtError) for kind in BY_NAME.values())
    assert issubclass(fr.SpecError, fr.GraphError)
    assert issubclass(fr.NodeLost, fr.RemoteError)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda x: fr.unstack(x), r"unstack \(HERE\): cannot unstack float32\[\?,3\]"),
        (lambda x: fr.pad(x, 1.5), r"pad \(HERE\): paddings are pairs"),
        (lambda x: fr.pad(x, ((1, 2, 3),)), r"pad \(HERE\): paddings are pairs"),
        (lambda x: fr.zeros((2,), "foo"), r"zeros \(HERE\): 'foo' is not a dtype"),
        (lambda x: fr.constant("x"), r"constant \(HERE\): 'x' is not a tensor"),
        (lambda x: fr.constant([[1], [1, 2]]), r"constant \(HERE\): \[\[1\], \[1, 2\]\] is not a tensor"),
        (lambda x: fr.add(x, [[1], [1, 2]]), r"add \(HERE\): \[\[1\], \[1, 2\]\] is not a tensor"),
        (lambda x: fr.nn.bias_add(x, "a"), r"bias_add \(HERE\): 'a' is not a tensor"),
        (lambda x: fr.logsumexp([[1], [1, 2]]), r"logsumexp \(HERE\): \[\[1\], \[1, 2\]\] is not a tensor"),
        (lambda x: fr.placeholder("float32", (2.5,)), r"placeholder \(HERE\): a shape is a tuple of sizes"),
        (lambda x: fr.placeholder("float32").shape, r"HERE: the rank of .*placeholder.* is not known"),
        (lambda x: fr.rank(fr.placeholder("float32")), r"rank \(HERE\): the rank is not known"),
        (lambda x: fr.random.normal((2,), stddev=x), r"normal \(HERE\): stddev is a number"),
        (lambda x: fr.Variable("x"), r"variable \(HERE\): 'x' is not a tensor"),
        (lambda x: fr.Variable(None, dtype="float32"), r"variable \(HERE\): None is not a tensor"),
        (lambda x: fr.FIFOQueue("a", "float32"), r"a queue \(HERE\): it needs room .* got capacity='a'"),
        (lambda x: fr.optim.SGD(0.1).minimize(3.0), r"HERE: the loss to minimize is a tensor"),
        (lambda x: x[0.5], r"HERE: index with integers"),
        (lambda x: x[: fr.constant(0.5)], r"HERE: a slice is from integer to integer"),
        (lambda x: ~x, r"HERE: ~ flips bools"),
        (lambda x: x & x, r"(HERE: &, \| and \^ combine bools|bitwise_and \(HERE\))"),
        (lambda x: fr.device("/foo").__enter__(), r"HERE: '/foo' is not a device"),
        (lambda x: fr.name_scope("").__enter__(), r"HERE: '' is not a name"),
        (lambda x: fr.control_dependencies([1]).__enter__(), r"HERE: 1 is neither"),
        (lambda x: fr.Session(None), r"HERE: a session's graph is a Graph, not None"),  # type: ignore[arg-type]
        (lambda x: fr.Session(x.graph, placement={"a": "b"}), r"HERE: a session's placement is a Rules"),
        (lambda x: fr.Session(x.graph, checkpoints="/tmp/a"), r"HERE: checkpoints is fr.Checkpoints\('/tmp/a'\)"),
    ],
)
def test_a_wrong_call_names_the_line_of_the_user(build: Any, says: str) -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (None, 3))
        with pytest.raises(fr.GraphError, match="^" + says.replace("HERE", r"\S*test_errors\.py:\d+")):
            build(x)


def test_what_is_written_to_a_variable_or_queue_is_not_bent_into_its_dtype() -> None:
    with fr.Graph():
        count = fr.Variable(0, name="count")
        small = fr.Variable(np.uint8(0), name="small")
        queue = fr.FIFOQueue(2, "int32")
        for write, value in ((count.assign, 1.5), (count.assign_add, 0.5), (small.assign, 256), (small.assign_sub, -1)):
            with pytest.raises(fr.SpecError, match=r"^assign\w* to '\w+' \(.*test_errors.py:\d+\): .* does not fit"):
                write(value)
        with pytest.raises(fr.SpecError, match="is not a tensor"):
            fr.Variable(1.0).assign(None)
        with pytest.raises(fr.SpecError, match="does not fit int32"):
            queue.enqueue(1.5)
        count.assign(np.uint8(3))
        fr.Variable(1.0).assign(np.float64(3))


def test_an_op_without_a_kernel_names_the_line_of_the_user_outside_graphs_too() -> None:
    with pytest.raises(fr.GraphError, match=r"^forgotten \(.*test_errors.py:\d+\) has no kernel: write one,"):
        forgotten(np.ones(2))


async def test_a_producers_bad_element_names_the_line_that_feeds_the_queue() -> None:
    with fr.Graph() as graph:
        queue = fr.FIFOQueue(2, "float32", shapes=(3,))
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError, match=r"^\S*test_errors.py:\d+: feed 'element:0' \(\S*test_errors.py:\d+\)"):
            async with session.producing(queue, [np.zeros(2, np.float32)]):
                await asyncio.Event().wait()
        with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: \[1\] is not a queue"):
            async with session.producing([1], []):
                pass


async def test_a_run_in_a_task_of_its_own_names_no_line_of_asyncio() -> None:
    graph, x, _, y = model()
    async with fr.Session(graph) as session:
        with pytest.raises(fr.FeedError) as caught:
            await asyncio.gather(session.run(y, {x: 1.0}))
        assert "/asyncio/" not in str(caught.value)


def test_bits_of_integers_are_flipped_as_numpy_does() -> None:
    with fr.Graph() as graph:
        signed, unsigned = fr.constant(np.int64([0, 5, -3])), fr.constant(np.uint8([0, 5, 255]))
        flipped = [~signed, ~unsigned, ~(signed > 0), np.array([True, False, True]) & (signed > 0)]
    with fr.BlockingSession(graph) as session:
        values = session.run(flipped)
    expected = [~np.int64([0, 5, -3]), ~np.uint8([0, 5, 255]), [True, False, True], [False, False, False]]
    assert [v.tolist() for v in values] == [np.asarray(e).tolist() for e in expected]
    assert [v.dtype for v in values[:2]] == [np.int64, np.uint8]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("einsum", lambda: fr.einsum("ij,kj->ik", np.zeros((2, 3)), np.zeros((2, 4)))),
        ("einsum", lambda: fr.einsum("ij,jk", np.zeros((2, 3)))),
        ("tensordot", lambda: fr.tensordot(np.zeros((2, 3)), np.zeros((2, 4)), 1)),
        ("clip", lambda: fr.clip(np.zeros(3), None, None)),
        ("dropout", lambda: fr.nn.dropout(np.zeros(3, np.float32), 1.5)),
        ("embedding_lookup", lambda: fr.nn.embedding_lookup([], [0])),
        ("sigmoid_cross_entropy", lambda: fr.nn.sigmoid_cross_entropy(np.zeros(3, np.int32), np.zeros(3))),
        ("case", lambda: fr.case([], lambda: np.float32(1))),
    ],
)
def test_an_error_names_its_op_and_the_line_once(name: str, wrong: Any) -> None:
    with pytest.raises(fr.SpecError, match=rf"^{name} \(.*test_errors.py:\d+\): ") as caught:
        wrong()
    assert str(caught.value).count("test_errors.py") == 1, str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda size: fr.zeros((size, 3)),
        lambda size: fr.reshape(np.zeros(3), [size, 3]),
        lambda size: fr.broadcast_to(np.zeros(3), (size, 3)),
        lambda size: fr.random.normal((size,)),
    ],
)
def test_a_size_that_only_a_step_knows_is_told_where_it_is_found(build: Any) -> None:
    x = model()[1]
    with x.graph, pytest.raises(fr.SpecError, match=r"test_errors.py:\d+\): .*None.*take it from fr.shape_of\(x\)"):
        build(x.shape[0])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"threads": 0}, "threads is an integer from 1 up, got 0"),
        ({"threads": "many"}, "threads is an integer from 1 up, got 'many'"),
        ({"threads": True}, "got True"),
        ({"memory_limit": "1 GB"}, "memory_limit is a number of bytes, from 1 up, got '1 GB'"),
        ({"memory_limit": -1}, "got -1"),
        ({"transfer_budget": None}, "transfer_budget is a number of bytes, from 1 up, got None"),
        ({"seed": "seed"}, "seed is an integer, got 'seed'"),
    ],
)
def test_an_option_that_cannot_be_is_told_at_its_line(options: Any, told: str) -> None:
    with pytest.raises(fr.GraphError, match=rf"test_errors.py:\d+: Options: .*{told}"):
        fr.Options(**options)


def test_options_in_another_form_are_told() -> None:
    with pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: options is fr.Options\(...\), not {'threads': 1}"):
        fr.BlockingSession(model()[0], options={"threads": 1})


def test_an_op_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(fr.sqrt)) is fr.sqrt
    assert copy.deepcopy({"activation": forgotten}) == {"activation": forgotten}


def test_a_timeout_that_is_no_number_is_told_at_its_line() -> None:
    graph, x, _, y = model()
    with (
        fr.BlockingSession(graph) as session,
        pytest.raises(fr.GraphError, match=r"test_errors.py:\d+: timeout is a number of seconds, got '1'"),
    ):
        session.run(y, {x: np.ones((1, 3), np.float32)}, timeout="1")  # type: ignore[arg-type]
