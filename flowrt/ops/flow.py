"""Where values go: passing them on, ordering effects, choosing by value, and crossing between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from flowrt.base.errors import GraphError, SpecError
from flowrt.base.locating import fitting
from flowrt.base.spec import Spec
from flowrt.base.traits import Arranged
from flowrt.graph import as_node, control_dependencies, current_graph
from flowrt.op import building
from flowrt.ops.comparison import equal
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.graph import Node, Tensor
    from flowrt.op import DType
    from flowrt.typed import Operand, Result

__all__ = [
    "enter",
    "exit",
    "group",
    "identity",
    "loop_cond",
    "merge",
    "next_iteration",
    "no_op",
    "stop_gradient",
    "switch",
]


@op(view=Arranged.RESHAPED, gradient=lambda node, dy: (dy,))
def identity(x: Operand, *, name: str | None = None) -> Result:
    """``x`` itself."""
    return x


@op(view=Arranged.RESHAPED, gradient=None)
def stop_gradient(x: Operand, *, name: str | None = None) -> Result:
    """``x`` itself, as a constant to `flowrt.gradients`."""
    return x


@op(gradient=None)
def no_op(*, name: str | None = None) -> None:
    """Nothing; control dependencies give it a place."""


@fitting
def group(*values: Any, name: str | None = None) -> Node:
    """An operation that is done once all ``values`` (operations, tensors, variables) are."""
    graph = as_node(values[0]).graph if values else current_graph("group")
    with building(graph), control_dependencies(values):
        return no_op(name=name or "group")


@op
def switch(data: Operand, pred: Operand, *, name: str | None = None) -> tuple[Result, Result]:
    """``data`` as (if_false, if_true): the side that the bool scalar ``pred`` does not choose is dead."""
    if pred.dtype != bool or pred.dims not in (None, ()):
        raise SpecError(f"a switch is set by a bool scalar, got {pred}")
    return data.without_value(), data.without_value()


@switch.gradient
def switch_grad(node: Node, if_false: Tensor, if_true: Tensor) -> tuple[Any, ...]:
    return merge([if_false, if_true])[0], None


@op(gradient=lambda node, dy, dindex: tuple(switch(dy, equal(node.outputs[1], i))[1] for i in range(len(node.inputs))))
def merge(inputs: Sequence[Operand], *, name: str | None = None) -> tuple[Result, Result]:
    """The one of ``inputs`` that is not dead, and its position (int64). Dead if all are."""
    if not inputs:
        raise SpecError("merge needs at least one tensor")
    if len({v.dtype for v in inputs}) > 1:
        raise SpecError(f"merge takes tensors of one dtype, got {', '.join(map(str, inputs))}")
    ranks = {None if v.dims is None else v.rank for v in inputs}
    if len(ranks) > 1:
        return Spec(inputs[0].dtype, None), Spec("int64", ())
    return Spec(inputs[0].dtype, _common(inputs)), Spec("int64", ())


def _common(values: Sequence[Spec]) -> Any:
    """The sizes that all of ``values`` share; None where they differ."""
    if values[0].dims is None:
        return None
    columns = zip(*[v.shape for v in values], strict=True)
    return tuple(column[0] if len(set(column)) == 1 else None for column in columns)


def _no_way_back(node: Node, dy: Tensor) -> NoReturn:
    raise GraphError(
        f"{node.op.name} {node.name!r} ({node.site}): no gradient goes through a loop made by hand; build it with "
        "fr.while_loop or fr.scan, which are differentiable"
    )


@op(gradient=_no_way_back)
def enter(
    x: Operand, frame: str, *, is_constant: bool = False, parallel_iterations: int = 10, name: str | None = None
) -> Result:
    """``x`` inside the frame of that name: in its first iteration, or, if ``is_constant``, in all of them."""
    if not frame or parallel_iterations < 1:
        raise SpecError(f"a frame has a name and at least 1 parallel iteration, got {frame!r}, {parallel_iterations}")
    return x.without_value()


@op(gradient=_no_way_back)
def exit(x: Operand, *, name: str | None = None) -> Result:
    """``x`` outside its frame, from the iteration in which it is alive."""
    return x.without_value()


@op(gradient=_no_way_back)
def next_iteration(x: Operand, *, name: str | None = None) -> Result:
    """``x`` in the next iteration of its frame."""
    return x.without_value()


@op(view=Arranged.RESHAPED, gradient=None)
def loop_cond(pred: Operand, *, name: str | None = None) -> Result:
    """The bool scalar ``pred``, which says whether a frame goes on."""
    if pred.dtype != bool or pred.dims not in (None, ()):
        raise SpecError(f"a loop goes on by a bool scalar, got {pred}")
    return pred.without_value()


@op(gradient=None)
def no_rows(*, dtype: DType, shape: Any) -> Result:
    """A stack of rows of that dtype and shape, without any; put in where loops are taken apart."""
    return Spec(dtype, None if shape is None else (None, *shape))


@op(gradient=None)
def append_row(rows: Operand, row: Operand) -> Result:
    """The stack ``rows`` and, after them, ``row``; put in where loops are taken apart."""
    return _any_number(rows)


@op(gradient=None)
def append_rows(rows: Operand, more: Operand, count: Operand) -> Result:
    """The stack ``rows`` and, after them, the first ``count`` rows of ``more``; put in where loops are taken apart."""
    return _any_number(rows)


@op(gradient=None)
def stack_rows(rows: Operand, length: Operand, *, reverse: bool) -> Result:
    """A stack as a tensor of ``length`` rows, zeros behind those there are; from the last to the first in ``reverse``.

    Put in where loops are taken apart.
    """
    return _any_number(rows)


def _any_number(rows: Spec) -> Spec:
    return Spec(rows.dtype, None if rows.dims is None else (None, *rows.dims[1:]))


@op(gradient=None)
def bring(x: Operand) -> Result:
    """``x`` in the memory of the device that this is on; put in where a step is split over devices of one task."""
    return x


@op(effect=True, gradient=None)
def send(x: Operand, *, edge: int, peer: str, lead: int = 0) -> None:
    """Hand ``x`` to whoever receives ``edge`` on ``peer``; put in where a graph is split over devices.

    With a ``lead`` it goes ahead of what else waits for the same; the largest first.
    """


@op(effect=True, gradient=None)
def recv(*, edge: int, peer: str, dtype: DType, shape: Any) -> Result:
    """The tensor that ``peer`` sends on ``edge``; put in where a graph is split over devices."""
    return Spec(dtype, shape)
