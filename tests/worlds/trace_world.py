"""Judges a timeline by the published Trace Event format, and finds in it what tests ask for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

AHEAD = 3_600_000_000_000  # nanoseconds, of nodes that import `skewed_clock`
CLOSE = 1e-3  # microseconds that writing a time as a float may be off


@dataclass
class Timeline:
    """What a file says: its slices, each with the names of its process and track, and its arrows."""

    about: dict[str, Any]
    slices: list[dict[str, Any]] = field(default_factory=list)
    arrows: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def of(self, category: str, **wanted: Any) -> list[dict[str, Any]]:
        """The slices of a category, of which some things are as wanted: of the slice, or of its arguments."""
        return [
            one
            for one in self.slices
            if one["cat"] == category
            and all(one.get(name, one["args"].get(name)) == value for name, value in wanted.items())
        ]

    def names(self, category: str, **wanted: Any) -> Counter[str]:
        """How often each name is among them."""
        return Counter(one["name"] for one in self.of(category, **wanted))


def files_in(folder: Path) -> list[str]:
    """The names of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def judged(path: Path) -> Timeline:
    """The timeline in a file, if that is one."""
    data = path.read_bytes()
    told = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = told["traceEvents"]
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys(), event
        assert event["ph"] in "XMsf", event
    names = {
        (event["pid"], event["tid"] if event["name"] == "thread_name" else None): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
    }
    for event in events:
        event["process"] = names[event["pid"], None]
        event["track"] = names.get((event["pid"], event["tid"]), "")
    placed = [event for event in events if event["ph"] != "M"]
    _check_order(placed)
    slices = [event for event in placed if event["ph"] == "X"]
    _check_nesting(slices)
    return Timeline(told["otherData"], slices, list(_arrows(placed)))


def _check_order(events: Iterable[dict[str, Any]]) -> None:
    """On one track, events stand in the order of their times."""
    last: dict[tuple[int, int], float] = {}
    for event in events:
        track = event["pid"], event["tid"]
        assert event["ts"] >= last.get(track, 0.0), event
        last[track] = event["ts"]


def _check_nesting(slices: Iterable[dict[str, Any]]) -> None:
    """On one track, slices follow one another or lie inside one another."""
    open_until: dict[tuple[int, int], list[float]] = {}
    for one in slices:
        assert one["dur"] > 0, one
        ends, end = open_until.setdefault((one["pid"], one["tid"]), []), one["ts"] + one["dur"]
        while ends and ends[-1] <= one["ts"] + CLOSE:
            ends.pop()
        assert not ends or end <= ends[-1] + CLOSE, one
        ends.append(end)


def _arrows(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The slices that each arrow leads from and to: every start has one end, and each lies in a slice of its track."""
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "X":
            assert event["ph"] not in ends.setdefault(event["id"], {}), event
            ends[event["id"]][event["ph"]] = event
    for both in ends.values():
        assert both.keys() == {"s", "f"}, both
        yield _around(both["s"], events), _around(both["f"], events)


def _around(end: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(
        one
        for one in events
        if one["ph"] == "X"
        and (one["pid"], one["tid"]) == (end["pid"], end["tid"])
        and one["ts"] - CLOSE <= end["ts"] <= one["ts"] + one["dur"] + CLOSE
    )
