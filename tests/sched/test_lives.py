"""What is found of a region's values before it runs."""

from __future__ import annotations

import numpy as np
import pytest
from tape_world import PlanMaker, whole_region
from test_fuse import plan_of

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import forget_kernels
from flowrt.sched.regions.lives import SMALL, find_lives
from flowrt.sched.regions.regions import find_regions
from flowrt.sched.tape.recording import record


def test_only_what_the_plan_knew_all_of_is_taken_from_it() -> None:
    make = PlanMaker()
    known, open_ = make.feed("float32", (2,)), make.feed("float32", (None,))
    arrived = make.node("recv", edge=0, peer="/job:ps/task:0", dtype="float32", shape=(2,))
    makes = [make.node("negative", value, control=[0]) for value in (known, open_, arrived)]
    plan = make.plan(*makes)
    (region,) = find_regions(plan, lambda node: node.op == "recv")
    assert region.inputs == (known, open_, arrived)
    find_lives(plan, region, [Spec("float32", (2,))] * 3)
    assert region.latest.fixed == {0}  # what is made of what is open, or has come, is inferred, and so compared


def test_what_is_fed_must_fit_although_the_plan_knows_what_is_made_of_it() -> None:
    make = PlanMaker()
    x = make.feed("float32", (None,))
    plan = make.plan(make.node("reshape", x, make.constant([2, 2])))
    assert plan.nodes[1].outputs[0].known
    with pytest.raises(SpecError, match="reshape_1"):
        find_lives(plan, whole_region(plan), [Spec("float32", (5,))])


@pytest.mark.parametrize(("nbytes", "kept"), [(SMALL, 1), (SMALL + 4, 2)])
def test_equal_constants_are_one_where_they_are_small(nbytes: int, kept: int) -> None:
    make = PlanMaker()
    x = make.feed("float32", (nbytes // 4,))
    sums = [make.node("add", x, make.constant(np.ones(nbytes // 4, np.float32))) for _ in range(2)]
    plan = make.plan(*sums)
    assert len(find_lives(plan, whole_region(plan), [Spec("float32", (nbytes // 4,))]).constants) == kept


def test_a_recording_is_what_it_would_be_had_there_been_none_before_and_finds_again_what_sizes_leave_alike() -> None:
    make = PlanMaker()
    x, w = make.feed("float32", (None, 8)), make.feed("float32", (8, 8))
    flags = {"transpose_a": False, "transpose_b": False}
    hidden = make.node("relu", make.node("matmul", make.node("matmul", x, w, **flags), w, **flags))
    step = make.node("multiply", make.node("transpose", w, axes=(1, 0)), make.node("negative", w))
    plan = make.plan(make.node("sum", hidden, axis=0, keepdims=False), make.node("matmul", step, w, **flags))
    region = whole_region(plan)
    found = []
    for rows in (5, 1, 300, 5):
        inputs = [Spec("float32", (rows, 8)), Spec("float32", (8, 8))]
        again, alone = record(plan, region, inputs), record(plan, whole_region(plan), inputs)
        assert (again.launches, again.arena_bytes) == (alone.launches, alone.arena_bytes)
        found.append({key: known for key, known in region.latest.applied.items() if inputs[0] not in key})
        assert all(found[0].get(key) is known for key, known in found[-1].items() if key in found[0])
    assert any(key in found[0] for key in found[-1])
    forget_kernels()
    record(plan, region, inputs)
    assert not region.latest.applied.keys() & found[-1].keys()  # kernels may be others


def test_what_the_latest_recording_found_of_a_loops_body_is_found_again() -> None:
    def step(x: fr.Tensor) -> fr.Tensor:
        zeros, table = x[0] * 0, np.eye(4, dtype=np.float32)
        return fr.scan(lambda h, row: (fr.sort(h @ fr.sort(table * 2) + row), h), zeros, x)[1]

    plan = plan_of(step, (None, None, 4))
    region, bodies = whole_region(plan), []
    for rows in (5, 1, 300, 5):
        inputs = [Spec("float32", (3, rows, 4))]
        again, alone = record(plan, region, inputs), record(plan, whole_region(plan), inputs)
        assert (again.launches, again.arena_bytes) == (alone.launches, alone.arena_bytes)
        bodies.append({**region.latest.bodies})
    assert len(bodies[0]) == 1
    (before,), (after,) = bodies[0].values(), bodies[-1].values()
    assert before is after
    assert after.latest.applied
