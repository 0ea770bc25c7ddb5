"""One node at a time: what the machine runs where no tape applies.

A `NodeRunner` is made once per plan node and shared by all runs. It infers concrete output specs from its inputs, keeps
what it prepared per shape signature (a bounded number), and computes into fresh arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.errors import FlowrtError, SpecError
from flowrt.kernels.launch import FAILURES, STATUS, Prepared, prepare
from flowrt.kernels.table import ALIASES
from flowrt.op import lookup
from flowrt.sched.regions import resource_of, size_operands
from flowrt.sched.tape import address
from flowrt.spec import Spec, spec_of

if TYPE_CHECKING:
    from flowrt.plan import PlanNode
    from flowrt.sched.variables import Variables

Array: TypeAlias = np.ndarray[Any, Any]

PREPARED_PER_NODE = 64

UPDATES: dict[str, Callable[..., Any]] = {"assign_add": np.add, "assign_sub": np.subtract}


def variable_spec(node: PlanNode) -> Spec:
    """The spec that a variable's node says its variable has."""
    return Spec(node.attrs["dtype"], node.attrs["shape"])


class NodeRunner:
    """Computes one synchronous node of a plan."""

    def __init__(self, node: PlanNode) -> None:
        self.node = node
        self._op = lookup(node.op)
        self._alias = node.op in ALIASES
        self._constant = node.attrs["value"] if node.op == "constant" else None
        self._by_value = tuple(size_operands(node))
        self._prepared: OrderedDict[Any, tuple[Prepared | None, tuple[Spec, ...]]] = OrderedDict()

    def __call__(self, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        """The outputs for C-contiguous ``inputs``; ``run`` are the run's words."""
        if self._constant is not None:
            return (self._constant,)
        prepared, outputs = self._prepare(inputs)
        if prepared is None:
            return [inputs[0].reshape(outputs[0].concrete)] if outputs else ()
        arrays = [np.empty(spec.concrete, spec.dtype) for spec in outputs]
        scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
        prepared.run(address(run), [address(a) for a in (*inputs, *arrays, *scratch)])
        if run[STATUS]:
            raise FlowrtError(f"{self.node.where()}: {FAILURES[int(run[STATUS])]}")
        return arrays

    def _prepare(self, inputs: Sequence[Array]) -> tuple[Prepared | None, tuple[Spec, ...]]:
        key: Any = tuple([a.shape for a in inputs])
        if self._by_value:
            key = (key, *(inputs[i].tobytes() for i in self._by_value))
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._make(inputs)
            if len(self._prepared) > PREPARED_PER_NODE:
                self._prepared.popitem(last=False)
        return found

    def _make(self, inputs: Sequence[Array]) -> tuple[Prepared | None, tuple[Spec, ...]]:
        specs = [spec_of(a) for a in inputs]
        try:
            outputs = self._op.infer(specs, self.node.attrs)
        except SpecError as error:
            raise SpecError(f"{self.node.where()}: {error}") from None
        if self._alias or not outputs:
            return None, outputs
        return prepare(self.node.op, specs, outputs, self.node.attrs), outputs


def read_variable(node: PlanNode, variables: Variables) -> Array:
    """A copy of a held variable."""
    return variables.value(resource_of(node)).copy()


def write_variable(node: PlanNode, value: Array, variables: Variables) -> None:
    """Carry out an assignment to a held variable."""
    if node.op == "assign":
        np.copyto(variables.target(resource_of(node)), value)
    else:
        held = variables.value(resource_of(node))
        UPDATES[node.op](held, value, out=held)
