"""The driving side: one master registers plans with the nodes of a cluster and runs steps on them.

Law: a step is one small message to each task that takes part, and one back; everything else is pulled. A step ends when
every task of it has said so, or is lost, or is suspect and has been told: until then `Master.run` does not return, also
when cancelled, so nothing of an ended step goes on unseen. Of a step's errors, the one that the others followed from is
raised. Who is alive is `liveness`'s to decide; a lost task fails the steps it takes part in and no others.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flowrt.base import codec
from flowrt.base.device import CLIENT
from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    DeadTensorError,
    FlowrtError,
    InternalError,
    LinkBroken,
    ResourceError,
    as_error,
)
from flowrt.base.plan import Plan, plan_to_parts, too_large
from flowrt.net.link import INLINE, SMALL, Allowance, LinkStore, checked, is_large
from flowrt.net.master.inventory import answered, collect
from flowrt.net.master.joining import Joining
from flowrt.net.master.liveness import BEAT
from flowrt.net.master.meeting import spares_nobody
from flowrt.net.master.peers import Peers
from flowrt.net.master.steps import OpenStep, Registered, describe
from flowrt.net.stream.local import Local, way_between
from flowrt.net.wire.messages import (
    Abort,
    Answer,
    Ask,
    Command,
    Introduce,
    Introduced,
    Recruit,
    Register,
    Unregister,
    root_error,
    to_data,
    to_frame,
)
from flowrt.net.wire.steps import Done, Start, make_start
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.rendezvous import DEAD, Announced, Array, Budget, Listeners, Rendezvous, StepKey
from flowrt.sched.host.shielded import EndedAnyway, shielded

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.net.door.tls import Keys
    from flowrt.net.master.meeting import Spares
    from flowrt.net.peer import Peer


TRIES = 5  # to ask something of a task to which the way breaks again and again


class Master:
    """Drives the tasks at ``addresses`` (``{"/job:ps/task:0": (host, port)}``) while the block runs.

    ``peers`` are these tasks, and who of them is there. ``listeners`` hear what they post, and of ways to them that
    broke and are there again.

    ``tls`` are the keys of this side, which the way beyond this machine takes.
    ``name`` is the session's: a newer master of the same name takes over from an older one; without a name, it is
    nobody's successor. ``patience`` is how long, in seconds, opening waits for nodes that are not up yet, and less for
    those that it ``spares``; every ``beat`` seconds nodes are asked for a sign of life.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        token: str,
        *,
        tls: Keys | None = None,
        name: str = "",
        beat: float = BEAT,
        patience: float = 5.0,
        spares: Spares = spares_nobody,
        transfer_budget: int = 256 << 20,
    ) -> None:
        self.epoch = secrets.token_hex(16)
        self.name = name or f"unnamed {self.epoch}"
        self._patience, self._spares = patience, spares
        self._rendezvous = Rendezvous()
        budget = Budget(transfer_budget)
        self._memory = Memory()
        self._local = Local(self._memory, own=True)
        self.listeners = Listeners()
        self._store = LinkStore(
            self._rendezvous,
            budget,
            Allowance(),
            lambda epoch: epoch == self.epoch,
            self._memory.received,
            posted=self.listeners.hear,
            local=self._local,
            tls=tls,
        )
        self.peers = Peers(
            addresses,
            token,
            beat,
            self._store,
            hear=self._hear,
            gone=self._settle_steps,
            excused=self._excuse,
            back=lambda peer: self.listeners.broken(peer.task, ""),
            join=self._ship_all,
        )
        self._steps: dict[int, OpenStep] = {}
        self._plans: dict[int, Registered] = {}  # by the number of their plans
        self._numbers = itertools.count()
        self._joining = Joining(self.peers, self._ask, self._numbers)
        self._opened = self._closed = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # ── opening and closing ──

    async def open(self) -> None:
        """Connect to every task; one that is not up is awaited while this goes on, if another of its job is up.

        Raises `RemoteError` within 10 s for one that refuses, and for a job of which none is up.
        """
        if self._opened:
            raise ClosedError("a master is opened once; make another one")
        self._opened = True
        try:
            await self.peers.open(self.name, self.epoch, self._patience, self._spares)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End the steps in progress, part from the nodes and let everything go; twice is once."""
        if self._closed or not self._opened:
            return
        self._closed = True
        for step in self._steps.values():
            step.fail(ClosedError("the session was closed"))
        self.listeners.ended(self.epoch)
        try:
            await self.peers.aclose()
        finally:
            self._local.close()
            self._memory.reclaim()

    # ── who is there ──

    def way(self, one: str, other: str) -> str:
        """How bytes travel between two tasks, of which one may be the client: shared (memory), unix or tcp."""
        mine = self._local.host, self._local.way
        return way_between(*(mine if task == CLIENT else self.peers[task].local for task in (one, other)))

    def moved(self, task: str, place: tuple[str, int]) -> None:
        """Who starts the nodes says that the node of ``task`` is at ``place`` from now on."""
        if not self._closed:
            self._joining.moved(task, place)

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str] = frozenset()) -> None:
        """Wait until others than these are lost or suspect; raises `TakenOver` where another master has come."""
        await self.peers.wait_changed(lost, suspects)
        self._check_open()

    def _settle_steps(self, peer: Peer) -> None:
        for step in self._steps.values():
            if peer.error and peer.task in step.registered.tasks:  # also if it has ended it: what it sent may be lost
                step.settle(peer.task, peer.error)

    def _excuse(self, peer: Peer) -> None:
        """Do not let ended steps wait for a task that may never answer: it finds the abort when it wakes."""
        for step in self._steps.values():
            if step.aborted:
                step.excuse(peer.task)

    # ── iterations ──

    async def command(self, task: str, message: Any) -> Any:
        """Have the iterations of a task do what a message of theirs asks, and answer what they do.

        Where the way to the task breaks, it is asked again: to be asked twice is to them as to be asked once.
        """
        packed = np.frombuffer(codec.pack(to_data(message)), np.uint8)
        return await self._ask_again(task, lambda: Command(next(self._numbers), packed))

    def post(self, task: str, message: Any) -> None:
        """Send a message to a task, of a kind that was registered for it; returns at once.

        Lost if the way to the task is broken: who listens is told when it was reached again.
        """
        self.peers[task].link.post(message)

    # ── talking ──

    def _hear(self, peer: Peer, message: Any) -> None:
        match message:
            case Done(number):
                if number in self._steps:
                    self._finish(self._steps[number], peer.task, message)
            case Answer(request):
                reply = peer.replies.get(request)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case Recruit():
                self.peers.spawn(self._joining.recruit(peer, message))
            case Introduced():
                self._joining.learn(message)
            case _:
                raise BrokenStream(f"a node cannot say {type(message).__name__}")

    def _finish(self, step: OpenStep, task: str, done: Done) -> None:
        if done.error:
            step.settle(task, as_error(done.error, f"on {task}: {done.text}"), remote=True)
            return
        try:
            for edge, value in zip(step.registered.fetched[task], done.fetches, strict=True):
                spec, where = step.registered.specs[edge], f"edge {edge} of {task}"
                step.values[edge] = DEAD if value is None else checked(value, spec, where)
        except (KeyError, ValueError, BrokenStream) as error:
            step.settle(task, BrokenStream(f"{task} ended a step with other values than asked for: {error}"))
        except ResourceError as error:
            step.settle(task, error)
        else:
            step.end(task)

    async def _ask(self, task: str, message: Register | Ask | Command | Introduce) -> Any:
        """Send a request and wait for its answer."""
        peer = await self.peers.reach(task)
        reply = peer.replies[message.request] = asyncio.get_running_loop().create_future()
        try:
            await self.peers.say(peer, message)
            answer = await reply
        finally:
            del peer.replies[message.request]
        if answer.error:
            raise as_error(answer.error, f"on {peer.task}: {answer.text}")
        return answer.value

    async def _ask_again(self, task: str, request: Callable[[], Ask | Command]) -> Any:
        """Ask something that may be asked twice; do so where the way to the task breaks."""
        failed = 0
        while True:
            self._check_open()
            try:
                return await self._ask(task, request())
            except LinkBroken:
                failed += 1
                if failed == TRIES:
                    raise

    async def _ask_each(self, messages: Mapping[str, Register | Ask], within: float | None = None) -> dict[str, Any]:
        if within is not None:
            return await answered({task: self._ask(task, message) for task, message in messages.items()}, within)
        try:
            async with asyncio.TaskGroup() as group:
                asked = {t: group.create_task(self._ask(t, m)) for t, m in messages.items()}
        except BaseExceptionGroup as errors:
            raise root_error(errors) from None
        return {task: answer.result() for task, answer in asked.items()}

    async def _ask_all(self, what: str, container: str = "", within: float | None = None) -> dict[str, Any]:
        self._check_open()
        asks = {task: Ask(next(self._numbers), what, container) for task in self.peers.serving()}
        return await self._ask_each(asks, within)

    def _check_open(self) -> None:
        if self._closed or not self._opened:
            raise ClosedError("the session is not open")
        if self.peers.taken_over is not None:
            raise type(self.peers.taken_over)(*self.peers.taken_over.args)

    # ── state ──

    async def inventory(self, wanted: Collection[tuple[str, str]] | None = None) -> dict[tuple[str, str], Spec]:
        """The variables of all tasks that are not lost, by (container, name): see `inventory.collect`."""
        self._check_open()

        def ask() -> Ask:
            return Ask(next(self._numbers), "inventory", "")

        asks = {task: self._ask_again(task, ask) for task in self.peers.serving()}
        return await collect(asks, self.peers, wanted)

    async def reset(self, container: str | None = None) -> None:
        """Forget the variables and queues of a container, or of all."""
        await self._ask_all("reset", container or "")

    async def statistics(self, within: float | None = None) -> dict[str, Mapping[str, Any]]:
        """What is open, held and sent so far on each task that is not lost, or that answers ``within`` seconds."""
        return await self._ask_all("statistics", within=within)

    # ── steps ──

    async def register(
        self,
        plans: Mapping[str, Plan],
        feeds: Sequence[Sequence[tuple[int, str]]],
        fetches: Sequence[tuple[int, str] | int],
    ) -> Registered:
        """Ship each plan to its task, once; what comes back can be run any number of times.

        ``feeds[i]``: the (edge, task) pairs that feed i goes to; ``fetches[j]``: the (edge, task) that fetch j comes
        from, or the number of the feed that it is.
        """
        self._check_open()
        for task in plans:
            if task not in self.peers:
                raise InternalError(f"a plan for {task}, which is not in the cluster")
        registered = describe(next(self._numbers), plans, feeds, fetches)
        self._plans[registered.plan] = registered  # before all have it, lest who has is lost, and back without it
        try:
            await self._ask_each({task: self._shipment(registered, task) for task in registered.tasks})
        except BaseException:
            self._plans.pop(registered.plan, None)
            raise
        return registered

    def _shipment(self, step: Registered, task: str) -> Register:
        data = np.frombuffer(codec.pack_parts(plan_to_parts(step.plans[task]), where=too_large), np.uint8)
        return Register(next(self._numbers), step.plan, data, step.is_silent(task))

    async def _ship_all(self, peer: Peer) -> None:
        """Give a task that was lost the plans that it is to have."""
        for registered in list(self._plans.values()):
            if peer.task in registered.tasks:
                await self._ask(peer.task, self._shipment(registered, peer.task))

    async def unregister(self, registered: Registered) -> None:
        """Let the nodes forget a step."""
        self._plans.pop(registered.plan, None)
        for task in registered.tasks:
            await self.peers.say(self.peers[task], Unregister(registered.plan))

    async def run(self, registered: Registered, feeds: Sequence[Array], *, number: int, seed: int) -> list[Array]:
        """Run a registered step and answer its fetches; several may run at once, under different numbers.

        Cancelling the caller aborts the step on all its tasks and waits until they have ended it, which may be its end
        all the same: `EndedAnyway`. Raises the error that the step failed with, saying where, and `NodeLost` if a task
        that takes part is lost.
        """
        self._check_open()
        for task in registered.tasks:
            if (peer := self.peers[task]).severed or peer.error is not None:
                await self.peers.reach(task)
        if number in self._steps:
            raise InternalError(f"step {number} is in progress")
        step = self._steps[number] = OpenStep(number, registered)
        key = (self.epoch, number)
        try:
            await self._carry_out(step, key, feeds, seed)
            if step.waiting:
                await self._end(step)
        except asyncio.CancelledError:
            await self._end(step)
            with suppress(DeadTensorError):
                if step.is_whole:
                    raise EndedAnyway(step.fetches(feeds)) from None
            raise
        except BaseException:
            await self._end(step)
            raise
        finally:
            del self._steps[number]
            if registered.sent or registered.pulled:
                self._rendezvous.close(key)
        if step.errors:
            raise step.error()
        return step.fetches(feeds)

    async def _carry_out(self, step: OpenStep, key: StepKey, feeds: Sequence[Array], seed: int) -> None:
        """Start the step everywhere and receive what comes, until it has failed or is over."""
        if not step.registered.pulled:
            await self._start(step, self._starts(step, key, feeds, seed))
            await step.news
            return
        async with asyncio.TaskGroup() as group:
            pulls = [group.create_task(self._fetch(step, key, *edge)) for edge in step.registered.pulled]
            await self._start(step, self._starts(step, key, feeds, seed))
            await step.news
            if step.errors:
                for pull in pulls:
                    pull.cancel()

    def _starts(self, step: OpenStep, key: StepKey, feeds: Sequence[Array], seed: int) -> dict[str, Start]:
        """What to tell each task; large feeds are laid out to be pulled."""
        registered = step.registered
        large: dict[int, Array] = {}
        small: dict[str, dict[int, Array]] = {task: {} for task in registered.tasks}
        for feed, edge, task in registered.sent:
            value = feeds[feed]
            inline = value.nbytes <= SMALL and len(small[task]) < INLINE
            (small[task] if inline else large)[edge] = value
        if large or registered.pulled:
            self._rendezvous.open(key, large)
        number, plan = step.number, registered.plan
        return {
            task: make_start(number, plan, seed, tuple([feeds[i] for i in fed]), tuple(some), tuple(some.values()))
            for (task, some), fed in zip(small.items(), registered.feeds, strict=True)
        }

    async def _start(self, step: OpenStep, starts: Mapping[str, Start]) -> None:
        for task, start in starts.items():
            peer, told = self.peers[task], partial(step.told.add, task)
            if peer.control.send_at_once(to_frame(start)) or not await self.peers.say(peer, start, told):
                told()  # if not by us, what became of the connection will end the step there

    async def _fetch(self, step: OpenStep, key: StepKey, edge: int, task: str) -> None:
        spec, link, announced, expected = step.registered.specs[edge], self.peers[task].link, None, 0
        try:
            if not is_large(spec):
                value = await self._rendezvous.take(key, edge)
                if not isinstance(value, Announced):
                    step.values[edge] = value if value is DEAD else checked(value, spec, f"edge {edge} of {task}")
                    return
                announced, expected = value.nbytes or None, 1  # what was not made yet may be small, and pushed
            step.values[edge] = await link.pull(key, edge, spec, announced, expected)
        except FlowrtError as error:
            step.fail(error)

    async def _end(self, step: OpenStep) -> None:
        """Abort the step where it goes on, and wait for that, also if cancelled meanwhile."""
        step.aborted = True
        if not step.waiting:  # as mostly
            return
        suspects = self.peers.suspects
        for task in sorted(step.waiting):
            if step.told:  # those that were not may have been sent values by those that were
                self.peers.post(self.peers[task], Abort(step.number))
            if task in suspects or task not in step.told:
                step.excuse(task)
        cancelled = await shielded(lambda: not step.waiting, step.next_news)
        if cancelled is not None:
            raise cancelled
