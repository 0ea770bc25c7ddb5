"""What a ledger's records come to: where every batch is, and whether each ended once.

Law: told of one record after another, in order; what does not fit what was told before is a violation, noted and
obeyed all the same. It must not know files. Pure.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

import numpy as np

from flowrt.ledger.records import Begun, Handed, Made, Missed, Over, Record, Returned, Setup, Undone
from flowrt.sched.versions.ledger import Outcome

OUTCOMES = tuple(Outcome)


class BatchState(IntEnum):
    """Where a batch is, or how it ended."""

    NEVER = 0  # handed out, though later ones were: it is unused
    UNUSED = 1  # back from whom it was handed to
    HANDED = 2
    KEPT = 3
    LATE = 4
    REFUSED = 5
    LOST = 6


ENDS = {
    Outcome.KEPT: BatchState.KEPT,
    Outcome.LATE: BatchState.LATE,
    Outcome.REFUSED: BatchState.REFUSED,
    Outcome.LOST: BatchState.LOST,
    Outcome.ABANDONED: BatchState.LATE,
}
FREE = (BatchState.NEVER, BatchState.UNUSED)
AGAIN = (Outcome.LATE, Outcome.LOST, Outcome.ABANDONED)  # what is used again where that is asked for


class Account:
    """Where all batches are.

    Args:
        setup: The newest.
        run: The number of the run that goes on, or was cut off; None where the last one is over.
        version: What the variables are at; None before the first run.
        states: By identity, a `BatchState`.
        held: identity → (replica, number) of what is handed out in this run.
        numbered: (replica, number) → identity, of the same.
        outcomes: (replica, outcome) → how many updates.
        violations: What does not fit.
    """

    def __init__(self) -> None:
        self.setup: Setup | None = None
        self.run: int | None = None
        self.version: int | None = None
        self.states = bytearray()
        self.held: dict[int, tuple[int, int]] = {}
        self.numbered: dict[tuple[int, int], int] = {}
        self.outcomes: Counter[tuple[int, Outcome]] = Counter()
        self.violations: list[str] = []

    @property
    def unused(self) -> list[int]:
        """The batches that are to be handed out before new ones, in order."""
        found: list[int] = np.flatnonzero(np.isin(np.frombuffer(bytes(self.states), np.uint8), FREE)).tolist()
        return found

    def count(self, state: BatchState) -> int:
        """How many batches are there, or ended so."""
        return self.states.count(state)

    def take(self, record: Record) -> None:
        """Take in the next record."""
        match record:
            case Setup():
                self.setup = record
            case Begun(run, version):
                self._begin(run, version)
            case Handed(replica, number, identities):
                self._hand(replica, number, identities)
            case Made():
                self._make(record)
            case Returned(replica, identities):
                self._end(identities, BatchState.UNUSED, f"came back of replica {replica}")
            case Undone(version, _, identities, again):
                self._check_version(version, version <= (self.version or 0), "went back")
                self._put(identities, BatchState.UNUSED if again else BatchState.LOST, (BatchState.KEPT,), "was undone")
                self.version = version
            case Missed(version, identities):
                self._check_version(version, version > (self.version or 0), "was missed")
                self._end(identities, BatchState.LOST, "may have been used")
                self.version = version
            case Over(version, unused):
                self._check_version(version, version == self.version, "was the end")
                self._end(unused, BatchState.UNUSED, "was not used")
                if self.held:
                    self._violate(f"a run is over, and {sorted(self.held)} neither used nor unused")
                self.run, self.held, self.numbered = None, {}, {}

    def _begin(self, run: int, version: int) -> None:
        if self.run is not None:
            self._violate(f"run {run} begins before run {self.run} is over")
        self._check_version(version, self.version in (None, version), "began a run")
        self.run, self.version = run, version

    def _hand(self, replica: int, number: int, identities: tuple[int, ...]) -> None:
        if self.run is None:
            self._violate(f"{list(identities)} are handed out, and no run goes on")
        self._put(identities, BatchState.HANDED, FREE, f"is handed to replica {replica}")
        for place, identity in enumerate(identities, number):
            if (replica, place) in self.numbered:
                self._violate(f"{self.numbered[replica, place]} and {identity} are both batch {place} of {replica}")
            self.held[identity] = replica, place
            self.numbered[replica, place] = identity

    def _make(self, made: Made) -> None:
        self._check_version(made.version, made.version == self.version, "was used")
        self.version = made.version + 1
        again = self.setup is not None and self.setup.late == "requeue"
        for replica, code, _, identities in made.receipts:
            outcome = OUTCOMES[code]
            self.outcomes[replica, outcome] += 1
            state = BatchState.UNUSED if again and outcome in AGAIN else ENDS[outcome]
            self._end(identities, state, f"is {outcome.value} of replica {replica} in version {made.version}")

    def _end(self, identities: tuple[int, ...], state: BatchState, what: str) -> None:
        self._put(identities, state, (BatchState.HANDED,), what)
        for identity in identities:
            if identity in self.held:
                self.numbered.pop(self.held.pop(identity), None)

    def _put(self, identities: tuple[int, ...], state: BatchState, expected: tuple[BatchState, ...], what: str) -> None:
        beyond = max(identities, default=-1) + 1 - len(self.states)
        if beyond > 0:
            self.states.extend(bytes(beyond))
        for identity in identities:
            if self.states[identity] not in expected:
                self._violate(
                    f"batch {identity} {what}, and was {BatchState(self.states[identity]).name.lower()} already"
                )
            self.states[identity] = state

    def _check_version(self, version: int, holds: bool, what: str) -> None:
        if not holds:
            self._violate(f"version {version} {what}, and the variables were at {self.version}")

    def _violate(self, text: str) -> None:
        self.violations.append(text)
