"""Which nodes of a region do the same, and what its latest recording found of them, for the next one to find again.

Law: pure. Much of what a graph computes does not hang on the sizes that differ from step to step: layers are alike, and
what is done to variables is the same for batches of any size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.attributes import attr_key
from flowrt.base.plan import Plan

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec

Found: TypeAlias = "dict[Hashable, Any]"


@dataclass(slots=True, eq=False)
class FoundLast:
    """What the latest recording of a region found, by what it follows from; ``kinds`` of the region's nodes, by
    place, are numbers: nodes of one kind do the same, but for the sizes of their operands. Those ``fixed``
    are what the plan says, whatever comes. ``nodes`` are all, each with its place and the values it makes. ``bodies``
    are the regions, by the plans' ids, that bodies of loops and branches are recorded as."""

    kinds: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()
    nodes: tuple[tuple[int, PlanNode, range], ...] = ()
    inferred: Found = field(default_factory=dict)
    applied: Found = field(default_factory=dict)
    bodies: dict[int, Any] = field(default_factory=dict)

    def kinds_of(self, plan: Plan, positions: Sequence[int], first: Sequence[int]) -> tuple[int, ...]:
        """The kinds of the nodes at these positions, which are the region's; the values that they make begin at
        ``first``."""
        if not self.kinds:
            nodes = [plan.nodes[position] for position in positions]
            made = [range(value, value + len(node.outputs)) for value, node in zip(first, nodes, strict=True)]
            self.nodes = tuple(zip(range(len(nodes)), nodes, made, strict=True))
            self.fixed = _fixed(plan, self.nodes)
            numbers: dict[Hashable, int] = {}
            keys = [_key(position, plan.nodes[position]) for position in positions]
            self.kinds = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        return self.kinds


def _fixed(plan: Plan, nodes: Sequence[tuple[int, PlanNode, range]]) -> frozenset[int]:
    """The nodes, by place, that make what the plan says of values of which it knows all: integers may come yet."""
    known = {value for value, feed in enumerate(plan.feeds) if _is_told(feed.spec)}
    fixed = []
    for place, node, values in nodes:
        if all(map(_is_told, node.outputs)):  # or inference finds that it is not as the plan says, and fails
            if known.issuperset(node.inputs):
                fixed.append(place)
            known.update(values)
    return frozenset(fixed)


def _is_told(spec: Spec) -> bool:
    return spec.known and spec.dtype.kind not in "iu"


def _key(position: int, node: PlanNode) -> Hashable:
    """What equals only the same; a program is numbers and names alone, and may be long. What is structured names the
    nodes inside, and each its own."""
    if any(isinstance(value, Plan) for value in node.attrs.values()):
        return position
    attrs = tuple((n, repr(v) if n == "members" else attr_key(v)) for n, v in sorted(node.attrs.items()))
    return node.op, node.outputs, attrs


def again(found: Found, before: Mapping[Hashable, Any], key: Hashable) -> Any:
    """What was found for ``key`` in this recording, or in the one ``before``; None where that is nothing."""
    known = found.get(key)
    if known is None and (known := before.get(key)) is not None:
        found[key] = known
    return known
