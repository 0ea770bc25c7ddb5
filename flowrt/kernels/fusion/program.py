"""Fused programs as plain data: what their values' shapes are, and how a launch sees what they take.

Values are numbered: first the inputs, then each member's result in order; see `ops.fused`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.spec import Spec, index_steps, normal_axes
from flowrt.base.traits import Arranged, reduction_of, traits_of
from flowrt.base.valueclass import valueclass
from flowrt.kernels.language.bits import on_bits
from flowrt.kernels.language.composing import express
from flowrt.kernels.language.table import Form, RegisteredKernel, View, broadcast
from flowrt.kernels.ops.shape import part

if TYPE_CHECKING:
    from flowrt.kernels.launch import LaunchStep

Member: TypeAlias = "tuple[str, tuple[int, ...], str, tuple[tuple[str, Any], ...]]"
Plain: TypeAlias = "tuple[tuple[str, tuple[int, ...], str], ...]"

Value = TypeVar("Value", bound=Hashable)

PAD, PART = "pad", "getitem"
CACHED = 1 << 22  # bytes that one launch may leave to another and stay in a cache


@valueclass
class FusedProgram:
    """``members`` on so many inputs, ``first``, the ``specs`` of all values, and the ``results`` that it answers."""

    first: int
    specs: Sequence[Spec]
    members: Sequence[Member]
    results: Sequence[int]
    reductions: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        reductions = [n for n, (op, *_) in enumerate(self.members, self.first) if is_reduction(op)]
        object.__setattr__(self, "reductions", frozenset(reductions))

    @property
    def made(self) -> range:
        """The values that members make."""
        return range(self.first, len(self.specs))

    @property
    def ops(self) -> Sequence[str]:
        """The members' ops."""
        return [op for op, *_ in self.members]

    def op(self, n: int) -> str:
        """The op that makes a value."""
        return self.members[n - self.first][0]

    def taken(self, n: int) -> tuple[int, ...]:
        """The values that a value is made of."""
        return self.members[n - self.first][1]

    def attrs(self, n: int) -> Mapping[str, Any]:
        """The attributes of the member that makes a value."""
        return dict(self.members[n - self.first][3])

    def reduces(self, n: int) -> bool:
        """Whether a value is what a reduction makes."""
        return n in self.reductions

    def kept(self, n: int, shape: Sequence[int]) -> tuple[int, ...]:
        """What of ``shape`` the reduction that makes a value leaves, with axes of size 1."""
        return kept_shape(shape, normal_axes(self.attrs(n)["axis"], len(shape)))

    @property
    def views(self) -> set[int]:
        """The values that are read where what they are made of lies; what is made of another view is none."""
        views: set[int] = set()
        for n in self.made:
            if is_view(self.op(n)) and self.taken(n)[0] not in views:
                views.add(n)
        return views

    def with_views(self, piece: Sequence[int], views: Collection[int]) -> list[int]:
        """The piece behind the views that it takes."""
        return [*sorted({n for at in piece for n in self.taken(at)}.intersection(views)), *piece]


def program_of(inputs: Sequence[Spec], members: Sequence[Member], results: Sequence[int]) -> FusedProgram:
    """The program of these members."""
    return FusedProgram(len(inputs), specs_of(inputs, members), members, results)


@valueclass
class Whole:
    """A program as one launch. The step's operands are the program's inputs and results, then totals of its units.

    ``ends`` are the operand and the value of each result that is reduced from those totals. ``local`` is the memory
    that each thread needs for itself, whose operands count down from -1. ``before`` are copies of what would cut the
    step's rows short; the scratch that they fill, of specs ``copied``, comes behind the totals.
    """

    step: LaunchStep
    ends: tuple[tuple[int, int], ...] = ()
    local: tuple[Spec, ...] = ()
    before: tuple[LaunchStep, ...] = ()
    copied: tuple[Spec, ...] = ()


def is_view(op: str) -> bool:
    """Whether members read the op's output where its input lies: a part of it, or repeated."""
    return traits_of(op).view in (Arranged.REPEATED, Arranged.PART)


def is_reduction(op: str) -> bool:
    """Whether the op makes one of many entries."""
    return reduction_of(op) is not None


def specs_of(inputs: Sequence[Spec], members: Sequence[Member]) -> list[Spec]:
    """The specs of all values of a program."""
    specs = list(inputs)
    for op, operands, dtype, attrs in members:
        traits = traits_of(op)
        if traits.view is Arranged.REPEATED:
            specs.append(Spec(dtype, specs[operands[1]].value))
        elif traits.view is Arranged.PART:
            steps = index_steps(dict(attrs)["key"], specs[operands[0]].concrete)
            specs.append(Spec(dtype, [step.count for step in steps if step.kept]))
        elif op == PAD:
            pairs = zip(dict(attrs)["paddings"], specs[operands[0]].concrete, strict=True)
            specs.append(Spec(dtype, [before + size + after for (before, after), size in pairs]))
        elif traits.reduction is not None:
            shape, axes = specs[operands[0]].concrete, normal_axes(dict(attrs)["axis"], specs[operands[0]].rank)
            left = (
                kept_shape(shape, axes)
                if dict(attrs)["keepdims"]
                else [n for i, n in enumerate(shape) if i not in axes]
            )
            specs.append(Spec(dtype, left))
        elif traits.view is Arranged.RESHAPED:
            specs.append(Spec(dtype, _other_shape(op, specs, operands, dict(attrs))))
        else:
            shapes = {specs[n].concrete for n in operands}
            specs.append(Spec(dtype, shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)))
    return specs


def _other_shape(op: str, specs: Sequence[Spec], operands: Sequence[int], attrs: Mapping[str, Any]) -> Sequence[int]:
    """The shape under which an alias answers its first operand."""
    shape = specs[operands[0]].concrete
    if op == "reshape":
        wanted = np.atleast_1d(np.asarray(specs[operands[1]].value)).tolist()
        return [math.prod(shape) // max(-math.prod(wanted), 1) if n < 0 else n for n in wanted]
    if op == "squeeze":
        axes = normal_axes(attrs["axis"], len(shape)) if attrs["axis"] is not None else range(len(shape))
        return [n for i, n in enumerate(shape) if n != 1 or i not in axes]
    if op == "expand_dims":
        axes = normal_axes(attrs["axis"], len(shape) + (len(attrs["axis"]) if isinstance(attrs["axis"], tuple) else 1))
        sizes = iter(shape)
        return [1 if i in axes else next(sizes) for i in range(len(shape) + len(axes))]
    return shape


def kept_shape(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """``shape`` where ``axes`` are of size 1."""
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def source_view(program: FusedProgram, n: int) -> View:
    """How a launch sees an input, a part of one, or one repeated."""
    specs = program.specs
    if n < program.first:
        return View.dense(specs[n].concrete)
    op, taken, shape = program.op(n), View.dense(specs[program.taken(n)[0]].concrete), specs[n].concrete
    if traits_of(op).view is Arranged.PART:
        return part(taken, program.attrs(n)["key"])
    if op == "spread":
        taken = taken.reshape(program.kept(n, shape))
    return taken.broadcast_to(shape)


def plain_members(
    made: Iterable[tuple[Value, str, Sequence[Value], str]], sources: Iterable[Value]
) -> tuple[Plain, dict[Value, int]]:
    """The members of an expression of ``sources``: of (value, op, what it takes, dtype); and each value's number."""
    number = {value: at for at, value in enumerate(sources)}
    inputs, plain = len(number), list[tuple[str, tuple[int, ...], str]]()

    def put(op: str, operands: tuple[int, ...], dtype: str) -> int:
        plain.append((op, operands, dtype))
        return inputs + len(plain) - 1

    for value, op, operands, dtype in made:
        taken = [number[each] for each in operands]
        if op == "add_n":
            total, *rest = taken
            for each in rest:
                total = put("add", (total, each), dtype)
            number[value] = total
        else:
            number[value] = put(op, tuple(taken), dtype)
    return tuple(plain), number


@lru_cache(1024)
def fused_kernel(
    inputs: tuple[str, ...],
    members: Plain,
    results: tuple[int, ...],
    device: str = "cpu",
    reductions: tuple[tuple[int, str], ...] = (),
) -> RegisteredKernel:
    """The kernel of a program on inputs of these dtypes; members are (op, operands, dtype of the result)."""
    expression = express(inputs, members, results, device, reductions)
    form = Form.ROWS if any(member.reduces_row for member in expression.members) else Form.SCALARS
    return RegisteredKernel("fused", device, on_bits(expression).function(), broadcast, form, expression=expression)
