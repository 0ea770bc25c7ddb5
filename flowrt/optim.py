"""Optimisers, built of nothing but variables and primitive maths.

An optimiser is a recipe: it holds its settings and no state. What must be remembered between steps (a momentum) is a
variable beside the one it belongs to, so it is placed, checkpointed and restored like any other.

A gradient that is an `IndexedSlices` moves the rows that occur, once each by the sum of their slices, and leaves every
other row as it is, slots included: no momentum carries it on, no mean and no weight decays. For SGD and AdaGrad that is
what the dense gradient does; for the others it is what PyTorch's SparseAdam and TensorFlow's sparse momentum do.

Variables that one call moves always move together. What is then the same for all of them, as the count of their steps,
is kept and computed once for each place that variables were asked to be in, so that no server waits for another's. The
count is named after the first variable of its place: a checkpoint continues it where that one is the first again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.collection import held_back
from flowrt.base.errors import GraphError, from_site, user_site
from flowrt.base.familiar import answering
from flowrt.base.locating import fitting
from flowrt.base.partitioning import Partition
from flowrt.base.telling import telling
from flowrt.gradients import gradients
from flowrt.graph import as_node, beside, current_scope, scoped
from flowrt.misuse import OptimizerElsewhere
from flowrt.op import as_value, building
from flowrt.ops.elementwise import add_n, astype, divide, expm1, maximum, multiply, negative, sqrt, square
from flowrt.ops.flow import group
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
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.routing import SplitGradient, split_gradient
from flowrt.ops.rows import adagrad_rows, adam_rows, add_rows, momentum_rows, rmsprop_rows
from flowrt.ops.slices import IndexedSlices, group_rows, sum_rows
from flowrt.ops.source import constant, full, shape_of
from flowrt.ops.state import SplitVariable, Variable, variables_from

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node, Tensor

T = TypeVar("T")

__all__ = ["SGD", "AdaGrad", "Adam", "AdamW", "Momentum", "Optimizer", "RMSProp", "clip_by_global_norm"]


class Optimizer(OptimizerElsewhere, ABC):
    """How variables follow their gradients.

    ``lr``, the learning rate, is a number or a scalar tensor (a schedule computed in the graph).
    """

    @fitting
    def __init__(self, lr: Any) -> None:
        number = isinstance(lr, (int, float, np.generic, np.ndarray)) and np.ndim(lr) == 0 and math.isfinite(lr)
        if not (number or hasattr(lr, "__tensor__")):
            raise GraphError(f"{user_site()}: lr, the learning rate, is a finite number or a scalar tensor, not {lr!r}")
        self.lr = lr

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = fitting(vars(cls)["__init__"])  # type: ignore[method-assign]

    @telling
    def __repr__(self) -> str:
        return f"fr.optim.{type(self).__name__} {', '.join(f'{name}={value!r}' for name, value in vars(self).items())}"

    @fitting
    def minimize(self, loss: Any, variables: Sequence[Variable] | None = None, *, name: str | None = None) -> Node:
        """The operation of one training step: ``loss`` goes down along ``variables``, by default all trainable ones."""
        return self.apply_gradients(self.compute_gradients(loss, variables), name=name)

    @fitting
    def compute_gradients(self, loss: Any, variables: Sequence[Variable] | None = None) -> list[tuple[Any, Variable]]:
        """(gradient, variable) for each variable; the gradient is None where ``loss`` does not depend on it.

        Raises `GraphError` where it depends on none of them.
        """
        tensor = as_value(loss)
        if not hasattr(tensor, "graph"):
            raise GraphError(f"{user_site()}: the loss to minimize is a tensor of a graph, not {loss!r}")
        given = [variables] if isinstance(variables, Variable) else variables
        among = _trainable(tensor.graph) if given is None else list(given)
        if not among:
            raise GraphError(f"{user_site()}: there is no trainable variable; create one, or name some by variables=")
        found = gradients(tensor, among)
        if all(gradient is None for gradient in found):
            names = ", ".join(repr(v.name) for v in among)
            raise GraphError(f"{user_site()}: {tensor!r} does not depend on {names}, so there is nothing to minimize")
        return list(zip(found, among, strict=True))

    @fitting
    @held_back()
    def apply_gradients(self, pairs: Iterable[tuple[Any, Variable]], *, name: str | None = None) -> Node:
        """The operation that moves each variable of the (gradient, variable) ``pairs``; gradients of None move nothing.

        The updates are computed where the variables are. With a ``name`` what is kept beside a variable bears it, too:
        two optimisers that move the same variables need names, for checkpoints to tell whose is whose.
        """
        moves = by_parts(pairs)
        if not moves:
            raise GraphError(f"{user_site()}: there are no gradients to apply")
        done: list[Node] = []
        with from_site(user_site()), counted_together(), _update(name) as common:
            for gradient, variable in moves:
                with building(variable.graph), beside(as_node(variable)):
                    if isinstance(gradient, IndexedSlices):
                        done += self._move_rows(variable, gradient)
                    else:
                        done += self._move(variable, as_value(gradient))
        with building(moves[0][1].graph), beside(as_node(moves[0][1])):
            made: Node = group(*done, *common.writes, name=name or "apply_gradients")
        return made

    @abstractmethod
    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        """The writes of one variable's update."""

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        """The writes of the update of a variable of which only rows have a gradient."""
        return self._move(variable, as_value(slices))

    def _rate(self, variable: Variable) -> Any:
        """The learning rate in the variable's dtype."""
        rate = as_value(self.lr)
        if not hasattr(rate, "builder"):
            return _number(variable, rate)
        return _common.get().once(variable, ("rate", variable.dtype), lambda: astype(rate, variable.dtype))


def _trainable(graph: Graph) -> list[Variable]:
    """The variables that are moved by default, as the program sees them."""
    held = [variable for variable in graph.variables if variable.trainable]
    return list(dict.fromkeys(v if v.whole is None else v.whole for v in held))


def by_parts(pairs: Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
    """Those of the (gradient, variable) ``pairs`` that have a gradient, split variables part by part."""
    found: list[tuple[Any, Variable]] = []
    for gradient, variable in pairs:
        if isinstance(variable, SplitVariable) and gradient is not None:
            with building(variable.graph):
                found += zip(split_gradient(gradient, variable.partition), variable.parts, strict=True)
        else:
            found.append((gradient, variable))
    return [(gradient, variable) for gradient, variable in found if gradient is not None]


class _Common:
    """What one update's variables have in common where they lie in one place: made once, beside the first of them.

    ``writes`` are those of what is kept for all. ``name`` tells this update's slots from another's.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.writes: list[Node] = []
        self._made: dict[Hashable, Any] = {}

    def once(self, variable: Variable, what: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` makes beside ``variable``, or has made before beside one that was asked to be there too."""
        asked = variable.resource.device
        alone = variable.name if variable.whole is not None and asked.task is None else None  # parts are placed apart
        key = asked, variable.resource.container, as_node(variable).colocate, alone, what
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def count(self, variable: Variable) -> Any:
        """Which update this is, counted from 1."""

        def count() -> Any:
            steps = _slot(variable, "steps", 0, shape=(), dtype="int64")
            _counts.get().append((variable, steps))
            now = steps + 1
            self.writes.append(steps.assign(now))
            return now

        return self.once(variable, "count", count)


_common: ContextVar[_Common] = ContextVar("flowrt_common")
_counts: ContextVar[list[tuple[Variable, Variable]]] = ContextVar("flowrt_counts")


@contextmanager
def counted_together(order: Sequence[Variable] = ()) -> Iterator[None]:
    """Of the updates built inside, which are made together, have checkpoints keep one count, wherever there are some.

    It is named after the variable that comes first: in ``order``, or of those that are moved.
    """
    if not order and _counts.get(None) is not None:
        yield  # in those of a trainer
        return
    token = _counts.set([])
    try:
        yield
        found = _counts.get()
    finally:
        _counts.reset(token)
    place = {variable: number for number, variable in enumerate(order)}
    found.sort(key=lambda pair: place.get(pair[0], 0))
    alike: dict[str, list[tuple[Variable, Variable]]] = {}
    for variable, steps in found:
        alike.setdefault(_beside(variable, steps), []).append((variable, steps))
    for name, counts in alike.items():
        first = counts[0][0] if counts[0][0].whole is None else counts[0][0].whole
        mirror([steps for _, steps in counts], f"{first.name}/{name}")


def _beside(variable: Variable, slot: Variable) -> str:
    """What is kept beside a variable, as its name says it."""
    return slot.name.removeprefix(f"{variable.name}/")


def mirror(held: Sequence[Variable], name: str) -> None:
    """Have checkpoints keep these scalars, which are always equal, as one of that ``name``."""
    if len(held) > 1 or (held and held[0].name != name):
        shards = tuple(variable.name for variable in held)
        container = held[0].resource.container
        held[0].graph.partitions[name] = Partition(name, held[0].spec, (), shards, container)


@contextmanager
def _update(name: str | None) -> Iterator[_Common]:
    """Build one update inside, of variables that move together."""
    common = _Common(name)
    token = _common.set(common)
    try:
        yield common
    finally:
        _common.reset(token)


def _number(variable: Variable, value: Any) -> Any:
    """A plain ``value`` in the variable's dtype: one node for all variables of a place, or each would bring several."""
    if not isinstance(value, (int, float, np.generic, np.ndarray)):
        return value
    if isinstance(value, float):  # as most are
        return _common.get().once(variable, (value.hex(), variable.dtype), lambda: constant(variable.dtype.type(value)))
    array = np.asarray(value).astype(variable.dtype)
    key = "number", array.shape, array.tobytes(), variable.dtype
    return _common.get().once(variable, key, lambda: constant(array))


class SGD(Optimizer):
    """Gradient descent: p -= lr * g."""

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        return [variable.move_rows(add_rows, slices, [negative(self._rate(variable))])]

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
        velocity, numbers = _slot(variable, "momentum"), [_number(variable, self.momentum), self._rate(variable)]
        move = nesterov_move if self.nesterov else momentum_move
        grown, step = in_one(move, [velocity, gradient], numbers)
        return [velocity.assign(grown), variable.assign_sub(step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        velocity = _slot(variable, "momentum")
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
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        accumulator = _slot(variable, "accumulator", self.initial_accumulator_value)
        numbers = [_number(variable, self.epsilon), self._rate(variable)]
        grown, step = in_one(adagrad_move, [accumulator, gradient], numbers)
        return [accumulator.assign(grown), variable.assign_sub(step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        accumulator = _slot(variable, "accumulator", self.initial_accumulator_value)
        return [variable.move_rows(adagrad_rows, slices, [self._rate(variable), self.epsilon], [accumulator])]


class RMSProp(Optimizer):
    """Gradients over the root of their mean square: s = decay * s + (1 - decay) * g²; p -= v, where
    v = momentum * v + lr * g / (sqrt(s) + epsilon).

    Of an `IndexedSlices` only the rows that occur are moved and their slots decay; ``fr.identity(gradient)`` moves all.

    Tieleman and Hinton, "Lecture 6.5, RMSProp", Neural Networks for Machine Learning, 2012.
    """

    def __init__(self, lr: Any, decay: float = 0.9, momentum: float = 0.0, epsilon: float = 1e-7) -> None:
        super().__init__(lr)
        self.decay = decay
        self.momentum = momentum
        self.epsilon = epsilon

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        mean_square = _slot(variable, "mean_square")
        settings = [_number(variable, n) for n in (self.decay, 1 - self.decay, self.epsilon)]
        settings.append(self._rate(variable))
        if not self.momentum:
            squares, step = in_one(rmsprop_move, [mean_square, gradient], settings)
            return [mean_square.assign(squares), variable.assign_sub(step)]
        velocity = _slot(variable, "momentum")
        settings.append(_number(variable, self.momentum))
        squares, step = in_one(rmsprop_momentum_move, [mean_square, gradient, velocity], settings)
        return [mean_square.assign(squares), velocity.assign(step), variable.assign_sub(step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        slots = [_slot(variable, "mean_square"), _slot(variable, "momentum")]
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
            if not isinstance(beta, Real) or not 0 <= beta < 1:
                raise GraphError(f"{user_site()}: {name} must be from 0 up to 1, which is left out, got {beta}")
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        first, second = _slot(variable, "first_moment"), _slot(variable, "second_moment")
        corrections = self._corrections(variable)
        weights = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        numbers = [*(_number(variable, weight) for weight in weights), *corrections, self._rate(variable)]
        mean, squares, step = self._moved(variable, [first, second, gradient], numbers)
        return [first.assign(mean), second.assign(squares), variable.assign_sub(step)]

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        first, second = _slot(variable, "first_moment"), _slot(variable, "second_moment")
        scale, floor = self._corrections(variable)
        rate = self._rate(variable)
        beta1, beta2 = self.beta1, self.beta2
        settings = [multiply(scale, rate), beta1, 1 - beta1, beta2, 1 - beta2, floor, self._decay_of_rows(rate)]
        return [variable.move_rows(adam_rows, slices, settings, [first, second])]

    def _corrections(self, variable: Variable) -> tuple[Any, Any]:
        """``sqrt(1 - beta2^t) / (1 - beta1^t)``, and ``sqrt(1 - beta2^t) * epsilon``.

        With these scalars, one pair for all variables of a place, the formula has one root and one quotient per entry.
        """
        common = _common.get()

        def correct() -> tuple[Any, Any]:
            time = astype(common.count(variable), variable.dtype)
            root = sqrt(_weight(self.beta2, time))
            return divide(root, _weight(self.beta1, time)), root * self.epsilon

        return common.once(variable, ("corrections", variable.dtype), correct)

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
        self.weight_decay = weight_decay

    def _moved(self, variable: Variable, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        return in_one(adamw_move, [*tensors, variable], [*numbers, _number(variable, self.weight_decay)])

    def _decay_of_rows(self, rate: Any) -> Any:
        return multiply(rate, self.weight_decay)


def _weight(beta: float, time: Any) -> Any:
    """``1 - beta^time``, what a mean that decays by ``beta`` has counted; exact where ``beta`` is close to 1."""
    return negative(expm1(multiply(time, math.log(beta) if beta else -math.inf)))


def _slot(variable: Variable, name: str, value: float = 0, *, shape: Any = None, dtype: Any = None) -> Variable:
    """What an optimiser keeps beside ``variable``, named after it whatever scope this is; by default shaped like it.

    All that one update keeps under this ``name`` starts from the same ``value``.
    """
    scope, common = replace(current_scope(), prefix="", container=variable.resource.container), _common.get()
    shape, dtype = variable.shape if shape is None else shape, variable.dtype if dtype is None else dtype
    with variables_from(None), scoped(scope):
        sizes = common.once(variable, ("sizes", shape), lambda: constant(np.array(shape, "int64")))
        first = common.once(variable, ("first", name, dtype), lambda: full((), value, dtype))
        full_name = "/".join(filter(None, (variable.name, common.name, name)))
        made = Variable(full(sizes, first), name=full_name, trainable=False)
    if variable.whole is not None and shape == variable.shape:
        _split_alike(variable.whole, _beside(variable, made))
    return made


def _split_alike(variable: SplitVariable, name: str) -> None:
    """Note that what is kept beside all parts of a variable is split as they are, once it is there."""
    graph, found = variable.graph, variable.partition.beside(name)
    if all((found.container, shard) in graph.resources for shard in found.shards):
        graph.partitions[found.name] = found


@fitting
def clip_by_global_norm(grads: Sequence[Any], norm: float) -> tuple[list[Any], Tensor]:
    """``grads`` scaled down together so that their global norm is at most ``norm``, and the norm they had.

    The global norm is the root of the sum of all squares. Gradients of None stay None. Pascanu et al., "On the
    difficulty of training recurrent neural networks", ICML 2013.
    """
    if isinstance(norm, Real) and not norm > 0:
        raise GraphError(f"{user_site()}: norm, to which gradients are clipped, is more than 0, not {norm!r}")
    given = [part for g in grads for part in (g.parts if isinstance(g, SplitGradient) else (g,))]
    present = [_summed(g) for g in given if g is not None]
    if not present:
        raise GraphError(f"{user_site()}: there are no gradients to clip")
    total: Tensor = sqrt(add_n([sum_(square(g)) for g in present]))
    scale = divide(norm, maximum(total, norm))
    return [None if g is None else _scaled(g, scale) for g in grads], total


def _summed(gradient: Any) -> Any:
    """What has the gradient's entries: of slices the sums of their rows, as the dense gradient would."""
    if not isinstance(gradient, IndexedSlices):
        return as_value(gradient)
    groups = group_rows(gradient.indices, shape_of(gradient.values)[0], gradient.shape[0], gradient.absent)
    return sum_rows(gradient.values, groups)


def _scaled(gradient: Any, scale: Any) -> Any:
    if isinstance(gradient, SplitGradient):
        return gradient.map(lambda part: _scaled(part, scale))
    if not isinstance(gradient, IndexedSlices):
        return multiply(gradient, scale)
    return replace(gradient, values=multiply(gradient.values, scale))


if not TYPE_CHECKING:
    __getattr__, __dir__ = answering("fr.optim", globals())
