"""Shapes beside one another, where parts of them are not known."""

from __future__ import annotations

from typing import Any

import pytest

from flowrt.base.spec import agree


@pytest.mark.parametrize(
    ("first", "second", "do"),
    [
        (None, (1, 2), True),
        ((), (), True),
        ((1, None), [1, 2], True),
        ((None, 3), (2, None), True),
        ((1, 2), (2, 1), False),
        ((None, 3), (2, 4), False),
        ((), (None,), False),
    ],
)
def test_shapes_agree_that_differ_nowhere_both_are_known(first: Any, second: Any, do: bool) -> None:
    assert agree(first, second) is do is agree(second, first)
