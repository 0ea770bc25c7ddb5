"""What is found of a region's values before it runs."""

from __future__ import annotations

import numpy as np
import pytest
from tape_world import PlanMaker, whole_region

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec
from flowrt.sched.regions.lives import SMALL, find_lives
from flowrt.sched.regions.regions import find_regions


def test_only_what_the_plan_knew_all_of_is_taken_from_it() -> None:
    make = PlanMaker()
    known, open_ = make.feed("float32", (2,)), make.feed("float32", (None,))
    arrived = make.node("recv", edge=0, peer="/job:ps/task:0", dtype="float32", shape=(2,))
    makes = [make.node("negative", value, control=[0]) for value in (known, open_, arrived)]
    plan = make.plan(*makes)
    (region,) = find_regions(plan, lambda node: node.op == "recv")
    assert region.inputs == (known, open_, arrived)
    lives = find_lives(plan, region, [Spec("float32", (2,))] * 3)
    assert lives.planned == {known, makes[0], makes[2]}


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
