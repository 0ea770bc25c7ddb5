"""Where a trainer's batches come from, any iterable, plain or asynchronous, of ``{name: array}``; and where they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.errors import FeedError, user_site
from flowrt.feeds import as_feed

if TYPE_CHECKING:
    from flowrt.graph import Tensor

Values: TypeAlias = "tuple[np.ndarray[Any, Any], ...]"
TOGETHER = 3  # batches that one message brings to a replica, where they are small
SMALL, FEW = 20 << 10, 32  # bytes, and arrays, that such a batch has at most: together they are received in one go


class Batches:
    """The batches that are left. ``empty`` is known once one more was asked for than there are."""

    def __init__(
        self, source: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]], names: Iterable[str]
    ) -> None:
        self.empty = False
        self._names = frozenset(names)
        self._coming: AsyncIterator[Mapping[str, Any]] | None = None
        self._there: Iterator[Mapping[str, Any]] = iter(())
        if isinstance(source, AsyncIterable):
            self._coming = aiter(source)
        else:
            self._there = iter(source)

    @property
    def waits(self) -> bool:
        """Whether the next batch has to be awaited."""
        return self._coming is not None

    def next(self) -> Mapping[str, Any] | None:
        """The next batch, or None if there is none; raises `FeedError` if it has other names than expected."""
        try:
            return self._checked(next(self._there))
        except StopIteration:
            self.empty = True
            return None

    async def wait_next(self) -> Mapping[str, Any] | None:
        """As `next`, of an asynchronous source."""
        assert self._coming is not None
        try:
            return self._checked(await anext(self._coming))
        except StopAsyncIteration:
            self.empty = True
            return None

    def _checked(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if type(batch) is not dict or batch.keys() != self._names:
            check_names(batch, self._names, "a batch")
        return batch


class Supply:
    """Hands batches out to replicas, in turn, each ``depth`` more than are spent; those that are lost get no more, and
    those that are excused none until they are included again.

    ``inputs`` are the tensors that a replica's batch is for, ``give`` sends some, of which the first has that number.
    A message costs more than a small batch: so some of these are drawn ahead, and kept back until several go together.
    What goes wrong with a batch ends the supply: it is the ``error`` that is to be raised once those before it are
    spent.
    """

    def __init__(
        self,
        source: Batches,
        inputs: Sequence[Mapping[str, Tensor]],
        depth: int,
        give: Callable[[int, int, Sequence[Values]], None],
        copy: Callable[[Any], Any],
    ) -> None:
        self.given = [0] * len(inputs)
        self.over = False
        self.error: BaseException | None = None
        self.drawn = 0.0  # seconds in which nothing else was done here than to wait for the source
        self._source = source
        self._inputs = inputs
        self._depth = depth
        self._give = give
        self._copy = copy
        self._spent = [0] * len(inputs)
        self._sent = [0] * len(inputs)
        self._together = 1
        self._lost: set[int] = set()
        self._excused: set[int] = set()
        self._skipped = 0  # numbers of batches that nobody has
        self._held: list[dict[int, Values]] = [{} for _ in inputs]  # by replica and number: not known to be spent
        self._turn = 0
        self._drawing: asyncio.Task[None] | None = None

    @property
    def total(self) -> int:
        """How many batches were handed out."""
        return sum(self.given) - self._skipped

    def spend(self, replica: int, number: int) -> None:
        """All batches of ``replica`` up to ``number`` are spent."""
        self._spent[replica] = max(self._spent[replica], number)
        held = self._held[replica]
        for old in [old for old in held if old <= number]:
            del held[old]

    def lose(self, replica: int) -> None:
        """Give ``replica`` no more."""
        self._lost.add(replica)
        self._held[replica].clear()
        self._sent[replica] = self.given[replica]

    def join(self, replica: int, number: int) -> None:
        """Give ``replica``, which was lost, batches again, numbered from ``number`` + 1 on."""
        self._lost.discard(replica)
        self._skipped += number - self.given[replica]
        self.given[replica] = self._sent[replica] = self._spent[replica] = number

    def excuse(self, replica: int) -> None:
        """Give ``replica``, which is not known to be well, nothing until it is included again."""
        self._excused.add(replica)

    def include(self, replica: int) -> None:
        """Give ``replica`` batches again as the others; see to `fill` afterwards."""
        self._excused.discard(replica)

    def give_again(self, replica: int) -> None:
        """Send those again that may not have arrived."""
        self._sent[replica] = self.given[replica]
        for number, values in self._held[replica].items():
            self._give(replica, number, [values])

    def fill(self, told: Callable[[], None]) -> None:
        """Hand out what may be, now or as it comes; ``told`` is called when a source that waits is at its end."""
        if self._source.waits:
            if self._drawing is None and not self.over and self._next() is not None:
                self._drawing = asyncio.ensure_future(self._draw(told))
            return
        while not self.over and (replica := self._next()) is not None:
            began = time.perf_counter()
            try:
                batch = self._source.next()
                self.drawn += time.perf_counter() - began
                self._hand_out(replica, batch)
            except Exception as error:
                self._fail(error)

    async def _draw(self, told: Callable[[], None]) -> None:
        try:
            while not self.over and (replica := self._next()) is not None:
                self._hand_out(replica, await self._source.wait_next())
        except Exception as error:
            self._fail(error)
        finally:
            self._drawing = None
        if self.over:
            told()

    def _next(self) -> int | None:
        """Whose turn it is, of those that may have a batch."""
        count, ahead = len(self.given), self._depth + self._together - 1
        for replica in (i % count for i in range(self._turn, self._turn + count)):
            if replica in self._lost or replica in self._excused:
                continue
            if self.given[replica] - self._spent[replica] < ahead:
                return replica
        return None

    def _hand_out(self, replica: int, batch: Mapping[str, Any] | None) -> None:
        if batch is None:
            self._end()
            return
        inputs = self._inputs[replica]
        values = tuple([as_feed(tensor, batch[name], self._copy) for name, tensor in inputs.items()])
        self._turn, self._together = replica + 1, 1 if self._source.waits else _together(values)
        self.given[replica] += 1
        self._held[replica][self.given[replica]] = values
        sent = self._sent[replica]
        if sent - self._spent[replica] < self._depth or self.given[replica] - sent >= self._together:
            self._send(replica)

    def _send(self, replica: int) -> None:
        """Send a replica what it was not sent yet, together."""
        first, self._sent[replica] = self._sent[replica] + 1, self.given[replica]
        held = self._held[replica]
        self._give(replica, first, [held[number] for number in range(first, self.given[replica] + 1)])

    def _end(self) -> None:
        """No more will be handed out."""
        self.over = True
        for replica, given in enumerate(self.given):
            if given > self._sent[replica]:
                self._send(replica)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    async def aclose(self) -> None:
        """Draw nothing any more."""
        if self._drawing is not None:
            self._drawing.cancel()
            with suppress(asyncio.CancelledError):
                await self._drawing


def _together(batch: Values) -> int:
    """How many batches like this one a message may bring."""
    small = len(batch) <= FEW and sum([value.nbytes for value in batch]) <= SMALL
    return TOGETHER if small else 1


def check_names(given: Any, expected: Iterable[str], who: str) -> None:
    """Raise `FeedError` unless ``given`` is a mapping with exactly the names ``expected``."""
    wanted = sorted(expected)
    if not isinstance(given, Mapping) or sorted(given) != wanted:
        got = sorted(given) if isinstance(given, Mapping) else repr(given)[:80]
        raise FeedError(f"{user_site()}: {who} is a mapping with {wanted}, got {got}")
