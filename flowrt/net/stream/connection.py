"""One framed stream between two nodes, once the door (`flowrt.net.door.transport`) let it through.

Law: memory is bounded at both ends. A sender writes slices, and the next only when the kernel has taken the last, so
nothing is buffered here and what `Connection.send` was given may change once it returns. A receiver whose inbox is full
stops reading, which in time stops the sender. Frames never interleave, and never end in the middle while the connection
lives: what a cancelled send has begun, and all that was posted, the connection finishes when it can. A peer that is
stopped or does not read is waited for, though in the middle of a frame only for so long as `Bounds.stall` says; one
whose kernel answers nothing is gone (`flowrt.net.stream.sockets`). Nothing here interprets a message, and messages are
decoded, and handed to who listens, in the loop's own time: some, and then it is others' turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from flowrt.base.errors import BrokenStream, ClosedError, FlowrtError, InternalError, NodeLost
from flowrt.net.stream.outbox import Outbox, Outgoing
from flowrt.net.stream.sockets import ASK_SECONDS, Standstill, broken_by, tune, unanswered, unreachable
from flowrt.net.wire.frames import GOODBYE, WORK, FrameReader, Piece, frame, joined, placed, writes

if TYPE_CHECKING:
    from flowrt.base.codec import Message
    from flowrt.net.stream.bounds import Means
    from flowrt.net.stream.shared import Channel

SHORT_OF_MEMORY = 0.05  # seconds until a message that there was no memory to decode is tried again
TIME_SLICE = 1e-3  # seconds after which who listens to a stream lets others have the loop


class _Stream(asyncio.BufferedProtocol):
    """What the event loop calls: fills the inbox, writes what is to be sent, notices the end."""

    def __init__(self, transport: asyncio.Transport, peer: str, means: Means, channel: Channel | None) -> None:
        self.transport = transport
        self.peer = peer
        self.bounds = means.bounds
        self.local = means.local
        self.channel = channel
        borrow = None if channel is None else channel.borrow
        self.reader = FrameReader(self._deliver, self.bounds.limits, means.allocate, work=WORK, borrow=borrow)
        self.get_buffer = self.reader.get_buffer  # type: ignore[method-assign]
        self.inbox: deque[tuple[Message, int]] = deque()
        self.inbox_bytes = 0
        self.receiver: asyncio.Future[None] | None = None  # who waits for a message, or for the end
        self.hearer: Callable[[Message], None] | None = None  # who is told of messages as they come, instead
        self.heard: asyncio.Future[None] | None = None  # what ended the telling
        self.outbox = Outbox(transport)
        self.lost = asyncio.Event()
        self.is_lost = False  # as that says
        self.closing = False  # by this side
        self.failure: FlowrtError | None = None
        self.loop = asyncio.get_running_loop()
        self.watch: asyncio.TimerHandle | None = None
        self.moved = 0.0  # when bytes last came in the middle of a frame
        self.due = 0.0  # when to look whether more came
        self.paused = False  # the inbox is full
        self.breath: asyncio.TimerHandle | None = None  # until then nothing is decoded
        self.pulse: asyncio.TimerHandle | None = None  # when to ask the kernel for the peer
        self.standstill = Standstill()

    def attach(self) -> None:
        """Become the transport's protocol. Reading is off meanwhile, so that no byte reaches the one before."""
        self.transport.pause_reading()
        self.transport.set_protocol(self)
        self.transport.set_write_buffer_limits(high=0, low=0)
        self.socket = self.transport.get_extra_info("socket")
        if self.socket is None:
            raise InternalError("a connection needs a socket")
        tune(self.socket, self.bounds.unacknowledged, self.bounds.silence, self.bounds.socket_bytes)
        self._feel_pulse()
        if self.channel is not None:
            self.channel.attach(self._misled)
        self.transport.resume_reading()

    def _misled(self, error: FlowrtError) -> None:
        self.fail(type(error)(f"{self.peer}: {error}"))

    # ── called by the transport ──

    def buffer_updated(self, nbytes: int) -> None:
        listens = self.hearer is not None and not self.inbox and not self.closing
        if listens and (message := self.reader.take_alone(nbytes)) is not None:  # as mostly
            return self.hear(message)
        self._decode(nbytes)
        if self.inbox and not self.paused and self._full():
            self.paused = True
            self.transport.pause_reading()
        if self.reader.ended:
            self.transport.close()
        elif not self.reader.idle:
            self._mind_progress()

    def _decode(self, nbytes: int) -> None:
        """Take in bytes, as many as are decoded in little time; the others wait until the loop has been round."""
        try:
            self.reader.buffer_updated(nbytes)
        except FlowrtError as error:
            self.fail(type(error)(f"{self.peer}: {error}"))
        except MemoryError:
            self._breathe(SHORT_OF_MEMORY)
        else:
            if self.reader.more:
                self._breathe(0.0)
        if self.inbox or self.closing or self.is_lost:
            self.tell()

    def _breathe(self, seconds: float) -> None:
        if self.breath is None:
            self.transport.pause_reading()
            self.breath = self.loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self.breath = None
        if not self.is_lost and self.failure is None:
            self.buffer_updated(0)
            self._read_on()

    def _read_on(self) -> None:
        if not (self.paused or self.breath is not None or self.transport.is_closing()):
            self.moved = self.loop.time()
            self.transport.resume_reading()

    def _deliver(self, message: Message, size: int) -> None:
        if not self.closing:
            self.inbox.append((message, size))
            self.inbox_bytes += size
            if self.receiver is not None:
                self.wake_receiver()

    def eof_received(self) -> None:
        if not (self.reader.ended or self.closing) and self.failure is None:
            where = "between two frames, without a goodbye" if self.reader.idle else "in the middle of a frame"
            self.failure = NodeLost(f"{self.peer} closed the connection {where}")

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.blocked = False
        self.loop.call_soon(self.outbox.go_on)  # a write that fails inside of this call ends asyncio's transport twice

    def connection_lost(self, exc: Exception | None) -> None:
        while self.reader.more and self.failure is None:  # what came is delivered
            self._decode(0)
        self._note_loss(exc or "aborted")
        for timer in (self.watch, self.breath, self.pulse):
            if timer is not None:
                timer.cancel()
        if self.channel is not None:
            self.channel.close()
        self.is_lost = True
        self.lost.set()
        self.wake_receiver()
        self.outbox.clear()

    def _note_loss(self, cause: object) -> None:
        """Say that the stream was cut, unless a side had ended it in order, or it is said already."""
        if not (self.reader.ended or self.closing) and self.failure is None:
            self.failure = broken_by(cause, f"the connection to {self.peer} was lost: {cause}")

    # ── called by the connection ──

    @property
    def over(self) -> bool:
        """Whether nothing more can be sent, although the last bytes may still be on their way."""
        return self.closing or self.is_lost or self.transport.is_closing()

    @property
    def gone(self) -> bool:
        """Whether what was written last may never arrive."""
        return self.is_lost or self.transport.is_closing()

    def writes(self, pieces: Sequence[Piece], changing: bool) -> Iterator[Piece]:
        """A frame as it is to be written, once its turn has come: large arrays are lent, if they can be."""
        channel = self.channel
        if channel is not None:
            pieces = placed(pieces, lambda data: channel.lend(data, changing=changing))
        for piece in writes(pieces, self.bounds.slice_bytes):
            if self.local is not None:
                self.local.socket_bytes += len(piece)
            yield piece

    def close(self) -> None:
        """Keep and deliver nothing more; go on reading, to see the peer's end."""
        if self.transport.is_closing():  # the kernel refused what was written, and nobody was told yet
            self._note_loss("the peer takes nothing any more")
        self.closing = True
        self.inbox.clear()
        self.paused = False
        self.outbox.refuse(self.ending)
        self.wake_receiver()
        if not self.is_lost:
            self._read_on()

    def wake_receiver(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None and not receiver.done():
            receiver.set_result(None)
        if self.closing or self.is_lost:
            self.tell()

    def tell(self) -> None:
        """Hand what has come to who listens, and in the end, why nothing more comes."""
        until = time.monotonic() + TIME_SLICE if len(self.inbox) > 1 else 0.0
        while self.inbox and self.hearer is not None:
            self.hear(self.take())
            if self.inbox and time.monotonic() > until:
                self.loop.call_soon(self.tell)
                return
        if self.hearer is not None and (self.closing or self.is_lost):
            self.stop_telling(self.ending())

    def hear(self, message: Message) -> None:
        try:
            if self.hearer is not None:
                self.hearer(message)
        except Exception as error:
            self.stop_telling(error)

    def stop_telling(self, why: Exception) -> None:
        self.hearer = None
        if self.heard is not None and not self.heard.done():
            self.heard.set_exception(why)

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
            self._read_on()
        return message

    def fail(self, error: FlowrtError) -> None:
        if self.failure is None:
            self.failure = error
        self.abort()

    def abort(self) -> None:
        """Cut the stream, if it is not gone: asyncio's transport fails if it was closed before its last write."""
        if not self.is_lost:
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

    # ── called by the clock ──

    def _mind_progress(self) -> None:
        self.moved = self.loop.time()
        if self.watch is None:
            self._look_again(self.bounds.stall)

    def _look_again(self, seconds: float) -> None:
        self.due = self.loop.time() + seconds
        self.watch = self.loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        self.watch = None
        if self.reader.idle or self.is_lost:
            return
        now = self.loop.time()
        if self.paused or self.breath is not None or now - self.due > self.bounds.stall:  # it was this side
            self.moved = now
        quiet = now - self.moved
        if quiet < self.bounds.stall:
            self._look_again(self.bounds.stall - quiet)
        else:
            self.fail(BrokenStream(f"{self.peer} stalled for {quiet:.1f} s in the middle of a frame"))

    def _feel_pulse(self) -> None:
        self.pulse = None
        if self.transport.is_closing():
            return
        silent = unanswered(self.socket)
        untaken = self.standstill.seconds(self.transport.get_write_buffer_size())
        if silent >= self.bounds.silence:
            self.fail(unreachable(self.peer, silent))
        elif untaken >= self.bounds.unacknowledged:
            self.fail(NodeLost(f"{self.peer} has taken nothing for {untaken:.1f} s"))
        else:
            self.pulse = self.loop.call_later(ASK_SECONDS, self._feel_pulse)


class Connection:
    """A stream of messages in both directions; `flowrt.net.door.transport` makes it, one owner closes it.

    Any number of tasks may send; what is received goes to one consumer. A peer that went away is `NodeLost`, one that
    sent something illegal is `BrokenStream`, and after `aclose` everything raises `ClosedError`.
    """

    def __init__(self, transport: asyncio.Transport, peer: str, means: Means, channel: Channel | None = None) -> None:
        self.hello: Mapping[str, Any] = {}  # what this side said of itself
        self.peer_hello: Mapping[str, Any] = {}  # what the other side said
        self._stream = _Stream(transport, peer, means, channel)
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

    @property
    def waiting(self) -> int:
        """How many messages wait for their turn, or for the kernel to take them."""
        return len(self._stream.outbox)

    async def wait_closed(self) -> None:
        """Wait until the stream is gone, whoever ended it. Raises nothing; `failure` tells why."""
        await self._stream.lost.wait()

    async def send(self, message: Message) -> None:
        """`send_frame` of a message that is no frame yet. Raises `SpecError` for what is not a legal message."""
        await self.send_frame(frame(message, self._stream.bounds.limits))

    async def send_frame(self, framed: list[Piece], begun: Callable[[], None] | None = None) -> None:
        """Send a message; its arrays may be changed again once this returns.

        Waits while the peer does not read. Cancelled before its turn, it has sent nothing; ``begun`` is called when its
        turn comes, and from then on the message will arrive whole, or the connection is lost. Cancelled after that, it
        returns at once, and the connection keeps the arrays until the kernel has taken them: who changes them meanwhile
        changes what arrives.
        """
        stream = self._stream
        if stream.channel is not None and len(framed) > 1:
            framed = await stream.channel.move(framed)
        pieces = self._write(framed, begun)
        if pieces is None and not stream.outbox.blocked and not stream.over:
            return
        taken = stream.loop.create_future()
        rest = Outgoing((), None, taken) if pieces is None else Outgoing(pieces, begun, taken)
        stream.outbox.put(rest)
        try:
            await taken
        except asyncio.CancelledError:
            stream.outbox.withdraw(rest)
            raise
        if stream.gone:
            raise stream.ending()

    def send_at_once(self, framed: list[Piece]) -> bool:
        """Send a small message, if none waits before it and the stream stands; False: nothing was done."""
        return len(framed) == 1 and self._stream.outbox.idle and not self._stream.over and self._write(framed) is None

    def post_frame(self, framed: list[Piece]) -> None:
        """Send a message without waiting, behind all that was sent before; its arrays stay as they are until then.

        An array in memory that others of this host see is read there, for as long as the peer keeps what it got: who
        changes it meanwhile changes what the peer sees.

        What the kernel does not take at once is kept, and written as it does. Raises what `send_frame` raises; a peer
        that lets more than ``Bounds.outbox_messages`` wait is cut off.
        """
        pieces = self._write(framed, changing=True)
        if pieces is None:
            return
        stream = self._stream
        if len(stream.outbox) >= stream.bounds.outbox_messages:
            stream.fail(BrokenStream(f"{self.peer} does not read, and {len(stream.outbox)} messages wait for it"))
            raise stream.ending()
        stream.outbox.put(Outgoing(pieces))

    def _write(
        self, pieces: list[Piece], begun: Callable[[], None] | None = None, *, changing: bool = False
    ) -> Iterable[Piece] | None:
        """Write the usual message, small and with nothing before it, in one go; or answer how it is to be written."""
        stream, whole = self._stream, joined(pieces)
        transport, local = stream.transport, stream.local
        if stream.closing or stream.is_lost or transport.is_closing():
            raise stream.ending()
        if local is not None:
            local.messages += 1
            local.socket_bytes += 0 if whole is None else len(whole)
        if whole is None or not stream.outbox.idle:
            return stream.writes(pieces, changing) if whole is None else (whole,)
        if begun is not None:
            begun()
        transport.write(whole)
        return None

    async def receive(self) -> Message:
        """The next message. What came before a loss is still delivered; then the loss is raised."""
        stream = self._stream
        while not stream.closing and not stream.inbox:
            if stream.is_lost:
                raise stream.ending()
            await stream.wait_arrived()
        if stream.closing:
            raise stream.ending()
        return stream.take()

    async def listen(self, hear: Callable[[Message], None]) -> None:
        """Have ``hear`` called with each message as it comes, from the loop itself, in place of `receive`.

        Goes on until the stream ends, and raises then what `receive` would; or until ``hear`` raises, and raises that.
        """
        stream = self._stream
        if stream.hearer is not None:
            raise InternalError(f"two listen to {self.peer} at once; a connection has one consumer")
        stream.hearer, stream.heard = hear, (heard := stream.loop.create_future())
        stream.tell()
        try:
            await heard
        finally:
            stream.hearer = stream.heard = None

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

    def cut(self) -> None:
        """End the stream here and now, without a goodbye; it still has to be closed."""
        self._stream.fail(NodeLost(f"the connection to {self.peer} was cut here"))

    async def aclose(self) -> None:
        """Say goodbye and close; twice is once. Takes ``Bounds.grace`` at most, then the stream is cut."""
        stream = self._stream
        if not stream.closing:
            stream.close()
            try:
                async with asyncio.timeout(stream.bounds.grace):
                    await stream.outbox.drained.wait()
                    self._say_goodbye()
                    await stream.lost.wait()
            except TimeoutError:
                pass
            finally:
                stream.abort()
        await stream.lost.wait()

    def _say_goodbye(self) -> None:
        """The last bytes, then the end of our half; the peer answers by ending its own."""
        if self._stream.transport.is_closing():
            return
        self._stream.transport.write(GOODBYE)
        with suppress(OSError, NotImplementedError):  # the peer was faster; over TLS it answers to the goodbye alone
            self._stream.transport.write_eof()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
