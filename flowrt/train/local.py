"""What a replica of `LocalSteps` is made of: copies of the shared variables, steps on these, and what they come to.

Law: tensors and variables alone; the driver says when what is run. A model's function is given the replica's copies for
its variables, so that whatever it reads, differentiates or writes is the replica's own. A copy starts from the shared
variable: giving it its first value is what loads it, and that is done again for each version. The slots that the inner
optimiser keeps beside the copies are the replica's, too. No session initialises or saves any of them.

The update is, for each variable that local steps move, what it was loaded with minus what it has become: a *gradient*
for the outer optimiser, as large as the variable, also where the steps moved only rows of it. Batch statistics that the
model writes by itself are moved, too; the servers take the mean of them as it is.

Where steps are taken while updates and versions travel, what the copies were at the end of a round is *marked*: a
version is then *merged* with what the steps since have made of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowrt.base.errors import GraphError, user_site
from flowrt.base.spec import is_float
from flowrt.base.valueclass import valueclass
from flowrt.graph import current_graph, current_scope, scoped
from flowrt.op import as_value
from flowrt.ops.elementwise import subtract
from flowrt.ops.state import Variable, variables_from
from flowrt.optim import SGD, Momentum, Optimizer
from flowrt.optim.optimizer import by_parts
from flowrt.train.updates import all_finite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from flowrt.graph import Graph, Node, Tensor
    from flowrt.ops.state import VariableSource
    from flowrt.sched.policies import LocalSteps

LOCAL = "local variable"


@valueclass
class LocalTower:
    """What a replica runs between two versions.

    Args:
        start: What gives the inner optimiser's slots their first values.
        load: What makes the copies what the shared variables are.
        mark: What keeps what the copies are; nothing where no steps are taken while versions travel.
        merge: What makes the copies what the shared variables are, and by as much more as they moved since the mark.
        step: What moves the copies by the gradients of one batch.
        finite: Whether all numbers of the slots are finite (a bool scalar).
    """

    start: tuple[Node, ...]
    load: tuple[Node, ...]
    mark: tuple[Node, ...]
    merge: tuple[Node, ...]
    step: Node
    finite: Tensor


class LocalCopies:
    """Hands a model a copy of each variable that ``shared`` hands out; to be asked for like that one."""

    def __init__(self, shared: VariableSource) -> None:
        self.of: dict[Variable, Variable] = {}  # by the shared one
        self._shared = shared
        self._scope = replace(current_scope(), control=())
        self._graph = current_graph("a copy of a model")
        self._first = len(self._graph.nodes)

    def variable(self, initial: Any, dtype: Any, name: str | None, trainable: bool, *partition: Any) -> Variable:
        """A copy of the variable that ``shared`` hands out: whole, however that is split."""
        held = self._shared.variable(initial, dtype, name, trainable, *partition)
        assert held is not None
        with variables_from(None), scoped(self._scope):
            made = self.of[held] = Variable(held, name=held.name, trainable=trainable)
        return made

    def written(self) -> list[tuple[Variable, Variable]]:
        """The (shared variable, copy) of those that the model writes by itself."""
        loads = {copy.initializer for copy in self.of.values()}
        writes = [n for n in self._graph.nodes[self._first :] if n.op.name != "read_variable" and n not in loads]
        names = {name for node in writes for name in node.resources}
        return [(shared, copy) for shared, copy in self.of.items() if _key(copy) in names]


def build_local(
    optimizer: Optimizer, loss: Tensor, trainable: Sequence[Variable], copies: LocalCopies, who: str, overlaps: bool
) -> tuple[LocalTower, list[tuple[Tensor, Variable]]]:
    """What a replica runs, and the (difference, shared variable) pairs that are its update.

    If it ``overlaps``, it takes steps while updates and versions travel.

    Raises `GraphError` for a model that writes what has no mean.
    """
    graph, written = loss.graph, copies.written()
    for shared, _ in written:
        if not is_float(shared.dtype):
            raise GraphError(
                f"{shared.resource.site}: the model of {who} writes {shared!r}; what replicas have made of it in local "
                "steps is averaged, and only floats are: make it a float, or count outside of loss_fn"
            )
    before = set(graph.resources)
    pairs = optimizer.compute_gradients(loss, [copies.of[shared] for shared in trainable])
    given = [(gradient, copy) for gradient, copy in pairs if gradient is not None]
    step = optimizer.apply_gradients(given)
    slots = [variable for variable in graph.variables if _key(variable) not in before]
    followed = {copy for _, copy in given} | {copy for _, copy in written}
    moved = [(shared, copy) for shared, copy in copies.of.items() if copy in followed]
    differences = [(_difference(shared, copy), shared) for shared, copy in moved]
    finite = all_finite([(as_value(slot), slot) for slot in slots if is_float(slot.dtype)])
    load = tuple([copy.initializer for copy in copies.of.values()])
    start = tuple([slot.initializer for slot in slots])
    marks = {copy: Variable(copy, name=f"{copy.name}/mark", trainable=False) for _, copy in moved if overlaps}
    mark = tuple([kept.initializer for kept in marks.values()])
    merge = tuple([_merged(shared, copy, marks.get(copy)) for shared, copy in copies.of.items() if overlaps])
    _make_local(graph, [*copies.of.values(), *slots, *marks.values()])
    return LocalTower(start, load, mark, merge, step, finite), by_parts(differences)


def apply_differences(outer: Optimizer, pairs: Sequence[tuple[Any, Variable]]) -> list[Node]:
    """What moves shared variables by the means of differences: ``outer``, but of batch statistics each is the mean.

    What ``outer`` keeps is named for it, lest a checkpoint take the momentum of gradients for one of differences.
    """
    trained = [(mean, variable) for mean, variable in pairs if variable.trainable]
    others = [(mean, variable) for mean, variable in pairs if not variable.trainable]
    by = ((outer, trained), (SGD(1.0), others))
    return [optimizer.apply_gradients(moves, name="outer") for optimizer, moves in by if moves]


def outer_of(policy: LocalSteps) -> Optimizer:
    """The optimiser that moves the shared variables; raises `GraphError` for what is none."""
    outer = Momentum(0.7, 0.9, nesterov=True) if policy.outer is None else policy.outer
    if not isinstance(outer, Optimizer):
        raise GraphError(f"{user_site()}: outer is an optimiser, such as fr.optim.SGD(1.0), not {outer!r}")
    return outer


def _difference(shared: Variable, copy: Variable) -> Tensor:
    made: Tensor = subtract(as_value(shared), as_value(copy), name=f"difference/{shared.name}")
    return made


def _merged(shared: Variable, copy: Variable, mark: Variable | None) -> Node:
    """What makes ``copy`` what is shared, and by as much more as it moved since the ``mark``; of others, no more."""
    if mark is None:
        return copy.initializer
    return copy.assign_add(subtract(as_value(shared), as_value(mark)), name=f"merge/{shared.name}")


def _make_local(graph: Graph, variables: Sequence[Variable]) -> None:
    """Have no session initialise or save these: who runs what uses them does all that."""
    local = set(variables)
    for key in map(_key, variables):
        graph.resources[key] = replace(graph.resources[key], kind=LOCAL)
    graph.variables[:] = [variable for variable in graph.variables if variable not in local]
    kept = {variable.name for variable in graph.variables}
    for name in [p.name for p in graph.partitions.values() if not kept.issuperset(p.shards)]:
        del graph.partitions[name]


def _key(variable: Variable) -> tuple[str, str]:
    return variable.resource.container, variable.resource.name
