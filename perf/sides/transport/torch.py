"""PyTorch's side of perf/transport.py's steps: gloo's send and receive, into tensors that are there already."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from sides import processes as p
from sides.transport import data as d


def join(rank: int, port: int, world: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def hold(rank: int, a: p.Settings, port: int, world: int) -> None:
    join(rank, port, world)
    asked, value = torch.zeros(d.REQUEST, dtype=torch.uint8), torch.from_numpy(d.value(a.workload))
    while True:
        dist.recv(asked, 0)
        dist.send(value, 0)


def add(rank: int, a: p.Settings, port: int, world: int) -> None:
    join(rank, port, world)
    number = torch.zeros(1)
    while True:
        dist.recv(number, rank - 1)
        number += 1
        dist.send(number, (rank + 1) % world)


def asking(a: p.Settings) -> Callable[[], bool]:
    asked, room = torch.zeros(d.REQUEST, dtype=torch.uint8), torch.ones(d.floats(a.workload))

    def step() -> bool:
        dist.send(asked, 1)
        dist.recv(room, 1)
        return d.right(room.numpy())

    return step


def around() -> bool:
    number = torch.ones(1)
    dist.send(number, 1)
    dist.recv(number, 2)
    return bool(number[0] == d.VALUE)


def main() -> None:
    a = p.settings()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    work, world = (add, 3) if a.workload == "steps" else (hold, 2)
    with p.started(work, [(rank, a, port, world) for rank in range(1, world)]) as pids:
        join(0, port, world)
        step = around if a.workload == "steps" else asking(a)
        roles = {"server": pids[0], "client": p.here()}
        p.serve(lambda n: p.timed(step, n), roles, lambda _: step())
        os._exit(0)


if __name__ == "__main__":
    main()
