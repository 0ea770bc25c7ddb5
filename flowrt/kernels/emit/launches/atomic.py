"""Words that several threads change: read and written at once, in one order for all."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORD = ir.IntType(64)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


def _word(builder: Any, address: Any, position: Any) -> Any:
    return builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [position])


@intrinsic
def load(typing_context: Any, address: Any, position: Any) -> Any:
    """What a word holds now that others may change: read anew each time, and before whatever follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, *args), "seq_cst", 8)

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def store(typing_context: Any, address: Any, position: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(builder, *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


def _changing(operation: str) -> Any:
    """An intrinsic (address, position, value) that changes a word at once and answers what it was."""

    @intrinsic
    def change(typing_context: Any, address: Any, position: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, _word(builder, *args[:2]), args[2], "seq_cst")

        return types.intp(types.intp, types.intp, types.intp), codegen

    return change


add, least = _changing("add"), _changing("min")


@intrinsic
def replace(typing_context: Any, address: Any, position: Any, old: Any, new: Any) -> Any:
    """Put ``new`` where ``old`` is; answers what was there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(builder, *args[:2])
        return builder.extract_value(builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst"), 0)

    return types.intp(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the core that this thread only waits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, words = _PAUSES.get(llvm.get_process_triple().split("-")[0].replace("arm64", "aarch64"), (None, ()))
        if name is not None:
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(words))
            hint = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(hint, [ir.Constant(ir.IntType(32), word) for word in words])
        return context.get_dummy_value()

    return types.void(), codegen
