"""CUDA twins of reductions: a team of threads reduces a part of a result's entries, another launch joins the parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.spec import Spec
from flowrt.kernels.language.table import Call, View, jitable, kernel
from flowrt.kernels.language.twin import THREADS, cuda
from flowrt.kernels.teams.standing import AT_ONCE, Teams, divided, reduce_team, stand, teams_for

if TYPE_CHECKING:
    from flowrt.kernels.language.table import Attrs
    from flowrt.kernels.ops.partials import Reduced

    FormFor = Callable[[Sequence[Spec], Sequence[Spec], Attrs], Reduced]  # of inputs, outputs and attributes


def teams_of(form: Reduced) -> Teams:
    """The teams for what has this form; parts of its results are told apart in `LaidOnCuda.scratch`."""
    outer, a, middle, b, tail = form.sizes
    if form.last:
        return teams_for(outer * middle, a * tail, along=True)
    return teams_for(outer * middle * tail, a * b, along=False)


class LaidOnCuda:
    """How twins of so many operands with all entries, and so many with the results' shape, are laid out.

    All are flat. Words are the four sizes as a tuple: outermost ones told apart, of which each has every result's
    ``across`` groups of ``length`` entries, ``middle`` and ``kept`` results side by side; and how teams stand. What was
    found of every part is ``kinds`` numbers for each result. Inputs that are ``ignored`` lie behind the entries.
    """

    def __init__(
        self,
        form: FormFor,
        wide: Callable[[Any], Any],
        given: int = 1,
        columns: int = 1,
        kinds: int = 1,
        ignored: int = 0,
    ) -> None:
        self._form, self._wide, self._given, self._columns = form, wide, given, columns
        self._kinds, self._ignored = kinds, ignored

    def first(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        """Of the launch that reduces parts."""
        form = self._form(inputs, outputs, attrs)
        teams, (_, across, middle, rows, tail) = teams_of(form), form.sizes
        size, found = (math.prod(form.sizes),), self.scratch(inputs, outputs, attrs)[0].concrete
        ignored = [View.dense(spec.concrete) for spec in inputs[self._given : self._given + self._ignored]]
        views = (*[form.seen(size)] * self._given, *ignored, *[View.dense(found[2:])] * self._columns)
        length, kept = (tail, 1) if form.last else (rows, tail)
        return Call(
            (*views, View.dense(found)),
            ((across, middle, length, kept), *teams.words),
            copied=(size,) * self._given,
            blocks=teams.blocks(found[1] * found[2]),
        )

    def second(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> Call:
        """Of the launch that joins parts, where there are several."""
        call = self.first(inputs, outputs, attrs)
        _, parts, results = call.views[-1].shape
        teams = teams_for(results, parts, along=False)
        return replace(call, words=(call.words[0], *teams.words), blocks=teams.blocks(results) if parts > 1 else 0)

    def scratch(self, inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Attrs) -> list[Spec]:
        form = self._form(inputs, outputs, attrs)
        outer, _, middle, _, tail = form.sizes
        results = outer * middle * (1 if form.last else tail)
        return [Spec(self._wide(inputs[0].dtype), (self._kinds, teams_of(form).parts, results))]

    def enter(self, op: str, reduce: Callable[..., None], join: Callable[..., None]) -> None:
        """Have the op's twin ``reduce`` parts and ``join`` them."""
        kernel(op, "cuda", layout=self.first, scratch=self.scratch, then=((join, self.second),))(reduce)


@jitable
def first_entry(result: int, sizes: Any) -> Any:
    """Where the first entry of a result lies."""
    across, middle, length, kept = sizes
    group, column = divided(result, kept)
    outer, inner = divided(group, middle)
    return (outer * across * middle + inner) * length * kept + column


@jitable
def entry_on_cuda(x: Any, begin: int, number: int, sizes: Any) -> Any:
    """One of the entries that come to the result whose first entry lies at ``begin``."""
    across, middle, length, kept = sizes
    jump = 0 if across == 1 else divided(number, length)[0] * (middle - 1) * length
    return x[np.uint64(begin + (number + jump) * kept)]


def strand_by(combine: Any, start: int | None) -> Any:
    """What makes one of all that a thread reduces, from ``start`` or, if None, from the first, which counts twice."""
    first, neutral = start is None, 0 if start is None else start

    def reduce_strand(x: Any, found: Any, begin: int, at: int, end: int, width: int, sizes: Any) -> Any:
        dtype = found.dtype
        mine = dtype.type(entry_on_cuda(x, begin, 0, sizes)) if first else dtype.type(neutral)
        while at + 3 * width < end:
            one, two = entry_on_cuda(x, begin, at, sizes), entry_on_cuda(x, begin, at + width, sizes)
            three, four = entry_on_cuda(x, begin, at + 2 * width, sizes), entry_on_cuda(x, begin, at + 3 * width, sizes)
            mine = dtype.type(combine(combine(combine(combine(mine, one), two), three), four))
            at += AT_ONCE * width
        while at < end:
            mine = dtype.type(combine(mine, entry_on_cuda(x, begin, at, sizes)))
            at += width
        return mine

    return jitable(reduce_strand)


def reduction_on_cuda(combine: Any, start: int | None, finish: Any) -> tuple[Any, Any]:
    """The twins that reduce entries as `strand_by` does, and that join parts."""
    reduce_strand, reduce_all = strand_by(combine, start), reduce_team(combine)

    def reduce(x: Any, y: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
        held = cuda.shared.array(THREADS, found.dtype)
        parts, count = found.shape[1], sizes[0] * sizes[2]
        (team, rank, teams), lines = stand(width, apart), found.shape[1] * y.size
        line = cuda.blockIdx.x * teams
        while line < lines:
            own = min(line + team, lines - 1)
            part, result = divided(own, y.size)
            at, end = divided(count * part, parts)[0] + rank, divided(count * (part + 1), parts)[0]
            mine = reduce_strand(x, found, first_entry(result, sizes), at, end, width, sizes)
            whole = reduce_all(held, mine, rank, width, apart)
            if rank == 0 and line + team < lines:
                if parts > 1:
                    found[0, part, result] = whole
                else:
                    y[result] = finish(whole, count)
            line += cuda.gridDim.x * teams

    def join(x: Any, y: Any, found: Any, sizes: Any, width: int, apart: int) -> None:
        held = cuda.shared.array(THREADS, found.dtype)
        team, rank, teams = stand(width, apart)
        line = cuda.blockIdx.x * teams
        while line < y.size:
            result = min(line + team, y.size - 1)
            mine = found[0, rank, result]
            part, stop = rank + width, found.shape[1]
            while part < stop:
                mine = found.dtype.type(combine(mine, found[0, part, result]))
                part += width
            whole = reduce_all(held, mine, rank, width, apart)
            if rank == 0 and line + team < y.size:
                y[result] = finish(whole, sizes[0] * sizes[2])
            line += cuda.gridDim.x * teams

    return reduce, join
