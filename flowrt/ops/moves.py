"""What optimisers move a variable by, entry by entry, given its gradient: what they keep beside it, then the step.

Each is recorded once, for `flowrt.ops.fused.in_one`; the formulas, with their papers, stand at the optimisers. What is
moved by rows stands in `flowrt.ops.rows`.
"""

from __future__ import annotations

from typing import Any

from flowrt.ops.elementwise import divide, sqrt, square


def momentum_move(velocity: Any, gradient: Any, momentum: Any, rate: Any) -> tuple[Any, ...]:
    grown = velocity * momentum + gradient
    return grown, grown * rate


def nesterov_move(velocity: Any, gradient: Any, momentum: Any, rate: Any) -> tuple[Any, ...]:
    grown = velocity * momentum + gradient
    return grown, (gradient + grown * momentum) * rate


def adagrad_move(accumulator: Any, gradient: Any, epsilon: Any, rate: Any) -> tuple[Any, ...]:
    grown = accumulator + square(gradient)
    return grown, divide(gradient, sqrt(grown) + epsilon) * rate


def rmsprop_move(mean_square: Any, gradient: Any, decay: Any, weight: Any, epsilon: Any, rate: Any) -> tuple[Any, ...]:
    squares = mean_square * decay + square(gradient) * weight
    return squares, divide(gradient, sqrt(squares) + epsilon) * rate


def rmsprop_momentum_move(mean_square: Any, gradient: Any, velocity: Any, *settings: Any) -> tuple[Any, ...]:
    *numbers, momentum = settings
    squares, step = rmsprop_move(mean_square, gradient, *numbers)
    return squares, velocity * momentum + step


def _moments(
    first: Any, second: Any, gradient: Any, beta1: Any, weight1: Any, beta2: Any, weight2: Any, scale: Any, floor: Any
) -> tuple[Any, ...]:
    """The moments that come next, and the direction that they point in."""
    mean = first * beta1 + gradient * weight1
    squares = second * beta2 + square(gradient) * weight2
    return mean, squares, divide(mean * scale, sqrt(squares) + floor)


def adam_move(first: Any, second: Any, gradient: Any, *settings: Any) -> tuple[Any, ...]:
    *numbers, rate = settings
    mean, squares, direction = _moments(first, second, gradient, *numbers)
    return mean, squares, direction * rate


def adamw_move(first: Any, second: Any, gradient: Any, variable: Any, *settings: Any) -> tuple[Any, ...]:
    *numbers, rate, decay = settings
    mean, squares, direction = _moments(first, second, gradient, *numbers)
    return mean, squares, (direction + variable * decay) * rate
