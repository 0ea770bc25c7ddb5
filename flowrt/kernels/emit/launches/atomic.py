"""Words that several threads change: read and written at once, in one order for all."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from flowrt.kernels.emit.abi import emitted

_WORD = ir.IntType(64)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


def _word(builder: Any, address: Any, position: Any) -> Any:
    return builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [position])


@emitted(types.intp(types.intp, types.intp))
def load(builder: Any, address: Any, position: Any) -> Any:
    """What a word holds now that others may change: read anew each time, and before whatever follows."""
    return builder.load_atomic(_word(builder, address, position), "seq_cst", 8)


@emitted(types.void(types.intp, types.intp, types.intp))
def store(builder: Any, address: Any, position: Any, value: Any) -> None:
    builder.store_atomic(value, _word(builder, address, position), "seq_cst", 8)


def _changing(operation: str) -> Any:
    """A function (address, position, value) that changes a word at once and answers what it was."""

    @emitted(types.intp(types.intp, types.intp, types.intp))
    def change(builder: Any, address: Any, position: Any, value: Any) -> Any:
        return builder.atomic_rmw(operation, _word(builder, address, position), value, "seq_cst")

    return change


add, least = _changing("add"), _changing("min")


@emitted(types.intp(types.intp, types.intp, types.intp, types.intp))
def replace(builder: Any, address: Any, position: Any, old: Any, new: Any) -> Any:
    """Put ``new`` where ``old`` is; answers what was there."""
    place = _word(builder, address, position)
    return builder.extract_value(builder.cmpxchg(place, old, new, "seq_cst", "seq_cst"), 0)


@emitted(types.void())
def pause(builder: Any) -> None:
    """Tell the core that this thread only waits."""
    name, words = _PAUSES.get(llvm.get_process_triple().split("-")[0].replace("arm64", "aarch64"), (None, ()))
    if name is not None:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(words))
        hint = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(hint, [ir.Constant(ir.IntType(32), word) for word in words])
