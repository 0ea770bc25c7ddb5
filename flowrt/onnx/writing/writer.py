"""Going through a graph node by node, and writing what ONNX has for each.

Law: a function of the table gets an `AppliedOp`, adds nodes and answers the names of its outputs, or raises
`Unwritable`. What cannot be written leaves its outputs unwritten; all of it is told at once. Of floats of 16 bits what
one operator says is written as it is; what takes several is of float32 and rounded once, as it is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from flowrt.base.plan import Plan
from flowrt.base.spec import Spec, as_dtype, is_half, value_known
from flowrt.onnx.types import Array, element_of

if TYPE_CHECKING:
    from flowrt.graph import Tensor

OPSET = 21  # operators that runtimes have had since 2024
WIDE = np.dtype(np.float32)
CHANNELS_LAST = (0, 2, 3, 1)
EXACT = (
    "And Cast Concat Equal Expand Flatten Gather GatherElements Greater GreaterOrEqual Identity IsInf IsNaN Less "
    "LessOrEqual Not Or Pad Reshape Shape Slice Squeeze Transpose Unsqueeze Where Xor"
)
"""Operators that round nothing, beside one that does."""
ADDING = "CumSum ReduceMean ReduceProd ReduceSum Scan ScatterElements ScatterND"
"""Operators that may round an entry many times over."""

WRITERS: dict[str, Callable[[AppliedOp], Any]] = {}
"""What writes a node, by flowrt's op."""


class Unwritable(Exception):
    """A node that ONNX cannot say, and why; empty where that was noted already."""


def writes(*ops: str) -> Callable[[Callable[[AppliedOp], Any]], Callable[[AppliedOp], Any]]:
    """Decorator: the function writes nodes of these ops."""

    def enter(function: Callable[[AppliedOp], Any]) -> Callable[[AppliedOp], Any]:
        WRITERS.update(dict.fromkeys(ops, function))
        return function

    return enter


@dataclass
class Shared:
    """What the graphs of one model have in common: weights, names that are taken, refusals, what is known of values.

    ``channels_first`` is, for the name of images, that of the same with their channels first.
    """

    weights: dict[str, Array] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    refusals: dict[str, None] = field(default_factory=dict)
    channels_first: dict[str, str] = field(default_factory=dict)
    same: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def copied(self) -> Shared:
        """The same, to be written on for a trial."""
        return Shared(
            dict(self.weights), set(self.names), dict(self.refusals), dict(self.channels_first), dict(self.same)
        )

    def fresh(self, name: str) -> str:
        """``name``, numbered if it is taken."""
        found, number = name, 1
        while found in self.names:
            found, number = f"{name}_{number}", number + 1
        self.names.add(found)
        return found


class GraphWriter:
    """Who writes the nodes of one graph of a model, or of a body inside of it."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.nodes: list[Any] = []

    def add(self, op: str, inputs: Sequence[str | None], name: str, **attrs: Any) -> str:
        """Write a node; answers the name of its output."""
        return self.add_many(op, inputs, name, 1, **attrs)[0]

    def add_many(self, op: str, inputs: Sequence[str | None], name: str, outputs: int, **attrs: Any) -> list[str]:
        """Write a node of several outputs; answers their names."""
        made = [self.shared.fresh(name if n == 0 else f"{name}:{n}") for n in range(outputs)]
        given = [each or "" for each in inputs]
        while given and not given[-1]:
            given.pop()
        self.nodes.append(helper.make_node(op, given, made, name=made[0], **attrs))
        return made

    def constant(self, value: Any, dtype: Any = None, name: str = "constant") -> str:
        """The name of a weight that holds ``value``: the same for the same small ones."""
        array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))
        key = (array.dtype.str, array.shape, array.tobytes()) if array.nbytes <= 1024 and name == "constant" else None
        if key is not None and key in self.shared.same:
            return self.shared.same[key]
        called = self.shared.fresh(name)
        self.shared.weights[called] = array
        if key is not None:
            self.shared.same[key] = called
        return called

    def known(self, name: str) -> Array | None:
        """What a weight holds; None for what is no weight."""
        return self.shared.weights.get(name)

    def write(self, applied: Iterable[AppliedOp], values: dict[Any, str | None]) -> None:
        """Write nodes in order; ``values`` are names by what stands for outputs, None for what could not be written."""
        for one in applied:
            names: Sequence[str | None] = ()
            if None not in one.inputs:
                try:
                    found = self._written(one)
                    names = [found] if isinstance(found, str) else list(found)
                except Unwritable as error:
                    if str(error):
                        self.shared.refusals[f"{one.op} {one.name!r} ({one.site}): {error}"] = None
            values.update((key, names[n] if n < len(names) else None) for n, key in enumerate(one.keys))

    def _written(self, one: AppliedOp) -> Any:
        if one.op not in WRITERS:
            raise Unwritable(NEVER.get(one.op, "ONNX has nothing that says it"))
        if one.is_said():
            return WRITERS[one.op](one)
        found = WRITERS[one.op](one.widened())
        names = [found] if isinstance(found, str) else found
        return [
            one.cast(name, WIDE, spec.dtype) if is_half(spec.dtype) else name
            for name, spec in zip(names, one.answers, strict=False)
        ]


NEVER: dict[str, str] = {}
"""Ops that are not written, and why."""


@dataclass
class AppliedOp:
    """A node to write: of a graph, or of a body. ``inputs`` are names, ``keys`` what its outputs are known by."""

    writer: GraphWriter
    op: str
    name: str
    site: str
    attrs: Mapping[str, Any]
    inputs: Sequence[str]
    specs: Sequence[Spec]
    answers: Sequence[Spec]
    keys: Sequence[Any]

    @property
    def out(self) -> Spec:
        """The spec of its first output."""
        return self.answers[0]

    def is_said(self) -> bool:
        """Whether the opset's operators say it of its very dtypes: of floats of 16 bits one that takes them and rounds,
        at most, beside any that but move and compare."""
        halves = {spec.dtype.name for spec in (*self.specs, *self.answers) if is_half(spec.dtype)}
        if not halves or any(isinstance(value, Plan) for value in self.attrs.values()):
            return True
        trial = GraphWriter(self.writer.shared.copied())
        WRITERS[self.op](replace(self, writer=trial))
        ops = [node.op_type for node in trial.nodes]
        rounding = [op for op in ops if op not in EXACT.split()]
        if len(rounding) > 1 or any(op in ADDING.split() for op in rounding):
            return False
        return all(takes(op, half) for op in ops for half in halves)

    def widened(self) -> AppliedOp:
        """The same of float32 in the place of dtypes of 16 bits, and of inputs that are cast."""
        inputs = [self.input_as(_wide(spec).dtype, n) for n, spec in enumerate(self.specs)]
        specs, answers = ([_wide(spec) for spec in given] for given in (self.specs, self.answers))
        dtype = self.attrs.get("dtype")
        attrs = {**self.attrs, "dtype": WIDE.name} if dtype and is_half(as_dtype(dtype)) else self.attrs
        return replace(self, attrs=attrs, inputs=inputs, specs=specs, answers=answers)

    def add(self, op: str, *inputs: str | None, **attrs: Any) -> str:
        """Write a node that bears this one's name."""
        return self.writer.add(op, inputs, self.name, **attrs)

    def add_many(self, op: str, *inputs: str | None, outputs: int, **attrs: Any) -> list[str]:
        """The same of several outputs."""
        return self.writer.add_many(op, inputs, self.name, outputs, **attrs)

    def constant(self, value: Any, dtype: Any = None) -> str:
        """A weight beside it."""
        return self.writer.constant(value, dtype)

    def like(self, value: Any, index: int = 0) -> str:
        """A scalar weight of the dtype of an input."""
        return self.writer.constant(np.asarray(value, self.specs[index].dtype))

    def ints(self, *values: int) -> str:
        """A vector of int64."""
        return self.writer.constant(np.asarray(values, np.int64).reshape(-1))

    def known(self, index: int) -> Array | None:
        """The entries of an input, where they are known."""
        found = self.writer.known(self.inputs[index])
        spec = self.specs[index]
        if found is None and value_known(spec.value):
            found = np.asarray(spec.value, spec.dtype)
        return found

    def rank(self, index: int = 0) -> int:
        """The number of axes of an input, which must be known."""
        dims = self.specs[index].dims
        if dims is None:
            raise Unwritable("the rank of its input is open; declare its shape")
        return len(dims)

    def cast(self, name: str, given: Any, wanted: Any) -> str:
        """A value of one dtype as another."""
        if np.dtype(given) == np.dtype(wanted):
            return name
        held = self.writer.known(name)
        if held is not None and held.size <= 4096:
            return self.writer.constant(held.astype(wanted))
        to = element_of(np.dtype(wanted))
        first = self.writer.shared.channels_first.get(name)
        if first is None:
            return self.add("Cast", name, to=to)
        turned = self.add("Cast", first, to=to)
        made = self.transposed(turned, CHANNELS_LAST)
        self.writer.shared.channels_first[made] = turned
        return made

    def input_as(self, dtype: Any, index: int = 0) -> str:
        """An input as another dtype."""
        return self.cast(self.inputs[index], self.specs[index].dtype, dtype)

    def transposed(self, name: str, axes: Sequence[int]) -> str:
        """A value with its axes in another order; of a weight, another weight."""
        held = self.writer.known(name)
        if list(axes) == list(range(len(axes))):
            return name
        if held is not None:
            return self.writer.constant(held.transpose(axes), name=f"{name}/transposed")
        return self.add("Transpose", name, perm=list(axes))

    def reshaped(self, name: str, sizes: Sequence[int]) -> str:
        """A value in a shape that is known, -1 for one size."""
        held = self.writer.known(name)
        if held is not None:
            return self.writer.constant(held.reshape(sizes), name=f"{name}/reshaped")
        return self.add("Reshape", name, self.ints(*sizes))


def _wide(spec: Spec) -> Spec:
    return Spec(WIDE, spec.dims) if is_half(spec.dtype) else spec


@cache
def takes(op: str, half: str) -> bool:
    """Whether an operator of the opset takes such floats wherever it takes float32."""
    kinds = [set(kind.allowed_type_strs) for kind in onnx.defs.get_schema(op, OPSET).type_constraints]
    return all(f"tensor({half})" in kind for kind in kinds if "tensor(float)" in kind)


def applied_of(writer: GraphWriter, nodes: Iterable[Any], names: dict[Tensor, str | None]) -> Iterable[AppliedOp]:
    """A graph's nodes, one by one; ``names`` are those of tensors, and grow as nodes are written."""
    for node in nodes:
        yield AppliedOp(
            writer,
            node.op.name,
            node.name,
            str(node.site),
            node.attrs,
            [names[t] for t in node.inputs],  # type: ignore[misc]  # None is looked for before it is used
            [t.spec for t in node.inputs],
            [t.spec for t in node.outputs],
            node.outputs,
        )


def written_body(
    shared: Shared, plan: Plan, inputs: Sequence[str], specs: Sequence[Spec]
) -> tuple[list[Any], list[str]]:
    """A body's nodes, and the names of what it answers, each of which one of them makes."""
    writer = GraphWriter(shared)
    values: dict[Any, str | None] = dict(enumerate(inputs))
    known = dict(enumerate(specs))
    number = len(inputs)

    def nodes() -> Iterable[AppliedOp]:
        nonlocal number
        for node in plan.nodes:
            keys = list(range(number, number + len(node.outputs)))
            number += len(keys)
            given = [values[v] for v in node.inputs]
            yield AppliedOp(
                writer,
                node.op,
                node.name,
                node.site,
                node.attrs,
                given,  # type: ignore[arg-type]  # as above
                [known[v] for v in node.inputs],
                list(node.outputs),
                keys,
            )
            known.update(zip(keys, node.outputs, strict=True))

    around = dict(shared.channels_first)  # what is made inside is seen nowhere else
    writer.write(nodes(), values)
    shared.channels_first = around
    found = [values[v] for v in plan.fetches]
    if None in found:
        raise Unwritable
    answers = [writer.add("Identity", [name], "answer") for name in found]
    return writer.nodes, answers


def initializer(name: str, array: Array) -> Any:
    """A weight of a model."""
    return numpy_helper.from_array(array, name)
