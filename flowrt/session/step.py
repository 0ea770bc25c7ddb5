"""The steps of a session: compiled once, registered once, and called any number of times.

A `CompiledStep` takes the shortest way there is: the direct call of one short tape, else a run in the caller's thread,
else one that is awaited.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import FeedError, LinkBroken, NodeLost, user_site
from flowrt.base.plan import resources_in
from flowrt.base.telling import telling
from flowrt.base.tracebacks import shorten
from flowrt.base.traits import writes
from flowrt.base.valueclass import valueclass
from flowrt.graph import Tensor
from flowrt.kernels.run.direct import Direct
from flowrt.ops.structure import LEAF, Structure
from flowrt.progress import Activity
from flowrt.sched.host.shielded import EndedAnyway
from flowrt.session.feeds import as_feed
from flowrt.session.runners import Registered, Runner, compile_for

if TYPE_CHECKING:
    from flowrt.graph import Graph
    from flowrt.session.inside import Inside

Array = np.ndarray[Any, Any]

LARGE = 1000  # nodes of graphs whose steps may take a while to prepare
TRIES = 4  # to read what a task that is being lost holds
YIELD_EVERY = 32  # runs in the caller's own task between two looks at the loop


class Step:
    """One compiled step."""

    def __init__(
        self, session: Inside, graph: Graph, structure: Structure, wanted: Sequence[Any], feeds: Sequence[Tensor]
    ) -> None:
        self._structure = structure
        self._wanted = tuple(wanted)
        fetches = [value for value in wanted if isinstance(value, Tensor)]
        targets = [value for value in wanted if not isinstance(value, Tensor)]
        self.feeds = tuple(feeds)
        self._copy = session._open().copy
        self._fits = [(tensor, tensor.spec.dtype, tensor.spec.dims) for tensor in self.feeds]
        self._nodes = len(graph.nodes)
        self._compile = partial(
            compile_for,
            session._open(),
            graph,
            fetches,
            targets,
            feeds,
            optimize=session.options.optimize,
            placement=session._placement,
        )
        self._prepare(session._open())
        self.registered: Registered | None = None
        self._fresh = session.fresh_number
        self.users = 0  # runs in progress, and who may run it at any time
        self._registering = asyncio.Lock()
        self._single = structure == LEAF and bool(fetches)

    @property
    def runs_elsewhere(self) -> bool:
        """Whether other processes run it."""
        return self.compiled.client is not None

    def __str__(self) -> str:
        names = ", ".join(repr(value.name) for value in self._wanted[:3])
        more = f" and {len(self._wanted) - 3} more" if len(self._wanted) > 3 else ""
        return f"the step that fetches {names or 'nothing'}{more}"

    def _prepare(self, runner: Runner) -> None:
        """Compile it, for where variables are now."""
        self.stand_ins = runner.stand_ins
        with Activity(f"preparing {self}") if self._nodes > LARGE else nullcontext():
            self.compiled = self._compile()
        nodes = [node for plan in self.compiled.plans.values() for node in plan.nodes]
        self.written = frozenset(name for node in nodes if writes(node.op) for name in resources_in(node.attrs))
        self.writes = any(writes(node.op) for node in nodes)

    async def register(self, runner: Runner) -> Registered:
        """The step as its runner knows it; registered there the first time, and anew where variables have moved."""
        async with self._registering:
            if self.stand_ins is not runner.stand_ins:
                self._prepare(runner)
                self.registered = None
            if self.registered is None:
                self.registered = await runner.register(self.compiled)
        return self.registered

    async def run(self, runner: Runner, arrays: Sequence[Array], number: int, seed: int) -> Sequence[Array]:
        """The fetches of one run. What it writes is written wherever that is held.

        Where a task is lost meanwhile for which another stands in, a step that writes nothing is run there.
        """
        for _ in range(TRIES if runner.keepers and not self.writes else 1):
            registered = self.registered
            if registered is None or self.stand_ins is not runner.stand_ins:
                registered = await self.register(runner)
            for keeper in runner.keepers if self.written else ():
                await keeper.will_write(self.written)
            try:
                came = await runner.run(registered, arrays, number=number, seed=seed)
                break
            except EndedAnyway as ended:
                raise EndedAnyway(self._answers(ended.values)) from None
            except (LinkBroken, NodeLost) as error:
                failed, number = error, self._fresh()
        else:
            raise failed
        if self.written:
            for keeper in runner.keepers:
                await keeper.copy_written(self.written)
        return self._answers(came)

    def _answers(self, came: Sequence[Array]) -> Sequence[Array]:
        client = self.compiled.client
        return came if client is None else client.answers(came)

    def arrays(self, values: Sequence[Any]) -> list[Array]:
        """The fed values as C-contiguous arrays; raises `FeedError` for one that does not fit its tensor."""
        if len(values) != len(self._fits):
            takes = f"the step takes {len(self.feeds)} values, got {len(values)}"
            raise FeedError(f"{user_site()}: {takes}; its feeds are {_listed(t.op.name for t in self.feeds)}")
        return [
            value
            if type(value) is np.ndarray and value.dtype == dtype and value.shape == dims and value.flags.c_contiguous
            else as_feed(tensor, value, self._copy)
            for (tensor, dtype, dims), value in zip(self._fits, values, strict=True)
        ]

    def in_order(self, values: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """A value per feed, of those given in order and those given by their feed's name, as functions take them.

        Raises `FeedError` for a name that is no feed's, a feed that is given twice, and one that is not given.
        """
        places, given = self._places(), dict(enumerate(values))
        feeds = f"its feeds are {_listed(tensor.op.name for tensor in self.feeds)}"
        for name, value in named.items():
            place = places.get(name)
            if place is None:
                raise FeedError(f"{user_site()}: no feed of the step is named {name!r}; {feeds}")
            if place in given:
                raise FeedError(f"{user_site()}: the step is given {name!r} twice, in order and by name; {feeds}")
            given[place] = value
        missing = [tensor.op.name for place, tensor in enumerate(self.feeds) if place not in given]
        if missing:
            raise FeedError(f"{user_site()}: the step is given no value for {_listed(missing)}; {feeds}")
        return [given[place] for place in range(len(given))]

    def _places(self) -> dict[str, int]:
        """Feeds by their name, and by what follows the scopes in it, where that is no other's."""
        whole = _unique([tensor.op.name for tensor in self.feeds])
        return _unique([tensor.op.name.rpartition("/")[2] for tensor in self.feeds]) | whole

    def direct(self, fallback: Callable[..., Any]) -> Direct:
        """A callable that runs this step at once where it may, and else is ``fallback``."""
        leaves, form = self._leaves(), self._structure
        if form == LEAF:
            return Direct(fallback, leaves, None)
        outputs = [leaf for leaf in leaves if leaf is not None]
        distinct = range(len(set(outputs)))
        if len(outputs) > len(distinct):
            return Direct(fallback, distinct, list, partial(self._repeat, leaves))
        plain = form.kind in (list, tuple) and all(part == LEAF for part in form.parts)
        return Direct(fallback, leaves, form.kind) if plain else Direct(fallback, leaves, list, form.rebuild)

    def _leaves(self) -> list[int | None]:
        """Of each leaf of the answer, which of the plan's distinct fetches it is; None for an operation."""
        plans = self.compiled.plans.values()
        fetches = iter(next(iter(plans)).fetches if self.compiled.client is None else range(len(self._wanted)))
        places: dict[int, int] = {}
        return [
            places.setdefault(next(fetches), len(places)) if isinstance(value, Tensor) else None
            for value in self._wanted
        ]

    def _repeat(self, leaves: Sequence[int | None], values: Sequence[Any]) -> Any:
        """The answer made of distinct values, each leaf with memory of its own."""
        given: set[int] = set()
        own: list[Any] = []
        for leaf in leaves:
            value = None if leaf is None else values[leaf]
            own.append(self._copy(value) if leaf in given and isinstance(value, np.ndarray) else value)
            given.update(() if leaf is None else (leaf,))
        return self._structure.rebuild(own)

    def answer(self, values: Sequence[Array]) -> Any:
        """The fetched values in the form they were asked for in."""
        if self._single:
            return _scalar(values[0])
        left = iter(values)
        return self._structure.rebuild([_scalar(next(left)) if isinstance(v, Tensor) else None for v in self._wanted])


def _unique(names: Sequence[str]) -> dict[str, int]:
    """The places of the names that there are once."""
    return {name: place for place, name in enumerate(names) if names.count(name) == 1}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _scalar(array: Array) -> Any:
    return array if array.ndim else array[()]


def _changed(values: Sequence[Any], arrays: Sequence[Array]) -> bool:
    """Whether some of the values had to be made arrays of: those may be what a plan is for."""
    return any(array is not value for array, value in zip(arrays, values, strict=True))


@valueclass
class AwaitedRun:
    """A run that has to be awaited: its values, checked, and its number."""

    arrays: Sequence[Array]
    number: int


class CompiledStep:
    """A step made ready: ``await step(*values)`` with one value per feed, in order or by the feed's name."""

    def __init__(self, session: Inside, step: Step) -> None:
        self._session = session
        self._step = step
        self._direct: Direct | None = None
        self._call: Callable[..., Any] = self._attempt
        self._left = YIELD_EVERY  # runs until others have a turn

    @telling
    def __repr__(self) -> str:
        return f"{self._step}, of {self._session!r}"

    async def __call__(self, /, *values: Any, **named: Any) -> Any:
        try:
            answer = self._call(*self._step.in_order(values, named)) if named else self._call(*values)
            if type(answer) is AwaitedRun:
                return await self._session._run(self._step, answer.arrays, number=answer.number)
        except BaseException as error:
            shorten(error)
            raise
        self._left -= 1
        if not self._left:
            self._left = YIELD_EVERY
            await asyncio.sleep(0)  # a loop over short steps must not starve the rest of the program
        return answer

    def _attempt(self, *values: Any) -> Any:
        arrays = self._step.arrays(values)
        if self._step.runs_elsewhere:
            return AwaitedRun(arrays, self._session.fresh_number())
        if _changed(values, arrays):
            return self._call(*arrays)
        return self._session._attempt(self._step, arrays, self._choose)

    def _choose(self, plan: Any) -> None:
        if self._direct is None:
            self._direct = self._step.direct(self._attempt)
            self._call = self._direct.call
        self._direct.choose(plan)

    def blocking(self, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> Callable[..., Any]:
        """The step as a plain callable, for any thread; ``wait`` runs a coroutine where runs are awaited."""
        session, step = self._session, self._step

        def call(*values: Any, **named: Any) -> Any:
            try:
                if named:
                    return direct.call(*step.in_order(values, named))
                arrays = step.arrays(values)
                if _changed(values, arrays):
                    return direct.call(*arrays)
                answer = session._attempt(step, arrays, direct.choose, math.inf)  # the caller waits in any case
                if type(answer) is AwaitedRun:
                    return wait(session._run(step, answer.arrays, number=answer.number))
            except BaseException as error:
                shorten(error)
                raise
            return answer

        direct = step.direct(call)
        return direct.call
