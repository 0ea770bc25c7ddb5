"""Which small launches of a region become one.

Law: pure; launches in the region's order in, groups in the order to run them in out. A launch in hand is put off until
another needs what it does, in any of the ways in which order matters: memory that one of the two writes, or a node that
waits for another. What is in hand at a moment is therefore independent of one another, and runs as one.

Launches that are put off keep their operands' memory for longer, and so all in hand touch no more than `HELD` bytes:
what gradients were left in the second cache is there still, and a step's memory grows by as little. Larger launches
gain nothing that would be worth it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from flowrt.kernels.language.table import Form
from flowrt.kernels.launch import LaunchStep

if TYPE_CHECKING:
    from flowrt.kernels.launch import Launchable

HELD = 256 << 10  # bytes: half of a small second cache
SMALL = 16 << 10  # bytes that a launch touches, beyond which a launch's own cost is nothing beside its work

Groups: TypeAlias = "list[tuple[list[int], int]]"
"""Launches that run as one, and the one that they run just before, or that runs by itself: the end is past the last."""


class Candidate(Protocol):
    """A launch whose operands' memory is known by identity."""

    @property
    def step(self) -> Launchable: ...
    @property
    def storages(self) -> Sequence[Any]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class _Hand:
    """The launches put off, and who of them touches what."""

    nbytes: dict[int, int] = field(default_factory=dict)  # by launch
    held: int = 0
    touching: dict[int, set[int]] = field(default_factory=dict)  # memory → launches
    writing: dict[int, set[int]] = field(default_factory=dict)

    def needed(self, one: Candidate, ordered: Iterable[int]) -> list[int]:
        """Those that must run before ``one``, which also waits for ``ordered``."""
        found = {number for number in ordered if number in self.nbytes}
        for memory, written in _operands(one):
            found |= (self.touching if written else self.writing).get(memory, set())
        return sorted(found)

    def take(self, number: int, one: Candidate, nbytes: int) -> None:
        self.nbytes[number] = nbytes
        self.held += nbytes
        for memory, written in _operands(one):
            self.touching.setdefault(memory, set()).add(number)
            if written:
                self.writing.setdefault(memory, set()).add(number)

    def drop(self, number: int, one: Candidate) -> None:
        self.held -= self.nbytes.pop(number)
        for memory, _ in _operands(one):
            self.touching.get(memory, set()).discard(number)
            self.writing.get(memory, set()).discard(number)


def gather(launches: Sequence[Candidate], ordered: Sequence[Iterable[int]]) -> Groups:
    """The launches in the order to run them in, those that run as one together.

    ``ordered`` says for each which earlier ones it waits for, whatever memory they touch.
    """
    hand = _Hand()
    groups: Groups = []

    def run(numbers: list[int], before: int) -> None:
        for number in numbers:
            hand.drop(number, launches[number])
        if numbers:
            groups.append((numbers, before))

    for number, one in enumerate(launches):
        run(hand.needed(one, ordered[number]), number)
        nbytes = sum(one.sizes)
        if not _may_wait(one.step) or nbytes > SMALL:
            groups.append(([number], number))
            continue
        if hand.held + nbytes > HELD:
            run(sorted(hand.nbytes), number)
        hand.take(number, one, nbytes)
    run(sorted(hand.nbytes), len(launches))
    return groups


def _may_wait(step: Launchable) -> bool:
    """Whether a launch is one of those that are put off: what is fused of elementwise ops, which cannot fail."""
    if not isinstance(step, LaunchStep) or step.kernel.form is not Form.SCALARS or step.kernel.expression is None:
        return False
    return not step.kernel.expression.reductions and not step.kernel.may_fail and step.kernel.device == "cpu"


def _operands(one: Candidate) -> Iterator[tuple[int, bool]]:
    """The identity of each operand's memory, and whether it is written."""
    for position, number in enumerate(one.step.operands):
        yield id(one.storages[number]), position >= one.step.reads
