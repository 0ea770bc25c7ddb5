from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import Array, PlanMaker, interpret, whole_region

import flowrt as fr
from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.language.table import kernel
from flowrt.kernels.launch import RUN_WORDS, apply_kernel
from flowrt.op import no_gradient
from flowrt.sched.regions.lives import find_lives
from flowrt.sched.regions.recorded import ARENA_SLOT, Recording
from flowrt.sched.regions.regions import find_regions
from flowrt.sched.regions.sharing import may_overwrite, share
from flowrt.sched.tape.recording import record
from flowrt.sched.tape.tape import Tape, address
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.plan import Plan


@no_gradient
@op
def sharing_test_checked(x: Spec) -> Spec:
    """``x``, or a failure where an entry is negative; what comes before that entry is written all the same."""
    return x


@no_gradient
@op
def sharing_test_both(x: Spec) -> tuple[Spec, Spec]:
    """Two of what ``x`` is one of."""
    return x, x


@kernel("sharing_test_checked")
def sharing_test_checked_kernel(x: Any, y: Any, run: Any) -> None:
    for i in range(x.size):
        if x[i] < 0:
            run[0] = 1
            break
        y[i] = x[i]


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def recorded(plan: Plan, *inputs: Array) -> Recording:
    (region,) = find_regions(plan, lambda node: False)
    return record(plan, region, [spec_of(a) for a in inputs])


def run(plan: Plan, state: dict[str, Array], *inputs: Array) -> list[Array]:
    (region,) = find_regions(plan, lambda node: False)
    inputs = tuple(inputs[v] for v in region.inputs)
    tape = Tape(plan, region, [spec_of(a) for a in inputs])
    return tape.run(np.zeros(RUN_WORDS, np.int64), inputs, [address(state[name]) for _, name in tape.variables])


def agree(plan: Plan, state: dict[str, Array], *inputs: Array) -> None:
    """The tape computes and leaves in the variables what NumPy does, node by node."""
    expected_state = {name: value.copy() for name, value in state.items()}
    expected = interpret(plan, inputs, expected_state)
    outputs = run(plan, state, *inputs)
    for value, output in zip(sorted(plan.fetches), outputs, strict=True):
        np.testing.assert_array_equal(output, expected[value])
    for name, value in expected_state.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)


def arena_places(made: Recording) -> list[tuple[int, ...]]:
    """The offsets of each launch's operands in the arena."""
    return [tuple(s.begin for s in launch.stretches() if s.slot == ARENA_SLOT) for launch in made.launches]


# Over inputs that die


def test_an_elementwise_launch_writes_over_the_input_that_dies_there() -> None:
    make = PlanMaker()
    x, row = make.feed("float32", (8, 4)), make.feed("float32", (4,))
    squared = make.node("square", x)
    shifted = make.node("add", squared, row)
    kept = make.node("negative", shifted)
    plan = make.plan(make.node("cumsum", make.node("multiply", kept, kept), axis=0, reverse=False))
    made = recorded(plan, array(8, 4), array(4))
    assert arena_places(made) == [(0,), (0, 0), (0, 0), (0, 0, 0), (0,)]
    assert made.arena_bytes == 128


def test_a_sum_of_several_is_written_over_the_first_alone() -> None:
    for first in (0, 1):
        make = PlanMaker()
        x = make.feed("float32", (8, 4))
        squared = make.node("square", x)
        total = make.node("add_n", *((squared, x) if first == 0 else (x, squared)), _many=2)
        made = recorded(make.plan(make.node("cumsum", total, axis=0, reverse=False)), array(8, 4))
        assert made.arena_bytes == (128 if first == 0 else 256)


def test_one_input_that_dies_makes_room_for_one_output() -> None:
    make = PlanMaker()
    squared = make.node("square", make.feed("float32", (4,)))
    both = make.node("sharing_test_both", squared)
    plan = make.plan(make.node("add", both, both + 1))
    lives = find_lives(plan, whole_region(plan), [Spec("float32", (4,))])
    added = apply_kernel("add", [Spec("float32", (4,))] * 2, [Spec("float32", (4,))], {})
    assert share(lives, {1: added}).heirs == {squared: both}


def test_nothing_is_written_over_while_somebody_needs_it() -> None:
    make = PlanMaker()
    x = make.feed("float32", (8, 4))
    squared = make.node("square", x)
    flat = make.node("reshape", squared, make.constant([32]))
    negated = make.node("negative", squared)
    total = make.node("multiply", flat, make.node("reshape", negated, make.constant([32])))
    plan = make.plan(total, squared)
    agree(plan, {}, array(8, 4))
    assert recorded(plan, array(8, 4)).arena_bytes == 0, "the negative lies where the product will"


def test_inputs_and_constants_are_never_written_over() -> None:
    make = PlanMaker()
    x = make.feed("float32", (5,))
    c = make.constant(array(5, seed=1))
    plan = make.plan(make.node("negative", x), make.node("square", c))
    given = array(5)
    for _ in range(2):
        agree(plan, {}, given)
    np.testing.assert_array_equal(given, array(5))


def test_an_input_seen_in_another_order_or_more_than_once_is_not_written_over() -> None:
    make = PlanMaker()
    x = make.feed("float32", (4, 4))
    squared = make.node("square", x)
    wide = make.node("add", squared, make.node("transpose", squared, axes=(1, 0)))
    first = make.node("max", wide, axis=1, keepdims=False)
    column = make.node("reshape", make.node("negative", first), make.constant([4, 1]))
    outer = make.node("multiply", column, make.node("reshape", column, make.constant([4])))
    agree(make.plan(outer), {}, array(4, 4))


def test_another_item_size_needs_memory_of_its_own() -> None:
    make = PlanMaker()
    x = make.feed("float32", (6,))
    squared = make.node("square", x)
    positive = make.node("greater", squared, x)
    plan = make.plan(make.node("logical_not", positive))
    assert recorded(plan, array(6)).arena_bytes == 64
    np.testing.assert_array_equal(run(plan, {}, array(6))[0], ~(np.square(array(6)) > array(6)))


# Straight into variables


def momentum_step(make: PlanMaker, name: str, gradient: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """v = 0.9 v + g; p -= 0.1 v. Answers the positions of the two writes."""
    v = make.read(f"{name}/v", shape)
    read = make.last
    grown = make.node("add", make.node("multiply", v, make.constant(0.9)), gradient)
    first = make.write("assign", f"{name}/v", grown, control=[read])
    return first, make.write("assign_sub", name, make.node("multiply", grown, make.constant(0.1)))


def test_a_value_is_computed_straight_into_the_variable_it_is_assigned_to() -> None:
    make = PlanMaker()
    g = make.feed("float32", (6, 5))
    momentum_step(make, "w", g, (6, 5))
    plan = make.plan()
    made = recorded(plan, array(6, 5))
    assert [launch.step.kernel.op for launch in made.launches] == ["multiply", "add", "multiply", "subtract"]
    assert made.arena_bytes == 128, "only the scaled momentum is a temporary"
    agree(plan, {"w": array(6, 5, seed=1), "w/v": array(6, 5, seed=2)}, array(6, 5))


def test_the_old_value_may_be_read_by_the_very_launch_that_writes_the_new_one() -> None:
    make = PlanMaker()
    g = make.feed("float32", (5,))
    w = make.read("w", (5,))
    make.write("assign", "w", make.node("subtract", w, g), control=[0])
    plan = make.plan()
    assert len(recorded(plan, array(5)).launches) == 1
    agree(plan, {"w": array(5, seed=1)}, array(5))


@pytest.mark.parametrize(
    "how", ["a later reader", "another order", "a later turn", "a fresh read before", "a second write"]
)
def test_a_value_is_copied_where_the_old_one_is_still_needed(how: str) -> None:
    make = PlanMaker()
    g = make.feed("float32", (4, 4))
    w = make.read("w", (4, 4))
    fetches = [make.node("square", g)]
    new = make.node("cumsum", w, axis=0, reverse=False) if how == "another order" else make.node("add", w, g)
    if how == "a later turn":  # the first has been written by then
        new = make.node("add_n", g, w, _many=2)
    if how == "a fresh read before":
        fetches.append(make.node("negative", make.read("w", (4, 4))))
    if how == "a later reader":
        fetches.append(make.node("multiply", w, w))
    if how == "a second write":
        make.write("assign_add", "w", g, control=[0])
    make.write("assign", "w", new, control=[0])
    plan = make.plan(*fetches)
    assert recorded(plan, array(4, 4)).launches[-1].step.kernel.op == "copy"
    agree(plan, {"w": array(4, 4, seed=1)}, array(4, 4))


def test_a_value_may_be_read_from_the_variable_until_that_is_written_again() -> None:
    make = PlanMaker()
    g = make.feed("float32", (5,))
    new = make.node("square", g)
    first = make.write("assign", "w", new)
    before = make.node("negative", new)
    make.write("assign_add", "w", g, control=[first])
    agree(make.plan(before), {"w": array(5, seed=1)}, array(5))
    make.node("sum", new, axis=None, keepdims=False)
    agree(make.plan(before, len(make.specs) - 1), {"w": array(5, seed=1)}, array(5))


def test_a_value_computed_in_a_variable_is_not_written_over_by_the_next_while_it_is_read() -> None:
    make = PlanMaker()
    g = make.feed("float32", (5,))
    old = make.node("square", g)
    first = make.write("assign", "w", old)
    new = make.node("negative", g)
    late = make.node("multiply", old, old)
    make.write("assign", "w", new, control=[first])
    plan = make.plan(late)
    assert recorded(plan, array(5)).launches[-1].step.kernel.op == "copy"
    agree(plan, {"w": array(5, seed=1)}, array(5))


def test_rows_are_not_moved_by_a_value_that_lies_where_they_do() -> None:
    with fr.Graph() as graph:
        g, w = fr.placeholder("float32", (4, 3)), fr.Variable(np.zeros((4, 3), np.float32))
        new = fr.square(g)
        with fr.control_dependencies([w.assign(new)]):
            moved = w.scatter_add([1, 0, 3, 2], new)  # what is read of it last, and again written
    with fr.BlockingSession(graph) as session:
        for seed in range(2):
            fed = array(4, 3, seed=seed)
            session.run(moved, {g: fed})
            squares = fed * fed
            np.testing.assert_array_equal(session.run(w), squares + squares[[1, 0, 3, 2]])


def test_two_variables_swap_what_was_computed_from_them() -> None:
    make = PlanMaker()
    a, b = make.read("a", (3,)), make.read("b", (3,))
    more, less = make.node("square", a), make.node("negative", b)
    make.write("assign", "b", more, control=[0, 1])
    make.write("assign", "a", less, control=[0, 1])
    agree(make.plan(), {"a": array(3), "b": array(3, seed=1)})


def test_one_value_assigned_to_two_variables_is_copied_once() -> None:
    make = PlanMaker()
    new = make.node("square", make.feed("float32", (3,)))
    make.write("assign", "a", new)
    make.write("assign", "b", new)
    plan = make.plan()
    assert len(recorded(plan, array(3)).launches) == 2
    agree(plan, {"a": array(3), "b": array(3, seed=1)}, array(3, seed=2))


def test_a_kernel_that_fails_halfway_leaves_the_variable_as_it_was() -> None:
    make = PlanMaker()
    g = make.feed("float32", (4,))
    make.write("assign", "w", make.node("sharing_test_checked", g))
    state = {"w": np.full(4, 7, np.float32)}
    with pytest.raises(FlowrtError, match="sharing_test_checked_0"):
        run(make.plan(), state, np.array([1, 2, -1, 3], np.float32))
    assert state["w"].tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("control", [[1], [0, 1], [1, 0]])
def test_an_assignment_waits_for_what_it_was_told_to_wait_for(control: list[int]) -> None:
    make = PlanMaker()
    g = make.feed("float32", (4,))
    new = make.node("square", g)
    make.node("sharing_test_checked", g)
    make.write("assign", "w", new, control=control)
    state = {"w": np.full(4, 7, np.float32)}
    with pytest.raises(FlowrtError, match="sharing_test_checked_1"):
        run(make.plan(), state, -np.ones(4, np.float32))
    assert state["w"].tolist() == [7, 7, 7, 7]


def test_the_launch_that_carries_out_an_assignment_waits_for_what_that_waits_for() -> None:
    make = PlanMaker()
    g = make.feed("float32", (4,))
    make.node("sharing_test_checked", g)
    checked = make.last
    make.write("assign", "w", make.node("square", g), control=[checked])
    launches = recorded(make.plan(), array(4)).launches
    assert [(launch.step.kernel.op, launch.control) for launch in launches] == [
        ("sharing_test_checked", ()),
        ("square", (checked,)),
    ]


# Random updates


@pytest.mark.parametrize("seed", range(150))
def test_random_updates_agree_with_numpy(seed: int) -> None:
    rng = random.Random(seed)
    make = PlanMaker()
    values = [make.feed("float32", (3, 3))]
    state = {name: array(3, 3, seed=i + 1) for i, name in enumerate("uvw")}
    for _ in range(rng.randrange(4, 30)):
        draw, name = rng.random(), rng.choice("uvw")
        if draw < 0.25:
            values.append(make.read(name, (3, 3)))
        elif draw < 0.5:
            make.write("assign" if draw < 0.43 else "assign_add", name, rng.choice(values[-3:]))
        elif draw < 0.6:
            values.append(make.node("transpose", rng.choice(values[-4:]), axes=(1, 0)))
        else:
            op = rng.choice(["add", "subtract", "maximum"])
            values.append(make.node(op, *(rng.choice(values[-4:]) for _ in range(2))))
    plan = make.plan(*rng.sample(values[1:], min(2, len(values) - 1)))
    agree(plan, state, array(3, 3))


def test_an_output_may_not_lie_over_an_input_that_a_later_launch_reads() -> None:
    class Step:
        def __init__(self, *operands: int) -> None:
            self.operands = operands

        def may_overwrite(self, output: int, operand: int) -> bool:
            return True

    def application(*steps: Step) -> Any:
        return SimpleNamespace(steps=steps)

    assert may_overwrite(application(Step(0, 1)), 1, [0])
    assert may_overwrite(application(Step(0, 2), Step(2, 1)), 1, [0])
    assert not may_overwrite(application(Step(1), Step(0, 1)), 1, [0])
    assert not may_overwrite(application(Step(3), Step(1), Step(0, 2)), 1, [0])
    assert not may_overwrite(application(Step(0)), 1, [0])


def test_what_is_assigned_behind_its_own_making_is_made_where_the_variable_lies() -> None:
    make = PlanMaker()
    x = make.feed("float32", (3,))
    value = make.node("negative", x)
    make.write("assign", "v", value, control=[make.last])
    out = make.node("square", x)
    plan = make.plan(out)
    (region,) = find_regions(plan, lambda node: False)
    made = record(plan, region, [Spec("float32", (3,))])
    assert len(made.launches) == 2  # and no copy
    agree(plan, {"v": array(3)}, array(3, seed=1))


def test_an_output_may_lie_over_entries_of_its_own_size_alone() -> None:
    """The same entries, by number, lie elsewhere where they are larger."""
    for taken, made, may in (("float32", "int32", True), ("float16", "float32", False), ("float64", "float32", False)):
        assert may_overwrite(apply_kernel("astype", [Spec(taken, (4,))], [Spec(made, (4,))], {}), 1, [0]) == may


def test_part_of_a_tensor_is_converted_beside_it_where_both_take_as_many_bytes() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float16", (2, None))
        made = fr.cumsum(fr.astype((x + 1)[0], "float32"))
    with fr.BlockingSession(graph) as session:
        found = session.run(made, {x: np.zeros((2, 9), np.float16)})
    np.testing.assert_array_equal(found, np.arange(1, 10))
