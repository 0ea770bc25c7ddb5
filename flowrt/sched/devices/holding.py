"""The variables of a device, as those see them who are issued there and hold them.

Law: a variable is read by referring to what it holds; who writes it has it hold something new, or writes where nobody
else looks. One that began in the host's memory moves to the device when it is first needed there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowrt.base.traits import writes
from flowrt.sched.devices.memory import DeviceArray
from flowrt.sched.regions.regions import READ, resources_of

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.base.spec import Spec
    from flowrt.sched.devices.memory import Arena
    from flowrt.sched.host.variables import Name, Variables


class Holding:
    """The variables of a task that lie on one device, for a ``plan``. All is called in its lane."""

    def __init__(self, plan: Plan, arena: Arena, variables: Variables) -> None:
        self._plan, self._arena, self._variables = plan, arena, variables
        self._begun: dict[Name, DeviceArray] = {}

    @property
    def changes(self) -> int:
        """How often so far any variable of the task came to lie elsewhere."""
        return self._variables.changes

    def where(self, name: Name) -> str:
        """How errors name a variable: with the first line of the plan's that works on it."""
        return f"variable {name[1]!r} ({self._sites[name]})"

    @cached_property
    def _sites(self) -> dict[Name, str]:
        nodes = [node for node in reversed(self._plan.nodes) if node.op == READ or writes(node.op)]
        return {name: node.site for node in nodes for name in resources_of(node)}

    def held(self, name: Name, spec: Spec) -> DeviceArray:
        """What a variable holds, moved here if it is elsewhere."""
        value: Any = self._variables.value(name, spec)
        if not isinstance(value, DeviceArray):
            value = self._arena.hold(value, self.where(name))
            self._variables.begin(name, value)
        held: DeviceArray = value
        return held

    def is_here(self, name: Name, spec: Spec) -> bool:
        """Whether a variable lies on the device already."""
        return isinstance(self._variables.find(name, spec), DeviceArray)

    def own(self, name: Name, spec: Spec) -> DeviceArray:
        """What a variable holds, where nobody else looks."""
        held = self.held(name, spec)
        if held.is_alone:
            return held
        copied = self._arena.empty(spec, self.where(name))
        with self._arena.naming(copied, "copied on"):
            self._arena.driver.copy(held.storage.memory, copied.storage.memory, held.nbytes)
        self._variables.begin(name, copied)
        return copied

    def beginning(self, name: Name, spec: Spec) -> DeviceArray:
        """Memory of a variable that is given a value before it is read: its own, or what it has once that is done."""
        value: Any = self._variables.find(name, spec)
        if value is not None:
            return self.own(name, spec)
        made = self._begun[name] = self._arena.empty(spec, self.where(name))
        return made

    def begin_all(self, names: Iterable[Name]) -> None:
        """Those of some variables that were to get their first value have it."""
        for name in names if self._begun else ():
            if name in self._begun:
                self._variables.begin(name, self._begun[name])

    def begin_none(self) -> None:
        """Those that were to get their first value, and have not, get none."""
        self._begun.clear()
