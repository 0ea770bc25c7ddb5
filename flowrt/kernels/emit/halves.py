"""float16 to float32 and back by the processor's own instructions, where it has them.

Law: they come to the bits that the plain functions of `ops.precision` come to, which all others compute.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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


@intrinsic
def _extend(typing_context: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _truncate(typing_context: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen
