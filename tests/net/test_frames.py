"""Frames: any cut of the bytes gives the same messages, and garbage gives `BrokenStream` alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import messages, same

from flowrt.base import codec
from flowrt.base.codec import FRAME, Array, Limits
from flowrt.base.errors import BrokenStream, InternalError, ResourceError, SpecError
from flowrt.base.valueclass import replace
from flowrt.net.wire import brief, frames
from flowrt.net.wire.frames import (
    GOODBYE,
    WINDOW,
    WORK,
    Allocate,
    Borrow,
    FrameReader,
    LentPlace,
    NoRoom,
    allocate_array,
    frame,
    joined,
    placed,
    writes,
)


def wire(*sent: Any) -> bytes:
    return b"".join(bytes(piece) for message in sent for piece in frame(message))


class Received:
    """A reader and what it delivered."""

    def __init__(
        self,
        limits: Limits = FRAME,
        allocate: Allocate = allocate_array,
        window: int = WINDOW,
        work: int | None = None,
        borrow: Borrow | None = None,
    ) -> None:
        self.messages: list[Any] = []
        self.sizes: list[int] = []
        self.reader = FrameReader(self.deliver, limits, allocate, window, work, borrow)

    def deliver(self, message: Any, size: int) -> None:
        self.messages.append(message)
        self.sizes.append(size)

    def feed(self, data: bytes, cuts: list[int] | None = None) -> list[Any]:
        """Everything delivered after ``data``, received in pieces that end at ``cuts`` or where the room does."""
        at = 0
        for end in sorted({min(cut, len(data)) for cut in cuts or []} | {len(data)}):
            while at < end:
                room = self.reader.get_buffer()
                assert len(room) > 0
                count = min(len(room), end - at)
                room[:count] = data[at : at + count]
                self.reader.buffer_updated(count)
                at += count
        return self.messages


@given(st.lists(messages, max_size=4), st.lists(st.integers(0, 2000), max_size=30), st.integers(1, 100))
def test_any_cut_of_the_bytes_gives_the_same_messages(sent: list[Any], cuts: list[int], window: int) -> None:
    received = Received(window=window)
    assert same(tuple(received.feed(wire(*sent), cuts)), tuple(sent))
    assert received.reader.idle
    assert sum(received.sizes) == len(wire(*sent))


def test_frames_come_one_byte_at_a_time() -> None:
    sent = ({"a": np.arange(5), "b": "text"}, np.zeros((0, 3)), (), np.float32([[1]]))
    data = wire(*sent)
    assert same(tuple(Received().feed(data, list(range(len(data))))), sent)


def test_a_large_array_is_received_where_it_will_stay() -> None:
    destination = np.zeros(1 << 18, "uint8")
    received = Received(allocate=lambda dtype, shape: destination)
    array = np.random.default_rng(1).integers(0, 256, 1 << 18, dtype=np.uint8)
    data = wire(array)
    received.feed(data[:100])
    assert np.shares_memory(np.frombuffer(received.reader.get_buffer(), np.uint8), destination)
    (message,) = received.feed(data[100:])
    assert message is destination
    assert np.array_equal(message, array)


def test_many_small_frames_in_one_window_are_all_delivered() -> None:
    sent = tuple({"step": step} for step in range(1000))
    assert Received().feed(wire(*sent)) == list(sent)


def test_a_short_message_that_came_alone_and_whole_is_taken_at_once_and_nothing_else() -> None:
    whole = wire(sent := {"step": 3})

    def taken(data: bytes, before: bytes = b"", limits: Limits = FRAME) -> Any:
        received = Received(limits)
        received.feed(before)
        received.reader.get_buffer()[: len(data)] = data
        return received.reader.take_alone(len(data))

    assert taken(whole) == taken(whole, before=whole) == sent
    assert [taken(data) for data in (whole[:2], whole[:-1], whole + whole[:3], whole + whole, GOODBYE)] == [None] * 5
    assert taken(whole, before=whole[:2]) is taken(whole, before=whole[:-1]) is taken(whole, before=GOODBYE) is None
    shortest = min(codec.WHOLE.header, brief.WHOLE.header)
    assert taken(whole, limits=replace(FRAME, header=shortest)) is None  # for all that is known it is over the limit


def test_a_header_may_be_as_long_as_the_limit() -> None:
    data, length = wire("x" * 5000), len(wire("x" * 5000)) - len(GOODBYE)
    assert Received(replace(FRAME, header=length)).feed(data) == ["x" * 5000]
    with pytest.raises(BrokenStream, match=f"a header of {length} bytes, over the limit of {length - 1}"):
        Received(replace(FRAME, header=length - 1)).feed(data)


def test_a_header_larger_than_the_window_is_received() -> None:
    assert Received().feed(wire("x" * 200_000)) == ["x" * 200_000]


def test_a_reader_is_idle_only_between_frames() -> None:
    data = wire({"a": np.arange(3)})
    for end in range(len(data) + 1):
        received = Received()
        got = received.feed(data[:end])
        assert received.reader.idle == (end in (0, len(data)))
        assert len(got) == (end == len(data))


def test_a_goodbye_ends_the_stream_and_nothing_may_follow() -> None:
    received = Received()
    assert received.feed(wire(1) + GOODBYE) == [1]
    assert received.reader.ended
    assert received.reader.idle
    with pytest.raises(BrokenStream, match="after the goodbye"):
        received.feed(b"\x01")


def test_what_came_whole_before_garbage_is_delivered() -> None:
    received = Received()
    with pytest.raises(BrokenStream):
        received.feed(wire(1, 2) + b"\xff" * 4)
    assert received.messages == [1, 2]


@settings(max_examples=300)
@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_garbage_is_a_broken_stream_or_waits_for_more(data: bytes, cuts: list[int]) -> None:
    with suppress(BrokenStream):
        Received(Limits(array_bytes=1 << 20)).feed(data, cuts)


@settings(max_examples=200)
@given(st.lists(messages, min_size=1, max_size=3), st.integers(0, 2**32))
def test_damaged_frames_are_messages_or_a_broken_stream(sent: list[Any], seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(wire(*sent))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with suppress(BrokenStream):
        Received(Limits(array_bytes=1 << 20)).feed(bytes(data))


def test_oversized_claims_are_refused_before_memory_is_asked_for() -> None:
    asked: list[Any] = []

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Array:
        asked.append(shape)
        return np.empty(shape, dtype)

    with pytest.raises(BrokenStream, match="header of 4294967295"):
        Received(allocate=allocate).feed(b"\xff" * 4)
    huge = frame([np.zeros(10), np.broadcast_to(np.uint8(0), (2**20,))])[0]
    with pytest.raises(BrokenStream, match="limit of 1000"):
        Received(Limits(array_bytes=1000), allocate).feed(bytes(huge))
    assert asked == []


@given(st.lists(messages, max_size=4), st.lists(st.integers(0, 2000), max_size=30), st.integers(0, 2**16))
def test_what_finds_no_memory_is_read_past_and_all_else_delivered(sent: list[Any], cuts: list[int], seed: int) -> None:
    rng = random.Random(seed)
    failure: type[Exception] = rng.choice([MemoryError, ResourceError])

    def allocate(dtype: Any, shape: tuple[int, ...]) -> Array:
        if rng.random() < 0.5:
            raise failure("not today")
        return np.empty(shape, dtype)

    received = Received(allocate=allocate, window=rng.choice([1, 64, WINDOW]))
    got = received.feed(wire(*sent), cuts)
    assert received.reader.idle
    assert all(lacking(message, original) for message, original in zip(got, sent, strict=True))


def lacking(message: Any, original: Any) -> bool:
    """Whether a message is as it was sent, but for arrays in whose place something says what they were."""
    if isinstance(message, NoRoom):
        return (message.dtype, message.shape) == (original.dtype, original.shape) and message.reason == "not today"
    if isinstance(message, dict):
        return all(lacking(message[key], original[key]) for key in original)
    if isinstance(message, tuple):
        return all(lacking(m, o) for m, o in zip(message, original, strict=True))
    return same(message, original)


@pytest.mark.parametrize(("sent", "most"), [(range(500), 100 / 5), (["x" * 5000] * 5, 1)])
def test_one_call_decodes_a_bounded_number_of_bytes_and_the_next_goes_on(sent: Sequence[Any], most: float) -> None:
    received = Received(work=100)
    data = wire(*sent)
    room = received.reader.get_buffer()
    room[: len(data)] = data
    received.reader.buffer_updated(len(data))
    counts = [len(received.messages)]
    while received.reader.more:
        received.reader.buffer_updated(0)
        counts.append(len(received.messages))
    assert received.messages == list(sent)
    assert max(after - before for before, after in pairwise([0, *counts])) <= most


def test_a_message_that_there_is_no_memory_to_decode_is_decoded_by_a_later_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = {"x": np.arange(1000), "y": ("z",) * 600}
    for name in ("survey", "assemble"):
        received, whole = Received(), getattr(codec, name)
        with monkeypatch.context() as patch:
            patch.setattr(codec, name, no_memory)
            with pytest.raises(MemoryError):
                received.feed(wire(sent))
        assert getattr(codec, name) is whole
        received.reader.buffer_updated(0)
        assert same(received.messages[0], sent)


def no_memory(*args: Any) -> Any:
    raise MemoryError


def test_the_largest_legal_header_is_bounded_in_what_it_makes_a_loop_do() -> None:
    """4,096 empty maps take 3 ms on a core of 2024, the worst there is; all limits beside were measured with them."""
    assert FRAME.items <= 1 << 12
    assert FRAME.arrays <= 1 << 10
    assert FRAME.header <= 1 << 18
    assert WORK <= 1 << 13


@pytest.mark.parametrize("wrong", [np.zeros(9), np.zeros(10, "float32"), np.zeros(20)[::2]])
def test_an_allocator_that_answers_something_else_is_a_bug(wrong: Array) -> None:
    with pytest.raises(InternalError, match="allocated"):
        Received(allocate=lambda dtype, shape: wrong).feed(wire(np.zeros(10)))


def test_what_is_over_the_limits_is_not_sent() -> None:
    with pytest.raises(SpecError, match="limit"):
        frame("x" * FRAME.header)


@given(st.lists(st.integers(0, 70_000), max_size=6), st.sampled_from([1000, 1 << 14, 1 << 20]))
def test_writes_keep_the_bytes_and_bound_their_size(lengths: list[int], size: int) -> None:
    pieces = [memoryview(bytes([i]) * n) for i, n in enumerate(lengths)]
    written = list(writes(pieces, size))
    assert b"".join(written) == b"".join(pieces)
    assert all(0 < len(piece) <= size for piece in written)


def test_a_small_message_is_one_write_and_a_large_one_is_not_copied() -> None:
    assert len(list(writes(frame([np.zeros(128), np.ones(3)]), 1 << 20))) == 1
    array = np.zeros(3 << 20, "uint8")
    written = list(writes(frame(array), 1 << 20))
    assert [len(piece) for piece in written[1:]] == [1 << 20] * 3
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in written[1:])


# ── arrays that lie in memory of the sender ──────────────────────────────────────────────────────────────────────────

THREE = (np.arange(5.0), np.arange(12, dtype=np.int32).reshape(3, 4), np.full(7, True))
PLACE = [LentPlace(3, 4096, 7), LentPlace(1, 1 << 40, 1 << 50), LentPlace(1 << 20, 0, 1)]


def lent(which: int) -> list[Any]:
    """A frame of `THREE` without those among them which are lent, by bits."""
    lending = iter([place if which >> at & 1 else None for at, place in enumerate(PLACE)])
    return list(placed(frame(THREE), lambda _: next(lending)))


def borrowed(place: LentPlace, layout: codec.Layout, allocate: Allocate) -> Array:
    array = allocate(*layout)
    array[...] = THREE[PLACE.index(place)]
    return array


@pytest.mark.parametrize("which", range(1, 8))
@pytest.mark.parametrize("window", [16, WINDOW])
def test_of_arrays_that_are_lent_the_place_is_told_and_the_others_come_as_bytes(which: int, window: int) -> None:
    pieces = lent(which)
    assert [bytes(piece) for piece in pieces[1:]] == [a.tobytes() for at, a in enumerate(THREE) if not which >> at & 1]
    data = b"".join(map(bytes, [*pieces, *frame("next")]))
    for step in (1, 7, len(data)):
        received = Received(window=window, borrow=borrowed)
        got, after = received.feed(data, list(range(0, len(data), step)))
        assert after == "next"
        assert same(got, THREE)
        assert received.sizes[0] == sum(map(len, pieces))
        assert received.reader.idle


def test_a_frame_of_which_nothing_is_lent_stays_as_it_is() -> None:
    whole = frame(THREE)
    assert placed(whole, lambda _: None) is whole


def test_places_are_no_frame_for_who_shares_no_memory() -> None:
    pieces = lent(2)
    with pytest.raises(BrokenStream):
        Received().feed(b"".join(map(bytes, pieces)))


# ── how a frame is written ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sizes", [[frames.ONE_WRITE], [1, frames.ONE_WRITE - 1]])
def test_as_many_bytes_as_are_cheap_to_copy_are_one_write_and_one_more_is_not(sizes: list[int]) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert joined(pieces) == b"".join(pieces)
    assert joined([*pieces[:-1], pieces[-1] + b"x"]) is None


def test_a_piece_is_copied_to_join_its_neighbours_up_to_a_size() -> None:
    small, large = b"s" * frames._SMALL, b"l" * (frames._SMALL + 1)
    assert list(writes([b"head", small, b"tail"], WINDOW)) == [b"head" + small + b"tail"]
    head, alone, tail = writes([b"head", large, b"tail"], WINDOW)
    assert (head, tail) == (b"head", b"tail")
    assert alone == large
