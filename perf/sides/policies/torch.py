"""PyTorch's side of perf/stragglers/policies.py: DistributedDataParallel over gloo, which waits for all replicas.

python -m sides.policies.torch DATA.npz SETTINGS      # prints the seconds of training to the held-out loss, or inf
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing


class Net(torch.nn.Module):
    """Two dense layers, or a convolution, its largest values and a dense layer."""

    def __init__(self, model: str, first: np.ndarray, last: np.ndarray) -> None:
        super().__init__()
        self.dense = model == "dense"
        weights = first if self.dense else first.transpose(3, 2, 0, 1).copy()
        self.first, self.last = (torch.nn.Parameter(torch.from_numpy(w)) for w in (weights, last))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.dense:
            return torch.relu(images.reshape(-1, 64) @ self.first) @ self.last
        seen = torch.relu(torch.conv2d(images.permute(0, 3, 1, 2), self.first, padding="same"))
        pooled = torch.max_pool2d(seen, 2).permute(0, 2, 3, 1)
        return pooled.reshape(-1, 256) @ self.last


def train(rank: int, replicas: int, port: int, path: str, settings: dict[str, Any], told: Any) -> None:
    """One replica; the first tells how long it took."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=replicas)
    data = np.load(path)
    net = Net(settings["model"], data["w0"], data["w1"])
    replica = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), settings["rate"])
    images, labels, waits = data["images"], data["labels"].astype(np.int64), data["waits"]
    test = torch.from_numpy(data["test_images"]), torch.from_numpy(data["test_labels"].astype(np.int64))
    seconds, done = 0.0, torch.zeros(1)
    for step in range(len(waits)):
        if step == settings["dies"] and rank == replicas - 1:
            os._exit(9)
        began, batch = time.perf_counter(), step * replicas + rank
        optimizer.zero_grad()
        scores = replica(torch.from_numpy(images[batch]))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels[batch]))
        time.sleep(waits[step, rank])
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - began if step else 0.0
        if step % 2:
            with torch.no_grad():
                done[0] = torch.nn.functional.cross_entropy(net(test[0]), test[1]) <= settings["target"]
            distributed.broadcast(done, 0)
            if done[0] or seconds > settings["limit"]:
                break
    if rank == 0:
        told.put(seconds if done[0] else math.inf)
    distributed.barrier()


def main() -> None:
    """Start the replicas, and print what the first tells; where one dies, the others cannot go on."""
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    replicas = int(np.load(path)["waits"].shape[1])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    started = [
        context.Process(target=train, args=(rank, replicas, port, path, settings, told)) for rank in range(replicas)
    ]
    for process in started:
        process.start()
    while told.empty() and started[0].is_alive():
        time.sleep(0.01)
    print(math.inf if told.empty() else told.get(), flush=True)
    for process in started:
        process.join(5)
        process.kill()


if __name__ == "__main__":
    main()
