"""Compile a plan's kernels before anybody waits for them.

A kernel's variant depends on dtypes and ranks, not on sizes, so a plan with open sizes says enough. Compiled kernels
are on disk: whoever warms them for a cluster spares its nodes the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flowrt.base.device import is_apart
from flowrt.base.errors import FlowrtError
from flowrt.base.plan import Plan
from flowrt.base.spec import Spec
from flowrt.base.traits import is_alias, writes_rows
from flowrt.kernels.language.table import KERNELS
from flowrt.kernels.launch import Prepared, apply_kernel
from flowrt.kernels.store.compiling import batch
from flowrt.kernels.store.locking import while_wanted
from flowrt.kernels.store.parts import LOOP_PARTS, NESTED_PARTS
from flowrt.op import lookup
from flowrt.sched.loops.structured import PURE_STRUCTURED
from flowrt.sched.regions.regions import variable_specs

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode

ANY_SIZE = 2


def warm(plans: Sequence[Plan], wanted: Callable[[], bool] = lambda: True) -> None:
    """Compile, or find compiled, what the plans will launch. What cannot be told before a step is left to the step.

    Raises `StepCancelled` between two kernels once it is not ``wanted`` any more.
    """

    def ask() -> None:
        LOOP_PARTS["alone"].address()
        for plan in plans:
            _warm(plan)

    with while_wanted(wanted), batch(ask):
        ask()


def _warm(plan: Plan) -> None:
    specs = plan.value_specs()
    for node in plan.nodes:
        bodies = [value for value in node.attrs.values() if isinstance(value, Plan)]
        for body in bodies:
            _warm(body)
        if node.op in PURE_STRUCTURED:
            NESTED_PARTS[node.op].address()
        if (node.op, "cpu") in KERNELS and not is_alias(node.op) and not is_apart(node.device):
            _warm_node(node, [_sized(specs[value]) for value in node.inputs])


def _warm_node(node: PlanNode, inputs: list[Spec]) -> None:
    try:
        outputs = lookup(node.op).infer(inputs, node.attrs)
        if writes_rows(node.op):  # whose kernels write the variables
            outputs = variable_specs(node)
        application = apply_kernel(node.op, inputs, outputs, node.attrs)
    except (FlowrtError, ValueError):  # these sizes do not fit, or are not enough
        return
    Prepared(application, len(inputs) + len(outputs))


def _sized(spec: Spec) -> Spec:
    """``spec`` with a size for every open dimension."""
    if spec.dims is None:
        return spec
    value = tuple(ANY_SIZE if n is None else n for n in spec.value) if isinstance(spec.value, tuple) else spec.value
    return Spec(spec.dtype, tuple(ANY_SIZE if n is None else n for n in spec.dims), value)
