"""CUDA twins of `softmax`: a team of threads has a row at a time, each thread every so many of the row's entries.

Exponentials are of the entries' own dtype, as on CPUs; their sums are held in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.index import around
from flowrt.kernels.ops.nn.softmax import NOT_A_CLASS, examples
from flowrt.kernels.ops.reduce import larger
from flowrt.kernels.ops.slices import row_of
from flowrt.kernels.teams.standing import add_team, divided, reduce_team, stand, teams_for

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

largest_of_team = reduce_team(larger)


def _in_teams(call: Call, rows: int, count: int, along: bool) -> Call:
    """The call with a team for each row of so many entries."""
    teams = teams_for(rows, count, along=along)
    return replace(call, words=teams.words, blocks=teams.blocks(rows) if count else 0)


def _rows_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    outer, count, inner = around(inputs[0].concrete, attrs["axis"])
    view = View.dense((outer, count, inner))
    return _in_teams(Call((view, view)), outer * inner, count, inner == 1)


@jitable
def largest_on_cuda(x: Any, o: int, i: int, rank: int, width: int, apart: int, held: Any) -> Any:
    """The largest entry of a line, NaN if one is."""
    best = held.dtype.type(x[o, 0, i])
    k, stop = rank, x.shape[1]
    while k < stop:
        best = larger(best, held.dtype.type(x[o, k, i]))
        k += width
    return largest_of_team(held, best, rank, width, apart)


@jitable
def powers_on_cuda(x: Any, o: int, i: int, top: Any, rank: int, width: int, apart: int, held: Any) -> Any:
    """The sum of the exponentials of a line, less its largest entry."""
    found = 0.0
    k, stop = rank, x.shape[1]
    while k < stop:
        found += math.exp(x[o, k, i] - top)
        k += width
    return add_team(held, found, rank, width, apart)


def _softmax_by(rest_of: Any, entry: Any) -> Any:
    """The twin whose entries are ``entry`` of these less the largest, and of ``rest_of`` the sum of their powers."""

    def softmax(x: Any, y: Any, width: int, apart: int) -> None:
        tops, sums = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, np.float64)
        (team, rank, teams), lines = stand(width, apart), x.shape[0] * x.shape[2]
        line = cuda.blockIdx.x * teams
        while line < lines:
            own = min(line + team, lines - 1)
            o, i = divided(own, x.shape[2])
            top = largest_on_cuda(x, o, i, rank, width, apart, tops)
            rest = rest_of(powers_on_cuda(x, o, i, top, rank, width, apart, sums), y)
            k, stop = rank, x.shape[1] if line + team < lines else 0
            while k < stop:
                y[o, k, i] = entry(x[o, k, i] - top, rest)
                k += width
            line += cuda.gridDim.x * teams

    return softmax


kernel("softmax", "cuda", layout=_rows_on_cuda)(
    _softmax_by(jitable(lambda total, y: y.dtype.type(1 / total)), jitable(lambda less, share: math.exp(less) * share))
)
kernel("log_softmax", "cuda", layout=_rows_on_cuda)(
    _softmax_by(jitable(lambda total, y: math.log(total)), jitable(lambda less, rest: less - rest))
)


def _examples_on_cuda(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Mapping[str, Any]) -> Call:
    """As `examples`, the logits as (examples, classes, 1)."""
    call = examples(inputs, outputs, attrs)
    rows, classes = call.views[0].shape
    seen = replace(call, views=(View.dense((rows, classes, 1)), *call.views[1:]))
    found = _in_teams(seen, rows, classes, True)
    return found if classes else replace(found, blocks=1)


@kernel("class_cross_entropy", "cuda", layout=_examples_on_cuda)
def class_cross_entropy_on_cuda(logits: Any, labels: Any, y: Any, width: int, apart: int, run: Any) -> None:
    tops, sums = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, np.float64)
    (team, rank, teams), rows = stand(width, apart), logits.shape[0]
    first = cuda.blockIdx.x * teams
    while first < rows:
        row = min(first + team, rows - 1)
        label = row_of(labels[row], logits.shape[1], 0)
        known = label >= 0 and labels[row] >= 0
        if logits.shape[1] > 0:
            top = largest_on_cuda(logits, row, 0, rank, width, apart, tops)
            rest = math.log(powers_on_cuda(logits, row, 0, top, rank, width, apart, sums))
            if known and rank == 0 and first + team < rows:
                y[row] = rest - (logits[row, label, 0] - top)
        if not known:
            run[0] = NOT_A_CLASS
        first += cuda.gridDim.x * teams


@kernel("class_cross_entropy_slope", "cuda", layout=_examples_on_cuda)
def class_cross_entropy_slope_on_cuda(
    logits: Any, labels: Any, dy: Any, y: Any, width: int, apart: int, run: Any
) -> None:
    tops, sums = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, np.float64)
    (team, rank, teams), rows = stand(width, apart), logits.shape[0]
    first = cuda.blockIdx.x * teams
    while first < rows:
        row = min(first + team, rows - 1)
        label = row_of(labels[row], logits.shape[1], 0)
        known = label >= 0 and labels[row] >= 0
        if logits.shape[1] > 0:
            top = largest_on_cuda(logits, row, 0, rank, width, apart, tops)
            share = y.dtype.type(1 / powers_on_cuda(logits, row, 0, top, rank, width, apart, sums))
            k, stop = rank, logits.shape[1] if known and first + team < rows else 0
            while k < stop:
                y[row, k] = dy[row] * (math.exp(logits[row, k, 0] - top) * share - (1 if k == label else 0))
                k += width
        if not known:
            run[0] = NOT_A_CLASS
        first += cuda.gridDim.x * teams


@kernel("cross_entropy", "cuda", layout=_examples_on_cuda)
def cross_entropy_on_cuda(logits: Any, labels: Any, y: Any, width: int, apart: int) -> None:
    tops, sums = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, np.float64)
    (team, rank, teams), rows = stand(width, apart), logits.shape[0]
    first = cuda.blockIdx.x * teams
    while first < rows:
        row, found = min(first + team, rows - 1), 0.0
        if logits.shape[1] > 0:
            top = largest_on_cuda(logits, row, 0, rank, width, apart, tops)
            rest = math.log(powers_on_cuda(logits, row, 0, top, rank, width, apart, sums))
            k, stop = rank, logits.shape[1]
            while k < stop:
                if labels[row, k] != 0:  # of the impossible ask nothing
                    found += labels[row, k] * (rest - (logits[row, k, 0] - top))
                k += width
        total = add_team(sums, found, rank, width, apart)
        if rank == 0 and first + team < rows:
            y[row] = total
        first += cuda.gridDim.x * teams


@kernel("cross_entropy_slope", "cuda", layout=_examples_on_cuda)
def cross_entropy_slope_on_cuda(logits: Any, labels: Any, dy: Any, y: Any, width: int, apart: int) -> None:
    tops, sums = cuda.shared.array(THREADS, y.dtype), cuda.shared.array(THREADS, np.float64)
    (team, rank, teams), rows = stand(width, apart), logits.shape[0]
    first = cuda.blockIdx.x * teams
    while first < rows and logits.shape[1] > 0:
        row, found = min(first + team, rows - 1), 0.0
        k, stop = rank, logits.shape[1]
        while k < stop:
            found += labels[row, k]
            k += width
        weight = add_team(sums, found, rank, width, apart)
        top = largest_on_cuda(logits, row, 0, rank, width, apart, tops)
        share = y.dtype.type(weight / powers_on_cuda(logits, row, 0, top, rank, width, apart, sums))
        k, stop = rank, logits.shape[1] if first + team < rows else 0
        while k < stop:
            y[row, k] = dy[row] * (math.exp(logits[row, k, 0] - top) * share - labels[row, k])
            k += width
        first += cuda.gridDim.x * teams
