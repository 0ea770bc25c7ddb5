"""Loops of scalars: launch by launch until a helper has compiled their one kernel, and the same either way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.spec import Spec
from flowrt.kernels.compiler import carry_out
from flowrt.kernels.composite import scalar_loop
from flowrt.kernels.composite.many import ManyStep
from flowrt.kernels.composite.nested import NestedStep
from flowrt.kernels.composite.scalar_loop import LOOP, ScalarLoopStep, found_loop_symbol, read_program
from flowrt.kernels.fusion import fused
from flowrt.kernels.launch import apply_kernel
from flowrt.kernels.store import background
from flowrt.kernels.store import objects as store
from flowrt.kernels.store.background import wait_compiled
from flowrt.kernels.store.folder import cache_folder
from flowrt.kernels.store.parts import NESTED_PARTS, RuntimeObject
from flowrt.ops.fused import fused as fused_op
from flowrt.sched.loops.nesting import apply_structured
from flowrt.sched.loops.scalar_loops import apply_scalar_loop
from flowrt.sched.tape.recording import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.kernels.launch import Application

F32, I32 = Spec("float32", ()), Spec("int32", ())


def loop_graph() -> tuple[fr.Graph, Any, Any]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (), name="x")
        made = fr.while_loop(lambda i, y: i < np.int32(11), lambda i, y: (i + np.int32(1), y * x - x), (np.int32(0), x))
    return graph, x, made


def wanted(x: np.float32) -> np.float32:
    y = x
    for _ in range(11):
        y = y * x - x
    return y


def application() -> Application:
    graph, _, _ = loop_graph()
    node = next(n for n in graph.nodes if n.op.name == "loop")
    specs = [tensor.spec for tensor in node.inputs]
    return apply_structured("loop", specs, [t.spec for t in node.outputs], node.attrs, "cpu:0", record)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The symbol of `loop_graph`'s kernel, which is not there; all that the loop's launches need is."""
    monkeypatch.setattr(background, "was_tried", lambda symbol: True)
    (step,) = application().steps
    assert isinstance(step, ScalarLoopStep)
    monkeypatch.undo()
    symbol = found_loop_symbol(step.program)
    NESTED_PARTS["loop"].address()
    for op, spec in (("add", I32), ("less", I32), ("multiply", F32), ("subtract", F32)):
        result = Spec("bool", ()) if op == "less" else spec
        for launch in apply_kernel(op, [spec, spec], [result], {}).steps:
            launch.address()
    for launch in apply_kernel("copy", [I32], [I32], {}).steps:
        launch.address()
    (cache_folder() / f"{symbol}.o").unlink(missing_ok=True)
    store._entries.pop(symbol, None)
    background.close()
    background._state.done.clear()
    yield symbol
    assert wait_compiled(120)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int32", "int64", "uint16"])
def test_loops_of_scalars_of_any_dtype_are_one_launch(dtype: str) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(dtype, (), name="x")
        fr.while_loop(lambda i, y: i < np.int32(11), lambda i, y: (i + np.int32(1), y * x + y), (np.int32(0), x))
    node = next(n for n in graph.nodes if n.op.name == "loop")
    made = apply_scalar_loop([t.spec for t in node.inputs], [t.spec for t in node.outputs], node.attrs)
    assert made is not None
    assert isinstance(made.steps[0], ScalarLoopStep)


def test_a_loop_is_nested_until_its_kernel_is_there(missing: str) -> None:
    first = application()
    assert isinstance(first.steps[0], NestedStep)
    (order,) = first.orders
    assert order.symbol == missing
    assert carry_out(order.symbol, order.request) == ""
    after = application()
    assert isinstance(after.steps[0], ScalarLoopStep)
    assert after.orders == ()


def test_a_step_that_is_run_again_has_its_loop_compiled_and_answers_the_same(missing: str) -> None:
    graph, x, made = loop_graph()
    fed = np.float32(1.0625)
    with fr.BlockingSession(graph, options=fr.Options(optimize=False)) as session:  # its turns are not counted ahead
        step = session.compile(made, [x])
        answers = [step(fed) for _ in range(3)]
        assert wait_compiled(120)
        answers += [step(fed) for _ in range(3)]
    assert store.is_there(missing)
    for turns, y in answers:
        assert int(turns) == 11
        np.testing.assert_allclose(y, wanted(fed), rtol=1e-5)
    assert len({np.asarray(y).tobytes() for _, y in answers}) == 1  # one launch after another, and in one kernel


def test_what_the_helper_could_not_do_is_compiled_here(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "was_tried", lambda symbol: symbol == missing)
    made = application()
    assert isinstance(made.steps[0], ScalarLoopStep)
    assert made.orders == ()


def test_a_loop_whose_launches_are_not_compiled_either_is_compiled_at_once(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.kernels.launch.is_compiled", lambda variant: variant.kernel.op != "multiply")
    assert isinstance(application().steps[0], ScalarLoopStep)


def test_a_program_is_read_as_it_was_written(missing: str) -> None:
    (order,) = application().orders
    program = read_program(order.request.removeprefix(LOOP))
    assert program.text() == order.request.removeprefix(LOOP)
    assert found_loop_symbol(program) == missing
    assert (program.carried, program.scanned) == ((1, 1), ())


@pytest.mark.parametrize("request_", ["", "[", "[1, 2]", "[null, [[], [], []], 0, 0, 0]", "{}", '["x", "y", 1, 1, 1]'])
def test_an_order_that_cannot_be_read_is_answered(request_: str) -> None:
    assert carry_out("flowrt_scalar_loop_x", LOOP + request_) != ""


def test_another_processs_kernels_are_not_taken_for_these(missing: str) -> None:
    (order,) = application().orders
    assert carry_out("flowrt_scalar_loop_other", order.request) == "the parent's kernels differ from these"


async def test_a_loop_that_writes_nothing_between_its_turns_sees_that_it_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "was_tried", lambda symbol: True)  # so that its one kernel is compiled at once
    with fr.Graph() as graph:
        x = fr.placeholder("float32", ())
        halved = fr.while_loop(lambda y: y > 0.0, lambda y: y * 0.5, x)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        with pytest.raises(fr.StepTimeout):
            await session.run(halved, {x: np.float32(np.inf)}, timeout=0.05)


SINE = (("sin", (0,), "float64", ()), ("multiply", (1, 0), "float64", ()))


@pytest.mark.parametrize("there", [True, False])
def test_small_launches_in_one_are_taken_where_all_of_them_are_compiled(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is two fused launches whose kernels another program may have left in the cache."""
    with fr.Graph() as graph:
        rows = [fr.placeholder("float64", (5, 1)) for _ in range(2)]
        fr.map_fn(lambda pair: tuple(fused_op([a], members=SINE, results=(2,)) for a in pair), tuple(rows))
    node = next(n for n in graph.nodes if n.op.name == "loop")
    monkeypatch.setattr(scalar_loop, "is_there", lambda symbol: False)
    monkeypatch.setattr(background, "was_tried", lambda symbol: False)
    monkeypatch.setattr(fused, "is_compiled", lambda variant: True)
    monkeypatch.setattr("flowrt.kernels.launch.is_compiled", lambda variant: there)
    monkeypatch.setattr(RuntimeObject, "is_compiled", lambda part: there)
    specs, outputs = [t.spec for t in node.inputs], [t.spec for t in node.outputs]
    (step,) = apply_structured("loop", specs, outputs, node.attrs, "cpu:0", record).steps
    assert isinstance(step, NestedStep if there else ScalarLoopStep)
    if isinstance(step, NestedStep):
        assert [type(inner.step) for inner in step.spans[1]] == [ManyStep]
