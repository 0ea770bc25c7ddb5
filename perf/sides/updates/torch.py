"""PyTorch's side of perf/updates.py: torch.optim, fused or foreach."""

from __future__ import annotations

from typing import Any

import torch
from sides import harness as h
from sides.harness import Settings, Side
from sides.updates import data as d


def update(a: Settings) -> Side:
    torch.set_num_threads(a.threads)
    values, slopes = d.parameters(a.workload)
    h.imported()
    parameters = [torch.nn.Parameter(torch.tensor(value)) for value in values]
    for parameter, slope in zip(parameters, slopes, strict=True):
        parameter.grad = torch.tensor(slope)
    which: dict[str, Any] = {a.variant or "foreach": True}
    rule = a.workload.split("-")[0]
    optimizer: Any
    if rule == "adam":
        optimizer = torch.optim.Adam(parameters, d.RATE, (d.BETA1, d.BETA2), d.EPSILON, **which)
    else:
        optimizer = torch.optim.SGD(parameters, d.RATE, d.MOMENTUM if rule == "momentum" else 0.0, **which)

    def step() -> float:
        before = float(parameters[-1].detach()[0])
        optimizer.step()
        return before

    return Side(step)


if __name__ == "__main__":
    h.main(dict.fromkeys(d.WORKLOADS, update))
