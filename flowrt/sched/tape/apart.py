"""A tape whose variables' new values are to lie elsewhere than the old ones, as somebody still looks at those.

Law: pure. All of such a variable is written by one node, and no other writes any of it before. What comes before that,
and that node itself, read the old value; everything after, the new one. So nothing is copied: what a step writes costs
the same, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from flowrt.kernels.launch import Operand

if TYPE_CHECKING:
    from flowrt.sched.regions.recorded import Launch, Recording

WholeWrites: TypeAlias = "Mapping[int, int]"  # variables, as the recording numbers them → the launches that write them


def find_whole_writes(recording: Recording, first: int) -> WholeWrites:
    """The launch that begins to write each variable which may lie apart; the variables' slots begin with ``first``."""
    specs, rows = recording.variable_specs, {name for write in recording.row_writes for name in write.names}
    found: dict[int, int] = {}
    excluded = {number for number, name in enumerate(recording.variables) if name in rows}
    for number, launch in enumerate(recording.launches):
        for position, operand in enumerate(launch.step.operands):
            variable = launch.places[operand].slot - first
            if not 0 <= variable < len(specs):
                continue
            if position < launch.step.reads:
                begun = found.get(variable, number)
                if begun != number and _is_part_of(launch, recording.launches[begun]):
                    excluded.add(variable)  # it may want the old value, where others want the new one
            elif (launch.places[operand].offset, launch.sizes[operand]) != (0, specs[variable].nbytes):
                excluded.add(variable)
            else:
                found.setdefault(variable, number)
    return {variable: launch for variable, launch in found.items() if variable not in excluded}


def _is_part_of(launch: Launch, other: Launch) -> bool:
    """Whether they compute the same node, or some that are the same."""
    return not {launch.node, *launch.also}.isdisjoint((other.node, *other.also))


def places_apart(
    number: int, launch: Launch, first: int, writes: WholeWrites, old: Mapping[int, int]
) -> Sequence[Operand]:
    """Where the operands of a launch lie, of the variables that it reads before they are written: in slots ``old``."""
    places = list(launch.places)
    for operand in launch.step.operands[: launch.step.reads]:
        place = places[operand]
        variable = place.slot - first
        if number <= writes.get(variable, -1):
            places[operand] = Operand(old[variable], place.offset)
    return places
