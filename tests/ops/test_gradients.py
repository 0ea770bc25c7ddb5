"""Gradients by structure: what is built, where, and what is refused. The op table judges the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrt.base.errors import GraphError
from flowrt.base.spec import Spec
from flowrt.gradients import gradients
from flowrt.graph import Graph, Tensor, device, name_scope
from flowrt.op import Op
from flowrt.ops.elementwise import add, astype, exp, multiply, negative, square
from flowrt.ops.flow import merge, stop_gradient, switch
from flowrt.ops.reduce import sum
from flowrt.ops.source import constant, placeholder
from flowrt.ops.state import Variable
from flowrt.session.blocking import BlockingSession


def halves(x: Spec) -> tuple[Spec, Spec]:
    """Two tensors from one."""
    return x, x


def floats(*shape: int | None, name: str = "x") -> Tensor:
    made: Tensor = placeholder("float32", shape, name=name)
    return made


def apply(fn: Any, *inputs: Tensor, gradient: Any = None) -> Any:
    """The outputs of an op of this test's own, which no registry holds."""
    op = Op(fn)
    op.gradient_rule = gradient
    return inputs[0].graph.apply(op, inputs, {})


def form(tensor: Tensor) -> Any:
    """A tensor as nested (op, inputs); constants by value, placeholders by name."""
    if tensor.op.op.name == "constant":
        return tensor.op.attrs["value"].tolist()  # type: ignore[union-attr]
    if not tensor.op.inputs:
        return tensor.op.name
    return (tensor.op.op.name, *(form(t) for t in tensor.op.inputs))


def ones(x: Any) -> Any:
    return ("full_like", x, 1.0)


def test_a_chain_is_differentiated_backwards() -> None:
    with Graph():
        x = floats(3)
        (dx,) = gradients(negative(negative(x)), x)
    assert form(dx) == ("negative", ("negative", ones(("negative", ("negative", "x")))))


def test_partials_are_summed() -> None:
    with Graph():
        x = floats(3)
        (dx,) = gradients(add(x, x), x)
    assert form(dx) == ("add_n", ones(("add", "x", "x")), ones(("add", "x", "x")))


def test_several_ys_add_up_and_weights_replace_ones() -> None:
    with Graph():
        x, weight = floats(3), floats(3, name="weight")
        (dx,) = gradients([negative(x), negative(x)], [x], [weight, np.array([1.0, 2.0, 3.0])])
    assert form(dx) == ("add_n", ("negative", [1.0, 2.0, 3.0]), ("negative", "weight"))


def test_the_gradient_of_y_by_itself_is_its_weight() -> None:
    with Graph():
        x = floats(3)
        y = negative(x)
        dy, dx = gradients(y, [y, x])
    assert form(dy) == ones(("negative", "x"))
    assert form(dx) == ("negative", ones(("negative", "x")))


def test_what_y_does_not_depend_on_has_none() -> None:
    with Graph():
        x, other = floats(3), floats(3, name="other")
        assert gradients(negative(x), [other, x])[0] is None


def test_stop_gradient_and_integers_let_nothing_through() -> None:
    with Graph():
        x, n = floats(3), placeholder("int64", (3,), name="n")
        y = multiply(stop_gradient(x), astype(n, "float32"))
        through_integers = astype(astype(x, "int64"), "float32")
        assert gradients([y, through_integers], [x, n]) == [None, None]


def test_a_variable_stands_for_its_read() -> None:
    with Graph():
        v = Variable([1.0, 2.0], name="v")
        (dv,) = gradients(square(v), v)
    assert dv.spec == v.spec


def test_a_broadcast_input_gets_a_sum() -> None:
    with Graph():
        x, b = floats(2, 3), floats(3, name="b")
        dx, db = gradients(add(x, b), [x, b])
    assert (form(dx), form(db)) == (ones(("add", "x", "b")), ("sum_to", ones(("add", "x", "b")), [3]))
    assert db.shape == (3,)


def test_a_scalar_gets_a_sum_to_no_dimensions() -> None:
    with Graph():
        x, c = floats(2, 3), floats(name="c")
        dc = gradients(add(x, c), c)[0]
    assert (dc.op.op.name, dc.shape, dc.op.inputs[1].spec) == ("sum_to", (), Spec("int64", (0,), ()))


def test_an_open_batch_is_summed_only_where_it_may_have_been_broadcast() -> None:
    with Graph():
        x, b, row = floats(None, 3), floats(3, name="b"), floats(None, 3, name="row")
        dx, db = gradients(add(x, b), [x, b])
        dx_beside_row = gradients(add(x, row), [x])[0]
    assert (dx.op.op.name, db.op.op.name, dx_beside_row.op.op.name) == ("full_like", "sum_to", "sum_to")
    assert form(dx_beside_row.op.inputs[1]) == ("shape_of", "x")


def test_a_sum_for_one_op_does_not_stand_for_the_next() -> None:
    with Graph():
        x, row, other = floats(None, 3), floats(None, 3, name="row"), floats(None, 3, name="other")
        (dx,) = gradients(add(add(x, row), other), x)
    assert form(dx)[0] == form(dx)[1][0] == "sum_to"
    assert form(dx)[2] == ("shape_of", "x")


def test_unused_outputs_get_zeros() -> None:
    seen: list[Any] = []

    def rule(node: Any, first: Tensor, second: Tensor) -> tuple[Any, ...]:
        seen.extend([form(first), form(second)])
        return (add(first, second),)

    with Graph():
        x = floats(3)
        _a, b = apply(halves, x, gradient=rule)
        gradients(b, x)
    assert seen == [("full_like", ("halves", "x"), 0.0), ones(("halves", "x"))]


def test_an_op_without_a_rule_is_named_with_its_line() -> None:
    with Graph():
        x = floats(3)
        a, _ = apply(halves, x)
        with pytest.raises(GraphError, match=r"halves 'halves' \(.*test_gradients.py:\d+\): halves has no gradient"):
            gradients(a, x)
        assert gradients(negative(constant([1.0])), [x]) == [None]  # off the way nobody asks


def test_a_rule_that_answers_wrongly_is_named() -> None:
    with Graph():
        x = floats(3)
        one = apply(halves, x, gradient=lambda node, *dy: dy)[0]
        two = apply(halves, x, gradient=lambda node, *dy: (astype(dy[0], "float64"),))[0]
        with pytest.raises(GraphError, match="2 gradients for 1 inputs"):
            gradients(one, x)
        with pytest.raises(GraphError, match=r"answered float64\[3\] for input 0, float32\[3\]"):
            gradients(two, x)


def test_the_second_order_is_a_gradient_of_the_first() -> None:
    with Graph():
        x = floats(3)
        (first,) = gradients(sum(multiply(square(x), x)), x)
        (second,) = gradients(first, x)
        (third,) = gradients(second, x)
    assert first.spec == second.spec == third.spec == x.spec


def test_gradients_pass_switches_and_merges() -> None:
    with Graph():
        x, pred = floats(3), placeholder("bool", (), name="pred")
        if_false, if_true = switch(x, pred)
        y = merge([negative(if_false), exp(if_true)])[0]
        (dx,) = gradients(y, x)
        (one_sided,) = gradients(if_true, x)
    assert dx.op.op.name == one_sided.op.op.name == "merge"
    assert form(one_sided)[1][0] == "full_like"


def test_nodes_are_named_apart_and_placed_beside_their_forward_nodes() -> None:
    with Graph() as graph:
        x = floats(3)
        with device("/job:worker/task:1"):
            y = exp(x, name="y")
        count = len(graph.nodes)
        with name_scope("training"), device("/job:ps"):
            gradients(y, x)
    made = graph.nodes[count:]
    assert all(node.name.startswith("training/gradients/") for node in made)
    assert all(node.colocate == (y.op,) and str(node.device) == "" for node in made)


def test_ys_must_be_floating_tensors_of_one_graph() -> None:
    with Graph():
        x, n = floats(3), placeholder("int64", (3,), name="n")
        with pytest.raises(GraphError, match="not floating"):
            gradients(n, x)
        with pytest.raises(GraphError, match="tensors or variables, got 3"):
            gradients(x, [3])
        with pytest.raises(GraphError, match="at least one of xs"):
            gradients(x, [])
        with pytest.raises(GraphError, match=r"must be float32\[3\]"):
            gradients(negative(x), x, [constant([1.0])])
        with pytest.raises(GraphError, match="2 grad_ys"):
            gradients(negative(x), x, [None, None])
    with Graph(), pytest.raises(GraphError, match="different graphs"):
        gradients(x, floats(3))


def test_a_number_that_weighs_a_double_is_one() -> None:
    with Graph() as graph:
        x = placeholder("float64", (3,))
        (weighed,) = gradients(negative(x), x, [[0.1, 0.2, 1e300]])
    with BlockingSession(graph) as session:
        assert session.run(weighed, {x: np.ones(3)}).tolist() == [-0.1, -0.2, -1e300]


def test_a_deep_graph_is_walked_without_recursion() -> None:
    with Graph():
        x = y = floats()
        for _ in range(3000):
            y = negative(y)
        assert gradients(y, x)[0].shape == ()
