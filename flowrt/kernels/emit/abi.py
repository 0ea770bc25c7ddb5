"""How a compiled entry finds its operands: ``void(bases, block, begin, end)``, in LLVM's terms."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic

ENTRY = types.void(types.intp, types.intp, types.intp, types.intp)
OPTIONS = {
    "error_model": "numpy",
    "_nrt": False,  # a kernel that allocates does not compile
    "no_cpython_wrapper": True,  # nothing but compiled code calls it
    "no_cfunc_wrapper": True,
}
INLINED = OPTIONS | {"forceinline": True}  # a call left in a loop would keep it from being vectorised
WORD = ir.IntType(64)
ZERO, ONE = ir.Constant(WORD, 0), ir.Constant(WORD, 1)


def emitted(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of what emits instructions, given a builder and LLVM's values: compiled code calls it as of that
    signature."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = emit(builder, *args)
            return context.get_dummy_value() if signature.return_type == types.void else found

        @wraps(emit)
        def typed(typing_context: Any, *kinds: Any) -> Any:
            return signature, codegen

        return intrinsic(typed)

    return decorate


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """The integer ``address`` as a pointer to a ``kind``."""
    return builder.inttoptr(address, kind.as_pointer())


def word(builder: Any, block: Any, position: int) -> Any:
    """The word at ``position`` of the block."""
    base = pointer(builder, block, WORD)
    return builder.load(builder.gep(base, [ir.Constant(WORD, position)]))


def operand_address(builder: Any, bases: Any, block: Any, operand: int) -> Any:
    """Where an operand lies: the block begins with a slot of ``bases`` and a byte offset for each."""
    slot, offset = word(builder, block, 2 * operand), word(builder, block, 2 * operand + 1)
    base = builder.load(builder.gep(pointer(builder, bases, WORD), [slot]))
    return builder.add(base, offset)
