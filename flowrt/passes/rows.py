"""Groups that read again what they folded: which nodes belong to one whose rows are computed as a whole.

Law: pure. A group's elements have one shape, of whose axes the last ``along`` are a row. A member is an entry for each
element, or one for each row, with axes of size 1 in the row's place (kept) or without (bare); or it is folded
otherwise, and then no member takes it. Entries take entries and what is kept; kept takes kept, bare takes bare.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import TYPE_CHECKING

from flowrt.base.spec import normal_axes
from flowrt.base.traits import Arranged
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.spec import Shape
    from flowrt.passes.step import Step, StepNode

LINKS = (Arranged.RESHAPED, Arranged.REPEATED)
"""Ops that compute nothing: members where they take what is one for each row."""


class Form(Enum):
    """What a member is beside a row."""

    ENTRY = "entry"
    KEPT = "kept"
    BARE = "bare"
    TOTAL = "total"


TAKES = {Form.ENTRY: (Form.ENTRY, Form.KEPT), Form.KEPT: (Form.KEPT,), Form.BARE: (Form.BARE,)}


@valueclass
class Rows:
    """The shape of a group's elements, and how many of its last axes are a row: 0 while nothing folded is read."""

    dims: Shape
    along: int = 0

    @property
    def bare(self) -> Shape:
        return self.dims[: len(self.dims) - self.along]

    @property
    def kept(self) -> Shape:
        return (*self.bare, *[1] * self.along)

    def form_of(self, dims: Shape | None) -> Form | None:
        """What a member of that shape is, unless it is folded."""
        if dims == self.dims:
            return Form.ENTRY
        return {self.kept: Form.KEPT, self.bare: Form.BARE}.get(dims) if self.along and dims is not None else None

    def form(self, step: Step, node: StepNode) -> Form | None:
        """What ``node`` is in such a group; None where it is none of its members."""
        if node.op.traits.reduction is not None and step.spec(node.inputs[0]).dims == self.dims:
            if folded_axes(step, node) != self.along or not self.along:
                return Form.TOTAL
            return Form.KEPT if node.attrs["keepdims"] else Form.BARE
        return self.form_of(node.outputs[0].dims)

    def takes(self, step: Step, node: StepNode, members: Collection[int]) -> bool:
        """Whether ``node`` may take what it does of ``members``."""
        found = self.form(step, node)
        if found is None:
            return False
        taken = [self.form(step, step.nodes[i]) for i, _ in node.inputs if i in members]
        if node.op.traits.reduction is not None:
            return all(form is Form.ENTRY for form in taken)
        if node.op.traits.view in LINKS:
            return self._links(node, found, taken)
        return all(form in TAKES[found] for form in taken)

    def _links(self, node: StepNode, found: Form, taken: list[Form | None]) -> bool:
        """Whether what is one for each row, alone, is repeated along it or put in another shape."""
        if len(taken) != 1 or taken[0] not in (Form.KEPT, Form.BARE):
            return False
        if node.op.name == "spread":
            axes = normal_axes(node.attrs["axis"], len(self.dims))
            whole = sorted(axes) == list(range(len(self.bare), len(self.dims)))
            return found is Form.ENTRY and whole and taken[0] is (Form.KEPT if node.attrs["keepdims"] else Form.BARE)
        if node.op.name == "broadcast_to":
            return taken[0] is Form.KEPT and found in (Form.ENTRY, Form.KEPT)
        return found in (Form.KEPT, Form.BARE)


def folded_axes(step: Step, node: StepNode) -> int:
    """How many of the last axes a fold is over, where it makes one number of each row; else 0."""
    spec, reduction = step.spec(node.inputs[0]), node.op.traits.reduction
    if reduction is None or not reduction.in_rows or spec.dims is None or spec.dtype.kind not in "fiu":
        return 0
    rank, axes = len(spec.dims), normal_axes(node.attrs["axis"], len(spec.dims))
    trailing = axes and len(axes) < rank and min(axes) == rank - len(axes)
    row = spec.dims[rank - len(axes) :]
    return len(axes) if trailing and any(n != 1 for n in row) else 0


def is_link(node: StepNode) -> bool:
    """Whether a node may repeat what is one for each row, or put it in another shape, as kernels know how."""
    ours = node.op.__module__.startswith("flowrt.")
    return ours and node.op.traits.view in LINKS and len(node.outputs) == 1 and node.outputs[0].dims is not None


def common_rows(step: Step, folds: Collection[StepNode], groups: Collection[Rows]) -> Rows | None:
    """What ``groups`` come to together, where some of their ``folds`` are read; None where nothing is read by rows."""
    along = {rows.along for rows in groups if rows.along} | {folded_axes(step, node) for node in folds}
    shapes = {rows.dims for rows in groups if rows.along} | {step.spec(node.inputs[0]).dims for node in folds}
    if len(along) != 1 or len(shapes) != 1 or 0 in along:
        return None
    (shape,), (count,) = shapes, along
    found = Rows(shape or (), count)
    return found if all(found.form_of(rows.dims) for rows in groups) else None
