"""What a frozen model is made of: which values of a graph become constants, and the graph of all that is left.

Law: pure. It answers what is to be fetched, is given that, and builds. What depends on no input is computed once, by
who freezes, unless its value is larger than all that it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.attributes import as_attr
from flowrt.base.errors import FeedError, GraphError, from_site, user_site
from flowrt.base.traits import writes
from flowrt.graph import Graph, Scope, Tensor, scoped
from flowrt.op import lookup
from flowrt.passes.fold_constants import STRUCTURAL
from flowrt.passes.prune import READ, prune
from flowrt.passes.step import FED
from flowrt.serving.int8 import is_product, product
from flowrt.serving.signature import Frozen

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.passes.step import Ref, StepGraph, StepNode

SMALL = 1 << 12  # bytes of a value that is kept whatever it is computed from


class CutOut:
    """The part of a graph from ``inputs`` to ``outputs``, in which the tensors ``given`` have one value for good.

    Where it is to be ``quantized``, products with weights are of eight bits.
    Raises `GraphError` for what cannot be frozen.
    """

    def __init__(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], given: Sequence[Tensor], quantized: bool
    ) -> None:
        self._inputs, self._outputs, self._quantized = inputs, outputs, quantized
        self._step = _step_of(inputs, outputs, given)
        for node in self._step.nodes.values():
            _check_changes_nothing(node)
        self._varying = _varying(self._step, len(inputs))
        self._constants, self._kept = self._found()

    @property
    def constants(self) -> list[Tensor]:
        """What to fetch, all in one step."""
        return [self._tensor(ref) for ref in self._constants]

    def built(self, values: list[Any], name: str) -> Frozen:
        """The model; ``values`` are those of `constants`, and are let go."""
        arrays: dict[Ref, Any] = dict(zip(self._constants, values, strict=True))
        values.clear()
        with scoped(Scope()):
            return self._built(Graph(self._step.graph.seed), arrays, name)

    def _built(self, graph: Graph, arrays: dict[Ref, Any], called: str) -> Frozen:
        made: dict[Ref, Tensor] = {}
        for place, (name, tensor) in enumerate(self._inputs.items()):
            own = tensor.op.name if tensor.op.op.name == "placeholder" else name
            made[FED, place] = _added(graph, tensor, "placeholder", _attributes(tensor.spec), own)
        inputs = dict(zip(self._inputs, made.values(), strict=True))

        def found(ref: Ref) -> Tensor:
            if ref not in made:  # so constants stand where they are first used
                value = as_attr(np.asarray(arrays.pop(ref)))
                made[ref] = _added(graph, self._tensor(ref), "constant", {"value": value}, self._name_of(ref))
            return made[ref]

        for node in self._step.nodes.values():
            if node.id in self._varying or node.id in self._kept:
                with from_site(node.site):
                    computed = self._in_eight_bits(graph, node, found, arrays)
                    if computed is None:
                        computed = graph.apply(node.op, [found(ref) for ref in node.inputs], node.attrs, node.name)
                made.update(((node.id, i), tensor) for i, tensor in enumerate(computed))
        outputs = {name: found(ref) for name, ref in zip(self._outputs, self._step.fetches, strict=True)}
        return Frozen(graph, inputs, outputs, called)

    def _in_eight_bits(
        self, graph: Graph, node: StepNode, found: Callable[[Ref], Tensor], arrays: Mapping[Ref, Any]
    ) -> Any:
        """A product with a weight, where it is to be of eight bits; None for any other node."""
        if not self._quantized or len(node.inputs) != 2 or self._is_varying(node.inputs[1]):
            return None
        x, ref = found(node.inputs[0]), node.inputs[1]
        weight: Any = arrays[ref] if ref in arrays else found(ref).op.attrs.get("value")
        return product(graph, node, x, weight, self._name_of(ref)) if is_product(node, x, weight) else None

    def _tensor(self, ref: Ref) -> Tensor:
        return self._step.feeds[ref[1]] if ref[0] == FED else self._step.graph.nodes[ref[0]].outputs[ref[1]]

    def _name_of(self, ref: Ref) -> str:
        """What a constant is called: as the variable that it was, if it was one."""
        op = self._tensor(ref).op
        return op.resource[1] if op.op.name == READ and op.resource else op.name

    def _found(self) -> tuple[tuple[Ref, ...], frozenset[int]]:
        """The values that become constants, and the nodes that stay though they depend on no input."""
        step, constants, kept = self._step, dict[Any, None](), set[int]()
        look = [ref for node in step.nodes.values() if node.id in self._varying for ref in node.inputs]
        look += step.fetches
        while look:
            ref = look.pop()
            if self._is_varying(ref):
                continue
            if ref[0] == FED or self._is_worth_keeping(ref):
                constants[ref] = None
            elif ref[0] not in kept:
                kept.add(ref[0])
                look += step.nodes[ref[0]].inputs
        return tuple(constants), frozenset(kept)

    def _is_varying(self, ref: Ref) -> bool:
        return ref[1] < len(self._inputs) if ref[0] == FED else ref[0] in self._varying

    def _is_worth_keeping(self, ref: Ref) -> bool:
        """Whether a value takes no more than what it is computed from does."""
        node, spec = self._step.nodes[ref[0]], self._step.spec(ref)
        if not node.inputs:
            return node.op.name in (READ, "constant") or (spec.known and spec.nbytes <= SMALL)
        return spec.known and spec.nbytes <= max(SMALL, self._sources_of(ref))

    def _sources_of(self, ref: Ref) -> int:
        """The bytes of the variables, constants and given values that a value comes from."""
        seen: set[Ref] = set()
        look, total = [ref], 0
        while look:
            at = look.pop()
            if at in seen:
                continue
            seen.add(at)
            inputs = () if at[0] == FED else self._step.nodes[at[0]].inputs
            look += inputs
            spec = self._step.spec(at)
            total += spec.nbytes if not inputs and spec.known else 0
        return total


def _step_of(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], given: Sequence[Tensor]) -> StepGraph:
    first = next(iter(outputs.values()))
    try:
        return prune(first.graph, list(outputs.values()), (), [*inputs.values(), *given])
    except FeedError as error:
        raise GraphError(f"{user_site()}: {error}; name it among the inputs, or give it a value by given=") from None
    except GraphError as error:
        raise GraphError(f"{user_site()}: {error}") from None


def _check_changes_nothing(node: StepNode) -> None:
    if node.op.effect or writes(node.op.name) or (node.resources and node.op.name != READ):
        named = ", ".join(repr(name) for _, name in node.resources) or "what outlives the step"
        raise GraphError(
            f"{user_site()}: {node.where()} works on {named}; a frozen model changes nothing and waits for nothing, so "
            "freeze outputs that need no such operation"
        )


def _varying(step: StepGraph, inputs: int) -> frozenset[int]:
    """The nodes whose values are those of one run: what depends on an input, is drawn, or may be dead."""
    found: set[int] = set()
    for node in step.nodes.values():
        drawn = (node.op.stateful and node.op.name != READ) or node.op.name in STRUCTURAL
        if drawn or any(at in found if at != FED else place < inputs for at, place in node.inputs):
            found.add(node.id)
    return frozenset(found)


def _attributes(spec: Spec) -> dict[str, Any]:
    return {"dtype": spec.dtype.name, "shape": spec.dims}


def _added(graph: Graph, like: Tensor, op: str, attrs: Mapping[str, Any], name: str) -> Tensor:
    """A node without inputs, which is said to stand where ``like`` was built."""
    with from_site(like.op.site):
        made: Tensor = graph.apply(lookup(op), (), attrs, name)[0]
    return made
