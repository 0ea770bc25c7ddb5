"""How programs say loops and branches: `while_loop`, `scan`, `map_fn`, `cond`, `case`.

Law: here functions become bodies, nestings become flat inputs and outputs, and plain arrays outside a graph are
computed at once. What the nodes mean is `control`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.locating import fitting, located, located_error
from flowrt.base.plain import as_dtype_of, common_dtype, default_array, fitting_array, takes
from flowrt.base.spec import Spec, as_shape, kind_of, spec_of
from flowrt.base.tracebacks import brief
from flowrt.graph import Graph, Node, Tensor, control_dependencies, current_scope, scoped
from flowrt.op import active_builder, as_value, building
from flowrt.ops.ahead import products_ahead
from flowrt.ops.body import (
    ITERATION,
    Traced,
    as_tensor,
    asks_for_iteration,
    awaited,
    capture,
    changes_state,
    close,
    trace,
)
from flowrt.ops.control import choose, loop, of_other_dtype, row_of, stateful_cond, stateful_loop
from flowrt.ops.elementwise import add, astype
from flowrt.ops.source import constant
from flowrt.ops.structure import LEAF, Structure, flatten, leaves_of, loose, written

if TYPE_CHECKING:
    from flowrt.base.spec import Shape
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand

__all__ = ["case", "cond", "map_fn", "scan", "while_loop"]


@overload
def cond(
    pred: Operand, true_fn: Callable[[], Tensor], false_fn: Callable[[], Tensor], *, name: str | None = None
) -> TensorOrArray: ...


@overload
def cond(pred: Operand, true_fn: Callable[[], Any], false_fn: Callable[[], Any], *, name: str | None = None) -> Any: ...


@fitting
def cond(pred: Operand, true_fn: Callable[[], Any], false_fn: Callable[[], Any], *, name: str | None = None) -> Any:
    """What ``true_fn()`` answers where the bool scalar ``pred`` holds, else what ``false_fn()`` does.

    Only the one that is chosen runs. Both answer the same nesting of tensors, of equal dtypes; what they use of the
    graph around them is captured. Branches that answer an operation, or None, make an operation. On plain arrays
    outside a graph the choice is made at once.
    """
    _check_functions("cond", true_fn=true_fn, false_fn=false_fn)
    decides = as_value(pred)
    graph = _graph_of([decides])
    if graph is None:
        answer = true_fn() if _holds("cond", decides) else false_fn()
        with located("cond"):
            form, leaves = flatten(answer)
            return form.rebuild([_as_array(leaf) for leaf in leaves])
    with located(f"cond {name!r}" if name else "cond"):
        if isinstance(pred, bool):
            raise SpecError(
                f"pred is Python's {pred}, decided before the graph runs: choose with Python's if, or compare tensors"
            )
        label = name or "cond"
        first = trace(graph, f"{label}/true", true_fn, Structure(tuple), ())
        second = trace(graph, f"{label}/false", false_fn, Structure(tuple), ())
        if first.form != second.form or first.kept != second.kept:
            one, other = [written(each.form, each.kept) for each in (first, second)]
            raise SpecError(f"true_fn answers {one} and false_fn {other}; they must be alike")
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


@brief
@located("case")
def case(
    pairs: Sequence[tuple[Any, Callable[[], Any]]], default: Callable[[], Any] | None = None, *, name: str | None = None
) -> Any:
    """What the function of the first pair (bool scalar, function) answers whose scalar holds, else ``default()``.

    Without a ``default`` the last function stands for it.
    """
    if not pairs:
        raise SpecError("give at least one pair of a bool scalar and a function")
    (pred, function), rest = pairs[0], pairs[1:]
    _check_functions("case", function=function, default=default or function)
    if not rest:
        return function() if default is None else cond(pred, function, default, name=name)
    return cond(pred, function, lambda: case(rest, default, name=name), name=name)


@fitting
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
    nesting like ``loop_vars`` of shapes with None where they change, says otherwise. What the functions use of the
    graph around them is captured. ``maximum_iterations`` (a number or an int scalar) ends the loop at the latest; where
    it is a number, gradients need no growing memory. ``parallel_iterations`` bounds how many the step machine may
    have under way, where the body has effects. On plain arrays outside a graph the loop runs at once.
    """
    _check_functions("while_loop", cond_fn=cond_fn, body_fn=body_fn)
    form, first = flatten(loop_vars)
    single = form == LEAF
    first = [as_value(leaf) for leaf in first]
    graph = _graph_of(first)
    if graph is None:
        return _while_now(cond_fn, body_fn, loop_vars, maximum_iterations)
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


@fitting
def scan(
    fn: Callable[[Any, Any], Any], init: Any, xs: Any, *, reverse: bool = False, name: str | None = None
) -> tuple[Any, Any]:
    """Carry ``init`` along the first axis of ``xs``: ``carry, y = fn(carry, x)`` for each entry ``x``.

    Answers the last carry, and the ``y`` stacked along a new first axis. ``init``, ``xs`` and ``y`` are tensors or
    nestings of them (``y`` may be None). With ``reverse`` the entries are visited last to first; each ``y`` keeps the
    place of its ``x``.
    """
    _check_functions("scan", fn=fn)
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


def stacking_loop(
    fn: Callable[[Any], tuple[Any, Any]],
    cond_fn: Callable[[Any], Any],
    init: list[Any],
    most: Any = None,
    shapes: Sequence[Any] | None = None,
) -> tuple[list[Any], list[Any]]:
    """A `while_loop` over a list of tensors whose iterations answer ``(state, ys)``: the last state, and ys stacked.

    There are at most ``most`` iterations, an int64 scalar tensor; ``shapes`` are as ``shape_invariants``. In a graph
    alone.
    """
    form, first = flatten(list(init))
    graph = _graph_of([as_value(value) for value in first])
    if graph is None:
        raise GraphError(f"{user_site()}: a loop that stacks what it makes is built in a graph")
    start = [as_tensor(graph, graph.adopt(as_value(value))) for value in first]
    invariants = [t.spec.without_value() for t in start]
    if shapes is not None:
        invariants = [Spec(t.dtype, shape) for t, shape in zip(start, shapes, strict=True)]
    count = None if most is None else as_tensor(graph, graph.adopt(as_value(most)))
    with located("while_loop"):
        state, ys = _build_loop(
            graph,
            "while_loop",
            lambda held, rows: fn(held),
            cond_fn,
            (start, invariants, form),
            [],
            rows_form=Structure(tuple),
            count=count,
            reverse=False,
        )
    return state, ys


@overload
def map_fn(fn: Callable[[Any], Tensor], xs: Operand, *, name: str | None = None) -> TensorOrArray: ...


@overload
def map_fn(fn: Callable[[Any], Any], xs: Any, *, name: str | None = None) -> Any: ...


@fitting
def map_fn(fn: Callable[[Any], Any], xs: Any, *, name: str | None = None) -> Any:
    """``fn(x)`` for each entry ``x`` along the first axis of ``xs``, stacked along a new first axis."""
    _check_functions("map_fn", fn=fn)
    return scan(lambda carry, x: ((), fn(x)), (), xs, name=name or "map_fn")[1]


# ── building ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_functions(what: str, **functions: Any) -> None:
    """Raise `SpecError` for what is no function, as a value that one is to answer."""
    for name, function in functions.items():
        if not callable(function):
            raise located_error(what, SpecError(f"{name} is a function, not {function!r}"))


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
    rows = [row_of(t.spec) for t in scanned]
    traced = trace(graph, f"{name}/body", body_fn, Structure(tuple, (), forms), [*invariants, *rows], iterations=True)
    test = None
    if cond_fn is not None:
        test = trace(graph, f"{name}/cond", cond_fn, Structure(tuple, (), (form,)), invariants, iterations=True)
    both = [traced] if test is None else [traced, test]
    answers, ys_form = _loop_answers(traced, form, invariants, stacks=rows_form is not None)
    ahead = products_ahead(traced, answers, dict(zip(traced.parameters[len(start) :], scanned, strict=True)))
    traced = replace(traced, parameters=(*traced.parameters, *ahead))
    scanned = [*scanned, *ahead.values()]
    states = len(start)
    if any(map(asks_for_iteration, both)):
        both = [_told_the_iteration(one, states) for one in both]
        start = [*start, graph.constant(np.asarray(0, ITERATION.dtype))]
        answers[states:states] = [_next_iteration(traced, name)]
        traced, test = both[0], None if test is None else both[1]
    captured = capture(both)
    body = close(traced, answers, captured)
    condition = None if test is None else close(test, [_condition(test)], captured)
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
    return form.rebuild(found[:states]), ys


def _told_the_iteration(traced: Traced, states: int) -> Traced:
    """A body that takes the number of its iteration behind the ``states`` that it is given by the program."""
    iteration = traced.graph.iteration
    assert iteration is not None
    return replace(traced, parameters=(*traced.parameters[:states], iteration, *traced.parameters[states:]))


def _next_iteration(traced: Traced, name: str) -> Tensor:
    with building(traced.graph), scoped(replace(current_scope(), prefix=f"{name}/body/", control=())):
        following: Tensor = add(traced.graph.iteration, np.ones((), ITERATION.dtype), name="next_iteration")
    return following


def _loop_answers(
    traced: Traced, form: Structure, invariants: Sequence[Spec], *, stacks: bool
) -> tuple[list[Tensor], Structure | None]:
    """What a body answers as tensors, carried ones first, and the form of what it stacks."""
    want, got = form, traced.form
    ys_form = None
    if stacks:
        if got.kind is None or len(got.parts) != 2:
            raise SpecError(_no_pair(got, traced.kept))
        got, ys_form = got.parts
    elif want != got and len(invariants) == len(traced.kept) and loose(want) == loose(got):
        got = want  # a list for a tuple, or one tensor for a tuple of one
    if loose(want) != loose(got) or not all(traced.kept[: len(invariants)]):
        raise SpecError(_other_form(want, traced.form, traced.kept))
    dtypes = [spec.dtype for spec in invariants] + [None] * (len(traced.answers) - len(invariants))
    return [as_tensor(traced.graph, a, d) for a, d in zip(traced.answers, dtypes, strict=True)], ys_form


def _ys_kept(traced: Traced, form: Structure) -> tuple[bool, ...]:
    return traced.kept[leaves_of(form) :]


def _other_form(form: Structure, got: Structure, kept: Iterable[bool]) -> str:
    carried = written(form, [True] * leaves_of(form))
    return f"the loop carries {carried} and its body answers {written(got, kept)}; they must have the same form"


def _no_pair(got: Structure, kept: Iterable[bool]) -> str:
    return f"the function of a scan answers (carry, y), got {written(got, kept)}; y may be None"


def _condition(test: Traced) -> Tensor:
    if len(test.answers) != 1 or test.form != LEAF:
        raise SpecError(f"the condition of a loop answers one bool scalar, got {written(test.form, test.kept)}")
    if not isinstance(test.answers[0], Tensor):
        raise SpecError(f"the condition of a loop answers {test.answers[0]!r}, whatever the loop carries")
    return test.answers[0]


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
    shapes: list[Shape | None] = [
        None if s is None else as_shape(s) for s in ([given] if single else _flat_shapes(given))
    ]
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
    """The most iterations as an input, or as a number."""
    value = graph.adopt(as_value(most))
    if isinstance(value, Tensor):
        return astype(value, "int64"), None
    return None, None if value is None else int(value)


def _graph_of(values: Sequence[Any]) -> Graph | None:
    """The graph to build in, or None where there is none and all is plain data."""
    builder = active_builder()
    if builder is None:
        builder = next((v.graph for v in values if isinstance(v, Tensor)), None)
    return builder if isinstance(builder, Graph) else None


# ── on plain arrays ──────────────────────────────────────────────────────────────────────────────────────────────────


def _holds(what: str, decides: Any) -> bool:
    if np.size(decides) != 1:
        raise SpecError(f"{what} ({user_site()}): a bool scalar decides, got {spec_of(np.asarray(decides))}")
    return bool(decides)


def _as_array(value: Any, dtype: Any = None) -> Any:
    """Plain data that a function answers as an array, of ``dtype`` where it is a number that fits it."""
    if value is None or isinstance(value, np.ndarray) or hasattr(value, "builder") or hasattr(value, "__tensor__"):
        return value
    return as_dtype_of(value, dtype) if dtype is not None and takes(value, dtype) else default_array(value)


def _tensors(leaves: Sequence[Any]) -> list[bool]:
    return [leaf is not None for leaf in leaves]


def _carried_on(form: Structure, state: Sequence[Any], got: Structure, found: Sequence[Any]) -> list[Any]:
    """What a body answers, in the dtypes that a loop carries: NumPy's operators widen what a graph's do not."""
    if loose(got) != loose(form) or not all(_tensors(found)):
        raise SpecError(_other_form(form, got, _tensors(found)))
    carried: list[Any] = []
    for number, (value, held) in enumerate(zip(found, state, strict=True)):
        array = _as_array(value, held.dtype)
        if kind_of(array.dtype) != kind_of(held.dtype):
            raise SpecError(of_other_dtype(number, spec_of(held), spec_of(array)))
        carried.append(array if array.dtype == held.dtype else fitting_array(array, held.dtype))
    return carried


def _while_now(cond_fn: Any, body_fn: Any, loop_vars: Any, most: Any) -> Any:
    form, leaves = flatten(loop_vars)
    state = [constant(leaf) for leaf in leaves]
    with located("while_loop"):
        limit = None if most is None else int(most)
    test, body = _splat(cond_fn, form), _splat(body_fn, form)
    iterations = 0
    while (limit is None or iterations < limit) and _holds("while_loop", test(form.rebuild(state))):
        got, found = flatten(body(form.rebuild(state)))
        with located("while_loop"):
            state = _carried_on(form, state, got, found)
        iterations += 1
    return form.rebuild(state)


def _scan_now(fn: Any, init: Any, rows: tuple[Structure, list[Any]], reverse: bool) -> tuple[Any, Any]:
    form, leaves = rows
    if not leaves or any(leaf.ndim == 0 for leaf in leaves) or len({len(leaf) for leaf in leaves}) != 1:
        raise SpecError(f"scan ({user_site()}): what is scanned together has first axes of equal length")
    carry_form, first = flatten(init)
    state = [constant(leaf) for leaf in first]

    def iterate(state: list[Any], row: list[Any]) -> tuple[list[Any], Structure, list[Any]]:
        """What is carried on, the form of what is stacked, and that."""
        got, found = flatten(fn(carry_form.rebuild(state), form.rebuild(row)))
        with located("scan"):
            if got.kind is None or len(got.parts) != 2:
                raise SpecError(_no_pair(got, _tensors(found)))
            behind = leaves_of(got.parts[0])
            carried = _carried_on(carry_form, state, got.parts[0], found[:behind])
            return carried, got.parts[1], [_as_array(value) for value in found[behind:]]

    count = len(leaves[0])
    stacked: list[list[Any]] = []
    for t in reversed(range(count)) if reverse else range(count):
        state, ys_form, ys = iterate(state, [np.asarray(leaf[t]) for leaf in leaves])
        stacked.append(ys)
    carry = carry_form.rebuild(state)
    if not stacked:  # one iteration on zeros tells what would be stacked
        _, ys_form, ys = iterate(state, [np.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        stacked.append(ys)
    with located("scan"):
        columns = zip(*(reversed(stacked) if reverse else stacked), strict=True)
        return carry, ys_form.rebuild([None if c[0] is None else np.stack(c)[:count] for c in columns])
