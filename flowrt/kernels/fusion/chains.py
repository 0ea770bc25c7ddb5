"""Where several costly ops are better computed in as many launches than in the iterations of one loop.

Law: pure; by sizes and ops. Costly ops go through a loop in several vectors side by side, and the constants and values
of two of them are more than the registers hold: one loop over both took 1.02 to 1.17 times as long as two loops (AMD
Zen 3, 3,000 to 524,288 entries). So each has a launch with what is cheap around it, as long as what one leaves to
another stays in a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from flowrt.kernels.fusion.program import CACHED, is_reduction, views_of, with_views
from flowrt.kernels.language.table import is_costly

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.kernels.fusion.program import Member

FEW = 1 << 11  # entries that are not worth two launches


def cut_chains(
    specs: Sequence[Spec], members: Sequence[Member], results: Collection[int], first: int
) -> list[list[int]]:
    """The members, by number, in pieces with one costly op each; nothing where they are better left together."""
    costly = [n for n, member in enumerate(members, first) if is_costly(member[0])]
    if len(costly) < 2 or specs[costly[0]].size < FEW:
        return []
    stages = _stages(members, first, costly)
    views = views_of(members, first).difference(results)
    pieces: list[list[int]] = [[] for _ in costly]
    handed: set[int] = set()
    for n, stage in enumerate(stages, first):
        if n not in views:
            pieces[stage].append(n)
            made = {i for i in members[n - first][1] if i >= first}.difference(views, results)
            handed.update(i for i in made if stages[i - first] < stage)
    if sum(specs[n].nbytes for n in handed) > CACHED:
        return []
    return [with_views(piece, members, first, views) for piece in pieces]


def _stages(members: Sequence[Member], first: int, costly: Sequence[int]) -> list[int]:
    """The piece of each member: costly ones have one each, cheap ones that of the first that takes them."""
    stages: list[int] = []
    for n, (_, operands, _, _) in enumerate(members, first):
        before = max((stages[i - first] for i in operands if i >= first), default=0)
        stages.append(costly.index(n) if n in costly else before)
    readers: dict[int, int] = {}  # the first piece that takes each
    for n in reversed(range(first, first + len(members))):
        op, operands, _, _ = members[n - first]
        if not is_costly(op) and not is_reduction(op) and n in readers:
            stages[n - first] = max(stages[n - first], readers[n])
        for i in operands:
            readers[i] = min(readers.get(i, len(costly)), stages[n - first])
    return stages
