"""What a step takes is known before it runs: judged by what memory counts while it runs, and by the RSS."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from places import PYTHONPATH, ROOT
from session_world import host_of

import flowrt as fr
from flowrt.base.errors import ResourceError
from flowrt.base.spec import spec_of
from flowrt.sched.host.arena import ALIGNMENT
from flowrt.sched.host.memory import counted as bytes_counted
from flowrt.session.feeds import as_feed


def training(width: int, layers: int = 3, stddev: float = 0.05) -> tuple[fr.Graph, Any, list[Any]]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, width), name="x")
        y = x
        for i in range(layers):
            w = fr.Variable(fr.random.normal((width, width), stddev=stddev, seed=i), name=f"w{i}")
            y = fr.relu(y @ w)
        loss = fr.mean(fr.square(y - x))
        train = fr.optim.Momentum(0.01, 0.9).minimize(loss)
    return graph, x, [loss, train, y]


async def counted(session: fr.Session, fetches: Any, feeds: dict[Any, Any]) -> tuple[int, Any]:
    """The bytes that a run took at its peak, and what was predicted for it."""
    host = host_of(session)
    step = session._step(fetches, tuple(feeds))
    await step.register(session._open())
    predicted = step.registered.footprint([spec_of(np.asarray(a)) for a in feeds.values()])
    gc.collect()
    before = host.memory.held
    host.memory.forget_peak()
    await session.run(fetches, feeds)
    return host.memory.statistics().peak - before, predicted


async def test_the_predicted_peak_of_a_training_step_is_what_memory_counts() -> None:
    graph, x, fetches = training(96)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        taken, predicted = await counted(session, fetches, {x: np.ones((100, 96), np.float32)})
        assert (taken, predicted.left_out) == (predicted.peak, ())
        for batch in (40, 100):
            again, predicted = await counted(session, fetches, {x: np.ones((batch, 96), np.float32)})
            assert predicted.kept > 0
            assert again == predicted.peak - predicted.kept, "the arena of the first run is used again"


async def test_what_helpers_compute_in_is_predicted_and_counted_once() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, None), name="x")
        product = x @ x
    async with fr.Session(graph, options=fr.Options(threads=3)) as session:
        host, rooms, arena = host_of(session), [], 0
        for size in (64, 200, 100):
            before = host.helpers[1]
            taken, predicted = await counted(session, product, {x: np.ones((size, size), np.float32)})
            before_it, arena = arena, predicted.kept - bytes_counted(host.helpers[1]) + bytes_counted(before)
            lent = min(before_it, arena)  # that of the run before is used again, or goes as it is too small
            assert (taken, predicted.left_out) == (predicted.peak - lent, ())
            rooms.append(host.helpers[1] - before)
        assert rooms[1] > rooms[0] > 2 * 4 * 64
        assert not rooms[2], "there was enough already"
        fed = {x: np.ones((200, 200), np.float32)}
        _, again = await counted(session, product, fed)
        for _ in range(5):  # timed first, then perhaps divided
            taken, _ = await counted(session, product, fed)
            assert taken == again.peak - again.kept


async def test_the_copy_of_a_strided_feed_is_counted_and_predicted() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        y = fr.tanh(x) * x
    strided = np.ones((64, 100), np.float32).T
    for threads in (1, 2):
        async with fr.Session(graph, options=fr.Options(threads=threads)) as session:
            memory = host_of(session).memory
            plain = await session.explain(y, {x: strided.shape})
            told = await session.explain(y, {x: strided})
            assert told.peak_bytes == plain.peak_bytes + strided.nbytes
            memory.forget_peak()
            await session.run(y, {x: strided})
            assert memory.statistics().peak == told.peak_bytes


async def test_what_a_step_finds_out_only_as_it_runs_is_left_out_by_name_and_what_is_on_other_devices_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import_module("arena")
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        large = fr.FIFOQueue(2, "float32", (1 << 16,), name="large").dequeue() + 1.0
        some = fr.boolean_mask(x, x > 0.0) * 2.0
        with fr.device("arena:0"):
            there = x * 3.0
        back = there + 1.0
    nbytes = bytes_counted(4 << 16)
    expected = [
        (large, nbytes, ["dequeue 'large/dequeue'", "what it holds is known only when it runs"]),
        (some, 0, ["slice_along", "depends on values"]),
        (back, nbytes, []),
    ]
    for optimize in (True, False):
        options = fr.Options(threads=1, devices=("cpu:0", "arena"), optimize=optimize)
        async with fr.Session(graph, options=options) as session:
            for fetch, peak, told in expected:
                step = session._step(fetch, (x,))
                await step.register(session._open())
                predicted = step.registered.footprint([fr.Spec("float32", (1 << 16,))])
                assert predicted.peak == peak
                assert all(words in text for text in predicted.left_out for words in told)
                assert len(predicted.left_out) == bool(told)


async def test_a_direct_calls_outputs_are_counted() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (64, 64), name="x")
        y = fr.tanh(x) * 2.0
    async with fr.Session(graph, options=fr.Options(threads=1, optimize=False)) as session:
        memory, fed = host_of(session).memory, np.ones((64, 64), np.float32)
        step = session.compile(y, [x])
        while step._direct is None:
            await step(fed)
        gc.collect()
        before = memory.held
        value = await step(fed)
        assert memory.held - before == value.nbytes


@pytest.mark.parametrize("seed", range(12))
async def test_the_predicted_peak_of_random_steps_is_what_memory_counts(seed: int) -> None:
    rng = random.Random(seed)
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        v = fr.Variable(np.ones((64, 64), np.float32), name="v")
        values: list[Any] = [x, fr.constant(np.ones((64, 64), np.float32))]
        for _ in range(rng.randrange(3, 15)):
            a, b = rng.choice(values), rng.choice(values)
            made = [lambda a, b: fr.tanh(a), fr.add, lambda a, b: a @ v, lambda a, b: fr.reshape(a, (64, -1))]
            made += [lambda a, b: fr.cumsum(a, 0), lambda a, b: fr.identity(a), lambda a, b: fr.transpose(a) @ b]
            values.append(rng.choice(made)(a, b))
        fetches = [*rng.sample(values[1:], min(3, len(values) - 1)), v.assign(fr.transpose(v) @ v)]
    async with fr.Session(graph, options=fr.Options(threads=1, optimize=rng.random() < 0.5)) as session:
        taken, predicted = await counted(session, fetches, {x: np.ones((64, 64), np.float32)})
        assert taken == predicted.peak, f"seed {seed}"


async def test_the_predicted_peak_of_nodes_one_after_another_is_what_memory_counts() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        v = fr.Variable(np.ones((64, 64), np.float32), name="v")
        first = fr.tanh(x)
        same = fr.reshape(first, (-1, 32))
        tall = fr.concat([same, same], 0)
        sums = fr.cumsum(tall, 0)
        last = fr.sum(fr.reshape(fr.exp(sums), (-1, 64)) @ v, 0)
    options = fr.Options(threads=1, optimize=False, tapes=False)
    async with fr.Session(graph, options=options) as session:
        for fetches in (last, [last, tall], [same, last], [sums, first, v]):
            for rows in (100, 7):
                taken, predicted = await counted(session, fetches, {x: np.ones((rows, 64), np.float32)})
                assert (taken, predicted.left_out) == (predicted.peak, ())


async def test_a_step_that_does_not_fit_is_refused_before_it_runs() -> None:
    graph, x, fetches = training(128)
    async with fr.Session(graph, options=fr.Options(memory_limit=3_000_000, seed=1)) as session:
        small, large = np.ones((64, 128), np.float32), np.ones((4096, 128), np.float32)
        await session.run(fetches, {x: small})
        before = await session.run(graph.variables[0])
        with pytest.raises(ResourceError) as refused:
            await session.run(fetches, {x: large})
        for part in (
            "the step needs",
            "the memory_limit is 2.9 MiB",
            "float32[4096,128], 2.0 MiB",
            "test_footprint.py:",
        ):
            assert part in str(refused.value)
        np.testing.assert_array_equal(await session.run(graph.variables[0]), before)
        await session.run(fetches, {x: small})


async def test_variables_that_do_not_fit_are_refused() -> None:
    with fr.Graph() as graph:
        fr.Variable(fr.random.normal((1000, 1000)), name="huge")
    with pytest.raises(ResourceError, match=r"variable 'huge': float32\[1000,1000\], 3\.8 MiB \(variable\)"):
        async with fr.Session(graph, options=fr.Options(memory_limit=1_000_000)):
            pass


async def test_runs_on_other_shapes_compute_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRT_FUSED", "wait")  # what is fused once it is compiled takes less
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        y = fr.sum(fr.cumsum(x, 0) * x)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        held = []
        for n in [8000, *range(7990, 8300)]:
            await session.run(y, {x: np.ones(n, np.float32)})
            held.append(host_of(session).memory.held)
    assert held[1] == held[0] > 8000 * 4
    assert held[-1] <= held[0] + 4 * 299 + ALIGNMENT, "that of the longest; what is too short goes"


async def test_explain_tells_the_peak_before_the_step_runs() -> None:
    graph, x, fetches = training(96)
    async with fr.Session(graph, options=fr.Options(threads=1)) as session:
        memory = host_of(session).memory
        told = await session.explain(fetches, {x: (100, 96)})
        memory.forget_peak()
        await session.run(fetches, {x: np.ones((100, 96), np.float32)})
        assert told.peak_bytes == memory.statistics().peak
        gc.collect()
        again = await session.explain(fetches, {x: np.ones((100, 96), np.float32)})
        assert again.peak_bytes == told.peak_bytes, "rooms that are kept are not counted twice"
        open_shape = await session.explain(fetches)
        assert open_shape.peak_bytes is None
        assert "explain with feeds={'x': shape}" in str(open_shape)
        with pytest.raises(fr.SpecError, match=r"'x:0' .* is float32\[\?,96\]; it cannot be fed float32\[3,7\]"):
            await session.explain(fetches, {x: (3, 7)})


async def test_explain_is_text_and_html_with_the_largest_tensors() -> None:
    graph, x, fetches = training(96)
    async with fr.Session(graph) as session:
        told = await session.explain(fetches, {x: (1000, 96)})
    text, html = str(told), told._repr_html_()
    for part in ("peak memory", "float32[1000,96], 375.0 KiB", "test_footprint.py:", "tape of"):
        assert part in text
    assert html.count("<tr>") == 1 + len(told.tasks[0].tensors)
    assert "class='life'" in html
    assert told.seconds is not None
    assert told.seconds > 0


def test_the_predicted_peak_is_within_a_tenth_of_the_growth_of_rss() -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        import numpy as np
        import flowrt as fr
        from session_world import host_of
        from test_footprint import training

        def status(key):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

        graph, x, fetches = training(1024, layers=4)
        small, large = np.ones((8, 1024), np.float32), np.ones((6000, 1024), np.float32)
        with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
            session.run(fetches, {x: small})
            step = session.compile(fetches, [x])
            host = host_of(session._session)
            Path("/proc/self/clear_refs").write_text("5")
            before, held = status("VmRSS"), host.memory.held
            host.memory.forget_peak()
            step(large)
            print(status("VmHWM") - before, host.memory.statistics().peak - held)
    """)
    path = {**os.environ, "PYTHONPATH": PYTHONPATH}
    for _ in range(2):  # the first compiles what is not compiled yet, which takes memory of its own
        done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    growth, predicted = map(int, done.stdout.split())
    assert predicted > 64 << 20
    assert abs(growth - predicted) <= 0.1 * predicted, (growth, predicted)


async def test_feeds_are_not_copied_and_fetches_are_the_callers_own() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 64), name="x")
        same = fr.identity(x)
        v = fr.Variable(np.ones((64, 64), np.float32), name="v")
        bump = v.assign_add(np.ones((64, 64), np.float32))
    fed = np.ones((100, 64), np.float32)
    fed.setflags(write=False)
    assert as_feed(x, fed) is fed
    assert np.shares_memory(as_feed(x, fed[10:20]), fed)
    async with fr.Session(graph) as session:
        echoed, before = await session.run([same, v], {x: fed})
        assert not np.shares_memory(echoed, fed)
        echoed[...] = before[...] = 7
        await session.run(bump)
        np.testing.assert_array_equal(before, np.full((64, 64), 7, np.float32))
        np.testing.assert_array_equal(await session.run(v), np.full((64, 64), 2, np.float32))
    assert fed.max() == 1
