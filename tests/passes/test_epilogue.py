"""Products and what goes over their entries as one node: when, in how many launches, and that it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.device import Device
from flowrt.base.spec import Spec
from flowrt.kernels.composite.epilogue import EpilogueStep
from flowrt.kernels.launch import Application, Prepared, apply_kernel
from flowrt.ops.fused import parts_of
from flowrt.passes import StepTerms, compile_step
from flowrt.session.runners import fusible, supports

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

CPU = Device.parse("/job:local/task:0/device:cpu:0")


def plan_of(build: Callable[..., Any], *shapes: Any) -> Plan:
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", shape) for shape in shapes]
        made = build(*feeds)
    asked = list(made) if isinstance(made, (list, tuple)) else [made]
    fetches = [t for t in asked if isinstance(t, fr.Tensor)]
    targets = [t for t in asked if not isinstance(t, fr.Tensor)]
    compiled = compile_step(
        graph, fetches, targets, feeds, StepTerms(devices=[CPU], default=CPU, supports=supports, fusible=fusible)
    )
    (plan,) = compiled.plans.values()
    return plan


def parts(plan: Plan) -> list[list[str]]:
    """The ops of each node, but for constants."""
    return [parts_of(node.op, node.attrs) for node in plan.nodes if node.op != "constant"]


def test_a_layer_and_its_activation_are_one_node() -> None:
    layer = (None, 3), (3, 4), (4,)
    assert parts(plan_of(lambda x, w, b: fr.tanh(x @ w + b), *layer)) == [["matmul_bias", "tanh"]]
    assert parts(plan_of(lambda x, w, b: fr.silu(x @ w + b), *layer)) == [
        ["matmul_bias", "minimum", "maximum", "sigmoid", "multiply", "greater", "where"]
    ]
    plan = plan_of(lambda x, k: fr.sigmoid(fr.nn.conv2d(x, k)), (2, None, 6, 4), (3, 3, 4, 5))
    assert parts(plan) == [["conv2d", "sigmoid"]]
    assert plan.nodes[-1].name == "sigmoid"


def test_of_two_products_the_last_is_joined() -> None:
    plan = plan_of(lambda x, w, h, u: fr.tanh(x @ w + h @ u), (2, 3), (3, 4), (2, 5), (5, 4))
    assert parts(plan) == [["matmul"], ["matmul", "add", "tanh"]]


def test_a_product_that_its_gradient_wants_is_the_first_result() -> None:
    plan = plan_of(lambda x, w, dy: [fr.silu(x @ w), (x @ w) * dy], (2, 3), (3, 4), (2, 4))
    (node,) = (node for node in plan.nodes if node.op == "with_epilogue")
    assert parts_of(node.op, node.attrs)[0] == "matmul"
    read = plan_of(lambda x, w, u: [fr.tanh(product := x @ w), product @ u], (2, 3), (3, 4), (4, 5))
    assert [(node.op, node.attrs.get("kept")) for node in read.nodes] == [("with_epilogue", True), ("matmul", None)]
    asked = plan_of(lambda x, w: [product := x @ w, fr.tanh(product)], (2, 3), (3, 4))
    (node,) = asked.nodes
    assert node.attrs["kept"]
    assert asked.fetches == (2, 3)


def test_what_is_of_another_shape_or_assigned_stays_apart() -> None:
    assert parts(plan_of(lambda x, w, b: (x @ w) + b, (1, 3), (3, 4), (2, 4))) == [["matmul"], ["add"]]
    assert parts(plan_of(lambda x, w: fr.max(x @ w), (2, 3), (3, 4))) == [["matmul"], ["max"]]
    assert parts(plan_of(lambda x, v: fr.tanh(x @ v), (2, 3), (3,))) == [["matmul"], ["tanh"]]

    def assigned(x: Any, y: Any) -> Any:
        return fr.Variable(np.zeros((3, 3), np.float32), name="v").assign(fr.exp(x @ y))

    assert ["matmul"] in parts(plan_of(assigned, (3, 3), (3, 3)))


def test_a_residual_of_a_batch_that_only_a_step_knows_is_joined_where_it_is_the_products_own() -> None:
    def block(x: Any, w: Any, v: Any) -> Any:
        return fr.tanh(x @ w) @ v + x * 0.5

    joined = [parts_of(node.op, node.attrs) for node in plan_of(block, (None, None, 4), (4, 3), (3, 4)).nodes]
    assert ["matmul", "tanh"] in joined
    assert ["matmul", "multiply", "add"] in joined

    def apart(x: Any, w: Any, r: Any) -> Any:
        return x @ w + r * 0.5

    assert "with_epilogue" not in {node.op for node in plan_of(apart, (None, 4), (4, 3), (None, 3)).nodes}
    twice = plan_of(lambda x, w: x @ w + fr.concat([x, x], 0), (None, 4), (4, 4))  # a row, and two
    assert "with_epilogue" not in {node.op for node in twice.nodes}
    cut = plan_of(lambda x, w: fr.exp(x[1:]) @ w + x, (None, 4), (4, 4))  # a row, and two
    assert "with_epilogue" not in {node.op for node in cut.nodes}
    computed = plan_of(lambda x, w: (fr.exp(x) * 2.0) @ w + x, (None, 4), (4, 4))
    assert "with_epilogue" in {node.op for node in computed.nodes}
    rng = np.random.default_rng(3)
    x, w, v = (rng.standard_normal(shape).astype("f") for shape in ((2, 5, 4), (4, 3), (3, 4)))
    with fr.Graph() as graph:
        fed = fr.placeholder("float32", (None, None, 4))
        made = block(fed, w, v)
    with fr.BlockingSession(graph) as session:
        for part in (x, x[:1], x[:, :1]):
            judge = np.tanh(part @ w) @ v + part * 0.5
            np.testing.assert_allclose(session.run(made, {fed: part}), judge, rtol=1e-5, atol=1e-6)


WIDENED: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {  # what is built, the dims, and a step's shapes
    "rows": (lambda x, w, r: x @ w + r, [(None, 3), (3, 4), (None, 4)], [(1, 3), (3, 4), (5, 4)]),
    "columns": (lambda x, w, b: fr.tanh(x @ w + b), [(4, 3), (3, None), (None,)], [(4, 3), (3, 1), (6,)]),
    "matrices": (lambda x, w, r: (x @ w) * r, [(None, 2, 3), (3, 4), (None, 2, 4)], [(1, 2, 3), (3, 4), (7, 2, 4)]),
    "images": (
        lambda x, k, r: fr.nn.conv2d(x, k) * r,
        [(None, 8, 8, 2), (1, 1, 2, 3), (None, 8, 8, 3)],
        [(1, 8, 8, 2), (1, 1, 2, 3), (9, 8, 8, 3)],
    ),
    "repeated": (
        lambda x, w, r: (x @ w) * fr.broadcast_to(fr.sum(r, 0, keepdims=True), fr.shape_of(r)),
        [(None, 3), (3, 4), (None, 4)],
        [(1, 3), (3, 4), (5, 4)],
    ),
}


@pytest.mark.parametrize("name", WIDENED)
def test_a_product_that_only_a_step_repeats_is_computed_once(name: str) -> None:
    build, dims, shapes = WIDENED[name]
    rng = np.random.default_rng(8)
    given = [rng.standard_normal(shape).astype("f") for shape in shapes]
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float32", d) for d in dims]
        made = build(*feeds)
    with fr.BlockingSession(graph) as session:
        for _ in range(2):
            np.testing.assert_allclose(
                session.run(made, dict(zip(feeds, given, strict=True))), build(*given), rtol=1e-5, atol=1e-6
            )


def test_a_reader_that_waits_for_another_stays_apart() -> None:
    def build(x: Any, w: Any) -> Any:
        product = x @ w
        return fr.tanh(product) * fr.max(product)

    assert parts(plan_of(build, (2, 3), (3, 4))) == [["matmul"], ["max"], ["tanh", "multiply"]]

    def later(x: Any, w: Any) -> Any:
        return x @ w + fr.FIFOQueue(1, "float32", (2, 4)).dequeue()

    assert ["matmul"] in parts(plan_of(later, (2, 3), (3, 4)))

    def one_side(x: Any, w: Any, b: Any) -> Any:
        return [product := x @ w, product + fr.switch(b, fr.greater(fr.sum(b), 0.0))[0]]

    assert ["matmul"] in parts(plan_of(one_side, (2, 3), (3, 4), (2, 4)))


MATMUL = ("matmul", 2, (("transpose_a", False), ("transpose_b", False)))
CONV = ("conv2d", 2, (("dilations", 1), ("groups", 1), ("padding", "SAME"), ("strides", 1)))


def applied(product: Any, *shapes: Any, dtype: str = "float32", kept: bool = False) -> tuple[Application, list[Spec]]:
    """What computes the tanh of a product, and the specs of its operands."""
    *inputs, made = (Spec(dtype, shape) for shape in shapes)
    outputs = [made, made] if kept else [made]
    attrs = {"_many": 2, "product": product, "epilogue": ("tanh", ()), "taken": (-1,), "kept": kept}
    return apply_kernel("with_epilogue", inputs, outputs, attrs), [*inputs, *outputs]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (MATMUL, ((7, 5), (5, 3), (7, 3))),
        (MATMUL, ((2, 3, 1, 5), (3, 5, 4), (2, 3, 1, 4))),
        (MATMUL, ((300, 40), (40, 1), (300, 1))),
        (MATMUL, ((700, 33), (33, 90), (700, 90))),
        (MATMUL, ((2000, 600), (600, 100), (2000, 100))),
        (CONV, ((9, 4, 5, 3), (3, 3, 3, 4), (9, 4, 5, 4))),
        (CONV, ((2, 40, 30, 2), (3, 3, 2, 4), (2, 40, 30, 4))),
    ],
    ids=str,
)
def test_rows_by_rows_it_is_what_the_two_make_of_each_other(product: Any, shapes: Any, kept: bool) -> None:
    application, specs = applied(product, *shapes, kept=kept)
    rng = np.random.default_rng(len(shapes[0]))
    given = [rng.standard_normal(spec.concrete).astype("f") for spec in specs[:2]]
    prepared = Prepared(application, len(specs))
    rest = [np.full(spec.concrete, np.nan, spec.dtype) for spec in specs[2:]]
    rest += [np.zeros(spec.concrete, spec.dtype) for spec in prepared.scratch]
    prepared.run(np.zeros(4, np.int64).ctypes.data, [array.ctypes.data for array in (*given, *rest)])
    made = np.asarray(fr.matmul(*given) if product is MATMUL else fr.nn.conv2d(*given))
    np.testing.assert_array_equal(rest[kept], np.asarray(fr.tanh(made)))
    if kept:
        np.testing.assert_array_equal(rest[0], made)


def test_one_launch_does_both_where_units_make_whole_rows() -> None:
    def launches(product: Any, *shapes: Any) -> list[type]:
        return [type(step) for step in applied(product, *shapes)[0].steps]

    assert launches(MATMUL, (64, 8), (8, 10), (64, 10)) == [EpilogueStep]
    assert EpilogueStep not in launches(MATMUL, (64, 80), (80, 256), (64, 256))
    assert launches(CONV, (2, 8, 8, 3), (3, 3, 3, 4), (2, 8, 8, 4))[-1] is EpilogueStep


def test_layers_around_which_values_are_led_are_followed_once_however_deep() -> None:
    """The batch's size comes to each layer on two ways; along all ways there would be 2 to the power of 60."""

    def residual(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = fr.tanh(x @ w) + x
        return x

    plan = plan_of(residual, (None, 3), *[(3, 3)] * 60)
    assert parts(plan) == [["matmul", "tanh", "add"]] * 60
