"""Examples of programs made of several ops."""

from __future__ import annotations

import numpy as np
from example import Example, bools, integers, normal

from flowrt.ops.fused import fused

PRODUCT = (("multiply", (0, 1), "float32", ()), ("exp", (2,), "float32", ()))
CHOICE = (
    ("astype", (1,), "float32", (("dtype", "float32"),)),
    ("add", (2, 3), "float32", ()),
    ("where", (0, 4, 2), "float32", ()),
    ("less", (5, 3), "bool", ()),
)

FUSED = [
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
