"""Take the rows of a variable where the fewest bytes travel: where the variable lies, or where the rows are wanted.

Law: pure, a pass on a placed step that answers another placement. Only `take` along a variable's first axis moves, and
the sum or mean of each bag of rows with it. Where another task reads the whole variable anyway, its rows are taken
there. So they are where the variable is small or the rows are known to be no fewer bytes; sizes that only a step knows
may be few. What a program asked for as to devices is not looked at: the result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrt.passes.bag import bag_axes
from flowrt.passes.joining import readers_of
from flowrt.passes.step import FED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowrt.base.device import Device
    from flowrt.passes.place import Supports
    from flowrt.passes.step import StepGraph, StepNode

READ, TAKE = "read_variable", "take"
SMALL = 1 << 12
"""A variable of at most so many bytes travels whole: the message that asks for its rows costs more."""


@dataclass(slots=True)
class _Use:
    """What one other task wants of a variable: rows, by takes; ``whole`` where anything else reads it there."""

    takes: list[StepNode] = field(default_factory=list)
    whole: bool = False


def move_gathers(step: StepGraph, placement: Mapping[int, Device], supports: Supports) -> Mapping[int, Device]:
    """``placement`` with every gather of a variable's rows where the fewest bytes travel."""
    if len({device.host for device in placement.values()}) < 2 or not _any_take(step):
        return placement
    consumers = readers_of(step)
    moved = dict(placement)
    for read in [node for node in step.nodes.values() if node.op.name == READ]:
        home = placement[read.id]
        for task, use in _uses(step, read, placement, consumers).items():
            near = use.whole or not fewer_than_all(step, read, use.takes)
            for take in use.takes:
                where = _wanted_at(take, task, moved, consumers) if near else home
                if runs_on(step, take, where, supports):
                    moved[take.id] = where
                    if not near:
                        _move_sum(step, take, consumers[take.id], moved, supports)
    return moved


def put_together(step: StepGraph) -> dict[str, int]:
    """The bytes of each variable that is split by rows and that the step reads whole, so that all its parts travel."""
    found: dict[str, int] = {}
    names = {partition.shards: partition.name for partition in step.graph.partitions.values() if partition.rows}
    for node in step.nodes.values() if names else ():
        if node.op.name == "concat":
            read = tuple(_read_name(step, source) for source, _ in node.inputs)
            if read in names:
                found[names[read]] = node.outputs[0].nbytes
    return found


def _read_name(step: StepGraph, source: int) -> str:
    node = step.nodes.get(source)
    return node.resource[1] if node is not None and node.op.name == READ and node.resource is not None else ""


def _any_take(step: StepGraph) -> bool:
    return any(node.op.name == TAKE for node in step.nodes.values())


def _uses(
    step: StepGraph, read: StepNode, placement: Mapping[int, Device], consumers: Mapping[int, Sequence[StepNode]]
) -> dict[str, _Use]:
    """By task, other than the variable's own: what it wants of the variable."""
    home, found = placement[read.id].host, dict[str, _Use]()
    for node in consumers[read.id]:
        task = placement[node.id].host
        if not takes_rows(step, node, read):
            found.setdefault(task, _Use()).whole = True
            continue
        if task == home:
            task = _only([placement[user.id].host for user in consumers[node.id]]) or home
        found.setdefault(task, _Use()).takes.append(node)
    found.pop(home, None)
    return found


def _only(tasks: Sequence[str]) -> str:
    return tasks[0] if len(set(tasks)) == 1 else ""


def takes_rows(step: StepGraph, node: StepNode, read: StepNode) -> bool:
    """Whether ``node`` takes rows of the variable that ``read`` reads, and has no other use of it."""
    table = (read.id, 0)
    rank = len(step.spec(table).dims or ())
    return node.op.name == TAKE and node.inputs[0] == table != node.inputs[1] and node.attrs["axis"] in (0, -rank)


def fewer_than_all(step: StepGraph, read: StepNode, takes: Sequence[StepNode]) -> bool:
    """Whether what ``takes`` take of a variable, or may, is worth asking for, rather than all of it."""
    nbytes = read.outputs[0].nbytes
    return nbytes > SMALL and sum(_travelling(step, take) for take in takes) < nbytes


def _travelling(step: StepGraph, take: StepNode) -> int:
    """The bytes of a gather's indices and rows as far as they are known."""
    specs = take.outputs[0], step.spec(take.inputs[1])
    return sum(spec.nbytes for spec in specs if spec.known)


def _wanted_at(
    take: StepNode, task: str, placement: Mapping[int, Device], consumers: Mapping[int, Sequence[StepNode]]
) -> Device:
    """The device of ``task`` that uses the rows."""
    if placement[take.id].host == task:
        return placement[take.id]
    return placement[consumers[take.id][0].id]


def runs_on(step: StepGraph, node: StepNode, where: Device, supports: Supports) -> bool:
    """Whether there is a kernel for ``node``, as its inputs are, on that device."""
    return supports(node.op.name, step.dtypes(node), where.kind or "")


def _move_sum(
    step: StepGraph, take: StepNode, users: Sequence[StepNode], moved: dict[int, Device], supports: Supports
) -> None:
    """Have the sum or mean of each bag of rows, where nobody else reads these, be computed where they are taken."""
    where = moved[take.id]
    fetched = any(source == take.id for source, _ in step.fetches if source != FED)
    if len(users) == 1 and not fetched and bag_axes(step, take, users[0]) and runs_on(step, users[0], where, supports):
        moved[users[0].id] = where
