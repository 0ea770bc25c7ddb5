"""Checkpoints elsewhere than in folders, how long they are kept, and the command that looks at them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import safetensors.numpy
from bucket_world import bucket_served
from programs import python

import flowrt as fr
from flowrt.base.errors import CheckpointError
from flowrt.checkpoint import main
from flowrt.checkpoints.manifest import folder_of
from flowrt.checkpoints.retention import superfluous
from flowrt.checkpoints.stores import store_at
from flowrt.checkpoints.whole import verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR = 3600.0


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_served() as url:
        yield url


def model() -> Any:
    with fr.Graph(seed=1) as graph:
        w = fr.Variable(fr.random.normal((300, 20), seed=3), name="w")
        n = fr.Variable(np.int64(0), name="n", trainable=False)
        step = fr.group(w.assign_add(fr.ones((300, 20))), n.assign_add(np.int64(1)))
    return graph, w, n, step


async def train(checkpoints: fr.Checkpoints, steps: int) -> Any:
    graph, w, n, step = model()
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        for _ in range(steps):
            await session.run(step)
        return await session.run([w, n])


# ── places ──


async def saved_and_restored(url: str) -> None:
    first, n = await train(fr.Checkpoints(url, every_steps=2, keep=2), 7)
    assert n == 7
    again = fr.Checkpoints(url)
    second, n = await train(again, 0)
    assert (n, again.step, again.refused) == (6, 6, [])
    np.testing.assert_array_equal(second + 1, first)
    assert [step for _, step in again.saves()] == [4, 6]
    assert again.path is None
    store = store_at(url)
    assert verify(store, *store.saves()[-1]).variables.keys() == {("", "w"), ("", "n")}


async def test_a_place_in_memory_is_saved_to_and_restored_from() -> None:
    try:
        await saved_and_restored("memory://kept/here")
    finally:
        fsspec.filesystem("memory").rm("/kept", recursive=True)


async def test_a_bucket_is_saved_to_and_restored_from(bucket: str) -> None:
    await saved_and_restored(f"{bucket}/by/one")


@pytest.mark.timeout(120)
async def test_nodes_write_and_read_a_bucket_by_themselves(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/by/nodes"
    with fr.Graph() as graph:
        made = []
        for task in range(2):
            with fr.device(f"/job:ps/task:{task}"):
                made.append(fr.Variable(np.full((10, 3), task, np.float32), name=f"v{task}"))
        bump = fr.group(*(v.assign_add(fr.ones((10, 3))) for v in made))
    async with (
        fr.LocalCluster(ps=2) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(url)) as session,
    ):
        await session.run(bump)
        assert await session.save() == 1
        await session.run(bump)
        assert await session.restore() == 1
        for task, value in enumerate(await session.run(made)):
            assert (value == task + 1).all()
    (save,) = store_at(url).saves()
    system, (folder,) = fsspec.filesystem("s3"), [f"bucket/by/nodes/{folder_of(*save)}"]
    system.invalidate_cache()
    shards = sorted(name for name in system.ls(folder, detail=False) if name.endswith(".safetensors"))
    assert len(shards) == 2
    for task, shard in enumerate(shards):
        system.get(shard, str(tmp_path / "shard"))
        assert (safetensors.numpy.load_file(tmp_path / "shard")[f"v{task}"] == task + 1).all()


async def test_what_has_no_manifest_is_no_checkpoint_and_goes_with_the_next_save() -> None:
    memory = fsspec.filesystem("memory")
    try:
        await train(fr.Checkpoints("memory://half", every_steps=1), 1)
        memory.pipe_file(f"/half/{folder_of(7, 9)}/variables-00001-of-00001-0.safetensors", b"half")
        memory.pipe_file("/half/notes.txt", b"mine")
        _, n = await train(fr.Checkpoints("memory://half", every_steps=1), 1)
        assert n == 2
        names = sorted(name.rpartition("/")[2] for name in memory.ls("/half", detail=False))
        assert names == ["notes.txt", folder_of(1, 1), folder_of(2, 2)]
    finally:
        memory.rm("/half", recursive=True)


async def test_where_nodes_write_to_another_disk_than_the_client_sees_no_save_is_reported() -> None:
    with fr.Graph() as graph:
        fr.Variable(np.zeros(3), name="v")
    async with (
        fr.LocalCluster(ps=1) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints("memory://apart")) as session,
    ):
        with pytest.raises(CheckpointError, match="did not write where this process looks; keep checkpoints where all"):
            await session.save()


async def test_what_a_place_raises_of_its_own_is_a_checkpoint_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        """As buckets' libraries have them."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NoCredentials("unable to locate credentials")

    memory = type(fsspec.filesystem("memory"))
    with fr.Graph() as graph:
        fr.Variable(np.zeros(3), name="v")
    with monkeypatch.context() as patch:
        patch.setattr(memory, "ls", refuse)
        with pytest.raises(CheckpointError, match=r"memory://no cannot be listed: .*NoCredentials: unable to locate"):
            async with fr.Session(graph, checkpoints=fr.Checkpoints("memory://no")):
                pass
    async with fr.Session(graph, checkpoints=fr.Checkpoints("memory://no")) as session:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "pipe_file", refuse)
            with pytest.raises(CheckpointError, match=r"not saved in memory://no: .*NoCredentials: unable to locate"):
                await session.save()


async def test_a_checkpoint_that_is_there_is_no_failure_where_older_ones_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = type(fsspec.filesystem("memory"))

    def write_and_be_gone(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        pipe_file(self, path, value, **kwargs)
        monkeypatch.setattr(memory, "ls", gone)

    def gone(*args: Any, **kwargs: Any) -> None:
        raise OSError("the connection is gone")

    graph, _, _, step = model()
    pipe_file, listed = memory.pipe_file, memory.ls
    async with fr.Session(graph, checkpoints=fr.Checkpoints("memory://goes")) as session:
        await session.run(step)
        monkeypatch.setattr(memory, "pipe_file", write_and_be_gone)
        assert await session.save() == 1
        assert "after step 1 was saved: the checkpoints in memory://goes cannot be listed: " in caplog.text
        monkeypatch.setattr(memory, "ls", listed)
    assert [n for _, n in fr.Checkpoints("memory://goes").saves()] == [1]


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(fr.GraphError, match=r"s3://bucket/a is no folder .*pip install 'flowrt\[remote\]'"):
        fr.Checkpoints("s3://bucket/a")


@pytest.mark.timeout(120)
def test_nothing_of_fsspec_is_imported_for_folders(tmp_path: Path) -> None:
    text = f"""
        import sys, numpy as np, flowrt as fr
        with fr.Graph() as graph:
            fr.Variable(np.zeros(3), name="v")
        with fr.BlockingSession(graph, checkpoints=fr.Checkpoints({str(tmp_path)!r})) as session:
            session.save()
        assert "fsspec" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", "\n".join(line[8:] for line in text.splitlines())], check=True, timeout=60)


# ── how long they are kept ──


def test_the_newest_stay_and_one_for_every_so_many_hours() -> None:
    made = {(number, number): number * HOUR / 2 for number in range(1, 11)}
    assert [n for n, _ in superfluous(made, 2, None)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [n for n, _ in superfluous(made, 2, 1)] == [2, 4, 6, 8]
    assert [n for n, _ in superfluous(made, 1, 1.5)] == [2, 3, 5, 6, 8, 9]
    assert superfluous(made, 10, 1) == superfluous({}, 1, 1) == []
    assert superfluous(made, 1, 0) == []


def test_a_clock_that_is_set_back_has_hours_counted_from_there() -> None:
    hours = [0, 1, 2, 9000, 3, 3.5, 4, 5, 4.9, 6, 7]  # a year ahead for one save, and once back by minutes
    made = {(number, number): hour * HOUR for number, hour in enumerate(hours)}
    assert [hours[n] for n, _ in superfluous(made, 1, 2)] == [1, 3.5, 4, 6]
    stay = [save for save in made if save not in superfluous(made, 1, 2)]
    assert superfluous({save: made[save] for save in stay}, 1, 2) == []


def test_what_cannot_be_dated_now_is_not_removed_for_that() -> None:
    made = {(1, 1): 0.0, (2, 2): HOUR, (3, 3): None, (4, 4): 2 * HOUR, (5, 5): 3 * HOUR}
    assert superfluous(made, 1, 2) == [(2, 2)]
    assert superfluous(made, 1, None) == [(1, 1), (2, 2), (3, 3), (4, 4)]


async def test_hours_are_counted_by_the_manifests_also_of_sessions_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr("flowrt.session.saving.time.time", lambda: now[0])
    graph, _, _, step = model()
    for _ in range(2):
        async with fr.Session(graph, checkpoints=fr.Checkpoints(tmp_path, keep=1, keep_every_hours=2)) as session:
            for _ in range(4):
                await session.run(step)
                await session.save()
                now[0] += HOUR
    assert [n for n, _ in fr.Checkpoints(tmp_path).saves()] == [1, 3, 5, 7, 8]


# ── the command ──


async def test_the_command_lists_verifies_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "saved"
    await train(fr.Checkpoints(folder, every_steps=1), 2)
    assert await asyncio.to_thread(main, [str(folder), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "1"], ["2", "2"]]
    assert all(line.endswith("verified") for line in lines[1:])
    assert main([str(folder), "--step", "1"]) == 0
    assert "'w' float32[300,20]" in capsys.readouterr().out
    assert main([str(folder), "--step", "1", "1"]) == 0
    assert "0 of 2 variables differ" in capsys.readouterr().out
    assert main([str(folder), str(folder), "--step", "1", "2"]) == 1
    told = capsys.readouterr().out
    assert "'w': 6000 of 6000 entries differ, by up to 1 (" in told
    assert "2 of 2 variables differ" in told
    (shard,) = (folder / folder_of(2, 2)).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main([str(folder)]) == 0  # manifests alone were read
    assert main([str(folder), "--verify"]) == 1
    assert f"{shard.name}: bytes" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert "there is no checkpoint in" in capsys.readouterr().err


def test_the_command_is_run_by_its_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [*python(), "-m", "flowrt.checkpoint", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"there is no checkpoint in {tmp_path}\n"
