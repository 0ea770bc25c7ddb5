"""Own code on nodes: what they have imported is compared, and what differs or is missing is named with the fix."""

from __future__ import annotations

import asyncio
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from test_cluster import driving

import flowrt as fr
from flowrt.net.code import differing, hash_of, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

A, B, C = (f"/job:worker/task:{number}" for number in range(3))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a module that this process, and nodes that it starts, find as ``own_code``."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield lambda text: (tmp_path / "own_code.py").write_text(text) and None
    sys.modules.pop("own_code", None)


def test_who_has_another_module_than_the_client_or_else_than_most_is_named() -> None:
    assert differing({A: {"m": "1"}, B: {"m": "1"}}, {"m": "1"}) == []
    assert differing({A: {"m": "1"}, B: {}}, {}) == []
    (text,) = differing({A: {"m": "1"}, B: {"m": "2"}, C: {"m": "2"}}, {})
    assert text.startswith(f"{A} has imported another m than {B} has")
    assert "restart it with --import m" in text
    assert len(differing({A: {"m": "1"}, B: {"m": "2"}, C: {"m": "2"}}, {"m": "1"})) == 2
    (lacking,) = missing({A: {"m": "1"}, B: {}, C: {}})
    assert lacking.startswith(f"{B}, {C} has not imported m, as {A} has; restart it with --import m")


def test_a_package_is_known_by_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    inner = tmp_path / "own_package" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").touch()
    import_module("own_package")
    seen = {hash_of("own_package")}
    for text in ("x = 1", "x = 2", "x = 1"):
        (inner / "a.py").write_text(text)
        seen.add(hash_of("own_package"))
    assert len(seen) == 3
    del sys.modules["own_package"]


async def test_a_session_does_not_open_where_a_node_has_imported_another_version(write: Callable[[str], None]) -> None:
    write("x = 1")
    async with fr.LocalCluster(worker=2, imports=["own_code"]) as cluster:
        async with driving(cluster):
            pass  # this process has not imported it, and the nodes have the same
        write("x = 2")
        import_module("own_code")
        says = rf"{A} has imported another own_code than this client.*restart it with --import own_code"
        with pytest.raises(fr.RemoteError, match=says):
            async with driving(cluster):
                pass
        for task in (A, B):
            cluster.processes[task].kill()
            await cluster.processes[task].wait()
            await cluster.respawn(task)
        async with driving(cluster):
            pass


class Said(logging.Handler):
    """Waits for a text in the log."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.said = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.said.set()


async def test_a_node_that_comes_again_with_another_version_is_not_used(write: Callable[[str], None]) -> None:
    write("x = 1")
    refused = Said(f"cannot be used: {A} has imported another own_code than {B} has")
    logging.getLogger("flowrt.net.master.peers").addHandler(refused)
    async with fr.LocalCluster(worker=3, imports=["own_code"]) as cluster:
        cluster.processes[A].kill()
        await cluster.processes[A].wait()
        async with driving(cluster, patience=0.2) as master, asyncio.timeout(30):
            write("x = 2")
            await cluster.respawn(A)
            await refused.said.wait()
            assert master.peers.lost == {A}
    logging.getLogger("flowrt.net.master.peers").removeHandler(refused)
