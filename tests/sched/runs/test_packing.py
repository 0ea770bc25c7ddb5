"""Parts of updates that are packed: to the bits of naive NumPy, by any number of threads, and judged as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flowrt.base.errors import ResourceError, SpecError
from flowrt.base.plan import PlanFeed
from flowrt.base.spec import Spec
from flowrt.kernels.ops.updates.compressing import BLOCK
from flowrt.sched.drivers import packing as packing_module
from flowrt.sched.drivers.closed import checked
from flowrt.sched.drivers.packing import (
    INLINE_BYTES,
    Feedback,
    Packing,
    PackingPlan,
    Unpacking,
    packed_spec,
    shares,
    unpacked_now,
)

if TYPE_CHECKING:
    from flowrt.sched.drivers.way import Way

Array = np.ndarray[Any, Any]
LARGE = INLINE_BYTES // 4 + 17  # numbers that are packed in lanes
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (1,), (7, 5), (BLOCK,), (BLOCK + 1,), (3, BLOCK)]


class Made:
    """Stands for a plan of a replica, whose fetches are these; ``runs`` are those that took, or would take, long."""

    def __init__(self, fetches: Sequence[Array]) -> None:
        self.fetches, self.runs = list(fetches), 0

    def run_now(self, feeds: Sequence[Array], number: int) -> list[Array]:
        return list(self.fetches)

    async def run(self, feeds: Sequence[Array], context: Any) -> list[Array]:
        self.runs += 1
        return list(self.fetches)


def planned(made: Made, how: dict[int, str], way: Way) -> PackingPlan:
    return PackingPlan(made, how, Feedback(way.host.memory), way.host)  # type: ignore[arg-type]


def unpacking(packed: Sequence[str], parts: Sequence[Array], way: Way) -> Unpacking:
    """What makes updates of such parts again."""
    feeds = {n: PlanFeed(f"part {n}", Spec(part.dtype, part.shape), "here.py:1") for n, part in enumerate(parts)}
    return Unpacking(packed, feeds, way)


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
    plan = planned(Made([np.float32(3), *parts]), {1 + n: "bfloat16" for n in range(len(parts))}, way)
    for _ in range(2):  # nobody knows of the first run how large what it makes is
        loss, *found = await packed(plan)
        assert loss == 3
        for part, bits in zip(parts, found, strict=True):
            assert (bits.dtype, bits.shape) == (np.dtype(np.uint16), part.shape)
            assert bits.tobytes() == naive_bfloat16(part).tobytes()
    for again in await unpacked(unpacking(["bfloat16"] * len(parts), parts, way), found, found):
        for bits, numbers in zip(found, again, strict=True):
            assert numbers.dtype == np.float32
            assert numbers.tobytes() == (bits.astype(np.uint32) << 16).tobytes()


async def test_numbers_that_are_not_finite_stay_so_and_finite_ones_stay_finite(way: Way) -> None:
    numbers = np.array([np.nan, -np.inf, np.inf, 3.4e38, -3.4e38, 1e-45, 0.0, -0.0], np.float32)
    (bits,) = await packed(planned(Made([numbers]), {0: "bfloat16"}, way))
    again = unpacked_now([bits], ["bfloat16"], way.host.memory)[0]
    assert np.array_equal(np.isfinite(again), np.isfinite(numbers))
    assert np.isnan(again[0])
    assert np.array_equal(np.signbit(again[1:]), np.signbit(numbers[1:]))
    assert np.all(np.abs(again[3:5] / numbers[3:5] - 1) <= 2**-8)


async def test_what_is_not_packed_is_handed_on_as_it_is(way: Way) -> None:
    rows, part = np.arange(4), np.ones(3, np.float32)
    plan = planned(Made([rows, part]), {1: "bfloat16"}, way)
    assert (await packed(plan))[0] is rows
    ((first, second),) = await unpacked(unpacking(["", "bfloat16"], [rows, part], way), [rows, naive_bfloat16(part)])
    assert first is rows
    assert second.tolist() == [1, 1, 1]


async def test_parts_that_lie_in_other_orders_or_at_odd_places_are_packed_and_unpacked_as_others(way: Way) -> None:
    part = np.asfortranarray(np.arange(15, dtype=np.float32).reshape(3, 5))
    (bits,) = await packed(planned(Made([part]), {0: "bfloat16"}, way))
    assert bits.tobytes() == naive_bfloat16(np.ascontiguousarray(part)).tobytes()
    odd = np.zeros(31, np.uint8)[1:].view(np.uint16)
    odd[...] = bits.reshape(-1)
    ((numbers,),) = await unpacked(unpacking(["bfloat16"], [part.reshape(-1)], way), [odd])
    assert numbers.tolist() == part.reshape(-1).tolist()


# ── int8 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def naive_int8(numbers: Array) -> tuple[Array, Array, Array]:
    """The codes and scales of float32 numbers, block by block, and what they come to again."""
    codes, scales = np.zeros(numbers.size, np.int8), np.zeros(-(-numbers.size // BLOCK), np.float32)
    again = np.zeros(numbers.size, np.float32)
    for block in range(len(scales)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        each = numbers[part]
        largest = np.minimum(np.abs(each).max(), np.float32(2.0**126))
        if not np.isfinite(each).all():
            scales[block] = again[part] = np.nan
        elif largest >= 2.0**-116:
            scales[block] = largest / np.float32(127)
            codes[part] = np.rint(np.clip(each * (np.float32(127) / largest), -127, 127))
            again[part] = codes[part] * scales[block]
    return codes, scales, again


def of_int8(packed: Array, size: int) -> tuple[Array, Array]:
    """The codes and scales that are packed."""
    blocks = -(-size // BLOCK)
    return packed[4 * blocks :].view(np.int8), packed[: 4 * blocks].view(np.float32)


def widely(size: int, seed: int) -> Array:
    """Numbers of blocks that are large, small, tiny, huge and nothing."""
    rng, blocks = np.random.default_rng(seed), -(-size // BLOCK)
    powers = rng.choice([0, -20, -120, -149, 126, 127], blocks)
    ends = np.ldexp(rng.uniform(-1, 1, size), np.repeat(powers, BLOCK)[:size] + rng.integers(-9, 1, size))
    return np.asarray(ends, np.float32)


@pytest.mark.parametrize("shape", [(0,), (), (7, 5), (BLOCK,), (9, BLOCK + 1), (LARGE,)], ids=str)
async def test_int8_has_the_bits_of_naive_numpy_and_what_it_leaves_goes_with_the_next(way: Way, shape: Any) -> None:
    size = int(np.prod(shape))
    made, feedback = Made([]), Feedback(way.host.memory)
    plan = PackingPlan(made, {0: "int8"}, feedback, way.host)  # type: ignore[arg-type]
    kept = np.zeros(size, np.float32)
    for version in range(4):
        numbers = widely(size, version)
        made.fetches = [numbers.reshape(shape)]
        (found,) = await packed(plan)
        feedback.post(version)
        with np.errstate(over="ignore"):
            together = numbers + kept
        for first in range(0, size, BLOCK):  # what is no number any more together goes without what was kept
            if not np.isfinite(together[first : first + BLOCK]).all():
                together[first : first + BLOCK] = numbers[first : first + BLOCK]
        codes, scales, again = naive_int8(together)
        assert found.shape == packed_spec("int8", Spec("float32", shape)).dims
        assert of_int8(found, size)[0].tobytes() == codes.tobytes()
        assert of_int8(found, size)[1].tobytes() == scales.tobytes()
        ((numbers_again,),) = await unpacked(unpacking(["int8"], [numbers.reshape(shape)], way), [found])
        assert numbers_again.shape == shape
        assert np.array_equal(numbers_again.reshape(-1), again)
        if version != 2:  # that does not count: what was kept stays
            kept, feedback.counted = together - again, version
    assert np.isfinite(kept).all()


async def test_a_block_with_a_number_that_is_not_finite_comes_as_none_and_leaves_nothing(way: Way) -> None:
    made, feedback = Made([np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32)]), Feedback(way.host.memory)
    plan = PackingPlan(made, {0: "int8"}, feedback, way.host)  # type: ignore[arg-type]
    (first,) = await packed(plan)
    feedback.post(0)
    feedback.counted = 0
    for strange in (np.nan, np.inf, -np.inf):
        made.fetches[0][BLOCK + 5] = strange
        (spoiled,) = await packed(plan)
        feedback.post(1)  # and refused
        (again,) = unpacked_now([spoiled], ["int8"], way.host.memory)
        assert np.isnan(again[BLOCK : 2 * BLOCK]).all()
        assert np.isfinite(again[:BLOCK]).all()
        assert np.isfinite(again[2 * BLOCK :]).all()
    made.fetches = [np.linspace(-1, 1, 3 * BLOCK, dtype=np.float32)]
    (second,) = await packed(plan)
    kept = made.fetches[0] - naive_int8(made.fetches[0])[2]  # of the first one alone
    assert of_int8(second, 3 * BLOCK)[0].tobytes() == naive_int8(made.fetches[0] + kept)[0].tobytes()
    assert not np.array_equal(first, second)


# ── where it is computed ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_much_is_packed_in_lanes_and_little_in_the_call(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made([np.ones(LARGE, np.float32)])
    plan = planned(made, {0: "bfloat16"}, way)
    for runs in (1, 2):
        await packed(plan)
        assert made.runs == runs
    made.fetches = [np.ones(5, np.float32)]
    for _ in range(3):
        await packed(plan)
    assert made.runs == 3  # the first of them, before it was known how few they are
    monkeypatch.setattr(packing_module, "is_compiled", lambda variant: False)
    assert (
        unpacking(["bfloat16"], [np.ones(5, np.float32)], way).unpack([[np.ones(5, np.uint16)]], print, print)
        is not None
    )


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_share_all_blocks_and_none_twice(threads: int) -> None:
    packings = [Packing("narrow_blocks", (), (), size) for size in (0, 1, BLOCK, 5 * BLOCK + 1, 0, 40 * BLOCK)]
    shared = shares(packings, threads)
    assert len(shared) <= threads
    for each in packings:
        blocks = [block for share in shared for one, begin, end in share if one is each for block in range(begin, end)]
        assert sorted(blocks) == list(range(each.blocks))
    sizes = [sum(end - begin for _, begin, end in share) for share in shared]
    assert max(sizes) - min(sizes) <= 1


# ── what comes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "strange",
    [
        np.ones((3, 4), np.float32),
        np.ones((4, 3), np.uint16),
        np.ones(12, np.uint8),
        np.ones(17, np.uint8),
        np.ones((16, 1), np.uint8),
        np.ones(16, np.int8),
        "no room",
    ],
    ids=str,
)
async def test_what_is_no_packed_part_is_refused_before_there_is_memory_for_it(
    way: Way, how: str, strange: Any
) -> None:
    expected = unpacking([how], [np.ones((3, 4), np.float32)], way).expected
    right = np.ones((3, 4), np.uint16) if how == "bfloat16" else np.ones(12 + 4, np.uint8)
    assert checked([right], expected.values(), "replica 0")
    with pytest.raises(ResourceError if isinstance(strange, str) else SpecError, match=r"part .*of replica 0"):
        checked([strange], expected.values(), "replica 0")


async def test_where_there_is_no_memory_for_updates_that_is_said_and_nothing_runs(way: Way) -> None:
    way.host.memory.limit = 1 << 16
    with pytest.raises(ResourceError):
        await unpacked(unpacking(["bfloat16"], [np.ones(1 << 20, np.float32)], way), [np.ones(1 << 20, np.uint16)])
