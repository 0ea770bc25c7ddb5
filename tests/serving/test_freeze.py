"""Freezing: what becomes of a graph, and what cannot be frozen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import FeedError, GraphError

X = np.random.default_rng(1).normal(size=(5, 3)).astype("float32")


class Trained:
    """A classifier with dropout in its loss, an optimiser, and a flag."""

    def __init__(self) -> None:
        with fr.Graph(seed=3) as self.graph:
            self.x = fr.placeholder("float32", (None, 3), name="x")
            self.sharp = fr.placeholder("bool", (), name="sharp")
            self.w = fr.Variable(fr.random.normal((3, 4), seed=1), name="layer/w")
            self.b = fr.Variable(np.zeros(4, "float32"), name="layer/b")
            hidden = fr.nn.relu(self.x @ self.w + self.b)
            self.scores = fr.cond(self.sharp, lambda: hidden * 2, lambda: hidden)
            loss = fr.mean(fr.square(fr.nn.dropout(hidden, 0.5)))
            self.train = fr.optim.Adam(0.1).minimize(loss)

    def freeze(self, session: Any, **more: Any) -> Any:
        return fr.serving.freeze(session, {"rows": self.x}, {"scores": self.scores}, **more)


def ops_of(model: fr.serving.Model) -> list[str]:
    return [node.op.name for node in model.graph.nodes]


async def test_a_frozen_model_answers_the_bits_that_the_session_answers() -> None:
    program = Trained()
    async with fr.Session(program.graph) as session:
        await session.run(program.train, {program.x: X})
        expected = await session.run(program.scores, {program.x: X, program.sharp: True})
        model = await program.freeze(session, given={program.sharp: True})
        await session.run(program.train, {program.x: X})  # and what comes later does not concern it
    with model:
        np.testing.assert_array_equal(model(rows=X)["scores"], expected)


def test_what_trains_is_left_out_and_placeholders_keep_their_names() -> None:
    program = Trained()
    with fr.BlockingSession(program.graph) as session:
        model = program.freeze(session, given={program.sharp: False})
    assert not {op for op in ops_of(model) if "random" in op or "variable" in op or "assign" in op}
    assert not model.graph.variables
    assert not model.graph.resources
    assert model.inputs["rows"].op.name == "x"
    assert {node.name for node in model.graph.nodes} >= {"layer/w", "layer/b", "sharp"}
    assert str(model.outputs["scores"].spec) == "float32[?,4]"


def test_what_no_input_decides_is_computed_once() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        w = fr.Variable(np.ones((64, 64), "float32"), name="w")
        y = x @ fr.transpose(w * 3)
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, [x], {"y": y})
    assert sorted(ops_of(model)) == ["constant", "matmul", "placeholder"]


def test_a_value_that_is_larger_than_what_it_comes_from_is_computed_in_the_step() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 4096), name="x")
        row = fr.Variable(np.float32(2), name="row")
        y = x[:1] * 1 + fr.broadcast_to(row, (2048, 4096))
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, [x], {"y": y})
    assert "broadcast_to" in ops_of(model)
    assert all(n.attrs["value"].nbytes <= 4096 for n in model.graph.nodes if n.op.name == "constant")


def test_loops_and_branches_keep_their_bodies() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        decay = fr.Variable(np.float32(0.5), name="decay")
        _, means = fr.scan(lambda mean, value: (decay * mean + value, mean + 1), np.float32(0), x)
        _, count = fr.while_loop(lambda i, v: v > decay, lambda i, v: (i + 1, v / 2), (0, fr.max(x)))
    values = np.array([4, 8, 2], "float32")
    with fr.BlockingSession(graph) as session:
        expected = session.run([means, count], {x: values})
        model = fr.serving.freeze(session, {"x": x}, {"means": means, "count": count})
    with model:
        answer = model(x=values)
    np.testing.assert_array_equal(answer["means"], expected[0])
    np.testing.assert_array_equal(answer["count"], expected[1])


def test_any_tensor_may_be_an_input() -> None:
    program = Trained()
    with program.graph:
        inside = fr.identity(program.x * 2, name="inside")
        out = inside @ program.w
    with fr.BlockingSession(program.graph) as session:
        model = fr.serving.freeze(session, {"doubled": inside}, {"y": out})
        expected = session.run(out, {inside: X})
    assert [n.name for n in model.graph.nodes if n.op.name == "placeholder"] == ["doubled"]
    with model:
        np.testing.assert_array_equal(model(doubled=X)["y"], expected)


def test_random_numbers_are_drawn_anew_by_each_run_of_a_model() -> None:
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float32", (None,), name="x")
        y = x + fr.random.normal((3,))
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, [x], {"y": y})
    with model:
        zeros = np.zeros(3, "float32")
        assert not np.array_equal(model(x=zeros)["y"], model(x=zeros)["y"])


async def test_freezing_changes_no_later_draw() -> None:
    async def drawn(frozen: bool) -> Any:
        with fr.Graph(seed=1) as graph:
            x = fr.placeholder("float32", (None,), name="x")
            w = fr.Variable(np.float32(1), name="w")
            y = x * w
            noise = fr.random.normal((4,))
        async with fr.Session(graph) as session:
            if frozen:
                await fr.serving.freeze(session, [x], {"y": y})
            return await session.run(noise)

    np.testing.assert_array_equal(await drawn(True), await drawn(False))


async def test_a_checkpoint_is_frozen_by_a_session_that_restores_it(tmp_path: Any) -> None:
    program = Trained()
    async with fr.Session(program.graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
        await session.run(program.train, {program.x: X})
        expected = await session.run(program.scores, {program.x: X, program.sharp: True})
        await session.save()
    again = Trained()
    async with fr.Session(again.graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
        model = await again.freeze(session, given={again.sharp: True})
    with model:
        np.testing.assert_array_equal(model(rows=X)["scores"], expected)


def test_a_write_a_queue_and_a_missing_input_are_refused_by_name() -> None:
    program = Trained()
    with program.graph:
        count = fr.Variable(np.int64(0), name="count", trainable=False)
        with fr.control_dependencies([count.assign_add(1)]):
            after = count.read()
        taken = fr.FIFOQueue(2, "float32", (), name="waiting").dequeue()
    with fr.BlockingSession(program.graph) as session:
        with pytest.raises(GraphError, match=r"assign_add.*works on 'count'.*changes nothing"):
            fr.serving.freeze(session, [], {"after": after})
        with pytest.raises(GraphError, match=r"dequeue.*works on 'waiting'"):
            fr.serving.freeze(session, [], {"taken": taken})
        with pytest.raises(GraphError, match=r"placeholder 'sharp'.*name it among the inputs, or .* given="):
            program.freeze(session)


def test_what_names_no_model_is_refused() -> None:
    program = Trained()
    with fr.Graph():
        foreign = fr.placeholder("float32", (), name="foreign")
    with fr.BlockingSession(program.graph) as session:
        for inputs, outputs, text in (
            ({"x": 3}, {"y": program.scores}, "inputs are tensors by name"),
            ({"a/b": program.x}, {"y": program.scores}, "called 'a/b'"),
            ([program.x, program.x], {"y": program.scores}, "several inputs are called 'x'"),
            ([program.x], {}, "without outputs"),
            ([program.x], {"y": program.train}, "outputs are tensors"),
            ([foreign], {"y": program.w}, "another graph"),
        ):
            with pytest.raises(GraphError, match=text):
                fr.serving.freeze(session, inputs, outputs)
    with pytest.raises(GraphError, match="takes the session"):
        fr.serving.freeze(program.graph, [program.x], {"y": program.scores})


def test_a_model_says_what_it_takes() -> None:
    program = Trained()
    with fr.BlockingSession(program.graph) as session:
        model = program.freeze(session, given={program.sharp: True}, name="digits")
    assert repr(model) == "<Model 'digits' from (rows: float32[?,3]) to (scores: float32[?,4])>"
    with pytest.raises(fr.ClosedError, match="open the model first"):
        model(rows=X)
    with model:
        with pytest.raises(FeedError, match=r"takes \(rows: float32\[\?,3\]\), and was given \['row'\]"):
            model(row=X)
        with pytest.raises(
            FeedError, match=r"takes \(rows: float32\[\?,3\]\), and was given \[\] and 1 without a name"
        ):
            model(X)
        with pytest.raises(FeedError, match=r"expected float32\[\?,3\], got float64"):
            model(rows=X.astype("float64"))
        with pytest.raises(fr.ClosedError, match="open already"):
            model.__enter__()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(None, 96), (None, 5, 96)])
def test_weights_in_eight_bits_are_near_and_a_quarter_as_large(shape: Any, transposed: bool) -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(96, 128)).astype("float32") * rng.uniform(0.1, 10, 128).astype("float32")
    with fr.Graph() as graph:
        x = fr.placeholder("float32", shape, name="x")
        w = fr.Variable(values.T if transposed else values, name="layer/w")
        y = fr.matmul(x, w, transpose_b=transposed) + fr.Variable(np.ones(128, "float32"), name="b")
    with fr.BlockingSession(graph) as session:
        model = fr.serving.freeze(session, {"x": x}, {"y": y}, quantize="int8")
        plain = fr.serving.freeze(session, {"x": x}, {"y": y})
    constants = {n.name: n.attrs["value"] for n in model.graph.nodes if n.op.name == "constant"}
    assert {name: value.dtype.name for name, value in constants.items() if value.size > 128} == {"layer/w/int8": "int8"}
    given = rng.normal(size=tuple(7 if size is None else size for size in shape)).astype("float32")
    with model, plain:
        found, expected = model(x=given)["y"], plain(x=given)["y"]
        alone = model(x=given[:1])["y"]
        given[3] = np.nan
        spoiled = model(x=given)["y"]
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    np.testing.assert_array_equal(found[:1], alone)
    np.testing.assert_array_equal(np.delete(spoiled, 3, axis=0), np.delete(found, 3, axis=0))
    assert np.isnan(spoiled[3]).all()


def test_what_is_small_or_no_weight_stays_as_it_is() -> None:
    program = Trained()
    with program.graph:
        both, few = program.x @ fr.transpose(program.x), program.x @ X.T
    with fr.BlockingSession(program.graph) as session:
        model = fr.serving.freeze(session, [program.x], {"y": both, "z": few}, quantize="int8")
        assert ops_of(model).count("matmul") == 2
        with pytest.raises(GraphError, match="quantize is 'int8', or None, got 'int4'"):
            fr.serving.freeze(session, [program.x], {"y": both}, quantize="int4")


def test_a_weight_that_is_read_otherwise_too_keeps_its_floats_for_that() -> None:
    values = np.random.default_rng(4).normal(size=(64, 64)).astype("float32")
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        ids = fr.placeholder("int64", (None,), name="ids")
        w = fr.Variable(values, name="w")
        y, rows = x @ w, fr.take(w, ids)
    for outputs in ({"y": y, "rows": rows}, {"rows": rows, "y": y}):
        with fr.BlockingSession(graph) as session:
            model = fr.serving.freeze(session, [x, ids], outputs, quantize="int8")
        with model:
            answer = model(x=values[:2], ids=np.array([5]))
        np.testing.assert_array_equal(answer["rows"], values[[5]])
        np.testing.assert_allclose(answer["y"], values[:2] @ values, atol=0.5)
