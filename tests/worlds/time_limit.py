"""A limit of time that coroutines, too, cannot outlast.

The alarm of pytest-timeout is raised wherever the program is: in a callback of an event loop, which logs it, and goes
on. It came once, and a test whose loop was busy hung on. So a coroutine is cancelled a little before, at the line where
it waits, and what then cleans up a little after; the alarm comes again, and for what is torn down after a failure anew.
"""

from __future__ import annotations

import functools
import inspect
import signal
from asyncio import timeout
from collections.abc import Awaitable, Callable, Generator
from time import monotonic
from typing import Any

import pytest

PART = 0.9  # of the limit, which fixtures are counted in, until a coroutine is cancelled
AGAIN = 2.0  # seconds until what it cleans up is, and between alarms
SETTINGS = pytest.StashKey[Any]()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    answer = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN)
    if SETTINGS not in item.stash and isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = _ending(item.obj, monotonic() + PART * settings.timeout)
    item.stash[SETTINGS] = settings
    return answer


def _ending(test: Callable[..., Awaitable[None]], end: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def ends_in_time(**fixtures: Any) -> None:
        left = end - monotonic()
        async with timeout(left + AGAIN), timeout(left):
            await test(**fixtures)

    return ends_in_time


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """An alarm while a failure is written down would end the whole run."""
    if call.excinfo is not None and SETTINGS in item.stash:
        item.config.hook.pytest_timeout_cancel_timer(item=item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if SETTINGS in item.stash and not signal.getitimer(signal.ITIMER_REAL)[0]:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[SETTINGS])
