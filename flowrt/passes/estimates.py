"""What ops are expected to take, by what they compute and move, or as measured; and what crosses between devices.

Law: pure. Sizes that only a step knows count as `ASSUMED`, loops of an open length as `ITERATIONS`. Tasks are taken to
be machines of their own, all alike.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.plan import Plan
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.base.device import Device

ASSUMED = 32
ITERATIONS = 10
FREE = frozenset({"placeholder", "constant", "read_variable", "no_op"})  # what computes nothing
NEAR_BANDWIDTH, NEAR_LATENCY = 8e9, 2e-5  # between devices of one task

Cost: TypeAlias = Callable[[str, Sequence[Spec], str], float]
"""(op, concrete specs of inputs then outputs, kind of device) → seconds."""


@valueclass
class Prediction:
    """What is predicted by: the ``cost`` of ops, or the seconds ``measured`` of nodes, by patterns of their names; and
    of what crosses between tasks bytes a second, and seconds of latency."""

    cost: Cost
    measured: Mapping[str, float]
    bandwidth: float
    latency: float

    def crossing(self, source: Device, target: Device | None, nbytes: float) -> float:
        """The seconds that bytes take from one device to another, or to the client."""
        if target is not None and source.host == target.host:
            return NEAR_LATENCY + nbytes / NEAR_BANDWIDTH
        return self.latency + nbytes / self.bandwidth


class Costs:
    """What nodes take on each of the ``kinds`` of devices; what is alike is asked once."""

    def __init__(self, prediction: Prediction, kinds: set[str]) -> None:
        self._cost, self._kinds = prediction.cost, kinds
        self._measured = [(re.compile(fnmatch.translate(glob)), taken) for glob, taken in prediction.measured.items()]
        self._known: dict[Any, Mapping[str, float]] = {}

    def measured(self, name: str) -> float | None:
        """The seconds that were measured of the node of that name."""
        return next((taken for pattern, taken in self._measured if pattern.match(name)), None)

    def of(self, op: str, name: str, operands: Sequence[Spec], attrs: Mapping[str, Any]) -> Mapping[str, float]:
        """The seconds, by kind of device, of the node of that name, whose inputs and then outputs are ``operands``."""
        taken = self.measured(name)
        if taken is not None:
            return dict.fromkeys(self._kinds, taken)
        specs = [assumed(spec) for spec in operands]
        if any(isinstance(value, Plan) for value in attrs.values()):
            return {kind: self._bodies(attrs, specs, kind) for kind in self._kinds}
        return self._alike(op, specs)

    def _alike(self, op: str, specs: Sequence[Spec]) -> Mapping[str, float]:
        key = op, *[(spec.dtype, spec.dims) for spec in specs]
        if key not in self._known:
            free = not specs or op in FREE
            self._known[key] = {kind: 0.0 if free else self._cost(op, specs, kind) for kind in self._kinds}
        return self._known[key]

    def _bodies(self, attrs: Mapping[str, Any], specs: Sequence[Spec], kind: str) -> float:
        """What a loop or branch takes: its bodies' nodes, as often as they come; of two branches both."""
        bodies = [value for value in attrs.values() if isinstance(value, Plan)]
        return _iterations(attrs, specs) * sum(self._body(body, kind) for body in bodies)

    def _body(self, body: Plan, kind: str) -> float:
        values = body.value_specs()
        total, value = 0.0, len(body.feeds)
        for node in body.nodes:
            specs = [assumed(values[v]) for v in (*node.inputs, *range(value, value + len(node.outputs)))]
            inside = any(isinstance(each, Plan) for each in node.attrs.values())
            total += self._bodies(node.attrs, specs, kind) if inside else self._alike(node.op, specs)[kind]
            value += len(node.outputs)
        return total


def _iterations(attrs: Mapping[str, Any], specs: Sequence[Spec]) -> int:
    """How often a loop has an iteration; a branch comes once."""
    if "carried" not in attrs:
        return 1
    if attrs["scanned"]:
        rows = specs[int(attrs["counted"]) + attrs["carried"]].dims
        return rows[0] or 0 if rows else ITERATIONS
    limit: int | None = attrs["limit"]
    if attrs["cond"] is None and limit is not None:
        return limit
    return ITERATIONS if limit is None else min(limit, ITERATIONS)


def assumed(spec: Spec) -> Spec:
    """A concrete spec in its place."""
    return Spec(spec.dtype, tuple(ASSUMED if n is None else n for n in spec.dims or ()))
