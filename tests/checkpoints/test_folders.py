"""Who may save into a folder, and that what was saved there outlasts kills, failing disks and power cuts."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_world import read_checkpoint
from places import PYTHONPATH

import flowrt as fr
from flowrt.base.errors import CheckpointError
from flowrt.checkpoints.folders import FolderLock, HeldElsewhere
from flowrt.checkpoints.stores import LocalStore
from flowrt.checkpoints.whole import read_manifest
from flowrt.session.checkpoints import Checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = os.uname().nodename


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def saves_in(path: Path) -> list[tuple[int, int]]:
    return LocalStore(path).saves()


def model() -> Any:
    with fr.Graph() as graph:
        v = fr.Variable(np.zeros(3), name="v")
        bump = v.assign_add(fr.ones((3,), "float64"))
    return graph, v, bump


def session(path: Path, **settings: Any) -> fr.Session:
    return fr.Session(model()[0], checkpoints=Checkpoints(path, **settings))


@contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program as a process of its own, once it has said that it is ready; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


# ── one at a time ──


async def test_the_second_session_to_save_is_refused_and_may_restore(tmp_path: Path) -> None:
    refused = rf"process {os.getpid()} \(this very process\) on host {HOST} saves checkpoints in {tmp_path}, "
    async with session(tmp_path) as first, session(tmp_path) as second:
        assert await first.save() == 0
        with pytest.raises(CheckpointError, match=refused):
            await second.save()
        assert await second.restore() == 0
        async with session(tmp_path) as reader:
            assert await reader.restore() == 0
        with pytest.raises(CheckpointError, match=refused):
            await session(tmp_path, every_steps=1).__aenter__()
        await first.save()
        await first.__aexit__(None, None, None)
        await second.save()
    assert len(saves_in(tmp_path)) == 3


async def test_a_session_that_saves_on_its_own_has_the_folder_from_its_opening(tmp_path: Path) -> None:
    async with session(tmp_path / "new", every_seconds=1000):
        with pytest.raises(CheckpointError, match="one session at a time"):
            await session(tmp_path / "new", every_steps=1).__aenter__()
        async with session(tmp_path / "new") as other:
            with pytest.raises(CheckpointError, match="one session at a time"):
                await other.save()
    assert files(tmp_path / "new") == []
    async with session(tmp_path / "new", every_steps=1):
        pass


async def test_checkpoints_serve_one_open_session(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        async with fr.Session(model()[0], checkpoints=checkpoints) as first:
            with pytest.raises(CheckpointError, match=rf"of {tmp_path} serve a session that is open, in this process"):
                await fr.Session(model()[0], checkpoints=checkpoints).__aenter__()
            await first.save()
            await first.restore()


async def test_a_session_that_fails_to_open_lets_the_folder_go(tmp_path: Path) -> None:
    async with session(tmp_path) as first:
        await first.save()
    with fr.Graph() as graph:
        fr.Variable(0.0, name="other")
    with pytest.raises(CheckpointError, match="'other'"):
        await fr.Session(graph, checkpoints=Checkpoints(tmp_path, every_steps=1)).__aenter__()
    async with session(tmp_path, every_steps=1) as again:
        await again.save()


async def test_who_only_restores_writes_nothing(tmp_path: Path) -> None:
    async with session(tmp_path / "none"):
        pass
    assert files(tmp_path) == []


async def test_a_session_that_closes_waits_for_the_save_under_way(tmp_path: Path) -> None:
    for turns in range(12):
        async with session(tmp_path) as saver:
            save = asyncio.ensure_future(saver.save())
            for _ in range(turns):
                await asyncio.sleep(0)
        done = await asyncio.wait_for(asyncio.gather(save, return_exceptions=True), 10)
        assert done == [0] or isinstance(done[0], fr.ClosedError)
        assert not [name for name in files(tmp_path) if name.startswith((".lock", ".partial"))]
    for number, step in saves_in(tmp_path):
        read_checkpoint(tmp_path, number, step)


async def test_a_reader_goes_on_to_a_newer_save_where_the_saver_removes_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, v, bump = model()
    async with fr.Session(graph, checkpoints=Checkpoints(tmp_path, keep=1)) as saver:
        await saver.save()

        def read_late(*where: Any) -> Any:
            if where[-1] == 0:
                asyncio.run_coroutine_threadsafe(move_on(), loop).result()
            return read_manifest(*where)

        async def move_on() -> None:
            await saver.run(bump)
            await saver.save()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr("flowrt.session.checkpoints.read_manifest", read_late)
        checkpoints = Checkpoints(tmp_path)
        async with fr.Session(graph, checkpoints=checkpoints) as reader:
            assert (await reader.run(v)).tolist() == [1, 1, 1]
        assert checkpoints.refused == []


SAVER = """
    import sys
    import numpy as np
    import flowrt as fr

    with fr.Graph() as graph:
        fr.Variable(np.zeros(3), name="v")
    with fr.BlockingSession(graph, checkpoints=fr.Checkpoints(sys.argv[1])) as session:
        session.save()
        print("ready", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.timeout(60)
async def test_another_process_is_named_also_when_it_is_stopped_and_blocks_nobody_once_it_is_dead(
    tmp_path: Path,
) -> None:
    with program(SAVER, tmp_path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        began = time.monotonic()
        async with session(tmp_path) as other:
            with pytest.raises(CheckpointError, match=rf"^process {holder.pid} on host {HOST} saves .*{tmp_path}"):
                await other.save()
            with pytest.raises(CheckpointError, match=rf"^process {holder.pid} on host"):
                await session(tmp_path, every_steps=1).__aenter__()
            assert time.monotonic() - began < 10
            holder.kill()
            holder.wait()
            assert (tmp_path / ".lock").exists()
            await other.save()
    assert not (tmp_path / ".lock").exists()


FORKED = """
    import os, sys
    from pathlib import Path
    from flowrt.checkpoints.folders import FolderLock, HeldElsewhere

    lock = FolderLock(Path(sys.argv[1]))
    lock.acquire()
    parent, (read, write) = os.getpid(), os.pipe()
    if os.fork() == 0:
        try:
            lock.release()  # of no effect: it is the parent's
            FolderLock(Path(sys.argv[1])).acquire()
        except HeldElsewhere as holder:
            assert f"process {parent} " in str(holder), holder
            os.write(write, b"refused")
        sys.stdin.readline()
        os._exit(0)
    assert os.read(read, 10) == b"refused"
    print("ready", flush=True)
    os.read(read, 10) if sys.argv[2] == "stay" else os._exit(0)
"""


@pytest.mark.timeout(60)
def test_a_forked_child_has_no_part_in_the_lock(tmp_path: Path) -> None:
    other = FolderLock(tmp_path)
    with program(FORKED, tmp_path, "stay") as parent, pytest.raises(HeldElsewhere, match=f"process {parent.pid} "):
        other.acquire()
    with program(FORKED, tmp_path, "leave") as parent:  # its child lives on
        parent.wait()
        assert other.acquire()
        other.release()


def test_what_a_dead_process_left_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    assert not lock.acquire()  # held already
    with pytest.raises(HeldElsewhere, match=f"process {os.getpid()}"):
        FolderLock(tmp_path).acquire()
    for _ in range(2):
        lock.release()
    assert files(tmp_path) == []


@pytest.mark.parametrize("told", ["", "{", "[]", '{"pid": "x"}', "\x00" * 5000])
def test_a_holder_that_did_not_say_who_it_is_is_another_process(tmp_path: Path, told: str) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".lock").write_text(told)
    with pytest.raises(HeldElsewhere, match="another process"):
        FolderLock(tmp_path).acquire()
    lock.release()


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    lock, other = FolderLock(tmp_path), FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".lock").unlink()
    assert lock.acquire()
    (tmp_path / ".lock").unlink()
    assert other.acquire()
    with pytest.raises(HeldElsewhere):
        lock.acquire()
    lock.release()
    assert (tmp_path / ".lock").exists()  # it is the other's
    other.release()


async def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    async with session(tmp_path / "a" / "b") as saver:
        await saver.save()
        (tmp_path / "a").rename(tmp_path / "away")
        await saver.save()
    assert len(saves_in(tmp_path / "a" / "b")) == 1


async def test_where_nothing_can_be_locked_a_save_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "flowrt.session.checkpoints"):
        async with session(tmp_path, every_steps=1) as saver:
            assert "no checkpoint can be saved" in caplog.text
            with pytest.raises(CheckpointError, match=rf"not saved in {tmp_path}: .*No locks available"):
                await saver.save()
    assert saves_in(tmp_path) == []


# ── to last ──


class Disk:
    """Notes which folders are made, and which are forced to the disk, in order; the k-th forcing may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, Path]] = []
        self.failing = 0
        mkdir, fsync = os.mkdir, os.fsync

        def noted_mkdir(path: Any, *more: Any, **named: Any) -> None:
            mkdir(path, *more, **named)
            self.done.append(("made", Path(path)))

        def noted_fsync(descriptor: int) -> None:
            self.failing -= 1
            if self.failing == 0:
                raise OSError(errno.EIO, "Input/output error")
            fsync(descriptor)
            self.done.append(("forced", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

        monkeypatch.setattr(os, "mkdir", noted_mkdir)
        monkeypatch.setattr(os, "fsync", noted_fsync)

    def lasting(self, path: Path) -> bool:
        """Whether the name of ``path`` would be there after a power cut: its folder was forced after it was made."""
        made = max((i for i, what in enumerate(self.done) if what == ("made", path)), default=-1)
        return ("forced", path.parent) in self.done[made + 1 :]


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")


@needs_proc
async def test_all_new_folders_outlast_a_power_cut_once_a_save_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, folder = Disk(monkeypatch), tmp_path / "a" / "b" / "c"
    async with session(folder, every_steps=100) as saver:
        await saver.save()
        assert all(disk.lasting(path) for path in (folder, folder.parent, tmp_path / "a"))
        disk.done.clear()
        await saver.save()
        assert ("forced", folder.parent) not in disk.done  # once is enough
    async with session(folder) as saver:  # whoever made them may have been killed before it forced them
        disk.done.clear()
        await saver.save()
        assert all(disk.lasting(path) for path in (folder, folder.parent, tmp_path / "a"))


@needs_proc
async def test_no_save_is_reported_that_could_not_be_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, forced = Disk(monkeypatch), 0
    async with session(tmp_path / "all" / "inside") as saver:
        await saver.save()
        forced = sum(what == "forced" for what, _ in disk.done)
    assert forced >= 6  # two files, the checkpoint's folder, the one it lies in, and those around that one
    for failing in range(1, forced + 1):
        folder = tmp_path / str(failing) / "inside"
        async with session(folder) as saver:
            disk.failing = failing
            with pytest.raises(CheckpointError, match=r"was not saved in .*Input/output error"):
                await saver.save()
            assert files(folder) == []
            await saver.save()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import numpy as np
    from flowrt.checkpoints.manifest import folder_of
    from flowrt.checkpoints.stores import LocalStore
    from checkpoint_world import read_checkpoint, write_checkpoint
    from flowrt.checkpoints.folders import FolderLock

    root, calls, real = Path(sys.argv[1]), ("mkdir", "fsync", "rename", "unlink", "rmdir", "open", "ftruncate"), {}
    left = 0

    def killing(name):
        real[name] = getattr(os, name)
        def call(*arguments, **named):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **named)
        setattr(os, name, call)

    def saves_in(root):
        return LocalStore(root).saves()

    def save(number):
        lock = FolderLock(root)
        lock.acquire()
        write_checkpoint(root, number, number, 1, [(("", "v"), np.full(1000, number))])
        for save in saves_in(root)[:-1]:
            LocalStore(root).forget(folder_of(*save))
        lock.release()

    save(1)
    for name in calls:
        killing(name)
    number = killed = 0
    while True:
        number += 1
        if (child := os.fork()) == 0:
            left = number
            save(saves_in(root)[-1][0] + 1)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        killed += 1
        last = saves_in(root)[-1]
        assert (read_checkpoint(root, *last).variables["", "v"] == last[0]).all()
    save(saves_in(root)[-1][0] + 1)
    assert sorted(entry.name for entry in root.iterdir()) == ["save-%08d-step-%012d" % (saves_in(root)[-1])]
    assert killed > 10, killed
    print("ready", flush=True)
"""


@pytest.mark.timeout(60)
def test_a_kill_at_any_call_of_a_save_costs_nothing_that_was_saved_and_leaves_no_lock(tmp_path: Path) -> None:
    with program(KILLED, tmp_path) as done:
        done.wait()
    (last,) = saves_in(tmp_path)
    assert read_checkpoint(tmp_path, *last).variables["", "v"][0] == last[0]
