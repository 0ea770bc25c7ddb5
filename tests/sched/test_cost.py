"""The guess of what a launch takes: bytes that it touches, and arithmetic beyond that."""

from __future__ import annotations

import pytest

from flowrt.base.spec import Spec
from flowrt.sched.regions.cost import BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_STEP, Cost, predict

TABLE, IDS, ROWS = Spec("float32", (1000, 8)), Spec("int64", (5,)), Spec("float32", (5, 8))


@pytest.mark.parametrize(
    ("op", "specs", "nbytes"),
    [
        ("add", (ROWS, ROWS, ROWS), 3 * 160),
        ("take", (TABLE, IDS, ROWS), 40 + 2 * 160),
        ("bag", (TABLE, IDS, Spec("float32", (8,))), 40 + 32 + 5 * 32),
        ("bag", (Spec("float32", (1, 8)), IDS, Spec("float32", (8,))), 40 + 32 + 5 * 32),
        ("bag", (Spec("float32", (0, 8)), IDS, Spec("float32", (8,))), 40 + 32),
        ("add_rows", (ROWS, IDS, Spec("float32", (3,)), TABLE, TABLE), 160 + 40 + 12 + 2 * 2 * 160),
    ],
)
def test_what_is_touched_counts_and_of_tables_only_rows(op: str, specs: tuple[Spec, ...], nbytes: int) -> None:
    cost = Cost()
    cost.add(op, specs, 1)
    assert (cost.nbytes, cost.flops) == (nbytes, 0)


@pytest.mark.parametrize(
    ("op", "specs", "flops"),
    [
        ("matmul", (Spec("float32", (2, 3)), Spec("float32", (3, 5)), Spec("float32", (2, 5))), 2 * 2 * 3 * 5),
        ("conv2d", (Spec("float32", (4,)), Spec("float32", (4,)), Spec("float32", (4,))), 3 * 2 * 8),
        ("with_epilogue", (Spec("float32", (4, 1)), Spec("float32", (1, 4)), Spec("float32", (4, 4))), 2 * 16),
        ("matmul", (Spec("float32", (4, 1)), Spec("float32", (1, 4)), IDS, Spec("float32", (4, 4))), 2 * 16),
        (
            "lstm_steps",
            (Spec("float32", (7, 2, 3)), Spec("float32", (2, 4)), Spec("float32", (7, 2, 24))),
            2 * 7 * 2 * 16 * (3 + 4),
        ),
        ("lstm_steps", (Spec("float32", (0, 2, 3)), Spec("float32", (2, 4)), Spec("float32", (0, 2, 24))), 0),
        ("lstm_steps_grad", (ROWS, IDS, IDS, Spec("float32", (16, 4))), 2 * 40 * 4),
        ("exp", (ROWS, ROWS), 0),
    ],
)
def test_arithmetic_counts_where_it_is_more_than_touching(op: str, specs: tuple[Spec, ...], flops: float) -> None:
    cost = Cost()
    cost.add(op, specs, 1)
    assert cost.flops == pytest.approx(flops)


def test_the_seconds_are_those_of_moving_computing_and_launching() -> None:
    specs = Spec("float32", (20, 30)), Spec("float32", (30, 50)), Spec("float32", (20, 50))
    cost = Cost()
    cost.add("matmul", specs, 2)
    cost.add("add", (ROWS, ROWS, ROWS), 3)
    moved, computed = 4 * (600 + 1500 + 1000) + 480, 2 * 20 * 30 * 50
    wanted = moved / BYTES_PER_SECOND + computed / FLOPS_PER_SECOND + 5 * SECONDS_PER_STEP
    assert cost.seconds == pytest.approx(wanted)
    assert predict("add", (ROWS, ROWS, ROWS)) == pytest.approx(480 / BYTES_PER_SECOND + SECONDS_PER_STEP)
