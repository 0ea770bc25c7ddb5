"""Where entries belong among others in order, and where a mask is true."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Attrs, Call, View, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.sorting.keys import key_of, meaning_of
from flowrt.kernels.ops.sorting.lines import comes_before
from flowrt.kernels.teams.standing import divided

TOGETHER = 64  # values that are looked for side by side


def _searching(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Operands as rows, one alone if a vector is searched. Each entry that is looked for is a unit of work."""
    (*before, size), many = inputs[0].concrete, inputs[1].size
    rows = math.prod(before)
    each = View.dense((rows, many // rows if rows else 0))
    words = (*meaning_of(inputs[0].dtype), int(attrs["side"] == "right"))
    return Call((View.dense((rows, size)), each, each, View.dense((TOGETHER,))), words, many)


def _halved(specs: Sequence[Spec]) -> float:
    """Ten nanoseconds for each entry that is looked for, as a scheduler guesses."""
    return 600.0 * specs[1].size


def _batch(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [Spec("uint64", (TOGETHER,))]


@kernel("searchsorted", layout=_searching, local=_batch, moved=(0, 1), flops=_halved)
def searchsorted(
    x: Any, values: Any, y: Any, keys: Any, kind: int, infinite: int, right: int, begin: int, end: int
) -> None:
    """Some values together, each halving as often what is left, so that none waits for the memory of another."""
    unit = begin
    while unit < end:
        row, j = unit // values.shape[1], unit % values.shape[1]
        many, line = min(min(TOGETHER, end - unit), values.shape[1] - j), x[row]
        given, found = values[row, j : j + many], y[row, j : j + many]
        for t in range(many):
            keys[np.uint64(t)], found[np.uint64(t)] = key_of(given[np.uint64(t)], x.itemsize, kind, infinite, 0), 0
        left = line.size
        while left > 0:
            half = (left + 1) >> 1
            for t in range(many):
                low, key = found[np.uint64(t)], keys[np.uint64(t)]
                other = key_of(line[np.uint64(low + half - 1)], x.itemsize, kind, infinite, 0)
                before = int(other < key) | (right & int(other == key))
                found[np.uint64(t)] = low + half * before
            left -= half
        unit += many


def _searching_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    call = _searching(inputs, outputs, attrs)
    return Call(call.views[:3], call.words[-1:])


@kernel("searchsorted", "cuda", layout=_searching_on_cuda)
def searchsorted_on_cuda(x: Any, values: Any, y: Any, right: int) -> None:
    entry = cuda.grid(1)
    while entry < y.size:
        row, j = divided(entry, y.shape[1])
        low, left = 0, x.shape[1]
        while left > 0:
            half = (left + 1) >> 1
            if comes_before(x[row, low + half - 1], 0, values[row, j], right, 0):
                low += half
                left -= half
            else:
                left = half - 1
        y[row, j] = low
        entry += cuda.gridsize(1)


def _looking(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    return Call((View.dense((inputs[0].size,)), View.dense((inputs[0].size,)), View.dense((1,))), blocks=1)


@kernel("true_places", layout=_looking)
def true_places(mask: Any, places: Any, count: Any) -> None:
    found = 0
    for i in range(mask.size):
        places[np.uint64(found)] = i
        found += int(mask[np.uint64(i)])
    count[0] = found
    for i in range(found, mask.size):
        places[i] = 0


@kernel("true_places", "cuda", layout=_looking)
def true_places_on_cuda(mask: Any, places: Any, count: Any) -> None:
    """A thread for each stretch: it counts, then learns how many there are before its own."""
    counts, me = cuda.shared.array(THREADS, np.int64), cuda.threadIdx.x
    each = divided(mask.size + THREADS - 1, THREADS)[0]
    begin, end = min(me * each, mask.size), min((me + 1) * each, mask.size)
    found = 0
    for i in range(begin, end):
        found += int(mask[i])
    counts[me] = found
    cuda.syncthreads()
    at, total = 0, 0
    for other in range(THREADS):
        at += counts[other] if other < me else 0
        total += counts[other]
    behind = total + begin - at  # what is false goes behind all that is true
    for i in range(begin, end):
        if mask[i]:
            places[at] = i
            at += 1
        else:
            places[behind] = 0
            behind += 1
    if me == 0:
        count[0] = total
