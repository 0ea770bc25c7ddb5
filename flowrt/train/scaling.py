"""Replicas whose loss is scaled by one number, which a server keeps: `flowrt.LossScaled` in replicated training.

Law: tensors alone. The scale is a variable of the model, told to replicas with each version. An update says beside its
gradients, to every server, whether all of them are finite: by 0, or by NaN, which stays NaN in a mean however updates
are weighted. So all servers, which make a version of the same updates, move by it or do not, with no word between them;
and the one that keeps the scale changes it. Such updates count and their batches are spent: the version moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.graph import device
from flowrt.loss_scaling import LossScaled
from flowrt.ops.comparison import isfinite
from flowrt.ops.elementwise import astype, where
from flowrt.ops.state import Variable, variables_from
from flowrt.optim.optimizer import by_parts, mirror
from flowrt.train.updates import Gradient, all_finite

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.optim.optimizer import Optimizer

Pairs = Sequence[tuple[Gradient, Variable]]


class SharedScale:
    """The scale of a trainer's losses: how towers use it, and what servers do about updates that are not finite."""

    def __init__(self, optimizer: LossScaled) -> None:
        self._optimizer = optimizer
        self.counts: list[Variable] = []  # by server, the versions that moved nothing

    @property
    def name(self) -> str:
        """The scale's, once there is one."""
        assert self._optimizer.variable is not None
        return self._optimizer.variable.name

    def variable(self) -> Variable:
        """The scale, as the copy of the model that is being built has it."""
        made = Variable(np.float32(self._optimizer.scale), name="loss_scale", trainable=False)
        self._optimizer.variable = made
        return made

    def add_servers(self, devices: Sequence[str]) -> None:
        """Make what servers on these devices count by."""
        for number, place in enumerate(devices):
            with variables_from(None), device(place):
                name = f"skipped_{number}" if number else "skipped"
                self.counts.append(Variable(np.zeros((), np.int64), name=name, trainable=False))
        mirror(self.counts, self.counts[0].name)

    def gradients(self, loss: Tensor, variables: Sequence[Variable]) -> list[tuple[Any, Variable]]:
        """A tower's gradients of its loss as it is, then for each server whether all are finite."""
        pairs = by_parts(self._optimizer.compute_gradients(loss, variables))
        told = where(all_finite(pairs), np.float32(0), np.float32(math.nan))
        return [*pairs, *((told, count) for count in self.counts)]

    def skips(self, pairs: Pairs) -> Tensor:
        """Whether a tower's update has its version move nothing: 1 or 0."""
        made: Tensor = where(isfinite(pairs[-1][0]), np.float32(0), np.float32(1))
        return made

    def moves(self, means: Pairs, keeps: bool) -> list[Node]:
        """What a server does about the mean of its pairs, as it is finite or not; one ``keeps`` the scale."""
        *pairs, (told, count) = means
        finite = isfinite(told)
        moved = [self._optimizer.move_if(finite, pairs)] if pairs else []
        skipped = count.assign(count + astype(where(finite, 0, 1), np.int64))
        return [*moved, skipped, *(self._optimizer.adapt(finite) if keeps else ())]


def scale_of(optimizer: Optimizer) -> SharedScale | None:
    """The scale that replicas share; None where it stays as it is, or there is none."""
    return SharedScale(optimizer) if isinstance(optimizer, LossScaled) and optimizer.grow_every is not None else None
