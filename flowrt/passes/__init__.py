"""From a graph to plans: the passes, and the pipeline they stand in.

Law: what runs where, what it costs and what a constant evaluates to are parameters; passes never see a kernel or the
scheduler. Each pass is one function that answers a valid step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from flowrt.base.collection import held_back
from flowrt.base.errors import PlacementError
from flowrt.base.valueclass import valueclass
from flowrt.passes.arrange import Arrangement
from flowrt.passes.bag import bag
from flowrt.passes.bodies import rewrite_bodies
from flowrt.passes.bundle import Bundled, bundle
from flowrt.passes.contract import contract, contracted
from flowrt.passes.count_iterations import count_iterations
from flowrt.passes.epilogue import append_epilogues
from flowrt.passes.estimates import Prediction
from flowrt.passes.fold_constants import Evaluate, fold_constants
from flowrt.passes.fuse import Fusible, fuse
from flowrt.passes.gather import move_gathers, put_together
from flowrt.passes.hasten import hasten
from flowrt.passes.line_up import line_up
from flowrt.passes.lower import lower
from flowrt.passes.merge_common import merge_common
from flowrt.passes.order_state import order_state
from flowrt.passes.paddings import join_paddings
from flowrt.passes.partition import Client, Partitioned, Transfer, partition
from flowrt.passes.parts import take_together
from flowrt.passes.place import Home, Supports, arranged, place, with_halves
from flowrt.passes.prune import prune, without_meetings
from flowrt.passes.send_early import send_early
from flowrt.passes.settle import settle
from flowrt.passes.simplify import simplify
from flowrt.passes.stand_in import StandIn, StandIns, stand_in
from flowrt.passes.step import FED
from flowrt.passes.stored import multiply_stored
from flowrt.passes.trim import trim
from flowrt.passes.widen import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flowrt.base.device import Device
    from flowrt.base.plan import Plan
    from flowrt.graph import Graph, Node, Tensor
    from flowrt.passes.step import StepGraph

__all__ = [
    "Arrangement",
    "Client",
    "Compiled",
    "Ends",
    "Evaluate",
    "Fusible",
    "Home",
    "PassReport",
    "Prediction",
    "StandIn",
    "StandIns",
    "StepTerms",
    "Supports",
    "Transfer",
    "arranged",
    "compile_step",
]

Report: TypeAlias = "Callable[..., None]"


class Ends(Enum):
    """Where a step that has no client is fed and fetched from."""

    DEFAULT = "default"  # the task of what nothing ties down
    FETCHED = "fetched"  # the task that makes what is fetched first
    USED = "used"  # every task is fed what it uses, and nothing is fetched


@valueclass
class PassReport:
    """What one pass did, in numbers."""

    name: str
    counts: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{what} {count}" for what, count in self.counts.items())


@valueclass
class Compiled:
    """A step ready to run: a plan per task, the client's part (None for a step of one task), and how it came about.

    Without a client the feeds of the plan of ``home`` are the fed tensors in order, and its fetches the fetches in
    order. ``placement`` names the device of every node, by the node's name; ``moved`` says what was asked to be on
    another device, and why it is not.
    """

    plans: Mapping[str, Plan]
    client: Client | None = None
    report: tuple[PassReport, ...] = ()
    placement: Mapping[str, str] = field(default_factory=dict)
    home: str = ""
    moved: tuple[str, ...] = ()


@valueclass
class StepTerms:
    """What steps are compiled for, and how.

    ``devices`` are those that exist, ``default`` the one for what nothing ties down. ``supports(op, dtypes, kind)``
    says whether an op on these dtypes (inputs, then outputs) runs on a kind of device; effects are never asked about,
    they run on CPUs. ``fusible``, asked the same way, says what may become part of one fused kernel; without it nothing
    does. ``regions`` says whether the nodes of a region run as one. ``evaluate`` computes an op on arrays, to fold
    constants. ``client`` is the task that feeds and fetches, where that is none of the devices'; without one, ``ends``
    says where that is done. ``rules`` map patterns of names to devices, and ``wishes`` are those of `arranged`. What is
    placed on a task of ``stand_ins`` is done where these are. With ``soft_placement``, kinds of devices that are asked
    for are wishes. By a ``prediction``, what other tasks wait for is made ahead of the rest, where that pays.
    """

    devices: Sequence[Device]
    default: Device
    supports: Supports
    fusible: Fusible | None = None
    regions: bool = True
    evaluate: Evaluate | None = None
    optimize: bool = True
    client: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    wishes: Mapping[Home, Device] | None = None
    ends: Ends = Ends.DEFAULT
    stand_ins: StandIns = field(default_factory=dict)
    soft_placement: bool = False
    prediction: Prediction | None = None


@held_back()
def compile_step(
    graph: Graph, fetches: Sequence[Tensor], targets: Sequence[Node], feeds: Sequence[Tensor], terms: StepTerms
) -> Compiled:
    """Turn what a step asks for into one plan per task.

    Raises `FeedError` for a missing feed, `PlacementError`, and `GraphError` (foreign tensors, unordered writes).
    """
    reports: list[PassReport] = []

    def report(name: str, **counts: int) -> None:
        reports.append(PassReport(name, counts))

    step = trim(prune(graph, fetches, targets, feeds))
    report("prune", kept=len(step.nodes), dropped=len(graph.nodes) - len(step.nodes))
    if whole := put_together(step):
        report("put_together", **{f"bytes of {name}": nbytes for name, nbytes in whole.items()})
    if terms.optimize:
        step = _reduce(step, terms.evaluate, report)
    step = order_state(step)
    report("order_state", edges=sum(len(n.control) + len(n.after) for n in step.nodes.values()))
    away: list[str] | None = [] if terms.soft_placement else None
    home, placement, names = _place(step, terms, away, report)
    before, (step, placement) = step, widen(step, placement, terms.supports)
    if step is not before:
        report("widen", casts=len(step.nodes) - len(before.nodes))
    if terms.optimize:
        step = count_iterations(rewrite_bodies(step, placement, lambda body, _: count_iterations(body, inside=True)))
        step, placement = _join(without_meetings(step), placement, terms, report)
    parts = _divide(step, placement, home, terms, report)
    return Compiled(_lower_all(parts.plans, report), parts.client, tuple(reports), names, home.host, tuple(away or ()))


def _reduce(step: StepGraph, evaluate: Evaluate | None, report: Report) -> StepGraph:
    """What is computed twice once, and constants not at all."""
    before, step = step, merge_common(step)
    report("merge_common", merged=len(before.nodes) - len(step.nodes))
    before, step = step, fold_constants(step, evaluate)
    folded = sum(node.op is not before.nodes[node.id].op for node in step.nodes.values())
    report("fold_constants", folded=folded, dropped=len(before.nodes) - len(step.nodes))
    return step


def _place(
    step: StepGraph, terms: StepTerms, away: list[str] | None, report: Report
) -> tuple[Device, Mapping[int, Device], dict[str, str]]:
    """Where the step is fed if it has no client, where its nodes are, and the same by names; see `place` for ``away``.

    Where it is fed at what is fetched first, all is there that can be.
    """
    devices, default = terms.devices, terms.default
    asked = place(
        step,
        devices=devices,
        default=default,
        supports=terms.supports,
        rules=terms.rules,
        moved=away,
        wishes=terms.wishes,
    )
    placed = stand_in(step, asked, devices, terms.stand_ins)
    able = with_halves(terms.supports)
    placement: Mapping[int, Device] = move_gathers(step, placed, able) if terms.optimize else placed
    moved = 0 if placement is placed else sum(placement[i] is not device for i, device in placed.items())
    if terms.ends is Ends.FETCHED:
        first = next((placement[source] for source, _ in step.fetches if source != FED), default)
        home = _home(devices, first)
        placement = settle(step, placement, [d for d in devices if d.host == home.host], able)
    else:
        home = _home(devices, default)
    texts = {key: str(device) for key, device in {id(device): device for device in placement.values()}.items()}
    names = {node.name: texts[id(placement[node.id])] for node in step.nodes.values()}  # few devices, many nodes
    report("place", **Counter(names.values()))
    if moved:
        report("move_gathers", moved=moved)
    return home, placement, names


def _home(devices: Sequence[Device], default: Device) -> Device:
    """The device where a step is fed that has no client: the first CPU of a task."""
    for device in devices:
        if device.kind == "cpu" and device.host == default.host:
            return device
    if not devices:
        raise PlacementError("there is no device to run on")
    return default


def _join(
    step: StepGraph, placement: Mapping[int, Device], terms: StepTerms, report: Report
) -> tuple[StepGraph, Mapping[int, Device]]:
    """One node of what is best computed together, and variables updated as soon as may be; with the new placement."""
    supports, fusible = terms.supports, terms.fusible

    def rewrite(body: StepGraph, where: Mapping[int, Device]) -> StepGraph:
        body, where = simplify(body, where)
        contracted = contract(multiply_stored(body, where, supports), where, supports)
        if fusible is None:
            return contracted
        fused, homes = fuse(contracted, where, fusible, regions=False)
        return join_paddings(append_epilogues(fused, homes, fusible), homes, fusible)

    step, placement = simplify(*take_together(step, placement, supports))
    before, step = step, bag(step, placement, supports)
    if len(step.nodes) < len(before.nodes):
        report("bag", bags=len(before.nodes) - len(step.nodes))
    before, step = step, multiply_stored(step, placement, supports)
    if step is not before:
        report("multiply_stored", dropped=len(before.nodes) - len(step.nodes))
    step = contract(rewrite_bodies(step, placement, rewrite), placement, supports)
    if products := contracted(step):
        report("contract", products=products)
    if terms.regions and terms.prediction is not None:
        fetched = terms.client is not None
        step, found = send_early(step, placement, terms.prediction, fusible, fetched=fetched)
        if found:
            report("send_early", **{f"µs behind {each.node.name}": round(1e6 * each.behind) for each in found})
    if fusible is not None:
        step, placement = _fuse(step, placement, fusible, terms.regions, report)
    return line_up(hasten(step), placement)


def _fuse(
    step: StepGraph, placement: Mapping[int, Device], fusible: Fusible, regions: bool, report: Report
) -> tuple[StepGraph, Mapping[int, Device]]:
    """One kernel of what is best computed by one."""
    members = len(step.nodes)
    step, placement = fuse(step, placement, fusible, regions=regions)
    made = _count(step, "fused")
    report("fuse", groups=made, members=members - len(step.nodes) + made)
    step = append_epilogues(step, placement, fusible)
    if joined := _count(step, "with_epilogue"):
        report("append_epilogues", products=joined)
    before, step = step, join_paddings(step, placement, fusible)
    if step is not before:
        report("join_paddings", nodes=len(before.nodes) - len(step.nodes))
    return step, placement


def _count(step: StepGraph, op: str) -> int:
    return sum(node.op.name == op for node in step.nodes.values())


def _divide(
    step: StepGraph, placement: Mapping[int, Device], home: Device, terms: StepTerms, report: Report
) -> Partitioned:
    """Each task's part of the step."""
    client, bundled = terms.client, Bundled(step, placement)
    if terms.optimize:
        bundled = bundle(step, placement, terms.supports, fetched=client is not None)
    if bundled.values:
        report("bundle", values=bundled.values)
    fed_at = None if terms.ends is Ends.USED else home
    parts = partition(bundled.step, bundled.placement, home=fed_at, client=client, parts=bundled.parts)
    report("partition", tasks=len(parts.plans), transfers=parts.transfers)
    return parts


def _lower_all(plans: Mapping[str, Plan], report: Report) -> dict[str, Plan]:
    """Each task's plan, as it is best run."""
    lowered = {task: lower(plan) for task, plan in plans.items()}
    changed = [task for task, plan in lowered.items() if plan is not plans[task]]
    if changed:
        report("lower", **{task: len(lowered[task].nodes) - len(plans[task].nodes) for task in changed})
    return lowered
