"""What a session has the tasks that hold its variables do for a checkpoint: keep, write, verify and take.

Law: no value passes through here, unless a node has not the disk that the client keeps checkpoints on: then the client
writes and reads in its stead, a piece at a time, or a variable. What a program sees as one variable is one in a
checkpoint, whichever rows of it lie where; who has which rows is asked anew for every save and restore, as tasks come
and go.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from flowrt.base.device import Device
from flowrt.base.errors import CheckpointError, FlowrtError, GraphError, user_site
from flowrt.base.spec import Spec
from flowrt.base.valueclass import valueclass
from flowrt.checkpoints.manifest import File, Manifest, Name, Range, Stored, checks, row_count
from flowrt.checkpoints.shards import bytes_of, check, read_into, write_shard
from flowrt.checkpoints.stores import Store, store_at
from flowrt.checkpoints.whole import keys_of, shard_order
from flowrt.finishing import together
from flowrt.passes import Ends
from flowrt.sched.drivers.inquiries import WhoTrains
from flowrt.sched.drivers.keeping import Drop, Fetch, Keep, Prepare, Take, Verify, Write, read_written
from flowrt.sched.host.lanes import Lanes
from flowrt.session.runners import compile_for

if TYPE_CHECKING:
    from flowrt.checkpoints.shards import Written
    from flowrt.graph import Graph
    from flowrt.passes import StandIns
    from flowrt.progress import Activity
    from flowrt.session.inside import Inside

T = TypeVar("T")
PREPARED = 16 << 20  # bytes of variables below which it is not worth a message to have memory ready for their copies
AT_ONCE = 512  # variables that a message is about
AGREE_SECONDS, AGAIN_SECONDS = 30.0, 2e-3  # how long servers are asked for one version, and how often


@valueclass
class SavedPiece:
    """A variable that tasks hold, and the rows that it is of the ``whole`` that the program sees."""

    held: Name
    whole: Name
    spec: Spec
    first: int
    end: int
    mirrors: bool = False  # another piece has the same rows


@dataclass(slots=True)
class CheckpointDraft:
    """A checkpoint in progress: where it is written, as what it will be there, and whether it took the lock."""

    draft: str = ""
    folder: str = ""
    claimed: bool = False


def pieces_of(graph: Graph) -> list[SavedPiece]:
    """The variables of a graph as pieces of what the program sees."""
    shards: dict[Name, SavedPiece] = {}
    for partition in graph.partitions.values():
        whole = partition.container, partition.name
        for number, (shard, *rows) in enumerate(partition.pieces()):
            first, end = (0, row_count(partition.spec)) if partition.is_mirrored else rows
            mirrors = partition.is_mirrored and number > 0
            held = partition.container, shard
            shards[held] = SavedPiece(held, whole, partition.spec, first, end, mirrors)
    found = []
    for variable in graph.variables:
        resource = variable.resource
        name, spec = (resource.container, resource.name), resource.specs[0]
        found.append(shards.get(name) or SavedPiece(name, name, spec, 0, row_count(spec)))
    return found


@valueclass
class _Elsewhere:
    """What a task that has not this disk holds: so many bytes, which ``read`` answers from one on."""

    nbytes: int
    read: Callable[[int, int], Any]


class Places:
    """On which tasks the variables of a session lie, as long as nodes stand in for the same ones."""

    def __init__(self, session: Inside) -> None:
        self._session = session
        self._known: tuple[StandIns, tuple[Device, ...]] | None = None
        self._tasks: dict[Name, str] = {}

    @cached_property
    def are_large(self) -> bool:
        """Whether the variables come to so much that copies of them take long."""
        return sum(_held_spec(piece).nbytes for piece in pieces_of(self._session.graph)) >= PREPARED

    def find(self) -> Mapping[Name, str]:
        """The task of each variable. Raises `NodeLost` where one is lost that others need."""
        session = self._session
        runner = session._open_here()
        now = runner.stand_ins, tuple(runner.devices)
        if self._known is None or self._known[0] is not now[0] or self._known[1] != now[1]:
            reads = [variable.__tensor__() for variable in session.graph.variables]
            placed: Mapping[str, str] = {}
            if reads:
                compiled = compile_for(
                    runner, session.graph, reads, [], [], placement=session._placement, ends=Ends.USED
                )
                placed = compiled.placement
            self._tasks = {r.op.resources[0]: Device.parse(placed[r.op.name]).host for r in reads}
            self._known = now
        return self._tasks


def _by_task(pieces: Iterable[SavedPiece], places: Mapping[Name, str]) -> dict[str, list[SavedPiece]]:
    found: dict[str, list[SavedPiece]] = {}
    for piece in pieces:
        found.setdefault(places[piece.held], []).append(piece)
    return found


class Saving:
    """One save of a session's variables, which are kept as they are when it begins.

    Where a trainer moves them, they may be of a later ``step`` than this session has heard of: see `keep`.
    """

    def __init__(self, session: Inside, places: Mapping[Name, str], step: int) -> None:
        self.step, self.run = step, session.next_number
        self.saved_at = time.time()
        self._runner = session._open_here()
        self._token = secrets.token_hex(8)
        self._pieces = [piece for piece in pieces_of(session.graph) if not piece.mirrors]
        self._tasks = _by_task(self._pieces, places)
        self.rows = keys_of([(p.whole, p.spec, p.first, p.end) for p in self._pieces])

    @property
    def token(self) -> str:
        """By which its files are told from those of other saves."""
        return self._token

    @property
    def nbytes(self) -> int:
        """The bytes of all that is saved."""
        return sum(piece.spec.nbytes for piece in self._pieces if piece.first == 0)

    async def keep(self) -> None:
        """Have every task keep what it holds; trainers' servers at one version, which is the least step that it is of.

        Raises `CheckpointError`.
        """
        before = time.monotonic()
        while True:
            found = await self._each(lambda task, pieces: Keep(self._token, tuple([p.held for p in pieces])))
            versions: dict[str, set[int]] = {}
            for group, version in (each for told in found.values() for each in told):
                versions.setdefault(group, set()).add(version)
            apart = {group: sorted(each) for group, each in versions.items() if len(each) > 1}
            if not apart:
                self.step = max([self.step, *(version for each in versions.values() for version in each)])
                return
            if time.monotonic() - before > AGREE_SECONDS:
                raise CheckpointError(f"the servers were never seen at one version, but at {apart}")
            await asyncio.sleep(AGAIN_SECONDS)

    async def write(self, url: str, draft: str) -> list[tuple[File, list[Written]]]:
        """Have every task write a shard; answers what a manifest says of each."""
        rows = {piece.held: row for piece, row in zip(self._pieces, self.rows, strict=True)}
        held = {row.key: name for name, row in rows.items()}
        count = len(self._tasks)
        names = {
            task: f"variables-{number:05d}-of-{count:05d}-{self._token}.safetensors"
            for number, task in enumerate(self._tasks, 1)
        }

        def ask(task: str, pieces: Sequence[SavedPiece]) -> Write:
            ordered = shard_order([rows[piece.held] for piece in pieces])
            return Write(self._token, url, draft, names[task], tuple((*held[row.key], row.key) for row in ordered))

        found = await self._each(ask)
        return [
            await self._write_here(url, draft, ask(task, self._tasks[task]), task)
            if told is None
            else read_written(names[task], told)
            for task, told in found.items()
        ]

    async def _write_here(self, url: str, draft: str, asked: Write, task: str) -> tuple[File, list[Written]]:
        """Write the shard of a task that has not this disk. Raises `OSError`."""
        loop, specs = asyncio.get_running_loop(), {p.held: _held_spec(p) for p in self._pieces}

        def read(held: Name, first: int, nbytes: int) -> Any:
            asked = Fetch(self._token, *held, first, nbytes)
            return asyncio.run_coroutine_threadsafe(self._runner.command(task, asked), loop).result()

        def write() -> tuple[File, list[Written]]:
            held = [(container, name) for container, name, _ in asked.pieces]
            tensors = [
                (key, partial(_Elsewhere, specs[name].nbytes, partial(read, name)))
                for name, (*_, key) in zip(held, asked.pieces, strict=True)
            ]
            layouts = [(specs[name].dtype, specs[name].concrete) for name in held]
            with store_at(url).create(draft, asked.file) as file:
                return write_shard(file, asked.file, tensors, layouts)

        return await in_thread(write)

    async def drop(self) -> None:
        """Have nobody keep or write anything for it any more."""
        for task in self._tasks:
            if task not in self._runner.lost:
                with suppress(FlowrtError):
                    await self._runner.command(task, Drop(self._token))

    async def _each(self, ask: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def answer(task: str, pieces: Sequence[SavedPiece]) -> None:
            found[task] = await self._runner.command(task, ask(task, pieces))

        await together(answer(task, pieces) for task, pieces in self._tasks.items())
        return {task: found[task] for task in self._tasks}


async def prepare_on_tasks(session: Inside, places: Places) -> None:
    """Have tasks make memory for copies of what they hold, as a save is to come; who cannot does not."""

    async def prepare(task: str, pieces: Sequence[SavedPiece]) -> None:
        if sum(_held_spec(piece).nbytes for piece in pieces) >= PREPARED:
            await session._open_here().command(task, Prepare(tuple([piece.held for piece in pieces])))

    with suppress(FlowrtError):
        held = _by_task([piece for piece in pieces_of(session.graph) if not piece.mirrors], places.find())
        await together(prepare(task, pieces) for task, pieces in held.items())


async def verify_on_tasks(
    session: Inside, tasks: Collection[str], manifest: Manifest, store: Store, folder: str
) -> None:
    """Have tasks see that all files of a checkpoint are what its manifest says. Raises `CheckpointError`, `OSError`."""
    runner, shares = session._open_here(), {task: list[Any]() for task in sorted(tasks)}
    for number, each in enumerate(checks(manifest)):
        shares[sorted(tasks)[number % len(shares)]].append(each)

    async def verify(task: str, share: Sequence[tuple[File, list[Range]]]) -> None:
        files = [
            (file.name, file.nbytes, tuple((r.offset, r.nbytes, r.algorithm, r.digest, r.what) for r in ranges))
            for file, ranges in share
        ]
        if not await runner.command(task, Verify(store.url, folder, tuple(files))):
            for file, ranges in share:
                await in_thread(check, store, folder, file, ranges)

    await together(verify(task, share) for task, share in shares.items() if share)


class BeingTrained(CheckpointError):
    """Somebody moves the variables meanwhile, whom restoring them would disturb in silence."""


async def check_untrained(session: Inside, places: Mapping[Name, str]) -> None:
    """Raise `BeingTrained` where variables are trained by a run that goes on without a client, or another one's."""
    runner, names = session._open_here(), tuple(places)

    async def ask(task: str) -> None:
        if who := await runner.command(task, WhoTrains(names)):
            raise BeingTrained(f"variables are being trained, of {who}: no checkpoint is restored meanwhile")

    await together(ask(task) for task in set(places.values()))


async def take_on_tasks(
    session: Inside,
    places: Mapping[Name, str],
    stored: Mapping[Name, Stored],
    store: Store,
    folder: str,
    activity: Activity,
) -> None:
    """Have tasks read into their variables what is ``stored`` of each, by the name the program sees."""
    runner = session._open_here()
    wanted = [piece for piece in pieces_of(session.graph) if piece.whole in stored]
    for keeper in runner.keepers:
        await keeper.will_write(frozenset(piece.held for piece in wanted))

    async def take(task: str, pieces: Sequence[SavedPiece]) -> None:
        for start in range(0, len(pieces), AT_ONCE):
            some = pieces[start : start + AT_ONCE]
            targets = tuple([_target(piece, stored[piece.whole]) for piece in some])
            if not await runner.command(task, Take(store.url, folder, targets)):
                for piece in some:
                    await _give(session, piece, stored[piece.whole], store, folder)
            activity.done += sum(not piece.mirrors and piece.first == 0 for piece in some)

    await together(take(task, pieces) for task, pieces in _by_task(wanted, places).items())
    for keeper in runner.keepers:
        await keeper.copy_written(frozenset(piece.held for piece in wanted))


async def _give(session: Inside, piece: SavedPiece, stored: Stored, store: Store, folder: str) -> None:
    """Read a variable here, and have it start from that."""
    resource, made = session.graph.resources[piece.held], np.empty(_held_spec(piece).concrete, piece.spec.dtype)

    def read() -> None:
        for file, offset, at, nbytes in _overlaps(piece, stored):
            with store.open(folder, file) as opened:
                read_into(bytes_of(made)[at : at + nbytes], opened, offset)

    await in_thread(read)
    await session.run_uncounted(resource.initialize, {resource.initial: made})


def store_of(url: str | os.PathLike[str]) -> Store:
    """Where checkpoints are kept; a folder by its whole path, since nodes work in other folders."""
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else None
    if not text or "\0" in text:  # as of an environment that has not the variable
        raise GraphError(f"{user_site()}: Checkpoints: expected the path of a folder, or a URL, got {url!r}")
    try:
        return store_at(text if "://" in text else os.path.abspath(text))
    except (ImportError, ValueError) as error:
        raise GraphError(f"{user_site()}: Checkpoints: {error}") from error


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that waits for a disk in a thread of its own."""
    lane = Lanes(1, "checkpoint")
    try:
        return await lane.run(function, *arguments)
    finally:
        lane.close()


def _held_spec(piece: SavedPiece) -> Spec:
    """The spec of what a task holds."""
    shape = piece.spec.concrete
    if shape and (piece.first, piece.end) != (0, shape[0]):
        shape = piece.end - piece.first, *shape[1:]
    return Spec(piece.spec.dtype, shape)


def _target(piece: SavedPiece, stored: Stored) -> tuple[Any, ...]:
    """What `Take` says of a variable."""
    spec = _held_spec(piece)
    return (*piece.held, spec.dtype.name, spec.concrete, tuple(_overlaps(piece, stored)))


def _overlaps(piece: SavedPiece, stored: Stored) -> Iterator[tuple[str, int, int, int]]:
    """Where the rows of a piece lie: (file, byte in it, byte in the variable, how many)."""
    size = stored.row_bytes
    for part in stored.parts:
        first, end = max(part.first, piece.first), min(part.end, piece.end)
        if first < end and size:
            yield (
                part.file,
                part.offset + (first - part.first) * size,
                (first - piece.first) * size,
                (end - first) * size,
            )
