"""Parts and repetitions that a fused node reads where they lie, rather than copies of them; and parts side by side.

Law: a tensor is read in place where only members of groups read it, its entries along the last axis lie side by side or
are one, and nothing waits for it to be made. What it is made of was there before, so that no group waits for more than
it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.spec import index_steps
from flowrt.base.traits import Arranged
from flowrt.op import lookup
from flowrt.passes.step import StepGraph, StepNode, in_order, keep_needed

if TYPE_CHECKING:
    from flowrt.base.device import Device

PUT = "place"
WHOLE = (None, None, None)


# ── read where they lie ──────────────────────────────────────────────────────────────────────────────────────────────


def find_views(
    step: StepGraph, placement: Mapping[int, Device], users: Mapping[int, Collection[int]], members: Collection[int]
) -> frozenset[int]:
    """What of parts and repetitions only members of groups read, each on its group's device."""
    found = [node for node in step.nodes.values() if _is_view(step, node)]
    awaited = {c for node in step.nodes.values() for c in (*node.control, *node.after)} if found else set()
    awaited.update(step.targets)
    return frozenset(
        node.id
        for node in found
        if node.id not in awaited
        and not (node.control or node.after)
        and users[node.id]
        and all(user in members and placement[user] == placement[node.id] for user in users[node.id])
    )


def _is_view(step: StepGraph, node: StepNode) -> bool:
    view = node.op.traits.view
    if view is Arranged.REPEATED:
        return step.spec(node.inputs[0]).dims is not None and node.outputs[0].dims is not None
    return view is Arranged.PART and _lies_in_rows(node.attrs["key"], step.spec(node.inputs[0]).dims)


def _lies_in_rows(key: Any, dims: Sequence[int | None] | None) -> bool:
    """Whether the part ``key`` of a tensor is of whole stretches of its last axis."""
    if not dims or None in key:
        return False
    last = _items(key, len(dims))[-1]
    if last == WHOLE or last == (None, None, 1):
        return True
    if isinstance(last, int) or dims[-1] is None:
        return False
    count = index_steps(("...", last), dims)[-1]
    return count.step == 1 and count.count is not None and count.count > 1


def _items(key: Sequence[Any], rank: int) -> list[Any]:
    """What ``key`` says of each axis; it makes none."""
    spot = list(key).index("...") if "..." in key else len(key)
    given = [item for item in key if item != "..."]
    return [*given[:spot], *[WHOLE] * (rank - len(given)), *given[spot:]]


# ── put side by side ─────────────────────────────────────────────────────────────────────────────────────────────────


def join_parts(step: StepGraph, placement: Mapping[int, Device]) -> StepGraph:
    """``step`` with sums of parts amid zeros, where they tile a tensor along an axis, as the parts one after another.

    Such is the gradient of a tensor all of whose parts are used.
    """
    puts = _read_once(step)
    if not puts:
        return step
    nodes = dict(step.nodes)
    for node in step.nodes.values():
        own = {i for i, _ in node.inputs if i in puts and placement[i] == placement[node.id]}
        if node.op.name == "add_n" and len(own) > 1:
            _join(step, node, own, nodes)
    if all(nodes[i] is node for i, node in step.nodes.items()):
        return step
    return keep_needed(step, in_order(nodes))


def _read_once(step: StepGraph) -> set[int]:
    """The nodes that put a part amid zeros for one reader alone."""
    puts = {node.id for node in step.nodes.values() if node.op.name == PUT}
    uses = Counter(i for node in step.nodes.values() for i in node.before if i in puts) if puts else Counter[int]()
    uses.update((*(i for i, _ in step.fetches), *step.targets))
    return {i for i in puts if uses[i] == 1}


def _join(step: StepGraph, node: StepNode, puts: Collection[int], nodes: dict[int, StepNode]) -> None:
    """Make of ``node`` the sum of fewer, or one tensor after another."""
    left = list(node.inputs)
    joined: list[StepNode] = []
    for axis in range(node.outputs[0].rank):
        while tiles := _tiles(step, node, [i for i, _ in left if i in puts], axis):
            parts = [step.nodes[i] for i in tiles]
            for part in parts:
                left.remove((part.id, 0))
            joined.append(_side_by_side(parts, axis))
    if not joined:
        return
    if len(joined) == 1 and not left:
        made = joined[0]
        control = tuple(dict.fromkeys((*node.control, *made.control)))
        nodes[node.id] = replace(node, op=made.op, inputs=made.inputs, attrs=made.attrs, control=control)
        return
    nodes |= {made.id: made for made in joined}
    inputs = (*((made.id, 0) for made in joined), *left)
    nodes[node.id] = replace(node, inputs=inputs, attrs={**node.attrs, "_many": len(inputs)})


def _tiles(step: StepGraph, node: StepNode, puts: Sequence[int], axis: int) -> list[int]:
    """Those of ``puts`` that tile all of ``axis``, in their order; nothing where none do."""
    size, begins = node.outputs[0].shape[axis], dict[int, tuple[int, int]]()
    for put in puts if size is not None else ():
        span = _span(step, step.nodes[put], axis)
        if span is not None and span[0] < span[1]:
            begins.setdefault(span[0], (span[1], put))
    at, found = 0, list[int]()
    while at in begins:
        at, part = begins[at]
        found.append(part)
    return found if at == size and len(found) > 1 else []


def _span(step: StepGraph, put: StepNode, axis: int) -> tuple[int, int] | None:
    """From where to where along ``axis`` a node puts its input, where that is all it does."""
    dims, key = put.outputs[0].dims, put.attrs["key"]
    if dims is None or not isinstance(key, tuple) or None in key:
        return None
    items = _items(key, len(dims))
    if any(item != WHOLE for i, item in enumerate(items) if i != axis) or isinstance(items[axis], int):
        return None
    found = index_steps(items, dims)[axis]
    if found.step != 1 or found.start is None or found.count is None or step.spec(put.inputs[0]).dims is None:
        return None
    return found.start, found.start + found.count


def _side_by_side(parts: Sequence[StepNode], axis: int) -> StepNode:
    """The node that puts the inputs of ``parts`` one after another, in the place of the last of those."""
    last = max(parts, key=lambda part: part.id)
    waits = tuple(dict.fromkeys(c for part in parts for c in part.control))
    inputs = tuple(part.inputs[0] for part in parts)
    return replace(last, op=lookup("concat"), inputs=inputs, attrs={"axis": axis, "_many": len(inputs)}, control=waits)
