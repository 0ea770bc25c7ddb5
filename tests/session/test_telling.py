"""What things say they are: short, and always, also when they are closed or half made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.session.awaited import awaited_session
from flowrt.session.step import CompiledStep
from flowrt.train import StepReport


def small() -> tuple[fr.Graph, fr.Tensor, fr.Tensor]:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None,), name="x")
        y = fr.multiply(x, 2, name="y")
    return graph, x, y


async def test_a_session_and_its_step_say_where_they_run_and_whether_they_are_open() -> None:
    graph, x, y = small()
    session = fr.Session(graph)
    assert repr(session) == "<fr.Session of 3 nodes in this process, not open yet>"
    async with session:
        step = session.compile([y], feeds=[x])
        assert repr(session) == "<fr.Session of 3 nodes in this process, open>"
        assert repr(step) == f"<the step that fetches 'y:0', of {session!r}>"
    assert repr(session) == "<fr.Session of 3 nodes in this process, closed>"
    assert "closed" in repr(step)


def test_a_blocking_session_says_so_too() -> None:
    graph, _, _ = small()
    with fr.BlockingSession(graph) as session:
        assert repr(session) == "<fr.BlockingSession of 3 nodes in this process, open>"
    assert repr(session) == "<fr.BlockingSession of 3 nodes in this process, closed>"
    with pytest.raises(fr.GraphError, match=r"not an fr\.BlockingSession"):
        awaited_session(session, "this")


def test_a_cluster_tells_its_tasks_by_job() -> None:
    cluster = fr.LocalCluster(ps=1, worker=3)
    assert repr(cluster) == "<fr.LocalCluster ps=1, worker=3, not open>"
    assert repr(fr.Session(small()[0], cluster=cluster)) == f"<fr.Session of 3 nodes on {cluster!r}, not open yet>"
    spec = fr.ClusterSpec({"ps": ["127.0.0.1:7001"]})
    assert "127.0.0.1:7001" in repr(spec)


def test_an_optimiser_tells_its_settings() -> None:
    assert repr(fr.optim.SGD(0.1)) == "<fr.optim.SGD lr=0.1>"
    assert repr(fr.optim.Momentum(0.1, 0.9)) == "<fr.optim.Momentum lr=0.1, momentum=0.9, nesterov=False>"


def test_what_lives_in_a_graph_tells_its_name() -> None:
    with fr.Graph():
        assert repr(fr.Variable(np.zeros((2, 3), "float32"), name="w")) == "<Variable 'w' float32[2,3]>"
        assert repr(fr.FIFOQueue(4, "float32", (), name="q")) == "<FIFOQueue 'q' of (float32[])>"
        trainer = fr.train.Replicated(
            lambda inputs: fr.mean(inputs["x"] * fr.Variable(1.0)),
            {"x": fr.Spec("float32", (None,))},
            fr.optim.SGD(0.1),
            replicas=4,
            policy=fr.train.FirstOf(3),
        )
        shared = trainer.share(lambda inputs: inputs["x"] * fr.Variable(1.0), {"x": fr.Spec("float32", (None,))})
    assert repr(trainer) == f"<fr.train.Replicated 'replicated' of 4 replicas, {trainer.policy!r}>"
    assert repr(shared) == "<function of 'x' that shares a trainer's variables>"


def test_a_report_tells_what_became_of_the_updates_in_a_line() -> None:
    report = StepReport(12, 0.25, {}, (0, 2), (1,), (), (), 0.0123)
    assert repr(report) == "<step 12: loss 0.25, kept [0, 2], late [1], 0.0123 s>"


@pytest.mark.parametrize(
    "kind",
    [fr.Session, fr.BlockingSession, CompiledStep, fr.LocalCluster, fr.train.Replicated, fr.Checkpoints, StepReport],
)
def test_what_is_half_made_can_be_shown(kind: Any) -> None:
    assert repr(object.__new__(kind)) == f"<{kind.__name__}, not made>"
