"""Compute with floats of 16 bits in float32: casts around each node that no kernel computes on their bits.

Law: a pass on a placed step, run on every one. A node keeps its id, name and place; what it takes is widened for it,
and what it answers is rounded, to nearest and of two to the even one, whoever reads it: so a step comes to the same
bits whatever is fused afterwards. Every reader has casts of its own, which fusion takes into what reads; nothing wide
is kept from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.plan import Plan
from flowrt.base.spec import Spec, as_dtype, is_half
from flowrt.op import Op, lookup
from flowrt.passes.bodies import rewrite_bodies
from flowrt.passes.step import FED, Ref, StepGraph, StepNode, infer

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.device import Device
    from flowrt.passes.place import Supports

WIDE = np.dtype("float32")
FEW = 1 << 10  # entries of a constant that is widened before any step


def widen(
    step: StepGraph, placement: Mapping[int, Device], supports: Supports
) -> tuple[StepGraph, Mapping[int, Device]]:
    """``step``, its bodies too, with casts around what has a kernel for float32 alone; and where all its nodes run."""
    if not _has_halves(step):
        return step, placement

    def widened(
        body: StepGraph, where: Mapping[int, Device]
    ) -> StepGraph:  # one level: what goes to bodies goes deeper
        return _Widening(body, where, supports).made() if _has_halves(body) else body

    step = rewrite_bodies(step, placement, widened, effects=True)
    widening = _Widening(step, placement, supports)
    return widening.made(), widening.placement


def wide_attributes(op: Op, attrs: Mapping[str, Attr]) -> Mapping[str, Attr]:
    """``attrs`` with float32 in the place of dtypes of 16 bits."""
    named = {p.name for p in op.parameters if p.dtype and attrs.get(p.name) is not None}
    halves = {name for name in named if is_half(as_dtype(attrs[name]))}
    return {**attrs, **dict.fromkeys(halves, WIDE.name)} if halves else attrs


def _has_halves(step: StepGraph) -> bool:
    specs = [*step.feed_specs, *(spec for node in step.nodes.values() for spec in node.outputs)]
    if any(is_half(spec.dtype) for spec in specs):
        return True
    bodies = (value for node in step.nodes.values() for value in node.attrs.values() if isinstance(value, Plan))
    return any(map(_has_halves_inside, bodies))


def _has_halves_inside(body: Plan) -> bool:
    if any(is_half(spec.dtype) for node in body.nodes for spec in node.outputs):
        return True
    return any(_has_halves_inside(v) for node in body.nodes for v in node.attrs.values() if isinstance(v, Plan))


class _Widening:
    """A step written anew, with casts."""

    def __init__(self, step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> None:
        self._step, self._supports = step, supports
        self.placement = dict(placement)
        self._nodes: dict[int, StepNode] = {}
        self._narrowed: dict[Ref, Ref] = {}  # what readers take for an output
        self._free = step.free

    def made(self) -> StepGraph:
        for node in self._step.nodes.values():
            inputs = tuple(self._narrowed.get(ref, ref) for ref in node.inputs)
            node = node if inputs == node.inputs else replace(node, inputs=inputs)
            if self._is_computed_wide(node):
                self._widen(node)
            else:
                self._nodes[node.id] = node
        fetches = tuple(self._narrowed.get(ref, ref) for ref in self._step.fetches)
        return replace(self._step, nodes=self._nodes, fetches=fetches)

    def _is_computed_wide(self, node: StepNode) -> bool:
        dtypes = [*(self._spec(ref).dtype for ref in node.inputs), *(spec.dtype for spec in node.outputs)]
        bodies = any(isinstance(value, Plan) for value in node.attrs.values())  # in which casts stand already
        if node.op.effect or bodies or not any(map(is_half, dtypes)):
            return False
        return not self._supports(node.op.name, dtypes, self.placement[node.id].kind or "")

    def _spec(self, ref: Ref) -> Spec:
        return self._step.feed_specs[ref[1]] if ref[0] == FED else self._nodes[ref[0]].outputs[ref[1]]

    def _widen(self, node: StepNode) -> None:
        inputs = tuple(self._wide(node, n, ref) for n, ref in enumerate(node.inputs))
        wide = replace(node, inputs=inputs, attrs=wide_attributes(node.op, node.attrs))
        made = zip(infer(wide, [self._spec(ref) for ref in inputs]), node.outputs, strict=True)
        wide = replace(wide, outputs=tuple(Spec(found.dtype, spec.dims, spec.value) for found, spec in made))
        self._nodes[node.id] = wide
        for n, spec in enumerate(node.outputs):
            if spec.dtype != wide.outputs[n].dtype:
                self._narrowed[node.id, n] = self._cast(node, f"rounded_{n}", (node.id, n), spec.dtype)

    def _wide(self, node: StepNode, number: int, ref: Ref) -> Ref:
        """What ``node`` takes for its input of a number: that in float32, if it is of 16 bits."""
        if not is_half(self._spec(ref).dtype):
            return ref
        source = self._nodes.get(ref[0])
        if source is None or source.op.name != "constant" or self._spec(ref).size > FEW:
            return self._cast(node, f"wide_{number}", ref, WIDE)
        value = np.asarray(source.attrs["value"]).astype(WIDE)
        value.setflags(write=False)
        return self._add(replace(source, attrs={"value": value}, outputs=(Spec(WIDE, value.shape),)), node)

    def _cast(self, beside: StepNode, what: str, ref: Ref, dtype: np.dtype[Any]) -> Ref:
        attrs: dict[str, Attr] = {"dtype": dtype.name}
        outputs = (Spec(dtype, self._spec(ref).dims),)
        name = f"{beside.name}/{what}"
        return self._add(StepNode(0, lookup("astype"), name, (ref,), outputs, attrs, (), beside.site), beside)

    def _add(self, node: StepNode, beside: StepNode) -> Ref:
        """``node`` as a new one, where ``beside`` runs."""
        number, self._free = self._free, self._free + 1
        self._nodes[number] = replace(node, id=number)
        self.placement[number] = self.placement[beside.id]
        return number, 0
