"""What nodes take, of a trace: as a plain sum over its launches has it, and as placing by prediction takes it."""

from __future__ import annotations

import gzip
import json
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from pathlib import Path


def trace(path: Path, threads: int) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (64, 256), name="x")
        h = x
        for layer in range(3):
            with fr.name_scope(f"layer{layer}"):
                h = fr.tanh(h @ fr.Variable(np.full((256, 256), 1e-2, "float32"), name="w"))
        loss = fr.mean(h)
    batch = np.ones((64, 256), "float32")
    with fr.BlockingSession(graph, options=fr.Options(threads=threads)) as session:
        session.run(loss, {x: batch})
        with session.tracing(path):
            for _ in range(4):
                session.run(loss, {x: batch})


def launches(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("cat") == "launch"]


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_of_one_thread_the_launches_of_each_step_add_up(tmp_path: Path, name: str) -> None:
    trace(tmp_path / name, threads=1)
    steps: dict[str, dict[int, float]] = {}
    for event in launches(tmp_path / name):
        by_step = steps.setdefault(event["name"], {})
        by_step[event["args"]["step"]] = by_step.get(event["args"]["step"], 0.0) + event["dur"] / 1e6
    found = fr.placement.profile_of(tmp_path / name)
    assert found == pytest.approx({node: median(taken.values()) for node, taken in steps.items()}, rel=1e-3, abs=1e-8)
    assert {node.split("/")[0] for node in found} >= {"layer0", "layer1", "layer2"}


def test_threads_that_share_a_launch_count_from_the_first_to_the_last(tmp_path: Path) -> None:
    made = [
        {"name": "product", "cat": "launch", "ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": about}
        for about in ({"step": 1, "tape": "t", "launch": 0}, {"step": 2, "tape": "t", "launch": 0})
        for tid, ts, dur in ((1, 100.0, 50.0), (2, 120.0, 60.0))
    ]
    other = {"name": "tape", "cat": "tape", "ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 9.0, "args": {"step": 1}}
    (tmp_path / "step.json").write_text(json.dumps({"traceEvents": [*made, other]}))
    assert fr.placement.profile_of(tmp_path / "step.json") == pytest.approx({"product": 80e-6})


def test_prediction_takes_what_was_measured(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        ends = [
            fr.sum(fr.constant(np.ones((8, 8), "float32")) @ fr.Variable(np.ones((8, 8), "float32")), name=f"end{n}")
            for n in range(2)
        ]
        fr.add(*ends)
    with fr.BlockingSession(graph, placement=fr.placement.Auto(profile={"end?": 0.25})) as session:
        assert "µs on one device 5000" in str(session.explain(ends))


def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path) -> None:
    odd = [3, {"cat": "launch", "name": 5, "args": {"step": 1}, "pid": 1, "ts": 1, "dur": 1}]
    others = [json.dumps({"traceEvents": [event]}) for event in odd]
    for text in ("", "[]", '{"traceEvents": [{"cat": "launch"}]}', *others):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(fr.GraphError, match=r"other\.json is no trace of session\.tracing"):
            fr.placement.profile_of(tmp_path / "other.json")
    with pytest.raises(fr.GraphError, match="missing"):
        fr.placement.profile_of(tmp_path / "missing.json")
