"""The two ways to run compiled steps: on a private host in this process, or through the master of a cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flowrt.base.device import HOST_KIND, Device
from flowrt.base.errors import FlowrtError, InternalError, NodeLost, PlacementError, ResourceError
from flowrt.base.spec import Spec
from flowrt.base.traits import is_alias
from flowrt.kernels.store.building import build_standard_kernels
from flowrt.passes import Arrangement, Compiled, Ends, PassReport, Prediction, StepTerms, arranged, compile_step
from flowrt.placement import Auto
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.regions.cost import predict, predict_apart
from flowrt.sched.runs.loopback import Loopback
from flowrt.session.eager import evaluate

if TYPE_CHECKING:
    from flowrt.base.plan import Plan
    from flowrt.graph import Graph, Node, Tensor
    from flowrt.passes import StandIns
    from flowrt.placement import Rules
    from flowrt.sched.host.memory import MemoryStatistics
    from flowrt.sched.host.rendezvous import Listener
    from flowrt.sched.host.tracer import Tracer
    from flowrt.sched.tape.direct import Numbers
    from flowrt.session.options import Options

MOST_MOVED = 8  # nodes that the log names
_log = logging.getLogger(__name__)
_HOW_TO_HAVE_JOBS = (
    "jobs are a cluster's: `async with fr.LocalCluster(ps=1, worker=2) as cluster`, and in it "
    "fr.Session(graph, cluster=cluster)"
)
Array = np.ndarray[Any, Any]
Registered = Any
Name = tuple[str, str]


def supports(op: str, dtypes: Sequence[Any], kind: str) -> bool:
    """Whether a device of ``kind`` can compute ``op``; imports the kernels on first use."""
    from flowrt.kernels.language.table import find_kernel
    from flowrt.sched.devices import kinds
    from flowrt.sched.units import is_structural

    if kind != HOST_KIND:
        return kinds.supports(op, dtypes, kind)
    return is_structural(op) or is_alias(op) or find_kernel(op, kind, dtypes) is not None


def fusible(op: str, dtypes: Sequence[Any], kind: str) -> bool:
    """Whether a device of ``kind`` computes ``op`` entry by entry, with functions that the helper process has too."""
    from flowrt.kernels.language.composing import is_scalar_function

    return kind in ("cpu", "cuda") and is_scalar_function(op, dtypes, kind)


class CopyKeeper(Protocol):
    """Who sees to it that some variables are held twice."""

    def stand_ins(self) -> StandIns:
        """Who has now what others should have, and have not."""

    async def will_write(self, names: frozenset[Name]) -> None:
        """Have it known, before a step writes variables, who will not have what it writes."""

    async def copy_written(self, names: frozenset[Name]) -> None:
        """Have what a step has just written, by (container, name), be written where it is held too."""


class Runner(Protocol):
    """Runs compiled steps on its devices."""

    @property
    def lost(self) -> frozenset[str]:
        """The tasks that died, cannot be reached any more, or are not up yet."""

    @property
    def losses(self) -> Mapping[str, int]:
        """How often tasks were lost so far: what each had before that is gone."""

    @property
    def births(self) -> Mapping[str, str]:
        """Which process each task is that was met, by a name that no other has."""

    def why_lost(self, task: str) -> FlowrtError:
        """Why a task that is lost is not there."""

    def spares(self, tasks: Collection[str]) -> bool:
        """Whether the graph can do without tasks."""

    def expect(self, tasks: Iterable[str]) -> None:
        """Await those of ``tasks`` that are not of the cluster yet, as what is lost is."""

    @property
    def suspects(self) -> frozenset[str]:
        """The tasks that have been silent for longer than they use to be, and are not lost."""

    @property
    def leaving(self) -> frozenset[str]:
        """The suspects that were told to end."""

    @property
    def devices(self) -> Sequence[Device]:
        """The devices there are; what nothing ties down goes to the first."""

    @property
    def known_devices(self) -> Sequence[Device]:
        """Those and, as far as is known, the ones of tasks that are lost."""

    @property
    def keepers(self) -> list[CopyKeeper]:
        """Who holds variables twice here."""

    @property
    def stand_ins(self) -> StandIns:
        """Who has now what others should have: the very same mapping as long as that is so."""

    @property
    def client(self) -> str | None:
        """The task that feeds and fetches, where that is none of the devices'."""

    arrangement: Arrangement | None
    """What `fr.placement.Auto` has chosen, once for all steps."""

    @property
    def tracer(self) -> Tracer | None:
        """Who notes what this process does, while that is traced."""

    def trace(self, tracer: Tracer | None) -> None:
        """Have ``tracer`` note what this process does from now on, or nobody."""

    @property
    def tapes(self) -> bool:
        """Whether regions run as tapes."""

    @property
    def soft_placement(self) -> bool:
        """Whether the kinds of devices that graphs ask for are wishes."""

    async def register(self, compiled: Compiled) -> Registered:
        """Make a compiled step ready to run; once per step."""

    async def run(self, registered: Registered, feeds: Sequence[Array], *, number: int, seed: int) -> list[Array]:
        """The fetches of one run."""

    async def unregister(self, registered: Registered) -> None:
        """Forget a step that nobody runs any more."""

    def run_now(
        self, registered: Registered, feeds: Sequence[Array], number: int, seed: int, within: float
    ) -> list[Array] | None:
        """The fetches, where that needs no waiting and takes ``within`` seconds; else None, and nothing was done.

        From any thread.
        """

    def direct_plan(
        self, registered: Registered, feeds: Sequence[Array], numbers: Numbers, seed: int, within: float
    ) -> Any:
        """The plan of a direct call for feeds like these, which `run_now` has just run; None where there is none."""

    def copy(self, array: Array) -> Array:
        """A C-contiguous copy of what is fed, counted where the memory of this process is."""

    def way(self, one: str, other: str) -> str:
        """How bytes travel between two tasks: shared (memory), unix or tcp (sockets)."""

    @property
    def helpers(self) -> tuple[int, int]:
        """How many threads help a tape here, and the bytes they have to compute in."""

    def held_beside(self, registered: Registered | None) -> int:
        """The bytes held here beside what a step keeps for its own next run; 0 where none are."""

    def memory(self) -> Mapping[str, MemoryStatistics]:
        """What is held in the memory of each device of this process."""

    async def statistics(self, within: float) -> Mapping[str, Mapping[str, Any]]:
        """By task that answers within so many seconds, what is held there and goes on: `NetworkNode.statistics`."""

    async def inventory(self, wanted: Collection[Name] | None = None) -> Mapping[tuple[str, str], Spec]:
        """The variables that have a value; see `Master.inventory`."""

    def begin(self, arrays: Mapping[Name, Array], tables: Mapping[Name, Array]) -> Collection[Name]:
        """Have variables start as copies of ``arrays``, and ``tables`` as arrays of `pages`, where that is possible
        here and now; answers which."""

    async def install(self, plans: Mapping[str, Plan]) -> int:
        """Make plans ready on their tasks, for iterations to run by themselves; answers the number they go by there."""

    async def command(self, task: str, message: Any) -> Any:
        """Have the iterations of a task do what a message of theirs asks, and answer what they do."""

    def post(self, task: str, message: Any) -> None:
        """Send a message to the iterations of a task."""

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        """Have ``listener`` told of what iterations post to their client, while the block runs."""

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str]) -> None:
        """Wait until others than these are lost or suspect. Raises why none can be told of."""

    async def reset(self, container: str | None) -> None:
        """Forget the variables and queues of a container, or of all."""

    async def aclose(self) -> None:
        """Let everything go."""


def compile_for(
    runner: Runner,
    graph: Graph,
    fetches: Sequence[Tensor],
    targets: Sequence[Node],
    feeds: Sequence[Tensor],
    *,
    optimize: bool = True,
    placement: Rules | None = None,
    ends: Ends | None = None,
    stand_ins: StandIns | None = None,
    there: Collection[str] = (),
) -> Compiled:
    """The step as plans for the runner's devices, with ``stand_ins`` other than who stands in now, if given.

    Tasks that are to be ``there`` count as if they were, should they be lost.

    Raises what `compile_step` raises, and `NodeLost` where a task that is lost, or not up yet, is asked for.

    With ``ends`` it is one that the nodes feed and fetch from by themselves.
    """
    devices, standing = runner.devices, runner.stand_ins if stand_ins is None else stand_ins
    if not devices:
        raise NodeLost(f"no task is left to run on: lost are {', '.join(sorted(runner.lost))}")
    known = devices
    if standing or there:
        known = [d for d in runner.known_devices if d in devices or d.host in standing or d.host in there]
    arrangement = _arrangement(runner, graph, placement) if isinstance(placement, Auto) else None
    terms = StepTerms(
        known,
        devices[0],
        supports,
        fusible=fusible,
        regions=runner.tapes,
        evaluate=evaluate,
        optimize=optimize,
        client=runner.client if ends is None else None,
        rules=placement.devices if placement else {},
        wishes=arrangement.devices if arrangement else None,
        ends=ends or Ends.DEFAULT,
        stand_ins=standing,
        soft_placement=runner.soft_placement,
        prediction=_prediction(placement),
    )
    try:
        compiled = compile_step(graph, fetches, targets, feeds, terms)
    except PlacementError as error:
        if (told := _in_terms_of_tasks(runner, error)) is not None:
            raise told from None
        raise
    if compiled.moved:
        more = len(compiled.moved) - MOST_MOVED
        _log.warning("%s%s", "; ".join(compiled.moved[:MOST_MOVED]), f"; and {more} more" if more > 0 else "")
    if arrangement is None:
        return compiled
    predicted = {"µs predicted": arrangement.seconds, "µs on one device": arrangement.alone}
    report = PassReport("arrange", {what: round(1e6 * seconds) for what, seconds in predicted.items()})
    return replace(compiled, report=(report, *compiled.report))


def _in_terms_of_tasks(runner: Runner, error: PlacementError) -> FlowrtError | None:
    """What to say where the device that is missing is of a task that is lost, or of a job in a process alone."""
    asked = error.missing
    if asked is None:
        return None
    for task in sorted(runner.lost):
        if Device(asked.job, asked.task).matches(Device.parse(task)):
            return NodeLost(f"{error}: {runner.why_lost(task)}")
    if asked.job is not None and isinstance(runner, LocalRunner):
        return PlacementError(f"{error}; {_HOW_TO_HAVE_JOBS}")
    return None


def _arrangement(runner: Runner, graph: Graph, auto: Auto) -> Arrangement:
    """Where `fr.placement.Auto` has the nodes of ``graph``: found for the runner's first step, and kept."""
    if runner.arrangement is None:
        runner.arrangement = arranged(
            graph,
            devices=runner.known_devices,
            default=runner.devices[0],
            supports=supports,
            rules=auto.devices,
            prediction=_prediction(auto),
        )
    return runner.arrangement


def _prediction(placement: Rules | None) -> Prediction:
    """What is known, or assumed, of ops and of the network."""
    known = placement if isinstance(placement, Auto) else Auto()
    return Prediction(_cost, known.profile, known.bandwidth, known.latency)


def _cost(op: str, specs: Sequence[Spec], kind: str) -> float:
    return (predict if kind == HOST_KIND else predict_apart)(op, specs)


class LocalRunner:
    """Runs steps on a private host. Its one device answers to no job: graphs that name jobs need a cluster."""

    def __init__(self, options: Options) -> None:
        build_standard_kernels()
        self._host = Host(
            threads=options.threads,
            transfer_budget=options.transfer_budget,
            memory_limit=options.memory_limit,
            devices=options.devices,
            device_memory_limit=options.device_memory_limit,
        )
        self.tapes, self.soft_placement = options.tapes, options.soft_placement
        self._numbers = itertools.count()
        self._installed: dict[int, Executor] = {}
        self._way = Loopback(self._host)
        self._host.iterations = self._way.iterations
        self.devices = [Device.parse(f"{self._host.task}/device:{name}") for name in self._host.devices]
        self.known_devices = self.devices
        self.keepers: list[CopyKeeper] = []
        self.stand_ins: StandIns = {}
        self.client: str | None = None
        self.arrangement: Arrangement | None = None
        self.lost = self.suspects = self.leaving = frozenset[str]()
        self.losses: Mapping[str, int] = {}
        self.births: Mapping[str, str] = {}

    def why_lost(self, task: str) -> FlowrtError:
        raise InternalError(f"{task} cannot be lost")

    def spares(self, tasks: Collection[str]) -> bool:
        return not tasks

    def expect(self, tasks: Iterable[str]) -> None:
        """All are here."""

    @property
    def tracer(self) -> Tracer | None:
        return self._host.tracer

    def trace(self, tracer: Tracer | None) -> None:
        self._host.trace(tracer)

    async def register(self, compiled: Compiled) -> Executor:
        (plan,) = compiled.plans.values()
        return Executor(plan, self._host, tapes=self.tapes)

    async def run(self, registered: Executor, feeds: Sequence[Array], *, number: int, seed: int) -> list[Array]:
        key = ("local", next(self._numbers))
        try:
            return await registered.run(feeds, RunContext(key, number, seed))
        finally:
            self._host.rendezvous.close(key)

    async def unregister(self, registered: Executor) -> None:
        """Nothing is kept but the executor itself."""

    def run_now(
        self, registered: Executor, feeds: Sequence[Array], number: int, seed: int, within: float
    ) -> list[Array] | None:
        return registered.run_now(feeds, number, seed, within)

    def direct_plan(
        self, registered: Executor, feeds: Sequence[Array], numbers: Numbers, seed: int, within: float
    ) -> Any:
        return registered.direct_plan(feeds, numbers, seed, within)

    def copy(self, array: Array) -> Array:
        return self._host.memory.copy(array)

    def way(self, one: str, other: str) -> str:
        raise InternalError(f"nothing travels from {one} to {other}: both are this process")

    @property
    def helpers(self) -> tuple[int, int]:
        return self._host.helpers

    def held_beside(self, registered: Executor | None) -> int:
        return self._host.memory.held - (0 if registered is None else registered.tapes.kept_bytes)

    def memory(self) -> Mapping[str, MemoryStatistics]:
        return {name: device.statistics() for name, device in self._host.devices.items()}

    async def statistics(self, within: float) -> Mapping[str, Mapping[str, Any]]:
        return {self._host.task: self._host.statistics()}

    async def inventory(self, wanted: Collection[Name] | None = None) -> Mapping[tuple[str, str], Spec]:
        return self._host.inventory()

    def begin(self, arrays: Mapping[Name, Array], tables: Mapping[Name, Array]) -> Collection[Name]:
        variables, memory, starts = self._host.variables, self._host.memory, {**arrays, **tables}
        names = frozenset(starts)
        for name, first in starts.items():
            variables.declare(name, Spec(first.dtype, first.shape))
        if not variables.try_hold(frozenset(), names):
            return ()
        begun: set[Name] = set()
        try:
            with suppress(ResourceError):  # those that are left are copied, or it is told then why they cannot be
                for name, first in starts.items():
                    variables.begin(name, memory.begun(first) if name in tables else memory.lasting_copy(first))
                    begun.add(name)
        finally:
            variables.release(frozenset(), names)
        return begun

    async def install(self, plans: Mapping[str, Plan]) -> int:
        (plan,) = plans.values()
        number = next(self._numbers)
        self._installed[number] = Executor(plan, self._host, tapes=self.tapes)
        return number

    async def command(self, task: str, message: Any) -> Any:
        return await self._way.iterations.answer(message, "local", self._installed.__getitem__)

    def post(self, task: str, message: Any) -> None:
        self._way.post(task, "local", message)

    def listening(self, listener: Listener) -> AbstractContextManager[None]:
        return self._way.listeners.listening(listener)

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str]) -> None:
        await asyncio.Event().wait()  # none ever is

    async def reset(self, container: str | None) -> None:
        self._host.reset(container)

    async def aclose(self) -> None:
        await self._host.aclose()
