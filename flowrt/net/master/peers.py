"""The tasks that a master drives: met, listened to, asked for signs of life, and reached again when a connection broke.

Law: a broken connection loses nobody by itself. The steps in progress there have failed, as the node has ended them;
but the task is lost only if nobody listens at its address any more, if it does not know this master any more, or if it
has been silent for as long as `liveness` says. Until then it is severed, and who wants to run something there waits.
A task that is lost, or was not up when the others were met, is awaited: from the moment that a node serves it and
`join` is done with that, it is lost no more. When another master took the session over, nobody is lost, and nothing can
be done any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from flowrt.base.device import Device
from flowrt.base.errors import ClosedError, FlowrtError, LinkBroken, NodeLost, RemoteError, TakenOver, as_error
from flowrt.net.code import differing, hashes_here, missing
from flowrt.net.master.liveness import Belief, Change, Liveness
from flowrt.net.master.meeting import Meetings, job_of
from flowrt.net.peer import RETRY, SOON, Peer, is_gone, meet
from flowrt.net.wire.messages import (
    UNASKED,
    Drive,
    Introduce,
    Leaves,
    Ping,
    Pong,
    Refused,
    Resume,
    from_data,
    root_error,
    to_frame,
)

if TYPE_CHECKING:
    from flowrt.net.link import LinkStore
    from flowrt.net.master.meeting import Spares

REACH = 2.0  # seconds that one try to reach a severed task takes at most
_TASK = re.compile(r"/job:\w+/task:\d+")
AWAIT = 0.5  # seconds between two tries to meet one that is lost
_log = logging.getLogger(__name__)


class Peers:
    """The tasks at ``addresses``. ``hear`` is told what each says beside signs of life; ``gone`` of each whose steps
    have ended, because its connection broke or it is lost; ``excused`` of each that became suspect; ``back`` of each
    that was reached again; ``join`` makes one that was lost, and knows nothing, what it is to be."""

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        token: str,
        beat: float,
        store: LinkStore,
        *,
        hear: Callable[[Peer, Any], None],
        gone: Callable[[Peer], None],
        excused: Callable[[Peer], None],
        back: Callable[[Peer], None],
        join: Callable[[Peer], Coroutine[Any, Any, None]],
    ) -> None:
        self._addresses = dict(addresses)
        self._token = token
        self._every = beat
        self._store = store
        self._hear, self._gone, self._excused, self._back, self._join = hear, gone, excused, back, join
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._peers: dict[str, Peer] = {}
        self._awaited: dict[str, FlowrtError] = {}  # tasks that are lost, or were not up yet, and why
        self._losses: Counter[str] = Counter()  # how often each was lost
        self._incarnations: dict[str, int] = {}  # how often each was begun with anew
        self.joined: set[str] = set()  # tasks that are in no cluster file
        self._gone_for_good: set[str] = set()  # those whose nodes have left, or at whose addresses nobody listens
        self._expected: set[str] = set()
        self.leaving: frozenset[str] = frozenset()  # tasks whose nodes were told to end
        self._changed = asyncio.Event()
        self._here: dict[str, str] = {}  # the hashes of modules that this process has imported, too
        self._closed = False
        self.taken_over: FlowrtError | None = None  # by another master

    def __getitem__(self, task: str) -> Peer:
        return self._peers[task]

    def __contains__(self, task: str) -> bool:
        return task in self._peers

    # ── opening and closing ──

    async def open(self, session: str, epoch: str, patience: float, spares: Spares) -> None:
        """Meet every task, and begin to listen; one that is not up is awaited, if another of its job is.

        Who opens ``spares`` those that it can do without: they are not waited for as long.
        Raises `RemoteError` for one that refuses, and for a job of which none is up within ``patience`` seconds.
        """
        self._hello = session, epoch, self._addresses
        self._liveness = Liveness(self._every, asyncio.get_running_loop().time())
        await self._group.__aenter__()
        named = dict(self._addresses)
        meetings = Meetings(named, lambda absent: spares(absent, self.devices))
        try:
            absent = await meetings.held(lambda task: self._meet(task, named[task], patience, meetings.answered))
        except BaseExceptionGroup as errors:
            raise root_error(errors) from None
        absent = {t: error for t, error in (absent | await self._meet_joined()).items() if t not in self._peers}
        present = {job_of(task) for task in self._addresses if task not in absent}
        for task, error in absent.items():
            if job_of(task) not in present and task in named:  # and not one that has joined, and is gone
                raise error
            _log.warning("the session opens without %s, which is awaited: %s", task, error)
            self._await(task, error)
        self._peers = {task: self._peers[task] for task in self._addresses if task in self._peers}
        self.spawn(self._watch())
        self._check_code()
        for text in missing(self._code):
            _log.warning("%s", text)

    @property
    def _code(self) -> dict[str, Mapping[str, str]]:
        """What each task that is there has imported."""
        return {task: peer.imports for task, peer in self._peers.items() if peer.error is None}

    def _check_code(self) -> None:
        """Raise `RemoteError` where tasks have imported other code than this process, or than one another."""
        code = self._code
        modules = {module for imports in code.values() for module in imports}
        self._here |= hashes_here(modules - self._here.keys())  # as they were when the session began: files change
        if found := differing(code, self._here):
            raise RemoteError("; ".join(found))

    async def aclose(self) -> None:
        """Part from all and end every task."""
        self._closed = True
        try:
            async with asyncio.TaskGroup() as group:
                for peer in self._peers.values():
                    group.create_task(peer.control.aclose())
        finally:
            for peer in self._peers.values():
                peer.lose(peer.error or ClosedError(f"the session was closed; {peer.task} serves it no more"))
                self._gone(peer)
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have ``work`` done beside everything else, until this is closed."""
        task = self._group.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _meet(
        self, task: str, place: tuple[str, int], patience: float, answered: Callable[[str], None] = lambda task: None
    ) -> NodeLost | None:
        """Why a task is not up, if so."""
        try:
            drive = Drive(*self._hello)
            self._attend(await meet(task, place, self._token, drive, self._store, patience, answered))
        except NodeLost as error:
            if is_gone(error):
                self._gone_for_good.add(task)
            return error
        return None

    async def _meet_joined(self) -> dict[str, NodeLost]:
        """Meet those that the nodes know to have joined; answers who is not up, and why."""
        known = {task: place for peer in self._peers.values() for task, place in peer.joined.items()}
        absent = {}
        for task in sorted(known.keys() - self._peers.keys()):
            self._addresses[task] = known[task]
            self.joined.add(task)
            if (error := await self._meet(task, known[task], RETRY)) is not None:
                absent[task] = error
            self._introduce(task)
        return absent

    def _attend(self, peer: Peer) -> None:
        """Begin to listen to a task."""
        self._peers[peer.task] = peer
        for task in sorted(self.joined):  # whom it may have missed
            self._introduce(task, peer)
        self._liveness.joined(peer.task, asyncio.get_running_loop().time())
        for work in (self._listen(peer), self._beat(peer), self._carry(peer)):
            self.spawn(work)

    # ── who joins ──

    @property
    def addresses(self) -> Mapping[str, tuple[str, int]]:
        """Where tasks are, be they there or not."""
        return self._addresses

    @property
    def jobs(self) -> frozenset[str]:
        """The jobs that have tasks, or are to have some."""
        return frozenset(job_of(task).removeprefix("/job:") for task in (*self._addresses, *self._expected))

    @property
    def vacant(self) -> frozenset[str]:
        """The tasks that other nodes may be, as theirs are gone."""
        return frozenset(self._gone_for_good & self._awaited.keys())

    def expect(self, tasks: Iterable[str]) -> None:
        """Await those of ``tasks`` of which no address is known."""
        for task in tasks:
            if task not in self._addresses and _TASK.fullmatch(task):
                job = job_of(task).removeprefix("/job:")
                self._expected.add(task)
                self._awaited.setdefault(
                    task,
                    NodeLost(
                        f"{task} is not in the cluster, and no node has joined as it yet; start one by "
                        f"python -m flowrt.worker --job {job} --join HOST:PORT, of any node that is up"
                    ),
                )

    def welcome(self, task: str, place: tuple[str, int]) -> None:
        """A node has joined as ``task``, at ``place``: meet it, as soon as it serves."""
        before = self._addresses.get(task)
        if before == place:
            return
        self._addresses[task] = place
        self.joined.add(task)
        self._gone_for_good.discard(task)
        if before is None:
            self._awaited.setdefault(
                task, NodeLost(f"{task} has joined, at {place[0]}:{place[1]}, and does not serve yet")
            )
            self.spawn(self._wait_for(task))
        elif task in self._peers:  # whoever it was at the other place has ended
            self._apply(self._liveness.broke(task, f"it was started again, at {place[0]}:{place[1]}"))

    def _introduce(self, task: str, to: Peer | None = None) -> None:
        """Tell nodes that were met before where ``task`` is."""
        place = self._addresses[task]
        for peer in list(self._peers.values()) if to is None else [to]:
            if peer.task != task:
                self.post(peer, Introduce(UNASKED, task, *place, place))

    # ── who is there ──

    @property
    def devices(self) -> list[Device]:
        """The devices of the tasks that are not lost."""
        lost = self.lost
        return [device for task, peer in self._peers.items() if task not in lost for device in peer.devices]

    @property
    def known_devices(self) -> list[Device]:
        """The devices of all tasks: those that a lost one had; a CPU, if it never was there."""
        peers, cpu = self._peers, "/device:cpu:0"
        known = [peers[t].devices if t in peers else [Device.parse(f"{t}{cpu}")] for t in self._addresses]
        return [device for devices in known for device in devices]

    @property
    def lost(self) -> frozenset[str]:
        """The tasks that are lost, or not up yet."""
        return frozenset(self._awaited)

    @property
    def losses(self) -> Mapping[str, int]:
        """How often tasks were lost so far: what each had before that is gone."""
        return dict(self._losses)

    @property
    def births(self) -> Mapping[str, str]:
        """Which process each task is that was met."""
        return {task: peer.birth for task, peer in self._peers.items()}

    def why_lost(self, task: str) -> FlowrtError:
        """Why a task is lost, or was never there."""
        return self._awaited[task]

    @property
    def absent(self) -> list[str]:
        """The tasks that have not answered yet, with their addresses."""
        return [f"{t} ({host}:{port})" for t, (host, port) in self._addresses.items() if t not in self._peers]

    @property
    def suspects(self) -> frozenset[str]:
        """The tasks that have been silent for a while, or were told to end."""
        return self._liveness.having(Belief.SUSPECT) | self.leaving

    def serving(self) -> list[str]:
        """The tasks that answer, or will when they are reached again."""
        return [task for task, peer in self._peers.items() if peer.error is None]

    async def wait_changed(self, lost: frozenset[str], suspects: frozenset[str]) -> None:
        """Wait until `lost` or `suspects` differ from these, or another master has taken over."""
        while (self.lost, self.suspects) == (lost, suspects) and self.taken_over is None:
            await self._changed.wait()

    async def reach(self, task: str) -> Peer:
        """The peer that serves a task; waits while it is severed. Raises why it does not serve any more, if so."""
        while (peer := self._peers[task]).severed and peer.error is None:
            await self._changed.wait()
        peer.check()
        return peer

    def _apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            peer = self._peers[change.task]
            _log.warning("%s (%s) is %s: %s", peer.task, peer.address, change.standing.value, change.cause)
            if change.standing is Belief.LOST:
                error = NodeLost(f"{peer.task} ({peer.address}) was lost: {change.cause}")
                self._await(peer.task, error)
                self._give_up(peer, error)
            elif change.standing is Belief.SUSPECT:
                self._excused(peer)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _give_up(self, peer: Peer, error: FlowrtError) -> None:
        self.leaving -= {peer.task}
        if peer.error is None:
            peer.lose(error)
        self._gone(peer)
        self.spawn(peer.control.aclose())

    def _cede(self, error: TakenOver) -> None:
        """Another master drives the tasks now; they are well."""
        if self.taken_over is None:
            self.taken_over = error
            _log.warning("%s", error)
            for peer in list(self._peers.values()):
                self._give_up(peer, error)
            self._notify()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._every)
            self._apply(self._liveness.look(loop.time()))

    # ── talking ──

    async def say(self, peer: Peer, message: Any, begun: Callable[[], None] | None = None) -> bool:
        """Send; if that fails, who listens to the peer learns the same and acts on it."""
        try:
            await peer.control.send_frame(to_frame(message), begun)
        except (RemoteError, ClosedError):
            return False
        return True

    def post(self, peer: Peer, message: Any) -> None:
        """Send without waiting; if that fails, who listens to the peer learns the same and acts on it."""
        with suppress(RemoteError, ClosedError):
            peer.control.post_frame(to_frame(message))

    async def _beat(self, peer: Peer) -> None:
        for number in itertools.count():
            await asyncio.sleep(self._every)
            if not await self.say(peer, Ping(number)):
                return

    async def _listen(self, peer: Peer) -> None:
        cause = "it closed the connection"
        try:
            await peer.control.listen(partial(self._take_in, peer, asyncio.get_running_loop().time))
        except (RemoteError, ClosedError, MemoryError) as error:
            if peer.control.failure is not None or not peer.control.closed:
                cause = str(error)
        self._broke(peer, cause)

    def _take_in(self, peer: Peer, clock: Callable[[], float], data: Any) -> None:
        self._take(peer, from_data(data))
        if changes := self._liveness.heard(peer.task, clock()):
            self._apply(changes)

    def _take(self, peer: Peer, message: Any) -> None:
        match message:
            case Pong():
                pass
            case Leaves():
                _log.warning("%s (%s) was told to end, and is given nothing any more", peer.task, peer.address)
                self.leaving |= {peer.task}
                self._notify()
            case Refused(error, text):
                refusal = as_error(error, text)
                if isinstance(refusal, TakenOver):
                    self._cede(refusal)
                else:
                    self._apply(self._liveness.broke(peer.task, text))
            case _:
                self._hear(peer, message)

    async def _carry(self, peer: Peer) -> None:
        await peer.link.run()
        self._broke(peer, peer.link.ending)

    # ── reaching a task again ──

    def _broke(self, peer: Peer, cause: str) -> None:
        ours = self._peers.get(peer.task) is peer and not peer.severed and peer.error is None
        if ours and not self._closed and peer.task in self.leaving:
            self._gone_for_good.add(peer.task)
            self._apply(self._liveness.broke(peer.task, "it was terminated"))
        elif ours and not self._closed:
            peer.sever(_ended_step(peer, cause))
            self.spawn(self._mend(peer, cause))

    async def _mend(self, peer: Peer, cause: str) -> None:
        """Reach a task again whose connection broke; it is lost where that cannot be."""
        _log.info("%s (%s): %s; trying to reach it again", peer.task, peer.address, cause)
        await peer.control.aclose()
        pause = SOON
        while peer.error is None:
            resume = Resume(*self._hello, self._incarnations.get(peer.task, 0), tuple(sorted(self.joined)))
            try:
                found = await meet(peer.task, peer.place, self._token, resume, self._store, REACH)
            except TakenOver as error:
                self._cede(error)
            except RemoteError as error:
                if is_gone(error):
                    why = cause if isinstance(error, NodeLost) else f"{cause}; then {error}"
                    self._apply(self._liveness.broke(peer.task, why))
                else:
                    await asyncio.sleep(pause := min(2 * pause, RETRY))
            else:
                await self._welcome_back(peer, found, cause)
                return

    async def _welcome_back(self, peer: Peer, found: Peer, cause: str) -> None:
        if peer.error is not None:  # given up meanwhile
            await found.control.aclose()
            found.link.close()
            await found.link.run()
            return
        _log.warning("%s (%s) was reached again: %s", peer.task, peer.address, cause)
        self._attend(found)
        peer.lose(_ended_step(peer, cause))
        self._gone(peer)
        self._back(found)
        self._notify()

    # ── meeting a task that was lost ──

    def _await(self, task: str, why: FlowrtError) -> None:
        if task not in self._awaited:
            self._awaited[task] = why
            self._losses[task] += 1
            self.spawn(self._wait_for(task))

    async def _wait_for(self, task: str) -> None:
        """Meet a task as soon as a node serves it, again."""
        said = ""
        while self.taken_over is None:
            await asyncio.sleep(RETRY if task in self.joined else AWAIT)  # who joins is about to serve
            self._incarnations[task] = incarnation = self._incarnations.get(task, 0) + 1
            drive = Drive(*self._hello, incarnation, tuple(sorted(self.joined)))
            try:
                peer = await meet(task, self._addresses[task], self._token, drive, self._store, REACH)
            except TakenOver as error:
                self._cede(error)
            except NodeLost as error:  # it is not up yet
                if is_gone(error):
                    self._gone_for_good.add(task)
            except RemoteError as error:
                if str(error) != said:
                    _log.warning("%s is awaited, and cannot be met: %s", task, error)
                said = str(error)
            else:
                if await self._receive(peer):
                    return

    async def _receive(self, peer: Peer) -> bool:
        """Have a task be one of ours; answers whether it still is there then."""
        self._attend(peer)
        try:
            self._check_code()
            await self._join(peer)
            peer.check()
        except FlowrtError as error:
            _log.warning("%s (%s) came, and cannot be used: %s", peer.task, peer.address, error)
            why = NodeLost(f"{peer.task} ({peer.address}) was lost: {error}")
            self._give_up(self._peers[peer.task], why)  # which may have been reached again meanwhile
            return False
        del self._awaited[peer.task]
        self._gone_for_good.discard(peer.task)
        _log.warning("%s (%s) has come", peer.task, peer.address)
        self._notify()
        return True


def _ended_step(peer: Peer, cause: str) -> LinkBroken:
    return LinkBroken(f"{peer.task} ({peer.address}) ended the step, as its connection broke: {cause}")
