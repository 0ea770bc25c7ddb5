"""Sums of squares of updates: right, whatever their size, dtype and place, and the noise scale of a real run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.sched.drivers.measuring import BLOCK, square_of

Array = np.ndarray[Any, Any]


def naive(values: Any) -> float:
    return float((np.asarray(values, np.float64) ** 2).sum())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2 * BLOCK + 7,), (3, BLOCK)])
def test_dense_parts_are_squared_and_added_up(dtype: str, shape: tuple[int, ...]) -> None:
    parts = [np.asarray(np.random.default_rng(1).normal(size=shape), dtype) for _ in range(2)]
    assert square_of(parts, [False, False]) == pytest.approx(sum(map(naive, parts)), rel=1e-5)


@pytest.mark.parametrize("size", [3e38, 1e25, 1e-25, 1e-40])
def test_what_is_finite_measures_finite_and_not_nothing(size: float) -> None:
    part = np.full(1000, size, np.float32)
    assert square_of([part], [False]) == pytest.approx(1000 * float(np.float32(size)) ** 2, rel=1e-5)
    mixed = np.array([size, 1.0, 1e-3] * 100, np.float32)
    assert square_of([mixed], [False]) == pytest.approx(naive(mixed), rel=1e-5)


def test_a_square_beyond_float64_is_infinite_and_tells_nothing() -> None:
    with np.errstate(over="ignore"):
        assert square_of([np.full(3, 1e300)], [False]) == np.inf


@pytest.mark.parametrize("rows", [1, 7, 5000])
@pytest.mark.parametrize("width", [(), (3,), (2, 40)])
@pytest.mark.parametrize("many", [1, 4])
def test_equal_rows_are_added_up_before_they_are_squared(rows: int, width: tuple[int, ...], many: int) -> None:
    rng = np.random.default_rng(rows)
    indices = rng.integers(0, 50, rows * many)
    values = rng.normal(size=(rows, *width)).astype(np.float32)
    table = np.zeros((50, *width))
    np.add.at(table, indices, np.repeat(values, many, axis=0))
    dense = rng.normal(size=4).astype(np.float32)
    found = square_of([dense, indices, values], [False, True, True])
    assert found == pytest.approx(naive(table) + naive(dense), rel=1e-5)


def test_no_rows_are_nothing() -> None:
    assert square_of([np.zeros(0, np.int64), np.zeros((0, 3), np.float32)], [True, True]) == 0.0


# ── a run ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def batches(examples: Array, targets: Array, size: int, seed: int) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    while True:
        some = rng.integers(0, len(examples), size)
        yield {"x": examples[some], "y": targets[some]}


@pytest.mark.parametrize("servers", [1, 2])
async def test_the_noise_scale_of_a_run_is_that_of_its_gradients(servers: int) -> None:
    """Least squares at a point that does not move: the variance of a batch's gradient over the square of the mean."""
    rng = np.random.default_rng(3)
    examples = rng.normal(size=(400, 6)).astype(np.float32)
    targets = (examples @ np.arange(6, dtype=np.float32) + rng.normal(size=400)).astype(np.float32)
    size, replicas = 8, 4

    def loss_fn(inputs: Any) -> Any:
        w = fr.Variable(np.full((6, 1), 2.0, np.float32), name="w")
        b = fr.Variable(np.zeros(1, np.float32), name="b")
        return fr.mean(fr.square(fr.matmul(inputs["x"], w)[:, 0] + b - inputs["y"])) * 0.5

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            {"x": fr.Spec("float32", (size, 6)), "y": fr.Spec("float32", (size,))},
            fr.optim.SGD(0.0),
            replicas=replicas,
            servers=servers,
            policy=fr.train.Adaptive(at_least=2),
        )
    residual = examples @ np.full(6, 2.0) - targets
    each = np.column_stack((examples * residual[:, None], residual))
    expected = each.var(axis=0).sum() / size / (each.mean(axis=0) ** 2).sum()
    cluster: Any = {"ps": servers, "worker": replicas}
    async with asyncio.timeout(90), fr.LocalCluster(**cluster) as nodes, fr.Session(graph, cluster=nodes) as session:
        async for report in trainer.steps(session, batches(examples, targets, size, 4)):
            if report.step == 250:
                break
    print(report.noise_scale, expected, report.why)
    assert report.noise_scale == pytest.approx(expected, rel=0.6)
    assert trainer.statistics() is not None
