"""What runs on a device as one: laid out once, in one piece of memory, and told to the device once where it records."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ONE = fr.Options(devices=("recorder:0",))
RUN_WORDS = 4
REFUSING = 1 << 19  # bytes of a device that records nothing


class Recording:
    """Launches that are done again, one after another."""

    def __init__(self, driver: Any, launches: Sequence[Any]) -> None:
        self._driver, self._launches = driver, launches
        self.words = np.zeros((len(launches), RUN_WORDS), np.int64)

    def replay(self) -> None:
        self._driver.calls.append("replay")
        for (kernel, operands), words in zip(self._launches, self.words, strict=True):
            kernel.launch(operands, words)
        self._driver.calls.append("replayed")


class World:
    """The drivers that sessions have opened, of a device like the example's that records, too."""

    def __init__(self, driver: type[Any]) -> None:
        self.limit = 1 << 20
        self.opened: list[Any] = []
        self._driver = driver

    def count(self) -> int:
        return 1

    def supports(self, op: str, dtypes: Sequence[np.dtype[Any]]) -> bool:
        return fr.devices.computes_on_host(op, dtypes)

    def open(self, index: int) -> Any:
        self.opened.append(self._driver(self.limit, 0.0))
        return self.opened[-1]

    def calls(self) -> list[str]:
        """What the last driver was told since this was asked last, replays as one."""
        told, found, inside = self.opened[-1].calls, [], False
        for call in told:
            inside = call == "replay" or (inside and call != "replayed")
            if call == "replay" or not (inside or call == "replayed"):
                found.append(call)
        told.clear()
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    arena = import_module("arena")

    class Recorder(arena.Arena):  # type: ignore[name-defined,misc]
        """The example's device, which notes what it is told."""

        def __init__(self, limit: int, delay: float) -> None:
            super().__init__(limit, delay)
            self.calls: list[str] = []

        def record(self, launches: Sequence[Any]) -> Recording:
            if self.limit == REFUSING:
                raise OSError("a launch that no recording holds")
            return Recording(self, launches)

    for name in ("allocate", "launch", "copy", "finish"):
        setattr(Recorder, name, _noted(name, getattr(arena.Arena, name)))
    made = World(Recorder)
    fr.devices.register("recorder", lambda: made)
    return made


def _noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        self.calls.append(name)
        return method(self, *args)

    return call


def a_step() -> tuple[fr.Graph, Any, Any, Any, fr.Variable]:
    """A step of two layers by Adam, a feed, and the variable of the first."""
    with fr.Graph(seed=1) as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None, 5))
        w = fr.Variable(fr.random.normal((5, 7), seed=1), name="w")
        v = fr.Variable(fr.random.normal((7, 3), seed=2), name="v")
        loss = fr.mean(fr.square(fr.tanh(x @ w) @ v))
        update = fr.optim.Adam(0.1).minimize(loss)
    return graph, x, loss, update, w


def batches(*rows: int) -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.normal(size=(n, 5)).astype(np.float32) for n in rows]


async def losses(options: fr.Options, given: Sequence[Any]) -> list[float]:
    graph, x, loss, update, _ = a_step()
    soft = fr.Options(devices=options.devices, soft_placement=True)
    async with fr.Session(graph, options=soft) as session:
        return [float((await session.run([loss, update], {x: batch}))[0]) for batch in given]


async def test_a_step_that_runs_again_is_a_call_for_what_may_fail_and_one_for_the_updates(world: World) -> None:
    graph, x, loss, update, _ = a_step()
    (batch,) = batches(4)
    async with fr.Session(graph, options=ONE) as session:
        told = []
        for _ in range(4):
            await session.run([loss, update], {x: batch})
            told.append(world.calls())
    assert told[0].count("launch") > 10
    assert told[2] == told[3] == ["replay", "finish", "replay", "finish"]


async def test_what_is_recorded_trains_as_the_host_does(world: World) -> None:
    given = batches(4, 4, 4, 6, 4, 6, 6, 1, 4)
    there = await losses(ONE, given)
    assert world.calls().count("replay") >= 4
    np.testing.assert_allclose(there, await losses(fr.Options(), given), rtol=1e-5)


async def test_what_is_recorded_follows_variables_that_are_set_anew(world: World) -> None:
    graph, x, loss, update, w = a_step()
    with graph:
        zeroed = w.assign(np.zeros((5, 7), np.float32))
    (batch,) = batches(4)
    async with fr.Session(graph, options=ONE) as session:
        for _ in range(3):
            await session.run([loss, update], {x: batch})
        await session.run(zeroed)
        assert float(await session.run(loss, {x: batch})) == 0
        assert (await session.run(w) == 0).all()


async def test_what_was_fetched_is_not_changed_by_later_runs(world: World) -> None:
    graph, x, _, update, w = a_step()
    (batch,) = batches(4)
    async with fr.Session(graph, options=ONE) as session:
        seen = [(await session.run([w, update], {x: batch}))[0] for _ in range(5)]
        now = await session.run(w)
    assert all((one != other).any() for one, other in zip(seen, [*seen[1:], now], strict=True))


async def test_random_numbers_differ_from_run_to_run_and_are_the_hosts(world: World) -> None:
    found = []
    for options in (ONE, fr.Options(soft_placement=True)):
        with fr.Graph(seed=5) as graph, fr.device("recorder:0"):
            x = fr.placeholder("float32", (3,))
            y = x + fr.random.normal((3,), seed=7)
        async with fr.Session(graph, options=options) as session:
            found.append([await session.run(y, {x: np.zeros(3, np.float32)}) for _ in range(4)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert len({tuple(draw) for draw in found[0]}) == 4


async def test_a_recorded_step_that_fails_has_written_nothing_that_came_after(world: World) -> None:
    with fr.Graph() as graph, fr.device("recorder:0"):
        i = fr.placeholder("int64", (2,))
        rows = fr.take(fr.Variable(np.ones((3, 2), np.float32), name="rows"), i)
        total = fr.Variable(np.zeros(2, np.float32), name="total")
        step = total.assign_add(fr.sum(rows, axis=0))
    async with fr.Session(graph, options=ONE) as session:
        for _ in range(3):
            await session.run(step, {i: [0, 1]})
        assert world.calls()[-4:] == ["replay", "finish", "replay", "finish"]
        with pytest.raises(fr.FlowrtError, match=r"test_recorded_regions.py:\d+\): an index is out of"):
            await session.run(step, {i: [0, 7]})
        assert (await session.run(total)).tolist() == [6, 6]
        await session.run(step, {i: [0, 1]})
        assert (await session.run(total)).tolist() == [8, 8]


async def test_what_is_recorded_goes_where_memory_is_short(world: World) -> None:
    world.limit = 100_000
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None,))
        y = fr.sum(fr.cumsum(fr.tanh(x)))
    async with fr.Session(graph, options=ONE) as session:
        for size in (8_000, 7_000, 6_000, 8_000):
            given = np.full(size, 1e-3, np.float32)
            for _ in range(3):
                np.testing.assert_allclose(await session.run(y, {x: given}), np.cumsum(np.tanh(given)).sum(), rtol=1e-3)
            memory = fr.devices.memory(session)["recorder:0"]
            assert 4 * size < memory.held <= memory.peak <= 100_000


async def test_iterations_of_a_loop_are_recorded_and_take_what_the_one_before_has_made(world: World) -> None:
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (3,))
        y = fr.while_loop(lambda n, v: fr.sum(v) < 1000, lambda n, v: (n + 1, fr.cumsum(v) + 1), (0, x))[1]
    given = np.float32([0.5, 1.5, 2.5])
    expected = given
    while expected.sum() < 1000:
        expected = np.cumsum(expected) + 1
    async with fr.Session(graph, options=ONE) as session:
        for _ in range(3):
            np.testing.assert_allclose(await session.run(y, {x: given}), expected, rtol=1e-5)
    calls = world.calls()
    assert calls.count("replay") > calls.count("launch") > 0


async def test_a_constant_of_the_host_may_decide_sizes_of_what_is_laid_out_at_once(world: World) -> None:
    """A target shape with an open batch is such a constant, as in heads of attention."""
    with fr.Graph(seed=1) as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None, 6))
        w = fr.Variable(fr.random.normal((6, 6), seed=1), name="w")
        loss = fr.mean(fr.square(fr.nn.softmax(fr.reshape(x @ w, (-1, 2, 3)))))
        (slope,) = fr.gradients(loss, [w])
    fed = np.ones((4, 6), np.float32)
    async with fr.Session(graph, options=ONE) as session:
        for _ in range(3):
            found = await session.run([loss, slope], {x: fed})
        world.calls()
        await session.run([loss, slope], {x: fed})
        told = world.calls()
        assert "replay" in told
        assert "launch" not in told
    async with fr.Session(graph, options=fr.Options(devices=("cpu:0", "recorder:0"), optimize=False)) as session:
        for mine, plain in zip(found, await session.run([loss, slope], {x: fed}), strict=True):
            np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-7)


async def test_arithmetic_of_shapes_asks_neither_the_host_nor_the_device(world: World) -> None:
    """Sizes that only a step knows part nothing: the step is one region, and no kernel computes them."""
    rng = np.random.default_rng(5)
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None, None))
        rows, columns = fr.shape_of(x)[0], fr.shape_of(x)[1]
        folded = fr.reshape(fr.exp(x), fr.stack([rows * 2, columns // 2]))
        y = fr.mean(folded, axis=0) + fr.reshape(fr.sum(x), (1,)) / fr.astype(rows, "float32")
    async with fr.Session(graph, options=ONE) as session:
        for shape in ((3, 4), (3, 4), (5, 2), (3, 4)):
            given = rng.normal(size=shape).astype(np.float32)
            found = await session.run(y, {x: given})
            expected = np.exp(given).reshape(2 * shape[0], -1).mean(axis=0) + given.sum() / shape[0]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            calls = world.calls()
        assert calls.count("finish") == 1


async def test_what_is_computed_of_constants_alone_is_computed_once(world: World) -> None:
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None,))
        loss = fr.mean(fr.square(x))
        (gradient,) = fr.gradients([loss], [x])
    (batch,) = np.float32([[1, 2, 3, 4]])
    async with fr.Session(graph, options=ONE) as session:
        found = await session.run(gradient, {x: batch})
        assert world.calls().count("launch") <= 3  # of 1/4 times 2 x: what counts and divides is no launch
    np.testing.assert_allclose(found, batch / 2)


async def test_a_step_of_many_regions_is_recorded_as_a_whole(world: World) -> None:
    """Each region has recordings of its own: a plan of more than one keeps would else record all anew in every run."""
    regions = 70
    with fr.Graph() as graph:
        y = x = fr.placeholder("float32", (4,))
        for _ in range(regions):
            with fr.device("recorder:0"):
                y = fr.exp(y)
            with fr.device("cpu:0"):
                y = fr.log(y)
    given = np.float32([0.1, 0.2, 0.3, 0.4])
    async with fr.Session(graph, options=fr.Options(devices=("recorder:0", "cpu:0"), optimize=False)) as session:
        for _ in range(4):
            found = await session.run(y, {x: given})
            calls = world.calls()
    np.testing.assert_allclose(found, given, rtol=1e-4)
    assert calls.count("replay") == regions
    assert calls.count("launch") == 0


def test_a_blocking_step_visits_the_lane_once(world: World) -> None:
    """A thread that waits in any case asks the lane itself, and gets results that are read there."""
    graph, x, loss, update, w = a_step()
    (batch,) = batches(4)
    on_host = fr.Options(soft_placement=True)
    with fr.BlockingSession(graph, options=ONE) as session, fr.BlockingSession(graph, options=on_host) as host:
        step, there = session.compile([loss, update, w], [x]), host.compile([loss, update, w], [x])
        for _ in range(5):
            (mine, _, held), (other, _, beside) = step(batch), there(batch)
            np.testing.assert_allclose(mine, other, rtol=1e-5)
            np.testing.assert_allclose(held, beside, rtol=1e-5)
            assert held.flags.writeable
        with pytest.raises(fr.FlowrtError):
            step(np.ones((4, 6), np.float32))
        assert np.isfinite(step(batch)[0])


async def test_a_step_of_several_regions_is_recorded_though_a_later_one_writes_what_an_earlier_one_reads(
    world: World,
) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (3,))
        with fr.device("recorder:0"):
            w = fr.Variable(np.ones(3, np.float32), name="w")
            y = x * w
        with fr.device("cpu:0"):
            z = fr.exp(y)
        with fr.device("recorder:0"):
            step = w.assign_sub(z * w / 8)
    given, expected = np.float32([0.1, 0.2, 0.3]), np.ones(3, np.float32)
    async with fr.Session(graph, options=fr.Options(devices=("recorder:0", "cpu:0"))) as session:
        for _ in range(20):
            world.opened[-1].calls.clear()
            await session.run(step, {x: given})
            expected = expected - np.exp(given * expected) * expected / 8
        calls = world.calls()
        np.testing.assert_allclose(await session.run(w), expected, rtol=1e-5)
    assert calls.count("replay") == 2
    assert "launch" not in calls


async def test_what_no_recording_holds_is_launched_each_time_and_the_log_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.limit = REFUSING
    given = batches(4, 4, 4, 4)
    there = await losses(ONE, given)
    np.testing.assert_allclose(there, await losses(fr.Options(), given), rtol=1e-5)
    (told,) = [line for line in caplog.messages if line.startswith("recorder:0 launches each time anew what it cannot")]
    assert "record: one of 27: matmul 'matmul' (" in told
    assert told.endswith(": OSError: a launch that no recording holds")


async def test_constants_go_where_memory_is_short(world: World) -> None:
    """Those of other sizes: a step that had its memory has it again."""
    world.limit = 20_000
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None,))
        (slope,) = fr.gradients(fr.mean(x * fr.cumsum(x)), [x])
    async with fr.Session(graph, options=ONE) as session:
        for size in (1000, 900, 800, 700, 600, 500, 1000):
            found = await session.run(slope, {x: np.ones(size, np.float32)})
            np.testing.assert_allclose(found, np.full(size, (size + 1) / size), rtol=1e-4)


@pytest.mark.parametrize("limit", [100_000, 140_000])
async def test_a_restored_variable_has_memory_though_what_is_recorded_with_it_keeps_that(
    world: World, tmp_path: Path, limit: int
) -> None:
    """It comes from the host while its old place is kept: the recordings of other sizes go first, then this one."""
    world.limit = limit
    with fr.Graph() as graph, fr.device("recorder:0"):
        x = fr.placeholder("float32", (None,))
        w = fr.Variable(np.ones(10_000, np.float32), name="w")
        y = fr.mean(w + fr.sum(x))
    async with fr.Session(graph, options=ONE, checkpoints=fr.Checkpoints(tmp_path)) as session:
        await session.save()
        for size in (2, 2, 1, 1):
            assert await session.run(y, {x: np.zeros(size, np.float32)}) == 1
        await session.restore()
        assert await session.run(y, {x: np.zeros(1, np.float32)}) == 1
