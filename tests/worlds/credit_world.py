"""Programs over three tasks whose credit is for two values, with the shipped classes and a network that takes its time.

What a program does is drawn such that it always comes to an end where credit is unlimited: an element that is taken
from a queue goes only to queues of a higher level, and in the end as many are taken as are put in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from cluster_plans import CLIENT, PS, WORKERS, Writer

from flowrt.base.spec import Spec
from flowrt.net.link import Allowance, LinkStore, TensorLink, is_large
from flowrt.net.node.plans import ReadyPlan
from flowrt.net.node.started import Started
from flowrt.net.wire.frames import FrameReader, Piece, allocate_array
from flowrt.net.wire.steps import Done, Start
from flowrt.sched.executor import Executor
from flowrt.sched.host.host import Host
from flowrt.sched.host.rendezvous import Announced, Budget, Pushed, Rendezvous

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator

    from flowrt.sched.host.rendezvous import StepKey

TASKS = (PS, *WORKERS)
SIZE = 1024
KNOWN, OPEN = Spec("float64", (SIZE,)), Spec("float64", (None,))
NBYTES = 8 * SIZE
EPOCH = "epoch"
LEVELS = 3


class Wire:
    """One end of a connection: what it is given arrives at the ``other`` end, in order, and late."""

    def __init__(self, rng: random.Random) -> None:
        self.other: Wire
        self.closed = False
        self._rng = rng
        self._way: deque[tuple[Any, asyncio.Future[None]]] = deque()
        self._hear: Callable[[Any], None] = lambda data: None

    def post_frame(self, framed: list[Piece]) -> None:
        reader = FrameReader(lambda data, size: self._begin(data))
        whole = b"".join(framed)
        reader.get_buffer()[: len(whole)] = whole
        reader.buffer_updated(len(whole))

    async def send(self, data: Any) -> None:
        await self._begin(data)

    def _begin(self, data: Any) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        self._way.append((data, arrived))
        loop.call_later(self._rng.random() * 1e-3, self._arrive)
        return arrived

    def _arrive(self) -> None:
        data, arrived = self._way.popleft()
        if not arrived.cancelled():
            arrived.set_result(None)
        if not self.other.closed:
            self.other._hear(data)

    async def listen(self, hear: Callable[[Any], None]) -> None:
        self._hear = hear
        await asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed = True


@dataclass
class Step:
    """The plans of a step by task, what it is fed and what is fetched."""

    writers: dict[str, Writer] = field(default_factory=dict)
    feeds: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    fetches: list[tuple[int, str, Spec]] = field(default_factory=list)
    queues: bool = False
    edges: int = 0

    def on(self, task: str) -> Writer:
        return self.writers.setdefault(task, Writer(task))

    def edge(self) -> int:
        self.edges += 1
        return self.edges - 1


class Program:
    """Steps drawn by ``rng``, and those that drain the queues at last."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self._rng = rng
        self._level = {f"queue {i}": i // 2 for i in range(2 * LEVELS)}
        self._place = {queue: rng.choice(TASKS) for queue in self._level}
        self._full = dict.fromkeys(self._level, 0)
        self._capacity = {queue: rng.choice([1, 1, 2]) for queue in self._level}
        self.steps = [self._step() for _ in range(count)]
        self.drains = [self._drain(queue) for queue, left in self._full.items() for _ in range(left)]
        rng.shuffle(self.drains)

    def _step(self) -> Step:
        step, added = Step(), list[str]()
        for _ in range(self._rng.choice([1, 1, 2])):
            self._chain(step, added)
        for queue in added:
            self._full[queue] += 1
        return step

    def _chain(self, step: Step, added: list[str]) -> None:
        rng = self._rng
        task, value, level = self._source(step)
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.4:
                near = self._near(step, task)
                value = step.on(task).node("add", value, near, out=OPEN)
            if rng.random() < 0.8:
                task, value = self._hop(step, task, value)
        higher = [queue for queue, its in self._level.items() if its >= level]
        if higher and rng.random() < 0.6:
            queue = rng.choice(higher)
            if self._place[queue] != task:
                task, value = self._hop(step, task, value, self._place[queue])
            step.on(task).node("enqueue", value, **self._queue(queue))
            added.append(queue)
            step.queues = True
        else:
            self._fetch(step, task, value)

    def _source(self, step: Step) -> tuple[str, int, int]:
        rng = self._rng
        ready = [queue for queue, count in self._full.items() if count]
        if ready and rng.random() < 0.3:
            queue = rng.choice(ready)
            self._full[queue] -= 1
            step.queues = True
            return self._place[queue], self._dequeue(step, queue), self._level[queue] + 1
        task = rng.choice(TASKS)
        return task, self._near(step, task), 0

    def _near(self, step: Step, task: str) -> int:
        """A value that is fed, made here, or made elsewhere and received here."""
        way = self._rng.randrange(3)
        if way == 0:
            edge = step.edge()
            step.feeds[edge] = np.ones(SIZE)
            return step.on(task).recv(edge, CLIENT, self._rng.choice([KNOWN, OPEN]))
        origin = task if way == 1 else self._rng.choice(TASKS)
        value = step.on(origin).node("constant", out=KNOWN, value=np.ones(SIZE))
        return value if origin == task else self._hop(step, origin, value, task)[1]

    def _hop(self, step: Step, task: str, value: int, to: str = "") -> tuple[str, int]:
        to = to or self._rng.choice([other for other in TASKS if other != task])
        edge = step.edge()
        step.on(task).send(value, edge, to)
        return to, step.on(to).recv(edge, task, self._rng.choice([KNOWN, OPEN]))

    def _fetch(self, step: Step, task: str, value: int) -> None:
        edge = step.edge()
        step.on(task).send(value, edge, CLIENT)
        step.fetches.append((edge, task, self._rng.choice([KNOWN, OPEN])))

    def _dequeue(self, step: Step, queue: str) -> int:
        return step.on(self._place[queue]).node("dequeue", out=OPEN, **self._queue(queue))

    def _drain(self, queue: str) -> Step:
        step = Step(queues=True)
        self._fetch(step, self._place[queue], self._dequeue(step, queue))
        return step

    def _queue(self, queue: str) -> dict[str, Any]:
        return {
            "resource": queue,
            "container": "",
            "capacity": self._capacity[queue],
            "order": ("fifo",),
            "dtypes": ("float64",),
            "shapes": ((None,),),
        }


class Task:
    """A node that is one in all but its sockets: how its steps exchange values with others."""

    def __init__(self, task: str, credit: int, rng: random.Random) -> None:
        self.host = Host(task, threads=1)
        self.host.lanes.run = self._compute  # type: ignore[method-assign]
        self._rng = rng
        self.host.budget = Budget(2 * NBYTES)
        self.host.credit.limit = credit
        self.host.remote = self  # type: ignore[assignment]
        self.store = LinkStore(
            self.host.rendezvous,
            self.host.budget,
            Allowance(NBYTES),
            lambda epoch: True,
            allocate_array,
            credit=self.host.credit,
        )
        self.links: dict[str, TensorLink] = {}
        self.ended: dict[int, asyncio.Future[Done]] = {}
        self.started = Started(self.host, EPOCH, self._end, lambda error, what: (type(error).__name__, f"{error!r}"))

    def _end(self, done: Done) -> None:
        if not self.ended[done.number].done():
            self.ended[done.number].set_result(done)

    async def _compute(self, work: Callable[..., Any], *args: Any, stop: Any = None) -> Any:
        """As in a lane, but in the time of the simulation."""
        await asyncio.sleep(self._rng.random() * 1e-3)
        return work(*args)

    async def pull(
        self, peer: str, key: StepKey, edge: int, spec: Spec, announced: int | None = None, expected: int = 0
    ) -> Any:
        return await self.links[peer].pull(key, edge, spec, announced, expected)

    def pulls(self, peer: str, spec: Spec) -> bool:
        return peer == CLIENT or is_large(spec)

    def push(self, peer: str, key: StepKey, edge: int, value: Any) -> Pushed:
        return Pushed.SENT if self.links[peer].push(key, edge, value) else Pushed.ANNOUNCED


class World:
    """Three tasks and a client, linked to one another while `open` runs; ``credit`` is each task's, in bytes."""

    def __init__(self, rng: random.Random, credit: int) -> None:
        self.rng = rng
        self.tasks = {task: Task(task, credit, rng) for task in TASKS}
        self._meet = Rendezvous()
        self._store = LinkStore(self._meet, Budget(1 << 40), Allowance(4 * NBYTES), lambda epoch: True, allocate_array)
        self._links: dict[str, TensorLink] = {}
        self._group: asyncio.TaskGroup
        self._numbers = iter(range(1 << 30))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as self._group:
            every: list[TensorLink] = []
            names = [CLIENT, *TASKS]
            for at, one in enumerate(names):
                for other in names[at + 1 :]:
                    every += self._link(one, other)
            await asyncio.sleep(0)
            yield
            for link in every:
                link.close()
        for task in self.tasks.values():
            await task.host.aclose()

    def _link(self, one: str, other: str) -> list[TensorLink]:
        near, far = Wire(self.rng), Wire(self.rng)
        near.other, far.other = far, near
        ends = []
        for wire, here, there in ((near, one, other), (far, other, one)):
            store = self._store if here == CLIENT else self.tasks[here].store
            link = TensorLink(wire, there, store)  # type: ignore[arg-type]
            (self._links if here == CLIENT else self.tasks[here].links)[there] = link
            self._group.create_task(link.run())
            ends.append(link)
        return ends

    def left(self) -> tuple[int, int, int]:
        """The bytes of credit, ways and places in lines that are still taken."""
        hosts = [task.host for task in self.tasks.values()]
        lines = [queue for host in hosts for queue in host._queues.values()]
        return (
            sum(host.credit.held for host in hosts),
            sum(host.credit.ways for host in hosts),
            sum(queue.statistics().waiting_enqueues for queue in lines),
        )

    async def run(self, step: Step) -> list[Done]:
        """Run a step; answers how it ended on each task. Cancelled, it is aborted."""
        number = next(self._numbers)
        key = (EPOCH, number)
        self._meet.open(key, step.feeds)
        loop = asyncio.get_running_loop()
        ended = {}
        for task in step.writers:
            ended[task] = self.tasks[task].ended[number] = loop.create_future()
        try:
            for task, writer in self.rng.sample(sorted(step.writers.items()), len(step.writers)):
                await asyncio.sleep(self.rng.random() * 1e-3)
                host = self.tasks[task].host
                ready = ReadyPlan(Executor(writer.plan(), host, tapes=False), {})
                self.tasks[task].started.start(Start(number, 0, 0, ()), ready, self._group)
            async with asyncio.TaskGroup() as group:
                for edge, task, spec in step.fetches:
                    group.create_task(self._fetch(key, edge, task, spec))
            await asyncio.wait(ended.values())  # which a cancellation leaves as they are
            return [end.result() for end in ended.values()]
        except asyncio.CancelledError:
            for task in ended:
                self.tasks[task].started.abort(number)
            await asyncio.wait(ended.values())
            raise
        finally:
            self._meet.close(key)

    async def _fetch(self, key: StepKey, edge: int, task: str, spec: Spec) -> None:
        announced, expected = None, 0
        if not is_large(spec):
            value = await self._meet.take(key, edge)
            if not isinstance(value, Announced):
                return
            announced, expected = value.nbytes or None, 1
        await self._links[task].pull(key, edge, spec, announced, expected)
