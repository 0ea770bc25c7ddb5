"""Saving and restoring by the tasks that hold variables: beside steps, at one version, on other numbers of servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_world import read_checkpoint

import flowrt as fr
from flowrt.checkpoints.stores import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def model(size: int = 100) -> Any:
    with fr.Graph() as graph:
        v = fr.Variable(np.zeros(size), name="v")
        bump = v.assign_add(fr.ones((size,), "float64"))
    return graph, v, bump


# ── beside steps ──


class Held:
    """Checkpoints whose saves write nothing until they are let."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.checkpoints = fr.Checkpoints(path, **settings)
        self.written = threading.Event()
        self.checkpoints.before_save = lambda: None if self.written.wait(30) else pytest.fail("nobody let it write")


async def test_steps_go_on_while_a_save_is_written_and_it_has_what_was_there_when_it_began(tmp_path: Path) -> None:
    graph, v, bump = model(100_000)
    held = Held(tmp_path, every_steps=2)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        for step in range(3):
            await session.run(bump)
            assert held.checkpoints.is_saving == (step > 0)
        assert ((await session.run(v)) == 3).all()
        held.written.set()
        await held.checkpoints.wait_saved()
        assert await session.restore() == 2
        assert ((await session.run(v)) == 2).all()


async def test_memory_is_ready_for_copies_when_a_save_begins_and_goes_when_it_has_ended(tmp_path: Path) -> None:
    graph, v, bump = model(2 * MIB)
    held = Held(tmp_path, every_steps=3)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        host = session._runner._host  # type: ignore[union-attr]
        for save in range(1, 3):
            await session.run(bump)
            assert held.checkpoints._preparing is not None
            await held.checkpoints._preparing
            (ready,) = host.spares._ready.values()
            del ready
            held_before = host.memory.held
            for _ in range(3):  # the second of these is saved, and the third copies what is not written or copied
                await session.run(bump)
            assert host.memory.held < held_before + MIB
            assert not host.spares._ready
            held.written.set()
            await held.checkpoints.wait_saved()
            held.written.clear()
            assert await session.restore() == 3 * save
            assert ((await session.run(v)) == 3 * save).all()


async def held_up(step: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A step that is seen not to end."""
    running = asyncio.create_task(step)
    done, _ = await asyncio.wait([running], timeout=0.05)
    assert not done
    return running


async def test_a_step_for_which_a_save_is_due_waits_for_the_one_before(tmp_path: Path) -> None:
    graph, _, bump = model()
    held = Held(tmp_path, every_steps=1)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        await session.run(bump)
        second = await held_up(session.run(bump))
        held.written.set()
        await second
    assert [step for _, step in held.checkpoints.saves()] == [1, 2]


async def test_training_goes_on_where_a_save_hangs_and_what_was_put_off_is_saved_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.session.checkpoints.PATIENCE", 0.01)
    graph, _, bump = model()
    held = Held(tmp_path, every_steps=1)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        for _ in range(5):
            await session.run(bump)
        assert held.checkpoints.saves() == []
        held.written.set()
    assert [step for _, step in held.checkpoints.saves()] == [1, 5]


async def test_no_step_waits_for_a_save_of_much_that_is_due_while_the_one_before_is_written(tmp_path: Path) -> None:
    graph, v, bump = model(2 * MIB)
    held = Held(tmp_path, every_steps=2)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:

        async def prepared() -> None:
            assert held.checkpoints._preparing is not None
            await held.checkpoints._preparing

        await session.run(bump)
        await prepared()
        for _ in range(4):  # the first of these is saved
            await session.run(bump)
        held.written.set()
        await held.checkpoints.wait_saved()
        await session.run(bump)  # memory is made ready for the next, which is due
        await prepared()
        await session.run(bump)
        await held.checkpoints.wait_saved()
        assert [step for _, step in held.checkpoints.saves()] == [2, 7]
        assert await session.restore(2) == 2
        assert ((await session.run(v)) == 2).all()


async def test_the_first_save_of_much_is_of_the_step_for_which_it_is_due(tmp_path: Path) -> None:
    graph, _, bump = model(2 * MIB)
    held = Held(tmp_path, every_steps=1)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        await session.run(bump)
        assert held.checkpoints.is_saving
        held.written.set()
    assert [step for _, step in held.checkpoints.saves()] == [1]


@pytest.mark.parametrize("ends", ["in order", "by an error", "by a step that is cut short", "cancelled"])
async def test_a_save_that_was_put_off_is_made_when_a_session_ends_with_whole_steps(tmp_path: Path, ends: str) -> None:
    graph, v, bump = model(2 * MIB)
    with graph:
        number = fr.placeholder("int64", (1,))
        fails = fr.group(bump, v.scatter_add(number, fr.ones((1,), "float64")))
    held = Held(tmp_path, every_steps=2)
    with contextlib.suppress(ZeroDivisionError, fr.FlowrtError, asyncio.CancelledError):
        async with fr.Session(graph, checkpoints=held.checkpoints) as session:
            for _ in range(5):
                await session.run(bump)
            assert held.checkpoints.is_saving
            held.written.set()
            match ends:
                case "by an error":
                    raise ZeroDivisionError
                case "by a step that is cut short":
                    await session.run(fails, {number: np.array([2 * MIB])})
                case "cancelled":
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await asyncio.sleep(0)
    saved = [2] if ends == "by a step that is cut short" else [2, 5]
    assert [step for _, step in held.checkpoints.saves()] == saved
    if saved == [2, 5]:
        assert (read_checkpoint(tmp_path, 2, 5).variables["", "v"] == 5).all()


async def test_where_there_is_no_memory_for_a_copy_writers_wait_until_their_variable_is_written(tmp_path: Path) -> None:
    graph, v, bump = model(MIB)
    held = Held(tmp_path, every_steps=2)
    async with fr.Session(graph, checkpoints=held.checkpoints) as session:
        await session.run(bump)
        memory = session._runner._host.memory  # type: ignore[union-attr]
        memory.limit = memory.held + MIB  # the step has all that it needs, and a copy takes 8 MiB
        await session.run(bump)
        third = await held_up(session.run(bump))
        held.written.set()
        await third
        await held.checkpoints.wait_saved()
        memory.limit = None
        assert ((await session.run(v)) == 3).all()
        assert await session.restore() == 2
        assert ((await session.run(v)) == 2).all()


async def test_for_nodes_that_have_not_the_clients_disk_the_client_writes_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrt.sched.drivers.keeping.store_at", lambda url: LocalStore(tmp_path / "another"))
    with fr.Graph() as graph:
        start = fr.random.normal((3 * MIB,), seed=1)
        made = [fr.Variable(start, name="a"), fr.Variable(start, name="b"), fr.Variable(np.int64(7), name="n")]
        bump = fr.group(*(v.assign_add(fr.ones(v.shape, v.dtype)) for v in made))
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / "here")) as session:
        before = await session.run(made)
        await session.save()
        await session.run(bump)
        assert await session.restore() == 0
        for value, first in zip(await session.run(made), before, strict=True):
            np.testing.assert_array_equal(value, first)
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path / "here")) as session:
        np.testing.assert_array_equal((await session.run(made))[1], before[1])
    assert LocalStore(tmp_path / "another").saves() == []


def test_what_is_lent_stays_as_it_is_also_where_a_step_has_become_one_call() -> None:
    graph, v, bump = model()
    with fr.BlockingSession(graph) as session:
        step = session.compile([bump, v])
        for _ in range(20):
            step()
        variables = session._session._runner._host.variables  # type: ignore[union-attr]
        name = frozenset({("", "v")})
        for count in range(20, 24):
            assert variables.try_hold(name, frozenset())
            lent = variables.lend(("", "v"), fr.Spec("float64", (100,)))
            variables.release(name, frozenset())
            for _ in range(3):
                step()
            assert (lent == lent[0]).all()
            assert lent[0] == 20 + 3 * (count - 20)


# ── one version ──

INPUTS = {"x": fr.Spec("float32", (None, 3))}


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    for number in range(count):
        yield {"x": np.full((2, 3), 1 + number % 3, np.float32)}


def trainer_of(optimizer: fr.optim.Optimizer, servers: int, sizes: tuple[int, ...]) -> Any:
    def loss_fn(inputs: dict[str, fr.Tensor]) -> Any:
        made = [fr.Variable(np.linspace(-1, 1, n, dtype=np.float32), name=f"v{i}") for i, n in enumerate(sizes)]
        return fr.add_n([fr.mean(fr.square(v)) for v in made]) * fr.mean(inputs["x"])

    with fr.Graph(seed=1) as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, optimizer, replicas=2, servers=servers)
    return graph, trainer


@pytest.mark.timeout(120)
async def test_a_save_beside_steps_that_run_ahead_is_of_one_version_on_all_servers(tmp_path: Path) -> None:
    graph, trainer = trainer_of(fr.optim.SGD(0.125), 2, (3, 5))
    checkpoints = fr.Checkpoints(tmp_path, keep=100)
    async with (
        fr.LocalCluster(ps=2, worker=2) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=checkpoints) as session,
    ):
        async for _ in trainer.steps(session, batches(60), ahead=4):
            await session.save()
    for number, step in checkpoints.saves():
        values = read_checkpoint(tmp_path, number, step).variables
        assert len({int(value) for (_, name), value in values.items() if "step" in name}) == 1


@pytest.mark.timeout(120)
async def test_other_numbers_of_servers_restore_the_same_bits(tmp_path: Path) -> None:
    before: dict[str, Any] = {}
    for servers in (2, 3, 1):
        graph, trainer = trainer_of(fr.optim.Adam(0.01), servers, (300, 7, 40, 1))
        async with (
            fr.LocalCluster(ps=servers, worker=2) as cluster,
            fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path)) as session,
        ):
            values = dict(zip([v.name for v in graph.variables], await session.run(list(graph.variables)), strict=True))
            for name in values.keys() & before.keys():
                np.testing.assert_array_equal(values[name], before[name], strict=True)
            async for report in trainer.steps(session, batches(4)):
                assert report.step == await session.run(trainer.step)
            await session.save()
            before = dict(zip(values, await session.run(list(graph.variables)), strict=True))
    assert trainer.step.name in before
    assert before[trainer.step.name] == 6
