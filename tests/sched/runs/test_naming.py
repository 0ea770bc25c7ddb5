"""A replica names the rows that a batch takes before it computes; what fails there fails the version."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.base.errors import FlowrtError
from flowrt.sched.drivers.beginning import BeginReplica
from flowrt.sched.drivers.messages import Batch, Failed, NewVersion, Seen, Wants
from flowrt.sched.replica.asking import Asking
from flowrt.sched.replica.replica import Replica


class RecordingWay:
    """Notes what is posted; whatever is computed fails."""

    striking = None

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, task: str, message: Any) -> None:
        self.posted.append(message)

    def compute(self, plan: Any, feeds: Any, run: Any, then: Any, failed: Callable[[BaseException], None]) -> None:
        failed(FlowrtError("an index is out of range"))


@pytest.mark.parametrize("told_first", [False, True])
async def test_a_batch_whose_rows_cannot_be_named_fails_the_version_that_it_is_for(told_first: bool) -> None:
    none = "run", "replica", "replicas", "plan", "staleness", "ask", "told", "seed"
    numbers: dict[str, Any] = dict.fromkeys(none, 0)
    role = BeginReplica(
        **numbers, version=7, container="", group="g", feeds=(), wants=((0,), ()), parts=((), ()), finite=((), ()),
        servers=("/job:ps/task:0", "/job:ps/task:1"),
    )  # fmt: skip
    way = RecordingWay()
    plan: Any = SimpleNamespace(plan=SimpleNamespace(feeds=()))
    feedback: Any = SimpleNamespace(counted=-1)
    replica = Replica(role, plan, plan, way, feedback)  # type: ignore[arg-type]
    come: list[Any] = [Batch(0, 0, 1, ()), *(NewVersion(0, 7, server, 0, 0, False, 7, ()) for server in (0, 1))]
    for message in reversed(come) if told_first else come:
        replica.hear(message)
    replica.close()
    assert [message.version for message in way.posted if isinstance(message, Failed)] == [7]
    assert {message.version for message in way.posted if isinstance(message, Seen)} >= {7}


def test_a_server_that_was_asked_for_rows_of_a_batch_is_not_told_of_it_again() -> None:
    role: Any = SimpleNamespace(run=0, replica=0, servers=("/job:ps/task:0",), wants=((0,),))
    way: Any = RecordingWay()
    asking = Asking(role, None, way, lambda number, batch: None)
    asking.come(1, ("ids",))
    assert not asking.has(7, 1, ("ids",))
    asking.say()
    assert way.posted == [Wants(0, 0, 1, 7, ("ids",))]
