"""Ops outside a graph: each is inferred and computed at once, on arrays, by the kernels a graph would use.

Kernels are imported at the first op, so that importing flowrt stays fast. What an application prepares is kept per op,
specs and attributes, a bounded number of them.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.errors import FlowrtError, GraphError, user_site
from flowrt.op import Attr, Op, attr_key, lookup, set_eager_builder
from flowrt.sched.structured import STRUCTURED, interpret
from flowrt.spec import Spec, spec_of
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.kernels.launch import Prepared
    from flowrt.plan import PlanNode

Array: TypeAlias = np.ndarray[Any, Any]

PREPARED = 1024


def evaluate(
    op: Op, inputs: Sequence[Array], attrs: Mapping[str, Attr], words: Array | None = None
) -> tuple[Array, ...]:
    """The outputs of a synchronous op on arrays, as new arrays (views of the first input where nothing is computed).

    ``words`` are the run's words that random kernels read. Raises `GraphError` for an op that only a step can carry
    out, and `FlowrtError` where the kernel fails.
    """
    if op.name == "constant":
        return (np.array(attrs["value"]),)
    if op.name in STRUCTURED:
        return interpret(op.name, [np.asarray(a) for a in inputs], attrs, partial(_evaluate_node, words))
    arrays = [np.ascontiguousarray(a, a.dtype.newbyteorder("=")).reshape(a.shape) for a in inputs]
    prepared, outputs = _prepared(op.name, tuple(spec_of(a) for a in arrays), _Attrs.of(attrs))
    if prepared is None:
        return (arrays[0].reshape(outputs[0].concrete),)
    return _run(op.name, prepared, arrays, outputs, words)


def _evaluate_node(words: Array | None, node: PlanNode, inputs: Sequence[Array]) -> tuple[Array, ...]:
    return evaluate(lookup(node.op), inputs, node.attrs, words)


def _run(
    name: str, prepared: Prepared, inputs: Sequence[Array], outputs: Sequence[Spec], words: Array | None
) -> tuple[Array, ...]:
    from flowrt.kernels.launch import FAILURES, RUN_WORDS, STATUS

    run = np.zeros(RUN_WORDS, np.int64) if words is None else words
    made = [np.empty(spec.concrete, spec.dtype) for spec in outputs]
    scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
    prepared.run(run.ctypes.data, [a.ctypes.data for a in (*inputs, *made, *scratch)])
    if run[STATUS]:
        raise FlowrtError(f"{name} ({user_site()}): {FAILURES.get(int(run[STATUS]), 'its kernel failed')}")
    return tuple(made)


@valueclass
class _Attrs:
    """Attributes as a key of what is prepared for them."""

    key: Hashable
    values: Mapping[str, Attr] = field(compare=False)

    @staticmethod
    def of(attrs: Mapping[str, Attr]) -> _Attrs:
        return _Attrs(tuple([(name, attr_key(attrs[name])) for name in sorted(attrs)]), attrs)


@lru_cache(PREPARED)
def _prepared(name: str, inputs: tuple[Spec, ...], attrs: _Attrs) -> tuple[Prepared | None, tuple[Spec, ...]]:
    """What computes the op on operands of these specs (None where the first input is the answer), and its outputs."""
    from flowrt.kernels.launch import prepare
    from flowrt.kernels.table import ALIASES, KERNELS

    if name not in ALIASES and (name, "cpu") not in KERNELS:
        raise GraphError(
            f"{name} ({user_site()}) means something only in a graph; build it inside `with fr.Graph():` and run it "
            "in a session"
        )
    outputs = lookup(name).infer(inputs, attrs.values)
    if name in ALIASES:
        return None, outputs
    try:
        return prepare(name, inputs, outputs, attrs.values), outputs
    except GraphError as error:
        raise GraphError(f"{name} ({user_site()}): {error}") from error


class EagerBuilder:
    """The builder in force where no graph is: values are arrays."""

    def __init__(self) -> None:
        self._seed = int.from_bytes(os.urandom(8), "little", signed=True)

    def constant(self, array: Array) -> Array:
        return array

    def spec(self, value: Array) -> Spec:
        return spec_of(value)

    def lies_in(self, other: object) -> bool:
        return False

    def adopt(self, value: Any) -> Any:
        return value

    def apply(self, op: Op, inputs: Sequence[Array], attrs: Mapping[str, Attr], name: str | None) -> tuple[Array, ...]:
        """The op's outputs."""
        return evaluate(op, inputs, attrs, self._words() if op.stateful else None)

    def _words(self) -> Array:
        from flowrt.kernels.launch import RUN_WORDS, SEED

        words = np.zeros(RUN_WORDS, np.int64)  # the step is always 0: each call of a random op is a stream of its own
        words[SEED] = self._seed
        return words


set_eager_builder(cache(EagerBuilder))
