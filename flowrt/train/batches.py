"""Where a trainer's batches come from, any iterable, plain or asynchronous, of ``{name: array}``; and where they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from math import inf
from operator import sub
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.errors import FeedError, GraphError, user_site
from flowrt.base.plain import shortened
from flowrt.sched.versions.handing import Handing
from flowrt.session.feeds import as_feed

if TYPE_CHECKING:
    from flowrt.graph import Tensor
    from flowrt.ledger.writer import LedgerWriter

Values: TypeAlias = "tuple[np.ndarray[Any, Any], ...]"
Given: TypeAlias = "Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]]"
TOGETHER = 6  # batches that one message brings to a replica, where they are small
EARLIER = 2  # so many batches before a replica would wait for one, it is sent what there is, complete or not
LONG = 1e-3  # seconds of drawing, after which what nobody lacks yet is left for the next time
LACKED = 64  # batches that are given without a pause, however many more are asked for ahead
LOOKED_AT = 8  # batches of a source by which it is known whether it writes them where others were
SMALL, FEW = 60 << 10, 96  # bytes, and arrays, that these have at most: they are received in one go


class Batches:
    """The batches that are left. ``empty`` is known once one more was asked for than there are."""

    def __init__(self, source: Given, names: Iterable[str]) -> None:
        self.empty = False
        self._names = frozenset(names)
        self._coming: AsyncIterator[Mapping[str, Any]] | None = None
        self._there: Iterator[Mapping[str, Any]] = iter(())
        self.waits = isinstance(source, AsyncIterable)  # for the next batch, which is to be awaited
        self.own = Lasting(0 if isinstance(source, (list, tuple, repeat)) else LOOKED_AT).own
        if isinstance(source, AsyncIterable):
            self._coming = aiter(source)
        else:
            self._there = iter(source)

    def next(self) -> Mapping[str, Any] | None:
        """The next batch, or None if there is none; raises `FeedError` if it has other names than expected."""
        try:
            batch = next(self._there)
        except StopIteration:
            self.empty = True
            return None
        if type(batch) is not dict or batch.keys() != self._names:
            check_names(batch, self._names, "a batch")
        return batch

    async def wait_next(self) -> Mapping[str, Any] | None:
        """As `next`, of an asynchronous source."""
        assert self._coming is not None
        try:
            batch = await anext(self._coming)
        except StopAsyncIteration:
            self.empty = True
            return None
        check_names(batch, self._names, "a batch")
        return batch


class Lasting:
    """Has batches last though their source should write others in their place: then each is copied.

    So are the first, ``left`` of them; if these were all somewhere else, no more are. They are kept until that is
    known, lest memory that was given back is taken for the source's.
    """

    def __init__(self, left: float) -> None:
        self._left = left  # that are looked at yet; no end of them once one was where another had been
        self._places: dict[int, np.ndarray[Any, Any]] = {}

    def own(self, values: Values) -> Values:
        """The values of a batch, which are its own from now on."""
        if not self._left:
            return values
        if self._left < inf:
            places = {value.__array_interface__["data"][0]: value for value in values if value.flags.writeable}
            again = not self._places.keys().isdisjoint(places)
            self._left = inf if again else self._left - 1
            self._places = {} if again or not self._left else {**self._places, **places}
        return tuple([value.copy() if value.flags.writeable else value for value in values])


class Supply:
    """Hands batches out to replicas, as `Handing` says, each ``depth`` more than are spent.

    ``inputs`` are the tensors that a replica's batch is for. ``give`` sends some: it is called with the replica, the
    number that the first of them has there, their identities, and their values. A message costs more than a small
    batch: so some of these are drawn ahead, and go together. Values are kept until their batch is accounted for. What
    goes wrong with a batch ends the supply: it is the ``error`` that is to be raised once those before it are spent.
    """

    def __init__(
        self,
        source: Batches,
        inputs: Sequence[Mapping[str, Tensor]],
        depth: int,
        give: Callable[[int, int, Sequence[int], Sequence[Values]], None],
        copy: Callable[[Any], Any],
        first: int = 0,
    ) -> None:
        self.handing = Handing(len(inputs), depth, first)
        self.error: BaseException | None = None
        self.drawn = 0.0  # seconds in which nothing else was done here than to wait for the source
        self._source = source
        self._inputs = inputs
        self._depth = depth
        self._give = give
        self._copy = copy
        self._sent = [0] * len(inputs)
        self._together = 1  # so many batches go in a message
        self._enough = depth  # a replica with fewer that are sent is sent what there is
        self._values: dict[int, Values] = {}  # by identity, of what was drawn and is not accounted for
        self._drawing: asyncio.Task[None] | None = None
        self._told: Callable[[], None] | None = None  # None while nothing is handed out
        self.ledger: LedgerWriter | None = None  # which is told before anybody else

    @property
    def given(self) -> Sequence[int]:
        """By replica, the number of the newest batch that it was handed."""
        return self.handing.given

    @property
    def total(self) -> int:
        """How many batches were handed out."""
        return self.handing.new - self.handing.first

    @property
    def over(self) -> bool:
        """Whether nothing is left to hand out; what comes back or is used again may change that."""
        return self.handing.over

    # ── what becomes of them ─────────────────────────────────────────────────────────────────────────────────────────

    def spend(self, replica: int, number: int, *, again: bool = False) -> list[int]:
        """All batches of ``replica`` up to ``number`` are spent; answers those that were not before, by identity.

        With ``again`` they are handed out again, before new ones.
        """
        spent = self.handing.spend(replica, number)
        if again:
            self.handing.requeue(*spent)
        else:
            for identity in spent:
                self._values.pop(identity, None)
        return spent

    def lose(self, replica: int) -> None:
        """Give ``replica`` no more."""
        self.handing.lose(replica)
        self._sent[replica] = self.given[replica]

    def confirm_lost(self, replica: int, spent: int) -> list[int]:
        """Of a replica that was lost the first ``spent`` batches were; others are to have the rest, which it answers.

        See to `fill` afterwards.
        """
        back = self.handing.confirm_lost(replica, spent)
        if self.ledger is not None:
            self.ledger.returned(replica, back)
        return back

    def join(self, replica: int, number: int) -> None:
        """Give ``replica``, which was lost, batches again, numbered from ``number`` + 1 on."""
        self.handing.join(replica, number)
        self._sent[replica] = number

    def excuse(self, replica: int) -> None:
        """Give ``replica``, which is not known to be well, nothing until it is included again."""
        self.handing.excuse(replica)

    def include(self, replica: int) -> None:
        """Give ``replica`` batches again as the others; see to `fill` afterwards."""
        self.handing.include(replica)

    def begin_again(self) -> None:
        """A run begins anew: see `Handing.begin_again`."""
        self.handing.begin_again()
        self._sent = [0] * len(self._sent)

    def give_again(self, replica: int) -> None:
        """Send those again that may not have arrived."""
        for number, identity in self.handing.held(replica).items():
            self._give(replica, number, [identity], [self._values_of(identity)])

    # ── handing out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, told: Callable[[], None]) -> None:
        """From now on, until it is to `rest`, there is somebody to `fill`, who is ``told`` once nothing is left."""
        self._told = told

    def rest(self) -> None:
        """Hand nothing out until it is to `begin` again; what is being drawn is kept for then."""
        self._told = None

    def fill(self) -> bool:
        """Hand out what may be, now or as it comes; answers whether more is to be, once others have had the loop."""
        if self._told is None:
            return False
        handing, until = self.handing, time.perf_counter() + LONG
        while (due := handing.due) is not None:
            replica, identity = due
            if not self._has(identity):
                if self._source.waits:
                    self._drawing = self._drawing or asyncio.ensure_future(self._draw())
                    return False
                began = time.perf_counter()
                if began > until and not handing.lacks(min(self._depth, LACKED)):
                    break
                try:
                    batch = self._source.next()
                    self.drawn += time.perf_counter() - began
                    self._admit(replica, batch)
                except Exception as error:
                    self._fail(error)
                if not self._has(identity):
                    continue  # there are no more
            self._hand(replica, identity)
        self._end_filling(more=due is not None)
        return due is not None

    async def _draw(self) -> None:
        try:
            while self._told is not None and (due := self._hand_drawn()) is not None:
                self._admit(due[0], await self._source.wait_next())
        except asyncio.CancelledError as error:
            if self._drawing is None:  # nothing is to be drawn any more
                raise
            cancelled = FeedError("the iterator of batches was cancelled within: what it awaits was")
            cancelled.__cause__ = error
            self._fail(cancelled)
        except Exception as error:
            self._fail(error)
        finally:
            self._drawing = None
        if self._told is not None:
            self._hand_drawn()
            self._end_filling()

    def _has(self, identity: int | None) -> bool:
        """Whether a batch is there to be handed out."""
        return identity in self._values

    def _admit(self, replica: int, batch: Mapping[str, Any] | None) -> None:
        """Take in what was drawn for a replica: a batch, or that there are no more."""
        if batch is None:
            self.handing.end(self.handing.new)
        else:
            self._put_in(replica, self.handing.new, batch)

    def _put_in(self, replica: int, identity: int, batch: Mapping[str, Any]) -> None:
        copy = self._copy
        values = tuple([as_feed(tensor, batch[name], copy) for name, tensor in self._inputs[replica].items()])
        self._values[identity] = self._source.own(values)

    def _hand_drawn(self) -> tuple[int, int] | None:
        """Hand out what is drawn, and send what is enough to go together; answers what is due and not drawn yet."""
        handing = self.handing
        while (due := handing.due) is not None and self._has(due[1]):
            self._hand(*due)
        return due

    def _hand(self, replica: int, identity: int) -> None:
        if self.handing.hand(replica, identity) - self._sent[replica] >= self._together:
            self._send(replica)

    def _end_filling(self, more: bool = False) -> None:
        """Send what nothing more goes with, and what a replica may soon lack; say so where nothing is left.

        Where ``more`` is drawn soon, what is enough until then waits for that.
        """
        sent, spent, enough = self._sent, self.handing.spent, self._depth if more else self._enough
        last = self._source.waits or self.handing.identity is None
        if sent != self.given and (last or min(map(sub, sent, spent)) < enough):
            for replica, number in enumerate(self.given):
                if number > sent[replica] and (last or sent[replica] - spent[replica] < enough):
                    self._send(replica)
        if self.over and self._told is not None:
            self._told()

    def _send(self, replica: int) -> None:
        """Send a replica what it was not sent yet, together."""
        first, self._sent[replica] = self._sent[replica] + 1, self.given[replica]
        held = self.handing.held(replica)
        identities = [held[number] for number in range(first, self.given[replica] + 1)]
        if self.ledger is not None:
            self.ledger.hand(replica, first, identities)
        batches = [self._values_of(identity) for identity in identities]
        self._give(replica, first, identities, batches)
        if not self._source.waits:
            self._together = together = _together(batches[-1])
            self._enough = self._depth + min(EARLIER, together - 1)
            self.handing.depth = self._enough + together - 1

    def _values_of(self, identity: int) -> Values:
        return self._values[identity]

    def _fail(self, error: BaseException) -> None:
        """Draw no more."""
        self.error = error
        self.handing.end(self.handing.new)

    async def aclose(self) -> None:
        """Draw nothing any more."""
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing.cancel()
            with suppress(asyncio.CancelledError):
                await drawing


class Identities(Supply):
    """Hands out batches that replicas read themselves: nothing but their identities, ``total`` of them, if that many.

    To whoever gives them to replicas, their values are empty.
    """

    def __init__(
        self,
        total: int | None,
        replicas: int,
        depth: int,
        give: Callable[[int, int, Sequence[int], Sequence[Values]], None],
        first: int = 0,
    ) -> None:
        super().__init__(Batches((), ()), [{}] * replicas, depth, give, np.ascontiguousarray, first)
        if total is not None:
            self.handing.end(max(total, first))

    def _has(self, identity: int | None) -> bool:
        return identity is not None

    def _values_of(self, identity: int) -> Values:
        return ()


def _together(batch: Values) -> int:
    """How many batches like this one a message may bring."""
    arrays, nbytes = len(batch), 0
    for value in batch:
        nbytes += value.nbytes
    return max(1, min(TOGETHER, FEW // max(1, arrays), SMALL // max(1, nbytes)))


def check_iterable(batches: Any, who: str) -> None:
    """Raise `GraphError` unless ``batches`` can be iterated over, and are several."""
    if isinstance(batches, Mapping):
        told, fix = f"one with {list(batches)}", "; write [batch] for a single one"
    elif not any(hasattr(type(batches), way) for way in ("__iter__", "__aiter__", "__getitem__")):
        told, fix = shortened(batches), "; call it, and give what it answers" if callable(batches) else ""
    else:
        return
    raise GraphError(f"{user_site()}: {who} takes an iterable of batches, or a source of fr.data, not {told}{fix}")


def check_names(given: Any, expected: Iterable[str], who: str) -> None:
    """Raise `FeedError` unless ``given`` is a mapping with exactly the names ``expected``."""
    wanted = sorted(expected)
    if not isinstance(given, Mapping) or sorted(given) != wanted:
        got = sorted(given) if isinstance(given, Mapping) else shortened(given)
        raise FeedError(f"{user_site()}: {who} is a mapping with {wanted}, got {got}")
