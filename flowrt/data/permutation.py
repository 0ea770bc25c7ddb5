"""Shuffling without a table: where a keyed permutation of 0 … n - 1 sends any of these, computed for it alone.

A Feistel network over pairs (l, r), 0 ≤ l < a, 0 ≤ r < b, a b ≥ n, which adds to one half a keyed hash of the other, in
turn. What comes out beyond n goes through it again, until it is below ("cycle walking"): both from Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). All is arithmetic of integers modulo 2^64, so it is the
same on every platform and with every version of NumPy. It mixes; it keeps no secrets.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12  # with 10, of five rows some orders are visibly likelier than others
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def permuted(positions: Any, count: int, *key: int) -> NDArray[np.int64]:
    """Where the permutation of 0 … ``count`` - 1 that ``key`` names sends each of ``positions``."""
    found = np.array(positions, np.uint64).reshape(-1)
    beyond = np.arange(len(found))
    high = isqrt(count - 1) + 1 if count > 1 else 1
    sides, keys = (high, -(-count // high)), _round_keys(key)
    while len(beyond):
        found[beyond] = _network(found[beyond], sides, keys)
        beyond = beyond[found[beyond] >= count]
    return found.astype(np.int64)


def _network(numbers: NDArray[np.uint64], sides: tuple[int, int], keys: list[int]) -> NDArray[np.uint64]:
    left_size, right_size = np.uint64(sides[0]), np.uint64(sides[1])
    left, right = np.divmod(numbers, right_size)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _hashed(right, even) % left_size) % left_size
        right = (right + _hashed(left, odd) % right_size) % right_size
    return left * right_size + right


def _hashed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    mixed = numbers + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> list[int]:
    """A key for each round, made of all parts of ``key`` in order."""
    state = 0
    for part in key:
        state = _mix(state + part + _GOLDEN)
    return [_mix(state + (i + 1) * _GOLDEN) for i in range(ROUNDS)]


def _mix(number: int) -> int:
    """`_hashed` of one number."""
    number &= _MASK
    number = (number ^ (number >> 30)) * _FIRST & _MASK
    number = (number ^ (number >> 27)) * _SECOND & _MASK
    return number ^ (number >> 31)
