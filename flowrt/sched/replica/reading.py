"""Reads a replica's batches where it computes: of a source that the node opens itself, by identities that it is told.

Law: what is read is admitted in the order of its numbers, as if it had come from the client; what waits to be used is
bounded, in bytes and, as so many are handed out ahead and no more, in number. Files are opened, read and closed in
threads of the replica's own, never on the loop, which are waited for when it ends. What cannot be read is admitted as
`Unread`, and is an error once its turn has come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FeedError, FlowrtError, ResourceError
from flowrt.base.spec import Spec
from flowrt.data.sources import Reading, source_from_data
from flowrt.sched.drivers.way import Unread
from flowrt.sched.host.lanes import Lanes

if TYPE_CHECKING:
    from flowrt.sched.drivers.beginning import BeginReplica

Values: TypeAlias = tuple[Any, ...]
READERS = 2  # threads of a replica: one that waits for a disk, one that arranges what came
TOGETHER, SMALL = 4, 64 << 10  # batches that are read in one go, if they have no more bytes than that
AHEAD_BYTES = 64 << 20  # of what waits to be used, unless that is one batch


class Reader:
    """Reads the batches of the replica ``role`` on the node ``task``; ``admit`` is called with each, in order."""

    def __init__(self, role: BeginReplica, task: str, admit: Callable[[int, Sequence[Any] | Unread], None]) -> None:
        assert role.source is not None
        self._source = source_from_data(role.source)
        self._inputs = {name: Spec(dtype, dims) for name, dtype, dims in role.inputs}
        self._task = task
        self._admit = admit
        self._drawn = self._admitted = role.given * role.steps
        self._waiting: deque[tuple[int, int]] = deque()  # numbers and identities that are to be read
        self._held: dict[int, int] = {}  # by number, the bytes of what waits to be used, or is being read
        self._largest = 0  # bytes of a batch so far
        self._read: dict[int, Sequence[Any] | Unread] = {}  # what is read before one that comes earlier
        self._moved = asyncio.Event()
        self._lanes = Lanes(READERS, "reader")
        self._opening = asyncio.Lock()
        self._reading: Reading | None = None  # the source, once it is open
        self._shut: BaseException | None = None  # why it could not be opened

    def draw(self, number: int, identities: Iterable[int]) -> None:
        """The batches from ``number`` on are those of these identities; what was told before changes nothing."""
        for place, identity in enumerate(identities, number):
            if place == self._drawn + 1:
                self._drawn = place
                self._waiting.append((place, identity))
        self._moved.set()

    def use(self, number: int) -> None:
        """The batches up to ``number`` do not wait any more: they are being used, or were."""
        for used in [held for held in self._held if held <= number]:
            del self._held[used]
        self._moved.set()

    async def run(self) -> None:
        """Read what is drawn, until cancelled; waits for what is being read then, and leaves nothing open."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(self._keep_reading())
        finally:
            self._lanes.close()  # nothing runs there any more
            if self._reading is not None:
                self._reading.close()

    async def _keep_reading(self) -> None:
        while True:
            while not self._waiting or self._full:
                self._moved.clear()
                await self._moved.wait()
            wanted = dict(self._next() for _ in range(self._together))
            async with self._opening:
                if self._reading is None:
                    await self._lanes.run(self._open)
            found = await self._lanes.run(self._read_all, list(wanted.values()))
            for number, values in zip(wanted, found, strict=True):
                self._take_in(number, values)

    @property
    def _together(self) -> int:
        """How many batches are read in one go: going to a thread and back takes longer than to read a small one."""
        return min(TOGETHER if 0 < self._largest <= SMALL else 1, len(self._waiting))

    def _next(self) -> tuple[int, int]:
        number, identity = self._waiting.popleft()
        self._held[number] = self._largest
        return number, identity

    @property
    def _full(self) -> bool:
        held = self._held.values()
        return bool(held) and sum(held) + self._largest > AHEAD_BYTES

    def _take_in(self, number: int, values: Values | Unread) -> None:
        nbytes = 0 if isinstance(values, Unread) else sum(value.nbytes for value in values)
        self._held[number], self._largest = nbytes, max(nbytes, self._largest)
        self._read[number] = values
        while (following := self._admitted + 1) in self._read:
            self._admitted = following
            self._admit(following, self._read.pop(following))

    # ── in a thread ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        try:
            self._reading = self._source.open()
        except BaseException as error:  # whatever it is, it is the error of a batch
            self._shut = error

    def _read_all(self, identities: Iterable[int]) -> list[Values | Unread]:
        return [self._read_or_explain(identity) for identity in identities]

    def _read_or_explain(self, identity: int) -> Values | Unread:
        try:
            return self._read_batch(identity)
        except BaseException as error:  # as above
            return Unread(self._explained(identity, error))

    def _read_batch(self, identity: int) -> Values:
        if self._reading is None:
            assert self._shut is not None
            raise self._shut
        batch = self._reading.batch(identity)
        if batch.keys() != self._inputs.keys():
            raise FeedError(f"expected {', '.join(self._inputs)}; it has {', '.join(batch)}")
        return tuple([_checked(name, batch, spec) for name, spec in self._inputs.items()])

    def _explained(self, identity: int, error: BaseException) -> FlowrtError:
        """``error``, with the node, the source and the batch."""
        what = str(error) if isinstance(error, FlowrtError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            what += f"; the workers read it themselves, so it has to be there on {self._task}, too"
        kind = ResourceError if isinstance(error, MemoryError) else FeedError
        return kind(f"batch {identity} of {self._source} cannot be read on {self._task}: {what}")


def _checked(name: str, batch: Mapping[str, Any], spec: Spec) -> Any:
    """An array of a batch as kernels take it."""
    array = np.ascontiguousarray(batch[name])
    if array.ndim > np.ndim(batch[name]):  # which is what becomes of a scalar
        array = array.reshape(())
    if array.dtype != spec.dtype or not spec.accepts(array.dtype, array.shape):
        fix = f"; convert it with .astype({spec.dtype.name!r})" if array.dtype != spec.dtype else ""
        raise FeedError(f"{name!r}: expected {spec}, got {array.dtype}{list(array.shape)}{fix}")
    return array.view(spec.dtype)  # plans go by the one object that stands for a dtype
