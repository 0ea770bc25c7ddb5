"""The serving side of a task: obeys masters, runs their plans on its host, and trades tensors with other tasks.

Law: of one session name only the newest master is obeyed. A newer one ends the reign of the older first: its steps are
cancelled and waited for before the newer is welcomed, and an epoch that has ended never returns, so no two masters ever
drive a step together. Steps also end with their master's connection; its reign goes on if it comes back soon, and ends
otherwise. A master that is stopped keeps its connection, and its reign. What a step computes, and in which order, is
the executor's; what a variable holds outlives all reigns, and so do the messages by which nodes apply what was ordered.
No message ends a node: what goes wrong with one is told to who sent it, or ends its connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base import codec
from flowrt.base.device import CLIENT
from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    FlowrtError,
    InternalError,
    LinkBroken,
    NodeLost,
    RemoteError,
    StepCancelled,
    name_error,
)
from flowrt.base.plan import spec_to_data
from flowrt.net.door.transport import Connection, OpenPort, serve
from flowrt.net.link import Allowance, LinkStore, TensorLink, is_large
from flowrt.net.links import Address, Links
from flowrt.net.node.newcomers import Newcomers
from flowrt.net.node.plans import ReadyPlan, dismantle_in, make_ready
from flowrt.net.node.reign import Reign, address_of, addresses_in, say, superseded
from flowrt.net.node.started import Started
from flowrt.net.stream.local import Local
from flowrt.net.stream.sockets import was_silent
from flowrt.net.wire.frames import NoRoom
from flowrt.net.wire.messages import (
    Abort,
    Answer,
    Ask,
    Carry,
    Command,
    Drive,
    Enlist,
    Introduce,
    Leaves,
    Ping,
    Pong,
    Recruited,
    Refused,
    Register,
    Resume,
    Serve,
    Unregister,
    Welcome,
    from_data,
    root_error,
    to_data,
    to_hello,
)
from flowrt.net.wire.steps import Start
from flowrt.sched.host.latest import Latest
from flowrt.sched.host.rendezvous import Array, Dead, Pushed, StepKey
from flowrt.sched.runs.iterations import Iterations

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.net.door.tls import Keys
    from flowrt.sched.executor import Executor
    from flowrt.sched.host.host import Host

REMEMBERED_EPOCHS = 1024
M = TypeVar("M", Command, Register)
RETURN, SOON = 9.0, 2.0  # seconds that a master has to come back, since its last sign of life and since its way broke
HEAL = 30.0  # but where the way to it is gone without a word: it may be well, and come back when that is mended
MASTER_SILENCE = 120.0  # seconds without a heartbeat after which a master that still has a connection is given up
_log = logging.getLogger(__name__)


class NetworkNode:
    """A host on the network. `serving` opens its port. ``imports`` are what `Serve` tells of, ``tls`` its keys."""

    def __init__(
        self, host: Host, token: str, imports: Mapping[str, str] = MappingProxyType({}), tls: Keys | None = None
    ) -> None:
        self.host = host
        self._imports = tuple(imports.items())
        self._token = token
        self._tls = tls
        self._reigns: dict[str, Reign] = {}  # by epoch
        self._known: dict[str, tuple[str, int]] = {}  # where masters said last that tasks are
        # incarnations of epochs that ended, `inf` for another's
        self._over: Latest[str, float] = Latest(REMEMBERED_EPOCHS)
        self._local = Local(host.memory)
        self._store = LinkStore(
            host.rendezvous,
            host.budget,
            Allowance(),
            self._reigns.__contains__,
            host.memory.received,
            self._hear_posted,
            self._local,
            host.credit,
            tls,
        )
        self._newcomers = Newcomers()
        self._kept: dict[str, list[ReadyPlan]] = {}  # by epoch that has ended: of runs that go on without its master
        self._iterations = host.iterations = Iterations(host, self.post, self._is_driven)
        self._links = Links(host.task, token, self._store, self._link_broke, self._peer_gone)
        self._tasks: asyncio.TaskGroup | None = None
        host.remote = self

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[OpenPort]:
        """Obey whoever has the token, at ``host:port`` (0: any free one), while the block runs."""
        task, local, birth = self.host.task, self._local, secrets.token_hex(8)
        hello = to_hello(Serve(task, tuple(self.host.devices), local.host, local.way, self._imports, birth))
        allocate, tls = self.host.memory.received, self._tls
        door = serve(host, port, self._token, self._attend, hello=hello, allocate=allocate, local=local, tls=tls)
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as self._tasks:
            try:
                async with self._links, door as server:
                    yield server
            except BaseException as error:  # raised below, so that it leaves bare and not in a group
                failure = error
        self._local.close()
        if failure is not None:
            raise failure

    # ── how steps exchange values with other tasks ──

    async def pull(
        self, peer: str, key: StepKey, edge: int, spec: Spec, announced: int | None = None, expected: int = 0
    ) -> Array | Dead:
        """What ``peer`` sends on ``edge``."""
        return await (await self._way(peer, key)).pull(key, edge, spec, announced, expected)

    def pulls(self, peer: str, spec: Spec) -> bool:
        """Whether values are asked for ahead: large ones, and a client's, which come with the start or not at all."""
        return peer == CLIENT or is_large(spec)

    def push(self, peer: str, key: StepKey, edge: int, value: Array | Dead | None) -> Pushed:
        """Send a small value, or announce one that is large or not made yet, where there is a way to ``peer``."""
        reign = self._reign_of(key)
        link = reign.standing if peer == CLIENT else self._links.standing(address_of(peer, reign))
        if link is None:
            return Pushed.NO_WAY
        return Pushed.SENT if link.push(key, edge, value) else Pushed.ANNOUNCED

    async def open_way(self, peer: str, key: StepKey) -> None:
        """Open a link to ``peer``."""
        link = await self._way(peer, key)
        if link.closed:
            raise LinkBroken(link.ending)

    async def _way(self, peer: str, key: StepKey) -> TensorLink:
        reign = self._reign_of(key)
        if peer != CLIENT:
            return await self._links.to(peer, address_of(peer, reign))
        return reign.client.result() if reign.client.done() else await asyncio.shield(reign.client)

    def _reign_of(self, key: StepKey) -> Reign:
        reign = self._reigns.get(key[0])
        if reign is None:
            raise StepCancelled(f"step {key[1]} has ended: its master is gone")
        return reign

    def statistics(self) -> dict[str, Any]:
        """What is open, held and sent so far, in numbers."""
        return self.host.statistics() | {
            "steps": sum(len(reign.steps) for reign in self._reigns.values()),
            "open_steps": self.host.rendezvous.open_steps,
            "plans": sum(len(reign.plans) for reign in self._reigns.values()),
            "masters": len(self._reigns),
            "iterations": self._iterations.going,
            "links": len(self._links),
            "bytes_expected": self.host.budget.used,
            "bytes_shared": self._local.shared_bytes,
            "bytes_by_socket": self._local.socket_bytes,
            "messages": self._local.messages,
        }

    # ── what other tasks post ──

    def post(self, peer: str, epoch: str, message: Any) -> None:
        """Send a message to a task, or to the client of ``epoch``: how iterations talk to others.

        One to a client that is away waits for it; one to the client of an epoch that has ended goes nowhere.
        """
        reign = self._reigns.get(epoch)
        if peer == self.host.task:
            asyncio.get_running_loop().call_soon(self._hear_posted, peer, message)
        elif reign is not None and (address := reign.addresses.get(peer)) is not None:
            self._links.post(peer, address, message)
        elif reign is not None and peer == CLIENT:
            reign.post(message)
        else:
            self._post_after(peer, message)

    def _post_after(self, peer: str, message: Any) -> None:
        """Send a message though no master says where to: what one that is gone has ordered, all servers apply."""
        if peer in self._known:
            self._links.post(peer, self._known[peer], message)
        else:
            _log.info("%s: nothing is posted to %s: nobody says where it is", self.host.task, peer)

    def _hear_posted(self, peer: str, message: Any) -> None:
        if self.host.iterations is not None:
            self.host.iterations.hear(peer, message)

    def _link_broke(self, peer: str, link: TensorLink | None) -> None:
        """Fail the steps that may have lost what was pushed, and tell who posts."""
        if link is not None:
            lost = f"what {self.host.task} sent to {peer} may be lost: {link.ending}"
            for epoch, number in dict.fromkeys(link.pushed):
                if epoch in self._reigns:
                    self._reigns[epoch].steps.abort(number, LinkBroken(lost))
        self._tell_broken(peer)

    def _peer_gone(self, peer: str, address: Address, birth: str) -> None:
        """Tell who posts that a process is gone; whichever is where a task was before is nobody's."""
        if birth or self._known.get(peer, address) == address:
            self._iterations.lost(peer, birth)

    def _tell_broken(self, peer: str, epoch: str = "") -> None:
        if self.host.iterations is not None:
            self.host.iterations.broken(peer, epoch)

    async def leave(self, seconds: float) -> None:
        """Say that this node ends, and let its replicas end what they are at, for so many seconds at most."""
        for reign in self._reigns.values():
            reign.tell(Leaves())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._iterations.leave()

    # ── connections ──

    async def _attend(self, connection: Connection) -> None:
        """Serve one connection, whose token was checked, until it ends."""
        try:
            hello = from_data(connection.peer_hello)
            match hello:
                case Drive():
                    await self._reign(hello, connection)
                case Resume():
                    await self._resume(hello, connection)
                case Carry(task, ""):
                    await TensorLink(connection, task, self._store).run()
                case Carry():
                    await self._carry_for_client(hello, connection)
                case Enlist():
                    await self._newcomers.attend(hello, connection, [*self._reigns.values()])
                case _:
                    raise BrokenStream(f"a connection began with {type(hello).__name__}")
        except (RemoteError, ClosedError) as error:
            level = logging.INFO if connection.closed and connection.failure is None else logging.WARNING
            _log.log(level, "%s: a connection ended: %s", self.host.task, error)
        except Exception:  # ours, or memory that ran out where nobody could be told: this connection's trouble alone
            _log.exception("%s: a connection failed", self.host.task)

    async def _carry_for_client(self, hello: Carry, connection: Connection) -> None:
        reign = self._reigns.get(hello.epoch)
        if reign is None or reign.client.done():
            raise BrokenStream(f"{connection.peer} is no client of a master here")
        link = TensorLink(connection, CLIENT, self._store)
        reign.client.set_result(link)
        for message in reign.waiting:
            link.post(message)
        reign.waiting.clear()
        if isinstance(reign.drive, Resume):  # what was posted to the client before may not have arrived
            self._tell_broken(CLIENT, hello.epoch)
        await link.run()

    # ── masters ──

    async def _reign(self, drive: Drive, connection: Connection) -> None:
        reign = self._begin_reign(drive, connection)
        before = self._reigns.get(drive.epoch)
        if drive.incarnation <= (self._over.get(drive.epoch, -1) if before is None else before.drive.incarnation):
            await self._say(reign, superseded(reign))
            return
        if before is not None:  # which its master has given up
            before.followed.set()
            before.connection.cut()
            await before.ended.wait()
        older = [other for other in self._reigns.values() if other.drive.session == drive.session]
        self._reigns[drive.epoch] = reign
        try:
            for other in older:
                await self._depose(other)
            if self._over.get(drive.epoch, -1) < drive.incarnation:
                await self._rule_until_gone(reign)
        finally:
            self._end_reign(reign)

    def _begin_reign(self, drive: Drive | Resume, connection: Connection) -> Reign:
        tell = partial(say, connection)
        addresses, joined = addresses_in(drive)
        self._known.update(addresses)
        self._newcomers.joined.update(joined)
        return Reign(drive, connection, addresses, Started(self.host, drive.epoch, tell, self._report))

    async def _resume(self, resume: Resume, connection: Connection) -> None:
        """Let a master go on that was here before: its plans still are, its steps have ended."""
        reign = self._begin_reign(resume, connection)
        before = self._reigns.get(resume.epoch)
        if before is None or before.followed.is_set():
            anew = Refused(RemoteError.__name__, f"{self.host.task} does not know this session any more")
            await self._say(reign, superseded(reign) if self._over.get(resume.epoch) == inf else anew)
            return
        reign.plans = before.plans
        self._reigns[resume.epoch] = reign
        try:
            before.followed.set()
            before.connection.cut()
            await before.ended.wait()
            if self._over.get(resume.epoch, -1) < resume.incarnation:
                await self._rule_until_gone(reign)
        finally:
            self._end_reign(reign)

    async def _rule_until_gone(self, reign: Reign) -> None:
        """Obey a master; where its connection breaks, give it time to come back."""
        try:
            await self._rule(reign)
        except (RemoteError, ClosedError) as error:
            if reign.connection.failure is None or reign.followed.is_set():
                raise
            _log.warning("%s: the way to a master broke: %s", self.host.task, error)
        self._end_client(reign)
        now = asyncio.get_running_loop().time()
        soon = HEAL if was_silent(reign.connection.failure) else SOON
        with suppress(TimeoutError):
            async with asyncio.timeout_at(max(now + soon, reign.heard + RETURN)):
                await reign.followed.wait()

    async def _rule(self, reign: Reign) -> None:
        _log.info("%s: obeys the master of session %r", self.host.task, reign.drive.session)
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._iterations.come_to_rest()
                    await self._say(reign, Welcome(dict(self._newcomers.joined)))
                    self._newcomers.show(reign)
                    await self._obey(reign, tasks)
                finally:
                    reign.steps.abort_all()
                    await reign.connection.aclose()
        except BaseExceptionGroup as group:
            raise root_error(group) from None

    async def _depose(self, reign: Reign) -> None:
        self._over[reign.drive.epoch] = inf
        reign.followed.set()
        try:
            async with asyncio.timeout(1.0):
                await self._say(reign, superseded(reign))
        except (RemoteError, ClosedError, TimeoutError):
            pass  # it is gone, or does not read: it learns from the end of the connection
        await reign.connection.aclose()
        await reign.ended.wait()

    def _end_reign(self, reign: Reign) -> None:
        epoch = reign.drive.epoch
        self._end_client(reign)
        if self._reigns.get(epoch) is reign:  # and not the same master's, come back
            del self._reigns[epoch]
            self._kept[epoch] = [*reign.plans.values()]
            reign.plans.clear()
            self._over[epoch] = max(reign.drive.incarnation, self._over.get(epoch, -1))
            if self.host.iterations is not None:
                self.host.iterations.ended(epoch)
        self._forget_kept()
        reign.ended.set()

    def _forget_kept(self) -> None:
        """Let go what masters that are gone had here, but for those whose runs go on without them."""
        for epoch in [epoch for epoch in self._kept if not self._iterations.keeps(epoch)]:
            self._forget(self._kept.pop(epoch))
            self.host.rendezvous.close_epoch(epoch)

    def _end_client(self, reign: Reign) -> None:
        if not reign.client.done():
            reign.client.cancel()
        elif not reign.client.cancelled():
            reign.client.result().close()

    async def _obey(self, reign: Reign, tasks: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(MASTER_SILENCE) as silence:
                await reign.connection.listen(lambda data: self._hear(reign, from_data(data), tasks, silence))
        except TimeoutError:
            raise NodeLost(f"the master was silent for {MASTER_SILENCE:g} s") from None
        except MemoryError as error:
            reign.connection.cut()  # it comes back, and there may be memory then
            raise LinkBroken(f"no memory to obey a master: {error}") from error

    def _hear(self, reign: Reign, message: Any, tasks: asyncio.TaskGroup, silence: asyncio.Timeout) -> None:
        match message:
            case Start():
                reign.steps.start(message, reign.plans.get(message.plan), tasks)
            case Ping(number):
                reign.heard = asyncio.get_running_loop().time()
                silence.reschedule(reign.heard + MASTER_SILENCE)
                reign.tell(Pong(number))
            case Abort(number):
                reign.steps.abort(number)
            case Register():
                tasks.create_task(self._carry_out(reign, message, self._register, "a plan"))
            case Unregister(plan):
                self._forget([reign.plans.pop(plan)] if plan in reign.plans else [])
            case Command():
                tasks.create_task(self._carry_out(reign, message, self._obey_command, "a run of a trainer"))
            case Ask():
                reign.tell(self._answer(message))
            case Recruited():
                self._newcomers.hear(message)
            case Introduce():
                if self._newcomers.introduce(message, reign, self._reigns.values()):
                    self._known[message.task] = reign.addresses[message.task]
                    self._tell_broken(message.task)  # what was posted to it before went nowhere
            case _:
                raise BrokenStream(f"a master cannot say {type(message).__name__}")

    async def _say(self, reign: Reign, message: Any) -> None:
        await reign.connection.send(to_data(message))

    async def _carry_out(self, reign: Reign, asked: M, how: Callable[[Reign, M], Awaitable[Any]], where: str) -> None:
        """Do as a master asks, and tell it the answer, or why there is none."""
        try:
            answer = Answer(asked.request, await how(reign, asked))
        except Exception as error:
            answer = Answer(asked.request, None, *self._report(error, where))
        reign.tell(answer)

    async def _register(self, reign: Reign, message: Register) -> None:
        """Make a plan ready in a lane: a large one takes seconds, in which the node answers all the same."""
        reign.plans[message.plan] = await self.host.lanes.run(make_ready, message.data, self.host, message.silent)

    def _forget(self, plans: list[ReadyPlan]) -> None:
        """Let plans go that nobody runs any more, in a lane."""
        if self._tasks is not None:
            self._tasks.create_task(dismantle_in(self.host.lanes, plans))

    async def _obey_command(self, reign: Reign, command: Command) -> Any:
        """Have iterations do as a master's client asks; they go on when its reign has ended."""
        if isinstance(command.data, NoRoom):
            raise command.data.error("what is asked of a run")
        asked = from_data(codec.unpack(codec.bytes_of(command.data)))
        return await self._iterations.answer(asked, reign.drive.epoch, partial(self._executor, reign))

    def _executor(self, reign: Reign, plan: int) -> Executor:
        if plan not in reign.plans:
            raise InternalError(f"plan {plan} is not registered on {self.host.task}")
        return reign.plans[plan].executor

    def _is_driven(self, epoch: str) -> bool:
        """Whether the master of ``epoch`` is connected."""
        reign = self._reigns.get(epoch)
        return reign is not None and not reign.connection.closed

    def _answer(self, ask: Ask) -> Answer:
        try:
            match ask.what:
                case "inventory":
                    rows = ((*name, spec_to_data(spec)) for name, spec in self.host.inventory().items())
                    return Answer(ask.request, np.frombuffer(codec.pack_parts(rows), np.uint8))
                case "statistics":
                    return Answer(ask.request, self.statistics())
                case "reset":
                    self.host.reset(ask.container or None)
                    return Answer(ask.request, None)
                case _:
                    raise BrokenStream(f"a master cannot ask for {ask.what!r}")
        except (FlowrtError, MemoryError) as error:
            return Answer(ask.request, None, *name_error(error))

    def _report(self, error: BaseException, where: str) -> tuple[str, str]:
        """The error as it travels to the master; what is nobody's on purpose is also logged here, with its trace."""
        if not isinstance(error, FlowrtError):
            _log.error("%s: %s failed", self.host.task, where, exc_info=error)
        return name_error(error)
