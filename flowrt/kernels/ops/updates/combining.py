"""Weighted sums of what several replicas computed, wherever their numbers lie: what a server makes of a set of updates.

An update is some *parts*; all that are summed here are of one dtype, in whose numbers all places are counted from the
beginning of memory on: ``memory`` is an array at address 0. Part p of update k begins at ``sources[k, p]`` and has
``sizes[p]`` numbers; its sum goes to ``targets[p]``. Each number of a sum is computed by itself, in the order of the
updates, so how the work is cut and shared changes no bit. A unit of work is a *block*, as much of a part as a core's
nearest cache holds with its sum; blocks ``starts[p]`` to ``starts[p + 1]`` are of part p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec, as_dtype, is_half
from flowrt.kernels.language.table import Call, View, host_only, jitable, kernel
from flowrt.kernels.launch import Application, apply_kernel
from flowrt.kernels.ops.precision import BITS

BLOCK = 2048
"""The numbers of a block, of which a nearest cache of 32 KiB holds two in float64."""


def _summing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    views = [View.dense(spec.concrete) for spec in (*inputs, *_near(inputs, outputs, attrs))]
    return Call(tuple(views), units=attrs["blocks"])


def _near(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Spec, ...]:
    return (Spec(inputs[-1].dtype, (BLOCK,)),)


def _sums(read: Callable[..., Any], write: Callable[..., Any]) -> Callable[..., None]:
    """What sums numbers that ``read`` makes of what memory holds, rounded by ``write`` where ops would round them: each
    term, the sum, and what is divided."""

    def sum_updates(
        memory: Any,
        sources: Any,
        targets: Any,
        sizes: Any,
        starts: Any,
        count: Any,
        weights: Any,
        total: Any,
        begin: int,
        end: int,
    ) -> None:
        """Sums of ``count[0]`` updates. ``weights`` are one for each that there may be, and behind them the divisor."""
        part, divisor = 0, weights[weights.size - 1]
        for unit in range(begin, end):
            while unit >= starts[part + 1]:
                part += 1
            first = (unit - starts[part]) * total.size
            many = min(sizes[part] - first, total.size)
            place, weight = sources[0, part] + first, weights[0]
            for i in range(many):
                total[np.uint64(i)] = read(write(weight * read(memory[np.uint64(place + i)])))
            for k in range(1, count[0]):
                place, weight = sources[k, part] + first, weights[k]
                for i in range(many):
                    total[np.uint64(i)] += read(write(weight * read(memory[np.uint64(place + i)])))
            place = targets[part] + first
            for i in range(many):
                memory[np.uint64(place + i)] = write(read(write(total[np.uint64(i)])) / divisor)

    return sum_updates


@jitable
def _as_it_is(number: Any) -> Any:
    return number


def _updates_of(half: str) -> Callable[[Sequence[Any]], bool]:
    return lambda dtypes: str(dtypes[0]) == half


kernel("sum_updates", layout=_summing, local=_near)(_sums(_as_it_is, _as_it_is))
for _half, _functions in BITS.items():
    kernel("sum_updates", layout=_summing, local=_near, dtypes=_updates_of(_half), takes_bits=True)(_sums(*_functions))
host_only("sum_updates", why="a server adds up what came to its memory from the network")


def weighed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What numbers of a dtype are multiplied by and added up in."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def blocks_of(sizes: Sequence[int]) -> list[int]:
    """Where each part's blocks begin among all, and behind them how many there are."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // BLOCK))
    return starts


def summing(dtype: Any, parts: int, updates: int, blocks: int) -> Application:
    """The launch that sums at most so many updates, of so many parts and blocks."""
    words = [(updates, parts), (parts,), (parts,), (parts + 1,), (1,)]
    weights = Spec(weighed_in(as_dtype(dtype)), (updates + 1,))
    specs = [Spec(dtype, (1,)), *(Spec("int64", shape) for shape in words), weights]
    return apply_kernel("sum_updates", specs, [], {"blocks": blocks})
