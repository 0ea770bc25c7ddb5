"""One node at a time: what the machine runs where no tape applies.

A `NodeRunner` is made once per plan node and shared by all runs. It infers concrete output specs from its inputs, keeps
what it prepared per shape signature (a bounded number), and computes into fresh arrays. Nodes of a plan that do the
same share what they prepared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import GraphError, ResourceError, SpecError, StepCancelled
from flowrt.base.plan import Plan
from flowrt.base.spec import Spec, spec_of
from flowrt.base.traits import is_alias, traits_of, writes, writes_rows
from flowrt.kernels.launch import STATUS, Prepared, check, prepare
from flowrt.kernels.store.background import are_ready, submit
from flowrt.sched.host.latest import Latest
from flowrt.sched.loops.nesting import whole
from flowrt.sched.loops.pieces import fed_to, find_pieces, outputs_of, role_of
from flowrt.sched.loops.structured import PARTING, STACKING, STRUCTURED, StackedRows, interpret
from flowrt.sched.piecewise import Piecewise
from flowrt.sched.ready import AT_ONCE, GuessingRunner
from flowrt.sched.regions.cost import predict
from flowrt.sched.regions.lives import infer
from flowrt.sched.regions.misfits import PlanWithin, misfit_of_node
from flowrt.sched.regions.regions import READ, resource_of, resources_of, size_operands, variable_spec, variable_specs
from flowrt.sched.tape.tape import address, corrected

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.memory import Memory
    from flowrt.sched.loops.pieces import Piece
    from flowrt.sched.ready import ReadyRun
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.tape.tape import Tape

Array: TypeAlias = np.ndarray[Any, Any]

PREPARED_PER_NODE = 64
COPIED_AT_ONCE = 1 << 18  # a variable of more bytes is copied in a lane
ROW_SECONDS, COPIED_PER_SECOND = 2e-7, 4e9  # what stacking a row takes, whatever its size, and bytes a second


@dataclass(slots=True)
class PreparedNode:
    """What computes a node on inputs of one shape signature: None where the first input is the answer."""

    prepared: Prepared | None
    outputs: tuple[Spec, ...]
    guess: float
    fastest: float = math.inf

    @property
    def expected_seconds(self) -> float:
        return corrected(self.guess, self.fastest)

    def took(self, seconds: float) -> None:
        self.fastest = min(self.fastest, seconds)


Known: TypeAlias = "Latest[Any, PreparedNode]"


class NodeRunner:
    """Computes one synchronous node of a plan. May be called from any thread."""

    def __init__(
        self, node: PlanNode, memory: Memory, known: Known | None = None, body: PlanWithin | None = None
    ) -> None:
        self.node = node
        self._body = body  # whose node it is
        self._memory = memory
        self._alias = is_alias(node.op)
        self._constant = (node.attrs["value"],) if node.op == "constant" else None
        self._by_value = tuple(size_operands(node))
        self._known: Known = Latest(PREPARED_PER_NODE) if known is None else known

    def __call__(self, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        """The outputs, by what is ready for inputs like these."""
        return self.run(self.ready(inputs), inputs, run)

    def known(self, inputs: Sequence[Array]) -> ReadyRun | None:
        if self._constant is not None:
            return AT_ONCE
        found = self._known.get(self._key(inputs))
        return None if found is None or (found.prepared is not None and _is_outdated(found.prepared)) else found

    def run(self, ready: Any, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        if self._constant is not None:
            return self._constant
        if ready.prepared is None:
            return [inputs[0].reshape(ready.outputs[0].concrete)] if ready.outputs else ()
        if run[STATUS]:
            raise StepCancelled(f"{self.node.where()} was not begun")
        words = run.copy()  # a failure is this node's own, not that of others beside it
        try:
            arrays = [self._memory.output(shape, dtype) for shape, dtype in ready.prepared.fresh]
        except ResourceError as error:
            raise ResourceError(f"{self.node.where()}: {error}") from error
        except MemoryError as error:
            raise ResourceError(f"{self.node.where()}: out of memory: {error}") from error
        ready.prepared.run(address(words), [address(a) for a in (*inputs, *arrays)])
        check(words, self.node.op, self.node.where, lambda: misfit_of_node(self.node, inputs, self._body))
        return arrays[: len(ready.outputs)]

    def _key(self, inputs: Sequence[Array]) -> Any:
        key: Any = tuple([a.shape for a in inputs])
        return (key, *[inputs[i].tobytes() for i in self._by_value]) if self._by_value else key

    def ready(self, inputs: Sequence[Array]) -> ReadyRun:
        found = self.known(inputs)
        if found is None:
            found = self._known[self._key(inputs)] = self._make(inputs)
        return found

    def _make(self, inputs: Sequence[Array]) -> PreparedNode:
        node, specs = self.node, [spec_of(a) for a in inputs]
        outputs = infer(node, specs)
        if self._alias or not outputs:
            return PreparedNode(None, outputs, 0.0, 0.0)
        try:
            prepared = prepare(node.op, specs, outputs, node.attrs)
        except GraphError as error:
            raise type(error)(f"{node.where()}: {error}") from error
        return PreparedNode(prepared, outputs, predict(node.op, (*specs, *outputs)))


def _is_outdated(prepared: Prepared) -> bool:
    """Whether kernels that serve better, ordered when it was first used again, have been compiled since."""
    if not prepared.orders:
        return False
    submit(prepared.orders)
    return are_ready(prepared.orders)


class StructuredRunner(GuessingRunner):
    """Computes a loop or branch of a plan, body by body, for any shapes. May be called from any thread.

    A body that comes for the first time on inputs of some shapes is computed node by node, and after that piece by
    piece, unless there are to be no ``tapes``.
    """

    def __init__(self, node: PlanNode, memory: Memory, around: PlanWithin | None, tapes: bool = True) -> None:
        super().__init__(node, memory)
        bodies = [PlanWithin(value, node, around) for value in node.attrs.values() if isinstance(value, Plan)]
        self._bodies = {id(body.plan): BodyRunner(body, memory, node.device, tapes) for body in bodies}
        self._in_pieces = tapes
        self._pieces: Latest[Any, Sequence[Piece] | None] = Latest(PREPARED_PER_NODE)  # None where a body came once

    def __call__(self, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        """The outputs for C-contiguous ``inputs``; raises as `NodeRunner` does."""
        shapes = tuple([a.shape for a in inputs])

        def compute(body: Plan, values: Sequence[Array]) -> list[Array]:
            arrays = [np.ascontiguousarray(v).reshape(v.shape) for v in values]
            return self._bodies[id(body)](self._pieces_of(body, shapes, inputs), arrays, run)

        try:
            made = interpret(self.node.op, inputs, self.node.attrs, compute)
        except SpecError as error:
            raise SpecError(f"{self.node.where()}: {error}") from None
        return [np.ascontiguousarray(a).reshape(a.shape) for a in made]

    def _pieces_of(self, body: Plan, shapes: Any, inputs: Sequence[Array]) -> Sequence[Piece] | None:
        """The pieces of a body on ``inputs`` of the loop or branch; None where it is computed node by node."""
        key, came = (id(body), shapes), self._pieces
        if not self._in_pieces or key not in came:
            came[key] = None
            return None
        pieces = came.get(key)
        if pieces is None:
            specs = [Spec(a.dtype, a.shape) for a in inputs]
            fed = {id(plan): given for plan, given in fed_to(self.node, specs, outputs_of(self.node, specs))}
            pieces = came[key] = self._bodies[id(body)].pieces(fed[id(body)])
        return pieces


class BodyRunner:
    """Computes the body of a loop or branch: pieces by tapes, and nodes by themselves."""

    def __init__(self, body: PlanWithin, memory: Memory, device: str, tapes: bool) -> None:
        self._plan, self._starts, self._whole = body.plan, body.plan.value_starts(), whole(body.plan, device)
        self._piecewise = Piecewise(body.plan, memory, _run_tape, self._run_singly, around=body)
        known: defaultdict[Any, Known] = defaultdict(partial(Latest, PREPARED_PER_NODE))
        specs = body.plan.value_specs()
        self._runners = [runner_for(node, memory, known[role_of(node, specs)], body, tapes) for node in body.plan.nodes]

    def __call__(self, pieces: Sequence[Piece] | None, inputs: Sequence[Array], run: Array) -> list[Array]:
        """What the body answers for C-contiguous ``inputs``; node by node where there are no ``pieces``."""
        if pieces is None:
            return self._run_singly(self._whole, inputs, run)
        return self._piecewise.run(self._whole, pieces, inputs, run)

    def pieces(self, inputs: Sequence[Spec]) -> Sequence[Piece]:
        """The pieces of the body on inputs of these specs."""
        return find_pieces(self._plan, self._whole, inputs)

    def _run_singly(self, region: Region, inputs: Sequence[Array], run: Array) -> list[Array]:
        """What a region of the body answers, one node after another."""
        values = dict(zip(region.inputs, inputs, strict=True))
        for position in region.nodes:
            node = self._plan.nodes[position]
            if run[STATUS]:
                raise StepCancelled(f"stopped at {node.where()}")
            outputs = self._runners[position]([values[v] for v in node.inputs], run)
            values.update(enumerate(outputs, self._starts[position]))
        return [values[v] for v in region.outputs]


def _run_tape(tape: Tape, inputs: Sequence[Array], words: Array) -> list[Array]:
    return tape.run(words, inputs)


class StackRunner(GuessingRunner):
    """Computes a node whose values are `StackedRows`, or that makes a tensor of them."""

    def expected_seconds(self, inputs: Sequence[Any]) -> float:
        """What copying all rows takes; adding one copies nothing."""
        if self.node.op != "stack_rows":
            return 0.0
        rows: StackedRows = inputs[0]
        return rows.count * (ROW_SECONDS + (rows.shared[0].nbytes if rows.count else 0) / COPIED_PER_SECOND)

    def __call__(self, inputs: Sequence[Any], run: Array) -> Sequence[Any]:
        """The outputs; raises `ResourceError` where there is no room for them, `SpecError` where rows differ."""
        match self.node.op:
            case "no_rows":
                return (StackedRows(),)
            case "append_row":
                return (inputs[0].and_rows(inputs[1:]),)
            case "append_rows":
                rows, more, count = inputs
                return (rows.and_rows(more[: int(count)], more.shape[1:]),)
        try:
            spec, reverse = self.node.outputs[0], self.node.attrs["reverse"]
            return (inputs[0].stacked(spec, int(inputs[1]), reverse, self._memory.empty),)
        except (ResourceError, SpecError) as error:
            raise type(error)(f"{self.node.where()}: {error}") from error


class PartRunner(GuessingRunner):
    """Computes a node that takes a part of rows, or joins parts: a part is a view of what was dealt out, nothing is
    computed."""

    def expected_seconds(self, inputs: Sequence[Array]) -> float:
        """What copying all rows takes; a part is not copied."""
        return 0.0 if self.node.op == "part_of" else sum(part.nbytes for part in inputs[:-2]) / COPIED_PER_SECOND

    def __call__(self, inputs: Sequence[Array], run: Array) -> Sequence[Array]:
        """The output; raises `ResourceError` where there is no room for it, `SpecError` for parts that do not fit."""
        if self.node.op == "part_of":
            x, starts = inputs
            part = self.node.attrs["part"]
            return (x[starts[part] : starts[part + 1]],)
        *parts, _, order = inputs
        return (self._joined(parts, len(order)),)

    def _joined(self, parts: Sequence[Array], room: int) -> Array:
        rows = sum(map(len, parts))
        if rows > room:
            raise SpecError(f"{self.node.where()}: {rows} rows of parts do not fit {room}")
        try:
            out = self._memory.output((room, *parts[0].shape[1:]), parts[0].dtype)
        except ResourceError as error:
            raise ResourceError(f"{self.node.where()}: {error}") from error
        np.concatenate(parts, out=out[:rows])
        out[rows:] = 0
        return out


class VariableRunner(GuessingRunner):
    """Reads or writes variables that are held."""

    def __init__(self, node: PlanNode, host: Host) -> None:
        super().__init__(node, host.memory)
        self._host = host
        self._expected = 0.0 if variable_spec(node).nbytes <= COPIED_AT_ONCE else math.inf

    def expected_seconds(self, inputs: Sequence[Array]) -> float:
        """Nothing to speak of, or too much for the loop's own thread."""
        return self._expected

    def __call__(self, inputs: Sequence[Array], words: Array) -> Sequence[Array]:
        node, variables = self.node, self._host.variables
        if node.op == READ:
            value = variables.value(resource_of(node), variable_spec(node))
            made = self._memory.output(value.shape, value.dtype)
            np.copyto(made, value)
            return (made,)
        if variables.lent:
            names = frozenset(resources_of(node))
            staying = variables.part(names, self._host.spares.copy, names if writes_rows(node.op) else frozenset())
            if staying:
                self._host.keep_rows(staying, inputs[1])
        if writes_rows(node.op):
            self._write_rows(inputs, words)
        else:
            self._write(inputs[0])
        return ()

    def _write(self, value: Array) -> None:
        node, variables, update = self.node, self._host.variables, traits_of(self.node.op).update
        name, spec = resource_of(node), variable_spec(node)
        if not spec.accepts(value.dtype, value.shape):
            got = Spec(value.dtype, value.shape)
            raise SpecError(f"{node.where()}: the variable holds {spec}, the step gives {got}")
        if update is not None and update.whole is not None:
            old = variables.value(name, spec)
            with np.errstate(all="ignore"):  # as in kernels
                getattr(np, update.whole)(old, value, out=old)
        elif (held := variables.find(name, spec)) is None:
            variables.begin(name, self._memory.lasting_copy(value))
        else:
            np.copyto(held, value)

    def _write_rows(self, inputs: Sequence[Array], run: Array) -> None:
        node, variables, memory = self.node, self._host.variables, self._memory
        tables, specs = variable_specs(node), [spec_of(a) for a in inputs]
        infer(node, specs)
        held = [variables.value(name, spec) for name, spec in zip(resources_of(node), tables, strict=True)]
        prepared = prepare(node.op, specs, tables, node.attrs)
        scratch = [memory.empty(each.concrete, each.dtype) for each in prepared.scratch]
        words = run.copy()
        prepared.run(address(words), [address(a) for a in (*inputs, *held, *scratch)])
        check(words, node.op, node.where)


def runner_for(
    node: PlanNode, memory: Memory, known: Known | None = None, body: PlanWithin | None = None, tapes: bool = True
) -> NodeRunner | GuessingRunner:
    """What computes a synchronous node, of ``body``, by itself; with ``tapes`` for what is inside, or without."""
    if node.op in STACKING:
        return StackRunner(node, memory)
    if node.op in PARTING:
        return PartRunner(node, memory)
    if node.op in STRUCTURED:
        return StructuredRunner(node, memory, body, tapes)
    return NodeRunner(node, memory, known, body)


class Runners(dict[int, NodeRunner | GuessingRunner]):
    """What computes the nodes of a plan by themselves on a host, by position; made when first asked for."""

    def __init__(self, plan: Plan, host: Host, *, tapes: bool = True) -> None:
        self._body, self._nodes, self._host, self._tapes = PlanWithin(plan), plan.nodes, host, tapes
        self._specs = plan.value_specs()
        self._known: defaultdict[Any, Known] = defaultdict(partial(Latest, PREPARED_PER_NODE))

    def __missing__(self, position: int) -> NodeRunner | GuessingRunner:
        node = self._nodes[position]
        if node.op == READ or writes(node.op):
            return self.setdefault(position, VariableRunner(node, self._host))
        structured = node.op in STACKING or node.op in STRUCTURED or node.op in PARTING
        known = None if structured else self._known[role_of(node, self._specs)]
        return self.setdefault(position, runner_for(node, self._host.memory, known, self._body, self._tapes))


def read_in_place(plan: Plan, nodes: Sequence[int], outputs: Sequence[int]) -> frozenset[int]:
    """Which reads of variables that are held need no copy where ``nodes`` run one after another.

    They are those whose value nobody looks at once the variable is written, or keeps: neither is it among ``outputs``,
    nor is it handed on as it is. So rows are taken of a table in time that its size has no part in.
    """
    starts = plan.value_starts()
    reads = {starts[n]: n for n in nodes if plan.nodes[n].op == READ and starts[n] not in outputs}
    written: set[Any] = set()
    found = set(reads.values())
    for position in nodes if reads else ():
        node = plan.nodes[position]
        if writes(node.op):
            written.update(resources_of(node))
        keeps = is_alias(node.op) or node.op in STACKING or node.op in STRUCTURED
        for value in node.inputs:
            if value in reads and (keeps or resource_of(plan.nodes[reads[value]]) in written):
                found.discard(reads[value])
    return frozenset(found)
