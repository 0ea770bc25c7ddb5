"""Have a step that one task is fed and fetched from do there what it does not need another task for.

Law: pure, a pass on a placed step that answers another placement. What works on a variable, queue or device of another
task stays where it is, and so does what follows from it; all else that was put beside such a thing, as rows of a fed
table or indices on their way to one, runs at home.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.passes.gather import runs_on
from flowrt.passes.step import FED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowrt.base.device import Device
    from flowrt.passes.place import Supports
    from flowrt.passes.step import StepGraph


def settle(
    step: StepGraph, placement: Mapping[int, Device], homes: Sequence[Device], supports: Supports
) -> dict[int, Device]:
    """``placement`` with all on one of ``homes``, one task's devices, that has its inputs there and can run there."""
    task, settled = homes[0].host, dict(placement)
    for node in step.nodes.values():  # inputs come before their consumers
        at_home = all(settled[source].host == task for source in node.before)
        if placement[node.id].host == task or node.resources or not at_home:
            continue
        able = [] if node.op.effect else [device for device in homes if runs_on(step, node, device, supports)]
        near = [settled[source] for source, _ in node.inputs if source != FED]
        settled[node.id] = next((device for device in near if device in able), able[0] if able else placement[node.id])
    return settled
