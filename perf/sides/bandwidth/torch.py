"""Torch's side of bandwidth.py: eager, as its users run such layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sides.bandwidth.cases import Array, Case, report
from torch.nn import functional

torch.set_num_threads(int(os.environ["THREADS"]))


def nchw(x: Any) -> Any:
    """Images of channels last, as torch names their axes."""
    return x.permute(0, 3, 1, 2)


def nhwc(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


def batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    if x.ndim == 2:
        return functional.batch_norm(x, None, None, scale, offset, training=True)
    return nhwc(functional.batch_norm(nchw(x), None, None, scale, offset, training=True))


def lstm(x: Any, h: Any, c: Any, w_x: Any, w_h: Any, bias: Any) -> Any:
    weights = [w_x.t().contiguous(), w_h.t().contiguous(), bias, torch.zeros_like(bias)]
    return torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, True, False, False)[0]


def scatter_add(updates: Any, ids: Any) -> Any:
    return torch.zeros(8192, updates.shape[1]).index_add_(0, ids, updates)


def segment_sum(x: Any, ids: Any) -> Any:
    return torch.zeros(2048, x.shape[1]).index_add_(0, ids, x)


PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "layer_norm": lambda x, scale, offset: functional.layer_norm(x, x.shape[-1:], scale, offset),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "dropout": lambda x: functional.dropout(x, 0.1),
    "softmax": lambda x: functional.softmax(x, -1),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "class_entropy": lambda x, labels: functional.cross_entropy(x, labels.long(), reduction="none"),
    "entropy": lambda x, labels: functional.cross_entropy(x, labels, reduction="none"),
    "max_pool": lambda x: nhwc(functional.max_pool2d(nchw(x), 2)),
    "avg_pool": lambda x: nhwc(functional.avg_pool2d(nchw(x), 2)),
    "max_pool_3_by_2": lambda x: nhwc(functional.max_pool2d(nchw(x), 3, 2, 1)),
    "sum_0": lambda x: x.sum(0),
    "sum_1": lambda x: x.sum(1),
    "sum_all": lambda x: x.sum(),
    "mean_0": lambda x: x.mean(0),
    "mean_1": lambda x: x.mean(1),
    "mean_all": lambda x: x.mean(),
    "max_0": lambda x: x.amax(0),
    "max_1": lambda x: x.amax(1),
    "max_all": lambda x: x.max(),
    "var_0": lambda x: x.var(0, correction=0),
    "var_1": lambda x: x.var(1, correction=0),
    "var_all": lambda x: x.var(correction=0),
    "cumsum_0": lambda x: x.cumsum(0),
    "cumsum_1": lambda x: x.cumsum(1),
    "bias_add": torch.add,
    "take": lambda table, ids: functional.embedding(ids, table),
    "scatter_add": scatter_add,
    "segment_sum": segment_sum,
    "lstm": lstm,
    "concat_0": lambda x, y: torch.cat([x, y], 0),
    "concat_1": lambda x, y: torch.cat([x, y], 1),
    "pad": lambda x: functional.pad(x, (0, 0, 1, 1, 1, 1)),
    "transpose": lambda x: x.t().contiguous(),
    "to_nchw": lambda x: nchw(x).contiguous(),
    "heads": lambda x: x.transpose(1, 2).contiguous(),
}


def make(case: Case, values: Sequence[Array]) -> tuple[Callable[[], Any], Callable[[], Sequence[Any]]]:
    given, program = [torch.from_numpy(a) for a in values], PROGRAMS[case.program]
    if not case.of:
        return lambda: program(*given), lambda: [program(*given)]
    sources = [given[n].requires_grad_() for n in case.of]

    def call() -> Sequence[Any]:
        y = program(*given[:-1])
        return [y, *torch.autograd.grad(y, sources, given[-1])]

    return call, lambda: [a.detach() for a in call()]


if __name__ == "__main__":
    report(make)
