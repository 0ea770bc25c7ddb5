"""Several things awaited at once, of which the first that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def await_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all answer, in their order. Raises the first error, once the others have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def errors_in(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a task group, and of the groups in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += errors_in(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
