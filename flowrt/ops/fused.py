"""Several ops as one: what the passes make of elementwise chains, so that memory is read and written once.

A program is plain data: its members are ``(op, operands, dtype of the result, attributes)`` in order, attributes as
pairs of a name and a value. Values are numbered: first the inputs, then each member's result. ``results`` are the
numbers of those that leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import SpecError
from flowrt.base.spec import NAMES
from flowrt.op import lookup
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.base.spec import Spec
    from flowrt.typed import Operand, Result

FusedMember: TypeAlias = "tuple[str, tuple[int, ...], str, tuple[tuple[str, Attr], ...]]"


@op(gradient=None)
def fused(values: Sequence[Operand], *, members: Any, results: Any) -> tuple[Result, ...]:
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
        if len(outputs) != 1 or NAMES[outputs[0].dtype] != dtype:
            raise SpecError(f"{name} is no member of a program that makes one {dtype} of {specs}")
        specs.append(outputs[0])
    return specs


@op(gradient=None)
def with_epilogue(
    values: Sequence[Operand], *, product: Any, epilogue: Any, taken: Any, kept: bool
) -> tuple[Result, ...]:
    """``epilogue``, an op that goes over entries, of what ``product`` makes of the first ``values``.

    ``product`` is (op, how many values it takes, attributes), ``epilogue`` (op, attributes). ``taken`` numbers the
    values that the epilogue takes, -1 being the product. If that is ``kept`` it is the first result.
    """
    name, count, attrs = product
    (made,) = lookup(name).infer(values[:count], dict(attrs))
    other, other_attrs = epilogue
    results = lookup(other).infer([values[n] if n >= 0 else made for n in taken], dict(other_attrs))
    return (made, *results) if kept else results


def parts_of(op: str, attrs: Mapping[str, Any]) -> list[str]:
    """The ops that a node of ``op`` computes, in order."""
    if op == "with_epilogue":
        (product, *_), (epilogue, pairs) = attrs["product"], attrs["epilogue"]
        return [product, *parts_of(epilogue, dict(pairs))]
    return [member[0] for member in attrs["members"]] if op == "fused" else [op]
