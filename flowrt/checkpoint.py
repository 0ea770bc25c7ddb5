"""Checkpoints of a session: kept and made without the program's help, and restored whole or by its word.

How one lies on the disk is the business of `checkpoint_files`; which saved value becomes which variable that of
`restoring`; who may save into a folder that of `folders`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from flowrt.building_order import Order, nameless, order_of
from flowrt.checkpoint_files import (
    Name,
    Saved,
    bytes_written,
    forget_saves,
    read_checkpoint,
    saves_in,
    write_checkpoint,
)
from flowrt.errors import CheckpointError, FlowrtError, GraphError, user_site
from flowrt.folders import FolderLock, HeldElsewhere, sync_parents
from flowrt.options import is_at_least
from flowrt.progress import Activity
from flowrt.restoring import OWN_NAMES, checked_renames, fit, listed
from flowrt.sched.lanes import Lanes
from flowrt.spec import Spec
from flowrt.tracebacks import brief

if TYPE_CHECKING:
    from flowrt.graph import Resource, Tensor
    from flowrt.session import Session

MIB = 1 << 20
_log = logging.getLogger("flowrt.checkpoint")


class Checkpoints:
    """Saves the variables of a session's graph on its own, and restores the newest whole checkpoint on opening.

    ``url`` is the path of a folder, or its file:// URL; it is made if need be. A save follows every ``every_steps``
    training steps (runs that write variables) and every ``every_seconds``, as ``clock`` tells them; without either,
    only `Session.save` saves. The newest ``keep`` stay. ``refused`` lists the checkpoints that were not whole. A save
    that fails on its own is logged and tried again after the next step; training goes on.

    A checkpoint fits the graph: what only one of them has, or has with another dtype or shape, raises
    `CheckpointError`, which lists it all. ``rename`` maps saved names to those of the graph, all at once, and with a
    name whatever lies in it as in a scope, as an optimiser's slots do in their variable's; what is saved from then on
    has the new names, and stays as it is when the same program restores it. With ``partial`` what is common to both is
    restored, at least one variable, and the rest is left as it is. Variables without a name of their own (no ``name=``,
    or the same one twice) are common to graphs only where one begins as the other, node for node.

    One session saves into a folder at a time, from its opening on if it saves on its own, else from its first save
    on, until it is closed; others are refused with `CheckpointError`, and may restore. See `flowrt.folders` for
    network file systems.
    """

    @brief
    def __init__(
        self,
        url: str | os.PathLike[str],
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 5,
        *,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        counts = keep, 1 if every_steps is None else every_steps
        seconds = 0 if every_seconds is None else every_seconds
        if not (all(is_at_least(1, count, Integral) for count in counts) and is_at_least(0, seconds, Real)):
            raise GraphError(
                f"{user_site()}: Checkpoints: expected keep and every_steps of at least 1 and every_seconds of at "
                f"least 0, got {keep!r}, {every_steps!r} and {every_seconds!r}"
            )
        self.path = _local(url)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.keep = keep
        self.partial = partial
        self.rename = checked_renames(rename)
        self.refused: list[str] = []
        self._session: Session | None = None
        self._order: Order | None = None
        self._step = 0
        self._saved_step = 0
        self._clock = clock
        self._saved_at = clock()
        self._saving = asyncio.Lock()
        self._lock = FolderLock(self.path)
        self._durable = False
        self.before_save: Callable[[], None] = lambda: None  # in the thread that writes

    @property
    def step(self) -> int:
        """Training steps so far, those before the restored checkpoint included."""
        return self._step

    @property
    def saves_by_itself(self) -> bool:
        """Whether some steps are followed by a save."""
        return self.every_steps is not None or self.every_seconds is not None

    def saves(self) -> list[tuple[int, int]]:
        """The (number, step) of every save there is, oldest first; whether one is whole is seen when it is read."""
        return saves_in(self.path)

    # What a session asks for

    async def open(self, session: Session) -> set[Name]:
        """Serve ``session`` until `close`: restore the newest whole checkpoint; answers what that restored.

        Raises `CheckpointError` as `restore_newest` does, and where this session is to save on its own and must not.
        """
        if self._session is not None:
            raise CheckpointError(
                f"these fr.Checkpoints of {self.path} serve a session that is open, in this process {os.getpid()} on "
                f"host {os.uname().nodename}; give every session its own"
            )
        self._session = session
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder, so no checkpoint can be saved in it")
        self._order = order_of(session.graph)
        if self._order is not None:
            told = listed(f"{resource.name!r} ({resource.site})" for resource in nameless(session.graph))
            _log.warning(
                "variables without a name of their own are restored into this very graph alone: %s; %s", told, OWN_NAMES
            )
        if self.saves_by_itself:
            try:
                await _on_disk(self._claim)
            except OSError as error:
                _log.warning("no checkpoint can be saved in %s: %s; every save tries again", self.path, error)
        return await self.restore_newest(session)

    async def close(self, session: Session) -> None:
        """Let ``session`` go, after a save that is under way, and others save. Twice is once."""
        if self._session is session:
            async with self._saving:
                self._session = None
                await _on_disk(self._lock.release)

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

    # Saving

    async def save(self, session: Session) -> int:
        """Save now; answers the step. A failure leaves no file behind and the earlier checkpoints untouched.

        Raises `CheckpointError` also where another session saves into the folder, and it says which.
        """
        async with self._saving:
            step, resources = self._step, _variables(session)
            total = sum(tensor.spec.nbytes for _, tensor in resources) // MIB
            try:
                with Activity(f"saving step {step} in {self.path}, MiB", total, look=self._look):
                    values = await session.run_uncounted([tensor for _, tensor in resources])
                    content = [(name, value) for (name, _), value in zip(resources, values, strict=True)]
                    await _on_disk(self._write, step, session.next_number, content)
            except OSError as error:
                raise CheckpointError(f"the checkpoint of step {step} was not saved in {self.path}: {error}") from error
            self._saved_step, self._saved_at = step, self._clock()
            await _on_disk(forget_saves, self.path, self.keep)
            return step

    def _write(self, step: int, run: int, content: Any) -> None:
        claimed = self._claim()
        try:
            self.before_save()
            if not self._durable:
                sync_parents(self.path)
                self._durable = True
            number = max((n for n, _ in self.saves()), default=0) + 1
            write_checkpoint(self.path, number, step, run, content, self._order, self.rename)
        except BaseException:
            if claimed:
                self._lock.release()
            raise

    def _claim(self) -> bool:
        """Have the folder, and the right to save into it, until `close`; answers whether that is new."""
        try:
            claimed = self._lock.acquire()
        except HeldElsewhere as holder:
            raise CheckpointError(
                f"{holder} saves checkpoints in {self.path}, and one session at a time does; close that one, or give "
                "this one another folder (to restore is free)"
            ) from None
        if claimed:
            self._durable = False  # for all we know the folder has just been made
        return claimed

    # Restoring

    def _look(self, activity: Activity) -> None:
        activity.done = bytes_written(self.path) // MIB

    async def _read(self, number: int, step: int) -> tuple[Saved, Activity]:
        """A checkpoint, and the activity of restoring it, which goes on."""
        activity = Activity(f"restoring step {step} from {self.path}")
        with activity:
            return await _on_disk(read_checkpoint, self.path, number, step), activity

    async def restore_newest(self, session: Session) -> set[Name]:
        """Restore the newest whole checkpoint, if there are any; answers what it restored.

        Raises `CheckpointError` where it does not fit the graph, and where there are some, and none is whole: starting
        over would push them out.
        """
        refused: list[str] = []
        seen: set[tuple[int, int]] = set()
        while left := [save for save in self.saves() if save not in seen]:
            number, step = left[-1]
            seen.add((number, step))
            try:
                saved, activity = await self._read(number, step)
            except CheckpointError as error:
                if (number, step) not in self.saves():
                    continue  # whoever saves here has just removed it for a newer one
                refused.append(str(error))
                self.refused.append(str(error))
                _log.warning("%s; trying the one before", error)
            else:
                return await self._restore(session, saved, step, activity)
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.path} is whole; move them away to start over: {'; '.join(refused)}"
            )
        if self.partial or self.rename:
            _log.warning("there is no checkpoint in %s to restore, in part or renamed; variables start anew", self.path)
        return set()

    async def go_back(self, session: Session) -> None:
        """Restore the newest whole checkpoint; while there is none, what the session began with.

        Raises as `restore_newest`, and `CheckpointError` where there is none and the session began with what an
        earlier one had left on the nodes.
        """
        if self.saves():
            await self.restore_newest(session)
            return
        if not await session.start_over():
            raise CheckpointError(
                f"there is no checkpoint in {self.path} yet to go back to, and the variables were not this session's "
                "own; save one before training, by session.save()"
            )
        self._step = self._saved_step = 0
        self._saved_at = self._clock()

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
        saved, activity = await self._read(numbers[-1], step)
        await self._restore(session, saved, step, activity)
        return step

    async def _restore(self, session: Session, saved: Saved, step: int, activity: Activity) -> set[Name]:
        specs = {name: Spec(value.dtype, value.shape) for name, value in saved.variables.items()}
        rename = {old: new for old, new in self.rename.items() if saved.renamed.get(old) != new}
        what = f"the checkpoint of step {step} in {self.path}"
        found = fit(specs, saved.order, session.graph, rename, self.partial, what)
        if not found.whole:
            _log.log(logging.WARNING if found.other else logging.INFO, "%s is restored in part; %s", what, found)
        activity.what, activity.of = f"{activity.what}, variables", len(found.restored)
        with activity:
            for batch in _without_shared_initials(session.graph.resources[name] for name in found.restored):
                feeds = {r.initial: saved.variables[found.restored[(r.container, r.name)]] for r in batch}
                await session.run_uncounted([r.initialize for r in batch], feeds)
                activity.done += len(batch)
        session.skip_numbers(saved.run)
        self._step = self._saved_step = step
        self._saved_at = self._clock()
        return set(found.restored)


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
        raise GraphError(
            f"{user_site()}: Checkpoints: checkpoints are kept on a local disk, not at {text}; give a folder's path"
        )
    return Path(unquote(rest) if found else text)


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
