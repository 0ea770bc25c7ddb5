"""Where rows are too short for a loop over them, so that a program is better computed in several launches.

Law: pure; by sizes and ops. A loop over few entries takes most of its time to begin and to end, the more so where its
ops are costly, which fill the processor only where several vectors go side by side. So what repeats along short rows is
copied to lie as everything else does, and reductions that would cut rows short are launches of their own.

The numbers are from an AMD Zen 3 core, 131,072 float32 entries in rows of 4 to 100.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowrt.base.traits import held_dtype
from flowrt.kernels.fusion.program import CACHED
from flowrt.kernels.language.table import View, is_costly
from flowrt.kernels.tiles.copies import merged

CHEAP_ROW, COSTLY_ROW = 16, 64  # entries from which a loop over rows is as good as a copy and one loop over everything


def are_costly(ops: Iterable[str]) -> bool:
    """Whether some of these ops take many instructions."""
    return any(map(is_costly, ops))


def needs_copy(view: View, itemsize: int, costly: bool) -> bool:
    """Whether a loop over the view, beside one that lies in order, would be over too short rows.

    A copy that no cache holds takes memory and its time, which only the shortest rows of costly ops are worth: 13 MB
    or more in rows of 8 and 12 beside a multiplication and an addition took 1.2 to 2.9 times as long with it.
    """
    dims = merged([view, View.dense(view.shape)])
    enough = COSTLY_ROW if costly else CHEAP_ROW
    if view.size * itemsize > CACHED:
        enough = CHEAP_ROW if costly else 0
    return bool(dims) and dims[0][0] < min(enough, view.size)


def needs_launch(kept: View, op: str, dtype: str, costly: bool) -> bool:
    """Whether a reduction by ``op`` of values of ``dtype``, whose results ``kept`` shows, is better a launch of its
    own.

    One number for each row costs a loop little, unless its values are costly: those are written down before wider
    totals are made of them, but other reductions wait in the midst of them.
    """
    dims = merged([kept, View.dense(kept.shape)])
    if not dims:
        return False
    length, (step, _) = dims[0]
    if len(dims) > 2 or step:
        return length < (COSTLY_ROW if costly else CHEAP_ROW)
    itemsize = np.dtype(dtype).itemsize
    waits = costly and held_dtype(op, dtype).itemsize <= itemsize
    return waits and (length < COSTLY_ROW or kept.size * itemsize <= CACHED)


def are_too_short(length: int, ops: Iterable[str]) -> bool:
    """Whether rows of which such ops are made are better computed in launches between their reductions."""
    return length < COSTLY_ROW and are_costly(ops)
