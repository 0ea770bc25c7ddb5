"""PyTorch's side of perf/replicas.py: DistributedDataParallel over gloo, which waits for all replicas."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sides import processes as p
from sides.null_step.torch import agreed, follow, join
from sides.replicas import data as d


class Digits(torch.nn.Module):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1, self.w2, self.b2 = (torch.nn.Parameter(torch.from_numpy(w)) for w in d.weights())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images @ self.w1 + self.b1) @ self.w2 + self.b2


def make(rank: int, a: p.Settings) -> tuple[Callable[[], None], Callable[[], Any]]:
    model = Digits()
    replica = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), d.RATE, d.MOMENTUM)
    batches = d.batches_of(rank, a.workers)
    slow = a.workload == "straggler" and rank == a.workers - 1

    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        scores = replica(torch.from_numpy(images))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels.astype(np.int64)))
        if slow:
            time.sleep(d.DELAY)
        loss.backward()
        optimizer.step()

    return step, lambda: [w.detach().numpy() for w in model.parameters()]


def main() -> None:
    a = p.settings()
    judge = d.Judge(a.workload, a.workers, waits=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with p.started(follow, [(rank, a, port, a.workers, make) for rank in range(1, a.workers)]) as pids:
        join(0, a, port, a.workers)
        step, found = make(0, a)

        def run(count: int) -> list[float]:
            agreed(count)
            return p.timed(step, count)

        roles = p.workers([p.here(), *pids])
        p.serve(run, roles, lambda n: judge.right(n, found()), d.FIRST[a.workload], judge.notes)
        agreed(0)
    os._exit(0)


if __name__ == "__main__":
    main()
