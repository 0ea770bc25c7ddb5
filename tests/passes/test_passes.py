"""Passes: small graphs by equality, and random graphs against what they mean."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pass_world import compiled, named, names
from step_world import CLIENT, CLUSTER, DEAD, LOCAL, RandomGraph, evaluate, everywhere, meaning, run_plans

import flowrt as fr
from flowrt.base.attributes import as_attr, attr_key
from flowrt.base.errors import FeedError, GraphError, PlacementError, SpecError
from flowrt.base.plan import plan_from_data, plan_to_data
from flowrt.base.spec import Spec
from flowrt.graph import Graph, Tensor, control_dependencies, device
from flowrt.op import Op
from flowrt.ops.elementwise import add, multiply, negative
from flowrt.ops.flow import switch
from flowrt.ops.source import constant, full, full_like, placeholder, shape_of
from flowrt.ops.state import Variable
from flowrt.passes import Compiled, StepTerms, compile_step
from flowrt.passes.fold_constants import fold_constants
from flowrt.passes.merge_common import merge_common
from flowrt.passes.prune import prune
from flowrt.passes.step import FED, StepGraph

if TYPE_CHECKING:
    from flowrt.base.device import Device


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_holds_what_its_fetches_need_and_nothing_else() -> None:
    with Graph() as graph:
        a = constant(1.0, name="a")
        add(a, 1.0, name="unused")
        b = add(a, a, name="b")
    assert names(prune(graph, [b], [], [])) == ["a", "b"]


def test_a_feed_cuts_off_what_computes_it_but_not_its_siblings() -> None:
    with Graph() as graph:
        pred, x = placeholder("bool", (), name="pred"), constant(1.0, name="x")
        low, high = switch(x, pred, name="s")
        y = add(low, high, name="y")
    step = prune(graph, [y], [], [pred, low])
    assert names(step) == ["x", "s", "y"]
    assert named(step, "y").inputs == ((FED, 1), (high.op.index, 1))


def test_controls_are_kept_unless_a_feed_stands_for_them() -> None:
    with Graph() as graph:
        x, a = placeholder("float32", name="x"), constant(1.0, name="a")
        with control_dependencies([x, a]):
            y = constant(2.0, name="y")
    assert names(prune(graph, [y], [], [x])) == ["a", "y"]
    assert named(prune(graph, [y], [], [x]), "y").control == (a.op.index,)


def test_a_missing_feed_names_the_placeholder() -> None:
    with Graph() as graph:
        y = negative(placeholder("float32", (None, 3), name="images"))
    with pytest.raises(FeedError, match=r"placeholder 'images' \(.*test_passes.py:\d+\) .* feed float32\[\?,3\]"):
        prune(graph, [y], [], [])


def test_a_foreign_tensor_is_refused() -> None:
    with Graph() as graph:
        y = constant(1.0)
    with Graph():
        foreign = constant(2.0)
    for arguments in ([foreign], [], []), ([y], [foreign.op], []), ([y], [], [foreign]):
        with pytest.raises(GraphError, match="another graph"):
            prune(graph, *arguments)


def test_feeding_a_shape_forgets_what_was_inferred_from_it() -> None:
    with Graph() as graph:
        shape = constant([2, 3], name="shape")
        y = full(shape, 1.0)
    assert y.shape == (2, 3)
    assert prune(graph, [y], [], [shape]).nodes[y.op.index].outputs[0].dims == (None, None)


def test_feeding_a_variable_replaces_its_reads() -> None:
    with Graph() as graph:
        v = Variable([1.0], name="v")
        y = add(v, v, name="y")
    assert names(prune(graph, [y], [], [v.__tensor__()])) == ["y"]


# ── merge_common ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_nodes_are_one() -> None:
    with Graph() as graph:
        x = placeholder("float32", name="x")
        y = multiply(add(x, 1.0, name="a"), add(x, 1.0, name="b"), name="y")
    step = merge_common(prune(graph, [y], [], [x]))
    assert names(step) == ["constant", "a", "y"]
    assert named(step, "y").inputs == ((named(step, "a").id, 0),) * 2


def test_what_differs_in_dtype_sign_device_or_state_stays_two() -> None:
    with Graph() as graph:
        v = Variable([1.0], name="v")
        pairs = [(constant(0.0), constant(-0.0)), (constant(1), constant(1.0)), (constant(1), constant(True))]
        pairs.append((constant(np.zeros(2, "float32")), constant(np.zeros(2, "int32"))))
        pairs.append((constant(np.zeros((2, 1))), constant(np.zeros((1, 2)))))
        with device("cpu:1"):
            pairs.append((constant(0.0), constant(0.0)))
        pairs[-1] = (pairs[0][0], pairs[-1][0])
        pairs.append((v.read(), v.read()))
    for pair in pairs:
        assert len(merge_common(prune(graph, pair, [], [])).nodes) == 2


def test_attributes_that_are_not_the_same_have_keys_of_their_own() -> None:
    numbers: list[Any] = [0, 0.0, -0.0, False, 1, 1.0, True, None, "1", (1,), (1.0,), (True,), ((1,),)]
    arrays = [np.zeros(shape, dtype) for shape in (2, (2, 1), (1, 2)) for dtype in ("int32", "float32", "bool")]
    assert len({attr_key(as_attr(value)) for value in numbers + arrays}) == len(numbers) + len(arrays)


def test_what_waits_for_others_stays_beside_what_does_not() -> None:
    with Graph() as graph:
        x = placeholder("float32", name="x")
        with control_dependencies([Variable([1.0], name="v").assign([2.0])]):
            late, too = negative(x, name="late"), negative(x, name="too")
        fetches = [negative(x, name="now"), late, too]
    assert names(merge_common(prune(graph, fetches, [], [x])))[-2:] == ["late", "now"]


def test_a_fetch_of_a_merged_node_follows_it() -> None:
    with Graph() as graph:
        a, b = constant(7.0), constant(7.0)
    step = merge_common(prune(graph, [a, b], [], []))
    assert step.fetches == ((a.op.index, 0),) * 2


# ── fold_constants ───────────────────────────────────────────────────────────────────────────────────────────────────


def reduction(fetches: list[Tensor], feeds: Any = (), **options: Any) -> StepGraph:
    return fold_constants(prune(fetches[0].graph, fetches, [], feeds), evaluate, **options)


def test_constants_are_computed_once_under_the_name_of_what_they_replace() -> None:
    with Graph():
        y = add(multiply(constant([1.0, 2.0]), 3.0), 1.0, name="y")
    step = reduction([y])
    assert names(step) == ["y"]
    node = named(step, "y")
    assert (node.op.name, node.attrs["value"].tolist(), node.site) == ("constant", [4.0, 7.0], y.op.site)


def test_a_known_shape_is_a_constant_although_its_tensor_is_not() -> None:
    with Graph():
        x = placeholder("float32", (3, 5), name="x")
        unknown = placeholder("float32", (None, 5), name="unknown")
        a, b = shape_of(x), shape_of(unknown)
    step = reduction([a, b], [x, unknown])
    assert [node.op.name for node in step.nodes.values()] == ["constant", "shape_of"]


def test_what_takes_only_the_shape_of_a_tensor_does_not_wait_for_it() -> None:
    """As the slope of a loss, which would hold up the way back until the loss is known."""
    with Graph():
        x, unknown = placeholder("float32", (2, 3)), placeholder("float32", (None,))
        a, b = full_like(negative(x), 2.0, name="a"), full_like(unknown, 2.0, name="b")
    step = reduction([a, b], [x, unknown])
    np.testing.assert_array_equal(named(step, "a").attrs["value"], np.full((2, 3), 2.0, np.float32))
    assert [node.op.name for node in step.nodes.values() if node.name in "ab"] == ["constant", "full_like"]
    assert all(node.op.name != "negative" for node in step.nodes.values())


def truncate(x: Spec) -> Spec:
    """Integers of floats, whose values inference does not know."""
    return Spec("int64", x.dims)


def test_reducing_refines_the_shapes_behind_it() -> None:
    with Graph():
        floats = constant(np.array([2.0, 3.0]))
        shape = floats.graph.apply(Op(truncate), [floats], {})[0]
        x = placeholder("float32", (), name="x")
        y = negative(full(shape, x))
    assert y.shape == (None, None)
    step = fold_constants(prune(y.graph, [y], [], [x]), lambda op, arrays, attrs: (arrays[0].astype(np.int64),))
    assert step.nodes[y.op.index].outputs[0].dims == (2, 3)


def test_values_beyond_their_dtype_are_not_carried_into_inference() -> None:
    with Graph():
        x = constant(10, name="x")
        for _ in range(200):  # as a Python integer it would have 10^60 digits
            x = multiply(x, x)
    assert x.spec.value is None
    assert fold_constants(prune(x.graph, [x], [], []), None).nodes[x.op.index].op.name == "multiply"


def test_large_results_stateful_nodes_and_switched_ones_are_left() -> None:
    with Graph():
        big = negative(constant(np.zeros(100)), name="big")
        v = Variable([1.0], name="v")
        read = negative(v.read(), name="read")
        side = shape_of(switch(constant([1.0]), True)[1], name="side")
    assert named(reduction([big], largest=99), "big").op.name == "negative"
    assert named(reduction([read]), "read").op.name == "negative"
    assert named(reduction([side]), "side").op.name == "shape_of"


def test_reducing_a_shape_leaves_no_change_of_state_out() -> None:
    with Graph():
        v = Variable([1.0], name="v")
        with control_dependencies([v.assign_add([1.0])]):
            size = shape_of(v.read(), name="size")
        plain = shape_of(v, name="plain")
    step = reduction([size, plain])
    assert [named(step, name).op.name for name in ("size", "plain")] == ["shape_of", "constant"]
    assert any(node.op.name == "assign_add" for node in step.nodes.values())


def test_what_cannot_be_evaluated_stays_and_fails_in_the_step() -> None:
    def refuse(*arguments: Any) -> Any:
        raise SpecError("no")

    with Graph() as graph:
        y = negative(constant(1.0), name="y")
    assert named(fold_constants(prune(graph, [y], [], []), refuse), "y").op.name == "negative"


# ── everything, on random graphs ─────────────────────────────────────────────────────────────────────────────────────


def _compile(world: RandomGraph, devices: Any, client: str | None, optimize: bool) -> Compiled:
    return compile_step(
        world.graph,
        world.fetches,
        world.targets,
        list(world.feeds),
        StepTerms(
            devices=devices,
            default=devices[0],
            supports=everywhere,
            evaluate=evaluate,
            optimize=optimize,
            client=client,
        ),
    )


def _same(a: Any, b: Any) -> bool:
    return a is b if a is DEAD or b is DEAD else bool(np.array_equal(a, b))


def _agree(seed: int, devices: tuple[Device, ...], client: str | None) -> bool:
    """Whether the plans of one random graph compute what it means; False where its placement has no answer."""
    world = RandomGraph(seed, devices)
    want, state = meaning(world.graph, world.fetches, world.targets, world.feeds, world.initial)
    for optimize in (True, False):
        try:
            result = _compile(world, devices, client, optimize)
        except PlacementError:
            return False  # random colocation may contradict random devices
        got, after = run_plans(result, list(world.feeds.values()), world.initial, random.Random(seed))
        assert all(_same(a, b) for a, b in zip(want, got, strict=True)), f"seed {seed}, optimize={optimize}"
        assert all(_same(state[name], after[name]) for name in state), f"seed {seed}, optimize={optimize}"
    return True


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize(("devices", "client"), [(LOCAL, None), (CLUSTER, CLIENT)], ids=["local", "cluster"])
def test_plans_compute_what_the_graph_means(devices: Any, client: str | None, block: int) -> None:
    seeds = range(100 * block, 100 * (block + 1))
    print("seeds", seeds)
    assert sum(_agree(seed, devices, client) for seed in seeds) >= 50


def test_plans_survive_the_wire_and_edges_are_unique() -> None:
    world = RandomGraph(5, CLUSTER)
    result = _compile(world, CLUSTER, CLIENT, True)
    assert result.client is not None
    sent: list[int] = []
    for plan in result.plans.values():
        assert plan_from_data(plan_to_data(plan)) is not None
        sent += [node.attrs["edge"] for node in plan.nodes if node.op == "send"]
    sent += [t.edge for transfers in result.client.feeds for t in transfers]
    assert len(set(sent)) == len(sent)


def test_the_report_tells_what_each_pass_did() -> None:
    with Graph():
        y = negative(add(constant(1.0), constant(1.0)), name="y")
    result = compiled([y], evaluate=evaluate)
    assert [report.name for report in result.report] == [
        "prune",
        "merge_common",
        "fold_constants",
        "order_state",
        "place",
        "partition",
    ]
    assert str(result.report[1]) == "merge_common: merged 1"
    assert result.report[2].counts == {"folded": 1, "dropped": 2}


def test_unoptimized_steps_run_every_node_as_written() -> None:
    with Graph():
        y = negative(add(constant(1.0), constant(1.0)), name="y")
    plan = compiled([y], evaluate=evaluate, optimize=False).plans["/job:local/task:0"]
    assert [node.op for node in plan.nodes] == ["constant", "constant", "add", "negative"]


def test_a_long_chain_compiles_without_recursion() -> None:
    with Graph():
        x = y = placeholder("float32", (), name="x")
        v = Variable(0.0, name="v")
        for _ in range(5000):
            y = add(y, v)
        write = v.assign(y)
    plan = compiled([y], [write], feeds=[x]).plans["/job:local/task:0"]
    assert len(plan.nodes) == 5002
    assert len(plan.nodes[-1].control) == 5000 - 1 + 1


@pytest.mark.parametrize(
    ("write", "turns"),
    [
        (lambda v: v.assign_add(np.ones((2, 1), np.float32)), 1),
        (lambda v: v.scatter_add([0], np.ones((1, 1), np.float32)), 1),
        (lambda v: v.scatter_update([0], np.ones((1, 1), np.float32)), 1),
        (None, 10),
    ],
)
def test_iterations_of_a_loop_that_writes_a_variable_or_rows_of_it_follow_one_another(write: Any, turns: int) -> None:
    with fr.Graph():
        v, queue = fr.Variable(np.zeros((2, 1), np.float32)), fr.FIFOQueue(4, "float32", ())

        def body(i: Any, total: Any) -> Any:
            if write is None:
                return i + 1, total + queue.dequeue()
            with fr.control_dependencies([write(v)]):
                return i + 1, total + v.read()[0, 0]

        _, total = fr.while_loop(lambda i, total: i < 3, body, (0, np.float32(0)))
        made = compiled([total])
    nodes = [node for plan in made.plans.values() for node in plan.nodes if node.op == "enter"]
    assert {node.attrs["parallel_iterations"] for node in nodes} == {turns}
