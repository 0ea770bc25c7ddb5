"""Register tiles: the innermost loop of every matrix product and convolution, in vectors as wide as the machine's.

Law: variants differ by register tile, vector width and dtype, never by a shape. Here are the names that kernels call
and the sizes that they plan by; `flowrt.kernels.tile` makes the machine code when a kernel that calls one is compiled.
All addresses are in bytes, all strides and table entries in elements. Nothing beyond what is counted is read, except
that vectors of a packed operand and of a result are whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flowrt.kernels.surroundings import architecture, processor_features
from flowrt.valueclass import valueclass

START_ZERO, START_STORED, START_BIAS = 0, 1, 2  # what a tile adds to


@valueclass
class Geometry:
    """A register tile: ``rows`` by ``vectors`` of ``width`` bytes; ``fewer`` rows are for what is left of them."""

    width: int
    rows: int
    fewer: int
    vectors: int = 2

    def columns(self, dtype: Any) -> int:
        """How many columns a tile of this dtype has."""
        return self.vectors * self.width // int(np.dtype(dtype).itemsize)


# Accumulators fill the registers, less those for a row of vectors and one broadcast: 16 registers with AVX2 and SSE, 32
# with AVX-512 and NEON. Two ports with a latency of four cycles need eight accumulators at least.
AVX512 = Geometry(64, 8, 4)
AVX2 = Geometry(32, 6, 4)
NEON = Geometry(16, 8, 4)
SSE = Geometry(16, 4, 2)


@cache
def native() -> Geometry:
    """The tile for the machine this runs on."""
    features = processor_features()
    if "avx512f" in features:
        return AVX512
    if "avx" in features:
        return AVX2
    return NEON if architecture() == "aarch64" else SSE


@valueclass
class Stub:
    """What is to be put in the place of a function: a kind of code and its numbers."""

    kind: str
    rows: int
    vectors: int
    width: int


STUBS: dict[Callable[..., None], Stub] = {}
_REVISION = hashlib.blake2b(Path(__file__).with_name("tile.py").read_bytes(), digest_size=8).hexdigest()


def stub(kind: str, rows: int, vectors: int, width: int, revision: str) -> Callable[..., Any]:
    """A function to be replaced by code of a ``kind``; a kernel's fingerprint tells one ``revision`` from another."""
    made = Stub(kind, rows, vectors, width)

    def stand_in(*args: Any) -> Any:
        raise RuntimeError(f"{made} of {revision} runs only inside a compiled kernel")

    STUBS[stand_in] = made
    return stand_in


def _stub(kind: str, rows: int, vectors: int, width: int) -> Callable[..., Any]:
    return stub(kind, rows, vectors, width, _REVISION)


@cache
def tile(rows: int, vectors: int, width: int) -> Callable[..., None]:
    """``tile(like, (a, rows, b, taps, count, depth, a_step, b_step, c, places, start, bias, floor))``.

    For every row r and column j of the tile: ``c[places[r] + j] = start + sum over taps t and p < depth of
    a[rows[r] + t.a + p * a_step] * b[t.b + p * b_step + j]``, where the table of ``count`` taps holds pairs (a, b).
    ``start`` says whether from zero, from what ``c`` holds, or from ``bias[j]``. Where ``floor`` is not 0 negative
    results become 0. ``like`` is any array of the dtype.
    """
    return _stub("tile", rows, vectors, width)


@cache
def beside(rows: int, vectors: int, width: int) -> Callable[..., None]:
    """`tile` where every column has a left operand of its own: ``a[.. + j]`` stands for ``a[..]``."""
    return _stub("beside", rows, vectors, width)


@cache
def dots(rows: int, vectors: int, width: int) -> Callable[..., None]:
    """``dots(like, (a, b, step, c, across, start, depth))``: a vector times ``rows`` others.

    Those are ``step`` apart: ``c[r * across] = sum over p < depth of a[p] * b[r * step + p]``, plus what is there if
    ``start`` says so.
    """
    return _stub("dots", rows, vectors, width)


@cache
def copy(vectors: int, width: int) -> Callable[..., None]:
    """``copy(like, (source, step, target, target_step, count))`` moves ``count`` rows of ``vectors`` vectors."""
    return _stub("copy", 1, vectors, width)


@cache
def transpose(width: int) -> Callable[..., None]:
    """``transpose(like, (source, step, target, target_step))`` turns a square of one vector's lanes around."""
    return _stub("transpose", 1, 1, width)


@cache
def clear(width: int) -> Callable[..., None]:
    """``clear(like, (target, count))`` fills ``count`` vectors with zeros."""
    return _stub("clear", 1, 1, width)


@cache
def move() -> Callable[..., None]:
    """``move(like, (source, step, across, target, target_step, rows, columns))``, entry by entry.

    ``across`` is the source's step between columns; the target's columns lie side by side.
    """
    return _stub("move", 1, 1, 0)
