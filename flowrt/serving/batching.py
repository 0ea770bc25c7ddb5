"""Which requests run together, and when.

Law: pure, ``now`` is an argument. Requests of one group, whose rows have one shape, are joined in the order in which
they came, until their rows are as many as go together or the first of them has waited as long as it may. Of the batches
that are ready, the one whose first request came first is next; so nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from flowrt.base.errors import GraphError, user_site
from flowrt.base.locating import Fitting
from flowrt.base.plain import is_number, is_whole
from flowrt.base.valueclass import valueclass


@valueclass
class Batching(Fitting):
    """How requests are joined, and how many may wait.

    At most ``max_batch`` rows run together, and the first of a batch waits ``max_delay`` seconds for others, at most,
    unless one is running. ``max_batch=1`` joins nothing: each request runs alone, as it came. Beyond ``max_waiting``
    requests, or ``max_bytes`` of them, one is refused. One that has no answer after ``timeout`` seconds is given up.
    """

    max_batch: int = 64
    max_delay: float = 0.002
    max_waiting: int = 1024
    max_bytes: int = 256 << 20
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, is_right, least in (
            ("max_batch", is_whole, 1),
            ("max_delay", is_number, 0),
            ("max_waiting", is_whole, 1),
            ("max_bytes", is_whole, 1),
            ("timeout", is_number, 0),
        ):
            value = getattr(self, name)
            if not is_right(value, least):
                raise GraphError(f"{user_site()}: Batching: {name} is a number from {least} up, got {value!r}")


class Joined(Protocol):
    """A request: how many ``rows`` it has, None where it runs alone; ``group``, who it may run with; when it came."""

    @property
    def rows(self) -> int | None: ...

    @property
    def group(self) -> Hashable: ...

    @property
    def arrived(self) -> float: ...


T = TypeVar("T", bound=Joined)


class Forming(Generic[T]):
    """Requests that become batches of at most ``most`` rows, the first of which waits ``delay`` seconds at most.

    One with more rows than that is a batch of its own.
    """

    def __init__(self, most: int, delay: float) -> None:
        self._most, self._delay = most, delay
        self._full: list[list[T]] = []
        self._forming: dict[Hashable, list[T]] = {}

    def add(self, request: T) -> None:
        """Have it run soon."""
        if request.rows is None:
            self._full.append([request])
            return
        forming = self._forming.get(request.group, [])
        if forming and _rows(forming) + request.rows > self._most:
            self._full.append(self._forming.pop(request.group))
            forming = []
        forming.append(request)
        if _rows(forming) >= self._most:
            self._full.append(forming)
            self._forming.pop(request.group, None)
        else:
            self._forming[request.group] = forming

    def take(self, now: float, ending: bool = False) -> list[T]:
        """The batch to run now, none if no one is ready; when it is ``ending``, all are."""
        due = [group for group, forming in self._forming.items() if ending or self._due(forming) <= now]
        ready = [*self._full, *(self._forming[group] for group in due)]
        if not ready:
            return []
        batch = min(ready, key=lambda batch: batch[0].arrived)
        if batch in self._full:
            self._full.remove(batch)
        else:
            del self._forming[batch[0].group]
        return batch

    def due(self) -> float | None:
        """When the next batch is ready, if none comes before it is full; None where nobody waits."""
        return min(map(self._due, self._forming.values()), default=None)

    def _due(self, forming: list[T]) -> float:
        return forming[0].arrived + self._delay


def _rows(batch: list[T]) -> int:
    return sum(request.rows or 0 for request in batch)
