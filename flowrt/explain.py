"""What became of a step, as text: its passes, where its nodes went, what runs as tapes and what broke them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrt.sched.executor import breaks_tape
from flowrt.sched.regions import find_regions

if TYPE_CHECKING:
    from flowrt.passes import Compiled
    from flowrt.plan import Plan

MAX_ROWS = 20


def explain_step(compiled: Compiled) -> str:
    """The report on one compiled step."""
    lines = ["passes"]
    lines += [f"  {report}" for report in compiled.report]
    lines += ["placement", *_placement(compiled)]
    for task in sorted(compiled.plans):
        lines += [f"task {task}", *_plan(compiled.plans[task])]
    return "\n".join(lines)


def _placement(compiled: Compiled) -> Iterator[str]:
    by_device: dict[str, list[str]] = {}
    for name, device in compiled.placement.items():
        by_device.setdefault(device, []).append(name)
    for device, names in sorted(by_device.items()):
        more = f", and {len(names) - MAX_ROWS} more" if len(names) > MAX_ROWS else ""
        yield f"  {device}: {len(names)} nodes: {', '.join(names[:MAX_ROWS])}{more}"


def _plan(plan: Plan) -> Iterator[str]:
    broken = Counter(node.op for node in plan.nodes if breaks_tape(node))
    regions = find_regions(plan, breaks_tape)
    yield f"  {len(plan.nodes)} nodes, {len(plan.feeds)} feeds, {len(plan.fetches)} fetches"
    for region in regions[:MAX_ROWS]:
        ops = Counter(plan.nodes[n].op for n in region.nodes).most_common(5)
        kinds = ", ".join(f"{op} x{count}" for op, count in ops)
        yield f"  tape of {len(region.nodes)} nodes on {region.device} ({kinds}), {len(region.inputs)} inputs"
    if len(regions) > MAX_ROWS:
        yield f"  and {len(regions) - MAX_ROWS} more tapes"
    if broken:
        yield "  run by the machine, between tapes: " + ", ".join(f"{op} x{n}" for op, n in broken.items())
