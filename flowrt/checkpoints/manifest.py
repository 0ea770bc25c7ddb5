"""What a manifest says, and what of it is believed.

Law: pure. A manifest is JSON as `to_bytes` writes it, to the byte, with its own SHA-256 in it, so any other bit is
noticed. What it says fits together, or it is refused before anything that it speaks of is read or allocated: every row
of a variable lies in one part, the header of a file and its parts are all of the file, and a file is a plain name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from flowrt.base.errors import FlowrtError
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass

Name: TypeAlias = tuple[str, str]
"""(container, name) of a variable."""
T = TypeVar("T")

FORMAT = 2
MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20  # of a manifest
SHA256 = "sha256"
_FOLDER = re.compile(r"save-(\d{8})-step-(\d{12})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@valueclass
class SavedPart:
    """The rows of a variable from ``first`` up to ``end``, as they lie in a file from byte ``offset`` on.

    ``key`` is their name there. A scalar is one row.
    """

    file: str
    key: str
    offset: int
    first: int
    end: int
    digest: str


@valueclass
class Stored:
    """A variable as it was saved: its parts in the order of their rows."""

    spec: Spec
    parts: tuple[SavedPart, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        shape = self.spec.concrete
        return self.spec.dtype.itemsize * math.prod(shape[1:])

    def bytes_of(self, part: SavedPart) -> int:
        """The bytes of a part."""
        return (part.end - part.first) * self.row_bytes


@valueclass
class File:
    """A file of ``nbytes``; the first ``header`` of them have the ``digest``, parts of variables are the rest."""

    name: str
    nbytes: int
    header: int
    digest: str
    algorithm: str = SHA256


@valueclass
class SavedOrder:
    """Which ``names`` hang on the order of building, and of what graph: see `flowrt.session.building_order`."""

    names: tuple[str, ...]
    nodes: int
    digest: str


@valueclass
class Manifest:
    """What a checkpoint holds. ``run`` numbers the runs to come, ``saved_at`` is in seconds since 1970.

    ``order`` says which names hang on the order in which the graph was built, and ``renamed`` by which names (old to
    new) the variables of still older checkpoints went on into this one.
    """

    step: int
    run: int
    saved_at: float
    variables: dict[Name, Stored]
    files: tuple[File, ...]
    order: SavedOrder | None
    renamed: dict[str, str]

    @property
    def nbytes(self) -> int:
        """The bytes of all variables."""
        return sum(stored.spec.nbytes for stored in self.variables.values())


@valueclass
class Range:
    """Bytes of a file and what they must come to; ``what`` says it to people."""

    offset: int
    nbytes: int
    algorithm: str
    digest: str
    what: str


def checks(manifest: Manifest) -> Iterator[tuple[File, list[Range]]]:
    """For each file the ranges that are all of it."""
    inside: dict[str, list[Range]] = {file.name: [] for file in manifest.files}
    for (_, name), stored in manifest.variables.items():
        for part in stored.parts:
            if part.digest:
                what = f"rows {part.first} to {part.end} of variable {name!r}"
                inside[part.file].append(Range(part.offset, stored.bytes_of(part), SHA256, part.digest, what))
    for file in manifest.files:
        header = Range(0, file.header, file.algorithm, file.digest, "the header")
        yield file, [header, *inside[file.name]]


def row_count(spec: Spec) -> int:
    """The rows of a variable; a scalar is one."""
    return spec.concrete[0] if spec.rank else 1


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def folder_of(number: int, step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"save-{number:08d}-step-{step:012d}"


def saves_among(names: Iterable[str]) -> list[tuple[int, int]]:
    """The (number, step) of every checkpoint's folder among ``names``, oldest first."""
    found = (_FOLDER.fullmatch(name) for name in names)
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def checked_file(name: str) -> str:
    """A file's name, if it is one and leads nowhere; raises `ValueError`."""
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r:.200} is no name of a shard")
    return name


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON with its own digest."""
    data = {
        "format": FORMAT,
        "step": manifest.step,
        "run": manifest.run,
        "saved_at": manifest.saved_at,
        "variables": [_variable_to_data(name, stored) for name, stored in manifest.variables.items()],
        "files": [
            {"name": file.name, "bytes": file.nbytes, "header_bytes": file.header, "header_sha256": file.digest}
            for file in manifest.files
        ],
        "order": None if manifest.order is None else _order_to_data(manifest.order),
        "renamed": manifest.renamed,
    }
    return _dumped({**data, SHA256: hashlib.sha256(_dumped(data)).hexdigest()})


def _dumped(data: Any) -> bytes:
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


def _variable_to_data(name: Name, stored: Stored) -> dict[str, Any]:
    parts = [
        {"file": p.file, "key": p.key, "offset": p.offset, "first": p.first, "end": p.end, SHA256: p.digest}
        for p in stored.parts
    ]
    shape = list(stored.spec.concrete)
    return {"container": name[0], "name": name[1], "dtype": stored.spec.dtype.name, "shape": shape, "parts": parts}


def _order_to_data(order: SavedOrder) -> dict[str, Any]:
    return {"names": sorted(order.names), "nodes": order.nodes, "digest": order.digest}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class NotWhole(ValueError):
    """What was read is no whole checkpoint; the text says where."""


def loaded(text: bytes) -> dict[str, Any]:
    """The JSON object of a manifest of whatever format. Raises `NotWhole`."""
    try:
        return of(dict, json.loads(text.decode()))  # of bytes it would guess the encoding, and import that
    except (ValueError, TypeError, RecursionError) as error:
        raise NotWhole(f"{MANIFEST}: {error or type(error).__name__}") from error


def from_data(data: dict[str, Any], text: bytes) -> Manifest:
    """The manifest that `to_bytes` wrote as ``text``, which was loaded as ``data``. Raises `NotWhole`."""
    try:
        given = data.pop(SHA256)
        if hashlib.sha256(_dumped(data)).hexdigest() != given or _dumped({**data, SHA256: given}) != text:
            raise ValueError("it does not match its digest")
        if data["format"] != FORMAT:
            raise ValueError(f"it is of format {data['format']!r:.100}")
        files = tuple([_file_from_data(of(dict, file)) for file in of(list, data["files"])])
        variables: dict[Name, Stored] = {}
        for each in of(list, data["variables"]):
            name, stored = _variable_from_data(of(dict, each))
            if name in variables:
                raise ValueError(f"variable {name[1]!r} is there twice")
            variables[name] = stored
        _check_files(files, variables)
        return Manifest(
            _count(data["step"]),
            of(int, data["run"]),
            of(float, data["saved_at"]),
            variables,
            files,
            order_from_data(data["order"]),
            renamed_from_data(data["renamed"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, FlowrtError) as error:
        raise NotWhole(f"{MANIFEST}: {said(error)}") from error


def said(error: BaseException) -> str:
    """What an error of reading says."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def of(kind: type[T], value: Any) -> T:
    """``value``, which must be of just that ``kind``. Raises `TypeError`."""
    if type(value) is not kind:
        raise TypeError(f"it has {type(value).__name__} where it should have {kind.__name__}")
    return value


def _count(value: Any) -> int:
    if of(int, value) < 0:
        raise ValueError(f"it has {value} where it should have a count")
    return int(value)


def _digest(value: Any) -> str:
    if not _DIGEST.fullmatch(of(str, value)):
        raise ValueError(f"it has {value!r:.100} where it should have a SHA-256")
    return str(value)


def spec_from_data(fields: Mapping[str, Any]) -> Spec:
    """The spec of a variable's entry."""
    return Spec(of(str, fields["dtype"]), tuple([_count(size) for size in of(list, fields["shape"])]))


def _file_from_data(fields: dict[str, Any]) -> File:
    name = checked_file(of(str, fields["name"]))
    return File(name, _count(fields["bytes"]), _count(fields["header_bytes"]), _digest(fields["header_sha256"]))


def _variable_from_data(fields: dict[str, Any]) -> tuple[Name, Stored]:
    name = of(str, fields["container"]), of(str, fields["name"])
    parts = [_part_from_data(of(dict, part)) for part in of(list, fields["parts"])]
    stored, at = Stored(spec_from_data(fields), tuple(parts)), 0
    for part in parts:
        if part.first != at or part.end < at:
            raise ValueError(f"variable {name[1]!r} has rows {part.first} to {part.end} after row {at}")
        at = part.end
    if not parts or at != row_count(stored.spec):
        raise ValueError(f"variable {name[1]!r} has {at} of its {row_count(stored.spec)} rows")
    return name, stored


def _part_from_data(fields: dict[str, Any]) -> SavedPart:
    where = of(str, fields["file"]), of(str, fields["key"]), _count(fields["offset"])
    return SavedPart(*where, _count(fields["first"]), _count(fields["end"]), _digest(fields[SHA256]))


def _check_files(files: tuple[File, ...], variables: Mapping[Name, Stored]) -> None:
    """Raise unless each file is its header and the parts that lie in it, one behind the other."""
    found = sorted((part.file, part.offset, s.bytes_of(part)) for s in variables.values() for part in s.parts)
    parts = {file: [piece[1:] for piece in pieces] for file, pieces in groupby(found, key=lambda piece: piece[0])}
    if len({file.name for file in files}) < len(files) or not parts.keys() <= set(map(attrgetter("name"), files)):
        raise ValueError("its files are not those of its variables")
    for file in files:
        at = file.header
        for offset, nbytes in parts.get(file.name, ()):
            if offset != at:
                raise ValueError(f"{file.name}: a variable begins at byte {offset}, not at {at}")
            at += nbytes
        if at != file.nbytes:
            raise ValueError(f"{file.name} has {file.nbytes} bytes, and its variables end at {at}")


def order_from_data(data: Any) -> SavedOrder | None:
    """What a manifest says of the order of building."""
    if data is None:
        return None
    fields = of(dict, data)
    names = tuple([of(str, name) for name in of(list, fields["names"])])
    return SavedOrder(names, of(int, fields["nodes"]), of(str, fields["digest"]))


def renamed_from_data(data: Any) -> dict[str, str]:
    """What a manifest says of renaming."""
    return {of(str, old): of(str, new) for old, new in of(dict, data).items()}
