"""Which rows of a variable are whose: pure data."""

from __future__ import annotations

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.partitioning import Partition, row_bounds


@pytest.mark.parametrize(
    ("partition", "rows", "bounds"),
    [
        (1, 5, (0, 5)),
        (2, 5, (0, 2, 5)),
        (3, 3, (0, 1, 2, 3)),
        ((0, 1, 7), 7, (0, 1, 7)),
        ([0, 4], 4, (0, 4)),
        (np.int64(2), 5, (0, 2, 5)),
        (np.array([0, 1, 7]), 7, (0, 1, 7)),
        ((0, np.int32(1), 7), 7, (0, 1, 7)),
    ],
)
def test_rows_are_split_evenly_or_as_the_program_says(partition: object, rows: int, bounds: tuple[int, ...]) -> None:
    assert row_bounds(partition, rows) == bounds  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        (6, "5 rows cannot be split into 6 parts; ask for 1 to 5"),
        (0, "ask for 1 to 5"),
        (True, "number of parts"),
        (2.0, "number of parts"),
        (np.True_, "number of parts"),
        (np.float32(2), "number of parts"),
        ((0, 3), "integers from 0 to 5"),
        ((1, 5), "integers from 0 to 5"),
        ((5,), "integers from 0 to 5"),
        ((0, 3, 2, 5), "must rise"),
        ((0, 2, 2, 5), "must rise"),
        ((0, 2.5, 5), "integers from 0 to 5"),
    ],
)
def test_bounds_that_make_no_sense_say_the_fix(partition: object, says: str) -> None:
    with pytest.raises(fr.SpecError, match=says):
        row_bounds(partition, 5)  # type: ignore[arg-type]


def test_each_piece_is_a_shard_with_its_rows_and_slots_are_split_alike() -> None:
    table = Partition("w", fr.Spec("float32", (5, 2)), (0, 2, 5), ("w/part_0", "w/part_1"))
    assert list(table.pieces()) == [("w/part_0", 0, 2), ("w/part_1", 2, 5)]
    assert table.spec_of(2, 5) == fr.Spec("float32", (3, 2))
    slot = table.beside("momentum", np.dtype("float64"))
    assert slot.name == "w/momentum"
    assert slot.spec_of(2, 5) == fr.Spec("float64", (3, 2))
    assert list(slot.pieces()) == [("w/part_0/momentum", 0, 2), ("w/part_1/momentum", 2, 5)]


def test_a_scalar_is_held_whole_by_each_shard() -> None:
    steps = Partition("w/steps", fr.Spec("int64", ()), (), ("w/part_0/steps", "w/part_1/steps"))
    assert steps.is_mirrored
    assert list(steps.pieces()) == [("w/part_0/steps", 0, 1), ("w/part_1/steps", 0, 1)]
    assert steps.spec_of(0, 1) == steps.spec
