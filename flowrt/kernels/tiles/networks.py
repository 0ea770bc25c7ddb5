"""Lines put in order side by side, by a network of comparisons whose order no entry has a part in.

Law: as in `micro`, names and what is made of them; `flowrt.kernels.emit.sortcode` makes the machine code. Entry k of
every line is in row k, as wide as `WIDTH`: a comparison of two rows is one of vectors. The network is Batcher's (Knuth,
"The Art of Computer Programming", volume 3, 5.2.2, algorithm M), for any number of rows.
"""

from __future__ import annotations

from typing import Any

from flowrt.kernels.language.table import jitable
from flowrt.kernels.store.sources import revision
from flowrt.kernels.tiles.micro import stub

WIDTH = 64
"""Bytes of a row; LLVM splits vectors that are too wide."""

_REVISION = revision("flowrt.kernels.emit.sortcode") + revision("flowrt.kernels.emit.vectors")

exchange = stub("exchange", 1, 1, WIDTH, _REVISION)
"""``exchange(like, (one, other, count, 0))`` compares ``count`` rows from one address on with as many from another.

The lesser of two entries comes to lie in the first row. Entries are signed integers, as those of ``like``.
"""

exchange_both = stub("exchange", 2, 1, WIDTH, _REVISION)
"""Likewise ``exchange_both(like, (one, other, count, beside))`` with rows of companions, so many bytes behind.

Of equal entries that is the lesser whose companion is.
"""


@jitable
def sort_beside(rows: Any, companions: Any, both: int) -> None:
    """Put every column of ``rows`` in order and, where there are ``both``, have companions change places with them."""
    first, beside, count = rows.ctypes.data, companions.ctypes.data - rows.ctypes.data, rows.shape[0]
    top = 1
    while 2 * top < count:
        top *= 2
    half = top if count > 1 else 0
    while half > 0:
        reach, begin, apart = top, 0, half
        while apart > 0:
            for row in range(begin, count - apart, 2 * half):
                one, many = first + row * WIDTH, min(half, count - apart - row)
                if both != 0:
                    exchange_both(rows, (one, one + apart * WIDTH, many, beside))
                else:
                    exchange(rows, (one, one + apart * WIDTH, many, 0))
            apart, reach, begin = reach - half, reach // 2, half
        half //= 2
