"""A policy gets ready for a version before it is asked about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError
from flowrt.train import Close, Policy, WaitUntil

said: list[str] = []


@dataclass(frozen=True)
class NotesWhatItPrepares(Policy):
    """Waits for all, and notes what it is called for."""

    fails: bool = False

    def decide(self, offers: Any, able: Any, now: float) -> Any:
        said.append("decide")
        return WaitUntil(offers=2) if len(offers) < 2 else Close((0, 1))

    def prepare(self) -> None:
        said.append("prepare")
        if self.fails:
            raise ValueError("not today")


def batches() -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": np.ones((4, 3), np.float32)}


async def train(policy: Policy, steps: int) -> None:
    """So many steps by two replicas, in this process."""
    inputs = {"x": fr.Spec("float32", (4, 3))}

    def loss_fn(given: dict[str, fr.Tensor]) -> Any:
        return fr.mean(fr.square(given["x"] @ fr.Variable(np.zeros((3, 1), np.float32), name="w") - 1.0))

    said.clear()
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(
            loss_fn, inputs, fr.optim.SGD(0.1), 2, policy=policy, server_device="", worker_device=""
        )
    async with asyncio.timeout(60), fr.Session(graph) as session:
        async for report in trainer.steps(session, batches()):
            if report.step == steps:
                break


async def test_it_prepares_once_for_each_version_but_the_first() -> None:
    await train(NotesWhatItPrepares(), 6)
    assert said[0] == "decide"
    assert said.count("prepare") >= 5
    assert all(before != "prepare" for before, each in pairwise(said) if each == "prepare")


async def test_what_fails_in_it_ends_the_run_and_says_where() -> None:
    with pytest.raises(GraphError, match=r"test_preparing.py:\d+: .*failed in prepare: ValueError: not today"):
        await train(NotesWhatItPrepares(fails=True), 6)
