"""Which integers inference finds by itself once shapes are known: shapes, and arithmetic of them.

Law: pure. Nobody need compute such a value, so it decides sizes wherever it is said to be made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.spec import Spec, spec_of, value_known
from flowrt.base.valueclass import valueclass
from flowrt.passes.step import FED, StepNode

if TYPE_CHECKING:
    from flowrt.graph import Node
    from flowrt.op import Op
    from flowrt.passes.step import Ref, StepGraph

Value = TypeVar("Value", bound=Hashable)

ON_HOST = frozenset({"shape_of"})
"""Ops that look at no entry, whose results lie in the host's memory wherever they are computed."""


@valueclass
class HowMade:
    """How a value is made: the output of that ``number`` of an op on ``inputs`` of these ``specs``."""

    op: Op
    attrs: Mapping[str, Any]
    inputs: Sequence[Any]
    specs: Sequence[Spec]
    number: int


def find_size(value: Value, made: Callable[[Value], HowMade | None], found: dict[Value, Spec | None]) -> Spec | None:
    """What inference finds of a value, were all unknown sizes 2; None where that is not all of it.

    ``made`` says how a value is made, None of what somebody has to compute. ``found`` keeps answers, and has those of
    values that are made in no way.
    """
    wanted = [value]
    while wanted:
        how = None if wanted[-1] in found else made(wanted[-1])
        before = [] if how is None or how.op.name in ON_HOST else [each for each in how.inputs if each not in found]
        wanted.extend(before)
        if not before:
            found.setdefault(wanted.pop(), None if how is None else _infer(how, found))
    return found[value]


def _infer(made: HowMade, sizes: Mapping[Any, Spec | None]) -> Spec | None:
    if made.op.name == "constant":
        return spec_of(np.asarray(made.attrs["value"]))
    inputs: list[Spec] = []
    for source, spec in zip(made.inputs, made.specs, strict=True):
        known = _as_if_known(spec) if made.op.name in ON_HOST else sizes[source]
        if known is None:
            return None
        inputs.append(known)
    try:
        found = made.op.infer(inputs, made.attrs)[made.number]
    except SpecError:
        return None
    return found if value_known(found.value) else None


def _as_if_known(spec: Spec) -> Spec | None:
    """``spec`` with 2 for every size that a step finds out; None where their number is not known."""
    return None if spec.dims is None else Spec(spec.dtype, tuple(2 if dim is None else dim for dim in spec.dims))


class StepSizes:
    """What is known of sizes in a step, wherever they are computed."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._found: dict[Ref, Spec | None] = {}

    def fed_to(self, node: StepNode | Node, number: int) -> Spec | None:
        """What is known of the input of that number, as far as it comes from shapes or is fed: see `find_size`."""
        if not isinstance(node, StepNode):  # of the graph: its step is another
            return None
        ref = node.inputs[number]
        return _as_if_fed(self._step.spec(ref)) if ref[0] == FED else find_size(ref, self._made, self._found)

    def _made(self, ref: Ref) -> HowMade | None:
        """How a constant is made, or an integer."""
        node, spec = self._step.nodes.get(ref[0]), self._step.spec
        if node is None or node.op.stateful or (node.op.name != "constant" and spec(ref).dtype.kind not in "iu"):
            return None
        return HowMade(node.op, node.attrs, node.inputs, [spec(source) for source in node.inputs], ref[1])


def _as_if_fed(spec: Spec) -> Spec | None:
    """Sizes that are fed, were each of them 2; None where they are none, or nobody knows how many."""
    if spec.dtype.kind not in "iu" or not spec.known or spec.rank > 1:
        return None
    return spec_of(np.full(spec.concrete, 2, spec.dtype))
