"""Several ops as one: what the passes make of elementwise chains, so that memory is read and written once.

A program is plain data: its members are ``(op, operands, dtype of the result, attributes)`` in order, attributes as
pairs of a name and a value. Values are numbered: first the inputs, then each member's result. ``results`` are the
numbers of those that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from flowrt.base.errors import InternalError, SpecError
from flowrt.base.spec import NAMES, Spec, is_float, is_half
from flowrt.op import as_value, builder_for, building, lookup
from flowrt.operators import Operators
from flowrt.typed import op

if TYPE_CHECKING:
    import numpy as np

    from flowrt.base.attributes import Attr
    from flowrt.op import Op
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


# ── recorded ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_one(function: Callable[..., tuple[Any, ...]], tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """``function(*tensors, *numbers)`` as one node, where the tensors are of one spec and the numbers scalars.

    All of 32 or 64 bits. The function applies elementwise ops alone, each to a tensor at least, and makes no constants.
    A graph of thousands of alike updates has a node for each, not a dozen; what else is fused with them is as it would
    be.
    """
    values = [as_value(value) for value in (*tensors, *numbers)]
    builder, count = builder_for(values), len(tensors)
    specs = [builder.spec(value) for value in values]
    first = specs[0]
    alike = all(spec.dims == first.dims for spec in specs[:count]) and all(spec.dims == () for spec in specs[count:])
    floats = is_float(first.dtype) and not is_half(first.dtype)
    if not (alike and first.dims and floats and all(spec.dtype == first.dtype for spec in specs)):
        return function(*tensors, *numbers)
    attrs = _recorded(function, first.dtype, count, len(numbers))
    made: tuple[Any, ...] = lookup("fused").applied(builder, values, attrs, None)
    return made


@lru_cache(maxsize=64)
def _recorded(
    function: Callable[..., tuple[Any, ...]], dtype: np.dtype[Any], tensors: int, numbers: int
) -> Mapping[str, Attr]:
    """The attributes of the node that does what ``function`` does: the same for all sizes."""
    recorder = _ProgramBuilder()
    given = [_Value(recorder, n, Spec(dtype, (2,) if n < tensors else ())) for n in range(tensors + numbers)]
    recorder.count = len(given)
    with building(recorder):
        results = function(*given)
    return {"_many": len(given), "members": tuple(recorder.members), "results": tuple([r.number for r in results])}


class _Value(Operators[Any]):
    """A value of a program that is being recorded."""

    __slots__ = ("builder", "number", "spec")
    __tensor__ = None

    def __init__(self, builder: _ProgramBuilder, number: int, spec: Spec) -> None:
        self.builder, self.number, self.spec = builder, number, spec

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype


class _ProgramBuilder:
    """The builder whose values are numbered."""

    def __init__(self) -> None:
        self.members: list[FusedMember] = []
        self.count = 0

    def constant(self, array: np.ndarray[Any, Any]) -> NoReturn:
        raise InternalError(f"a program that is recorded is given its numbers, and makes none of {array!r}")

    def spec(self, value: _Value) -> Spec:
        return value.spec

    def lies_in(self, other: Any) -> bool:
        return False

    def adopt(self, value: Any) -> Any:
        return value

    def apply(self, op: Op, inputs: Sequence[_Value], attrs: Mapping[str, Attr], name: str | None) -> tuple[_Value]:
        (spec,) = op.infer([value.spec for value in inputs], attrs)
        operands = tuple([value.number for value in inputs])
        self.members.append((op.name, operands, NAMES[spec.dtype], tuple(sorted(attrs.items()))))
        self.count += 1
        return (_Value(self, self.count - 1, spec),)
