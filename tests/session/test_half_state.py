"""State of 16 bits: what optimisers, rows, checkpoints, bytes of graphs and other processes make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path

HALVES = ("bfloat16", "float16")
both = pytest.mark.parametrize("half", HALVES)

OPTIMIZERS: dict[str, Any] = {
    "SGD": fr.optim.SGD(0.125),
    "Momentum": fr.optim.Momentum(0.125, 0.5),
    "AdaGrad": fr.optim.AdaGrad(0.125),
    "RMSProp": fr.optim.RMSProp(0.125),
    "RMSProp with momentum": fr.optim.RMSProp(0.125, momentum=0.5),
    "Adam": fr.optim.Adam(0.125),
    "AdamW": fr.optim.AdamW(0.125),
}


def ones(half: str, *shape: int) -> Any:
    return np.ones(shape, fr.Spec(half).dtype)


async def moved(optimizer: Any, dtype: str, by_rows: bool) -> Any:
    """A table after two steps, by the gradients of some of its rows or by dense ones."""
    with fr.Graph() as graph:
        table = fr.Variable(ones(dtype, 6, 3), name="table")
        seen = fr.take(table, [1, 4, 1]) if by_rows else fr.concat([table[1:2], table[4:5], table[1:2]], 0)
        update = optimizer.minimize(fr.astype(fr.sum(fr.square(seen)), "float32"))
    async with fr.Session(graph) as session:
        for _ in range(2):
            await session.run(update)
        found = await session.run(table)
    assert found.dtype == fr.Spec(dtype).dtype
    return found.astype("float32")


@both
@pytest.mark.parametrize("by_rows", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_an_optimizer_moves_them_about_as_it_does_float32(name: str, by_rows: bool, half: str) -> None:
    found = await moved(OPTIMIZERS[name], half, by_rows)
    np.testing.assert_allclose(found, await moved(OPTIMIZERS[name], "float32", by_rows), atol=2.0**-6)
    assert (found[[0, 2, 3, 5]] >= 0.99).all()  # AdamW lets all weights decay
    assert (found[[1, 4]] < 0.9).all()


@both
async def test_their_losses_are_scaled_and_gradients_divided_in_float32(half: str) -> None:
    found = await moved(fr.LossScaled(fr.optim.SGD(0.125), 2.0**8), half, by_rows=True)
    np.testing.assert_array_equal(found, await moved(fr.optim.SGD(0.125), half, by_rows=True))


@both
@pytest.mark.parametrize("by_rows", [False, True], ids=["whole", "rows"])
async def test_what_is_kept_beside_them_grows_by_less_than_their_last_bit(half: str, by_rows: bool) -> None:
    g, steps = 2.0**-6, 100
    with fr.Graph() as graph:
        table = fr.Variable(ones(half, 3, 2), name="table")
        seen = fr.take(table, [0, 1, 2]) if by_rows else table
        update = fr.optim.AdaGrad(0.125, 1.0).minimize(fr.sum(fr.astype(seen, "float32")) * g)
        (accumulator,) = (v for v in graph.variables if v.name == "table/accumulator")
    async with fr.Session(graph) as session:
        for _ in range(steps):
            await session.run(update)
        found = await session.run(accumulator)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 1 + steps * g * g, rtol=1e-5)
    own = ones(half)
    assert own + np.array(g * g, own.dtype) == own  # what it would have come to, of the variable's dtype


@both
@pytest.mark.parametrize("name", ["AdaGrad", "RMSProp", "Adam", "AdamW"])
@pytest.mark.parametrize("by_rows", [False, True], ids=["whole", "rows"])
async def test_the_usual_epsilon_keeps_quotients_from_being_no_numbers(half: str, name: str, by_rows: bool) -> None:
    with fr.Graph() as graph:
        table = fr.Variable(ones(half, 3, 2), name="table")
        seen = fr.take(table, [0, 2]) if by_rows else table
        optimizer = fr.optim.AdaGrad(0.1, 0.0) if name == "AdaGrad" else getattr(fr.optim, name)(0.1)
        update = optimizer.minimize(fr.sum(fr.astype(seen, "float32")) * 0.0)
    async with fr.Session(graph) as session:
        await session.run(update)
        found = (await session.run(table)).astype("float32")
    np.testing.assert_allclose(found, 1, atol=2.0**-7)  # AdamW lets weights decay


@both
async def test_rows_are_added_up_in_float32_and_rounded_once(half: str) -> None:
    with fr.Graph() as graph:
        table = fr.Variable(ones(half, 4, 2), name="table")
        small = np.full((300, 2), 2.0**-10, fr.Spec(half).dtype)  # one of which moves no bfloat16 by itself
        updates = [table.scatter_add([1] * 300, small), table.scatter_sub([2, 2], ones(half, 2, 2))]
        updates.append(table.scatter_update([3], ones(half, 1, 2) * 5))
    async with fr.Session(graph) as session:
        for update in updates:
            await session.run(update)
        found = await session.run(table)
    summed = np.float32(1 + 300 / 1024).astype(found.dtype).astype("float32")
    assert found.astype("float32").tolist() == [[1, 1], [summed] * 2, [-1, -1], [5, 5]]


@both
async def test_they_are_saved_as_what_they_are_and_come_back(tmp_path: Path, half: str) -> None:
    def build() -> tuple[fr.Graph, Any, Any]:
        with fr.Graph() as graph:
            v = fr.Variable(np.array([1, 2.5, -3], fr.Spec(half).dtype), name="v")
            return graph, v, v.assign_add(ones(half, 3))

    graph, _, update = build()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
        await session.run(update)
        await session.save()
    graph, v, _ = build()
    async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
        found = await session.run(v)
    assert (found.dtype, found.astype("float32").tolist()) == (fr.Spec(half).dtype, [2, 3.5, -2])
    from safetensors.numpy import load_file

    (saved,) = load_file(file_in(tmp_path)).values()
    assert (saved.dtype, saved.astype("float32").tolist()) == (found.dtype, [2, 3.5, -2])


def file_in(folder: Path) -> Path:
    (file,) = folder.rglob("*.safetensors")
    return file


@both
async def test_a_graph_as_bytes_holds_them(half: str) -> None:
    with fr.Graph() as graph:
        v = fr.Variable(np.array([1, 2.5], fr.Spec(half).dtype), name="v")
        fr.multiply(v, np.array([0.5, 3], fr.Spec(half).dtype), name="y")
    again = fr.Graph.from_bytes(graph.to_bytes())
    async with fr.Session(again) as session:
        found = await session.run(again.get_tensor_by_name("y:0"))
    assert (found.dtype, found.astype("float32").tolist()) == (fr.Spec(half).dtype, [0.5, 7.5])


@both
async def test_they_travel_between_processes(half: str) -> None:
    rows = 100_000  # more than what messages carry at once, so that memory is shared
    x = (np.arange(rows * 4).reshape(rows, 4) % 1000).astype(fr.Spec(half).dtype)
    with fr.Graph() as graph:
        fed = fr.placeholder(half, (None, 4))
        with fr.device("/job:ps/task:0"):
            v = fr.Variable(np.array([1, 2, 3, 4], fr.Spec(half).dtype), name="v")
            scaled = fed * v
        with fr.device("/job:worker/task:0"):
            back = scaled[::-1] + v
    async with fr.LocalCluster(ps=1, worker=1) as cluster, fr.Session(graph, cluster=cluster) as session:
        for few in (x[:3], x):
            found = await session.run(back, {fed: few})
            with fr.Graph() as alone:
                given = fr.placeholder(half, (None, 4))
                here = (given * np.array([1, 2, 3, 4], found.dtype))[::-1] + np.array([1, 2, 3, 4], found.dtype)
            async with fr.Session(alone) as other:
                wanted = await other.run(here, {given: few})
            assert found.dtype == wanted.dtype
            assert found.view(np.uint16).tobytes() == wanted.view(np.uint16).tobytes()


@both
@pytest.mark.parametrize("by_rows", [False, True], ids=["whole", "rows"])
async def test_what_is_kept_beside_a_split_one_comes_back_split_otherwise(
    tmp_path: Path, half: str, by_rows: bool
) -> None:
    def build(parts: int) -> tuple[Any, Any]:
        with fr.Graph() as graph:
            table = fr.Variable(ones(half, 6, 2), name="table", partition=parts)
            seen = fr.take(table, [1, 4, 1]) if by_rows else fr.square(table)
            update = fr.optim.Momentum(0.125, 0.5).minimize(fr.sum(fr.astype(seen, "float32")))
        return graph, update

    found = []
    for parts in (2, 3):
        graph, update = build(parts)
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path)) as session:
            await session.run(update)
            await session.save()
            held = [v for v in graph.variables if v.name.endswith("/momentum")]
            found.append(np.concatenate(await session.run(held)))
    alone, update = build(3)
    async with fr.Session(alone) as session:
        for _ in range(2):
            await session.run(update)
        wanted = np.concatenate(await session.run([v for v in alone.variables if v.name.endswith("/momentum")]))
    assert found[1].dtype == np.float32
    np.testing.assert_array_equal(found[1], wanted)
