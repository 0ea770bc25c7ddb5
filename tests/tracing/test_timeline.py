"""What notes become: tracks, slices, arrows."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

from flowrt.tracing.clocks import Alignment, ClockSample
from flowrt.tracing.timeline import ProcessNotes, events

TAPE = {"name": "tape", "line": "a.py:1", "launches": ((("x", "matmul", "", "a.py:2"),), (("y", "add", "", "a.py:3"),))}


def slices(*processes: ProcessNotes, began: int = 0) -> list[tuple[Any, ...]]:
    """(process, track's name, name, begin, end) of each slice, in nanoseconds."""
    told = list(events(processes, began))
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in told if e["name"] == "thread_name"}
    return [
        (e["pid"], tracks[e["pid"], e["tid"]], e["name"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3))
        for e in told
        if e["ph"] == "X"
    ]


def test_launches_of_a_tape_follow_one_another_with_what_is_left_between_them() -> None:
    times = np.array([30, 40], np.int64).tobytes()
    process = ProcessNotes("here", [TAPE], [("tape", "main", 0, 1000, 1100, 7, {"times": times})])
    assert slices(process, began=1000) == [
        (1, "main", "tape", 0, 100),
        (1, "main", "x", 10, 40),
        (1, "main", "y", 50, 90),
    ]


def test_launches_of_one_node_are_told_as_one() -> None:
    tape = TAPE | {"launches": (TAPE["launches"][0], TAPE["launches"][0], TAPE["launches"][1])}
    times = np.array([30, 40, 20], np.int64).tobytes()
    process = ProcessNotes("here", [tape], [("tape", "main", 0, 0, 90, 7, {"times": times})])
    assert [one[2:] for one in slices(process)] == [("tape", 0, 90), ("x", 0, 70), ("y", 70, 90)]


def test_chunks_of_a_shared_tape_are_on_the_tracks_of_their_threads() -> None:
    stamps = np.array([[0, 0, 10, 20], [0, 1, 12, 25], [1, 1, 25, 40]], np.int64).tobytes()
    process = ProcessNotes("here", [TAPE], [("tape", "main", 0, 0, 50, 7, {"stamps": stamps})])
    assert slices(process) == [
        (1, "helper 1", "x", 12, 25),
        (1, "helper 1", "y", 25, 40),
        (1, "main", "tape", 0, 50),
        (1, "main", "x", 10, 20),
    ]


def test_what_overlaps_is_laid_out_side_by_side() -> None:
    steps = [("step", "", -1, begin, begin + 30, n, {}) for n, begin in enumerate((0, 10, 30, 35))]
    assert slices(ProcessNotes("here", [], steps)) == [
        (1, "steps", "step 0", 0, 30),
        (1, "steps", "step 2", 30, 60),
        (1, "steps 2", "step 1", 10, 40),
        (1, "steps 3", "step 3", 35, 65),
    ]


def test_slices_on_a_track_never_cross() -> None:
    rng = random.Random(3)
    notes = []
    for number in range(400):
        begin = rng.randrange(10_000)
        kind, track = rng.choice([("node", "lane 0"), ("node", "lane 1"), ("wait", ""), ("step", "")])
        notes.append((kind, track, -1, begin, begin + rng.randrange(1, 500), number, {"name": str(number)}))
    by_track: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for process, track, _, begin, end in slices(ProcessNotes("here", [], notes)):
        by_track.setdefault((process, track), []).append((begin, end))
    assert sum(map(len, by_track.values())) == 400
    for (_, track), laid in by_track.items():
        for (begin, end), (other, stop) in itertools.pairwise(laid):
            assert begin <= other
            assert other >= end or (stop <= end and track.startswith("lane"))


def test_an_arrow_leads_from_a_send_to_its_receive_and_from_no_other() -> None:
    def moved(kind: str, begin: int, flow: str) -> Any:
        return (kind, "", -1, begin, begin + 10, 1, {"flow": flow, "name": kind})

    here = ProcessNotes("here", [], [moved("send", 0, "1/a"), moved("send", 20, "1/b")])
    there = ProcessNotes("there", [], [moved("recv", 30, "1/a"), moved("recv", 50, "1/c")])
    arrows = [(e["ph"], e["pid"], e["id"], round(e["ts"] * 1e3)) for e in events([here, there], 0) if e["ph"] in "sf"]
    assert arrows == [("s", 1, 0, 0), ("f", 2, 0, 39)]


def test_a_message_that_came_shows_how_long_it_was_under_way() -> None:
    here = ProcessNotes("here", [], [("post", "", -1, 100, 100, 1, {"flow": "m", "name": "update"})])
    there = ProcessNotes("there", [], [("hear", "", -1, 400, 400, 1, {"flow": "m", "name": "update"})])
    assert slices(here, there) == [(1, "sent", "update", 100, 101), (2, "received", "update", 100, 401)]


def test_another_clock_is_read_as_ours() -> None:
    ahead = Alignment([ClockSample(at=0, ahead=5000, uncertainty=10)])
    process = ProcessNotes("there", [], [("step", "", -1, 5100, 5200, 1, {})], ahead)
    assert slices(process) == [(1, "steps", "step 1", 100, 200)]
    labels = [event["args"] for event in events([process], 0) if event["name"] == "process_labels"]
    assert labels == [{"labels": "clock ±0.000 ms"}]
