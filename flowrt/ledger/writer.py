"""Writes a trainer's ledger, as its runs go on.

Law: what is said here is with the operating system before the call returns, and is said before it is acted upon: what
is about to be handed out, and what was made before the servers are told that this is known. So a client that is killed
leaves a ledger from which another goes on, with what the servers can tell of the rest.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from flowrt.base.errors import LedgerError
from flowrt.checkpoints.folders import sync_parents
from flowrt.ledger.account import Account
from flowrt.ledger.frames import MAGIC, framed, records_in
from flowrt.ledger.ledger import Ledger
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
    record_to_data,
)
from flowrt.ledger.summary import EVERY, read_summary, write_summary

OLDER = "the variables were restored from an older checkpoint, or reset"


class LedgerWriter:
    """Appends to the ledger at ``path``, which is made if need be, until `close`.

    Raises `LedgerError` where another process writes it, where it is damaged, or is another trainer's.
    """

    def __init__(self, path: str | os.PathLike[str], setup: Setup) -> None:
        self.path = Path(path)
        self.account = Account()
        self._checksum = 0  # of all bytes before the end
        self._summed = 0  # the end as the summary has it
        self._setup = setup
        self._file = self._open()
        _writers.add(self)
        try:
            self._end = self._read()
            self._check(self.account.setup)
            self._sum_up()
            if self.account.setup != setup:
                self._append(setup)
        except OSError as error:
            self.close()
            raise LedgerError(f"the ledger {self.path} cannot be read, or begun: {error}") from error
        except BaseException:
            self.close()
            raise

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def first(self) -> int:
        """The identity of the next batch that nobody was ever handed."""
        return len(self.account.states)

    def catch_up(self, unseen: Sequence[Any]) -> None:
        """Take in the reports that the client of a run may not have had; those that it had change nothing."""
        for report in unseen:
            if (report.run, report.version) == (self.account.run, self.account.version):
                self.made(report)

    def begin(
        self,
        run: int,
        version: int,
        because: str = OLDER,
        *,
        again: bool = False,
        compression: str = "",
        begun: int | None = None,
    ) -> None:
        """A run begins at ``version``, in which updates are packed as ``compression`` says, if they are.

        It was ``begun`` at an older version, where that is given: the ledger knows it from ``version`` on.

        Where the variables are not where the ledger had them, ``because`` says why they are older. What was kept since
        is lost, unless it is to be used ``again`` where batches are requeued.
        """
        account = self.account
        before = version if account.version is None else account.version
        if version > before:
            self._append(Missed(version, tuple(sorted(account.held))))
        if account.run is not None:
            self.over()
        if version < before:
            self._undo(version, because, again)
        self._append(Begun(run, version, time.time()))
        begun = version if begun is None else begun
        if compression or begun < version:
            self._append(Packed(run, compression, begun))

    def attach(
        self, run: int, version: int, because: str = OLDER, *, compression: str = "", begun: int | None = None
    ) -> None:
        """A detached run begins, or is attached to: reports follow from ``version`` on, of which some may be known."""
        if self.account.run != run or (self.account.version or 0) < version:
            self.begin(run, version, because, compression=compression, begun=begun)

    def over(self) -> None:
        """The run is over; what is not accounted for is unused. Twice is once."""
        if self.account.run is not None:
            self._append(Over(self.account.version or 0, tuple(sorted(self.account.held))))

    def _undo(self, version: int, because: str, again: bool) -> None:
        kept = [i for made in Ledger(self.path).versions if made.version >= version for i in made.kept_batches]
        self._append(Undone(version, because, tuple(sorted(kept)), again and self._setup.late == "requeue"))

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def hand(self, replica: int, number: int, identities: Sequence[int]) -> None:
        """A replica is about to be handed batches, of which the first is its ``number``-th."""
        self._append(Handed(replica, number, tuple(identities)))

    def made(self, report: Any) -> None:
        """A version was made: see `Report`.

        That of a detached run says itself which batches it was made of; told again, it changes nothing.
        """
        if report.identities and report.version < (self.account.version or 0):
            return
        receipts = []
        for place, (replica, group, code, _, staleness) in enumerate(report.receipts):
            first = (group - 1) * self._setup.local_steps + 1
            count = len(report.identities[place]) if report.identities else self._setup.local_steps
            found = self._handed(replica, range(first, first + count))
            if report.identities and found != report.identities[place]:  # else a client was killed as it wrote it down
                found = report.identities[place]
                self.hand(replica, first, found)  # which server 0 did
            receipts.append((replica, code, staleness, found))
        self._append(Made(report.version, tuple(receipts)))

    def _handed(self, replica: int, numbers: Iterable[int]) -> tuple[int, ...]:
        """The batches of a replica of these numbers, of those that are not accounted for."""
        numbered = self.account.numbered
        return tuple([numbered[replica, number] for number in numbers if (replica, number) in numbered])

    def returned(self, replica: int, identities: Sequence[int]) -> None:
        """Batches, if any, came back of a replica that was lost before it began with them."""
        known = tuple([identity for identity in identities if identity in self.account.held])
        self._append(Returned(replica, known))

    # ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def sync(self) -> None:
        """Force what was written to the disk. Raises `LedgerError`."""
        try:
            if self._file >= 0:
                os.fsync(self._file)
        except OSError as error:
            raise LedgerError(f"{self.path} could not be forced to the disk: {error}") from error

    def close(self) -> None:
        """Let others write. Twice is once."""
        held, self._file = self._file, -1
        if held >= 0:
            os.close(held)

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} cannot be opened to be written: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise LedgerError(
                f"another process or session writes the ledger {self.path}, and one at a time does ({error.strerror}); "
                "close that one, or give this one another by ledger=PATH (to read is free)"
            ) from None
        return file

    def _read(self) -> int:
        """Take in what the file holds, and cut off what is not whole; answers its end."""
        data = self.path.read_bytes()
        self.account, self._summed = read_summary(self.path, data)
        end = self._summed
        for end, record in records_in(data, str(self.path), self._summed):
            self.account.take(record_from_data(record, f"{self.path} before byte {end}"))
        if len(data) < len(MAGIC):
            os.ftruncate(self._file, 0)
            os.write(self._file, MAGIC)
            self.sync()
            sync_parents(self.path)
        end = max(end, len(MAGIC))
        if len(data) > end:
            os.ftruncate(self._file, end)
        self._checksum = crc32(data[:end] if len(data) >= end else MAGIC)
        return end

    def _check(self, found: Setup | None) -> None:
        """Raise where the ledger is not this trainer's."""
        setup = self._setup
        if found is None:
            return
        for what in ("trainer", "local_steps"):
            if getattr(found, what) != getattr(setup, what):
                raise LedgerError(
                    f"the ledger {self.path} is of trainer {found.trainer!r} with {found.local_steps} local steps, not "
                    f"of {setup.trainer!r} with {setup.local_steps}; give this one another by ledger=PATH"
                )

    def _append(self, record: Record) -> None:
        data = framed(record_to_data(record))
        try:
            left = memoryview(data)
            while left:  # where a disk has room for a part, the rest says why there is no more
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._cut()
            raise LedgerError(
                f"the ledger {self.path} could not be written: {error}; what is in it is whole, and training ends, as "
                "batches could not be accounted for; make room there, and go on"
            ) from error
        self._end += len(data)
        self._checksum = crc32(data, self._checksum)
        self.account.take(record)
        self._sum_up()

    def _sum_up(self) -> None:
        """Spare who comes next what was written since the last summary, if it is much."""
        if self._end - self._summed >= EVERY:
            write_summary(self.path, self.account, self._end, self._checksum)
            self._summed = self._end

    def _cut(self) -> None:
        """Take away what was written of a record; if that fails too, readers pass over it."""
        try:
            os.ftruncate(self._file, self._end)
        except OSError:
            self.close()


def _leave_to_parent() -> None:
    """In a forked child: have no part in the locks, so that they end with the process that took them."""
    for writer in _writers:
        writer.close()


_writers: weakref.WeakSet[LedgerWriter] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
