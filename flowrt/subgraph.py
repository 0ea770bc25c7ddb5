"""The graph of a body, which takes what it uses of the graphs around it as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import GraphError
from flowrt.graph import Graph, Node, Resource, Tensor, current_scope, scoped
from flowrt.op import REGISTRY

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


class Subgraph(Graph):
    """The graph of a body: a part of ``outer`` that an op of it holds. What it uses of the graphs around it becomes
    one of its inputs: ``captured`` holds them, by the tensor of ``outer``. ``awaited`` are nodes of ``outer`` that
    something inside waits for. ``iteration`` is the input that says which it is, where it is that of a loop. It
    holds no variables or queues of its own.
    """

    def __init__(self, outer: Graph) -> None:
        super().__init__(outer.seed)
        self.outer = outer
        self.device = current_scope().device
        self.captured: dict[Tensor, Tensor] = {}
        self.awaited: dict[Node, None] = {}
        self.iteration: Tensor | None = None

    def lies_in(self, other: Any) -> bool:
        """Whether ``other`` is a graph around this one."""
        return other is self.outer or self.outer.lies_in(other)

    def adopt(self, value: Any) -> Any:
        """``value`` as an input of this graph, if it is a tensor of a graph around it."""
        if not isinstance(value, Tensor) or value.graph is self or not self.lies_in(value.graph):
            return value
        outside = self.outer.adopt(value)
        if outside not in self.captured:
            self.captured[outside] = self.input(outside.spec, outside.op.name)
        return self.captured[outside]

    def iterations(self) -> list[Tensor]:
        """As `Graph.iterations`; those of loops around this graph are captured."""
        around = [self.adopt(iteration) for iteration in self.outer.iterations()]
        return around if self.iteration is None else [*around, self.iteration]

    def input(self, spec: Spec, name: str = "input") -> Tensor:
        """A new input. Unlike a placeholder it may come with a known value."""
        with scoped(replace(current_scope(), control=())):
            attrs = {"dtype": spec.dtype.name, "shape": spec.dims}
            made: Tensor = self.apply(REGISTRY["placeholder"], (), attrs, name)[0]
        made.op.outputs = (Tensor(made.op, 0, spec),)
        return made.op.outputs[0]

    def add_resource(self, resource: Resource) -> None:
        """Raises: state lives in the graph around the body."""
        raise GraphError(f"{resource.site}: create the {resource.kind} {resource.name!r} outside the loop or branch")

    def _waits_for(self, control: Sequence[Node]) -> tuple[Node, ...]:
        self.awaited.update((n, None) for n in control if self.lies_in(n.graph))
        return super()._waits_for(control)
