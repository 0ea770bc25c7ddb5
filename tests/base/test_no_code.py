"""Nothing that comes from elsewhere is code: whatever decodes it answers plain data and arrays, or refuses it.

What Python loads, compiles and runs it tells its audit hooks of, so these say whether anything was.
"""

from __future__ import annotations

import marshal
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any
from zlib import crc32

import msgpack
import numba
import numpy as np
import pytest

from flowrt.base import codec
from flowrt.base.errors import FlowrtError
from flowrt.base.plan import plan_from_data, plan_from_parts
from flowrt.base.spec import DTYPES
from flowrt.checkpoints import manifest, older
from flowrt.ledger import frames as ledger_frames
from flowrt.ledger.records import record_from_data
from flowrt.net.door import heads
from flowrt.net.wire import brief
from flowrt.net.wire.frames import FrameReader, allocate_array
from flowrt.net.wire.messages import _KINDS, from_data
from flowrt.serialize import graph_from_bytes, graph_from_data

SOURCE = "raise SystemExit('code from elsewhere ran')"
PLAIN = (type(None), bool, int, float, str, bytes)
TELLS_OF_CODE = ("pickle.", "marshal.load", "code.__new__", "function.__new__", "ctypes.", "os.", "subprocess.")
RUNS = ("exec", "compile", "import")


class Trap:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (SOURCE,)


def objects() -> bytes:
    """A file of NumPy's that holds Python objects."""
    file = BytesIO()
    np.save(file, np.array([Trap()], object), allow_pickle=True)
    return file.getvalue()


CODE: dict[str, bytes] = {
    **{f"pickle {protocol}": pickle.dumps(Trap(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
    "marshal": marshal.dumps(compile(SOURCE, "elsewhere", "exec")),
    "a kernel of Numba": pickle.dumps(numba.njit(objects)),
    "a file of objects": objects(),
    "source": SOURCE.encode(),
    "an object file": b"\x7fELF\x02\x01\x01" + bytes(57),
}


def extension(code: int, content: bytes) -> bytes:
    """An extension of msgpack's, of any code there is."""
    return struct.pack(">BIb", 0xC9, len(content), code) + content


def headers(content: bytes) -> Iterator[bytes]:
    """That content in every place that a header has for it."""
    yield content
    yield msgpack.packb(content)
    yield msgpack.packb({"kind": content, "op": content, "__reduce__": content})
    yield msgpack.packb(["Welcome", content])
    for code in range(-128, 128):
        yield extension(code, content)
        yield extension(code, b"|O\0" + content[:8])  # what NumPy calls an object
        yield msgpack.packb(["x"])[:1] + extension(code, b"|O8" + struct.pack("<Q", 1))


def streams(content: bytes) -> Iterator[bytes]:
    """The same as it would come: after its length, or after that of a record of a ledger with its checksums."""
    for header in headers(content):
        yield header
        yield struct.pack("<I", len(header)) + header + content
        yield ledger_frames.MAGIC + recorded(header)


def recorded(content: bytes) -> bytes:
    head = ledger_frames._HEAD.pack(len(content), crc32(content))
    return head + ledger_frames._SUM.pack(crc32(head)) + content


def read_frames(data: bytes) -> list[Any]:
    came: list[Any] = []
    reader = FrameReader(lambda message, size: came.append(message), codec.FRAME, allocate_array)
    for begin in range(0, len(data), 1024):
        piece = data[begin : begin + 1024]
        while piece:
            room = reader.get_buffer()
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            reader.buffer_updated(count)
            piece = piece[count:]
    return came


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "a header": lambda data: codec.decode(data, []),
    "a header and its bytes": lambda data: codec.decode(data, [data]),
    "a header in one pass": lambda data: codec.decode_whole(memoryview(data), len(data), allocate_array),
    "a packed message": codec.unpack,
    "packed parts": lambda data: list(codec.unpack_parts(data)),
    "a brief header": lambda data: brief.assemble(data, brief.survey(data, codec.FRAME)),
    "frames": read_frames,
    "a manifest": manifest.loaded,
    "records": lambda data: list(ledger_frames.records_in(data, "one")),
}
READERS: dict[str, Callable[[Any], Any]] = {
    "a message": from_data,
    "a graph": graph_from_data,
    "a plan": plan_from_data,
    "a plan in parts": lambda data: plan_from_parts(iter([data])),
    "a record": lambda data: record_from_data(data, "one"),
    "a manifest": lambda data: manifest.from_data(dict(data), b""),
    "an older manifest": lambda data: older.from_data(dict(data), 0),
}


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Nothing is loaded, compiled or run in the block."""
    seen: list[str] = []
    HEARING.append(seen)
    try:
        yield
    finally:
        HEARING.remove(seen)
    assert not seen


HEARING: list[list[str]] = []  # who hears of what is run; a hook cannot be taken out again


@sys.addaudithook
def hear(event: str, given: tuple[Any, ...]) -> None:
    if HEARING and (event in RUNS or event.startswith(TELLS_OF_CODE)):
        for seen in HEARING:
            seen.append(f"{event} {given!r:.200}")


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, (*value, *value.values())))
    if isinstance(value, tuple | list):
        return all(map(is_plain, value))
    return type(value) in PLAIN or (type(value) is np.ndarray and value.dtype.name in DTYPES)


def test_the_hook_hears_of_what_is_run() -> None:
    for runs in (lambda: pickle.loads(CODE["pickle 4"]), lambda: exec("1"), lambda: marshal.loads(CODE["marshal"])):
        with pytest.raises(AssertionError), nothing_runs(), suppress(SystemExit):
            runs()


@pytest.mark.parametrize("name", DECODERS)
def test_no_decoder_makes_code_of_what_comes(name: str) -> None:
    decode = DECODERS[name]
    with suppress(FlowrtError, ValueError):
        decode(b"")  # what it imports when it is first called
    for content in CODE.values():
        for stream in streams(content):
            with nothing_runs(), suppress(FlowrtError, manifest.NotWhole):
                assert is_plain(decode(stream)), (name, stream)


@pytest.mark.parametrize("name", READERS)
def test_nothing_is_made_of_data_that_holds_code(name: str) -> None:
    read = READERS[name]
    for content in CODE.values():
        for data in (content, (content,), {"op": content}, *((kind, content) for kind in _KINDS)):
            with nothing_runs(), pytest.raises((FlowrtError, manifest.NotWhole, ValueError, TypeError)):
                read(data)


@pytest.mark.parametrize("content", CODE.values(), ids=CODE)
def test_no_code_is_a_graph_or_a_head(content: bytes) -> None:
    with nothing_runs():
        with pytest.raises(FlowrtError):
            graph_from_bytes(content)
        with pytest.raises(ValueError, match=r"\w"):
            heads.read(content + heads.END)
