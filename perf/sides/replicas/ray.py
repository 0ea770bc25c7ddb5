"""ray's side of perf/replicas.py: actors and NumPy.

""       every step waits for all replicas
first    it keeps the first updates, of all but one; who is late begins the next version when it is done
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import ray
from sides import processes as p
from sides.null_step.ray import begin
from sides.replicas import data as d


@ray.remote
class Server:
    """The weights."""

    def __init__(self, path: str) -> None:
        os.environ["DIGITS"] = path
        self.w = d.weights()
        self.v = [np.zeros_like(weight) for weight in self.w]

    def pid(self) -> int:
        return os.getpid()

    def read(self) -> list[np.ndarray]:
        return self.w

    def apply(self, *updates: list[np.ndarray]) -> list[np.ndarray]:
        """Move by the mean, and read again."""
        d.move(self.w, self.v, [sum(parts) / np.float32(len(updates)) for parts in zip(*updates, strict=True)])
        return self.w


@ray.remote
class Worker:
    """One replica."""

    def __init__(self, path: str, replica: int, replicas: int, delay: float) -> None:
        os.environ["DIGITS"] = path
        self.batches, self.delay = d.batches_of(replica, replicas), delay

    def pid(self) -> int:
        return os.getpid()

    def gradients(self, w: list[np.ndarray]) -> list[np.ndarray]:
        found = d.gradients(w, *next(self.batches))
        if self.delay:
            time.sleep(self.delay)
        return found


def main() -> None:
    a = p.settings()
    begin()
    path = os.environ["DIGITS"]
    first = a.variant == "first"
    judge = d.Judge(a.workload, a.workers, waits=not first)
    server: Any = Server.options(num_cpus=0).remote(path)
    slow = a.workload == "straggler"
    delays = [d.DELAY if slow and number == a.workers - 1 else 0.0 for number in range(a.workers)]
    made: Any = Worker.options(num_cpus=0)
    workers = [made.remote(path, number, a.workers, delay) for number, delay in enumerate(delays)]
    latest = server.read.remote()
    behind: dict[Any, Any] = {}  # late updates in progress, and their workers

    def step() -> None:
        nonlocal latest
        for late in ray.wait(list(behind), num_returns=len(behind), timeout=0)[0] if behind else []:
            del behind[late]
        idle = [worker for worker in workers if worker not in behind.values()]
        pending = {worker.gradients.remote(latest): worker for worker in idle}
        taken = list(pending)
        if first:
            taken = ray.wait(taken, num_returns=a.workers - 1, fetch_local=False)[0]
            behind.update({late: worker for late, worker in pending.items() if late not in taken})
        latest = server.apply.remote(*taken)
        ray.wait([latest], fetch_local=False)

    pids = ray.get([worker.pid.remote() for worker in workers])
    roles = {"server": ray.get(server.pid.remote()), **p.workers(pids), "client": p.here()}
    p.serve(
        lambda n: p.timed(step, n),
        roles,
        lambda n: judge.right(n, ray.get(server.read.remote())),
        d.FIRST[a.workload],
        judge.notes,
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
