"""How what is said in every step is written briefly: of replicated training an update, a version, and a report, a
permission to go on, and batches; of sessions what `net.wire.steps` has.

Law: what is read has the types of its class's fields, as `net.wire.messages` says of all others; anything else is
`BrokenStream`. What has no place in the layout, as metrics that are arrays, errors, or the batches that reports of a
detached run name, goes the way of all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import BrokenStream
from flowrt.net.wire import brief, frames, steps
from flowrt.sched.drivers.messages import (
    Allow,
    Batch,
    NewVersion,
    Report,
    Update,
    make_allow,
    make_batch,
    make_report,
    make_update,
    make_version,
)

if TYPE_CHECKING:
    from flowrt.net.wire.brief import Brief

Pieces: TypeAlias = list[bytes | memoryview]

_UPDATE, _VERSION, _REPORT, _ALLOW, _BATCH = 1, 2, 3, 4, 5  # the first byte of a head
# kind, run, version, replica, ready, samples, square, finite; how many parts and wants, told numbers, bytes of times
_UPDATE_HEAD = struct.Struct("<B5qd?4H")
_WANT = struct.Struct("<qH")  # number, how many values
# kind, run, version, server, replica, spent, begun, since, number, counted; how many values
_VERSION_HEAD = struct.Struct("<B5q?3qH")
# kind, run, version, seconds, noise scale; how many receipts, told numbers and stages; behind them the reason
_REPORT_HEAD = struct.Struct("<B2q2dI2H")
_RECEIPT = struct.Struct("<iqBdi")  # replica, batch, outcome, seconds, staleness
# kind, run, version, seen; how many totals, -1 for None
_ALLOW_HEAD = struct.Struct("<B3qi")
# kind, run, replica, number; how many batches, and values of each
_BATCH_HEAD = struct.Struct("<B3q2H")
_INTS = [struct.Struct(f"<{count}q") for count in range(65)]
_FLOATS = [struct.Struct(f"<{count}d") for count in range(17)]


def _write_update(update: Update) -> Pieces | None:
    told, wants, times, arrays = update.told, update.wants, update.times, update.parts
    if not _are_floats(told):
        return None
    head: bytes = _UPDATE_HEAD.pack(
        _UPDATE,
        update.run,
        update.version,
        update.replica,
        update.ready,
        update.samples,
        update.square,
        update.finite,
        len(arrays),
        len(wants),
        len(told),
        len(times),
    )
    for number, values in wants:
        head += _WANT.pack(number, len(values))
        arrays = (*arrays, *values)
    return brief.with_tail(head + _FLOATS[len(told)].pack(*told) + times, brief.tail(arrays))


def _read_update(head: bytes, arrays: tuple[Any, ...]) -> Update:
    unpacked = _UPDATE_HEAD.unpack_from(head)
    _, run, version, replica, ready, samples, square, finite, parts, wanted, told, times = unpacked
    at, behind = _UPDATE_HEAD.size, parts
    wants: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    for _ in range(wanted):
        number, count = _WANT.unpack_from(head, at)
        wants = (*wants, (number, arrays[behind : behind + count]))
        at, behind = at + _WANT.size, behind + count
    floats = _FLOATS[told]
    numbers, at = floats.unpack_from(head, at), at + floats.size
    if at + times != len(head) or behind != len(arrays):
        raise BrokenStream(f"an update came with {len(head)} bytes and {len(arrays)} arrays, and says it has others")
    parts = arrays[:parts] if wants else arrays
    return make_update(run, version, replica, ready, parts, numbers, wants, head[at:], finite, samples, square)


_last: tuple[Any, brief.Tail | None] = (None, None)  # values that were told last, and what they come to


def _tail_of(values: tuple[Any, ...]) -> brief.Tail | None:
    """What follows the head of a version with these values: what all replicas are told is joined once, if short."""
    global _last
    known, behind = _last
    if values is known:
        return behind
    behind = brief.tail(values, few=frames.ONE_WRITE)
    if behind is not None and not behind[-1]:
        _last = values, behind
    return behind


def _write_version(version: NewVersion) -> Pieces | None:
    head = _VERSION_HEAD.pack(
        _VERSION,
        version.run,
        version.version,
        version.server,
        version.replica,
        version.spent,
        version.begun,
        version.since,
        version.number,
        version.counted,
        len(version.values),
    )
    behind = brief.tail(version.values + version.rows) if version.rows else _tail_of(version.values)
    return brief.with_tail(head, behind)


def _read_version(head: bytes, arrays: tuple[Any, ...]) -> NewVersion:
    _, run, version, server, replica, spent, begun, since, number, counted, count = _VERSION_HEAD.unpack(head)
    if count > len(arrays):
        raise BrokenStream(f"a version of {count} values came with {len(arrays)} arrays")
    values, rows = arrays[:count], arrays[count:]
    return make_version(run, version, server, replica, spent, begun, since, values, number, rows, counted)


def _write_report(report: Report) -> Pieces | None:
    """The receipts and times, which are many where replicas are, travel as an array of bytes."""
    told, stages, receipts = report.told, report.stages, report.receipts
    if report.identities or report.errors or not (_are_floats(told) and _are_floats(stages)):
        return None
    head = _REPORT_HEAD.pack(
        _REPORT,
        report.run,
        report.version,
        report.seconds,
        report.noise_scale,
        len(receipts),
        len(told),
        len(stages),
    )
    head += _FLOATS[len(told)].pack(*told) + _FLOATS[len(stages)].pack(*stages) + report.why.encode()
    each = _receipts(len(receipts)).pack(*chain.from_iterable(receipts)) + report.times
    return brief.frame(head, (np.frombuffer(each, np.uint8),)) if each else None


@lru_cache(64)
def _receipts(count: int) -> struct.Struct:
    """The layout of so many receipts."""
    return struct.Struct("<" + count * _RECEIPT.format[1:])


def _read_report(head: bytes, arrays: tuple[Any, ...]) -> Report:
    _, run, version, seconds, noise_scale, count, told_numbers, stage_numbers = _REPORT_HEAD.unpack_from(head)
    at, floats = _REPORT_HEAD.size, _FLOATS[told_numbers]
    told, at, floats = floats.unpack_from(head, at), at + floats.size, _FLOATS[stage_numbers]
    stages, at = floats.unpack_from(head, at), at + floats.size
    if len(arrays) != 1 or not isinstance(arrays[0], np.ndarray):
        raise BrokenStream("a report came without the array of its receipts and times")
    each, end = arrays[0].tobytes(), count * _RECEIPT.size
    receipts = tuple(_RECEIPT.iter_unpack(each[:end]))
    if len(receipts) != count:
        raise BrokenStream(f"a report came with {len(receipts)} receipts, and says it has {count}")
    why = head[at:].decode()
    return make_report(run, version, receipts, told, seconds, stages, each[end:], why, noise_scale, (), ())


def _write_allow(allow: Allow) -> Pieces | None:
    totals = () if allow.totals is None else allow.totals
    if len(totals) >= len(_INTS):
        return None
    count = -1 if allow.totals is None else len(totals)
    head = _ALLOW_HEAD.pack(_ALLOW, allow.run, allow.version, allow.seen, count)
    return brief.frame(head + _INTS[len(totals)].pack(*totals), ())


def _read_allow(head: bytes, arrays: tuple[Any, ...]) -> Allow:
    _, run, version, seen, count = _ALLOW_HEAD.unpack_from(head)
    if arrays or len(head) != _ALLOW_HEAD.size + _INTS[max(count, 0)].size or count < -1:
        raise BrokenStream(f"a permission came with {len(head)} bytes and {len(arrays)} arrays, and says it has others")
    return make_allow(run, version, seen, None if count < 0 else _INTS[count].unpack_from(head, _ALLOW_HEAD.size))


def _write_batch(batch: Batch) -> Pieces | None:
    values, width = batch.values, len(batch.values)
    if not set(map(len, batch.more)) <= {width}:
        return None
    head = _BATCH_HEAD.pack(_BATCH, batch.run, batch.replica, batch.number, 1 + len(batch.more), width)
    return brief.frame(head, values if not batch.more else [value for one in (values, *batch.more) for value in one])


def _read_batch(head: bytes, arrays: tuple[Any, ...]) -> Batch:
    _, run, replica, number, count, width = _BATCH_HEAD.unpack(head)
    if count < 1 or count * width != len(arrays):
        raise BrokenStream(f"{count} batches of {width} values came with {len(arrays)} arrays")
    more = (
        tuple([arrays[at : at + width] for at in range(width, width * count, width)]) if width else ((),) * (count - 1)
    )
    return make_batch(run, replica, number, arrays[:width], more)


def _are_floats(values: tuple[Any, ...]) -> bool:
    """Whether there is a place for all of these numbers."""
    return len(values) < len(_FLOATS) and {float}.issuperset(map(type, values))


_WRITE: dict[type[Any], Callable[[Any], Pieces | None]] = {
    Update: _write_update,
    NewVersion: _write_version,
    Report: _write_report,
    Allow: _write_allow,
    Batch: _write_batch,
    steps.Start: steps.write_start,
    steps.Done: steps.write_done,
    steps.Push: steps.write_push,
}
_READ: dict[int, Callable[[bytes, tuple[Any, ...]], Any]] = {
    _UPDATE: _read_update,
    _VERSION: _read_version,
    _REPORT: _read_report,
    _ALLOW: _read_allow,
    _BATCH: _read_batch,
    steps.START: steps.read_start,
    steps.DONE: steps.read_done,
    steps.PUSH: steps.read_push,
}


def write(message: Any) -> Pieces | None:
    """The frame of a message, if it is of such a kind, and there is a place for all of it."""
    kind = _WRITE.get(type(message))
    try:
        return None if kind is None else kind(message)
    except struct.error:  # a number that is too large
        return None


def read(data: Brief) -> Any:
    """The message that `write` wrote; raises `BrokenStream` for anything else."""
    head, arrays = data
    kind = _READ.get(head[0]) if head else None
    if kind is None:
        raise BrokenStream(f"a brief message of an unknown kind came: {head[:16]!r}")
    try:
        return kind(head, arrays)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise BrokenStream(f"a brief message of {len(head)} bytes is not what its kind is: {error}") from error
