"""How what is said in every step of replicated training is written briefly: an update, a version, and a report.

Law: what is read has the types of its class's fields, as `net.messages` says of all others; anything else is
`BrokenStream`. What has no place in the layout, as metrics that are arrays, or the batches that reports of a detached
run name, goes the way of all others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import BrokenStream
from flowrt.base.valueclass import maker
from flowrt.net import brief
from flowrt.sched.drivers.messages import NewVersion, Report, Update

if TYPE_CHECKING:
    from flowrt.net.brief import Brief

Pieces: TypeAlias = list[bytes | memoryview]

_UPDATE, _VERSION, _REPORT = 1, 2, 3  # the first byte of a head
# kind, run, version, replica, ready, samples, square, finite; how many parts and wants, told numbers, bytes of times
_UPDATE_HEAD = struct.Struct("<B5qd?4H")
_WANT = struct.Struct("<qH")  # number, how many values
# kind, run, version, server, replica, spent, begun, since, number; how many values
_VERSION_HEAD = struct.Struct("<B5q?2qH")
# kind, run, version, seconds, noise scale; how many receipts, told numbers and stages; behind them the reason
_REPORT_HEAD = struct.Struct("<B2q2dI2H")
_RECEIPT = struct.Struct("<iqBdi")  # replica, batch, outcome, seconds, staleness
_FLOATS = [struct.Struct(f"<{count}d") for count in range(17)]
_make_update, _make_version, _make_report = maker(Update), maker(NewVersion), maker(Report)


def _write_update(update: Update) -> Pieces | None:
    told, wants, times, arrays = update.told, update.wants, update.times, update.parts
    if not _are_floats(told):
        return None
    head = _UPDATE_HEAD.pack(
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
    return brief.frame(b"".join((head, _FLOATS[len(told)].pack(*told), times)), arrays)


def _read_update(head: bytes, arrays: tuple[Any, ...]) -> Update:
    _, run, version, replica, ready, samples, square, finite, *counts = _UPDATE_HEAD.unpack_from(head)
    parts, wanted, told, times = counts
    at, behind = _UPDATE_HEAD.size, parts
    wants: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    for _ in range(wanted):
        number, count = _WANT.unpack_from(head, at)
        wants = (*wants, (number, arrays[behind : behind + count]))
        at, behind = at + _WANT.size, behind + count
    numbers = _FLOATS[told].unpack_from(head, at)
    at += _FLOATS[told].size
    if at + times != len(head) or behind != len(arrays):
        raise BrokenStream(f"an update came with {len(head)} bytes and {len(arrays)} arrays, and says it has others")
    parts = arrays[:parts] if wants else arrays
    return _make_update(run, version, replica, ready, parts, numbers, wants, head[at:], finite, samples, square)


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
        len(version.values),
    )
    return brief.frame(head, version.values + version.rows)


def _read_version(head: bytes, arrays: tuple[Any, ...]) -> NewVersion:
    _, run, version, server, replica, spent, begun, since, number, count = _VERSION_HEAD.unpack(head)
    if count > len(arrays):
        raise BrokenStream(f"a version of {count} values came with {len(arrays)} arrays")
    values, rows = arrays[:count], arrays[count:]
    return _make_version(run, version, server, replica, spent, begun, since, values, number, rows)


def _write_report(report: Report) -> Pieces | None:
    """The receipts and times, which are many where replicas are, travel as an array of bytes."""
    told, stages, receipts = report.told, report.stages, report.receipts
    if report.identities or not (_are_floats(told) and _are_floats(stages)):
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
    each = b"".join([*[_RECEIPT.pack(*receipt) for receipt in receipts], report.times])
    return brief.frame(head, (np.frombuffer(each, np.uint8),)) if each else None


def _read_report(head: bytes, arrays: tuple[Any, ...]) -> Report:
    _, run, version, seconds, noise_scale, count, *numbers = _REPORT_HEAD.unpack_from(head)
    at, parts = _REPORT_HEAD.size, []
    for number in numbers:
        parts.append(_FLOATS[number].unpack_from(head, at))
        at += _FLOATS[number].size
    told, stages = parts
    if len(arrays) != 1 or not isinstance(arrays[0], np.ndarray):
        raise BrokenStream("a report came without the array of its receipts and times")
    each, end = arrays[0].tobytes(), count * _RECEIPT.size
    receipts = tuple(_RECEIPT.iter_unpack(each[:end]))
    if len(receipts) != count:
        raise BrokenStream(f"a report came with {len(receipts)} receipts, and says it has {count}")
    why = head[at:].decode()
    return _make_report(run, version, receipts, told, seconds, stages, each[end:], why, noise_scale, ())


def _are_floats(values: tuple[Any, ...]) -> bool:
    """Whether there is a place for all of these numbers."""
    return len(values) < len(_FLOATS) and {float}.issuperset(map(type, values))


_WRITE: dict[type[Any], Callable[[Any], Pieces | None]] = {
    Update: _write_update,
    NewVersion: _write_version,
    Report: _write_report,
}
_READ: dict[int, Callable[[bytes, tuple[Any, ...]], Any]] = {
    _UPDATE: _read_update,
    _VERSION: _read_version,
    _REPORT: _read_report,
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
