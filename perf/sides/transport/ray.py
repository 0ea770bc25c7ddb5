"""ray's side of perf/transport.py's steps: actors, and its shared memory for what is large."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
from sides import processes as p
from sides.null_step.ray import begin
from sides.transport import data as d


@ray.remote
class Server:
    """Holds the value."""

    def __init__(self, workload: str) -> None:
        self.value = d.value(workload)

    def pid(self) -> int:
        return os.getpid()

    def read(self) -> np.ndarray:
        return self.value

    def add(self, number: float) -> float:
        return number + 1


@ray.remote
class Worker:
    """Receives it."""

    def pid(self) -> int:
        return os.getpid()

    def ends(self, value: np.ndarray) -> np.ndarray:
        return value[[0, -1]]

    def add(self, number: float) -> float:
        return number + 1


def main() -> None:
    a = p.settings()
    begin()
    server: Any = Server.options(num_cpus=0).remote(a.workload)
    worker: Any = Worker.options(num_cpus=0).remote()

    def step() -> bool:
        if a.workload == "steps":
            return bool(ray.get(worker.add.remote(server.add.remote(1.0))) == d.VALUE)
        value = server.read.remote()
        return d.right(ray.get(value if a.workload.startswith("fetch") else worker.ends.remote(value)))

    pids = ray.get([server.pid.remote(), worker.pid.remote()])
    roles = {"server": pids[0], "worker 0": pids[1], "client": p.here()}
    p.serve(lambda n: p.timed(step, n), roles, lambda _: step())
    ray.shutdown()


if __name__ == "__main__":
    main()
