"""ray's side of perf/null_step.py: an actor with the variable and one for each worker, as ray's own guide writes it.

What the server answers goes to every worker, and what they answer to the server, by reference: large arrays through
ray's shared memory.
"""

from __future__ import annotations

import logging
import os
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from sides import processes as p
from sides.null_step import data as d


@ray.remote
class Server:
    """The variable."""

    def __init__(self, a: p.Settings) -> None:
        self.a = a
        self.rows = a.workload in d.TABLES
        shape = (d.TABLES[a.workload], d.WIDTH) if self.rows else (d.floats(a.workload),)
        self.w = np.ones(shape, np.float32)
        self.ids = d.ids(a.workload, a.workers).astype(np.int64) if self.rows else None
        self.turn = 0

    def pid(self) -> int:
        return os.getpid()

    def read(self) -> Any:
        """What the workers compute the next step from: all of them alike, or rows for each."""
        if self.ids is None:
            return self.w
        read = [self.w[self.ids[worker, self.turn % d.BATCHES]] for worker in range(self.a.workers)]
        return read if self.a.workers > 1 else read[0]

    def apply(self, *gradients: np.ndarray) -> Any:
        """Move by the mean, and read again."""
        if self.ids is None:
            total = gradients[0] + gradients[1] if len(gradients) > 1 else gradients[0].copy()
            for gradient in gradients[2:]:
                total += gradient
            total *= np.float32(d.RATE / self.a.workers)
            self.w -= total
        else:
            for worker, gradient in enumerate(gradients):
                named = self.ids[worker, self.turn % d.BATCHES]
                np.subtract.at(self.w, named, np.float32(d.ROW_RATE / self.a.workers) * gradient)
        self.turn += 1
        return self.read()

    def probed(self) -> np.ndarray:
        return self.w[d.probes(self.a.workload, self.a.workers), 0] if self.rows else self.w[-1:]


@ray.remote
class Worker:
    """Computes a gradient."""

    def pid(self) -> int:
        return os.getpid()

    def gradient(self, read: np.ndarray) -> np.ndarray:
        0.5 * np.dot(read.ravel(), read.ravel())
        return np.multiply(read, 1.0, dtype=np.float32)


def begin() -> None:
    """ray's own processes, on this machine alone."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=3 << 30,
    )


def main() -> None:
    a = p.settings()
    begin()
    parts = a.workers if a.workload in d.TABLES else 1
    server = Server.options(num_cpus=0).remote(a)
    workers = [Worker.options(num_cpus=0).remote() for _ in range(a.workers)]

    def parted(version: Any) -> list[Any]:
        return list(version) if parts > 1 else [version] * a.workers

    latest = parted(server.read.options(num_returns=parts).remote())

    def step() -> None:
        nonlocal latest
        gradients = [worker.gradient.remote(read) for worker, read in zip(workers, latest, strict=True)]
        latest = parted(server.apply.options(num_returns=parts).remote(*gradients))
        ray.wait(latest[:1], fetch_local=False)

    pids = ray.get([worker.pid.remote() for worker in workers])
    roles = {"server": ray.get(server.pid.remote()), **p.workers(pids), "client": p.here()}
    p.serve(
        lambda count: p.timed(step, count),
        roles,
        lambda steps: d.right(a.workload, a.workers, steps, ray.get(server.probed.remote())),
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
