"""Where something runs: ``/job:worker/task:0/device:cpu:0``, any part of which may be left open."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flowrt.base.errors import PlacementError

_PATTERN = re.compile(
    r"(?:/job:(?P<job>[A-Za-z][A-Za-z0-9_]*))?(?:/task:(?P<task>\d+))?(?:/device:(?P<kind>[a-z][a-z0-9_]*)(?::(?P<index>\d+))?)?"
)

HOST_KIND = "cpu"

CLIENT = "/job:client/task:0"
"""The task that whoever drives a cluster stands for: it sends the feeds and receives the fetches."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A device's name, or a constraint on one: ``None`` leaves a part open."""

    job: str | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    @staticmethod
    def parse(text: str) -> Device:
        """``""`` is no constraint; ``"cpu:0"`` is short for ``"/device:cpu:0"``."""
        if not isinstance(text, str):
            raise PlacementError(f"{text!r} is not the name of a device; write cpu:0, or /job:worker/task:0")
        full = text if text.startswith("/") or not text else f"/device:{text}"
        match = _PATTERN.fullmatch(full)
        if match is None:
            raise PlacementError(f"{text!r} is not a device; write /job:worker/task:0/device:cpu:0 or a part of it")
        job, task, kind, index = match["job"], match["task"], match["kind"], match["index"]
        return Device(job, None if task is None else int(task), kind, None if index is None else int(index))

    @property
    def host(self) -> str:
        """The task this device belongs to: ``/job:worker/task:0``."""
        return _host(self.job, self.task)

    @property
    def local(self) -> str:
        """The device's name on its own task: ``cpu:0``."""
        return f"{self.kind}:{self.index}"

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's, which feeds, fetches, queues and other tasks use as it is."""
        return self.kind == HOST_KIND

    @property
    def on_host(self) -> Device:
        """Itself where its memory is the host's, else the host's own device, of the same task."""
        return self if self.is_host else Device(self.job, self.task, HOST_KIND, 0)

    def matches(self, device: Device) -> bool:
        """Whether ``device`` satisfies this constraint."""
        return all(
            mine is None or mine == other
            for mine, other in zip(
                (self.job, self.task, self.kind, self.index),
                (device.job, device.task, device.kind, device.index),
                strict=True,
            )
        )

    def over(self, outer: Device) -> Device:
        """This constraint where it says something, ``outer`` where it does not."""
        same_job = self.job is None or self.job == outer.job
        same_kind = self.kind is None or self.kind == outer.kind
        return Device(
            outer.job if self.job is None else self.job,
            (outer.task if same_job else None) if self.task is None else self.task,
            outer.kind if self.kind is None else self.kind,
            (outer.index if same_kind else None) if self.index is None else self.index,
        )

    def __str__(self) -> str:
        out = "" if self.job is None else f"/job:{self.job}"
        out += "" if self.task is None else f"/task:{self.task}"
        if self.kind is not None:
            out += f"/device:{self.kind}" + ("" if self.index is None else f":{self.index}")
        return out


@lru_cache(maxsize=1024)
def _host(job: str | None, task: int | None) -> str:
    return str(Device(job, task))


ANYWHERE = Device()


@dataclass(frozen=True, slots=True)
class SomeOf:
    """Nodes of a graph, by number, that are built for several ``tasks``, ``least`` of which are enough."""

    tasks: tuple[str, ...]
    least: int
    nodes: range


@dataclass(frozen=True, slots=True)
class HeldTwice:
    """That the variables ``names``, by (container, name), which are on one of ``tasks`` are to be on the next one, too.

    ``keep`` is awaited as a session opens on a cluster: it has somebody see to that there.
    """

    tasks: tuple[str, ...]
    names: frozenset[tuple[str, str]]
    keep: Callable[[Any], Awaitable[None]]

    def spared(self, absent: Collection[str]) -> set[str]:
        """The tasks that are ``absent``, and whose variables are on one that is not."""
        after = zip(self.tasks, (*self.tasks[1:], self.tasks[0]), strict=True)
        return {task for task, other in after if task in absent and other not in absent}


def is_apart(local: str) -> bool:
    """Whether a device, by its name on its own task, has memory other than the host's."""
    return local.partition(":")[0] != HOST_KIND
