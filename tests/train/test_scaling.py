"""A loss whose scale replicas share: which versions move nothing, on which servers, and what becomes of the scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import flowrt as fr

SCALE, GROW_EVERY = 2.0**10, 3
Batch = dict[str, np.ndarray[Any, Any]]


def build(replicas: int, policy: Any, where: Sequence[str], worker: str) -> tuple[fr.Graph, Any, fr.LossScaled]:
    """A model with a matrix and a table of which rows are taken, each on a server of its own."""

    def loss_fn(inputs: dict[str, Any]) -> Any:
        w = fr.Variable(np.ones((3, 2), np.float32), name="w")
        table = fr.Variable(np.ones((4, 2), np.float32), name="table")
        return fr.sum(fr.square(inputs["x"] @ w)) + fr.sum(fr.take(table, [1, 2]) * fr.sum(inputs["x"]))

    scaled = fr.LossScaled(fr.optim.Adam(0.01), SCALE, grow_every=GROW_EVERY)
    with fr.Graph(seed=1) as graph:
        trainer = fr.train.Replicated(
            loss_fn,
            inputs={"x": fr.Spec("float32", (None, 3))},
            optimizer=scaled,
            replicas=replicas,
            policy=policy,
            servers=len(where),
            server_device=where,
            worker_device=worker,
        )
    return graph, trainer, scaled


def batches(count: int, ill: Sequence[int]) -> Iterator[Batch]:
    """Of these the gradients are not finite."""
    for number in range(count):
        yield {"x": np.full((2, 3), np.inf if number in ill else 0.1, np.float32)}


def scales(skipped: Sequence[bool]) -> list[float]:
    """What the scale comes to after each version."""
    scale, well, found = SCALE, 0, []
    for skips in skipped:
        scale, well = (scale / 2, 0) if skips else (scale * 2, 0) if well + 1 == GROW_EVERY else (scale, well + 1)
        found.append(scale)
    return found


@pytest.mark.parametrize("policy", [fr.train.AllOf(), fr.train.Deadline(30.0)], ids=["all", "any number"])
async def test_a_version_with_an_update_that_is_not_finite_moves_nothing_on_any_server(policy: Any) -> None:
    graph, trainer, scaled = build(2, policy, ("cpu:0", "cpu:0"), "cpu:0")
    assert scaled.variable is not None
    counts = ("replicated/skipped", "replicated/skipped_1")
    async with fr.Session(graph) as session:
        names = {v.name: v for v in graph.variables}
        kept = [v for n, v in names.items() if not n.startswith(("loss_scale", "replicated/"))]
        before, moved, skipped, told = await session.run(kept), [], [], []
        async with aclosing(trainer.steps(session, batches(16, ill=(4, 7, 11)))) as reports:
            async for report in reports:
                after = await session.run(kept)
                moved.append([bool((one != other).any()) for one, other in zip(before, after, strict=True)])
                before = after
                skipped.append(report.skipped)
                told.append(float(await session.run(scaled.variable)))
                assert report.kept == (0, 1)
                assert ("skipped" in repr(report)) == report.skipped
        assert skipped == [False, False, True, True, False, True, False, False]
        assert [set(each) for each in moved] == [{not skips} for skips in skipped]
        assert told == scales(skipped)
        assert [int(await session.run(names[name])) for name in counts] == [3, 3]


@pytest.mark.timeout(120)
async def test_servers_skip_the_same_versions_whichever_updates_make_them() -> None:
    where = [f"/job:ps/task:{n}" for n in range(2)]
    graph, trainer, scaled = build(3, fr.train.FirstOf(2), where, "/job:worker/task:{}")
    ill = range(0, 60, 7)
    async with fr.LocalCluster(ps=2, worker=3) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with aclosing(trainer.steps(session, batches(60, ill))) as reports:
            found = [report async for report in reports]
        assert scaled.variable is not None
        names = {v.name: v for v in graph.variables}
        counts = [int(await session.run(names[name])) for name in ("replicated/skipped", "replicated/skipped_1")]
        scale = float(await session.run(scaled.variable))
    wanted = [any(n in ill for r in report.kept for n in report.batches[r]) for report in found]
    assert [report.skipped for report in found] == wanted
    assert counts == [sum(wanted)] * 2
    assert scale == scales(wanted)[-1]
