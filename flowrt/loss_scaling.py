"""Losses scaled up before they are differentiated, and gradients down again, for floats that hold no small numbers.

A step whose gradients are not all finite moves nothing, slots and counts of steps included. Micikevicius et al., "Mixed
precision training", ICLR 2018; the scale is halved and doubled as PyTorch's GradScaler does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.plain import is_whole
from flowrt.base.tracebacks import brief
from flowrt.graph import as_node, beside, current_scope, scoped
from flowrt.op import as_value, building
from flowrt.ops.comparison import isfinite
from flowrt.ops.elementwise import astype, maximum, minimum, multiply, where
from flowrt.ops.flow import group
from flowrt.ops.reduce import all as all_
from flowrt.ops.routing import SplitGradient, dynamic_partition
from flowrt.ops.shape import stack
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import zeros_like
from flowrt.ops.state import Variable, only_if, variables_from
from flowrt.optim.optimizer import Optimizer, by_parts, is_number

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor

__all__ = ["LossScaled"]

LEAST, MOST = 2.0**-14, 2.0**24  # of what a scale comes to


class LossScaled(Optimizer):
    """``optimizer`` on a loss that is multiplied by ``scale``, its gradients divided by that again.

    After ``grow_every`` steps in a row whose gradients were finite the scale is doubled; after one that had others,
    which moves nothing, it is halved. It is a variable, ``variable``, and so is kept in checkpoints. With
    ``grow_every=None`` it stays as it is, and steps of gradients that are not finite are left out all the same.

    Of `flowrt.train.Replicated` all replicas take the scale that a server keeps. A version one of whose updates is not
    finite moves nothing on any server and halves the scale; its report says that it was ``skipped``. With
    ``grow_every=None`` such an update is ``refused`` alone, and others make the version.

    Raises `GraphError` for a scale that is not a power of two from 2**-14 to 2**24: others would round gradients.
    """

    def __init__(self, optimizer: Optimizer, scale: float = 2.0**15, *, grow_every: int | None = 2000) -> None:
        if not isinstance(optimizer, Optimizer):
            raise GraphError(f"{user_site()}: a loss is scaled for an optimiser, not {optimizer!r:.80}")
        super().__init__(optimizer.lr)
        if not is_number(scale) or not LEAST <= scale <= MOST or np.frexp(scale)[0] != 0.5:
            got = f"{scale!r:.80}"
            raise GraphError(f"{user_site()}: a loss is scaled by a power of two from 2**-14 to 2**24, not {got}")
        if grow_every is not None and not is_whole(grow_every, 1):
            raise GraphError(f"{user_site()}: grow_every is a number of steps, or None, not {grow_every!r}")
        self.optimizer, self.scale = optimizer, float(scale)
        self.grow_every = None if grow_every is None else int(grow_every)
        self.variable: Variable | None = None  # once there is a loss

    @brief
    def compute_gradients(self, loss: Any, variables: Sequence[Variable] | None = None) -> list[tuple[Any, Variable]]:
        """(gradient, variable) for each variable, as `Optimizer.compute_gradients`: of the loss as it is."""
        tensor: Tensor = as_value(loss)
        if not hasattr(tensor, "graph"):
            raise GraphError(f"{user_site()}: the loss to minimize is a tensor of a graph, not {loss!r}")
        with building(tensor.graph), beside(tensor.op):
            if self.grow_every is not None and self.variable is None:
                self.variable = Variable(np.float32(self.scale), name="loss_scale", trainable=False)
            scale = self.scale if self.variable is None else as_value(self.variable)
            scaled = multiply(tensor, scale)
        found = self.optimizer.compute_gradients(scaled, variables)
        with building(tensor.graph):
            return [(_divided(gradient, scale), variable) for gradient, variable in found]

    @brief
    def apply_gradients(self, pairs: Iterable[tuple[Any, Variable]], *, name: str | None = None) -> Node:
        """The operation that moves each variable, if all gradients are finite, and sees to the scale."""
        moves = by_parts(pairs)
        if not moves:
            raise GraphError(f"{user_site()}: there are no gradients to apply")
        with building(moves[0][1].graph):
            finite = all_(stack([all_(isfinite(_values(gradient))) for gradient, _ in moves]))
        if self.variable is None or self.grow_every is None:
            return self.move_if(finite, moves, name=name)
        moved = self.move_if(finite, moves)
        with building(self.variable.graph):
            made: Node = group(moved, *self.adapt(finite), name=name)
        return made

    def move_if(self, finite: Tensor, pairs: Iterable[tuple[Any, Variable]], *, name: str | None = None) -> Node:
        """The operation that moves each variable, by gradients that are all ``finite`` if that scalar says so."""
        with only_if(finite):
            return self.optimizer.apply_gradients([(_if(finite, g), variable) for g, variable in pairs], name=name)

    def adapt(self, finite: Tensor) -> list[Node]:
        """The writes of the scale, and of how many steps have gone well since it was changed."""
        assert self.variable is not None
        assert self.grow_every is not None
        with beside(as_node(self.variable)):
            return self._adapt(self.variable, finite, self.grow_every)

    def _adapt(self, scale: Variable, finite: Tensor, grow_every: int) -> list[Node]:
        with variables_from(None), scoped(replace(current_scope(), prefix="", container=scale.resource.container)):
            well = Variable(np.int32(0), name=f"{scale.name}/steps", trainable=False)
        now = well + 1
        grows = now >= grow_every
        grown = where(grows, minimum(scale * 2.0, MOST), scale)
        return [
            scale.assign(where(finite, grown, maximum(scale * 0.5, LEAST))),
            well.assign(where(finite, where(grows, 0, now), 0)),
        ]

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        return self.optimizer._move(variable, gradient)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _if(finite: Tensor, gradient: Any) -> Any:
    """A gradient; of slices none, where not all are finite, as rows are moved only by what is there."""
    if not isinstance(gradient, IndexedSlices):
        return gradient
    with building(finite.graph):
        whose = zeros_like(gradient.indices, "int32") + astype(finite, "int32")
        values, indices = (dynamic_partition(part, whose, 2)[1] for part in (gradient.values, gradient.indices))
        return replace(gradient, values=values, indices=indices)


def _divided(gradient: Any, scale: Any) -> Any:
    """A gradient without the scale, which is a power of two: what it is divided by rounds nothing."""
    if gradient is None:
        return None
    if isinstance(gradient, SplitGradient):
        return SplitGradient(gradient.partition, [_divided(part, scale) for part in gradient.parts])
    if isinstance(gradient, IndexedSlices):
        return replace(gradient, values=_divided(gradient.values, scale))
    inverse = 1.0 / scale
    divided = multiply(gradient, inverse)
    return divided if divided.dtype == gradient.dtype else astype(divided, gradient.dtype)  # of 16 bits
