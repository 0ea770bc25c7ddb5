"""Nodes as actors of a real Ray on this machine: they train, die, come again, and keep to their own cluster."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from places import ROOT
from process_world import ended
from programs import python
from test_ranges_of_replicas import WORKERS, batches, trainer_of

import flowrt as fr
from flowrt.launch.ray_node import RayNode, _host
from flowrt.net.door.tokens import new_token

PS = "/job:ps/task:0"
SCRIPT = ROOT / "scripts" / "digits.py"
LITTLE = {"num_cpus": 0.1}
ROOM = {"ps": LITTLE, "worker": LITTLE}

Cluster = partial(fr.launch.ray.Cluster, startup=200.0)  # where everything else is started, too, an actor takes long

pytestmark = [
    pytest.mark.timeout(240),  # Ray starts a process of its own for each actor, and they start slowly on two cores
    pytest.mark.usefixtures("engine"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """A Ray of two logical CPUs for all tests here: its address."""
    import ray  # here: whoever collects tests would take a second for it

    folder = tempfile.mkdtemp(prefix="ray-")  # a socket's path is short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else 15: beside processes that compile, actors get no time
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr(builtins, "print", print)  # Ray puts its own there when it has something to say, and leaves it
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


async def test_the_main_job_trains_on_ray(engine: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(*python(), str(SCRIPT), "--on", "ray", "--json", "--policy", "all", "--replicas", "2"),
        *("--steps", "60", "--slow", "none"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"RAY_ADDRESS": engine},
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    every = json.loads(out.splitlines()[-1])["policies"]["all"]
    assert every["accuracy"] >= 0.95  # always the same, as every update counts
    assert every["kept"] == {"0": 60, "1": 60}
    assert every["lost"] == []


async def test_a_killed_actor_is_restarted_by_ray_and_counts_again_while_training_goes_on() -> None:
    graph, trainer = trainer_of(2, fr.train.FirstOf(1))
    async with Cluster(ps=1, worker=2, resources=ROOM) as cluster, fr.Session(graph, cluster=cluster) as session:
        async with aclosing(trainer.steps(session, batches())) as reports:
            for worker, dies in ((1, "actor"), (0, "node")):
                task, before = WORKERS[worker], cluster.nodes[WORKERS[worker]]
                handle = os.pidfd_open(before.pid)
                os.kill(before.actor if dies == "actor" else before.pid, signal.SIGKILL)
                await ended(handle)  # with its actor, if that was killed
                runner, meanwhile = session._open_here(), 0
                async for report in reports:
                    assert report.step == trainer.statistics().steps
                    meanwhile += task in session.lost
                    if runner.losses.get(task) and task not in session.lost and worker in report.kept:
                        break
                assert meanwhile  # training went on
                now = cluster.nodes[task]
                assert (before.epoch, now.epoch) == (0, 1)
                assert now.actor != before.actor
                assert cluster.spec.jobs["worker"][worker] == now.address
        assert cluster.nodes[PS].epoch == 0
    assert cluster.nodes == {}


async def test_two_jobs_on_one_ray_do_not_meet() -> None:
    async def train(cluster: Any, steps: int) -> Any:
        with fr.Graph() as graph, fr.device(WORKERS[0]):
            w = fr.Variable(0.0, name="w")
            step = w.assign_add(1.0)
        async with fr.Session(graph, cluster=cluster, name="same") as session:
            for _ in range(steps):
                await session.run(step)
            return await session.run(w)

    one, other = (Cluster(worker=1, resources={"worker": LITTLE}) for _ in range(2))
    assert one.name != other.name
    async with one, other:
        assert not {*one.spec.tasks().values()} & {*other.spec.tasks().values()}
        assert await asyncio.gather(train(one, 3), train(other, 5)) == [3.0, 5.0]
        assert await asyncio.gather(train(one, 1), train(other, 1)) == [4.0, 6.0]  # what nodes keep is their own's
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other, "token", one.token)
            with pytest.raises(fr.AuthenticationError):
                await train(other, 1)


async def test_nodes_are_added_and_removed_while_a_session_is_open() -> None:
    graph, trainer = trainer_of((1, 2), fr.train.AllOf())
    async with Cluster(ps=1, worker=1, resources=ROOM) as cluster, fr.Session(graph, cluster=cluster) as session:
        assert await cluster.add("worker") == WORKERS[1]
        assert [len(cluster.spec.jobs[job]) for job in ("ps", "worker")] == [1, 2]
        async with aclosing(trainer.steps(session, batches())) as reports:
            async for report in reports:
                if report.kept == (0, 1):
                    break
            await cluster.remove(WORKERS[0])
            async for report in reports:
                if report.kept == (1,):
                    break
        assert WORKERS[0] not in cluster.nodes
        with pytest.raises(fr.GraphError, match="is not in the cluster, which has"):
            await cluster.respawn(WORKERS[0])


async def test_a_detached_cluster_goes_on_and_is_found_by_its_name() -> None:
    async with Cluster("lasts", detached=True, ps=1, resources={"ps": LITTLE}) as cluster:
        there, token = cluster.spec, cluster.token
    async with Cluster("lasts") as again:
        assert (again.spec, again.token) == (there, token)
        with pytest.raises(fr.ResourceError, match="a cluster 'lasts' runs on this Ray already"):
            async with Cluster("lasts", ps=1):
                pass
        await again.respawn(PS)
        assert again.nodes[PS].epoch == 1
        assert again.spec != there
        handle = os.pidfd_open(again.nodes[PS].pid)
        await again.end()
        await ended(handle)
    with pytest.raises(fr.ResourceError, match="no cluster 'lasts' runs on this Ray; start one by"):
        async with Cluster("lasts"):
            pass


async def test_over_tls_nodes_listen_where_other_hosts_reach_them() -> None:
    async with Cluster("over-tls", detached=True, worker=1, resources={"worker": LITTLE}, tls=True) as cluster:
        (host, _) = cluster.spec.tasks()[WORKERS[0]]
        assert host == cluster.nodes[WORKERS[0]].host
    with fr.Graph() as graph, fr.device(WORKERS[0]):
        y = fr.constant(1.0) + 1.0
    async with Cluster("over-tls") as again:
        try:
            async with fr.Session(graph, cluster=again) as session:
                assert await session.run(y) == 2.0
        finally:
            await again.end()


async def test_a_cluster_whose_program_shuts_ray_down_says_what_became_of_its_nodes(engine: str) -> None:
    script = f"""
        import asyncio, logging, sys
        import ray
        import flowrt as fr

        async def main():
            room = {{"ps": {LITTLE!r}}}
            async with fr.launch.ray.Cluster("stays", detached=True, ps=1, resources=room) as stays:
                async with fr.launch.ray.Cluster(ps=1, resources=room) as cluster:
                    ray.shutdown()
                    for ask in (stays.end(), cluster.add("ps"), cluster.respawn("{PS}"), cluster.remove("{PS}")):
                        try:
                            await ask
                        except fr.ClosedError as error:
                            print(error)
            print("connected" if ray.is_initialized() else "not connected")
            async with fr.launch.ray.Cluster("stays") as stays:
                await stays.end()

        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        *(*python(), "-c", "\n".join(line[8:] for line in script.splitlines())),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"RAY_ADDRESS": engine},
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    goes_on, *ended, warned, connected = out.decode().splitlines()
    assert goes_on.endswith("and the nodes go on; fr.launch.ray.Cluster('stays') finds them")
    said = "ray.shutdown() ended the connection to Ray, and the nodes with it"
    assert [line.partition(": ")[2] for line in ended] == [said] * 3
    assert (warned, connected) == (said, "not connected")


async def test_what_ray_has_no_room_for_is_a_sentence_that_names_it() -> None:
    asks = Cluster(worker=2, resources={"worker": {"num_gpus": 1, "ssd": 2}}, startup=0.5)
    with pytest.raises(fr.ResourceError) as caught:
        async with asks:
            pass
    assert str(caught.value) == (
        f"{WORKERS[0]}, {WORKERS[1]} did not come up within 0.5 s: {WORKERS[0]} asks Ray for 1 CPU, 1 GPU, 2 ssd, and "
        "free are 0 of 0 GPU, 0 of 0 ssd; give Ray more, or lower resources="
    )


async def test_a_node_that_cannot_start_says_why() -> None:
    with pytest.raises(fr.ResourceError, match=f"{PS} did not start: cannot import 'no_such_module', as --import asks"):
        async with Cluster(ps=1, resources={"ps": LITTLE}, imports=["no_such_module"]):
            pass


async def test_a_node_that_is_ended_while_it_starts_has_not_failed() -> None:
    node = RayNode(PS, new_token(), _host(), {"threads": 1})
    while node._process is None:  # noqa: ASYNC110 - a thread starts it
        await asyncio.sleep(0)
    await node.stop(grace=60.0)
    said = await node.serves()
    assert said["ended"]
    assert "failure" not in said


def test_what_makes_no_sense_is_refused_at_the_users_line() -> None:
    with pytest.raises(fr.GraphError, match=r"test_launch_ray\.py:\d+: resources are given for 'wroker', which is no"):
        Cluster(worker=1, resources={"wroker": LITTLE})
    with pytest.raises(fr.GraphError, match=r"test_launch_ray\.py:\d+: .* is not what worker may ask Ray for; write"):
        Cluster(worker=1, resources={"worker": {"num_cpus": -1}})
    with pytest.raises(fr.GraphError, match="a cluster needs a task"):
        Cluster()
    with pytest.raises(fr.ClosedError, match="the cluster is not open"):
        _ = Cluster(worker=1).spec
