"""Examples of programs made of several ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from example import Example, bools, integers, normal

from flowrt.ops.fused import fused, with_epilogue

PRODUCT = (("multiply", (0, 1), "float32", ()), ("exp", (2,), "float32", ()))
CHOICE = (
    ("astype", (1,), "float32", (("dtype", "float32"),)),
    ("add", (2, 3), "float32", ()),
    ("where", (0, 4, 2), "float32", ()),
    ("less", (5, 3), "bool", ()),
)

ALONG, DOWN = (("axis", -1), ("keepdims", True)), (("axis", 0), ("keepdims", False))
CENTRED = (
    ("mean", (0,), "float32", ALONG),
    ("subtract", (0, 1), "float32", ()),
    ("sum", (2,), "float32", DOWN),
    ("max", (2,), "float32", ALONG),
    ("divide", (2, 4), "float32", ()),
)


def centred(x: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    less = x - x.mean(-1, keepdims=True)
    top = less.max(-1, keepdims=True)
    return less / top, less.sum(0), top


FUSED = [
    Example(
        "fused",
        lambda x: fused([x], members=CENTRED, results=(5, 3, 4)),
        (normal(9, 20),),
        centred,
        note="rows",
    ),
    Example(
        "fused",
        lambda x, y: fused([x, y], members=PRODUCT, results=(3, 2)),
        (normal(4, 3), normal(3, seed=1)),
        lambda x, y: (np.exp(x * y), x * y),
        note="row",
    ),
    Example(
        "fused",
        lambda c, n, x: fused([c, n, x], members=CHOICE, results=(5, 6)),
        (bools(4, 1), integers(1, 3), normal(4, 3)),
        lambda c, n, x: (np.where(c, np.float32(n) + x, x), np.where(c, np.float32(n) + x, x) < n),
        note="mixed",
    ),
    Example(
        "fused",
        lambda x: fused([x, x], members=PRODUCT, results=(0, 3, 3)),
        (normal(0, 3),),
        lambda x: (x, x, x),
        note="empty",
    ),
]


def _layer(kept: bool, epilogue: Any, taken: tuple[int, ...]) -> Callable[..., Any]:
    """A product and what goes over its entries."""
    product = ("matmul", 2, (("transpose_a", False), ("transpose_b", True)))
    return lambda *values: with_epilogue(list(values), product=product, epilogue=epilogue, taken=taken, kept=kept)


EPILOGUES = [
    Example(
        "with_epilogue",
        _layer(False, ("tanh", ()), (-1,)),
        (normal(2, 5, 3), normal(4, 3, seed=1)),
        lambda a, b: np.tanh(a @ b.T),
        note="alone",
    ),
    Example(
        "with_epilogue",
        _layer(True, ("fused", (("_many", 3), ("members", CHOICE), ("results", (5, 6)))), (2, 3, -1)),
        (normal(5, 3), normal(4, 3, seed=1), bools(5, 1), integers(1, 4)),
        lambda a, b, c, n: (
            a @ b.T,
            np.where(c, np.float32(n) + a @ b.T, a @ b.T),
            np.where(c, np.float32(n) + a @ b.T, a @ b.T) < n,
        ),
        note="kept",
    ),
    Example(
        "with_epilogue",
        _layer(False, ("multiply", ()), (-1, 2)),
        (normal(0, 3), normal(4, 3, seed=1), normal(0, 4)),
        lambda a, b, c: (a @ b.T) * c,
        note="empty",
    ),
    Example(
        "with_epilogue",
        _layer(False, ("subtract", ()), (-1, -1)),
        (normal(3, 2), normal(1, 2, seed=1)),
        lambda a, b: a @ b.T - a @ b.T,
        note="twice",
    ),
]
