"""A registered step, and a step in progress, as their master keeps them.

Pure but for the future that wakes who waits; talking to the tasks is `master`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrt.base.device import CLIENT
from flowrt.base.errors import DeadTensorError, StepCancelled
from flowrt.base.valueclass import valueclass
from flowrt.net.master.closing import close
from flowrt.net.master.ends import ends_of
from flowrt.net.wire.messages import consequence
from flowrt.sched.host.rendezvous import Dead

if TYPE_CHECKING:
    from flowrt.base.errors import FlowrtError
    from flowrt.base.plan import Plan
    from flowrt.base.spec import Spec
    from flowrt.sched.host.rendezvous import Array


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A step that the nodes have plans for. ``fetches``: the edge each fetch comes by, or the feed that answers it."""

    plan: int
    plans: Mapping[str, Plan]  # by task
    tasks: tuple[str, ...]
    feeds: tuple[tuple[int, ...], ...]  # by task, which feeds its plan is fed
    sent: tuple[tuple[int, int, str], ...]  # what is to be received: which feed, by which edge, by whom
    fetches: tuple[int | Feed, ...]
    fetched: Mapping[str, tuple[int, ...]]  # by task, the edges of the fetches of its plan
    pulled: tuple[tuple[int, str], ...]  # the other edges, with their tasks
    specs: Mapping[int, Spec]  # of what comes by each edge
    names: Mapping[int, str]  # what comes by each edge, for people
    ends: Mapping[str, tuple[str, ...]]  # by task: which have ended it well if that one has

    def is_silent(self, task: str) -> bool:
        """Whether another task's end says that this one has ended well."""
        return any(task in ended for other, ended in self.ends.items() if other != task)


@valueclass
class Feed:
    """A fetch that is simply feed ``position``."""

    position: int


class OpenStep:
    """A step in progress: which tasks have yet to end it, what came, what went wrong."""

    def __init__(self, number: int, registered: Registered) -> None:
        self.number = number
        self.registered = registered
        self.waiting = set(registered.tasks)
        self.told: set[str] = set()  # the tasks that will hear of its start
        self.values: dict[int, Array | Dead] = {}
        self.errors: list[tuple[int, FlowrtError]] = []
        self.aborted = False
        self.excused: set[str] = set()  # tasks of which it is not known whether they have ended the step
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # it failed, or all have ended it
        if not self.waiting:  # nothing but feeds is fetched, or nothing
            self._tell()

    def end(self, task: str) -> None:
        """``task`` has ended the step well, and so have those that this says it of."""
        ended = self.registered.ends[task]
        self.waiting.difference_update(ended)
        self.excused.difference_update(ended)
        if not self.waiting:
            self._tell()

    def settle(self, task: str, error: FlowrtError, *, remote: bool = False) -> None:
        """``task`` has failed, or never will end the step. What a task says of others counts less than what we see."""
        if self.aborted and isinstance(error, StepCancelled):  # as it was told; before, it may have ended it well
            self.excuse(task)
            return
        self.waiting.discard(task)
        self.errors.append((2 * consequence(error) + remote, error))
        self._tell()

    def excuse(self, task: str) -> None:
        """Wait for ``task`` no more, of which it is not known whether it has ended the step."""
        if task not in self.waiting:
            return
        self.waiting.discard(task)
        self.excused.add(task)
        if not self.waiting:
            self._tell()

    @property
    def is_whole(self) -> bool:
        """Whether every task has ended it well, and all came that was fetched."""
        came = all(isinstance(fetch, Feed) or fetch in self.values for fetch in self.registered.fetches)
        return came and not (self.waiting or self.errors or self.excused)

    def fail(self, error: FlowrtError) -> None:
        """End the step because of ``error``."""
        self.errors.append((2 * consequence(error) + 1, error))
        self._tell()

    def next_news(self) -> asyncio.Future[None]:
        """What is done once there are news again."""
        self.news = self.news.get_loop().create_future()
        return self.news

    def _tell(self) -> None:
        if not self.news.done():
            self.news.set_result(None)

    def fetches(self, feeds: Sequence[Array]) -> list[Array]:
        """What the step was run for, each with memory of its own; raises `DeadTensorError` where that is dead."""
        found: list[Array] = []
        given: set[int | Feed] = set()
        for fetch in self.registered.fetches:
            value = self._fetched(fetch, feeds)
            found.append(value.copy() if fetch in given else value)
            given.add(fetch)
        return found

    def _fetched(self, fetch: int | Feed, feeds: Sequence[Array]) -> Array:
        if isinstance(fetch, Feed):
            return np.array(feeds[fetch.position])
        value = self.values[fetch]
        if isinstance(value, Dead):
            raise DeadTensorError(self.registered.names[fetch])
        return value

    def error(self) -> FlowrtError:
        """The error that explains the others best."""
        return min(self.errors, key=lambda ranked: ranked[0])[1]


def describe(
    plan: int,
    plans: Mapping[str, Plan],
    feeds: Sequence[Sequence[tuple[int, str]]],
    fetches: Sequence[tuple[int, str] | int],
) -> Registered:
    """How values travel between the client and the tasks of a step."""
    sends = {edge: (task, *sent) for task, p in plans.items() for edge, sent in _sent_to_client(p).items()}
    fed = {(edge, task): feed for feed, ways in enumerate(feeds) for edge, task in ways}
    closed = {task: close(p, {edge for edge, whose in fed if whose == task}) for task, p in plans.items()}
    with_end = {edge for each in closed.values() for edge in each.fetched}
    with_start = {(edge, task) for task, each in closed.items() for edge in each.fed}
    return Registered(
        plan,
        {task: each.plan for task, each in closed.items()},
        tuple(plans),
        tuple(tuple([fed[edge, task] for edge in each.fed]) for task, each in closed.items()),
        tuple([(feed, *way) for way, feed in fed.items() if way not in with_start]),
        tuple(Feed(fetch) if isinstance(fetch, int) else fetch[0] for fetch in fetches),
        {task: each.fetched for task, each in closed.items()},
        tuple([(edge, task) for edge, (task, _, _) in sends.items() if edge not in with_end]),
        {edge: spec for edge, (_, spec, _) in sends.items()},
        {edge: name for edge, (_, _, name) in sends.items()},
        ends_of({task: each.plan for task, each in closed.items()}),
    )


def _sent_to_client(plan: Plan) -> dict[int, tuple[Spec, str]]:
    """By edge: the static spec of what a plan sends to the client, and what to say if it is dead."""
    specs = plan.value_specs()
    return {
        node.attrs["edge"]: (specs[node.inputs[0]], _why_dead(plan, node.inputs[0]))
        for node in plan.nodes
        if node.op == "send" and node.attrs["peer"] == CLIENT
    }


def _why_dead(plan: Plan, value: int) -> str:
    """The switch that ``value`` depends on, if it is of this plan."""
    starts = plan.value_starts()
    producer = {v: n for n in range(len(plan.nodes)) for v in range(starts[n], starts[n + 1])}
    fetched = plan.nodes[producer[value]].where() if value in producer else plan.feeds[value].name
    seen: set[int] = set()
    look = [value]
    while look:
        position = producer.get(look.pop())
        if position is None or position in seen:
            continue
        seen.add(position)
        if plan.nodes[position].op == "switch":
            return f"{fetched} was fetched, but {plan.nodes[position].where()} took the other side"
        look.extend(plan.nodes[position].inputs)
    return f"{fetched} was fetched, but it lies on the side of a switch that was not taken"
