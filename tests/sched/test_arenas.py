"""What the tapes of a region compute in: lent to one run after another, and bounded however many shapes there are."""

from __future__ import annotations

import numpy as np
import pytest
from session_world import host_of

import flowrt as fr
from flowrt.base.errors import ResourceError
from flowrt.sched.host.memory import Memory
from flowrt.sched.tape.arenas import MOST, Arenas


def test_an_arena_that_is_large_enough_is_lent_again_and_one_too_small_goes() -> None:
    memory = Memory()
    arenas = Arenas(memory)
    large = arenas.take(100_000)
    arenas.give(large)
    assert arenas.idle_bytes == memory.held == 100_000
    assert arenas.take(50_000) is large
    arenas.give(large)
    larger = arenas.take(200_000)
    del large
    assert (arenas.idle_bytes, memory.held) == (0, 200_000)
    arenas.give(larger)
    arenas.let_go()
    del larger
    assert memory.held == 0


def test_what_is_parted_with_is_no_larger_than_was_asked_for() -> None:
    arenas = Arenas(Memory())
    large = arenas.take(100_000)
    arenas.give(large)
    assert arenas.part_with(50_000).nbytes == 50_000
    assert arenas.part_with(100_000) is large, "which stayed"


def test_as_many_arenas_are_kept_as_there_should_be() -> None:
    memory = Memory()
    arenas = Arenas(memory)
    lent = [arenas.take(40_000) for _ in range(MOST + 2)]
    for arena in lent:
        arenas.give(arena)
    del lent, arena
    assert arenas.idle_bytes == memory.held == 40_000 * MOST


def test_where_there_is_no_memory_nothing_is_lent() -> None:
    with pytest.raises(ResourceError):
        Arenas(Memory(limit=10_000)).take(20_000)


async def test_direct_calls_of_many_shapes_keep_no_more_than_may_be_idle() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        y = fr.sum(fr.cumsum(x, 0) * x)
    async with fr.Session(graph, options=fr.Options(threads=1, memory_limit=800_000)) as session:
        step = session.compile(y, feeds=[x])
        for n in range(8000, 8100):
            for _ in range(6):
                await step(np.ones(n, np.float32))
        memory = host_of(session).memory
        assert session._step(y, (x,)).registered.tapes.kept_bytes <= memory.most_idle
        assert memory.statistics().peak <= 800_000
