"""Work beside other work: in which order it is begun, and whose error is raised."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowrt.finishing import pipelined

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


async def test_each_work_is_begun_once_the_one_before_waits_and_all_wait_at_once() -> None:
    begun: list[str] = []
    all_there = asyncio.Barrier(3)

    def works() -> Iterator[Coroutine[Any, Any, None]]:
        for name in "abc":
            yield work(name, [*begun])

    async def work(name: str, before: list[str]) -> None:
        assert before == begun
        begun.append(name)
        await all_there.wait()

    await pipelined(works())
    assert begun == ["a", "b", "c"]


async def test_the_first_error_ends_the_others_and_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("by nothing")

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    with pytest.raises(ZeroDivisionError, match="by nothing") as raised:
        await pipelined([wait(), fail()])
    assert ended == ["waiting"]
    assert raised.value.__suppress_context__
