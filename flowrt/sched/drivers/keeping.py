"""Checkpoints, as far as a host has part in them: it holds its variables at one version, writes its shard, reads rows.

Law: variables are not copied: who writes one that is not in the shard yet copies it first, or the rows that are
written. Where there is no memory for such copies, writers wait instead. What is kept belongs to a client, and goes with
it. Files are read and written in a thread of their own, and nothing of a file is believed: the client's manifest says
what it must come to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from flowrt.base import codec
from flowrt.base.errors import CheckpointError, FlowrtError, GraphError, InternalError, ResourceError
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.checkpoints.aside import Aside
from flowrt.checkpoints.manifest import File, Range
from flowrt.checkpoints.shards import Written, bytes_of, check, read_into, write_shard
from flowrt.checkpoints.stores import store_at
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.segments import LARGE
from flowrt.sched.host.snapshots import Snapshot

if TYPE_CHECKING:
    from flowrt.sched.drivers.tasks import Tasks
    from flowrt.sched.host.host import Host
    from flowrt.sched.host.spares import Spares
    from flowrt.sched.host.variables import Name

T = TypeVar("T")
NOTHING: frozenset[Any] = frozenset()
APPLYING_SECONDS = 1e-3  # between two looks whether updates are applied


# ── what a client asks: each is answered ─────────────────────────────────────────────────────────────────────────────


@valueclass
class Prepare:
    """Have memory ready for copies of variables ``names``, as they will soon be kept; answered when it is.

    Where there are none, what lies ready is let go.
    """

    names: tuple[tuple[str, str], ...]


@valueclass
class Keep:
    """Hold what variables ``names`` are now, between two versions of every trainer, for the save of that number.

    Answers (group, version) of each trainer whose server here moves some of them. What was kept for the save before
    goes, and so does all of one that fails.
    """

    save: str
    names: tuple[tuple[str, str], ...]


@valueclass
class Write:
    """Write what is kept for a save into ``file`` of the draft, in that order: (container, name, key).

    Answers, packed, (bytes, bytes of the header, its digest) of the file and (key, offset, digest) of each; None where
    there is no such draft, as the client's disk is another one: it may `Fetch` them.
    """

    save: str
    url: str
    draft: str
    file: str
    pieces: tuple[tuple[str, str, str], ...]


@valueclass
class Fetch:
    """Answer ``nbytes`` of what is kept of a variable, from byte ``first`` on."""

    save: str
    container: str
    name: str
    first: int
    nbytes: int


@valueclass
class Drop:
    """Let what is kept for a save go."""

    save: str


@valueclass
class Verify:
    """See that files are what a manifest says: (name, bytes, ranges), as `manifest.Range` has them.

    Answers whether the folder is seen here.
    """

    url: str
    folder: str
    files: tuple[tuple[str, int, tuple[tuple[Any, ...], ...]], ...]


@valueclass
class Take:
    """Give variables the values that files have: (container, name, dtype, dims, pieces) of each.

    A piece is (file, byte in it, byte in the variable, how many). Answers whether the folder is seen here.
    """

    url: str
    folder: str
    variables: tuple[tuple[Any, ...], ...]


ABOUT_CHECKPOINTS: tuple[type[Any], ...] = (Prepare, Keep, Write, Fetch, Drop, Verify, Take)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False, slots=True)
class _Kept:
    """What is held for a save, by name, and which of that writers wait for."""

    epoch: str
    values: dict[Name, Snapshot]
    waited_for: set[Name]
    going: bool = True
    writing: asyncio.Task[Any] | None = None


class Resting(Protocol):
    """A parameter server, as far as it must rest at one version for its variables to be kept."""

    @property
    def rests(self) -> bool: ...

    @property
    def version(self) -> int: ...

    @property
    def role(self) -> Any: ...

    @property
    def moves(self) -> frozenset[Name]: ...

    async def wait_applied(self) -> None: ...


class Keeping:
    """What ``host`` does for checkpoints; ``tasks`` are the host's own, which outlive who asks."""

    def __init__(self, host: Host, tasks: Tasks) -> None:
        self._host = host
        self._tasks = tasks
        self._kept: dict[str, _Kept] = {}
        self._preparing = object()  # changes when nothing need be ready any more

    async def answer(self, asked: Any, epoch: str, servers: Callable[[], Collection[Resting]]) -> Any:
        """Do as the client of ``epoch`` asks; ``servers`` are those that go on here."""
        match asked:
            case Prepare():
                return await self._prepare(asked)
            case Keep():
                return await self._keep(asked, epoch, servers)
            case Write():
                return await self._write(asked)
            case Fetch(save, container, name, first, nbytes):
                return self._find(save).values[container, name].read(first, nbytes)
            case Drop(save):
                writing = self._drop(save)
                if writing is not None:
                    await asyncio.wait([writing])  # so that nothing is written any more
                return None
            case Verify():
                return await self._in_thread(_verify, asked)
            case Take():
                return await self._take(asked)
            case _:
                raise InternalError(f"{type(asked).__name__} is not about checkpoints")

    def ended(self, epoch: str) -> None:
        """The client of ``epoch`` is gone, and with it what was kept for it."""
        for save in [save for save, kept in self._kept.items() if kept.epoch == epoch]:
            self._drop(save)
        self._let_spares_go()

    def close(self) -> None:
        """Let everything go."""
        for save in list(self._kept):
            self._drop(save)
        self._let_spares_go()

    async def _prepare(self, asked: Prepare) -> None:
        host, known = self._host, self._host.inventory()
        specs = {name: known[name] for name in asked.names if name in known and known[name].nbytes >= LARGE}
        if not asked.names:
            self._let_spares_go()
        if not specs:
            return
        if not host.memory.room_for(sum(spec.nbytes for spec in specs.values())):
            return  # nor will there be for copies: writers will wait
        mine = self._preparing = object()

        def wanted() -> bool:
            return self._preparing is mine

        with suppress(ResourceError, MemoryError):
            await self._in_thread(partial(_prepare, spares=host.spares, wanted=wanted), specs)

    def _let_spares_go(self) -> None:
        self._preparing = object()
        self._host.spares.let_go()

    async def _keep(self, asked: Keep, epoch: str, servers: Callable[[], Collection[Resting]]) -> tuple[Any, ...]:
        self._drop(asked.save)
        kept = self._kept[asked.save] = _Kept(epoch, {}, set())  # which goes with its client, now or later
        try:
            return await self._hold(asked, kept, servers)
        except BaseException:
            if kept.going:
                self._drop(asked.save)
            raise

    async def _hold(self, asked: Keep, kept: _Kept, servers: Callable[[], Collection[Resting]]) -> tuple[Any, ...]:
        self._preparing = object()  # what is not ready by now is made by who needs it
        host, names = self._host, frozenset(asked.names)
        variables = host.variables

        def moving() -> list[Resting]:
            return [server for server in servers() if not names.isdisjoint(server.moves)]

        while True:
            for server in moving():
                while not server.rests:
                    await server.wait_applied()
                    if not server.rests:  # what is applied is still being put together
                        await asyncio.sleep(APPLYING_SECONDS)
            if all(server.rests for server in moving()) and variables.try_hold(names, NOTHING):
                break
            async with variables.hold(names, NOTHING):
                pass
        try:
            known = host.inventory()
            if missing := sorted(names - known.keys()):
                raise GraphError(f"variable {missing[0][1]!r} has no value on {host.task}: was it reset?")
            values = {name: await self._snapshot(name, known[name]) for name in names}
            if kept.going:
                scarce = not host.memory.room_for(sum(value.nbytes for value in values.values()))
                kept.values |= values
                kept.waited_for |= {n for n in names if scarce and variables.try_hold(frozenset([n]), NOTHING)}
        finally:
            variables.release(names, NOTHING)
        self._find(asked.save)
        return tuple((server.role.group, server.version) for server in moving())

    async def _snapshot(self, name: Name, spec: Spec) -> Snapshot:
        """What a variable that is held holds now, whatever is written to it later."""
        host = self._host
        value: Any = host.variables.value(name, spec)
        if isinstance(value, np.ndarray):
            return host.variables.snapshot(name, spec, host.memory)
        return Snapshot(await host.fetch(value), host.memory)

    def _drop(self, save: str) -> asyncio.Task[Any] | None:
        """Let what is kept go, and stop what writes it, if that has not ended: answers it."""
        kept = self._kept.pop(save, None)
        if kept is None:
            return None
        kept.going = False
        kept.values.clear()
        self._let_write(kept, *list(kept.waited_for))
        self._let_spares_go()
        return kept.writing

    def _let_write(self, kept: _Kept, *names: Name) -> None:
        for name in names:
            if name in kept.waited_for:
                kept.waited_for.discard(name)
                self._host.variables.release(frozenset([name]), NOTHING)

    def _find(self, save: str) -> _Kept:
        if save not in self._kept:
            raise CheckpointError(f"{self._host.task} keeps nothing for that save: it was begun anew since")
        return self._kept[save]

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _write(self, asked: Write) -> Any:
        kept = self._find(asked.save)
        if kept.writing is None:  # else it is asked again, as the answer was lost
            kept.writing = self._tasks.start(self._written(asked, kept))
        return _told(await asyncio.shield(kept.writing))

    async def _written(self, asked: Write, kept: _Kept) -> Any:
        """What `Write` answers, or the error of it: nobody else may be there to hear that."""
        loop = asyncio.get_running_loop()

        def let_write(name: Name) -> None:
            loop.call_soon_threadsafe(self._let_write, kept, name)

        try:
            return await self._in_thread(partial(_write, kept=kept, let_write=let_write), asked)
        except FlowrtError as error:
            return error
        finally:
            if not kept.values:
                self._let_write(kept, *list(kept.waited_for))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _take(self, asked: Take) -> bool:
        host, specs = self._host, _specs_of(asked)
        variables, names = host.variables, frozenset(specs)
        for name, spec in specs.items():
            variables.declare(name, spec)
        async with variables.hold(NOTHING, names):
            variables.part(names, host.spares.copy)
            found = {name: variables.find(name, spec) for name, spec in specs.items()}
            there = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
            begun = {n: host.memory.lasting(specs[n].concrete, specs[n].dtype) for n in names - there.keys()}
            seen = await self._in_thread(_take, asked, {**there, **begun})
            for name, value in begun.items() if seen else ():
                variables.begin(name, value)
        return seen

    async def _in_thread(self, work: Callable[..., T], asked: Any, *more: Any) -> T:
        """What ``work`` answers, in a thread; it is told by a call whether that is still wanted."""
        wanted, lane = [True], Lanes(1, "checkpoint")
        try:
            return await lane.run(work, asked, *more, lambda: bool(wanted), stop=wanted.clear)
        except (FlowrtError, MemoryError):
            raise
        except Exception as error:  # a disk, a network, or a package that speaks to one
            raise CheckpointError(str(error) or type(error).__name__) from error
        finally:
            lane.close()


def _told(found: Any) -> Any:
    if isinstance(found, FlowrtError):
        raise type(found)(*found.args)
    return found


def _prepare(specs: dict[Name, Spec], going: Callable[[], bool], *, spares: Spares, wanted: Callable[[], bool]) -> None:
    aside = Aside()

    def go_on() -> bool:
        aside()
        return wanted() and going()

    for name, spec in specs.items():
        if go_on():
            spares.make(name, spec, go_on)


def _write(asked: Write, going: Callable[[], bool], *, kept: _Kept, let_write: Callable[[Name], None]) -> Any:
    store = store_at(asked.url)
    if not store.has(asked.draft):
        return None
    aside = Aside()
    names = {key: (container, name) for container, name, key in asked.pieces}
    held = (kept.values[names[key]].source for _, _, key in asked.pieces)
    layouts = [(source.dtype, source.shape) for source in held]
    done: list[Name] = []

    def take(name: Name) -> Snapshot:
        for other in done:  # is written by now
            let_write(other)
        done[:] = [name]
        return kept.values.pop(name)

    def go_on() -> bool:
        aside()
        return kept.going and going()

    tensors = [(key, partial(take, names[key])) for _, _, key in asked.pieces]
    with store.create(asked.draft, asked.file) as file:
        shard, written = write_shard(file, asked.file, tensors, layouts, go_on)
    return np.frombuffer(codec.pack((shard.nbytes, shard.header, shard.digest, written)), np.uint8)


def _verify(asked: Verify, going: Callable[[], bool]) -> bool:
    store = store_at(asked.url)
    if not store.has(asked.folder):
        return False
    for name, nbytes, ranges in asked.files:
        parts = [Range(*part) for part in ranges]
        check(store, asked.folder, File(name, nbytes, 0, ""), parts, going)
    return True


def _specs_of(asked: Take) -> dict[Name, Spec]:
    """The variables that are to be given values. Raises `InternalError` where they are none."""
    try:
        return {(container, name): Spec(dtype, tuple(dims)) for container, name, dtype, dims, _ in asked.variables}
    except (TypeError, ValueError, OverflowError):
        raise InternalError("what is to be given values is no variables") from None


def _take(asked: Take, values: dict[Name, Any], going: Callable[[], bool]) -> bool:
    store = store_at(asked.url)
    if not store.has(asked.folder):
        return False
    opened: dict[str, Any] = {}
    try:
        for container, name, _, _, pieces in asked.variables:
            target = bytes_of(values[container, name])
            for file, offset, at, nbytes in pieces:
                if file not in opened:
                    opened[file] = store.open(asked.folder, file)
                read_into(target[at : at + nbytes], opened[file], offset, going)
    finally:
        for file in opened.values():
            file.close()
    return True


def read_written(file: str, packed: np.ndarray[Any, Any]) -> tuple[File, list[Written]]:
    """What `Write` answered of ``file``."""
    nbytes, header, digest, written = codec.unpack(codec.bytes_of(packed))
    return File(file, nbytes, header, digest), [(key, offset, told) for key, offset, told in written]
