"""A cluster of processes, each behind a link of its own with a given rate: namespaces of the network, shaped by tc.

What is measured runs in a process of its own, which `run_behind_links` starts in a namespace where it may do that:
`unshare` allows it to users, too, on most systems. Where it does not, nodes themselves hold back what they send and
receive, by `fr.delays.Link`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import flowrt as fr
from flowrt.cluster.keys import make_keys
from flowrt.net.door.tokens import new_token, save_token

INSIDE = "FLOWRT_BEHIND_LINKS"
ROOT = Path(__file__).resolve().parents[2]
PORT = 7001


def run_behind_links(script: str, arguments: Mapping[str, Any]) -> Any:
    """What ``script --measure JSON`` prints as JSON, in its last line, where it may shape links if that is possible."""
    command = [sys.executable, script, "--measure", json.dumps(arguments)]
    may = ["unshare", "--map-root-user", "--net"]
    tried = shutil.which("unshare") and shutil.which("tc") and shutil.which("nsenter")
    inside = bool(tried) and subprocess.run([*may, "true"], capture_output=True, check=False).returncode == 0
    env = {**os.environ, INSIDE: "1" if inside else ""}
    done = subprocess.run([*(may if inside else ()), *command], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def described(gigabits: float) -> str:
    """How the links of this process's clusters are slow."""
    return f"{gigabits:g} Gbit/s by {'tc' if os.environ.get(INSIDE) else 'fr.delays.Link'}"


@asynccontextmanager
async def cluster_behind_links(ps: int, worker: int, gigabits: float) -> AsyncIterator[Any]:
    """A cluster of processes, for a session, whose nodes each send, and receive, ``gigabits`` a second at most."""
    tasks = [*(f"/job:ps/task:{i}" for i in range(ps)), *(f"/job:worker/task:{i}" for i in range(worker))]
    if not os.environ.get(INSIDE):
        link = fr.delays.Link(gigabits * 1e9 / 8)
        async with fr.LocalCluster(ps=ps, worker=worker, delays=dict.fromkeys(tasks, link)) as cluster:
            yield cluster
        return
    os.environ["FLOWRT_TRANSPORT"] = "tcp"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_token(folder / "token", new_token())
        make_keys(folder / "keys", ["*"])
        os.environ["FLOWRT_TLS"] = str(folder / "keys")
        places = [f"10.77.0.{number + 2}:{PORT}" for number in range(len(tasks))]
        spec = {"ps": places[:ps], "worker": places[ps:]}
        (folder / "cluster.toml").write_text("".join(f"{job} = {json.dumps(where)}\n" for job, where in spec.items()))
        _sh("ip link set lo up")
        _sh("ip link add nodes type bridge")
        stack.callback(_sh, "ip link del nodes")
        _sh("ip addr add 10.77.0.1/24 dev nodes")
        _sh("ip link set nodes up")
        nodes = [stack.enter_context(_Node(number, task, folder, gigabits)) for number, task in enumerate(tasks)]
        await asyncio.gather(*(node.wait_ready() for node in nodes))
        yield fr.ClusterSpec(spec, str(folder / "token"))


class _Node:
    """A node in a namespace of its own, behind a pair of devices that are shaped at both ends."""

    def __init__(self, number: int, task: str, folder: Path, gigabits: float) -> None:
        self._outer, self._address = f"node{number}", f"10.77.0.{number + 2}/24"
        self._rate = f"tbf rate {gigabits * 1000:g}mbit burst 512kb latency 100ms"
        _, job, at = task.split("/")
        self._worker = [
            "-m",
            "flowrt.worker",
            "--die-with-parent",
            "--job",
            job.removeprefix("job:"),
            "--task",
            at.removeprefix("task:"),
        ]
        self._worker += ["--cluster", str(folder / "cluster.toml"), "--token-file", str(folder / "token")]

    def __enter__(self) -> _Node:
        self._space = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
        assert self._space.stdout is not None
        self._space.stdout.readline()  # it is there
        inside = f"nsenter --target {self._space.pid} --net"
        _sh(f"ip link add {self._outer} type veth peer name eth0 netns {self._space.pid}")
        _sh(f"ip link set {self._outer} master nodes up")
        _sh(f"tc qdisc add dev {self._outer} root {self._rate}")
        for command in ("ip link set lo up", f"ip addr add {self._address} dev eth0", "ip link set eth0 up"):
            _sh(f"{inside} {command}")
        _sh(f"{inside} tc qdisc add dev eth0 root {self._rate}")
        command = [*inside.split(), sys.executable, *self._worker]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # held open: its end tells the node that we are gone
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return self

    async def wait_ready(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if "ready" not in line:
            raise RuntimeError(f"a node did not start: {line}")

    def __exit__(self, *_: object) -> None:
        for process in (self._process, self._space):
            with process:  # which closes its pipes, and waits
                process.terminate()


def _sh(command: str) -> None:
    subprocess.run(command.split(), check=True)
