"""What a variable holds at one moment, for who reads it later, piece after piece, while others write some of its rows.

Law: who is about to write rows has them kept first, unless they were, or are read already. Who reads a piece copies it
from where the variable lies, torn as it may be, and only then looks what was kept of it and puts that over it: whoever
wrote there meanwhile had that kept before. So nobody waits for anybody. What is kept at once is a row, or some narrow
ones; it comes to no more than the variable. Who writes all of a variable writes elsewhere: see `Variables.part`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import ResourceError

if TYPE_CHECKING:
    from flowrt.sched.host.memory import Memory

Array: TypeAlias = "np.ndarray[Any, Any]"
LEAST = 256  # bytes that are kept at once: for each a byte says whether they are, and four or eight say which
BLOCK = 256 << 10  # bytes that are taken at once for what is kept: new memory costs more than what is written there


class Snapshot:
    """What ``source`` holds now. One thread at a time has rows kept that it then writes, and one reads."""

    def __init__(self, source: Array, memory: Memory) -> None:
        self.source = source
        self._memory = memory
        self._bytes = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        row = max(1, self.nbytes // max(1, len(source) if source.ndim else 1))
        self._rows = max(1, LEAST // row)  # that are kept together
        self._unit = self._rows * row
        self._whole = self.nbytes // self._unit
        self._last = self._bytes[self._whole * self._unit :].copy()  # what does not make a unit
        self._units = self._bytes[: self._whole * self._unit].reshape(self._whole, self._unit)
        self._per_block = max(1, BLOCK // self._unit)
        self._kept = 0
        self._numbers: list[Array] = []  # of units that are kept
        self._blocks: list[Array] = []  # what they hold, in this order
        self._is_kept: Array | None = None  # of each unit, once some are
        self._begin = 0  # what lies before is not read any more
        self._error: Exception | None = None  # that kept something from being kept

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return self.source.nbytes

    def keep(self, rows: Array) -> None:
        """Keep what these rows hold: no row twice among them. Where there is no memory for that, reading fails."""
        try:
            self._keep(rows if self._rows == 1 else np.unique(rows // self._rows))
        except (ResourceError, MemoryError) as error:
            self._error = self._error or error

    def _keep(self, units: Array) -> None:
        if self._is_kept is None:
            self._is_kept = self._memory.zeros((self._whole,), np.dtype(bool))
        units = units[(units >= self._begin // self._unit) & (units < self._whole)]
        units = units[~self._is_kept[units]]
        while len(units):
            block, at = divmod(self._kept, self._per_block)
            if block == len(self._blocks):
                self._blocks.append(self._memory.empty((self._per_block, self._unit), np.dtype(np.uint8)))
            some, units = np.split(units, [self._per_block - at])
            np.take(self._units, some, axis=0, out=self._blocks[block][at : at + len(some)], mode="clip")
            self._is_kept[some] = True
            self._kept += len(some)
            self._numbers.append(some)

    def read(self, first: int, nbytes: int) -> Array:
        """A copy of so many bytes from ``first`` on, as far as there are. What lies before may not be read any more.

        Raises `ResourceError` where something was written that could not be kept.
        """
        self._begin = first
        piece = self._bytes[first : first + nbytes].copy()
        if self._error is not None:
            raise ResourceError(f"rows that steps were about to write could not be kept: {self._error}")
        if self._numbers:
            self._restore(piece, first)
        rest = self._units.size
        if (end := first + len(piece)) > rest:
            begin = max(first, rest)
            piece[begin - first :] = self._last[begin - rest : end - rest]
        return piece

    def _restore(self, piece: Array, first: int) -> None:
        """Put what is kept over a piece that begins at byte ``first``."""
        unit, end, numbers = self._unit, first + len(piece), np.concatenate(self._numbers)
        begin, stop = -(-first // unit), max(-(-first // unit), end // unit)  # the units that lie in it whole
        whole = piece[begin * unit - first : stop * unit - first].reshape(-1, unit)
        here = np.flatnonzero((numbers >= begin) & (numbers < stop))
        blocks, starts = np.unique(here // self._per_block, return_index=True)
        for block, some in zip(blocks, np.split(here, starts)[1:], strict=True):
            whole[numbers[some] - begin] = self._blocks[block][some - block * self._per_block]
        for number in {begin - 1, stop}:  # of which a part may lie in it
            for at in np.flatnonzero(numbers == number):
                block, place = divmod(int(at), self._per_block)
                low, high = max(first, number * unit), min(end, (number + 1) * unit)
                if low < high:
                    kept = self._blocks[block][place]
                    piece[low - first : high - first] = kept[low - number * unit : high - number * unit]
