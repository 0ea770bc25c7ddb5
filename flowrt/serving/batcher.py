"""A model that answers many at once: requests wait in a bounded queue, are joined, run as one step, and cut apart.

Law: what waits is bounded in requests and in bytes, and what is beyond that is refused at once. A request that fails
fails alone: where a run of several does, each is run again by itself. One that is cancelled is dropped wherever it is,
and a run that nobody waits for any more is stopped. `batching` decides; `joining` makes arrays of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.errors import (
    ClosedError,
    FeedError,
    FlowrtError,
    GraphError,
    InternalError,
    QueueClosedError,
    StepTimeout,
    WouldBlock,
    user_site,
)
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.queues import Queue
from flowrt.serving.batching import Batching, Forming
from flowrt.serving.joining import Array, cut, joined, size_of
from flowrt.serving.metrics import Metrics
from flowrt.serving.probing import joins, probes, sample
from flowrt.serving.signature import told
from flowrt.session.feeds import as_feed
from flowrt.session.session import Session

if TYPE_CHECKING:
    from flowrt.serving.model import Model
    from flowrt.session.options import Options
    from flowrt.session.step import CompiledStep

T = TypeVar("T")
LARGE = 1 << 20  # bytes that others would wait for, were they copied on the event loop
_log = logging.getLogger(__name__)


class Request:
    """One that waits for an answer."""

    def __init__(self, arrays: Sequence[Array], joins: bool) -> None:
        sizes = {len(array) for array in arrays} if joins else set()
        self.arrays: Sequence[Array] = arrays
        self.rows = sizes.pop() if len(sizes) == 1 else None
        self.group = tuple(array.shape[1:] for array in arrays)
        self.nbytes = sum(array.nbytes for array in arrays)
        self.arrived = time.monotonic()
        self.answer: asyncio.Future[list[Array]] = asyncio.get_running_loop().create_future()

    def finish(self, answer: list[Array] | FlowrtError) -> None:
        """Tell who waits, if somebody does."""
        if self.answer.done():
            return
        if isinstance(answer, FlowrtError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class Batcher:
    """One version of a model, while it is served: `serve` runs for as long as `infer` may be called."""

    def __init__(
        self, model: Model, batching: Batching, options: Options | None = None, metrics: Metrics | None = None
    ) -> None:
        self.model, self.batching, self.metrics = model, batching, metrics or Metrics()
        self.joins = batching.max_batch > 1 and joins(model)
        self.waiting = self.waiting_bytes = 0
        self._options = options
        self._queue = Queue(f"requests of {model.name}", batching.max_waiting)
        self._forming: Forming[Request] = Forming(batching.max_batch, batching.max_delay)
        self._running: tuple[Sequence[Request], asyncio.Timeout] | None = None
        self._lane = Lanes(1, "joining")

    async def serve(self, ready: asyncio.Future[None]) -> None:
        """Open a session, tell who waits that it is ``ready`` or why it is not, and answer until `close`."""
        try:
            async with Session(self.model.graph, options=self._options) as session:
                step = session.compile(list(self.model.outputs.values()), list(self.model.inputs.values()))
                await self._warm(step)
                if not ready.cancelled():
                    ready.set_result(None)
                while batch := await self._next():
                    live = [request for request in batch if not request.answer.done()]
                    if live:
                        await self._run(step, live)
        except FlowrtError as error:
            if not ready.done():
                ready.set_exception(error)
            elif not ready.cancelled():
                raise
        finally:
            self._queue.close(cancel_pending_enqueues=True)
            self._lane.close()

    def close(self) -> None:
        """Let nothing more in; what is waiting is answered."""
        self._queue.close()

    async def infer(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name for inputs by name, run with others' where that fits.

        Raises `FeedError` for what does not fit the signature, `WouldBlock` where too much waits already,
        `StepTimeout` after ``timeout`` seconds, and `ClosedError` after `close`.
        """
        began = time.monotonic()
        how = "error"
        try:
            request = self._admitted(values)
            answer = await self._answered(request)
            how = "ok"
            return dict(zip(self.model.outputs, answer, strict=True))
        except BaseException as error:
            how = outcome(error)
            raise
        finally:
            self.metrics.note_ended(how, time.monotonic() - began)

    def _admitted(self, values: Mapping[str, Any]) -> Request:
        """A request that has its place in the queue, which it takes at once."""
        if self._queue.closed:
            raise ClosedError(f"{user_site()}: the model {self.model.name!r} is not being served any more")
        if values.keys() != self.model.inputs.keys():
            takes = told(self.model.inputs)
            raise FeedError(f"the model {self.model.name!r} takes ({takes}), and was given ({', '.join(values)})")
        request = Request([as_feed(self.model.inputs[name], values[name]) for name in self.model.inputs], self.joins)
        waits, most = self.waiting_bytes + request.nbytes, self.batching
        if self.waiting >= most.max_waiting or (self.waiting and waits > most.max_bytes):
            raise WouldBlock(
                f"{self.waiting} requests of {self.waiting_bytes} bytes wait for the model {self.model.name!r}; "
                f"at most {most.max_waiting} of {most.max_bytes} bytes may: ask again later"
            )
        return request

    async def _answered(self, request: Request) -> list[Array]:
        nbytes = request.nbytes
        self.waiting += 1
        self.waiting_bytes += nbytes
        try:
            async with asyncio.timeout(self.batching.timeout):
                await self._queue.enqueue([(request,)])  # type: ignore[list-item]  # at once, unless many were given up
                return await request.answer
        except TimeoutError:
            raise StepTimeout(
                f"there was no answer within {self.batching.timeout} s; the request was given up"
            ) from None
        finally:
            self.waiting -= 1
            self.waiting_bytes -= nbytes
            self._drop(request)

    def _drop(self, request: Request) -> None:
        """Nobody waits for it any more."""
        request.answer.cancel()
        request.arrays = ()
        if self._running is None or request not in self._running[0]:
            return
        batch, scope = self._running
        if all(other.answer.done() for other in batch):
            self._running = None  # to be stopped once
            scope.reschedule(asyncio.get_running_loop().time())

    # Running

    async def _next(self) -> list[Request]:
        """The next batch; none once the queue is closed and all that was in it is answered."""
        forming = self._forming
        while True:
            for (request,) in await self._queue.dequeue(len(self._queue)):
                forming.add(request)  # type: ignore[arg-type]
            ended = self._queue.closed
            batch = forming.take(time.monotonic(), ended)
            if batch or ended:
                return batch
            due = forming.due()
            try:
                async with asyncio.timeout(None if due is None else max(due - time.monotonic(), 0)):
                    [(request,)] = await self._queue.dequeue(1)
                forming.add(request)  # type: ignore[arg-type]
            except (TimeoutError, QueueClosedError):
                continue

    async def _run(self, step: CompiledStep, batch: Sequence[Request]) -> None:
        """Answer them; where that fails, each by itself, as one may be why."""
        answers: list[list[Array]] | FlowrtError
        try:
            async with asyncio.timeout(None) as scope:
                self._running = batch, scope
                answers = await self._computed(step, batch)
        except TimeoutError:  # nobody waits for them any more
            return
        except FlowrtError as error:  # of no kind of its own where a kernel met a value that it cannot compute with
            answers = FeedError(str(error)) if type(error) is FlowrtError else error
        except Exception as error:  # it is these requests', and nobody else's
            _log.exception("a run of the model %r failed", self.model.name)
            answers = InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._running = None
        if not isinstance(answers, FlowrtError):
            for request, answer in zip(batch, answers, strict=True):
                request.finish(answer)
        elif len(batch) == 1:
            batch[0].finish(answers)
        else:
            for request in batch:
                if not request.answer.done():
                    await self._run(step, [request])

    async def _computed(self, step: CompiledStep, batch: Sequence[Request]) -> list[list[Array]]:
        sizes = [request.rows for request in batch]
        inputs = [request.arrays for request in batch]
        self.metrics.note_run(len(batch), sum(rows or 1 for rows in sizes))
        if None in sizes:
            return [[np.asarray(output) for output in await step(*inputs[0])]]
        beside = self._lane.run if sum(request.nbytes for request in batch) > LARGE else _at_once
        pieces = await beside(lambda: list(joined(inputs, self.batching.max_batch)))
        runs = [(await step(*arrays), len(arrays[0]), rows) for arrays, rows in pieces]
        return await beside(cut, runs, [rows for rows in sizes if rows is not None])

    async def _warm(self, step: CompiledStep) -> None:
        """Run each size once, so that nobody waits for kernels, and see that rows do not hang on one another."""
        sizes = [
            size_of(1 << power, self.batching.max_batch) for power in range(self.batching.max_batch.bit_length() + 1)
        ]
        for rows in sorted(set(sizes)) if self.joins else [1]:
            values = sample(self.model, rows)
            if values is None:
                return
            try:
                await step(*values)
            except FlowrtError:  # what it takes is known to its users alone
                return
        if self.joins:
            await self._check_rows(step)

    async def _check_rows(self, step: CompiledStep) -> None:
        pairs = probes(self.model)
        if pairs is None:
            return
        one, other = [await step(*values) for values in pairs]
        for name, first, second in zip(self.model.outputs, one, other, strict=True):
            if first.shape[:1] != (2,) or first[:1].tobytes() != second[:1].tobytes():
                raise GraphError(
                    f"the model {self.model.name!r}: a row of {name!r} hangs on the others that run with it, as where "
                    "a mean over the batch is taken; serve it with max_batch=1, so that each request runs alone"
                )


async def _at_once(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def outcome(error: BaseException) -> str:
    """How a request ended that was not answered."""
    match error:
        case WouldBlock() | ClosedError():
            return "overload"
        case StepTimeout():
            return "timeout"
        case asyncio.CancelledError():
            return "cancelled"
        case FeedError() | GraphError():
            return "invalid"
    return "error"
