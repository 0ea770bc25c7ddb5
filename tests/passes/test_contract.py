"""Products, biases and activations as one node: when, and that it computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_world import CPU

import flowrt as fr
from flowrt.ops.conv import conv2d
from flowrt.ops.elementwise import add, relu
from flowrt.ops.flow import switch
from flowrt.ops.linalg import matmul
from flowrt.ops.source import placeholder, shape_of
from flowrt.passes import StepTerms, compile_step
from flowrt.session.session import Options


def on_cpu(op: str, dtypes: Any, kind: str) -> bool:
    return kind == "cpu"


def ops_of(fetches: list[Any], feeds: list[Any], targets: Any = ()) -> list[str]:
    made = compile_step(
        fetches[0].graph, fetches, targets, feeds, StepTerms(devices=[CPU], default=CPU, supports=on_cpu)
    )
    (plan,) = made.plans.values()
    return [node.op for node in plan.nodes]


def layer() -> tuple[list[Any], Any, Any]:
    """The inputs of a dense layer, its sum and its result; call it where a graph is active."""
    x, w = placeholder("float32", (None, 3), name="x"), placeholder("float32", (3, 4), name="w")
    b = placeholder("float32", (4,), name="b")
    total = add(matmul(x, w), b)
    return [x, w, b], total, relu(total)


def test_a_layer_is_one_node() -> None:
    with fr.Graph():
        feeds, total, y = layer()
        k = placeholder("float32", (3, 3, 4, 5), name="k")
        image, bias = placeholder("float32", (2, None, 6, 4), name="image"), placeholder("float32", (5,), name="c")
        z = add(bias, conv2d(image, k))
    assert ops_of([y], feeds) == ["matmul_bias"]
    assert ops_of([total], feeds) == ["matmul_bias"]
    assert ops_of([z], [image, k, bias]) == ["conv2d_bias"]


def test_what_someone_else_reads_or_waits_for_is_computed() -> None:
    with fr.Graph():
        feeds, total, y = layer()
        product = total.op.inputs[0]
        other = add(product, 1.0)
    assert ops_of([y, total], feeds) == ["matmul_bias", "relu"]
    assert ops_of([y, product], feeds) == ["matmul", "add", "relu"]
    assert sorted(ops_of([y, other], feeds)) == ["add", "add", "constant", "matmul", "relu"]
    assert ops_of([y], feeds, [product.op]) == ["matmul", "add", "relu"]


def test_what_is_no_bias_along_the_last_axis_stays() -> None:
    with fr.Graph():
        x, w = placeholder("float32", (4, 4), name="x"), placeholder("float32", (4, 4), name="w")
        column, one = placeholder("float32", (4, 1), name="column"), placeholder("float32", (1,), name="one")
        row = placeholder("float32", (4,), name="row")
        cases = [add(matmul(x, w), column), add(matmul(x, w), one), add(matmul(x, row), row), add(matmul(x, w), w)]
    for case in cases:
        assert "matmul_bias" not in ops_of([case], [x, w, column, one, row])


def test_the_shape_of_what_is_left_out_is_that_of_the_result() -> None:
    with fr.Graph():
        feeds, total, y = layer()
        shape = shape_of(total.op.inputs[0])
    assert sorted(ops_of([y, shape], feeds)) == ["matmul_bias", "shape_of"]


def test_where_there_are_switches_what_is_asked_for_its_shape_stays_as_that_may_be_wanted_alone() -> None:
    with fr.Graph():
        feeds, total, y = layer()
        pred = placeholder("bool", (), name="pred")
        shape = shape_of(total.op.inputs[0])
        chosen = fr.negative(switch(y, pred)[0])
    assert sorted(ops_of([chosen], [*feeds, pred])) == ["matmul_bias", "negative", "switch"]
    assert "matmul" in ops_of([chosen, shape], [*feeds, pred])


def test_what_was_contracted_is_counted() -> None:
    with fr.Graph() as graph:
        feeds, _, y = layer()
        others = [fr.negative(feeds[0]), fr.exp(feeds[0])]
    made = compile_step(graph, [y, *others], [], feeds, StepTerms(devices=[CPU], default=CPU, supports=on_cpu))
    assert [dict(report.counts) for report in made.report if report.name == "contract"] == [{"products": 1}]


def test_a_bias_made_of_the_shape_it_is_added_to_does_not_wait_for_itself() -> None:
    with fr.Graph():
        feeds, total, _ = layer()
        product = total.op.inputs[0]
        bias = fr.reshape(fr.astype(fr.multiply(shape_of(product)[:1], np.ones(4, np.int64)), "float32"), (4,))
        y = relu(add(product, bias))
    assert "matmul" in ops_of([y], feeds[:2])


@pytest.mark.timeout(300)  # the first to run compiles the kernels
@pytest.mark.parametrize(("inner", "outer"), [(fr.nn.relu, fr.identity), (fr.silu, fr.tanh)], ids=["bias", "epilogue"])
@pytest.mark.parametrize("batch", [1, 5])
async def test_a_training_step_is_the_same_joined_or_not(batch: int, inner: Any, outer: Any) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((batch, 6, 6, 3)).astype("f"), rng.integers(0, 4, batch)
    losses = []
    for optimize in (True, False):
        with fr.Graph() as graph:
            x, y = fr.placeholder("float32", (None, 6, 6, 3)), fr.placeholder("int64", (None,))
            k = fr.Variable(np.random.default_rng(1).standard_normal((3, 3, 3, 5)).astype("f"), name="k")
            w = fr.Variable(np.random.default_rng(2).standard_normal((180, 4)).astype("f") * 0.1, name="w")
            b, c = (fr.Variable(np.full(n, 0.1, np.float32), name=f"bias{n}") for n in (5, 4))
            hidden = inner(fr.nn.bias_add(fr.nn.conv2d(x, k), b))
            logits = outer(fr.matmul(fr.reshape(hidden, (-1, 180)), w) + c)
            loss = fr.mean(fr.nn.softmax_cross_entropy(logits, y))
            train = fr.optim.Momentum(0.05, 0.9).minimize(loss)
        async with fr.Session(graph, options=Options(optimize=optimize)) as session:
            losses.append([(await session.run([loss, train], {x: images, y: labels}))[0] for _ in range(4)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
