"""Small values that a recorded step brings in and out by itself, on a device that can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from test_recorded_regions import ONE, World, _noted, a_step, batches
from test_recorded_regions import world as world

import flowrt as fr
from flowrt.sched.devices import staging

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST, SEVERAL = fr.Options(soft_placement=True), fr.Options(devices=("recorder:0", "cpu:0"))


@pytest.fixture(autouse=True)
def _copying(world: World) -> None:
    """Have the device copy by itself, and note what it is told to."""
    recorder: Any = world._driver
    recorder.pinned = lambda self, nbytes: np.zeros(nbytes, np.uint8)
    recorder.send = lambda self, memory, array: self._at(memory, array.nbytes).__setitem__(slice(None), array)
    recorder.fetch = lambda self, memory, array: array.__setitem__(slice(None), self._at(memory, array.nbytes))
    for name in ("write", "read"):
        setattr(recorder, name, _noted(name, getattr(recorder, name)))


async def steps(options: fr.Options, given: Sequence[Any]) -> list[Any]:
    """What each step answers: the loss before it, a variable after it, and how its batch is shaped."""
    graph, x, loss, update, w = a_step()
    with graph, fr.control_dependencies([update]):
        after, rows = fr.identity(w), fr.shape_of(x)
    async with fr.Session(graph, options=options) as session:
        return [await session.run([loss, update, after, rows], {x: batch}) for batch in given]


async def test_a_step_that_runs_again_is_not_written_to_nor_read_from(world: World) -> None:
    graph, x, loss, update, _ = a_step()
    async with fr.Session(graph, options=ONE) as session:
        for batch in batches(4, 4, 4):
            await session.run([loss, update], {x: batch})
            told = world.calls()
    assert told == ["replay", "finish", "replay", "finish"]


async def test_what_is_brought_out_is_of_its_own_step(world: World) -> None:
    given = batches(4, 4, 4, 6, 4, 6, 6, 1, 4)
    there, here = await steps(ONE, given), await steps(HOST, given)
    assert world.calls().count("replay") >= 4
    for mine, other in zip(there, here, strict=True):
        for one, another in zip((mine[0], *mine[2:]), (other[0], *other[2:]), strict=True):
            np.testing.assert_allclose(one, another, rtol=1e-5)


@pytest.mark.parametrize(("bound", "call"), [("SENT", "write"), ("FETCHED", "read")])
async def test_what_is_large_is_copied_by_pieces(
    world: World, bound: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, bound, 1)
    graph, x, loss, update, _ = a_step()
    async with fr.Session(graph, options=ONE) as session:
        for batch in batches(4, 4, 4):
            await session.run([loss, update], {x: batch})
            told = world.calls()
    assert set(told) == {"replay", "finish", call}
    given = batches(4, 4, 4)
    for mine, other in zip(await steps(ONE, given), await steps(HOST, given), strict=True):
        np.testing.assert_allclose(mine[0], other[0], rtol=1e-5)


async def test_what_the_host_goes_on_with_needs_no_further_call(world: World) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        with fr.device("recorder:0"):
            y = fr.exp(x)
        with fr.device("cpu:0"):
            z = fr.log(y)
    async with fr.Session(graph, options=SEVERAL) as session:
        for n in range(4):
            given = np.float32([n, 1, 2])
            np.testing.assert_allclose(await session.run(z, {x: given}), given, rtol=1e-5, atol=1e-6)
            told = world.calls()
    assert told.count("replay") == 1
    assert "read" not in told


async def test_a_loops_condition_comes_with_what_decides_it(world: World) -> None:
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (3,))
        y = fr.while_loop(lambda v: fr.sum(v) < 1000, lambda v: v * 2, x)
    async with fr.Session(graph, options=ONE) as session:
        for first in (1, 3, 5):
            found = await session.run(y, {x: np.float32([first, 0, 0])})
            told = world.calls()
            assert found[0] == first * 2 ** np.ceil(np.log2(1000 / first))
    assert told.count("replay") > 8
    assert told.count("read") <= 1


@pytest.mark.parametrize("asked", ["pinned", "record"])
async def test_a_step_goes_on_as_it_went_where_a_recording_finds_no_memory(
    world: World, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(world._driver, asked, full)
    given = batches(4, 4, 4, 4)
    there, here = await steps(ONE, given), await steps(HOST, given)
    assert "replay" not in world.calls()
    for mine, other in zip(there, here, strict=True):
        np.testing.assert_allclose(mine[0], other[0], rtol=1e-5)
