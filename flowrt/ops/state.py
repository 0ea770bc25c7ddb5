"""Variables: state that lives on nodes under (container, name), and the ops that read and write it.

Every op here names its variable by attributes alone, so that a node can check the one it is asked for. `Variable` is
what a program holds of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrt.base.attributes import frozen
from flowrt.base.errors import SpecError, user_site
from flowrt.base.locating import fitting, located
from flowrt.base.partitioning import Partition, row_bounds
from flowrt.base.plain import as_dtype_of, default_array, fitting_array
from flowrt.base.spec import NAMES, Spec, as_dtype
from flowrt.base.tracebacks import brief
from flowrt.base.traits import VariableUpdate
from flowrt.graph import Graph, Resource, TensorOperators, as_node, beside, current_graph, current_scope, scoped
from flowrt.op import active_builder, as_value, building
from flowrt.ops.elementwise import astype, where
from flowrt.ops.flow import group
from flowrt.ops.routing import looked_up, split_slices
from flowrt.ops.rows import add_rows, assign_rows, write_rows
from flowrt.ops.shape import concat
from flowrt.ops.slices import IndexedSlices
from flowrt.ops.source import constant, zeros_like
from flowrt.ops.starting import check_start, rows_of
from flowrt.subgraph import Subgraph
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.graph import Node, Tensor
    from flowrt.op import DType, Op
    from flowrt.typed import Operand, Result

__all__ = ["Variable"]


@op(stateful=True)
def read_variable(
    *, resource: str, container: str, dtype: DType, shape: Any, fresh: bool = False, name: str | None = None
) -> Result:
    """The variable's value: before this step's writes, or, if ``fresh``, after those it is ordered behind."""
    return _held(dtype, shape)


@lru_cache(maxsize=1024)
def _held(dtype: DType, shape: tuple[int, ...]) -> Spec:
    """The spec of what such a variable holds, the same one for all that are alike."""
    return Spec(dtype, shape)


def _check_written(value: Spec, resource: str, dtype: DType, shape: Any) -> None:
    held = _held(dtype, shape)
    if not held.accepts(value.dtype, held.shape if value.dims is None else value.shape):
        raise SpecError(f"the variable {resource!r} holds {held}, not {value}")


@op(stateful=True, update=VariableUpdate(), gradient=None)
def assign(value: Operand, *, resource: str, container: str, dtype: DType, shape: Any, name: str | None = None) -> None:
    """Make ``value`` the variable's."""
    _check_written(value, resource, dtype, shape)


@op(stateful=True, update=VariableUpdate("add"), gradient=None)
def assign_add(
    value: Operand, *, resource: str, container: str, dtype: DType, shape: Any, name: str | None = None
) -> None:
    """Add ``value`` to the variable's."""
    _check_written(value, resource, dtype, shape)


@op(stateful=True, update=VariableUpdate("subtract"), gradient=None)
def assign_sub(
    value: Operand, *, resource: str, container: str, dtype: DType, shape: Any, name: str | None = None
) -> None:
    """Subtract ``value`` from the variable's."""
    if value.dtype == bool:
        raise SpecError(f"the difference of bools is not defined, and the variable {resource!r} holds them; use assign")
    _check_written(value, resource, dtype, shape)


class VariableSource(Protocol):
    """Who may hand out an existing variable where a program asks for a new one."""

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool, *partition: Any) -> Variable | None:
        """The variable to use, or None to let a new one be made; ``partition`` where one was asked for."""


variable_source: ContextVar[VariableSource | None] = ContextVar("flowrt_variable_source", default=None)


@contextmanager
def variables_from(source: VariableSource | None) -> Iterator[None]:
    """Ask ``source`` first for every variable that is created inside."""
    token = variable_source.set(source)
    try:
        yield
    finally:
        variable_source.reset(token)


_condition: ContextVar[Tensor | None] = ContextVar("flowrt_condition", default=None)


@contextmanager
def only_if(condition: Tensor) -> Iterator[None]:
    """Have what is assigned to whole variables inside change them only in steps where a scalar is true."""
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


@brief
class Variable(TensorOperators):
    """A tensor that outlives the step: it is read, and written by `assign`, `assign_add`, `assign_sub`, and row by row.

    ``initial`` (a number, an array or a tensor of fully known shape, also one computed from other variables, or a
    function of no arguments that answers one) is what a session starts it from, unless it was restored or an earlier
    session left it. The graph keeps an array for sessions
    to come: a copy, or the array itself where it is read-only (``table.setflags(write=False)``, ``np.load`` with
    ``mmap_mode="r"``). A large table of which steps only look up and move rows shares the copy's pages until they are
    written. Used as a tensor a variable means its value before the step's writes; `read` under control
    dependencies sees earlier ones.

    With ``partition``, a number of parts or the bounds of their rows such as (0, 1000, 4000), it is split by rows, and
    its parts are placed on several tasks: see `SplitVariable`. Raises `SpecError` for parts that make no sense.
    """

    __slots__ = ("_read", "resource", "whole")
    resource: Resource
    whole: SplitVariable | None
    """The variable that this one is a part of."""
    _read: Tensor

    @fitting
    def __new__(
        cls,
        initial: Any,
        *,
        dtype: Any = None,
        name: str | None = None,
        trainable: bool = True,
        partition: int | Sequence[int] | None = None,
    ) -> Variable:
        initial = initial() if callable(initial) else initial
        source = variable_source.get()
        split = () if partition is None else (partition,)  # of which most sources need not know
        found = None if source is None else source.variable(initial, dtype, name, trainable, *split)
        if found is not None:
            return found
        if partition is None:
            return _create_variable(initial, dtype, name, trainable)
        return split_variable(initial, dtype, name, trainable, partition)

    @staticmethod
    def of(resource: Resource, read: Tensor) -> Variable:
        """The handle of a variable that stands in ``read.graph`` already; ``read`` is its plain read."""
        variable: Variable = object.__new__(Variable)
        variable.resource = resource
        variable.whole = None
        variable._read = read
        return variable

    @property
    def parts(self) -> tuple[Variable, ...]:
        """The variables that nodes hold of it: itself, or, where it is split, one for each stretch of its rows."""
        return (self,)

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

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read)

    if not TYPE_CHECKING:

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
            slices = IndexedSlices(of_dtype(rows, self.dtype), ids, self.shape)
        return self.move_rows(write, slices, [factor], name=name)

    def move_rows(self, write: Op, slices: IndexedSlices, settings: Any, slots: Any = (), name: Any = None) -> Node:
        """The operation that moves the rows of ``slices``, and of ``slots``, by a write of `flowrt.ops.rows`."""
        attributes = _attributes(self.resource)
        if slots:
            attributes["slots"] = tuple(slot.name for slot in slots)
        with building(self.graph):
            made: Node = write_rows(write, slices, settings, attributes, name or f"{self.name}/{write.name}")
        return made

    def _if_meant(self, write: Op, value: Any) -> Any:
        """What is written so that the variable stays as it is where the condition of `only_if` is false."""
        condition = _condition.get()
        if condition is None:
            return value
        return where(condition, value, as_value(self) if write is assign else zeros_like(value))

    def _write(self, write: Op, value: Any, name: str | None) -> Node:
        with building(self.graph), located(f"{write.name} to {self.name!r}"):
            value, name = self._if_meant(write, of_dtype(value, self.dtype)), name or f"{self.name}/{write.name}"
            made: Node = _touch(write, (value,), _attributes(self.resource), name)
        return made


@located("variable")
def _create_variable(initial: Any, dtype: Any, name: str | None, trainable: bool) -> Variable:
    graph = current_graph("a variable")
    value, scope = _initial(initial, dtype), current_scope()
    check_start(value, graph, f"{scope.prefix}{name or 'variable'}", user_site())
    own = graph.claim_name(name, "variable")
    variable = _new_variable(_spec_of(value), lambda _: value, own, trainable)
    graph.variables.append(variable)
    return variable


def _new_variable(spec: Spec, start: Callable[[Tensor], Any], name: str, trainable: bool) -> Variable:
    """A variable of that very name, which starts from what ``start`` answers for its plain read: a tensor, an array."""
    graph, scope = current_graph("a variable"), current_scope()
    resource = Resource("variable", scope.container, name, (spec,), scope.device, user_site(), trainable)
    graph.add_resource(resource)
    attributes = _attributes(resource)
    with scoped(replace(scope, prefix=f"{name}/", control=())):
        plain = _touch(read_variable, (), {**attributes, "fresh": False}, "value")
        value = start(plain)
        first = value if hasattr(value, "builder") else constant(value, name="initial")
        initialize = _touch(assign, (first,), attributes, "initialize")
    graph.complete_resource((resource.container, name), first, initialize)
    return Variable.of(graph.resources[(resource.container, name)], plain)


@located("variable")
def split_variable(
    initial: Any, dtype: Any, name: str | None, trainable: bool, partition: Any, devices: Sequence[Device] = ()
) -> SplitVariable:
    """A variable that is split by rows as ``partition`` says, part i on ``devices[i]``, or where it will be placed."""
    graph = current_graph("a variable")
    value, scope, site = _initial(initial, dtype), current_scope(), user_site()
    check_start(value, graph, f"{scope.prefix}{name or 'variable'}", site)
    spec = _spec_of(value)
    if spec.rank == 0:
        raise SpecError(f"a scalar has no rows to be split by, got partition={partition!r}; leave that out")
    rows = row_bounds(partition, spec.concrete[0])
    own = graph.claim_name(name, "variable")
    with scoped(replace(scope, prefix="")):
        shards = tuple(graph.claim_name(f"{own}/part_{part}", "part") for part in range(len(rows) - 1))
    found, parts = Partition(own, spec, rows, shards, scope.container), []
    for part, (shard, first, end) in enumerate(found.pieces()):
        device = devices[part] if devices else scope.device
        with scoped(replace(scope, prefix="", control=(), device=device)):
            parts.append(_new_variable(found.spec_of(first, end), _start_of(value, first, end), shard, trainable))
    with scoped(replace(scope, prefix=f"{own}/", control=())):
        whole = concat(parts, name="value")
        initialize = group(*(part.initializer for part in parts), name="initialize")
    resource = Resource("variable", scope.container, own, (spec,), scope.device, site, trainable, whole, initialize)
    graph.variables += parts
    graph.partitions[own] = found
    return SplitVariable.join(resource, whole, parts, found)


def _start_of(value: Any, first: int, end: int) -> Callable[[Tensor], Any]:
    """What a part starts from, made beside it."""

    def start(read: Tensor) -> Any:
        with beside(read.op):
            return rows_of(value, first, end)

    return start


def _spec_of(value: Any) -> Spec:
    return value.spec.without_value() if hasattr(value, "spec") else Spec(value.dtype, value.shape)


@brief
class SplitVariable(Variable):
    """A variable that is split by rows: ``parts`` are variables that nodes hold, wherever each is placed.

    It is used as any variable. `take` and `nn.embedding_lookup` send each part the ids of its rows, gather them there,
    and put them together; writes of rows, and gradients, are sent to the parts likewise. Whatever else reads it reads
    all of its parts to put them together: use rows where that is much. See `flowrt.base.partitioning`.
    """

    __slots__ = ("_parts", "partition")
    partition: Partition
    _parts: tuple[Variable, ...]

    @staticmethod
    def join(resource: Resource, whole: Tensor, parts: Sequence[Variable], partition: Partition) -> SplitVariable:
        """The handle of ``parts``, of which ``whole`` is put together. No node knows ``resource``."""
        variable: SplitVariable = object.__new__(SplitVariable)
        variable.resource, variable.whole, variable._read = resource, None, whole
        variable._parts, variable.partition = tuple(parts), partition
        for part in parts:
            part.whole = variable
        return variable

    def __tensor__(self) -> Tensor:
        """All of it, put together for each use: so partials add up in the order in which the whole one's would."""
        if self.graph.finalized or isinstance(active_builder(), Subgraph):
            return self._read
        with building(self.graph):
            made: Tensor = concat(self._parts, name=f"{self.name}/value")
        return made

    @property
    def parts(self) -> tuple[Variable, ...]:
        """The variables that nodes hold of it, each a stretch of its rows, in order."""
        return self._parts

    @property
    def initializer(self) -> Node:
        """The operation that gives the variable its initial value."""
        assert self.resource.initialize is not None
        return self.resource.initialize

    def composed(self, op: Op, arguments: Mapping[str, Any], name: str | None) -> Any:
        """What ``op`` with these arguments, the first this variable, comes to on its parts; None to read it whole."""
        by_rows = op.name == "take" and arguments["axis"] in (0, -self.spec.rank)
        if not by_rows or isinstance(active_builder(), Subgraph):
            return None  # in a body rows are taken of the whole, as iterations must find equally many in each part
        with building(self.graph), located(f"take {name!r}" if name else "take"):
            ids, absent, bounds = arguments["indices"], arguments["absent"], self.partition.rows
            return looked_up(self._parts, bounds, ids, lambda p: beside(as_node(p)), name, self.name, absent)

    def read(self, *, name: str | None = None) -> Tensor:
        """The value when this read runs: after whatever the control dependencies around it have written."""
        with building(self.graph):
            made: Tensor = concat([part.read() for part in self._parts], name=name or f"{self.name}/read")
        return made

    def move_rows(self, write: Op, slices: IndexedSlices, settings: Any, slots: Any = (), name: Any = None) -> Node:
        """The operation that moves the rows of ``slices`` of each part."""
        with building(self.graph), located(f"{write.name} of {self.name!r}"):
            each = zip(self._parts, split_slices(slices, self.partition), strict=True)
            moves = [part.move_rows(write, mine, settings) for part, mine in each]
            made: Node = group(*moves, name=name or f"{self.name}/{write.name}")
        return made

    def _write(self, write: Op, value: Any, name: str | None) -> Node:
        with building(self.graph), located(f"{write.name} to {self.name!r}"):
            whole = of_dtype(value, self.dtype)
            given = whole.spec if hasattr(whole, "builder") else Spec(whole.dtype, whole.shape)
            _check_written(given, self.name, NAMES[self.dtype], self.shape)
            rows = ((first, end) for _, first, end in self.partition.pieces())
            writes = [part._write(write, whole[a:b], None) for part, (a, b) in zip(self._parts, rows, strict=True)]
            made: Node = group(*writes, name=name or f"{self.name}/{write.name}")
        return made


def _initial(initial: Any, dtype: Any) -> Any:
    value = as_value(initial)
    if hasattr(value, "builder"):
        return of_dtype(value, value.dtype if dtype is None else dtype, cast=True)
    return default_array(value) if dtype is None else frozen(as_dtype_of(value, as_dtype(dtype)))


def of_dtype(value: Any, dtype: Any, cast: bool = False) -> Any:
    """``value`` as a tensor as it is (cast if asked to) or an array of ``dtype``."""
    found = as_value(value)
    if not hasattr(found, "builder"):
        return fitting_array(found, as_dtype(dtype))
    return astype(found, dtype) if cast and found.dtype != as_dtype(dtype) else found


def _touch(op: Op, inputs: Sequence[Any], attributes: Mapping[str, Any], name: str) -> Any:
    """``op`` on a variable, with all its attributes; at half the cost where its inputs are the graph's own already."""
    here = active_builder()
    if here is not None and all(getattr(value, "builder", None) is here for value in inputs):
        return op.applied(here, inputs, attributes, name)
    return op(*inputs, **attributes, name=name)


def _attributes(resource: Resource) -> dict[str, Any]:
    """What every op on the variable carries."""
    spec = resource.specs[0]
    return {
        "resource": resource.name,
        "container": resource.container,
        "dtype": NAMES[spec.dtype],
        "shape": spec.concrete,
    }
