"""Loops and branches as single nodes, whose bodies are attributes; `loops` has the functions that build them.

One op is every loop. It *carries* tensors along its iterations, reads a row of each *scanned* input in each,
*stacks* what its body answers beyond what it carries, and ends with its scanned inputs, its count, its limit or its
condition. Its gradient is such a loop too, backwards over stacks that the forward loop is given for it. Follows Yu et
al., "Dynamic control flow in large-scale machine learning" (EuroSys 2018), in structured form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from flowrt.base.errors import GraphError, SpecError
from flowrt.base.plan import Plan
from flowrt.base.spec import MAX_RANK, Spec, is_float, value_known
from flowrt.graph import Graph, Node, Tensor, current_scope, scoped
from flowrt.op import active_builder, as_value, building, gradients_inside, sizing
from flowrt.ops.ahead import Behind
from flowrt.ops.body import answers_of, as_body, replay, with_flat_feeds
from flowrt.ops.elementwise import add
from flowrt.ops.shape import reshape
from flowrt.ops.source import shape_of, zeros_like
from flowrt.subgraph import Subgraph
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.typed import Operand, Result

COUNT = Spec("int64", ())


# ── what the ops mean ────────────────────────────────────────────────────────────────────────────────────────────────


def _iteration(
    inputs: Sequence[Operand],
    *,
    body: Plan,
    cond: Plan | None,
    carried: int,
    scanned: int,
    counted: bool,
    reverse: bool,
    limit: int | None,
    parallel_iterations: int,
    name: str | None = None,
) -> tuple[Result, ...]:
    """Carry tensors through iterations of ``body``: what was carried last, the number of iterations, and the stacks.

    ``inputs``: the most iterations (if ``counted``), what is carried, what is scanned, what the bodies capture.
    As `stateful_loop`, its bodies have effects, and the step machine runs them node by node.
    """
    _check_loop(inputs, body, cond, (carried, scanned, int(counted)), limit, parallel_iterations)
    first = inputs[int(counted) : int(counted) + carried]
    rows = [row_of(spec) for spec in inputs[int(counted) + carried : int(counted) + carried + scanned]]
    captured = list(inputs[int(counted) + carried + scanned :])
    held = [spec.without_value() for spec in first]
    while True:
        answers = answers_of(body, [*held, *rows, *captured])
        settled = [_held(k, body.feeds[k].spec, held[k], answers[k]) for k in range(carried)]
        if settled == held:
            break
        held = settled
    if cond is not None:
        (pred,) = answers_of(cond, [*held, *captured])
        if pred.dtype != bool or pred.dims not in (None, ()):
            raise SpecError(f"the condition of a loop is a bool scalar, got {pred}")
    length = _length(inputs[int(counted) + carried :][:scanned], limit)
    stacks = [Spec(s.dtype, None if s.dims is None else (length, *s.dims)) for s in answers[carried:]]
    return (*held, COUNT, *stacks)


loop = op(name="loop", gradient=lambda node, *slopes: _Backward(node, slopes).answers())(_iteration)
stateful_loop = op(name="stateful_loop", stateful=True, gradient=lambda node, *slopes: _no_way_back(node))(_iteration)


def _choose(inputs: Sequence[Operand], *, if_true: Plan, if_false: Plan, name: str | None = None) -> tuple[Result, ...]:
    """What one of two bodies answers; ``inputs``: the bool scalar that decides, then what the bodies capture.

    As `stateful_cond`, its bodies have effects, and the step machine runs them node by node.
    """
    if not (isinstance(if_true, Plan) and isinstance(if_false, Plan)):
        raise SpecError("the branches of a cond are plans")
    if not inputs or inputs[0].dtype != bool or inputs[0].dims not in (None, ()):
        raise SpecError(f"a cond is decided by a bool scalar, got {inputs[0] if inputs else 'nothing'}")
    first, second = answers_of(if_true, inputs[1:]), answers_of(if_false, inputs[1:])
    if len(first) != len(second):
        raise SpecError(f"true_fn answers {len(first)} tensors and false_fn {len(second)}; they must answer alike")
    return tuple(_either(n, a, b) for n, (a, b) in enumerate(zip(first, second, strict=True)))


choose = op(name="cond", gradient=lambda node, *slopes: _choose_slopes(node, slopes))(_choose)
stateful_cond = op(name="stateful_cond", stateful=True, gradient=lambda node, *slopes: _no_way_back(node))(_choose)

for _op in (loop, stateful_loop, choose, stateful_cond):
    _op.absent_gradients = True


def _check_loop(
    inputs: Sequence[Spec],
    body: Plan,
    cond: Plan | None,
    counts: tuple[int, int, int],
    limit: int | None,
    parallel_iterations: int,
) -> None:
    carried, scanned, counted = counts
    if not isinstance(body, Plan) or not (cond is None or isinstance(cond, Plan)):
        raise SpecError("the body and condition of a loop are plans")
    if carried < 0 or scanned < 0 or counted + carried + scanned > len(inputs) or carried > len(body.fetches):
        raise SpecError(f"a loop that carries {carried} and scans {scanned} does not fit {len(inputs)} inputs")
    if counted and (inputs[0].dtype != np.int64 or inputs[0].dims not in (None, ())):
        raise SpecError(f"the number of iterations is an int64 scalar, got {inputs[0]}")
    if cond is None and not scanned and not counted and limit is None:
        raise SpecError("nothing ends this loop; give it a condition or maximum_iterations")
    if limit is not None and limit < 0:
        raise SpecError(f"maximum_iterations cannot be negative, got {limit}")
    if parallel_iterations < 1:
        raise SpecError(f"parallel_iterations is at least 1, got {parallel_iterations}")


def row_of(spec: Spec) -> Spec:
    """One entry along the first axis of what is scanned."""
    if spec.dims == ():
        raise SpecError(f"a scan goes along the first axis, and {spec} has none")
    return Spec(spec.dtype, None if spec.dims is None else spec.dims[1:])


def _length(scanned: Sequence[Spec], limit: int | None) -> int | None:
    known = {spec.dims[0] for spec in scanned if spec.dims is not None and spec.dims[0] is not None}
    if len(known) > 1:
        raise SpecError(f"{' and '.join(map(str, scanned))} are scanned together; their first axes must be equal")
    return known.pop() if known else None if scanned else limit


def of_other_dtype(number: int, held: Spec, answer: Spec) -> str:
    """What is wrong with a body whose ``answer`` is not of the dtype of the loop variable."""
    return (
        f"loop variable {number} begins as {held} and the body makes it {answer}; a loop variable keeps its dtype: "
        f"use fr.astype(x, {held.dtype.name!r}) in the body, or begin with {answer.dtype}"
    )


def _held(number: int, declared: Spec, held: Spec, answer: Spec) -> Spec:
    """The spec of a loop variable that has been ``held`` so far, after an iteration that made it ``answer``."""
    if answer.dtype != held.dtype:
        raise SpecError(of_other_dtype(number, held, answer))
    if answer.dims == held.dims or held.dims is None:
        return held
    if answer.dims is None:
        return held if declared.dims is not None else Spec(held.dtype, None)
    if len(answer.dims) == len(held.dims):
        dims = tuple(h if h == a or a is None else None for h, a in zip(held.dims, answer.dims, strict=True))
        if declared.accepts(held.dtype, dims) and all(
            d is None or n is not None for n, d in zip(dims, declared.dims or dims, strict=True)
        ):
            return Spec(held.dtype, dims)
    elif declared.dims is None:
        return Spec(held.dtype, None)
    raise SpecError(
        f"loop variable {number} begins as {held} and the body makes it {answer}; a loop variable keeps its shape: "
        f"reshape it in the body, or say shape_invariants= with None where it changes"
    )


def _either(number: int, first: Spec, second: Spec) -> Spec:
    if first.dtype != second.dtype:
        raise SpecError(
            f"answer {number} is {first} of true_fn and {second} of false_fn; give them one dtype with fr.astype"
        )
    if first.dims is None or second.dims is None or len(first.dims) != len(second.dims):
        return Spec(first.dtype, None)
    return Spec(first.dtype, tuple(a if a == b else None for a, b in zip(first.dims, second.dims, strict=True)))


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _no_way_back(node: Node) -> NoReturn:
    raise GraphError(
        f"{node.op.name} {node.name!r} ({node.site}): no gradient goes through a body that reads or changes state; "
        "keep assignments, reads and queues out of it (a variable itself may be used), or cut it off with stop_gradient"
    )


def _is_real(tensor: Tensor) -> bool:
    return is_float(tensor.dtype)


def _gradient_scope(node: Node) -> Any:
    """Names inside the body of a gradient tell whose gradient it is."""
    return scoped(replace(current_scope(), prefix=f"{node.graph.unique_name(node.name + '/gradient')}/", control=()))


def _present_graph(node: Node) -> Graph:
    """Where the gradient of ``node`` is built: in its graph, or in a body inside that."""
    here = active_builder()
    return here if isinstance(here, Graph) else node.graph


def _choose_slopes(node: Node, slopes: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """A cond whose branches compute what they need of the forward ones again."""
    graph, captured = _present_graph(node), node.inputs[1:]
    bodies = [node.attrs[name] for name in ("if_true", "if_false")]
    branches = [_branch_slopes(graph, node, body, slopes) for body in bodies if isinstance(body, Plan)]
    wanted = [i for i in range(len(captured)) if any(found[i] is not None for _, found in branches)]
    if not wanted:
        return (None,) * len(node.inputs)
    for inside, found in branches:
        with building(inside):
            for i in wanted:
                found[i] = zeros_like(inside.adopt(captured[i])) if found[i] is None else found[i]
    outside = list(dict.fromkeys(t for inside, _ in branches for t in inside.captured))
    first, second = (
        as_body(inside, [inside.adopt(t) for t in outside], [found[i] for i in wanted]) for inside, found in branches
    )
    made = choose([node.inputs[0], *outside], if_true=first, if_false=second, name=f"{node.name}/gradient")
    answers = dict(zip(wanted, made if isinstance(made, tuple) else (made,), strict=True))
    return (None, *(answers.get(i) for i in range(len(captured))))


def _branch_slopes(graph: Graph, node: Node, body: Plan, slopes: Sequence[Tensor | None]) -> tuple[Subgraph, list[Any]]:
    """A graph inside ``graph`` with what one branch hands back to each of its inputs."""
    inside = Subgraph(graph)
    with building(inside), _gradient_scope(node):
        inputs = [inside.adopt(t) for t in node.inputs[1:]]
        values = replay(body, inputs, inside)
        pairs = [(values[v], s) for v, s in zip(body.fetches, slopes, strict=True) if s is not None]
        real = [(y, inside.adopt(s)) for y, s in pairs if _is_real(y)]
        xs = [t for t in inputs if _is_real(t)]
        if not real or not xs:
            return inside, [None] * len(inputs)
        slopes_of = gradients_inside([y for y, _ in real], xs, [s for _, s in real])
        found = {x: as_value(slope) for x, slope in zip(xs, slopes_of, strict=True)}
        return inside, [found.get(t) for t in inputs]


class _Backward:
    """The loop that runs ``node`` backwards, and what the forward loop must stack for it.

    Inside, one iteration of the body is built again, and its gradient beside it. What the gradient needs of the
    iteration is stacked by the forward loop, where it depends on the iteration at all, and scanned by the backward
    loop. The slopes of captured tensors are summed over the iterations.
    """

    def __init__(self, node: Node, slopes: Sequence[Tensor | None]) -> None:
        attrs: Any = node.attrs
        self.node, self.body = node, attrs["body"]
        counted, carried, scanned = int(attrs["counted"]), attrs["carried"], attrs["scanned"]
        self.counted, self.carried, self.scanned = counted, carried, scanned
        self.rows = node.inputs[counted + carried : counted + carried + scanned]
        self.captured = node.inputs[counted + carried + scanned :]
        self.state_slopes, self.stack_slopes = slopes[:carried], slopes[carried + 1 :]
        self.inside = Subgraph(_present_graph(node))

    def answers(self) -> tuple[Any, ...]:
        """A gradient, or None, for each input of the loop."""
        self._replay()
        if not self._differentiate():
            return (None,) * len(self.node.inputs)
        return self._build(*self._split())

    def _replay(self) -> None:
        inside, feeds = self.inside, self.body.feeds
        with building(inside), scoped(replace(current_scope(), prefix="", control=())):
            self.kept = [inside.adopt(t) for t in self.captured]
            self.state = [inside.input(f.spec, "state") for f in feeds[: self.carried]]
            self.row = [inside.input(f.spec, "row") for f in feeds[self.carried : self.carried + self.scanned]]
            values = replay(self.body, [*self.state, *self.row, *self.kept], inside)
            self.iteration = frozenset(inside.nodes)
            self.made = [values[v] for v in self.body.fetches]

    def _differentiate(self) -> bool:
        """Build the slopes of one iteration; False where nothing flows back."""
        inside = self.inside
        with building(inside), _gradient_scope(self.node):
            self.d_state = [inside.input(t.spec, "slope") if _is_real(t) else None for t in self.state]
            stacked = list(zip(self.made[self.carried :], self.stack_slopes, strict=True))
            self.d_stack = [
                inside.input(y.spec, "slope") if s is not None and _is_real(y) else None for y, s in stacked
            ]
            pairs = list(zip(self.made, [*self.d_state, *self.d_stack], strict=True))
            real = [(y, d) for y, d in pairs if d is not None]
            xs = [t for t in (*self.state, *self.row, *self.kept) if _is_real(t)]
            if not real or not xs:
                return False
            slopes = gradients_inside([y for y, _ in real], xs, [d for _, d in real])
            found = {x: as_value(slope) for x, slope in zip(xs, slopes, strict=True)}  # those of rows made dense
            self.to_state = [
                None if d is None else zeros_like(d) if found.get(t) is None else found[t]
                for t, d in zip(self.state, self.d_state, strict=True)
            ]
            self.to_row = [found.get(t) for t in self.row]
            self.behind = Behind(inside, found) if self._iterations_as_often_as_rows() else Behind(inside, {})
            self.behind.take(self.kept)
            self.sums = [
                None if found.get(t) is None or t in self.behind else inside.input(t.spec, "sum") for t in self.kept
            ]
            self.to_kept = [
                None if total is None else add(total, found[t]) for t, total in zip(self.kept, self.sums, strict=True)
            ]
        return True

    def _iterations_as_often_as_rows(self) -> bool:
        return self.node.attrs["cond"] is None and not self.counted and bool(self.scanned)

    def _split(self) -> tuple[list[Tensor], set[Tensor]]:
        """What of the forward iteration the backward one needs: values to stack, and inputs to hand it again.

        Values of another size in each iteration make no stack: the backward one computes them again.
        """
        state, row = set(self.state), set(self.row)
        varies = {t.op for t in state | row}
        for node in self.inside.nodes:
            if node in self.iteration and any(t.op in varies for t in node.inputs):
                varies.add(node)
        stacked = varies - self._resized()
        stack: dict[Tensor, None] = {}
        again: set[Tensor] = set()
        left = [t for t in (*self.to_state, *self.to_kept, *self.to_row) if t is not None] + self.behind.needed
        seen: set[Tensor] = set()
        while left:
            tensor = left.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in state or (tensor.op in self.iteration and tensor.op in stacked and tensor not in row):
                stack[tensor] = None
            elif tensor in row or tensor.op.op.name == "placeholder":
                again.add(tensor)
            else:
                left += tensor.op.inputs
        return list(stack), again

    def _resized(self) -> set[Node]:
        """What in an iteration has sizes that this decides by its values, so that no two need have the same."""
        varies = {t.op for t in (*self.state, *self.row)}
        resized: set[Node] = set()
        for node in self.inside.nodes:
            if node not in self.iteration:
                continue
            sizes = [node.inputs[i] for i in sizing(node.op.name, node.attrs, len(node.inputs))]
            decided = any(t.op in varies and not value_known(t.spec.value) for t in sizes)
            if not all(t.spec.known for t in node.outputs) and (decided or any(t.op in resized for t in node.inputs)):
                resized.add(node)
            taken = resized if node.op is shape_of else varies
            if any(t.op in taken for t in node.inputs):
                varies.add(node)
        return resized

    def _stacked(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """The stacks of those values of each iteration, which the forward loop is made to keep."""
        have = {t: i for i, t in reversed(list(enumerate(self.made[self.carried :])))}
        new = [t for t in wanted if t not in have]
        for t in filter(_has_most_axes, new):
            if not t.spec.known or t in set(self.behind.needed):
                raise SpecError(
                    f"{self.node.name!r} ({self.node.site}): the gradient of a loop keeps each iteration's {t.spec} "
                    f"along a further axis, and tensors have at most {MAX_RANK}; reshape what the loop computes with "
                    "to fewer, or tell all its sizes"
                )
        have |= {t: i for i, t in enumerate(new, len(self.made) - self.carried)}
        if new or self._has_grown():
            with building(self.inside), scoped(replace(current_scope(), control=())):
                kept = [reshape(t, (-1,)) if _has_most_axes(t) else t for t in new]
            forward = as_body(self.inside, [*self.state, *self.row, *self.kept], [*self.made, *kept])
            self.node.graph.extend(self.node, {**self.node.attrs, "body": forward})
        return [self.node.outputs[self.carried + 1 + have[t]] for t in wanted]

    def _has_grown(self) -> bool:
        """Whether a loop inside the iteration was made to stack something, too."""
        again = [n for n in self.inside.nodes if n in self.iteration and n.op.name == loop.name]
        before = [n for n in self.body.nodes if n.op == loop.name]
        return sum(len(n.outputs) for n in again) > sum(len(n.outputs) for n in before)

    def _build(self, wanted: list[Tensor], again: set[Tensor]) -> tuple[Any, ...]:
        node, inside = self.node, self.inside
        stacks = self._stacked(wanted)
        rows = [(r, outside) for r, outside in zip(self.row, self.rows, strict=True) if r in again]
        flowing = [(d, s) for d, s in zip(self.d_stack, self.stack_slopes, strict=True) if d is not None and d in again]
        kept = {mine: outside for outside, mine in inside.captured.items() if mine in again}
        sums = [(t, outside) for t, outside in zip(self.sums, self.captured, strict=True) if t is not None]
        first = self._last_slopes()
        scanned = [*(s for _, s in flowing), *stacks, *(outside for _, outside in rows)]
        counted = bool(node.attrs["cond"] is not None or self.counted or not scanned)
        inner = [*(d for d, _ in first), *(t for t, _ in sums)]
        inner += [*(d for d, _ in flowing), *wanted, *(r for r, _ in rows), *kept]
        stacked_now = set(wanted)
        flat = [i for i, t in enumerate(inner) if t in stacked_now and _has_most_axes(t)]  # those are vectors
        whole = dict(rows) | dict(zip(wanted, stacks, strict=True))
        stacked = [t for t in self.behind.needed if t not in whole]
        fetches = [t for t in (*self.to_state, *self.to_kept, *self.to_row, *stacked) if t is not None]
        outputs = loop(
            [
                *([node.outputs[self.carried]] if counted else []),
                *(s for _, s in first),
                *(zeros_like(outside) for _, outside in sums),
                *scanned,
                *kept.values(),
            ],
            body=with_flat_feeds(as_body(inside, inner, fetches), flat),
            cond=None,
            carried=len(first) + len(sums),
            scanned=len(scanned),
            counted=counted,
            reverse=not node.attrs["reverse"],
            limit=None,
            parallel_iterations=node.attrs["parallel_iterations"],
            name=f"{node.name}/gradient",
        )
        found = list(outputs) if isinstance(outputs, tuple) else [outputs]
        last = found[len(found) - len(stacked) :]
        made = self.behind.build(whole | dict(zip(stacked, last, strict=True)))
        return self._dealt(found, len(first), len(sums), made)

    def _last_slopes(self) -> list[tuple[Tensor, Any]]:
        """With what the way back begins, for each slope of the state: what came of the loop's outputs, or zeros."""
        return [
            (d, s if s is not None else zeros_like(self.node.outputs[k]))
            for k, (d, s) in enumerate(zip(self.d_state, self.state_slopes, strict=True))
            if d is not None
        ]

    def _dealt(self, found: list[Any], states: int, sums: int, made: Mapping[Tensor, Any]) -> tuple[Any, ...]:
        """The slopes of the loop's inputs, of what the way back answers: of the state, sums, a count, and of rows.

        What is ``made`` behind the loop are those of tensors that it captured.
        """
        to_state, to_kept = iter(found[:states]), iter(found[states : states + sums])
        to_row = iter(found[states + sums + 1 :])
        return (
            *(None for _ in range(self.counted)),
            *(None if d is None else next(to_state) for d in self.d_state),
            *(None if t is None else next(to_row) for t in self.to_row),
            *(made.get(t) if total is None else next(to_kept) for t, total in zip(self.kept, self.sums, strict=True)),
        )


def _has_most_axes(tensor: Tensor) -> bool:
    return len(tensor.spec.dims or ()) == MAX_RANK
