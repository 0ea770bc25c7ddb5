"""Optimisers, built of nothing but variables and primitive maths.

An optimiser is a recipe: it holds its settings and no state. What must be remembered between steps (a momentum) is a
variable beside the one it belongs to, so it is placed, checkpointed and restored like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.errors import GraphError, user_site
from flowrt.gradients import gradients
from flowrt.graph import as_node, beside, current_scope, scoped
from flowrt.op import as_value, building
from flowrt.ops.elementwise import add_n, astype, divide, maximum, multiply, sqrt, square
from flowrt.ops.flow import group
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.source import zeros
from flowrt.ops.state import Variable, variables_from

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor

__all__ = ["SGD", "Momentum", "Optimizer", "clip_by_global_norm"]


class Optimizer(ABC):
    """How variables follow their gradients.

    ``lr``, the learning rate, is a number or a scalar tensor (a schedule computed in the graph).
    """

    def __init__(self, lr: Any) -> None:
        self.lr = lr

    def minimize(self, loss: Any, variables: Sequence[Variable] | None = None, *, name: str | None = None) -> Node:
        """The operation of one training step: ``loss`` goes down along ``variables``, by default all trainable ones."""
        return self.apply_gradients(self.compute_gradients(loss, variables), name=name)

    def compute_gradients(self, loss: Any, variables: Sequence[Variable] | None = None) -> list[tuple[Any, Variable]]:
        """(gradient, variable) for each variable; the gradient is None where ``loss`` does not depend on it.

        Raises `GraphError` where it depends on none of them.
        """
        tensor = as_value(loss)
        among = [v for v in tensor.graph.variables if v.trainable] if variables is None else list(variables)
        if not among:
            raise GraphError(f"{user_site()}: there is no trainable variable; create one, or name some by variables=")
        found = gradients(tensor, among)
        if all(gradient is None for gradient in found):
            names = ", ".join(repr(v.name) for v in among)
            raise GraphError(f"{user_site()}: {tensor!r} does not depend on {names}, so there is nothing to minimize")
        return list(zip(found, among, strict=True))

    def apply_gradients(self, pairs: Iterable[tuple[Any, Variable]], *, name: str | None = None) -> Node:
        """The operation that moves each variable of the (gradient, variable) ``pairs``; gradients of None move nothing.

        The updates are computed where the variables are.
        """
        moves = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not moves:
            raise GraphError(f"{user_site()}: there are no gradients to apply")
        done: list[Node] = []
        for gradient, variable in moves:
            with building(variable.graph), beside(as_node(variable)):
                done += self._move(variable, as_value(gradient))
        with building(moves[0][1].graph), beside(as_node(moves[0][1])):
            made: Node = group(*done, name=name or "apply_gradients")
        return made

    @abstractmethod
    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        """The writes of one variable's update."""

    def _rate(self, variable: Variable) -> Any:
        """The learning rate in the variable's dtype."""
        rate = as_value(self.lr)
        return astype(rate, variable.dtype) if hasattr(rate, "builder") else rate


class SGD(Optimizer):
    """Gradient descent: p -= lr * g."""

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        return [variable.assign_sub(multiply(gradient, self._rate(variable)))]


class Momentum(Optimizer):
    """Gradient descent with momentum: v = momentum * v + g; p -= lr * v, or with ``nesterov`` lr * (g + momentum * v).

    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    """

    def __init__(self, lr: Any, momentum: float, nesterov: bool = False) -> None:
        super().__init__(lr)
        self.momentum = momentum
        self.nesterov = nesterov

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        velocity = _slot(variable, "momentum")
        grown = velocity * self.momentum + gradient
        step = gradient + grown * self.momentum if self.nesterov else grown
        return [velocity.assign(grown), variable.assign_sub(multiply(step, self._rate(variable)))]


def _slot(variable: Variable, name: str) -> Variable:
    """A variable of zeros that an optimiser keeps beside ``variable``, named after it whatever scope this is."""
    scope = replace(current_scope(), prefix="", container=variable.resource.container)
    with variables_from(None), scoped(scope):
        return Variable(zeros(variable.shape, variable.dtype), name=f"{variable.name}/{name}", trainable=False)


def clip_by_global_norm(grads: Sequence[Any], norm: float) -> tuple[list[Any], Tensor]:
    """``grads`` scaled down together so that their global norm is at most ``norm``, and the norm they had.

    The global norm is the root of the sum of all squares. Gradients of None stay None. Pascanu et al., "On the
    difficulty of training recurrent neural networks", ICML 2013.
    """
    present = [as_value(g) for g in grads if g is not None]
    if not present:
        raise GraphError(f"{user_site()}: there are no gradients to clip")
    total: Tensor = sqrt(add_n([sum_(square(g)) for g in present]))
    scale = divide(norm, maximum(total, norm))
    return [None if g is None else multiply(g, scale) for g in grads], total
