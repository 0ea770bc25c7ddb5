"""Tapes of which some variables' new values lie elsewhere than the old."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import PlanMaker, array, divided, interpret, random_plan, tape_of, whole_region, words

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.launch import Operand
from flowrt.sched.host.lanes import Crew
from flowrt.sched.regions.recorded import FIRST_SLOT, Launch, Recording
from flowrt.sched.tape.apart import find_whole_writes
from flowrt.sched.tape.tape import Tape, address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flowrt.base.plan import Plan

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(2)
    yield made
    made.close()


def run_apart(
    tape: Tape, inputs: Sequence[Array], state: Mapping[str, Array], apart: Collection[str], crew: Crew | None = None
) -> tuple[list[Array], dict[str, Array]]:
    """The outputs, and what the variables hold, those ``apart`` elsewhere; where these were, nothing is written."""
    held = {name: state[name].copy() for _, name in tape.variables}
    new = {name: np.full_like(value, np.nan) if name in apart else value for name, value in held.items()}
    old = [address(value) for value in held.values()]
    outputs = tape.run(words(), inputs, [address(value) for value in new.values()], crew=crew, old=old)
    for name in apart:
        np.testing.assert_array_equal(held[name], state[name], err_msg=f"{name}, where it was")
    return outputs, {**state, **new}


def may_lie_apart(tape: Tape) -> list[str]:
    return [tape.variables[number][1] for number in tape.whole_writes]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_what_is_computed_does_not_hang_on_where_variables_lie(
    first: int, threads: int, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_apart = 0
    for seed in range(first, first + 50):
        plan, feeds, state = random_plan(random.Random(seed))
        region = whole_region(plan)
        expected_state = {name: value.copy() for name, value in state.items()}
        expected = interpret(plan, feeds, expected_state)
        inputs = [feeds[v] for v in region.inputs]
        tape = Tape(plan, region, [spec_of(value) for value in inputs])
        if threads > 1:
            divided(tape, plan, crew, monkeypatch, seed)
        names = may_lie_apart(tape)
        for some in itertools.chain(*(itertools.combinations(names, n) for n in range(1, len(names) + 1))):
            outputs, held = run_apart(tape, inputs, state, some, crew if threads > 1 else None)
            for value, output in zip(region.outputs, outputs, strict=True):
                np.testing.assert_array_equal(output, expected[value], err_msg=f"seed {seed}, apart: {some}")
            for name, value in expected_state.items():
                np.testing.assert_array_equal(held[name], value, err_msg=f"seed {seed}, apart: {some}")
            lay_apart += 1
    assert lay_apart > 20


def updates(*writes: str) -> Plan:
    """A variable moved by what is fed, as many times as there are ops, and read before and after."""
    make = PlanMaker()
    x = make.feed("float32", (4, 8))
    before = make.read("v", (4, 8))
    last: list[int] = []
    for op in writes:
        last = [make.write(op, "v", x, control=last)]
    return make.plan(make.node("multiply", before, x), make.read("v", (4, 8), control=last))


@pytest.mark.parametrize("writes", [("assign",), ("assign_add",), ("assign_sub", "assign_add"), ("assign_add",) * 3])
def test_a_variable_that_is_written_whole_may_lie_apart(writes: Sequence[str]) -> None:
    plan, x, state = updates(*writes), array(4, 8), {"v": array(4, 8, seed=1)}
    tape = tape_of(plan, x)
    assert may_lie_apart(tape) == ["v"]
    outputs, held = run_apart(tape, [x], state, ["v"])
    moved = {name: value.copy() for name, value in state.items()}
    expected = interpret(plan, [x], moved)
    np.testing.assert_array_equal(held["v"], moved["v"])
    for value, output in zip(whole_region(plan).outputs, outputs, strict=True):
        np.testing.assert_array_equal(output, expected[value])


def test_one_that_is_only_read_or_whose_rows_are_moved_may_not() -> None:
    make = PlanMaker()
    x, ids = make.feed("float32", (2, 8)), make.feed("int64", (2,))
    added = make.node("add", make.read("read", (2, 8)), x)
    groups = make.node("group_rows", ids, make.constant(np.int64(2)), size=4, absent=False)
    where: Mapping[str, Any] = {"resource": "rows", "container": "", "dtype": "float32", "shape": (4, 8)}
    make.node("add_rows", x, groups, make.constant(np.ones(8)), **where)
    tape = tape_of(make.plan(added), array(2, 8), np.array([1, 3]))
    assert {name for _, name in tape.variables} == {"read", "rows"}
    assert not tape.whole_writes


def test_nobody_is_told_of_rows_whose_groups_could_not_be_made() -> None:
    make = PlanMaker()
    x, ids = make.feed("float32", (2, 8)), make.feed("int64", (2,))
    groups = make.node("group_rows", ids, make.constant(np.int64(2)), size=4, absent=False)
    where: Mapping[str, Any] = {"resource": "rows", "container": "", "dtype": "float32", "shape": (4, 8)}
    make.node("add_rows", x, groups, make.constant(np.ones(8)), **where)
    state, told = array(4, 8), list[Any]()
    ids_given = np.array([1, 3]), np.array([1, 4])
    tape = tape_of(make.plan(), array(2, 8), ids_given[0])
    for given in ids_given:
        run = partial(tape.run, words(), [array(2, 8), given], [address(state)])
        with pytest.raises(FlowrtError, match="out of range") if given[1] == 4 else nullcontext():
            run(before=lambda write, groups: told.append(groups.copy()))
        assert len(told) == 1


@dataclass
class Step:
    operands: Sequence[int]
    reads: int


def launch(node: int, reads: Sequence[int], writes: Sequence[int], nbytes: int = 64, also: Sequence[int] = ()) -> Any:
    """A launch on variables, by their numbers."""
    places = tuple(Operand(FIRST_SLOT + variable) for variable in (*reads, *writes))
    return Launch(Step(range(len(places)), len(reads)), places, node, (nbytes,) * len(places), also=tuple(also))


@pytest.mark.parametrize(
    ("launches", "begun"),
    [
        ([launch(0, [0], []), launch(1, [0], [0]), launch(2, [0], [1])], {0: 1, 1: 2}),
        ([launch(0, [1], [0]), launch(0, [1], [0]), launch(1, [0], [1])], {0: 0, 1: 2}),
        ([launch(0, [0], [0]), launch(0, [0], [0])], {}),  # which value does the node's second launch want?
        ([launch(0, [0], [0], also=[2]), launch(1, [0], [1]), launch(2, [0], [1])], {1: 1}),
        ([launch(0, [], [0], nbytes=32), launch(1, [], [0])], {}),
    ],
)
def test_what_a_node_reads_when_it_has_begun_to_write_is_told_by_its_place_or_not_at_all(
    launches: Sequence[Launch], begun: Mapping[int, int]
) -> None:
    names, spec = (("", "u"), ("", "v")), Spec("float32", (16,))
    made = Recording(tuple(launches), (), names, (spec, spec), (), 0, 0, 0, 0, 0.0, 0.0)
    assert find_whole_writes(made, FIRST_SLOT) == begun
