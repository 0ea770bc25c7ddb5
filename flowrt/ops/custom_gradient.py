"""Functions with a gradient of their own: `custom_gradient`, and the op that it puts behind what they answer.

What such a function builds is ordinary. Behind each floating answer stands a `with_gradient` node, which computes
nothing: its first input is the answer, and the others are what its rule needs. The rule is a body, built once, when the
function is called; a gradient replays it beside the nodes, as often as there are gradients, and inside loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from flowrt.base.errors import GraphError, SpecError, user_site
from flowrt.base.locating import checked_function, fitting
from flowrt.base.plan import Plan
from flowrt.base.spec import is_float
from flowrt.base.tracebacks import brief
from flowrt.base.traits import Arranged
from flowrt.graph import Graph, Node, Tensor
from flowrt.op import active_builder, as_value, builder_for
from flowrt.ops.body import as_tensor, capture, changes_state, close, replay, trace
from flowrt.ops.source import zeros_like
from flowrt.ops.structure import LEAF, Structure, flatten
from flowrt.subgraph import Subgraph
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.typed import Operand, Result

__all__ = ["custom_gradient"]

P = ParamSpec("P")
OPEN = frozenset({"placeholder", "read_variable"})  # what has no inputs, and yet is no constant


@op(view=Arranged.RESHAPED, gradient=lambda node, *slopes: _answer_gradients(node, slopes))
def with_gradient(
    values: Sequence[Operand],
    *,
    rule: Plan,
    call: str,
    answer: int,
    answers: int,
    arguments: int,
    name: str | None = None,
) -> Result:
    """The first of ``values``, which is the ``answer``-th of a function's ``call``; then come all its ``answers`` and
    ``arguments``, and what the ``rule`` takes beside the gradients of the answers."""
    if len(values) <= answers + arguments or not 0 <= answer < answers or not isinstance(rule, Plan):
        raise SpecError(f"{len(values)} values are no answer, {answers} answers and {arguments} arguments")
    return values[0]


def _together(node: Node) -> Sequence[Tensor | None]:
    """All answers of the call that ``node`` is of, as far as they are kept, where it is the first of them; or none."""
    found: list[Tensor | None] = [None] * int(node.attrs["answers"])
    for each in _alike(node, node.graph.nodes[node.index :]):
        found[each.attrs["answer"]] = each.outputs[0]
    return () if any(_alike(node, reversed(node.graph.nodes[: node.index]))) else found


def _alike(node: Node, others: Any) -> Iterator[Node]:
    """Those of ``others`` at the beginning that share their call with ``node``."""
    for other in others:
        same = other.op is with_gradient and other.attrs["call"] == node.attrs["call"]
        if not same or any(a is not b for a, b in zip(other.inputs[1:], node.inputs[1:], strict=False)):
            return
        yield other


with_gradient.absent_gradients = True
with_gradient.results = _together


def _answer_gradients(node: Node, slopes: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What the rule answers for the arguments; nothing goes to what they came to, or to what else the rule uses."""
    here = active_builder()
    graph = here if isinstance(here, Graph) else node.graph
    rule, answers, arguments = node.attrs["rule"], int(node.attrs["answers"]), int(node.attrs["arguments"])
    assert isinstance(rule, Plan)
    made = node.inputs[1 : 1 + answers]
    taken = [graph.adopt(t) for t in node.inputs[1 + answers + arguments :]]
    dys = [graph.adopt(zeros_like(y) if dy is None else dy) for y, dy in zip(made, slopes, strict=True)]
    values = replay(rule, [*dys, *taken], graph)
    found = [values[v] for v in rule.fetches]
    return (*[None] * (1 + answers), *found, *[None] * len(taken))


@fitting
def custom_gradient(function: Callable[P, Any]) -> Callable[P, Any]:
    """Decorator for a function of tensors that answers ``(result, rule)``: its gradient is what ``rule`` says.

    ``result`` is a tensor or a nesting of tensors. ``rule(*dys)`` is given the gradient of each tensor in it, in order
    (None for one that is not floating), and answers one gradient for each positional argument, of its shape and dtype,
    or None where none flows; for a single argument, that alone. It may use what the function has computed. It is
    called once for each call of the function, when that is built, and what it builds has a gradient, too.

    A gradient flows to positional arguments only: what else the function computes with is a constant to it, or
    passed through `stop_gradient`. Outside a graph the decorated function answers its result.

    Raises `GraphError` where the function answers anything else, its rule another number of gradients or one that does
    not fit, where the rule has effects, and where a gradient would get lost on the way to what is no argument.
    """
    name = getattr(checked_function(function, "what custom_gradient decorates"), "__name__", "function")

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = [as_value(value) for value in args]
        builder = builder_for(given)
        if not isinstance(builder, Graph):
            return _halves(name, function(*args, **kwargs))[0]
        arguments, begun = [builder.adopt(value) for value in given], len(builder.nodes)
        result, rule = _halves(name, function(*arguments, **kwargs))
        form, leaves = flatten(result)
        answers = [builder.adopt(as_value(leaf)) for leaf in leaves]
        if not any(_is_real(argument) for argument in arguments):
            return result
        _refuse_others(name, builder, begun, answers, arguments)
        return form.rebuild(_with_rule(name, builder, rule, answers, arguments))

    return brief(called)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and is_float(value.dtype)


def _halves(name: str, answer: Any) -> tuple[Any, Callable[..., Any]]:
    if isinstance(answer, tuple) and len(answer) == 2 and callable(answer[1]):
        return answer
    raise GraphError(
        f"{user_site()}: {name}, a function with a gradient of its own, answers (result, rule), rule being a function "
        f"of the result's gradients; it answered {answer!r}"
    )


def _with_rule(
    name: str, graph: Graph, rule: Callable[..., Any], answers: Sequence[Any], arguments: Sequence[Any]
) -> list[Any]:
    """``answers``, behind each floating one a node with what ``rule`` comes to."""
    real = [i for i, answer in enumerate(answers) if _is_real(answer)]
    if not real:
        return list(answers)

    def of_real(*dys: Tensor) -> list[Any]:
        each = dict(zip(real, dys, strict=True))
        return _one_each(name, rule(*[each.get(i) for i in range(len(answers))]), len(arguments))

    made = [answers[i] for i in real]
    traced = trace(graph, f"{name}/rule", of_real, Structure(list, (), (LEAF,) * len(real)), [t.spec for t in made])
    found = iter(traced.answers)
    pairs = [(x, next(found)) for x, kept in zip(arguments, traced.kept, strict=True) if kept]
    pairs = [(x, _fitting(name, traced.graph, x, gradient)) for x, gradient in pairs if _is_real(x)]
    captured = capture([traced])
    plan = close(traced, [gradient for _, gradient in pairs], captured)
    if changes_state(plan):
        raise GraphError(f"{user_site()}: the gradient rule of {name} reads or changes state; it only computes")
    values = [*made, *[x for x, _ in pairs], *captured]
    ruled = partial(
        with_gradient, rule=plan, call=graph.unique_name(name), answers=len(made), arguments=len(pairs), name=name
    )
    behind = {place: ruled([made[number], *values], answer=number) for number, place in enumerate(real)}
    return [behind.get(place, answer) for place, answer in enumerate(answers)]


def _one_each(name: str, gradients: Any, arguments: int) -> list[Any]:
    """What a rule answered: one gradient, or None, for each argument."""
    found = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    if len(found) != arguments:
        raise GraphError(
            f"{user_site()}: the gradient rule of {name} answered {len(found)} gradients for {arguments} positional "
            "arguments; it answers a tuple of one for each, None where none flows"
        )
    return [as_value(gradient) for gradient in found]


def _fitting(name: str, graph: Subgraph, x: Tensor, gradient: Any) -> Tensor:
    made = as_tensor(graph, gradient, x.dtype)
    if made.dtype == x.dtype and (None in (made.spec.dims, x.spec.dims) or _agree(made.spec.dims, x.spec.dims)):
        return made
    raise GraphError(
        f"{user_site()}: the gradient rule of {name} answered {made.spec} for {x.spec}; a gradient has its tensor's "
        "shape and dtype"
    )


def _agree(dims: Any, others: Any) -> bool:
    return len(dims) == len(others) and all(n == m or None in (n, m) for n, m in zip(dims, others, strict=True))


def _refuse_others(name: str, graph: Graph, begun: int, answers: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Raise where ``answers`` depend on what is no argument, and varies: a gradient would not get there."""
    seen = {id(argument) for argument in arguments}
    left = [answer for answer in answers if _is_real(answer)]
    while left:
        tensor = left.pop()
        if id(tensor) in seen or not _is_real(tensor) or not tensor.op.op.differentiable:
            continue
        seen.add(id(tensor))
        source = _meant(graph, tensor)
        mine = source is tensor and tensor.op.index >= begun
        if source.op.op.name in OPEN or (not mine and source.op.inputs and source.op.op.differentiable):
            raise GraphError(
                f"{user_site()}: {name} computes with {source}, which is no argument of it, so no gradient would flow "
                "there; pass it as a positional argument, or through fr.stop_gradient"
            )
        if mine:
            left += tensor.op.inputs


def _meant(graph: Graph, tensor: Tensor) -> Tensor:
    """``tensor`` as the program knows it: what a body captured is a tensor around it."""
    if isinstance(graph, Subgraph):
        outside = next((out for out, mine in graph.captured.items() if mine is tensor), None)
        return tensor if outside is None else _meant(graph.outer, outside)
    return tensor
