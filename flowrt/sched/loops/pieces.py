"""A region some of whose shapes are told by values alone, as pieces that run one after another.

Law: pure; it runs inference, and knows no kernel. A node *varies* where the shape of something that it takes or makes
does not follow from the shapes of the region's inputs. Pieces are by turns of nodes that do not and of nodes that do:
each node stands in the first of its kind that is not before a piece it waits for, so edges lead only to the same piece
or a later one. A constant, and a read of a variable that the region does not write, stand in every piece that reads
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from flowrt.base.attributes import attr_key
from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, value_known
from flowrt.base.valueclass import valueclass
from flowrt.op import lookup
from flowrt.sched.loops.structured import COND, PURE_STRUCTURED, STATEFUL_COND
from flowrt.sched.regions.lives import sizes_known
from flowrt.sched.regions.regions import CONSTANT, READ, Region, regions_of, resource_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode


@valueclass
class Piece:
    """A part of a region, as a region; whether its nodes vary; and what a tape for it may be made of: the first region
    that is the same in all but names, as those of layers are."""

    region: Region
    varies: bool
    like: Region


def find_pieces(plan: Plan, region: Region, inputs: Sequence[Spec]) -> tuple[Piece, ...]:
    """The pieces of ``region`` on inputs of these specs, in an order in which they can run; of no values but those that
    the plan knows.

    Raises `SpecError` naming the node that does not fit.
    """
    known: dict[int, Spec] = {}
    planned = plan.value_specs()
    for value, spec in zip(region.inputs, inputs, strict=True):
        static = planned[value].value
        known[value] = Spec(spec.dtype, spec.dims, static if value_known(static) else None)
    varying = _varying(plan, region.nodes, known)
    anywhere = frozenset(n for n in region.nodes if _may_stand_anywhere(plan.nodes[n], region))
    groups = _groups(plan, region, varying, anywhere)
    order = sorted(groups)
    found = regions_of(plan, [sorted(groups[level]) for level in order], anywhere, region.outputs)
    first: dict[Hashable, Region] = {}
    return tuple(
        [
            Piece(each, bool(level % 2), first.setdefault(_likeness(plan, each, planned), each))
            for level, each in zip(order, found, strict=True)
        ]
    )


def _may_stand_anywhere(node: PlanNode, region: Region) -> bool:
    """Whether it is all the same when a node runs, and how often."""
    if node.inputs or node.control:
        return False
    return node.op == CONSTANT or (node.op == READ and resource_of(node) not in region.writes)


def role_of(node: PlanNode, specs: Sequence[Spec]) -> Hashable:
    """What a node does, the same for all that do it; ``specs`` are its plan's."""
    attrs = tuple((name, attr_key(node.attrs[name])) for name in sorted(node.attrs))
    return node.op, attrs, tuple((specs[value].dtype, specs[value].dims) for value in node.inputs), node.outputs


def _likeness(plan: Plan, region: Region, specs: Sequence[Spec]) -> Hashable:
    """What is the same of regions that are alike in all but names."""
    number = {value: place for place, value in enumerate(region.inputs)}
    roles = []
    for position, first in zip(region.nodes, region.first, strict=True):
        node = plan.nodes[position]
        roles.append((role_of(node, specs), tuple(number[value] for value in node.inputs)))
        for value in range(first, first + len(node.outputs)):
            number[value] = len(number)
    given = tuple(specs[value] for value in region.inputs)
    alone = region.nodes if region.writes else ()  # what fails is run again by its own nodes, which must write once
    return alone, given, tuple(roles), tuple(number[value] for value in region.outputs)


def _groups(plan: Plan, region: Region, varying: frozenset[int], anywhere: frozenset[int]) -> dict[int, set[int]]:
    """The nodes of each piece by its level, an odd one where they vary."""
    makers: dict[int, int] = {}
    levels: dict[int, int] = {}
    groups: dict[int, set[int]] = {}
    for position, first in zip(region.nodes, region.first, strict=True):
        node = plan.nodes[position]
        makers.update((value, position) for value in range(first, first + len(node.outputs)))
        if position in anywhere and first not in region.outputs:
            continue
        before = {makers[value] for value in node.inputs if value in makers}.union(node.control)
        level = max((levels[n] for n in before if n in levels), default=0)
        levels[position] = level = level + (level % 2 != (position in varying))
        groups.setdefault(level, set()).update((position, *before.intersection(anywhere)))
    return groups


def _varying(plan: Plan, nodes: Sequence[int], specs: dict[int, Spec]) -> frozenset[int]:
    """Those of the ``nodes`` that vary, where ``specs`` are what is known of what they take from outside."""
    starts, found = plan.value_starts(), set()
    for position in nodes:
        node = plan.nodes[position]
        taken = [specs[value] for value in node.inputs]
        made = outputs_of(node, taken)
        specs.update(enumerate(made, starts[position]))
        alike = all(spec.known for spec in (*taken, *made)) and sizes_known(node, taken)
        if not alike or _varies_inside(node, taken, made):
            found.add(position)
    return frozenset(found)


def outputs_of(node: PlanNode, inputs: Sequence[Spec]) -> Sequence[Spec]:
    """The specs of what a node makes of inputs of these, as far as they are known before it runs."""
    if all(spec.known and spec.dtype.kind not in "iu" for spec in node.outputs):
        return node.outputs
    try:
        return lookup(node.op).infer(inputs, node.attrs)
    except SpecError as error:
        if node.op in PURE_STRUCTURED:  # its body need not run
            return node.outputs
        raise SpecError(f"{node.where()}: {error}") from None


def _varies_inside(node: PlanNode, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> bool:
    """Whether a loop or branch has a node that varies, or one that does not fit and may never run."""
    if node.op not in PURE_STRUCTURED:
        return False
    try:
        return any(
            _varying(body, range(len(body.nodes)), dict(enumerate(fed))) for body, fed in fed_to(node, inputs, outputs)
        )
    except SpecError:
        return True


def fed_to(node: PlanNode, inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Iterator[tuple[Plan, Sequence[Spec]]]:
    """The bodies of a loop or branch, and what is known in each iteration of what they are fed."""
    attrs = node.attrs
    if node.op in (COND, STATEFUL_COND):
        yield attrs["if_true"], inputs[1:]
        yield attrs["if_false"], inputs[1:]
        return
    carried, counted = int(attrs["carried"]), int(attrs["counted"])
    held, behind = outputs[:carried], carried + counted + int(attrs["scanned"])
    rows = [
        Spec(spec.dtype, None if spec.dims is None else spec.dims[1:]) for spec in inputs[carried + counted : behind]
    ]
    yield attrs["body"], [*held, *rows, *inputs[behind:]]
    if attrs["cond"] is not None:
        yield attrs["cond"], [*held, *inputs[behind:]]
