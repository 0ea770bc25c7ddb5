"""Reads a ledger: what became of every batch, and what every version was made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import LedgerError, path_of
from flowrt.base.locating import fitting
from flowrt.base.valueclass import valueclass
from flowrt.ledger.account import OUTCOMES, Account, BatchState
from flowrt.ledger.frames import MAGIC, records_in
from flowrt.ledger.records import (
    Begun,
    Handed,
    Made,
    Missed,
    Over,
    Packed,
    Record,
    Returned,
    Setup,
    Undone,
    record_from_data,
)
from flowrt.sched.versions.ledger import Outcome

if TYPE_CHECKING:
    import os

ENDS = ("kept", "late", "refused", "lost")


@valueclass
class Version:
    """A version that was used, and what made the one after it.

    ``kept``, ``late``, ``refused`` and ``lost`` are, by replica, the identities of the batches of its update;
    ``staleness`` by replica of ``kept`` how many versions old its values were. ``run`` is the number of its run,
    ``setup`` which of the ledger's it was made under. ``compression`` says how updates were packed, if they were;
    ``anew`` are those of ``kept`` that had been lost in that run, and had begun again. ``begun`` is the version at
    which it began.
    """

    version: int
    run: int
    kept: Mapping[int, tuple[int, ...]]
    late: Mapping[int, tuple[int, ...]]
    refused: Mapping[int, tuple[int, ...]]
    lost: Mapping[int, tuple[int, ...]]
    staleness: Mapping[int, int]
    setup: Setup
    compression: str = ""
    anew: frozenset[int] = frozenset()
    begun: int = 0

    @property
    def kept_batches(self) -> tuple[int, ...]:
        """The identities of the batches that counted."""
        return tuple(identity for identities in self.kept.values() for identity in identities)


class Ledger:
    """What the ledger at ``path`` says, as far as it is whole. It may be written meanwhile.

    ``versions`` are those that led to the newest one, oldest first: what was undone is not among them. ``violations``
    lists what must not be, such as a batch that ended twice or versions between which some are missing; a ledger that
    flowrt wrote has none. ``torn`` is how many bytes of a record there are at the end that is not whole.

    Raises `LedgerError` where there is none, where it is damaged, or is none.
    """

    @fitting
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path_of(path, "a ledger"))
        self.versions: list[Version] = []
        self._account = Account()
        self._compression = ""  # of the run that began last, as are the others
        self._begun = 0
        self._lost: set[int] = set()  # replicas that were
        self._anew: set[int] = set()  # batches that these were handed afterwards
        self._records: list[tuple[Record, int]] = []  # with the byte at which each ends
        self.torn = self._read()

    def _read(self) -> int:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise LedgerError(f"there is no ledger to read at {self.path}: {error.strerror}") from error
        end = len(MAGIC) if len(data) >= len(MAGIC) else 0
        for end, content in records_in(data, str(self.path)):
            record = record_from_data(content, f"{self.path} before byte {end}")
            self._records.append((record, end))
            self._take(record)
        return len(data) - end

    def _take(self, record: Record) -> None:
        self._account.take(record)
        match record:
            case Begun(_, version):
                self._compression, self._begun, self._lost, self._anew = "", version, set(), set()
            case Returned(replica):
                self._lost.add(replica)
            case Handed(replica, _, identities) if replica in self._lost:
                self._anew.update(identities)
            case Packed(_, compression, begun):
                self._compression, self._begun = compression, begun
            case Made():
                self.versions.append(self._version(record))
            case Undone(version):
                while self.versions and self.versions[-1].version >= version:
                    self.versions.pop()

    def _version(self, made: Made) -> Version:
        of: dict[Outcome, dict[int, tuple[int, ...]]] = {outcome: {} for outcome in OUTCOMES}
        for replica, code, _, identities in made.receipts:
            of[OUTCOMES[code]][replica] = identities
        kept, setup = of[Outcome.KEPT], self._account.setup
        stale = {replica: staleness for replica, _, staleness, _ in made.receipts if replica in kept}
        if setup is None:
            raise LedgerError(f"{self.path} does not say whose batches these are, before version {made.version}")
        late = of[Outcome.LATE] | of[Outcome.ABANDONED]
        refused, lost, run = of[Outcome.REFUSED], of[Outcome.LOST], self._account.run or 0
        anew = frozenset(replica for replica, used in kept.items() if not self._anew.isdisjoint(used))
        return Version(made.version, run, kept, late, refused, lost, stale, setup, self._compression, anew, self._begun)

    @property
    def setup(self) -> Setup | None:
        """Whose batches these are; None of an empty ledger."""
        return self._account.setup

    @property
    def compression(self) -> str:
        """How updates of the newest run travel, where they are packed: see `Replicated`; empty where they are not."""
        return self._compression

    @property
    def violations(self) -> tuple[str, ...]:
        """What must not be."""
        return tuple(self._account.violations)

    @property
    def version(self) -> int | None:
        """What the variables are at, as far as the ledger knows; None before the first run."""
        return self._account.version

    @property
    def drawn(self) -> int:
        """How many batches were drawn: the identity of the next new one."""
        return len(self._account.states)

    @property
    def unused(self) -> list[int]:
        """The identities of the batches that were drawn, and neither used nor with a replica now."""
        return self._account.unused

    def count(self, state: str) -> int:
        """How many batches are "kept", "late", "refused", "lost", "unused", or "handed" out to a replica now."""
        states = [BatchState.NEVER, BatchState.UNUSED] if state == "unused" else [BatchState[state.upper()]]
        return sum(map(self._account.count, states))

    def updates(self, replica: int, outcome: str) -> int:
        """How many updates of a replica were "kept", "late", "refused" or "lost"."""
        return self._account.outcomes[replica, Outcome(outcome)]

    def state_of(self, identity: int) -> str:
        """Where a batch is, or how it ended: as for `count`."""
        if not 0 <= identity < self.drawn:
            return "unused"
        state = BatchState(self._account.states[identity])
        return "unused" if state is BatchState.NEVER else state.name.lower()

    def history(self, identity: int) -> Iterator[str]:
        """What was said of a batch, in order."""
        run = 0
        for record, _ in self._records:
            match record:
                case Begun():
                    run = record.run
                case Handed(replica, number, identities) if identity in identities:
                    yield f"handed to replica {replica} as its batch {number + identities.index(identity)} of run {run}"
                case Made(version, receipts):
                    for replica, code, staleness, identities in receipts:
                        if identity in identities:
                            old = f", {staleness} versions old" if staleness else ""
                            yield f"{OUTCOMES[code].value} of replica {replica} in version {version}{old}"
                case Returned(replica, identities) if identity in identities:
                    yield f"came back of replica {replica}, which was lost before it began with it"
                case Undone(version, because, identities, again) if identity in identities:
                    yield f"undone, as the variables are at version {version} again: {because}" + (
                        "; to be used again" if again else ""
                    )
                case Missed(version, identities) if identity in identities:
                    yield f"lost: it may have been used in a version before {version}, of which nothing is known"
                case Over(version, unused) if identity in unused:
                    yield f"not used in run {run}, which was over at version {version}"

    def to_data(self) -> dict[str, Any]:
        """What the summary says, as plain data."""
        setup = self.setup
        replicas = range(0 if setup is None else setup.replicas)
        return {
            "path": str(self.path),
            "trainer": None if setup is None else setup.trainer,
            "policy": None if setup is None else setup.policy,
            "version": self.version,
            "runs": sum(isinstance(record, Begun) for record, _ in self._records),
            "batches": {state: self.count(state) for state in (*ENDS, "unused", "handed")},
            "drawn": self.drawn,
            "updates": [{outcome: self.updates(replica, outcome) for outcome in ENDS} for replica in replicas],
            "undone": [
                {"version": record.version, "because": record.because, "batches": len(record.identities)}
                for record, _ in self._records
                if isinstance(record, Undone)
            ],
            "violations": list(self.violations),
            "torn": self.torn,
        }
