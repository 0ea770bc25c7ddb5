"""Functions of this package go through fewer of Numba's steps than those of others, and come to the same."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba import types

import flowrt.kernels  # noqa: F401  (enters the kernels in the table)
from flowrt.kernels.emit.lowering import Lowered, linked_object
from flowrt.kernels.language.table import JITABLES, KERNELS, Form

LEFT_OUT = {"MAKE_FUNCTION", "BEFORE_WITH", "YIELD_VALUE", "PUSH_EXC_INFO", "BUILD_MAP", "BUILD_SET"}
SIGNATURE = types.int64(types.int64, types.int64)


def sum_up(limit: int, step: int) -> int:
    """Branches, a loop that is left early, values that change, and a tuple of constants."""
    total, last = 0, (step, limit)[1]
    for number in range(limit):
        if number % 3 == step:
            total += number * last
        elif number > 7:
            last = total - step
        if total > 1000:
            break
    return total + last


def standing_in(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    made = FunctionType(function.__code__, function.__globals__, function.__name__)
    made.__module__ = module
    return made


def test_fewer_steps_come_to_the_same_machine_code() -> None:
    ours, whole = (
        linked_object(standing_in(module, sum_up), SIGNATURE, "flowrt_test", None)
        for module in ("flowrt.kernels.made", "somewhere.else")
    )
    assert ours == whole


def test_no_variable_of_a_function_of_ours_is_deleted() -> None:
    def stores(module: str) -> int:
        lowered = Lowered(standing_in(module, sum_up))
        lowered.compile(SIGNATURE)
        return str(lowered.overloads[SIGNATURE.args].library.get_llvm_str()).count("store ")

    assert stores("flowrt.kernels.made") < stores("somewhere.else")


def test_functions_of_others_may_make_functions() -> None:
    def twice_the_sum(a: int, b: int) -> int:
        def twice(value: int) -> int:
            return 2 * value

        return twice(a + b)

    assert linked_object(standing_in("somewhere.else", twice_the_sum), SIGNATURE, "flowrt_test", None)


def test_kernels_of_ours_have_nothing_that_the_steps_left_out_look_for() -> None:
    kernels = [kernel for (_, device), found in KERNELS.items() if device == "cpu" for kernel in found]
    functions = [*JITABLES, *(kernel.function for kernel in kernels if kernel.form is not Form.PROGRAM)]
    ours = [f for f in functions if str(f.__module__).startswith("flowrt.kernels.")]
    asking = {
        f"{f.__module__}.{f.__qualname__}: {instruction.opname}"
        for f in ours
        for instruction in dis.get_instructions(f.__code__)
        if instruction.opname in LEFT_OUT
    }
    assert len(ours) > 100
    assert not asking
