"""Examples of floats of 16 bits: of all there are, and of what lies about halfway between two."""

from __future__ import annotations

from typing import Any

import numpy as np
from example import Example

from flowrt.ops import linalg, precision

ALL = np.arange(1 << 16, dtype=np.uint16)
SOME = ALL[::67]


def _halves(bits: Any) -> Any:
    return bits.view(np.float16).astype(np.float32)


def _brain(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _nearest(x: Any, values: Any) -> Any:
    """The bits of the nearest of all such floats, of two the even one; by looking at them all."""
    finite = ALL[np.isfinite(values) & (ALL < 0x8000)]
    at = np.searchsorted(values[finite], np.abs(x))
    low, high = finite[np.clip(at - 1, 0, None)], finite[np.clip(at, None, len(finite) - 1)]
    down, up = np.abs(x) - values[low].astype(np.float64), values[high].astype(np.float64) - np.abs(x)
    found = np.where((up < down) | ((up == down) & (high % 2 == 0)), high, low)
    return (found | np.where(np.signbit(x), 0x8000, 0)).astype(np.uint16)


def _about(values: Any) -> Any:
    """Numbers that are such floats, and those halfway to the next and just beside that."""
    bits = SOME[np.isfinite(values[SOME]) & np.isfinite(values[(SOME + 1).astype(np.uint16)])]
    halfway = ((values[bits].astype(np.float64) + values[bits + 1]) / 2).astype(np.float32)
    beside = [np.nextafter(halfway, side) for side in (np.float32(np.inf), np.float32(-np.inf))]
    return np.concatenate([values[bits], halfway, *beside])[:1000]


def _product(
    name: str, multiply: Any, stand_for: Any, left: tuple[int, ...], right: tuple[int, ...], **flags: bool
) -> Example:
    """Of bits that stand for numbers about 1."""
    rng = np.random.default_rng(7)
    near = {_halves: np.arange(0x3800, 0x4200), _brain: np.arange(0x3F00, 0x4040)}[stand_for].astype(np.uint16)
    a, b = (rng.choice(near, shape) | rng.choice(np.uint16([0, 0x8000]), shape) for shape in (left, right))

    def judge(a: Any, b: Any) -> Any:
        x, y = stand_for(a), stand_for(b)
        return np.matmul(
            x.swapaxes(-1, -2) if flags.get("transpose_a") else x, y.swapaxes(-1, -2) if flags.get("transpose_b") else y
        )

    run = lambda a, b: multiply(a, b, **flags)  # noqa: E731
    return Example(name, run, (a, b), judge, gradient=False, margin=5e-6)


HALVES, BRAIN = _halves(ALL), _brain(ALL)
HALVES_ABOUT, BRAIN_ABOUT = _about(HALVES), _about(BRAIN)

PRECISION = [
    Example(
        "narrow_float16",
        precision.narrow_float16,
        (HALVES_ABOUT,),
        lambda x: x.astype(np.float16).view(np.uint16),
        gradient=False,
    ),
    Example(
        "narrow_bfloat16",
        precision.narrow_bfloat16,
        (BRAIN_ABOUT,),
        lambda x: _nearest(x, BRAIN),
        gradient=False,
    ),
    Example("widen_float16", precision.widen_float16, (SOME, HALVES[SOME]), lambda b, x: _halves(b), gradient=False),
    Example("widen_bfloat16", precision.widen_bfloat16, (SOME, BRAIN[SOME]), lambda b, x: _brain(b), gradient=False),
    *(
        _product(name, multiply, stand_for, left, right, **flags)
        for name, multiply, stand_for in (
            ("matmul_float16", linalg.matmul_float16, _halves),
            ("matmul_bfloat16", linalg.matmul_bfloat16, _brain),
        )
        for left, right, flags in (
            ((3, 5), (5, 4), {}),
            ((5, 3), (4, 5), {"transpose_a": True, "transpose_b": True}),
            ((2, 1, 3, 5), (3, 5, 2), {}),
            ((17, 40), (40, 19), {}),
            ((5,), (5,), {}),
            ((2, 0), (0, 3), {}),
        )
    ),
]
