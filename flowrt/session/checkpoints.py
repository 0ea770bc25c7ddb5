"""Checkpoints of a session: kept and made without the program's help, and restored whole or by its word.

How one lies in its place is the business of `checkpoints`; what nodes do for it that of `saving`; which saved value
becomes which variable that of `restoring`; who may save into a folder that of `folders`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import CheckpointError, FlowrtError, GraphError, user_site
from flowrt.base.locating import fitting
from flowrt.base.plain import is_number, is_whole
from flowrt.base.telling import telling
from flowrt.checkpoints.folders import FolderLock, HeldElsewhere, in_the_way, sync_parents
from flowrt.checkpoints.manifest import File, Manifest, Name, NotWhole, folder_of, to_bytes
from flowrt.checkpoints.retention import superfluous
from flowrt.checkpoints.stores import LocalStore
from flowrt.checkpoints.whole import check_reached, manifest_of, not_whole, read_manifest
from flowrt.finishing import to_the_end
from flowrt.progress import Activity
from flowrt.session.building_order import Order, from_manifest, nameless, order_of, to_manifest
from flowrt.session.restoring import OWN_NAMES, Fit, checked_renames, fit, listed
from flowrt.session.saving import (
    BeingTrained,
    CheckpointDraft,
    Places,
    Saving,
    check_untrained,
    in_thread,
    pieces_of,
    prepare_on_tasks,
    store_of,
    take_on_tasks,
    verify_on_tasks,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.checkpoints.shards import Written
    from flowrt.session.inside import Inside

MIB = 1 << 20
PATIENCE = 5.0  # seconds that a step waits for a save of little, at most
AHEAD_STEPS, AHEAD_SECONDS = 8, 5.0  # before a save is due memory is made ready: it takes as long as some steps do
_log = logging.getLogger("flowrt.checkpoint")


class Checkpoints:
    """Saves the variables of a session's graph on its own, and restores the newest whole checkpoint on opening.

    ``url`` is the path of a folder, or a URL that fsspec knows (s3://bucket/folder); a folder is made if need be. A
    save follows every ``every_steps`` training steps (runs that write variables) and every ``every_seconds``, as
    ``clock`` tells them; without either, only `Session.save` saves. The newest ``keep`` stay, and with
    ``keep_every_hours`` one for every so many hours. ``refused`` lists the checkpoints that were not whole.

    The variables are saved as they are when it is time, and written beside the steps that follow: by the nodes that
    hold them, each its own, or by the client for those that have not its disk. A save that is due while the one before
    is still being written follows as soon as that is done, or the session ends; where variables come to less than 16
    MiB, the step waits for that, 5 s at most. A save that fails on its own is logged and tried again after the
    next step.

    A checkpoint fits the graph: what only one of them has, or has with another dtype or shape, raises
    `CheckpointError`, which lists it all. ``rename`` maps saved names to those of the graph, all at once, and with a
    name whatever lies in it as in a scope, as an optimiser's slots do in their variable's; what is saved from then on
    has the new names, and stays as it is when the same program restores it. With ``partial`` what is common to both is
    restored, at least one variable, and the rest is left as it is. Variables without a name of their own (no ``name=``,
    or the same one twice) are common to graphs only where one begins as the other, node for node.

    One session saves into a folder at a time, from its opening on if it saves on its own, else from its
    first save on, until it is closed; others are refused with `CheckpointError`, and may restore. See
    `flowrt.checkpoints.folders` for network file systems. Elsewhere than in folders nobody is refused: give every
    session a place of its own.
    """

    @fitting
    def __init__(
        self,
        url: str | os.PathLike[str],
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 5,
        keep_every_hours: float | None = None,
        *,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        counts = keep, 1 if every_steps is None else every_steps
        seconds = [0 if each is None else each for each in (every_seconds, keep_every_hours)]
        if not (all(is_whole(n, 1) for n in counts) and all(map(is_number, seconds))):
            raise GraphError(
                f"{user_site()}: Checkpoints: expected keep and every_steps of at least 1, every_seconds and "
                f"keep_every_hours of at least 0, got {keep!r}, {every_steps!r}, {every_seconds!r} and "
                f"{keep_every_hours!r}"
            )
        self._store = store_of(url)
        self.url = os.fspath(url)
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.keep = keep
        self.keep_every_hours = keep_every_hours
        self.partial = partial
        self.rename = checked_renames(rename)
        self.refused: list[str] = []
        self._session: Inside | None = None
        self._places: Places | None = None
        self._order: Order | None = None
        self._step = 0
        self._saved_step = 0
        self._clock = clock
        self._saved_at = clock()
        self._saving = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None  # a save that goes on beside steps
        self._preparing: asyncio.Task[None] | None = None  # for a save to come
        self._behind = False  # whether the save that is due was put off by the one before
        self._prepared_after: float | None = None  # when the save before that was
        self._times: dict[tuple[int, int], float] = {}  # when saves were made, as far as that was asked
        self._lock = FolderLock(self._store.path) if isinstance(self._store, LocalStore) else None
        self._durable = False
        self.before_save: Callable[[], None] = lambda: None  # in the thread that writes

    @telling
    def __repr__(self) -> str:
        return f"fr.Checkpoints at {self.url!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made, for another session."""
        counts = self.every_steps, self.every_seconds, self.keep, self.keep_every_hours
        named = functools.partial(type(self), partial=self.partial, rename=self.rename, clock=self._clock)
        return named, (self._store.url, *counts)

    @property
    def path(self) -> Path | None:
        """The folder; None where they are kept elsewhere."""
        return self._store.path if isinstance(self._store, LocalStore) else None

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
        try:
            return self._store.saves()
        except OSError as error:
            raise CheckpointError(f"the checkpoints in {self.url} cannot be listed: {error}") from error

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._saving.locked()

    async def wait_saved(self) -> None:
        """Wait until no save is under way any more."""
        async with self._saving:
            pass

    # What a session asks for

    async def open(self, session: Inside) -> set[Name]:
        """Serve ``session`` until `close`: restore the newest whole checkpoint; answers what that restored.

        Raises `CheckpointError` as `restore_newest` does, and where this session is to save on its own and must not.
        """
        if self._session not in (None, session):  # this one asks again where a node was lost meanwhile
            raise CheckpointError(
                f"these fr.Checkpoints of {self.url} serve a session that is open, in this process {os.getpid()} on "
                f"host {os.uname().nodename}; give every session its own"
            )
        self._session, self._places = session, Places(session)
        if self.path is not None and (why := in_the_way(self.path)) is not None:
            raise CheckpointError(f"no checkpoint can be saved in {self.url}: {why}")
        self._order = order_of(session.graph)
        if self._order is not None:
            told = listed(f"{resource.name!r} ({resource.site})" for resource in nameless(session.graph))
            _log.warning(
                "variables without a name of their own are restored into this very graph alone: %s; %s", told, OWN_NAMES
            )
        if self.saves_by_itself:
            try:
                await in_thread(self._claim)
            except OSError as error:
                _log.warning("no checkpoint can be saved in %s: %s; every save tries again", self.url, error)
        try:
            return await self.restore_newest(session)
        except BeingTrained as error:  # they stay as they are, beyond that step: reports will tell
            _log.warning("%s", error)
            self._step = self._saved_step = (await in_thread(self.saves))[-1][1]
            return set()

    async def close(self, session: Inside) -> None:
        """Let ``session`` go, after a save that is under way, and others save. Twice is once."""
        if self._session is session:
            if self._preparing is not None:
                self._preparing.cancel()
                await asyncio.wait([self._preparing])
            async with self._saving:
                self._session = self._places = None
                if self._lock is not None:
                    await in_thread(self._lock.release)

    async def after_step(self, session: Inside, step: int = 0) -> None:
        """Count a training step, at least to ``step``, and begin to save if it is time, beside the steps to come."""
        self._step = max(self._step + 1, step)
        self._prepare(session)
        if not self._is_due() or self._puts_off():
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await self._saving.acquire()
        except TimeoutError:  # what the one before writes to hangs, or fails again and again
            self._behind = True
            return
        try:
            if not self._is_due():  # another step has waited, too
                self._saving.release()
                return
            saving = await self._keep(session)
        except FlowrtError as error:
            self._saving.release()
            _log.warning("%s; training goes on", error)
        except BaseException:
            self._saving.release()
            raise
        else:
            before = self._saved_step, self._saved_at
            self._saved_step, self._saved_at = saving.step, self._clock()
            self._writing = asyncio.ensure_future(self._write_beside(saving, before))

    def cut_short(self) -> None:
        """A step that writes variables was cut short: what they are now is nothing to end with."""
        self._behind = False

    async def catch_up(self, session: Inside) -> None:
        """Make the save that was put off, if one was, whatever the session ends by: no step follows any more."""
        if self._behind and self._is_due():
            try:
                await self.save(session)
            except FlowrtError as error:
                _log.warning("%s", error)

    def _is_due(self, steps: int = 0, seconds: float = 0.0) -> bool:
        """Whether it is time to save, or will be after so many steps or seconds more."""
        due = self.every_steps is not None and self._step + steps - self._saved_step >= self.every_steps
        return due or (
            self.every_seconds is not None and self._clock() + seconds - self._saved_at >= self.every_seconds
        )

    def _puts_off(self) -> bool:
        """Whether a save that is due follows a later step: one of much, or that was put off already, where the one
        before is not written yet, and then until memory is ready for its copies."""
        preparing = self._preparing is not None and not self._preparing.done()
        due_later = self.is_saving or (self._behind and preparing)
        self._behind = due_later and (self._behind or (self._places is not None and self._places.are_large))
        return self._behind

    def _prepare(self, session: Inside) -> None:
        """Have memory ready by the time that the next save is due, once for each."""
        if self.is_saving or self._prepared_after == self._saved_at or not self._is_due(AHEAD_STEPS, AHEAD_SECONDS):
            return
        self._prepared_after = self._saved_at
        if self._places is not None:
            self._preparing = asyncio.ensure_future(prepare_on_tasks(session, self._places))

    # Saving

    async def save(self, session: Inside) -> int:
        """Save now; answers the step. Raises `CheckpointError`, where another session saves too, with all as it was."""
        async with self._saving:
            saving = await self._keep(session)
            await self._write(saving)
            self._saved_step, self._saved_at = saving.step, self._clock()
            return saving.step

    async def _keep(self, session: Inside) -> Saving:
        """Have all that is to be saved be kept as it is now."""
        if self._places is None:
            raise CheckpointError("the session was closed")
        saving = Saving(session, self._places.find(), self._step)
        try:
            async with session.rests.all():
                await saving.keep()
        except BaseException:
            await saving.drop()
            raise
        return saving

    async def _write_beside(self, saving: Saving, before: tuple[int, float]) -> None:
        try:
            await self._write(saving)
        except Exception as error:
            self._saved_step, self._saved_at = before
            _log.warning("%s; training goes on", error, exc_info=not isinstance(error, FlowrtError))
        finally:
            self._saving.release()

    async def _write(self, saving: Saving) -> None:
        """Have what is kept be written, whole or not at all."""
        what = f"saving step {saving.step} in {self.url}{', MiB' * (saving.nbytes >= MIB)}"
        at = CheckpointDraft()
        try:
            with Activity(what, saving.nbytes // MIB or None, look=lambda activity: self._look(activity, at)):
                await in_thread(self._begin, saving, at)
                shards = await saving.write(self._store.url, at.draft)
                await in_thread(self._commit, saving, at, shards)
        except _Refused:
            raise
        except (OSError, CheckpointError) as error:
            text = f"the checkpoint of step {saving.step} was not saved in {self.url}: {error}"
            raise CheckpointError(text) from error
        finally:
            await to_the_end(self._clear(saving, at))
        try:
            await in_thread(self._forget)
        except FlowrtError as error:
            _log.warning("after step %d was saved: %s", saving.step, error)

    async def _clear(self, saving: Saving, at: CheckpointDraft) -> None:
        """Let go of what a save held; where it failed, also of its draft and of a lock that it took."""
        await saving.drop()
        if at.draft:
            await in_thread(self._store.discard, at.draft)
        if at.claimed and self._lock is not None:
            await in_thread(self._lock.release)

    def _begin(self, saving: Saving, at: CheckpointDraft) -> None:
        """Make a folder to write in."""
        at.claimed = self._claim()
        self.before_save()
        if self.path is not None and not self._durable:
            sync_parents(self.path)
            self._durable = True
        number = max((n for n, _ in self.saves()), default=0) + 1
        at.folder = folder_of(number, saving.step)
        at.draft = self._store.begin(at.folder, saving.token)

    def _commit(self, saving: Saving, at: CheckpointDraft, shards: Sequence[tuple[File, Sequence[Written]]]) -> None:
        for file, _ in shards:
            check_reached(self._store, at.draft, file)
        order = None if self._order is None else to_manifest(self._order)
        manifest = manifest_of(saving.step, saving.run, saving.rows, shards, order, self.rename, saving.saved_at)
        self._store.commit(at.draft, at.folder, to_bytes(manifest))
        at.draft, at.claimed = "", False

    def _forget(self) -> None:
        """Remove what need not stay."""
        hours = self.keep_every_hours
        saves = self.saves()
        self._times = {save: self._times[save] for save in saves if save in self._times}
        for save in saves if hours is not None else ():
            if save not in self._times:
                with suppress(CheckpointError):
                    self._times[save] = read_manifest(self._store, *save).saved_at
        for save in superfluous({save: self._times.get(save) for save in saves}, self.keep, hours):
            self._store.forget(folder_of(*save))

    def _claim(self) -> bool:
        """Have the folder, and the right to save into it, until `close`; answers whether that is new."""
        if self._lock is None:
            return False
        try:
            claimed = self._lock.acquire()
        except HeldElsewhere as holder:
            raise _Refused(
                f"{holder} saves checkpoints in {self.url}, and one session at a time does; close that one, or give "
                "this one another folder (to restore is free)"
            ) from None
        if claimed:
            self._durable = False  # for all we know the folder has just been made
        return claimed

    def _look(self, activity: Activity, at: CheckpointDraft) -> None:
        if draft := at.draft:
            activity.done = self._store.written(draft) // MIB

    # Restoring

    async def restore_newest(self, session: Inside) -> set[Name]:
        """Restore the newest whole checkpoint, if there are any; answers what it restored.

        Raises `CheckpointError` where it does not fit the graph, and where there are some, and none is whole: starting
        over would push them out.
        """
        refused: list[str] = []
        seen: set[tuple[int, int]] = set()
        while left := [save for save in await in_thread(self.saves) if save not in seen]:
            seen.add(left[-1])
            try:
                return await self._restore(session, *left[-1])
            except _NotWhole as error:
                if left[-1] not in await in_thread(self.saves):
                    continue  # whoever saves here has just removed it for a newer one
                refused.append(str(error))
                self.refused.append(str(error))
                _log.warning("%s; trying the one before", error)
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.url} is whole; move them away to start over: {'; '.join(refused)}"
            )
        if self.partial or self.rename:
            _log.warning("there is no checkpoint in %s to restore, in part or renamed; variables start anew", self.url)
        return set()

    async def go_back(self, session: Inside) -> None:
        """Restore the newest whole checkpoint; while there is none, what the session began with.

        Raises as `restore_newest`, and `CheckpointError` where there is none and the session began with what an
        earlier one had left on the nodes.
        """
        await self.wait_saved()  # of what is undone now, and yet was
        if await in_thread(self.saves):
            await self.restore_newest(session)
            return
        if not await session.start_over():
            raise CheckpointError(
                f"there is no checkpoint in {self.url} yet to go back to, and the variables were not this session's "
                "own; save one before training, by session.save()"
            )
        self._step = self._saved_step = 0
        self._saved_at = self._clock()

    async def restore(self, session: Inside, step: int | None = None) -> int:
        """Restore the newest checkpoint of ``step``, or the newest whole one of all; answers its step."""
        await self.wait_saved()
        saves = await in_thread(self.saves)
        if step is None:
            if not saves:
                raise CheckpointError(f"there is no checkpoint in {self.url}")
            await self.restore_newest(session)
            return self._step
        numbers = [number for number, of in saves if of == step]
        if not numbers:
            have = ", ".join(str(of) for _, of in saves) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.url}; there are: {have}")
        await self._restore(session, numbers[-1], step)
        return step

    async def _restore(self, session: Inside, number: int, step: int) -> set[Name]:
        """Restore one checkpoint, once it was seen to be whole and to fit; answers the variables that have it now."""
        assert self._places is not None
        places, folder = self._places.find(), folder_of(number, step)
        await check_untrained(session, places)
        activity = Activity(f"restoring step {step} from {self.url}")
        try:
            with activity:
                manifest = await in_thread(read_manifest, self._store, number, step)
                tasks = set(places.values()) or {session._open_here().devices[0].host}
                await verify_on_tasks(session, tasks, manifest, self._store, folder)
        except (CheckpointError, NotWhole, OSError) as error:
            raise self._not_whole(number, step, error) from error
        found = self._fit(session, manifest, step)
        stored = {name: manifest.variables[old] for name, old in found.restored.items()}
        activity.what, activity.of = f"{activity.what}, variables", len(stored)
        try:
            with activity:
                await take_on_tasks(session, places, stored, self._store, folder, activity)
        except (CheckpointError, OSError) as error:  # it has changed since
            raise self._not_whole(number, step, error) from error
        session.skip_numbers(manifest.run)
        self._step = self._saved_step = step
        self._saved_at = self._clock()
        return {piece.held for piece in pieces_of(session.graph) if piece.whole in stored}

    def _fit(self, session: Inside, manifest: Manifest, step: int) -> Fit:
        specs = {name: stored.spec for name, stored in manifest.variables.items()}
        rename = {old: new for old, new in self.rename.items() if manifest.renamed.get(old) != new}
        order = None if manifest.order is None else from_manifest(manifest.order)
        what = f"the checkpoint of step {step} in {self.url}"
        found = fit(specs, order, session.graph, rename, self.partial, what)
        if not found.whole:
            _log.log(logging.WARNING if found.other else logging.INFO, "%s is restored in part; %s", what, found)
        return found

    def _not_whole(self, number: int, step: int, error: Exception) -> CheckpointError:
        text = str(error)
        return _NotWhole(text if "is not whole" in text else str(not_whole(self._store, number, step, text)))


class _Refused(CheckpointError):
    """Somebody else saves there."""


class _NotWhole(CheckpointError):
    """Another checkpoint may be whole."""
