"""Plans for tests of regions and tapes, and a naive interpreter of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import flowrt.kernels.elementwise
import flowrt.kernels.flow
import flowrt.kernels.shape
import flowrt.ops  # noqa: F401  (fills the registry)
from flowrt.op import lookup
from flowrt.plan import Plan, PlanFeed, PlanNode
from flowrt.spec import Spec

Array = np.ndarray[Any, Any]

MEANING: Mapping[str, Any] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": np.maximum,
    "negative": lambda a: -a,
    "square": lambda a: a * a,
    "relu": lambda a: np.maximum(a, 0),
    "identity": lambda a: a,
    "reshape": lambda a, shape: a.reshape(shape),
    "transpose": np.transpose,
    "broadcast_to": lambda a, shape: np.broadcast_to(a, shape).copy(),
    "shape_of": lambda a: np.array(a.shape, np.int64),
    "sum": np.sum,
    "max": np.max,
    "cumsum": np.cumsum,
}


class PlanMaker:
    """Adds nodes one by one, as a graph would; answers value ids. Feeds must come first."""

    def __init__(self) -> None:
        self.nodes: list[PlanNode] = []
        self.feeds: list[PlanFeed] = []
        self.specs: list[Spec] = []

    def feed(self, dtype: str, shape: Sequence[int | None]) -> int:
        assert not self.nodes
        self.feeds.append(PlanFeed(f"x{len(self.feeds)}", Spec(dtype, shape), "train.py:1"))
        self.specs.append(self.feeds[-1].spec)
        return len(self.specs) - 1

    def node(self, op: str, *inputs: int, control: Sequence[int] = (), device: str = "cpu:0", **attrs: Any) -> int:
        """The first output's value id; for a node without outputs, the number of values so far."""
        outputs = lookup(op).infer([self.specs[v] for v in inputs], attrs)
        number = len(self.nodes)
        site = f"train.py:{number + 10}"
        self.nodes.append(PlanNode(op, f"{op}_{number}", inputs, outputs, attrs, tuple(control), device, site))
        self.specs += outputs
        return len(self.specs) - len(outputs)

    def constant(self, value: Any) -> int:
        array = np.asarray(value)
        return self.node("constant", value=array.astype(np.float32) if array.dtype == np.float64 else array)

    def read(self, name: str, shape: Sequence[int], control: Sequence[int] = ()) -> int:
        return self.node(
            "read_variable", control=control, resource=name, container="", dtype="float32", shape=tuple(shape)
        )

    def write(self, op: str, name: str, value: int, control: Sequence[int] = ()) -> int:
        """The position of the node that writes."""
        shape = self.specs[value].concrete
        self.node(op, value, control=control, resource=name, container="", dtype="float32", shape=shape)
        return self.last

    @property
    def last(self) -> int:
        return len(self.nodes) - 1

    def plan(self, *fetches: int) -> Plan:
        return Plan("/job:worker/task:0", tuple(self.nodes), tuple(self.feeds), fetches)


def interpret(plan: Plan, feeds: Sequence[Array], variables: dict[str, Array]) -> list[Array]:
    """Every value of ``plan``, computed by NumPy in plan order; ``variables`` are written in place."""
    values: list[Array] = [np.asarray(feed) for feed in feeds]
    for node in plan.nodes:
        inputs = [values[v] for v in node.inputs]
        match node.op:
            case "constant":
                values.append(node.attrs["value"])
            case "read_variable":
                values.append(variables[node.attrs["resource"]].copy())
            case "assign":
                variables[node.attrs["resource"]][...] = inputs[0]
            case "assign_add":
                variables[node.attrs["resource"]] += inputs[0]
            case "assign_sub":
                variables[node.attrs["resource"]] -= inputs[0]
            case "no_op":
                pass
            case op:
                attrs = {k: v for k, v in node.attrs.items() if k in ("axes", "axis", "keepdims")}
                values.append(np.asarray(MEANING[op](*inputs, **attrs)))
    return values
