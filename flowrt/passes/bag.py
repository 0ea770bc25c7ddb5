"""Make one node of rows taken from a table and their sum or mean, so that no row is copied.

Law: a pass on a placed step. The two become one where no one else reads the rows, and what is summed over are the last
axes of the indices. The node made bears the id of the sum, so that it keeps its name and its place, and waits for all
that both waited for; who waited for the rows waits for it. Where nodes would wait for each other all stays as it was.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError
from flowrt.base.spec import is_float, normal_axes
from flowrt.op import lookup
from flowrt.passes.joining import joined, standing_for, users_of
from flowrt.passes.step import FED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowrt.base.device import Device
    from flowrt.passes.place import Supports
    from flowrt.passes.step import StepGraph, StepNode


def bag(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> StepGraph:
    """``step`` with sums and means of rows as single nodes, where the device has a kernel for those."""
    taken = {node.id for node in step.nodes.values() if node.op.name == "take"}
    if not taken:
        return step
    users = users_of(step, taken - {*step.targets})
    alone = {rows: next(iter(those)) for rows, those in users.items() if len(those) == 1 and FED not in those}
    pairs = {rows: total for rows, total in alone.items() if _fits(step, rows, total, placement, supports)}
    try:
        return _joined(step, pairs) if pairs else step
    except GraphError:
        for rows, total in pairs.items():
            with suppress(GraphError):
                step = _joined(step, {rows: total})
        return step


def _fits(step: StepGraph, rows: int, total: int, placement: Mapping[int, Device], supports: Supports) -> bool:
    taken, device = step.nodes[rows], placement[rows]
    if not bag_axes(step, taken, step.nodes[total]) or placement[total] != device:
        return False
    return supports("bag", step.dtypes(taken), device.kind or "")


def _joined(step: StepGraph, pairs: Mapping[int, int]) -> StepGraph:
    """``step`` with ``pairs`` of rows and their sum as single nodes."""
    made = {total: _bag(step, step.nodes[rows], step.nodes[total]) for rows, total in pairs.items()}
    return joined(step, made, pairs)


def _bag(step: StepGraph, rows: StepNode, total: StepNode) -> StepNode:
    reduction = total.op.traits.reduction
    mean = reduction is not None and reduction.mean
    return standing_for(
        total,
        (rows, total),
        op=lookup("bag"),
        inputs=rows.inputs,
        attrs={"axes": bag_axes(step, rows, total), "mean": mean, "absent": rows.attrs["absent"]},
    )


def bag_axes(step: StepGraph, rows: StepNode, total: StepNode) -> int:
    """Over how many of the indices' last axes the rows are summed; 0 where it is another sum."""
    reduction = total.op.traits.reduction
    if reduction is None or not reduction.adds or total.attrs["keepdims"]:
        return 0
    table, indices = (step.spec(ref) for ref in rows.inputs)
    if table.dims is None or indices.dims is None or table.rank < 2 or not is_float(table.dtype):
        return 0
    if rows.attrs["axis"] not in (0, -table.rank):
        return 0
    axes = sorted(normal_axes(total.attrs["axis"], rows.outputs[0].rank))
    last = list(range(indices.rank - len(axes), indices.rank))
    return len(axes) if axes == last else 0
