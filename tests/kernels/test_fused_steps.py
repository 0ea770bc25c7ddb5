"""Steps of which parts are fused answer what they do as written."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.kernels.fusion import fused
from flowrt.kernels.store.background import wait_compiled
from flowrt.session.session import Options

Array = np.ndarray[Any, Any]
F4 = "float32"


@pytest.fixture(autouse=True)
def small_ones_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


OPERANDS = {"row": (5,), "column": (6, 1), "dense": (6, 5), "scalar": (), "wide": (7, 12)}


def grow(rng: np.random.Generator, values: list[Any], count: int) -> None:
    """Add random elementwise nodes, floats and bools mixed."""
    floats = [v for v in values if v.dtype == F4]
    for _ in range(count):
        a, b = (floats[i] for i in rng.integers(len(floats), size=2))
        match rng.integers(9):
            case 0:
                made = a + b
            case 1:
                made = fr.tanh(a) * b
            case 2:
                made = fr.where(fr.less(a, b), a, b * 0.5)
            case 3:
                made = fr.astype(fr.astype(fr.maximum(a, b), "int32") + 1, F4)
            case 4:
                made = fr.relu(a) - fr.sigmoid(b)
            case 5:
                made = fr.minimum(a, 2.0)
            case 6 if a.shape == b.shape:
                made = fr.add_n([a, b, a])
            case 7:
                made = fr.abs(a) / (fr.abs(b) + 1.0)
            case _:
                made = fr.astype(fr.isfinite(a - b), F4)
        floats.append(made)
        values.append(made)


@pytest.mark.parametrize("seed", range(4))
async def test_random_programs_answer_fused_what_they_do_as_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with fr.Graph() as graph:
        feeds = {fr.placeholder(F4, shape): np.asarray(rng.normal(size=shape), F4) for shape in OPERANDS.values()}
        *operands, wide = list(feeds)
        values: list[Any] = [*operands, wide[1:, 1:6], wide[:6, 7:], wide[0, 2:7], wide[:6, 3:4]]
        grow(rng, values, 12)
        fetches = [values[i] for i in {len(values) - 1, *rng.integers(8, len(values), size=3).tolist()}]
    async with fr.Session(graph, options=Options(optimize=False, threads=1)) as session:
        judge = await session.run(fetches, feeds)
    async with fr.Session(graph, options=Options(threads=1)) as session:
        apart = [await session.run(fetches, feeds) for _ in range(2)]
        assert wait_compiled(120)
        together = [await session.run(fetches, feeds) for _ in range(2)]
    for found in (*apart, *together):
        for mine, other in zip(found, judge, strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5, err_msg=f"seed {seed}")


def test_a_fed_size_of_one_is_right_too() -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder(F4, (None, 3)), fr.placeholder(F4, (None, 3))
        z = fr.exp(x) * 2.0 + y
    with fr.BlockingSession(graph) as session:
        for rows in ((4, 4), (1, 4), (4, 1)):
            a, b = (np.full((n, 3), 0.5, F4) for n in rows)
            np.testing.assert_allclose(session.run(z, {x: a, y: b}), np.exp(a) * 2 + b, rtol=1e-6)


@pytest.mark.parametrize("tapes", [True, False], ids=["tape", "machine"])
def test_slopes_of_means_are_repeated_to_what_a_step_is_fed(tapes: bool) -> None:
    """The shape to repeat to is a value, and no other operand may have it: here a row is added to each fed row."""
    with fr.Graph() as graph:
        x, y = fr.placeholder(F4, (None, 3)), fr.placeholder(F4, (None, 3))
        slopes = fr.gradients(fr.mean(fr.square(x * y) + x), [x, y])
    with fr.BlockingSession(graph, options=Options(tapes=tapes, threads=1)) as session:
        for _ in range(2):
            for rows in ((4, 4), (1, 4), (4, 1), (2, 2), (1, 1)):
                a, b = (np.linspace(-1, 1, 3 * n, dtype=F4).reshape(n, 3) for n in rows)
                count = 3 * max(rows)
                da = (2 * a * b * b + 1 + np.zeros_like(a * b)) / count
                db = 2 * a * b * a / count
                judge = [d.sum(0, keepdims=True) if n == 1 else d for d, n in zip((da, db), rows, strict=True)]
                for found, other in zip(session.run(slopes, {x: a, y: b}), judge, strict=True):
                    np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-6, err_msg=str(rows))
            assert wait_compiled(120)


@pytest.mark.parametrize(
    "optimizer",
    [fr.optim.Momentum(0.1, 0.9), fr.optim.Adam(0.1), fr.optim.AdaGrad(0.1), fr.optim.RMSProp(0.1, momentum=0.5)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimisers_move_variables_in_one_pass_as_they_do_apart(optimizer: Any) -> None:
    start = np.linspace(-1, 1, 60, dtype=F4)

    def train(options: Options) -> list[Array]:
        with fr.Graph() as graph:
            x = fr.placeholder(F4, (60,))
            weight = fr.Variable(start, name="weight")
            move = optimizer.minimize(fr.sum(fr.square(weight * x)))
            slots = [v for v in graph.variables if v.shape]
        with fr.BlockingSession(graph, options=options) as session:
            step = session.compile(move, [x])
            for number in range(6):
                step(start + number)
                assert wait_compiled(120)
            return list(session.run(slots))

    with np.errstate(all="ignore"):
        judge = train(Options(optimize=False, tapes=False, threads=1))
        for options in (Options(threads=1), Options(threads=2)):
            for mine, other in zip(train(options), judge, strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


async def test_steps_that_run_at_once_lose_no_addition() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(F4, (4000,))
        total = fr.Variable(np.zeros(4000, F4))
        move = total.assign_add(fr.exp(x * 0.0) * 2.0 + total * 0.0)
    async with fr.Session(graph, options=Options(threads=2)) as session:
        step = session.compile(move, [x])
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(step(np.ones(4000, F4)))
            assert wait_compiled(120)
        np.testing.assert_array_equal(await session.run(total), np.full(4000, 80, F4))


def test_a_cell_written_by_hand_is_fused_in_loops_forward_and_back() -> None:
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(5, 4, 3)).astype(F4), rng.normal(size=(3, 9)).astype(F4)

    def train(options: Options) -> list[float]:
        with fr.Graph() as graph:
            rows, weight = fr.placeholder(F4, (5, None, 3)), fr.Variable(start)

            def cell(h: Any, row: Any) -> Any:
                gates = fr.matmul(row, weight) + fr.matmul(h, weight)
                update, reset = fr.sigmoid(gates[:, :3]), fr.sigmoid(gates[:, 3:6])
                h = update * h + (1.0 - update) * fr.tanh(reset * gates[:, 6:])
                return h, h

            _, states = fr.scan(cell, fr.zeros((4, 3)), rows)
            loss = fr.mean(fr.square(states - 0.5))
            move = fr.optim.SGD(1.0).minimize(loss)
        with fr.BlockingSession(graph, options=options) as session:
            step, losses = session.compile([loss, move], [rows]), []
            for _ in range(5):
                losses.append(float(step(x)[0]))
                assert wait_compiled(120)
            return losses

    judge = train(Options(optimize=False, tapes=False, threads=1))
    assert judge[-1] < judge[0]
    for options in (Options(threads=1), Options(threads=2), Options(tapes=False, threads=1)):
        np.testing.assert_allclose(train(options), judge, rtol=1e-5)
