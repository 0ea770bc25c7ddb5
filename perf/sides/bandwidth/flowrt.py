"""Flowrt's side of bandwidth.py: one blocking compiled step a case."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sides.bandwidth.cases import Array, Case, report

import flowrt as fr
from flowrt.kernels.store.background import wait_compiled

EDGES = ((0, 0), (1, 1), (1, 1), (0, 0))
PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "batch_norm": lambda x, scale, offset: fr.nn.batch_norm(x, scale, offset, tuple(range(x.spec.rank - 1)))[0],
    "layer_norm": fr.nn.layer_norm,
    "gelu": fr.gelu,
    "gelu_tanh": lambda x: fr.gelu(x, approximate=True),
    "silu": fr.silu,
    "tanh": fr.tanh,
    "sigmoid": fr.sigmoid,
    "softplus": fr.softplus,
    "dropout": lambda x: fr.nn.dropout(x, 0.1),
    "softmax": fr.nn.softmax,
    "log_softmax": fr.nn.log_softmax,
    "logsumexp": lambda x: fr.logsumexp(x, -1),
    "class_entropy": fr.nn.softmax_cross_entropy,
    "entropy": fr.nn.softmax_cross_entropy,
    "max_pool": lambda x: fr.nn.max_pool2d(x, 2),
    "avg_pool": lambda x: fr.nn.avg_pool2d(x, 2),
    "max_pool_3_by_2": lambda x: fr.nn.max_pool2d(x, 3, 2, ((1, 1), (1, 1))),
    "sum_0": lambda x: fr.sum(x, 0),
    "sum_1": lambda x: fr.sum(x, 1),
    "sum_all": fr.sum,
    "mean_0": lambda x: fr.mean(x, 0),
    "mean_1": lambda x: fr.mean(x, 1),
    "mean_all": fr.mean,
    "max_0": lambda x: fr.max(x, 0),
    "max_1": lambda x: fr.max(x, 1),
    "max_all": fr.max,
    "var_0": lambda x: fr.var(x, 0),
    "var_1": lambda x: fr.var(x, 1),
    "var_all": fr.var,
    "cumsum_0": lambda x: fr.cumsum(x, 0),
    "cumsum_1": lambda x: fr.cumsum(x, 1),
    "bias_add": fr.nn.bias_add,
    "take": fr.take,
    "scatter_add": lambda updates, ids: fr.scatter_add(updates, ids, (8192, 64)),
    "segment_sum": lambda x, ids: fr.segment_sum(x, ids, 2048),
    "lstm": lambda *given: fr.nn.lstm(*given)[0],
    "concat_0": lambda x, y: fr.concat([x, y], 0),
    "concat_1": lambda x, y: fr.concat([x, y], 1),
    "pad": lambda x: fr.pad(x, EDGES),
    "transpose": fr.transpose,
    "to_nchw": lambda x: fr.transpose(x, (0, 3, 1, 2)),
    "heads": lambda x: fr.transpose(x, (0, 2, 1, 3)),
}


def make(case: Case, values: Sequence[Array]) -> tuple[Callable[[], Any], Callable[[], Sequence[Any]]]:
    with fr.Graph() as graph:
        feeds = [fr.placeholder(a.dtype, a.shape) for a in values]
        program = PROGRAMS[case.program]
        made = [program(*feeds[: len(feeds) - bool(case.of)])]
        if case.of:
            made += fr.gradients(made[0], [feeds[n] for n in case.of], feeds[-1])
    session = fr.BlockingSession(graph, options=fr.Options(threads=int(os.environ["THREADS"])))
    session.__enter__()
    atexit.register(session.__exit__, None, None, None)
    step = session.compile(made, feeds)
    for _ in range(3):
        step(*values)
        if not wait_compiled(120):
            raise SystemExit("the fused kernels were not compiled in two minutes")
    for _ in range(8):  # the first runs of a tape are timed, to divide it
        step(*values)
    return lambda: step(*values), lambda: step(*values)


if __name__ == "__main__":
    report(make)
