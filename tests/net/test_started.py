"""What a step that was started on a node comes to: when its end is said, with what, and that nothing is left then.

Plans are stood in for, so that it is the test that says what a run does, and when.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from cluster_plans import PS, WORKERS

from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    InternalError,
    LinkBroken,
    NodeLost,
    ResourceError,
    StepCancelled,
)
from flowrt.base.plan import PlanNode
from flowrt.net.node.started import Started
from flowrt.net.wire.steps import Done, Start
from flowrt.sched.host.host import Host
from flowrt.sched.host.rendezvous import DEAD, Pushed

if TYPE_CHECKING:
    from flowrt.sched.host.host import RunContext

EPOCH, NUMBER, SEED, FEED = "epoch", 3, 7, "feed"
KEY = (EPOCH, NUMBER)
START = Start(NUMBER, 5, SEED, (FEED,))
PEER, OTHER = WORKERS
GONE = LinkBroken("the way is gone")


@dataclass(eq=False)
class Run:
    """A run by the step machine, which goes as the test says; ``rest`` is what it comes to in a task."""

    context: RunContext
    look: Callable[[], None]
    rest: asyncio.Future[Exception | None]
    done: bool = False
    needs_task: bool = False
    error: Exception | None = None
    stopped: bool = False

    def fetched(self) -> Sequence[Any]:
        return "alive", DEAD

    def stop(self) -> None:
        self.stopped = True

    async def finish(self) -> Exception | None:
        return await self.rest


@dataclass(eq=False)
class Ready:
    """A registered plan, which one call answers with ``made``; if that is None, the step machine runs it."""

    made: list[Any] | None = None
    comes: tuple[int, ...] = ()
    goes: tuple[tuple[PlanNode, int], ...] = ()
    fetches: int = 0
    silent: bool = False
    ends_at_once: bool = False
    given: list[tuple[Any, ...]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def executor(self) -> Ready:
        return self

    def run_now(self, *given: Any) -> list[Any] | None:
        self.given.append(given)
        return self.made

    def received(self, edges: Sequence[int], values: Sequence[Any]) -> dict[int, Any]:
        return dict(zip(edges, values, strict=True))

    def begin(self, feeds: Sequence[Any], context: RunContext, look: Callable[[], None]) -> Run:
        assert feeds == START.feeds
        self.runs.append(Run(context, look, asyncio.get_running_loop().create_future(), self.ends_at_once))
        return self.runs[-1]


class Peers:
    """The other tasks: what is pushed there, and what becomes of it, by the peer; ways are opened once asked for."""

    def __init__(self, **becomes: Pushed) -> None:
        self.becomes: dict[str, Pushed] = dict(zip(WORKERS, becomes.values(), strict=False))
        self.pushed: list[tuple[Any, ...]] = []
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, peer: str, key: Any, edge: int, value: Any) -> Pushed:
        self.pushed.append((peer, key, edge, value))
        return self.becomes.get(peer, Pushed.SENT)

    async def open_way(self, peer: str, key: Any) -> None:
        await self.asked
        self.becomes[peer] = Pushed.SENT


class Node:
    """A task on which a master starts steps, and what it is told of their ends."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.host, self.tasks, self.said = Host(PS, threads=1), tasks, list[Done]()
        self.meet = self.host.rendezvous
        self.steps = Started(self.host, EPOCH, self.said.append, lambda error, what: (type(error).__name__, what))

    def start(self, ready: Ready | None, start: Start = START) -> None:
        self.steps.start(start, ready, self.tasks)  # type: ignore[arg-type]

    def begin(self, start: Start = START) -> Run:
        """Start what the step machine runs."""
        ready = Ready()
        self.start(ready, start)
        (run,) = ready.runs
        return run

    def reach(self, **becomes: Pushed) -> Peers:
        self.host.remote = peers = Peers(**becomes)  # type: ignore[assignment]
        return peers

    def ended(self) -> Done:
        """The one end that was said, after which nothing is left."""
        (done,) = self.said
        self.assert_over()
        return done

    def assert_over(self) -> None:
        assert (len(self.steps), self.meet.open_steps) == (0, 0)
        with pytest.raises((StepCancelled, ResourceError)):  # as it was closed
            self.meet.open(KEY)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks:
        made = Node(tasks)
        yield made
    await made.host.aclose()


async def turns() -> None:
    """Have all happen that does by itself."""
    for _ in range(10):
        await asyncio.sleep(0)


def sending(edge: int, peer: str) -> PlanNode:
    return PlanNode("send", "send", (0,), (), {"edge": edge, "peer": peer})


def failed(error: type[Exception]) -> Done:
    return Done(NUMBER, error=error.__name__, text=f"step {NUMBER}")


ABORTED = Done(NUMBER, error="StepCancelled", text=f"step {NUMBER} was aborted")
CANCELLED = failed(StepCancelled)


# ── by one call ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_runs_at_once_is_answered_at_once(node: Node) -> None:
    ready = Ready(["alive", DEAD])
    node.start(ready)
    assert node.ended() == Done(NUMBER, ("alive", None))
    assert ready.given == [((FEED,), NUMBER, SEED)]


async def test_of_a_silent_plan_only_a_failure_is_said(node: Node) -> None:
    node.start(Ready([], silent=True))
    assert node.said == []
    node.assert_over()
    other = Start(NUMBER + 1, 5, SEED, (FEED,))
    ready = Ready(silent=True)
    node.start(ready, other)
    ready.runs[0].error = ResourceError("full")
    ready.runs[0].look()
    assert [(done.number, done.error) for done in node.said] == [(NUMBER + 1, "ResourceError")]


async def test_a_plan_that_is_not_registered_fails_the_step(node: Node) -> None:
    node.start(None)
    assert node.ended() == failed(InternalError)


async def test_a_step_on_a_closed_node_fails(node: Node) -> None:
    await node.host.aclose()
    ready = Ready([])
    node.start(ready)
    assert node.ended() == failed(ClosedError)
    assert not ready.given


async def test_a_step_is_started_once(node: Node) -> None:
    run = node.begin()
    with pytest.raises(BrokenStream, match=f"step {NUMBER} was started twice"):
        node.start(Ready([]))
    run.done = True
    run.look()
    assert node.ended() == Done(NUMBER, ("alive", None))


# ── once all has come ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", [(), (4,), (9,), (4, 9)], ids=str)
async def test_what_others_push_is_waited_for_and_given_behind_the_feeds(node: Node, before: tuple[int, ...]) -> None:
    for edge in before:
        node.meet.arrive(KEY, edge, f"value {edge}")  # type: ignore[arg-type]
    ready = Ready([], comes=(9, 4))
    node.start(ready)
    for edge in {4, 9}.difference(before):
        assert not ready.given
        assert len(node.steps) == 1
        node.meet.arrive(KEY, edge, f"value {edge}")  # type: ignore[arg-type]
    assert ready.given == [((FEED, "value 9", "value 4"), NUMBER, SEED)]
    assert node.ended() == Done(NUMBER)


async def test_a_step_that_is_aborted_while_it_waits_never_runs(node: Node) -> None:
    ready = Ready([], comes=(4,))
    node.start(ready)
    node.steps.abort(NUMBER)
    node.meet.arrive(KEY, 4, "value")  # type: ignore[arg-type]
    assert node.ended() == CANCELLED
    assert not ready.given


async def test_what_the_step_is_closed_with_while_it_waits_is_why_it_fails(node: Node) -> None:
    ready = Ready([], comes=(4,))
    node.start(ready)
    node.meet.close(KEY, ResourceError("full"))
    assert node.ended() == failed(ResourceError)
    assert not ready.given


# ── what it pushes ───────────────────────────────────────────────────────────────────────────────────────────────────

GOES = ((sending(8, PEER), 1), (sending(9, OTHER), 2))
MADE = ["fetched", "one", "two"]


async def test_all_that_goes_is_pushed_and_the_fetches_are_answered(node: Node) -> None:
    peers = node.reach()
    node.start(Ready(MADE, goes=GOES, fetches=1))
    assert peers.pushed == [(PEER, KEY, 8, "one"), (OTHER, KEY, 9, "two")]
    assert node.ended() == Done(NUMBER, ("fetched",))


async def test_what_is_waited_for_here_is_not_pushed(node: Node) -> None:
    peers, taken = node.reach(), node.meet.expect(KEY, 9)
    node.start(Ready(MADE, goes=GOES, fetches=1))
    assert peers.pushed == [(PEER, KEY, 8, "one")]
    assert await taken == "two"
    assert node.ended() == Done(NUMBER, ("fetched",))


async def test_a_step_has_ended_once_what_was_announced_was_taken(node: Node) -> None:
    node.reach(one=Pushed.ANNOUNCED)
    node.start(Ready(MADE, goes=GOES, fetches=1))
    await turns()
    assert not node.said
    assert node.meet.holds(KEY, 8)
    assert not node.meet.holds(KEY, 9)
    assert await node.meet.take(KEY, 8) == "one"
    await turns()
    assert node.ended() == Done(NUMBER, ("fetched",))


async def test_where_there_are_no_other_tasks_what_goes_waits_to_be_taken(node: Node) -> None:
    node.start(Ready(MADE, goes=GOES, fetches=1))
    assert await node.meet.take(KEY, 8) == "one"
    assert await node.meet.take(KEY, 9) == "two"
    await turns()
    assert node.ended() == Done(NUMBER, ("fetched",))


async def test_where_there_is_no_way_one_is_opened(node: Node) -> None:
    peers = node.reach(one=Pushed.NO_WAY)
    node.start(Ready(MADE, goes=GOES, fetches=1))
    await turns()
    assert not node.said
    peers.asked.set_result(None)
    await turns()
    assert peers.pushed[-1] == (PEER, KEY, 8, "one")
    assert node.ended() == Done(NUMBER, ("fetched",))


async def test_a_way_that_cannot_be_opened_fails_the_step(node: Node) -> None:
    peers = node.reach(one=Pushed.NO_WAY)
    node.start(Ready(MADE, goes=GOES, fetches=1))
    peers.asked.set_exception(GONE)
    await turns()
    assert node.ended() == failed(LinkBroken)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_step_is_aborted_while_a_way_is_opened(node: Node, begun: bool) -> None:
    node.reach(one=Pushed.NO_WAY)
    node.start(Ready(MADE, goes=GOES, fetches=1))
    if begun:
        await turns()
    node.steps.abort(NUMBER, GONE)
    await turns()
    assert node.ended() == failed(LinkBroken)


# ── by the step machine ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_machine_finds_what_came_with_the_start_and_is_told_which_run_it_is(node: Node) -> None:
    run = node.begin(Start(NUMBER, 5, SEED, (FEED,), (4,), ("value",)))
    assert node.meet.pick(KEY, 4) == "value"
    assert (run.context.key, run.context.number, run.context.seed) == (KEY, NUMBER, SEED)
    run.look()
    assert (len(node.steps), node.said) == (1, [])
    run.done = True
    run.look()
    assert node.ended() == Done(NUMBER, ("alive", None))
    assert run.stopped


async def test_what_the_machine_has_done_at_once_is_answered_at_once(node: Node) -> None:
    node.start(Ready(ends_at_once=True))
    assert node.ended() == Done(NUMBER, ("alive", None))


async def test_a_run_that_fails_ends_its_step_though_more_could_go_on(node: Node) -> None:
    run = node.begin()
    run.error, run.needs_task = ResourceError("full"), True
    run.look()
    assert node.ended() == failed(ResourceError)
    assert run.stopped
    run.look()
    assert len(node.said) == 1


@pytest.mark.parametrize("error", [None, ResourceError("full")], ids=repr)
async def test_what_needs_a_task_ends_in_one(node: Node, error: Exception | None) -> None:
    run = node.begin()
    run.needs_task = True
    run.look()
    run.needs_task, run.done = False, True
    run.look()  # which is the task's from now on
    await turns()
    assert not node.said
    run.rest.set_result(error)
    await turns()
    assert node.ended() == (Done(NUMBER, ("alive", None)) if error is None else failed(ResourceError))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("needs_task", [False, True])
async def test_a_step_is_aborted_as_the_master_says_why(node: Node, needs_task: bool, turned: bool) -> None:
    run = node.begin()
    run.needs_task = needs_task
    run.look()
    if turned:
        await turns()
    node.steps.abort(NUMBER, GONE)
    await turns()
    assert node.ended() == failed(LinkBroken)
    assert run.stopped


async def test_a_task_that_is_cancelled_by_others_ends_its_step_as_aborted(node: Node) -> None:
    run = node.begin()
    run.needs_task = True
    run.look()
    await turns()
    run.rest.cancel()
    await turns()
    assert node.ended() == CANCELLED


# ── ends of steps that are not in progress, and of all ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("why", "said"), [(None, ABORTED), (NodeLost("gone"), Done(NUMBER, (), "NodeLost", "gone"))])
async def test_of_a_step_that_is_not_in_progress_the_end_is_said_and_nothing_that_came_is_kept(
    node: Node, why: Any, said: Done
) -> None:
    node.meet.arrive(KEY, 4, "value")  # type: ignore[arg-type]
    node.steps.abort(NUMBER, why)
    assert node.ended() == said


async def test_all_end_with_their_master(node: Node) -> None:
    waiting, computing = node.begin(), node.begin(Start(NUMBER + 1, 5, SEED, (FEED,)))
    computing.needs_task = True
    computing.look()
    await turns()
    node.steps.abort_all()
    await turns()
    assert [(done.number, done.error) for done in node.said] == [(n, "StepCancelled") for n in (NUMBER, NUMBER + 1)]
    assert waiting.stopped
    assert computing.stopped
    node.assert_over()


async def test_what_a_step_held_that_is_aborted_in_its_task_is_let_go_without_a_collection(node: Node) -> None:
    ready = Ready(MADE, goes=GOES, fetches=1)
    gone = weakref.ref(ready)
    node.reach(one=Pushed.NO_WAY)
    node.start(ready)
    del ready
    await turns()
    gc.disable()
    try:
        node.steps.abort(NUMBER)
        await turns()
        assert gone() is None
    finally:
        gc.enable()
    assert node.ended() == CANCELLED
