"""In which order elements leave a queue.

Law: pure. What leaves next hangs on what was added, in which order, and on what has left: not on the time, nor on how
full the queue was meanwhile. What is given back leaves again as if it never had.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from flowrt.base.errors import GraphError

if TYPE_CHECKING:
    import numpy as np

    from flowrt.base.attributes import Attr

Element: TypeAlias = "tuple[np.ndarray[Any, Any], ...]"
Taken: TypeAlias = "tuple[int, int, Element]"  # sorted as they leave: no two are alike in both numbers


class ElementOrder(Protocol):
    """The elements of a queue. Of these ``kept`` stay as long as more may come."""

    kept: int

    def __len__(self) -> int: ...

    def add(self, element: Element) -> None: ...

    def take(self) -> Taken:
        """The element that is next, of which there is one."""

    def give_back(self, taken: Taken) -> None: ...

    def remove(self, elements: Collection[Element]) -> None:
        """Take back what was added, as far as it is still here, if all of it is."""


class Ranked:
    """By a number that each element has, smallest first, and those of the same one in the order in which they came."""

    kept = 0

    def __init__(self, rank: Callable[[Element], int]) -> None:
        self._rank = rank
        self._arrivals = count()
        self._heap: list[Taken] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, element: Element) -> None:
        heappush(self._heap, (self._rank(element), next(self._arrivals), element))

    def take(self) -> Taken:
        return heappop(self._heap)

    def give_back(self, taken: Taken) -> None:
        heappush(self._heap, taken)

    def remove(self, elements: Collection[Element]) -> None:
        mine = {id(element) for element in elements}
        left = [entry for entry in self._heap if id(entry[-1]) not in mine]
        if len(self._heap) - len(left) == len(elements):
            heapify(left)
            self._heap = left


class Shuffled:
    """Each drawn at random from the ``kept`` + 1 that came first of those still here.

    With more to draw from, such as all that is here, the order would hang on how fast elements come and go. Each draw
    is a function of its number and of the numbers in ``key``: a keyed hash.
    """

    def __init__(self, kept: int, key: Sequence[int]) -> None:
        self.kept = kept
        self._key = " ".join(map(str, key)).encode()
        self._draws = 0
        self._held: list[Element] = []  # in the order in which they came
        self._back: list[Taken] = []  # a heap of those that were drawn before

    def __len__(self) -> int:
        return len(self._held) + len(self._back)

    def add(self, element: Element) -> None:
        self._held.append(element)

    def take(self) -> Taken:
        if self._back:
            return heappop(self._back)
        among = min(len(self._held), self.kept + 1)
        self._draws += 1
        drawn = int.from_bytes(blake2b(b"%d" % self._draws, digest_size=8, key=self._key).digest(), "little")
        return 0, self._draws, self._held.pop(drawn * among >> 64)

    def give_back(self, taken: Taken) -> None:
        heappush(self._back, taken)

    def remove(self, elements: Collection[Element]) -> None:
        mine = {id(element) for element in elements}
        held = [element for element in self._held if id(element) not in mine]
        back = [entry for entry in self._back if id(entry[-1]) not in mine]
        if len(self) - len(held) - len(back) == len(elements):
            heapify(back)
            self._held, self._back = held, back


def order_of(form: Sequence[Attr], seed: int) -> ElementOrder:
    """The order that a queue's attribute names; one that names no seed has it from ``seed``."""
    match form:
        case ("fifo",):
            return Ranked(lambda element: 0)
        case ("priority",):
            return Ranked(lambda element: int(element[0]))
        case ("shuffle", int(kept), int() | None as own, int(stream)) if kept > 0:
            return Shuffled(kept, (seed if own is None else own, stream))
    raise GraphError(f"there is no order {form!r} in which elements leave a queue")
