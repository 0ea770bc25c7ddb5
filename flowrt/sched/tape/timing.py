"""When each launch of one run of a tape ran, and on which thread, as compiled code has written it down.

A tape that runs alone says how long each launch took: they follow one another, and what is left of the run's time is
spread evenly between them. One that several threads share says of each chunk who ran it and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.run import board as at
from flowrt.sched.host.tracer import now
from flowrt.sched.regions.lives import find_lives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowrt.base.plan import Plan, PlanNode
    from flowrt.sched.host.tracer import Tracer
    from flowrt.sched.regions.recorded import Launch
    from flowrt.sched.regions.regions import Region
    from flowrt.sched.tape.pace import Share

Array = np.ndarray[Any, Any]

MOST_LAUNCHES = 1 << 16  # of a tape longer than that only the run as a whole is noted


class LaunchTimes:
    """Of one run of ``launches``: words that compiled code writes, at `address`, and what they come to."""

    def __init__(self, launches: int) -> None:
        self.nanoseconds = np.zeros(max(launches, 1), np.int64)
        self.address = int(self.nanoseconds.ctypes.data)
        self._stamps: Array | None = None
        self._share: Share | None = None
        self._began, self._ended = now(), 0

    def begin(self) -> None:
        """The run begins only now."""
        self._began = now()

    def end(self) -> None:
        """The run has ended, though it is told later."""
        self._ended = now()

    def share(self, share: Share) -> None:
        """Have what the threads that share the run do be stamped."""
        schedule = share.division.schedule
        most = schedule.chunks + sum(task.stop - task.first for task in schedule.tasks)
        self._stamps = np.zeros(at.FIRST_STAMP + at.STAMP_FIELDS * most, np.int64)
        self._stamps[at.MOST_STAMPS] = most
        self._share = share
        share.time(self.address)
        share.stamp(int(self._stamps.ctypes.data))

    def tell(self, tracer: Tracer, description: int, number: int) -> None:
        """Note the run, which has just ended if nothing else was said, and its launches."""
        ended, launches, times = self._ended or now(), len(self.nanoseconds), self.nanoseconds.tobytes()
        stamped = self._stamped()
        if stamped is None:
            about: dict[str, Any] = {"times": times}
        else:
            launches, about = len(stamped), {"stamps": stamped.tobytes()}
        if launches > MOST_LAUNCHES:
            tracer.drop(launches)
            launches, about = 0, {}
        tracer.note("tape", description, self._began, ended, number, about, slices=1 + launches)

    def _stamped(self) -> Array | None:
        """Rows of (launch, lane, began, ended), where the caller is lane 0; None where nobody shared the run."""
        if self._stamps is None or self._share is None:
            return None
        self._share.stamp(0)
        if not self._stamps[at.STAMPED]:
            return None
        count = min(int(self._stamps[at.STAMPED]), int(self._stamps[at.MOST_STAMPS]))
        rows = self._stamps[at.FIRST_STAMP :].reshape(-1, at.STAMP_FIELDS)[:count].copy()
        rows[:, at.STAMP_WORDS] = self._share.lanes(rows[:, at.STAMP_WORDS])
        return rows


def describe_tape(plan: Plan, region: Region, inputs: Sequence[Spec], launches: Sequence[Launch]) -> dict[str, Any]:
    """What a tape is, as plain data: its launches, each with the nodes that it is part of."""
    lives, starts = find_lives(plan, region, inputs), plan.value_starts()

    def told(position: int) -> tuple[str, str, str, str]:
        node = plan.nodes[position]
        made = range(starts[position], starts[position + 1])
        shapes = [[lives.specs.get(value) for value in values] for values in (node.inputs, made)]
        return describe_node(node, *shapes)

    where = plan.nodes[region.nodes[0]]
    return {
        "name": f"tape of {len(region.nodes)} nodes from {where.name}",
        "line": where.site,
        "launches": [tuple(told(node) for node in (launch.node, *launch.also)) for launch in launches],
    }


def describe_node(
    node: PlanNode, inputs: Sequence[Spec | None] = (), outputs: Sequence[Spec | None] = ()
) -> tuple[str, str, str, str]:
    """A node's name, op, shapes and line."""
    return node.name, _ops(node.op, node.attrs), shapes_of(inputs, outputs), node.site


def _ops(op: str, attrs: Mapping[str, Any]) -> str:
    """The op, and those that it is made of."""
    if op == "with_epilogue":
        (product, *_), (epilogue, pairs) = attrs["product"], attrs["epilogue"]
        return f"{product}, {_ops(epilogue, dict(pairs))}"
    return f"fused: {', '.join(member[0] for member in attrs['members'])}" if op == "fused" else op


def note_node(
    tracer: Tracer, node: PlanNode, inputs: Sequence[Any], outputs: Sequence[Any], began: int, number: int
) -> None:
    """Note a node that has just been computed by itself, on this thread."""
    description = tracer.describe(node, lambda: describe_node(node))
    tracer.note("node", description, began, now(), number, {"shapes": shapes_of(inputs, outputs)})


def shapes_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    """What goes in and what comes out, for people: ``float32[8,16], float32[16,4] → float32[8,4]``."""
    return f"{_told(inputs)} → {_told(outputs)}"


def _told(values: Sequence[Any]) -> str:
    specs = [Spec(v.dtype, v.shape) if isinstance(v, np.ndarray) else v for v in values]
    return ", ".join(str(spec) for spec in specs if isinstance(spec, Spec))
