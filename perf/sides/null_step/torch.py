"""PyTorch's sides of perf/null_step.py, over gloo.

ps           a parameter server: versions, gradients and rows by send and receive, all workers' at once
allreduce    no server: every worker has the variable, and gradients are summed by all_reduce
ddp          no server: torch's DistributedDataParallel and its SGD; of a table, sparse gradients of an Embedding
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sides import processes as p
from sides.null_step import data as d


def join(rank: int, a: p.Settings, port: int, world: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(a.threads)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def agreed(count: int = 0) -> int:
    """What the first process says, to all."""
    told = torch.tensor([count])
    dist.broadcast(told, 0)
    return int(told)


def follow(rank: int, a: p.Settings, port: int, world: int, make: Callable[..., Any]) -> None:
    """What every process but the first does: as many steps as it says, until it says none."""
    join(rank, a, port, world)
    step, _ = make(rank, a)
    while count := agreed():
        for _ in range(count):
            step()
    os._exit(0)


# ── a parameter server ───────────────────────────────────────────────────────────────────────────────────────────────


def ps(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    if a.workload in d.TABLES:
        return (row_server if rank == 0 else row_worker)(rank, a)
    return (dense_server if rank == 0 else dense_worker)(rank, a)


def dense_server(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    w = torch.ones(d.floats(a.workload))
    updates = [torch.empty_like(w) for _ in range(a.workers)]

    def step() -> None:
        sent = [dist.isend(w, 1 + worker) for worker in range(a.workers)]
        received = [dist.irecv(update, 1 + worker) for worker, update in enumerate(updates)]
        for each in sent + received:
            each.wait()
        total = updates[0]
        for update in updates[1:]:
            total += update
        w.sub_(total, alpha=d.RATE / a.workers)

    return step, lambda: w[-1:].numpy()


def dense_worker(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    w = torch.empty(d.floats(a.workload))
    gradient = torch.empty_like(w)

    def step() -> None:
        dist.recv(w, 0)
        0.5 * torch.dot(w, w)
        torch.mul(w, 1.0, out=gradient)
        dist.send(gradient, 0)

    return step, lambda: w


def row_server(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    table = torch.ones(d.TABLES[a.workload], d.WIDTH)
    named = [torch.empty(d.ROWS_A_STEP, dtype=torch.int64) for _ in range(a.workers)]
    updates = [torch.empty(d.ROWS_A_STEP, d.WIDTH) for _ in range(a.workers)]

    def step() -> None:
        asked = [dist.irecv(rows, 1 + worker) for worker, rows in enumerate(named)]
        sent = []
        for worker, each in enumerate(asked):
            each.wait()
            sent.append(dist.isend(table[named[worker]], 1 + worker))
        received = [dist.irecv(update, 1 + worker) for worker, update in enumerate(updates)]
        for each in sent + received:
            each.wait()
        table.index_add_(0, torch.cat(named), torch.cat(updates), alpha=-d.ROW_RATE / a.workers)

    return step, lambda: table[d.probes(a.workload, a.workers), 0].numpy()


def row_worker(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    batches = torch.from_numpy(d.ids(a.workload, a.workers)[rank - 1].astype(np.int64))
    rows = torch.empty(d.ROWS_A_STEP, d.WIDTH)
    turn = [0]

    def step() -> None:
        dist.send(batches[turn[0] % d.BATCHES], 0)
        turn[0] += 1
        dist.recv(rows, 0)
        0.5 * torch.dot(rows.view(-1), rows.view(-1))
        dist.send(rows * 1.0, 0)

    return step, lambda: rows


# ── no server ────────────────────────────────────────────────────────────────────────────────────────────────────────


def allreduce(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    if a.workload in d.TABLES:
        raise SystemExit("all_reduce would make the rows dense")
    w = torch.ones(d.floats(a.workload))
    gradient = torch.empty_like(w)

    def step() -> None:
        0.5 * torch.dot(w, w)
        torch.mul(w, 1.0, out=gradient)
        dist.all_reduce(gradient)
        w.sub_(gradient, alpha=d.RATE / a.workers)

    return step, lambda: w[-1:].numpy()


class Half(torch.nn.Module):
    """Half the sum of the squares of ``w``."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(count))

    def forward(self) -> torch.Tensor:
        return 0.5 * torch.dot(self.w, self.w)


class HalfOfRows(torch.nn.Module):
    """Half the sum of the squares of some rows of a table."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(count, d.WIDTH, sparse=True, _weight=torch.ones(count, d.WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        return 0.5 * (rows * rows).sum()


def ddp(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    rows = a.workload in d.TABLES
    model = HalfOfRows(d.TABLES[a.workload]) if rows else Half(d.floats(a.workload))
    replica = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=not rows)
    optimizer = torch.optim.SGD(model.parameters(), d.ROW_RATE if rows else d.RATE)
    batches = torch.from_numpy(d.ids(a.workload, a.workers)[rank].astype(np.int64)) if rows else None
    turn = [0]

    def step() -> None:
        optimizer.zero_grad(set_to_none=rows)
        loss = replica() if batches is None else replica(batches[turn[0] % d.BATCHES])
        turn[0] += 1
        loss.backward()
        optimizer.step()

    def probed() -> Any:
        w = next(model.parameters()).detach()
        return (w[d.probes(a.workload, a.workers), 0] if rows else w[-1:]).numpy()

    return step, probed


def main() -> None:
    a = p.settings()
    make = {"ps": ps, "allreduce": allreduce, "ddp": ddp}[a.variant]
    served = a.variant == "ps"
    world = a.workers + served
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with p.started(follow, [(rank, a, port, world, make) for rank in range(1, world)]) as pids:
        join(0, a, port, world)
        step, probed = make(0, a)

        def run(count: int) -> list[float]:
            agreed(count)
            return p.timed(step, count)

        roles = {"server": p.here(), **p.workers(pids)} if served else p.workers([p.here(), *pids])
        p.serve(run, roles, lambda steps: d.right(a.workload, a.workers, steps, probed()))
        agreed(0)
    os._exit(0)


if __name__ == "__main__":
    main()
