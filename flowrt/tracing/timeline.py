"""What processes noted, as events of the Trace Event format that ui.perfetto.dev and chrome://tracing read.

Law: pure. Everything is a complete event (``X``) on a track of its process; on one track, slices follow one another or
lie inside one another, and stand in the order in which they begin. What may overlap (steps, waits, transfers) is laid
out on as many tracks as that takes. An arrow (``s``, ``f``) leads from a value's leaving to its coming, and is there
only where both were noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from flowrt.tracing.clocks import Alignment

Event: TypeAlias = "dict[str, Any]"

# by kind: the tracks of what is not done on one thread, in the order in which they are shown
GROUPS = {
    "step": "steps",
    "version": "versions",
    "wait": "waits",
    "recv": "received",
    "hear": "received",
    "send": "sent",
    "post": "sent",
}
ORDER = ("steps", "versions", "waits", "received", "sent")
CATEGORIES = {"hear": "recv", "post": "send"}
LEAVING, COMING = frozenset({"send", "post"}), frozenset({"recv", "hear"})


@dataclass(slots=True, eq=False)
class ProcessNotes:
    """What one process noted: descriptions, notes of `sched.host.tracer`, and what its clock is to ours."""

    task: str
    descriptions: list[Any] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)
    alignment: Alignment = field(default_factory=Alignment)
    dropped: int = 0


@dataclass(slots=True, eq=False)
class _Slice:
    process: int
    group: str
    name: str
    category: str
    began: int
    ended: int
    args: dict[str, Any] = field(default_factory=dict)
    flow: tuple[str, bool] | None = None  # which value, and whether it leaves here
    track: int = -1


def events(processes: Sequence[ProcessNotes], began: int) -> Iterator[Event]:
    """The events of all processes; ``began`` is the moment that is 0, by the clock here."""
    slices = [made for number, process in enumerate(processes) for made in _slices(number, process)]
    pairs = _pair(slices)
    slices.sort(key=lambda s: (s.process, s.group, s.began, -s.ended))
    tracks = _lay(slices)
    yield from _names(processes, tracks)
    arrows = {id(end): (phase, n) for n, pair in enumerate(pairs) for phase, end in zip("sf", pair, strict=True)}
    told = [event for one in slices for event in _told(one, arrows.get(id(one)), began)]
    yield from sorted(told, key=lambda event: (event["pid"], event["tid"], event["ts"]))


# ── what notes come to ───────────────────────────────────────────────────────────────────────────────────────────────


def _slices(number: int, process: ProcessNotes) -> Iterator[_Slice]:
    here = process.alignment.here
    for kind, track, description, there, ended, step, about in process.notes:
        told: Any = None if description < 0 else process.descriptions[description]
        whole = _Slice(number, GROUPS.get(kind, track), "", CATEGORIES.get(kind, kind), here(there), here(ended))
        whole.ended = max(whole.ended, whole.began + 1)
        if kind == "tape":
            yield from _tape(whole, told, step, about, here)
            continue
        args = {"step": None if step < 0 else step, **_described(told), **about}
        flow, whole.name = args.pop("flow", None), str(args.pop("name"))
        if flow is not None:
            whole.flow = flow, kind in LEAVING
        if kind == "step":
            args["fetches"], whole.name = whole.name, f"step {step}"
        whole.args = args
        yield whole


def _described(told: Any) -> dict[str, Any]:
    if isinstance(told, tuple):
        name, op, shapes, line = told
        return {"name": name, "op": op, "shapes": shapes, "line": line}
    return dict(told) if isinstance(told, Mapping) else {"name": told or ""}


def _tape(
    whole: _Slice, told: Mapping[str, Any], step: int, about: Mapping[str, Any], here: Callable[[int], int]
) -> Iterator[_Slice]:
    """A run of a tape, and its launches on whichever threads they ran."""
    launches = told["launches"]
    whole.name, whole.args = told["name"], {"step": step, "line": told["line"], "launches": len(launches)}
    yield whole
    if "stamps" in about:
        runs = _stamped(about["stamps"], whole.group, here)
    else:
        runs = _in_turn(np.frombuffer(about.get("times", b""), np.int64), launches, whole)
    for launch, count, track, start, stop in runs:
        (name, op, shapes, line), *others = launches[launch]
        args = {"step": step, "op": op, "shapes": shapes, "line": line, "tape": whole.name, "launch": launch}
        args |= {"launches": count if count > 1 else None, "also": ", ".join(other[0] for other in others)}
        yield _Slice(whole.process, track, name, "launch", start, max(stop, start + 1), args)


Run: TypeAlias = "tuple[int, int, str, int, int]"


def _in_turn(times: Any, launches: Sequence[Any], tape: _Slice) -> Iterator[Run]:
    """The launches of a tape that one thread ran: those of one node after another are told as one."""
    if len(times) != len(launches) or not len(launches):
        return
    left = max(0, tape.ended - tape.began - int(times.sum()))
    gaps = left * np.arange(1, len(times) + 1) // (len(times) + 1)
    stops = (tape.began + np.cumsum(times) + gaps).tolist()
    starts = (np.array(stops) - times).tolist()
    first = 0
    for launch in range(1, len(launches) + 1):
        if launch == len(launches) or launches[launch] != launches[first]:
            yield first, launch - first, tape.group, starts[first], stops[launch - 1]
            first = launch


def _stamped(stamps: bytes, track: str, here: Callable[[int], int]) -> Iterator[Run]:
    """The chunks of a tape that several threads shared."""
    for launch, lane, start, stop in np.frombuffer(stamps, np.int64).reshape(-1, 4).tolist():
        yield launch, 1, track if lane == 0 else f"helper {lane}", here(start), here(stop)


# ── tracks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Tracks:
    """The tracks of one group of a process: by number, when what lies open on each will end, the innermost last."""

    def __init__(self, nested: bool) -> None:
        self._nested = nested
        self._ends: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def lay(self, began: int, ended: int, fresh: int) -> int:
        """The track for the next slice: one where nothing is in its way, or the ``fresh`` one."""
        for track, ends in self._ends.items():
            while ends and ends[-1] <= began:
                ends.pop()
            if not ends or (self._nested and ends[-1] >= ended):
                ends.append(ended)
                return track
        self._ends[fresh] = [ended]
        return fresh


def _lay(slices: Iterable[_Slice]) -> dict[tuple[int, int], str]:
    """Give every slice a track, and answer what each track of each process is called.

    They come by process and group, in the order in which they begin, the longest first.
    """
    groups: dict[tuple[int, str], _Tracks] = {}
    named: dict[tuple[int, int], str] = {}
    count: dict[int, int] = {}
    for one in slices:
        tracks = groups.setdefault((one.process, one.group), _Tracks(nested=one.group not in ORDER))
        fresh = count.get(one.process, 0) + 1
        one.track = tracks.lay(one.began, one.ended, fresh)
        if one.track == fresh:
            count[one.process] = fresh
            named[one.process, fresh] = one.group if len(tracks) == 1 else f"{one.group} {len(tracks)}"
    return named


def _names(processes: Sequence[ProcessNotes], tracks: Mapping[tuple[int, int], str]) -> Iterator[Event]:
    for number, process in enumerate(processes):
        yield _about(number, 0, "process_name", name=process.task)
        yield _about(number, 0, "process_sort_index", sort_index=number)
        if process.alignment.uncertainty:
            yield _about(number, 0, "process_labels", labels=f"clock ±{process.alignment.uncertainty / 1e6:.3f} ms")
    for (number, track), name in tracks.items():
        yield _about(number, track, "thread_name", name=name)
        first = next((place for place, group in enumerate(ORDER) if name.startswith(group)), len(ORDER))
        yield _about(number, track, "thread_sort_index", sort_index=100 * first + track)


def _about(process: int, track: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "ts": 0, "pid": process + 1, "tid": track, "name": what, "args": args}


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pair(slices: Iterable[_Slice]) -> list[tuple[_Slice, _Slice]]:
    """The leaving and the coming of each value; a message that came shows how long it was under way."""
    ends: dict[str, tuple[list[_Slice], list[_Slice]]] = {}
    for one in slices:
        if one.flow is not None:
            ends.setdefault(one.flow[0], ([], []))[not one.flow[1]].append(one)
    pairs = []
    for leaving, coming in ends.values():
        for left, came in zip(leaving, coming, strict=False):
            pairs.append((left, came))
            if came.ended - came.began <= 1:
                came.began = min(left.began, came.began)
    return pairs


def _told(one: _Slice, arrow: tuple[str, int] | None, zero: int) -> Iterator[Event]:
    where = {"pid": one.process + 1, "tid": one.track}
    began, ended = one.began - zero, one.ended - zero
    args = {name: value for name, value in one.args.items() if value not in ("", None)}
    yield {
        "ph": "X",
        "ts": began / 1e3,
        "dur": (ended - began) / 1e3,
        **where,
        "name": one.name,
        "cat": one.category,
        "args": args,
    }
    if arrow is not None:
        phase, identity = arrow
        at = began if phase == "s" else ended - 1
        yield {
            "ph": phase,
            "ts": at / 1e3,
            **where,
            "id": identity,
            "name": "transfer",
            "cat": "transfer",
            **({"bp": "e"} if phase == "f" else {}),
        }
