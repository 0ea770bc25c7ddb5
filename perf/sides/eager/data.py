"""What every side of perf/eager.py computes on, and how often. Needs NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sides import harness
from sides.harness import Settings, Side

CALLS, FEW = 50, 2  # of each op in a step; of those on large arrays
NETWORK = 9  # ops
_BATCH, _WIDTH, _CLASSES, _LARGE = 32, 64, 10, 1024
_random = np.random.default_rng(11)


def _normal(*sizes: int) -> np.ndarray:
    return (_random.standard_normal(sizes) / 4).astype(np.float32)


x, y, scale, offset = _normal(_BATCH, _WIDTH), _normal(_BATCH, _WIDTH), _normal(_WIDTH), _normal(_WIDTH)
w1, b1, w2, b2 = _normal(_WIDTH, _WIDTH), _normal(_WIDTH), _normal(_WIDTH, _CLASSES), _normal(_CLASSES)
logits, labels = _normal(_BATCH, _CLASSES), _random.integers(0, _CLASSES, _BATCH).astype(np.int32)
whole, rows = _random.integers(0, 9, (_BATCH, _WIDTH)), _random.integers(0, _BATCH, _BATCH).astype(np.int32)
image, filters = _normal(2, 8, 8, 4), _normal(3, 3, 4, 8)
large, vector = _normal(_LARGE, _LARGE), _normal(_LARGE)


def sides(ops: Mapping[str, Callable[[], Any]], last: Callable[[Any], Any]) -> dict[str, Callable[[Settings], Side]]:
    """A workload of each op; ``last`` waits for what an op answered, and makes an array of it."""

    def workload(name: str) -> Callable[[Settings], Side]:
        def side(a: Settings) -> Side:
            harness.imported()
            call, calls = ops[name], FEW if name == "large" else CALLS

            def step() -> Any:
                for _ in range(calls - 1):
                    call()
                answer = last(call())
                return answer.size if name == "normal" else answer  # everybody's numbers are others

            return Side(step, work=calls * (NETWORK if name == "network" else 1))

        return side

    return {name: workload(name) for name in ops}
