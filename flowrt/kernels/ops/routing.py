"""Where rows go that are sent to their parts: counted, then dealt out in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.language.table import Call, View, host_only, jitable, kernel
from flowrt.kernels.ops.slices import ABSENT, OUT_OF_RANGE, row_number

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def _routing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call(tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs)), (int(attrs["wraps"]),))


@jitable
def owner(bounds: Any, at: int) -> int:
    """The part that has a row: the last whose bound is not above it."""
    low, high = 0, bounds.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if bounds[middle] <= at:
            low = middle
        else:
            high = middle
    return low


@kernel("route_rows", layout=_routing)
def route_rows(indices: Any, bounds: Any, starts: Any, found: Any, order: Any, back: Any, wraps: int, run: Any) -> None:
    """While parts are counted, ``back`` holds each index's part; while they are dealt out, ``starts`` is one ahead."""
    parts, size = bounds.size - 1, bounds[bounds.size - 1]
    for p in range(parts + 1):
        starts[p] = 0
    for j in range(indices.size):
        at = row_number(indices[j])
        if at < 0 and at != ABSENT and wraps != 0:
            at += size
        if (at < 0 or at >= size) and (at != ABSENT or wraps == 0):
            run[0] = OUT_OF_RANGE
            return
        part = 0 if at == ABSENT else owner(bounds, at)
        back[j] = part
        starts[part + 1] += 1
    for p in range(parts):
        starts[p + 1] += starts[p]
    for j in range(indices.size):
        part, at = back[j], row_number(indices[j])
        place = starts[part]
        starts[part] = place + 1
        order[place], back[j] = j, place
        found[place] = at if at == ABSENT else (at + size if at < 0 else at) - bounds[part]
    for p in range(parts, 0, -1):
        starts[p] = starts[p - 1]
    starts[0] = 0


def _placing(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    return Call((View.dense(inputs[0].concrete), View.dense((1,)), View.dense(outputs[0].concrete)))


@kernel("last_places", layout=_placing)
def last_places(indices: Any, size: Any, places: Any, run: Any) -> None:
    for n in range(places.size):
        places[n] = np.int64(ABSENT)
    for j in range(indices.size):
        at = row_number(indices[j])
        if at < 0 or at >= places.size:
            run[0] = OUT_OF_RANGE
            return
        places[at] = j


host_only("route_rows", "last_places")
