"""A process that Ray is to have as a driver: it waits no longer than it is told, and hears what to do."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.base.errors import ResourceError
from flowrt.launch.ray_driver import connect_to_ray


class RayError(Exception):
    """One of Ray's own."""


class FakeRay:
    """A Ray whose `init` raises ``error``, if there is one."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[str | None] = []

    def shutdown(self) -> None:
        self.asked.append("shutdown")

    def init(self, address: str | None, **_: Any) -> None:
        self.asked.append(address)
        if self.error is not None:
            raise self.error


@pytest.fixture
async def listening() -> AsyncIterator[str]:
    """The address of one who listens."""
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def closed_port() -> int:
    """One at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


async def test_where_nobody_listens_ray_is_not_asked_and_the_error_says_what_to_do(closed_port: int) -> None:
    nobody = FakeRay()
    for scheme in ("", "ray://"):
        where = f"{scheme}127.0.0.1:{closed_port}"
        with pytest.raises(ResourceError) as caught:
            await connect_to_ray(nobody, where, 0.1)
        assert re.fullmatch(
            rf"\S+test_ray_driver\.py:\d+: no Ray answers at {where} within 0\.1 s: Connection refused; start one by "
            "`ray start --head`, or leave out address= and RAY_ADDRESS for one of this program's own",
            str(caught.value),
        )
    assert nobody.asked == []


async def test_a_ray_that_is_about_to_start_is_waited_for(closed_port: int) -> None:
    late = FakeRay()
    connecting = asyncio.create_task(connect_to_ray(late, f"127.0.0.1:{closed_port}", 60.0))
    await asyncio.sleep(0)
    assert late.asked == []
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", closed_port):
        await connecting
    assert late.asked == [f"127.0.0.1:{closed_port}"]


async def test_who_listens_and_refuses_may_want_a_token(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = FakeRay(ConnectionError("Failed to connect to Ray cluster"))
    monkeypatch.setenv("RAY_ADDRESS", listening)
    with pytest.raises(ResourceError, match=f"at {listening} is no Ray, or does not let .* set RAY_AUTH_MODE=token"):
        await connect_to_ray(refusing, None, 60.0)
    assert refusing.asked == [None]


async def test_what_ray_itself_says_of_a_token_is_passed_on() -> None:
    with pytest.raises(ResourceError, match=r"test_ray_driver\.py:\d+: no authentication token was found"):
        await connect_to_ray(FakeRay(RayError("no authentication token was found")), "local", 1.0)


async def test_where_no_ray_is_known_the_error_says_so() -> None:
    with pytest.raises(ResourceError, match="no Ray answers at auto: none was found"):
        await connect_to_ray(FakeRay(ConnectionError("none was found")), "auto", 1.0)


class SlowRay(FakeRay):
    """One whose `init` takes until the event loop, which it is not to hold up, has ``told`` it to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()
        self.began, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def init(self, address: str | None, **_: Any) -> None:
        super().init(address)
        self._loop.call_soon_threadsafe(self.began.set)
        if not self.told.wait(20):
            raise RayError("the event loop is held up")


async def test_a_ray_that_takes_long_to_answer_holds_up_no_event_loop(listening: str) -> None:
    slow = SlowRay()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(connect_to_ray(slow, listening, 60.0))
        await slow.began.wait()
        slow.told.set()
    assert slow.asked == [listening]


async def test_who_is_cancelled_while_ray_answers_is_no_driver_of_it(listening: str) -> None:
    slow = SlowRay()
    connecting = asyncio.create_task(connect_to_ray(slow, listening, 60.0))
    async with asyncio.timeout(30):
        await slow.began.wait()
        connecting.cancel()
        slow.told.set()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    assert slow.asked == [listening, "shutdown"]
