"""Environments that name a cluster, TF_CONFIG, torchrun's, Slurm's and our own: the spec, or what is missing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from flowrt.base.errors import GraphError
from flowrt.cluster.cluster import ClusterSpec
from flowrt.cluster.hosts import expand_counts, expand_hosts

TENSORFLOW = {"ps": ["a:1"], "worker": ["b:1", "b:2"]}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_JOB_NODELIST": "node[01-03,07],gpu-a[1-2]", "SLURM_PROCID": "3", "SLURM_NTASKS": "6"}


def tf_config(**task: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": TENSORFLOW, "task": task})}


@pytest.mark.parametrize(
    ("environ", "jobs", "task"),
    [
        pytest.param(tf_config(type="worker", index=1), TENSORFLOW, "/job:worker/task:1", id="tf_config"),
        pytest.param({"TF_CONFIG": json.dumps({"cluster": TENSORFLOW})}, TENSORFLOW, None, id="a client's tf_config"),
        pytest.param(
            TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            {"ps": ["127.0.0.1:29501"], "worker": [f"127.0.0.1:{port}" for port in (29502, 29503, 29504)]},
            "/job:worker/task:1",
            id="torchrun on one host",
        ),
        pytest.param(
            TORCHRUN | {"FLOWRT_HOSTS": "node[1-2]", "FLOWRT_JOBS": "ps=2,worker", "FLOWRT_PORT": "80"},
            {"ps": ["node1:80", "node1:81"], "worker": ["node2:80", "node2:81"]},
            "/job:worker/task:0",
            id="torchrun on two hosts",
        ),
        pytest.param(
            SLURM,
            {
                "ps": ["node01:10000"],
                "worker": ["node02:10000", "node03:10000", "node07:10000", "gpu-a1:10000", "gpu-a2:10000"],
            },
            "/job:worker/task:2",
            id="slurm with ranges",
        ),
        pytest.param(
            SLURM
            | {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"}
            | {"FLOWRT_PORT": "70", "FLOWRT_JOBS": "ps=2,chief=1,worker"},
            {"ps": ["n1:70", "n1:71"], "chief": ["n2:70"], "worker": ["n2:71", "n3:70", "n3:71", "n4:70"]},
            "/job:worker/task:0",
            id="slurm with counts by host",
        ),
        pytest.param(
            SLURM
            | {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "5", "SLURM_NTASKS_PER_NODE": "3"}
            | {"SLURM_JOB_ID": "313", "SLURM_DISTRIBUTION": "cyclic:block", "MASTER_ADDR": "n1"},
            {"ps": ["n1:10064"], "worker": ["n2:10064", "n1:10065", "n2:10065", "n1:10066"]},
            "/job:worker/task:2",
            id="slurm in turn",
        ),
        pytest.param(
            {"SLURM_JOB_NODELIST": "r[0-1]n[8-9]-ib", "SLURM_JOB_ID": "0"},
            {"ps": ["r0n8-ib:10000"], "worker": ["r0n9-ib:10000", "r1n8-ib:10000", "r1n9-ib:10000"]},
            None,
            id="slurm's batch script",
        ),
        pytest.param(
            {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "4294901761"},
            {"ps": ["n1:25424"], "worker": ["n1:25425"]},
            "/job:ps/task:0",
            id="slurm's federated clusters",
        ),
        pytest.param(
            {"FLOWRT_CLUSTER": '{"worker": ["digits-worker-0-[0-1].digits:7000", "[::1]:70"]}'}
            | {"FLOWRT_JOB": "worker", "FLOWRT_TASK": "2", "SLURM_NTASKS": "9"},
            {"worker": ["digits-worker-0-0.digits:7000", "digits-worker-0-1.digits:7000", "[::1]:70"]},
            "/job:worker/task:2",
            id="our own jobs",
        ),
        pytest.param(
            {"FLOWRT_HOSTS": "n[1-2],n3:8,n1,fe80::1", "FLOWRT_RANK": "0"},
            {"ps": ["n1:7001"], "worker": ["n2:7001", "n3:8", "n1:7002", "[fe80::1]:7001"]},
            "/job:ps/task:0",
            id="our own hosts",
        ),
    ],
)
def test_an_environment_gives_the_cluster_and_which_task_this_is(
    environ: dict[str, str], jobs: dict[str, list[str]], task: str | None
) -> None:
    spec = ClusterSpec.from_env(environ)
    assert spec == ClusterSpec(jobs)
    assert spec.task == task


def test_jobs_of_ranks_may_be_an_argument() -> None:
    spec = ClusterSpec.from_env({"FLOWRT_HOSTS": "n[1-3]", "FLOWRT_JOBS": "nobody"}, jobs="worker,ps=1")
    assert spec.jobs == {"worker": ("n1:7001", "n2:7001"), "ps": ("n3:7001",)}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "no cluster is named in the environment; set FLOWRT_CLUSTER to a cluster file"),
        ({"FLOWRT_CLUSTER": "{"}, "FLOWRT_CLUSTER is not JSON"),
        ({"FLOWRT_CLUSTER": '{"ps":' * 3000}, "FLOWRT_CLUSTER is not JSON: maximum recursion depth"),
        ({"FLOWRT_CLUSTER": '["a:1"]'}, "FLOWRT_CLUSTER: a cluster is jobs with the addresses of their tasks"),
        (TORCHRUN | {"WORLD_SIZE": "999999999"}, "WORLD_SIZE=999999999 is not a number from 0 to 65536"),
        (SLURM | {"SLURM_NTASKS": "999999999"}, "SLURM_NTASKS=999999999 is not a number from 0 to 65536"),
        ({"FLOWRT_CLUSTER": "nowhere.toml"}, "FLOWRT_CLUSTER: cannot read the cluster file nowhere.toml"),
        ({"FLOWRT_CLUSTER": '{"ps": ["a:1"]}', "FLOWRT_JOB": "ps"}, "FLOWRT_JOB is set and FLOWRT_TASK is not; set bo"),
        ({"FLOWRT_CLUSTER": '{"ps": ["a:1"]}', "FLOWRT_JOB": "ps", "FLOWRT_TASK": "one"}, "FLOWRT_TASK=one is not a n"),
        (
            {"FLOWRT_CLUSTER": '{"ps": ["n[2-1]:1"]}'},
            "'2-1' in 'n[2-1]:1' is not a range; write the lower number first",
        ),
        ({"FLOWRT_HOSTS": "a,,b"}, "FLOWRT_HOSTS: '' is no host; write them as in node[01-03,07],gpu-a[1-2]"),
        ({"FLOWRT_HOSTS": "a,b", "FLOWRT_RANK": "2"}, "FLOWRT_RANK=2, and FLOWRT_HOSTS make 2 ranks, from 0 to 1"),
        ({"FLOWRT_HOSTS": "n[1-99999999]"}, "names more than 65536 hosts"),
        ({"FLOWRT_HOSTS": "n[0-999]m[0-999]"}, "names more than 65536 hosts"),
        ({"FLOWRT_HOSTS": "a,b", "FLOWRT_PORT": "0"}, "FLOWRT_PORT=0 is not a port; write one from 1 to 65535"),
        ({"FLOWRT_HOSTS": "a,b", "FLOWRT_PORT": "70000"}, "FLOWRT_PORT=70000 is not a port; write one from 1 to 65535"),
        ({"FLOWRT_HOSTS": "a,a", "FLOWRT_PORT": "65535"}, "a has no port above 65535 left for its ranks"),
        ({"FLOWRT_HOSTS": "a,b", "FLOWRT_JOBS": "ps,worker"}, "FLOWRT_JOBS=ps,worker does not say how many ranks"),
        ({"FLOWRT_HOSTS": "a,b", "FLOWRT_JOBS": "ps=1"}, "FLOWRT_HOSTS make 2 ranks, and the jobs ps=1 need 1; start"),
        ({"FLOWRT_HOSTS": "a"}, "FLOWRT_HOSTS make 1 rank, and the jobs ps=1,worker need 2 at least; start as many"),
        ({"FLOWRT_HOSTS": "a"}, "or set FLOWRT_JOBS, as in FLOWRT_JOBS=worker"),
        ({"TF_CONFIG": "[]"}, 'TF_CONFIG has no "cluster"; TF_CONFIG is {"cluster": {"ps": ["HOST:PORT"]'),
        (tf_config(type="worker", index=2), "TF_CONFIG: /job:worker/task:2 is not in the cluster, which has /job:ps"),
        (
            {"FLOWRT_CLUSTER": '{"w": ["n[0-999]:1"]}', "FLOWRT_JOB": "w", "FLOWRT_TASK": "1000"},
            "/job:w/task:1000 is not in the cluster, which has /job:w/task:0, /job:w/task:1, /job:w/task:2, "
            "/job:w/task:3, /job:w/task:4, /job:w/task:5, /job:w/task:6, ..., /job:w/task:999",
        ),
        (tf_config(type="worker"), 'TF_CONFIG\'s "task" has no "type" and "index" that make one'),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "set in part: MASTER_ADDR, MASTER_PORT are missing; start this by torchrun"),
        (TORCHRUN, "name one host, node1, and there are 4 ranks, 2 on each host; set FLOWRT_HOSTS to the 2 hosts in"),
        (
            TORCHRUN | {"FLOWRT_HOSTS": "a,b,c"},
            "FLOWRT_HOSTS names 3 hosts, of 2 ranks each, and torchrun's WORLD_SIZE",
        ),
        (TORCHRUN | {"MASTER_ADDR": "localhost", "RANK": "4"}, "RANK=4, and torchrun's variables make 4 ranks, from 0"),
        (
            {"SLURM_PROCID": "3"},
            "SLURM_PROCID is set, and SLURM_JOB_NODELIST is not; start this by srun, within sbatch",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": "node[01-03"}, "SLURM_JOB_NODELIST: 'node[01-03' is no host; write them as in"),
        (SLURM | {"SLURM_NTASKS": "5"}, "SLURM_NTASKS is 5, and "),
        (
            SLURM | {"SLURM_TASKS_PER_NODE": "1(x2)"},
            "SLURM_TASKS_PER_NODE=1(x2) counts 2 hosts, and SLURM_JOB_NODELIST",
        ),
        (SLURM | {"SLURM_TASKS_PER_NODE": "1(x2"}, "SLURM_TASKS_PER_NODE: '1(x2' is not a count; write 2, or 2(x3)"),
        (SLURM | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6, and Slurm's variables make 6 ranks, from 0 to 5"),
        (SLURM | {"SLURM_DISTRIBUTION": "arbitrary"}, "does not say which rank is on which host; start this by srun"),
    ],
)
def test_a_broken_environment_is_a_sentence_that_says_what_is_missing(environ: dict[str, str], says: str) -> None:
    environ = {"SLURM_TASKS_PER_NODE": "1(x6)"} | environ if environ.get("SLURM_NTASKS") == "5" else environ
    with pytest.raises(GraphError, match=re.escape(says)):
        ClusterSpec.from_env(environ)


def test_lists_of_hosts_are_read_as_slurm_writes_them() -> None:
    assert expand_hosts("a, b[8-11],c[01,3]x") == ["a", "b8", "b9", "b10", "b11", "c01x", "c3x"]
    assert expand_hosts("r[0-1]n[09-10]") == ["r0n09", "r0n10", "r1n09", "r1n10"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    for wrong in ("", "a b", "a[1", "a]", "a[]", "a[1-]", "a[x]", "a[2-1]"):
        with pytest.raises(ValueError, match=r"no host|not a range"):
            expand_hosts(wrong)
