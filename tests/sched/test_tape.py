from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import Array, PlanMaker, array, interpret, random_plan, tape_of, whole_region, words

from flowrt.base.errors import FlowrtError, SpecError, StepCancelled
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, elementwise, kernel
from flowrt.kernels.launch import FAILURES, STATUS, run_kernel
from flowrt.op import no_gradient
from flowrt.sched.tape.tape import CANCELLED, Tape, address
from flowrt.sched.tape.tapes import Tapes
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.plan import Plan


@no_gradient
@op
def tape_test_numbers(like: Spec) -> Spec:
    """The run's step and seed."""
    return Spec("int64", (2,))


@kernel("tape_test_numbers")
def tape_test_numbers_kernel(like: Any, out: Any, run: Any) -> None:
    out[0], out[1] = run[1], run[2]


@no_gradient
@op
def tape_test_checked(x: Spec) -> Spec:
    """``x``, or a failure where an entry is negative."""
    return x


@kernel(
    "tape_test_checked",
    layout=lambda inputs, outputs, attrs: Call((View.dense(inputs[0].concrete),) * 3),
    scratch=lambda inputs, outputs, attrs: [inputs[0]],
)
def tape_test_checked_kernel(x: Any, y: Any, scratch: Any, run: Any) -> None:
    for i in range(x.size):
        scratch[i] = x[i]
        if x[i] < 0:
            run[0] = 1
    for i in range(x.size):
        y[i] = scratch[i]


elementwise("tape_test_slow", lambda x: ((x * x + x) % 7) * x + x, on=("cpu",))


@no_gradient
@op
def tape_test_slow(x: Spec) -> Spec:
    """Something that takes a while."""
    return x


def test_a_tape_computes_what_its_nodes_do() -> None:
    make = PlanMaker()
    x, y = make.feed("float32", (None, 3)), make.feed("float32", (3,))
    a = make.node("add", x, y)
    b = make.node("multiply", a, x)
    c = make.node("negative", b)
    plan = make.plan(a, c)
    left, right = array(4, 3), array(3, seed=1)
    tape = tape_of(plan, left, right)
    sums, product = tape.run(words(), [left, right])
    np.testing.assert_array_equal(sums, left + right)
    np.testing.assert_array_equal(product, -((left + right) * left))
    assert (tape.arena_bytes, tape.recording.output_bytes) == (0, 2 * 48), "the product lies where its negative will"


def test_memory_is_used_again() -> None:
    make = PlanMaker()
    value = make.feed("float32", (1000,))
    for _ in range(20):
        value = make.node("cumsum", value, axis=0, reverse=False)
    tape = tape_of(make.plan(value), np.ones(1000, np.float32))
    assert tape.recording.value_bytes == 19 * 4000
    assert tape.arena_bytes == 2 * 4032, "what is not elementwise needs its input beside its output"
    tape.run(words(), [np.ones(1000, np.float32)])


def test_an_alias_keeps_the_memory_it_shares_alive() -> None:
    make = PlanMaker()
    x = make.feed("float32", (4, 6))
    kept = make.node("reshape", make.node("negative", x), make.constant([24]))
    other = make.node("add", x, x)
    for _ in range(3):
        other = make.node("add", other, x)
    again = make.node("reshape", kept, make.constant([4, 6]))
    z = make.node("add", again, other)
    data = array(4, 6)
    tape = tape_of(make.plan(z), data)
    np.testing.assert_allclose(tape.run(words(), [data])[0], 4 * data, rtol=1e-6)
    assert tape.launches == 6


def test_small_constants_of_the_same_bits_are_one() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    values = [np.float32(0.5), np.float32(0.0), np.float32(-0.0), np.float32([0.5]), np.float32([0.5, 0.5])]
    values += [np.float32(np.nan), np.full(17, 0.5, np.float32)]
    kept = [make.constant(value) for value in (*values, *values)]
    made = [make.node("multiply", x, n) for n in (*kept[:6], *kept[7:13])]
    whole = make.constant(np.int32(np.float32(0.5).view(np.int32)))
    plan = make.plan(*made, whole, *kept)
    data = array(2)
    tape = tape_of(plan, data)
    assert len(tape.recording.constants) == 5 + 2 + 1, "five small ones, the large one twice, and the integer"
    outputs = dict(zip(whole_region(plan).outputs, tape.run(words(), [data]), strict=True))
    for value, n, product in zip(values[:6] * 2, (*kept[:6], *kept[7:13]), made, strict=True):
        np.testing.assert_array_equal(outputs[product].view(np.int32), (data * value).view(np.int32))
        np.testing.assert_array_equal(outputs[n].view(np.int32), value.view(np.int32))
        assert outputs[n].shape == value.shape
    assert outputs[whole].dtype == np.int32


def test_inputs_constants_and_aliases_may_leave() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2, 3))
    flat = make.node("reshape", x, make.constant([6]))
    held = make.constant([[1.0, 2.0]])
    y = make.node("negative", x)
    turned = make.node("reshape", y, make.constant([3, 2]))
    plan = make.plan(flat, held, y, turned)
    data = array(2, 3)
    outputs = dict(zip(whole_region(plan).outputs, tape_of(plan, data).run(words(), [data]), strict=True))
    np.testing.assert_array_equal(outputs[flat], data.reshape(6))
    assert np.shares_memory(outputs[flat], data)
    np.testing.assert_array_equal(outputs[held], np.array([[1, 2]], np.float32))
    np.testing.assert_array_equal(outputs[turned], -data.reshape(3, 2))
    assert not np.shares_memory(outputs[turned], outputs[y])


def test_inputs_may_be_strided_or_read_only_and_values_empty_or_scalar() -> None:
    make = PlanMaker()
    x, none, one = make.feed("float32", (3, 4)), make.feed("float32", (0, 4)), make.feed("float32", ())
    fetches = [make.node("add", v, one) for v in (x, none, one)]
    total = make.node("add", make.node("square", one), one)
    turned = array(4, 3).T
    frozen = np.array(2, np.float32)
    frozen.setflags(write=False)
    empty = np.empty((0, 4), np.float32)
    plan = make.plan(*fetches, total)
    a, b, c, d = tape_of(plan, turned, empty, frozen).run(words(), [turned, empty, frozen])
    np.testing.assert_array_equal(a, turned + 2)
    assert b.shape == (0, 4)
    assert (c.shape, c[()], d[()]) == ((), 4, 6)


def test_arithmetic_of_shapes_is_done_when_the_tape_is_made() -> None:
    make = PlanMaker()
    x = make.feed("float32", (None, 3))
    sizes = make.node("shape_of", x)
    double = make.node("add", sizes, sizes)
    y = make.node("negative", x)
    tape = tape_of(make.plan(y, double), array(4, 3))
    assert tape.launches == 1
    assert tape.run(words(), [array(4, 3)])[0].tolist() == [8, 6]


def test_a_product_too_large_for_its_dtype_is_left_to_the_kernel() -> None:
    make = PlanMaker()
    large = make.constant(np.array([1 << 62, 3], np.int64))
    tape = tape_of(make.plan(make.node("multiply", large, large)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(tape.run(words(), [])[0], np.array([1 << 62, 3]) ** 2)


def test_a_region_that_computes_nothing_runs_too() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    y = make.node("identity", x)
    make.node("no_op", control=[0])
    assert tape_of(make.plan(y), array(2)).run(words(), [array(2)])[0].shape == (2,)


def test_kernels_see_the_step_and_the_seed() -> None:
    make = PlanMaker()
    y = make.node("tape_test_numbers", make.feed("float32", ()))
    data = np.zeros((), np.float32)
    assert tape_of(make.plan(y), data).run(words(7, 99), [data])[0].tolist() == [7, 99]


# Variables


def run_with(plan: Plan, state: dict[str, Array], *inputs: Array) -> tuple[Tape, list[Array]]:
    tape = tape_of(plan, *inputs)
    return tape, tape.run(words(), inputs, [address(state[name]) for _, name in tape.variables])


def test_a_variable_is_updated_where_it_lies() -> None:
    make = PlanMaker()
    g = make.feed("float32", (3,))
    w = make.read("w", (3,))
    y = make.node("multiply", w, g)
    make.write("assign_sub", "w", y, control=[0])
    state = {"w": array(3)}
    memory = state["w"]
    tape, _ = run_with(make.plan(), state, array(3, seed=1))
    np.testing.assert_array_equal(memory, array(3) - array(3) * array(3, seed=1))
    assert tape.launches == 2, "a read that nothing overtakes is not copied"


def test_a_read_keeps_its_value_when_a_write_overtakes_its_reader() -> None:
    make = PlanMaker()
    g = make.feed("float32", (3,))
    w = make.read("w", (3,))
    flat = make.node("reshape", w, make.constant([1, 3]))
    make.write("assign_add", "w", g, control=[0])
    late = make.node("negative", flat)
    now = make.read("w", (3,), control=[make.last - 1])
    after = make.node("negative", now)
    state = {"w": np.zeros(3, np.float32)}
    tape, (before, later) = run_with(make.plan(late, after), state, np.ones(3, np.float32))
    assert before.tolist() == [[0, 0, 0]]
    assert later.tolist() == [-1, -1, -1]
    assert tape.launches == 4


def test_a_read_that_leaves_is_a_copy_of_its_moment() -> None:
    make = PlanMaker()
    g = make.feed("float32", (2,))
    w = make.read("w", (2,))
    make.write("assign", "w", g, control=[0])
    state = {"w": np.zeros(2, np.float32)}
    _, (old,) = run_with(make.plan(w), state, np.ones(2, np.float32))
    assert old.tolist() == [0, 0]
    assert state["w"].tolist() == [1, 1]


def test_two_variables_can_be_swapped() -> None:
    make = PlanMaker()
    a, b = make.read("a", (2,)), make.read("b", (2,))
    make.write("assign", "a", b, control=[0, 1])
    make.write("assign", "b", a, control=[0, 1])
    state = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    run_with(make.plan(), state)
    assert (state["a"].tolist(), state["b"].tolist()) == ([1, 1], [0, 0])


# What does not fit


def test_shapes_that_do_not_fit_name_the_node() -> None:
    make = PlanMaker()
    x, y = make.feed("float32", (None,)), make.feed("float32", (None,))
    plan = make.plan(make.node("add", x, y))
    with pytest.raises(SpecError, match=r"add 'add_0' \(train.py:10\): .*do not broadcast"):
        tape_of(plan, array(2), array(3))


def test_a_failing_kernel_names_its_node() -> None:
    make = PlanMaker()
    x = make.feed("float32", (2,))
    value = make.node("negative", x)
    for _ in range(3):
        value = make.node("tape_test_checked", value)
    value = make.node("negative", value)
    tape = tape_of(make.plan(value), array(2))
    with pytest.raises(FlowrtError, match=r"tape_test_checked 'tape_test_checked_1' \(train.py:11\): " + FAILURES[1]):
        tape.run(words(), [np.ones(2, np.float32)])
    assert tape.run(words(), [np.full(2, -1, np.float32)])[0].tolist() == [-1, -1]


def test_a_run_that_fails_before_it_begins_gives_its_memory_back() -> None:
    make = PlanMaker()
    x, value = make.feed("float32", (1000,)), array(1000)
    sums = make.node("cumsum", x, axis=0, reverse=False)
    tape = tape_of(make.plan(make.node("cumsum", sums, axis=0, reverse=False)), value)
    tape.run(words(), [value])
    assert len(tape._arenas._idle) == 1
    with pytest.raises(ValueError, match="size"):
        tape.run(words(), [value], places=[0])  # for which there is no variable
    assert len(tape._arenas._idle) == 1


def test_another_thread_stops_a_tape() -> None:
    make = PlanMaker()
    value = make.feed("float32", (1 << 17,))
    for _ in range(4000):
        value = make.node("tape_test_slow", value)
    data = array(1 << 17)
    tape = tape_of(make.plan(value), data)
    run_words = words()

    def cancel() -> None:
        run_words[STATUS] = CANCELLED

    timer = threading.Timer(0.05, cancel)
    timer.start()
    with pytest.raises(StepCancelled, match="stopped at tape_test_slow"):
        tape.run(run_words, [data])
    timer.join()
    with pytest.raises(StepCancelled, match="not begun"):
        tape.run(run_words, [data])


def test_one_tape_runs_on_four_threads_at_once() -> None:
    make = PlanMaker()
    x = make.feed("float32", (4096,))
    value = x
    for i in range(40):
        value = make.node("add" if i % 3 else "subtract", value, x)
        value = make.node("negative", value)
    plan = make.plan(value)
    tape = tape_of(plan, array(4096))
    feeds = [array(4096, seed=i) for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda feed: tape.run(words(), [feed])[0], feeds))
    for feed, output in zip(feeds, outputs, strict=True):
        np.testing.assert_array_equal(output, interpret(plan, [feed], {})[value])


# The cache


def test_tapes_are_kept_by_shape_and_by_the_values_that_decide_shapes() -> None:
    make = PlanMaker()
    x, shape = make.feed("float32", (None,)), make.feed("int64", (2,))
    plan = make.plan(make.node("negative", make.node("reshape", x, shape)))
    region, tapes = whole_region(plan), Tapes(plan)
    assert region.shape_inputs == (shape,)
    data = array(6)

    def run(*dims: int) -> Tape:
        inputs = [data, np.array(dims)]
        tape = tapes.get(region, inputs)
        assert tape is not None
        np.testing.assert_array_equal(tape.run(words(), inputs)[0], -data.reshape(dims))
        return tape

    assert run(2, 3) is run(2, 3)
    assert run(2, 3) is not run(3, 2)


def test_the_oldest_tape_goes_first() -> None:
    make = PlanMaker()
    plan = make.plan(make.node("negative", make.feed("float32", (None,))))
    region, tapes = whole_region(plan), Tapes(plan, bound=2)
    one, two = tapes.get(region, [array(1)]), tapes.get(region, [array(2)])
    assert tapes.get(region, [array(1)]) is one
    tapes.get(region, [array(3)])
    assert tapes.get(region, [array(1)]) is one
    assert tapes.get(region, [array(2)]) is not two


def test_a_shape_computed_from_data_inside_has_no_tape() -> None:
    make = PlanMaker()
    x = make.feed("int64", (100,))
    shape = make.node("reshape", make.node("max", x, axis=None, keepdims=False), make.constant([1]))
    plan = make.plan(make.node("full", shape, make.constant(1.0)))
    assert Tapes(plan).get(whole_region(plan), [np.arange(100)]) is None


# Random plans


@pytest.mark.parametrize("seed", range(300))
def test_random_plans_agree_with_numpy(seed: int) -> None:
    plan, feeds, state = random_plan(random.Random(seed))
    expected_state = {name: value.copy() for name, value in state.items()}
    with np.errstate(all="ignore"):
        expected = interpret(plan, feeds, expected_state)
    region = whole_region(plan)
    tape = Tapes(plan).get(region, [feeds[v] for v in region.inputs])
    assert tape is not None
    places = [address(state[name]) for _, name in tape.variables]
    outputs = tape.run(words(), [feeds[v] for v in region.inputs], places)
    for value, output in zip(region.outputs, outputs, strict=True):
        np.testing.assert_array_equal(output, expected[value], err_msg=f"seed {seed}, value {value}")
    for name in state:
        np.testing.assert_array_equal(state[name], expected_state[name], err_msg=f"seed {seed}, variable {name}")


@pytest.mark.parametrize("seed", range(10))
def test_a_tape_agrees_with_its_kernels_run_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    make = PlanMaker()
    values = [make.feed("float32", (5, 4)), make.feed("float32", (4,))]
    for _ in range(30):
        values.append(make.node(rng.choice(["add", "multiply", "maximum"]), *rng.sample(values[-5:], 2)))
    feeds = [array(5, 4), array(4, seed=1)]
    computed: list[Array] = list(feeds)
    for node in make.nodes:
        computed += run_kernel(node.op, [computed[v] for v in node.inputs], node.outputs, node.attrs)
    plan = make.plan(*values[-3:])
    region = whole_region(plan)
    for value, output in zip(region.outputs, tape_of(plan, *feeds).run(words(), feeds), strict=True):
        np.testing.assert_array_equal(output, computed[value])
