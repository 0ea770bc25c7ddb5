"""Which products are rounded together with the sum they go into, where the processor can: decided once per function.

Law: LLVM has no choice left about an entry's value. It makes a loop's body several times (vectors side by side, single
ones, what is left over, one element alone), and where it may contract it decides anew in each, by what stands nearby:
an entry's bits would hang on where a range is cut. So each function is looked at by itself, before anything is inlined
or copied, and what is a product and a sum afterwards stays one. Zeros keep their sign for the same reason.

Only sums that may be reordered (`emit.reductions`) may still take in a product: all entries of a unit make one of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from llvmlite import ir


def contract(module: Any) -> None:
    """Make one instruction of each sum or difference in ``module`` and a product that nothing else wants."""
    for function in module.functions:
        instructions = [instruction for block in function.blocks for instruction in block.instructions]
        uses = Counter(id(value) for instruction in instructions for value in instruction.operands)
        for instruction in instructions:
            if instruction.opname in ("fadd", "fsub") and not instruction.flags:
                place = next((n for n, value in enumerate(instruction.operands) if _is_product(value, uses)), None)
                if place is not None:
                    _round_once(instruction, place)
        for instruction in instructions:
            if instruction.opname == "fmul":
                instruction.flags.append("contract")


def _is_product(value: Any, uses: Counter[int]) -> bool:
    """Whether a sum's operand is a product of two scalars, for it alone."""
    if not isinstance(value, ir.Instruction) or value.opname != "fmul" or value.flags:
        return False
    return uses[id(value)] == 1 and isinstance(value.type, (ir.FloatType, ir.DoubleType))


def _round_once(total: Any, place: int) -> None:
    """Compute a sum or difference and its operand ``place``, a product, in one instruction.

    Its readers go on reading it: it becomes the sum of that and -0, which is nothing to LLVM.
    """
    builder = ir.IRBuilder(total.parent)
    builder.position_before(total)
    first, second = total.operands[place].operands
    other = total.operands[1 - place]
    if total.opname == "fsub":
        first, other = (builder.fneg(first), other) if place else (first, builder.fneg(other))
    total.opname = "fadd"
    total.operands = (builder.fma(first, second, other), ir.Constant(total.type, -0.0))
