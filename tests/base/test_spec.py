"""Shapes beside one another, where parts of them are not known."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from flowrt.base.spec import Spec, agree


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


def test_a_spec_does_not_take_its_hash_to_another_process_where_texts_hash_otherwise() -> None:
    spec = Spec("float32", (None, 3), (1, 2))
    assert hash(spec) == spec._hash
    there = pickle.loads(pickle.dumps(spec))
    assert there._hash == 0
    assert (there, hash(there), there.value) == (spec, hash(spec), (1, 2))
