"""One event file: what is put into it is made and written by a thread of its own.

Law: `put` notes what there is to write and returns; where more waits than fits, it is dropped and counted, never waited
for. The thread wakes every so many seconds, makes records of what was noted, and writes them in one piece, behind the
last one that is whole: whatever a kill or a full disk leaves of a record is written over, and readers pass it over. It
gives way after each thing that it makes, so that an event loop waits for one of them at most. A file is of one process:
one that was forked from it does not write.

A record is its length (8 bytes, little-endian), a checksum of these, its content, and a checksum of that: CRC-32C,
masked, as TensorFlow's TFRecord has them.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from flowrt.base.errors import ClosedError, ResourceError, no_thread, not_written, path_of, user_site
from flowrt.base.valueclass import valueclass

try:
    from google_crc32c import value as crc32c
except ImportError:  # TensorBoard's own, in Python, takes a hundred times as long
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

if TYPE_CHECKING:
    from os import PathLike

AT_ONCE = 4 << 20  # bytes that wait, at which the thread does not sleep any longer
PIECE = 1 << 20  # bytes of records that are written at once
TURN, REST = 5e-4, 1e-5  # seconds that the thread works, and then gives way: less often costs others their turns
_files = itertools.count()
_log = logging.getLogger("flowrt.summary")


@valueclass
class Entry:
    """What is to be written: ``add`` adds it to an event, in the thread; ``nbytes`` is what it holds until then."""

    add: Callable[[Any], object]
    step: int
    time: float
    nbytes: int


class RecordMaker(Protocol):
    """Who makes records of what was noted."""

    def make(self, entry: Entry) -> Iterable[bytes]:
        """The records of one thing."""

    def sum_up(self) -> Iterable[bytes]:
        """Those of all that was made since it was asked last."""


class EventFile:
    """A new event file in ``folder``, which is made if there is none; `close` writes what waits, and ends the thread.

    Raises `GraphError` where that cannot be written to.
    """

    def __init__(self, folder: str | PathLike[str], maker: RecordMaker, head: bytes, seconds: float, most: int) -> None:
        self._maker, self._seconds, self._most = maker, seconds, most
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._held = 0  # bytes of what waits
        self._dropped = 0
        self._told = 0  # of the dropped, how many the log was told of
        self._records = bytearray()  # that are made and not written
        self._end = 0  # of what is written, in the file
        self._failure: str | None = None  # why nothing is written now
        self._asking: list[Callable[[str | None], None]] = []  # who waits until all is written
        self._rested = 0.0  # when it gave way last
        self._wake = threading.Event()
        self._closing = False
        self.path, self._file = _created(path_of(folder, "the folder of summaries"))
        self._records += framed(head)
        try:
            self._write()
        except OSError as error:
            os.close(self._file)
            raise not_written(self.path, error) from error
        self._thread = threading.Thread(target=self._main, name="flowrt-summaries", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._file)
            raise no_thread(error) from error

    @property
    def closed(self) -> bool:
        """Whether nothing can be put into it any more."""
        return self._closing or not self._is_ours

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._process

    def check_open(self) -> None:
        """Raise `ClosedError` where nothing can be put into it any more."""
        if not self._is_ours:
            raise ClosedError(f"{user_site()}: the writer is of the process that forked this one; open another here")
        if self._closing:
            raise ClosedError(f"{user_site()}: the writer is closed; use it inside its `with` block")

    def put(self, add: Callable[[Any], object], step: int, nbytes: int = 1024) -> None:
        """Note what is to be written. From any thread."""
        self.check_open()  # before the lock, which a fork may have left held
        with self._lock:
            self.check_open()  # the thread looks at what waits once more after `close`
            fits = not self._held or self._held + nbytes <= self._most
            if fits:
                self._held += nbytes
                self._entries.append(Entry(add, step, time.time(), nbytes))
            else:
                self._dropped += 1
        if not fits or self._held > AT_ONCE:
            self._wake.set()

    def when_written(self, tell: Callable[[str | None], None]) -> None:
        """Have ``tell`` be called, in the thread, once all that was put is written, or with why it is not."""
        self.check_open()
        with self._lock:
            self.check_open()
            self._asking.append(tell)
        self._wake.set()

    def close(self) -> None:
        """Write what waits, as far as that can be, and end. Twice is once."""
        if self._is_ours:
            with self._lock:
                self._closing = True
            self._wake.set()
            if self._thread is not threading.current_thread():  # where the last reference may go, too
                self._thread.join()

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────

    def _main(self) -> None:
        while not self._closing:
            self._wake.wait(self._seconds)
            self._wake.clear()
            self._write_what_waits()
        self._write_what_waits()
        os.close(self._file)
        if self._failure is not None:
            _log.warning("%s: what was put last is not in it", self.path)

    def _write_what_waits(self) -> None:
        with self._lock:
            asking, self._asking = self._asking, []
            left = len(self._entries)
        try:
            self._write()  # what could not be written before comes first
            while left:
                left -= 1
                self._make(self._entries.popleft())
                if len(self._records) >= PIECE or not left:
                    self._write()
            self._append(self._maker.sum_up)
            self._write()
        except OSError as error:
            self._fail(error)
        else:
            self._recover()
        for tell in asking:
            tell(self._failure)

    def _make(self, entry: Entry) -> None:
        self._append(lambda: self._maker.make(entry))
        with self._lock:
            self._held -= entry.nbytes
        if time.perf_counter() - self._rested > TURN:
            time.sleep(REST)
            self._rested = time.perf_counter()

    def _append(self, make: Callable[[], Iterable[bytes]]) -> None:
        """Add records to those that are to be written; what cannot be made is left out, as it must end no training."""
        try:
            for record in make():
                self._records += framed(record)
        except Exception:
            _log.exception("%s: a summary is left out", self.path)

    def _write(self) -> None:
        """Write the records, behind what is written; raises `OSError`, and then they are still to be written."""
        done, records = 0, memoryview(self._records)
        try:
            while done < len(records):
                done += os.pwrite(self._file, records[done:], self._end + done)
        finally:
            records.release()
        self._end += done
        self._records.clear()

    def _fail(self, error: OSError) -> None:
        why = f"{self.path} cannot be written: {error.strerror or error}; make room there: what waits is written then"
        if self._failure is None:
            _log.warning("%s; training goes on", why)
        self._failure = why

    def _recover(self) -> None:
        if self._failure is not None:
            _log.warning("%s is written again", self.path)
        self._failure = None
        if self._dropped > self._told:
            _log.warning("%s lacks %d summaries, as too many waited", self.path, self._dropped - self._told)
            self._told = self._dropped


def framed(content: bytes) -> bytes:
    """A record of TFRecord."""
    length = struct.pack("<Q", len(content))
    return b"".join([length, _checksum(length), content, _checksum(content)])


def _checksum(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _created(folder: str) -> tuple[str, int]:
    """The path, and a descriptor, of a file that nobody else writes to."""
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
    path = os.path.join(folder, name)
    try:
        os.makedirs(folder, exist_ok=True)
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise not_written(path, error) from error


def refused(why: str) -> ResourceError:
    """The error of who asked that all be written, and it was not."""
    return ResourceError(f"{user_site()}: {why}")
