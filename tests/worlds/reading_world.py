"""A model of two inputs, and sources of its batches that are functions: nodes import this module for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import flowrt as fr

INPUTS = {"x": fr.Spec("float32", (None, 2)), "y": fr.Spec("float32", (None,))}


def build(replicas: int, policy: Any = None, *, cluster: bool = False) -> tuple[fr.Graph, fr.train.Replicated]:
    where = {} if cluster else {"server_device": "", "worker_device": ""}
    with fr.Graph() as graph:
        trainer = fr.train.Replicated(_loss, INPUTS, fr.optim.SGD(0.1), replicas=replicas, policy=policy, **where)
    return graph, trainer


def _loss(inputs: dict[str, fr.Tensor]) -> fr.Tensor:
    w = fr.Variable(np.zeros((2,), np.float32), name="w")
    return fr.mean(fr.square(fr.sum(inputs["x"] * w, axis=1) - inputs["y"]))


def columns(rows: int = 64) -> dict[str, Any]:
    x = np.random.default_rng(5).normal(size=(rows, 2)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([2.0, -1.0])}


@fr.data.source
def lines(rows: Any, rng: Any) -> dict[str, Any]:
    """Points of a line, drawn anew for each batch."""
    x = rng.normal(size=(len(rows), 2)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([2.0, -1.0])}


@fr.data.source
def failing(rows: Any, at: int) -> dict[str, Any]:
    if at in rows:
        raise ValueError(f"row {at} is damaged")
    return columns(len(rows))


@fr.data.source
def wide(rows: Any) -> dict[str, Any]:
    return {name: np.asarray(column, np.float64) for name, column in columns(len(rows)).items()}


gate, asked = threading.Event(), threading.Event()


@fr.data.source
def gated(rows: Any, size: int) -> dict[str, Any]:
    """Rows of so many bytes, once the gate is open."""
    asked.set()
    assert gate.wait(30)
    return {"x": np.zeros((len(rows), size), np.uint8)}


@fr.data.source
def slow(rows: Any, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return columns(len(rows))
