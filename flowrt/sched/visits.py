"""Runs plans that are one region of another device's (`alone`): in one visit of its lane.

The step machine would come by once for the region and once for each result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowrt.kernels.launch import STEP
from flowrt.sched.host.tracer import now
from flowrt.sched.run_trace import note_step
from flowrt.sched.running import own, run_words
from flowrt.sched.tape.interrupts import Noted, Unbroken
from flowrt.sched.tape.tape import cancel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from flowrt.base.plan import Plan
    from flowrt.sched.alone import Visit
    from flowrt.sched.devices.device import ApartDevice, Issuing
    from flowrt.sched.host.host import Host, RunContext

    Array = np.ndarray[Any, Any]


class VisitRunner:
    """Runs such a plan on a host, whose ``device`` has the region."""

    def __init__(self, plan: Plan, visit: Visit, host: Host, device: ApartDevice, issuer: Issuing) -> None:
        self._plan, self._visit, self._host, self._device, self._issuer = plan, visit, host, device, issuer
        at = {value: place for place, value in enumerate(visit.unit.outputs)}
        self._wanted = [(value, at.get(value)) for value in visit.wanted]  # each a feed, or among the region's outputs

    async def run(self, feeds: Sequence[Array], context: RunContext) -> list[Array] | None:
        """The fetches; None where its variables are not free, and nothing was done."""
        unit, variables, words = self._visit.unit, self._host.variables, run_words(context.number, context.seed)
        if not variables.try_hold(unit.reads, unit.writes):
            return None
        try:
            return await self._device.run(self._carry_out, feeds, words, stop=partial(cancel, words))
        finally:
            variables.release(unit.reads, unit.writes)

    def run_now(self, feeds: Sequence[Array], number: int, seed: int) -> list[Array] | None:
        """The same in a thread that may wait."""
        unit, variables, words = self._visit.unit, self._host.variables, run_words(number, seed)
        with Unbroken():
            if not variables.try_hold(unit.reads, unit.writes):
                return None
            try:
                with Noted(words):
                    return self._device.call(self._carry_out, feeds, words, stop=partial(cancel, words))
            finally:
                variables.release(unit.reads, unit.writes)

    def _carry_out(self, feeds: Sequence[Array], words: Array) -> list[Array]:
        """Issue the region and read its results, in the device's lane."""
        tracer, began = self._host.tracer, now()
        inputs = [feeds[value] for value in self._visit.unit.inputs]
        outputs = self._issuer.carry_out(self._visit.unit, inputs, words)
        found = [feeds[value] if place is None else outputs[place] for value, place in self._wanted]
        read = [value if isinstance(value, np.ndarray) else self._device.read(value) for value in found]
        if tracer is not None:
            note_step(tracer, self._plan, began, int(words[STEP]))
        return own(read, feeds, self._host.memory.copy)
