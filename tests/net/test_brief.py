"""Messages of a fixed layout: they come as they were sent, however they are cut, and nothing illegal comes at all."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np
import pytest

from flowrt.base.codec import FRAME, Limits
from flowrt.base.errors import BrokenStream
from flowrt.net.wire import brief, briefly
from flowrt.net.wire.brief import BEGINS
from flowrt.net.wire.frames import WINDOW, FrameReader, NoRoom, allocate_array, frame
from flowrt.net.wire.messages import from_data, to_data, to_frame
from flowrt.net.wire.steps import Done, Push, Start
from flowrt.sched.drivers.messages import Allow, Batch, NewVersion, Report, Seen, Update

RUN = (1 << 62) - 5
SMALL = np.arange(6, dtype=np.float32).reshape(2, 3)
UPDATES = {
    "a scalar": Update(RUN, 7, 3, 9, (np.full((), 2, np.float32),), (0.5,), (), bytes(40)),
    "nothing": Update(0, 0, 0, 0, ()),
    "not finite": Update(RUN, 7, 3, 9, (), (nan,), (), b"", finite=False),
    "rows": Update(
        RUN,
        7,
        3,
        9,
        (np.arange(3, dtype=np.int32), SMALL),
        (1.0, -2.0),
        ((10, (np.arange(4, dtype=np.int64),)), (11, ())),
        bytes(range(40)),
        samples=64,
        square=0.25,
    ),
    "many": Update(RUN, 7, 3, 9, tuple(np.float32([[i]]) for i in range(250))),
    "large": Update(RUN, 7, 3, 9, (np.arange(100_000, dtype=np.float64), SMALL), (0.5,)),
    "empty and turned": Update(RUN, 7, 3, 9, (np.zeros((0, 4), np.float32), SMALL.T)),
}
VERSIONS = {
    "a scalar": NewVersion(RUN, 7, 0, 3, 8, True, 7, (np.ones((), np.float32),)),
    "rows": NewVersion(RUN, -1, 2, 3, 0, False, 0, (SMALL, np.arange(5) > 2), 12, (SMALL,)),
    "large": NewVersion(RUN, 7, 0, 3, 8, True, 7, (np.arange(100_000, dtype=np.float32),)),
}
RECEIPTS = ((0, 1 << 40, 0, 0.25, 0), (1, 7, 2, -1.0, 3))
REPORTS = {
    "of two replicas": Report(RUN, 7, RECEIPTS, (0.5, nan), 0.25, (1.0, 2.0, 3.0, 4.5), bytes(range(176)), "à temps"),
    "without times": Report(RUN, 7, RECEIPTS, (), nan, noise_scale=2.0),
    "of many": Report(RUN, 7, tuple((r, r, 0, 0.5, 0) for r in range(300)), (0.5,), 0.25, (), bytes(88 * 300)),
}
ALLOWS = {
    "to go on": Allow(RUN, 8, 7),
    "of no batches": Allow(RUN, 8, 7, ()),
    "to the end": Allow(RUN, 1 << 40, 7, (3, 1 << 40, 0)),
}
BATCHES = {
    "one": Batch(RUN, 3, 9, (SMALL, np.full((), 2, np.int32))),
    "several": Batch(RUN, 3, 9, (SMALL, np.arange(2)), ((SMALL + 1, np.arange(3)), (SMALL, np.arange(0)))),
    "without values": Batch(RUN, 3, 9, (), ((), ())),
    "large": Batch(RUN, 3, 9, (np.arange(100_000, dtype=np.float32),)),
}
STARTS = {
    "of nothing": Start(7, 0, RUN, ()),
    "fed": Start(7, 3, 0, (SMALL, np.full((), 2, np.int32))),
    "fed by edges": Start(7, 3, 0, (SMALL,), (4, 1 << 40), (np.arange(3), SMALL > 2)),
}
ENDS = {
    "of nothing": Done(7),
    "with values": Done(7, (SMALL, np.full((), 2, np.int32))),
}
PUSHES = {
    "a value": Push("f" * 32, 7, 3, SMALL),
    "of a named epoch": Push("époque", 7, 3, np.arange(0)),
}
MESSAGES: dict[str, Update | NewVersion | Report | Allow | Batch | Start | Done | Push] = {
    **{f"an update: {name}": update for name, update in UPDATES.items()},
    **{f"a version: {name}": version for name, version in VERSIONS.items()},
    **{f"a report: {name}": report for name, report in REPORTS.items()},
    **{f"a permission: {name}": allow for name, allow in ALLOWS.items()},
    **{f"batches: {name}": batch for name, batch in BATCHES.items()},
    **{f"a start: {name}": start for name, start in STARTS.items()},
    **{f"an end: {name}": done for name, done in ENDS.items()},
    **{f"a value: {name}": push for name, push in PUSHES.items()},
}

NUMBERS: dict[Any, slice] = {Report: slice(1, 3), Done: slice(1, 2), Push: slice(2, 4)}  # where others have three


def read(pieces: Sequence[bytes], limits: Limits = FRAME, allocate: Any = allocate_array) -> list[Any]:
    """The messages in these bytes, which come in these pieces."""
    came: list[Any] = []
    reader = FrameReader(lambda data, size: came.append(data), limits, allocate)
    for piece in pieces:
        left = memoryview(piece)
        while left:
            room = reader.get_buffer()
            count = min(len(room), len(left))
            room[:count] = left[:count]
            reader.buffer_updated(count)
            left = left[count:]
    assert reader.idle
    return [from_data(data) for data in came]


def written(message: Any) -> bytes:
    pieces = briefly.write(message)
    assert pieces is not None
    return b"".join(pieces)


def same(one: Any, other: Any) -> bool:
    """Whether two messages say the same, arrays by dtype, shape and entries."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, float):
        return type(other) is float and (one == other or (one != one and other != other))
    return type(one) is type(other) and bool(one == other)


def fields(message: Any) -> tuple[Any, ...]:
    return to_data(message)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_comes_as_it_was_sent(name: str) -> None:
    message = MESSAGES[name]
    if name.endswith("turned"):  # which is copied for the wire by others
        assert briefly.write(message) is None
        return
    whole = written(message)
    cuts = sorted(random.Random(5).sample(range(1, len(whole)), 6))
    in_pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    for pieces in ([whole], in_pieces, [whole[i : i + 1] for i in range(len(whole))][:4000]):
        if sum(map(len, pieces)) < len(whole):
            continue
        (came,) = read(pieces)
        assert type(came) is type(message)
        assert same(fields(came), fields(message))
        assert not hasattr(came, "__dict__")
        with pytest.raises(AttributeError):
            came.run = 1
    assert same(tuple(map(fields, read([whole + whole]))), (fields(message), fields(message)))


def test_a_message_that_comes_alone_is_taken_at_once_and_nothing_else_is() -> None:
    came: list[Any] = []
    reader = FrameReader(lambda data, size: came.append(data))

    def alone(*pieces: bytes) -> Any:
        whole = b"".join(pieces)
        reader.get_buffer()[: len(whole)] = whole
        return reader.take_alone(len(whole))

    one, other = written(UPDATES["rows"]), written(VERSIONS["a scalar"])
    assert same(fields(from_data(alone(one))), fields(UPDATES["rows"]))
    assert same(fields(from_data(alone(other))), fields(VERSIONS["a scalar"]))
    assert from_data(alone(*frame(to_data(Seen(RUN, 1, 2))))) == Seen(RUN, 1, 2)
    for pieces in ([one[:-1]], [one, other], [one, b"\0"], [one[:4]], [one[:3]], [bytes(4)]):
        assert alone(*pieces) is None
    assert reader.idle
    assert alone(one[:9]) is None
    reader.buffer_updated(9)
    assert alone(one[9:]) is None  # it began before
    reader.buffer_updated(len(one) - 9)
    assert same(fields(from_data(came.pop())), fields(UPDATES["rows"]))
    assert alone(one) is not None
    alone(bytes(4))
    reader.buffer_updated(4)
    assert reader.ended
    assert alone(one) is None  # which is an error
    assert not came


def test_what_has_no_place_in_the_layout_is_left_to_others() -> None:
    assert briefly.write(Seen(RUN, 1, 2)) is None
    assert briefly.write(Update(RUN, 7, 3, 9, ("bundle", np.zeros(3, np.uint8)))) is None
    assert briefly.write(Update(RUN, 7, 3, 9, (SMALL,), (0.5, SMALL))) is None  # a metric that is an array
    assert briefly.write(Update(RUN, 7, 3, 9, (SMALL.astype(">f4"),))) is None
    assert briefly.write(Update(RUN, 7, 3, 9, (SMALL,), (0.5,) * 40)) is None
    assert briefly.write(Update(1 << 70, 7, 3, 9, (SMALL,))) is None
    assert briefly.write(NewVersion(RUN, 7, 0, 3, 8, True, 7, ("bundle", SMALL))) is None
    assert briefly.write(Report(RUN, 7, RECEIPTS, (SMALL,), 0.25)) is None
    assert briefly.write(Report(RUN, 7, RECEIPTS, (), 0.25, why="?" * 2000)) is None
    assert briefly.write(Report(RUN, 7, (), (0.5,), 0.25)) is None
    assert briefly.write(Report(RUN, 7, RECEIPTS, (0.5,), 0.25, identities=((3,), (4,)))) is None
    assert briefly.write(Allow(RUN, 8, 7, (1,) * 100)) is None
    assert briefly.write(Batch(RUN, 3, 9, (SMALL,), ((SMALL, SMALL),))) is None
    others = [
        Start(1 << 63, 0, 0, ()),
        Start(7, 0, 0, (), tuple(range(100)), (SMALL,) * 100),
        Done(7, (SMALL, None)),
        Done(7, error="ValueError", text="why"),
        Push("e", 7, 3, None),
    ]
    for message in others:
        assert briefly.write(message) is None
        (came,) = read([b"".join(to_frame(message))])
        assert same(fields(came), fields(message))


@pytest.mark.parametrize("arrays", [(), (SMALL,), (SMALL,) * 3])
def test_what_does_not_come_with_the_arrays_that_it_tells_of_breaks_the_stream(arrays: tuple[Any, ...]) -> None:
    for message in (STARTS["fed by edges"], PUSHES["a value"]):
        (came,) = [brief.decode_whole(memoryview(whole := written(message)), 0, len(whole), allocate_array)]
        assert came is not None
        assert came[0] is not None
        if isinstance(message, Start) and len(arrays) >= len(message.edges):
            continue  # others would be its feeds
        if isinstance(message, Push) and len(arrays) == 1:
            continue
        with pytest.raises(BrokenStream):
            briefly.read(came[0]._replace(arrays=arrays))


def test_a_permission_that_has_other_than_it_tells_of_breaks_the_stream() -> None:
    whole = written(Allow(RUN, 7, 3, (4, 5)))
    came = brief.decode_whole(memoryview(whole), 0, len(whole), allocate_array)
    assert came is not None
    assert came[0] is not None
    told, head = came[0], bytes(came[0].head)
    assert briefly.read(told).totals == (4, 5)
    below = head[:-20] + struct.pack("<i", -2)
    for wrong in (
        told._replace(arrays=(SMALL,)),
        *(told._replace(head=each) for each in (head + head, head[:-8], below)),
    ):
        with pytest.raises(BrokenStream, match="a permission came with"):
            briefly.read(wrong)


def test_what_several_are_told_is_written_as_it_was_when_the_first_was_told() -> None:
    values = (np.zeros(3, np.float32),)
    first = written(NewVersion(RUN, 7, 0, 0, 8, True, 7, values))
    values[0][:] = 1
    (again,) = read([written(NewVersion(RUN, 7, 0, 1, 8, True, 7, values))])
    assert same(read([first])[0].values, again.values)
    (anew,) = read([written(NewVersion(RUN, 8, 0, 1, 8, True, 7, (values[0],)))])
    assert same(anew.values, values)
    (rows,) = read([written(NewVersion(RUN, 8, 0, 1, 8, True, 7, (values[0],), 3, (SMALL,)))])
    assert same(rows.rows, (SMALL,))


def test_an_array_without_room_is_told_in_its_place() -> None:
    def refuse(dtype: Any, shape: tuple[int, ...]) -> Any:
        raise MemoryError("there is none")

    (came,) = read([written(UPDATES["large"])], allocate=refuse)
    assert [type(part) for part in came.parts] == [NoRoom, NoRoom]


def test_a_header_is_held_to_the_limits() -> None:
    whole = written(Update(RUN, 7, 3, 9, (SMALL,) * 5))
    assert len(read([whole], Limits(arrays=5))) == 1
    for limits in (Limits(arrays=4), Limits(header=40), Limits(array_bytes=100), Limits(rank=1)):
        with pytest.raises(BrokenStream):
            read([whole], limits)


def test_what_is_written_is_held_to_the_limits_to_the_byte() -> None:
    both = [SMALL, np.zeros(3, np.int8)]
    assert brief.frame(b"", both, Limits(array_bytes=27)) is not None
    assert brief.frame(b"", both, Limits(array_bytes=26)) is None
    assert brief.frame(b"", both, Limits(arrays=2)) is not None
    assert brief.frame(b"", both, Limits(arrays=1)) is None


def test_memory_is_asked_for_where_it_is_counted_and_not_for_a_few_numbers() -> None:
    asked: list[tuple[int, ...]] = []

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Any:
        asked.append(shape)
        return np.empty(shape, dtype)

    pieces = brief.frame(b"head", [SMALL, np.arange(2500.0)])
    assert pieces is not None
    whole = b"".join(pieces)
    found = brief.decode_whole(memoryview(whole), 0, len(whole), allocate)
    assert found is not None
    assert found[0] is not None
    assert found[1] == len(whole)
    assert same(found[0].arrays, (SMALL, np.arange(2500.0)))
    assert asked == [(2500,)]


def test_the_updates_of_a_model_of_many_variables_are_decoded_in_one_go() -> None:
    whole = memoryview(written(UPDATES["many"]))
    found = brief.decode_whole(whole, 0, len(whole), allocate_array)
    assert found is not None
    assert found[0] is not None
    assert same(fields(briefly.read(found[0])), fields(UPDATES["many"]))
    assert brief.decode_whole(whole, 0, len(whole) - 1, allocate_array) == (None, len(whole))


@pytest.mark.parametrize("cut", [9, 60, 1000, 70_000])
def test_a_message_with_room_in_the_window_is_waited_for_and_then_decoded_where_it_lies(cut: int) -> None:
    update = Update(RUN, 7, 3, 9, (np.arange(1 << 14, dtype=np.float32), np.zeros((0, 4)), np.arange(2048.0)))
    whole, came, asked = written(update), list[Any](), list[tuple[int, ...]]()

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Any:
        asked.append(shape)
        return np.empty(shape, dtype)

    reader = FrameReader(lambda data, size: came.append((data, size)), allocate=allocate)
    for piece, is_idle in ((written(ALLOWS["to go on"]), True), (whole[:cut], False), (whole[cut:], True)):
        assert asked == []
        reader.get_buffer()[: len(piece)] = piece
        reader.buffer_updated(len(piece))
        assert reader.idle == is_idle
    (_, (data, size)) = came
    assert same(fields(from_data(data)), fields(update))
    assert size == len(whole)
    assert [shape for shape in asked if 0 not in shape] == [(1 << 14,), (2048,)]


def test_a_message_without_room_in_the_window_is_received_where_it_stays() -> None:
    asked: list[tuple[int, ...]] = []

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Any:
        asked.append(shape)
        return np.empty(shape, dtype)

    whole = written(Update(RUN, 7, 3, 9, (np.arange(WINDOW, dtype=np.uint8),)))
    reader = FrameReader(lambda data, size: None, allocate=allocate)
    reader.get_buffer()[:1000] = whole[:1000]
    reader.buffer_updated(1000)
    assert asked == [(WINDOW,)]


@pytest.mark.parametrize("header", [b"\xc1", struct.pack("<BHH", BEGINS, 5, 0), struct.pack("<BHH", BEGINS, 0, 1)])
def test_a_header_that_is_cut_short_breaks_the_stream(header: bytes) -> None:
    with pytest.raises(BrokenStream):
        read([struct.pack("<I", len(header)) + header])


@pytest.mark.parametrize("name", [name for name in MESSAGES if "turned" not in name and "large" not in name])
@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_not_what_was_sent_make_a_message_or_break_the_stream(name: str, seed: int) -> None:
    draw, whole = random.Random(seed), written(MESSAGES[name])
    print(f"seed {seed}")
    for _ in range(200):
        bad = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            bad[draw.randrange(4, len(bad))] = draw.randrange(256)
        came: list[Any] = []
        reader = FrameReader(lambda data, size, came=came: came.append(data), Limits(array_bytes=1 << 20))
        try:
            reader.get_buffer()[: len(bad)] = bad
            reader.buffer_updated(len(bad))
            for data in came:
                made = from_data(data)
                assert isinstance(made, Update | NewVersion | Report | Allow | Batch | Start | Done | Push)
                numbers = fields(made)[NUMBERS.get(type(made), slice(1, 4))]
                assert same(numbers, tuple(map(int, numbers)))
        except BrokenStream:
            continue
