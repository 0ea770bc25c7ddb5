"""Move what is placed on a task to the one that stands in for it, because the task has not what it is to work on.

Law: pure. A stand-in holds some variables of the task, and no more: what works on others stays where it is, and where
that task is lost, nothing can be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.errors import PlacementError
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.passes.step import StepGraph, StepNode


@valueclass
class StandIn:
    """Who has the variables ``names``, by (container, name), in place of another task; that one may be ``lost``."""

    task: str
    names: frozenset[tuple[str, str]]
    lost: bool = True


StandIns: TypeAlias = Mapping[str, tuple[StandIn, ...]]
"""By task, who stands in for it: each for other variables."""


def stand_in(
    step: StepGraph, placement: Mapping[int, Device], devices: Sequence[Device], stand_ins: StandIns
) -> Mapping[int, Device]:
    """``placement`` with what stand-ins have moved to them; the answer is that very one where this is nothing.

    Raises `PlacementError` for what works on a variable that a lost task had alone.
    """
    if not stand_ins:
        return placement
    found: dict[int, Device] = {}
    for i, device in placement.items():
        others = stand_ins.get(device.host)
        found[i] = device if others is None else _moved(step.nodes[i], device, others, devices)
    return found if found != placement else placement


def _moved(node: StepNode, device: Device, others: Sequence[StandIn], devices: Sequence[Device]) -> Device:
    wanted, lost = frozenset(node.resources), any(other.lost for other in others)
    has_all = [other for other in others if wanted <= other.names]
    if has_all and (wanted or lost):
        return _like(device, has_all[0].task, devices)
    if not lost:
        return device
    alone = wanted.difference(*(other.names for other in others)) or wanted
    error = PlacementError(f"{node.where()}: {device.host} alone had {min(alone)[1]!r}, which it works on")
    error.missing = device
    raise error


def _like(device: Device, task: str, devices: Sequence[Device]) -> Device:
    """The device of ``task`` that is called as ``device`` on its own, or its first CPU."""
    there = [each for each in devices if each.host == task]
    same = [each for each in there if each.local == device.local]
    return (same or [each for each in there if each.kind == "cpu"])[0]
