"""A model as a file: safetensors, whose tensors are the weights, and, last, the graph and the names around them.

The format is that of https://huggingface.co/docs/safetensors, so any reader of it finds the weights by their names.
The tensor `DESCRIPTION` is bytes: the SHA-256 of what follows, and that, packed as graphs are: the signature, the graph
without its large constants, and of each of these its node, its tensor and its SHA-256.

Law: bytes are not trusted. A header is bounded, says where all bytes are, without gaps, and is the very one that would
be written; digests vouch for the rest; the graph is checked as `flowrt.serialize` checks any. Whatever does not hold is
`BrokenStream`. Nothing is held twice but one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flowrt.base.attributes import as_attr
from flowrt.base.codec import pack, unpack
from flowrt.base.errors import BrokenStream, FlowrtError, GraphError, not_written, path_of, user_site
from flowrt.base.plan import spec_from_data
from flowrt.checkpoints.folders import sync_folder
from flowrt.checkpoints.shards import PIECE, bytes_of, header_of, read_into
from flowrt.files import replacing
from flowrt.serialize import graph_from_data, graph_to_data
from flowrt.serving.signature import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowrt.graph import Graph, Tensor

FORMAT, VERSION = "flowrt.model", 1
DESCRIPTION = "flowrt.model"
LEFT_OUT = 1 << 12  # bytes of a constant that is a tensor of its own
MOST_HEADER = 64 << 20  # bytes
DIGEST = 32
_CONSTANT = "constant"


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def write(model: Frozen, path: str | os.PathLike[str]) -> str:
    """Write ``model`` at ``path``, whole or not at all; answers its version. Raises `GraphError` where that fails."""
    target = Path(path_of(path, "a model's file"))
    if not target.name:
        raise GraphError(f"{user_site()}: {str(path)!r} names no file that a model could be written to")
    try:
        with replacing(target) as file:
            version = _write(file, model)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(target.resolve().parent)
    except OSError as error:
        raise not_written(target, error) from error
    return version


def _write(file: BinaryIO, model: Frozen) -> str:
    data = graph_to_data(model.graph)
    weights = _taken_out(data)
    described = {
        "format": FORMAT,
        "version": VERSION,
        "name": model.name,
        "inputs": _places(model.inputs),
        "outputs": _places(model.outputs),
        "graph": data,
        "weights": [(index, key, _digest(array)) for key, (index, array) in weights.items()],
    }
    packed = pack(described)
    digest = hashlib.sha256(packed).digest()
    description = np.frombuffer(digest + packed, np.uint8)
    arrays = {key: array for key, (_, array) in weights.items()} | {DESCRIPTION: description}
    file.write(header_of(list(arrays), [(array.dtype, array.shape) for array in arrays.values()])[0])
    for array in arrays.values():
        file.write(bytes_of(array))
    return _version(digest)


def _taken_out(data: Any) -> dict[str, tuple[int, np.ndarray[Any, Any]]]:
    """Large constants, taken out of a graph's data: by the name of their tensor, their node and value."""
    found = []
    for index, node in enumerate(data["nodes"]):
        value = node["attrs"].get("value")
        if node["op"] == _CONSTANT and value.nbytes >= LEFT_OUT:
            found.append((index, node["name"], value))
            node["attrs"] = {"value": None}
    found.sort(key=lambda each: -each[2].dtype.itemsize)  # so that each begins at a multiple of its entries' size
    taken: dict[str, tuple[int, np.ndarray[Any, Any]]] = {}
    for index, name, value in found:
        while name in taken or name in (DESCRIPTION, "__metadata__"):
            name += "'"
        taken[name] = index, value
    return taken


def _places(tensors: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
    return [(name, tensor.op.index, tensor.index) for name, tensor in tensors.items()]


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(bytes_of(array)).digest()


def _version(digest: bytes) -> str:
    return digest.hex()[:12]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(path: str | os.PathLike[str]) -> tuple[Frozen, str]:
    """The model in a file, and its version; see `Model.load`."""
    with open(path_of(path, "a model's file"), "rb") as file:
        try:
            return _read(file, os.fstat(file.fileno()).st_size)
        except FlowrtError as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from error
        except OSError as error:
            raise BrokenStream(f"{os.fspath(path)}: {error}") from error
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise BrokenStream(f"{os.fspath(path)} is no model: {type(error).__name__}: {error}") from error


def _read(file: BinaryIO, size: int) -> tuple[Frozen, str]:
    header = _header(file, size)
    places = _tensors(header, size)
    description = places.pop(DESCRIPTION, None)
    if description is None:
        raise BrokenStream(f"it has no tensor {DESCRIPTION!r}, so it is no model that flowrt wrote")
    begin, end = description
    content = np.empty(end - begin, np.uint8)
    read_into(memoryview(content.data), file, begin)
    digest, packed = content[:DIGEST].tobytes(), content[DIGEST:]
    _check_digest(hashlib.sha256(packed.data).digest(), digest, "the graph")
    data = unpack(packed.data)
    if data["format"] != FORMAT or data["version"] != VERSION:
        raise BrokenStream(f"it is {data['format']!r:.80} of version {data['version']!r:.80}; this reads {VERSION}")
    layouts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    for index, key, expected in data["weights"]:
        node = data["graph"]["nodes"][index]
        array = _weight(file, places.pop(key), node, expected, key)
        node["attrs"], layouts[key] = {"value": array}, (array.dtype, array.shape)
    layouts[DESCRIPTION] = content.dtype, content.shape
    if places or header != header_of(list(layouts), list(layouts.values()))[0]:
        raise BrokenStream("its header is not that of the tensors that its nodes take")
    graph = graph_from_data(data["graph"])
    inputs, outputs = (_found(graph, data[which]) for which in ("inputs", "outputs"))
    if any(tensor.op.op.name != "placeholder" for tensor in inputs.values()) or graph.resources:
        raise BrokenStream("it is no frozen model: it has state, or inputs that are none")
    return Frozen(graph, inputs, outputs, data["name"]), _version(digest)


def _header(file: BinaryIO, size: int) -> bytes:
    """What stands before the tensors."""
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if size < 8 or length > min(MOST_HEADER, size - 8):
        raise BrokenStream(f"a file of {size} bytes that begins like this is no safetensors file")
    return begin + file.read(length)


def _tensors(header: bytes, size: int) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes begin and end in the file; raises `BrokenStream` unless these are all that is there."""
    entries = json.loads(header[8:])
    if not isinstance(entries, dict):
        raise BrokenStream("its header is no table of tensors")
    entries.pop("__metadata__", None)
    at, found = len(header), {}
    for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or begin + len(header) != at or end < begin:
            raise BrokenStream(f"the tensor {key!r:.200} does not lie where the one before it ends")
        found[key] = at, at + end - begin
        at += end - begin
    if at != size:
        raise BrokenStream(f"the file has {size} bytes, and its header says {at}")
    return found


def _weight(file: BinaryIO, place: tuple[int, int], node: Any, expected: Any, key: str) -> Any:
    """A constant that was left out, of the spec that its node has."""
    spec, (begin, end) = spec_from_data(node["outputs"][0]), place
    if not spec.known or spec.nbytes != end - begin:
        raise BrokenStream(f"the tensor {key!r:.200} has {end - begin} bytes, and its node is {spec}")
    array = np.empty(spec.concrete, spec.dtype.newbyteorder("<"))
    target, digest = bytes_of(array), hashlib.sha256()
    for start in range(0, len(target), PIECE):  # while it lies near
        piece = target[start : start + PIECE]
        read_into(piece, file, begin + start)
        digest.update(piece)
    _check_digest(digest.digest(), expected, f"the tensor {key!r:.200}")
    return as_attr(array)


def _check_digest(found: bytes, expected: Any, what: str) -> None:
    if found != expected:
        raise BrokenStream(f"{what} is damaged: it does not match its digest")


def _found(graph: Graph, places: Any) -> dict[str, Tensor]:
    found = {name: graph.nodes[node].outputs[output] for name, node, output in places if min(node, output) >= 0}
    if len(found) < len(places):
        raise BrokenStream("a name of its signature is there twice, or names nothing")
    return found
