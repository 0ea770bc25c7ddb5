"""The codec: what goes in comes out, and nothing illegal gets further than `BrokenStream`."""

from __future__ import annotations

import math
import random
import struct
import sys
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_messages import DTYPES, messages, same

from flowrt.base import codec
from flowrt.base.codec import (
    FRAME,
    PART,
    SHORT,
    WHOLE,
    Limits,
    decode,
    decode_whole,
    encode,
    pack,
    pack_parts,
    survey,
    unpack,
    unpack_parts,
)
from flowrt.base.errors import BrokenStream, SpecError


def array_token(code: bytes, *dims: int) -> bytes:
    """The header of a message that is one array, written by hand."""
    return msgpack.packb(msgpack.ExtType(1, code + struct.pack(f"<{len(dims)}Q", *dims)))


@given(messages)
def test_a_message_comes_back_as_it_was_sent(message: Any) -> None:
    header, buffers = encode(message)
    assert same(decode(header, buffers), message)
    assert same(unpack(pack(message)), message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_of_every_dtype_comes_back_bitwise(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    assert same(unpack(pack({"x": array}))["x"], array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(7, "float32"),
        np.zeros((0,), "float32"),
        np.zeros((3, 0, 2), "int64"),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(10)[::-2],
        np.asfortranarray(np.ones((3, 4))),
        np.broadcast_to(np.float32(1), (4, 3)),
        np.arange(5, dtype=">f4"),
        np.zeros((1,) * 8, "uint8"),
    ],
    ids=["0-d", "empty", "zero-rows", "transposed", "reversed", "fortran", "broadcast", "big-endian", "rank-8"],
)
def test_arrays_of_odd_layout_come_back_with_their_values(array: np.ndarray[Any, Any]) -> None:
    back = decode(*encode([array]))[0]
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert back.dtype.isnative


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6.0)
    array.flags.writeable = False
    _, (buffer,) = encode(array)
    assert np.shares_memory(np.frombuffer(buffer), array)
    assert np.shares_memory(decode(*encode(array)), array)


def test_every_sequence_comes_back_as_a_tuple_that_can_be_hashed() -> None:
    assert decode(*encode([1, [2, ("a", [None])]])) == (1, (2, ("a", (None,))))
    hash(decode(*encode([[1], [2, (3,)]])))


def test_unpacked_arrays_are_owned_and_writable() -> None:
    back = unpack(pack(np.zeros(3)))
    back[0] = 1.0
    assert back.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({1: 2}, "keys"),
        ({"a": [{b"k": 1}]}, "keys"),
        ({"a": {1, 2}}, "set"),
        (np.int32(3), "item"),
        (2**64, "hold"),
        ("\ud800", "hold"),
        (np.ones(2, "complex64"), "complex64"),
        (np.array(["a"]), "not supported"),
        (np.array([None]), "not supported"),
        (b"x" * (FRAME.header + 1), "limit"),
        ([0] * (FRAME.items + 1), "values"),
        ([np.ones(1)] * (FRAME.arrays + 1), "arrays"),
    ],
)
def test_what_no_reader_would_accept_is_refused_by_the_writer(message: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        encode(message)


def test_a_message_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SpecError, match="levels"):
        encode(loop)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "truncated"),
        (b"\xc1", "nothing legal"),
        (b"\x01\x01", "its value 1"),
        (b"\x92\x01", "truncated"),
        (b"\xa5ab", "its value"),
        (b"\xdb\xff\xff\xff\xffa", "its value"),
        (b"\xdd\xff\xff\xff\xff", "values"),
        (b"\xdf\xff\xff\xff\xff", "values"),
        (b"\x91" * 40 + b"\x00", "levels"),
        (b"\x82\xa1a\x01\xa1a\x02", "twice"),
        (b"\x81\x01\x02", "not legal"),
        (b"\x81\xc4\x01a\x02", "not a str"),
        (b"\x81\x90\x02", "not legal"),
        (b"\xa1\xff", "not legal"),
        (b"\xd6\xff\x00\x00\x00\x00", "describes no array"),
        (b"\xd4\x01\x00", "describes no array"),
        (array_token(b"<c8", 1), "describes no array"),
        (array_token(b"|O8", 1), "describes no array"),
        (array_token(b"<f4", 1)[:-1], "describes no array"),
        (array_token(b"<f4", *[1] * 9), "dimensions"),
        (array_token(b"<f4", 2**63), "address"),
        (array_token(b"<f4", 2**32, 2**32), "address"),
        (array_token(b"<f8", 0, 2**62), "address"),
        (array_token(b"<f4", 2**31), "limit"),
        (b"\x92" + 2 * array_token(b"|u1", 3 << 30), "limit"),
    ],
)
def test_an_illegal_header_is_refused_by_name(header: bytes, told: str) -> None:
    with pytest.raises(BrokenStream, match=told):
        decode(header, [memoryview(b"")] * len(survey(header)))


def test_buffers_that_do_not_fit_the_header_are_refused() -> None:
    header, buffers = encode({"x": np.ones(4)})
    with pytest.raises(BrokenStream, match="came"):
        decode(header, [])
    with pytest.raises(BrokenStream, match="32 bytes, 31 came"):
        decode(header, [buffers[0][:-1]])


def test_an_array_without_a_byte_is_no_packed_message_and_no_part() -> None:
    empty = codec.bytes_of(np.zeros((3, 0, 2), np.uint8))
    with pytest.raises(BrokenStream, match="got 0"):
        unpack(empty)
    assert list(codec.unpack_parts(empty)) == []


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_broken_stream(data: bytes) -> None:
    for read in (lambda: decode(data, []), lambda: unpack(data), lambda: survey(data)):
        with suppress(BrokenStream):
            read()


@settings(max_examples=300)
@given(messages, st.integers(0, 2**32))
def test_a_mutated_message_is_a_message_or_a_broken_stream(message: Any, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(pack(message))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    for damaged in (bytes(data), bytes(data[: rng.randrange(len(data))])):
        with suppress(BrokenStream):
            unpack(damaged)


@given(messages)
def test_a_packed_message_cut_short_is_refused(message: Any) -> None:
    data = pack(message)
    for end in range(len(data)):
        with pytest.raises(BrokenStream):
            unpack(data[:end])


def many(count: int, token: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + token * count


@pytest.mark.parametrize(
    "bomb",
    [
        many(10**6, b"\x80"),
        b"\x91" * 10**6,
        b"\xdd\x00\x00\x3f\xff" * 1000,
        b"\xdf\x00\x00\x1f\xff\xa1a" * 1000,
        array_token(b"<f4", 2**63),
        many(10**5, array_token(b"|u1", 1)),
    ],
    ids=["maps", "nesting", "claimed-arrays", "claimed-maps", "length", "many-arrays"],
)
def test_a_bomb_is_refused_before_it_allocates(bomb: bytes) -> None:
    roomy = Limits(header=4 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenStream):
            decode(bomb, [], roomy)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_work_of_a_refusal_is_bounded_by_the_limits_not_by_the_input() -> None:
    small, large = (many(count, b"\x80") for count in (10**5, 10**6))

    def refuse(bomb: bytes) -> float:
        start = time.process_time()
        with pytest.raises(BrokenStream):
            survey(bomb, Limits(header=4 << 20))
        return time.process_time() - start

    assert max(min(refuse(bomb) for _ in range(5)) for bomb in (small, large)) < 0.05  # a stall would be 130 ms


@given(messages, st.integers(1, 64))
def test_lower_limits_refuse_and_never_alter(message: Any, items: int) -> None:
    header, buffers = encode(message)
    with suppress(BrokenStream):
        assert same(decode(header, buffers, Limits(items=items, arrays=items)), message)


def test_not_a_number_and_infinity_survive() -> None:
    back = decode(*encode((math.nan, math.inf, -0.0)))
    assert math.isnan(back[0])
    assert back[1] == math.inf
    assert math.copysign(1, back[2]) == -1


# ── in one pass ──────────────────────────────────────────────────────────────────────────────────────────────────────


def empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.empty(shape, dtype)


def in_one_pass(header: bytes, body: bytes) -> tuple[Any, int] | None:
    return decode_whole(memoryview(header + body), len(header), empty)


@given(messages, st.binary(max_size=8))
def test_one_pass_reads_what_two_read_or_leaves_it_to_them(message: Any, after: bytes) -> None:
    header, buffers = encode(message)
    body = b"".join(buffers)
    whole = in_one_pass(header, body + after)
    if whole is not None:
        assert same(whole[0], message)
        assert whole[1] == len(header) + len(body)


def test_one_pass_reads_a_short_message_and_waits_for_one_that_is_cut() -> None:
    header, (buffer,) = encode({"kind": "Done", "values": (np.arange(5),), "edges": (1,)})
    body = bytes(buffer)
    read = in_one_pass(header, body)
    assert read is not None
    assert same(read[0]["values"][0], np.arange(5))
    assert in_one_pass(header, body[:-1]) is None


def test_one_pass_reads_nearly_all_short_messages_of_many_floats() -> None:
    read = []
    for seed in range(200):
        rng = random.Random(seed)
        times = tuple(tuple(rng.uniform(-1, 1) for _ in range(6)) for _ in range(6))
        message = ("Report", rng.getrandbits(62), -1, times, (-1.0, rng.random()))
        header, _ = encode(message)
        whole = in_one_pass(header, b"")
        assert whole is None or whole[0] == message
        read.append(whole is not None)
    assert sum(read) > 190  # some bytes of floats are those of what only the survey may judge


@settings(max_examples=300)
@given(messages, st.integers(0, 2**32))
def test_one_pass_accepts_nothing_that_the_survey_refuses(message: Any, seed: int) -> None:
    rng = random.Random(seed)
    header, buffers = encode(message)
    damaged = bytearray(header)
    for _ in range(rng.randrange(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    body = b"".join(buffers) + bytes(64)
    whole = in_one_pass(bytes(damaged), body)
    if whole is not None:
        used = body[: whole[1] - len(damaged)]
        assert same(whole[0], unpack(struct.pack("<I", len(damaged)) + damaged + used, WHOLE))


@pytest.mark.parametrize(
    "header",
    [
        b"\xd6\xff\x00\x00\x00\x01",
        b"\xd7\xff" + bytes(8),
        b"\xc7\x0c\xff" + bytes(12),
        b"\xc8\x00\x04\xff" + bytes(4),
        b"\xc9\x00\x00\x00\x08\xff" + bytes(8),
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xc4\x01a\x02",
        b"\x91" * 33 + b"\x00",
        b"\x81\xa1a" * 33 + b"\x00",
        b"\xdc\x00\x01" * 200 + b"\x00",
        b"\x01\x01",
        array_token(b"<f4", 0, 2**62),
        array_token(b"<f4", 2**63),
        array_token(b"<f4", *[1] * 9),
        msgpack.packb("x" * SHORT),
    ],
    ids=[
        *("time4", "time8", "time12", "time16", "time32", "twice", "bytes-key", "deep", "deep-maps", "deeper", "extra"),
        *("empty", "huge", "rank-9", "long"),
    ],
)
def test_one_pass_leaves_to_the_survey_what_may_be_illegal(header: bytes) -> None:
    assert in_one_pass(header, bytes(64)) is None


# ── in parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(messages, max_size=4))
def test_parts_come_back_one_by_one_and_a_cut_one_is_refused(parts: list[Any]) -> None:
    data = pack_parts(parts)
    back = list(unpack_parts(data))
    assert len(back) == len(parts)
    assert all(map(same, back, parts))
    ends = {len(pack_parts(parts[:count])) for count in range(len(parts) + 1)}
    for end in set(range(len(data))) - ends:
        with pytest.raises(BrokenStream):
            list(unpack_parts(data[:end]))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parts_or_a_broken_stream(data: bytes) -> None:
    with suppress(BrokenStream):
        list(unpack_parts(data))


def packed(header: bytes) -> bytes:
    return struct.pack("<I", len(header)) + header


@pytest.mark.parametrize(
    "part",
    [
        many(PART.items + 1, b"\x01"),
        many(PART.items // 2 + 1, b"\x91\x01"),
        many(PART.items + 1, b"\x80"),
        msgpack.packb("x" * PART.header),
        many(PART.arrays + 1, array_token(b"|u1", 0)),
        b"\x91" * 10**5,
    ],
    ids=["ints", "tuples", "maps", "text", "arrays", "nesting"],
)
def test_no_more_than_one_part_is_decoded_at_once(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = codec.assemble
    monkeypatch.setattr(codec, "assemble", lambda header, arrays: sizes.append(len(header)) or real(header, arrays))
    small = packed(many(100, b"\x01"))
    with pytest.raises(BrokenStream):
        list(unpack_parts(small * 3 + packed(part)))
    assert sizes == [len(small) - 4] * 3


def test_parts_are_within_the_limits_of_all_together() -> None:
    parts = [(1,) * 10, np.zeros(2, "uint8")] * 3
    data = pack_parts(parts)
    for limits in (Limits(items=29), Limits(arrays=2), Limits(header=50)):
        with pytest.raises(SpecError, match="parts"):
            pack_parts(parts, limits=limits)
        with pytest.raises(BrokenStream, match="parts"):
            list(unpack_parts(data, limits=limits))
    assert len(list(unpack_parts(data, limits=Limits(items=30, arrays=3)))) == 6


def test_a_part_that_no_reader_would_accept_is_refused_by_the_writer() -> None:
    with pytest.raises(SpecError, match="values"):
        pack_parts([(0,) * (PART.items + 1)])


@pytest.mark.skipif(sys.byteorder != "little", reason="elsewhere arrays come in another byte order than the machine's")
def test_arrays_that_come_are_of_the_dtypes_that_direct_calls_know() -> None:
    for name in DTYPES:
        decoded = unpack(pack({"x": np.zeros(3, name)}))["x"]
        assert decoded.dtype is np.dtype(name)
