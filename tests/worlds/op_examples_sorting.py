"""The examples of the family sorting; see `op_examples`."""

from __future__ import annotations

import numpy as np
from example import Example, bools, integers, normal

import flowrt.ops as fr
from flowrt.ops import sorting

CUBE = normal(3, 4, 5)
SPECIAL = np.float32([0.0, np.nan, -0.0, np.inf, -1.0, -np.nan, -np.inf, 0.0, -0.0, 2.0])
TIED = integers(5, 40, low=-3, high=4, dtype="int8")
FAR = np.int64([0, -1, 2**63 - 1, -(2**63), 1, 2**32, -(2**32), 2**31, 5, 2**32 + 5])
LINES: list[tuple[np.ndarray, int | None]] = [
    *((CUBE, axis) for axis in (-1, 0, 1, None)),
    (SPECIAL, 0),
    (np.stack([np.roll(SPECIAL, n) for n in range(5)]).astype(np.float64), 1),  # side by side
    (np.stack([np.roll(SPECIAL, n) for n in range(5)], 1), 0),
    (TIED, 1),
    (TIED.astype("uint64"), 0),
    (np.tile(FAR, 30), 0),  # dealt out by bytes
    (np.repeat(FAR, 4).astype("uint64"), -1),  # runs merged
    (np.tile(FAR, (4, 1)), -1),
    (normal(300), 0),
    (bools(6, 7), 0),
    (integers(2, 0), -1),
    (integers(0, 3), -1),
]


def numpys_order(x: np.ndarray, axis: int | None = -1, descending: bool = False) -> np.ndarray:
    """NumPy's stable one; of descending order by numbers that stand for the entries, NaN's above all."""
    if descending:
        held = np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
        ranks = np.unique(np.where(held, x.dtype.type(0), x), return_inverse=True)[1].reshape(x.shape)
        x = np.where(held, x.size + 1, -ranks)
    return np.argsort(x, axis=axis, kind="stable")


def sorted_by_numpy(x: np.ndarray, axis: int | None = -1, descending: bool = False) -> np.ndarray:
    order = numpys_order(x, axis, descending)
    return x.ravel()[order] if axis is None else np.take_along_axis(x, order, axis)


def _largest(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = numpys_order(x, -1, True)[..., :k]
    return np.take_along_axis(x, order, -1), order


def _found_in_rows(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    rows = zip(x.reshape(-1, x.shape[-1]), values.reshape(-1, values.shape[-1]), strict=True)
    return np.stack([np.searchsorted(row, many) for row, many in rows]).reshape(values.shape)


SORTING = [
    *[
        Example(
            name,
            lambda x, run=run, a=axis, d=down: run(x, a, d),
            (x,),
            lambda x, judge=judge, a=axis, d=down: judge(x, a, d),
            note=f"{axis}{'-down' * down}",
            gradient=None if x.ndim > 1 and np.isfinite(x).all() and name == "sort" else False,
        )
        for name, run, judge in [("argsort", fr.argsort, numpys_order), ("sort", fr.sort, sorted_by_numpy)]
        for x, axis in LINES
        for down in (False, True)
    ],
    *[
        Example("top_k", lambda x, k=k: fr.top_k(x, k), (x,), lambda x, k=k: _largest(x, k), note=str(k))
        for x, k in [
            (CUBE, 2),
            (CUBE, 5),
            (normal(2, 90), 3),
            (normal(2, 300), 33),  # more than are put in their places one by one
            (normal(70), 40),
            (TIED, 7),
            (FAR, 4),
            (CUBE, 0),
            (integers(0, 3), 2),
        ]
    ],
    Example("top_k", lambda x: fr.top_k(x, 9), (SPECIAL,), lambda x: _largest(x, 9), gradient=False, note="special"),
    *[
        Example(
            "searchsorted",
            lambda x, v, s=side: fr.searchsorted(x, v, s),
            (x, v),
            lambda x, v, s=side: np.searchsorted(x, v, s),
            note=side,
        )
        for side in ("left", "right")
        for x, v in [
            (np.sort(normal(9)), normal(3, 4, seed=1)),
            (np.sort(integers(70)), integers(200, seed=1)),
            (np.sort(SPECIAL), SPECIAL),
            (np.sort(FAR), FAR),
            (np.sort(integers(7, dtype="uint8", low=0)), np.uint8(3)),
            (integers(0), integers(3)),
            (integers(3), integers(0, 2)),
        ]
    ],
    Example(
        "searchsorted",
        fr.searchsorted,
        (np.sort(normal(3, 2, 6)), normal(3, 2, 4, seed=1)),
        _found_in_rows,
        note="rows",
    ),
    Example(
        "true_places",
        sorting.true_places,
        (bools(40),),
        lambda m: (np.pad(np.flatnonzero(m), (0, int((~m).sum()))), np.array(int(m.sum()))),
    ),
    Example(
        "true_places",
        sorting.true_places,
        (bools(0),),
        lambda m: (np.zeros(0, np.int64), np.array(0)),
        note="empty",
    ),
    *[
        Example("true_places", fr.nonzero, (x,), np.nonzero, note="computed")
        for x in (bools(9), integers(3, 4, 2), np.float32([0.0, -0.0, np.nan]), bools(3, 0))
    ],
    *[
        Example(
            "true_places",
            lambda x, m, a=a: fr.boolean_mask(x, m, a),
            (CUBE, m),
            lambda x, m, a=a: x[(*[slice(None)] * a, m)],
            gradient=True,
            note="computed",
        )
        for m, a in [(bools(3), 0), (bools(4), 1), (bools(3, 4), 0), (bools(4, 5), 1), (bools(3, 4, 5), 0)]
    ],
    *[
        Example(
            "true_places",
            lambda x, a=a: fr.unique(x, *a),
            (x,),
            lambda x, a=a: np.unique(x, *a),
            gradient=False,
            note="computed",
        )
        for x in (TIED, SPECIAL, normal(0), bools(2, 3))
        for a in ((), (True,), (True, True, True), (False, False, True))
    ],
]
