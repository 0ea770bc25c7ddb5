"""What a node notes for a client: chunks that are told again, whose trace it is, and what has no room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrt.base.errors import BrokenStream, GraphError
from flowrt.sched.drivers.inquiries import TellTrace
from flowrt.sched.drivers.messages import Batch, NewVersion, Report, Update
from flowrt.sched.host.host import Host
from flowrt.sched.host.tracer import Tracer, now
from flowrt.sched.runs.tracing import HostTrace, nbytes_of, unpacked

ONE, OTHER = TellTrace(1, 0, 100), TellTrace(2, 0, 100)


@pytest.fixture
def host() -> Host:
    return Host("/job:worker/task:0", threads=1)


def notes(chunk: Any) -> list[str]:
    """What the notes of a chunk are of."""
    return [note[0] for note in unpacked(chunk[2])[1]]


def test_a_chunk_whose_answer_was_lost_is_told_again(host: Host) -> None:
    trace = HostTrace(host)
    trace.tell(ONE, "client")
    assert host.tracer is not None
    for kind in ("a", "b", "c"):
        host.tracer.note(kind, -1, 0, 1)
    first = trace.tell(TellTrace(1, 1, 2), "client")
    assert notes(first) == notes(trace.tell(TellTrace(1, 1, 2), "client")) == ["a", "b"]
    assert first[3]  # there are more
    last = trace.tell(TellTrace(1, 2, 2, on=False), "client")
    assert (notes(last), last[3]) == (["c"], False)
    assert host.tracer is None


def test_to_ask_for_the_time_takes_nothing(host: Host) -> None:
    trace = HostTrace(host)
    before = now()
    said, _, data, _, _ = trace.tell(TellTrace(1, 0, 0), "client")
    assert before <= said <= now()
    assert data is None


def test_one_client_traces_a_node_at_a_time_and_none_once_it_is_gone(host: Host) -> None:
    trace = HostTrace(host)
    birth = trace.tell(ONE, "client")[1]
    with pytest.raises(GraphError, match="traced by another session"):
        trace.tell(OTHER, "other")
    trace.ended("other")
    assert trace.tell(ONE, "client")[1] == birth
    trace.ended("client")
    assert host.tracer is None
    assert trace.tell(OTHER, "other")[1] != birth


def test_direct_calls_are_shut_while_a_node_is_traced(host: Host) -> None:
    trace = HostTrace(host)
    trace.tell(ONE, "client")
    assert host.direct_gate[0] == 0
    trace.tell(TellTrace(1, 1, 1, on=False), "client")
    assert host.direct_gate[0] == 1


def test_descriptions_travel_once(host: Host) -> None:
    trace, described = HostTrace(host), object()
    trace.tell(ONE, "client")
    assert host.tracer is not None
    for _ in range(2):
        host.tracer.note("node", host.tracer.describe(described, lambda: ("name", "op", "", "a.py:1")), 0, 1)
    assert unpacked(trace.tell(TellTrace(1, 1, 1), "client")[2])[0] == [("name", "op", "", "a.py:1")]
    assert unpacked(trace.tell(TellTrace(1, 2, 1), "client")[2])[0] == []


def test_what_has_no_room_is_counted() -> None:
    tracer = Tracer(most=10)
    for _ in range(4):
        tracer.note("tape", -1, 0, 1, slices=4)
    assert tracer.dropped == 8
    assert len(tracer.take()[1]) == 2
    tracer.note("tape", -1, 0, 1, slices=4)  # there is room again
    assert tracer.dropped == 8
    assert tracer.waiting


def test_what_is_taken_while_something_is_being_described_mixes_nothing_up() -> None:
    tracer, first, second = Tracer(), object(), object()
    taken: list[str] = []

    def interrupted() -> str:
        """As another thread does that describes and takes meanwhile."""
        tracer.note("node", tracer.describe(second, lambda: "second"), 0, 1)
        taken.extend(tracer.take()[0])
        return "first"

    tracer.note("node", tracer.describe(first, interrupted), 0, 1)
    tracer.note("node", tracer.describe(second, lambda: "again"), 0, 1)
    descriptions, notes = tracer.take()
    assert [*taken, *descriptions] == ["second", "first"]
    assert [note[2] for note in notes] == [1, 0]


def test_messages_with_tensors_are_noted_by_what_identifies_them(host: Host) -> None:
    trace = HostTrace(host)
    trace.tell(ONE, "client")
    part = np.ones(3, np.float32)
    trace.posted("ps", Update(7, 5, 1, 1, (part, part)))
    trace.heard("ps", NewVersion(7, 6, 0, 1, 1, True, 5, (part,)))
    trace.heard("client", Batch(7, 1, 9, (part,), ((part,), (part,))))
    trace.posted("ps", object())
    told = [(note[0], note[6]["name"], note[6]["bytes"], note[6]["flow"]) for note in host_notes(host)]
    assert told == [
        ("post", "update of version 5, replica 1", 24, "/job:worker/task:0>ps/update/7/5/1/0"),
        ("hear", "version 6", 12, "ps>/job:worker/task:0/version/7/6/1/0"),
        ("hear", "batch 9, replica 1", 36, "client>/job:worker/task:0/batch/7/9/1/0"),
    ]


def test_a_version_is_noted_from_its_opening_until_it_was_applied(host: Host) -> None:
    trace = HostTrace(host)
    trace.tell(ONE, "client")
    receipts = ((0, 1, 0, 0.25, 0), (2, 1, 0, 0.5, 0), (1, 1, 1, -1.0, 0))
    trace.posted("client", Report(7, 3, receipts, (1.5,), 0.5, (10.0, 10.25, 10.375, 10.5)))
    ((kind, _, _, began, ended, number, about),) = host_notes(host)
    assert (kind, began, ended, number) == ("version", 10_000_000_000, 10_500_000_000, 4)
    assert about == {"name": "version 3 → 4", "kept": "0 (250.0 ms), 2 (500.0 ms)", "late": "1", "loss": 1.5}


def host_notes(host: Host) -> list[Any]:
    assert host.tracer is not None
    return host.tracer.take()[1]


def test_bytes_of_a_message_are_those_of_its_tensors() -> None:
    part = np.ones(4, np.float64)
    assert nbytes_of(NewVersion(1, 1, 0, 0, 1, True, 0, (part, (part, 3)), 0, (part,))) == 96


def test_what_is_no_chunk_is_refused() -> None:
    with pytest.raises(BrokenStream):
        unpacked(np.zeros(7, np.uint8))
