"""What optimisers have in common: how they are asked, and what they keep beside variables.

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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.collection import held_back
from flowrt.base.errors import GraphError, from_site, user_site
from flowrt.base.locating import fitting
from flowrt.base.partitioning import Partition
from flowrt.base.spec import computed
from flowrt.base.telling import telling
from flowrt.gradients import gradients
from flowrt.graph import as_node, beside, current_scope, scoped
from flowrt.misuse import OptimizerElsewhere
from flowrt.op import as_value, building
from flowrt.ops.elementwise import astype
from flowrt.ops.flow import group
from flowrt.ops.routing import split_gradient
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import constant, full
from flowrt.ops.state import SplitVariable, Variable, of_dtype, variables_from

if TYPE_CHECKING:
    from flowrt.graph import Graph, Node

T = TypeVar("T")


class Optimizer(OptimizerElsewhere, ABC):
    """How variables follow their gradients.

    ``lr``, the learning rate, is a number or a scalar tensor (a schedule computed in the graph).
    """

    @fitting
    def __init__(self, lr: Any) -> None:
        self.lr = checked_number("lr, the learning rate,", lr)

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
        if not (given is None or isinstance(given, Iterable)):
            raise GraphError(f"{user_site()}: variables are several of a graph, or None for all, not {given!r:.80}")
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
        return self._apply(pairs, name, self._moves)

    def _apply(
        self,
        pairs: Iterable[tuple[Any, Variable]],
        name: str | None,
        moves: Callable[[Sequence[tuple[Any, Variable]]], list[Node]],
    ) -> Node:
        """The operation of the writes that ``moves`` answers."""
        given = by_parts(pairs)
        if not given:
            raise GraphError(f"{user_site()}: there are no gradients to apply")
        with from_site(user_site()), counted_together(), _update(name) as common:
            done = moves(given)
        with building(given[0][1].graph), beside(as_node(given[0][1])):
            made: Node = group(*done, *common.writes, name=name or "apply_gradients")
        return made

    def _moves(self, pairs: Sequence[tuple[Any, Variable]]) -> list[Node]:
        """The writes of an update, of each variable by itself."""
        done: list[Node] = []
        for gradient, variable in pairs:
            with building(variable.graph), beside(as_node(variable)):
                if isinstance(gradient, IndexedSlices):
                    done += self._move_rows(variable, gradient)
                else:
                    done += self._move(variable, of_dtype(gradient, computed(variable.dtype), cast=True))
        return done

    @abstractmethod
    def _move(self, variable: Variable, gradient: Any) -> list[Node]:
        """The writes of one variable's update; ``gradient`` is of the dtype that is `computed` with."""

    def _move_rows(self, variable: Variable, slices: IndexedSlices) -> list[Node]:
        """The writes of the update of a variable of which only rows have a gradient."""
        return self._move(variable, of_dtype(as_value(slices), computed(variable.dtype), cast=True))

    def _rate(self, variable: Variable) -> Any:
        """The learning rate in the dtype that is `computed` with."""
        rate, dtype = as_value(self.lr), computed(variable.dtype)
        if not hasattr(rate, "builder"):
            return number(variable, rate)
        return in_common.get().once(variable, ("rate", dtype), lambda: astype(rate, dtype))


def moved_by(variable: Variable, step: Any) -> Node:
    """The write of ``variable -= step``; of floats of 16 bits both are rounded."""
    made: Node = variable.assign_sub(of_dtype(step, variable.dtype, cast=True))
    return made


def _trainable(graph: Graph) -> list[Variable]:
    """The variables that are moved by default, as the program sees them."""
    held = [variable for variable in graph.variables if variable.trainable]
    return list(dict.fromkeys(v if v.whole is None else v.whole for v in held))


def by_parts(pairs: Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
    """Those of the (gradient, variable) ``pairs`` that have a gradient, split variables part by part."""
    found: list[tuple[Any, Variable]] = []
    for gradient, variable in _checked_pairs(pairs):
        if isinstance(variable, SplitVariable) and gradient is not None:
            with building(variable.graph):
                found += zip(split_gradient(gradient, variable.partition), variable.parts, strict=True)
        else:
            found.append((gradient, variable))
    return [(gradient, variable) for gradient, variable in found if gradient is not None]


def _checked_pairs(pairs: Any) -> list[tuple[Any, Variable]]:
    given = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in given:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and hasattr(pair[1], "resource")):
            raise GraphError(
                f"{user_site()}: gradients are applied in pairs (gradient, variable), as compute_gradients answers "
                f"them, not as {pair!r:.80}"
            )
    return given


def checked_number(name: str, value: Any) -> Any:
    """``value``, if it is a finite number or a tensor; raises `GraphError` with the ``name`` that it has."""
    if not (is_number(value) or hasattr(value, "__tensor__")):
        raise GraphError(f"{user_site()}: {name} is a finite number or a scalar tensor, not {value!r:.80}")
    return value


def is_number(value: Any) -> bool:
    """Whether ``value`` is one finite number, of Python or NumPy."""
    try:
        return isinstance(value, (int, float, np.generic, np.ndarray)) and np.ndim(value) == 0 and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # of no number, and of one beyond all floats
        return False


class Common:
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
            steps = slot(variable, "steps", 0, shape=(), dtype="int64")
            _counts.get().append((variable, steps))
            now = steps + 1
            self.writes.append(steps.assign(now))
            return now

        return self.once(variable, "count", count)


in_common: ContextVar[Common] = ContextVar("flowrt_common")
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
def _update(name: str | None) -> Iterator[Common]:
    """Build one update inside, of variables that move together."""
    common = Common(name)
    token = in_common.set(common)
    try:
        yield common
    finally:
        in_common.reset(token)


def number(variable: Variable, value: Any) -> Any:
    """A plain ``value`` in the dtype that is `computed` with: one node for all variables of a place, not one each."""
    if not isinstance(value, (int, float, np.generic, np.ndarray)):
        return value
    dtype = computed(variable.dtype)
    if isinstance(value, float):  # as most are
        return in_common.get().once(variable, (value.hex(), dtype), lambda: constant(dtype.type(value)))
    array = np.asarray(value).astype(dtype)
    key = "number", array.shape, array.tobytes(), dtype
    return in_common.get().once(variable, key, lambda: constant(array))


def slot(variable: Variable, name: str, value: float = 0, *, shape: Any = None, dtype: Any = None) -> Variable:
    """What an optimiser keeps beside ``variable``, named after it whatever scope this is; by default shaped like it.

    Beside floats of 16 bits it is of float32: what a mean gains in a step is often less than such a one's last bit.
    All that one update keeps under this ``name`` starts from the same ``value``.
    """
    scope, common = replace(current_scope(), prefix="", container=variable.resource.container), in_common.get()
    shape, dtype = variable.shape if shape is None else shape, computed(variable.dtype) if dtype is None else dtype
    with variables_from(None), scoped(scope):
        sizes = common.once(variable, ("sizes", shape), lambda: constant(np.array(shape, "int64")))
        first = common.once(variable, ("first", name, dtype), lambda: full((), value, dtype))
        full_name = "/".join(filter(None, (variable.name, common.name, name)))
        made = Variable(full(sizes, first), name=full_name, trainable=False)
    if variable.whole is not None and shape == variable.shape:
        _split_alike(variable.whole, _beside(variable, made), dtype)
    return made


def _split_alike(variable: SplitVariable, name: str, dtype: Any) -> None:
    """Note that what is kept beside all parts of a variable is split as they are, once it is there."""
    graph, found = variable.graph, variable.partition.beside(name, dtype)
    if all((found.container, shard) in graph.resources for shard in found.shards):
        graph.partitions[found.name] = found
