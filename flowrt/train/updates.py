"""What a parameter server makes of updates, as tensors: whether one may count, and the mean over those that do.

Law: tensors alone; when they are computed is the servers' business. An update is one replica's gradients. That of a
table of which only rows are taken is an `IndexedSlices`, and stays one: it travels as two *parts*, its indices and its
values; any other gradient is one part. Check and mean are compiled like all else, the mean together with the
optimiser's arithmetic, so that a server reads updates and variables once each to apply them, on all its cores.

The additions of a mean are those of the replicas in their order, whoever's update came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from flowrt.graph import control_dependencies
from flowrt.ops.elementwise import add_n, divide, isfinite
from flowrt.ops.reduce import all as all_
from flowrt.ops.shape import stack
from flowrt.ops.slices import IndexedSlices, group_rows, sum_slices
from flowrt.ops.source import constant, placeholder, shape_of

if TYPE_CHECKING:
    from flowrt.graph import Tensor
    from flowrt.ops.state import Variable

Gradient: TypeAlias = "Tensor | IndexedSlices"


def parts_of(gradients: Iterable[Gradient]) -> list[Tensor]:
    """The tensors that gradients travel as: each itself, or its indices, then its values."""
    return [part for gradient in gradients for part in _parts(gradient)]


def _parts(gradient: Gradient) -> tuple[Tensor, ...]:
    return (gradient.indices, gradient.values) if isinstance(gradient, IndexedSlices) else (gradient,)


def fed_like(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Gradients of the same kinds and specs whose parts are placeholders, to be fed in the order of `parts_of`."""
    return [_fed_like(gradient) for gradient in gradients]


def _fed_like(gradient: Gradient) -> Gradient:
    parts = [placeholder(part.dtype, part.spec.dims, name="part") for part in _parts(gradient)]
    return IndexedSlices(parts[1], parts[0], gradient.shape) if isinstance(gradient, IndexedSlices) else parts[0]


def all_finite(update: Iterable[tuple[Gradient, Variable]]) -> Tensor:
    """Whether all numbers of an update's (gradient, variable) pairs are finite (a bool scalar).

    A row that the variable does not have fails the step, before any server moves anything by it.
    """
    seen, found = [], [constant(True)]
    for gradient, variable in update:
        if isinstance(gradient, IndexedSlices):
            count = shape_of(gradient.values)[0]
            seen.append(group_rows(gradient.indices, count, gradient.shape[0], name=f"rows_of/{variable.name}"))
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
        total = sum_slices(slices)
        return IndexedSlices(_over(total.values, len(slices)), total.indices, total.shape)
    return _over(add_n(list(gradients)), len(gradients))


def _over(total: Tensor, count: int) -> Tensor:
    return cast("Tensor", divide(total, count)) if count > 1 else total
