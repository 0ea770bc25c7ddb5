"""Checkpoints on a local disk: whole or not there, checked when read, kept and made without the program's help.

A checkpoint is a folder ``save-00000007-step-000000000120`` (saves are numbered, so none replaces another). It holds
``data``, the variables' bytes, each at a multiple of 64, and ``manifest.json``: what lies where, and BLAKE2b digests of
the data and of the manifest itself. It is written under another name, forced to the disk, and renamed; what is
not whole never has a checkpoint's name. Names of variables are data in the manifest, never paths.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote

import numpy as np

from flowrt.errors import CheckpointError, FlowrtError, GraphError
from flowrt.sched.lanes import Lanes
from flowrt.spec import Spec

if TYPE_CHECKING:
    from flowrt.graph import Resource, Tensor
    from flowrt.session import Session

Name: TypeAlias = tuple[str, str]
Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

FORMAT = 1
ALIGNMENT = 64
MAX_MANIFEST = 64 << 20
_FOLDER = re.compile(r"save-(\d{8})-step-(\d{12})")
_log = logging.getLogger("flowrt.checkpoint")


class Checkpoints:
    """Saves the variables of a session's graph on its own, and restores the newest whole checkpoint on opening.

    ``url`` is the path of a folder, or its file:// URL; it is made if need be; one session at a time saves into it.
    A save follows every ``every_steps`` training steps (runs that write variables) and every ``every_seconds``, as
    ``clock`` tells them; without either, only `Session.save` saves. The newest ``keep`` stay. ``refused`` lists the
    checkpoints that were not whole. A save that fails on its own is logged and tried again after the next step;
    training goes on.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 5,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (
            keep < 1
            or (every_steps is not None and every_steps < 1)
            or (every_seconds is not None and every_seconds < 0)
        ):
            raise GraphError(
                f"Checkpoints: expected keep and every_steps of at least 1 and every_seconds of at least 0, "
                f"got {keep}, {every_steps} and {every_seconds}"
            )
        self.path = _local(url)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.keep = keep
        self.refused: list[str] = []
        self._step = 0
        self._saved_step = 0
        self._clock = clock
        self._saved_at = clock()
        self._saving = asyncio.Lock()

    @property
    def step(self) -> int:
        """Training steps so far, those before the restored checkpoint included."""
        return self._step

    def saves(self) -> list[tuple[int, int]]:
        """The (number, step) of every save there is, oldest first; whether one is whole is seen when it is read."""
        if not self.path.is_dir():
            return []
        found = (_FOLDER.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted((int(match[1]), int(match[2])) for match in found if match)

    async def after_step(self, session: Session) -> None:
        """Count a training step and save if it is time."""
        self._step += 1
        due = self.every_steps is not None and self._step - self._saved_step >= self.every_steps
        overdue = self.every_seconds is not None and self._clock() - self._saved_at >= self.every_seconds
        if (due or overdue) and not self._saving.locked():
            try:
                await self.save(session)
            except FlowrtError as error:
                _log.warning("%s; training goes on", error)

    async def save(self, session: Session) -> int:
        """Save now; answers the step. A failure leaves no file behind and the earlier checkpoints untouched."""
        async with self._saving:
            step, run = self._step, session.fresh_number()
            resources = _variables(session)
            values = await session.run_uncounted([tensor for _, tensor in resources], number=run)
            content = [(name, value) for (name, _), value in zip(resources, values, strict=True)]
            number = max((n for n, _ in self.saves()), default=0) + 1
            try:
                await _on_disk(write_checkpoint, self.path, number, step, run + 1, content)
            except OSError as error:
                raise CheckpointError(f"the checkpoint of step {step} was not saved in {self.path}: {error}") from error
            self._saved_step, self._saved_at = step, self._clock()
            await _on_disk(self._forget_old)
            return step

    async def restore_newest(self, session: Session) -> set[Name]:
        """Restore the newest whole checkpoint, if there are any; answers what it restored.

        Raises `CheckpointError` where there are some, and none is whole: starting over would push them out; and where
        something other than a folder is in their place.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder, so no checkpoint can be saved in it")
        refused: list[str] = []
        for number, step in reversed(self.saves()):
            try:
                return await self._restore(session, number, step)
            except CheckpointError as error:
                refused.append(str(error))
                self.refused.append(str(error))
                _log.warning("%s; trying the one before", error)
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole; move them away to start over: {'; '.join(refused)}"
            )
        return set()

    async def restore(self, session: Session, step: int | None = None) -> int:
        """Restore the newest checkpoint of ``step``, or the newest whole one of all; answers its step."""
        if step is None:
            if not self.saves():
                raise CheckpointError(f"there is no checkpoint in {self.path}")
            await self.restore_newest(session)
            return self._step
        numbers = [number for number, of in self.saves() if of == step]
        if not numbers:
            have = ", ".join(str(of) for _, of in self.saves()) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.path}; there are: {have}")
        await self._restore(session, numbers[-1], step)
        return step

    async def _restore(self, session: Session, number: int, step: int) -> set[Name]:
        run, values = await _on_disk(read_checkpoint, self.path, number, step)
        resources = session.graph.resources
        wanted = {n: r for n, r in resources.items() if r.kind == "variable" and n in values}
        for name, resource in wanted.items():
            _check_spec(resource, values[name], self.path, step)
        for batch in _without_shared_initials(wanted.values()):
            feeds = {r.initial: values[(r.container, r.name)] for r in batch}
            await session.run_uncounted([r.initialize for r in batch], feeds)
        session.skip_numbers(run)
        self._step = self._saved_step = step
        self._saved_at = self._clock()
        return set(wanted)

    def _forget_old(self) -> None:
        for number, step in self.saves()[: -self.keep]:
            shutil.rmtree(self.path / _folder(number, step), ignore_errors=True)


async def _on_disk(function: Any, *args: Any) -> Any:
    """Run a function that waits for the disk in a thread of its own."""
    lane = Lanes(1, "checkpoint")
    try:
        return await lane.run(function, *args)
    finally:
        lane.close()


def _variables(session: Session) -> list[tuple[Name, Tensor]]:
    return [((v.resource.container, v.resource.name), v.__tensor__()) for v in session.graph.variables]


def _local(url: str | os.PathLike[str]) -> Path:
    """The folder that ``url`` names."""
    text = os.fspath(url)
    scheme, found, rest = text.partition("://")
    if found and scheme != "file":
        raise GraphError(f"Checkpoints: checkpoints are kept on a local disk, not at {text}; give a folder's path")
    return Path(unquote(rest) if found else text)


def _check_spec(resource: Resource, value: Array, path: Path, step: int) -> None:
    spec = resource.specs[0]
    if not spec.accepts(value.dtype, value.shape):
        raise GraphError(
            f"variable {resource.name!r} ({resource.site}) is {spec}, but the checkpoint of step {step} in {path} "
            f"holds {Spec(value.dtype, value.shape)}; it is of another model: use another folder or rename the variable"
        )


def _without_shared_initials(resources: Iterable[Resource]) -> list[list[Resource]]:
    """The resources in groups in which no two start from the same tensor, since that tensor is fed."""
    groups: list[dict[int, Resource]] = []
    for resource in resources:
        key = id(resource.initial)
        group = next((g for g in groups if key not in g), None)
        if group is None:
            groups.append(group := {})
        group[key] = resource
    return [list(group.values()) for group in groups]


# The files


def _folder(number: int, step: int) -> str:
    return f"save-{number:08d}-step-{step:012d}"


def write_checkpoint(root: Path, number: int, step: int, run: int, content: Sequence[tuple[Name, Array]]) -> None:
    """Write one checkpoint, whole or not at all; ``run`` numbers the runs to come. Raises `OSError`."""
    root.mkdir(parents=True, exist_ok=True)
    final, partial = root / _folder(number, step), root / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    written = partial
    try:
        partial.mkdir()
        entries, digest = _write_data(partial / "data", content)
        manifest = {"format": FORMAT, "step": step, "run": run, "data": digest, "variables": entries}
        _write_manifest(partial / "manifest.json", manifest)
        _sync_folder(partial)
        os.rename(partial, final)
        written = final
        _sync_folder(root)
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


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


def _digest(data: bytes) -> str:
    found = _hash()
    found.update(data)
    return found.hexdigest()


def read_checkpoint(root: Path, number: int, step: int) -> tuple[int, dict[Name, Array]]:
    """The number of the next run and the variables of one checkpoint; raises `CheckpointError` if it is not whole."""
    folder = root / _folder(number, step)
    try:
        manifest = _read_manifest(folder / "manifest.json")
        if manifest["format"] != FORMAT or manifest["step"] != step:
            raise ValueError(f"it is of format {manifest['format']!r}, step {manifest['step']!r}")
        data = (folder / "data").read_bytes()
        if _digest(data) != manifest["data"]:
            raise ValueError("the data does not match its digest")
        variables = [_read_variable(data, entry) for entry in _of(list, manifest["variables"])]
        return _of(int, manifest["run"]), dict(variables)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, FlowrtError) as error:
        raise CheckpointError(f"the checkpoint {folder} is not whole: {str(error) or type(error).__name__}") from error


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
