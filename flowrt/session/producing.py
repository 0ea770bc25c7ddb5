"""Fills queues of a session from iterables: ``async with session.producing(queue, source):``.

Law: the queue is closed when the source ends, fails or is left, so nobody waits for what never comes. An error of the
source ends the block, which may itself have learnt no more than that the queue is closed; whoever else waits for
elements in this session has it as the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrt.base.errors import (
    ClosedError,
    FeedError,
    GraphError,
    QueueClosedError,
    StepCancelled,
    carried_site,
    user_site,
)
from flowrt.base.plain import shortened
from flowrt.base.tracebacks import brief
from flowrt.finishing import to_the_end
from flowrt.misuse import AsyncOnly
from flowrt.ops.structure import LEAF
from flowrt.session.step import Step

if TYPE_CHECKING:
    from types import TracebackType

    from flowrt.session.inside import Inside

Name: TypeAlias = tuple[str, str]
Failures: TypeAlias = MutableMapping[Name, Exception]

_QUEUE_OPS = frozenset({"enqueue", "enqueue_many", "dequeue", "dequeue_many", "dequeue_up_to"})


class Producing(AsyncOnly):
    """The block in which a queue is filled; see `Session.producing`. ``failures`` are of all the session's sources."""

    WHAT = "session.producing(...)"

    def __init__(
        self, session: Inside, queue: Any, source: Iterable[Any] | AsyncIterable[Any], failures: Failures
    ) -> None:
        self._site = user_site()
        if not hasattr(queue, "entrance"):
            raise GraphError(f"{self._site}: {queue!r} is not a queue; create an fr.FIFOQueue in the graph")
        if not isinstance(source, (Iterable, AsyncIterable)):
            raise GraphError(f"{self._site}: {source!r} is no source of elements; give a plain or async iterable")
        graph, feeds, enqueue, close = queue.entrance()
        self._session = session
        self._name: Name = (queue.resource.container, queue.resource.name)
        self._source = source
        self._put = Step(session, graph, LEAF, [enqueue], feeds)
        self._end = Step(session, graph, LEAF, [close], ())
        self._failures = failures
        self._failure: Exception | None = None
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> None:
        self._failures.pop(self._name, None)
        await self._group.__aenter__()
        self._producer = self._group.create_task(self._produce())

    @brief
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the source. Its error is raised, unless the block failed otherwise: then it is the cause of that."""
        self._producer.cancel()
        try:
            with suppress(BaseExceptionGroup):  # of the block's own error, which goes on by itself, and the source's
                await self._group.__aexit__(kind, error, trace)
        finally:
            self._session.retire(self._put, self._end)
        failure = self._failure
        if failure is None:
            return
        if error is None or isinstance(error, (QueueClosedError, asyncio.CancelledError)):
            raise failure from failure.__cause__
        if error.__cause__ is None and error is not failure:
            error.__cause__ = failure

    async def _produce(self) -> None:
        carried_site.set(self._site)  # of this task alone
        try:
            await self._pass_on()
        except QueueClosedError as error:
            if error.__cause__ is not None:  # else the source read another queue, which came to its end
                raise self._failed(error) from error.__cause__
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            text = f"{self._site}: the source of queue {self._name[1]!r} was cancelled"
            raise self._failed(StepCancelled(text)) from error
        except Exception as error:
            self._failed(error)
            raise
        finally:
            with suppress(ClosedError):
                await to_the_end(self._session.fill(self._end, ()))

    async def _pass_on(self) -> None:
        """Put the elements into the queue, until there are no more or nobody wants them."""
        async with aclosing(_as_async(self._source)) as elements:
            async for element in elements:
                arrays = self._put.arrays(self._components(element))
                try:
                    await self._session.fill(self._put, arrays)
                except QueueClosedError:
                    return

    def _components(self, element: Any) -> Sequence[Any]:
        """An element's components, of a mapping its values; a list is an array where there is one alone."""
        count = len(self._put.feeds)
        if isinstance(element, Mapping):
            element = tuple(element.values())
        whole = count == 1 and not isinstance(element, tuple)
        parts = [element] if whole or not isinstance(element, (tuple, list)) else element
        if len(parts) == count:
            return parts
        raise FeedError(
            f"{self._site}: an element of queue {self._name[1]!r} is a tuple of {count} components, "
            f"but the source gave {shortened(element)}"
        )

    def _failed(self, error: Exception) -> Exception:
        """Note why there are no more elements, before anybody learns that there are none."""
        self._failure = self._failures[self._name] = error
        return error


def why_closed(step: Step, failures: Failures) -> Exception | None:
    """The error of a source that closed one of the queues which ``step`` waits for, if that is why it is closed."""
    if not failures:
        return None
    nodes = (node for plan in step.compiled.plans.values() for node in plan.nodes if node.op in _QUEUE_OPS)
    found = (failures.get((node.attrs["container"], node.attrs["resource"])) for node in nodes)
    return next((failure for failure in found if failure is not None), None)


def _is_cancelled() -> bool:
    """Whether the present task itself is, and not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _as_async(source: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """The elements; an asynchronous generator is closed with this one, or nobody would hear of an error of its end."""
    if isinstance(source, AsyncGenerator):
        async with aclosing(source):
            async for item in source:
                yield item
    elif isinstance(source, AsyncIterable):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item
