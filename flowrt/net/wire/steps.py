"""What is said in every step of a session: that it begins, that it has ended, and its small values from task to task.

Law: that of `net.wire.briefly`, whose messages these are too. What has no place in these layouts goes the way of all
others: errors, values that are dead or do not lie in order, and more edges than there usually are.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np

from flowrt.base.errors import BrokenStream
from flowrt.base.valueclass import maker, valueclass
from flowrt.net.wire import brief

Array: TypeAlias = np.ndarray[Any, Any]
Pieces: TypeAlias = list[bytes | memoryview]

START, DONE, PUSH = 6, 7, 8  # the first byte of a head: see `briefly`
_START = struct.Struct("<B3qH")  # kind, number, plan, seed; how many values come by edges
_DONE = struct.Struct("<Bq")  # kind, number
_PUSH = struct.Struct("<B2q")  # kind, number, edge; behind them the epoch
_EDGES = [struct.Struct(f"<{count}q") for count in range(65)]


@valueclass
class Start:
    """Run a plan as step ``number``: answered by `Done`.

    ``feeds`` are the plan's. Of what it receives from the client, ``values`` come too, by ``edges``, as they are small;
    others are pulled.
    """

    number: int
    plan: int
    seed: int
    feeds: tuple[Any, ...]
    edges: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()


@valueclass
class Done:
    """The end of a step: the plan's ``fetches`` (None where dead), or what went wrong."""

    number: int
    fetches: tuple[Any, ...] = ()
    error: str = ""
    text: str = ""


@valueclass
class Push:
    """The value of an edge of step (epoch, number), small, or None where it is dead: to who receives it, unasked."""

    epoch: str
    number: int
    edge: int
    value: Array | None


make_start, make_done, make_push = maker(Start), maker(Done), maker(Push)


def write_start(start: Start) -> Pieces | None:
    edges, values, count = start.edges, start.values, len(start.edges)
    if count >= len(_EDGES) or count != len(values):
        return None
    head: bytes = _START.pack(START, start.number, start.plan, start.seed, count)
    if not count:  # as mostly
        return brief.frame(head, start.feeds)
    return brief.frame(head + _EDGES[count].pack(*edges), (*values, *start.feeds))


def read_start(head: bytes, arrays: tuple[Any, ...]) -> Start:
    _, number, plan, seed, count = _START.unpack_from(head)
    edges, end = _EDGES[count], _START.size
    if end + edges.size != len(head) or count > len(arrays):
        raise BrokenStream(f"the start of a step with {count} edges came with {len(head)} bytes, {len(arrays)} arrays")
    start: Start = make_start(number, plan, seed, arrays[count:], edges.unpack_from(head, end), arrays[:count])
    return start


def write_done(done: Done) -> Pieces | None:
    return None if done.error else brief.frame(_DONE.pack(DONE, done.number), done.fetches)


def read_done(head: bytes, arrays: tuple[Any, ...]) -> Done:
    _, number = _DONE.unpack(head)
    done: Done = make_done(number, arrays, "", "")
    return done


def write_push(push: Push) -> Pieces | None:
    return brief.frame(_PUSH.pack(PUSH, push.number, push.edge) + push.epoch.encode(), (push.value,))


def read_push(head: bytes, arrays: tuple[Any, ...]) -> Push:
    _, number, edge = _PUSH.unpack_from(head)
    if len(arrays) != 1:
        raise BrokenStream(f"a value was pushed as {len(arrays)} arrays")
    pushed: Push = make_push(head[_PUSH.size :].decode(), number, edge, arrays[0])
    return pushed
