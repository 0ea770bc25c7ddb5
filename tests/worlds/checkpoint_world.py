"""Checkpoints written and read whole by one process, in a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.checkpoints.manifest import Manifest, Name, folder_of, row_count, to_bytes
from flowrt.checkpoints.shards import write_shard
from flowrt.checkpoints.stores import LocalStore
from flowrt.checkpoints.whole import Array, keys_of, manifest_of, read_variable, shard_order, verify
from flowrt.sched.host.memory import Memory
from flowrt.sched.host.snapshots import Snapshot

if TYPE_CHECKING:
    from pathlib import Path


@valueclass
class Saved:
    """A checkpoint and the values of its variables."""

    manifest: Manifest
    variables: dict[Name, Array]


def read_checkpoint(root: Path, number: int, step: int) -> Saved:
    """A checkpoint in a folder; raises `CheckpointError` if it is not whole."""
    store = LocalStore(root)
    manifest = verify(store, number, step)
    folder = folder_of(number, step)
    values = {name: read_variable(store, folder, stored) for name, stored in manifest.variables.items()}
    return Saved(manifest, values)


def write_checkpoint(root: Path, number: int, step: int, run: int, content: Sequence[tuple[Name, Array]]) -> None:
    """Write one checkpoint into a folder, whole or not at all. Raises `OSError`."""
    store, arrays = LocalStore(root), {}
    specs = [Spec(array.dtype, array.shape) for _, array in content]
    rows = keys_of([(name, spec, 0, row_count(spec)) for (name, _), spec in zip(content, specs, strict=True)])
    for piece, (_, array) in zip(rows, content, strict=True):
        arrays[piece.key] = array
    draft = store.begin(folder_of(number, step), "whole")
    try:
        pieces = shard_order(rows)
        tensors = [(piece.key, lambda key=piece.key: Snapshot(arrays[key], Memory())) for piece in pieces]
        layouts = [(arrays[piece.key].dtype, arrays[piece.key].shape) for piece in pieces]
        with store.create(draft, "variables-00001-of-00001.safetensors") as file:
            shard = write_shard(file, "variables-00001-of-00001.safetensors", tensors, layouts)
        manifest = manifest_of(step, run, rows, [shard], None, {}, time.time())
    except BaseException:
        store.discard(draft)
        raise
    store.commit(draft, folder_of(number, step), to_bytes(manifest))
