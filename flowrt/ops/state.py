"""Variables and queues: state that lives on nodes under (container, name), and the ops that read and write it.

Every op here names its resource by attributes alone, so that a node can create the queue or check the variable it is
asked for. `Variable` and `FIFOQueue` are what a program holds of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from flowrt.errors import SpecError, user_site
from flowrt.graph import (
    Graph,
    Resource,
    container,
    current_graph,
    current_scope,
    device,
    scoped,
)
from flowrt.op import as_value, building, frozen, located, no_gradient, op
from flowrt.operators import Operators
from flowrt.ops.elementwise import astype
from flowrt.ops.rows import add_rows, assign_rows, write_rows
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import constant, placeholder
from flowrt.ops.starting import check_start
from flowrt.plain import as_dtype_of, default_array, fitting_array
from flowrt.spec import NAMES, Spec, as_dtype, as_shape
from flowrt.tracebacks import brief

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.op import Attr, DType, Op


@op(stateful=True)
def read_variable(*, resource: str, container: str, dtype: DType, shape: Any, fresh: bool = False) -> Spec:
    """The variable's value: before this step's writes, or, if ``fresh``, after those it is ordered behind."""
    return Spec(dtype, shape)


def _check_written(value: Spec, resource: str, dtype: DType, shape: Any) -> None:
    held = Spec(dtype, shape)
    if not held.accepts(value.dtype, held.shape if value.dims is None else value.shape):
        raise SpecError(f"the variable {resource!r} holds {held}, not {value}")


@no_gradient
@op(stateful=True)
def assign(value: Spec, *, resource: str, container: str, dtype: DType, shape: Any) -> None:
    """Make ``value`` the variable's."""
    _check_written(value, resource, dtype, shape)


@no_gradient
@op(stateful=True)
def assign_add(value: Spec, *, resource: str, container: str, dtype: DType, shape: Any) -> None:
    """Add ``value`` to the variable's."""
    _check_written(value, resource, dtype, shape)


@no_gradient
@op(stateful=True)
def assign_sub(value: Spec, *, resource: str, container: str, dtype: DType, shape: Any) -> None:
    """Subtract ``value`` from the variable's."""
    if value.dtype == bool:
        raise SpecError(f"the difference of bools is not defined, and the variable {resource!r} holds them; use assign")
    _check_written(value, resource, dtype, shape)


class VariableSource(Protocol):
    """Who may hand out an existing variable where a program asks for a new one."""

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool) -> Variable | None:
        """The variable to use, or None to let a new one be made."""


variable_source: ContextVar[VariableSource | None] = ContextVar("flowrt_variable_source", default=None)


@contextmanager
def variables_from(source: VariableSource | None) -> Iterator[None]:
    """Ask ``source`` first for every variable that is created inside."""
    token = variable_source.set(source)
    try:
        yield
    finally:
        variable_source.reset(token)


@brief
class Variable(Operators):
    """A tensor that outlives the step: it is read, and written by `assign`, `assign_add`, `assign_sub`, and row by row.

    ``initial`` (a number, an array or a tensor of fully known shape, also one computed from other variables) is what a
    session starts it from, unless it was restored or an earlier session left it. The graph keeps an array for sessions
    to come: a copy, or the array itself where it is read-only (``table.setflags(write=False)``, ``np.load`` with
    ``mmap_mode="r"``). A large table of which steps only look up and move rows shares the copy's pages until they are
    written. Used as a tensor a variable means its value before the step's writes; `read` under control
    dependencies sees earlier ones.
    """

    __slots__ = ("_read", "resource")
    resource: Resource
    _read: Tensor

    @brief
    def __new__(cls, initial: Any, *, dtype: Any = None, name: str | None = None, trainable: bool = True) -> Variable:
        source = variable_source.get()
        found = None if source is None else source.variable(initial, dtype, name, trainable)
        return _create_variable(initial, dtype, name, trainable) if found is None else found

    @staticmethod
    def of(resource: Resource, read: Tensor) -> Variable:
        """The handle of a variable that stands in ``read.graph`` already; ``read`` is its plain read."""
        variable: Variable = object.__new__(Variable)
        variable.resource = resource
        variable._read = read
        return variable

    @property
    def name(self) -> str:
        """Its name, unique among the graph's variables and queues."""
        return self.resource.name

    @property
    def spec(self) -> Spec:
        """Its dtype and shape."""
        return self.resource.specs[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of its entries."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, all known."""
        return self.spec.concrete

    @property
    def trainable(self) -> bool:
        """Whether optimisers move it by default."""
        return self.resource.trainable

    @property
    def device(self) -> str:
        """The device this variable was asked to be on, as far as the program says."""
        return str(self.resource.device)

    @property
    def graph(self) -> Graph:
        """The graph it was created in."""
        return self._read.graph

    @property
    def initializer(self) -> Node:
        """The operation that gives the variable its initial value."""
        node = self.graph.resources[(self.resource.container, self.resource.name)].initialize
        assert node is not None
        return node

    def __tensor__(self) -> Tensor:
        return self._read

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} {self.spec}>"

    def __bool__(self) -> bool:
        return bool(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read)

    def __array__(self, *args: object, **kwargs: object) -> Any:
        return self._read.__array__()

    def read(self, *, name: str | None = None) -> Tensor:
        """The value when this read runs: after whatever the control dependencies around it have written."""
        with building(self.graph):
            made: Tensor = read_variable(**_attributes(self.resource), fresh=True, name=name or f"{self.name}/read")
        return made

    def assign(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that makes ``value`` this variable's; its shape must be equal."""
        return self._write(assign, value, name)

    def assign_add(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that adds ``value``, of equal shape."""
        return self._write(assign_add, value, name)

    def assign_sub(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that subtracts ``value``, of equal shape."""
        return self._write(assign_sub, value, name)

    def scatter_add(self, ids: Any, rows: Any, *, name: str | None = None) -> Node:
        """The operation that adds ``rows``, [*ids.shape, ...], to the rows ``ids``, each as often as it occurs."""
        return self._write_rows(add_rows, ids, rows, 1, name or f"{self.name}/scatter_add")

    def scatter_sub(self, ids: Any, rows: Any, *, name: str | None = None) -> Node:
        """The operation that subtracts ``rows`` from the rows ``ids``; each as often as it occurs."""
        if self.dtype.kind == "u":
            raise SpecError(
                f"scatter_sub to {self.name!r} ({user_site()}): {self.spec} has no negatives; use scatter_add"
            )
        return self._write_rows(add_rows, ids, rows, -1, name or f"{self.name}/scatter_sub")

    def scatter_update(self, ids: Any, rows: Any, *, name: str | None = None) -> Node:
        """The operation that makes ``rows`` the rows ``ids``; of a row that occurs several times the last counts."""
        return self._write_rows(assign_rows, ids, rows, 1, name or f"{self.name}/scatter_update")

    def _write_rows(self, write: Op, ids: Any, rows: Any, factor: int, name: str) -> Node:
        if self.dtype.kind == "b" and write is add_rows:
            raise SpecError(f"{name} ({user_site()}): bools are not added; use scatter_update")
        with building(self.graph), located(f"{write.name} of {self.name!r}"):
            slices = IndexedSlices(_of_dtype(rows, self.dtype), ids, self.shape)
        return self.move_rows(write, slices, [factor], name=name)

    def move_rows(self, write: Op, slices: IndexedSlices, settings: Any, slots: Any = (), name: Any = None) -> Node:
        """The operation that moves the rows of ``slices``, and of ``slots``, by a write of `flowrt.ops.rows`."""
        attributes = _attributes(self.resource)
        if slots:
            attributes["slots"] = tuple(slot.name for slot in slots)
        with building(self.graph):
            made: Node = write_rows(write, slices, settings, attributes, name or f"{self.name}/{write.name}")
        return made

    def _write(self, write: Op, value: Any, name: str | None) -> Node:
        with building(self.graph), located(f"{write.name} to {self.name!r}"):
            made: Node = write(
                _of_dtype(value, self.dtype), **_attributes(self.resource), name=name or f"{self.name}/{write.name}"
            )
        return made


@located("variable")
def _create_variable(initial: Any, dtype: Any, name: str | None, trainable: bool) -> Variable:
    graph = current_graph("a variable")
    value, scope, site = _initial(initial, dtype), current_scope(), user_site()
    check_start(value, graph, f"{scope.prefix}{name or 'variable'}", site)
    spec = value.spec if hasattr(value, "spec") else Spec(value.dtype, value.shape)
    resource = Resource(
        "variable",
        scope.container,
        graph.claim_name(name, "variable"),
        (spec.without_value(),),
        scope.device,
        site,
        trainable,
    )
    graph.add_resource(resource)
    attributes = _attributes(resource)
    with scoped(replace(scope, prefix=f"{resource.name}/", control=())):
        plain = read_variable(**attributes, name="value")
        first = value if hasattr(value, "builder") else constant(value, name="initial")
        initialize = assign(first, **attributes, name="initialize")
    graph.complete_resource((resource.container, resource.name), first, initialize)
    variable = Variable.of(graph.resources[(resource.container, resource.name)], plain)
    graph.variables.append(variable)
    return variable


def _initial(initial: Any, dtype: Any) -> Any:
    value = as_value(initial)
    if hasattr(value, "builder"):
        return _of_dtype(value, value.dtype if dtype is None else dtype, cast=True)
    return default_array(value) if dtype is None else frozen(as_dtype_of(value, as_dtype(dtype)))


def _of_dtype(value: Any, dtype: Any, cast: bool = False) -> Any:
    """``value`` as a tensor as it is (cast if asked to) or an array of ``dtype``."""
    found = as_value(value)
    if not hasattr(found, "builder"):
        return fitting_array(found, as_dtype(dtype))
    return astype(found, dtype) if cast and found.dtype != as_dtype(dtype) else found


def _attributes(resource: Resource) -> dict[str, Any]:
    """What every op on the variable carries."""
    spec = resource.specs[0]
    return {
        "resource": resource.name,
        "container": resource.container,
        "dtype": NAMES[spec.dtype],
        "shape": spec.concrete,
    }


def queue_specs(dtypes: Sequence[str], shapes: Any) -> tuple[Spec, ...]:
    """The specs of one element's components; ``shapes=None`` leaves even the ranks open."""
    each = (None,) * len(dtypes) if shapes is None else shapes
    return tuple(Spec(d, s) for d, s in zip(dtypes, each, strict=True))


@no_gradient
@op(effect=True, stateful=True)
def enqueue(
    values: Sequence[Spec], *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any
) -> None:
    """Append one element, once there is room; raises `QueueClosedError` after close."""
    _check_components(values, queue_specs(dtypes, shapes), resource)


@no_gradient
@op(effect=True, stateful=True)
def enqueue_many(
    values: Sequence[Spec], *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any
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


@no_gradient
@op(effect=True, stateful=True)
def dequeue(*, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any) -> tuple[Spec, ...]:
    """The oldest element, once there is one; raises `QueueClosedError` when closed and empty."""
    return queue_specs(dtypes, shapes)


@no_gradient
@op(effect=True, stateful=True)
def dequeue_many(
    n: Spec, *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any
) -> tuple[Spec, ...]:
    """The ``n`` oldest elements at once, stacked; waits until there are that many."""
    _check_count(n, shapes, resource)
    return tuple(Spec(s.dtype, (n.value, *s.shape)) for s in queue_specs(dtypes, shapes))


@no_gradient
@op(effect=True, stateful=True)
def dequeue_up_to(
    n: Spec, *, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any
) -> tuple[Spec, ...]:
    """The ``n`` oldest elements, stacked, or the fewer that a closed queue still holds."""
    _check_count(n, shapes, resource)
    return tuple(Spec(s.dtype, (None, *s.shape)) for s in queue_specs(dtypes, shapes))


def _check_count(n: Spec, shapes: Any, resource: str) -> None:
    if n.dtype.kind not in "iu" or n.dims not in (None, ()):
        raise SpecError(f"the number of elements is an integer scalar, got {n}")
    if isinstance(n.value, int) and n.value < 0:
        raise SpecError(f"the number of elements cannot be {n.value}")
    if shapes is None or None in shapes:
        raise SpecError(f"the queue {resource!r} cannot stack elements of unknown shapes; create it with shapes=")


@no_gradient
@op(effect=True, stateful=True)
def queue_size(*, resource: str, container: str, capacity: int, dtypes: tuple[str, ...], shapes: Any) -> Spec:
    """The number of elements waiting, an int64 scalar."""
    return Spec("int64", ())


@no_gradient
@op(effect=True, stateful=True)
def queue_close(
    *,
    resource: str,
    container: str,
    capacity: int,
    dtypes: tuple[str, ...],
    shapes: Any,
    cancel_pending_enqueues: bool = False,
) -> None:
    """Let nothing more in; what waits to get in still does, unless ``cancel_pending_enqueues``."""


@brief
class FIFOQueue:
    """A bounded first-in, first-out queue of elements, each of one tensor or several.

    ``dtypes`` and ``shapes`` describe the components: one dtype and shape, or a sequence of them. ``shapes=None``
    leaves the shapes open; `dequeue_many` and `dequeue_up_to` need them. Waiters are served strictly in order.
    """

    @located("a queue")
    def __init__(self, capacity: int, dtypes: Any, shapes: Any = None, name: str | None = None) -> None:
        graph = current_graph("a queue")
        if not isinstance(capacity, int) or capacity < 1:
            raise SpecError(f"it needs room for at least one element, got capacity={capacity!r}")
        self._single = not isinstance(dtypes, (list, tuple))
        names = tuple(as_dtype(d).name for d in ([dtypes] if self._single else dtypes))
        nested = isinstance(shapes, (list, tuple)) and len(shapes) == 1 and isinstance(shapes[0], (list, tuple))
        each = [shapes] if self._single and not nested else shapes
        forms = None if shapes is None else tuple(as_shape(s) for s in each)
        if forms is not None and len(forms) != len(names):
            raise SpecError(f"{len(names)} dtypes need as many shapes, got {len(forms)}")
        scope = current_scope()
        detail: Mapping[str, Attr] = {"capacity": capacity, "kind": "fifo"}
        self.resource = Resource(
            "queue",
            scope.container,
            graph.claim_name(name, "queue"),
            queue_specs(names, forms),
            scope.device,
            user_site(),
            detail=detail,
        )
        graph.add_resource(self.resource)
        self.graph = graph
        self._attributes: dict[str, Any] = {
            "resource": self.resource.name,
            "container": self.resource.container,
            "capacity": capacity,
            "dtypes": names,
            "shapes": forms,
        }

    @property
    def name(self) -> str:
        """Its name, unique among the graph's variables and queues."""
        return self.resource.name

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of an element's components."""
        return self.resource.specs

    def __repr__(self) -> str:
        return f"<FIFOQueue {self.name!r} of ({', '.join(map(str, self.specs))})>"

    def enqueue(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that appends ``value`` (a tensor, or one per component) once there is room."""
        return cast("Node", self._build(enqueue, self._components(value), name=name))

    def enqueue_many(self, value: Any, *, name: str | None = None) -> Node:
        """The operation that appends the entries along the first axis of ``value`` as elements."""
        return cast("Node", self._build(enqueue_many, self._components(value), name=name))

    def dequeue(self, *, name: str | None = None) -> Any:
        """The oldest element once there is one: a tensor, or a tuple of one per component."""
        return self._element(self._build(dequeue, name=name))

    def dequeue_many(self, n: Any, *, name: str | None = None) -> Any:
        """The ``n`` oldest elements at once, stacked along a new first axis."""
        return self._element(self._build(dequeue_many, n, name=name))

    def dequeue_up_to(self, n: Any, *, name: str | None = None) -> Any:
        """The ``n`` oldest elements, or the fewer that the queue holds when it is closed."""
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
            twin = FIFOQueue(
                self._attributes["capacity"], self._attributes["dtypes"], self._attributes["shapes"], self.name
            )
            feeds = tuple(placeholder(s.dtype, s.dims, name="element") for s in self.specs)
            return graph, feeds, twin.enqueue(feeds), twin.close()

    def _build(self, what: Op, *inputs: Any, name: str | None, **more: Any) -> Any:
        with building(self.graph):
            return what(*inputs, **self._attributes, **more, name=name or f"{self.name}/{what.name}")

    @located("an element of a queue")
    def _components(self, value: Any) -> list[Any]:
        given = list(value) if isinstance(value, (tuple, list)) and not self._single else [value]
        if len(given) != len(self.specs):
            raise SpecError(f"{self!r} takes {len(self.specs)} components, not {len(given)}")
        return [_of_dtype(v, s.dtype) for v, s in zip(given, self.specs, strict=True)]

    def _element(self, outputs: Any) -> Any:
        """A bare tensor for a queue of one bare dtype, else a tuple."""
        return outputs if self._single or isinstance(outputs, tuple) else (outputs,)
