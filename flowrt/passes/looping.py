"""Which loops and branches a device carries out whose memory is not the host's: see `sched/devices/looping`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.plan import Plan
from flowrt.op import lookup, sizing
from flowrt.ops.body import changes_state

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode

Supports: TypeAlias = Callable[[str, Sequence[Any], str], bool]

FIXED = frozenset({"constant", "shape_of"})  # whose values are known on the host, wherever they are made


def runs_apart(op: str, attrs: Mapping[str, Any], kind: str, supports: Supports) -> bool:
    """Whether devices of that ``kind`` carry out a loop or branch.

    They do where they compute all of its bodies, nothing in these has an effect or sizes known only inside, and
    how many rows a loop stacks does not depend on its condition alone.
    """
    bodies = [value for value in attrs.values() if isinstance(value, Plan)]
    if lookup(op).stateful or changes_state(*bodies) or (op == "loop" and _stacks_by_condition(attrs)):
        return False
    return all(_computes(body, kind, supports) for body in bodies)


def _stacks_by_condition(attrs: Mapping[str, Any]) -> bool:
    stacks = len(attrs["body"].fetches) > attrs["carried"]
    return stacks and attrs["cond"] is not None


def _computes(body: Plan, kind: str, supports: Supports) -> bool:
    specs, starts = body.value_specs(), body.value_starts()
    makers = {v: node for n, node in enumerate(body.nodes) for v in range(starts[n], starts[n + 1])}
    return all(_runs(node, specs, makers, kind, supports) for node in body.nodes)


def _runs(
    node: PlanNode,
    specs: Sequence[Any],
    makers: Mapping[int, PlanNode],
    kind: str,
    supports: Supports,
) -> bool:
    if any(isinstance(value, Plan) for value in node.attrs.values()):
        return runs_apart(node.op, node.attrs, kind, supports)
    sizes = [makers.get(node.inputs[place]) for place in sizing(node.op, node.attrs, len(node.inputs))]
    if any(made is None or made.op not in FIXED for made in sizes):
        return False
    return supports(node.op, [specs[v].dtype for v in node.inputs] + [spec.dtype for spec in node.outputs], kind)
