"""What is stated of ops: what a value is beside rows that are reduced, from shapes alone."""

from __future__ import annotations

from typing import Any

import pytest

import flowrt.ops  # noqa: F401  (states which ops reduce, and which are views)
from flowrt.base.traits import RowForm, RowSpace, last_axes

SPACE = RowSpace((None, 3, 4), 1)
ENTRY, KEPT, BARE, TOTAL = RowForm.ENTRY, RowForm.KEPT, RowForm.BARE, RowForm.TOTAL


@pytest.mark.parametrize(
    ("dims", "form"),
    [((None, 3, 4), ENTRY), ((None, 3, 1), KEPT), ((None, 3), BARE), ((None, 1, 4), None), ((3,), None), (None, None)],
)
def test_a_shape_tells_what_a_value_is(dims: Any, form: RowForm | None) -> None:
    assert SPACE.form_of(dims) is form


def test_where_nothing_reduced_is_read_all_are_entries() -> None:
    assert RowSpace((2, 3)).form_of((2, 3)) is ENTRY
    assert RowSpace((2, 3)).form_of((2, 1)) is None


@pytest.mark.parametrize(
    ("op", "axis", "count"),
    [("sum", -1, 1), ("max", (1, 2), 2), ("mean", (2, 1), 2), ("min", None, 3), ("sum", 1, 0), ("sum", (), 0)],
)
def test_only_the_last_axes_are_a_row(op: str, axis: Any, count: int) -> None:
    assert last_axes(op, 3, axis) == count


@pytest.mark.parametrize("op", ["prod", "any", "argmax", "exp", "no such op"])
def test_only_what_may_be_read_again_makes_rows(op: str) -> None:
    assert last_axes(op, 3, -1) == 0


def test_a_reduction_over_other_axes_is_a_total() -> None:
    assert [SPACE.form_reduced(1, kept) for kept in (True, False)] == [KEPT, BARE]
    assert [SPACE.form_reduced(axes, True) for axes in (0, 2)] == [TOTAL, TOTAL]


@pytest.mark.parametrize(
    ("op", "attrs", "found", "taken", "links"),
    [
        ("squeeze", {"axis": 2}, BARE, KEPT, True),
        ("reshape", {}, KEPT, BARE, True),
        ("reshape", {}, ENTRY, KEPT, False),
        ("identity", {}, KEPT, ENTRY, False),
        ("broadcast_to", {}, ENTRY, KEPT, True),
        ("broadcast_to", {}, ENTRY, BARE, False),
        ("spread", {"axis": -1, "keepdims": True}, ENTRY, KEPT, True),
        ("spread", {"axis": -1, "keepdims": False}, ENTRY, BARE, True),
        ("spread", {"axis": -1, "keepdims": False}, ENTRY, KEPT, False),
        ("spread", {"axis": (1, 2), "keepdims": True}, ENTRY, KEPT, False),
        ("spread", {"axis": -1, "keepdims": True}, ENTRY, TOTAL, False),
    ],
)
def test_views_link_what_is_one_for_each_row(
    op: str, attrs: dict[str, Any], found: RowForm, taken: RowForm, links: bool
) -> None:
    assert SPACE.links(op, attrs, found, taken) is links
