"""What a parameter server makes of updates, as tensors: whether one may count, and the mean over those that do.

Law: tensors alone; when they are computed is the servers' business. An update is one replica's gradients. That of a
table of which only rows are taken is an `IndexedSlices`, and stays one: it travels as two *parts*, its indices and its
values; any other gradient is one part. Check and mean are compiled like all else, the mean together with the
optimiser's arithmetic, so that a server reads updates and variables once each to apply them, on all its cores.

The additions of a mean are those of the replicas in their order, whoever's update came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

from flowrt.graph import control_dependencies
from flowrt.ops.comparison import isfinite
from flowrt.ops.elementwise import add_n, divide
from flowrt.ops.reduce import all as all_
from flowrt.ops.rows import repeated, unrepeated
from flowrt.ops.shape import concat, stack
from flowrt.ops.slices import IndexedSlices, group_rows
from flowrt.ops.source import constant, placeholder, shape_of

if TYPE_CHECKING:
    from flowrt.graph import Tensor
    from flowrt.ops.state import Variable

Gradient: TypeAlias = "Tensor | IndexedSlices"


def parts_of(gradients: Iterable[Gradient]) -> list[Tensor]:
    """The tensors that gradients travel as: each itself, or its indices, then its values.

    Neighbouring indices whose values are copies of one, as those of a bag of rows, share it.
    """
    return [part for gradient in gradients for part in _parts(gradient)]


def of_rows(gradients: Iterable[Gradient]) -> list[bool]:
    """Of each part that gradients travel as, whether it is the indices or the values of rows."""
    return [isinstance(gradient, IndexedSlices) for gradient in gradients for _ in _parts(gradient)]


def _parts(gradient: Gradient) -> tuple[Tensor, ...]:
    return (gradient.indices, _once(gradient)[0]) if isinstance(gradient, IndexedSlices) else (gradient,)


def _once(slices: IndexedSlices) -> tuple[Tensor, int]:
    """The values without copies, and how many indices in a row each is for."""
    values, times = unrepeated(slices.values)
    return (slices.values, 1) if times is None else (values, times)


def fed_like(gradients: Sequence[Gradient], *, any_rows: bool = False) -> list[Gradient]:
    """Gradients of the same kinds and specs whose parts are placeholders, to be fed in the order of `parts_of`.

    With ``any_rows`` there may be any number of rows, as there are in what is made of several updates.
    """
    return [_fed_like(gradient, any_rows) for gradient in gradients]


def _fed_like(gradient: Gradient, any_rows: bool) -> Gradient:
    if not isinstance(gradient, IndexedSlices):
        return cast("Tensor", placeholder(gradient.dtype, gradient.spec.dims, name="part"))
    parts: list[Tensor] = [
        placeholder(
            part.dtype, (None, *part.spec.dims[1:]) if any_rows and part.spec.dims else part.spec.dims, name="part"
        )
        for part in _parts(gradient)
    ]
    return replace(gradient, values=repeated(parts[1], _once(gradient)[1]), indices=parts[0])


def all_finite(update: Iterable[tuple[Gradient, Variable]]) -> Tensor:
    """Whether all numbers of an update's (gradient, variable) pairs are finite (a bool scalar).

    A row that the variable does not have fails the step, before any server moves anything by it.
    """
    seen, found = [], [constant(True)]
    for gradient, variable in update:
        if isinstance(gradient, IndexedSlices):
            count, name = shape_of(gradient.indices)[0], f"rows_of/{variable.name}"
            seen.append(group_rows(gradient.indices, count, gradient.shape[0], gradient.absent, name=name))
        found.append(all_(isfinite(_parts(gradient)[-1])))
    with control_dependencies(seen):
        return cast("Tensor", all_(stack(found)))


def mean_of(gradients: Sequence[Gradient]) -> Gradient:
    """The mean of several replicas' gradients of one variable, added up in this order.

    Of slices it is all their rows, one replica's after another's, each divided by the number of replicas: what applies
    them adds up the values of equal rows.
    """
    slices = [gradient for gradient in gradients if isinstance(gradient, IndexedSlices)]
    if len(slices) == len(gradients):
        values, times = zip(*map(_once, slices), strict=True)
        mean = repeated(_over(concat(values), len(values)), times[0])
        return replace(slices[0], values=mean, indices=concat([each.indices for each in slices]))
    return _over(add_n(list(gradients)), len(gradients))


def _over(total: Tensor, count: int) -> Tensor:
    return cast("Tensor", divide(total, count)) if count > 1 else total
