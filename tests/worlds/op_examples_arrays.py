"""Examples of what arrays are cut, arranged, measured and looked up by; see `op_examples`."""

from __future__ import annotations

from typing import Any

import numpy as np
from example import Example, bools, integers, normal

import flowrt.ops as fr
from flowrt.ops import entries, running

CUBE = normal(3, 4, 5)
NAN, INF = np.float32("nan"), np.float32("inf")
FLOATS = np.tile(np.float32([0.0, -1.5, NAN, INF, -INF, 3e38]), 20)
BITS = integers(9, low=-(2**31), high=2**31, dtype="int64").astype("int32")


def _scattered(updates: np.ndarray, places: tuple[list[int], ...], size: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(size, updates.dtype)
    np.add.at(out, places, updates)
    return out


def _running(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    return np.flip(np.flip(x, axis).cumprod(axis), axis) if reverse else x.cumprod(axis)


def _recurred(factors: np.ndarray, terms: np.ndarray, axis: int, reverse: bool, own: bool) -> np.ndarray:
    f, t = (np.moveaxis(np.flip(v, axis) if reverse else v, axis, 0) for v in (factors, terms))
    y = t.copy()
    for k in range(1, len(y)):
        y[k] += f[k if own else k - 1] * y[k - 1]
    y = np.moveaxis(y, 0, axis)
    return np.flip(y, axis) if reverse else y


LOGIC = [
    Example("isinf", fr.isinf, (FLOATS,), np.isinf),
    Example("isinf", fr.isinf, (FLOATS.astype("float64"),), np.isinf),
    Example("isinf", fr.isinf, (BITS,), np.isinf),
    Example("isinf", fr.isinf, (bools(),), np.isinf),
    *[
        Example(name, getattr(fr, name), (a, b), getattr(np, name))
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
        for a, b in [
            (BITS, integers(3, 1)),
            (bools(3, 4), bools(4, seed=1)),
            (bools(9), BITS),
            (np.uint64([2**64 - 1, 1]), np.uint64(2**63 + 5)),
            (integers(0, dtype="int8"), integers(dtype="int16")),
        ]
    ],
]


def _arranged(op: str, call: str, *settings: Any, x: np.ndarray = CUBE, note: str = "") -> Example:
    return Example(
        op,
        lambda v: getattr(fr, call)(v, *settings),
        (x,),
        lambda v: getattr(np, call)(v, *settings),
        gradient=x.size > 0,
        note=f"{call}{settings}{note}",
    )


ARRANGED = [
    *[_arranged("getitem", "flip", axis) for axis in (None, 0, -1, (0, 2), ())],
    _arranged("getitem", "flip", x=normal(), note="scalar"),
    *[
        _arranged("roll", "roll", shift, axis)
        for shift, axis in [
            (1, 0),
            (-2, -1),
            (7, 1),
            (0, 1),
            ((1, -2), (0, 2)),
            (1, (0, 1, 2)),
            ((1, 2), 1),
            (-1, (2, -1)),
            (3, None),
            (-70, None),
        ]
    ],
    _arranged("roll", "roll", 1, 0, x=normal(0, 3), note="empty"),
    _arranged("roll", "roll", 1, x=bools(), note="scalar"),
    Example(
        "concat",
        lambda x, n: fr.roll(x, (n, 1), (1, 0)),
        (CUBE, np.int8(-3)),
        lambda x, n: np.roll(x, (n, 1), (1, 0)),
        note="computed",
    ),
    Example(
        "concat",
        lambda x, n: fr.roll(x, n, (0, 2)),
        (CUBE, np.int64([2, -11])),
        lambda x, n: np.roll(x, n, (0, 2)),
        note="computed",
        open_sizes=False,  # of how many shifts there are
    ),
    Example("getitem", lambda x: fr.split(x, 2, 1), (CUBE,), lambda x: tuple(np.split(x, 2, 1)), note="split"),
    Example("getitem", lambda x: fr.split(x, 1), (CUBE,), lambda x: (x,), note="split-whole"),
    Example("getitem", lambda x: fr.split(x, [1, 0, 4], -1), (CUBE,), lambda x: tuple(np.split(x, [1, 1], -1))),
    Example(
        "slice_along",
        lambda x, n: fr.split(fr.concat([x, fr.zeros((n, 4, 5))]), (2, -1, 1))[:2],
        (CUBE, np.int64(3)),
        lambda x, n: (x[:2], np.concatenate([x[2:], np.zeros((n - 1, 4, 5), "float32")])),
        note="computed",
    ),
    Example("where", lambda a, b: fr.linspace(a, b, 7), (normal(), normal(3)), lambda a, b: np.linspace(a, b, 7)),
    Example(
        "add",
        lambda a, b: fr.linspace(a, b, 7, endpoint=False),
        (normal(2, 1), normal(3)),
        lambda a, b: np.linspace(a, b, 7, endpoint=False).astype("float32"),
    ),
    Example("add", lambda a: fr.linspace(a, 2, 1), (normal(3),), lambda a: a[None], note="one"),
    Example("where", lambda a: fr.linspace(a, 9, 4), (integers(),), lambda a: np.linspace(a, 9, 4), note="integers"),
    Example(
        "astype",
        lambda a: fr.linspace(a, 9, 4, dtype="int32"),
        (integers(),),
        lambda a: np.linspace(a, 9, 4, dtype="int32"),
    ),
    Example(
        "constant",
        lambda: (fr.linspace(-1, 3, 5), fr.linspace(0, 1, 3, False), fr.linspace(2.0, 3.0, 0), fr.linspace(2, 3, 1)),
        (),
        lambda: tuple(np.float32(v) for v in ([-1, 0, 1, 2, 3], [0, 1 / 3, 2 / 3], [], [2])),
        note="linspace",
    ),
]
TALL = normal(3, 4, seed=1)
NORMS = [
    Example(
        op,
        lambda x, o=order, a=axis, k=keep: fr.norm(x, o, a, k),
        (x,),
        lambda x, o=order, a=axis, k=keep: np.linalg.norm(x, o, a, k),
        note=f"norm-{order}-{axis}{'k' if keep else ''}",
        margin=1e-5,
    )
    for op, x, order, axis, keep in [
        ("sqrt", CUBE, None, None, False),
        ("sqrt", CUBE, None, (0, 2), True),
        ("sqrt", TALL, "fro", None, False),
        ("sqrt", CUBE, 2, -1, False),
        ("abs", CUBE, 1, 0, True),
        ("max", CUBE, np.inf, 1, False),
        ("min", CUBE, -np.inf, 1, True),
        ("pow", CUBE, 3, 1, False),
        ("pow", CUBE, 0.5, 1, True),
        ("pow", CUBE, -1.5, -1, False),
        ("max", TALL, 1, None, False),
        ("min", TALL, -1, None, True),
        ("max", CUBE, np.inf, (2, 0), False),
        ("min", CUBE, -np.inf, (0, -1), True),
    ]
] + [
    Example(
        "not_equal", lambda x: fr.norm(x, 0, 1), (CUBE.round(),), lambda x: np.linalg.norm(x, 0, 1), gradient=False
    ),
    Example("sqrt", fr.norm, (integers(5),), np.linalg.norm),
    Example("sqrt", lambda x: fr.norm(x, axis=1), (np.zeros((2, 0), "float32"),), lambda x: x.sum(1), gradient=False),
]


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
    Example(
        "take",
        lambda x: fr.gather_nd(x, [[[2, 0], [-1, -4]], [[0, 3], [2, 0]]]),
        (CUBE,),
        lambda x: x[[[2, -1], [0, 2]], [[0, -4], [3, 0]]],
        note="gather_nd",
    ),
    Example(
        "flat_indices",
        fr.gather_nd,
        (CUBE, integers(6, 3, low=-3, high=3)),
        lambda x, i: x[tuple(i.T)],
        open_sizes=False,  # of how many axes they name
    ),
    Example(
        "flat_indices", lambda x: fr.gather_nd(x, np.zeros((2, 0), int)), (CUBE,), lambda x: np.stack([x, x]), note="0"
    ),
    Example(
        "flat_indices",
        lambda x: fr.gather_nd(x, np.zeros((0, 2), int)),
        (bools(0, 4, 3),),
        lambda x: x[0:0, 0],
        note="none",
    ),
    Example(
        "scatter_add",
        lambda u: fr.scatter_nd([[2, 0], [1, -1], [2, 0]], u, (3, 4, 2)),
        (normal(3, 2),),
        lambda u: _scattered(u, ([2, 1, 2], [0, -1, 0]), (3, 4, 2)),
        note="scatter_nd",
    ),
    Example(
        "flat_indices",
        lambda u, n: fr.scatter_nd([[2], [1], [-3]], u, fr.stack([n, 2])),
        (integers(3, 2), np.int64(4)),
        lambda u, n: _scattered(u, ([2, 1, -3],), (n, 2)),
        note="computed",
    ),
]
ZEROS = CUBE * (np.arange(60).reshape(3, 4, 5) % 7 > 0)
RUNNING = [
    *[
        Example(
            "cumprod",
            lambda x, a=a, r=r: fr.cumprod(x, a, r),
            (x,),
            lambda x, a=a, r=r: _running(x, a, r),
            note=f"{a}{r}",
        )
        for x, a, r in [(ZEROS, 0, False), (ZEROS, 1, True), (ZEROS, -1, False), (normal(40, 6), 1, True)]
    ],
    Example("cumprod", fr.cumprod, (normal(0),), np.cumprod, gradient=False, note="empty"),
    Example("cumprod", fr.cumprod, (np.float32([2, NAN, 0, INF]),), np.cumprod, gradient=False, note="edges"),
    Example("cumprod", fr.cumprod, (np.int8([100, 3, -2]),), np.cumprod),
    Example("cumprod", lambda x: fr.cumprod(x, 0), (bools(4, 3),), lambda x: x.cumprod(0)),
    *[
        Example(
            "linear_recurrence",
            lambda f, t, a=a, r=r, o=o: running.linear_recurrence(f, t, a, r, o),
            (ZEROS, normal(3, 4, 5, seed=1)),
            lambda f, t, a=a, r=r, o=o: _recurred(f, t, a, r, o),
            note=f"{a}{r}{o}",
        )
        for a, r, o in [(0, False, False), (1, True, True), (-1, False, True), (2, True, False)]
    ],
    Example(
        "linear_recurrence",
        lambda f, t: running.linear_recurrence(f, t, 0),
        (0.5 * normal(300), normal(300, seed=1)),
        lambda f, t: _recurred(f, t, 0, False, False),
        gradient=False,
        margin=1e-5,
        note="long",
    ),
]
ARRAYS = [*LOGIC, *ARRANGED, *NORMS, *ENTRIES, *RUNNING]
