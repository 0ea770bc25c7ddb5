"""Compute what depends on nothing once, before any step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.attributes import Attr, attr_key
from flowrt.base.errors import FlowrtError, InternalError, StepCancelled
from flowrt.base.spec import Spec, spec_of, value_known
from flowrt.op import Op, lookup
from flowrt.passes.step import NO_GUARDS, Ref, StepGraph, StepNode, guards_of, infer, keep_needed

Array: TypeAlias = np.ndarray[Any, Any]
Evaluate: TypeAlias = Callable[[Op, Sequence[Array], Mapping[str, Attr]], tuple[Array, ...]]

LARGEST = 1 << 16
"""A constant of more bytes than this is not worth sending with every plan; it is computed in the step."""

STRUCTURAL = frozenset({"switch", "merge", "enter", "exit", "next_iteration"})
"""Which of their inputs is alive, and when, is a matter of the step."""
ONLY_SHAPE = frozenset({"full_like"})
"""Of their first input they take the shape."""
BODIES = frozenset({"loop", "cond"})
"""How long they would take is not known: a loop of constants may never end, and a step can be cancelled."""
LEFT = STRUCTURAL | BODIES


def fold_constants(step: StepGraph, evaluate: Evaluate | None, largest: int = LARGEST) -> StepGraph:
    """Put a constant where a node's value is known: from inference (the shape of a tensor), or by ``evaluate``.

    What a step must decide stays: state, effects and what is behind them, nodes that wait for others or lie on a side
    of a switch. A node that ``evaluate`` refuses stays too, and fails in the step, where its error belongs. Shapes that
    become known thereby are inferred onward.
    """
    guards, changing = guards_of(step), _behind_changes(step)
    constants: dict[int, Array] = {}
    evaluate = evaluate and _remembering(evaluate)
    changed: dict[Ref, Spec] = {}
    nodes: dict[int, StepNode] = {}
    for node in step.nodes.values():
        made = _inferred_again(step, node, changed)
        free = not (guards.get(node.id, NO_GUARDS) or made.control or made.after or node.id in changing)
        value = _value(made, constants, evaluate, largest) if free else None
        if value is not None:
            constants[node.id] = value
            made = made if made.op.name == "constant" else _as_constant(made, value)
        if made is not node:
            changed |= {(node.id, i): spec for i, spec in enumerate(made.outputs) if spec != node.outputs[i]}
        nodes[node.id] = made
    return keep_needed(step, nodes)


def _remembering(evaluate: Evaluate) -> Evaluate:
    """``evaluate``, which answers a question it was asked before without computing: large graphs repeat themselves."""
    known: dict[Hashable, tuple[Sequence[Array], tuple[Array, ...]]] = {}  # what was given lives on: keys name it

    def remembered(op: Op, given: Sequence[Array], attrs: Mapping[str, Attr]) -> tuple[Array, ...]:
        key = op.name, *map(attr_key, given), *[(name, attr_key(value)) for name, value in sorted(attrs.items())]
        if key not in known:
            known[key] = given, evaluate(op, given, attrs)
        return known[key][1]

    return remembered


def _behind_changes(step: StepGraph) -> set[int]:
    """The nodes that change state or wait, and all behind them: to fold one could be to leave a change out."""
    found: set[int] = set()
    for node in step.nodes.values():
        changes = node.op.effect or (node.op.stateful and node.op.name != "read_variable")
        if changes or not found.isdisjoint(node.before):
            found.add(node.id)
    return found


def _inferred_again(step: StepGraph, node: StepNode, changed: Mapping[Ref, Spec]) -> StepNode:
    if changed.keys().isdisjoint(node.inputs):
        return node
    outputs = infer(node, [changed.get(ref) or step.spec(ref) for ref in node.inputs])
    return node if outputs == node.outputs else replace(node, outputs=outputs)


def _value(node: StepNode, constants: Mapping[int, Array], evaluate: Evaluate | None, largest: int) -> Array | None:
    """What ``node`` computes in every step, if that is known and small."""
    if node.op.name == "constant":
        value = node.attrs["value"]
        return value if isinstance(value, np.ndarray) else None
    if len(node.outputs) != 1 or node.op.stateful or node.op.effect or node.op.name in LEFT:
        return None
    spec = node.outputs[0]
    if spec.value is not None and value_known(spec.value) and spec.known:
        return _frozen(np.array(spec.value, spec.dtype).reshape(spec.concrete))
    of_shape = node.op.name in ONLY_SHAPE
    sources = [source for source, _ in node.inputs[of_shape:]]
    if evaluate is None or not all(map(constants.__contains__, sources)):
        return None
    if not spec.known or spec.nbytes > largest:
        return None
    given = [constants[source] for source in sources]
    if of_shape:
        given.insert(0, np.broadcast_to(spec.dtype.type(0), spec.concrete))
    try:
        found = evaluate(node.op, given, node.attrs)[0]
    except StepCancelled:  # while it waited for a kernel
        raise
    except FlowrtError:
        return None
    if not spec.accepts(found.dtype, found.shape):
        raise InternalError(f"{node.where()}: folded to {spec_of(found)}, but {spec} was inferred")
    return _frozen(found)


def _frozen(array: Array) -> Array:
    out = np.array(array, order="C")
    out.setflags(write=False)
    return out


def _as_constant(node: StepNode, value: Array) -> StepNode:
    constant = lookup("constant")
    attrs: dict[str, Attr] = {"value": value}
    return StepNode(node.id, constant, node.name, (), constant.infer([], attrs), attrs, (), node.site)
