"""What `folds` come to in LLVM's terms: an operation marked as reorderable, or the operator itself for integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from flowrt.kernels import folds
from flowrt.kernels.abi import INLINED

LOOSE = ("reassoc", "nsz", "contract")


def _extreme(name: str) -> Callable[[Any, Any], Any]:
    def build(builder: Any, args: Any) -> Any:
        kind = args[0].type
        function = builder.module.declare_intrinsic(name, (kind,), ir.FunctionType(kind, [kind, kind]))
        return builder.call(function, args, fastmath=("nsz",))

    return build


OPERATIONS: dict[Callable[..., Any], tuple[Callable[[Any, Any], Any], Callable[..., Any]]] = {
    folds.add_loosely: (lambda builder, args: builder.fadd(*args, flags=LOOSE), lambda x, y: x + y),
    folds.multiply_loosely: (lambda builder, args: builder.fmul(*args, flags=LOOSE), lambda x, y: x * y),
    folds.larger_loosely: (_extreme("llvm.maximum"), lambda x, y: x if x >= y else y),
    folds.smaller_loosely: (_extreme("llvm.minimum"), lambda x, y: x if x <= y else y),
}


@cache
def bind_folds() -> None:
    """Let compiled kernels call the folds."""
    for fold, (build, exact) in OPERATIONS.items():
        overload(fold, strict=False, jit_options=INLINED)(_chosen(_instruction(build), exact))


def _instruction(build: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def instruction(typing_context: Any, x: Any, y: Any) -> Any:
        return x(x, x), lambda context, builder, signature, args: build(builder, args)

    return instruction


def _chosen(instruction: Any, exact: Callable[..., Any]) -> Callable[..., Any]:
    def choose(x: Any, y: Any) -> Any:
        if isinstance(x, types.Float):
            return lambda x, y: instruction(x, y)
        return exact

    return choose
