"""What became of a step: its passes, where its nodes went, what runs as tapes and what broke them, and what it takes.

Law: first plain data, by asking the same functions that will run the step; then text and HTML, which decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.device import is_apart
from flowrt.base.errors import GraphError
from flowrt.base.plan import Plan, PlanFeed
from flowrt.base.valueclass import valueclass
from flowrt.kernels.composite.many import ManyStep
from flowrt.op import PROGRAMS
from flowrt.ops.fused import parts_of
from flowrt.sched.footprint import Footprint, HeldTensor, predict_peak, survey
from flowrt.sched.host.memory import amount
from flowrt.sched.host.segments import LARGE
from flowrt.sched.loops.nesting import whole
from flowrt.sched.loops.pieces import fed_to, find_pieces, outputs_of
from flowrt.sched.loops.scalar_loops import in_one_kernel
from flowrt.sched.loops.structured import LOOP, STRUCTURED
from flowrt.sched.regions.lives import DataDependent, infer
from flowrt.sched.regions.regions import CONSTANT
from flowrt.sched.tape.recording import record
from flowrt.sched.units import BRING, Action, action_of, breaks_tape, connect, find_units
from flowrt.session.feeds import copied_bytes, fed_spec

if TYPE_CHECKING:
    from flowrt.base.plan import PlanNode
    from flowrt.base.spec import Spec
    from flowrt.passes import Compiled
    from flowrt.sched.regions.recorded import Recording
    from flowrt.sched.regions.regions import Name, Region
    from flowrt.sched.units import Unit
    from flowrt.session.runners import Runner
    from flowrt.session.step import Step

MAX_ROWS = 20
FEW = 4  # nodes that are named in one row
FREQUENT = 5  # ops that are counted in one row

Way: TypeAlias = "Callable[[str, str], str]"


@valueclass
class TapeReport:
    """One region that runs as a tape; ``memory`` says what a run of it allocates, where that is known."""

    nodes: int
    device: str
    ops: str
    inputs: int
    memory: str
    seconds: float | None

    def __str__(self) -> str:
        return f"tape of {self.nodes} nodes on {self.device} ({self.ops}), {self.inputs} inputs; {self.memory}"


@valueclass
class TaskReport:
    """One task's part. ``peak_bytes`` is None where it cannot be told, for what ``left_out`` says."""

    task: str
    size: str
    tapes: tuple[TapeReport, ...]
    broken: tuple[str, ...]
    fused: tuple[str, ...]
    loops: tuple[str, ...]
    peak_bytes: int | None
    held_bytes: int
    left_out: tuple[str, ...]
    tensors: tuple[HeldTensor, ...]
    places: int  # of nodes in the largest region
    issued: tuple[str, ...] = ()  # what devices other than the host are told, and what crosses to and from them


@valueclass
class Explanation:
    """The report on one compiled step: as text (`str`), as HTML (`html`, shown by notebooks), and as data."""

    passes: tuple[str, ...]
    placement: tuple[str, ...]
    tasks: tuple[TaskReport, ...]
    transfers: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The most that the tasks will hold at one moment, variables and all; None where that cannot be told."""
        peaks = [task.peak_bytes for task in self.tasks if task.peak_bytes is not None]
        return sum(peaks) if len(peaks) == len(self.tasks) else None

    @property
    def seconds(self) -> float | None:
        """A rough guess of what the tapes take; None where their shapes are not known."""
        times = [tape.seconds for task in self.tasks for tape in task.tapes]
        return None if None in times else sum(t for t in times if t is not None)

    def __str__(self) -> str:
        lines = ["passes", *(f"  {each}" for each in self.passes)]
        lines += ["placement", *(f"  {each}" for each in self.placement)]
        if self.transfers:
            lines += ["transfers", *(f"  {each}" for each in self.transfers)]
        for task in self.tasks:
            lines += [f"task {task.task}", *(f"  {line}" for line in _lines(task))]
        return "\n".join(lines)

    @property
    def html(self) -> str:
        """The report as a fragment of HTML that needs nothing else."""
        parts = [_STYLE, "<div class='flowrt-step'>", _list("Passes", self.passes), _list("Placement", self.placement)]
        if self.transfers:
            parts.append(_list("Transfers", self.transfers))
        for task in self.tasks:
            plain = [line for line in _lines(task) if not line.startswith("  ")]
            parts += [_list(f"Task {task.task}", plain), _liveness(task)]
        return "".join([*parts, "</div>"])

    def _repr_html_(self) -> str:
        return self.html


async def explain_for(step: Step, runner: Runner, feeds: Mapping[Any, Any] | Sequence[Any]) -> Explanation:
    """The report on a session's ``step``, with the shapes that ``feeds`` maps its tensors to, if it does."""
    if step.compiled.client is not None:
        return explain_step(step.compiled, tapes=runner.tapes, way=runner.way)
    given = list(feeds.values()) if isinstance(feeds, Mapping) else [None] * len(step.feeds)
    specs = [fed_spec(tensor, value) for tensor, value in zip(step.feeds, given, strict=True)]
    return explain_step(
        step.compiled,
        specs,
        tapes=runner.tapes,
        held=runner.held_beside(step.registered),
        begun=frozenset(await runner.inventory()),
        helpers=runner.helpers,
        copied=copied_bytes(given),
    )


def explain_step(
    compiled: Compiled,
    feeds: Sequence[Spec] | None = None,
    *,
    tapes: bool = True,
    held: int = 0,
    begun: Collection[Name] = frozenset(),
    helpers: tuple[int, int] = (0, 0),
    copied: Sequence[int] = (),
    way: Way | None = None,
) -> Explanation:
    """The report on one compiled step whose one plan is fed ``feeds``, by default what the plans say they are fed.

    ``tapes`` says whether regions run as tapes at all; ``held`` are bytes held already, by the variables ``begun``
    and others. What ``helpers`` and ``copied`` are, `predict_peak` says; ``way``, how bytes travel between two tasks.
    """
    predict = partial(predict_peak, begun=begun, helpers=helpers, copied=copied)
    reports = []
    for name in sorted(compiled.plans):
        plan = compiled.plans[name]
        specs = [feed.spec for feed in plan.feeds] if feeds is None else feeds
        reports.append(_report(plan, specs, tapes, held, predict))
    transfers = () if way is None else tuple(_transfers(compiled.plans, way))
    return Explanation(tuple(map(str, compiled.report)), _placement(compiled), tuple(reports), transfers)


def _placement(compiled: Compiled) -> tuple[str, ...]:
    by_device: dict[str, list[str]] = {}
    for name, device in compiled.placement.items():
        by_device.setdefault(device, []).append(name)
    return tuple(
        f"{device}: {len(names)} nodes: {', '.join(names[:MAX_ROWS])}{_more(len(names), 'more')}"
        for device, names in sorted(by_device.items())
    )


def _transfers(plans: Mapping[str, Plan], way: Way) -> Iterator[str]:
    """What each value that crosses between tasks takes, as they receive it; last what comes to who receives nothing."""
    for task in sorted(plans):
        specs = plans[task].value_specs()
        for node in plans[task].nodes:
            if node.op == "recv":
                yield _transfer(node, node.attrs["peer"], task, node.outputs[0], way)
            elif node.op == "send" and node.attrs["peer"] not in plans:
                yield _transfer(node, task, node.attrs["peer"], specs[node.inputs[0]], way)


def _transfer(node: PlanNode, source: str, target: str, spec: Spec, way: Way) -> str:
    size = amount(spec.nbytes) if spec.known else "of a size known when it runs"
    return f"{node.name}: {spec}, {size}, {source} to {target}: {_how(way(source, target), spec)}"


def _how(way: str, spec: Spec) -> str:
    match way:
        case "shared" if not spec.known:
            return f"shared memory from {amount(LARGE)}, else Unix socket"
        case "shared" if spec.nbytes >= LARGE:
            return "shared memory"
        case "tcp":
            return "TCP"
        case _:
            return "Unix socket"


def _more(count: int, what: str) -> str:
    return f", and {count - MAX_ROWS} {what}" if count > MAX_ROWS else ""


def _report(plan: Plan, feeds: Sequence[Spec], tapes: bool, held: int, predict: Callable[..., Footprint]) -> TaskReport:
    units = find_units(plan, tapes=tapes)
    recording = partial(record, plan)
    found = _footprint(plan, units, feeds, predict)
    regions = [unit.region for unit in units if unit.region is not None]
    broken = [node for node in plan.nodes if breaks_tape(node) and node.op != BRING and not is_apart(node.device)]
    missing = [] if tapes else ["no tapes, by this session's options: the machine runs every node"]
    return TaskReport(
        plan.task,
        f"{len(plan.nodes)} nodes, {len(plan.feeds)} feeds, {len(plan.fetches)} fetches",
        tuple(_tape(plan, region, feeds) for region in regions),
        (*missing, *(f"broken by {node.where()}, which the machine runs: {_why(node)}" for node in broken)),
        tuple(_fusion(node) for node in plan.nodes if node.op in PROGRAMS),
        tuple(_loops(plan, units, feeds)),
        None if found.left_out else held + found.peak,
        held,
        found.left_out,
        tuple(survey(plan, units, feeds, record=recording)[:MAX_ROWS]),
        max((len(region.nodes) for region in regions), default=0),
        tuple(_issued(plan, units)),
    )


def _issued(plan: Plan, units: Sequence[Unit]) -> Iterator[str]:
    """What is done on devices whose memory is not the host's, and what crosses to and from them."""
    for unit in units:
        nodes = [plan.nodes[n] for n in unit.nodes]
        if unit.action is Action.ISSUE:
            ops = _counted((node.op for node in nodes), FREQUENT)
            yield f"{len(nodes)} nodes issued on {nodes[0].device} ({ops}), {len(unit.inputs)} inputs"
    for node in plan.nodes:
        if node.op == BRING:
            yield f"{node.name}: {node.outputs[0]}, brought to {node.device}"


def _footprint(
    plan: Plan, units: Sequence[Unit], feeds: Sequence[Spec], predict: Callable[..., Footprint]
) -> Footprint:
    unknown = [feed.name for feed, spec in zip(plan.feeds, feeds, strict=True) if not spec.known]
    if unknown:
        names = ", ".join(map(repr, unknown))
        return Footprint(left_out=(f"it depends on the shapes fed: explain with feeds={{{names}: shape}}",))
    return predict(plan, units, feeds, record=partial(record, plan))


def _why(node: PlanNode) -> str:
    """Why a node is in no tape."""
    if node.op in STRUCTURED:
        return "how often it iterates, or what it changes, is known only when it runs"
    if node.op in ("switch", "merge", "enter", "exit", "next_iteration", "loop_cond"):
        return "what runs after it depends on a value"
    if node.attrs.get("lead"):
        return f"{node.attrs['peer']} waits for it, so the tape ends with what it needs, and the rest is another"
    return "it may wait for something outside the step"


def _fusion(node: PlanNode) -> str:
    return f"{node.where()}: {_counted(parts_of(node.op, node.attrs))}"


def _counted(ops: Iterable[str], most: int | None = None) -> str:
    """How often each op is among ``ops``: of the ``most`` frequent, if not of all in their order."""
    count = Counter(ops)
    return ", ".join(f"{op} x{times}" for op, times in (count.items() if most is None else count.most_common(most)))


def _loops(plan: Plan, units: Sequence[Unit], feeds: Sequence[Spec]) -> Iterator[str]:
    """What an iteration of each loop comes to, as far as shapes tell."""
    known = [*feeds, *plan.value_specs()[len(feeds) :]]
    for node in plan.nodes:
        if node.op != LOOP or breaks_tape(node):
            continue
        inputs = [known[value] for value in node.inputs]
        if not all(spec.known for spec in inputs):
            yield f"{node.where()}: it depends on the shapes fed"
            continue
        yield f"{node.where()}: {_pace(node, inputs)}"
    framed = any(node.op == "enter" for node in plan.nodes)
    for frame in connect(plan, units).topology.frames[1:] if framed else ():
        yield f"loop {frame.name!r}: {_framed(plan, [units[n] for n in frame.nodes], feeds)}"


def _framed(plan: Plan, units: Sequence[Unit], feeds: Sequence[Spec]) -> str:
    """What an iteration that the machine goes through comes to."""
    tapes = [_tape(plan, unit.region, feeds) for unit in units if unit.region is not None]
    alone = [plan.nodes[unit.nodes[0]] for unit in units if unit.region is None]
    ops = _counted(node.op for node in alone)
    waiting = [node for node in alone if action_of(node) is Action.EFFECT]
    effects = f", among them {_named(waiting)}" if waiting else ""
    broken = f"broken by {len(alone)} nodes that the machine runs ({ops}){effects}"
    return f"{len(tapes)} tapes an iteration, {_cost(tapes)}, {broken}"


def _cost(tapes: Sequence[TapeReport]) -> str:
    """What tapes take, as far as their shapes are known."""
    known = [tape.seconds for tape in tapes if tape.seconds is not None]
    left = len(tapes) - len(known)
    return _seconds(sum(known)) + f" and what {left} of unknown sizes take" * bool(left)


def _named(nodes: Sequence[PlanNode]) -> str:
    """The first of some nodes, and how many more there are."""
    more = [f"{len(nodes) - FEW} more"] if len(nodes) > FEW else []
    return ", ".join([*[node.where() for node in nodes[:FEW]], *more])


def _pace(node: PlanNode, inputs: Sequence[Spec]) -> str:
    """What computes an iteration of a loop on such inputs."""
    feeds = tuple([PlanFeed(f"input {place}", spec) for place, spec in enumerate(inputs)])
    alone = Plan("", (replace(node, inputs=tuple(range(len(inputs))), control=()),), feeds)
    try:
        try:
            record(alone, whole(alone, node.device), inputs)
        except DataDependent as error:
            return f"{_pieces(node, inputs)}, as it is not one tape: {error}"
    except GraphError as error:
        return f"one operation after another: {error}"
    reason = in_one_kernel(inputs, node.attrs)
    if isinstance(reason, float):
        return f"one kernel, {_seconds(reason)} an iteration"
    body, fed = next(fed_to(node, inputs, infer(node, inputs)))
    made = record(body, whole(body, node.device), fed)
    taken = _seconds(made.predicted_seconds)
    return f"several launches an iteration: {len(made.launches)}, {taken}, as it has {reason}"


def _pieces(node: PlanNode, inputs: Sequence[Spec]) -> str:
    """What an iteration of a loop comes to that is no launch."""
    body, fed = next(fed_to(node, inputs, outputs_of(node, inputs)))
    pieces = find_pieces(body, whole(body, node.device), fed)
    varying = [body.nodes[n] for piece in pieces if piece.varies for n in piece.region.nodes]
    alone = [node for node in varying if node.op != CONSTANT]
    tapes = [_tape(body, piece.region, fed) for piece in pieces if not piece.varies]
    broken = f", and {len(alone)} operations one after another until their sizes come again, which break them"
    between = f"{broken} ({_named(alone)})" if alone else ""
    return f"{len(tapes)} tapes an iteration{between}; the tapes take {_cost(tapes)}"


def _seconds(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs"


def _tape(plan: Plan, region: Region, feeds: Sequence[Spec]) -> TapeReport:
    made = _recorded(plan, region, feeds)
    memory = made if isinstance(made, str) else _memory(made)
    seconds = None if isinstance(made, str) else made.predicted_seconds
    kinds = _counted((plan.nodes[n].op for n in region.nodes), FREQUENT)
    return TapeReport(len(region.nodes), region.device, kinds, len(region.inputs), memory, seconds)


def _recorded(plan: Plan, region: Region, feeds: Sequence[Spec]) -> Recording | str:
    known = [*feeds, *plan.value_specs()[len(feeds) :]]
    inputs = [known[value] for value in region.inputs]
    if not all(spec.known for spec in inputs):
        return "its memory depends on the shapes fed"
    try:
        return record(plan, region, inputs)
    except GraphError:
        return "its memory depends on values"


def _memory(made: Recording) -> str:
    guess = f"{1e6 * made.predicted_seconds:.1f} µs"
    several = [launch.step.units for launch in made.launches if isinstance(launch.step, ManyStep)]
    launches = f"{len(made.launches)} launches" + (
        f", {len(several)} of them of {sum(several)} small ones" * bool(several)
    )
    return f"{launches}; {made.arena_bytes} bytes of arena, {made.output_bytes} of outputs, {guess}"


# Rendering


def _lines(task: TaskReport) -> list[str]:
    lines = [task.size]
    for rows in (task.tapes, task.issued, task.broken):
        lines += [str(row) for row in rows[:MAX_ROWS]]
        if len(rows) > MAX_ROWS:
            lines.append(f"and {len(rows) - MAX_ROWS} more")
    lines += [f"fused {group}" for group in task.fused[:MAX_ROWS]]
    lines += task.loops[:MAX_ROWS]
    if task.peak_bytes is None:
        lines += ["peak memory unknown", *(f"  {reason}" for reason in task.left_out[:MAX_ROWS])]
    else:
        lines.append(f"peak memory {amount(task.peak_bytes)}, of which {amount(task.held_bytes)} are held already")
    return [*lines, *(f"  {tensor}" for tensor in task.tensors[:8])]


_STYLE = (
    "<style>.flowrt-step{font:13px sans-serif}.flowrt-step ul{margin:2px 0 10px;padding-left:18px}"
    ".flowrt-step td{padding:1px 8px;white-space:nowrap}.flowrt-step .life{width:240px;background:#eef1f5}"
    ".flowrt-step .life i{display:block;height:9px;background:#4477aa;border-radius:2px}</style>"
)


def _list(title: str, rows: Sequence[object]) -> str:
    return f"<b>{escape(title)}</b><ul>{''.join(f'<li>{escape(str(row))}</li>' for row in rows)}</ul>"


def _liveness(task: TaskReport) -> str:
    """The largest tensors, and from which node to which of its region each is in memory."""
    span = max(task.places, 1)
    rows = []
    for tensor in task.tensors:
        first, last = (0, span - 1) if tensor.first < 0 else (tensor.first, max(tensor.last, tensor.first))
        bar = f"margin-left:{100 * first / span:.1f}%;width:{max(100 * (last + 1 - first) / span, 1):.1f}%"
        cells = (tensor.where, str(tensor.spec), amount(tensor.nbytes), tensor.what)
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{text}<td class='life'><i style='{bar}'></i></td></tr>")
    head = "<tr><th>tensor</th><th>spec</th><th>size</th><th></th><th>in memory</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>" if rows else ""
