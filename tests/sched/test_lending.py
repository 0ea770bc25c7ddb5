"""Large values that a step sends and receives: variables are lent, not copied, and memory is received in again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_plans import CLIENT, PS, WORKERS, Writer
from test_faults import world

from flowrt.base import codec
from flowrt.base.spec import Spec
from flowrt.checkpoints import shards
from flowrt.sched.executor import LENT_BYTES
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.segments import PATIENCE, Segments
from flowrt.sched.host.spares import Spares
from flowrt.sched.host.variables import Name, Variables

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
LARGE = Spec("float64", (MIB,))  # 8 MiB
SCALAR = Spec("float64", ())
NAME = ("", "v")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that share memory are lent copies."""
    monkeypatch.setenv("FLOWRT_TRANSPORT", "tcp")


def held(spec: Spec, task: str, peer: str) -> dict[str, dict[str, Any]]:
    """Steps on a variable of ``task``: set all of it to the feed, add the feed to all of it, fetch it by ``peer``."""
    where = {"resource": "v", "container": "", "dtype": spec.dtype.name, "shape": spec.dims}
    steps = {}
    for name in ("assign", "assign_add"):
        w = Writer(task)
        shape = w.node("constant", out=Spec("int64", (1,)), value=np.asarray(spec.dims))
        w.node(name, w.node("broadcast_to", w.recv(0, CLIENT, SCALAR), shape, out=spec), **where)
        steps[name] = {"plans": {task: w.plan()}, "feeds": [[(0, task)]], "fetches": []}
    w, other = Writer(task), Writer(peer)
    read = w.node("read_variable", out=spec, fresh=False, **where)
    w.send(read, 0, CLIENT)
    w.send(read, 1, peer)
    other.send(other.recv(1, task, spec), 2, CLIENT)
    plans = {task: w.plan(), peer: other.plan()}
    steps["read"] = {"plans": plans, "feeds": [], "fetches": [(0, task), (2, peer)]}
    return steps


async def test_what_is_fetched_of_a_variable_is_what_it_held_at_one_moment_whoever_writes_it_meanwhile() -> None:
    async with world() as made:
        steps = {n: await made.master.register(**s) for n, s in held(LARGE, PS, WORKERS[0]).items()}
        await made.run(steps["assign"], 0.0)
        reading = [asyncio.ensure_future(made.run(steps["read"])) for _ in range(2)]
        for _ in range(10):
            writing = asyncio.ensure_future(made.run(steps["assign_add"], 1.0))
            done, _ = await asyncio.wait([*reading, writing], return_when=asyncio.FIRST_COMPLETED)
            for read in done & set(reading):
                reading[reading.index(read)] = asyncio.ensure_future(made.run(steps["read"]))
                for value in read.result():
                    assert (value == value[0]).all()
            await writing
        for value in (await made.run(steps["read"])) + [v for read in reading for v in await read]:
            assert (value == value[0]).all()
        assert ((await made.run(steps["read"]))[0] == 10.0).all()
        await made.assert_well()


async def test_a_variable_that_is_only_sent_takes_no_memory_for_that() -> None:
    async with world() as made:
        steps = {n: await made.master.register(**s) for n, s in held(LARGE, PS, WORKERS[0]).items()}
        await made.run(steps["assign"], 3.0)
        memory = made.hosts[PS].memory
        memory.forget_peak()
        for _ in range(3):
            for value in await made.run(steps["read"]):
                assert (value == 3.0).all()
        assert memory.statistics().peak - memory.held < MIB
        assert LARGE.nbytes >= LENT_BYTES


def test_who_writes_what_is_lent_writes_elsewhere_and_where_it_was_once_nobody_looks_any_more() -> None:
    variables, spec, copies = Variables(PS), Spec("float64", (4,)), []
    variables.declare(NAME, spec)
    variables.begin(NAME, np.ones(4))

    def write(number: float) -> None:
        def copy(name: Name, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            assert name == NAME
            copies.append(number)
            return value.copy()

        variables.part(frozenset({NAME, ("", "another")}), copy)
        variables.value(NAME, spec)[:] = number

    first = variables.lend(NAME, spec)
    assert np.shares_memory(variables.lend(NAME, spec), first)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 2.0
    write(2.0)
    second = variables.lend(NAME, spec)
    write(3.0)
    assert (first.tolist(), second.tolist()) == ([1.0] * 4, [2.0] * 4)
    assert copies == [2.0, 3.0]
    del first, second
    third = variables.lend(NAME, spec)
    before = third.ctypes.data
    del third
    write(4.0)
    assert copies == [2.0, 3.0]
    assert variables.value(NAME, spec).ctypes.data == before


SEEN: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "written to a file": lambda array: shards.bytes_of(np.ascontiguousarray(array)),
    "sent": codec.bytes_of,
    "sent in pieces": lambda array: np.frombuffer(shards.bytes_of(array), np.uint8)[1:],
    "a view": lambda array: array[...],
    "of another shape": lambda array: array.reshape(-1, 1).T,
}


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0, 2)])
@pytest.mark.parametrize("way", SEEN)
def test_what_is_lent_stays_as_it_was_for_whoever_sees_but_a_part_of_it(way: str, shape: tuple[int, ...]) -> None:
    variables, spec = Variables(PS), Spec("float64", shape)
    variables.declare(NAME, spec)
    variables.begin(NAME, np.ones(shape))
    seen = SEEN[way](variables.lend(NAME, spec))
    before = bytes(seen)
    variables.part(frozenset({NAME}), lambda _, value: value.copy())
    variables.value(NAME, spec)[...] = 2.0
    assert bytes(seen) == before
    del seen
    variables.lend(NAME, spec)
    variables.part(frozenset({NAME}), lambda *_: pytest.fail("nobody looks at it"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_lies_where_memory_was_made_ready_for_it_once_and_if_it_fits(shared: bool) -> None:
    memory = Memory()
    spares, value = Spares(memory), np.arange(MIB, dtype="float64")
    memory.segments = Segments(memory) if shared else None
    spares.make(NAME, LARGE, lambda: True)
    held = memory.held
    assert held == LARGE.nbytes
    copies = [spares.copy(NAME, value)]
    assert memory.held == held
    copies.append(spares.copy(NAME, value))
    assert memory.held == 2 * held
    assert all((copy == value).all() for copy in copies)
    spares.make(NAME, LARGE, lambda: True)
    assert spares.copy(NAME, value[:100]).shape == (100,)
    spares.make(NAME, LARGE, lambda: False)  # it is not wanted any more
    assert memory.held == 2 * held
    spares.make(NAME, LARGE, lambda: True)
    memory.reclaim()
    assert memory.held == 2 * held


async def test_large_arrays_are_received_where_earlier_ones_were_that_nobody_has_any_more() -> None:
    memory = Memory()
    memory.buffers = Segments(memory, shared=False)
    first = memory.received(np.dtype("uint8"), (MIB,))
    kept = memory.received(np.dtype("uint8"), (MIB,))
    place, first[:], kept[:] = first.ctypes.data, 1, 2
    assert memory.held == 2 * MIB
    del first
    assert memory.held == MIB
    again = memory.received(np.dtype("float32"), (MIB // 4,))
    again[:] = 3
    assert again.ctypes.data == place
    assert (kept == 2).all()
    memory.limit = MIB
    memory.reclaim()
    del kept, again
    assert memory.held == 0
    assert memory.received(np.dtype("uint8"), (MIB,)).size == MIB  # what is idle gives way to what there is a limit for


@pytest.mark.parametrize(("steps", "stays"), [(1, 1), (2, 2), (3, 3), (50, 1 + PATIENCE)])
def test_memory_that_was_used_again_and_again_outlasts_a_step_that_takes_long_for_once(steps: int, stays: int) -> None:
    segments = Segments(Memory(), shared=False)
    for step in range(steps):
        assert segments.empty((MIB,), np.dtype("uint8")) is not None
        if step < steps - 1:
            assert segments.sweep()
    looks = 0
    while segments.nbytes:
        segments.sweep()
        looks += 1
    assert looks == stays + 1


def test_memory_that_took_long_to_make_goes_as_soon_as_other_memory_that_was_used_once() -> None:
    segments = Segments(Memory(), shared=False)
    segments.grow(MIB, steady=True)
    segments.sweep()  # while somebody waits for it
    assert segments.empty((MIB,), np.dtype("uint8")) is not None
    segments.sweep()
    assert segments.nbytes
    segments.sweep()
    assert not segments.nbytes
