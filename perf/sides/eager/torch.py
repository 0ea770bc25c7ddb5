"""PyTorch's side of perf/eager.py: functions of tensors, in inference mode, so that nothing is kept for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sides import harness
from sides.eager import data as d
from sides.harness import Settings, Side

NAMES = ("x", "y", "scale", "offset", "w1", "b1", "w2", "b2", "logits", "whole", "large", "vector")
x, y, scale, offset, w1, b1, w2, b2, logits, whole, large, vector = (torch.tensor(getattr(d, name)) for name in NAMES)
labels, rows = torch.tensor(d.labels).long(), torch.tensor(d.rows)
image = torch.tensor(d.image).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
filters = torch.tensor(d.filters).permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
strided, positive = x[:, ::2], x > 0


def network() -> Any:
    hidden = torch.relu(x @ w1 + b1)
    return F.cross_entropy(torch.tanh(hidden * 0.5) @ w2 + b2, labels, reduction="none").mean()


OPS = {
    "network": network,
    "add": lambda: x + b1,
    "scale": lambda: x * 0.5,
    "mixed": lambda: x + whole,
    "strided": lambda: torch.relu(strided),
    "matmul": lambda: x @ w1,
    "einsum": lambda: torch.einsum("ij,jk->ik", x, w1),
    "relu": lambda: torch.relu(x),
    "softmax": lambda: torch.softmax(x, -1),
    "layer_norm": lambda: F.layer_norm(x, (64,), scale, offset),
    "cross_entropy": lambda: F.cross_entropy(logits, labels, reduction="none"),
    "sum": lambda: torch.sum(x, dim=-1),
    "reshape": lambda: torch.reshape(x, (64, 32)),
    "transpose": lambda: x.t().contiguous(),
    "concat": lambda: torch.cat([x, y], dim=-1),
    "take": lambda: torch.index_select(x, 0, rows),
    "where": lambda: torch.where(positive, x, 0.0),
    "conv2d": lambda: F.conv2d(image, filters, padding=1),
    "max_pool": lambda: F.max_pool2d(image, 2),
    "normal": lambda: torch.randn(32, 64),
    "large": lambda: large + vector,
}


def quick(workload: Callable[[Settings], Side]) -> Callable[[Settings], Side]:
    def side(a: Settings) -> Side:
        torch.set_num_threads(a.threads)
        made = workload(a)
        return Side(torch.inference_mode()(made.step), work=made.work)

    return side


if __name__ == "__main__":
    harness.main({name: quick(workload) for name, workload in d.sides(OPS, lambda t: t.numpy()).items()})
