"""The ops that wait: on the event loop, where they never hold a kernel's lane.

Each handler takes the host, the run's context, the plan's node and its inputs, and answers the node's outputs. Handlers
are coroutines. Those that mostly have nothing to wait for, or only to be told, have one beside them that is a plain
function: it answers at once, or says who will be told, or that it takes the coroutine after all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.base.errors import BrokenStream, FeedError, GraphError, InternalError, QueueClosedError, ResourceError
from flowrt.base.plan import PlanNode
from flowrt.base.spec import Spec
from flowrt.sched.host.host import Host, RunContext
from flowrt.sched.host.rendezvous import Announced, Dead, Pushed, Waiter

if TYPE_CHECKING:
    from flowrt.sched.host.orders import Element
    from flowrt.sched.host.queues import Queue
    from flowrt.sched.host.rendezvous import Array, Remote, StepKey

Inputs: TypeAlias = "Sequence[Array | Dead]"
Handler: TypeAlias = Callable[[Host, RunContext, PlanNode, "Sequence[Any]"], Awaitable["Sequence[Array | Dead]"]]

T = TypeVar("T")


class Later(Enum):
    """What is answered in place of outputs by what cannot be done at once, nor by a call."""

    TASK = "task"


Answer: TypeAlias = "Sequence[Array | Dead] | Waiter | Later | Exception"
Then: TypeAlias = Callable[[Any], None]
AtOnce: TypeAlias = "Callable[[Host, RunContext, PlanNode, Sequence[Any], Then], Answer]"

EFFECTS: dict[str, Handler] = {}
AT_ONCE: dict[str, AtOnce] = {}


def handler_of(node: PlanNode) -> Handler:
    """Who carries out an effect."""
    if node.op not in EFFECTS:
        raise GraphError(f"{node.where()}: nothing carries out {node.op} on this node")
    return EFFECTS[node.op]


def effect(handler: Handler) -> Handler:
    """Decorator: the coroutine function carries out the op of its own name."""
    EFFECTS[handler.__name__] = handler
    return handler


def at_once(handler: AtOnce) -> AtOnce:
    """Decorator: the function tries the op that it is named after, without waiting.

    It answers the outputs, or the error; `Later.TASK`, with nothing done, where the op's coroutine has to be run; or a
    `Waiter`: then ``then`` is called with one of these, unless the waiter is withdrawn before.
    """
    AT_ONCE[handler.__name__.removesuffix("_at_once")] = handler
    return handler


@effect
async def send(host: Host, context: RunContext, node: PlanNode, inputs: Inputs) -> Sequence[Array | Dead]:
    edge, peer, value = node.attrs["edge"], node.attrs["peer"], inputs[0]
    if host.remote is not None and peer != host.task:
        while not host.rendezvous.awaited(context.key, edge):
            match host.remote.push(peer, context.key, edge, value):
                case Pushed.SENT:
                    return ()
                case Pushed.ANNOUNCED:
                    break
                case Pushed.NO_WAY:
                    await host.remote.open_way(peer, context.key)
    await host.rendezvous.send(context.key, edge, value)
    return ()


@at_once
def send_at_once(host: Host, context: RunContext, node: PlanNode, inputs: Inputs, then: Then) -> Answer:
    edge, peer, value, meet = node.attrs["edge"], node.attrs["peer"], inputs[0], host.rendezvous
    if meet.give(context.key, edge, value):
        return ()
    if host.remote is not None and peer != host.task:
        match host.remote.push(peer, context.key, edge, value):
            case Pushed.SENT:
                return ()
            case Pushed.NO_WAY:
                return Later.TASK
    taken = Waiter(lambda error: then(() if error is None else error))
    meet.leave(context.key, edge, value, taken)
    return taken


async def open_and_push(remote: Remote, peer: str, key: StepKey, edge: int) -> None:
    """Announce a value that is not made yet to a peer to whom there is no way yet."""
    while remote.push(peer, key, edge, None) is Pushed.NO_WAY:
        await remote.open_way(peer, key)


@effect
async def recv(host: Host, context: RunContext, node: PlanNode, inputs: Inputs) -> Sequence[Array | Dead]:
    return await receive(host, context, node)


async def receive(host: Host, context: RunContext, node: PlanNode, expected: int = 0) -> Sequence[Array | Dead]:
    """What ``node`` receives, which is ``expected`` to have about so many bytes where it had them the last time.

    Whatever the plan does not know to be large may be pushed before it is asked for.
    """
    edge, peer, announced = node.attrs["edge"], node.attrs["peer"], None
    if host.remote is None:
        raise InternalError(f"{node.where()}: {host.task} has no way to {peer}")
    if host.rendezvous.holds(context.key, edge):
        value = host.rendezvous.pick(context.key, edge)
        if isinstance(value, (np.ndarray, Dead)):
            return (value,)
        announced = value.nbytes or None if isinstance(value, Announced) else None
    if not node.outputs[0].known:
        expected = max(expected, 1)
    try:
        return (await host.remote.pull(peer, context.key, edge, node.outputs[0], announced, expected),)
    except ResourceError as error:
        raise ResourceError(f"{node.where()}: {error}") from None


@at_once
def recv_at_once(host: Host, context: RunContext, node: PlanNode, inputs: Inputs, then: Then) -> Answer:
    edge, peer, meet = node.attrs["edge"], node.attrs["peer"], host.rendezvous
    if meet.holds(context.key, edge):
        return _received(host, context, node, meet.pick(context.key, edge))
    if peer != host.task and (host.remote is None or host.remote.pulls(peer, node.outputs[0])):
        return Later.TASK
    return await_arrival(host, context, node, then)


def await_arrival(host: Host, context: RunContext, node: PlanNode, then: Then) -> Waiter:
    """Have ``then`` called with what comes of a value that is pushed or announced here."""
    edge, meet = node.attrs["edge"], host.rendezvous
    coming = Waiter(lambda value: then(_received(host, context, node, value)))
    meet.wait(context.key, edge, coming)
    return coming


def _received(host: Host, context: RunContext, node: PlanNode, value: Any) -> Answer:
    """What comes of a value that came: kernels trust it to be the tensor that the plan says comes there."""
    spec = node.outputs[0]
    match value:
        case Announced():
            host.rendezvous.arrive(context.key, node.attrs["edge"], value)
            return Later.TASK
        case ResourceError():
            return ResourceError(f"{node.where()}: {value}")
        case Exception():
            return value
        case np.ndarray() if not spec.accepts(value.dtype, value.shape):
            return BrokenStream(f"{node.where()}: expected {spec}, {value.dtype}{list(value.shape)} came")
    return (value,)


def _queue(host: Host, context: RunContext, node: PlanNode) -> Queue:
    name = (node.attrs["container"], node.attrs["resource"])
    return host.queue(name, node.attrs["capacity"], _component_specs(node), node.attrs["order"], context.seed)


async def _served(node: PlanNode, waiting: Awaitable[T]) -> T:
    """What a queue answers; its errors name the node."""
    try:
        return await waiting
    except (QueueClosedError, GraphError) as error:
        raise type(error)(f"{node.where()}: {error}") from None


def _component_specs(node: PlanNode) -> list[Spec]:
    shapes = node.attrs["shapes"]
    return [Spec(d, None if shapes is None else shapes[i]) for i, d in enumerate(node.attrs["dtypes"])]


def _checked(node: PlanNode, specs: Sequence[Spec], components: Sequence[Array]) -> Sequence[Array]:
    """The components of one element."""
    for i, (array, spec) in enumerate(zip(components, specs, strict=True)):
        if not spec.accepts(array.dtype, array.shape):
            raise FeedError(
                f"{node.where()}: component {i} is {Spec(array.dtype, array.shape)}, the queue holds {spec}"
            )
    return components


async def _put(host: Host, context: RunContext, node: PlanNode, elements: list[Sequence[Array]]) -> tuple[()]:
    """Enqueue elements, copied when there is room for them: the queue outlives the step's memory."""

    def make() -> list[Element]:
        return [tuple(np.array(array) for array in components) for components in elements]

    await _served(node, _queue(host, context, node).enqueue_made(len(elements), make, _holder(context, node)))
    return ()


def _holder(context: RunContext, node: PlanNode) -> tuple[StepKey, int]:
    """Under which an enqueue has its place in a queue's line."""
    return context.key, id(node)


def line_up(host: Host, context: RunContext, node: PlanNode, rows: int, turn: Callable[[], None]) -> Callable[[], None]:
    """Take a place in the line of the queue that ``node`` enqueues to; ``turn`` is called when there is room.

    Answers what gives up the place, if it was not used.
    """
    queue, holder = _queue(host, context, node), _holder(context, node)
    queue.line_up(holder, rows, turn)
    return partial(queue.step_back, holder)


@effect
async def enqueue(host: Host, context: RunContext, node: PlanNode, inputs: Any) -> Sequence[Array | Dead]:
    return await _put(host, context, node, [_checked(node, _component_specs(node), inputs)])


@effect
async def enqueue_many(host: Host, context: RunContext, node: PlanNode, inputs: Any) -> Sequence[Array | Dead]:
    if any(a.ndim == 0 for a in inputs):
        raise FeedError(f"{node.where()}: a scalar holds no elements; use enqueue for a single one")
    counts = {len(a) for a in inputs}
    if len(counts) > 1:
        raise FeedError(f"{node.where()}: its components hold different numbers of elements: {sorted(counts)}")
    specs = _component_specs(node)
    rows = [_checked(node, specs, [np.asarray(a[i]) for a in inputs]) for i in range(len(inputs[0]))]
    return await _put(host, context, node, rows)


@effect
async def dequeue(host: Host, context: RunContext, node: PlanNode, inputs: Inputs) -> Sequence[Array | Dead]:
    (element,) = await _served(node, _queue(host, context, node).dequeue(1))
    return element


@effect
async def dequeue_many(host: Host, context: RunContext, node: PlanNode, inputs: Any) -> Sequence[Array | Dead]:
    return _stack(node, await _served(node, _queue(host, context, node).dequeue(int(inputs[0]))))


@effect
async def dequeue_up_to(host: Host, context: RunContext, node: PlanNode, inputs: Any) -> Sequence[Array | Dead]:
    return _stack(node, await _served(node, _queue(host, context, node).dequeue(int(inputs[0]), up_to=True)))


def _stack(node: PlanNode, elements: Sequence[Element]) -> Sequence[Array]:
    if not elements:
        return tuple(np.empty((0, *(n or 0 for n in spec.dims or ())), spec.dtype) for spec in _component_specs(node))
    try:
        return tuple(np.stack(column) for column in zip(*elements, strict=True))
    except ValueError:
        shapes = sorted({str(list(array.shape)) for element in elements for array in element})
        raise FeedError(
            f"{node.where()}: elements of different shapes cannot be stacked: {', '.join(shapes)}; dequeue them singly"
        ) from None


@effect
async def queue_size(host: Host, context: RunContext, node: PlanNode, inputs: Inputs) -> Sequence[Array | Dead]:
    return (np.asarray(len(_queue(host, context, node)), np.int64),)


@effect
async def queue_close(host: Host, context: RunContext, node: PlanNode, inputs: Inputs) -> Sequence[Array | Dead]:
    _queue(host, context, node).close(node.attrs["cancel_pending_enqueues"])
    return ()
