"""Groups that read again what they reduced: which nodes belong to one whose rows are computed as a whole.

Law: pure. Entries take entries and what is kept; kept takes kept, bare takes bare; see `RowSpace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.traits import Arranged, RowForm, RowSpace, last_axes

if TYPE_CHECKING:
    from collections.abc import Collection

    from flowrt.passes.step import StepGraph, StepNode

LINKS = (Arranged.RESHAPED, Arranged.REPEATED)
"""Ops that compute nothing: members where they take what is one for each row."""
TAKES = {
    RowForm.ENTRY: (RowForm.ENTRY, RowForm.KEPT),
    RowForm.KEPT: (RowForm.KEPT,),
    RowForm.BARE: (RowForm.BARE,),
}


def form_of(rows: RowSpace, step: StepGraph, node: StepNode) -> RowForm | None:
    """What ``node`` is in such a group; None where it is none of its members."""
    if node.op.traits.reduction is not None and step.spec(node.inputs[0]).dims == rows.dims:
        return rows.form_reduced(reduced_axes(step, node), bool(node.attrs["keepdims"]))
    return rows.form_of(node.outputs[0].dims)


def may_take(rows: RowSpace, step: StepGraph, node: StepNode, members: Collection[int]) -> bool:
    """Whether ``node`` may take what it does of ``members``."""
    found = form_of(rows, step, node)
    if found is None:
        return False
    taken = [form_of(rows, step, step.nodes[i]) for i, _ in node.inputs if i in members]
    if node.op.traits.reduction is not None:
        return all(form is RowForm.ENTRY for form in taken)
    if node.op.traits.view in LINKS:
        return len(taken) == 1 and rows.links(node.op.name, node.attrs, found, taken[0])
    return all(form in TAKES[found] for form in taken)


def reduced_axes(step: StepGraph, node: StepNode) -> int:
    """How many of the last axes a reduction is over, where it makes one number of each row; else 0."""
    spec = step.spec(node.inputs[0])
    if node.op.traits.reduction is None or spec.dims is None or spec.dtype.kind not in "fiu":
        return 0
    axes = last_axes(node.op.name, len(spec.dims), node.attrs["axis"])
    row = spec.dims[len(spec.dims) - axes :] if axes < len(spec.dims) else ()
    return axes if any(n != 1 for n in row) else 0


def is_link(node: StepNode) -> bool:
    """Whether a node may repeat what is one for each row, or put it in another shape, as kernels know how."""
    ours = node.op.__module__.startswith("flowrt.")
    return ours and node.op.traits.view in LINKS and len(node.outputs) == 1 and node.outputs[0].dims is not None


def common_rows(step: StepGraph, reductions: Collection[StepNode], groups: Collection[RowSpace]) -> RowSpace | None:
    """What ``groups`` come to together, where some of their ``reductions`` are read; None where nothing is read by
    rows."""
    along = {rows.along for rows in groups if rows.along} | {reduced_axes(step, node) for node in reductions}
    shapes = {rows.dims for rows in groups if rows.along} | {step.spec(node.inputs[0]).dims for node in reductions}
    if len(along) != 1 or len(shapes) != 1 or 0 in along:
        return None
    (shape,), (count,) = shapes, along
    found = RowSpace(shape or (), count)
    return found if all(found.form_of(rows.dims) for rows in groups) else None
