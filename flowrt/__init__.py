"""flowrt: a dataflow runtime for machine learning on asyncio and Numba.

Build a graph, run it in a session, on this machine or on a cluster::

    import flowrt as fr

    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 3))
        w = fr.Variable(fr.random.normal((3, 1), seed=1))
        y = x @ w

    async with fr.Session(graph) as session:
        print(await session.run(y, {x: data}))

Ops on plain arrays outside a graph run at once.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module

if _sys.platform == "win32":
    raise ImportError("flowrt runs on Linux and macOS; on Windows, use it inside WSL")

from flowrt.base.collection import passed_over as _passed_over
from flowrt.base.package import VERSION as _VERSION

with _passed_over():  # modules hold much and drop nothing: the collector would take a tenth of the time
    import flowrt.serialize  # noqa: F401  (graphs as bytes)
    from flowrt import optim, placement
    from flowrt.base.errors import (
        AuthenticationError,
        BrokenStream,
        CheckpointError,
        ClosedError,
        DeadTensorError,
        DeviceLost,
        FeedError,
        FlowrtError,
        GraphError,
        GraphFinalizedError,
        InternalError,
        LedgerError,
        LinkBroken,
        NodeLost,
        PlacementError,
        QueueClosedError,
        RemoteError,
        ResourceError,
        SpecError,
        StepCancelled,
        StepTimeout,
        TakenOver,
        VersionMismatch,
        WouldBlock,
    )
    from flowrt.base.familiar import absent as _absent
    from flowrt.base.spec import Spec
    from flowrt.base.spec import bfloat16 as _bfloat16
    from flowrt.gradients import gradients
    from flowrt.graph import Graph, Tensor, colocate_with, container, control_dependencies, device, name_scope
    from flowrt.graph import Node as Operation
    from flowrt.kernels.language.table import kernel
    from flowrt.op import no_gradient
    from flowrt.ops import *
    from flowrt.ops import __all__  # type: ignore[attr-defined]  # checkers take what is public there for it
    from flowrt.session import eager as _eager  # noqa: F401  (ops on plain arrays)
    from flowrt.session.blocking import BlockingSession
    from flowrt.session.options import Options
    from flowrt.session.session import Session
    from flowrt.typed import Operand, Result, op

if _typing.TYPE_CHECKING:
    from ml_dtypes import bfloat16

    from flowrt import data, delays, devices, launch, metrics, onnx, serving, summary, train
    from flowrt.cluster.cluster import ClusterSpec, LocalCluster
    from flowrt.ledger import Ledger
    from flowrt.loss_scaling import LossScaled
    from flowrt.session.checkpoints import Checkpoints
    from flowrt.simulation import simulate

# What not every program needs is imported where it is first used, so that `import flowrt` stays short.
_LATER = {
    "Checkpoints": "flowrt.session.checkpoints",
    "ClusterSpec": "flowrt.cluster.cluster",
    "Ledger": "flowrt.ledger",
    "LocalCluster": "flowrt.cluster.cluster",
    "LossScaled": "flowrt.loss_scaling",
    "data": "flowrt.data",
    "delays": "flowrt.delays",
    "devices": "flowrt.devices",
    "launch": "flowrt.launch",
    "metrics": "flowrt.metrics",
    "onnx": "flowrt.onnx",
    "serving": "flowrt.serving",
    "simulate": "flowrt.simulation",
    "summary": "flowrt.summary",
    "train": "flowrt.train",
}


if not _typing.TYPE_CHECKING:  # for checkers nothing answers what is not there

    def __getattr__(name: str) -> _typing.Any:
        if name == "bfloat16":
            value = _bfloat16().type
            globals()[name] = value
            return value
        if name not in _LATER:
            raise _absent("fr", globals(), name)
        module = _import_module(_LATER[name])
        value = module if module.__name__ == f"flowrt.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


__version__ = _VERSION

__all__ = [
    *__all__,
    "AuthenticationError",
    "BlockingSession",
    "BrokenStream",
    "CheckpointError",
    "Checkpoints",
    "ClosedError",
    "ClusterSpec",
    "DeadTensorError",
    "DeviceLost",
    "FeedError",
    "FlowrtError",
    "Graph",
    "GraphError",
    "GraphFinalizedError",
    "InternalError",
    "Ledger",
    "LedgerError",
    "LinkBroken",
    "LocalCluster",
    "LossScaled",
    "NodeLost",
    "Operand",
    "Operation",
    "Options",
    "PlacementError",
    "QueueClosedError",
    "RemoteError",
    "ResourceError",
    "Result",
    "Session",
    "Spec",
    "SpecError",
    "StepCancelled",
    "StepTimeout",
    "TakenOver",
    "Tensor",
    "VersionMismatch",
    "WouldBlock",
    "bfloat16",
    "colocate_with",
    "container",
    "control_dependencies",
    "data",
    "delays",
    "device",
    "devices",
    "gradients",
    "kernel",
    "launch",
    "metrics",
    "name_scope",
    "no_gradient",
    "onnx",
    "op",
    "optim",
    "placement",
    "serving",
    "simulate",
    "summary",
    "train",
]
