"""Sessions: where a graph meets the nodes that run it.

A session compiles each step once per (fetches, fed tensors), keeps it, and hands every run to its runner: the executor
of a private host, or the master of a cluster. It owns its runs: leaving the session cancels and awaits them.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.errors import ClosedError, FeedError, GraphError, StepTimeout, user_site
from flowrt.graph import Graph, Node, Tensor
from flowrt.op import as_value
from flowrt.runners import LocalRunner, Registered, Runner, open_cluster
from flowrt.sched.regions import WRITES
from flowrt.spec import Spec
from flowrt.structure import LEAF, Structure, flatten

if TYPE_CHECKING:
    from types import TracebackType

    from flowrt.checkpoint import Checkpoints
    from flowrt.placement import Rules

Array = np.ndarray[Any, Any]

MAX_STEPS = 256  # compiled steps a session keeps


@dataclass(frozen=True, slots=True)
class Options:
    """How a session runs steps.

    ``optimize=False``: no pass rewrites, every node runs as written (tapes still do). ``tapes=False``: the machine runs
    every node. ``threads`` defaults to the cores the process may use. For an in-process session; nodes of a cluster
    have their own.
    """

    optimize: bool = True
    tapes: bool = True
    threads: int | None = None
    transfer_budget: int = 256 << 20
    seed: int | None = None


class Session:
    """Runs steps of a graph, in this process or on a cluster.

    ``async with Session(graph) as session:`` initialises what no checkpoint restored and no earlier session left on the
    nodes. ``cluster`` is a `ClusterSpec` or a `LocalCluster`; ``placement`` says where nodes go, apart from the model.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: Any = None,
        *,
        placement: Rules | None = None,
        checkpoints: Checkpoints | None = None,
        options: Options | None = None,
        name: str = "",
    ) -> None:
        self.graph = graph
        self.options = options or Options()
        self.checkpoints = checkpoints
        self._cluster = cluster
        self._placement = placement
        self._name = name
        self._runner: Runner | None = None
        self._steps: OrderedDict[Any, _Step] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._closed = False
        self._numbers = itertools.count(1)
        seeds = (self.options.seed, graph.seed)
        self._seed = next((seed for seed in seeds if seed is not None), secrets.randbits(62))

    async def __aenter__(self) -> Session:
        if self._closed or self._runner is not None:
            raise ClosedError("a session is opened once; make another one")
        self._runner = await self._open_runner()
        try:
            self.graph.finalize()
            restored = await self._restore()
            await self._initialize(restored)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _open_runner(self) -> Runner:
        if self._cluster is None:
            return LocalRunner(self.options.threads, self.options.transfer_budget, self.options.tapes)
        return await open_cluster(self._cluster, self._name)

    async def _close(self) -> None:
        self._closed = True
        for task in self._running:
            task.cancel()
        while self._running:
            self._idle.clear()
            await self._idle.wait()
        if self._runner is not None:
            await self._runner.aclose()

    # Running

    async def run(self, fetches: Any, feeds: Mapping[Any, Any] | None = None, *, timeout: float | None = None) -> Any:
        """The values of ``fetches``, in the same form; operations answer None.

        ``fetches`` is a tensor, operation or variable, or any nesting of lists, tuples and dicts of them; ``feeds``
        maps tensors (any, not only placeholders) to values. ``timeout`` is in seconds and raises `StepTimeout`. Cancelling
        the awaiting task cancels the step, on all its nodes, and leaves nothing behind.
        """
        given = {self._fed(tensor): value for tensor, value in (feeds or {}).items()}
        step = self._step(fetches, tuple(given))
        return await self._run(step, step.arrays(list(given.values())), timeout)

    async def run_uncounted(self, fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any:
        """`run`, which is not taken for a training step, whatever it writes."""
        given = {self._fed(tensor): value for tensor, value in (feeds or {}).items()}
        step = self._step(fetches, tuple(given))
        return await self._run(step, step.arrays(list(given.values())), counted=False)

    def compile(self, fetches: Any, feeds: Sequence[Any] = ()) -> CompiledStep:
        """The fast path of `run`: a callable that takes the values of ``feeds`` in order and awaits the fetches."""
        return CompiledStep(self, self._step(fetches, tuple(self._fed(t) for t in feeds)))

    async def _run(
        self, step: _Step, arrays: Sequence[Array], timeout: float | None = None, *, counted: bool = True
    ) -> Any:
        runner = self._open()
        task = asyncio.current_task()
        assert task is not None
        nested = task in self._running
        self._running.add(task)
        try:
            async with asyncio.timeout(timeout):
                registered = step.registered or await step.register(runner)
                values = await runner.run(registered, arrays, number=next(self._numbers), seed=self._seed)
        except TimeoutError as error:
            raise StepTimeout(f"{step} did not finish within {timeout} s; it was cancelled") from error
        except asyncio.CancelledError:
            if self._closed and not nested:
                raise ClosedError(f"the session was closed while {step} ran") from None
            raise
        finally:
            if not nested:
                self._running.discard(task)
            self._idle.set()
        if counted and step.writes and self.checkpoints is not None:
            await self.checkpoints.after_step(self)
        return step.answer(values)

    def _run_now(self, step: _Step, arrays: Sequence[Array]) -> list[Array] | None:
        """The fetched arrays where the step is one short tape on this process's own host; else None."""
        if step.registered is None or self._closed or (step.writes and self.checkpoints is not None):
            return None
        return self._open().run_now(step.registered, arrays, number=next(self._numbers), seed=self._seed)

    def _open(self) -> Runner:
        if self._closed or self._runner is None:
            raise ClosedError("the session is not open; use it inside `async with fr.Session(graph) as session:`")
        return self._runner

    # Compiling

    def _fed(self, value: Any) -> Tensor:
        tensor = as_value(value)
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{user_site()}: only tensors can be fed, not {value!r}")
        self._own(tensor)
        return tensor

    def _own(self, value: Tensor | Node) -> None:
        if value.graph is not self.graph:
            raise GraphError(f"{user_site()}: {value!r} belongs to another graph than this session's")

    def _step(self, fetches: Any, feeds: tuple[Tensor, ...]) -> _Step:
        structure, leaves = flatten(fetches)
        wanted = [as_value(leaf) for leaf in leaves]
        for leaf, value in zip(leaves, wanted, strict=True):
            if not isinstance(value, (Tensor, Node)):
                raise GraphError(f"{user_site()}: {leaf!r} cannot be fetched; fetch tensors, operations or variables")
            self._own(value)
        key = (structure, tuple(map(id, wanted)), tuple(map(id, feeds)))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self, self.graph, structure, wanted, feeds)
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    # State

    async def _restore(self) -> set[tuple[str, str]]:
        if self.checkpoints is None:
            return set()
        return await self.checkpoints.restore_newest(self)

    async def _initialize(self, done: set[tuple[str, str]]) -> None:
        """Assign initial values to the variables that have none; an existing one of another spec raises."""
        have = await self._open().inventory()
        missing = []
        for key, resource in self.graph.resources.items():
            if resource.kind != "variable":
                continue
            spec = resource.specs[0]
            if key in have and not have[key].accepts(spec.dtype, spec.shape):
                raise GraphError(
                    f"variable {resource.name!r} ({resource.site}) is {spec}, but the nodes hold it as {have[key]} "
                    "since an earlier session; rename it, use another container, or session.reset() the old one"
                )
            if key not in have and key not in done and resource.initialize is not None:
                missing.append(resource.initialize)
        if missing:
            await self.run_uncounted(missing)

    async def reset(self, container: str | None = None) -> None:
        """Forget the variables and queues of a container (all of them by default) on every node."""
        await self._open().reset(container)

    async def save(self) -> int:
        """Save a checkpoint now; answers its step. Raises `CheckpointError` if it cannot be made whole."""
        return await self._need_checkpoints().save(self)

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

    async def explain(self, fetches: Any, feeds: Sequence[Any] = ()) -> str:
        """What became of a step: passes, placement, and the tapes of each task, as text."""
        from flowrt.explain import explain_step

        return explain_step(self._step(fetches, tuple(self._fed(t) for t in feeds)).compiled)

    @asynccontextmanager
    async def producing(self, queue: Any, source: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[None]:
        """Fill ``queue`` from an iterator of elements while the block runs; close the queue at the iterator's end.

        An element is an array, or a tuple of one per component. An error of the iterator is raised from the block.
        """
        graph, feeds, enqueue, close = queue.entrance()
        put = _Step(self, graph, LEAF, [enqueue], feeds)
        end = _Step(self, graph, LEAF, [close], ())

        async def produce() -> None:
            async for element in _as_async(source):
                await self._run(put, put.arrays(element if isinstance(element, tuple) else (element,)))
            await self._run(end, ())

        async with asyncio.TaskGroup() as group:
            producer = group.create_task(produce())
            try:
                yield
            finally:
                producer.cancel()


async def _as_async(source: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item


class _Step:
    """One compiled step of a session."""

    def __init__(
        self, session: Session, graph: Graph, structure: Structure, wanted: Sequence[Any], feeds: Sequence[Tensor]
    ) -> None:
        self._structure = structure
        self._slots: list[int | None] = []
        fetches: list[Tensor] = []
        targets: list[Node] = []
        for value in wanted:
            if isinstance(value, Tensor):
                self._slots.append(len(fetches))
                fetches.append(value)
            else:
                self._slots.append(None)
                targets.append(value)
        self.feeds = tuple(feeds)
        self.compiled = session._open().compile(
            graph, fetches, targets, feeds, optimize=session.options.optimize, placement=session._placement
        )
        self.writes = any(node.op in WRITES for plan in self.compiled.plans.values() for node in plan.nodes)
        self.registered: Registered | None = None
        self._single = structure == LEAF and self._slots[0] is not None

    def __str__(self) -> str:
        return f"the step of {len(self._slots)} fetches"

    async def register(self, runner: Runner) -> Registered:
        self.registered = await runner.register(self.compiled)
        return self.registered

    def arrays(self, values: Sequence[Any]) -> list[Array]:
        """The fed values as C-contiguous arrays; raises `FeedError` for one that does not fit its tensor."""
        if len(values) != len(self.feeds):
            raise FeedError(f"{user_site()}: the step takes {len(self.feeds)} values, got {len(values)}")
        return [_as_feed(tensor, value) for tensor, value in zip(self.feeds, values, strict=True)]

    def answer(self, values: Sequence[Array]) -> Any:
        if self._single:
            return _scalar(values[0])
        leaves = [None if slot is None else _scalar(values[slot]) for slot in self._slots]
        return self._structure.rebuild(leaves)


def _scalar(array: Array) -> Any:
    return array if array.ndim else array[()]


def _as_feed(tensor: Tensor, value: Any) -> Array:
    spec = tensor.spec
    array = value if isinstance(value, np.ndarray) else _convert(tensor, value)
    if array.dtype != spec.dtype or not (array.shape == spec.dims or spec.accepts(array.dtype, array.shape)):
        got = Spec(array.dtype, array.shape) if array.dtype.kind in "biuf" else f"{array.dtype}{list(array.shape)}"
        fix = f"; convert it with .astype({spec.dtype.name!r})" if array.dtype != spec.dtype else ""
        raise FeedError(f"{user_site()}: feed {tensor.name!r} ({tensor.op.site}): expected {spec}, got {got}{fix}")
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _convert(tensor: Tensor, value: Any) -> Array:
    """Plain Python data takes the tensor's dtype; NumPy scalars and others keep their own."""
    if isinstance(as_value(value), (Tensor, Node)):
        raise FeedError(f"{user_site()}: feed {tensor.name!r} with a value, not with {value!r}")
    try:
        natural = np.asarray(value)
        if isinstance(value, np.generic) or not np.can_cast(natural.dtype, tensor.dtype, "same_kind"):
            return natural
        return natural.astype(tensor.dtype)
    except (TypeError, ValueError) as error:
        raise FeedError(f"{user_site()}: feed {tensor.name!r}: {value!r} is not an array: {error}") from error


class CompiledStep:
    """A step made ready: ``await step(*values)`` with one value per feed."""

    def __init__(self, session: Session, step: _Step) -> None:
        self._session = session
        self._step = step

    async def __call__(self, *values: Any) -> Any:
        arrays = self._step.arrays(values)
        done = self._session._run_now(self._step, arrays)
        if done is not None:
            return self._step.answer(done)
        return await self._session._run(self._step, arrays)

    def run_now(self, *values: Any) -> tuple[bool, Any]:
        """(True, fetches) where the step could run in the calling thread at once; else (False, None)."""
        done = self._session._run_now(self._step, self._step.arrays(values))
        return (False, None) if done is None else (True, self._step.answer(done))
