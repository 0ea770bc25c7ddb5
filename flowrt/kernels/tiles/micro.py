"""Register tiles: the innermost loop of every matrix product and convolution, in vectors as wide as the machine's.

Law: variants differ by register tile, vector width and dtype, never by a shape. A `Tile` names one: it is an
object of its own, which `flowrt.kernels.emit.tile` makes, and which kernels `call` by an address that their launch's
block holds. So what walks through matrices and images is compiled once for all dtypes, vectors and ops: it
knows sizes and addresses. All addresses are in bytes, all strides and table entries in elements. Nothing beyond
what is counted is read, except that vectors of a packed operand and of a result are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from flowrt.base.valueclass import valueclass
from flowrt.kernels.store.parts import RuntimeObject
from flowrt.kernels.store.sources import revision
from flowrt.kernels.store.surroundings import architecture, processor_features

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
class Tile:
    """A kind of code (see `Tiles`) for so many rows of so many vectors of ``width`` bytes, of one dtype."""

    kind: str
    rows: int
    vectors: int
    width: int
    dtype: str

    def address(self) -> int:
        """Where its code begins, made first if this machine has none."""
        return tile_part(self).address()


def tile_part(tile: Tile) -> RuntimeObject:
    """The object that holds a tile's code."""
    arguments = tile.kind, str(tile.rows), str(tile.vectors), str(tile.width), tile.dtype
    return RuntimeObject(
        "_".join(("tile", *arguments)), "flowrt.kernels.emit.tile", "emit_tile", arguments, TILE_MAKERS
    )


TILE_MAKERS = ("flowrt.kernels.tiles.micro", "flowrt.kernels.emit.rowcode", "flowrt.kernels.emit.vectors")


class Tiles(NamedTuple):
    """Sizes of one geometry's tiles for one dtype, and the addresses by which compiled code calls them.

    An entry has ``size`` bytes, a vector ``lanes`` entries, a tile ``wide`` columns and ``rows`` rows, or ``fewer``.

    ``large`` tiles, ``small`` ones of fewer rows, and such that are ``half`` as wide take
    ``(a, rows, b, taps, count, depth, a_step, b_step, c, places, start, bias, floor)``: for every row r and column j
    of the tile ``c[places[r] + j] = start + sum over taps t and p < depth of
    a[rows[r] + t.a + p * a_step] * b[t.b + p * b_step + j]``, where the table of ``count`` taps holds pairs (a, b).
    ``start`` says whether from zero, from what ``c`` holds, or from ``bias[j]``. Where ``floor`` is not 0 negative
    results become 0. Tiles of the kind "beside" have a left operand for each column: ``a[.. + j]`` for ``a[..]``.

    ``copy`` and, of a single vector, ``copy_vector`` take ``(source, step, target, target_step, count)`` and move
    ``count`` rows of vectors. ``spread`` takes ``(source, step, target, target_step, count, across, target_across,
    parts, vectors)`` and moves, of each of ``count`` rows, so many parts of some vectors, which are ``across`` apart.
    ``turn`` takes ``(source, step, target, target_step)`` and turns a square of a vector's lanes around. ``move`` takes
    ``(source, step, across, target, target_step, rows, columns)``, where ``across`` is the source's step between
    columns; ``move_listed`` takes ``(source, places, target, others, rows, columns)``, where two tables say where rows
    begin. ``clear`` takes ``(target, count)``. ``put`` takes ``(source, target, across, count, bias, floor)`` and puts
    neighbours ``across`` apart, with a bias unless that address is 0, and negative ones as 0 where ``floor`` is not.
    """

    size: int
    lanes: int
    wide: int
    rows: int
    fewer: int
    large: int
    small: int
    half: int
    copy: int
    copy_vector: int
    turn: int
    move: int
    move_listed: int
    spread: int
    clear: int
    put: int


def tiles_of(geometry: Geometry, dtype: Any, kind: str = "tile") -> tuple[int | Tile, ...]:
    """What `Tiles` is made of, as a `Call` has it, for tiles of one ``kind``."""
    width, name, size = geometry.width, str(np.dtype(dtype)), int(np.dtype(dtype).itemsize)
    sizes = size, width // size, geometry.columns(dtype), geometry.rows, geometry.fewer

    def made(kind: str, rows: int = 1, vectors: int = 1) -> Tile:
        return Tile(kind, rows, vectors, width, name)

    shapes = (
        (geometry.rows, geometry.vectors),
        (geometry.fewer, geometry.vectors),
        (geometry.fewer, geometry.vectors // 2),
    )
    products = (made(kind, rows, vectors) for rows, vectors in shapes)
    moves = map(made, ("copy", "transpose", "move", "move_listed", "spread", "clear", "put"))
    return (*sizes, *products, made("copy", 1, geometry.vectors), *moves)


@valueclass
class Stub:
    """What is to be put in the place of a function: a kind of code and its numbers."""

    kind: str
    rows: int
    vectors: int
    width: int


STUBS: dict[Callable[..., None], Stub] = {}
_REVISION = revision("flowrt.kernels.emit.tile") + revision("flowrt.kernels.emit.vectors")


def stub(kind: str, rows: int, vectors: int, width: int, edition: str) -> Callable[..., Any]:
    """A function to be replaced by code of a ``kind``; a kernel's fingerprint tells one ``edition`` from another."""
    made = Stub(kind, rows, vectors, width)

    def stand_in(*args: Any) -> Any:
        raise RuntimeError(f"{made} of {edition} runs only inside a compiled kernel")

    STUBS[stand_in] = made
    return stand_in


def _stub(kind: str, rows: int, vectors: int, width: int) -> Callable[..., Any]:
    return stub(kind, rows, vectors, width, _REVISION)


call = _stub("call", 1, 1, 0)
"""``call(address, words)`` calls code at an address, as that of a tile, with a tuple of integers."""


@cache
def transpose(width: int) -> Callable[..., None]:
    """`Tiles.turn` inside a kernel of one dtype, that of the array ``like``: ``transpose(like, words)``."""
    return _stub("transpose", 1, 1, width)


@cache
def move() -> Callable[..., None]:
    """`Tiles.move` likewise."""
    return _stub("move", 1, 1, 0)
