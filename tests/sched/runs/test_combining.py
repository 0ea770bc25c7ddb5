"""One update made of a set of any size: the mean or a weighted sum, to the bit, wherever and whenever parts came."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import SpecError
from flowrt.base.valueclass import valueclass
from flowrt.kernels.ops.updates.combining import BLOCK
from flowrt.sched.drivers.way import Way
from flowrt.sched.host.host import Host
from flowrt.sched.policies.policy import Close, Offer, Policy, WaitUntil
from flowrt.sched.server import combining
from flowrt.sched.server.combining import INLINE_BYTES, Combiner

Array = np.ndarray[Any, Any]
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (1,), (7, 5), (2 * BLOCK,), (BLOCK + 1,)]
LARGE = [(3, INLINE_BYTES // 8 + 17), (5,)]  # computed in lanes


async def combined(combiner: Combiner, updates: Sequence[Any], weights: Any = None) -> list[Array]:
    """What ``combiner`` makes of updates; raises what it failed with."""
    answers: list[Any] = []
    task = combiner.combine(updates, weights, answers.append, answers.append)
    if task is not None:
        await task
    (answer,) = answers
    if isinstance(answer, BaseException):
        raise answer
    return list(answer)


def updates_of(shapes: Sequence[tuple[int, ...]], count: int, dtype: str, seed: int = 5) -> list[list[Array]]:
    rng = np.random.default_rng(seed)
    return [[np.asarray(rng.normal(size=shape), dtype) for shape in shapes] for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
async def test_the_mean_has_the_bits_of_additions_in_order_and_one_division(way: Way, dtype: str, shapes: Any) -> None:
    combiner = Combiner([False] * len(shapes), 5, way)
    for count in (1, 2, 5, 3):
        updates = updates_of(shapes, count, dtype)
        found = await combined(combiner, updates)
        for part, made in enumerate(found):
            total = updates[0][part].copy()
            for other in updates[1:]:
                total += other[part]
            expected = total / total.dtype.type(count)
            assert made.dtype == dtype
            assert made.shape == shapes[part]
            assert made.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
async def test_weights_multiply_updates_as_they_are(way: Way, dtype: str, shapes: Any) -> None:
    combiner, weights = Combiner([False] * len(shapes), 4, way), (0.5, 0.0, -2.0, 1 / 3)
    updates = updates_of(shapes, 4, dtype)
    close = 1e-6 if dtype == "float32" else 1e-14
    for chosen in ([0, 1, 2, 3], [2], [1, 3]):
        found = await combined(combiner, [updates[r] for r in chosen], tuple(weights[r] for r in chosen))
        for part, made in enumerate(found):
            expected = sum(weights[r] * updates[r][part].astype(np.float64) for r in chosen)
            np.testing.assert_allclose(made, expected, rtol=close, atol=close)


async def test_parts_of_several_dtypes_and_layouts_are_combined_beside_rows(way: Way) -> None:
    rng = np.random.default_rng(7)
    matrices = [rng.normal(size=(6, 8))[::2, ::-1].T for _ in range(3)]  # no part lies in order
    scalars = [np.float32(rng.normal()) for _ in range(3)]
    rows = [np.array(r, "int32") for r in ([4, 4, 1], [], [0])]
    values = [np.asarray(rng.normal(size=(len(r), 2)), "float32") for r in rows]
    combiner = Combiner([False, True, True, False], 3, way)
    unaligned = bytearray(b"x" + matrices[0].tobytes())
    matrices[0] = np.frombuffer(unaligned, "float64", 24, 1).reshape(8, 3)
    updates = list(zip(matrices, rows, values, scalars, strict=True))
    for weights in (None, (2.0, 3.0, 0.25)):
        matrix, indices, moved, scalar = await combined(combiner, updates, weights)
        factors = weights or (1 / 3, 1 / 3, 1 / 3)
        close = {"rtol": 1e-6, "atol": 1e-7}
        np.testing.assert_allclose(matrix, sum(f * m for f, m in zip(factors, matrices, strict=True)), **close)
        np.testing.assert_allclose(scalar, sum(f * s for f, s in zip(factors, scalars, strict=True)), **close)
        np.testing.assert_array_equal(indices, [4, 4, 1, 0])
        assert indices.dtype == np.int32
        expected = np.concatenate([f * v for f, v in zip(factors, values, strict=True)])
        np.testing.assert_allclose(moved, expected, **close)
        assert moved.dtype == np.float32


async def test_the_bits_depend_neither_on_who_came_first_nor_on_threads(way: Way) -> None:
    """Where parts lie, and how many threads share the work, is nobody's business."""
    updates, weights = updates_of(LARGE, 3, "float32"), (0.1, 0.7, 0.3)
    total = updates[0][0] * np.float32(weights[0])
    found = set()
    for arrival in permutations(range(3)):
        held = {replica: [part.copy() for part in updates[replica]] for replica in arrival}
        made = await combined(Combiner([False, False], 3, way), [held[r] for r in sorted(held)], weights)
        found.add(b"".join(part.tobytes() for part in made))
    assert len(found) == 1
    assert total.shape == made[0].shape
    one = Host(threads=1)
    alone = Way(one, "epoch", 1, 0, way.tasks, way.send)
    made = await combined(Combiner([False, False], 3, alone), updates, weights)
    await one.aclose()
    assert {b"".join(part.tobytes() for part in made)} == found


async def test_hundreds_of_updates_are_combined_by_the_same_code(way: Way) -> None:
    updates = updates_of([(3,), ()], 300, "float64")
    (vector, scalar) = await combined(Combiner([False, False], 300, way), updates)
    np.testing.assert_allclose(vector, np.mean([u[0] for u in updates], axis=0), rtol=1e-13)
    np.testing.assert_allclose(scalar, np.mean([u[1] for u in updates]), rtol=1e-13)


async def test_nobody_waits_for_the_compiler(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "is_compiled", lambda variant: False)
    combiner, updates = Combiner([False], 2, way), updates_of([(3,)], 2, "float64")
    found: list[Any] = []
    for _ in range(2):
        task = combiner.combine(updates, None, found.append, found.append)
        assert (task is None) == bool(found)  # it is compiled in a lane, once
        if task is not None:
            await task
    for (made,) in found:
        np.testing.assert_array_equal(made, (updates[0][0] + updates[1][0]) / 2)


async def test_a_weight_of_zero_leaves_nothing_of_the_largest_numbers(way: Way) -> None:
    largest = np.full(BLOCK + 3, np.finfo(np.float32).max, np.float32)
    (made,) = await combined(Combiner([False], 2, way), [[largest], [np.ones_like(largest)]], (0.0, 1.0))
    np.testing.assert_array_equal(made, np.ones_like(largest))


async def test_parts_of_other_shapes_than_before_are_combined_and_within_a_set_they_are_refused(way: Way) -> None:
    combiner = Combiner([False], 2, way)
    for size in (3, 9, 3):
        (made,) = await combined(combiner, updates_of([(size,)], 2, "float32"))
        assert made.shape == (size,)
    with pytest.raises(SpecError, match=r"part 0 of two updates of one set differs: .*\(3,\).*\(4,\)"):
        await combined(combiner, [[np.zeros(3)], [np.zeros(4)]])


async def test_what_is_forgotten_gives_its_memory_back(way: Way) -> None:
    combiner, memory = Combiner([False], 2, way), way.host.memory
    before = memory.statistics().held
    made = await combined(combiner, updates_of([(4096,)], 2, "float64"))
    assert memory.statistics().held >= before + math.prod(made[0].shape) * 8
    del made
    combiner.forget()
    assert memory.statistics().held == before


# ── in training ──────────────────────────────────────────────────────────────────────────────────────────────────────


@valueclass
class Everybody(Policy):
    """Waits for all, and says of no set how large it is; with ``thirds``, weights are said."""

    thirds: bool = False

    def decide(self, offers: Sequence[Offer], able: Sequence[int], now: float) -> Close | WaitUntil:
        return WaitUntil() if able else Close(tuple(offer.replica for offer in offers))

    def weights(self, kept: Sequence[Offer]) -> tuple[float, ...] | None:
        return (1 / len(kept),) * len(kept) if self.thirds else None


async def trained(policy: Any, *, servers: int = 2, dtype: str = "float32") -> list[Array]:
    """The variables, a table among them, after some steps."""

    def loss_fn(given: dict[str, fr.Tensor]) -> fr.Tensor:
        table = fr.Variable(np.linspace(-1, 1, 60).reshape(20, 3).astype(dtype), name="table")
        w, b = fr.Variable(np.ones((3, 4), dtype), name="w"), fr.Variable(np.zeros((), dtype), name="b")
        return fr.mean(fr.square(fr.nn.embedding_lookup(table, given["ids"]) @ w + b))

    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            {"ids": fr.Spec("int32", (5,))},
            fr.optim.Adam(0.1),
            3,
            policy,
            servers=servers,
            server_device="",
            worker_device="",
        )
    rng = np.random.default_rng(3)
    batches = [{"ids": rng.integers(0, 20, 5).astype(np.int32)} for _ in range(12)]
    async with asyncio.timeout(120), fr.Session(graph) as session:
        kept = [report.kept async for report in trainer.steps(session, batches)]
        assert kept == [(0, 1, 2)] * 4
        return list(await session.run(trainer.variables))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_a_set_whose_size_is_not_known_trains_to_the_bits_of_one_whose_size_is(dtype: str) -> None:
    expected = await trained(fr.train.AllOf(), dtype=dtype)
    for one, other in zip(expected, await trained(Everybody(), dtype=dtype), strict=True):
        assert one.tobytes() == other.tobytes()
    weighted = await trained(Everybody(thirds=True), dtype=dtype)
    for one, other in zip(expected, weighted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
