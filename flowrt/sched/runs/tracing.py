"""What a node notes for a client that traces it, and hands over a chunk at a time.

Law: one client traces a node at a time, and nothing is noted any more once it is gone. A chunk is kept until the next
one is asked for: its answer may be lost on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base import codec
from flowrt.base.errors import BrokenStream, GraphError
from flowrt.sched.drivers.messages import AskedRows, Batch, NewVersion, Report, Update
from flowrt.sched.host.tracer import Tracer, now
from flowrt.sched.server.reporting import OUTCOMES

if TYPE_CHECKING:
    from flowrt.sched.drivers.inquiries import TellTrace
    from flowrt.sched.host.host import Host

MOVED: dict[type[Any], str] = {Update: "update", NewVersion: "version", AskedRows: "rows", Batch: "batch"}
STAGES = 4  # of a version, as `Report` tells of them
Chunk = tuple[int, str, Any, bool, int]
"""The time here, by `now`; which tracer's it is; descriptions and notes as bytes, or None where only the time was asked
for; whether there are more; how many slices were left out so far."""


class HostTrace:
    """What ``host`` notes for one client."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._whose: tuple[str, int] | None = None
        self._tracer = Tracer()
        self._last: tuple[int, Any] = (0, None)

    def tell(self, asked: TellTrace, epoch: str) -> Chunk:
        """Do as the client of ``epoch`` asks. Raises `GraphError` where another one traces this node."""
        whose = (epoch, asked.trace)
        if self._whose != whose:
            self._begin(whose)
        self._host.trace(self._tracer if asked.on else None)
        tracer = self._tracer
        if not asked.most:
            return now(), tracer.birth, None, tracer.waiting, tracer.dropped
        if self._last[0] != asked.chunk + 1:
            self._last = asked.chunk + 1, _packed(*tracer.take(asked.most))
        return now(), tracer.birth, self._last[1], tracer.waiting, tracer.dropped

    def _begin(self, whose: tuple[str, int]) -> None:
        if self._host.tracer is not None:
            raise GraphError(f"{self._host.task} is being traced by another session; try again when that has ended")
        self._whose, self._tracer, self._last = whose, Tracer(), (0, None)

    def ended(self, epoch: str) -> None:
        """The client of ``epoch`` is gone."""
        if self._whose is not None and self._whose[0] == epoch:
            self._host.trace(None)
            self._whose, self._tracer, self._last = None, Tracer(), (0, None)

    def posted(self, peer: str, message: Any) -> None:
        """Note that a message leaves for ``peer``, if it carries tensors."""
        tracer = self._host.tracer
        if tracer is not None and isinstance(message, Report):
            note_version(tracer, message)
        note_moved(tracer, "post", self._host.task, peer, message)

    def heard(self, peer: str, message: Any) -> None:
        """Note that a message of ``peer`` has come."""
        note_moved(self._host.tracer, "hear", peer, self._host.task, message)


def note_moved(tracer: Tracer | None, kind: str, source: str, target: str, message: Any) -> None:
    """Note that a message of ``source`` to ``target`` leaves (``post``) or has come, if it carries tensors."""
    what = MOVED.get(type(message))
    if tracer is None or what is None:
        return
    version = message.number if what == "batch" else message.version
    server = 0 if what in ("batch", "update") else message.server
    flow = f"{source}>{target}/{what}/{message.run}/{version}/{message.replica}/{server}"
    name = f"{what} {version}" if what == "version" else f"{what} {version}, replica {message.replica}"
    if what == "update":
        name = f"update of {name.replace('update', 'version')}"
    peer = target if kind == "post" else source
    about = {"peer": peer, "flow": flow, "name": name, "bytes": nbytes_of(message)}
    moment = now()
    tracer.note(kind, -1, moment, moment, -1 if what == "batch" else version, about, track="")


def note_version(tracer: Tracer, report: Report) -> None:
    """Note a version, from its opening until all servers had applied it: whose updates it kept, and whose not."""
    about: dict[str, Any] = {"name": f"version {report.version} → {report.version + 1}"}
    for replica, _, code, seconds, _ in report.receipts:
        became = OUTCOMES[code].name.lower()
        took = "" if seconds < 0 else f" ({seconds * 1e3:.1f} ms)"
        about[became] = f"{about[became]}, {replica}{took}" if became in about else f"{replica}{took}"
    if report.told and isinstance(report.told[0], float):
        about["loss"] = report.told[0]
    if len(report.stages) == STAGES:  # by `time.monotonic`, which is the clock here
        opened, *_, applied = (int(seconds * 1e9) for seconds in report.stages)
        tracer.note("version", -1, opened, applied, report.version + 1, about, track="")


def nbytes_of(message: Any) -> int:
    """The bytes of the tensors in a message."""
    fields = (getattr(message, name, ()) for name in ("parts", "values", "rows", "more", "told"))
    return sum(_nbytes(field) for field in fields)


def _nbytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _packed(descriptions: list[Any], notes: list[Any]) -> Any:
    described = [np.frombuffer(codec.pack(description), np.uint8) for description in descriptions]
    return np.frombuffer(codec.pack_parts([len(described), *described, *notes]), np.uint8)


def unpacked(data: Any) -> tuple[list[Any], list[Any]]:
    """The descriptions and the notes of a chunk. Raises `BrokenStream` for anything else."""
    count, *parts = codec.unpack_parts(codec.bytes_of(data))
    if not isinstance(count, int) or not all(isinstance(part, np.ndarray) for part in parts[:count]):
        raise BrokenStream("a node handed over what is no part of a trace")
    return [codec.unpack(codec.bytes_of(part)) for part in parts[:count]], parts[count:]
