"""Queues: bounded state that nodes keep under (container, name), and the ops that wait on it.

Every op here names its queue by attributes alone, so that a node can create the one it is asked for. `FIFOQueue`,
`ShuffleQueue` and `PriorityQueue` are what a program holds of it; they differ in the attribute ``order``, which says
which element leaves next.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from flowrt.base.errors import SpecError, user_site
from flowrt.base.locating import located
from flowrt.base.plain import is_whole
from flowrt.base.spec import Spec, as_dtype, as_shape
from flowrt.base.tracebacks import brief
from flowrt.graph import Graph, Resource, container, current_graph, current_scope, device
from flowrt.op import building
from flowrt.ops.random import SEEDS, stream_of
from flowrt.ops.source import placeholder
from flowrt.ops.state import of_dtype
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.attributes import Attr
    from flowrt.graph import Node, Tensor
    from flowrt.op import Op
    from flowrt.typed import Operand, Result

__all__ = ["FIFOQueue", "PriorityQueue", "ShuffleQueue"]


def queue_specs(dtypes: Sequence[str], shapes: Any) -> tuple[Spec, ...]:
    """The specs of one element's components; ``shapes=None`` leaves even the ranks open."""
    each = (None,) * len(dtypes) if shapes is None else shapes
    return tuple(Spec(d, s) for d, s in zip(dtypes, each, strict=True))


@op(effect=True, stateful=True, gradient=None)
def enqueue(
    values: Sequence[Operand],
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    order: tuple[Any, ...],
) -> None:
    """Append one element, once there is room; raises `QueueClosedError` after close."""
    _check_components(values, queue_specs(dtypes, shapes), resource)


@op(effect=True, stateful=True, gradient=None)
def enqueue_many(
    values: Sequence[Operand],
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    order: tuple[Any, ...],
) -> None:
    """Append the entries along the values' first axis, all at once, when there is room for all of them."""
    rows = [Spec(s.dtype, None if s.dims is None else (None, *s.dims)) for s in queue_specs(dtypes, shapes)]
    _check_components(values, rows, resource)
    if any(v.dims == () for v in values):
        raise SpecError(f"enqueue_many takes elements along the first axis; {', '.join(map(str, values))} has none")


def _check_components(values: Sequence[Spec], specs: Sequence[Spec], resource: str) -> None:
    fits = len(values) == len(specs) and all(
        s.accepts(v.dtype, s.dims or () if v.dims is None else v.shape) for s, v in zip(specs, values, strict=True)
    )
    if not fits:
        held, given = (", ".join(map(str, many)) for many in (specs, values))
        raise SpecError(f"the queue {resource!r} takes ({held}), not ({given})")


@op(effect=True, stateful=True, gradient=None)
def dequeue(
    *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any, order: tuple[Any, ...]
) -> tuple[Result, ...]:
    """The next element, once there is one; raises `QueueClosedError` when closed and empty."""
    return queue_specs(dtypes, shapes)


@op(effect=True, stateful=True, gradient=None)
def dequeue_many(
    n: Operand,
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    order: tuple[Any, ...],
) -> tuple[Result, ...]:
    """The ``n`` next elements at once, stacked; waits until there are that many."""
    _check_count(n, shapes, resource)
    return tuple(Spec(s.dtype, (n.value, *s.shape)) for s in queue_specs(dtypes, shapes))


@op(effect=True, stateful=True, gradient=None)
def dequeue_up_to(
    n: Operand,
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    order: tuple[Any, ...],
) -> tuple[Result, ...]:
    """The ``n`` next elements, stacked, or the fewer that a closed queue still holds."""
    _check_count(n, shapes, resource)
    return tuple(Spec(s.dtype, (None, *s.shape)) for s in queue_specs(dtypes, shapes))


def _check_count(n: Spec, shapes: Any, resource: str) -> None:
    if n.dtype.kind not in "iu" or n.dims not in (None, ()):
        raise SpecError(f"the number of elements is an integer scalar, got {n}")
    if isinstance(n.value, int) and n.value < 0:
        raise SpecError(f"the number of elements cannot be {n.value}")
    if shapes is None or None in shapes:
        raise SpecError(f"the queue {resource!r} cannot stack elements of unknown shapes; create it with shapes=")


@op(effect=True, stateful=True, gradient=None)
def queue_size(
    *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any, order: tuple[Any, ...]
) -> Result:
    """The number of elements waiting, an int64 scalar."""
    return Spec("int64", ())


@op(effect=True, stateful=True, gradient=None)
def queue_close(
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    order: tuple[Any, ...],
    cancel_pending_enqueues: bool = False,
) -> None:
    """Let nothing more in; what waits to get in still does, unless ``cancel_pending_enqueues``."""


class _Elements(NamedTuple):
    """What a queue's elements are: their components' dtypes and shapes, and whether they are one tensor alone."""

    dtypes: tuple[str, ...]
    shapes: tuple[Any, ...] | None
    single: bool


def _elements(dtypes: Any, shapes: Any) -> _Elements:
    single = not isinstance(dtypes, (list, tuple))
    names = tuple(as_dtype(d).name for d in ([dtypes] if single else dtypes))
    nested = isinstance(shapes, (list, tuple)) and len(shapes) == 1 and isinstance(shapes[0], (list, tuple))
    each = [shapes] if single and not nested else shapes
    forms = None if shapes is None else tuple(as_shape(s) for s in each)
    if forms is not None and len(forms) != len(names):
        raise SpecError(f"{len(names)} dtypes need as many shapes, got {len(forms)}")
    return _Elements(names, forms, single)


@brief
class BoundedQueue(ABC):
    """What queues have in common: all but the order in which elements leave. Waiters are served strictly in order."""

    kind: ClassVar[str]
    components: ClassVar[str] = "components"

    def __init__(self, capacity: int, elements: _Elements, name: str | None) -> None:
        self.graph = current_graph("a queue")
        if not is_whole(capacity, 1):
            raise SpecError(f"it needs room for at least one element, got capacity={capacity!r}")
        scope, capacity = current_scope(), int(capacity)
        detail: Mapping[str, Attr] = {"capacity": capacity, "kind": self.kind}
        self.resource = Resource(
            "queue",
            scope.container,
            self.graph.claim_name(name, "queue"),
            queue_specs(elements.dtypes, elements.shapes),
            scope.device,
            user_site(),
            detail=detail,
        )
        self.graph.add_resource(self.resource)
        self._single = elements.single
        self._attributes: dict[str, Any] = {
            "resource": self.resource.name,
            "container": self.resource.container,
            "capacity": capacity,
            "dtypes": elements.dtypes,
            "shapes": elements.shapes,
            "order": (self.kind, *self._drawn()),
        }

    def _drawn(self) -> tuple[Attr, ...]:
        """What the order is drawn from, if it is."""
        return ()

    @property
    def name(self) -> str:
        """Its name, unique among the graph's variables and queues."""
        return self.resource.name

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of an element's components."""
        return self.resource.specs

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of ({', '.join(map(str, self.specs))})>"

    def enqueue(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that appends ``value`` (a tensor, or one per component) once there is room."""
        return cast("Node", self._build(enqueue, self._components(value), name=name))

    def enqueue_many(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that appends the entries along the first axis of ``value`` as elements."""
        return cast("Node", self._build(enqueue_many, self._components(value), name=name))

    def dequeue(self, *, name: str | None = None) -> Any:
        """The next element once there is one: a tensor, or a tuple of one per component."""
        return self._element(self._build(dequeue, name=name))

    def dequeue_many(self, n: Any, *, name: str | None = None) -> Any:
        """The ``n`` next elements at once, stacked along a new first axis."""
        return self._element(self._build(dequeue_many, n, name=name))

    def dequeue_up_to(self, n: Any, *, name: str | None = None) -> Any:
        """The ``n`` next elements, or the fewer that the queue holds when it is closed."""
        return self._element(self._build(dequeue_up_to, n, name=name))

    def size(self, *, name: str | None = None) -> Any:
        """The number of elements waiting, an int64 scalar."""
        return self._build(queue_size, name=name)

    def close(self, cancel_pending_enqueues: bool = False, *, name: str | None = None) -> Node:
        """The operation after which enqueue raises `QueueClosedError`, and dequeue too once the queue is drained."""
        made: Node = self._build(queue_close, cancel_pending_enqueues=cancel_pending_enqueues, name=name)
        return made

    def entrance(self) -> tuple[Graph, tuple[Tensor, ...], Node, Node]:
        """A graph of its own that fills this queue from outside: (graph, feeds, enqueue, close).

        Queues are shared by (container, name), so it reaches the same one, also when this queue's graph is finalized.
        """
        with Graph() as graph, device(str(self.resource.device)), container(self.resource.container):
            graph.add_resource(replace(self.resource, site=user_site()))
            feeds = tuple(placeholder(s.dtype, s.dims, name="element") for s in self.specs)
            twin = copy(self)
            twin.graph = graph
            return graph, feeds, twin._build(enqueue, feeds, name=None), twin.close()

    def _build(self, what: Op, *inputs: Any, name: str | None, **more: Any) -> Any:
        with building(self.graph):
            return what(*inputs, **self._attributes, **more, name=name or f"{self.name}/{what.name}")

    @located("an element of a queue")
    def _components(self, value: Any) -> list[Any]:
        given = list(value) if isinstance(value, (tuple, list)) and not self._single else [value]
        if len(given) != len(self.specs):
            raise SpecError(f"{self!r} takes {len(self.specs)} {self.components}, not {len(given)}")
        return [of_dtype(v, s.dtype) for v, s in zip(given, self.specs, strict=True)]

    def _element(self, outputs: Any) -> Any:
        """A bare tensor for a queue of one bare dtype, else a tuple."""
        return outputs if self._single or isinstance(outputs, tuple) else (outputs,)


@brief
class FIFOQueue(BoundedQueue):
    """A bounded first-in, first-out queue of elements, each of one tensor or several.

    ``dtypes`` and ``shapes`` describe the components: one dtype and shape, or a sequence of them. ``shapes=None``
    leaves the shapes open; `dequeue_many` and `dequeue_up_to` need them. Waiters are served strictly in order.
    """

    kind = "fifo"

    @located("a queue")
    def __init__(self, capacity: int, dtypes: Any, shapes: Any = None, name: str | None = None) -> None:
        super().__init__(capacity, _elements(dtypes, shapes), name)


@brief
class ShuffleQueue(BoundedQueue):
    """A bounded queue whose elements leave in an order drawn at random, as from TensorFlow's RandomShuffleQueue.

    Each is drawn from the ``min_after_dequeue`` + 1 that came first of those waiting. Until the queue is closed the
    others of these stay, so dequeuing waits for more. The same ``seed`` and the same order of enqueues give the same
    order, however fast elements come and go. Without a ``seed`` it is the graph's, else the session's, and queues of
    different names draw differently. At most ``capacity`` - ``min_after_dequeue`` elements go in, or out, at once.

    ``dtypes`` and ``shapes`` are those of a `FIFOQueue`.
    """

    kind = "shuffle"

    @located("a queue")
    def __init__(
        self,
        capacity: int,
        min_after_dequeue: int,
        dtypes: Any,
        shapes: Any = None,
        *,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        if not is_whole(min_after_dequeue, 1):
            raise SpecError(
                "min_after_dequeue is how many stay for the next one to be drawn from, at least 1, "
                f"not {min_after_dequeue!r}; a queue that keeps the order is fr.FIFOQueue"
            )
        if is_whole(capacity, 1) and capacity <= min_after_dequeue:
            raise SpecError(f"of capacity={capacity} min_after_dequeue={min_after_dequeue} leaves nothing to dequeue")
        self._kept, self._seed = int(min_after_dequeue), seed
        super().__init__(capacity, _elements(dtypes, shapes), name)

    def _drawn(self) -> tuple[Attr, ...]:
        if self._seed is not None:
            return self._kept, int(self._seed) & SEEDS, 0
        seed = self.graph.seed
        return self._kept, None if seed is None else seed & SEEDS, stream_of(self.name)


@brief
class PriorityQueue(BoundedQueue):
    """A bounded queue whose elements leave by priority, smallest first, and those of one priority in order of arrival.

    The priority is an int64 scalar and the first component of each element; ``dtypes`` and ``shapes`` are those of what
    comes with it, as a `FIFOQueue` has them: ``PriorityQueue(8, "float32", ()).enqueue((priority, value))``.
    """

    kind = "priority"
    components = "components, of which the priority is the first"

    @located("a queue")
    def __init__(self, capacity: int, dtypes: Any, shapes: Any = None, *, name: str | None = None) -> None:
        given = _elements(dtypes, shapes)
        rest = given.shapes or (None,) * len(given.dtypes)
        super().__init__(capacity, _Elements(("int64", *given.dtypes), ((), *rest), single=False), name)
