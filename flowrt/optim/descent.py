"""Optimisers that move each entry of a variable by what its own gradients were.

A gradient that is an `IndexedSlices` moves the rows that occur, once each by the sum of their slices, and leaves every
other row as it is, slots included: no momentum carries it on, no mean and no weight decays. For SGD and AdaGrad that is
what the dense gradient does; for the others it is what PyTorch's SparseAdam and TensorFlow's sparse momentum do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError, user_site
from flowrt.base.plain import is_number
from flowrt.base.spec import computed
from flowrt.ops.elementwise import astype, divide, expm1, multiply, negative, sqrt
from flowrt.ops.fused import in_one
from flowrt.ops.moves import (
    adagrad_move,
    adam_move,
    adamw_move,
    momentum_move,
    nesterov_move,
    rmsprop_momentum_move,
    rmsprop_move,
)
from flowrt.ops.rows import adagrad_rows, adam_rows, add_rows, momentum_rows, rmsprop_rows
from flowrt.ops.state import of_dtype
from flowrt.optim.optimizer import Optimizer, checked_number, in_common, moved_by, number, slot

if TYPE_CHECKING:
    from flowrt.graph import Node
    from flowrt.ops.slices import IndexedSlices
    from flowrt.ops.state import Variable


class SGD(Optimizer):
    """Gradient descent: p -= lr * g."""

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        return [variable.move_rows(add_rows, slices, [negative(self._rate(variable))])]

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        return [moved_by(variable, multiply(gradient, self._rate(variable)))]


class Momentum(Optimizer):
    """Gradient descent with momentum: v = momentum * v + g; p -= lr * v, or with ``nesterov`` lr * (g + momentum * v).

    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    """

    def __init__(self, lr: Any, momentum: float, nesterov: bool = False) -> None:
        super().__init__(lr)
        self.momentum = checked_number("momentum", momentum)
        self.nesterov = nesterov

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        velocity, numbers = slot(variable, "momentum"), [number(variable, self.momentum), self._rate(variable)]
        move = nesterov_move if self.nesterov else momentum_move
        grown, step = in_one(move, [velocity, gradient], numbers)
        return [velocity.assign(grown), moved_by(variable, step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        velocity = slot(variable, "momentum")
        along, ahead = (self.momentum, 1) if self.nesterov else (1, 0)
        settings = [self._rate(variable), self.momentum, along, ahead]
        return [variable.move_rows(momentum_rows, slices, settings, [velocity])]


class AdaGrad(Optimizer):
    """Rates that fall as squares add up: a = a + g²; p -= lr * g / (sqrt(a) + epsilon).

    a starts from ``initial_accumulator_value``. Duchi et al., "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 2011.
    """

    def __init__(self, lr: Any, initial_accumulator_value: float = 0.1, epsilon: float = 1e-7) -> None:
        super().__init__(lr)
        self.initial_accumulator_value = checked_number("initial_accumulator_value", initial_accumulator_value)
        self.epsilon = checked_number("epsilon", epsilon)

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        accumulator = slot(variable, "accumulator", self.initial_accumulator_value)
        numbers = [number(variable, self.epsilon), self._rate(variable)]
        grown, step = in_one(adagrad_move, [accumulator, gradient], numbers)
        return [accumulator.assign(grown), moved_by(variable, step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        accumulator = slot(variable, "accumulator", self.initial_accumulator_value)
        return [variable.move_rows(adagrad_rows, slices, [self._rate(variable), self.epsilon], [accumulator])]


class RMSProp(Optimizer):
    """Gradients over the root of their mean square: s = decay * s + (1 - decay) * g²; p -= v, where
    v = momentum * v + lr * g / (sqrt(s) + epsilon).

    Of an `IndexedSlices` only the rows that occur are moved and their slots decay; ``fr.identity(gradient)`` moves all.

    Tieleman and Hinton, "Lecture 6.5, RMSProp", Neural Networks for Machine Learning, 2012.
    """

    def __init__(self, lr: Any, decay: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-7) -> None:
        super().__init__(lr)
        self.decay = checked_number("decay", decay)
        self.momentum = checked_number("momentum", momentum)
        self.epsilon = checked_number("epsilon", epsilon)

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        mean_square = slot(variable, "mean_square")
        settings = [number(variable, n) for n in (self.decay, 1 - self.decay, self.epsilon)]
        settings.append(self._rate(variable))
        if not self.momentum:
            squares, step = in_one(rmsprop_move, [mean_square, gradient], settings)
            return [mean_square.assign(squares), moved_by(variable, step)]
        velocity = slot(variable, "momentum")
        settings.append(number(variable, self.momentum))
        squares, step = in_one(rmsprop_momentum_move, [mean_square, gradient, velocity], settings)
        return [mean_square.assign(squares), velocity.assign(step), moved_by(variable, step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        slots = [slot(variable, "mean_square"), slot(variable, "momentum")]
        settings = [self._rate(variable), self.decay, 1 - self.decay, self.epsilon, self.momentum]
        return [variable.move_rows(rmsprop_rows, slices, settings, slots)]


class Adam(Optimizer):
    """Adaptive moments: m = beta1 * m + (1 - beta1) * g; s = beta2 * s + (1 - beta2) * g²; at the t-th step
    p -= lr * (m / (1 - beta1^t)) / (sqrt(s / (1 - beta2^t)) + epsilon).

    Of an `IndexedSlices` only the rows that occur are moved and their moments decay, as in PyTorch's SparseAdam;
    ``fr.identity(gradient)`` moves all.

    Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
    """

    def __init__(self, lr: Any, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> None:
        super().__init__(lr)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not is_number(beta) or beta >= 1:
                raise GraphError(f"{user_site()}: {name} must be from 0 up to 1, which is left out, got {beta}")
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = checked_number("epsilon", epsilon)

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        first, second = slot(variable, "first_moment"), slot(variable, "second_moment")
        corrections = self._corrections(variable)
        weights = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        numbers = [*(number(variable, weight) for weight in weights), *corrections, self._rate(variable)]
        mean, squares, step = self._moved(variable, [first, second, gradient], numbers)
        return [first.assign(mean), second.assign(squares), moved_by(variable, step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        first, second = slot(variable, "first_moment"), slot(variable, "second_moment")
        scale, floor = self._corrections(variable)
        rate = self._rate(variable)
        beta1, beta2 = self.beta1, self.beta2
        settings = [multiply(scale, rate), beta1, 1 - beta1, beta2, 1 - beta2, floor, self._decay_of_rows(rate)]
        return [variable.move_rows(adam_rows, slices, settings, [first, second])]

    def _corrections(self, variable: Variable) -> tuple[Any, Any]:
        """``sqrt(1 - beta2^t) / (1 - beta1^t)``, and ``sqrt(1 - beta2^t) * epsilon``.

        With these scalars, one pair for all variables of a place, the formula has one root and one quotient per entry.
        """
        common, dtype = in_common.get(), computed(variable.dtype)

        def correct() -> tuple[Any, Any]:
            time = astype(common.count(variable), dtype)
            root = sqrt(_weight(self.beta2, time))
            return divide(root, _weight(self.beta1, time)), root * self.epsilon

        return common.once(variable, ("corrections", dtype), correct)

    def _decay_of_rows(self, rate: Any) -> Any:
        """What share of itself a row loses whenever it moves."""
        return 0

    def _moved(self, variable: Variable, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        """The moments that come next, and the step."""
        return in_one(adam_move, tensors, numbers)


class AdamW(Adam):
    """`Adam` with decay of the weights apart from their gradients: p -= lr * (Adam's step + weight_decay * p).

    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """

    def __init__(
        self, lr: Any, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, weight_decay: float = 0.01
    ) -> None:
        super().__init__(lr, beta1, beta2, epsilon)
        self.weight_decay = checked_number("weight_decay", weight_decay)

    def _moved(self, variable: Variable, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        held = of_dtype(variable, computed(variable.dtype), cast=True)
        return in_one(adamw_move, [*tensors, held], [*numbers, number(variable, self.weight_decay)])

    def _decay_of_rows(self, rate: Any) -> Any:
        return multiply(rate, self.weight_decay)


def _weight(beta: float, time: Any) -> Any:
    """``1 - beta^time``, what a mean that decays by ``beta`` has counted; exact where ``beta`` is close to 1."""
    return negative(expm1(multiply(time, math.log(beta) if beta else -math.inf)))
