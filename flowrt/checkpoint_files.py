"""How a checkpoint lies on the disk: whole or not there, and checked when read.

A checkpoint is a folder ``save-00000007-step-000000000120`` (saves are numbered, so none replaces another). It holds
``data``, the variables' bytes, each at a multiple of 64, and ``manifest.json``: what lies where, and BLAKE2b digests of
the data and of the manifest itself. It is written under another name, forced to the disk, and renamed; what is
not whole never has a checkpoint's name. Names of variables are data in the manifest, never paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flowrt.building_order import Order
from flowrt.errors import CheckpointError, FlowrtError
from flowrt.folders import sync_folder
from flowrt.spec import Spec
from flowrt.valueclass import valueclass

if TYPE_CHECKING:
    from pathlib import Path

Name: TypeAlias = tuple[str, str]
Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

FORMAT = 1
ALIGNMENT = 64
MAX_MANIFEST = 64 << 20
PARTIAL = ".partial"  # the folder of a checkpoint in progress
_FOLDER = re.compile(r"save-(\d{8})-step-(\d{12})")


@valueclass
class Saved:
    """What a checkpoint holds.

    ``run`` numbers the runs to come. ``order`` says which names hang on the order in which the graph was built, and
    ``renamed`` by which names (old to new) the variables of still older checkpoints went on into this one.
    """

    run: int
    variables: dict[Name, Array]
    order: Order | None
    renamed: dict[str, str]


def folder_of(number: int, step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"save-{number:08d}-step-{step:012d}"


def saves_in(root: Path) -> list[tuple[int, int]]:
    """The (number, step) of every save in ``root``, oldest first, whole or not."""
    if not root.is_dir():
        return []
    found = (_FOLDER.fullmatch(entry.name) for entry in root.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def forget_saves(root: Path, but: int) -> None:
    """Remove the oldest saves, but for the newest few."""
    for number, step in saves_in(root)[:-but]:
        shutil.rmtree(root / folder_of(number, step), ignore_errors=True)


def bytes_written(root: Path) -> int:
    """How much of the data of a checkpoint in progress is written."""
    with suppress(OSError):
        return (root / PARTIAL / "data").stat().st_size
    return 0


def write_checkpoint(
    root: Path,
    number: int,
    step: int,
    run: int,
    content: Sequence[tuple[Name, Array]],
    order: Order | None = None,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Write one checkpoint, whole or not at all; the arguments are described with `Saved`. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True)
    final, partial = root / folder_of(number, step), root / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    written = partial
    try:
        partial.mkdir()
        entries, digest = _write_data(partial / "data", content)
        manifest = {"format": FORMAT, "step": step, "run": run, "data": digest, "variables": entries}
        manifest |= {"order": _order_to_data(order), "renamed": dict(renamed or {})}
        _write_manifest(partial / "manifest.json", manifest)
        sync_folder(partial)
        os.rename(partial, final)
        written = final
        sync_folder(root)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


def _write_data(path: Path, content: Sequence[tuple[Name, Array]]) -> tuple[list[dict[str, Any]], str]:
    """Write the variables' bytes; answers what lies where, and the digest of it all."""
    entries, at, digest = [], 0, _hash()
    with path.open("wb") as file:
        for (container, name), value in content:
            padding = -at % ALIGNMENT
            data = bytes(padding) + np.ascontiguousarray(value).tobytes()
            file.write(data)
            digest.update(data)
            shape = list(np.shape(value))
            entries.append(
                {
                    "container": container,
                    "name": name,
                    "dtype": value.dtype.name,
                    "shape": shape,
                    "offset": at + padding,
                }
            )
            at += len(data)
        _sync_file(file.fileno(), file)
    return entries, digest.hexdigest()


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, sort_keys=True)
    with path.open("w") as file:
        file.write(json.dumps({"manifest": text, "digest": _digest(text.encode())}))
        _sync_file(file.fileno(), file)


def _sync_file(descriptor: int, file: Any) -> None:
    file.flush()
    os.fsync(descriptor)


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


def _digest(data: bytes) -> str:
    found = _hash()
    found.update(data)
    return found.hexdigest()


def read_checkpoint(root: Path, number: int, step: int) -> Saved:
    """One checkpoint; raises `CheckpointError` if it is not whole."""
    folder = root / folder_of(number, step)
    try:
        manifest = _read_manifest(folder / "manifest.json")
        if manifest["format"] != FORMAT or manifest["step"] != step:
            raise ValueError(f"it is of format {manifest['format']!r}, step {manifest['step']!r}")
        data = (folder / "data").read_bytes()
        if _digest(data) != manifest["data"]:
            raise ValueError("the data does not match its digest")
        variables = [_read_variable(data, entry) for entry in _of(list, manifest["variables"])]
        renamed = {_of(str, old): _of(str, new) for old, new in _of(dict, manifest.get("renamed", {})).items()}
        return Saved(_of(int, manifest["run"]), dict(variables), _order_from_data(manifest.get("order")), renamed)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, FlowrtError) as error:
        raise CheckpointError(f"the checkpoint {folder} is not whole: {str(error) or type(error).__name__}") from error


def _order_to_data(order: Order | None) -> dict[str, Any] | None:
    if order is None:
        return None
    return {"names": sorted(order.names), "nodes": order.nodes, "digest": order.digest}


def _order_from_data(data: Any) -> Order | None:
    if data is None:
        return None
    fields = _of(dict, data)
    names = frozenset(_of(str, name) for name in _of(list, fields["names"]))
    return Order(names, _of(int, fields["nodes"]), _of(str, fields["digest"]))


def _of(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"the manifest has {type(value).__name__} where it should have {kind.__name__}")
    return value


def _read_manifest(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_MANIFEST:
        raise ValueError(f"{path.name} is larger than {MAX_MANIFEST} bytes")
    outer = _of(dict, json.loads(path.read_bytes()))
    text = _of(str, outer["manifest"])
    if _digest(text.encode()) != outer["digest"]:
        raise ValueError(f"{path.name} does not match its digest")
    return _of(dict, json.loads(text))


def _read_variable(data: bytes, entry: Any) -> tuple[Name, Array]:
    fields = _of(dict, entry)
    name = _of(str, fields["container"]), _of(str, fields["name"])
    spec = Spec(_of(str, fields["dtype"]), tuple(_of(int, n) for n in _of(list, fields["shape"])))
    offset = _of(int, fields["offset"])
    if not 0 <= offset <= len(data) - spec.nbytes:
        raise ValueError(f"variable {name[1]!r} lies outside the data")
    return name, np.frombuffer(data, spec.dtype, spec.size, offset).reshape(spec.concrete)
