"""Which rows make which batch: decided by the batch's identity, its place in the order of all, and nothing else.

Law: no state. Any batch may be asked for, anywhere, any number of times, and is the same. Epochs follow one another;
each is shuffled anew, by (seed, epoch). Where rows lie in blocks that are read whole, an epoch takes the blocks in an
order of its own, some at a time, and shuffles the rows of these: who reads on needs few blocks at once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flowrt.base.errors import GraphError, user_site
from flowrt.base.plain import is_whole
from flowrt.base.valueclass import valueclass
from flowrt.data.permutation import permuted

Rows: TypeAlias = "NDArray[np.int64]"
SMALL = 1 << 16  # rows whose order is kept, which takes half a MiB: batches of them cost a look-up
KEPT = 8  # such orders
REMAINDERS = ("drop", "short")


@valueclass
class BatchOrder:
    """Batches of ``batch`` of ``rows``, for so many ``epochs``, None for endless ones.

    Where ``rows`` is None there is one epoch without an end, in which no row comes twice. What is left of an epoch for
    its last batch is one that is ``short``, or dropped. ``blocks`` are the numbers of rows in blocks, if they lie in
    such, of which ``mix`` at a time are shuffled.
    """

    rows: int | None
    batch: int
    shuffle: bool
    seed: int
    epochs: int | None
    short: bool
    blocks: tuple[int, ...] = ()
    mix: int = 1

    @property
    def per_epoch(self) -> int | None:
        """Batches of an epoch; None where that has no end."""
        if self.rows is None:
            return None
        return -(-self.rows // self.batch) if self.short else self.rows // self.batch

    @property
    def total(self) -> int | None:
        """Batches of all epochs; None where they have no end."""
        per_epoch = self.per_epoch
        return None if per_epoch is None or self.epochs is None else per_epoch * self.epochs

    def rows_of(self, identity: int) -> Rows:
        """The rows of a batch, in order. Raises `IndexError` beyond the last one."""
        if not isinstance(identity, Integral):
            raise GraphError(f"{user_site()}: a batch is told by its number, from 0 on, not {identity!r}")
        if identity < 0 or (self.total is not None and identity >= self.total):
            raise IndexError(f"batches are 0 to {self.total - 1 if self.total else '…'}, not {identity}")
        if self.rows is None or self.per_epoch is None:
            return np.arange(identity * self.batch, (identity + 1) * self.batch)
        epoch, place = divmod(int(identity), self.per_epoch)
        places = np.arange(place * self.batch, min((place + 1) * self.batch, self.rows))
        if not self.shuffle:
            return places
        if not self.blocks:
            return _shuffled(places, self.rows, self.seed, epoch)
        return _windows(self.blocks, self.mix, self.seed, epoch).shuffled(places)


def _shuffled(places: Rows, rows: int, *key: int) -> Rows:
    return permuted(places, rows, *key) if rows > SMALL else _whole(rows, *key)[places]


@lru_cache(maxsize=KEPT)
def _whole(rows: int, *key: int) -> Rows:
    """Where all rows go: as `permuted` says of each."""
    found = permuted(np.arange(rows), rows, *key)
    found.setflags(write=False)
    return found


class Windows:
    """An epoch over blocks: they come in an order of their own, and the rows of ``mix`` in a row are shuffled."""

    def __init__(self, blocks: tuple[int, ...], mix: int, seed: int, epoch: int) -> None:
        self._key = seed, epoch
        starts = np.array([0, *accumulate(blocks)])
        order = permuted(np.arange(len(blocks)), len(blocks), *self._key)
        self._first = starts[order]  # the row that each of the blocks begins with, as they come
        self._ends = np.cumsum(np.array(blocks)[order])  # where each ends among the places
        self._mix = mix
        self._bounds = np.array([0, *self._ends[mix - 1 : -1 : mix], self._ends[-1]])  # of windows

    def shuffled(self, places: Rows) -> Rows:
        """The rows that come at these places of the epoch."""
        windows = np.searchsorted(self._bounds, places, "right") - 1
        moved = np.empty_like(places)
        for window in np.unique(windows):
            begin, end = self._bounds[window : window + 2]
            here = windows == window
            moved[here] = begin + _shuffled(places[here] - begin, int(end - begin), *self._key, int(window) + 1)
        block = np.searchsorted(self._ends, moved, "right")
        return self._first[block] + moved - np.where(block > 0, self._ends[block - 1], 0)


_windows = lru_cache(maxsize=KEPT)(Windows)


def checked_order(
    what: str,
    rows: int | None,
    batch: Any,
    shuffle: Any,
    seed: Any,
    epochs: Any,
    remainder: Any,
    blocks: tuple[int, ...] = (),
    mix: Any = 1,
) -> BatchOrder:
    """The order of ``what`` that a program asks for; raises `GraphError` at its line for what makes no sense."""
    _check(is_whole(batch, 1), f"batch is a number of rows, 1 or more, not {batch!r}")
    _check(isinstance(shuffle, (bool, np.bool_)), f"shuffle is True or False, not {shuffle!r}")
    _check(is_whole(seed, 0) and seed < 1 << 63, f"seed is an integer from 0 to 2**63 - 1, not {seed!r}")
    _check(
        epochs is None or is_whole(epochs, 1),
        f"epochs is a number of them, 1 or more, or None for no end, not {epochs!r}",
    )
    _check(remainder in REMAINDERS, f"remainder is 'drop' or 'short', not {remainder!r}")
    _check(is_whole(mix, 1), f"mix is a number of row groups, 1 or more, not {mix!r}")
    _check(rows is None or is_whole(rows, 1), f"{what} is empty: it has {rows!r} rows")
    endless, short = epochs is None, remainder == "short"
    order = BatchOrder(
        None if rows is None else int(rows),
        int(batch),
        bool(shuffle),
        int(seed),
        None if endless else int(epochs),
        short,
        blocks,
        int(mix),
    )
    _check(
        order.per_epoch != 0,
        f"{what} has {rows} rows, which make no batch of {batch}; remainder='short' makes a short one of them",
    )
    return order


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise GraphError(f"{user_site()}: {text}")
