"""``async with session.tracing("step.json"):`` writes a timeline of the steps that run in the block.

Law: while nobody traces, nothing here is loaded. The file is opened before the block runs, beside its place, and takes
that once it is whole: also where the block fails, or nodes are lost.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Protocol

from flowrt.base.errors import GraphError, from_site, not_written, path_of, user_site
from flowrt.base.tracebacks import brief
from flowrt.finishing import to_the_end
from flowrt.misuse import AsyncOnly
from flowrt.sched.host.lanes import Lanes
from flowrt.sched.host.tracer import Tracer, now
from flowrt.tracing.collecting import CLIENT_NAME, PERIOD, Collecting
from flowrt.tracing.timeline import events

if TYPE_CHECKING:
    from flowrt.sched.tape.direct import Numbers
    from flowrt.tracing.clocks import Alignment
    from flowrt.tracing.collecting import TracedRunner
    from flowrt.tracing.timeline import ProcessNotes

_log = logging.getLogger(__name__)


class TracedSession(Protocol):
    """What a session is to the block in which it is traced."""

    _traced: Any
    _closed: bool
    _numbers: Numbers

    def _open_here(self) -> TracedRunner: ...


class Tracing(AsyncOnly):
    """The block in which a session is traced; see `Session.tracing`."""

    WHAT = "session.tracing(...)"

    def __init__(self, session: TracedSession, path: str | os.PathLike[str], most: int) -> None:
        self._site = user_site()
        self._session, self.path, self._most = session, path_of(path, "the file of a trace"), most
        self._group = asyncio.TaskGroup()

    @brief
    async def __aenter__(self) -> None:
        session = self._session
        self._runner = runner = session._open_here()
        if session._traced is not None:
            raise GraphError(
                f"{self._site}: the session is being traced already, to {session._traced.path}; leave that block first"
            )
        self._file = self._opened()
        session._traced = self
        self._collecting = Collecting(runner, self._most)
        self._tracer, self._began = Tracer(), now()
        try:
            await self._collecting.begin()
        except BaseException:
            session._traced = None
            self._discard()
            await to_the_end(self._collecting.end())
            raise
        session._numbers.gate[0] = 0
        runner.trace(self._tracer)
        await self._group.__aenter__()
        self._going = self._group.create_task(self._go_on())

    def holds(self, task: str) -> bool:
        """Whether anything that a task of the cluster did has come here."""
        return self._collecting.holds(task)

    @brief
    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._session._traced = None
        self._session._numbers.gate[0] = int(not self._session._closed)
        self._runner.trace(None)
        self._going.cancel()
        with suppress(BaseExceptionGroup):  # of the block's own error, which goes on by itself
            await self._group.__aexit__(None, None, None)
        await to_the_end(self._finish(error))

    async def _go_on(self) -> None:
        """Take what is noted here and there, as long as the block runs."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._collecting.go_on())
                group.create_task(self._take_own())
        except Exception:  # the block must not fail for it
            _log.exception("%s will lack what nodes do from now on", self.path)

    async def _take_own(self) -> None:
        while True:
            self._collecting.take(self._tracer)
            await asyncio.sleep(PERIOD)

    async def _finish(self, error: BaseException | None) -> None:
        await self._collecting.end()
        self._collecting.take(self._tracer)
        lanes = Lanes(1, "tracing")
        try:
            await lanes.run(self._write)
        except OSError as failure:
            self._discard()
            if error is None:
                with from_site(self._site):
                    raise not_written(self.path, failure) from failure
            _log.warning("the timeline %s was not written: %s", self.path, failure)
        finally:
            lanes.close()

    # ── the file ──

    @property
    def _beside(self) -> str:
        return f"{self.path}.part"

    def _opened(self) -> IO[bytes]:
        """The file, opened for writing; raises `GraphError` where that cannot be."""
        try:
            if os.path.isdir(self.path):
                raise IsADirectoryError(21, "it is a folder")
            return open(self._beside, "wb")
        except OSError as error:
            with from_site(self._site):
                raise not_written(self.path, error) from error

    def _discard(self) -> None:
        self._file.close()
        with suppress(OSError):
            os.remove(self._beside)

    def _write(self) -> None:
        """Write the file, and put it in its place. In a lane: a large one takes seconds."""
        processes = self._collecting.processes()
        with self._file as raw:
            packed = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if self.path.endswith(".gz") else None
            out = raw if packed is None else packed
            head = json.dumps({"displayTimeUnit": "ms", "otherData": self._about(processes)}, ensure_ascii=False)
            out.write(f'{head[:-1]}, "traceEvents": ['.encode())
            for number, event in enumerate(events(processes, self._began)):
                out.write((",\n" if number else "\n").encode() + json.dumps(event, ensure_ascii=False).encode())
            out.write(b"\n]}\n")
            if packed is not None:
                packed.close()
        os.replace(self._beside, self.path)

    def _about(self, processes: list[ProcessNotes]) -> dict[str, Any]:
        """What the file says of itself: by how much clocks may be off, what was left out, and whose end is missing."""
        return {
            "made by": "flowrt",
            "clocks": {process.task: _clock(process.alignment) for process in processes[1:]},
            "dropped": {process.task: process.dropped for process in processes if process.dropped},
            "incomplete": dict(self._collecting.missing),
        }


def _clock(alignment: Alignment) -> dict[str, Any]:
    if alignment.is_shared:
        return {"same as": CLIENT_NAME, "uncertainty_us": 0}
    return {"ahead_us": alignment.ahead / 1e3, "uncertainty_us": alignment.uncertainty / 1e3}
