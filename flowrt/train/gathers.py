"""The rows that a tower takes of servers' tables, told apart from the tower, so that a table need not come to it.

Law: a decision on a graph; nothing is built or run. What is taken must follow from the batch alone, as it is asked for
before the replica has the version whose rows it will be. A table that the tower reads otherwise, too, comes whole, and
so does one that is fewer bytes than its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.base.plan import resources_in
from flowrt.base.valueclass import valueclass
from flowrt.passes.bag import bag_axes
from flowrt.passes.fold_constants import fold_constants
from flowrt.passes.gather import READ, fewer_than_all, takes_rows
from flowrt.passes.joining import readers_of
from flowrt.passes.prune import prune
from flowrt.passes.step import FED
from flowrt.session.eager import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowrt.graph import Tensor
    from flowrt.ops.state import Variable
    from flowrt.passes.step import Ref, StepGraph, StepNode


@valueclass
class Gather:
    """Rows of ``table``: ``asked`` says which, ``rows`` is what a tower makes of the table itself: they, or their bags'
    sums or means."""

    table: Variable
    asked: Tensor
    rows: Tensor


@valueclass
class Asked:
    """How the rows of ``gathers`` are asked for: by values of a batch, which are ``inputs``, then ``computed`` ones."""

    inputs: tuple[Tensor, ...]
    computed: tuple[Tensor, ...]
    gathers: tuple[Gather, ...]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], gathers: Sequence[Gather]) -> Asked:
        """What has to be computed for these gathers is each ``asked`` that is no input, once."""
        computed = dict.fromkeys(gather.asked for gather in gathers if gather.asked not in set(inputs))
        return cls(tuple(inputs), tuple(computed), tuple(gathers))

    @property
    def values(self) -> tuple[Tensor, ...]:
        """All values of a batch."""
        return (*self.inputs, *self.computed)

    @property
    def feeds(self) -> tuple[Tensor, ...]:
        """All that a tower is fed but variables: the values of a batch, and the rows."""
        return (*self.values, *(gather.rows for gather in self.gathers))

    def wants(self, among: Sequence[Gather]) -> tuple[int, ...]:
        """Which values of a batch tell the rows of some of the gathers: once each, in the order of first use."""
        place = {value: i for i, value in enumerate(self.values)}
        return tuple(dict.fromkeys(place[gather.asked] for gather in among))


def find_gathers(outputs: Sequence[Tensor], inputs: Sequence[Tensor], tables: Sequence[Variable]) -> list[Gather]:
    """What a tower that computes ``outputs`` from a batch, its ``inputs``, gathers from each of ``tables``, in order.

    Where every ``asked`` and ``rows`` is fed, the tower reads none of the tables of these gathers.
    """
    step = fold_constants(prune(outputs[0].graph, outputs, (), inputs), evaluate)  # sizes are no use of a table
    users, given, workers = readers_of(step), _given(step), _workers(step)
    found: list[Gather] = []
    for table in tables:
        takes = _takes(step, workers.get((table.resource.container, table.resource.name), ()), users)
        if all(_is_given(take.inputs[1], given) for take in takes):
            found += [Gather(table, *_ends(step, take, users[take.id])) for take in takes]
    return found


def _given(step: StepGraph) -> set[int]:
    """The nodes that compute with what the batch and constants give, and nothing else."""
    given: set[int] = set()
    for node in step.nodes.values():
        if not (node.op.stateful or node.op.effect) and given.issuperset(node.before):
            given.add(node.id)
    return given


def _is_given(ref: Ref, given: set[int]) -> bool:
    return ref[0] == FED or ref[0] in given


def _workers(step: StepGraph) -> dict[tuple[str, str], list[StepNode]]:
    """The nodes that work on each variable."""
    found: dict[tuple[str, str], list[StepNode]] = {}
    for node in step.nodes.values():
        for name in resources_in(node.attrs):
            found.setdefault(name, []).append(node)
    return found


def _takes(step: StepGraph, reads: Sequence[StepNode], users: Mapping[int, Sequence[StepNode]]) -> list[StepNode]:
    """The takes of rows that are all that is done with a table, by ``reads`` alone, and are worth asking for; else
    none."""
    if len(reads) != 1 or reads[0].op.name != READ or reads[0].attrs["fresh"]:
        return []
    read, takes = reads[0], users[reads[0].id]
    if (read.id, 0) in step.fetches or not all(takes_rows(step, take, read) for take in takes):
        return []
    return list(takes) if fewer_than_all(step, read, takes) else []


def _ends(step: StepGraph, take: StepNode, users: Sequence[StepNode]) -> tuple[Tensor, Tensor]:
    """What asks for rows, and what the tower begins with: these, or the sum or mean of each bag if it needs no more."""
    alone = len(users) == 1 and (take.id, 0) not in step.fetches and bag_axes(step, take, users[0])
    rows = users[0].id if alone else take.id
    source, output = take.inputs[1]
    asked = step.feeds[output] if source == FED else step.graph.nodes[source].outputs[output]
    return asked, step.graph.nodes[rows].outputs[0]
