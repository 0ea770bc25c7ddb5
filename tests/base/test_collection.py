"""The collector, held back and passed over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from flowrt.base.collection import free_each, passed_over


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_what_is_made_where_the_collector_is_passed_over_counts_as_old() -> None:
    with passed_over():
        assert not gc.isenabled()
        made = [[i] for i in range(100_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    old = set(map(id, gc.get_objects(generation=2)))
    assert all(id(each) in old for each in made)


def test_what_somebody_froze_stays_frozen() -> None:
    mine = [[i] for i in range(1000)]
    gc.freeze()
    with passed_over():
        made = [[i] for i in range(10)]
    seen = set(map(id, gc.get_objects()))
    assert not any(id(each) in seen for each in mine)
    assert all(id(each) in seen for each in made)
    gc.unfreeze()


def test_what_is_freed_one_by_one_is_freed() -> None:
    values = [{1}, {2}]
    gone = [weakref.ref(value) for value in values]
    free_each(values)
    assert [ref() for ref in gone] == [None, None]
    assert values == []
