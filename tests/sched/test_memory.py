from __future__ import annotations

import gc
import math
import os
import resource
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tape_world import PlanMaker

from flowrt.base.errors import ResourceError
from flowrt.sched.host.memory import COUNTED, UNSETTLED, Memory, MemoryStatistics, amount
from flowrt.sched.host.segments import LARGE, Segments
from flowrt.sched.host.spares import Spares
from flowrt.sched.tape.tapes import Tapes
from flowrt.usable import available_bytes, usable_cores

FLOAT = np.dtype(np.float32)


def test_what_is_held_is_counted_until_nobody_refers_to_it() -> None:
    memory = Memory()
    first = memory.empty((5000, 2), FLOAT)
    second = memory.empty((15_000,), FLOAT)
    part = first[10:20]
    assert memory.held == 100_000
    del first, second
    assert memory.held == 40_000, "a view keeps the whole"
    assert memory.statistics().peak == 100_000
    memory.forget_peak()
    assert memory.statistics().peak == 40_000
    del part
    gc.collect()
    assert memory.held == 0


def test_arrays_that_are_gone_are_taken_off_before_a_peak_is_told_and_some_of_them_at_least() -> None:
    memory = Memory()
    kept = [memory.empty((5000,), FLOAT) for _ in range(4)]
    del kept
    for _ in range(10 * UNSETTLED):
        memory.empty((5000,), FLOAT)
        assert len(memory._happened) <= UNSETTLED
    assert memory.statistics() == MemoryStatistics(0, 80_000, None)
    more = [memory.empty((5000,), FLOAT) for _ in range(5)]
    assert memory.statistics() == MemoryStatistics(20_000 * len(more), 100_000, None)


def test_what_is_to_last_begins_at_a_cache_line_and_is_counted_while_any_of_it_is_in_use() -> None:
    memory = Memory()
    for shape in ((1 << 12,), (2001, 3), (1 << 20, 2)):
        array = memory.lasting(shape, np.dtype(np.float32))
        assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, np.float32, True)
        assert array.ctypes.data % 64 == 0
        array[...] = 1
        row = array[:1]
        del array
        assert memory.held == 4 * math.prod(shape)
        del row
        assert memory.held == 0


def test_small_arrays_are_not_worth_their_count() -> None:
    memory = Memory(limit=0)
    assert memory.empty((COUNTED // 4 - 1,), FLOAT).nbytes < COUNTED
    assert memory.held == 0
    with pytest.raises(ResourceError, match=r"no memory for 16\.0 KiB more: 0 bytes are held, and the"):
        memory.empty((COUNTED // 4,), FLOAT)


def test_a_refusal_takes_nothing_and_idle_memory_goes_first() -> None:
    class Shelf:
        def __init__(self) -> None:
            self.kept = [memory.empty((10_000,), FLOAT)]

        @property
        def idle_bytes(self) -> int:
            return sum(array.nbytes for array in self.kept)

        def let_go(self) -> None:
            self.kept.clear()

    memory = Memory(limit=100_000)
    shelf = Shelf()
    memory.enlist(shelf)
    with pytest.raises(ResourceError, match=r"97\.7 KiB"):
        memory.empty((30_000,), FLOAT)
    assert memory.held == 0, "the shelf was emptied, and nothing taken"
    shelf.kept.append(memory.empty((10_000,), FLOAT))
    held = memory.empty((20_000,), FLOAT)
    assert not shelf.kept
    assert memory.held == held.nbytes


def test_idle_memory_goes_first_where_only_the_system_knows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shelf:
        idle_bytes = 40_000

        def let_go(self) -> None:
            self.idle_bytes = 0

    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if shelf.idle_bytes or shape > (20_000,):
            raise MemoryError(f"Unable to allocate {shape}")
        return np.zeros(shape, dtype)

    memory, shelf = Memory(), Shelf()
    memory.enlist(shelf)
    with monkeypatch.context() as patched:
        patched.setattr(np, "empty", make)
        held = memory.empty((20_000,), FLOAT)
        with pytest.raises(ResourceError, match="Unable to allocate"):
            memory.empty((30_000,), FLOAT)
    assert memory.held == held.nbytes


def test_no_more_is_kept_idle_than_half_the_limit() -> None:
    class Shelf:
        def __init__(self) -> None:
            self.kept = [memory.empty((10_000,), FLOAT)]

        @property
        def idle_bytes(self) -> int:
            return sum(array.nbytes for array in self.kept)

        def let_go(self) -> None:
            self.kept.clear()

    memory = Memory(limit=200_000)
    shelves = [Shelf() for _ in range(4)]
    for shelf in shelves:
        memory.enlist(shelf)
    memory.trim(apart_from=shelves[0])
    assert [bool(shelf.kept) for shelf in shelves] == [True, False, False, True]


def test_many_threads_count_exactly_and_never_go_over_the_limit() -> None:
    memory = Memory(limit=160_000)

    def work(seed: int) -> int:
        refused, kept = 0, []
        for size in np.random.default_rng(seed).integers(4096, 16_000, 300):
            try:
                kept.append(memory.empty((int(size),), FLOAT))
            except ResourceError:
                refused += 1
                kept.clear()
        return refused

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    gc.collect()
    assert memory.held == 0
    assert memory.statistics().peak <= 160_000


def test_a_copy_is_contiguous_and_counted() -> None:
    memory = Memory()
    source = np.arange(4000, dtype=np.int64).reshape(40, 100).T
    made = memory.copy(source)
    assert made.flags.c_contiguous
    np.testing.assert_array_equal(made, source)
    assert memory.held == 32_000


def test_the_machine_and_the_cgroups_around_a_process_say_what_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, mine, info = tmp_path / "cgroup", tmp_path / "mine", tmp_path / "meminfo"
    inner = root / "jobs" / "one"
    inner.mkdir(parents=True)
    info.write_text("MemTotal:       9000 kB\nMemAvailable:   8000 kB\n")
    mine.write_text("0::/jobs/one\n")
    assert available_bytes(root, mine, info) == 8000 * 1024
    for folder, most, used in ((inner, "max", 0), (inner.parent, "5000000", 2_000_000)):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text("anon 7\ninactive_file 500000\n")
    assert available_bytes(root, mine, info) == 3_500_000
    assert available_bytes(tmp_path / "no", tmp_path / "no", tmp_path / "no") is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_cores(root, mine) == 8
    for folder, quota in ((inner, "max 100000"), (inner.parent, "250000 100000"), (root, "400000 100000")):
        (folder / "cpu.max").write_text(quota)
    assert usable_cores(root, mine) == 3
    named = root / os.fsdecode(b"caf\xe9")  # a name is bytes, of no encoding
    named.mkdir()
    (named / "cpu.max").write_text("200000 100000")
    mine.write_bytes(b"0::/caf\xe9\n")
    assert usable_cores(root, mine) == 2


def test_a_limit_of_addresses_says_what_is_left_too(tmp_path: Path) -> None:
    nowhere, limits = tmp_path / "no", resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), limits[1]))
    try:
        left = available_bytes(nowhere, nowhere, nowhere)
        assert left is not None
        assert 1 << 28 < left <= 1 << 30
        assert not Memory().room_for(2 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_amounts_are_written_as_people_read_them() -> None:
    assert [amount(n) for n in (7, 1536, 3 << 20, 5 << 29, 1 << 41)] == [
        "7 bytes",
        "1.5 KiB",
        "3.0 MiB",
        "2.5 GiB",
        "2.0 TiB",
    ]


def test_others_are_enlisted_while_idle_memory_lets_go() -> None:
    class Shelf:
        idle_bytes = 0

        def let_go(self) -> None:
            pass

    memory, over = Memory(limit=1 << 20), threading.Event()

    def enlist() -> None:
        kept: deque[Shelf] = deque(maxlen=50)
        while not over.is_set():
            kept.append(Shelf())
            memory.enlist(kept[-1])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    enlisting = threading.Thread(target=enlist)
    enlisting.start()
    try:
        for _ in range(3000):
            memory.reclaim()
    finally:
        over.set()
        enlisting.join()
        sys.setswitchinterval(before)


class AskingAtOnce(Memory):
    """Asks whoever is enlisted what is idle there before it is so much as made, as another thread may."""

    def enlist(self, keeper: Any) -> None:
        super().enlist(keeper)
        assert keeper.idle_bytes == 0
        keeper.let_go()


def test_who_is_enlisted_may_be_asked_at_once() -> None:
    make = PlanMaker()
    plan = make.plan(make.node("negative", make.feed("float32", (None,))))
    memory = AskingAtOnce()
    assert [Tapes(plan, memory=memory).idle_bytes, Spares(memory).idle_bytes, Segments(memory).idle_bytes] == [0, 0, 0]


class MakingRoom(Memory):
    """Looks whether other threads may use what is ``asking`` when that needs more: they may be about to make room."""

    asking: Segments
    others_may: bool | None = None

    def add_spare(self, nbytes: int) -> None:
        with ThreadPoolExecutor(1) as other:
            self.others_may = other.submit(self._may_use).result()
        super().add_spare(nbytes)

    def _may_use(self) -> bool:
        lock = self.asking._lock
        if may := lock.acquire(blocking=False):
            lock.release()
        return may


@pytest.mark.parametrize("grows", [False, True], ids=["empty", "grow"])
def test_nobody_waits_for_segments_that_ask_for_memory(grows: bool) -> None:
    memory = MakingRoom()  # as of two that let each other's go, each would wait for the other
    memory.asking = Segments(memory, shared=False)
    if grows:
        memory.asking.grow(LARGE, steady=True)
    made = memory.asking.empty((LARGE,), np.dtype(np.uint8))
    assert (made is not None, memory.others_may) == (True, True)
    memory.asking.close()


def test_segments_that_are_closed_make_and_count_nothing() -> None:
    memory = Memory(64 << 20)
    segments = Segments(memory, shared=False)
    segments.close()
    assert segments.empty((LARGE,), np.dtype(np.uint8)) is None
    segments.grow(LARGE, steady=True)
    assert (segments.nbytes, memory.room_for(64 << 20)) == (0, True)
