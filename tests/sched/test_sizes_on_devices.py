"""Sizes that only a step knows, where what they are of is computed on a device whose memory is not the host's."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr
from flowrt.sched.devices.looping import _Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Build = Callable[[fr.Tensor], Sequence[fr.Tensor]]

HERE, THERE, OTHER = "cpu:0", "arena:0", "arena:1"
OPTIONS = fr.Options(devices=("cpu:0", "arena"))
ROWS = (3, 3, 5, 1, 3)


@pytest.fixture(autouse=True)
def arena(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's devices."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return import_module("arena")


def values(rows: int) -> Any:
    return np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)


async def computed(build: Build, device: str) -> tuple[list[Any], Sequence[str]]:
    """What is fetched of a graph for several numbers of rows, and what was placed on each device."""
    with fr.Graph(seed=1) as graph:
        x = fr.placeholder("float32", (None, 4), name="x")
        with fr.device(device):
            fetched = list(build(x))
    async with fr.Session(graph, options=OPTIONS) as session:
        found = [await session.run(fetched, {x: values(rows)}) for rows in ROWS]
        return found, (await session.explain(fetched)).placement


async def check_alike(build: Build) -> Sequence[str]:
    """That device and host find the same; answers what was placed on each device."""
    (there, placement), (here, _) = await computed(build, THERE), await computed(build, HERE)
    for mine, host in zip(there, here, strict=True):
        for one, other in zip(mine, host, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    return placement


def weights() -> fr.Variable:
    return fr.Variable(np.eye(4, dtype=np.float32) * 0.9, name="w")


@pytest.mark.parametrize("least", [0.002, 0.5, 100.0])
async def test_a_loop_that_its_condition_ends_has_its_gradient_on_the_device_however_many_iterations_there_are(
    least: float,
) -> None:
    """From more than the stack has space for at first down to none."""

    def build(x: fr.Tensor) -> Sequence[fr.Tensor]:
        w = weights()
        done, last = fr.while_loop(
            lambda n, v: fr.mean(fr.square(v)) > least,
            lambda n, v: (n + 1, fr.tanh(v @ w)),
            (fr.constant(0), fr.abs(x) + 0.5),
        )
        return [done, last, *fr.gradients([fr.sum(fr.square(last))], [w, x])]

    (placement,) = await check_alike(build)
    assert "arena:0: " in placement
    assert "while_loop/gradient" in placement


async def test_rows_of_several_shapes_are_refused_on_a_device_in_the_words_of_the_host(arena: Any) -> None:
    def build(x: fr.Tensor) -> Sequence[fr.Tensor]:
        _, last = fr.while_loop(
            lambda n, v: n < 3,
            lambda n, v: (n + 1, fr.concat([v, fr.exp(v[:1])], axis=0)),
            (fr.constant(0), x),
            shape_invariants=((), (None, 4)),
        )
        return fr.gradients([fr.sum(fr.square(last))], [x])

    for device in (HERE, THERE):
        with pytest.raises(fr.SpecError, match=r"iterations stack rows of different shapes: .*; carry one tensor"):
            await computed(build, device)


def in_pairs(x: fr.Tensor, rows: fr.Tensor) -> fr.Tensor:
    return fr.reshape(x, fr.stack([rows * 2, fr.constant(2, dtype="int64")]))


def looped(body: Callable[[fr.Tensor], fr.Tensor], x: fr.Tensor) -> Sequence[fr.Tensor]:
    _, last = fr.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, body(v)), (fr.constant(0), x))
    return [last, *fr.gradients([fr.sum(fr.square(last))], [x])]


async def test_sizes_inside_a_body_may_be_arithmetic_of_shapes() -> None:
    (placement,) = await check_alike(
        lambda x: looped(lambda v: fr.reshape(in_pairs(fr.tanh(v), fr.shape_of(v)[0]) * 2, (-1, 4)), x)
    )
    assert "arena:0: " in placement


@pytest.mark.parametrize("where", [HERE, THERE, OTHER])
async def test_sizes_inside_a_body_may_come_from_shapes_around_it_wherever_these_are_looked_at(where: str) -> None:
    def build(x: fr.Tensor) -> Sequence[fr.Tensor]:
        with fr.device(where):
            rows, seen = fr.shape_of(x)[0], fr.exp(-x)
        bodied = looped(lambda v: fr.tanh(v) + fr.reshape(fr.exp(in_pairs(v, rows)), (-1, 4)), seen)
        chosen = fr.cond(fr.sum(x) > 0, lambda: in_pairs(seen, rows), lambda: in_pairs(x, rows) * 2)
        return [*bodied, chosen]

    await check_alike(build)


async def test_sizes_inside_a_body_may_be_fed() -> None:
    with fr.Graph() as graph, fr.device(THERE):
        x, rows = fr.placeholder("float32", (None,)), fr.placeholder("int64", ())
        chosen = fr.cond(fr.sum(x) > 0, lambda: fr.reshape(x, fr.stack([rows, -1])), lambda: fr.zeros((1, 1)))
    async with fr.Session(graph, options=OPTIONS) as session:
        found = [await session.run(chosen, {x: np.ones(6, np.float32), rows: n}) for n in (2, 3, 2)]
    assert [array.shape for array in found] == [(2, 3), (3, 2), (2, 3)]


async def test_sizes_may_be_a_long_way_from_what_is_known() -> None:
    with fr.Graph() as graph, fr.device(THERE):
        x = fr.placeholder("float32", (None,))
        rows = fr.shape_of(x)[0]
        for _ in range(1200):
            rows = rows + 0 * rows
        chosen = fr.cond(fr.sum(x) > 0, lambda: fr.reshape(x, fr.stack([rows, -1])), lambda: fr.zeros((1, 1)))
    async with fr.Session(graph, options=OPTIONS) as session:
        assert (await session.run(chosen, {x: np.ones(6, np.float32)})).shape == (6, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_a_stack_of_counted_iterations_takes_memory_for_its_rows_once(order: int) -> None:
    made: list[Any] = []
    row: Any = SimpleNamespace(shape=(0,), dtype=np.dtype("float32"), nbytes=0)

    def hold(array: Any, where: str) -> Any:
        made.append(SimpleNamespace(shape=array.shape))
        return made[-1]

    node: Any = SimpleNamespace(where=lambda: "a loop")
    stack = _Stack(node, None, 40, SimpleNamespace(hold=hold))  # type: ignore[arg-type]
    for at in range(40)[::order]:
        stack.put(at, row)
    assert stack.whole(fr.Spec("float32", (None, 0)), 40) is made[0]
    assert [array.shape for array in made] == [(40, 0)]


async def test_sizes_that_are_values_of_the_device_leave_a_branch_to_the_host() -> None:
    def build(x: fr.Tensor) -> Sequence[fr.Tensor]:
        count = fr.reshape(fr.sum(fr.astype(x > 0, "int64")), (1,))
        return [fr.cond(fr.sum(x) > 0, lambda: fr.ones(count), lambda: fr.zeros(count))]

    with pytest.raises(fr.PlacementError, match=r'cond .*ask for that, as in fr.device\("cpu:0"\)'):
        await computed(build, THERE)


async def test_what_one_device_finds_of_shapes_decides_sizes_on_others() -> None:
    def build(x: fr.Tensor) -> Sequence[fr.Tensor]:
        sizes = fr.stack([fr.shape_of(x)[0] * 2, fr.constant(2, dtype="int64")])
        found = [fr.reshape(fr.exp(x), sizes)]
        for device in (OTHER, HERE):
            with fr.device(device):
                found.append(fr.reshape(fr.exp(-x), sizes) * 2)
        return found

    await check_alike(build)


async def test_kernels_are_made_ready_once_for_indices_of_one_shape(
    arena: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    prepare = arena.Arena.prepare

    def noting(driver: Any, op: str, *args: Any) -> Any:
        prepared.append(op)
        return prepare(driver, op, *args)

    monkeypatch.setattr(arena.Arena, "prepare", noting)
    with fr.Graph() as graph, fr.device(THERE):
        indices = fr.placeholder("int64", (None,))
        rows = fr.take(weights(), indices)
        chosen = fr.cond(fr.sum(rows) > 0, lambda: rows * 2, lambda: rows)  # so that nodes are issued one by one
    async with fr.Session(graph, options=OPTIONS) as session:
        for given in ([0, 1], [2, 3], [1, 1], [3, 0]):
            found = await session.run(chosen, {indices: given})
            np.testing.assert_allclose(found, 2 * 0.9 * np.eye(4)[given], rtol=1e-6)
    assert prepared.count("take") == 1
