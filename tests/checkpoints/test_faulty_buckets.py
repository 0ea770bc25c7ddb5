"""A bucket that refuses, answers late, or stops in mid-answer, while a checkpoint is saved or restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from bucket_world import bucket_served
from faulty_bucket import Fault, FaultyBucket, faulty

import flowrt as fr
from flowrt.base.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with bucket_served() as url:
        yield url


@pytest.fixture
def bucket(served: str) -> Iterator[FaultyBucket]:
    with faulty() as made:
        yield made


def model() -> Any:
    with fr.Graph() as graph:
        v = fr.Variable(np.zeros(100_000), name="v")
        bump = v.assign_add(fr.ones((100_000,), "float64"))
    return graph, v, bump


@pytest.mark.parametrize(
    ("fault", "what"),
    [("refused", "variables"), ("cut", "variables"), ("unanswered", "manifest"), ("slow", "variables")],
)
async def test_a_save_of_which_requests_fail_is_an_error_and_the_one_before_stays(
    fault: Fault, what: str, bucket: FaultyBucket, served: str
) -> None:
    graph, v, bump = model()
    url = f"{served}/saved/{fault}/{what}"
    async with fr.Session(graph, checkpoints=fr.Checkpoints(url)) as session:
        await session.run(bump)
        assert await session.save() == 1
        await session.run(bump)
        bucket.fault = lambda method, path: fault if method in ("PUT", "POST") and what in path else ""
        if fault == "slow":
            assert await session.save() == 2
        else:
            with pytest.raises(CheckpointError, match=f"the checkpoint of step 2 was not saved in {url}: "):
                await session.save()
            assert [step for _, step in session.checkpoints.saves()] == [1]  # type: ignore[union-attr]
            await session.run(bump)
            assert await session.restore() == 1
            assert ((await session.run(v)) == 1).all()
        bucket.fault = lambda method, path: ""
        await session.run(bump)
        assert await session.save() == (3 if fault == "slow" else 2)
    async with fr.Session(graph, checkpoints=fr.Checkpoints(url)) as session:
        assert ((await session.run(v)) == (3 if fault == "slow" else 2)).all()


@pytest.mark.parametrize(("fault", "what"), [("refused", "manifest"), ("cut", "variables"), ("slow", "variables")])
async def test_a_restore_of_which_requests_fail_is_an_error_and_succeeds_once_they_do(
    fault: Fault, what: str, bucket: FaultyBucket, served: str
) -> None:
    graph, v, bump = model()
    url = f"{served}/restored/{fault}/{what}"
    async with fr.Session(graph, checkpoints=fr.Checkpoints(url)) as session:
        await session.run(bump)
        await session.save()
        await session.run(bump)
        bucket.fault = lambda method, path: fault if method == "GET" and what in path else ""
        if fault == "slow":
            assert await session.restore() == 1
        else:
            with pytest.raises(CheckpointError):
                await session.restore()
            assert ((await session.run(v)) == 2).all()
        bucket.fault = lambda method, path: ""
        assert await session.restore() == 1
        assert ((await session.run(v)) == 1).all()
