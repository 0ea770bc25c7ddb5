"""Sessions: where a graph meets the nodes that run it.

A session compiles each step once per (fetches, fed tensors), keeps it, and hands every run to its runner: the executor
of a private host, or the master of a cluster. It owns its runs: leaving the session cancels and awaits them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import (
    ClosedError,
    FlowrtError,
    GraphError,
    QueueClosedError,
    RemoteError,
    StepCancelled,
    StepTimeout,
    user_site,
)
from flowrt.base.locating import checked_name, fitting
from flowrt.base.plain import is_number
from flowrt.base.tracebacks import brief, shorten, unmark
from flowrt.finishing import to_the_end
from flowrt.graph import Graph, Node, Tensor
from flowrt.misuse import AsyncOnly, standing
from flowrt.op import as_value
from flowrt.operators import Operators
from flowrt.ops.structure import Structure, flatten
from flowrt.passes.prune import placeholders_of
from flowrt.placement import Rules
from flowrt.progress import Activity
from flowrt.sched.host.shielded import EndedAnyway
from flowrt.sched.running import INLINE_SECONDS
from flowrt.sched.tape.direct import Numbers
from flowrt.session.cluster_runner import Comebacks, again_where_lost, open_cluster
from flowrt.session.feeds import not_fetched
from flowrt.session.initial import arrays, initial_waves, tables
from flowrt.session.options import Options
from flowrt.session.producing import Failures, Producing, why_closed
from flowrt.session.resting import Rests
from flowrt.session.runners import LocalRunner, Runner
from flowrt.session.step import YIELD_EVERY, AwaitedRun, CompiledStep, Step

if TYPE_CHECKING:
    from os import PathLike

    from flowrt.graph import Resource
    from flowrt.session.checkpoints import Checkpoints
    from flowrt.session.explain import Explanation
    from flowrt.tracing.tracing import Tracing

Array = np.ndarray[Any, Any]

MAX_STEPS = 256  # compiled steps a session keeps
PENDING = object()  # what `Session._run_now` answers where the step cannot run at once


class Session(AsyncOnly):
    """Runs steps of a graph, in this process or on a cluster.

    ``async with Session(graph) as session:`` initialises what no checkpoint restored and no earlier session left on the
    nodes. ``cluster`` is a `ClusterSpec` or a `LocalCluster`; ``placement`` says where nodes go, apart from the model;
    ``tls`` is the folder of this side's keys, else the cluster's or FLOWRT_TLS's.
    """

    WHAT = "fr.Session"
    INSTEAD = "; without await, use `with fr.BlockingSession(graph) as session`"

    @fitting
    def __init__(
        self,
        graph: Graph,
        cluster: Any = None,
        *,
        placement: Rules | None = None,
        checkpoints: Checkpoints | None = None,
        options: Options | None = None,
        name: str = "",
        tls: str | PathLike[str] | None = None,
    ) -> None:
        for what, value, kind in (("graph", graph, Graph), ("placement", placement or Rules(), Rules)):
            if not isinstance(value, kind):
                raise GraphError(f"{user_site()}: a session's {what} is a {kind.__name__}, not {value!r}")
        if options is not None and not isinstance(options, Options):
            raise GraphError(f"{user_site()}: options is fr.Options(...), not {options!r}")
        if checkpoints is not None and not hasattr(checkpoints, "restore_newest"):
            raise GraphError(f"{user_site()}: checkpoints is fr.Checkpoints({checkpoints!r}), not {checkpoints!r}")
        self.graph, self.options = graph, Options() if options is None else options
        self.checkpoints = checkpoints
        self._cluster, self._placement, self._name, self._tls = cluster, placement, checked_name(name), tls
        self._runner: Runner | None = None
        self._steps: OrderedDict[Any, Step] = OrderedDict()
        self._retired: list[Step] = []
        self._running: set[asyncio.Timeout] = set()
        self._failed_sources: Failures = {}
        self._iterating: dict[Any, Callable[[], Coroutine[Any, Any, None]]] = {}  # by trainer: what ends that
        self._idle, self._numbers, self.rests, self._comebacks = asyncio.Event(), Numbers(), Rests(), Comebacks()
        self._closed, self._runs_now, self._anew = False, 0, False  # nodes held nothing of it when it was opened
        self._traced: Tracing | None = None  # the block in which it is traced
        seeds = (self.options.seed, graph.seed)
        self._seed = next((int(seed) % (1 << 63) for seed in seeds if seed is not None), secrets.randbits(62))

    __repr__ = standing

    @brief
    async def __aenter__(self) -> Session:
        if self._closed or self._runner is not None:
            raise ClosedError(f"{user_site()}: a session is opened once; make another one")
        self._loop, self._runner = asyncio.get_running_loop(), await self._open_runner()
        self._numbers.gate[0] = 1
        try:
            self.graph.finalize()
            await again_where_lost(self._runner, self._initialize)
            self._comebacks.note(self._runner.births)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        unmark(error)
        try:
            if self.checkpoints is not None:
                await self.checkpoints.catch_up(self)
        finally:
            await self._close()

    async def _open_runner(self) -> Runner:
        if self._cluster is None:
            return LocalRunner(self.options)
        return await open_cluster(self.graph, self._placement, self._cluster, self._name, self._tls, self.options)

    async def _close(self) -> None:
        """Cancel what runs, wait for it, and let the nodes go; a cancellation meanwhile is delivered afterwards."""
        self._closed = True
        self._numbers.gate[0] = 0
        for scope in self._running:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        await to_the_end(self._let_go())

    async def _let_go(self) -> None:
        for end in list(self._iterating.values()):
            await end()
        while self._running:
            self._idle.clear()
            await self._idle.wait()
        if self.checkpoints is not None:
            await self.checkpoints.close(self)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.aclose()

    # Running

    async def run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None, *, timeout: float | None = None) -> Any:
        """The values of ``fetches``, in the same form; operations answer None.

        ``fetches`` is a tensor, operation or variable, or any nesting of lists, tuples and dicts of them; ``feeds``
        maps tensors (any, not only placeholders) to values. ``timeout`` is in seconds and raises `StepTimeout`, unless
        the step came to its end all the same.
        Cancelling the awaiting task cancels the step, on all its nodes; what it had done by then stands.
        """
        try:
            if timeout is not None and not is_number(timeout, -inf):
                raise GraphError(f"{user_site()}: timeout is a number of seconds, got {timeout!r:.80}")
            step, arrays = self._prepare(fetches, feeds)
            return await (self._run_soon(step, arrays) if timeout is None else self._run(step, arrays, timeout))
        except BaseException as error:
            shorten(error)
            raise

    async def run_uncounted(self, fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any:
        """`run` beside the program: it is no training step, whatever it writes, and no later draw differs for it."""
        step, arrays = self._prepare(fetches, feeds)
        return await self._run(step, arrays, counted=False, number=self._numbers.aside())

    @fitting
    def compile(self, fetches: Any, feeds: Sequence[Any] = ()) -> CompiledStep:
        """The fast path of `run`: a callable that takes the values of ``feeds`` in order and awaits the fetches."""
        step = self._step(fetches, self._all_fed(feeds))
        step.users += 1  # for good: who has it may call it at any time
        return CompiledStep(self, step)

    def run_here(self, fetches: Any, feeds: Mapping[Any, Any] | None, wait: Callable[..., Any]) -> Any:
        """`run` in the caller's thread if it is short: none can cancel it there; else ``wait`` has it awaited."""
        given = self._given(feeds)
        key = self._asked(fetches, tuple(given))[0]
        step = self._steps.get(key)
        if step is None:
            return wait(self.run(fetches, feeds))
        with suppress(KeyError):  # another thread's step has just pushed it out
            self._steps.move_to_end(key)
        arrays, number = step.arrays(list(given.values())), self.fresh_number()
        answer = self._run_now(step, arrays, number)
        return wait(self._run(step, arrays, number=number)) if answer is PENDING else answer

    async def _run_soon(self, step: Step, arrays: Sequence[Array]) -> Any:
        number = self.fresh_number()
        answer = self._run_now(step, arrays, number)
        if answer is PENDING:
            return await self._run(step, arrays, number=number)
        self._runs_now += 1
        if self._runs_now % YIELD_EVERY == 0:
            await asyncio.sleep(0)  # a loop over short steps must not starve the rest of the program
        return answer

    def _run_now(self, step: Step, arrays: Sequence[Array], number: int, within: float = INLINE_SECONDS) -> Any:
        """The answer, where the step is one tape of this process and takes ``within`` seconds; else `PENDING`.

        From any thread. Where it is pending, nothing was done, and ``number`` is still this run's: what random ops draw
        must not depend on how fast a tape was.
        """
        registered, runner = step.registered, self._runner
        if registered is None or runner is None or self._closed or (step.writes and self.checkpoints is not None):
            return PENDING
        values = runner.run_now(registered, arrays, number, self._seed, within)
        return PENDING if values is None else step.answer(values)

    def _attempt(
        self, step: Step, arrays: Sequence[Array], choose: Callable[[Any], None], within: float = INLINE_SECONDS
    ) -> Any:
        """The answer, or an `AwaitedRun`; where it came at once, ``choose`` gets a plan for others. From any thread."""
        number = self.fresh_number()
        answer = self._run_now(step, arrays, number, within)
        if answer is PENDING:
            return AwaitedRun(arrays, number)
        if (runner := self._runner) is not None:
            plan = runner.direct_plan(step.registered, arrays, self._numbers, self._seed, within)
            if plan is not None:
                choose(plan)
        return answer

    async def _run(
        self,
        step: Step,
        arrays: Sequence[Array],
        timeout: float | None = None,
        *,
        counted: bool = True,
        number: int | None = None,
    ) -> Any:
        runner, number = self._open_here(), self.fresh_number() if number is None else number
        scope = asyncio.timeout(None if timeout is None else min(timeout, 1e9))  # of years no more
        self._running.add(scope)
        step.users += 1
        values = late = None
        try:
            async with scope:
                if self._retired:
                    await self._forget_retired(runner)
                try:
                    values = await step.run(runner, arrays, number, self._seed)
                except EndedAnyway as ended:
                    late = ended.values
                    raise asyncio.CancelledError from None
        except (TimeoutError, StepCancelled) as error:
            if not scope.expired():
                raise
            clear_frames(error.__traceback__)  # the scope's own refers to the task
            values = late
            if values is None:
                raise self._why_stopped(step, timeout) from error
        except QueueClosedError as error:
            error.__cause__ = why_closed(step, self._failed_sources)
            raise
        except FlowrtError as error:
            self._running.discard(scope)  # it is left: who closes the session could not stop it any more
            await self._comebacks.look(self, error, counted)
            raise
        finally:
            step.users -= 1
            self._running.discard(scope)
            del scope  # it knows the task, which will know the error, whose frames refer to this one
            self._idle.set()
            if values is None and step.writes and self.checkpoints is not None:
                self.checkpoints.cut_short()
        if counted and step.writes and self.checkpoints is not None:
            await self.checkpoints.after_step(self)
        return step.answer(values)

    def _why_stopped(self, step: Step, timeout: float | None) -> FlowrtError:
        if self._closed:
            return ClosedError(f"the session was closed while {step} ran")
        return StepTimeout(f"{step} did not finish within {timeout} s; it was cancelled")

    async def _forget_retired(self, runner: Runner) -> None:
        """Let the nodes forget steps that were pushed out by newer ones, once nothing runs them."""
        while (step := next((step for step in self._retired if not step.users), None)) is not None:
            self._retired.remove(step)
            registered, step.registered = step.registered, None  # who looked it up before it was pushed out may run it
            if registered is not None:
                with suppress(RemoteError):  # a node that is lost has forgotten it
                    await runner.unregister(registered)

    def _open(self) -> Runner:
        if self._closed or self._runner is None:
            state = "closed" if self._closed else "not open yet"
            where = "inside `async with fr.Session(graph) as session:`"
            raise ClosedError(f"{user_site()}: the session is {state}; use it {where}")
        return self._runner

    def _open_here(self) -> Runner:
        """The runner; raises `GraphError` on another event loop than the one the session was opened on."""
        runner = self._open()
        if asyncio.get_running_loop() is not self._loop:
            raise GraphError(
                f"{user_site()}: the session was opened on another event loop; use it there, in one asyncio.run, "
                "or take an fr.BlockingSession, which threads and loops may share"
            )
        return runner

    def fresh_number(self) -> int:
        """A number above that of every run so far; random ops draw by the number of their run."""
        return self._numbers.fresh()

    @property
    def next_number(self) -> int:
        """What `fresh_number` answers next."""
        return self._numbers.next()

    def skip_numbers(self, number: int) -> None:
        """Number the runs to come from at least ``number``."""
        self._numbers.skip(number)

    # Compiling

    def _prepare(self, fetches: Any, feeds: Mapping[Any, Any] | None) -> tuple[Step, list[Array]]:
        given = self._given(feeds)
        step = self._step(fetches, tuple(given))
        return step, step.arrays(list(given.values()))

    def _given(self, feeds: Mapping[Any, Any] | None) -> dict[Tensor, Any]:
        if feeds is None:
            return {}
        if type(feeds) is not dict and not isinstance(feeds, Mapping):
            kind = type(feeds).__name__
            raise GraphError(f"{user_site()}: feeds map tensors to values, as {{x: images}} does; got a {kind}")
        given = {self._fed(tensor): value for tensor, value in feeds.items()}
        if len(given) < len(feeds):
            raise GraphError(f"{user_site()}: a tensor is fed twice (a variable is fed as its read); give it one value")
        return given

    def _fed(self, value: Any) -> Tensor:
        tensor = as_value(value)
        if not isinstance(tensor, Tensor):
            raise GraphError(
                f"{user_site()}: only tensors can be fed, not {value!r}; feed {{x: value}}, x the tensor itself"
            )
        self._own(tensor)
        return tensor

    def _all_fed(self, feeds: Sequence[Any]) -> tuple[Tensor, ...]:
        if isinstance(feeds, Operators) or not isinstance(feeds, Iterable):
            raise GraphError(f"{user_site()}: feeds is a list of tensors; write feeds=[{feeds!r}]")
        return tuple(self._fed(t) for t in feeds)

    def _own(self, value: Tensor | Node) -> None:
        if value.graph is not self.graph:
            raise GraphError(f"{user_site()}: {value!r} belongs to another graph than this session's")

    def _asked(self, fetches: Any, feeds: tuple[Tensor, ...]) -> tuple[Any, Structure, list[Tensor | Node]]:
        """What a step is kept by, the form of its fetches, and the tensors and nodes that they are."""
        structure, leaves = flatten(fetches, parts=True)
        wanted = [as_value(leaf) for leaf in leaves]
        for leaf, value in zip(leaves, wanted, strict=True):
            if not isinstance(value, (Tensor, Node)):
                raise not_fetched(leaf)
            self._own(value)
        return (structure, tuple(map(id, wanted)), tuple(map(id, feeds))), structure, wanted

    def _step(self, fetches: Any, feeds: tuple[Tensor, ...]) -> Step:
        key, structure, wanted = self._asked(fetches, feeds)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = Step(self, self.graph, structure, wanted, feeds)
            if len(self._steps) > MAX_STEPS:
                self._retired.append(self._steps.popitem(last=False)[1])
        self._steps.move_to_end(key)
        return step

    # State

    async def _initialize(self) -> None:
        """Restore variables, and initialise those that have no value; an existing one of another spec raises."""
        for twice in () if self._cluster is None else self.graph.held_twice:
            await twice.keep(self)
        done = set() if self.checkpoints is None else await self.checkpoints.open(self)
        have = await self._open().inventory(held := self._held())
        for key, resource in held.items():
            spec = resource.specs[0]
            if key in have and not have[key].accepts(spec.dtype, spec.shape):
                raise GraphError(
                    f"variable {resource.name!r} ({resource.site}) is {spec}, but the nodes hold it as {have[key]} "
                    "since an earlier session; rename it, use another container, or session.reset() the old one"
                )
        missing = {key: resource for key, resource in held.items() if key not in have and key not in done}
        self._anew = len(missing) == len(held)
        begun = self._open().begin(arrays(missing), tables(self.graph, missing))
        await self._begin_variables(missing.keys() - begun)

    def _held(self) -> dict[tuple[str, str], Resource]:
        """The variables that this session's nodes hold."""
        return {key: resource for key, resource in self.graph.resources.items() if resource.kind == "variable"}

    async def start_over(self) -> bool:
        """Give all variables the initial values again that the session began with, if it did; answers whether."""
        if self._anew:
            await self._begin_variables(self._held())
        return self._anew

    async def _begin_variables(self, names: Collection[tuple[str, str]]) -> None:
        for place, wave in enumerate(initial_waves(self._held())):  # of all: draws are the same whatever has begun
            if left := [node for node in wave if node.resource in names]:
                number = self._numbers.initial(place)
                with Activity(f"initialising {len(left)} variables"):
                    await self._run(self._step(left, ()), (), counted=False, number=number)

    @brief
    async def reset(self, container: str | None = None) -> None:
        """Forget the variables and queues of a container (all of them by default) on every node."""
        await self._open().reset(container)
        self._failed_sources.clear()

    @brief
    async def save(self) -> int:
        """Save a checkpoint now; answers its step. Raises `CheckpointError` if it cannot be made whole."""
        return await self._need_checkpoints().save(self)

    @brief
    async def restore(self, step: int | None = None) -> int:
        """Put the variables back to the newest whole checkpoint, or to that of ``step``; answers its step."""
        return await self._need_checkpoints().restore(self, step)

    def _need_checkpoints(self) -> Checkpoints:
        if self.checkpoints is None:
            raise GraphError(f"{user_site()}: give the session checkpoints=fr.Checkpoints(path) first")
        return self.checkpoints

    # Looking

    @property
    def lost(self) -> frozenset[str]:
        """The tasks of the cluster that died or cannot be reached any more."""
        return self._open().lost

    @brief
    async def explain(self, fetches: Any, feeds: Mapping[Any, Any] | Sequence[Any] | None = None) -> Explanation:
        """What became of a step: passes, placement, the tapes of each task, and the peak of its memory.

        ``feeds`` are the tensors that are fed, by default the placeholders that the step needs; or a mapping from them
        to the shapes (or arrays) they are fed, where the graph leaves sizes open. Raises `SpecError` for such as do
        not fit. The answer prints as text, and shows as HTML in a notebook.
        """
        from flowrt.session.explain import explain_for

        feeds = placeholders_of(map(as_value, flatten(fetches, parts=True)[1])) if feeds is None else feeds
        step = self._step(fetches, self._all_fed(tuple(feeds) if isinstance(feeds, Mapping) else feeds))
        return await explain_for(step, self._open(), feeds)

    @fitting
    def tracing(self, path: str | PathLike[str], *, slices: int = 500_000) -> Tracing:
        """``async with``: write a timeline of the steps that run in the block, over all nodes, to ``path``.

        https://ui.perfetto.dev and chrome://tracing open it; a name that ends in ``.gz`` packs it, and it holds so many
        ``slices`` at most. Raises `GraphError` before the block runs where the file cannot be written, or the session
        or a node is being traced already. What tracing changes and costs: docs/guide/tracing.md.
        """
        from flowrt.tracing.tracing import Tracing

        return Tracing(self, path, slices)

    @brief
    def producing(self, queue: Any, source: Iterable[Any] | AsyncIterable[Any]) -> Producing:
        """``async with``: fill ``queue`` from an iterable of elements while the block runs, and close it at the end.

        An element is an array, a tuple of one per component, or a mapping of these in order, as of `fr.data`. Leaving
        the block early, or an error of the iterable, closes the queue too, so nobody waits for what never comes, and an
        asynchronous generator with it; that error is raised from the block, and is the cause of the `QueueClosedError`
        of whoever waits for elements elsewhere.
        """
        return Producing(self, queue, source, self._failed_sources)

    async def fill(self, step: Step, values: Sequence[Array]) -> None:
        """Run a step of `producing`."""
        await self._run(step, values)

    def retire(self, *steps: Step) -> None:
        """Have the nodes forget steps that are no more among those that are kept."""
        self._retired += steps
