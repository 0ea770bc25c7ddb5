"""What a server tells a node that is to hold what it does, while it goes on.

Law: the variables are lent at one version, as for a checkpoint: whoever writes one that is not told yet copies it
first. Then every update is told that they are moved by, in order. What was told is kept until it is had, so that it can
be told again; where that comes to more than the variables themselves, it is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.checkpoints.shards import bytes_of
from flowrt.sched.drivers.following import Lead, Passed
from flowrt.sched.drivers.way import bundled

if TYPE_CHECKING:
    from flowrt.sched.drivers.way import Way
    from flowrt.sched.host.rendezvous import Array

PIECE = 1 << 20  # bytes of a variable that are told at once
WINDOW = 8 << 20  # bytes on their way
LEAST_KEPT = 64 << 20  # bytes of updates that are kept in any case
NEAR = 1  # versions that it may be behind in any case
NOTHING: frozenset[Any] = frozenset()


class Leader:
    """Tells a task what variables are at a version, and what moves them. ``begun``: whether it does, once known."""

    def __init__(self, asked: Lead, way: Way) -> None:
        self.asked = asked
        self.begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.over = False
        self._way = way
        self._lent: list[Any] = []
        self._pieces: list[tuple[int, int]] = []  # of what is lent, and from which byte on
        self._updates: deque[tuple[Any, ...]] = deque()  # of versions whose number is not had yet
        self._applied = 0  # versions since it began
        self._had = self._sent = 0  # items
        self._kept, self._most = 0, LEAST_KEPT  # bytes of updates
        self._way_bytes: deque[int] = deque()  # of items on their way
        self.changed: Callable[[], None] = lambda: None  # is called as it may lag no more
        self._excused = False  # it does nothing at present
        self._allowed = 0.0  # versions that it may have to catch up, once it was told what the variables were

    # ── what the server does ─────────────────────────────────────────────────────────────────────────────────────────

    def reach(self, version: int) -> None:
        """The variables are at ``version``, and nobody writes them."""
        if self.over or self.begun.done() or version < self.asked.version:
            return
        began = version == self.asked.version and self._lend()
        self.begun.set_result(began)
        if began:
            self._pump()
        else:
            self.close()

    def moved(self, version: int, updates: Sequence[Sequence[Array]], valid: bool) -> None:
        """A version was applied, by these updates, which stay what they are if they are ``valid`` for good."""
        if self.over or not self.begun.done():
            self.reach(version + 1)
            return
        values = [update[part] for update in updates for part in self.asked.parts]
        kept = tuple(values) if valid else tuple([np.array(value) for value in values])
        self._kept += sum(value.nbytes for value in kept)
        self._applied += 1
        self._updates.append(kept)
        if self._kept > self._most:
            self._way.post(self.asked.task, Passed(self.asked.follow, -1, 0, ()))
            self.close()
        else:
            self._pump()

    def close(self) -> None:
        """Tell nothing any more."""
        self.over = True
        self._lent, self._pieces = [], []
        self._updates.clear()
        if not self.begun.done():
            self.begun.set_result(False)
        self.changed()

    @property
    def lags(self) -> bool:
        """Whether the next version is to wait for it: see `led`."""
        if self.over or self._excused:
            return False
        if self._had < len(self._pieces):
            return self._kept > LEAST_KEPT / 2
        return self._behind > max(NEAR, self._allowed)

    def excuse(self) -> None:
        """It is not to be waited for until it does something."""
        self._excused = True

    @property
    def _behind(self) -> int:
        """Versions that it has not applied."""
        return self._applied - max(0, self._had - len(self._pieces))

    # ── what who follows says ────────────────────────────────────────────────────────────────────────────────────────

    def had(self, number: int) -> None:
        """All items before ``number`` were used."""
        while self._had < min(number, self._sent) and not self.over:
            self._forget(self._had)
            self._way_bytes.popleft()
            self._had += 1
            self._allowed = self._behind if self._had <= len(self._pieces) else self._allowed - 0.5
            self._excused = False
        self._pump()
        self.changed()

    def broken(self) -> None:
        """Tell again what may not have come."""
        self._sent = self._had
        self._way_bytes.clear()
        self._pump()

    # ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _lend(self) -> bool:
        variables, names = self._way.host.variables, frozenset(self.asked.names)
        known = self._way.host.inventory()
        if not names <= known.keys() or not variables.try_hold(names, NOTHING):
            return False
        try:
            if not all(isinstance(variables.value(name, known[name]), np.ndarray) for name in names):
                return False
            self._lent = [variables.lend(name, known[name]) for name in self.asked.names]
        finally:
            variables.release(names, NOTHING)
        sizes = [array.nbytes for array in self._lent]
        self._pieces = [(place, first) for place, size in enumerate(sizes) for first in range(0, size, PIECE)]
        self._most = max(LEAST_KEPT, sum(sizes))
        return True

    def _pump(self) -> None:
        """Tell what may be on its way."""
        total = len(self._pieces) + self._applied
        while not self.over and self._sent < total and (not self._way_bytes or sum(self._way_bytes) < WINDOW):
            values = self._item(self._sent)
            self._way_bytes.append(sum(value.nbytes for value in values))
            self._sent += 1
            told = Passed(self.asked.follow, self._sent - 1, total - self._sent, bundled(values))
            self._way.post(self.asked.task, told)

    def _item(self, number: int) -> tuple[Any, ...]:
        if number >= len(self._pieces):
            behind = number - max(self._had, len(self._pieces))
            return self._updates[behind]
        place, first = self._pieces[number]
        return (np.frombuffer(bytes_of(self._lent[place]), np.uint8)[first : first + PIECE],)

    def _forget(self, number: int) -> None:
        if number >= len(self._pieces):
            self._kept -= sum(value.nbytes for value in self._updates.popleft())
            return
        place, _ = self._pieces[number]
        if number + 1 == len(self._pieces) or self._pieces[number + 1][0] != place:
            self._lent[place] = None  # who writes it need not copy it any more
