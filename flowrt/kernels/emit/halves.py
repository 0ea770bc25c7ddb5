"""float16 to float32 and back by the processor's own instructions, where it has them.

Law: they come to the bits that the plain functions of `ops.precision` come to, which all others compute.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from flowrt.kernels.emit.abi import emitted
from flowrt.kernels.emit.lowering import Lowered, bind
from flowrt.kernels.ops.precision import of_float16, to_float16
from flowrt.kernels.store.surroundings import has_half_conversions


@cache
def bind_conversions() -> None:
    """Let compiled kernels convert by instructions, where the processor has them."""
    if has_half_conversions():
        bind(of_float16, Lowered(_widened, inlined=True))
        bind(to_float16, Lowered(_narrowed, inlined=True))


def _widened(bits: Any) -> Any:
    return _extend(np.uint16(bits))


def _narrowed(x: Any) -> Any:
    return _truncate(np.float32(x))


@emitted(types.float32(types.uint16))
def _extend(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


@emitted(types.uint16(types.float32))
def _truncate(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
