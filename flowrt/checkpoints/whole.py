"""Checkpoints read and written by one process: the manifest of one, all of one, and whether one is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import CheckpointError
from flowrt.base.valueclass import valueclass
from flowrt.checkpoints import older
from flowrt.checkpoints.manifest import (
    MANIFEST,
    MAX_BYTES,
    File,
    Manifest,
    Name,
    NotWhole,
    SavedOrder,
    SavedPart,
    Stored,
    checks,
    folder_of,
    from_data,
    loaded,
    row_count,
)
from flowrt.checkpoints.shards import Written, bytes_of, check, read_into

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.checkpoints.stores import Store

Array: TypeAlias = "np.ndarray[Any, Any]"


@valueclass
class HeldRows:
    """A piece of a variable that a task has: rows ``first`` to ``end`` of what ``spec`` is as a whole."""

    name: Name
    spec: Spec
    first: int
    end: int
    key: str


def keys_of(rows: Sequence[tuple[Name, Spec, int, int]]) -> list[HeldRows]:
    """Pieces of variables with the keys by which they are told from one another in shards."""
    taken = {"__metadata__"}
    found = []
    for (container, name), spec, first, end in rows:
        key = f"{container}:{name}" if container else name
        key += "" if (first, end) == (0, row_count(spec)) else f"[{first}:{end}]"
        while key in taken:
            key += "'"
        taken.add(key)
        found.append(HeldRows((container, name), spec, first, end, key))
    return found


def shard_order(rows: Sequence[HeldRows]) -> list[HeldRows]:
    """In which order pieces lie in a shard: so that each begins at a multiple of its entries' size."""
    return sorted(rows, key=lambda piece: (-piece.spec.dtype.itemsize, piece.key))


def stored_of(rows: Sequence[HeldRows], written: Mapping[str, tuple[str, int, str]]) -> dict[Name, Stored]:
    """The variables of a manifest; ``written`` says of each key its file, its offset and its digest."""
    found: dict[Name, list[tuple[Spec, SavedPart]]] = {}
    for piece in rows:
        file, offset, digest = written[piece.key]
        part = SavedPart(file, piece.key, offset, piece.first, piece.end, digest)
        found.setdefault(piece.name, []).append((piece.spec, part))
    return {
        name: Stored(parts[0][0], tuple(sorted((part for _, part in parts), key=lambda part: part.first)))
        for name, parts in found.items()
    }


def read_manifest(store: Store, number: int, step: int) -> Manifest:
    """What a checkpoint holds; raises `CheckpointError` if that cannot be told."""
    folder = folder_of(number, step)
    try:
        nbytes = store.size(folder, MANIFEST)
        if nbytes > MAX_BYTES:
            raise NotWhole(f"{MANIFEST} has {nbytes} bytes, more than {MAX_BYTES}")
        with store.open(folder, MANIFEST) as file:
            text = file.read(MAX_BYTES)
        data = loaded(text)
        manifest = (
            older.from_data(data, store.size(folder, older.DATA)) if older.is_older(data) else from_data(data, text)
        )
        if manifest.step != step:
            raise NotWhole(f"{MANIFEST} is of step {manifest.step}")
        return manifest
    except (OSError, NotWhole) as error:
        raise not_whole(store, number, step, error) from error


def not_whole(store: Store, number: int, step: int, error: object) -> CheckpointError:
    """The error of a checkpoint that is not whole."""
    return CheckpointError(f"the checkpoint {store.url.rstrip('/')}/{folder_of(number, step)} is not whole: {error}")


def verify(store: Store, number: int, step: int, going: Callable[[], bool] = lambda: True) -> Manifest:
    """What a checkpoint holds, once every byte of it was seen to be what was written. Raises `CheckpointError`."""
    manifest = read_manifest(store, number, step)
    try:
        for file, ranges in checks(manifest):
            check(store, folder_of(number, step), file, ranges, going)
    except (OSError, NotWhole) as error:
        raise not_whole(store, number, step, error) from error
    return manifest


def check_reached(store: Store, draft: str, file: File) -> None:
    """Raise `OSError` where a node wrote a shard of a draft to another disk than that which is seen here."""
    found = None
    with suppress(OSError):
        found = store.size(draft, file.name)
    if found != file.nbytes:
        raise OSError(
            f"the node that wrote {file.name} did not write where this process looks; keep checkpoints where all "
            "machines of the cluster reach them: in a folder that they share, or at a URL such as s3://"
        )


def read_variable(store: Store, folder: str, stored: Stored) -> Array:
    """The value of a variable of a checkpoint that is whole. Raises `OSError`."""
    made = np.empty(stored.spec.concrete, stored.spec.dtype)
    for part in stored.parts:
        target = bytes_of(made)[part.first * stored.row_bytes : part.end * stored.row_bytes]
        with store.open(folder, part.file) as file:
            read_into(target, file, part.offset)
    return made


def manifest_of(
    step: int,
    run: int,
    rows: Sequence[HeldRows],
    shards: Sequence[tuple[File, Sequence[Written]]],
    order: SavedOrder | None,
    renamed: Mapping[str, str],
    saved_at: float,
) -> Manifest:
    """The manifest over shards that were written."""
    written = {key: (file.name, offset, digest) for file, pieces in shards for key, offset, digest in pieces}
    files = tuple(file for file, _ in shards)
    return Manifest(step, run, saved_at, stored_of(rows, written), files, order, dict(renamed))
