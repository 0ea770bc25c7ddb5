"""Entries chosen by integers. Axes before and after the indexed one are seen as one each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.kernels.table import Call, View, host_only, kernel
from flowrt.spec import Spec, normal_axes

OUT_OF_RANGE = 1  # of launch.FAILURES


def around(shape: Sequence[int], axis: Any) -> tuple[int, int, int]:
    """``shape`` as (what lies before ``axis``, its size, what lies after it)."""
    at = normal_axes(axis, len(shape))[0]
    return math.prod(shape[:at]), shape[at], math.prod(shape[at + 1 :])


def _taking(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    x, indices = inputs
    before, size, after = around(x.concrete, attrs["axis"])
    many = indices.size
    views = View.dense((before, size, after)), View.dense((many,)), View.dense((before, many, after))
    return Call(views)


@kernel("take", layout=_taking)
def take(x: Any, indices: Any, y: Any, run: Any) -> None:
    size = x.shape[1]
    for j in range(indices.size):
        at = int(indices[j])
        if at < -size or at >= size:
            run[0] = OUT_OF_RANGE
            return
        at = at + size if at < 0 else at
        for i in range(x.shape[0]):
            for k in range(x.shape[2]):
                y[i, j, k] = x[i, at, k]


def _scattering(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    _, indices, shape = inputs
    before, size, after = around(outputs[0].concrete, attrs["axis"])
    many = indices.size
    sources = View.dense((before, many, after)), View.dense((many,)), View.dense((shape.size,))
    return Call((*sources, View.dense((before, size, after))))


@kernel("scatter_add", layout=_scattering)
def scatter_add(updates: Any, indices: Any, shape: Any, y: Any, run: Any) -> None:
    size = y.shape[1]
    for i in range(y.shape[0]):
        for j in range(size):
            for k in range(y.shape[2]):
                y[i, j, k] = 0
    for j in range(indices.size):
        at = int(indices[j])
        if at < -size or at >= size:
            run[0] = OUT_OF_RANGE
            return
        at = at + size if at < 0 else at
        for i in range(y.shape[0]):
            for k in range(y.shape[2]):
                y[i, at, k] += updates[i, j, k]


def _coding(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    many = inputs[0].size
    return Call((View.dense((many,)), View.dense((many, attrs["depth"]))))


@kernel("one_hot", layout=_coding)
def one_hot(indices: Any, y: Any) -> None:
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = 1 if indices[i] == j else 0


host_only("take", "scatter_add", "one_hot")
