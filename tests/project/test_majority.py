"""A policy written by a user, in one file of examples/: what it decides, here and on nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from places import ROOT

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EXAMPLES = str(ROOT / "examples")
INPUTS = {"x": fr.Spec("float32", (None, 2)), "y": fr.Spec("float32", (None,))}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, found as a script beside it finds it."""
    monkeypatch.setattr(sys, "path", [EXAMPLES, *sys.path])
    return import_module("majority")


def offered(*replicas: int) -> tuple[fr.train.Offer, ...]:
    return tuple(fr.train.Offer(replica, 0.1) for replica in replicas)


def test_more_than_half_of_those_who_are_not_lost_decide(example: Any) -> None:
    majority = example.Majority()
    assert majority.decide(offered(3), (0, 1, 2, 4), 9.0) == fr.train.WaitUntil(offers=3)
    assert majority.decide(offered(3, 0), (1, 2), 9.0) == fr.train.WaitUntil(offers=3)
    assert majority.decide(offered(3, 0, 4), (1, 2), 0.1) == fr.train.Close((3, 0, 4), "3 of 5 are there")
    assert majority.decide(offered(3, 0), (1,), 0.1) == fr.train.Close((3, 0), "2 of 3 are there"), "two were lost"
    assert majority.decide(offered(3), (), 0.1) == fr.train.Close((3,), "1 of 1 are there")


def batches() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(5)
    while True:
        x = rng.normal(size=(8, 2)).astype(np.float32)
        yield {"x": x, "y": x @ np.float32([2.0, -1.0])}


def loss_fn(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
    w = fr.Variable(np.zeros((2,), np.float32), name="w")
    return fr.mean(fr.square(fr.sum(inputs["x"] * w, axis=1) - inputs["y"]))


@asynccontextmanager
async def training(policy: Any, cluster: fr.LocalCluster | None) -> AsyncIterator[Any]:
    where = {"server_device": "", "worker_device": ""} if cluster is None else {}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(loss_fn, INPUTS, fr.optim.SGD(0.1), replicas=3, policy=policy, **where)
    async with fr.Session(graph, cluster=cluster) as session:
        yield trainer.steps(session, batches())


async def learns(policy: Any, cluster: fr.LocalCluster | None) -> None:
    async with training(policy, cluster) as reports:
        losses = []
        async for report in reports:
            assert len(report.kept) in (2, 3)
            assert report.why == f"{len(report.kept)} of 3 are there"
            losses.append(report.loss)
            if report.step == 30:
                break
    assert losses[-1] < 0.1 * losses[0]


async def test_it_trains_in_a_process_of_its_own(example: Any) -> None:
    await learns(example.Majority(), None)


async def test_it_trains_on_nodes_that_import_it(example: Any) -> None:
    async with fr.LocalCluster(ps=1, worker=3, imports=["majority"]) as cluster:
        await learns(example.Majority(), cluster)


async def test_nodes_that_do_not_know_it_say_how_to_bring_it(example: Any) -> None:
    async with fr.LocalCluster(ps=1, worker=3) as cluster, training(example.Majority(), cluster) as reports:
        with pytest.raises(fr.GraphError, match=r"a policy named Majority is not known here.*imports=\[MODULE\]"):
            await anext(reports)


async def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(fr.ResourceError, match=r"/job:worker/task:0 did not start: cannot import 'no_such.module'.*"):
        async with fr.LocalCluster(worker=1, imports=["no_such.module"]):
            pass


@pytest.mark.parametrize("imports", ["majority", [5], [""]])
def test_imports_are_names_of_modules(imports: Any) -> None:
    with pytest.raises(fr.GraphError, match=r"test_majority.py:\d+: imports names modules"):
        fr.LocalCluster(worker=1, imports=imports)
