"""What is a message and what is not, and which of several errors is told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flowrt.base.errors import (
    LONGEST_TEXT,
    BrokenStream,
    FlowrtError,
    GraphError,
    LinkBroken,
    NodeLost,
    StepCancelled,
    as_error,
    name_error,
)
from flowrt.net.wire.frames import NoRoom
from flowrt.net.wire.messages import Value, from_data, root_error, to_data
from flowrt.net.wire.steps import Start


def test_a_message_comes_back_as_it_was() -> None:
    start = Start(3, 1, 42, (None,), (0,), (None,))
    assert from_data(to_data(start)) == start


NO_ROOM = NoRoom(np.dtype("int64"), (3,), "full")
NO_MESSAGES = [
    None,
    {},
    {"kind": "Boot"},
    {"kind": ["Ping"]},
    {"kind": "Ping"},
    {"kind": "Ping", "number": "1"},
    {"kind": "Ping", "count": 1},
    {"kind": "Ping", "number": NO_ROOM},
    {"kind": "Ping", "number": 1, "more": 2},
]


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_what_is_no_message_is_refused(data: object) -> None:
    with pytest.raises(BrokenStream):
        from_data(data)


def test_an_array_for_which_there_is_no_room_may_stand_for_any() -> None:
    for value in (np.arange(3), NO_ROOM):
        read = from_data({"kind": "Value", "request": 1, "value": value})
        assert isinstance(read, Value)
        assert read.value is value


def test_errors_keep_their_class_on_the_wire() -> None:
    assert isinstance(as_error(*name_error(StepCancelled("x"))), StepCancelled)
    assert str(as_error(*name_error(ValueError("x")))) == "ValueError: x"
    assert type(as_error("SystemExit", "x")).__name__ == "RemoteError"
    assert isinstance(as_error("SystemExit", "x"), FlowrtError)


def test_a_long_text_is_cut_where_it_is_too_long() -> None:
    for spare, told in ((0, "x" * LONGEST_TEXT), (1, "x" * LONGEST_TEXT + "…")):
        assert name_error(GraphError("x" * (LONGEST_TEXT + spare))) == ("GraphError", told)


def test_the_error_told_is_the_one_that_others_are_consequences_of() -> None:
    kinds = KeyError("a bug"), GraphError("mine"), NodeLost("away"), BrokenStream("cut"), StepCancelled("ended")
    for cause, effect in itertools.combinations(kinds, 2):
        for errors in ([cause, effect], [effect, cause], [effect, BaseExceptionGroup("within", [effect, cause])]):
            assert root_error(BaseExceptionGroup("all", errors)) is cause
    cut, broken = BrokenStream("cut"), LinkBroken("cut")
    assert root_error(BaseExceptionGroup("all", [broken, cut])) is broken, "the first of equals"
