"""What every side of perf/transport.py's steps does. Needs NumPy alone.

pass-SIZE    a value that a server holds goes to a worker, which answers its first and last entry
fetch-SIZE   the same value goes to the client
steps        a scalar goes from the client to a server, which adds 1, to a worker, which adds 1, and back
"""

from __future__ import annotations

import numpy as np

SIZES = {"1KiB": 1 << 10, "64MiB": 64 << 20, "256MiB": 256 << 20}
WORKLOADS = (*(f"{what}-{size}" for what in ("pass", "fetch") for size in SIZES), "steps")
VALUE = 3.0  # every entry
REQUEST = 8  # bytes that ask for the value


def floats(workload: str) -> int:
    """How many float32 the value has."""
    return SIZES[workload.split("-")[1]] // 4 if workload != "steps" else 1


def value(workload: str) -> np.ndarray:
    return np.full(floats(workload), VALUE, np.float32)


def right(found: np.ndarray) -> bool:
    """Whether this is the value, at both its ends."""
    return bool(found.ravel()[0] == VALUE and found.ravel()[-1] == VALUE)
