"""The deferred dataflow graph: nodes that apply ops, tensors between them, the variables and queues they share.

A graph only grows, by its own builder interface, until it is finalized. It holds no value but constants and runs
nothing. Scopes (names, devices, control dependencies) are one immutable value in a ``ContextVar``, so threads and tasks
that build side by side do not see each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from flowrt.base.attributes import Attr, as_attr
from flowrt.base.device import ANYWHERE, Device, HeldTwice, SomeOf
from flowrt.base.errors import GraphError, GraphFinalizedError, PlacementError, Site, SpecError, user_site
from flowrt.base.locating import checked_name, checked_seed, fitting
from flowrt.base.plan import resources_in
from flowrt.base.tracebacks import brief
from flowrt.base.valueclass import valueclass
from flowrt.op import REGISTRY, Op, active_builder, as_value, building
from flowrt.operators import NEVER_COPIED, NoValue, Operators

if TYPE_CHECKING:
    from flowrt.base.partitioning import Partition
    from flowrt.base.spec import Spec


@valueclass
class Scope:
    """What surrounds the code that builds nodes."""

    prefix: str = ""
    device: Device = ANYWHERE
    colocate: tuple[Node, ...] = ()
    control: tuple[Node, ...] = ()
    container: str = ""


MOST_INFERRED = 4096  # kinds of nodes whose specs a graph remembers

_OUTERMOST = Scope()
_scope: ContextVar[Scope] = ContextVar("flowrt_scope", default=_OUTERMOST)


@dataclass(eq=False, slots=True)
class Node(NoValue):
    """One application of an op. ``outputs`` are its tensors; ``control_inputs`` must finish before it starts."""

    graph: Graph
    index: int
    op: Op
    name: str
    inputs: tuple[Tensor, ...]
    attrs: dict[str, Any]  # its op knows of which types
    control_inputs: tuple[Node, ...]
    device: Device
    colocate: tuple[Node, ...]
    site: Site
    outputs: tuple[Tensor, ...] = ()

    @property
    def builder(self) -> Graph:
        """Who builds with this node: its graph."""
        return self.graph

    @property
    def resource(self) -> tuple[str, str] | None:
        """The (container, name) of the variable or queue this node works on."""
        found = resources_in(self.attrs)
        return found[0] if found else None

    @property
    def resources(self) -> tuple[tuple[str, str], ...]:
        """All that it works on: that one, and the variables it keeps beside it."""
        return resources_in(self.attrs)

    def __repr__(self) -> str:
        return f"<{self.op.name} {self.name!r} ({self.site})>"


if TYPE_CHECKING:
    TensorOperators: TypeAlias = "Operators[TensorOrArray]"
else:
    TensorOperators = Operators


@brief
class Tensor(TensorOperators):
    """A value that a step will compute: one output of a node.

    Python's operators, slicing and ``len`` work as on arrays; ``==`` and ``!=``, too, compare entry by entry. Tensors
    hash by identity, so they are keys of feeds.
    """

    __slots__ = ("_node", "_spec", "index")
    __tensor__ = None  # it stands for itself; a class attribute is found faster than a missing one

    def __init__(self, node: Node, index: int, spec: Spec) -> None:
        self._node = node
        self.index = index
        self._spec = spec

    @property
    def op(self) -> Node:
        """The operation that computes this tensor."""
        return self._node

    @property
    def graph(self) -> Graph:
        """The graph it belongs to."""
        return self._node.graph

    @property
    def builder(self) -> Graph:
        """Who builds with this tensor: its graph."""
        return self._node.graph

    @property
    def spec(self) -> Spec:
        """Its dtype, its shape, and its value where that is known while building."""
        return self._spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype of its entries."""
        return self._spec.dtype

    @property
    @brief
    def shape(self) -> tuple[int | None, ...]:
        """The sizes, None where only a step will know; raises `SpecError` where even the rank is open."""
        if self._spec.dims is None:
            raise SpecError(f"{user_site()}: the rank of {self!r} is not known; declare its shape (a queue: shapes=)")
        return self._spec.dims

    @property
    def name(self) -> str:
        """``operation:output``, unique in the graph."""
        return f"{self._node.name}:{self.index}"

    @property
    def device(self) -> str:
        """The device this tensor was asked to be on, as far as the program says."""
        return str(self._node.device)

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self._spec}>"

    def __bool__(self) -> bool:
        compared = self._node.op.name in ("equal", "not_equal")
        raise GraphError(
            f"{user_site()}: the tensor {self.name!r} has no value while the graph is built; "
            "use fr.cond for a choice in the graph, or fetch the tensor first"
            + ("; `a is b` tells whether two names mean one tensor, and a set finds one among many" if compared else "")
        )

    def __len__(self) -> int:
        first = self.shape[0] if self.shape else None
        if first is None:
            raise GraphError(f"{user_site()}: the length of {self!r} is not known; use fr.shape_of(tensor)[0]")
        return first

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[i] for i in range(len(self))])

    if not TYPE_CHECKING:  # or checkers would let an array take it for an operand

        def __array__(self, *args: object, **kwargs: object) -> Any:
            raise GraphError(f"{user_site()}: the tensor {self.name!r} is not an array; fetch it with session.run")


if TYPE_CHECKING:

    class TensorOrArray(Tensor, np.ndarray[Any, np.dtype[Any]]):  # type: ignore[misc]
        """What an op answers: a `Tensor` in a graph, an array outside. A checker allows what either does.

        No type of the arguments tells which of the two: ``fr.zeros((3,))`` has none that could.
        """

        @property  # type: ignore[misc]
        def shape(self) -> tuple[Any, ...]:
            """The sizes; of a tensor, None where only a step will know."""

        def __iter__(self) -> Iterator[TensorOrArray]:
            """Along the first axis."""


@valueclass
class Resource:
    """A variable or queue that nodes share by (container, name).

    A variable starts from ``initial``, by a session but for a "local variable"; ``detail`` tells a queue's capacity.
    """

    kind: str
    container: str
    name: str
    specs: tuple[Spec, ...]
    device: Device
    site: Site
    trainable: bool = False
    initial: Tensor | None = None
    initialize: Node | None = None
    detail: Mapping[str, Attr] = field(default_factory=dict)


class Graph:
    """A graph of ops. ``with graph:`` makes it the one that ops record into.

    ``seed`` is what random ops without a seed of their own derive theirs from; ``None`` leaves it to the session.
    """

    @fitting
    def __init__(self, seed: int | None = None) -> None:
        self.seed, self.finalized = checked_seed(seed), False
        self.nodes: list[Node] = []
        self._by_name: dict[str, Node] = {}  # those that were there when one was last asked for
        self.derived: dict[Any, Any] = {}  # what passes find out once it is finalized, for all steps
        self.resources: dict[tuple[str, str], Resource] = {}
        self.summaries: dict[Any, Tensor] = {}  # what it tells of each step, by what `flowrt.summary` calls it
        self.variables: list[Any] = []
        self._names: dict[str, int] = {}
        self._claimed: dict[str, int] = {}
        self._counted: set[str] = set()
        self.some_of: list[SomeOf] = []  # in the order of their nodes
        self.held_twice: list[HeldTwice] = []
        self.partitions: dict[str, Partition] = {}  # what several variables hold together, by its name
        self.startable: set[int] = set()  # nodes that variables may start from, as far as any was asked about
        self._entered: list[building] = []
        self._inferred: dict[tuple[Any, ...], tuple[tuple[Spec, ...], Any, Any]] = {}  # by ids, and what these are of

    def __enter__(self) -> Graph:
        if active_builder() not in (None, self):
            raise GraphError(f"{user_site()}: another graph is being built; leave it before entering this one")
        scope = building(self)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes>"

    @brief
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise GraphError(f"{user_site()}: {NEVER_COPIED}")

    def finalize(self) -> None:
        """Let no further node in. Opening a session does it."""
        self.finalized = True

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A constant tensor of ``array``, which is copied."""
        made: Tensor = self.apply(REGISTRY["constant"], (), {"value": as_attr(array)})[0]
        return made

    def spec(self, value: Tensor) -> Spec:
        """The spec of one of this graph's tensors."""
        return value.spec

    def lies_in(self, other: Any) -> bool:
        """Whether ``other`` is a graph around this one: only a body lies in another graph."""
        return False

    def adopt(self, value: Any) -> Any:
        """``value``, which no graph around this one could own."""
        return value

    def get_operation_by_name(self, name: str) -> Node:
        """The operation of that name, as in a graph read by `from_bytes`; raises `GraphError` where there is none."""
        self._by_name.update((node.name, node) for node in self.nodes[len(self._by_name) :])
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            raise GraphError(f"{user_site()}: no operation of this graph is named {name!r}")
        return found

    def get_tensor_by_name(self, name: str) -> Tensor:
        """The tensor of that name, ``operation:output``; raises `GraphError` where there is none."""
        operation, _, index = str(name).partition(":")
        outputs = self.get_operation_by_name(operation).outputs
        if not index.isdecimal() or int(index) >= len(outputs):
            raise GraphError(
                f"{user_site()}: no tensor is named {name!r}; {operation!r} has {len(outputs)} outputs, from :0"
            )
        return outputs[int(index)]

    def apply(self, op: Op, inputs: Sequence[Tensor], attrs: Mapping[str, Attr], name: str | None = None) -> Any:
        """Record one node and answer its outputs (the node itself where it has none)."""
        site = user_site()
        if self.finalized:
            raise GraphFinalizedError(f"{op.name} ({site}): a session runs this graph; build before that")
        for tensor in inputs:
            if tensor._node.graph is not self:
                raise GraphError(f"{op.name} ({site}): {tensor!r} belongs to another graph")
        specs = self._infer_alike(op, inputs, attrs) if inputs else op.infer((), attrs)
        scope = _scope.get()
        node = Node(
            self,
            len(self.nodes),
            op,
            self.unique_name(name or op.name),
            tuple(inputs),
            dict(attrs),
            self._waits_for(scope.control),
            scope.device,
            scope.colocate,
            site,
        )
        node.outputs = tuple([Tensor(node, i, spec) for i, spec in enumerate(specs)])
        self.nodes.append(node)
        return node.outputs or (node,)

    def _infer_alike(self, op: Op, inputs: Sequence[Tensor], attrs: Mapping[str, Attr]) -> tuple[Spec, ...]:
        """As `Op.infer`, once for the same specs and attributes: what it answers are the same ones again, and large
        graphs repeat themselves."""
        given = tuple([t._spec for t in inputs])
        if op.stateful:  # it bears a name of its own
            return op.infer(given, attrs)
        key = (op, *map(id, given), *attrs, *map(id, attrs.values())) if attrs else (op, *map(id, given))
        found = self._inferred.get(key)
        if found is None:
            if len(self._inferred) >= MOST_INFERRED:
                self._inferred.clear()
            found = self._inferred[key] = op.infer(given, attrs), given, tuple(attrs.values())
        return found[0]

    def _waits_for(self, control: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(n for n in control if n.graph is self) if control else ()

    def extend(self, node: Node, attrs: Mapping[str, Attr]) -> tuple[Tensor, ...]:
        """Change the attributes of ``node`` so that it has further outputs, and answer these; its others stay."""
        if self.finalized:
            raise GraphFinalizedError(f"{node.op.name} {node.name!r} ({node.site}): a session runs this graph")
        had, specs = len(node.outputs), node.op.infer([t.spec for t in node.inputs], attrs)
        node.attrs = dict(attrs)
        node.outputs += tuple(Tensor(node, i, spec) for i, spec in enumerate(specs[had:], had))
        return node.outputs[had:]

    def unique_name(self, name: str) -> str:
        """``name`` under the scope's prefix, numbered if it is taken."""
        return _numbered(self._names, _scope.get().prefix + checked_name(name))

    def claim_name(self, name: str | None, kind: str) -> str:
        """The name of a variable, queue or trainer under the scope's prefix, unique among those.

        Without ``name``, or where that was given before, it hangs on what was built before: `is_counted`.
        """
        asked = _scope.get().prefix + checked_name(name or kind)
        claimed = _numbered(self._claimed, asked)
        if not name or claimed != asked:
            self._counted |= {asked, claimed}
        return claimed

    def is_counted(self, name: str) -> bool:
        """Whether a claimed ``name``, or one that it lies in, hangs on the order in which the graph was built."""
        counted = self._counted
        return bool(counted) and any(scope in counted for scope in (name, *scopes_of(name)))

    def iterations(self) -> list[Tensor]:
        """The numbers of the iterations of the loops around what is built here, outermost first."""
        return []

    def add_resource(self, resource: Resource) -> None:
        """Enter a variable or queue; an equal (container, name) twice is an error."""
        key = (resource.container, resource.name)
        if self.finalized:
            raise GraphFinalizedError(f"{resource.kind} {resource.name!r} ({resource.site}): the graph is finalized")
        if key in self.resources:
            other = self.resources[key]
            raise GraphError(f"{resource.site}: {other.kind} {resource.name!r} exists already ({other.site})")
        self.resources[key] = resource

    def complete_resource(self, key: tuple[str, str], initial: Tensor, initialize: Node) -> None:
        """Record how a variable gets its first value."""
        self.resources[key] = replace(self.resources[key], initial=initial, initialize=initialize)

    @brief
    def to_bytes(self) -> bytes:
        """The graph as validated, self-contained data; no code inside."""
        return _as_bytes[0][0](self)

    @staticmethod
    @brief
    def from_bytes(data: bytes) -> Graph:
        """The graph that `to_bytes` wrote; raises `BrokenStream` or `GraphError` for anything else."""
        return _as_bytes[0][1](data)


_as_bytes: list[tuple[Callable[[Graph], bytes], Callable[[bytes], Graph]]] = []


def set_bytes(write: Callable[[Graph], bytes], read: Callable[[bytes], Graph]) -> None:
    """Have ``write`` and ``read`` make bytes of graphs, and graphs of bytes."""
    _as_bytes[:] = [(write, read)]


def _numbered(taken: dict[str, int], name: str) -> str:
    """``name``, numbered if it is ``taken``, which it is from now on."""
    taken[name] = 1 + (count := taken.get(name, 0))
    return name if count == 0 else _numbered(taken, f"{name}_{count}")


def scopes_of(name: str) -> Iterator[str]:
    """The scopes around ``name``, outermost first."""
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def current_graph(what: str) -> Graph:
    """The graph being built; ``what`` names who needs one in the error."""
    graph = active_builder()
    if not isinstance(graph, Graph):
        raise GraphError(f"{user_site()}: {what} needs a graph; write it inside `with fr.Graph():`")
    return graph


def current_scope() -> Scope:
    """The scope that nodes are built in here and now."""
    return _scope.get()


class scoped:
    """Put exactly ``scope`` around what is built inside."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self._token = _scope.set(self._scope)

    def __exit__(self, *exc: object) -> None:
        _scope.reset(self._token)


@contextmanager
def name_scope(name: str) -> Iterator[None]:
    """Prefix the names of the nodes built inside with ``name/``."""
    if not isinstance(name, str) or not name or name.startswith("/") or name.endswith("/"):
        raise GraphError(f"{user_site()}: {name!r} is not a name for a scope")
    scope = _scope.get()
    with scoped(replace(scope, prefix=f"{scope.prefix}{name}/")):
        yield


@contextmanager
def device(name: str) -> Iterator[None]:
    """Ask for a device, any part of whose name may be left out; inner scopes refine outer ones."""
    scope = _scope.get()
    try:
        asked = Device.parse(name)
    except PlacementError as error:
        raise PlacementError(f"{user_site()}: {error}") from None
    with scoped(replace(scope, device=asked.over(scope.device))):
        yield


@contextmanager
def colocate_with(value: Any) -> Iterator[None]:
    """Put what is built inside on the same device as ``value``."""
    with scoped(replace(_scope.get(), colocate=(*_scope.get().colocate, as_node(value)))):
        yield


def beside(node: Node) -> scoped:
    """Put what is built inside where ``node`` is, whatever device the code around it asks for."""
    return scoped(replace(_scope.get(), device=ANYWHERE, colocate=(node,)))


@contextmanager
def control_dependencies(values: Sequence[Any] | None) -> Iterator[None]:
    """Start what is built inside only after ``values`` are computed; ``None`` forgets those that surround it."""
    scope = _scope.get()
    if values is not None and not isinstance(values, (list, tuple)):
        raise GraphError(f"{user_site()}: control dependencies are a list of tensors and operations, got {values!r}")
    control = () if values is None else (*scope.control, *(as_node(v) for v in values))
    with scoped(replace(scope, control=control)):
        yield


@contextmanager
def container(name: str) -> Iterator[None]:
    """Keep the variables and queues created inside in the container ``name`` of their nodes."""
    with scoped(replace(_scope.get(), container=checked_name(name))):
        yield


def as_node(value: Any) -> Node:
    """The operation behind a tensor, variable or operation."""
    found = as_value(value)
    node = found.op if isinstance(found, Tensor) else found
    if isinstance(node, Node):
        return node
    raise GraphError(f"{user_site()}: {value!r} is neither a tensor nor an operation")
