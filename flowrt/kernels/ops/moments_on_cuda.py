"""CUDA twins of `moments`: a team of threads measures a part of a result's entries, another launch joins the parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrt.kernels.language.table import jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.ops.moments import form_about
from flowrt.kernels.ops.reduce import form_of
from flowrt.kernels.ops.reduce_on_cuda import LaidOnCuda, entry_on_cuda, first_entry
from flowrt.kernels.ops.teams import add_team, divided, stand


@jitable
def size_of_part(count: int, part: int, parts: int) -> int:
    """How many of ``count`` entries are in a part."""
    return divided(count * (part + 1), parts)[0] - divided(count * part, parts)[0]


@jitable
def sum_on_cuda(x: Any, begin: int, at: int, end: int, width: int, sizes: Any) -> float:
    """What one thread adds up."""
    found = 0.0
    while at + 3 * width < end:
        one, two = entry_on_cuda(x, begin, at, sizes), entry_on_cuda(x, begin, at + width, sizes)
        three, four = entry_on_cuda(x, begin, at + 2 * width, sizes), entry_on_cuda(x, begin, at + 3 * width, sizes)
        found = found + one + two + three + four
        at += 4 * width
    while at < end:
        found += entry_on_cuda(x, begin, at, sizes)
        at += width
    return found


def measure_on_cuda(
    x: Any,
    mean: Any,
    variance: Any,
    found: Any,
    across: int,
    middle: int,
    length: int,
    kept: int,
    width: int,
    apart: int,
) -> None:
    """Find the mean of a part, then the squares about it."""
    held = cuda.shared.array(THREADS, np.float64)
    sizes, parts, count = (across, middle, length, kept), found.shape[1], across * length
    (team, rank, teams), lines = stand(width, apart), found.shape[1] * mean.size
    line = cuda.blockIdx.x * teams
    while line < lines:
        own = min(line + team, lines - 1)
        part, result = divided(own, mean.size)
        begin, size = first_entry(result, sizes), size_of_part(count, part, parts)
        start, end = divided(count * part, parts)[0] + rank, divided(count * (part + 1), parts)[0]
        about = add_team(held, sum_on_cuda(x, begin, start, end, width, sizes), rank, width, apart) / size
        squares = 0.0
        at = start
        while at < end:
            away = entry_on_cuda(x, begin, at, sizes) - about
            squares += away * away
            at += width
        squares = add_team(held, squares, rank, width, apart)
        if rank == 0 and line + team < lines:
            if parts > 1:
                found[0, part, result], found[1, part, result] = about, squares
            else:
                mean[result], variance[result] = about, squares / size
        line += cuda.gridDim.x * teams


def join_on_cuda(
    x: Any,
    mean: Any,
    variance: Any,
    found: Any,
    across: int,
    middle: int,
    length: int,
    kept: int,
    width: int,
    apart: int,
) -> None:
    """The mean of the parts' means; then the squares about these, and these about that (Chan, Golub and LeVeque)."""
    held = cuda.shared.array(THREADS, np.float64)
    parts, count = found.shape[1], across * length
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < mean.size:
        result, total, squares = min(line + team, mean.size - 1), 0.0, 0.0
        part = rank
        while part < parts:
            total += size_of_part(count, part, parts) * found[0, part, result]
            part += width
        about = add_team(held, total, rank, width, apart) / count
        part = rank
        while part < parts:
            away = found[0, part, result] - about
            squares += found[1, part, result] + size_of_part(count, part, parts) * away * away
            part += width
        squares = add_team(held, squares, rank, width, apart)
        if rank == 0 and line + team < mean.size:
            mean[result], variance[result] = about, squares / count
        line += cuda.gridDim.x * teams


_moments = LaidOnCuda(
    lambda inputs, outputs, attrs: form_of(inputs, attrs), lambda dtype: "float64", columns=2, kinds=2
)
kernel("moments", "cuda", layout=_moments.first, scratch=_moments.scratch, then=((join_on_cuda, _moments.second),))(
    measure_on_cuda
)


def sum_about_on_cuda(
    x: Any,
    weights: Any,
    mean: Any,
    total: Any,
    product: Any,
    found: Any,
    across: int,
    middle: int,
    length: int,
    kept: int,
    width: int,
    apart: int,
) -> None:
    """Add up the weights of a part, and their products with what the entries are from the mean."""
    held = cuda.shared.array(THREADS, np.float64)
    sizes, parts, count = (across, middle, length, kept), found.shape[1], across * length
    (team, rank, teams), lines = stand(width, apart), found.shape[1] * mean.size
    line = cuda.blockIdx.x * teams
    while line < lines:
        own = min(line + team, lines - 1)
        part, result = divided(own, mean.size)
        begin, about, one, other = first_entry(result, sizes), mean[result], 0.0, 0.0
        at, end = divided(count * part, parts)[0] + rank, divided(count * (part + 1), parts)[0]
        while at < end:
            weight = entry_on_cuda(weights, begin, at, sizes)
            one += weight
            other += weight * (entry_on_cuda(x, begin, at, sizes) - about)
            at += width
        one, other = add_team(held, one, rank, width, apart), add_team(held, other, rank, width, apart)
        if rank == 0 and line + team < lines:
            if parts > 1:
                found[0, part, result], found[1, part, result] = one, other
            else:
                total[result], product[result] = one, other
        line += cuda.gridDim.x * teams


def join_about_on_cuda(
    x: Any,
    weights: Any,
    mean: Any,
    total: Any,
    product: Any,
    found: Any,
    across: int,
    middle: int,
    length: int,
    kept: int,
    width: int,
    apart: int,
) -> None:
    held = cuda.shared.array(THREADS, np.float64)
    team, rank, teams = stand(width, apart)
    line = cuda.blockIdx.x * teams
    while line < mean.size:
        result, one, other = min(line + team, mean.size - 1), 0.0, 0.0
        part, stop = rank, found.shape[1]
        while part < stop:
            one += found[0, part, result]
            other += found[1, part, result]
            part += width
        one, other = add_team(held, one, rank, width, apart), add_team(held, other, rank, width, apart)
        if rank == 0 and line + team < mean.size:
            total[result], product[result] = one, other
        line += cuda.gridDim.x * teams


_sums = LaidOnCuda(
    lambda inputs, outputs, attrs: form_about(inputs, attrs), lambda dtype: "float64", given=2, columns=3, kinds=2
)
kernel("sums_about", "cuda", layout=_sums.first, scratch=_sums.scratch, then=((join_about_on_cuda, _sums.second),))(
    sum_about_on_cuda
)
