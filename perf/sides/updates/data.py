"""What every side of perf/updates.py updates: how many parameters of what size, and their gradients. NumPy alone.

A step answers the first entry of the last parameter as it was before.
"""

from __future__ import annotations

import numpy as np

SIZES = {"small": (200, 64), "middling": (60, 10_000), "large": (20, 1_000_000)}
RULES = ("sgd", "momentum", "adam")
RATE, MOMENTUM, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.9, 0.999, 1e-8
WORKLOADS = [f"{rule}-{size}" for rule in RULES for size in SIZES]


def parameters(workload: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The parameters at first, and their gradients: none so small that what is kept of it becomes subnormal."""
    count, size = SIZES[workload.split("-")[1]]
    r = np.random.default_rng(19)
    values = [r.standard_normal(size, dtype=np.float32) for _ in range(count)]
    return values, [r.uniform(0.1, 1.0, size).astype(np.float32) for _ in range(count)]
