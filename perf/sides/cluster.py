"""What flowrt's sides on a `fr.LocalCluster` share: which process has which role, and how many messages each sent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sides import processes as p

if TYPE_CHECKING:
    import flowrt as fr

SERVER = "/job:ps/task:0"


def roles(cluster: fr.LocalCluster) -> dict[str, int]:
    """The process of each role; where workers hold the variables, there is no server."""
    pids = {task: process.pid for task, process in cluster.processes.items()}
    server = {"server": pids.pop(SERVER)} if SERVER in pids else {}
    return {**server, **p.workers(list(pids.values())), "client": os.getpid()}


async def messages(cluster: fr.LocalCluster, session: fr.Session) -> dict[str, int]:
    """How many messages each role has sent so far."""
    master = session._open_here()._master
    sent = {task: told["messages"] for task, told in (await master.statistics()).items()}
    workers = [sent[task] for task in cluster.processes if task != SERVER]
    server = {"server": sent[SERVER]} if SERVER in sent else {}
    return {**server, **p.workers(workers), "client": master._local.messages}
