"""How CUDA kernels find entries of operands: the same numbers as the views tell, in one division or none."""

from __future__ import annotations

import numpy as np
import pytest

from flowrt.kernels.cuda.walk import NARROW, OTHER, Walk, reciprocal, walk_over
from flowrt.kernels.language.table import View

SHAPE = (3, 4, 5)
DENSE = View.dense(SHAPE)


def places_of(view: View) -> list[int]:
    """Where its entries lie, in order."""
    steps = [n * stride for n, stride in zip(np.indices(view.shape), view.strides, strict=True)]
    return (sum(steps) + view.offset).reshape(-1).tolist() if steps else [view.offset]


def walked(walk: Walk, operand: int, count: int) -> list[int]:
    """Where a kernel finds them, as its text does."""
    told = dict(zip(walk.ways.names(), walk.words, strict=True))
    strides, found = walk.ways.strides[operand], []
    for number in range(count):
        if strides is None:
            found.append(walk.starts[operand] + number)
            continue
        left, place = number, told.get(f"from{operand}", 0)
        for axis, stride in enumerate(strides):
            rest = 0
            if axis < walk.ways.axes - 1:
                size = told[f"size{axis}"]
                rest = left * told[f"factor{axis}"] >> told[f"shift{axis}"] if walk.ways.narrow else left // size
                left, rest = left - rest * size, rest
            place += left * (told[f"by{operand}_{axis}"] if stride == OTHER else stride)
            left = rest
        found.append(walk.starts[operand] + place)
    return found


@pytest.mark.parametrize(
    "view",
    [
        DENSE,
        View.dense(()).broadcast_to(SHAPE),
        View.dense((5,)).broadcast_to(SHAPE),
        View.dense((4, 1)).broadcast_to(SHAPE),
        View.dense((3, 1, 5)).broadcast_to(SHAPE),
        View.dense((5, 4, 3)).permute((2, 1, 0)),
        View.dense((6, 9, 5)).window((1, 2, 0), SHAPE, (2, 2, 1)),
        View.dense(SHAPE).window((2, 0, 4), SHAPE, (-1, 1, -1)),
        View(SHAPE, DENSE.strides, 7),
    ],
    ids=lambda view: f"{view.strides}+{view.offset}",
)
def test_entries_are_found_where_they_lie_beside_dense_and_other_ones(view: View) -> None:
    for others in ((DENSE,), (DENSE, View.dense((4, 1)).broadcast_to(SHAPE))):
        walk = walk_over([view, *others])
        assert walked(walk, 0, DENSE.size) == places_of(view)
        assert walked(walk, len(others), DENSE.size) == places_of(others[-1])


def test_what_is_in_order_or_the_same_everywhere_needs_no_odometer() -> None:
    walk = walk_over([DENSE, View.dense(()).broadcast_to(SHAPE), View(SHAPE, DENSE.strides, 7)])
    assert (walk.ways.strides, walk.ways.axes, walk.words) == ((None, (), None), 0, ())
    assert walk.starts == (0, 0, 7)


def test_a_row_that_repeats_takes_one_quotient_whatever_its_length() -> None:
    walks = [walk_over([View.dense((n,)).broadcast_to((3, n)), View.dense((3, n))]) for n in (5, 64)]
    assert walks[0].ways == walks[1].ways
    assert list(walks[0].ways.names()) == ["size0", "factor0", "shift0"]


def test_what_is_turned_around_or_large_is_told_in_64_bits() -> None:
    assert walk_over([DENSE, DENSE]).ways.narrow
    assert not walk_over([View.dense((5,)).window((4,), (5,), (-1,)), View.dense((5,))]).ways.narrow
    wide = View.dense((NARROW,))
    assert not walk_over([wide, wide]).ways.narrow
    assert walk_over([View.dense((NARROW - 1,))]).ways.narrow


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 64, 641, 1000003, 2**30, 2**30 + 1, NARROW - 1])
def test_quotients_below_2_to_the_31_are_exact(size: int) -> None:
    factor, shift = reciprocal(size)
    numbers = [n for k in (0, 1, 2, 3, (NARROW - 1) // size) for n in (k * size - 1, k * size, k * size + 1)]
    for number in (*numbers, NARROW - 1):
        if 0 <= number < NARROW:
            assert number * factor >> shift == number // size
    assert factor < 2**32
