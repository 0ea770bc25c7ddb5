"""Loops that are one kernel, as tests look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.kernels.composite.scalar_loop import ScalarLoopStep
from flowrt.sched.loops.scalar_loops import apply_scalar_loop, in_one_kernel

if TYPE_CHECKING:
    import flowrt as fr


def step_of(graph: fr.Graph) -> ScalarLoopStep:
    """The one launch that the graph's last loop comes to."""
    node = [n for n in graph.nodes if n.op.name == "loop"][-1]
    specs = [t.spec for t in node.inputs]
    assert isinstance(in_one_kernel(specs, node.attrs), float)
    made = apply_scalar_loop(specs, [t.spec for t in node.outputs], node.attrs)
    assert made is not None
    (step,) = made.steps
    assert isinstance(step, ScalarLoopStep)
    return step
