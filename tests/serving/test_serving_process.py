"""``python -m flowrt.serving``: a process that serves, drains, is killed, and says why it does not start."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from places import ROOT
from process_world import running
from programs import python
from serving_world import X, client_of, doubling

from flowrt.cluster.keys import main as keys
from flowrt.net.door.tokens import save_token

if TYPE_CHECKING:
    from pathlib import Path

SERVING = ["-m", "flowrt.serving"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@asynccontextmanager
async def started(*arguments: str, by: Sequence[str] = ()) -> AsyncIterator[tuple[Any, int]]:
    """A serving process, and the port that it listens at."""
    command = [*(by or python()), *SERVING, *arguments, "--bind", "127.0.0.1:0"]
    async with running(*command, env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        line = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"flowrt serving .* ready on 127\.0\.0\.1:(\d+)\n", line)
        assert found, line + (await process.stderr.read()).decode()
        yield process, int(found[1])


async def test_it_serves_files_by_name_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    doubling().save(tmp_path / "two.flowrt")
    doubling(by=3).save(tmp_path / "b.flowrt")
    async with started(str(tmp_path / "two.flowrt"), f"three={tmp_path / 'b.flowrt'}") as (process, port):
        async with client_of(port) as client:
            np.testing.assert_array_equal(await client.infer(X, "two"), X * 2 + 1)
            np.testing.assert_array_equal(await client.infer(X, "three"), X * 3 + 1)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert (await process.stderr.read()) == b""


@pytest.mark.usefixtures("interruptible")
async def test_what_was_asked_before_the_signal_is_answered(tmp_path: Path) -> None:
    doubling().save(tmp_path / "m.flowrt")
    async with (
        started(str(tmp_path / "m.flowrt"), "--max-delay", "3s") as (process, port),
        client_of(port) as client,
    ):
        asked = [asyncio.ensure_future(client.infer(X[i : i + 1])) for i in range(8)]
        while 'waiting_requests{model="m"} 8' not in await _metrics(client):
            pass
        process.send_signal(signal.SIGINT)
        answers = await asyncio.gather(*asked)
        np.testing.assert_array_equal(np.concatenate(answers), X[:8] * 2 + 1)
        assert await process.wait() == 0


async def _metrics(client: Any) -> str:
    async with client.session.get("/metrics") as answer:
        text: str = await answer.text()
        return text


async def test_a_killed_server_leaves_a_file_that_the_next_one_serves(tmp_path: Path) -> None:
    doubling().save(tmp_path / "m.flowrt")
    async with started(str(tmp_path / "m.flowrt"), by=[sys.executable]) as (process, port), client_of(port) as client:
        await client.infer(X)
        process.kill()
        await process.wait()
        with pytest.raises(aiohttp.ClientError):
            await client.infer(X)
    async with started(str(tmp_path / "m.flowrt")) as (_, port), client_of(port) as client:
        np.testing.assert_array_equal(await client.infer(X), X * 2 + 1)


async def test_with_keys_and_a_token_who_has_both_is_answered(tmp_path: Path) -> None:
    doubling().save(tmp_path / "m.flowrt")
    save_token(tmp_path / "token", "secret")
    assert keys([str(tmp_path / "keys"), "--hosts", "127.0.0.1"]) == 0
    (folder,) = {path.parent for path in (tmp_path / "keys").rglob("cert.pem")}
    own = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    stranger = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    own.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    arguments = [str(tmp_path / "m.flowrt"), "--tls", str(folder), "--token-file", str(tmp_path / "token")]
    async with started(*arguments) as (_, port), aiohttp.ClientSession() as session:
        url, token = f"https://127.0.0.1:{port}/v2/models/m", {"Authorization": "Bearer secret"}
        async with session.get(url, ssl=own, headers=token) as answer:
            assert answer.status == 200
        async with session.get(url, ssl=own) as answer:
            assert answer.status == 401
        with pytest.raises(aiohttp.ClientError):
            async with session.get(url, ssl=stranger, headers=token) as answer:
                await answer.read()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.flowrt"], "No such file"),
        (["m.flowrt", "m.flowrt"], "of different names"),
        (["a=m.flowrt", "a=m.flowrt"], "two models are called 'a'"),
        (["m.flowrt", "--bind", "0.0.0.0:0"], "give --token-file or --tls"),
        (["m.flowrt", "--max-batch", "0"], "max_batch is a number from 1 up"),
        (["m.flowrt", "--token-file", "none"], "cannot read the token file"),
        (["m.flowrt", "--bind", "8500"], "is not HOST:PORT"),
        (["m.flowrt", "--max-delay", "2"], "is no time"),
    ],
)
def test_what_keeps_it_from_starting_is_said(arguments: list[str], text: str, tmp_path: Path) -> None:
    doubling().save(tmp_path / "m.flowrt")
    done = subprocess.run(
        [*python(), *SERVING, *arguments], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
