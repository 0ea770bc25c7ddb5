"""What a server makes of updates: whether one is finite, the mean over a set, and rows that stay rows."""

from __future__ import annotations

import mmap
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import FlowrtError
from flowrt.train.updates import Gradient, all_finite, fed_like, mean_of, parts_of

SIZE, WIDTH = 11, 3
Array = np.ndarray[Any, Any]
Update = list[Array]  # in parts: a table's indices and values, a matrix, a scalar, something empty


class Server:
    """The variables of a model, and the tensors that check and apply the updates of ``members`` replicas."""

    def __init__(self, members: int, optimizer: Any, dtype: str = "float32") -> None:
        with fr.Graph() as self.graph:
            table = fr.Variable(np.linspace(-1, 1, SIZE * WIDTH).reshape(SIZE, WIDTH).astype(dtype), name="table")
            matrix, scalar = fr.Variable(np.ones((4, 2), dtype), name="w"), fr.Variable(np.array(2, dtype), name="b")
            nothing = fr.Variable(np.zeros((0, 2), dtype), name="nothing")
            self.variables = [table, matrix, scalar, nothing]
            rows = fr.placeholder("int32", (None,))
            loss = fr.sum(fr.square(fr.nn.embedding_lookup(table, rows))) * scalar + fr.sum(matrix) + fr.sum(nothing)
            pairs = optimizer.compute_gradients(loss, self.variables)
            members_fed = [fed_like([gradient for gradient, _ in pairs]) for _ in range(members)]
            self.means = [mean_of(member) for member in zip(*members_fed, strict=True)]
            self.finite = all_finite(zip(members_fed[0], self.variables, strict=True))
            self.apply = optimizer.apply_gradients(zip(self.means, self.variables, strict=True))
        self.feeds = [parts_of(member) for member in members_fed]

    def fed(self, updates: list[Update]) -> dict[Any, Array]:
        tensors = [part for member in self.feeds for part in member]
        return dict(zip(tensors, [part for update in updates for part in update], strict=True))


def update(rng: np.random.Generator, rows: list[int], dtype: str = "float32") -> Update:
    values = rng.normal(size=(len(rows), WIDTH))
    parts = [values, rng.normal(size=(4, 2)), rng.normal(size=()), np.zeros((0, 2))]
    return [np.array(rows, "int32"), *(np.asarray(part, dtype) for part in parts)]


def dense(part: Update) -> Array:
    """The table's gradient that an update's indices and values stand for."""
    out = np.zeros((SIZE, WIDTH), part[1].dtype)
    np.add.at(out, part[0], part[1])
    return out


ROWS = [[1, 2, 1], [], [-1, 3, 3, 2]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_the_mean_is_applied_as_the_dense_one_would_be(dtype: str) -> None:
    server, rng = Server(3, fr.optim.SGD(0.5), dtype), np.random.default_rng(3)
    updates = [update(rng, rows, dtype) for rows in ROWS]
    async with fr.Session(server.graph) as session:
        before = await session.run(server.variables)
        await session.run(server.apply, server.fed(updates))
        after = await session.run(server.variables)
    means = [sum(map(dense, updates)) / 3, *(sum(u[i] for u in updates) / 3 for i in (2, 3, 4))]
    close = 1e-6 if dtype == "float32" else 1e-14
    for old, new, mean in zip(before, after, means, strict=True):
        np.testing.assert_allclose(new, old - 0.5 * mean, rtol=close, atol=close)


async def test_the_bits_of_a_dense_mean_are_those_of_additions_in_order() -> None:
    server, rng = Server(4, fr.optim.SGD(1.0)), np.random.default_rng(5)
    updates = [update(rng, [0]) for _ in range(4)]
    total = updates[0][2].copy()
    for other in updates[1:]:
        total += other[2]
    async with fr.Session(server.graph) as session:
        mean = await session.run(server.means[1], server.fed(updates))
    assert mean.tobytes() == (total / np.float32(4)).tobytes()


async def test_the_bits_depend_on_the_replicas_order_alone() -> None:
    """However updates arrived, and wherever they lie, the same ones in the same order give the same variables."""
    rng = np.random.default_rng(7)
    updates = [update(rng, rows) for rows in ROWS]
    found = set()
    for arrival in permutations(range(3)):
        server = Server(3, fr.optim.Momentum(0.1, 0.9))
        held = {replica: [mapped(part) for part in updates[replica]] for replica in arrival}
        async with fr.Session(server.graph) as session:
            for _ in range(2):
                await session.run(server.apply, server.fed([held[replica] for replica in sorted(held)]))
            found.add(b"".join(value.tobytes() for value in await session.run(server.variables)))
    assert len(found) == 1


def mapped(array: Array) -> Array:
    """A copy that may only be read, in pages of its own, as what another process shares with this one."""
    memory = mmap.mmap(-1, max(array.nbytes, 1))
    memory[: array.nbytes] = array.tobytes()
    copy = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    copy.flags.writeable = False
    return copy


async def test_rows_that_do_not_occur_keep_their_momentum_and_their_value() -> None:
    server, rng = Server(2, fr.optim.Momentum(0.1, 0.9)), np.random.default_rng(9)
    first, second = [update(rng, [1, 4]), update(rng, [4])], [update(rng, [2]), update(rng, [4])]
    async with fr.Session(server.graph) as session:
        (table,) = await session.run(server.variables[:1])
        for updates in (first, second):
            await session.run(server.apply, server.fed(updates))
        (moved,) = await session.run(server.variables[:1])
    velocity = np.zeros_like(table)
    for updates in (first, second):
        mean = sum(map(dense, updates)) / 2
        occur = sorted({row for u in updates for row in u[0].tolist()})
        velocity[occur] = 0.9 * velocity[occur] + mean[occur]
        table[occur] -= 0.1 * velocity[occur]
    np.testing.assert_allclose(moved, table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
async def test_an_update_with_a_number_that_is_not_finite_is_told(place: int, bad: float) -> None:
    server, rng = Server(1, fr.optim.SGD(0.5)), np.random.default_rng(11)
    async with fr.Session(server.graph) as session:
        for rows in ([], [1, -2, 1]):
            good = update(rng, rows)
            assert await session.run(server.finite, server.fed([good]))
        good[place][(-1,) * good[place].ndim] = bad
        assert not await session.run(server.finite, server.fed([good]))


@pytest.mark.parametrize("row", [SIZE, -SIZE - 1])
async def test_a_row_that_the_table_has_not_is_an_error_that_names_it(row: int) -> None:
    server, rng = Server(1, fr.optim.SGD(0.5)), np.random.default_rng(13)
    async with fr.Session(server.graph) as session:
        with pytest.raises(FlowrtError, match=r"rows_of/table.*index is out of range"):
            await session.run(server.finite, server.fed([update(rng, [2, row])]))


def test_a_table_that_is_also_read_whole_has_a_dense_gradient() -> None:
    with fr.Graph():
        table = fr.Variable(np.ones((SIZE, WIDTH), np.float32))
        rows = fr.nn.embedding_lookup(table, fr.placeholder("int64", (None, 2)))
        gradients: list[Gradient] = fr.gradients(fr.sum(rows) + fr.sum(fr.square(table)), [table])
        assert [part.spec.dims for part in parts_of(gradients)] == [(SIZE, WIDTH)]
        assert [part.spec.dims for part in parts_of(fed_like(gradients))] == [(SIZE, WIDTH)]


async def test_a_bag_of_rows_sends_the_gradient_of_its_mean_once() -> None:
    with fr.Graph() as graph:
        table = fr.Variable(np.ones((SIZE, WIDTH), np.float32))
        bags = fr.placeholder("int64", (None, 4))
        gradients: list[Gradient] = fr.gradients(fr.mean(fr.mean(fr.take(table, bags), axis=1)), [table])
        sent = parts_of(gradients)
        fed = [fed_like(gradients) for _ in range(2)]
        move = fr.optim.SGD(1.0).apply_gradients([(mean_of([one for (one,) in fed]), table)])
    rng = np.random.default_rng(15)
    updates = [[rng.integers(0, SIZE, 4 * n), rng.normal(size=(n, WIDTH)).astype("float32")] for n in (2, 3)]
    expected = np.ones((SIZE, WIDTH))
    for indices, values in updates:
        np.subtract.at(expected, indices, np.repeat(values, 4, axis=0) / 2)
    async with fr.Session(graph) as session:
        assert [part.shape for part in await session.run(sent, {bags: np.zeros((5, 4), int)})] == [(20,), (5, WIDTH)]
        tensors = [part for member in fed for part in parts_of(member)]
        await session.run(move, dict(zip(tensors, [part for update in updates for part in update], strict=True)))
        np.testing.assert_allclose(await session.run(table), expected, rtol=1e-5, atol=1e-5)
