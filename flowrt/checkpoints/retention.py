"""Which checkpoints stay. Law: pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

HOUR = 3600.0


def superfluous(
    saved_at: Mapping[tuple[int, int], float | None], keep: int, every_hours: float | None
) -> list[tuple[int, int]]:
    """Of the saves, by (number, step), each with the time at which it was made, those that need not stay, oldest first.

    The newest ``keep`` stay. With ``every_hours`` so does the first of all, and whichever is as many hours after the
    last one before it that stays for this, or made before that, as where a clock was set back; and those whose time
    cannot be told, which may be a matter of the moment.
    """
    saves = sorted(saved_at)
    stays = set(saves[-keep:])
    if every_hours is not None:
        last, due = math.inf, 0.0
        for save in saves:
            now = saved_at[save]
            if now is None:
                stays.add(save)
            elif not last <= now < due:
                stays.add(save)
                last, due = now, now + every_hours * HOUR
    return [save for save in saves if save not in stays]
