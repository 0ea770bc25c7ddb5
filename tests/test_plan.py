from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrt.errors import BrokenStream
from flowrt.plan import Plan, PlanFeed, PlanNode, plan_from_data, plan_to_data
from flowrt.spec import Spec

VECTOR = Spec("float32", (2,))


def plan() -> Plan:
    constant = PlanNode("constant", "c", (), (VECTOR,), {"value": np.float32([1, 2])})
    add = PlanNode("add", "y", (0, 1), (VECTOR,), control=(0,), site="train.py:3")
    return Plan("/job:local/task:0", (constant, add), (PlanFeed("x", Spec("float32", (None,))),), (2, 0))


def test_a_plan_comes_back_equal() -> None:
    read = plan_from_data(plan_to_data(plan()))
    (constant, add), (first, second) = read.nodes, plan().nodes
    assert (read.task, read.feeds, read.fetches, add) == (plan().task, plan().feeds, plan().fetches, second)
    assert replace(constant, attrs={}) == replace(first, attrs={})
    np.testing.assert_array_equal(constant.attrs["value"], first.attrs["value"])
    assert not constant.attrs["value"].flags.writeable
    assert read.value_starts() == [1, 2, 3]


HOSTILE = {
    "no plan at all": lambda data: None,
    "a dtype that no tensor has": lambda data: data["nodes"][0]["outputs"][0].update(dtype="object"),
    "a negative size": lambda data: data["nodes"][0]["outputs"][0].update(shape=(-1,)),
    "an infinite size": lambda data: data["nodes"][0]["outputs"][0].update(shape=(float("inf"),)),
    "too many axes": lambda data: data["feeds"][0]["spec"].update(shape=(1,) * 9),
    "an input from nowhere": lambda data: data["nodes"][1].update(inputs=(0, 9)),
    "an input from behind": lambda data: data["nodes"][0].update(inputs=(2,)),
    "a node that waits for itself": lambda data: data["nodes"][1].update(control=(1,)),
    "an infinite fetch": lambda data: data.update(fetches=(float("inf"),)),
    "a fetch of nothing": lambda data: data.update(fetches=(3,)),
    "attributes without names": lambda data: data["nodes"][1].update(attrs=(1, 2)),
    "a node without an op": lambda data: data["nodes"][1].pop("op"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_plan_is_refused(case: str) -> None:
    data: Any = plan_to_data(plan())
    HOSTILE[case](data)
    with pytest.raises(BrokenStream, match="not a plan"):
        plan_from_data("plan" if case == "no plan at all" else data)
