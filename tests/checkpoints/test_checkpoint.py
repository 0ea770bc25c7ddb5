from __future__ import annotations

import asyncio
import copy
import errno
import hashlib
import json
import logging
import os
import pickle
import random
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_world import read_checkpoint, write_checkpoint

import flowrt as fr
from flowrt.base.errors import CheckpointError
from flowrt.checkpoints.manifest import NotWhole, _dumped, folder_of, from_data, loaded
from flowrt.session.checkpoints import Checkpoints
from flowrt.session.saving import Saving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

W = np.float32([[1, 2], [3, 4]])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def model(shape: Any = (2, 2)) -> Any:
    with fr.Graph(seed=1) as graph:
        w = fr.Variable(fr.random.normal(shape, seed=3), name="w")
        n = fr.Variable(np.int64(0), name="n", trainable=False)
        empty = fr.Variable(np.zeros((0, 3)), name="empty")
        step = fr.group(w.assign_add(fr.ones(shape)), n.assign_add(np.int64(1)))
        noise = fr.random.normal((4,))
    return graph, w, n, step, noise, empty


def files(path: Path) -> list[str]:
    """What lies there, but for the lock of a session that saves."""
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")


async def train(checkpoints: Checkpoints, steps: int) -> Any:
    graph, w, n, step, *_ = model()
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        for _ in range(steps):
            await session.run(step)
        return await session.run([w, n])


async def test_training_goes_on_where_the_newest_checkpoint_stopped(tmp_path: Path) -> None:
    w, n = await train(Checkpoints(tmp_path / "new" / "folder", every_steps=5), 12)
    assert n == 12
    again = Checkpoints(tmp_path / "new" / "folder", every_steps=5)
    later, n = await train(again, 0)
    assert (n, again.step, again.refused) == (10, 10, [])
    np.testing.assert_array_equal(later, w - 2)
    _, n = await train(again, 4)
    assert n == 14
    assert [step for _, step in again.saves()] == [5, 10]
    _, n = await train(Checkpoints(tmp_path / "new" / "folder", every_steps=4), 4)
    assert n == 14


async def test_saving_and_restoring_by_hand(tmp_path: Path) -> None:
    graph, w, n, step, *_ = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            await session.restore()
        first = await session.run(w)
        assert await session.save() == 0
        for _ in range(3):
            await session.run(step)
        assert await session.save() == 3
        await session.run(step)
        assert await session.restore() == 3
        assert await session.run(n) == 3
        assert await session.restore(0) == 0
        np.testing.assert_array_equal(await session.run(w), first)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*; there are: 0, 3"):
            await session.restore(7)
    async with fr.Session(graph) as session:
        for use in (session.save(), session.restore()):
            with pytest.raises(fr.GraphError, match=r"checkpoints=fr\.Checkpoints"):
                await use


async def test_checkpoints_are_pickled_as_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("saved", 3, keep=2, keep_every_hours=6, partial=True, rename={"old": "new"})
    graph, *_ = model()
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        await session.save()
        monkeypatch.chdir("/")
        again = pickle.loads(pickle.dumps(checkpoints))
        with pytest.raises(CheckpointError, match="one session at a time does"):
            async with fr.Session(graph, checkpoints=copy.copy(again)):
                pass
    told = ("every_steps", "every_seconds", "keep", "keep_every_hours", "partial", "rename")
    assert [getattr(again, name) for name in told] == [3, None, 2, 6, True, {"old": "new"}]
    assert again.path == tmp_path / "saved"
    assert again.saves() == [(1, 0)]


async def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    await train(Checkpoints(tmp_path, every_steps=1, keep=3), 7)
    assert files(tmp_path) == [folder_of(i, i) for i in (5, 6, 7)]


async def test_saves_follow_the_clock(tmp_path: Path) -> None:
    clock = Clock()
    checkpoints = Checkpoints(tmp_path, every_seconds=10, clock=clock)
    graph, w, _, step, *_ = model()
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        for now in (1, 9, 10, 11, 19, 20, 45):
            clock.now = now
            await session.run(w)  # writes nothing, so it is no training step
            await session.run(step)
    assert [step for _, step in checkpoints.saves()] == [3, 6, 7]


async def test_steps_at_once_are_all_counted_and_saved_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, every_steps=10)
    graph, _, n, step, *_ = model()
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        async with asyncio.TaskGroup() as group:
            for _ in range(25):
                group.create_task(session.run(step))
        assert checkpoints.step == 25
        assert len(checkpoints.saves()) <= 2
        assert await session.run(n) == 25


async def test_what_goes_on_by_itself_rests_while_it_is_kept_and_what_a_save_kept_that_fails_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @asynccontextmanager
    async def rest() -> AsyncIterator[None]:
        told.append("rests")
        try:
            yield
        finally:
            told.append("goes on")

    async def keep(saving: Saving) -> None:
        told.append("is kept")
        raise CheckpointError("not all of it")

    async def drop(saving: Saving) -> None:
        told.append("is dropped")

    graph, *_ = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        session.rests.add(rest)
        monkeypatch.setattr(Saving, "keep", keep)
        monkeypatch.setattr(Saving, "drop", drop)
        with pytest.raises(CheckpointError, match="not all of it"):
            await session.save()
    assert told == ["rests", "is kept", "goes on", "is dropped"]


async def test_random_draws_do_not_begin_again_after_a_resume(tmp_path: Path) -> None:
    graph, _, _, step, noise, _ = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        seen = [(await session.run([noise, step]))[0] for _ in range(4)]
        await session.save()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        for _ in range(4):
            drawn = await session.run(noise)
            assert not any(np.array_equal(drawn, old) for old in seen)


async def test_a_resumed_program_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    graph, _, _, step, noise, _ = model()

    async def drawn(session: fr.Session) -> list[Any]:
        return [(await session.run([noise, step]))[0] for _ in range(3)]

    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        await drawn(session)
        await session.save()
        expected = await drawn(session)
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        np.testing.assert_array_equal(await drawn(session), expected)


@pytest.mark.parametrize("every_steps", [None, 1, 2])
async def test_saving_and_restoring_shift_no_draws(tmp_path: Path, every_steps: int | None) -> None:
    async def drawn(checkpoints: Checkpoints | None, by_hand: bool) -> list[Any]:
        graph, _, _, step, noise, _ = model()
        out = []
        async with fr.Session(graph, checkpoints=checkpoints) as session:
            for _ in range(5):
                if by_hand:
                    await session.save()
                    await session.restore()
                out.append((await session.run([noise, step]))[0])
                out.append(await session.run(noise))
        return out

    plain = await drawn(None, by_hand=False)
    checkpoints = Checkpoints(tmp_path / "saved", every_steps=every_steps)
    np.testing.assert_array_equal(await drawn(checkpoints, by_hand=every_steps is None), plain)
    assert checkpoints.saves()


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_compiled_step_draws_the_same_beside_saves_and_after_a_resume(tmp_path: Path, before: int) -> None:
    graph, _, _, _, noise, _ = model()
    with fr.BlockingSession(graph) as session:
        step = session.compile(noise)
        plain = [step() for _ in range(before + 6)]
    with fr.BlockingSession(graph, checkpoints=Checkpoints(tmp_path)) as session:
        step, drawn = session.compile(noise), []
        for turn in range(before + 6):
            if turn == before:
                session.save()
            drawn.append(step())
    np.testing.assert_array_equal(drawn, plain)
    with fr.BlockingSession(graph, checkpoints=Checkpoints(tmp_path)) as session:
        np.testing.assert_array_equal([session.run(noise) for _ in range(6)], plain[before:])


@pytest.mark.timeout(120)
async def test_on_a_cluster_saves_shift_no_draws_and_what_nodes_hold_is_restored(tmp_path: Path) -> None:
    with fr.Graph(seed=1) as graph:
        with fr.device("/job:ps"):
            w = fr.Variable(np.zeros(4), name="w")
        with fr.device("/job:worker"):
            train = w.assign(fr.random.normal((4,), dtype="float64"))
    seen: list[list[Any]] = []
    async with fr.LocalCluster(ps=1, worker=1) as cluster:
        for folder in (tmp_path / "never", tmp_path / "often"):
            async with fr.Session(graph, cluster=cluster, checkpoints=Checkpoints(folder)) as session:
                seen.append([])
                for _ in range(4):
                    await session.run(train)
                    seen[-1].append(await session.run(w))
                    if folder.name == "often":
                        await session.save()
        async with fr.Session(graph, cluster=cluster, checkpoints=Checkpoints(folder)) as session:
            assert await session.restore(2) == 2
            np.testing.assert_array_equal(await session.run(w), seen[0][1])
    np.testing.assert_array_equal(*seen)


async def test_draws_do_not_go_back_with_a_restore_of_the_same_session(tmp_path: Path) -> None:
    graph, _, _, _, noise, _ = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        await session.save()
        seen = [await session.run(noise) for _ in range(3)]
        await session.restore()
        drawn = await session.run(noise)
        assert not any(np.array_equal(drawn, old) for old in seen)


async def test_variables_may_share_what_they_start_from(tmp_path: Path) -> None:
    with fr.Graph() as graph:
        start = fr.random.normal((3,))
        a, b = fr.Variable(start, name="a"), fr.Variable(start, name="b")
        write = fr.group(a.assign(fr.zeros((3,))), b.assign(fr.ones((3,))))
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path, every_steps=1)) as session:
        np.testing.assert_array_equal(*await session.run([a, b]))
        await session.run(write)
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path)) as session:
        assert (await session.run(a)).tolist() == [0, 0, 0]
        assert (await session.run(b)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"every_steps": 0}, {"every_seconds": -1}])
def test_settings_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(fr.GraphError, match="expected keep and every_steps of at least 1"):
        Checkpoints("somewhere", **arguments)


# ── damage ──


def shard_in(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


def damage(folder: Path, how: str, rng: random.Random) -> None:
    target = folder / "manifest.json" if "manifest" in how else shard_in(folder)
    content = bytearray(target.read_bytes())
    match how.split()[1]:
        case "flipped":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            target.write_bytes(content)
        case "cut":
            target.write_bytes(content[: rng.randrange(len(content))])
        case "missing":
            target.unlink()
        case "emptied":
            target.write_bytes(b"")


@pytest.mark.parametrize(
    "how", [f"{w} {h}" for w in ("manifest", "shard") for h in ("flipped", "cut", "missing", "emptied")]
)
async def test_where_the_newest_is_damaged_the_one_before_is_used_and_said_so(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(how)
    await train(Checkpoints(tmp_path, every_steps=1, keep=2), 2)
    damage(tmp_path / folder_of(2, 2), how, rng)
    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING, "flowrt.session.checkpoints"):
        _, n = await train(checkpoints, 0)
    assert (n, checkpoints.step) == (1, 1)
    assert folder_of(2, 2) in checkpoints.refused[0]
    assert "is not whole" in caplog.text
    assert "trying the one before" in caplog.text


def test_every_flipped_bit_of_the_files_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W), (("", "v"), W)])
    folder = tmp_path / folder_of(1, 1)
    for name in ("manifest.json", shard_in(folder).name):
        whole = (folder / name).read_bytes()
        for position in range(len(whole)):
            for bit in (0, 5, 7):
                broken = bytearray(whole)
                broken[position] ^= 1 << bit
                (folder / name).write_bytes(broken)
                with pytest.raises(CheckpointError):
                    read_checkpoint(tmp_path, 1, 1)
        for length in range(len(whole)):
            (folder / name).write_bytes(whole[:length])
            with pytest.raises(CheckpointError):
                read_checkpoint(tmp_path, 1, 1)
        (folder / name).write_bytes(whole)


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W), (("scope", "v"), W)])
    whole = (tmp_path / folder_of(1, 1) / "manifest.json").read_bytes()
    assert from_data(loaded(whole), whole).step == 1
    for position in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[position // 8] ^= 1 << position % 8
        with pytest.raises(NotWhole):
            from_data(loaded(bytes(broken)), bytes(broken))


async def test_where_none_is_whole_nothing_starts_over_in_silence(tmp_path: Path) -> None:
    await train(Checkpoints(tmp_path, every_steps=1), 2)
    for name in files(tmp_path):
        shard_in(tmp_path / name).write_bytes(b"rubbish")
    graph, *_ = model()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; move them away to start over"):
        await fr.Session(graph, checkpoints=Checkpoints(tmp_path)).__aenter__()
    assert len(files(tmp_path)) == 2


SHARD = "variables-00001-of-00001.safetensors"
HOSTILE: list[tuple[str, Any]] = [
    *[("format", value) for value in (1, 3, None)],
    *[("step", value) for value in (2, -1, 1.0)],
    *[("run", value) for value in ("1", None)],
    *[("saved_at", value) for value in ("1", None, 1)],
    *[("variables", value) for value in ({}, [[]], [{}], [])],
    *[("files", value) for value in ({}, [[]], [{}], [])],
    *[("renamed", value) for value in ([], {"w": 1})],
    *[("order", value) for value in ([], {"names": ["w"], "nodes": "1", "digest": ""})],
    ("order", {"names": [1], "nodes": 1, "digest": ""}),
    *[("variables/0/shape", shape) for shape in ([1 << 62, 1 << 62], [-2, -2], [2.0, 2], [None], "22", [1] * 9)],
    *[("variables/0/shape", shape) for shape in ([[2], 2], [1 << 40, 2], [2, 1], [4, 2])],
    *[("variables/0/dtype", dtype) for dtype in ("object", "complex128", "S99999999999", 7, "../../x", "float64")],
    *[("variables/0/name", name) for name in (["w"], None)],
    ("variables/0/container", {}),
    *[("variables/0/parts", parts) for parts in ([], {}, [[]], [{}])],
    *[("variables/0/parts/0/offset", offset) for offset in (-8, 0, 1 << 80, 0.0, None, 257)],
    *[("variables/0/parts/0/first", row) for row in (1, -1, None)],
    *[("variables/0/parts/0/end", row) for row in (1, 3, 1 << 70, -1)],
    *[("variables/0/parts/0/file", file) for file in ("other.safetensors", "../" + SHARD, None, "/etc/passwd")],
    *[("variables/0/parts/0/sha256", digest) for digest in ("", "0" * 64, "z" * 64, None)],
    *[("files/0/name", name) for name in ("..", ".", "", "../x", "a/b", "/etc/passwd", "a\x00b", "manifest.json", 7)],
    *[("files/0/bytes", count) for count in (0, -1, 1 << 80, None)],
    *[("files/0/header_bytes", count) for count in (0, -1, 1 << 80, None)],
    *[("files/0/header_sha256", digest) for digest in ("", "0" * 64, None)],
]


def rewrite(folder: Path, where: str, value: Any) -> None:
    """Change one thing in a manifest, and its digest with it."""
    data = json.loads((folder / "manifest.json").read_text())
    del data["sha256"]
    *path, last = where.split("/")
    at = data
    for key in path:
        at = at[int(key)] if key.isdecimal() else at[key]
    at[last] = value
    data["sha256"] = hashlib.sha256(_dumped(data)).hexdigest()
    (folder / "manifest.json").write_bytes(_dumped(data))


@pytest.mark.parametrize(("where", "value"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused(tmp_path: Path, where: str, value: Any) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W)])
    rewrite(tmp_path / folder_of(1, 1), where, value)
    with pytest.raises(CheckpointError, match="is not whole: "):
        read_checkpoint(tmp_path, 1, 1)


def test_the_manifest_that_the_hostile_ones_differ_from_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W)])
    rewrite(tmp_path / folder_of(1, 1), "run", 7)
    saved = read_checkpoint(tmp_path, 1, 1)
    assert saved.manifest.run == 7
    np.testing.assert_array_equal(saved.variables[("", "w")], W)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W), (("", "v"), W)])
    shard = shard_in(tmp_path / folder_of(1, 1))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    place = rf"{shard.name}: bytes {len(content) - 16} to {len(content)}, rows 0 to 2 of variable 'w'"
    with pytest.raises(CheckpointError, match=place):
        read_checkpoint(tmp_path, 1, 1)


def test_nobody_is_waited_for_who_would_write_what_is_no_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W)])
    manifest = tmp_path / folder_of(1, 1) / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(CheckpointError, match=r"is not whole: manifest\.json"):
        read_checkpoint(tmp_path, 1, 1)


def test_anybodys_safetensors_reads_a_shard(tmp_path: Path) -> None:
    values = {
        ("", "w"): W,
        ("", "n"): np.int64(3).reshape(()),
        ("", "flags"): np.array([True, False, True]),
        ("here", "w"): np.arange(5, dtype=np.uint8),
        ("", "empty"): np.zeros((0, 3)),
        ("", "__metadata__"): np.float32([1]),
    }
    write_checkpoint(tmp_path, 1, 1, 1, list(values.items()))
    read = safetensors.numpy.load_file(shard_in(tmp_path / folder_of(1, 1)))
    assert sorted(read) == ["__metadata__'", "empty", "flags", "here:w", "n", "w"]
    for (container, name), value in values.items():
        key = f"{container}:{name}" if container else "__metadata__'" if name == "__metadata__" else name
        np.testing.assert_array_equal(read[key], value)
        assert read[key].dtype == value.dtype


# written by the format's own code: the bytes of w, of n at byte 64, and of nothing at byte 128
FORMAT_1 = {
    "data": "894acd236995755c2d555b1eef61ab640ec85f16e33f6c02a1acac5568a9227a",
    "format": 1,
    "order": None,
    "renamed": {},
    "run": 3,
    "step": 2,
    "variables": [
        {"container": "", "dtype": "float32", "name": "w", "offset": 0, "shape": [2, 2]},
        {"container": "", "dtype": "int64", "name": "n", "offset": 64, "shape": []},
        {"container": "", "dtype": "float64", "name": "empty", "offset": 128, "shape": [0, 3]},
    ],
}
FORMAT_1_DIGEST = "9f97a4f26ea7216f772a1435bf9f30b54accd8d4f6a7710cd07e6686799fa75d"
FORMAT_1_W = bytes.fromhex("fc4ae43f92675b40dcc1064003551640")


def write_format_1(folder: Path) -> None:
    folder.mkdir(parents=True)
    text = json.dumps(FORMAT_1, sort_keys=True)
    (folder / "manifest.json").write_text(json.dumps({"manifest": text, "digest": FORMAT_1_DIGEST}))
    (folder / "data").write_bytes(FORMAT_1_W + bytes(48) + b"\2" + bytes(63))


async def test_a_checkpoint_of_the_first_format_is_restored_and_followed_by_newer_ones(tmp_path: Path) -> None:
    write_format_1(tmp_path / folder_of(1, 2))
    w, n = await train(Checkpoints(tmp_path, every_steps=1), 1)
    assert n == 3
    np.testing.assert_array_equal(w, np.frombuffer(FORMAT_1_W, np.float32).reshape(2, 2) + 1)
    assert files(tmp_path) == [folder_of(1, 2), folder_of(2, 3)]
    _, n = await train(Checkpoints(tmp_path), 0)
    assert n == 3


def test_every_flipped_bit_of_a_checkpoint_of_the_first_format_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / folder_of(1, 2)
    write_format_1(folder)
    read_checkpoint(tmp_path, 1, 2)
    for name in ("manifest.json", "data"):
        whole = (folder / name).read_bytes()
        for position in range(len(whole)):
            broken = bytearray(whole)
            broken[position] ^= 1 << position % 8
            (folder / name).write_bytes(broken)
            with pytest.raises(CheckpointError):
                read_checkpoint(tmp_path, 1, 2)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"manifest": 1}', '{"manifest": [], "digest": ""}', "1" * 5000, "\x00", "{}"]
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, 1, 1, 1, [(("", "w"), W)])
    (tmp_path / folder_of(1, 1) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path, 1, 1)


def test_names_that_look_like_paths_are_only_names(tmp_path: Path) -> None:
    names = [("", "../../up"), ("/etc", "passwd"), ("ü", "a\nb"), ("", "")]
    write_checkpoint(tmp_path / "in", 1, 1, 1, [(name, W + i) for i, name in enumerate(names)])
    saved = read_checkpoint(tmp_path / "in", 1, 1)
    assert (saved.manifest.run, sorted(saved.variables)) == (1, sorted(names))
    np.testing.assert_array_equal(saved.variables[("", "../../up")], W)
    assert files(tmp_path) == ["in"]
    assert files(tmp_path / "in") == [folder_of(1, 1)]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float64"])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str) -> None:
    for i, shape in enumerate([(), (0,), (3,), (2, 0, 4), (3, 5)]):
        value = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        write_checkpoint(tmp_path, i + 1, 1, 1, [(("c", "v"), value)])
        values = read_checkpoint(tmp_path, i + 1, 1).variables
        np.testing.assert_array_equal(values[("c", "v")], value)
        assert values[("c", "v")].dtype == value.dtype


# ── a disk that fails ──


@pytest.mark.parametrize("failing", range(1, 5))
async def test_a_full_disk_leaves_no_file_and_training_goes_on(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls, broken = os.fsync, 0, False

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if broken and calls == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    graph, _, n, step, *_ = model()
    checkpoints = Checkpoints(tmp_path, every_steps=2)
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        await session.run(step)
        await session.run(step)
        await checkpoints.wait_saved()
        assert files(tmp_path) == [folder_of(1, 2)]
        calls, broken = 0, True
        await session.run(step)
        with caplog.at_level(logging.WARNING, "flowrt.session.checkpoints"):
            await session.run(step)
            await checkpoints.wait_saved()
        assert "No space left on device; training goes on" in caplog.text
        assert files(tmp_path) == [folder_of(1, 2)]
        calls = 0
        with pytest.raises(CheckpointError, match=r"step 4 was not saved in .*No space left"):
            await session.save()
        assert files(tmp_path) == [folder_of(1, 2)]
        broken = False
        await session.run(step)  # still due
        await checkpoints.wait_saved()
        assert files(tmp_path) == [folder_of(1, 2), folder_of(2, 5)]
        assert await session.run(n) == 5
    _, saved = await train(Checkpoints(tmp_path), 0)
    assert saved == 5


async def test_a_save_that_fails_in_a_way_that_nobody_foresaw_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, _, _, step, *_ = model()
    checkpoints, failures = Checkpoints(tmp_path, every_steps=2), [RuntimeError("as a package of others says it")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    checkpoints.before_save = fail
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        for _ in range(3):
            await session.run(step)
            await checkpoints.wait_saved()
    assert "as a package of others says it; training goes on" in caplog.text
    assert files(tmp_path) == [folder_of(1, 3)]


async def test_what_a_killed_process_left_is_no_checkpoint_and_goes_with_the_next_save(tmp_path: Path) -> None:
    await train(Checkpoints(tmp_path, every_steps=1), 1)
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "data").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    _, n = await train(Checkpoints(tmp_path, every_steps=1), 1)
    assert n == 2
    assert files(tmp_path) == ["notes.txt", folder_of(1, 1), folder_of(2, 2)]


async def test_a_folder_that_cannot_be_made_is_an_error_of_the_save(tmp_path: Path) -> None:
    graph, *_ = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path / "file" / "inside")) as session:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match=r"was not saved in .*: .*file is not a folder"):
            await session.save()


async def test_a_save_that_is_cancelled_leaves_no_half(tmp_path: Path) -> None:
    graph, *_ = model()
    checkpoints = Checkpoints(tmp_path)
    async with fr.Session(graph, checkpoints=checkpoints) as session:
        for turns in range(0, 12):
            task = asyncio.ensure_future(session.save())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            for number, step in checkpoints.saves():
                read_checkpoint(tmp_path, number, step)
            assert not [name for name in files(tmp_path) if name.startswith(".partial")]
        await session.save()
    shutil.rmtree(tmp_path)


async def test_a_place_that_nobody_knows_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(fr.GraphError, match="nowhere"):
        Checkpoints("nowhere://bucket/a")
    for nothing in ("", None, "a\0b"):
        with pytest.raises(fr.GraphError, match="expected the path of a folder"):
            Checkpoints(nothing)  # type: ignore[arg-type]
    assert Checkpoints(f"file://{tmp_path}/a%20b").path == tmp_path / "a b"
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for inside in ("", "run"):
        with pytest.raises(CheckpointError, match="file is not a folder"):
            await train(Checkpoints(url=tmp_path / "file" / inside), 0)
        with pytest.raises(CheckpointError, match=f"link is a symbolic link to {tmp_path}/disk, which"):
            await train(Checkpoints(url=tmp_path / "link" / inside, every_steps=1), 0)
    (tmp_path / "disk").mkdir()
    await train(Checkpoints(url=tmp_path / "link", every_steps=1), 1)
    assert files(tmp_path / "disk") == [folder_of(1, 1)]
