"""L-BFGS: steps by what the last changes of the gradient tell of the loss's curvature.

Follows Nocedal and Wright, "Numerical Optimization", 2nd edition: the direction by algorithm 7.4, the two-loop
recursion; how far to go by algorithms 3.5 and 3.6, in one loop. That computes the loss anew at each distance it tries,
as a function of the distance, whose gradient is the slope there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import common_dtype, is_whole
from flowrt.base.spec import epsilon
from flowrt.gradients import gradients
from flowrt.graph import as_node, beside
from flowrt.op import as_value, building
from flowrt.ops.body import built_of
from flowrt.ops.comparison import isfinite
from flowrt.ops.elementwise import abs as abs_
from flowrt.ops.elementwise import add_n, astype, clip, maximum, minimum, negative, sign, sqrt, where
from flowrt.ops.loops import scan, while_loop
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.shape import concat, expand_dims
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import constant, zeros_like
from flowrt.optim.optimizer import Optimizer, in_common, slot

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.ops.state import Variable

Vector: TypeAlias = "Sequence[Any]"  # what there is for each variable: together, a point or a direction
Place: TypeAlias = "tuple[Any, Any, Any]"  # on a line: how far along it, the loss there, and its slope

DECREASE, FLATTENING = 1e-4, 0.9  # c1 and c2 of the Wolfe conditions
ROUNDINGS = 8  # by which a loss may be too high: close to the minimum its slope tells more (Hager and Zhang, 2005)
MARGIN = 0.1  # of an interval: what is tried lies no closer to its ends
NEAR, FAR = 1.1, 4.0  # times as far again, where the end of the interval is not known: as Moré and Thuente (TOMS 1994)


class LBFGS(Optimizer):
    """L-BFGS: p -= t H g, where H is what the last ``history`` changes of the gradient g tell of the inverse Hessian.

    ``minimize`` goes so far that the strong Wolfe conditions hold: it computes the loss at up to ``evaluations`` values
    of t, from ``lr`` on, and takes the best; where none is lower, nothing moves. So the loss has to be the same at all
    steps, as that of all data is; what it draws at random is drawn once a step. ``apply_gradients``, which knows no
    loss, takes t = ``lr``. The first step, which has no history, goes along a gradient no longer than 1.

    A variable whose gradient is an `IndexedSlices` is a `GraphError`. Nocedal and Wright, "Numerical Optimization", 2nd
    edition, algorithms 3.5, 3.6 and 7.4.
    """

    def __init__(self, lr: Any = 1.0, history: int = 10, evaluations: int = 20) -> None:
        super().__init__(lr)
        for name, value in (("history", history), ("evaluations", evaluations)):
            if not is_whole(value, 1) or value >= 1 << 31:
                raise GraphError(f"{user_site()}: {name} is a whole number from 1 up, not {value!r:.80}")
        self.history, self.evaluations = int(history), int(evaluations)

    @fitting
    def minimize(self, loss: Any, variables: Sequence[Variable] | None = None, *, name: str | None = None) -> Node:
        """The operation of one step; it computes ``loss``, which has no effects, at other values of ``variables`` too.

        Whatever else ``loss`` is made of, as what is fed, stays as it is.
        """
        pairs = self.compute_gradients(loss, variables)
        tensor: Tensor = as_value(loss)
        with building(tensor.graph):
            total = sum_(tensor)  # which is what gradients are of
        return self._apply(pairs, name, partial(self._moves, loss=total))

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        return self._moves([(gradient, variable)])

    def _moves(self, pairs: Sequence[tuple[Any, Variable]], loss: Tensor | None = None) -> list[Node]:
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                name = variable.name
                raise GraphError(
                    f"{user_site()}: LBFGS moves all of {name!r}, and its gradient is that of some rows, an "
                    "IndexedSlices; take them from fr.identity(...) of it, or move it by fr.optim.Adam"
                )
        first = pairs[0][1]
        with building(first.graph), beside(as_node(first)):
            return _Update(self, [v for _, v in pairs], [as_value(g) for g, _ in pairs]).writes(loss)


class _Update:
    """One step of some variables. Numbers are of a ``dtype`` that holds all that theirs do, and float32 at least."""

    def __init__(self, optimizer: LBFGS, variables: Sequence[Variable], slopes: Vector) -> None:
        self.variables, self.slopes = variables, slopes
        self.points = [as_value(variable) for variable in variables]
        self.dtype = common_dtype([np.dtype(np.float32), *(variable.dtype for variable in variables)])
        self.evaluations = optimizer.evaluations
        self.rate = astype(optimizer._rate(variables[0]), self.dtype)
        rows = optimizer.history
        self.last_points, self.last_slopes = (
            [slot(v, name, dtype=v.dtype) for v in variables] for name in ("point", "slope")
        )
        self.moves, self.changes = (
            [slot(v, name, shape=(rows, *v.shape), dtype=v.dtype) for v in variables] for name in ("moves", "changes")
        )
        self.curvatures = slot(variables[0], "curvatures", shape=(rows,), dtype=self.dtype)  # 0 where there is none yet

    def writes(self, loss: Tensor | None) -> list[Node]:
        moves, changes, curvatures = self._remembered()
        direction = self._direction(moves, changes, curvatures)
        slope = self._product(self.slopes, direction)
        length = self.rate * where(curvatures[-1] > 0, 1.0, minimum(1.0, 1.0 / sqrt(negative(slope))))
        if loss is not None:
            start = constant(np.zeros((), self.dtype)), astype(loss, self.dtype), slope
            length = _distance(partial(self._along, loss, direction), start, length, self.evaluations)
        goes = length > 0  # no direction, then, has entries that are no numbers
        move = [where(goes, entry, zeros_like(entry)) for entry in self._scaled(length, direction)]
        kept = [*self.last_points, *self.last_slopes, *self.moves, *self.changes, self.curvatures]
        values = [*self.points, *self.slopes, *moves, *changes, curvatures]
        moved = [variable.assign_add(entry) for variable, entry in zip(self.variables, move, strict=True)]
        return moved + [variable.assign(value) for variable, value in zip(kept, values, strict=True)]

    def _remembered(self) -> tuple[Vector, Vector, Any]:
        """The history, newest last: moves, what they changed of the gradient, and the products of both.

        The last move counts if the loss curves upwards along it, beyond what rounding makes of it.
        """
        move, change = _difference(self.points, self.last_points), _difference(self.slopes, self.last_slopes)
        curvature = self._product(move, change)
        lengths = sqrt(self._product(move, move)) * sqrt(self._product(change, change))
        counts = (in_common.get().count(self.variables[0]) > 1) & (curvature > epsilon(self.dtype) * lengths)

        def appended(rows: Any, row: Any) -> Any:
            return where(counts, concat([rows[1:], expand_dims(row, 0)], 0), rows)

        moves, changes = (
            [appended(rows, row) for rows, row in zip(kept, new, strict=True)]
            for kept, new in ((self.moves, move), (self.changes, change))
        )
        return moves, changes, appended(self.curvatures, curvature)

    def _direction(self, moves: Vector, changes: Vector, curvatures: Any) -> Vector:
        """The inverse Hessian times the negative gradient: algorithm 7.4. Rows of no curvature change nothing."""
        inverse = where(curvatures > 0, 1.0 / curvatures, 0.0)

        def back(vector: Vector, row: Any) -> tuple[Vector, Any]:
            move, change, factor = row
            share = factor * self._product(move, vector)
            return _difference(vector, self._scaled(share, change)), share

        def forth(vector: Vector, row: Any) -> tuple[Vector, None]:
            move, change, factor, share = row
            return _sum(vector, self._scaled(share - factor * self._product(change, vector), move)), None

        vector, shares = scan(back, [negative(g) for g in self.slopes], (moves, changes, inverse), reverse=True)
        newest = [change[-1] for change in changes]
        scale = where(curvatures[-1] > 0, curvatures[-1] / self._product(newest, newest), 1.0)
        found: Vector = scan(forth, self._scaled(scale, vector), (moves, changes, inverse, shares))[0]
        return found

    def _along(self, loss: Tensor, direction: Vector, distance: Tensor) -> tuple[Any, Any]:
        """The loss at a distance, and its slope there; built in the graph of the distance."""
        points = _sum(self.points, self._scaled(distance, direction))
        value = built_of(loss, dict(zip(self.points, points, strict=True)), distance.graph)
        return astype(value, self.dtype), gradients(value, distance)[0]

    def _product(self, one: Vector, other: Vector) -> Any:
        return add_n([astype(sum_(a * b), self.dtype) for a, b in zip(one, other, strict=True)])

    def _scaled(self, factor: Any, vector: Vector) -> Vector:
        return [astype(factor, entry.dtype) * entry for entry in vector]


def _sum(one: Vector, other: Vector) -> Vector:
    return [a + b for a, b in zip(one, other, strict=True)]


def _difference(one: Vector, other: Vector) -> Vector:
    return [a - b for a, b in zip(one, other, strict=True)]


def _distance(along: Callable[[Any], tuple[Any, Any]], start: Place, first: Any, evaluations: int) -> Any:
    """Where the strong Wolfe conditions hold, or the lowest found with a sufficient decrease: algorithms 3.5 and 3.6.

    ``along`` tells the loss and its slope at a distance. ``low`` is the lowest place so far; one where the conditions
    hold lies between it and ``high``, which is endlessly far until it is known.
    """
    _, value, slope = start
    rounding = ROUNDINGS * epsilon(value.dtype) * abs_(value)

    def tried(number: Any, distance: Any, found: Any, low: Place, high: Place) -> Any:
        here = distance, *along(distance)
        enough = here[1] <= value + DECREASE * distance * slope + rounding  # not so where it is no number
        fits = enough & (abs_(here[2]) <= -FLATTENING * slope)
        lower = fits | (enough & (here[1] < low[1]))
        passed = here[2] * (high[0] - low[0]) >= 0
        ends = _either(lower, here, low), _either(lower, _either(passed, low, high), here)
        following = where(isfinite(ends[1][0]), _between(*ends), _beyond(low, here))
        return number + 1, following, fits, *ends

    def goes_on(number: Any, distance: Any, found: Any, low: Place, high: Place) -> Any:
        return (number < evaluations) & ~found

    nowhere = constant(np.full((), np.inf, start[0].dtype)), start[0], start[0]
    return while_loop(goes_on, tried, (0, first, ~(slope < 0), start, nowhere))[3][0]


def _either(first: Any, one: Place, other: Place) -> Any:
    return tuple(where(first, a, b) for a, b in zip(one, other, strict=True))


def _between(low: Place, high: Place) -> Any:
    """What to try next between two places."""
    width = high[0] - low[0]
    return _limited(_lowest(low, high), low[0] + MARGIN * width, high[0] - MARGIN * width, low[0] + 0.5 * width)


def _beyond(low: Place, high: Place) -> Any:
    """What to try next beyond ``high``."""
    width = high[0] - low[0]
    return _limited(_lowest(low, high), high[0] + NEAR * width, high[0] + FAR * width, high[0] + FAR * width)


def _limited(wanted: Any, one: Any, other: Any, otherwise: Any) -> Any:
    return clip(where(isfinite(wanted), wanted, otherwise), minimum(one, other), maximum(one, other))


def _lowest(one: Place, other: Place) -> Any:
    """Where the cubic of these values and slopes has its minimum, if it has one: (3.59)."""
    (a, value_a, slope_a), (b, value_b, slope_b) = one, other
    first = slope_a + slope_b - 3 * (value_a - value_b) / (a - b)
    second = sign(b - a) * sqrt(first * first - slope_a * slope_b)
    return b - (b - a) * (slope_b + second - first) / (slope_b - slope_a + 2 * second)
