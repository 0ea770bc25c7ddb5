"""Which nodes go ahead of others that wait for the same, as other tasks wait for what they make.

Law: pure, a pass on a placed step, which only marks nodes (`StepGraph.lead`): who finds regions cuts them there. What
waits for the same on one device would run as one, and what that sends would leave when all of it is done. Values go
ahead, with all that they need, where it takes longer than another tape costs to compute what would hold them up, and
also to do what waits for them elsewhere, or to send them: the less of the two is what can be gained. The most urgent
goes first, by the longest path from it to the end of the step (Jackson's rule: J. R. Jackson, "Scheduling a Production
Line to Minimize Maximum Tardiness", 1955).

What touches a variable whose value is replaced stays together, as others may write in between: who finds regions sees
to that, and here it is foreseen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flowrt.base.traits import traits_of
from flowrt.passes.estimates import NEAR_BANDWIDTH, Costs, assumed
from flowrt.passes.fuse import BREAKING, markers
from flowrt.passes.step import FED

if TYPE_CHECKING:
    from flowrt.base.device import Device
    from flowrt.passes.estimates import Prediction
    from flowrt.passes.fuse import Fusible
    from flowrt.passes.step import Ref, StepGraph, StepNode

WORTH = 1e-3
"""Seconds that must be gained: another tape costs a fifth of that, for its turn in a lane, and what is predicted is a
guess."""
MOST_PARTS = 16  # of what would be one tape
READ, CONSTANT = "read_variable", "constant"


class EarlyValue(NamedTuple):
    """The last node of a part that is sent, and the predicted seconds of what would hold it up."""

    node: StepNode
    behind: float


class _Sent(NamedTuple):
    """How long a value is ``awaited``, from when it is made to the end of the step; and the seconds of its sending."""

    awaited: float
    sending: float


def send_early(
    step: StepGraph,
    placement: Mapping[int, Device],
    prediction: Prediction,
    fusible: Fusible | None = None,
    *,
    fetched: bool,
) -> tuple[StepGraph, Sequence[EarlyValue]]:
    """``step`` with its nodes' leads, and why; a client waits for what is ``fetched``."""
    answers = [step.spec(ref) for ref in dict.fromkeys(step.fetches)] if fetched else []
    long = sum(assumed(spec).nbytes for spec in answers) >= WORTH * prediction.bandwidth
    if not long and len({device.host for device in placement.values()}) < 2:
        return step, ()
    seconds = _seconds(step, placement, prediction, fusible)
    sent = _sent(step, placement, prediction, seconds, fetched)
    lead: dict[int, int] = {}
    found: list[EarlyValue] = []
    for region in _regions(step, placement) if sent else ():
        if not sent.keys().isdisjoint(region):
            parts = _Parts(step, region, seconds, sent, apart=not placement[region[0]].is_host)
            found += parts.early
            lead |= parts.lead
    return (replace(step, lead=lead), found) if lead else (step, ())


def _seconds(
    step: StepGraph, placement: Mapping[int, Device], prediction: Prediction, fusible: Fusible | None
) -> dict[int, float]:
    """What each node is expected to take where it is: nothing, if it is computed along with others."""
    costs = Costs(prediction, {str(device.kind) for device in placement.values()})
    fusible = lru_cache(None)(fusible) if fusible else None
    found = {}
    for node in step.nodes.values():
        operands, kind = (*[step.spec(ref) for ref in node.inputs], *node.outputs), str(placement[node.id].kind)
        along = fusible is not None and fusible(node.op.name, tuple([spec.dtype for spec in operands]), kind)
        free = along and costs.measured(node.name) is None
        found[node.id] = 0.0 if free else costs.of(node.op.name, node.name, operands, node.attrs)[kind]
    return found


def _sent(
    step: StepGraph,
    placement: Mapping[int, Device],
    prediction: Prediction,
    seconds: Mapping[int, float],
    fetched: bool,
) -> dict[int, _Sent]:
    """The nodes whose values others wait for."""
    left: dict[int, float] = {}  # from what a node has made to the end of the step
    awaited: dict[int, float] = {}
    ways: dict[Any, float] = {}

    def wait(ref: Ref, target: Device | None, behind: float) -> None:
        if ref[0] == FED:
            return
        source, made_by = placement[ref[0]], step.nodes[ref[0]].op.name
        if target is None or source.host != target.host:
            nbytes = assumed(step.spec(ref)).nbytes
            behind += prediction.crossing(source, target, nbytes)
            if made_by != CONSTANT and traits_of(made_by).elsewhere is None:
                awaited[ref[0]] = max(awaited.get(ref[0], 0.0), behind)
                ways[ref, target and target.host] = nbytes / prediction.bandwidth
        left[ref[0]] = max(left.get(ref[0], 0.0), behind)

    for ref in step.fetches if fetched else ():
        wait(ref, None, 0.0)
    for node in reversed(tuple(step.nodes.values())):
        behind = seconds[node.id] + left.get(node.id, 0.0)
        for ref in node.inputs:
            wait(ref, placement[node.id], behind)
    sending = dict.fromkeys(awaited, 0.0)
    for (ref, _), taken in ways.items():
        sending[ref[0]] += taken
    return {i: _Sent(longest, sending[i]) for i, longest in awaited.items()}


def _regions(step: StepGraph, placement: Mapping[int, Device]) -> Iterable[Sequence[int]]:
    """The nodes that would run as one on their device, in order."""
    behind = markers(step, placement)
    groups: dict[Any, list[int]] = {}
    for node in step.nodes.values():
        if not (node.op.effect or node.op.name in BREAKING):
            groups.setdefault((placement[node.id], behind[node.id]), []).append(node.id)
    return groups.values()


class _Parts:
    """A region in parts: by how much each of its nodes leads, and the last that is sent of each part, ``early``."""

    def __init__(
        self,
        step: StepGraph,
        region: Sequence[int],
        seconds: Mapping[int, float],
        sent: Mapping[int, _Sent],
        *,
        apart: bool,
    ) -> None:
        self._step, self._region, self._seconds, self._apart = step, region, seconds, apart
        self._inside = frozenset(region)
        self._together = dict(self._touching())
        self.lead: dict[int, int] = {}
        self.early: list[EarlyValue] = []
        self._cut(self._groups(sent), sent)

    def _groups(self, sent: Mapping[int, _Sent]) -> list[tuple[int, list[int]]]:
        """The nodes that send, the most urgent first, each with all that it needs and those before do not."""
        sending, done = [i for i in self._region if i in sent], set[int]()
        sending.sort(key=lambda i: -math.frexp(sent[i].awaited)[1])  # by powers of two: else as it was, for memory
        return [(i, self._needed(i, done)) for i in sending if i not in done]

    def _needed(self, node: int, done: set[int]) -> list[int]:
        """What must be done for a node, but for what is ``done``, which it becomes."""
        found, look = [], [node]
        while look:
            i = look.pop()
            if i in done or i not in self._inside:
                continue
            done.add(i)
            found.append(i)
            look += self._step.nodes[i].before
            for source in self._step.nodes[i].before:
                look += self._together.get(source, ())
        return found

    def _touching(self) -> Iterator[tuple[int, list[int]]]:
        """The reads of variables whose values are replaced here, and the writes that do that."""
        writes: dict[Any, list[int]] = {}
        for node in map(self._step.nodes.__getitem__, self._region):
            if (update := node.op.traits.update) is not None and update.replaces:
                for name in node.resources:
                    writes.setdefault(name, []).append(node.id)
        for node in self._step.nodes.values() if writes else ():
            if node.op.name == READ and node.resource in writes:
                yield node.id, writes[node.resource]

    def _cut(self, groups: Sequence[tuple[int, Sequence[int]]], sent: Mapping[int, _Sent]) -> None:
        """Say what leads: cut behind a group where enough comes behind it, and is waited for that comes before."""
        whole = sum(self._seconds[i] for i in self._region)
        taken = [sum(self._seconds[i] for i in nodes) for _, nodes in groups]
        least, behind = max(WORTH, whole / MOST_PARTS), whole - sum(taken)
        copied = self._copied([nodes for _, nodes in groups])
        cuts = set[int]()
        for place in reversed(range(len(groups))):
            if behind >= least + copied[place]:
                cuts.add(place)
                behind = 0.0
            behind += taken[place]
        parts: list[list[int]] = [[]]
        longest = sending = 0.0
        for place, (last, nodes) in enumerate(groups):
            parts[-1] += nodes
            whole -= taken[place]
            made = [sent[i] for i in nodes if i in sent]
            longest = max(longest, *[each.awaited for each in made])
            sending += sum(each.sending for each in made)
            if place in cuts and max(longest, sending) >= WORTH + copied[place]:
                self.early.append(EarlyValue(self._step.nodes[last], whole))
                parts.append([])
                longest = sending = 0.0
        for lead, nodes in enumerate(reversed(parts[:-1]), 1):
            self.lead.update(dict.fromkeys(nodes, lead))

    def _copied(self, groups: Sequence[Sequence[int]]) -> list[float]:
        """For each group, the seconds that a cut behind it costs as variables are read on both of its sides.

        Where memory is not the host's, only what is written besides is copied.
        """
        at = {i: place for place, nodes in enumerate(groups) for i in nodes}
        nodes, users = self._step.nodes, dict[int, list[int]]()
        written = {name for i in self._region if nodes[i].op.traits.update for name in nodes[i].resources}
        for i in self._region:
            for source in nodes[i].before:
                if nodes[source].op.name == READ and (not self._apart or nodes[source].resource in written):
                    users.setdefault(source, []).append(at.get(i, len(groups)))
        found = [0.0] * len(groups)
        for read, places in users.items():
            for place in range(min(places), max(places)):
                found[place] += assumed(nodes[read].outputs[0]).nbytes / NEAR_BANDWIDTH
        return found
