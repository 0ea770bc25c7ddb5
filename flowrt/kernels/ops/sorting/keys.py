"""Keys of entries, and words in order.

A processor sees entries as integers of their size, whatever they mean (`moved`), and compares keys: unsigned numbers in
the order that is asked for, NaN behind all others, -0.0 as 0.0. A word holds half a key above the entry's place, so
that words in order are places in order; those of keys of 64 bits whose upper halves tie take another round by the lower
ones. Few words are put in order one by one, more by merging runs, many by dealing them out by one byte after another:
all of it stable.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.base.spec import NAMES, kind_of
from flowrt.kernels.language.table import jitable

RUN, MERGED = 16, 64  # words that are put in order one by one, and as many as are merged of such
BYTES, VALUES = 8, 256  # of a word, and of a byte
UNSIGNED, SIGNED, FLOATING = 0, 1, 2
ONE, HALF, LOW, TOP = np.uint64(1), np.uint64(32), np.uint64(2**32 - 1), np.uint64(2**63)
INFINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF0000000000000}


def meaning_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    """What entries are, and the bits of an infinite one."""
    kind = {"f": FLOATING, "i": SIGNED}.get(kind_of(dtype), UNSIGNED)
    return kind, INFINITE[NAMES[dtype]] if kind == FLOATING else 0


@jitable
def key_of(entry: Any, nbytes: int, kind: int, infinite: int, descending: int) -> Any:
    """An unsigned number for an entry of so many bytes, in the order asked for."""
    top = ONE << np.uint64(8 * nbytes - 1)
    most = (top - ONE) | top
    bits = np.uint64(entry) & most
    if kind == FLOATING:
        size = bits & (top - ONE)
        if size > np.uint64(infinite):
            return most
        bits = np.uint64(0) if size == np.uint64(0) else bits
        bits ^= most if bits >= top else top
    elif kind == SIGNED:
        bits ^= top
    return bits ^ most if descending != 0 else bits


@jitable
def entry_of(key: Any, nbytes: int, kind: int, infinite: int, descending: int) -> Any:
    """The entry whose key it is."""
    top = ONE << np.uint64(8 * nbytes - 1)
    most = (top - ONE) | top
    if kind == FLOATING and key == most:
        return np.int64(np.uint64(infinite) | (np.uint64(infinite) >> ONE))  # NaN
    bits = np.uint64(key) ^ most if descending != 0 else np.uint64(key)
    if kind == FLOATING:
        bits ^= top if bits >= top else most
    elif kind == SIGNED:
        bits ^= top
    return np.int64(bits)


# ── words in order ───────────────────────────────────────────────────────────────────────────────────────────────────


@jitable
def insert_each(words: Any, shift: Any) -> None:
    """Put a few ``words`` in order, one by one, by what they are without their last ``shift`` bits."""
    for i in range(1, words.size):
        word, at = words[np.uint64(i)], i
        while at > 0 and words[np.uint64(at - 1)] >> shift > word >> shift:
            words[np.uint64(at)] = words[np.uint64(at - 1)]
            at -= 1
        words[np.uint64(at)] = word


@jitable
def merge_two(source: Any, target: Any, begin: int, middle: int, end: int, shift: Any) -> None:
    """Two runs in order that lie side by side, into one."""
    i, j, at = begin, middle, begin
    while i < middle and j < end:
        one, other = source[np.uint64(i)], source[np.uint64(j)]
        later = int(one >> shift > other >> shift)
        target[np.uint64(at)] = other if later != 0 else one
        i, j, at = i + 1 - later, j + later, at + 1
    for k in range(i, middle):
        target[np.uint64(at + k - i)] = source[np.uint64(k)]
    at += middle - i
    for k in range(j, end):
        target[np.uint64(at + k - j)] = source[np.uint64(k)]


@jitable
def deal_out(source: Any, target: Any, ends: Any, shift: Any) -> None:
    """Every word to where those of its byte begin, in their order."""
    for i in range(source.size):
        word = source[np.uint64(i)]
        byte = np.uint64(word >> shift) & np.uint64(VALUES - 1)
        target[np.uint64(ends[byte])] = word
        ends[byte] += 1


@jitable
def sort_words(words: Any, spare: Any, counts: Any, first: int, last: int) -> bool:
    """Put ``words`` in order by their bytes from ``first`` up to ``last``, of which those above are none; whether they
    came to lie in ``spare``."""
    size, lowest = words.size, words.dtype.type(8 * first)
    if size <= MERGED:
        for begin in range(0, size, RUN):
            insert_each(words[begin : min(begin + RUN, size)], lowest)
        moved, width = False, RUN
        while width < size:
            for begin in range(0, size, 2 * width):
                middle, end = min(begin + width, size), min(begin + 2 * width, size)
                if moved:
                    merge_two(spare, words, begin, middle, end, lowest)
                else:
                    merge_two(words, spare, begin, middle, end, lowest)
            moved, width = not moved, 2 * width
        return moved
    for byte in range(first, last):
        counts[byte] = 0
    for i in range(size):
        word = np.uint64(words[np.uint64(i)])
        for byte in range(first, last):
            counts[np.uint64(byte), (word >> np.uint64(8 * byte)) & np.uint64(VALUES - 1)] += 1
    moved = False
    for byte in range(first, last):
        shift, found = words.dtype.type(8 * byte), counts[byte]
        if found[np.uint64(words[0] >> shift) & np.uint64(VALUES - 1)] == size:
            continue
        total = 0
        for value in range(VALUES):
            found[value], total = total, total + found[value]
        if moved:
            deal_out(spare, words, found, shift)
        else:
            deal_out(words, spare, found, shift)
        moved = not moved
    return moved


@jitable
def order_lower_halves(keys: Any, words: Any, spare: Any, counts: Any) -> None:
    """Put words that are in order by the upper halves of ``keys`` in order by the lower ones, too, where those tie."""
    begin = 0
    while begin < words.size:
        end = begin + 1
        while end < words.size and words[np.uint64(end)] >> HALF == words[np.uint64(begin)] >> HALF:
            end += 1
        if end > begin + 1:
            for i in range(begin, end):
                place = words[np.uint64(i)] & LOW
                words[np.uint64(i)] = (keys[place] << HALF) | place
            if sort_words(words[begin:end], spare[begin:end], counts, BYTES // 2, BYTES):
                for i in range(begin, end):
                    words[np.uint64(i)] = spare[np.uint64(i)]
        begin = end


@jitable
def order_keys(keys: Any, words: Any, counts: Any, nbytes: int) -> Any:
    """Which of two lines of ``words`` holds, in its low halves, the places of ``keys`` in their order."""
    size, upper = keys.size, np.uint64(32 if nbytes > BYTES // 2 else 0)
    for i in range(size):
        words[0, np.uint64(i)] = ((keys[np.uint64(i)] >> upper) << HALF) | np.uint64(i)
    which = int(sort_words(words[0, :size], words[1, :size], counts, BYTES // 2, BYTES // 2 + min(nbytes, 4)))
    if nbytes > BYTES // 2:
        order_lower_halves(keys, words[which, :size], words[1 - which, :size], counts)
    return which
