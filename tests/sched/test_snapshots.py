"""What is saved of a variable while others write it: bit for bit what it was, and only rows that are written copied."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flowrt.base.errors import CheckpointError, GraphError, ResourceError
from flowrt.base.spec import Spec
from flowrt.kernels.ops.slices import rows_of
from flowrt.sched.drivers.keeping import Fetch, Keep, Keeping
from flowrt.sched.drivers.tasks import Tasks
from flowrt.sched.host import snapshots
from flowrt.sched.host.host import Host
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.snapshots import Snapshot
from flowrt.sched.host.variables import Variables

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = ("", "v")
NOTHING: frozenset[Any] = frozenset()
SHAPES = [(), (0,), (0, 3), (3, 0), (1,), (7,), (1000,), (300, 5), (40, 64), (33, 100), (5, 3000), (2, 3, 4)]


def table(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 2, 1 + int(np.prod(shape)))[1:].reshape(shape).astype(dtype)


def read(snapshot: Snapshot, piece: int) -> Iterator[bytes]:
    for first in range(0, snapshot.nbytes, piece):
        yield bytes(snapshot.read(first, min(piece, snapshot.nbytes - first)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_snapshot_is_what_was_there_whatever_rows_are_written_between_its_pieces(
    shape: tuple[int, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "BLOCK", 700)
    rng = np.random.default_rng(5)
    for piece in (97, 256, 4096) if int(np.prod(shape)) < 2000 else (997, 4096):
        value = table(shape, dtype)
        before, found = value.tobytes(), b""
        snapshot = Snapshot(value, Memory())
        for part in read(snapshot, piece):
            found += part
            if shape and len(value):
                rows = rng.permutation(len(value))[: rng.integers(0, 1 + min(len(value), 20))]
                snapshot.keep(rows)
                value[rows] += np.ones((), dtype)
        assert found == before


def test_no_more_is_copied_than_is_asked_for_however_wide_a_row_is() -> None:
    value = np.arange(3 << 20).reshape(3, -1)
    snapshot, before = Snapshot(value, Memory()), value.tobytes()
    snapshot.keep(np.array([1]))
    value[1] = 0
    row = value[0].nbytes
    for first in (0, row - 50, row, row + 50, 2 * row - 50, 2 * row):
        piece = snapshot.read(first, 100)
        assert piece.base is None
        assert bytes(piece) == before[first : first + 100]


def test_what_is_asked_again_is_answered_again() -> None:
    value = table((100, 64))
    before = value.tobytes()
    snapshot = Snapshot(value, Memory())
    for first in range(0, len(before), 1000):
        for _ in range(2):
            assert bytes(snapshot.read(first, 1000)) == before[first : first + 1000]
            snapshot.keep(np.arange(100))
            value += 1


def test_no_more_is_kept_than_what_is_not_read_and_that_once() -> None:
    memory = Memory()
    value = np.zeros((1 << 16, 64), np.float32)
    snapshot = Snapshot(value, memory)
    for _ in range(3):
        snapshot.keep(np.arange(10, 20))
    assert snapshot._kept == 10
    snapshot.read(20 * 256, 1)
    snapshot.keep(np.arange(30))
    assert snapshot._kept == 20
    assert memory.held <= (1 << 16) + snapshots.BLOCK


def test_where_rows_could_not_be_kept_reading_fails_and_writing_does_not() -> None:
    memory = Memory(1 << 10)
    snapshot = Snapshot(np.zeros((1 << 16, 64), np.float32), memory)
    snapshot.read(0, 100)
    snapshot.keep(np.arange(10))
    with pytest.raises(ResourceError, match="rows that steps were about to write could not be kept: no memory for"):
        snapshot.read(0, 100)


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_is_what_was_there_while_another_thread_writes_rows(seed: int) -> None:
    rng, value = np.random.default_rng(seed), np.zeros((1 << 14, 64), np.int32)
    snapshot, ended = Snapshot(value, Memory()), threading.Event()

    def write() -> None:
        while not ended.is_set():
            rows = rng.choice(len(value), 50, replace=False)
            snapshot.keep(rows)
            value[rows] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        pieces = list(read(snapshot, 1 << 14))
    finally:
        ended.set()
        writer.join()
    assert not any(map(any, pieces))


# ── of variables ──


def saved(value: np.ndarray[Any, Any]) -> tuple[Variables, Snapshot]:
    variables, spec = Variables("/job:ps/task:0"), Spec(value.dtype, value.shape)
    variables.declare(NAME, spec)
    variables.begin(NAME, value)
    return variables, variables.snapshot(NAME, spec, Memory())


def test_a_variable_stays_where_it_is_when_some_rows_are_written_and_goes_elsewhere_when_all_are() -> None:
    value = np.arange(1000.0).reshape(100, 10)
    variables, snapshot = saved(value)
    names, before = frozenset({NAME}), value.tobytes()
    assert variables.part(names, lambda *_: pytest.fail("it is copied"), names) == names
    variables.keep_rows(names, np.arange(5))
    value[:5] = -1
    copies = []

    def copy(_: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        copies.append(array.copy())
        return copies[-1]

    assert variables.part(names, copy) == NOTHING
    assert (copies[0] == value).all()
    copies[0][:] = -2
    assert variables.part(names, copy, names) == NOTHING
    assert bytes(snapshot.read(0, snapshot.nbytes)) == before


def test_what_is_lent_beside_is_not_written_in_any_row() -> None:
    value = np.arange(1000.0).reshape(100, 10)
    variables, snapshot = saved(value)
    names, spec = frozenset({NAME}), Spec("float64", (100, 10))
    lent = variables.lend(NAME, spec)
    assert variables.part(names, lambda _, array: array.copy(), names) == NOTHING
    variables.value(NAME, spec)[:] = 0
    assert bytes(lent) == bytes(snapshot.read(0, snapshot.nbytes)) == value.tobytes()


def test_two_saves_at_once_have_each_what_was_there_when_it_began() -> None:
    value = np.arange(1000.0).reshape(100, 10)
    variables, first = saved(value)
    names, expected = frozenset({NAME}), [value.tobytes()]
    variables.keep_rows(names, np.arange(50))
    value[:50] += 1
    second = variables.snapshot(NAME, Spec("float64", (100, 10)), Memory())
    expected.append(value.tobytes())
    variables.keep_rows(names, np.arange(40, 60))
    value[40:60] += 1
    assert [bytes(each.read(0, each.nbytes)) for each in (first, second)] == expected
    del first, second
    assert variables.part(names, lambda *_: pytest.fail("it is copied"), names) == NOTHING
    assert not variables.lent


def test_the_rows_of_groups_are_those_that_occur() -> None:
    groups = np.array([2, 0, 2, 3, 0, 7, 4, 0, 0, 2, 1], np.int32)  # of the indices 7, 4, 7
    assert rows_of(groups).tolist() == [7, 4]
    assert rows_of(np.array([0, 0], np.int32)).tolist() == []


async def test_nothing_is_kept_for_a_client_that_is_gone_by_then() -> None:
    host = Host()
    keeping, name = Keeping(host, Tasks()), frozenset([NAME])
    host.variables.declare(NAME, Spec("float32", (4,)))
    host.variables.begin(NAME, np.zeros(4, np.float32))
    async with host.variables.hold(NOTHING, name):
        keep = asyncio.create_task(keeping.answer(Keep("save", (NAME,)), "client", tuple))
        await asyncio.sleep(0)  # now it waits for who holds the variable
        keeping.ended("client")
    with pytest.raises(CheckpointError, match="keeps nothing for that save"):
        await keep
    with pytest.raises(CheckpointError, match="keeps nothing for that save"):
        await keeping.answer(Fetch("save", *NAME, 0, 16), "client", tuple)
    assert host.variables.try_hold(NOTHING, name)
    await host.aclose()


async def test_a_save_that_fails_leaves_nothing_and_answers_of_trainers_that_move_what_it_keeps_alone() -> None:
    host = Host()
    keeping, other = Keeping(host, Tasks()), ("", "other")

    def server(group: str, version: int, name: tuple[str, str]) -> Any:
        return SimpleNamespace(rests=True, version=version, role=SimpleNamespace(group=group), moves=frozenset([name]))

    servers = [server("mine", 4, NAME), server("another's", 9, other)]
    host.variables.declare(NAME, Spec("float32", (4,)))
    host.variables.begin(NAME, np.zeros(4, np.float32))
    with pytest.raises(GraphError, match="'other' has no value"):
        await keeping.answer(Keep("save", (NAME, other)), "client", lambda: servers)
    with pytest.raises(CheckpointError, match="keeps nothing for that save"):
        await keeping.answer(Fetch("save", *NAME, 0, 16), "client", tuple)
    assert await keeping.answer(Keep("save", (NAME,)), "client", lambda: servers) == (("mine", 4),)
    keeping.close()
    await host.aclose()
