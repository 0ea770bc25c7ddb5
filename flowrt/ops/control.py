"""Loops and branches as single nodes, whose bodies are attributes: `while_loop`, `scan`, `map_fn`, `cond`, `case`.

One op is every loop. It *carries* tensors from turn to turn, reads a row of each *scanned* input per turn, *stacks* what
its body answers beyond what it carries, and ends with its scanned inputs, its count, its limit or its condition. Its
gradient is such a loop too, backwards over stacks that the forward loop is given for it. Follows Yu et al., "Dynamic
control flow in large-scale machine learning" (EuroSys 2018), in structured form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import GraphError, SpecError, user_site
from flowrt.graph import Graph, Node, Tensor, control_dependencies
from flowrt.op import active_builder, as_value, common_dtype, located, op
from flowrt.ops.body import Traced, answers_of, as_tensor, awaited, capture, changes_state, close, trace
from flowrt.ops.source import constant
from flowrt.plan import Plan
from flowrt.spec import Spec, as_shape
from flowrt.structure import LEAF, Structure, flatten

if TYPE_CHECKING:
    from flowrt.spec import Shape

COUNT = Spec("int64", ())


# ── what the ops mean ────────────────────────────────────────────────────────────────────────────────────────────────


def _infer_loop(
    inputs: Sequence[Spec],
    body: Plan,
    cond: Plan | None,
    carried: int,
    scanned: int,
    counted: bool,
    reverse: bool,
    limit: int | None,
    parallel_iterations: int,
) -> tuple[Spec, ...]:
    _check_loop(inputs, body, cond, (carried, scanned, int(counted)), limit, parallel_iterations)
    first = inputs[int(counted) : int(counted) + carried]
    rows = [_row(spec) for spec in inputs[int(counted) + carried : int(counted) + carried + scanned]]
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
        raise SpecError(f"the number of turns is an int64 scalar, got {inputs[0]}")
    if cond is None and not scanned and not counted and limit is None:
        raise SpecError("nothing ends this loop; give it a condition or maximum_iterations")
    if limit is not None and limit < 0:
        raise SpecError(f"maximum_iterations cannot be negative, got {limit}")
    if parallel_iterations < 1:
        raise SpecError(f"parallel_iterations is at least 1, got {parallel_iterations}")


def _row(spec: Spec) -> Spec:
    """One entry along the first axis of what is scanned."""
    if spec.dims == ():
        raise SpecError(f"a scan goes along the first axis, and {spec} has none")
    return Spec(spec.dtype, None if spec.dims is None else spec.dims[1:])


def _length(scanned: Sequence[Spec], limit: int | None) -> int | None:
    known = {spec.dims[0] for spec in scanned if spec.dims is not None and spec.dims[0] is not None}
    if len(known) > 1:
        raise SpecError(f"{' and '.join(map(str, scanned))} are scanned together; their first axes must be equal")
    return known.pop() if known else None if scanned else limit


def _held(number: int, declared: Spec, held: Spec, answer: Spec) -> Spec:
    """The spec of a loop variable that has been ``held`` so far, after a turn that made it ``answer``."""
    if answer.dtype != held.dtype:
        raise SpecError(
            f"loop variable {number} begins as {held} and the body makes it {answer}; a loop variable keeps its dtype: "
            f"use .astype({held.dtype.name!r}) in the body, or begin with {answer.dtype}"
        )
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


def _infer_cond(inputs: Sequence[Spec], if_true: Plan, if_false: Plan) -> tuple[Spec, ...]:
    if not (isinstance(if_true, Plan) and isinstance(if_false, Plan)):
        raise SpecError("the branches of a cond are plans")
    if not inputs or inputs[0].dtype != bool or inputs[0].dims not in (None, ()):
        raise SpecError(f"a cond is decided by a bool scalar, got {inputs[0] if inputs else 'nothing'}")
    first, second = answers_of(if_true, inputs[1:]), answers_of(if_false, inputs[1:])
    if len(first) != len(second):
        raise SpecError(f"true_fn answers {len(first)} tensors and false_fn {len(second)}; they must answer alike")
    return tuple(_either(n, a, b) for n, (a, b) in enumerate(zip(first, second, strict=True)))


def _either(number: int, first: Spec, second: Spec) -> Spec:
    if first.dtype != second.dtype:
        raise SpecError(
            f"answer {number} is {first} of true_fn and {second} of false_fn; use .astype so that they are of one dtype"
        )
    if first.dims is None or second.dims is None or len(first.dims) != len(second.dims):
        return Spec(first.dtype, None)
    return Spec(first.dtype, tuple(a if a == b else None for a, b in zip(first.dims, second.dims, strict=True)))


@op
def loop(
    inputs: Sequence[Spec],
    *,
    body: Plan,
    cond: Plan | None,
    carried: int,
    scanned: int,
    counted: bool,
    reverse: bool,
    limit: int | None,
    parallel_iterations: int,
) -> tuple[Spec, ...]:
    """Carry tensors through turns of ``body``: what was carried last, the number of turns, and the stacks.

    ``inputs``: the most turns (if ``counted``), what is carried, what is scanned, what the bodies capture.
    """
    return _infer_loop(inputs, body, cond, carried, scanned, counted, reverse, limit, parallel_iterations)


@op(stateful=True)
def stateful_loop(
    inputs: Sequence[Spec],
    *,
    body: Plan,
    cond: Plan | None,
    carried: int,
    scanned: int,
    counted: bool,
    reverse: bool,
    limit: int | None,
    parallel_iterations: int,
) -> tuple[Spec, ...]:
    """A `loop` whose bodies have effects: the step machine runs it, node by node."""
    return _infer_loop(inputs, body, cond, carried, scanned, counted, reverse, limit, parallel_iterations)


@op(name="cond")
def choose(inputs: Sequence[Spec], *, if_true: Plan, if_false: Plan) -> tuple[Spec, ...]:
    """What one of two bodies answers; ``inputs``: the bool scalar that decides, then what the bodies capture."""
    return _infer_cond(inputs, if_true, if_false)


@op(stateful=True)
def stateful_cond(inputs: Sequence[Spec], *, if_true: Plan, if_false: Plan) -> tuple[Spec, ...]:
    """A `cond` whose bodies have effects: the step machine runs it, node by node."""
    return _infer_cond(inputs, if_true, if_false)


# ── how programs say it ──────────────────────────────────────────────────────────────────────────────────────────────


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any], *, name: str | None = None) -> Any:
    """What ``true_fn()`` answers where the bool scalar ``pred`` holds, else what ``false_fn()`` does.

    Only the one that is chosen runs. Both answer the same nesting of tensors, of equal dtypes; what they use of the
    graph around them is captured. Branches that answer an operation, or None, make an operation. On plain arrays
    outside a graph the choice is made at once.
    """
    decides = as_value(pred)
    graph = _graph_of([decides])
    if graph is None:
        return true_fn() if bool(decides) else false_fn()
    with located(f"cond {name!r}" if name else "cond"):
        label = name or "cond"
        first = trace(graph, f"{label}/true", true_fn, Structure(tuple), ())
        second = trace(graph, f"{label}/false", false_fn, Structure(tuple), ())
        if first.form != second.form or first.kept != second.kept:
            raise SpecError(f"true_fn answers {_shape_of(first)} and false_fn {_shape_of(second)}; they must be alike")
        captured = capture([first, second])
        kinds = _common_kinds(first, second)
        bodies = [
            close(one, [as_tensor(one.graph, a, k) for a, k in zip(one.answers, kinds, strict=True)], captured)
            for one in (first, second)
        ]
        made = stateful_cond if changes_state(*bodies) else choose
        with control_dependencies(awaited([first, second])):
            found = made(
                [as_tensor(graph, graph.adopt(decides)), *captured], if_true=bodies[0], if_false=bodies[1], name=label
            )
    if isinstance(found, Node):
        return found
    outputs = found if isinstance(found, tuple) else (found,)
    left = iter(outputs)
    return first.form.rebuild([next(left) if keep else outputs[0].op for keep in first.kept])


def case(
    pairs: Sequence[tuple[Any, Callable[[], Any]]], default: Callable[[], Any] | None = None, *, name: str | None = None
) -> Any:
    """What the function of the first pair (bool scalar, function) answers whose scalar holds, else ``default()``.

    Without a ``default`` the last function stands for it.
    """
    if not pairs:
        raise SpecError(f"case ({user_site()}): give at least one pair of a bool scalar and a function")
    (pred, function), rest = pairs[0], pairs[1:]
    if not rest:
        return function() if default is None else cond(pred, function, default, name=name)
    return cond(pred, function, lambda: case(rest, default, name=name), name=name)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    loop_vars: Any,
    *,
    parallel_iterations: int = 10,
    maximum_iterations: Any = None,
    shape_invariants: Any = None,
    name: str | None = None,
) -> Any:
    """What ``loop_vars`` come to: ``loop_vars = body_fn(*loop_vars)`` as long as ``cond_fn(*loop_vars)`` holds.

    ``loop_vars`` is a tensor or a nesting of them; each keeps its dtype, and its shape unless ``shape_invariants``, a
    nesting like ``loop_vars`` of shapes with None where they change, says otherwise. What the functions use of the graph
    around them is captured. ``maximum_iterations`` (a number or an int scalar) ends the loop at the latest; where it
    is a number, gradients need no growing memory. ``parallel_iterations`` bounds how many turns the step machine may
    have under way, where the body has effects. On plain arrays outside a graph the loop runs at once.
    """
    form, first = flatten(loop_vars)
    single = form == LEAF
    first = [as_value(leaf) for leaf in first]
    graph = _graph_of(first)
    if graph is None:
        return _while_now(cond_fn, body_fn, loop_vars, single, maximum_iterations)
    with located(f"while_loop {name!r}" if name else "while_loop"):
        start = [as_tensor(graph, graph.adopt(value)) for value in first]
        invariants = _invariants(start, shape_invariants, single)
        count, limit = _most(graph, maximum_iterations)
        return _build_loop(
            graph,
            name or "while_loop",
            _splat(body_fn, form),
            _splat(cond_fn, form),
            (start, invariants, form),
            [],
            count=count,
            limit=limit,
            reverse=False,
            parallel_iterations=parallel_iterations,
        )[0]


def scan(
    fn: Callable[[Any, Any], Any], init: Any, xs: Any, *, reverse: bool = False, name: str | None = None
) -> tuple[Any, Any]:
    """Carry ``init`` along the first axis of ``xs``: ``carry, y = fn(carry, x)`` for each entry ``x``.

    Answers the last carry, and the ``y`` stacked along a new first axis. ``init``, ``xs`` and ``y`` are tensors or
    nestings of them (``y`` may be None). With ``reverse`` the entries are visited last to first; each ``y`` keeps the
    place of its ``x``.
    """
    form, first = flatten(init)
    rows_form, rows = flatten(xs)
    first, rows = [as_value(v) for v in first], [as_value(v) for v in rows]
    graph = _graph_of([*first, *rows])
    if graph is None:
        return _scan_now(fn, init, (rows_form, [np.asarray(row) for row in rows]), reverse)
    with located(f"scan {name!r}" if name else "scan"):
        if not rows:
            raise SpecError("a scan needs something to scan; use while_loop with maximum_iterations")
        start = [as_tensor(graph, graph.adopt(value)) for value in first]
        scanned = [as_tensor(graph, graph.adopt(value)) for value in rows]
        carry, ys = _build_loop(
            graph,
            name or "scan",
            fn,
            None,
            (start, [t.spec.without_value() for t in start], form),
            scanned,
            rows_form=rows_form,
            reverse=reverse,
        )
    return carry, ys


def map_fn(fn: Callable[[Any], Any], xs: Any, *, name: str | None = None) -> Any:
    """``fn(x)`` for each entry ``x`` along the first axis of ``xs``, stacked along a new first axis."""
    return scan(lambda carry, x: ((), fn(x)), (), xs, name=name or "map_fn")[1]


# ── building ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _build_loop(
    graph: Graph,
    name: str,
    body_fn: Callable[..., Any],
    cond_fn: Callable[..., Any] | None,
    carry: tuple[list[Tensor], list[Spec], Structure],
    scanned: list[Tensor],
    *,
    rows_form: Structure | None = None,
    count: Tensor | None = None,
    limit: int | None = None,
    reverse: bool,
    parallel_iterations: int = 10,
) -> tuple[Any, Any]:
    """Record a loop; answers what was carried last and, for a scan, the stacks, in the forms that ``body_fn`` uses."""
    start, invariants, form = carry
    forms = (form,) if rows_form is None else (form, rows_form)
    rows = [_row(t.spec) for t in scanned]
    traced = trace(graph, f"{name}/body", body_fn, Structure(tuple, (), forms), [*invariants, *rows])
    test = None
    if cond_fn is not None:
        test = trace(graph, f"{name}/cond", cond_fn, Structure(tuple, (), (form,)), invariants)
    both = [traced] if test is None else [traced, test]
    answers, ys_form = _loop_answers(traced, form, invariants, stacks=rows_form is not None)
    captured = capture(both)
    body = close(traced, answers, captured)
    condition = None if test is None else close(test, [_condition(test)], captured)
    _refuse_random(body, condition)
    made = stateful_loop if changes_state(body, condition) else loop
    with control_dependencies(awaited(both)):
        outputs = made(
            [*([] if count is None else [count]), *start, *scanned, *(graph.adopt(t) for t in captured)],
            body=body,
            cond=condition,
            carried=len(start),
            scanned=len(scanned),
            counted=count is not None,
            reverse=reverse,
            limit=limit,
            parallel_iterations=parallel_iterations,
            name=name,
        )
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    left = iter(found[len(start) + 1 :])
    ys = None if ys_form is None else ys_form.rebuild([next(left) if keep else None for keep in _ys_kept(traced, form)])
    return form.rebuild(found[: len(start)]), ys


def _loop_answers(
    traced: Traced, form: Structure, invariants: Sequence[Spec], *, stacks: bool
) -> tuple[list[Tensor], Structure | None]:
    """What a body answers as tensors, carried ones first, and the form of what it stacks."""
    want, got = form, traced.form
    ys_form = None
    if stacks:
        if got.kind is None or len(got.parts) != 2:
            raise SpecError(f"the function of a scan answers (carry, y), got {_shape_of(traced)}; y may be None")
        got, ys_form = got.parts
    elif want != got and len(invariants) == len(traced.kept) and _loose(want) == _loose(got):
        got = want  # a list for a tuple, or one tensor for a tuple of one
    if _loose(want) != _loose(got) or not all(traced.kept[: len(invariants)]):
        raise SpecError(
            f"the loop carries {want_text(want)} and its body answers {_shape_of(traced)}; they must have the same form"
        )
    dtypes = [spec.dtype for spec in invariants] + [None] * (len(traced.answers) - len(invariants))
    return [as_tensor(traced.graph, a, d) for a, d in zip(traced.answers, dtypes, strict=True)], ys_form


def _ys_kept(traced: Traced, form: Structure) -> tuple[bool, ...]:
    return traced.kept[_leaves(form) :]


def _leaves(form: Structure) -> int:
    return 1 if form.kind is None else sum(map(_leaves, form.parts))


def _loose(form: Structure) -> Any:
    """``form`` as far as a body must keep it: a list does for a tuple, and a tensor for a sequence of one."""
    if form.kind is None:
        return "leaf"
    parts = tuple(map(_loose, form.parts))
    if form.kind is dict:
        return dict, form.names, parts
    return parts[0] if len(parts) == 1 else parts


def want_text(form: Structure) -> str:
    """A form as errors show it."""
    return str(form.rebuild(["tensor"] * _leaves(form))).replace("'tensor'", "tensor")


def _shape_of(traced: Traced) -> str:
    leaves = ["tensor" if keep else "operation or None" for keep in traced.kept]
    return str(traced.form.rebuild(leaves)).replace("'", "")


def _condition(test: Traced) -> Tensor:
    if len(test.answers) != 1 or test.form != LEAF:
        raise SpecError(f"the condition of a loop answers one bool scalar, got {_shape_of(test)}")
    return as_tensor(test.graph, test.answers[0])


def _refuse_random(*bodies: Plan | None) -> None:
    """A random op draws once per step and name: in a loop every turn would draw the same."""
    for body in bodies:
        for node in () if body is None else body.nodes:
            if node.op.startswith("random_"):
                raise GraphError(
                    f"{node.where()}: a random op inside a loop would draw the same in every turn; draw for all turns "
                    "outside, and scan over what was drawn"
                )


def _common_kinds(first: Traced, second: Traced) -> list[Any]:
    """The dtype that each pair of answers shares; a Python number takes that of the tensor beside it."""
    kinds: list[Any] = []
    for pair in zip(first.answers, second.answers, strict=True):
        tensors = [a.dtype for a in pair if isinstance(a, Tensor)]
        kinds.append(tensors[0] if len(tensors) == 1 else None if tensors else common_dtype(pair))
    return kinds


def _splat(function: Callable[..., Any], form: Structure) -> Callable[[Any], Any]:
    """``function``, which takes loop variables one by one where they are a sequence, as one that takes them whole."""
    if form.kind is None or form.kind is dict:
        return function
    return lambda variables: function(*variables)


def _invariants(start: Sequence[Tensor], given: Any, single: bool) -> list[Spec]:
    if given is None:
        return [t.spec.without_value() for t in start]
    shapes: list[Shape | None] = [None if s is None else as_shape(s) for s in ([given] if single else _flat_shapes(given))]
    if len(shapes) != len(start):
        raise SpecError(f"{len(start)} loop variables have {len(shapes)} shape_invariants; give each one a shape")
    for tensor, shape in zip(start, shapes, strict=True):
        if shape is not None and not Spec(tensor.dtype, shape).accepts(tensor.dtype, tensor.shape):
            raise SpecError(f"{tensor!r} does not fit its shape invariant {shape}")
    return [Spec(t.dtype, shape) for t, shape in zip(start, shapes, strict=True)]


def _flat_shapes(given: Any) -> list[Any]:
    """The shapes in a nesting: tuples of sizes are leaves."""
    if given is None or (isinstance(given, (tuple, list)) and all(n is None or isinstance(n, int) for n in given)):
        return [given]
    items = given.values() if isinstance(given, dict) else given
    return [shape for item in items for shape in _flat_shapes(item)]


def _most(graph: Graph, most: Any) -> tuple[Tensor | None, int | None]:
    """The most turns as an input, or as a number."""
    value = graph.adopt(as_value(most))
    if isinstance(value, Tensor):
        return value.astype("int64"), None
    return None, None if value is None else int(value)


def _graph_of(values: Sequence[Any]) -> Graph | None:
    """The graph to build in, or None where there is none and all is plain data."""
    builder = active_builder()
    if builder is None:
        builder = next((v.graph for v in values if isinstance(v, Tensor)), None)
    return builder if isinstance(builder, Graph) else None


# ── on plain arrays ──────────────────────────────────────────────────────────────────────────────────────────────────


def _while_now(cond_fn: Any, body_fn: Any, loop_vars: Any, single: bool, most: Any) -> Any:
    form, leaves = flatten(loop_vars)
    dtypes = [constant(leaf).dtype for leaf in leaves]
    state = [constant(leaf) for leaf in leaves]
    test, body = _splat(cond_fn, form), _splat(body_fn, form)
    turns = 0
    while (most is None or turns < int(most)) and bool(test(form.rebuild(state))):
        found = flatten(body(form.rebuild(state)))[1]
        state = [np.asarray(v, d) if isinstance(v, (bool, int, float)) else v for v, d in zip(found, dtypes, strict=True)]
        turns += 1
    return form.rebuild(state)


def _scan_now(fn: Any, init: Any, rows: tuple[Structure, list[Any]], reverse: bool) -> tuple[Any, Any]:
    form, leaves = rows
    if not leaves or len({len(leaf) for leaf in leaves}) != 1:
        raise SpecError(f"scan ({user_site()}): what is scanned together has first axes of equal length")
    carry, stacked = init, []
    carry_form, first = flatten(init)
    carry = carry_form.rebuild([constant(leaf) for leaf in first])
    turns = range(len(leaves[0]))
    for t in reversed(turns) if reverse else turns:
        carry, y = fn(carry, form.rebuild([leaf[t] for leaf in leaves]))
        stacked.append(y)
    if not stacked:
        return carry, None
    y_form, _ = flatten(stacked[0])
    columns = zip(*[flatten(y)[1] for y in (reversed(stacked) if reverse else stacked)], strict=True)
    return carry, y_form.rebuild([None if column[0] is None else np.stack(column) for column in columns])
