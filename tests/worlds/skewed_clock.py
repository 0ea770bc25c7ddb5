"""Imported by nodes whose clock is to be ahead by an hour, as that of a machine is that was started earlier."""

from __future__ import annotations

import time

from trace_world import AHEAD

_true = time.clock_gettime_ns


def _ahead(clock: int) -> int:
    return _true(clock) + AHEAD


time.clock_gettime_ns = _ahead
