"""Which entry a node of a plan refused, in words, with the names and the shapes that the program gave.

Law: nothing is looked for until something has failed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.traits import is_alias
from flowrt.kernels.ops.misfits import chooses, indices_of, misfit
from flowrt.sched.regions.regions import READ, resource_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan, PlanNode
    from flowrt.base.spec import Spec
    from flowrt.sched.regions.recorded import Launch

Array: TypeAlias = "np.ndarray[Any, Any]"


def misfit_of_node(node: PlanNode, operands: Sequence[Array], plan: Plan | None) -> str:
    """Which entry of the operands is why the node failed, as far as that is known; ``plan`` is whose node it is."""
    if plan is None or not chooses(node.op):
        return misfit(node.op, operands, node.attrs)
    makers: dict[int, PlanNode] = dict(zip(plan.value_starts(), plan.nodes, strict=False))
    indices, table = (_first(makers, node.inputs[n]) for n in (indices_of(node.op), 0))
    return misfit(node.op, operands, node.attrs, plan.value_specs()[indices].dims, _variable(makers.get(table)))


def _first(makers: dict[int, PlanNode], value: int) -> int:
    """What a value was before its shape was changed."""
    while (maker := makers.get(value)) is not None and is_alias(maker.op):
        value = maker.inputs[0]
    return value


def _variable(read: PlanNode | None) -> str:
    """The name of the variable that a node reads, all of it where that is a part; "" where it does something else."""
    return "" if read is None or read.op != READ else resource_of(read)[1].partition("/part_")[0]


def misfit_of_launch(plan: Plan, launch: Launch, bases: Sequence[int]) -> str:
    """Which entry is why a launch failed whose operands lie at these ``bases``, as they did when it stopped."""
    node, specs, operands = plan.nodes[launch.node], plan.value_specs(), []
    if not chooses(node.op):
        return ""
    for value, place, nbytes in zip(node.inputs, launch.places, launch.sizes, strict=False):
        shape = _sizes(specs[value], nbytes)
        if shape is None:
            return ""
        memory: Any = (ctypes.c_char * nbytes).from_address(bases[place.slot] + place.offset) if nbytes else b""
        operands.append(np.frombuffer(memory, specs[value].dtype).reshape(shape))
    return misfit_of_node(node, operands, plan)


def _sizes(spec: Spec, nbytes: int) -> tuple[int, ...] | None:
    """The sizes of what has so many bytes; None where they do not tell."""
    if spec.dims is None or spec.dims.count(None) > 1:
        return None
    known = math.prod(size for size in spec.dims if size is not None)
    rest = nbytes // spec.dtype.itemsize // known if known else 0
    return tuple(rest if size is None else size for size in spec.dims)
