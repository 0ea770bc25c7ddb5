"""What begins values: fills, counts, and the sizes of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrt.base.spec import MAX_RANK
from flowrt.kernels.language.table import Attrs, Call, View, flat, host_only, kernel
from flowrt.kernels.language.twin import cuda

if TYPE_CHECKING:
    from flowrt.base.spec import Spec


def _sizes(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
    """The sizes as words, as many for every rank, so that one compiled variant serves all ranks."""
    dims = inputs[0].concrete
    views = (View.dense((inputs[0].size,)), View.dense((len(dims),)))
    return Call(views, (*dims, *(0,) * (MAX_RANK - len(dims))))


@kernel("shape_of", layout=_sizes)
def shape_of(x: Any, y: Any, *sizes: int) -> None:
    for i in range(y.size):
        y[i] = sizes[i]


@kernel("full_like", layout=flat, moved=(0, 1, 2))
@kernel("full", layout=flat, moved=(0, 1, 2))
def full(like: Any, value: Any, y: Any) -> None:
    entry = value[0]
    for i in range(y.size):
        y[i] = entry


@kernel("full_like", "cuda", layout=flat)
@kernel("full", "cuda", layout=flat)
def full_on_cuda(like: Any, value: Any, y: Any) -> None:
    i = cuda.grid(1)
    while i < y.size:
        y[i] = value[0]
        i += cuda.gridsize(1)


@kernel("arange", layout=flat)
def arange(start: Any, stop: Any, step: Any, y: Any) -> None:
    first, by = start[0], step[0]
    for i in range(y.size):
        y[i] = first + i * by


@kernel("arange", "cuda", layout=flat)
def arange_on_cuda(start: Any, stop: Any, step: Any, y: Any) -> None:
    i = cuda.grid(1)
    while i < y.size:
        y[i] = start[0] + i * step[0]
        i += cuda.gridsize(1)


host_only("shape_of", why="the host knows shapes, whichever device computes")
