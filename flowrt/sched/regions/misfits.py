"""Which entry a node of a plan refused, in words, with the names and the shapes that the program gave.

Law: nothing is looked for until something has failed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.plan import Plan
from flowrt.base.traits import is_alias
from flowrt.base.valueclass import valueclass
from flowrt.kernels.ops.misfits import chooses, has_so_many, indices_of, misfit
from flowrt.kernels.ops.slices import BEYOND
from flowrt.sched.regions.regions import READ, resource_of

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec
    from flowrt.kernels.composite.scalar_loop import LookedUp
    from flowrt.sched.regions.recorded import Launch

Array: TypeAlias = "np.ndarray[Any, Any]"


@valueclass
class PlanWithin:
    """A plan; if it is a loop's or branch's, also the ``node`` that it is of, and what that stands in."""

    plan: Plan
    node: PlanNode | None = None
    around: PlanWithin | None = None

    def first(self, value: int) -> int:
        """What a value was before its shape was changed."""
        makers = self._makers()
        while (maker := makers.get(value)) is not None and is_alias(maker.op):
            value = maker.inputs[0]
        return value

    def variable(self, value: int) -> str:
        """The name of the variable that a value is, all of it where that is a part; "" where it is something else."""
        maker = self._makers().get(self.first(value))
        if maker is None and self.node is not None and self.around is not None:
            outside = _captured(self.node, self.plan, self.first(value))
            return "" if outside is None else self.around.variable(outside)
        return "" if maker is None or maker.op != READ else resource_of(maker)[1].partition("/part_")[0]

    def holding(self, node: PlanNode) -> PlanWithin | None:
        """This, or what in it is a body, whose node that is."""
        if any(node is mine for mine in self.plan.nodes):
            return self
        inside = (
            PlanWithin(value, mine, self)
            for mine in self.plan.nodes
            for value in mine.attrs.values()
            if isinstance(value, Plan)
        )
        return next(filter(None, (body.holding(node) for body in inside)), None)

    def _makers(self) -> dict[int, PlanNode]:
        return dict(zip(self.plan.value_starts(), self.plan.nodes, strict=False))


def _captured(node: PlanNode, body: Plan, feed: int) -> int | None:
    """What a loop or branch is given as so many-th feed of its body, if that is the same in every iteration."""
    if "carried" not in node.attrs:
        return node.inputs[1 + feed]
    carried, scanned, counted = (int(node.attrs[name]) for name in ("carried", "scanned", "counted"))
    passed = 0 if body is node.attrs["body"] else scanned  # conditions see no row
    return None if feed + passed < carried + scanned else node.inputs[counted + passed + feed]


def misfit_of_look(look: LookedUp, index: int, size: int, around: PlanWithin) -> str:
    """What there is to say of an index that a compiled loop in ``around`` refused, whose table has ``size`` rows."""
    if index == BEYOND:
        return ""  # or more
    body = around.holding(look.node)
    table = "" if body is None else body.variable(look.node.inputs[0])
    return f": {index} at position {look.at} of {look.indices}, and {has_so_many(size, look.axis, table)}"


def misfit_of_node(node: PlanNode, operands: Sequence[Array], body: PlanWithin | None) -> str:
    """Which entry of the operands is why the node failed, as far as that is known; ``body`` is whose node it is."""
    if body is None or not chooses(node.op):
        return misfit(node.op, operands, node.attrs)
    indices = body.plan.value_specs()[body.first(node.inputs[indices_of(node.op)])].dims
    return misfit(node.op, operands, node.attrs, indices, body.variable(node.inputs[0]))


def misfit_of_launch(body: PlanWithin, launch: Launch, bases: Sequence[int]) -> str:
    """Which entry is why a launch failed whose operands lie at these ``bases``, as they did when it stopped."""
    node, specs, operands = body.plan.nodes[launch.node], body.plan.value_specs(), []
    if not chooses(node.op):
        return ""
    for value, place, nbytes in zip(node.inputs, launch.places, launch.sizes, strict=False):
        shape = _sizes(specs[value], nbytes)
        if shape is None or not bases[place.slot]:
            return ""
        memory: Any = (ctypes.c_char * nbytes).from_address(bases[place.slot] + place.offset) if nbytes else b""
        operands.append(np.frombuffer(memory, specs[value].dtype).reshape(shape))
    return misfit_of_node(node, operands, body)


def _sizes(spec: Spec, nbytes: int) -> tuple[int, ...] | None:
    """The sizes of what has so many bytes; None where they do not tell."""
    if spec.dims is None or spec.dims.count(None) > 1:
        return None
    known = math.prod(size for size in spec.dims if size is not None)
    rest = nbytes // spec.dtype.itemsize // known if known else 0
    return tuple(rest if size is None else size for size in spec.dims)
