"""Every op of the registry: what it infers, computes, differentiates to, and survives.

`op_examples.EXAMPLES` holds the cases; naive NumPy is the judge of values, finite differences of gradients.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES, Example

import flowrt.ops as fr
from flowrt.base.attributes import attr_key
from flowrt.base.codec import PLAN, decode, encode
from flowrt.base.errors import GraphError, SpecError
from flowrt.base.plan import Plan, PlanFeed, PlanNode, plan_from_data, plan_to_data
from flowrt.base.spec import Spec, as_dtype
from flowrt.gradients import gradients
from flowrt.graph import Graph, Node, Tensor
from flowrt.op import REGISTRY, Op
from flowrt.ops.inference import described
from flowrt.sched.units import action_of
from flowrt.session.eager import evaluate
from flowrt.session.session import Options, Session

Array = np.ndarray[Any, Any]

OWN = [op for op in REGISTRY.values() if op.__module__.startswith("flowrt.ops.")]
COMPUTED = [e for e in EXAMPLES if e.reference is not None]
FIXED = [e for e in EXAMPLES if e.specs is not None]
DIFFERENTIABLE = [e for e in COMPUTED if e.differentiable]
WITH_INPUTS = [e for e in COMPUTED if e.inputs]


def as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def build(example: Example, shapes: Callable[[Array], Any], dtype: Any = None) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The example in a graph of its own: its placeholders and its outputs."""
    with Graph():
        inputs = []
        for array in example.arrays:
            kind = dtype if dtype is not None and array.dtype.kind == "f" else array.dtype
            inputs.append(fr.placeholder(kind, shapes(array)))
        return inputs, as_tuple(example.run(*inputs))


def skip_if_closed(example: Example, sizes: Callable[[Array], Any]) -> None:
    if sizes is open_sizes and not example.open_sizes:
        pytest.skip("needs its inputs' sizes")


def whole(array: Array) -> tuple[int, ...]:
    return array.shape


def open_sizes(array: Array) -> tuple[None, ...]:
    return (None,) * array.ndim


def run_graph(fetches: Sequence[Tensor], feeds: dict[Tensor, Array]) -> list[Array]:
    """What a step would answer: the graph's nodes one by one, inferred anew from the arrays."""
    values = dict(feeds)
    for node in fetches[0].graph.nodes if fetches else ():
        if not any(output in values for output in node.outputs) and all(t in values for t in node.inputs):
            outputs = evaluate(node.op, [values[t] for t in node.inputs], node.attrs)
            values.update(zip(node.outputs, outputs, strict=True))
    return [values[t] for t in fetches]


def check(got: Sequence[Array], want: Sequence[Any], margin: float) -> None:
    assert len(got) == len(want)
    for mine, judge in zip(got, map(np.asarray, want), strict=True):
        assert mine.dtype == judge.dtype
        assert mine.shape == judge.shape
        np.testing.assert_allclose(mine, judge, rtol=margin, atol=margin, equal_nan=True)


def judged(example: Example) -> tuple[Any, ...]:
    assert example.reference is not None
    return as_tuple(example.reference(*example.inputs))


# ── the registry ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_op_has_an_example() -> None:
    assert {op.name for op in OWN} - {example.op for example in EXAMPLES} == set()


@pytest.mark.parametrize("op", OWN, ids=str)
def test_every_op_is_documented_differentiable_or_says_not_and_carried_out_somewhere(op: Op) -> None:
    assert op.__doc__
    takes_tensors = any(p.tensor for p in op.parameters)
    assert op.gradient_rule is not None or not op.differentiable or not takes_tensors
    assert op.gradient_rule is None or op.differentiable
    if op.name != "placeholder":  # which every step is given
        action_of(PlanNode(op.name, op.name, (), ()))


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_shows_the_op_it_is_of(example: Example) -> None:
    with Graph() as graph:
        example.run(*[fr.placeholder(a.dtype, a.shape) for a in example.arrays])
    assert example.op in {node.op.name for node in graph.nodes}


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("example", COMPUTED, ids=str)
def test_on_arrays_it_computes_what_numpy_does(example: Example) -> None:
    check(as_tuple(example.run(*example.arrays)), judged(example), example.margin)


@pytest.mark.parametrize("example", [e for e in WITH_INPUTS if any(a.size > 1 for a in e.arrays)], ids=str)
def test_strided_arrays_and_other_byte_orders_are_taken(example: Example) -> None:
    spaced = []
    for array in example.arrays:
        wide = np.zeros((*array.shape, 2), array.dtype.newbyteorder(">"))
        wide[..., 0] = array
        spaced.append(wide[..., 0])
    check(as_tuple(example.run(*spaced)), judged(example), example.margin)


@pytest.mark.parametrize("sizes", [whole, open_sizes])
@pytest.mark.parametrize("example", COMPUTED, ids=str)
def test_a_graph_infers_what_it_computes_and_computes_what_arrays_do(
    example: Example, sizes: Callable[[Array], Any]
) -> None:
    skip_if_closed(example, sizes)
    inputs, outputs = build(example, sizes)
    got = run_graph(outputs, dict(zip(inputs, example.arrays, strict=True)))
    for tensor, array in zip(outputs, got, strict=True):
        assert tensor.spec.accepts(array.dtype, array.shape)
        if sizes is whole and example.note != "computed":
            assert tensor.spec.known or example.op == "arange"
        if tensor.spec.value is not None:
            assert_value(tensor.spec.value, array)
    for mine, eager in zip(got, as_tuple(example.run(*example.arrays)), strict=True):
        np.testing.assert_array_equal(mine, eager)


AS_WRITTEN = {
    "machine": Options(optimize=False, tapes=False, threads=1),
    "tape": Options(optimize=False, threads=1),
    "optimized": Options(threads=1),
}


@pytest.mark.parametrize("options", AS_WRITTEN.values(), ids=AS_WRITTEN)
async def test_sessions_answer_what_numpy_does(options: Options) -> None:
    """All examples in one graph and one step: by the machine, as a tape, and after the passes."""
    fetches, feeds, wanted = {}, {}, {}
    with Graph() as graph:
        for number, example in enumerate(COMPUTED):
            inputs = [fr.placeholder(a.dtype, a.shape) for a in example.arrays]
            fetches[number] = as_tuple(example.run(*inputs))
            feeds.update(zip(inputs, example.arrays, strict=True))
            wanted[number] = judged(example)
    async with Session(graph, options=options) as session:
        got = await session.run(fetches, feeds)
    for number, example in enumerate(COMPUTED):
        check([np.asarray(a) for a in got[number]], wanted[number], example.margin)


def assert_value(value: Any, array: Array) -> None:
    """What inference knows of an integer tensor is what it comes to hold."""
    known = np.array(value, dtype=object)
    assert known.shape == array.shape
    for mine, actual in zip(known.ravel(), array.ravel(), strict=True):
        assert mine in (None, int(actual))


@pytest.mark.parametrize("example", FIXED, ids=str)
def test_what_only_a_step_carries_out_infers_its_outputs(example: Example) -> None:
    _, outputs = build(example, whole)
    found = tuple(t.spec.without_value() for t in outputs if isinstance(t, Tensor))
    assert found == example.specs
    assert example.specs or isinstance(outputs[0], Node)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sizes", [whole, open_sizes])
@pytest.mark.parametrize("example", DIFFERENTIABLE, ids=str)
def test_gradients_are_finite_differences_along_a_random_direction(
    example: Example, sizes: Callable[[Array], Any]
) -> None:
    rng = np.random.default_rng(zlib.crc32(str(example).encode()))
    skip_if_closed(example, sizes)
    inputs, outputs = build(example, sizes, "float64")
    xs = [t for t in inputs if t.dtype.kind == "f"]
    ys = [t for t in outputs if t.dtype.kind == "f"]
    values = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in example.arrays]
    weights = [
        rng.normal(size=np.shape(w)).astype(t.dtype)
        for w, t in zip(judged(example), outputs, strict=True)
        if t.dtype.kind == "f"
    ]
    slopes = gradients(ys, xs, weights)
    assert any(slope is not None for slope in slopes)
    feeds = dict(zip(inputs, values, strict=True))
    directions = {x: rng.normal(size=feeds[x].shape) for x in xs}
    found = run_graph([s for s in slopes if s is not None], feeds)
    with_slope = [x for x, slope in zip(xs, slopes, strict=True) if slope is not None]
    for x, slope in zip(with_slope, found, strict=True):
        assert slope.shape == feeds[x].shape
        assert slope.dtype == feeds[x].dtype
    analytic = sum(float(np.sum(slope * directions[x])) for x, slope in zip(with_slope, found, strict=True))

    def loss(step: float) -> float:
        moved = {t: a + step * directions[t] if t in directions else a for t, a in feeds.items()}
        return sum(float(np.sum(y * w)) for y, w in zip(run_graph(ys, moved), weights, strict=True))

    step = 1e-6
    numeric = (loss(step) - loss(-step)) / (2 * step)
    single = any(t.dtype == np.float32 for t in ys)  # an example that casts down
    assert analytic == pytest.approx(numeric, rel=1e-2 if single else 1e-6, abs=1e-2 if single else 1e-7)


SECOND: list[tuple[str, Callable[[Any], Any]]] = [
    ("multiply", lambda x: x * x * x),
    ("divide", lambda x: 1.0 / (x * x)),
    ("pow", lambda x: fr.pow(x, x)),
    ("exp", fr.exp),
    ("log", fr.log),
    ("sqrt", fr.sqrt),
    ("rsqrt", fr.rsqrt),
    ("reciprocal", fr.reciprocal),
    ("tanh", fr.tanh),
    ("sigmoid", fr.sigmoid),
    ("sin", fr.sin),
    ("erf", fr.erf),
    ("log1p", lambda x: fr.log1p(fr.expm1(x) * x)),
    ("softplus", fr.softplus),
    ("logsumexp", lambda x: fr.logsumexp(x, axis=1)),
    ("square", fr.square),
    ("prod", lambda x: fr.prod(x, axis=1)),
    ("max", lambda x: fr.square(fr.max(x, axis=0))),
    ("mean", lambda x: fr.square(fr.mean(x, axis=1, keepdims=True))),
    ("getitem", lambda x: fr.square(x[1:, ::-1]) * x[:1]),
    ("concat", lambda x: fr.square(fr.concat([x, x * x], axis=1))),
    ("broadcast_to", lambda x: fr.square(fr.broadcast_to(x, (2, 3, 4))) * x),
]


@pytest.mark.parametrize(("name", "function"), SECOND, ids=[name for name, _ in SECOND])
def test_gradients_of_gradients_are_finite_differences_too(name: str, function: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    point, direction, weight = (rng.uniform(0.5, 1.5, size=(3, 4)) for _ in range(3))
    with Graph():
        x = fr.placeholder("float64", (None, 4))
        first = gradients(function(x), x)[0]
        second = gradients(first, x, [weight])[0]
    analytic = float(np.sum(run_graph([second], {x: point})[0] * direction))

    def slope(step: float) -> float:
        return float(np.sum(run_graph([first], {x: point + step * direction})[0] * weight))

    assert analytic == pytest.approx((slope(1e-6) - slope(-1e-6)) / 2e-6, rel=1e-6, abs=1e-7)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_of(graph: Graph) -> Plan:
    """The graph's nodes as one task's plan; placeholders are its feeds."""
    fed = [n for n in graph.nodes if n.op.name == "placeholder"]
    nodes = [n for n in graph.nodes if n.op.name != "placeholder"]
    ids = {t: i for i, t in enumerate(t for n in (*fed, *nodes) for t in n.outputs)}
    position = {node: i for i, node in enumerate(nodes)}
    return Plan(
        "/job:local/task:0",
        tuple(
            PlanNode(
                n.op.name,
                n.name,
                tuple(ids[t] for t in n.inputs),
                tuple(t.spec for t in n.outputs),
                n.attrs,
                tuple(position[c] for c in n.control_inputs if c in position),
                "cpu:0",
                str(n.site),
            )
            for n in nodes
        ),
        tuple(PlanFeed(n.name, n.outputs[0].spec, str(n.site)) for n in fed),
        tuple(ids[t] for n in nodes for t in n.outputs),
    )


def assert_same(mine: Any, other: Any) -> None:
    if isinstance(mine, np.ndarray):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
        assert not other.flags.writeable
    elif isinstance(mine, Plan):
        assert attr_key(mine) == attr_key(other)
    else:
        assert mine == other
        assert type(mine) is type(other)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_plan_survives_the_codec(example: Example) -> None:
    with Graph() as graph:
        example.run(*[fr.placeholder(a.dtype, a.shape) for a in example.arrays])
    plan = plan_of(graph)
    header, buffers = encode(plan_to_data(plan), PLAN)
    read = plan_from_data(decode(header, [bytes(b) for b in buffers], PLAN))
    assert (read.task, read.feeds, read.fetches) == (plan.task, plan.feeds, plan.fetches)
    for mine, other in zip(plan.nodes, read.nodes, strict=True):
        assert mine.attrs.keys() == other.attrs.keys()
        for key, value in mine.attrs.items():
            assert_same(value, other.attrs[key])
        assert (mine.op, mine.name, mine.inputs, mine.outputs) == (other.op, other.name, other.inputs, other.outputs)
        assert (mine.control, mine.device, mine.site) == (other.control, other.device, other.site)


# ── what does not fit ────────────────────────────────────────────────────────────────────────────────────────────────

X = np.ones((2, 3), np.float32)

MISFITS: list[tuple[str, Callable[[], Any], str]] = [
    ("broadcast", lambda: fr.add(X, np.ones(4, np.float32)), "float32[2,3] and float32[4] do not broadcast"),
    ("bool", lambda: fr.subtract(True, False), "use logical_xor"),
    ("add_n", lambda: fr.add_n([X, X[0]]), "must have the same shape"),
    ("add_n of none", lambda: fr.add_n([]), "at least one"),
    ("axis of a scalar", lambda: fr.sum(1.0, axis=-1), "axis -1 is not there: a scalar has none"),
    ("axis", lambda: fr.sum(X, axis=2), "axis 2 is not among the 2 axes"),
    ("axis twice", lambda: fr.sum(X, axis=(0, -2)), "twice"),
    ("max of none", lambda: fr.max(X[:0], axis=0), "no entries"),
    ("clip", lambda: fr.clip(X), "at least one bound"),
    ("cumsum", lambda: fr.cumsum(X), "axis must say along which axis"),
    ("cumsum axis", lambda: fr.cumsum(X, 2), "axis 2 is not among the 2 axes"),
    ("argmax axes", lambda: fr.argmax(X, axis=(0, 1)), "axis is an integer or None, got (0, 1)"),
    ("argmax bool", lambda: fr.argmax(X, axis=True), "axis is one integer, got True"),
    ("split axes", lambda: fr.split(X, 3, (1, 0)), "axis is one integer, got (1, 0)"),  # type: ignore[arg-type]
    ("unstack axes", lambda: fr.unstack(X, (1, 0)), "axis is one integer, got (1, 0)"),  # type: ignore[arg-type]
    ("reshape", lambda: fr.reshape(X, (4, -1)), "cannot reshape float32[2,3] of 6 entries to (4, -1)"),
    ("reshape twice", lambda: fr.reshape(X, (-1, -1)), "only one size"),
    ("shape of floats", lambda: fr.reshape(X, (2.0, 3.0)), "a shape is an integer"),
    ("negative", lambda: fr.zeros((2, -3)), "negative sizes"),
    ("transpose", lambda: fr.transpose(X, (0, 0)), "name each one once"),
    ("squeeze", lambda: fr.squeeze(X, 0), "only axes of size 1"),
    ("concat", lambda: fr.concat([X, X[:, :2]]), "beside axis 0"),
    ("concat scalars", lambda: fr.concat([1, 2]), "use stack"),
    ("stack", lambda: fr.stack([X, X[0]]), "equal sizes"),
    ("index", lambda: fr.getitem(X, (2,)), "index 2 is out of range for axis 0 of size 2"),
    ("indices", lambda: fr.getitem(X, (0, 0, 0)), "do not fit 2 dimensions"),
    ("step", lambda: fr.getitem(X, ((None, None, 0),)), "step of 0"),
    ("pad", lambda: fr.pad(X, ((1, 1),)), "2 pairs"),
    ("broadcast_to", lambda: fr.broadcast_to(X, (2, 4)), "does not broadcast"),
    ("sum_to", lambda: fr.sum_to(X, (2, 2)), "cannot be summed"),
    ("full", lambda: fr.full((2,), [1, 2]), "scalar"),
    ("dtype", lambda: fr.astype(X, "complex64"), "not supported"),
    ("text", lambda: fr.add(X, "a"), "is not a tensor"),
    ("attribute", lambda: fr.add(X, X, axis=0), "unexpected keyword"),
]


@pytest.mark.parametrize(("run", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_what_does_not_fit_says_so_with_the_users_line(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        run()
    assert "test_ops.py:" in str(caught.value)


@pytest.mark.parametrize("run", [lambda: fr.placeholder("float32", ()), lambda: fr.switch(1.0, True), fr.no_op])
def test_what_means_nothing_outside_a_graph_says_so(run: Callable[[], Any]) -> None:
    with pytest.raises(GraphError, match=r"test_ops.py:\d+.*with fr\.Graph\(\)"):
        run()


# ── inference that the examples do not reach ─────────────────────────────────────────────────────────────────────────


def test_shapes_computed_in_the_graph_are_known_to_inference() -> None:
    with Graph():
        x = fr.placeholder("float32", (None, 6))
        rows = fr.shape_of(x)[0]
        assert fr.reshape(x, (rows, 2, 3)).shape == (None, 2, 3)
        assert fr.reshape(x, fr.shape_of(x)).shape == (None, 6)
        assert fr.zeros(fr.shape_of(x)[1:] * 2 + 1).shape == (13,)
        assert fr.reshape(x, fr.concat([[-1], fr.shape_of(x)[1:] // 2, [2]])).shape == (None, 3, 2)
        assert fr.arange(fr.shape_of(x)[1]).shape == (6,)
        assert fr.arange(rows).shape == (None,)


def test_a_tensor_of_unknown_rank_is_taken_everywhere_a_rank_is_not_needed() -> None:
    with Graph():
        x = fr.placeholder("float32")
        for y in (x + 1, fr.exp(x), fr.sum(x), fr.reshape(x, (2, -1)), fr.shape_of(x), fr.concat([x, x]), x[0], x * x):
            assert y.dtype in (np.float32, np.int64)
        assert fr.sum(x).shape == ()
        assert fr.reshape(x, (2, -1)).shape == (2, None)
        assert fr.sum(x, axis=0).spec.dims is None


def test_sizes_known_on_one_side_are_known_in_the_result() -> None:
    with Graph():
        x, y = fr.placeholder("float32", (None, 3)), fr.placeholder("float32", (4, None))
        assert (x + y).shape == (4, 3)
        assert fr.add_n([x, y]).shape == (4, 3)
        assert fr.concat([x, y]).shape == (None, 3)
        assert fr.stack([x, y]).shape == (2, 4, 3)
        assert fr.broadcast_to(y, (2, 4, 5)).shape == (2, 4, 5)


def test_python_numbers_take_the_dtype_of_the_tensor_beside_them() -> None:
    for dtype in ("float32", "float64", "int8", "uint64"):
        x = np.ones(2, dtype)
        assert fr.add(x, 1).dtype == dtype
        assert fr.multiply(2, x).dtype == dtype
    assert fr.add(np.ones(2, np.int32), 1.5).dtype == np.float64
    assert fr.add(1.5, 2).dtype == np.float32
    assert fr.multiply(np.ones(1), 0.1) == 0.1  # exactly
    assert fr.where(np.ones(2, bool), np.float32(1), 0).dtype == np.float32


def test_described_tells_of_anything_an_op_takes() -> None:
    assert described(np.ones((2, 3), np.int8)) == Spec("int8", (2, 3))
    assert described(2.5) == Spec("float32", ())
    assert as_dtype("float32") == described([1.0, 2.0]).dtype
