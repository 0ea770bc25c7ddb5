"""Whoever is killed while a checkpoint is being saved: what was acknowledged is restored, and nothing is left lying."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from bucket_world import bucket_served
from places import PYTHONPATH, ROOT
from programs import python

import flowrt as fr
from flowrt.base.errors import FlowrtError

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("FLOWRT_KILLS", "0"))  # more than the suite has time for
SEED = os.environ.get("FLOWRT_SEED")  # of a run to repeat
ASKED_FOR = pytest.mark.skipif(not KILLS, reason="FLOWRT_KILLS asks for what takes long")

CLIENTS = """
    import asyncio, os, random, signal, sys, time
    from contextlib import AsyncExitStack, nullcontext
    from pathlib import Path
    import numpy as np
    import flowrt as fr
    from flowrt.checkpoints.stores import LocalStore
    from checkpoint_world import read_checkpoint

    root, kills, seed, servers = Path(sys.argv[1]), *map(int, sys.argv[2:])
    rng, store = random.Random(seed), LocalStore(Path(sys.argv[1]))

    async def train(acknowledge, saves):
        with fr.Graph() as graph:
            made = []
            for number, size in enumerate((3, 40_000)):
                with fr.device(f"/job:ps/task:{number}") if servers else nullcontext():
                    made.append(fr.Variable(np.zeros(size), name=f"v{size}"))
            bump = fr.group(*(v.assign_add(fr.ones(v.shape, "float64")) for v in made))
        checkpoints = fr.Checkpoints(root, every_steps=3, keep=2)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(fr.LocalCluster(ps=servers)) if servers else None
            session = await stack.enter_async_context(fr.Session(graph, cluster=cluster, checkpoints=checkpoints))
            while saves:
                await session.run(bump)
                if checkpoints.step % 3 == 1:
                    os.write(acknowledge, (await session.save()).to_bytes(8, "little"))
                    saves -= 1

    def newest():
        for save in reversed(store.saves()):
            saved = read_checkpoint(root, *save)  # raises where it is not whole
            assert all((value == save[1]).all() for value in saved.variables.values()), save
            return save[1]
        return 0

    def begin(saves):
        # a child that trains, and the end of a pipe where it tells what was acknowledged
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            asyncio.run(train(write, saves))
            os._exit(0)
        os.close(write)
        return child, read

    acknowledged = 0
    for _ in range(kills):
        child, read = begin(-1)
        told = os.read(read, 8)  # it trains; whoever ends here has failed
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert told
        while told:
            acknowledged, told = int.from_bytes(told, "little"), os.read(read, 8)
        os.close(read)
        assert newest() >= acknowledged, (newest(), acknowledged)
    child, read = begin(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    names = sorted(entry.name for entry in root.iterdir())
    assert len(names) == 2 and all(name.startswith("save-") for name in names), names
    print("well", newest())
"""


def chosen() -> int:
    seed = int(SEED) if SEED else random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return seed


@pytest.mark.timeout(120 + 4 * KILLS)
@pytest.mark.parametrize(("servers", "kills"), [(0, 8), (2, 2)])
def test_a_client_killed_at_any_moment_of_its_saves_loses_nothing_that_was_acknowledged(
    servers: int, kills: int, tmp_path: Path
) -> None:
    """With servers these write, and go on for a while when their client is gone."""
    text = "\n".join(line[4:] for line in CLIENTS.splitlines())
    command = [*python(), "-c", text, str(tmp_path), str(KILLS or kills), str(chosen()), str(servers)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110 + 4 * KILLS)
    assert done.stdout.startswith("well"), done.stderr


def model() -> Any:
    with fr.Graph() as graph:
        made = []
        for task in range(2):
            with fr.device(f"/job:ps/task:{task}"):
                made.append(fr.Variable(np.zeros(300_000), name=f"v{task}"))
        bump = fr.group(*(v.assign_add(fr.ones(v.shape, "float64")) for v in made))
    return graph, made, bump


@pytest.mark.timeout(120 + 4 * KILLS)
async def test_a_server_killed_at_any_moment_of_a_save_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(chosen())
    graph, made, bump = model()
    acknowledged, failed = 0, 0
    async with (
        fr.LocalCluster(ps=2, restart=True) as cluster,
        fr.Session(graph, cluster=cluster, checkpoints=fr.Checkpoints(tmp_path, keep=2)) as session,
    ):
        runner = session._open_here()
        await session.save()
        for _ in range(KILLS or 2):
            await session.run(bump)
            victim = f"/job:ps/task:{rng.randrange(2)}"
            losses = runner.losses.get(victim, 0)
            saving = asyncio.ensure_future(session.save())
            await asyncio.sleep(rng.random() * 0.1)  # the moment is what is tried here
            cluster.processes[victim].send_signal(signal.SIGKILL)
            try:
                acknowledged = await saving
            except FlowrtError:
                failed += 1
            while victim in runner.lost or runner.losses.get(victim, 0) == losses:
                await runner.wait_changed(runner.lost, runner.suspects)
            step = await session.restore()
            assert step >= acknowledged
            for value in await session.run(made):
                assert (value == step).all()
            assert not [name for name in os.listdir(tmp_path) if not name.startswith(("save-", ".lock"))]
    print("acknowledged", acknowledged, "failed", failed)


UPLOADER = """
    import asyncio, sys
    from contextlib import AsyncExitStack, nullcontext
    import numpy as np
    import flowrt as fr

    async def train(url, servers, saves):
        with fr.Graph() as graph:
            made = []
            for number, size in enumerate((3, 400_000)):
                with fr.device(f"/job:ps/task:{number}") if servers else nullcontext():
                    made.append(fr.Variable(np.zeros(size), name=f"v{size}"))
            bump = fr.group(*(v.assign_add(fr.ones(v.shape, "float64")) for v in made))
        checkpoints = fr.Checkpoints(url, keep=2)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(fr.LocalCluster(ps=servers)) if servers else None
            session = await stack.enter_async_context(fr.Session(graph, cluster=cluster, checkpoints=checkpoints))
            assert not checkpoints.refused, checkpoints.refused
            assert all([(value == checkpoints.step).all() for value in await session.run(made)])
            print(checkpoints.step, flush=True)
            while saves:
                await session.run(bump)
                print(await session.save(), flush=True)
                saves -= 1

    asyncio.run(train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.timeout(120 + 10 * KILLS)
@pytest.mark.parametrize("servers", [0, pytest.param(2, marks=ASKED_FOR)])
def test_a_client_killed_while_a_bucket_is_saved_to_loses_nothing_that_was_acknowledged(servers: int) -> None:
    rng = random.Random(chosen())
    text = "\n".join(line[4:] for line in UPLOADER.splitlines())

    def begin(url: str, saves: int) -> subprocess.Popen[str]:
        command = [*python(), "-c", text, url, str(servers), str(saves)]
        env = {**os.environ, "PYTHONPATH": PYTHONPATH}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)

    with bucket_served() as url:
        acknowledged = 0
        for _ in range(KILLS or 1):
            with begin(f"{url}/run", -1) as client:
                assert client.stdout is not None
                told = [int(client.stdout.readline()) for _ in range(2)]  # what it found, and saved first
                assert told[0] >= acknowledged
                time.sleep(rng.random() * 0.25)  # the moment is what is tried here
                client.kill()
                told += [int(line) for line in client.stdout if line.endswith("\n")]
                acknowledged = told[-1]
        with begin(f"{url}/run", 1) as client:
            assert client.stdout is not None
            found, saved = map(int, client.stdout)
        assert saved == found + 1 > acknowledged
        folders = {name.split("/")[2] for name in fsspec.filesystem("s3").find("bucket/run", refresh=True)}
        assert len(folders) == 2


FULL = """
    import resource, signal, sys
    from pathlib import Path
    import numpy as np
    import flowrt as fr

    root = Path(sys.argv[1])
    with fr.Graph() as graph:
        v = fr.Variable(np.zeros(300_000), name="v")
        bump = v.assign_add(fr.ones((300_000,), "float64"))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with fr.BlockingSession(graph, checkpoints=fr.Checkpoints(root, keep=1)) as session:
        assert session.save() == 0
        for limit in (1 << 20, 2_400_000):  # in the first piece, and in the last
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            session.run(bump)
            try:
                session.save()
            except fr.CheckpointError as error:
                assert str(error).endswith(f" was not saved in {root}: [Errno 27] File too large"), error
            else:
                raise AssertionError("it was saved")
            names = [entry.name for entry in root.iterdir()]
            assert [name for name in names if name != ".lock"] == ["save-00000001-step-000000000000"], names
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert session.restore() == 0
        session.run(bump)
        assert session.save() == 1
    print("well")
"""


@pytest.mark.timeout(120)
def test_where_the_system_takes_no_more_bytes_no_file_is_left_and_training_goes_on(tmp_path: Path) -> None:
    text = "\n".join(line[4:] for line in FULL.splitlines())
    command = [*python(), "-c", text, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.stdout == "well\n", done.stderr
