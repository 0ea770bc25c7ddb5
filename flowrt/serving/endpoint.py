"""A model that is served under a name, and the newer ones that take its place.

Law: there is always one whole version that answers. A newer file is read, checked and warmed up beside it, and takes
its place at once; the older one answers what it was asked and ends. A file that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrt.serving.batcher import Batcher
from flowrt.serving.metrics import Metrics
from flowrt.serving.model import Model
from flowrt.session.saving import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from flowrt.serving.batching import Batching
    from flowrt.session.options import Options

_log = logging.getLogger(__name__)


class Endpoint:
    """A model, or the file that it is read from, again when that changes."""

    def __init__(self, source: Model | Path, batching: Batching, options: Options | None) -> None:
        self._source, self._batching, self._options = source, batching, options
        self.metrics = Metrics()
        self._current: Batcher | None = None
        self._seen: tuple[int, ...] | None = None

    @property
    def current(self) -> Batcher:
        """What answers now; there is one once `open` is done."""
        assert self._current is not None
        return self._current

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Serve, by one of ``tasks``. Raises what keeps it from that."""
        self._seen = self._look()
        await self._put(await self._load(), tasks)

    async def follow(self, tasks: asyncio.TaskGroup, seconds: float) -> None:
        """Look every so many ``seconds`` whether there is a newer file, and serve that. Never ends by itself."""
        while True:
            await asyncio.sleep(seconds)
            seen = self._look()
            if seen is None or seen == self._seen:
                continue
            self._seen = seen
            try:
                await self._put(await self._load(), tasks)
            except Exception as error:  # whatever is wrong with one file, others are served on
                _log.warning("%s; version %s is served on", error, self.current.model.version)
            else:
                _log.info("the model %r is served in version %s", self.current.model.name, self.current.model.version)

    async def infer(self, values: Mapping[str, Any]) -> tuple[Model, dict[str, Any]]:
        """The answer, and which version gave it; see `Batcher.infer`."""
        batcher = self.current
        return batcher.model, await batcher.infer(values)

    def close(self) -> None:
        """Let nothing more in, and answer what waits."""
        if self._current is not None:
            self._current.close()

    async def _load(self) -> Model:
        return self._source if isinstance(self._source, Model) else await in_thread(Model.load, self._source)

    async def _put(self, model: Model, tasks: asyncio.TaskGroup) -> None:
        batcher, ready = Batcher(model, self._batching, self._options, self.metrics), asyncio.Future[None]()
        tasks.create_task(batcher.serve(ready))
        try:
            await ready
        except asyncio.CancelledError:  # though it may be ready by now
            batcher.close()
            raise
        before, self._current = self._current, batcher
        if before is not None:
            before.close()

    def _look(self) -> tuple[int, ...] | None:
        """What tells one file from another that has taken its place; None where there is none."""
        if isinstance(self._source, Model):
            return None
        try:
            about = os.stat(self._source)
        except OSError:
            return None
        return about.st_ino, about.st_size, about.st_mtime_ns
