"""Several ops as one: what the passes make of elementwise chains, so that memory is read and written once.

A program is plain data: its members are ``(op, operands, dtype of the result, attributes)`` in order, attributes as
pairs of a name and a value. Values are numbered: first the inputs, then each member's result. ``results`` are the
numbers of those that leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.errors import SpecError
from flowrt.op import lookup, no_gradient, op

if TYPE_CHECKING:
    from flowrt.op import Attr
    from flowrt.spec import Spec

FusedMember: TypeAlias = "tuple[str, tuple[int, ...], str, tuple[tuple[str, Attr], ...]]"


@no_gradient
@op
def fused(values: Sequence[Spec], *, members: Any, results: Any) -> tuple[Spec, ...]:
    """The ``results`` of the program ``members`` on ``values``."""
    specs = infer_members(values, members)
    if not results or any(not 0 <= n < len(specs) for n in results):
        raise SpecError(f"a program of {len(specs)} values cannot answer {results}")
    return tuple(specs[n] for n in results)


def infer_members(values: Sequence[Spec], members: Sequence[FusedMember]) -> list[Spec]:
    """The specs of all values of a program on inputs like ``values``."""
    specs = list(values)
    for name, operands, dtype, attrs in members:
        if any(not 0 <= n < len(specs) for n in operands):
            raise SpecError(f"{name} takes the values {operands}, of which only {len(specs)} come before")
        outputs = lookup(name).infer([specs[n] for n in operands], dict(attrs))
        if len(outputs) != 1 or outputs[0].dtype.name != dtype:
            raise SpecError(f"{name} is no member of a program that makes one {dtype} of {specs}")
        specs.append(outputs[0])
    return specs
