"""What became of a step, as text: its passes, where its nodes went, what runs as tapes and what broke them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrt.errors import GraphError
from flowrt.sched.recording import record
from flowrt.sched.regions import Region, find_regions
from flowrt.sched.units import breaks_tape

if TYPE_CHECKING:
    from flowrt.passes import Compiled
    from flowrt.plan import Plan

MAX_ROWS = 20


def explain_step(compiled: Compiled, *, tapes: bool = True) -> str:
    """The report on one compiled step; ``tapes`` says whether regions run as tapes at all."""
    lines = ["passes"]
    lines += [f"  {report}" for report in compiled.report]
    lines += ["placement", *_placement(compiled)]
    for task in sorted(compiled.plans):
        lines += [f"task {task}", *_plan(compiled.plans[task], tapes)]
    return "\n".join(lines)


def _placement(compiled: Compiled) -> Iterator[str]:
    by_device: dict[str, list[str]] = {}
    for name, device in compiled.placement.items():
        by_device.setdefault(device, []).append(name)
    for device, names in sorted(by_device.items()):
        more = f", and {len(names) - MAX_ROWS} more" if len(names) > MAX_ROWS else ""
        yield f"  {device}: {len(names)} nodes: {', '.join(names[:MAX_ROWS])}{more}"


def _plan(plan: Plan, tapes: bool) -> Iterator[str]:
    yield f"  {len(plan.nodes)} nodes, {len(plan.feeds)} feeds, {len(plan.fetches)} fetches"
    if not tapes:
        yield "  no tapes, by this session's options: the machine runs every node"
        return
    regions = find_regions(plan, breaks_tape)
    for region in regions[:MAX_ROWS]:
        ops = Counter(plan.nodes[n].op for n in region.nodes).most_common(5)
        kinds = ", ".join(f"{op} x{count}" for op, count in ops)
        inputs = f"{len(region.inputs)} inputs"
        yield f"  tape of {len(region.nodes)} nodes on {region.device} ({kinds}), {inputs}; {_memory(plan, region)}"
    if len(regions) > MAX_ROWS:
        yield f"  and {len(regions) - MAX_ROWS} more tapes"
    broken = [node for node in plan.nodes if breaks_tape(node)]
    for node in broken[:MAX_ROWS]:
        yield f"  broken by {node.where()}, which the machine runs"
    if len(broken) > MAX_ROWS:
        yield f"  and by {len(broken) - MAX_ROWS} more"


def _memory(plan: Plan, region: Region) -> str:
    """What a run of the region allocates, where its shapes are known before the step."""
    specs = plan.value_specs()
    inputs = [specs[value] for value in region.inputs]
    if not all(spec.known for spec in inputs):
        return "its memory depends on the shapes fed"
    try:
        made = record(plan, region, inputs)
    except GraphError:
        return "its memory depends on values"
    return f"{made.arena_bytes} bytes of arena, {made.output_bytes} of outputs, {1e6 * made.predicted_seconds:.1f} µs"
