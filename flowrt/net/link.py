"""One connection that carries tensors between two tasks: small ones are pushed, large ones pulled when there is room.

Law: nothing large is sent that was not asked for, and not before there is room for it at the receiver. Room is given
for values that are there, never for values to come: who waits for a value holds nothing that another needs, so
transfers cannot wait for each other in a circle. (A small allowance may be promised ahead, which saves a round trip; it
is never waited for.) A pull always ends: with the value, an error, or the loss of the connection. What was pushed may
be lost with the connection, and who pushed it is told for which steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import (
    BrokenStream,
    ClosedError,
    FlowrtError,
    LinkBroken,
    RemoteError,
    ResourceError,
    StepCancelled,
    as_error,
    name_error,
)
from flowrt.base.valueclass import valueclass
from flowrt.net.wire import briefly
from flowrt.net.wire.brief import Brief
from flowrt.net.wire.frames import NoRoom
from flowrt.net.wire.messages import (
    POSTED,
    Announce,
    DeadValue,
    Fault,
    Forget,
    Grant,
    Pull,
    TooLarge,
    Value,
    from_data,
    to_data,
    to_frame,
)
from flowrt.net.wire.steps import Push, make_push
from flowrt.sched.host.credit import way_to
from flowrt.sched.host.rendezvous import DEAD, Announced, Array, Budget, Dead, Rendezvous, StepKey, Waiter

if TYPE_CHECKING:
    from flowrt.base.codec import Allocate
    from flowrt.base.spec import Spec
    from flowrt.net.door.tls import Keys
    from flowrt.net.door.transport import Connection
    from flowrt.net.stream.local import Local
    from flowrt.sched.host.credit import Credit

SMALL = 4096  # bytes that anybody has room for
INLINE = 256  # values of at most `SMALL` bytes that travel with the start or the end of a step
MAX_PULLS = 1 << 14  # unanswered, by one peer
REMEMBERED_PUSHES = 1 << 10  # steps for which something was pushed last
BYTE = np.dtype(np.uint8)
_log = logging.getLogger(__name__)


class Allowance:
    """Bytes that may be on their way here beside the budget, promised before they are known to be there."""

    def __init__(self, total: int = 8 << 20) -> None:
        self.left = total

    @contextmanager
    def promise(self, nbytes: int) -> Iterator[int]:
        """The room for a value of so many bytes to come; too little for it where the allowance does not reach."""
        promised = nbytes if SMALL < nbytes <= self.left else 0
        self.left -= promised
        try:
            yield max(promised, SMALL)
        finally:
            self.left += promised


@valueclass
class LinkStore:
    """What a task's links share: where values wait, and the room for those to come.

    ``knows`` says whether an epoch is in force: steps of others are over. ``allocate`` makes the memory for what is
    received. ``posted`` is told of the peer and message where one comes that is no pull's. ``local`` is what others of
    this host see of the task, ``credit`` what it may hold of values that nobody can use yet, ``tls`` its keys.
    """

    rendezvous: Rendezvous
    budget: Budget
    allowance: Allowance
    knows: Callable[[str], bool]
    allocate: Allocate
    posted: Callable[[str, Any], None] = lambda peer, message: None
    local: Local | None = None
    credit: Credit | None = None
    tls: Keys | None = None

    def sending(self, peer: str, key: StepKey, nbytes: int) -> AbstractContextManager[None]:
        """What is on its way to ``peer`` while the block runs has credit of this task."""
        if self.credit is None or nbytes <= SMALL:
            return nullcontext()
        return self.credit.sending(way_to(peer), key, nbytes)

    def arrived(self, key: StepKey, edge: int, value: Any, peer: str) -> None:
        """Take in what ``peer`` pushed."""
        if self.knows(key[0]):
            arrival = value.error(f"edge {edge} of {peer}") if isinstance(value, NoRoom) else value
            self.rendezvous.arrive(key, edge, arrival)

    def check_room(self, nbytes: int, spec: Spec, where: str) -> None:
        """Raise `ResourceError` where there is no memory for what is offered: it would come only to be thrown away."""
        try:
            self.allocate(BYTE, (nbytes,))
        except (MemoryError, ResourceError) as error:
            raise ResourceError(f"{where}: no memory to receive {spec}, {nbytes} bytes: {error}") from error


def is_small(spec: Spec) -> bool:
    """Whether all values of ``spec`` are pushed."""
    return spec.known and spec.nbytes <= SMALL


def is_large(spec: Spec) -> bool:
    """Whether all values of ``spec`` are more than what is pushed: they are pulled, as soon as they are wanted."""
    return spec.known and spec.nbytes > SMALL


class TensorLink:
    """A connection for tensors; `run` serves it until it ends, and must be running for `pull` to be answered."""

    def __init__(self, connection: Connection, peer: str, store: LinkStore) -> None:
        self.peer = peer
        self._connection = connection
        self._store = store
        self._requests = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}  # to pulls of ours
        self._ahead: set[int] = set()  # those of our pulls whose values may be pushed instead
        self._serving: dict[int, asyncio.Task[None]] = {}  # pulls of theirs
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[Any] | None = None
        self._ending: FlowrtError | None = None
        self.pushed: deque[StepKey] = deque(maxlen=REMEMBERED_PUSHES)  # what may be lost with the connection

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._ending is not None or self._connection.closed

    @property
    def ending(self) -> str:
        """Why nothing comes any more, once that is so."""
        return str(self._ending)

    async def run(self) -> None:
        """Serve until the connection ends, however it does; raises nothing but cancellation. Closes it at the end."""
        self._runner = asyncio.current_task()
        try:
            async with self._connection, asyncio.TaskGroup() as self._tasks:
                try:
                    if self._ending is None:
                        await self._read()
                finally:
                    self._end()
        finally:
            self._end()

    def post(self, message: Any) -> bool:
        """Send a message that is not of a pull, behind all others; lost with the link, if that will be broken.

        Its arrays stay as they are until it has arrived. False says that the link is broken, and the message not sent.
        Raises `SpecError` for what is not a legal message.
        """
        if self._ending is not None:
            return False
        try:
            self._connection.post_frame(briefly.write(message) or to_frame(message))
        except (RemoteError, ClosedError):
            return False
        return True

    def push(self, key: StepKey, edge: int, value: Array | Dead | None) -> bool:
        """Send a value that nobody has asked for, if it is small, or else announce it; answers which.

        None is announced, too: it will be made as soon as it is asked for.
        """
        self.pushed.append(key)
        if value is None:
            self.post(Announce(*key, edge, 0))
            return False
        if isinstance(value, Dead):
            self.post(Push(*key, edge, None))
        elif value.nbytes <= SMALL:
            self.post(make_push(*key, edge, value))
        else:
            self.post(Announce(*key, edge, value.nbytes))
            return False
        return True

    def close(self, why: FlowrtError | None = None) -> None:
        """End `run`, now or once it begins; who waits for a value is told ``why``."""
        self._ending = self._ending or why or ClosedError(f"the link to {self.peer} was closed here")
        if self._runner is not None:
            self._runner.cancel()

    async def pull(
        self, key: StepKey, edge: int, spec: Spec, announced: int | None = None, expected: int = 0
    ) -> Array | Dead:
        """The value of ``edge`` of step ``key``; waits until it is there and there is room for it.

        ``announced`` is how many bytes it has, where the peer has said so of one that is there. One that is
        ``expected`` to have so many, as nobody knows before, may come pushed as well. Raises what went wrong at the
        peer, `ResourceError` where there is no memory for it, or `LinkBroken`. Cancelled, it tells the peer to forget
        the request.
        """
        if self._ending is not None:
            raise self._broken()
        request, where = next(self._requests), f"edge {edge} of {self.peer}"
        try:
            reply: Any = None if announced is None else TooLarge(request, announced)
            if reply is None:
                with self._store.allowance.promise(spec.nbytes if spec.known else expected) as room:
                    reply = await self._ask(request, Pull(request, *key, edge, room), bool(expected))
            if isinstance(reply, TooLarge):
                self._ahead.discard(request)
                async with self._store.budget.reserve(reply.nbytes):
                    self._store.check_room(reply.nbytes, spec, where)
                    granted = Grant(request) if announced is None else Pull(request, *key, edge, announced)
                    reply = await self._ask(request, granted)
        except (asyncio.CancelledError, ResourceError):
            self.post(Forget(request))
            raise
        finally:
            self._replies.pop(request, None)
            self._ahead.discard(request)
        value = _value_of(reply, self.peer)
        return value if isinstance(value, Dead) else checked(value, spec, where)

    # ── both sides ──

    async def _read(self) -> None:
        try:
            await self._connection.listen(self._hear)
        except (RemoteError, ClosedError, MemoryError) as error:
            self._ending = LinkBroken(f"the link to {self.peer} broke: {error}")
            _log.info("%s", self._ending)

    def _hear(self, data: Any) -> None:
        message = briefly.read(data) if type(data) is Brief else from_data(data)
        if type(message) in POSTED:
            self._store.posted(self.peer, message)
            return
        match message:
            case Push(epoch, number, edge, value):
                if value is not None and value.nbytes > SMALL:
                    raise BrokenStream(
                        f"{self.peer} pushed {value.nbytes} bytes; more than {SMALL} are to be asked for"
                    )
                self._store.arrived((epoch, number), edge, DEAD if value is None else value, self.peer)
            case Announce(nbytes=nbytes) | TooLarge(nbytes=nbytes) if nbytes < 0:
                raise BrokenStream(f"{self.peer} has a value of {nbytes} bytes")
            case Value() | DeadValue() | TooLarge() | Fault():
                self._settle(message)
            case Announce(epoch, number, edge, nbytes):
                self._store.arrived((epoch, number), edge, Announced(nbytes), self.peer)
            case Pull():
                self._begin(message)
            case Grant(request):
                if request in self._grants and not self._grants[request].done():
                    self._grants[request].set_result(None)
            case Forget(request):
                if request in self._serving:
                    self._serving[request].cancel()
            case _:
                raise BrokenStream(f"{type(message).__name__} does not belong on a link")

    def _end(self) -> None:
        """Let everyone go who waits here."""
        if self._ending is None:
            self._ending = ClosedError(f"the link to {self.peer} was closed here")
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._broken())
        for task in self._serving.values():
            task.cancel()

    def _broken(self) -> FlowrtError:
        assert self._ending is not None
        return type(self._ending)(*self._ending.args)

    async def _send(self, message: Any) -> None:
        try:
            await self._connection.send(to_data(message))
        except (RemoteError, ClosedError) as error:
            _log.info("%s", error)  # the reader sees the same, and tells who waits

    # ── pulling ──

    async def _ask(self, request: int, message: Pull | Grant, may_be_pushed: bool = False) -> Any:
        reply = self._replies[request] = asyncio.get_running_loop().create_future()
        if self._ending is not None:
            raise self._broken()
        self.post(message)
        if isinstance(message, Pull) and may_be_pushed:
            self._ahead.add(request)
            came = Waiter(partial(self._pushed_instead, request))
            self._store.rendezvous.wait((message.epoch, message.number), message.edge, came)
        return await reply

    def _pushed_instead(self, request: int, value: Any) -> None:
        """What was asked for was made before the request came, and is small."""
        reply = self._replies.get(request)
        if reply is not None and not reply.done() and not isinstance(value, Announced):
            reply.set_result(value)
            self.post(Forget(request))

    def _settle(self, message: Value | DeadValue | TooLarge | Fault) -> None:
        reply = self._replies.get(message.request)
        if isinstance(message, Fault) and message.error == StepCancelled.__name__ and message.request in self._ahead:
            return  # the peer's part of the step is over: then the value was pushed, on a link of its own, or all is
        if reply is not None and not reply.done():
            reply.set_result(message)

    # ── being pulled from ──

    def _begin(self, pull: Pull) -> None:
        if pull.request in self._serving or len(self._serving) >= MAX_PULLS:
            raise BrokenStream(f"pull {pull.request} came twice, or is one of more than {MAX_PULLS}")
        assert self._tasks is not None
        task = self._serving[pull.request] = self._tasks.create_task(self._serve(pull))
        task.add_done_callback(lambda _: self._serving.pop(pull.request, None))

    async def _serve(self, pull: Pull) -> None:
        try:
            value = await self._asked_for(pull)
            if isinstance(value, Dead):
                await self._send(DeadValue(pull.request))
                return
            with self._store.sending(self.peer, (pull.epoch, pull.number), value.nbytes):
                if value.nbytes > pull.room:
                    await self._offer(pull.request, value.nbytes)
                await self._send(Value(pull.request, value))
        except (FlowrtError, MemoryError) as error:
            await self._send(Fault(pull.request, *name_error(error)))

    async def _asked_for(self, pull: Pull) -> Array | Dead:
        if not self._store.knows(pull.epoch):
            raise StepCancelled(f"step {pull.number} has ended: its master is gone")
        return await self._store.rendezvous.take((pull.epoch, pull.number), pull.edge)

    async def _offer(self, request: int, nbytes: int) -> None:
        grant = self._grants[request] = asyncio.get_running_loop().create_future()
        try:
            await self._send(TooLarge(request, nbytes))
            await grant
        finally:
            del self._grants[request]


def _value_of(reply: Any, peer: str) -> Array | Dead:
    match reply:
        case Value(_, value):
            return value
        case DeadValue():
            return DEAD
        case np.ndarray() | Dead():
            return reply
        case FlowrtError():
            raise reply
        case Fault(_, name, text):
            raise as_error(name, f"from {peer}: {text}")
        case _:
            raise BrokenStream(f"{peer} answered a pull with {type(reply).__name__}")


def checked(value: Any, spec: Spec, where: str) -> Array:
    """``value`` if it is the tensor that a plan says comes there; kernels trust it from here on.

    Raises `ResourceError` where there was no memory for it.
    """
    if type(value) is np.ndarray and value.dtype is spec.dtype and value.shape == spec.dims:
        return value  # as nearly always
    if isinstance(value, NoRoom):
        raise value.error(where)
    if not isinstance(value, np.ndarray) or not spec.accepts(value.dtype, value.shape):
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise BrokenStream(f"{where}: expected {spec}, {got} came")
    return value
