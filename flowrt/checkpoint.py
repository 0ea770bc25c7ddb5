"""``python -m flowrt.checkpoint URL``: what checkpoints there are, if they are whole, and how two of them differ."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from flowrt.base.errors import CheckpointError
from flowrt.checkpoints.manifest import Manifest, Name, Stored, folder_of
from flowrt.checkpoints.shards import bytes_of, read_into
from flowrt.checkpoints.stores import Store, store_at
from flowrt.checkpoints.whole import Array, read_manifest, verify
from flowrt.sched.host.memory import amount

ROWS_AT_ONCE = 16 << 20  # bytes of a variable that are compared at once


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; answers 0, 1 where a checkpoint is not whole or two differ, 2 where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m flowrt.checkpoint", description="List, verify and compare checkpoints. Changes nothing."
    )
    parser.add_argument("url", help="where checkpoints are: a folder, or a URL such as s3://bucket/folder")
    parser.add_argument("other", nargs="?", help="where the checkpoint to compare with is; by default there, too")
    parser.add_argument("--step", type=int, nargs="+", help="of that step, by default the newest; of two, to compare")
    parser.add_argument("--verify", action="store_true", help="read all there is of each, and compare digests")
    given = parser.parse_args(arguments)
    try:
        store = store_at(given.url)
        if given.other is not None or len(given.step or ()) > 1:
            return _compare(store, store if given.other is None else store_at(given.other), given.step or [None])
        return _list(store, given.step, given.verify)
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _find(store: Store, step: int | None) -> tuple[int, int]:
    """The newest save, of ``step`` if given."""
    found = [save for save in store.saves() if step is None or save[1] == step]
    if not found:
        raise CheckpointError(f"there is no checkpoint {'' if step is None else f'of step {step} '}in {store.url}")
    return found[-1]


# ── listing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _list(store: Store, steps: Sequence[int] | None, verified: bool) -> int:
    saves = [_find(store, steps[0])] if steps else store.saves()
    if not saves:
        _find(store, None)
    damaged = 0
    print(f"{'save':>8} {'step':>12}  {'saved at':19}  {'bytes':>10}  variables  shards")
    for save in saves:
        try:
            manifest = verify(store, *save) if verified else read_manifest(store, *save)
        except CheckpointError as error:
            damaged += 1
            print(f"{save[0]:>8} {save[1]:>12}  {error}")
        else:
            print(_line(save, manifest) + ("  verified" if verified else ""))
            if steps:
                print("\n".join(_variables(manifest)))
    return 1 if damaged else 0


def _line(save: tuple[int, int], manifest: Manifest) -> str:
    when = datetime.datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds") if manifest.saved_at else ""
    sizes = f"{amount(manifest.nbytes):>10}  {len(manifest.variables):>9}  {len(manifest.files):>6}"
    return f"{save[0]:>8} {save[1]:>12}  {when:19}  {sizes}"


def _variables(manifest: Manifest) -> Iterator[str]:
    for name, stored in sorted(manifest.variables.items()):
        parts = "" if len(stored.parts) == 1 else f", in {len(stored.parts)} parts"
        yield f"  {_said(name)} {stored.spec}{parts}"


def _said(name: Name) -> str:
    return f"{name[0]}:{name[1]!r}" if name[0] else repr(name[1])


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare(store: Store, other: Store, steps: Sequence[int | None]) -> int:
    saves = _find(store, steps[0]), _find(other, steps[-1])
    one, two = verify(store, *saves[0]), verify(other, *saves[1])
    folders = folder_of(*saves[0]), folder_of(*saves[1])
    print(f"{store.url}/{folders[0]} and {other.url}/{folders[1]}")
    told = 0
    for name in sorted(one.variables.keys() | two.variables.keys()):
        if name not in one.variables or name not in two.variables:
            text = f"only in the {'first' if name in one.variables else 'second'}"
        else:
            pair = one.variables[name], two.variables[name]
            text = _difference(store, folders[0], pair[0], other, folders[1], pair[1])
        told += bool(text)
        if text:
            print(f"  {_said(name)}: {text}")
    print(f"{told} of {len(one.variables.keys() | two.variables.keys())} variables differ")
    return 1 if told else 0


def _difference(store: Store, folder: str, one: Stored, other: Store, other_folder: str, two: Stored) -> str:
    """How two values differ; nothing where they are the same to the bit."""
    if (one.spec.dtype, one.spec.concrete) != (two.spec.dtype, two.spec.concrete):
        return f"{one.spec} and {two.spec}"
    digests = [[(part.first, part.end, part.digest) for part in stored.parts] for stored in (one, two)]
    if digests[0] == digests[1] and all(part.digest for part in one.parts):
        return ""
    count, largest, relative = 0, 0.0, 0.0
    for left, right in zip(_stretches(store, folder, one), _stretches(other, other_folder, two), strict=True):
        apart = left.view(np.uint8) != right.view(np.uint8)  # so that a NaN is itself
        count += int(apart.reshape(left.size, -1).any(axis=1).sum())
        with np.errstate(all="ignore"):
            distance = np.abs(left.astype(np.float64) - right.astype(np.float64))
            size = np.maximum(np.abs(left.astype(np.float64)), np.abs(right.astype(np.float64)))
            largest = max(largest, float(distance.max(initial=0.0)))
            relative = max(relative, float(np.nan_to_num(distance / size, nan=0.0).max(initial=0.0)))
    if not count:
        return ""
    return f"{count} of {one.spec.size} entries differ, by up to {largest:.6g} ({relative:.2%})"


def _stretches(store: Store, folder: str, stored: Stored) -> Iterator[Array]:
    """A value in stretches that do not hang on how it is stored."""
    total, at = stored.spec.nbytes, 0
    step = ROWS_AT_ONCE // stored.spec.dtype.itemsize * stored.spec.dtype.itemsize
    starts = [(part.first * stored.row_bytes, part) for part in stored.parts]
    while at < total:
        made = np.empty(min(step, total - at), np.uint8)
        for start, part in starts:
            first, end = max(start, at), min(start + stored.bytes_of(part), at + made.size)
            if first < end:
                with store.open(folder, part.file) as file:
                    read_into(bytes_of(made)[first - at : end - at], file, part.offset + first - start)
        yield made.view(stored.spec.dtype)
        at += made.size


def run() -> None:
    """Run the command; a reader of its output that goes away ends it quietly."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    run()
