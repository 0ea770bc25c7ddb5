"""Random numbers by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

A key and a counter make four words of 32 bits. A tensor's own key is what (seed, stream, step) makes, and then each
iteration of the loops around it; its entries are blocks counted from 0, so each is computed without those before it:
devices agree, and so does whoever makes but a stretch of it. What the words become is computed in float64 and rounded
once. A CPU computes many blocks at a time, side by side, each step of the way a loop of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.elementary.exponential import whole_number
from flowrt.kernels.elementary.logarithm import log_of_normal64
from flowrt.kernels.elementary.quantile import distance_of, quantile_at
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import cuda
from flowrt.kernels.ops.trigonometry import circle

ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
FIRST, SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
FIRST_STEP, SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
FIVE, SIX, EIGHT = np.uint64(5), np.uint64(6), np.uint64(8)
POSITIVE = (1 << 63) - 1
TWO_PI = 2.0 * math.pi
BLOCKS = 128  # side by side


@jitable
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """The four random words of a counter and a key, all of them uint64 below 2**32."""
    for _ in range(ROUNDS):
        first, second = FIRST * c0, SECOND * c2
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & LOW, (first >> HALF) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + FIRST_STEP) & LOW, (k1 + SECOND_STEP) & LOW
    return c0, c1, c2, c3


@jitable
def tensor_key(iterations: Any, given: int, seed: int, stream: int, run: Any) -> Any:
    """Four words of a tensor's own, from the op's seed (the run's, where none is ``given``), stream, step and
    iterations."""
    root, step = np.uint64((seed if given else run[2]) & POSITIVE), np.uint64(run[1] & POSITIVE)
    name = np.uint64(stream & POSITIVE)
    key = philox(name & LOW, name >> HALF, step & LOW, step >> HALF, root & LOW, root >> HALF)
    for number in range(iterations.size):
        iteration = np.uint64(iterations[number])
        key = philox(iteration & LOW, iteration >> HALF, key[2], key[3], key[0], key[1])
    return key


@jitable
def block_words(block: int, key: Any) -> Any:
    counter = np.uint64(block)
    return philox(counter & LOW, counter >> HALF, key[2], key[3], key[0], key[1])


@jitable
def unit(first: Any, second: Any) -> float:
    """A float64 from 0 up to 1, which is left out, of 53 random bits."""
    return (float(first >> FIVE) * 67108864.0 + float(second >> SIX)) * 2.0**-53


@jitable
def fill_uniform(y: Any, block: int, low: float, high: float, base: int, lead: int, key: Any) -> None:
    """Write a block of `lanes` entries of ``y``, of which the first has ``lead`` entries before ``y`` begins."""
    words, many = block_words(base + block, key), lanes(y)
    for lane in range(many):
        at = block * many + lane - lead
        if at < 0 or at >= y.size:
            continue
        share = unit(words[2 * lane], words[2 * lane + 1]) if many == 2 else float(words[lane] >> EIGHT) * 2.0**-24
        value = y.dtype.type(low + (high - low) * share)
        y[at] = y.dtype.type(low) if value >= y.dtype.type(high) else value  # rounded up to what is left out


@jitable
def fill_normal(y: Any, block: int, mean: float, stddev: float, base: int, lead: int, key: Any) -> None:
    """As `fill_uniform`: pairs by Box and Muller's transform."""
    words, many = block_words(base + block, key), lanes(y)
    for pair in range(many // 2):
        if many == 2:
            share, angle = unit(words[0], words[1]), unit(words[2], words[3])
        else:
            share, angle = float(words[2 * pair]) * 2.0**-32, float(words[2 * pair + 1]) * 2.0**-32
        radius, at = stddev * math.sqrt(-2.0 * math.log(1.0 - share)), block * many + 2 * pair - lead
        if at >= 0 and at < y.size:
            y[at] = mean + radius * math.cos(TWO_PI * angle)
        if at + 1 >= 0 and at + 1 < y.size:
            y[at + 1] = mean + radius * math.sin(TWO_PI * angle)


@jitable
def lanes(y: Any) -> int:
    """How many entries a block makes: float64 takes two words each."""
    return 2 if y.itemsize == 8 else 4


def _sampling(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    seed = attrs["seed"]
    numbers = [float(attrs[name]) for name in ("low", "high", "mean", "stddev") if name in attrs]
    base, lead = divmod(attrs["first"], _lanes(outputs[0].dtype))
    words = (*numbers, int(seed is not None), seed or 0, attrs["stream"], base, lead)
    return Call(tuple(View.dense((spec.size,)) for spec in (*inputs, *outputs)), words)


def _lanes(dtype: Any) -> int:
    return 2 if np.dtype(dtype).itemsize == 8 else 4


def _side_by_side(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """As `_sampling`, with room for the words and numbers of some blocks. Each block is a unit."""
    call, room = _sampling(inputs, outputs, attrs), View.dense((4, BLOCKS))
    size = outputs[0].size + call.words[-1] if outputs[0].size else 0
    return Call((*call.views, room, room), call.words, units=-(-size // _lanes(outputs[0].dtype)))


def _room(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, Spec]:
    return Spec("uint64", (4, BLOCKS)), Spec(outputs[0].dtype, (4, BLOCKS))


@jitable
def make_words(words: Any, first: int, many: int, key: Any) -> None:
    """Put the words of ``many`` blocks, from the block ``first`` on, into the rows of ``words``."""
    for t in range(many):
        a, b, c, d = block_words(first + t, key)
        words[0, t], words[1, t], words[2, t], words[3, t] = a, b, c, d


@jitable
def wide_share(first: Any, second: Any) -> Any:
    """`unit` of words that lie side by side."""
    return (whole_number(first >> FIVE) * 67108864.0 + whole_number(second >> SIX)) * 2.0**-53


@jitable
def put_blocks(numbers: Any, y: Any, first: int, many: int, lead: int) -> None:
    """Put the rows of ``numbers`` where the blocks from ``first`` on lie; the last may reach beyond the end.

    The block 0 begins ``lead`` entries before ``y``.
    """
    each = lanes(y)
    begun = int(first == 0 and lead > 0)
    if begun:
        for lane in range(lead, min(each, y.size + lead)):
            y[lane - lead] = numbers[lane, 0]
    whole = max(min(many, (y.size + lead) // each - first), begun)
    for t in range(begun, whole):
        at = (first + t) * each - lead
        if each == 2:
            y[np.uint64(at)], y[np.uint64(at + 1)] = numbers[0, t], numbers[1, t]
        else:
            y[np.uint64(at)], y[np.uint64(at + 1)] = numbers[0, t], numbers[1, t]
            y[np.uint64(at + 2)], y[np.uint64(at + 3)] = numbers[2, t], numbers[3, t]
    if whole < many:
        for at in range((first + whole) * each - lead, y.size):
            y[at] = numbers[(at + lead) % each, whole]


@kernel("random_normal", layout=_side_by_side, local=_room, infallible=True)
def random_normal(
    shape: Any, iterations: Any, y: Any, words: Any, numbers: Any, mean: float, stddev: float, given: int, seed: int,
    stream: int, base: int, lead: int, begin: int, end: int, run: Any,
) -> None:  # fmt: skip
    key, many = tensor_key(iterations, given, seed, stream, run), lanes(y)
    for first in range(begin, end, BLOCKS):
        count = min(BLOCKS, end - first)
        make_words(words, base + first, count, key)
        for pair in range(many // 2):
            one, other = words[2 * pair], words[2 * pair + 1]
            for t in range(count):
                if many == 2:
                    share, angle = wide_share(words[0, t], words[1, t]), wide_share(words[2, t], words[3, t])
                else:
                    share, angle = whole_number(one[t]) * 2.0**-32, whole_number(other[t]) * 2.0**-32
                radius = stddev * math.sqrt(-2.0 * log_of_normal64(1.0 - share, 0.0))
                across, up = circle(angle)
                numbers[2 * pair, t], numbers[2 * pair + 1, t] = mean + radius * across, mean + radius * up
        put_blocks(numbers, y, first, count, lead)


@kernel("random_uniform", layout=_side_by_side, local=_room, infallible=True)
def random_uniform(
    shape: Any, iterations: Any, y: Any, words: Any, numbers: Any, low: float, high: float, given: int, seed: int,
    stream: int, base: int, lead: int, begin: int, end: int, run: Any,
) -> None:  # fmt: skip
    key, many = tensor_key(iterations, given, seed, stream, run), lanes(y)
    least, limit = y.dtype.type(low), y.dtype.type(high)
    for first in range(begin, end, BLOCKS):
        count = min(BLOCKS, end - first)
        make_words(words, base + first, count, key)
        for lane in range(many):
            for t in range(count):
                if many == 2:
                    share = wide_share(words[2 * lane, t], words[2 * lane + 1, t])
                else:
                    share = whole_number(words[lane, t] >> EIGHT) * 2.0**-24
                value = y.dtype.type(low + (high - low) * share)
                numbers[lane, t] = least if value >= limit else value  # rounded up to what is left out
        put_blocks(numbers, y, first, count, lead)


@jitable
def fill_truncated(y: Any, block: int, mean: float, stddev: float, base: int, lead: int, key: Any) -> None:
    """As `fill_uniform`: quantiles, each of one share."""
    words, many = block_words(base + block, key), lanes(y)
    for lane in range(many):
        at = block * many + lane - lead
        if at >= 0 and at < y.size:
            share = unit(words[2 * lane], words[2 * lane + 1]) if many == 2 else (float(words[lane]) + 0.5) * 2.0**-32
            distance = distance_of(share)
            y[at] = mean + stddev * quantile_at(distance, math.log(1.0 - 4.0 * distance * distance))


@kernel("random_truncated_normal", layout=_side_by_side, local=_room, infallible=True)
def random_truncated_normal(
    shape: Any, iterations: Any, y: Any, words: Any, numbers: Any, mean: float, stddev: float, given: int, seed: int,
    stream: int, base: int, lead: int, begin: int, end: int, run: Any,
) -> None:  # fmt: skip
    key, many = tensor_key(iterations, given, seed, stream, run), lanes(y)
    for first in range(begin, end, BLOCKS):
        count = min(BLOCKS, end - first)
        make_words(words, base + first, count, key)
        for lane in range(many):
            for t in range(count):
                if many == 2:
                    share = wide_share(words[2 * lane, t], words[2 * lane + 1, t])
                else:
                    share = (whole_number(words[lane, t]) + 0.5) * 2.0**-32
                distance = distance_of(share)
                logarithm = log_of_normal64(1.0 - 4.0 * distance * distance, 0.0)
                numbers[lane, t] = mean + stddev * quantile_at(distance, logarithm)
        put_blocks(numbers, y, first, count, lead)


def filled_on_cuda(fill: Any) -> Callable[..., None]:
    """The twin of a distribution of two numbers: a thread fills a block at a time."""

    def fill_all(
        shape: Any, iterations: Any, y: Any, first: float, second: float, given: int, seed: int, stream: int, base: int,
        lead: int, run: Any,
    ) -> None:  # fmt: skip
        key, many = tensor_key(iterations, given, seed, stream, run), lanes(y)
        for block in range(cuda.grid(1), (y.size + lead + many - 1) // many, cuda.gridsize(1)):
            fill(y, block, first, second, base, lead, key)

    return fill_all


kernel("random_normal", "cuda", layout=_sampling)(filled_on_cuda(fill_normal))
kernel("random_uniform", "cuda", layout=_sampling)(filled_on_cuda(fill_uniform))
kernel("random_truncated_normal", "cuda", layout=_sampling)(filled_on_cuda(fill_truncated))


# ── integers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# A random number of 64 bits, or 128 where more than 2**32 integers are drawn from, times how many they are: what is
# above those bits. So one is drawn more often than another by less than 2**-32 of its probability.


def _drawing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """Each block is a unit: of two entries, or of one where each takes all its bits."""
    seed, many = attrs["seed"], attrs["most"] - attrs["low"] + 1
    each = 2 if many <= 1 << 32 else 1
    words = attrs["low"], many % (1 << 64), each, int(seed is not None), seed or 0, attrs["stream"]
    flat = (View.dense((spec.size,)) for spec in (*inputs, *outputs))
    return Call((*flat, View.dense((4, BLOCKS))), words, units=-(-outputs[0].size // each))


def _room_for_words(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec]:
    return (Spec("uint64", (4, BLOCKS)),)


@jitable
def scaled(high: Any, low: Any, many: Any) -> Any:
    """What is above the 64 bits of a random number, as two words, times ``many``, at most 2**32."""
    return (high * many + ((low * many) >> HALF)) >> HALF


@jitable
def product_of(a: Any, b: Any) -> tuple[Any, Any]:
    """The upper and the lower 64 bits of a product."""
    lowest = (a & LOW) * (b & LOW)
    middle = (a >> HALF) * (b & LOW) + (lowest >> HALF)
    other = (a & LOW) * (b >> HALF) + (middle & LOW)
    return (a >> HALF) * (b >> HALF) + (middle >> HALF) + (other >> HALF), (other << HALF) | (lowest & LOW)


@jitable
def widely_scaled(a: Any, b: Any, c: Any, d: Any, many: Any) -> Any:
    """What is above the 128 bits of a random number, as four words, times ``many``, where 0 stands for 2**64."""
    if many == 0:
        return (a << HALF) | b
    upper, lower = product_of((a << HALF) | b, many)
    carried = product_of((c << HALF) | d, many)[0]
    return upper + np.uint64(carried > ~lower)


@jitable
def counted_from(low: Any, number: Any) -> Any:
    """The sum modulo 2**64, which nothing on the way to it exceeds."""
    lower = (low & LOW) + (number & LOW)
    return (((low >> HALF) + (number >> HALF) + (lower >> HALF)) << HALF) | (lower & LOW)


@kernel("random_integers", layout=_drawing, local=_room_for_words, infallible=True)
def random_integers(
    shape: Any, iterations: Any, y: Any, words: Any, low: int, many: int, each: int, given: int, seed: int,
    stream: int, begin: int, end: int, run: Any,
) -> None:  # fmt: skip
    key, least, size = tensor_key(iterations, given, seed, stream, run), np.uint64(low), np.uint64(many)
    for first in range(begin, end, BLOCKS):
        count = min(BLOCKS, end - first)
        make_words(words, first, count, key)
        a, b, c, d = words[0], words[1], words[2], words[3]
        if each == 1:
            for t in range(count):
                y[first + t] = counted_from(least, widely_scaled(a[t], b[t], c[t], d[t], size))
            continue
        for t in range(count):
            a[t], c[t] = counted_from(least, scaled(a[t], b[t], size)), counted_from(least, scaled(c[t], d[t], size))
        for t in range(min(count, y.size // 2 - first)):
            y[2 * (first + t)], y[2 * (first + t) + 1] = a[t], c[t]
        if 2 * (first + count) > y.size:
            y[y.size - 1] = a[count - 1]


@kernel("random_integers", "cuda", layout=_drawing, local=_room_for_words)
def random_integers_on_cuda(
    shape: Any, iterations: Any, y: Any, words: Any, low: int, many: int, each: int, given: int, seed: int,
    stream: int, run: Any,
) -> None:  # fmt: skip
    key, least, size = tensor_key(iterations, given, seed, stream, run), np.uint64(low), np.uint64(many)
    for block in range(cuda.grid(1), (y.size + each - 1) // each, cuda.gridsize(1)):
        a, b, c, d = block_words(block, key)
        if each == 1:
            y[block] = counted_from(least, widely_scaled(a, b, c, d, size))
            continue
        y[2 * block] = counted_from(least, scaled(a, b, size))
        if 2 * block + 1 < y.size:
            y[2 * block + 1] = counted_from(least, scaled(c, d, size))
