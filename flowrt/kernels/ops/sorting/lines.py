"""Lines of entries in order, and the first entries of rows, by their keys (`keys`).

Many short lines are put in order side by side by a network of comparisons (`networks`), long ones each alone. Of the
first entries of a row only candidates are put in order: what comes before the last of those that were found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Attrs, Call, View, jitable, kernel, state
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.launch import in_ways
from flowrt.kernels.ops.index import around
from flowrt.kernels.ops.sorting.keys import (
    BYTES,
    FLOATING,
    LOW,
    TOP,
    VALUES,
    entry_of,
    key_of,
    meaning_of,
    order_keys,
    sort_words,
)
from flowrt.kernels.teams.standing import divided
from flowrt.kernels.tiles import networks
from flowrt.kernels.tiles.squares import transpose_lines, transpose_rows

# entries, by the bytes of a key, up to which lines are put in order side by side
PLACES_BESIDE, VALUES_BESIDE = {4: 256, 8: 256}, {4: 4096, 8: 1024}
SMALL, CANDIDATES = 32, 64  # first entries that others are put among one by one; those that are put in order together
LOOKED_AT = 64  # entries among which a candidate is looked for at once


def lines_of(shape: Sequence[int], axis: int | None) -> tuple[int, int, int]:
    """``shape`` as (before, ``axis``, after); as one line where that is None."""
    return (1, math.prod(shape), 1) if axis is None else around(shape, axis)


def _way(limits: dict[int, int]) -> Callable[..., str]:
    """What tells whether lines are put in order side by side, as those are that have no more entries than ``limits``
    says for the bytes of a key, where there are enough of them; or each alone."""

    def choose(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> str:
        before, size, after = lines_of(inputs[0].concrete, attrs["axis"])
        wide = _key_bytes(inputs[0])
        return "beside" if size <= limits[wide] and before * after >= networks.WIDTH // wide // 2 else "alone"

    return choose


def _key_bytes(x: Spec) -> int:
    return 8 if x.dtype.itemsize == 8 else 4


_way_of_places, _way_of_values = _way(PLACES_BESIDE), _way(VALUES_BESIDE)


def _beside(x: Spec, size: int) -> list[Spec]:
    """For keys of lines side by side, for their places or else the lines as rows; there is nothing to count."""
    wide = _key_bytes(x)
    rows = Spec(f"int{8 * wide}", (size, networks.WIDTH // wide))
    return [rows, rows, Spec("int64", (1, 1))]


def _room_for_places(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """For keys, for words or, side by side, places, and to count in."""
    size = lines_of(inputs[0].concrete, attrs["axis"])[1]
    if _way_of_places(inputs, outputs, attrs) == "beside":
        return _beside(inputs[0], size)
    return [Spec("uint64", (size,)), Spec("uint64", (2, size)), Spec("int64", (BYTES, VALUES))]


def _room_for_values(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """The same where the keys themselves are words."""
    size = lines_of(inputs[0].concrete, attrs["axis"])[1]
    if _way_of_values(inputs, outputs, attrs) == "beside":
        return _beside(inputs[0], size)
    words = Spec(f"uint{8 * _key_bytes(inputs[0])}", (2, size))
    return [Spec("uint64", (1,)), words, Spec("int64", (BYTES, VALUES))]


def _ordering(room: Callable[..., Sequence[Spec]]) -> Callable[..., Call]:
    """Operands as (before, axis, after). Each line is a unit of work."""

    def layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        before, size, after = lines_of(inputs[0].concrete, attrs["axis"])
        view, words = View.dense((before, size, after)), (*meaning_of(inputs[0].dtype), int(attrs["descending"]))
        local = (View.dense(spec.concrete) for spec in room(inputs, outputs, attrs))
        return Call((view, view, *local), words, before * after if size else 0)

    return layout


def argsort_alone(
    x: Any, y: Any, keys: Any, words: Any, counts: Any, kind: int, infinite: int, descending: int, begin: int, end: int
) -> None:
    after = x.shape[2]
    for line in range(begin, end):
        before, i = line // after, line % after
        for k in range(x.shape[1]):
            keys[np.uint64(k)] = key_of(x[before, k, i], x.itemsize, kind, infinite, descending)
        places = words[order_keys(keys, words, counts, x.itemsize)]
        for k in range(x.shape[1]):
            y[before, k, i] = places[np.uint64(k)] & LOW


def sort_alone(
    x: Any, y: Any, keys: Any, words: Any, counts: Any, kind: int, infinite: int, descending: int, begin: int, end: int
) -> None:
    after = x.shape[2]
    for line in range(begin, end):
        before, i = line // after, line % after
        for k in range(x.shape[1]):
            words[0, np.uint64(k)] = key_of(x[before, k, i], x.itemsize, kind, infinite, descending)
        found = words[int(sort_words(words[0], words[1], counts, 0, x.itemsize))]
        for k in range(x.shape[1]):
            y[before, k, i] = entry_of(found[np.uint64(k)], x.itemsize, kind, infinite, descending)
        if kind == FLOATING:
            order_zeros(x, y, before, i)


@jitable
def signed_key(key: Any, nbytes: int) -> Any:
    """A key of so many bytes as a signed number in the same order."""
    unused = np.uint64(8 * (BYTES - nbytes))
    return np.int64((key << unused) ^ TOP) >> np.int64(unused)


@jitable
def unsigned_key(key: Any, nbytes: int) -> Any:
    """The key that is such a number."""
    unused = np.uint64(8 * (BYTES - nbytes))
    return ((np.uint64(key) << unused) ^ TOP) >> unused


@jitable
def put_beside(x: Any, first: int, many: int, keys: Any, spare: Any, kind: int, infinite: int, descending: int) -> None:
    """Signed keys of so many lines side by side. Of rows, which are turned around, the last stands in for missing."""
    (lanes, after), (o, i) = (keys.shape[1], x.shape[2]), (first // x.shape[2], first % x.shape[2])
    if after > 1:
        for k in range(x.shape[1]):
            line, target = x[o, k, i : i + many], keys[k]
            for t in range(many):
                target[t] = signed_key(key_of(line[t], x.itemsize, kind, infinite, descending), keys.itemsize)
            target[many:] = target[0]
        return
    rows, entries = spare.reshape((lanes, x.shape[1])), x.reshape((x.shape[0], x.shape[1]))
    for t in range(lanes):
        row, target = entries[first + min(t, many - 1)], rows[t]
        for k in range(row.size):
            target[np.uint64(k)] = signed_key(
                key_of(row[np.uint64(k)], x.itemsize, kind, infinite, descending), keys.itemsize
            )
    transpose_rows(rows, keys)


@jitable
def lines_beside(x: Any, first: int, end: int, lanes: int) -> int:
    """How many lines from the first on are put in order side by side: they lie side by side, or are rows."""
    after = x.shape[2]
    return min(lanes, end - first) if after == 1 else min(min(lanes, end - first), after - first % after)


def argsort_beside(
    x: Any, y: Any, keys: Any, places: Any, counts: Any, kind: int, infinite: int, descending: int, begin: int, end: int
) -> None:
    first, size, after, lanes = begin, x.shape[1], x.shape[2], keys.shape[1]
    while first < end:
        many = lines_beside(x, first, end, lanes)
        put_beside(x, first, many, keys, places, kind, infinite, descending)
        for k in range(size):
            places[k] = k
        networks.sort_beside(keys, places, 1)
        if after == 1:
            rows, out = keys.reshape((lanes, size)), y.reshape((y.shape[0], size))
            transpose_lines(places, rows)
            for t in range(many):
                row, target = rows[t], out[first + t]
                for k in range(size):
                    target[np.uint64(k)] = row[np.uint64(k)]
        else:
            for k in range(size):
                for t in range(many):
                    y[first // after, k, first % after + t] = places[np.uint64(k), np.uint64(t)]
        first += many


def sort_beside(
    x: Any, y: Any, keys: Any, spare: Any, counts: Any, kind: int, infinite: int, descending: int, begin: int, end: int
) -> None:
    first, size, after, lanes = begin, x.shape[1], x.shape[2], keys.shape[1]
    while first < end:
        many = lines_beside(x, first, end, lanes)
        put_beside(x, first, many, keys, spare, kind, infinite, descending)
        networks.sort_beside(keys, spare, 0)
        if after == 1:
            rows, out = spare.reshape((lanes, size)), y.reshape((y.shape[0], size))
            transpose_lines(keys, rows)
            for t in range(many):
                row, target = rows[t], out[first + t]
                for k in range(size):
                    key = unsigned_key(row[np.uint64(k)], keys.itemsize)
                    target[np.uint64(k)] = entry_of(key, x.itemsize, kind, infinite, descending)
        else:
            for k in range(size):
                for t in range(many):
                    key = unsigned_key(keys[np.uint64(k), np.uint64(t)], keys.itemsize)
                    y[first // after, k, first % after + t] = entry_of(key, x.itemsize, kind, infinite, descending)
        if kind == FLOATING:
            for line in range(first, first + many):
                order_zeros(x, y, line // after, line % after)
        first += many


@jitable
def order_zeros(x: Any, y: Any, before: int, i: int) -> None:
    """Have the zeros of a line in order, which are alike to their keys, stand as they do in ``x``: some may be -0.0."""
    sign, zeros, place = np.int64(-1) << np.int64(8 * x.itemsize - 1), 0, 0
    for k in range(x.shape[1]):
        zeros += int(np.int64(x[before, k, i]) == sign)
    if zeros == 0:
        return
    while y[before, place, i] != 0:
        place += 1
    for k in range(x.shape[1]):
        if x[before, k, i] == 0 or np.int64(x[before, k, i]) == sign:
            y[before, place, i] = x[before, k, i]
            place += 1


def _compared(specs: Sequence[Spec]) -> float:
    """Ten nanoseconds an entry, as a scheduler guesses: more than moving it takes."""
    return 600.0 * specs[0].size


for _op in ("argsort", "sort"):
    state(_op, flops=_compared)

in_ways(
    "argsort",
    _way_of_places,
    {"alone": argsort_alone, "beside": argsort_beside},
    layout=_ordering(_room_for_places),
    local=_room_for_places,
    moved=(0,),
)
in_ways(
    "sort",
    _way_of_values,
    {"alone": sort_alone, "beside": sort_beside},
    layout=_ordering(_room_for_values),
    local=_room_for_values,
    moved=(0, 1),
)


# ── the first of each row ────────────────────────────────────────────────────────────────────────────────────────────


def _choosing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """Operands as rows. Each row is a unit of work."""
    (*before, size), wanted = inputs[0].concrete, attrs["k"]
    rows = math.prod(before)
    views = View.dense((rows, size)), View.dense((rows, wanted)), View.dense((rows, wanted))
    local = (View.dense(spec.concrete) for spec in _candidates(inputs, outputs, attrs))
    return Call((*views, *local), meaning_of(inputs[0].dtype), rows if wanted else 0)


def _candidates(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Keys, places, words and counts; twice as many as are asked for, so that they are seldom put in order."""
    room = min(max(2 * attrs["k"], CANDIDATES), inputs[0].concrete[-1])
    return [*(Spec(dtype, (2, room)) for dtype in ("uint64", "int64", "uint64")), Spec("int64", (BYTES, VALUES))]


@jitable
def keep_first(keys: Any, places: Any, words: Any, counts: Any, many: int, wanted: int, nbytes: int) -> None:
    """Of so many candidates put those that are wanted in front, in order."""
    order = words[order_keys(keys[0, :many], words, counts, nbytes)]
    for t in range(wanted):
        at = order[np.uint64(t)] & LOW
        keys[1, np.uint64(t)], places[1, np.uint64(t)] = keys[0, at], places[0, at]
    for t in range(wanted):
        keys[0, np.uint64(t)], places[0, np.uint64(t)] = keys[1, np.uint64(t)], places[1, np.uint64(t)]


@jitable
def some_before(row: Any, begin: int, end: int, last: Any, kind: int, infinite: int) -> bool:
    """Whether an entry comes before the key ``last``; of all of them, so that the loop is of vectors."""
    found = False
    for k in range(begin, end):
        found |= key_of(row[np.uint64(k)], row.itemsize, kind, infinite, 1) < last
    return found


@jitable
def put_among(keys: Any, places: Any, many: int, key: Any, place: int) -> None:
    """A key and its place behind those of so many, in order, that do not come after it."""
    at = many
    while at > 0 and keys[np.uint64(at - 1)] > key:
        keys[np.uint64(at)], places[np.uint64(at)] = keys[np.uint64(at - 1)], places[np.uint64(at - 1)]
        at -= 1
    keys[np.uint64(at)], places[np.uint64(at)] = key, place


@jitable
def find_few(row: Any, keys: Any, places: Any, wanted: int, kind: int, infinite: int) -> None:
    """The keys and places of the first entries, each put in its place as soon as it is found."""
    for k in range(wanted):
        put_among(keys, places, k, key_of(row[np.uint64(k)], row.itemsize, kind, infinite, 1), k)
    for begin in range(wanted, row.size, LOOKED_AT):
        end, last = min(begin + LOOKED_AT, row.size), keys[np.uint64(wanted - 1)]
        if some_before(row, begin, end, last, kind, infinite):
            for k in range(begin, end):
                key = key_of(row[np.uint64(k)], row.itemsize, kind, infinite, 1)
                if key < last:
                    put_among(keys, places, wanted - 1, key, k)
                    last = keys[np.uint64(wanted - 1)]


@jitable
def find_many(row: Any, keys: Any, places: Any, words: Any, counts: Any, wanted: int, kind: int, infinite: int) -> None:
    """The same by candidates, which are put in order whenever there is no room for more."""
    many = at = keys.shape[1]
    for k in range(many):
        keys[0, np.uint64(k)], places[0, np.uint64(k)] = key_of(row[np.uint64(k)], row.itemsize, kind, infinite, 1), k
    keep_first(keys, places, words, counts, many, wanted, row.itemsize)
    many = wanted
    while at < row.size:
        end, last = min(at + LOOKED_AT, row.size), keys[0, np.uint64(wanted - 1)]
        if not some_before(row, at, end, last, kind, infinite):
            at = end
            continue
        while at < end and many < keys.shape[1]:
            key = key_of(row[np.uint64(at)], row.itemsize, kind, infinite, 1)
            keys[0, np.uint64(many)], places[0, np.uint64(many)] = key, at
            many, at = many + int(key < last), at + 1
        if many == keys.shape[1]:
            keep_first(keys, places, words, counts, many, wanted, row.itemsize)
            many = wanted
    if many > wanted:
        keep_first(keys, places, words, counts, many, wanted, row.itemsize)


@kernel("top_k", layout=_choosing, local=_candidates, moved=(0, 1))
def top_k(
    x: Any, values: Any, indices: Any, keys: Any, places: Any, words: Any, counts: Any, kind: int, infinite: int,
    begin: int, end: int,
) -> None:  # fmt: skip
    wanted = indices.shape[1]
    for line in range(begin, end):
        row = x[line]
        if wanted <= SMALL:
            find_few(row, keys[0], places[0], wanted, kind, infinite)
        else:
            find_many(row, keys, places, words, counts, wanted, kind, infinite)
        for t in range(wanted):
            place = places[0, np.uint64(t)]
            values[line, t], indices[line, t] = row[np.uint64(place)], place


# ── on GPUs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@jitable
def comes_before(x: Any, place: int, y: Any, other: int, descending: int) -> bool:
    """Whether the entry x at a place is to stand before y at another: NaN behind all, equal ones as they stood."""
    before = x > y if descending != 0 else x < y
    after = y > x if descending != 0 else y < x
    numbers = int(x == x) - int(y == y)
    return before or numbers > 0 or (not after and numbers == 0 and place < other)


@jitable
def order_places(x: Any, places: Any, line: int, descending: int) -> None:
    """A block puts the places of a line in the order of its entries, by a bitonic network whose halves are mirrored, so
    that any number of entries is in order when it ends."""
    (o, i), size, me = divided(line, x.shape[2]), x.shape[1], cuda.threadIdx.x
    k = me
    while k < size:
        places[o, k, i] = k
        k += THREADS
    cuda.syncthreads()
    width = 2
    while width < 2 * size:
        apart = width >> 1
        while apart > 0:
            k = me
            while k < width * divided(size + width - 1, width)[0] >> 1:
                part, inside = divided(k, apart)
                low = 2 * apart * part + inside
                high = 2 * apart * (part + 1) - 1 - inside if 2 * apart == width else low + apart
                if high < size:
                    one, other = places[o, low, i], places[o, high, i]
                    if comes_before(x[o, other, i], other, x[o, one, i], one, descending):
                        places[o, low, i], places[o, high, i] = other, one
                k += THREADS
            cuda.syncthreads()
            apart >>= 1
        width <<= 1


def _places(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    return [Spec("int64", inputs[0].concrete)]


def _lines_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """All as (before, axis, after); a block for each line."""
    before, size, after = lines_of(inputs[0].concrete, attrs["axis"])
    view, blocks = View.dense((before, size, after)), before * after if size else 0
    return Call((view, view), (int(attrs["descending"]),), blocks=blocks)


def _lines_with_places(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    call = _lines_on_cuda(inputs, outputs, attrs)
    return replace(call, views=(*call.views, call.views[0]))


@kernel("argsort", "cuda", layout=_lines_on_cuda)
def argsort_on_cuda(x: Any, y: Any, descending: int) -> None:
    line = cuda.blockIdx.x
    while line < x.shape[0] * x.shape[2]:
        order_places(x, y, line, descending)
        line += cuda.gridDim.x


@kernel("sort", "cuda", layout=_lines_with_places, scratch=_places)
def sort_on_cuda(x: Any, y: Any, places: Any, descending: int) -> None:
    line = cuda.blockIdx.x
    while line < x.shape[0] * x.shape[2]:
        order_places(x, places, line, descending)
        o, i = divided(line, x.shape[2])
        k = cuda.threadIdx.x
        while k < x.shape[1]:
            y[o, k, i] = x[o, places[o, k, i], i]
            k += THREADS
        line += cuda.gridDim.x


def _rows_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """As columns of one entry; a block for each row."""
    (*before, size), wanted = inputs[0].concrete, attrs["k"]
    rows = math.prod(before)
    view, chosen = View.dense((rows, size, 1)), View.dense((rows, wanted))
    return Call((view, chosen, chosen, view), blocks=rows if wanted else 0)


@kernel("top_k", "cuda", layout=_rows_on_cuda, scratch=_places)
def top_k_on_cuda(x: Any, values: Any, indices: Any, places: Any) -> None:
    line = cuda.blockIdx.x
    while line < x.shape[0]:
        order_places(x, places, line, 1)
        k = cuda.threadIdx.x
        while k < indices.shape[1]:
            place = places[line, k, 0]
            values[line, k], indices[line, k] = x[line, place, 0], place
            k += THREADS
        line += cuda.gridDim.x
