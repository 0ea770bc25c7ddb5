"""Values that a recording brings in and out by itself, through memory of the host's that the device reads and writes.

Law: all is called in the device's lane but by who looks at an array that was brought out, which changes when the
recording is replayed: nobody may look at what it made then, see `replaying`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flowrt.base.spec import Spec
    from flowrt.sched.devices.driver import Array

Placed: TypeAlias = "tuple[int, Spec, Any]"  # a value by number, what it is, and the memory that it lies in

SENT = 1 << 20  # bytes of a value that is brought in, at most: more are copied piece by piece, while others travel
FETCHED = 1 << 14  # and of one that is brought out, which nobody may want
ALIGNED = 64


class Copying:
    """A copy as a kernel, which a driver's method issues: between its operands, or with what is ``given``."""

    scratch: Sequence[Spec] = ()
    may_fail = False

    def __init__(self, issue: Callable[..., None], given: Any) -> None:
        self._issue, self._given = issue, given

    def launch(self, operands: Sequence[Any], words: Array) -> None:
        self._issue(*operands, self._given)


@dataclass(slots=True, eq=False)
class Staging:
    """Arrays of the host's that are copied to the device as a recording begins, and from it as it ends.

    ``sent`` and ``fetched`` are by the numbers that were asked for; ``before`` and ``after`` are launches to record.
    """

    sent: dict[int, Array] = field(default_factory=dict)
    fetched: dict[int, Array] = field(default_factory=dict)
    before: list[tuple[Copying, Sequence[Any]]] = field(default_factory=list)
    after: list[tuple[Copying, Sequence[Any]]] = field(default_factory=list)


def stage(driver: Any, given: Sequence[Placed], made: Sequence[Placed]) -> Staging:
    """Stage those of some values that are small; none where the device does not copy by itself."""
    found, pinned = Staging(), getattr(driver, "pinned", None)
    if pinned is None:
        return found
    given, made = _small(given, SENT), _small(made, FETCHED)
    if not (given or made):
        return found
    staged = pinned(sum(_room(spec) for _, spec, _ in (*given, *made)))
    for some, arrays, launches, issue in (
        (given, found.sent, found.before, driver.send),
        (made, found.fetched, found.after, driver.fetch),
    ):
        for number, spec, memory in some:
            part, staged = staged[: spec.nbytes], staged[_room(spec) :]
            arrays[number] = part.view(spec.dtype).reshape(spec.concrete)
            launches.append((Copying(issue, part), [memory]))
    return found


def _small(values: Sequence[Placed], most: int) -> list[Placed]:
    return [value for value in values if 0 < value[1].nbytes <= most]


def _room(spec: Spec) -> int:
    return -(-spec.nbytes // ALIGNED) * ALIGNED
