"""Devices beside the host's own: a third party's, from examples/, through sessions."""

from __future__ import annotations

import logging
import subprocess
import sys
import weakref
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from loop_world import assert_guarded, guarded
from places import ROOT

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path

EXAMPLES = str(ROOT / "examples")
ONE = fr.Options(devices=("arena:0",))
MIXED = fr.Options(devices=("cpu:0", "arena:0", "arena:1"))


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, found as a script beside it finds it."""
    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    return import_module("arena")


@pytest.fixture
def opened(arena: Any) -> Any:
    """What becomes of it when sessions open its devices: a small one, told to be slow."""
    kind = arena.ArenaKind(limit=1 << 20, delay=1e-4)
    fr.devices.register("arena", lambda: kind)
    yield kind.opened
    fr.devices.register("arena", arena.ArenaKind)


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


async def test_a_third_partys_device_trains_digits_within_its_memory(arena: Any) -> None:
    accuracy, memory = await arena.train(steps=250)
    assert accuracy >= 0.96
    assert 0 < memory.held < memory.peak <= memory.limit == 4 << 20


def test_a_device_takes_less_than_200_lines() -> None:
    assert len((ROOT / "examples" / "arena.py").read_text().splitlines()) < 200


async def losses(device: str, options: fr.Options) -> list[float]:
    with fr.Graph(seed=1) as graph, fr.device(device):
        x, y = fr.placeholder("float32", (None, 5)), fr.placeholder("int32", (None,))
        w = fr.Variable(fr.random.normal((5, 7), seed=1), name="w")
        b = fr.Variable(np.zeros(7, np.float32), name="b")
        v = fr.Variable(fr.random.normal((7, 3), seed=2), name="v")
        loss = fr.mean(fr.nn.softmax_cross_entropy(fr.tanh(x @ w + b) @ v, y))
        update = fr.optim.Adam(0.1).minimize(loss)
    rng = np.random.default_rng(3)
    async with fr.Session(graph, options=options) as session:
        batches = [(rng.normal(size=(n, 5)).astype("f"), rng.integers(0, 3, n)) for n in (4, 6, 4, 1, 6)]
        return [float((await session.run([loss, update], {x: a, y: b.astype("i4")}))[0]) for a, b in batches]


@pytest.mark.parametrize("tapes", [True, False])
async def test_what_is_trained_on_a_device_is_what_the_host_trains(opened: Any, tapes: bool) -> None:
    there = await losses("arena:0", fr.Options(devices=("cpu:0", "arena:0"), tapes=tapes))
    np.testing.assert_allclose(there, await losses("cpu:0", fr.Options()), rtol=1e-5)
    assert opened[0].launched > 50


async def test_a_graph_may_be_split_over_the_host_and_two_devices(opened: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 4))
        with fr.device("arena:0"):
            a = fr.exp(x)
            kept = fr.Variable(np.ones((1, 4), np.float32), name="kept")
        with fr.device("arena:1"):
            b = a * 2 + x
        c = fr.sum(a + b, axis=0)  # follows what it is made of
        with fr.device("cpu:0"):
            d, e = b - x, kept + a
        with fr.device("arena:0"):
            added = kept.assign_add(fr.reshape(c, (1, 4)))
    given = values(3, 4)
    async with fr.Session(graph, options=MIXED) as session:
        found = await session.run([a, b, c, d, e, x, added], {x: given})
        after = await session.run(kept)
        text = str(await session.explain([a, b, d]))
    expected = np.exp(given)
    naive = [expected, 2 * expected + given, (3 * expected + given).sum(axis=0), 2 * expected, 1 + expected, given]
    for mine, theirs in zip(found, naive, strict=False):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    np.testing.assert_allclose(after, 1 + naive[2][None], rtol=1e-5)
    assert "issued on arena:1" in text
    assert "brought to cpu:0" in text
    assert "broken by" not in text


async def test_an_update_is_computed_beside_its_variable(opened: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 4), name="x")
        with fr.device("cpu:0"):
            w = fr.Variable(np.ones((4, 2), np.float32), name="w")
        with fr.device("arena:0"):
            v = fr.Variable(np.ones((2, 2), np.float32), name="v")
            loss = fr.sum(fr.square(x @ w @ v))
        update = fr.optim.Adam(0.1).minimize(loss)
    async with fr.Session(graph, options=MIXED) as session:
        lines = (await session.explain([loss, update])).placement
        await session.run([loss, update], {x: values(3, 4)})
    there, here = (next(line for line in lines if device in line) for device in ("arena:0", "cpu:0"))
    assert "w/steps/assign" in here
    assert "v/steps/assign" in there
    assert " w/" not in there
    assert " v/" not in here


async def test_a_step_that_does_not_fit_names_the_devices_largest_tensors_and_the_next_runs(opened: Any) -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (None,), name="x")
        table = fr.Variable(np.zeros(1000, np.float32), name="table")
        y = fr.concat([fr.exp(x), fr.exp(-x), table])
    async with fr.Session(graph, options=fr.Options(devices=("arena",), device_memory_limit=300_000)) as session:
        with pytest.raises(fr.ResourceError) as caught:
            await session.run(y, {x: np.zeros(30_000, np.float32)})
        text = str(caught.value)
        assert "no memory on arena:0 for 117.2 KiB more, of float32[30000]" in text
        assert "test_devices.py:" in text
        assert "it may hold 293.0 KiB" in text
        assert text.index("Its largest tensors: ") < text.index("exp 'exp' (") < text.index("variable 'table'")
        assert len(await session.run(y, {x: np.zeros(3, np.float32)})) == 1006
        memory = fr.devices.memory(session)["arena:0"]
        assert memory.peak <= 300_000
        assert memory.held < 10_000


async def test_memory_comes_back_however_often_a_step_runs(opened: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 8))
        y = fr.tanh(x @ fr.Variable(np.eye(8, dtype=np.float32), name="w"))
    async with fr.Session(graph, options=ONE) as session:
        held = set()
        for rows in (1, 5, 1, 5, 1):
            await session.run(y, {x: values(rows, 8)})
            held.add(fr.devices.memory(session)["arena:0"].held)
        assert len(held) == 1


async def test_a_kernel_that_fails_says_so_and_nothing_after_it_is_written(opened: Any) -> None:
    with fr.Graph() as graph:
        i = fr.placeholder("int64", (None,))
        row = fr.take(fr.Variable(np.ones((3, 2), np.float32), name="rows"), i)
        total = fr.Variable(np.zeros(2, np.float32), name="total")
        step = total.assign_add(fr.sum(row, axis=0))
    async with fr.Session(graph, options=ONE) as session:
        await session.run(step, {i: [0, 1]})
        with pytest.raises(fr.FlowrtError, match=r"test_devices.py:\d+\): an index is out of range"):
            await session.run(step, {i: [7]})
        assert (await session.run(total)).tolist() == [2, 2]


async def test_rows_of_a_table_are_updated_where_it_lies(opened: Any) -> None:
    with fr.Graph() as graph:
        i = fr.placeholder("int64", (None,))
        table = fr.Variable(values(9, 4), name="table")
        loss = fr.sum(fr.square(fr.take(table, i)))
        update = fr.optim.Adam(0.1).minimize(loss)
    found = []
    for options in (ONE, fr.Options()):
        async with fr.Session(graph, options=options) as session:
            before = await session.run(table)
            for batch in ([1, 1, 3], [3, 8]):
                await session.run(update, {i: batch})
            found.append(await session.run(table))
        assert (found[-1][[0, 2]] == before[[0, 2]]).all()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


async def test_checkpoints_hold_what_lies_on_a_device(opened: Any, tmp_path: Path) -> None:
    with fr.Graph() as graph:
        w = fr.Variable(np.zeros(3, np.float32), name="w")
        step = w.assign_add(np.ones(3, np.float32))
    kept = fr.Checkpoints(str(tmp_path))
    async with fr.Session(graph, options=ONE, checkpoints=kept) as session:
        await session.run(step)
        await session.save()
    for options in (ONE, fr.Options()):
        async with fr.Session(graph, options=options, checkpoints=fr.Checkpoints(str(tmp_path))) as session:
            assert (await session.run(w)).tolist() == [1, 1, 1]


async def test_a_run_that_is_cancelled_ends_with_the_kernel_it_is_at(arena: Any) -> None:
    kind = arena.ArenaKind(delay=0.02)
    fr.devices.register("arena", lambda: kind)
    with fr.Graph() as graph:
        y = fr.placeholder("float32", (2,), name="x")
        x = y
        for _ in range(200):
            y = fr.tanh(y)
    try:
        async with fr.Session(graph, options=ONE) as session:
            with pytest.raises(fr.StepTimeout):
                await session.run(y, {x: [1.0, 2.0]}, timeout=0.2)
            assert kind.opened[0].launched < 200
    finally:
        fr.devices.register("arena", arena.ArenaKind)


async def test_devices_that_are_not_here_are_a_sentence_in_the_log(
    arena: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with fr.Graph() as graph:
        y = fr.constant(1.0) + 1.0
    with caplog.at_level(logging.WARNING):
        async with fr.Session(graph, options=fr.Options(devices=("cuda:0", "arena:7", "cpu:0"))) as session:
            assert await session.run(y) == 2
            assert list(fr.devices.memory(session)) == ["cpu:0"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("cuda:0 is not used: ")
    assert said[1] == "arena:7 is not used: there are arena:0, arena:1"


def looping(device: str) -> tuple[fr.Graph, Any]:
    """A graph whose loop no device but the host runs: how large something is, only an iteration knows."""
    with fr.Graph() as graph, fr.device(device):
        x = fr.placeholder("float32", (), name="x")
        y = fr.while_loop(lambda v: v < 100, lambda v: v + fr.sum(fr.ones(fr.reshape(fr.astype(v, "int64"), 1))), x + 1)
    return graph, [x, y]


async def turned(device: str, options: fr.Options) -> list[Any]:
    """What loops and branches with bodies on a device come to."""
    with fr.Graph(seed=2) as graph, fr.device(device):
        x = fr.placeholder("float32", (None, 4), name="x")
        w = fr.Variable(values(4, 4, seed=1) / 4, name="w")
        doubled = fr.while_loop(lambda n, v: fr.sum(v) < 50, lambda n, v: (n + 1, v * 2), (fr.constant(0), fr.abs(x)))
        state, stacked = fr.scan(
            lambda h, row: (fr.tanh(h + row @ w), h * 2), fr.zeros((1, 4)), fr.reshape(x, (3, 1, 4))
        )
        taken = fr.cond(fr.sum(x) > 0, lambda: fr.exp(x), lambda: x @ w)
        noisy = fr.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v + fr.random.normal((4,), seed=3)), (0, x[0]))
        update = fr.optim.Momentum(0.1, 0.9).minimize(fr.sum(fr.square(state)))
        fetched = [doubled, state, stacked, taken, noisy, update]
    found: list[Any] = []
    async with fr.Session(graph, options=options) as session:
        found += [(await session.run(fetched, {x: values(3, 4, seed=seed)}))[:5] for seed in range(4)]
        lines = (await session.explain(fetched)).placement
        found.append([await session.run(w)])
    loops = [line for line in lines if "while" in line or "cond" in line or "scan" in line]
    assert loops
    assert all(device in line for line in loops if "gradients" not in line), loops
    return found


@pytest.mark.parametrize("in_parts", [True, False])
async def test_loops_and_branches_are_carried_out_where_their_bodies_are(
    opened: Any, arena: Any, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_parts:
        monkeypatch.delattr(arena.Arena, "part")
    there = await turned("arena:0", fr.Options(devices=("cpu:0", "arena:0")))
    here = await turned("cpu:0", fr.Options())
    for mine, host in zip(there, here, strict=True):
        for one, other in zip(mine, host, strict=True):
            for a, b in zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (one, other)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


async def test_a_body_on_a_device_that_sizes_rule_out_and_that_does_not_run_is_no_error(opened: Any) -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        x, rows = fr.placeholder("float32", (None,)), fr.placeholder("float32", (None, None))
        made, mapped = guarded(x), fr.map_fn(lambda r: r - fr.max(rows), rows)
    async with fr.Session(graph, options=fr.Options(devices=("arena",))) as session:
        for size in (0, 3, 0, 7):
            fed = np.arange(size, dtype=np.float32) + 1
            found, of_rows = await session.run([made, mapped], {x: fed, rows: np.ones((size, 4), np.float32)})
            assert_guarded(found, fed)
            assert of_rows.shape == (size, 4)


async def test_what_a_device_cannot_do_is_refused_at_the_users_line_with_what_would_do(opened: Any) -> None:
    graph, (x, y) = looping("arena:0")
    async with fr.Session(graph, options=ONE) as session:
        with pytest.raises(fr.PlacementError) as caught:
            await session.run(y, {x: 2.0})
    text = str(caught.value)
    assert "test_devices.py:" in text
    assert "no kernel for (float32" in text
    assert text.endswith(
        'it has one on cpu; ask for that, as in fr.device("cpu:0"), or for fr.Options(soft_placement=True)'
    )


async def test_what_a_device_cannot_do_goes_elsewhere_where_that_is_asked_for_and_the_log_says_so(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graph, (x, y) = looping("arena:0")
    options = fr.Options(devices=("arena:0",), soft_placement=True)
    with caplog.at_level(logging.WARNING):
        async with fr.Session(graph, options=options) as session:
            assert await session.run(y, {x: 2.0}) == 192
    (record,) = caplog.records
    assert "is on /job:local/task:0/device:cpu:0, as arena has no kernel for (float32" in record.getMessage()
    assert opened[0].launched > 0, "what it can do stays"


async def test_a_device_that_is_not_there_is_a_wish_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with fr.Graph() as graph, fr.device("cuda:1"):
        x = fr.placeholder("float32", (2,), name="x")
        y = fr.exp(x) + fr.Variable(np.ones(2, np.float32), name="w")
    async with fr.Session(graph, options=fr.Options(soft_placement=True)) as session:
        assert (await session.run(y, {x: [0.0, 0.0]})).tolist() == [2, 2]
    assert "is elsewhere, as there is no device /device:cuda:1" in caplog.text
    with pytest.raises(fr.PlacementError, match=r"there is no device .*; fr.Options\(devices=...\) and a node's"):
        async with fr.Session(graph) as session:
            await session.run(y, {x: [0.0, 0.0]})


@pytest.mark.parametrize(
    ("names", "why"),
    [(("gpu0!",), "named as in cpu:0"), (("cpu:1",), "the host is one device"), ((3,), "named as"), (7, "devices: ")],
)
def test_names_that_are_none_are_refused(names: Any, why: str) -> None:
    with pytest.raises(fr.GraphError, match=why):
        fr.Options(devices=names)


@pytest.mark.parametrize("given", [{"devices": "cuda"}, {"device_memory_limit": 1e9}])
async def test_devices_of_a_session_on_a_cluster_are_its_nodes_own(given: Any) -> None:
    with fr.Graph() as graph:
        fr.constant(1.0)
    cluster = fr.ClusterSpec({"worker": ["127.0.0.1:7001"]})
    with pytest.raises(fr.GraphError, match=rf"test_devices.py:\d+: Options\({next(iter(given))}=.*with --devices"):
        async with fr.Session(graph, cluster, options=fr.Options(**given)):
            pass


@pytest.mark.parametrize("limit", [0, 1.5, float("nan"), "1", True])
@pytest.mark.parametrize("name", ["transfer_budget", "memory_limit", "device_memory_limit"])
def test_a_limit_is_a_whole_number_of_bytes_and_some(name: str, limit: Any) -> None:
    with pytest.raises(fr.GraphError, match=f"Options: {name} is a number of bytes, from 1 up, got {limit!r}"):
        fr.Options(**{name: limit})
    fr.Options(**{name: 1e9})


async def test_a_kind_that_nobody_registered_is_refused() -> None:
    with fr.Graph() as graph:
        fr.constant(1.0)
    with pytest.raises(fr.GraphError, match="nobody has registered the devices 'npu': there are cpu, "):
        async with fr.Session(graph, options=fr.Options(devices=("npu",))):
            pass


@pytest.mark.parametrize("kind", ["cpu", "GPU", "gpu:0", None, 5])
def test_a_kind_of_ones_own_is_named_by_small_letters_and_is_not_the_host(kind: Any) -> None:
    with pytest.raises(fr.GraphError, match=f"and not cpu; got {kind!r}"):
        fr.devices.register(kind, lambda: None)


def test_what_is_registered_makes_the_kind() -> None:
    with pytest.raises(fr.GraphError, match=r"what is registered as 'book' is called to make the kind, .*; got 7"):
        fr.devices.register("book", 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        ("Kind", "supports", None, "the kind of the devices 'arena', .* has no supports; see flowrt.devices.Kind"),
        ("Arena", "close", None, "the driver of arena:0, .* has no close; see flowrt.devices.Driver"),
        ("Kind", "open", lambda self, index: None, "the driver of arena:0, None, has no limit, allocate, "),
        ("Kind", "count", lambda self: "2", "count.. of the devices 'arena' answers how many there are, .* got '2'"),
        ("Kind", "supports", lambda self, op, dtypes: 1 // 0, "the devices 'arena' fail to say whether .* exp: Zero"),
        (
            "Arena",
            "prepare",
            lambda self, *given: None,
            r"exp 'exp' \(.*: TypeError: prepare answers a kernel; got None",
        ),
        ("Arena", "close", lambda self: 1 // 0, "arena:0, closed: ZeroDivisionError: "),
    ],
)
def test_what_is_wrong_with_a_device_of_ones_own_is_said(
    arena: Any, monkeypatch: pytest.MonkeyPatch, where: str, name: str, value: Any, says: str
) -> None:
    of = getattr(arena, where.replace("Kind", "ArenaKind"))
    if value is None:
        monkeypatch.delattr(of, name)
    else:
        monkeypatch.setattr(of, name, value)
    fr.devices.register("arena", arena.ArenaKind)
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (2,), name="x")
        y = fr.exp(x)

    def run() -> None:
        with fr.BlockingSession(graph, options=ONE) as session:
            session.run(y, {x: [0.0, 1.0]})

    with pytest.raises(fr.FlowrtError, match=says):
        run()
    monkeypatch.undo()
    fr.devices.register("arena", arena.ArenaKind)


ASKED = """
import asyncio, sys
import flowrt as fr
with fr.Graph() as graph:
    y = fr.constant(1.0) + 1.0
async def main():
    async with fr.Session(graph, options=fr.Options(devices="cuda")) as session:
        await session.run(y)
        if list(fr.devices.memory(session)) == ["cpu:0"]:
            print(*[name for name in sys.modules if name.split(".")[0] in ("numba_cuda", "cuda")])
asyncio.run(main())
"""


def test_no_cuda_package_is_imported_where_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == ""
    assert "cuda is not used: " in done.stderr


def a_failing_arena(arena: Any, name: str, after: int, error: Exception | None = None) -> Any:
    """The example's devices, whose ``name`` fails, once it was asked for so often: as the device is lost, if no other
    ``error`` is said."""

    class Failing(arena.Arena):  # type: ignore[name-defined,misc]
        asked = 0

    def ask(self: Any, *args: Any) -> Any:
        self.asked += 1
        if self.asked > after:
            raise error or fr.DeviceLost("an illegal address")
        return getattr(arena.Arena, name)(self, *args)

    setattr(Failing, name, ask)

    class Kind(arena.ArenaKind):  # type: ignore[name-defined,misc]
        def open(self, index: int) -> Any:
            return Failing(1 << 20, 0.0) if not index else super().open(index)

    return Kind()


@pytest.mark.parametrize(("name", "says"), [("launch", "tanh 'second' ("), ("finish", "one of ")])
async def test_a_device_that_is_lost_says_where_and_the_host_and_other_devices_go_on(
    arena: Any, name: str, says: str
) -> None:
    kind = a_failing_arena(arena, name, after=1 if name == "launch" else 0)
    fr.devices.register("arena", lambda: kind)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,), name="x")
        with fr.device("arena:0"):
            broken = fr.tanh(fr.exp(x), name="second")
        with fr.device("arena:1"):
            well = fr.exp(x)
        here = x + 1
    try:
        async with fr.Session(graph, options=MIXED) as session:
            with pytest.raises(fr.DeviceLost) as caught:
                await session.run(broken, {x: [0.0, 0.0]})
            assert f"arena:0 is lost: {says}" in str(caught.value)
            assert "tanh 'second' (" in str(caught.value)
            assert "test_devices.py:" in str(caught.value)
            assert "): an illegal address" in str(caught.value)
            with pytest.raises(fr.DeviceLost, match="arena:0 is lost: "):
                await session.run(broken, {x: [0.0, 0.0]})
            assert (await session.run(well, {x: [0.0, 0.0]})).tolist() == [1, 1]
            assert (await session.run(here, {x: [0.0, 0.0]})).tolist() == [1, 1]
    finally:
        fr.devices.register("arena", arena.ArenaKind)


@pytest.mark.parametrize(
    ("name", "error", "kind", "says"),
    [
        ("prepare", KeyError("tanh"), fr.FlowrtError, "tanh 'second' (.*): KeyError: 'tanh'"),
        ("launch", OSError("too large a grid"), fr.FlowrtError, "tanh 'second' (.*): OSError: too large a grid"),
        ("launch", MemoryError("a stack"), fr.ResourceError, "tanh 'second' (.*): no memory: a stack"),
        ("finish", OSError("odd"), fr.FlowrtError, "one of 2: exp 'exp' (.*), tanh 'second' (.*): OSError: odd"),
    ],
)
async def test_whatever_a_driver_raises_becomes_an_error_that_names_the_op_and_the_users_line(
    arena: Any, name: str, error: Exception, kind: type[Exception], says: str
) -> None:
    failing = a_failing_arena(arena, name, after=0 if name == "finish" else 1, error=error)
    fr.devices.register("arena", lambda: failing)
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (2,), name="x")
        y = fr.tanh(fr.exp(x), name="second")
    try:
        async with fr.Session(graph, options=MIXED) as session:
            with pytest.raises(kind, match=says.replace("(.*)", r"\(.*test_devices.py:\d+\)")) as caught:
                await session.run(y, {x: [0.0, 0.0]})
            assert caught.value.__cause__ is error
    finally:
        fr.devices.register("arena", arena.ArenaKind)


@pytest.mark.parametrize(
    ("name", "after", "says"),
    [
        ("allocate", 0, "2 launches from read_variable 'w/value' (.*) on: OSError: odd"),
        ("write", 0, "variable 'w' (.*), brought to arena:0: OSError: odd"),
        ("write", 1, "'x' (.*), brought to arena:0: OSError: odd"),
        ("copy", 0, "loop 'scan' (.*), a row, copied on arena:0: OSError: odd"),
        ("read", 0, "tanh 'second' (.*), read from arena:0: OSError: odd"),
    ],
)
async def test_what_goes_wrong_with_memory_names_the_op_or_variable_and_the_users_line(
    arena: Any, name: str, after: int, says: str
) -> None:
    error = OSError("odd")
    failing = a_failing_arena(arena, name, after=after, error=error)
    fr.devices.register("arena", lambda: failing)
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (3, 2), name="x")
        y = x * fr.Variable(np.ones(2, np.float32), name="w")
        if name == "copy":
            y = fr.scan(lambda h, row: (h + row, h), fr.zeros((2,)), y)[1]
        y = fr.tanh(y, name="second")
    try:
        async with fr.Session(graph, options=MIXED) as session:
            with pytest.raises(fr.FlowrtError, match=says.replace("(.*)", r"\(.*test_devices.py:\d+\)")) as caught:
                await session.run(y, {x: np.ones((3, 2), np.float32)})
            assert caught.value.__cause__ is error
    finally:
        fr.devices.register("arena", arena.ArenaKind)


async def test_a_replica_whose_device_in_this_process_is_lost_is_gone_without(
    arena: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kind = a_failing_arena(arena, "launch", after=2)
    fr.devices.register("arena", lambda: kind)

    def loss_fn(inputs: Any) -> fr.Tensor:
        return fr.mean(fr.square(fr.tanh(inputs["x"] @ fr.Variable(values(4, 3), name="w"))))

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"x": fr.Spec("float32", (None, 4))},
            optimizer=fr.optim.SGD(0.1),
            replicas=2,
            policy=fr.train.FirstOf(1),
            server_device="cpu:0",
            worker_device="/device:arena:{}",
        )
    batches = ({"x": values(2, 4, seed=seed)} for seed in range(1000))
    without = 0
    try:
        async with fr.Session(graph, options=MIXED) as session, aclosing(trainer.steps(session, batches)) as reports:
            async for report in reports:
                without = 0 if 0 in (*report.kept, *report.late) else without + 1
                if "goes on without" in caplog.text and without == 5:
                    break
    finally:
        fr.devices.register("arena", arena.ArenaKind)
    assert "replicated goes on without replica 0: arena:0 is lost: " in caplog.text


async def test_a_step_that_cannot_fit_is_refused_before_anything_of_it_runs(opened: Any) -> None:
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (None,), name="x")
        count = fr.Variable(np.zeros((), np.float32), name="count")
        counted = count.assign_add(fr.constant(1.0))
        with fr.control_dependencies([counted]):
            y = fr.concat([fr.cumsum(x), fr.cumsum(-x)], name="whole")
    async with fr.Session(graph, options=fr.Options(devices=("arena",), device_memory_limit=100_000)) as session:
        await session.run(y, {x: np.zeros(1000, np.float32)})
        before = opened[0].launched
        with pytest.raises(fr.ResourceError, match=r"concat 'whole' \(.*test_devices.py:\d+\): no memory on arena:0"):
            await session.run(y, {x: np.zeros(8000, np.float32)})
        assert opened[0].launched == before
        assert await session.run(count) == 1


async def test_the_words_of_every_kernel_stay_until_what_was_issued_is_done(
    opened: Any, arena: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device looks at them when it comes to the launch, also at those of a kernel that cannot fail."""
    monkeypatch.delattr(arena.Arena, "part")  # its nodes are issued one by one
    given: list[weakref.ref[Any]] = []
    there: list[bool] = []
    launch = arena.Arena.launch

    def launched(self: Any, kernel: Any, operands: Any, words: Any) -> None:
        given.append(weakref.ref(words))
        launch(self, kernel, operands, words)

    monkeypatch.setattr(arena.Arena, "launch", launched)
    monkeypatch.setattr(arena.Arena, "finish", lambda self: there.extend(words() is not None for words in given))
    with fr.Graph() as graph, fr.device("arena:0"):
        x = fr.placeholder("float32", (3,))
        y = fr.cumsum(fr.tanh(x) + fr.random.normal((3,), seed=1))
    async with fr.Session(graph, options=ONE) as session:
        await session.run(y, {x: np.zeros(3, np.float32)})
    assert len(there) >= 2
    assert all(there)


@pytest.mark.parametrize("whole", [True, False])
async def test_what_was_issued_is_waited_for_where_the_next_launch_is_refused(
    opened: Any, arena: Any, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Its words stay until then, as those of a step that ends well do."""
    if not whole:
        monkeypatch.delattr(arena.Arena, "part")
    given: list[weakref.ref[Any]] = []
    there: list[bool] = []

    def launched(self: Any, kernel: Any, operands: Any, words: Any) -> None:
        if given:
            raise OSError("one launch was enough")
        given.append(weakref.ref(words if words.base is None else words.base))

    monkeypatch.setattr(arena.Arena, "launch", launched)
    monkeypatch.setattr(arena.Arena, "finish", lambda self: there.extend(words() is not None for words in given))
    with fr.Graph() as graph, fr.device("arena:0"):
        y = fr.cumsum(fr.tanh(x := fr.placeholder("float32", (3,))))
    async with fr.Session(graph, options=ONE) as session:
        with pytest.raises(fr.FlowrtError, match=r"cumsum.*: OSError: one launch was enough"):
            await session.run(y, {x: np.zeros(3, np.float32)})
        assert there == [True]
