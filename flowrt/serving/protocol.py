"""What is asked and answered over HTTP: the Open Inference Protocol, version 2, as KServe and Triton speak it.

https://github.com/kserve/open-inference-protocol, with its extension for binary tensors: behind the JSON, whose length
the header `LENGTH` says, stand the bytes of tensors, little-endian. In JSON, NaN and infinities are the words NaN,
Infinity and -Infinity, as Python and Triton write them.

Law: pure, and bytes are not trusted. Every tensor is checked with the model's signature before it is made; what does
not fit is `FeedError`, whose text says the input, what was expected, what came, and the fix where it is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from reprlib import repr as shown  # of a list, only the beginning
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FeedError, SpecError
from flowrt.base.plain import RANKS, narrowed
from flowrt.base.spec import MAX_RANK, NAMES, Spec, kind_of
from flowrt.base.valueclass import valueclass

if TYPE_CHECKING:
    from flowrt.serving.model import Model

Array: TypeAlias = "np.ndarray[Any, Any]"

LONG = 1 << 16  # bytes of a request that takes milliseconds to be read
PIECE = 1 << 12  # numbers that are written out at once, in milliseconds
MARKS = 1 << 18  # lists, objects and quotes in JSON: no other thread has its turn while these are read
LENGTH = "Inference-Header-Content-Length"
EXTENSIONS = ("binary_tensor_data",)
_NOT_HERE = frozenset({"classification", "shared_memory_region"})  # Triton's, whose clients would misread other answers
_KINDS = {"bool": "BOOL", "int": "INT", "uint": "UINT", "float": "FP", "bfloat": "BF"}
_NUMBERS = frozenset({bool, int, float})
MOST = 1 << 63  # bytes that an array may have


@cache
def datatype_of(dtype: np.dtype[Any]) -> str:
    """What the protocol calls a dtype."""
    name = NAMES[dtype]
    return _KINDS[name.rstrip("0123456789")] + name.lstrip("abcdefghijklmnopqrstuvwxyz")


@valueclass
class Inquiry:
    """What a request asks for: values by name; the outputs that it wants, by name, and whether as bytes."""

    id: str | None
    values: dict[str, Array]
    wanted: dict[str, bool]


def described(model: Model) -> dict[str, Any]:
    """A model's metadata."""

    def listed(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "datatype": datatype_of(t.spec.dtype),
                "shape": [-1 if n is None else n for n in t.spec.dims or ()],
            }
            for name, t in tensors.items()
        ]

    return {
        "name": model.name,
        "versions": [model.version] if model.version else [],
        "platform": "flowrt",
        "inputs": listed(model.inputs),
        "outputs": listed(model.outputs),
    }


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(body: bytes | bytearray, length: str | None, model: Model, most: int = MOST) -> Inquiry:
    """What ``body``, of at most ``most`` bytes, asks of a model; ``length`` is the header `LENGTH`.

    Raises `FeedError`.
    """
    view = memoryview(body)
    count = len(view) if length is None else _count(length, len(view))
    text = bytes(view[:count])
    if sum(text.count(mark) for mark in b'[{"') > MARKS:
        raise FeedError(f"the request has more than {MARKS} lists, objects and quotes; give data flat, or as bytes")
    try:
        request = json.loads(text, **(_YIELDING if count > LONG else {}))
    except (ValueError, RecursionError) as error:
        raise FeedError(f"the request is not JSON: {error}") from None
    given = _list(_object(request, "the request"), "inputs")
    rest = view[count:]
    values: dict[str, Array] = {}
    for item in given:
        entry = _object(item, "an input")
        name = entry.get("name")
        if not isinstance(name, str) or name not in model.inputs or name in values:
            twice = " twice" if isinstance(name, str) and name in values else ""
            raise FeedError(
                f"the request gives the input {shown(name)}{twice}; the model takes {', '.join(model.inputs)}"
            )
        spec = model.inputs[name].spec
        try:
            values[name], rest = _tensor(entry, spec, rest, most)
        except FeedError as error:
            raise FeedError(f"{_told(name, spec)}, {error}") from None
    if missing := [name for name in model.inputs if name not in values]:
        raise FeedError(f"the request lacks {_told(missing[0], model.inputs[missing[0]].spec)}")
    if rest:
        raise FeedError(f"{len(rest)} bytes follow those of the inputs; each needs its binary_data_size")
    return Inquiry(_id(request), values, _wanted(request, model))


def _float(text: str) -> float:
    return float(text)


def _int(text: str) -> int:
    return int(text)


# Python's own functions: between two calls of them other threads have their turn, which else wait for the whole text
_YIELDING: dict[str, Any] = {"parse_float": _float, "parse_int": _int}


def _tensor(entry: Any, spec: Spec, rest: memoryview, most: int) -> tuple[Array, memoryview]:
    """An input's value, and the bytes that follow it. What does not fit is told without what was expected."""
    datatype = entry.get("datatype")
    if datatype != datatype_of(spec.dtype):
        fix = "; text is not taken" if datatype == "BYTES" else f"; convert it to {datatype_of(spec.dtype)}"
        raise FeedError(f"got datatype {shown(datatype)}{fix}")
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
        raise FeedError(f"got shape {shown(shape)}; a shape is a list of sizes")
    # what has no entries came in no bytes, whatever its other axes are, and each row of it is computed
    if math.prod(n or 1 for n in shape) * spec.dtype.itemsize >= (most if 0 in shape else MOST):
        raise FeedError(f"got a shape of {len(shape)} axes that no memory holds")
    if not spec.accepts(spec.dtype, tuple(shape)):
        fix = "; give it a first axis of 1" if spec.accepts(spec.dtype, (1, *shape)) else ""
        raise FeedError(f"got shape {shape}{fix}")
    size = _parameters(entry).get("binary_data_size")
    if size is None:
        return _written_out(entry.get("data"), shape, spec), rest
    nbytes = math.prod(shape) * spec.dtype.itemsize
    if type(size) is not int or size != nbytes or size > len(rest) or "data" in entry:
        raise FeedError(
            f"got shape {shape}, which is {nbytes} bytes; binary_data_size is {shown(size)}, {len(rest)} came"
        )
    array = np.frombuffer(rest[:size], spec.dtype.newbyteorder("<")).reshape(shape)
    if spec.dtype.kind == "b" and size and array.view(np.uint8).max() > 1:
        raise FeedError("got bytes other than 0 and 1")
    return array.astype(spec.dtype), rest[size:]


def _written_out(data: Any, shape: list[int], spec: Spec) -> Array:
    if not isinstance(data, list):
        raise FeedError(f"got data {shown(data)}; data is a list, flat or nested")
    wanted, (first, sizes) = RANKS[kind_of(spec.dtype)], _first(data)
    if len(sizes) > MAX_RANK:
        raise FeedError(f"got data of lists {len(sizes)} deep; data is a list, flat or nested as its shape is")
    nested = shape[: shape.index(0) + 1] if 0 in shape else shape  # lists of none have no further axes
    if sizes not in (nested, [math.prod(shape)]):
        raise FeedError(f"got shape {shape}, which is {math.prod(shape)} entries, and data {sizes}")
    entries = _entries(data, sizes)
    kinds = {type(entry) for entry in entries}
    if not kinds <= _NUMBERS:
        others = ", ".join(sorted(kind.__name__ for kind in kinds - _NUMBERS))
        raise FeedError(f"got data of {others}, as {shown(first)}")
    try:
        natural = np.asarray(entries)
        if natural.dtype.kind not in RANKS or (natural.size and RANKS[natural.dtype.kind] > wanted):
            raise FeedError(f"got data of {natural.dtype}, as {shown(first)}")
        array = narrowed(natural, spec.dtype) if natural.size else natural.astype(spec.dtype)
    except (SpecError, ValueError, OverflowError, TypeError) as error:
        raise FeedError(str(error)) from None
    return array.reshape(shape)


def _first(data: Any) -> tuple[Any, list[int]]:
    """What stands first in nested lists, and how long each of those is in which it does."""
    sizes = []
    while isinstance(data, list):
        sizes.append(len(data))
        if not data:
            break
        data = data[0]
    return data, sizes


def _entries(data: list[Any], sizes: list[int]) -> list[Any]:
    """What is in lists that are nested, all as long as the first. In loops of Python, where others have their turn."""
    for size in sizes[1:]:
        for part in data:
            if not isinstance(part, list) or len(part) != size:
                raise FeedError(f"got data in which {shown(part)} stands where a list of {size} belongs")
        data = [entry for part in data for entry in part]
    return data


def _wanted(request: Any, model: Model) -> dict[str, bool]:
    every = _parameters(request).get("binary_data_output") is True
    if not request.get("outputs"):
        return dict.fromkeys(model.outputs, every)
    found = {}
    for item in _list(request, "outputs"):
        entry = _object(item, "an output")
        name = entry.get("name")
        if not isinstance(name, str) or name not in model.outputs:
            raise FeedError(f"the model has no output {shown(name)}; it has {', '.join(model.outputs)}")
        found[name] = _parameters(entry).get("binary_data", every) is True
    return found


def _told(name: str, spec: Spec) -> str:
    sizes = "any shape" if spec.dims is None else f"shape {[-1 if n is None else n for n in spec.dims]}"
    return f"input {name!r:.200}: expected {datatype_of(spec.dtype)} of {sizes}"


def _count(length: str, most: int) -> int:
    if not length.isascii() or not length.isdecimal() or len(length) > 20 or int(length) > most:
        raise FeedError(f"{LENGTH} is {length!r:.80}, and the request has {most} bytes")
    return int(length)


def _id(request: Any) -> str | None:
    found = request.get("id")
    if found is not None and not isinstance(found, str):
        raise FeedError("the id of a request is a string")
    return found


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    """What else is said of a request or a tensor: nothing that would have the answer be, or lie, elsewhere."""
    found = _object(entry.get("parameters", {}), "parameters")
    for extension in _NOT_HERE & found.keys():
        raise FeedError(f"the parameter {extension!r} is of an extension that is not here; there is {EXTENSIONS[0]}")
    return found


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FeedError(f"{what} is an object of JSON, got {shown(value)}")
    return value


def _list(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise FeedError(f"the request's {key!r} are a list, got {shown(found)}")
    return found


# ── answering ────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_long(asked: Inquiry, outputs: Mapping[str, Any]) -> bool:
    """Whether an answer takes milliseconds to be written out."""
    return sum(np.size(outputs[name]) for name, binary in asked.wanted.items() if not binary) > PIECE


def written(
    asked: Inquiry, name: str, version: str, outputs: Mapping[str, Any]
) -> tuple[list[bytes | memoryview], int | None]:
    """The body of an answer, and what its header `LENGTH` says; None where there is nothing but JSON."""
    listed, buffers = [], []
    for output, binary in asked.wanted.items():
        array = np.ascontiguousarray(outputs[output]).reshape(np.shape(outputs[output]))
        entry: dict[str, Any] = {"name": output, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            buffers.append(
                memoryview(array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8).data)
            )
            listed.append(json.dumps(entry))
        else:
            listed.append(_with(entry, "data", _numbers(array.reshape(-1))))
    said = {"model_name": name}
    if version:
        said["model_version"] = version
    if asked.id is not None:
        said["id"] = asked.id
    text = _with(said, "outputs", listed).encode()
    return [text, *buffers], len(text) if any(asked.wanted.values()) else None


def _numbers(array: Array) -> Iterator[str]:
    """What is in a flat array, in pieces, between which other threads have their turn."""
    return (json.dumps(array[at : at + PIECE].tolist())[1:-1] for at in range(0, array.size, PIECE))


def _with(entry: Mapping[str, Any], key: str, items: Iterable[str]) -> str:
    """``entry`` in JSON, with a list besides, of ``items`` that are written out."""
    return f'{json.dumps(entry)[:-1]}, "{key}": [{", ".join(items)}]}}'
