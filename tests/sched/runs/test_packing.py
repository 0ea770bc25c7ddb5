"""Parts of updates that are packed: to the bits of naive NumPy, by any number of threads, and judged as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from flowrt.base.errors import ResourceError, SpecError
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.kernels.ops.updates.compressing import BLOCK
from flowrt.sched.drivers import packing as packing_module
from flowrt.sched.drivers.closed import checked
from flowrt.sched.drivers.packing import INLINE_BYTES, Packing, PackingPlan, Unpacking, shares, unpacked_now
from flowrt.sched.drivers.tasks import Tasks
from flowrt.sched.drivers.way import Way
from flowrt.sched.host.host import Host

Array = np.ndarray[Any, Any]
LARGE = INLINE_BYTES // 4 + 17  # numbers that are packed in lanes
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (1,), (7, 5), (BLOCK,), (BLOCK + 1,), (3, BLOCK)]


@pytest.fixture(params=[1, 3])
async def way(request: pytest.FixtureRequest) -> AsyncIterator[Way]:
    host, tasks = Host(threads=request.param), Tasks()
    async with asyncio.timeout(60):
        yield Way(host, "epoch", 1, 0, tasks, lambda peer, epoch, message: None)
    await tasks.aclose()
    await host.aclose()


class Made:
    """Stands for a plan of a replica, whose fetches are these; ``runs`` are those that took, or would take, long."""

    def __init__(self, fetches: Sequence[Array]) -> None:
        self.fetches, self.runs = list(fetches), 0

    def run_now(self, feeds: Sequence[Array], number: int) -> list[Array]:
        return list(self.fetches)

    async def run(self, feeds: Sequence[Array], context: Any) -> list[Array]:
        self.runs += 1
        return list(self.fetches)


async def packed(plan: Any, context: Any = None) -> list[Array]:
    """The fetches of a plan, as drivers have it run."""
    fetches = plan.run_now((), 0)
    return list(await plan.run((), context) if fetches is None else fetches)


async def unpacked(unpacking: Unpacking, *updates: Sequence[Array]) -> list[list[Array]]:
    answers: list[Any] = []
    task = unpacking.unpack(updates, answers.append, answers.append)
    if task is not None:
        await task
    (answer,) = answers
    if isinstance(answer, BaseException):
        raise answer
    return [list(parts) for parts in answer]


def strange_numbers(count: int, seed: int = 3) -> Array:
    """Floats of all bits, among them what is no number, and such as lie halfway between two bfloat16s."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000
    bits[1::50] = rng.choice(
        np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7FFFFF, 1]), len(bits[1::50])
    )
    return bits.view(np.float32)


def naive_bfloat16(numbers: Array) -> Array:
    """The bits of the nearest bfloat16s, by whole numbers of 64 bits; what is NaN stays some NaN."""
    bits = numbers.reshape(-1).view(np.uint32).astype(np.int64)
    sign, rest = bits >> 31 << 15, bits & 0x7FFFFFFF
    low, high = rest & 0xFFFF, rest >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    near = np.where(rest < 0x7F800000, np.minimum(high + up, 0x7F7F), np.where(rest > 0x7F800000, high | 0x40, high))
    return (sign | near).astype(np.uint16).reshape(numbers.shape)


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shapes", [SHAPES, [(LARGE,), (5, BLOCK + 3)]], ids=["small", "large"])
async def test_parts_become_the_nearest_bfloat16s_and_come_back_as_these(way: Way, shapes: Any) -> None:
    parts = [strange_numbers(int(np.prod(shape)), seed).reshape(shape) for seed, shape in enumerate(shapes)]
    plan = PackingPlan(Made([np.float32(3), *parts]), {1 + n: "bfloat16" for n in range(len(parts))}, way.host)  # type: ignore[arg-type]
    for _ in range(2):  # nobody knows of the first run how large what it makes is
        loss, *found = await packed(plan)
        assert loss == 3
        for part, bits in zip(parts, found, strict=True):
            assert (bits.dtype, bits.shape) == (np.dtype(np.uint16), part.shape)
            assert bits.tobytes() == naive_bfloat16(part).tobytes()
    for again in await unpacked(Unpacking(["bfloat16"] * len(parts), way), found, found):
        for bits, numbers in zip(found, again, strict=True):
            assert numbers.dtype == np.float32
            assert numbers.tobytes() == (bits.astype(np.uint32) << 16).tobytes()


async def test_numbers_that_are_not_finite_stay_so_and_finite_ones_stay_finite(way: Way) -> None:
    numbers = np.array([np.nan, -np.inf, np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, -0.0], np.float32)
    (bits,) = await packed(PackingPlan(Made([numbers]), {0: "bfloat16"}, way.host))  # type: ignore[arg-type]
    again = unpacked_now([bits], ["bfloat16"], way.host.memory)[0]
    assert np.array_equal(np.isfinite(again), np.isfinite(numbers))
    assert np.isnan(again[0])
    assert np.array_equal(np.signbit(again[1:]), np.signbit(numbers[1:]))
    assert np.all(np.abs(again[3:5] / numbers[3:5] - 1) <= 2**-8)


async def test_what_is_not_packed_is_handed_on_as_it_is(way: Way) -> None:
    rows, part = np.arange(4), np.ones(3, np.float32)
    plan = PackingPlan(Made([rows, part]), {1: "bfloat16"}, way.host)  # type: ignore[arg-type]
    assert (await packed(plan))[0] is rows
    ((first, second),) = await unpacked(Unpacking(["", "bfloat16"], way), [rows, naive_bfloat16(part)])
    assert first is rows
    assert second.tolist() == [1, 1, 1]


async def test_parts_that_lie_in_other_orders_or_at_odd_places_are_packed_and_unpacked_as_others(way: Way) -> None:
    part = np.asfortranarray(np.arange(15, dtype=np.float32).reshape(3, 5))
    (bits,) = await packed(PackingPlan(Made([part]), {0: "bfloat16"}, way.host))  # type: ignore[arg-type]
    assert bits.tobytes() == naive_bfloat16(np.ascontiguousarray(part)).tobytes()
    odd = np.zeros(31, np.uint8)[1:].view(np.uint16)
    odd[...] = bits.reshape(-1)
    ((numbers,),) = await unpacked(Unpacking(["bfloat16"], way), [odd])
    assert numbers.tolist() == part.reshape(-1).tolist()


# ── where it is computed ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_much_is_packed_in_lanes_and_little_in_the_call(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made([np.ones(LARGE, np.float32)])
    plan = PackingPlan(made, {0: "bfloat16"}, way.host)  # type: ignore[arg-type]
    for runs in (1, 2):
        await packed(plan)
        assert made.runs == runs
    made.fetches = [np.ones(5, np.float32)]
    for _ in range(3):
        await packed(plan)
    assert made.runs == 3  # the first of them, before it was known how few they are
    monkeypatch.setattr(packing_module, "is_compiled", lambda variant: False)
    assert Unpacking(["bfloat16"], way).unpack([[np.ones(5, np.uint16)]], print, print) is not None


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_share_all_blocks_and_none_twice(threads: int) -> None:
    packings = [Packing("narrow_blocks", (), size) for size in (0, 1, BLOCK, 5 * BLOCK + 1, 0, 40 * BLOCK)]
    shared = shares(packings, threads)
    assert len(shared) <= threads
    for each in packings:
        blocks = [block for share in shared for one, begin, end in share if one is each for block in range(begin, end)]
        assert sorted(blocks) == list(range(each.blocks))
    sizes = [sum(end - begin for _, begin, end in share) for share in shared]
    assert max(sizes) - min(sizes) <= 1


# ── what comes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "strange", [np.ones((3, 4), np.float32), np.ones((4, 3), np.uint16), np.ones(12, np.uint8), "no room"], ids=str
)
async def test_what_is_no_packed_part_is_refused_before_there_is_memory_for_it(way: Way, strange: Any) -> None:
    feeds = {0: PlanFeed("part", Spec("float32", (3, 4)), "here.py:1")}
    expected = Unpacking(["bfloat16"], way).expected(feeds)
    assert checked([np.ones((3, 4), np.uint16)], expected.values(), "replica 0")
    with pytest.raises(ResourceError if isinstance(strange, str) else SpecError, match=r"part .*of replica 0"):
        checked([strange], expected.values(), "replica 0")


async def test_where_there_is_no_memory_for_updates_that_is_said_and_nothing_runs(way: Way) -> None:
    way.host.memory.limit = 1 << 16
    with pytest.raises(ResourceError):
        await unpacked(Unpacking(["bfloat16"], way), [np.ones(1 << 20, np.uint16)])
