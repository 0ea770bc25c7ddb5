"""Which of a region's values lie in one another's memory, and which are computed straight into a variable's.

Law: pure; it knows lives and the operands of launches, and no offsets. A launch may write over an input only where that
input dies at its node and each element it writes depends on that element of the input alone (an elementwise launch over
equal views), or where all that read the input have run before it. Inputs of the region, constants, variables and what
leaves the region are never written over.

A value assigned to a variable is computed in the variable's memory where all of this holds, so that nobody can tell:
one launch writes it and cannot fail; nothing uses the variable between that launch and the assignment; whatever the
assignment waits for comes before that launch; and who reads what the memory held before has read it by then, or reads
it in that very launch, element by element. A step that fails or is stopped thus leaves a variable whole: as it was, or
as it was to become.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flowrt.base.traits import writes
from flowrt.sched.regions.regions import READ, Name

if TYPE_CHECKING:
    from flowrt.sched.regions.lives import Life, Lives

ASSIGN = "assign"


class LaunchedStep(Protocol):
    """One launch: the first ``reads`` of its ``operands`` are only read, the others written."""

    @property
    def operands(self) -> Sequence[int]: ...

    @property
    def reads(self) -> int: ...

    @property
    def may_fail(self) -> bool: ...

    def may_overwrite(self, output: int, operand: int) -> bool:
        """Whether each element of ``output`` is written after ``operand`` was last read there, and nowhere else."""


class Computation(Protocol):
    """What computes a node: its launches, one after another."""

    @property
    def steps(self) -> Sequence[LaunchedStep]: ...


@dataclass(slots=True, eq=False)
class Sharing:
    """``homed``: root → the variable in whose memory it is computed. ``carried``: place of an assignment that this
    makes needless → place of the node that computes the value. ``heirs``: root → the root that is written over it.
    ``written``: the places where each variable is written, in order.
    """

    homed: dict[int, Name] = field(default_factory=dict)
    carried: dict[int, int] = field(default_factory=dict)
    heirs: dict[int, int] = field(default_factory=dict)
    written: dict[Name, list[int]] = field(default_factory=dict)

    def in_place(self, root: int) -> list[int]:
        """A value, and those that are written over it, one after another."""
        found = [root]
        while found[-1] in self.heirs:
            found.append(self.heirs[found[-1]])
        return found

    def is_overtaken(self, name: Name, read: int, life: Life) -> bool:
        """Whether a variable is written again in the ``life`` of what the node at ``read`` reads of it."""
        places = self.written[name]
        after = bisect_right(places, read)
        return after < len(places) and places[after] < life.last


def share(lives: Lives, applications: Mapping[int, Computation]) -> Sharing:
    """Decide for the nodes that compute something, by place."""
    sharing = Sharing()
    leaving = {lives.roots[value] for value in lives.region.outputs}
    for name in lives.touches:
        _home(lives, applications, sharing, name, leaving)
    taken = set(leaving)
    for index, application in applications.items():
        for number, value in enumerate(lives.outputs(index)):
            if value in sharing.homed:
                continue
            found = _dying(lives, application, index, number, taken, sharing)
            if found is not None:
                sharing.heirs[found] = value
                taken.add(found)
    for name, touches in lives.touches.items():
        sharing.written[name] = [sharing.carried.get(i, i) for i in touches if writes(lives.node(i).op)]
    return sharing


# Variables


def _home(
    lives: Lives, applications: Mapping[int, Computation], sharing: Sharing, name: Name, leaving: set[int]
) -> None:
    """Decide for the assignments of one variable, in order."""
    tenants: list[int] = []  # what was read from the variable's memory, or computed in it
    touches = lives.touches[name]
    for number, index in enumerate(touches):
        node = lives.node(index)
        if node.op == READ and lives.outputs(index)[0] not in leaving:  # what leaves is copied when it is read
            tenants.append(lives.outputs(index)[0])
        if node.op != ASSIGN:
            continue
        root = lives.roots[node.inputs[0]]
        made = lives.of[root].first
        if made not in applications or root in leaving or root in sharing.homed:
            continue
        tenants = [tenant for tenant in tenants if lives.of[tenant].last >= made]  # the others are gone for good
        if _untouched(lives, touches, number, root) and _may_live_there(lives, applications, index, root, tenants):
            sharing.homed[root], sharing.carried[index] = name, made
            tenants.append(root)


def _untouched(lives: Lives, touches: Sequence[int], number: int, root: int) -> bool:
    """Whether nothing uses a variable between the making of ``root`` and its assignment, which is the ``number``-th
    use, and nothing writes it again while ``root`` is needed."""
    life = lives.of[root]
    again = next((i for i in touches[number + 1 :] if writes(lives.node(i).op)), None)
    before = touches[number - 1] if number else -1
    return before < life.first and (again is None or again > life.last)


def _may_live_there(
    lives: Lives, applications: Mapping[int, Computation], assignment: int, root: int, tenants: Sequence[int]
) -> bool:
    made = lives.of[root].first
    output = root - lives.outputs(made)[0]
    if _waits_until(lives, assignment) > made or not writes_once(applications[made], _operand(lives, made, output)):
        return False
    return all(_gone(lives, applications[made], made, output, tenant) for tenant in tenants)


def _waits_until(lives: Lives, index: int) -> int:
    """The place of the last node of the region that a node waits for by a control edge; -1 for none."""
    nodes, last = lives.region.nodes, -1
    for before in lives.node(index).control:
        place = bisect_right(nodes, before) - 1
        if place >= 0 and nodes[place] == before:
            last = max(last, place)
    return last


def _gone(lives: Lives, application: Computation, made: int, output: int, tenant: int) -> bool:
    """Whether nobody needs ``tenant`` any more once the node at ``made`` writes its output over it."""
    last = lives.of[tenant].last
    return last < made or (last == made and _takes_over(lives, application, made, output, tenant))


# Over inputs that die


def _dying(
    lives: Lives, application: Computation, index: int, number: int, taken: set[int], sharing: Sharing
) -> int | None:
    """The input of a node over which its output may be written, if there is one."""
    size = lives.specs[lives.outputs(index)[number]].nbytes
    for root in dict.fromkeys(lives.roots[value] for value in lives.node(index).inputs):
        life = lives.of[root]
        free = life.last == index and root not in taken and root not in sharing.homed
        computed = life.first >= 0 and lives.computes(life.first) and lives.specs[root].nbytes == size
        if free and computed and _takes_over(lives, application, index, number, root):
            return root
    return None


def _takes_over(lives: Lives, application: Computation, index: int, number: int, root: int) -> bool:
    inputs = [i for i, value in enumerate(lives.node(index).inputs) if lives.roots[value] == root]
    return may_overwrite(application, _operand(lives, index, number), inputs)


def _operand(lives: Lives, index: int, number: int) -> int:
    return len(lives.node(index).inputs) + number


# Launches


def may_overwrite(application: Computation, output: int, inputs: Sequence[int]) -> bool:
    """Whether the operand ``output`` may lie where the operands ``inputs`` do, which are one memory."""
    written = next((i for i, step in enumerate(application.steps) if output in step.operands), None)
    if written is None:
        return False
    if any(operand in step.operands for step in application.steps[written + 1 :] for operand in inputs):
        return False
    return all(application.steps[written].may_overwrite(output, operand) for operand in inputs)


def writes_once(application: Computation, output: int) -> bool:
    """Whether one launch that cannot fail writes all of an operand."""
    writers = [step for step in application.steps if output in step.operands[step.reads :]]
    return len(writers) == 1 and not any(step.may_fail for step in application.steps)
