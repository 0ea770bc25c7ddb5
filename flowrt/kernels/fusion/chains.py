"""Where several costly ops are better computed in as many launches than in the iterations of one loop.

Law: pure; by sizes and ops. Costly ops go through a loop in several vectors side by side, and the constants and values
of two of them are more than the registers hold: one loop over both took 1.02 to 1.17 times as long as two loops (AMD
Zen 3, 3,000 to 524,288 entries). So each has a launch with what is cheap around it, as long as what one leaves to
another stays in a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrt.kernels.fusion.program import CACHED
from flowrt.kernels.language.table import is_costly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowrt.kernels.fusion.program import FusedProgram

FEW = 1 << 11  # entries that are not worth two launches


def cut_chains(program: FusedProgram) -> list[list[int]]:
    """The members, by number, in pieces with one costly op each; nothing where they are better left together."""
    costly = [n for n in program.made if is_costly(program.op(n))]
    if len(costly) < 2 or program.specs[costly[0]].size < FEW:
        return []
    stages, views = _stages(program, costly), program.views.difference(program.results)
    pieces: list[list[int]] = [[] for _ in costly]
    handed: set[int] = set()
    for n, stage in stages.items():
        if n not in views:
            pieces[stage].append(n)
            made = {i for i in program.taken(n) if i in stages}.difference(views, program.results)
            handed.update(i for i in made if stages[i] < stage)
    if sum(program.specs[n].nbytes for n in handed) > CACHED:
        return []
    return [program.with_views(piece, views) for piece in pieces]


def _stages(program: FusedProgram, costly: Sequence[int]) -> dict[int, int]:
    """The piece of each member: costly ones have one each, cheap ones that of the first that takes them."""
    stages: dict[int, int] = {}
    for n in program.made:
        before = max((stages[i] for i in program.taken(n) if i in stages), default=0)
        stages[n] = costly.index(n) if n in costly else before
    readers: dict[int, int] = {}  # the first piece that takes each
    for n in reversed(program.made):
        if not is_costly(program.op(n)) and not program.reduces(n) and n in readers:
            stages[n] = max(stages[n], readers[n])
        for i in program.taken(n):
            readers[i] = min(readers.get(i, len(costly)), stages[n])
    return stages
