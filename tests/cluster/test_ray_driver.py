"""A process that Ray is to have as a driver: it waits no longer than it is told, and hears what to do."""

from __future__ import annotations

import asyncio
import re
import socket
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

    def init(self, address: str | None, **_: Any) -> None:
        self.asked.append(address)
        if self.error is not None:
            raise self.error


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


async def test_who_listens_and_refuses_may_want_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = FakeRay(ConnectionError("Failed to connect to Ray cluster"))
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", where)
        with pytest.raises(ResourceError, match=f"at {where} is no Ray, or does not let .* set RAY_AUTH_MODE=token"):
            await connect_to_ray(refusing, None, 60.0)
    assert refusing.asked == [None]


async def test_what_ray_itself_says_of_a_token_is_passed_on() -> None:
    with pytest.raises(ResourceError, match=r"test_ray_driver\.py:\d+: no authentication token was found"):
        await connect_to_ray(FakeRay(RayError("no authentication token was found")), "local", 1.0)


async def test_where_no_ray_is_known_the_error_says_so() -> None:
    with pytest.raises(ResourceError, match="no Ray answers at auto: none was found"):
        await connect_to_ray(FakeRay(ConnectionError("none was found")), "auto", 1.0)
