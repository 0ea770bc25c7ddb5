"""What kernels do with rows of int8: multiply some with others, in registers.

Law: names alone, as in `micro`; `flowrt.kernels.emit.bytecode` makes the machine code. Addresses are in bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.kernels.store.sources import revision
from flowrt.kernels.tiles.micro import stub

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 2, 4  # of a tile: with a pair of either in registers its sums fill the others
_REVISION = revision("flowrt.kernels.emit.bytecode") + revision("flowrt.kernels.emit.vectors")


def _dots(rows: int, columns: int) -> Callable[..., Any]:
    return stub("byte_dots", rows, columns, 32, _REVISION)


dots_of_tile, dots_of_row, dot = _dots(ROWS, COLUMNS), _dots(1, COLUMNS), _dots(1, 1)
"""``dots_of_tile(like, (a, b, depth, c, across))``: the products of `ROWS` rows with `COLUMNS` rows, as int32.

Rows of ``depth`` bytes follow one another from ``a``, and from ``b``; a row of results begins ``across`` bytes behind
the one before it, from ``c``. ``like`` is any array. `dots_of_row` takes one row of ``a``, and `dot` one of ``b``, too.
"""
