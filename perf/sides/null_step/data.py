"""What every side of perf/null_step.py does: one variable, the gradient of half its squares, SGD. Needs NumPy alone.

The loss of a worker is half the sum of the squares of what it reads, so the gradient is what it reads: all of ``w``
(scalar, dense), or the rows of a table that its batch names. A step moves the variable by RATE times the mean over the
workers. Nothing is cheaper to compute, so what is measured is how a step is made.
"""

from __future__ import annotations

import numpy as np

RATE = 1e-3
DENSE = 25_000_000  # floats: 100 MB
WIDTH = 64  # floats of a row
TABLES = {"rows-2.5MB": 10_000, "rows-256MB": 1_000_000, "rows-2.5GB": 10_000_000}
ROWS_A_STEP = 32  # of each worker
BATCHES = 16  # of each worker, then they come again
ROW_RATE = 0.1
WORKLOADS = ("scalar", "dense", *TABLES)


def floats(workload: str) -> int:
    """How many floats the one dense variable has."""
    return {"scalar": 1, "dense": DENSE}[workload]


def ids(workload: str, workers: int) -> np.ndarray:
    """The rows that each worker's batches name: int32 [workers, BATCHES, ROWS_A_STEP], none twice a step."""
    rng, of_a_step = np.random.default_rng(12), workers * ROWS_A_STEP
    steps = [rng.choice(TABLES[workload], of_a_step, replace=False) for _ in range(BATCHES)]
    return np.stack(steps).reshape(BATCHES, workers, ROWS_A_STEP).swapaxes(0, 1).astype(np.int32)


def probes(workload: str, workers: int) -> np.ndarray:
    """The rows whose first entries are compared in the end: those of every worker's first batch."""
    return np.unique(ids(workload, workers)[:, 0])


def expected(workload: str, workers: int, steps: int) -> np.ndarray:
    """What the probes are after so many steps; of a dense variable, all entries are alike and one is asked for."""
    if workload not in TABLES:
        return np.array([(1 - RATE) ** steps])
    named = ids(workload, workers)
    found, where = np.unique(named, return_inverse=True)
    where = where.reshape(named.shape)
    rows = np.ones(len(found))
    for step in range(steps):
        occurrences = np.bincount(where[:, step % BATCHES].ravel(), minlength=len(found))
        rows -= ROW_RATE / workers * occurrences * rows
    return rows[np.searchsorted(found, probes(workload, workers))]


def right(workload: str, workers: int, steps: int, found: np.ndarray) -> bool:
    """Whether the probes are what so many steps make of them, in float32."""
    wanted = expected(workload, workers, steps)
    return found.size == wanted.size and np.allclose(found.ravel(), wanted, rtol=2e-3, atol=1e-6)
