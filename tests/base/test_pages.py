"""Large arrays that graphs keep, and tables that share their pages with them."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from session_world import host_of

import flowrt as fr
from flowrt.base import pages
from flowrt.session.initial import tables

ROWS, COLUMNS = 3000, 5  # not whole pages


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("there are no files in memory here")
    monkeypatch.setattr(pages, "LARGE", 1 << 12)


def numbers(dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return (np.arange(ROWS * COLUMNS) % 97).reshape(ROWS, COLUMNS).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint64", ">f8"])
def test_what_is_begun_is_its_own(dtype: str) -> None:
    given = numbers(dtype)
    held = pages.held(given)
    assert held is not None
    given[:] = 1
    one, other = (pages.begun(held).reshape(held.shape) for _ in range(2))
    one[7] = 0
    np.testing.assert_array_equal(held, numbers(dtype))
    np.testing.assert_array_equal(other, numbers(dtype))
    np.testing.assert_array_equal(one[8:], numbers(dtype)[8:])
    assert not one[7].any()
    with pytest.raises(ValueError, match="read-only"):
        held[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        held.setflags(write=True)
    del held
    gc.collect()
    np.testing.assert_array_equal(other, numbers(dtype))


def test_small_and_other_arrays_and_parts_are_not_held() -> None:
    assert pages.held(np.zeros(10)) is None
    assert pages.held(np.array([None] * 5000)) is None
    held = pages.held(numbers())
    assert held is not None
    assert pages.is_held(held)
    assert not any(map(pages.is_held, (held[1:], held.T, numbers(), np.array(held))))


def test_no_more_are_held_at_once_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(pages, "MOST", len(pages._alive) + 2)
    kept = [pages.held(numbers()) for _ in range(4)]
    assert [array is not None for array in kept] == [True, True, False, False]
    del kept[0]
    gc.collect()
    assert pages.held(numbers()) is not None


def test_files_are_closed_with_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held = [pages.held(numbers()) for _ in range(5)]
    begun = [pages.begun(array) for array in held if array is not None]
    assert len(os.listdir("/proc/self/fd")) > before
    del held, begun
    gc.collect()
    monkeypatch.setattr(os, "write", lambda file, what: os.close(-1))  # no room
    assert pages.held(numbers()) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_tables_are_what_steps_see_and_move_by_rows() -> None:
    with fr.Graph() as graph:
        ids = fr.constant([3, 3, 11])
        table, whole, put, columns, copied = (
            fr.Variable(numbers(), name=name) for name in ("table", "whole", "put", "columns", "copied")
        )
        small = fr.Variable(np.ones((2, 2), np.float32), name="small")
        drawn = fr.Variable(fr.random.normal((ROWS, COLUMNS)), name="drawn")
        fr.Variable(copied * 1.0, name="copy")
        used = [fr.nn.embedding_lookup(v, ids) for v in (table, whole, put, copied, drawn)]
        loss = fr.sum(fr.add_n(used)) + fr.sum(fr.take(columns, ids % 5, axis=1)) + fr.sum(small)
        fr.sum(whole)
        put.assign(fr.zeros((ROWS, COLUMNS)))
        fr.optim.Adam(0.1).minimize(loss, [table, drawn])
    missing = {key: r for key, r in graph.resources.items() if r.kind == "variable"}
    assert [name for _, name in tables(graph, missing)] == ["table"]


def test_sessions_start_from_what_was_given_and_count_what_they_may_write() -> None:
    given = numbers()
    with fr.Graph() as graph:
        table = fr.Variable(given, name="table")
        ids = fr.placeholder("int64", (None,), name="ids")
        train = fr.optim.SGD(1.0).minimize(fr.sum(fr.nn.embedding_lookup(table, ids)))
    given[:] = -1
    wanted = numbers()
    wanted[[5, 2999]] -= 1
    for _ in range(2):
        with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
            memory = host_of(session._session).memory
            assert memory.held == given.nbytes
            np.testing.assert_array_equal(session.run(table), numbers())
            session.run(train, {ids: np.array([5, 2999])})
            np.testing.assert_array_equal(session.run(table), wanted)
            session.reset()
            memory.reclaim()
            gc.collect()
            assert memory.held == 0
            with pytest.raises(fr.GraphError, match="has no value"):
                session.run(table)
    again = fr.Graph.from_bytes(graph.to_bytes())
    with fr.BlockingSession(again) as session:
        np.testing.assert_array_equal(session.run(again.variables[0]), numbers())
    with pytest.raises(fr.ResourceError), fr.BlockingSession(graph, options=fr.Options(memory_limit=1000)):
        pass


def test_what_is_drawn_first_does_not_depend_on_what_shares_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for large in (1 << 12, 1 << 60):
        monkeypatch.setattr(pages, "LARGE", large)
        with fr.Graph() as graph:
            table = fr.Variable(numbers(), name="table")
            rows = fr.nn.embedding_lookup(table, fr.constant([1, 2]))
            near = fr.Variable(rows + fr.random.normal((2, COLUMNS)), name="near")
        assert len(tables(graph, graph.resources)) == (large == 1 << 12)
        with fr.BlockingSession(graph, options=fr.Options(seed=5)) as session:
            drawn.append(session.run(near))
    np.testing.assert_array_equal(*drawn)


def test_tables_for_which_there_are_no_files_left_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, made = pages.begun, []

    def begun(array: Any) -> Any:
        if made:
            raise OSError("Too many open files")
        made.append(array)
        return begin(array)

    monkeypatch.setattr(pages, "begun", begun)
    with fr.Graph() as graph:
        held = [fr.Variable(numbers() + n, name=f"t{n}") for n in range(3)]
    with fr.BlockingSession(graph) as session:
        assert len(made) == 1
        for n, found in enumerate(session.run(held)):
            np.testing.assert_array_equal(found, numbers() + n)
