"""Programs of several ops as passes make them, small ones: op, arrays, outputs' specs and attributes."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.base.spec import Spec

Program = tuple[str, list[Any], list[Spec], dict[str, Any]]
LAST = (("axis", -1), ("keepdims", True))


def _fused(arrays: list[Any], members: list[Any], results: list[int], outputs: list[Spec]) -> Program:
    return "fused", arrays, outputs, {"_many": len(arrays), "members": tuple(members), "results": tuple(results)}


def programs() -> list[Program]:
    """An update; two results of several dtypes; a row's softmax; what a row comes to, repeated along it, multiplied by
    that, and beside something smaller; an entry, folded; many ops; and a product with what follows."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(5, 7)).astype(np.float32) for _ in range(2))
    row, rate, matrix = a[0], np.float32([0.5]).reshape(()), rng.normal(size=(7, 3)).astype(np.float32)
    f32 = "float32"
    update = [("multiply", (1, 2), f32, ()), ("subtract", (0, 3), f32, ())]
    several = [
        ("less", (0, 1), "bool", ()),
        ("where", (3, 0, 1), f32, ()),
        ("multiply", (4, 2), f32, ()),
        ("tanh", (5,), f32, ()),
        ("astype", (6,), "float64", (("dtype", "float64"),)),
    ]
    softmax = [
        ("max", (0,), f32, LAST),
        ("subtract", (0, 1), f32, ()),
        ("exp", (2,), f32, ()),
        ("sum", (3,), f32, LAST),
        ("divide", (3, 4), f32, ()),
    ]
    repeated = [
        ("negative", (0,), f32, ()),
        ("sum", (2,), f32, LAST),
        ("spread", (3, 1), f32, LAST),
    ]
    taken = [
        ("sum", (0,), f32, (("axis", -1), ("keepdims", False))),
        ("expand_dims", (2,), f32, (("axis", 1),)),
        ("spread", (3, 1), f32, LAST),
        ("multiply", (0, 4), f32, ()),
    ]
    beside = [("spread", (0, 1), f32, LAST), ("multiply", (2, 2), f32, ())]
    reduced = [("multiply", (0, 1), f32, ()), ("sum", (2,), f32, (("axis", 0), ("keepdims", False)))]
    many = [("add" if n % 2 else "multiply", (n + 1 if n else 0, 1), f32, ()) for n in range(60)]
    whole, flags = Spec(f32, (5, 7)), (("transpose_a", False), ("transpose_b", False))
    joined = {"product": ("matmul", 2, flags), "epilogue": ("tanh", ()), "taken": (-1,), "kept": 1}
    return [
        _fused([a, b, rate], update, [4], [whole]),
        _fused([a, b, row], several, [6, 7], [whole, Spec("float64", (5, 7))]),
        _fused([a], softmax, [5], [whole]),
        _fused([a, np.int64([5, 7])], repeated, [4], [whole]),
        _fused([a, np.int64([5, 7])], taken, [5], [whole]),
        _fused([a[:, :1], np.int64([5, 7]), row], beside, [3, 4], [whole, Spec(f32, (7,))]),
        _fused([a, b], reduced, [2, 3], [whole, Spec(f32, (7,))]),
        _fused([a, row], many, [61], [whole]),
        ("with_epilogue", [a, matrix], [Spec(f32, (5, 3))] * 2, joined),
    ]
