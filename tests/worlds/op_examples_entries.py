"""The examples of the family entries; see `op_examples`."""

from __future__ import annotations

import numpy as np
from example import Example, bools, integers, normal

import flowrt.ops as fr
from flowrt.ops import entries

CUBE = normal(3, 4, 5)


def _added_along(updates: np.ndarray, indices: np.ndarray, size: tuple[int, ...], axis: int) -> np.ndarray:
    out = np.zeros(size, updates.dtype)
    places = list(np.ogrid[tuple(slice(n) for n in updates.shape)])
    places[axis] = indices
    np.add.at(out, tuple(places), updates)
    return out


ENTRIES = [
    *[
        Example(
            "take_along_axis",
            lambda x, i, a=a: fr.take_along_axis(x, i, a),
            (CUBE, i),
            lambda x, i, a=a: np.take_along_axis(x, i, a),
            note=str(a),
        )
        for a, i in [
            (0, integers(7, 4, 5, low=-3, high=3)),
            (1, np.argsort(CUBE, 1)),
            (-1, integers(3, 4, 90, low=0, high=5, dtype="uint8")),
            (1, integers(1, 9, 5, low=-4, high=4)),
            (2, integers(3, 1, 2, low=-5, high=5, dtype="int64")),
        ]
    ],
    Example(
        "take_along_axis",
        lambda x, i: fr.take_along_axis(x, i, 1),
        (bools(1, 4, 2), integers(3, 2, 1, low=-4, high=4)),
        lambda x, i: np.take_along_axis(x, i, 1),
        note="both-broadcast",
    ),
    Example(
        "take_along_axis",
        lambda x, i: fr.take_along_axis(x, i, 1),
        (normal(1, 4, 2), integers(3, 2, 1, low=-4, high=4)),
        lambda x, i: np.take_along_axis(x, i, 1),
        note="slopes-summed",
    ),
    Example("take_along_axis", fr.take_along_axis, (bools(3, 0), integers(3, 0)), lambda x, i: x, note="none"),
    Example("take_along_axis", fr.take_along_axis, (bools(0, 3), integers(0, 2)), lambda x, i: x[:, :2], note="empty"),
    *[
        Example(
            "add_along_axis",
            lambda u, i, a=a: entries.add_along_axis(u, i, (3, 4, 5), a),
            (u, i),
            lambda u, i, a=a: _added_along(u, i, (3, 4, 5), a),
            note=str(a),
        )
        for a, u, i in [
            (0, normal(7, 4, 5), integers(7, 4, 5, low=-3, high=3)),
            (-1, normal(3, 4, 9), integers(1, 4, 9, low=-5, high=5)),
            (1, integers(3, 300, 5), integers(3, 300, 1, low=-4, high=4, dtype="int64")),
            (2, bools(3, 4, 0), integers(3, 4, 0)),
        ]
    ],
]
