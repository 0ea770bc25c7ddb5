"""What compiled code calls is lowered no more often than its types tell apart."""

from __future__ import annotations

from numba import types

from flowrt.kernels.emit.lowering import Lowered


def test_a_helper_is_lowered_once_whatever_integers_its_callers_know() -> None:
    def place(row: int, start: int) -> int:
        return row * 3 + start

    helper = Lowered(place, inlined=True)

    def entry(rows: int) -> int:
        at = 0
        for row in range(rows):
            at = helper(at, 1) + helper(row, start=0)
        return at

    Lowered(entry).compile((types.int64,))
    assert list(helper.overloads) == [(types.int64, types.int64)]
