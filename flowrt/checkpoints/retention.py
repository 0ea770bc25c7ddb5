"""Which checkpoints stay. Law: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

HOUR = 3600.0


def superfluous(
    saved_at: Mapping[tuple[int, int], float], keep: int, every_hours: float | None
) -> list[tuple[int, int]]:
    """Of the saves, by (number, step), each with the time at which it was made, those that need not stay, oldest first.

    The newest ``keep`` stay. With ``every_hours`` so does the first of all, and whichever is as many hours after the
    last one before it that stays for this.
    """
    saves = sorted(saved_at)
    stays = set(saves[-keep:])
    if every_hours is not None:
        due = -math.inf
        for save in saves:
            if saved_at[save] >= due:
                stays.add(save)
                due = saved_at[save] + every_hours * HOUR
    return [save for save in saves if save not in stays]
