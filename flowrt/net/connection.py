"""One framed stream between two nodes, once the door (`flowrt.net.transport`) let it through.

Law: memory is bounded at both ends. A sender writes slices, and the next only when the kernel has taken the last, so
nothing is buffered here and what `Connection.send` was given may change once it returns. A receiver whose inbox is full
stops reading, which in time stops the sender. Frames never interleave, and never end in the middle while the connection
lives: a cancelled send finishes its frame, or the connection goes. Nothing here interprets a message.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from flowrt.codec import FRAME, Allocate, Limits, Message
from flowrt.errors import BrokenStream, ClosedError, FlowrtError, InternalError, NodeLost
from flowrt.net.frames import GOODBYE, FrameReader, Piece, allocate_array, frame, joined, writes
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from types import TracebackType


@valueclass
class Bounds:
    """What one connection may use; times in seconds."""

    limits: Limits = FRAME
    inbox_messages: int = 256  # received and not yet taken; then reading stops
    inbox_bytes: int = 16 << 20
    slice_bytes: int = 4 << 20  # written at once; less, and a large array waits for this side too
    socket_bytes: int | None = None  # the kernel's buffers, each way; None lets it tune them
    unacknowledged: float = 30.0  # the peer's kernel does not acknowledge, or has no room: then it is lost
    stall: float = 10.0  # a frame that was begun must go on
    grace: float = 2.0  # for a frame or a goodbye in progress when its sender is cancelled or closes


class _Stream(asyncio.BufferedProtocol):
    """What the event loop calls: fills the inbox, opens and shuts the gates, notices the end."""

    def __init__(self, transport: asyncio.Transport, peer: str, bounds: Bounds, allocate: Allocate) -> None:
        self.transport = transport
        self.peer = peer
        self.bounds = bounds
        self.reader = FrameReader(self._deliver, bounds.limits, allocate)
        self.inbox: deque[tuple[Message, int]] = deque()
        self.inbox_bytes = 0
        self.receiver: asyncio.Future[None] | None = None  # who waits for a message, or for the end
        self.writable = asyncio.Event()  # the kernel took everything that was written
        self.lost = asyncio.Event()
        self.closing = False  # by this side
        self.failure: FlowrtError | None = None
        self.loop = asyncio.get_running_loop()
        self.watch: asyncio.TimerHandle | None = None
        self.moved = 0.0  # when bytes last came in the middle of a frame
        self.due = 0.0  # when to look whether more came
        self.paused = False
        self.writable.set()

    def attach(self) -> None:
        """Become the transport's protocol. Reading is off meanwhile, so that no byte reaches the one before."""
        self.transport.pause_reading()
        self.transport.set_protocol(self)
        self.transport.set_write_buffer_limits(high=0)
        _tune(self.transport, self.bounds)
        self.transport.resume_reading()

    # ── called by the transport ──

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.reader.buffer_updated(nbytes)
        except FlowrtError as error:
            self.fail(type(error)(f"{self.peer}: {error}"))
            return
        if self.inbox and not self.paused and self._full():
            self.paused = True
            self.transport.pause_reading()
        if self.reader.ended:
            self.transport.close()
        elif not self.reader.idle:
            self._mind_progress()

    def _deliver(self, message: Message, size: int) -> None:
        if not self.closing:
            self.inbox.append((message, size))
            self.inbox_bytes += size
            self.wake_receiver()

    def eof_received(self) -> None:
        if not (self.reader.ended or self.closing) and self.failure is None:
            where = "between two frames, without a goodbye" if self.reader.idle else "in the middle of a frame"
            self.failure = NodeLost(f"{self.peer} closed the connection {where}")

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not (self.reader.ended or self.closing) and self.failure is None:
            self.failure = NodeLost(f"the connection to {self.peer} was lost: {exc or 'aborted'}")
        if self.watch is not None:
            self.watch.cancel()
        self.lost.set()
        self.wake_receiver()
        self.writable.set()

    # ── called by the connection ──

    @property
    def over(self) -> bool:
        """Whether nothing more can be sent, although the last bytes may still be on their way."""
        return self.closing or self.lost.is_set() or self.transport.is_closing()

    def close(self) -> None:
        """Keep and deliver nothing more; go on reading, to see the peer's end."""
        self.closing = True
        self.inbox.clear()
        self.wake_receiver()
        if not self.lost.is_set():
            self.transport.resume_reading()

    def wake_receiver(self) -> None:
        if self.receiver is not None and not self.receiver.done():
            self.receiver.set_result(None)

    async def wait_arrived(self) -> None:
        """Wait for news: a message, or that there will be none."""
        if self.receiver is not None and not self.receiver.done():
            raise InternalError(f"two tasks receive from {self.peer} at once; a connection has one consumer")
        self.receiver = self.loop.create_future()
        await self.receiver

    def take(self) -> Message:
        """The oldest message of an inbox that is not empty."""
        message, size = self.inbox.popleft()
        self.inbox_bytes -= size
        if self.paused and not self._full():
            self.paused = False
            self.moved = self.loop.time()
            self.transport.resume_reading()
        return message

    def fail(self, error: FlowrtError) -> None:
        if self.failure is None:
            self.failure = error
        self.transport.abort()

    def ending(self) -> FlowrtError:
        """Why nothing more can be sent or received; a fresh error for each who is told."""
        if self.closing:
            return ClosedError(f"the connection to {self.peer} was closed here")
        if self.failure is None:
            return NodeLost(f"{self.peer} closed the connection")
        return type(self.failure)(*self.failure.args)

    def _full(self) -> bool:
        return len(self.inbox) >= self.bounds.inbox_messages or self.inbox_bytes >= self.bounds.inbox_bytes

    def _mind_progress(self) -> None:
        self.moved = self.loop.time()
        if self.watch is None:
            self._look_again(self.bounds.stall)

    def _look_again(self, seconds: float) -> None:
        self.due = self.loop.time() + seconds
        self.watch = self.loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        self.watch = None
        if self.reader.idle or self.lost.is_set():
            return
        now = self.loop.time()
        if self.paused or now - self.due > self.bounds.stall:  # it was this side that stood still
            self.moved = now
        quiet = now - self.moved
        if quiet < self.bounds.stall:
            self._look_again(self.bounds.stall - quiet)
        else:
            self.fail(BrokenStream(f"{self.peer} stalled for {quiet:.1f} s in the middle of a frame"))


class Connection:
    """A stream of messages in both directions; `flowrt.net.transport` makes it, one owner closes it.

    Any number of tasks may send; what is received goes to one consumer. A peer that went away is `NodeLost`, one that
    sent something illegal is `BrokenStream`, and after `aclose` everything raises `ClosedError`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        peer: str,
        bounds: Bounds,
        allocate: Allocate = allocate_array,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.hello: Mapping[str, Any] = {}  # what this side said of itself
        self.peer_hello: Mapping[str, Any] = {}  # what the other side said
        self._turn = asyncio.Lock()
        self._waiting = 0  # for their turn, or for the kernel to take what they sent
        self._stream = _Stream(transport, peer, bounds, allocate)
        self._stream.attach()

    @property
    def peer(self) -> str:
        """The other end, for people: ``127.0.0.1:7001``."""
        return self._stream.peer

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent: either side closed the stream, or it was lost."""
        return self._stream.over

    @property
    def failure(self) -> FlowrtError | None:
        """What ended the stream, if neither side closed it in order."""
        return self._stream.failure

    async def wait_closed(self) -> None:
        """Wait until the stream is gone, whoever ended it. Raises nothing; `failure` tells why."""
        await self._stream.lost.wait()

    async def send(self, message: Message) -> None:
        """Send ``message``; its arrays may be changed again once this returns.

        Waits while the peer does not read. Cancelled before its turn, it has sent nothing; in the middle of its frame,
        it finishes the frame first, and closes the connection if that takes longer than ``Bounds.grace``. Raises
        `SpecError` for what is not a legal message, before anything is sent.
        """
        stream = self._stream
        pieces = frame(message, stream.bounds.limits)
        whole = None if self._waiting else joined(pieces)
        if whole is not None:  # the usual message: one write, no task switch
            if stream.over:
                raise stream.ending()
            stream.transport.write(whole)
            if stream.writable.is_set() and not stream.over:
                return
        rest = writes(pieces, stream.bounds.slice_bytes) if whole is None else (b"",)
        self._waiting += 1
        try:
            async with self._turn:
                if stream.over:
                    raise stream.ending()
                await self._write(rest)
        finally:
            self._waiting -= 1

    async def _write(self, pieces: Iterable[Piece]) -> None:
        """Write each piece when the kernel has taken the one before, and wait until it has taken the last."""
        stream, lost = self._stream, False
        cancelled: asyncio.CancelledError | None = None
        cut: asyncio.TimerHandle | None = None
        for piece in pieces:
            stream.transport.write(piece)
            while not stream.writable.is_set():
                try:
                    await stream.writable.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
                    cut = cut or stream.loop.call_later(stream.bounds.grace, stream.transport.abort)
            if stream.lost.is_set() or stream.transport.is_closing():
                lost = True
                break
        if cut is not None:
            cut.cancel()
        if cancelled is not None:
            raise cancelled
        if lost:
            raise stream.ending()

    async def receive(self) -> Message:
        """The next message. What came before a loss is still delivered; then the loss is raised."""
        stream = self._stream
        while not stream.closing and not stream.inbox:
            if stream.lost.is_set():
                raise stream.ending()
            await stream.wait_arrived()
        if stream.closing:
            raise stream.ending()
        return stream.take()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """As `receive`, but ends in peace when either side closed the stream in order."""
        try:
            return await self.receive()
        except (ClosedError, NodeLost):
            if self._stream.failure is None:
                raise StopAsyncIteration from None
            raise

    async def aclose(self) -> None:
        """Say goodbye and close; twice is once. Takes ``Bounds.grace`` at most, then the stream is cut."""
        stream = self._stream
        if not stream.closing:
            stream.close()
            try:
                async with asyncio.timeout(stream.bounds.grace):
                    async with self._turn:
                        self._say_goodbye()
                    await stream.lost.wait()
            except TimeoutError:
                pass
            finally:
                stream.transport.abort()
        await stream.lost.wait()

    def _say_goodbye(self) -> None:
        """The last bytes, then the end of our half; the peer answers by ending its own."""
        if self._stream.transport.is_closing():
            return
        self._stream.transport.write(GOODBYE)
        with suppress(OSError):  # the peer was faster
            self._stream.transport.write_eof()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _tune(transport: asyncio.Transport, bounds: Bounds) -> None:
    """Small messages at once, and a peer whose machine is gone noticed."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        raise InternalError("a connection needs a socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(bounds.unacknowledged * 1000))
    if bounds.socket_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, bounds.socket_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, bounds.socket_bytes)
