"""flowrt's side of perf/building.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from sides.building import clock as clock

import flowrt as fr

OPEN = ExitStack()  # the sessions


def chain(size: int) -> clock.Built:
    with fr.Graph() as graph:
        x = y = fr.placeholder("float32", (16,))
        a, b = fr.Variable(np.full(16, 1.1, "float32")), fr.Variable(np.full(16, 0.1, "float32"))
        for _ in range(size // 3):
            y = fr.tanh(y * a + b)
    return lambda: ready(graph, y, x, np.zeros(16, "float32"))


def variables(size: int) -> clock.Built:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (4,))
        made = [fr.Variable(np.zeros(4, "float32")) for _ in range(size)]
        loss = fr.add_n([fr.sum(fr.square(v - x)) for v in made])
        train = fr.optim.Adam(clock.RATE).minimize(loss)
    return lambda: ready(graph, [loss, train], x, np.ones(4, "float32"))


def ready(graph: fr.Graph, fetches: Any, feed: Any, value: np.ndarray[Any, Any]) -> Callable[[], Any]:
    session = OPEN.enter_context(fr.BlockingSession(graph))
    step: Callable[..., Sequence[Any]] = session.compile(fetches, [feed])
    return lambda: step(value)


if __name__ == "__main__":
    with OPEN:
        clock.measure({"chain": chain, "variables": variables})
