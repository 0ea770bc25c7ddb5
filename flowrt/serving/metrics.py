"""What a server counts, as Prometheus reads it.

Law: pure, and bounded: the names of models and a few codes are all that tells one line from another, and quantiles are
of the last `KEPT` answers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from flowrt.metrics import escaped

KEPT = 4096
QUANTILES = (0.5, 0.9, 0.99)


class Metrics:
    """Of one model: how requests ended, how long they took, and what ran."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()  # requests, by how
        self.runs = self.rows = 0
        self.sizes: Counter[int] = Counter()  # runs, by the requests in them
        self.seconds = 0.0
        self._latest: deque[float] = deque(maxlen=KEPT)

    def note_ended(self, how: str, seconds: float) -> None:
        """A request was answered, or not: "ok", "invalid", "overload", "timeout", "cancelled" or "error"."""
        self.ended[how] += 1
        if how == "ok":
            self.seconds += seconds
            self._latest.append(seconds)

    def note_run(self, requests: int, rows: int) -> None:
        """So many requests were run together."""
        self.runs += 1
        self.rows += rows
        self.sizes[requests] += 1

    def quantiles(self) -> dict[float, float]:
        """How many seconds so large a part of the latest answers took at most."""
        if not self._latest:
            return {}
        return dict(zip(QUANTILES, np.quantile(np.array(self._latest), QUANTILES).tolist(), strict=True))


def text(models: Mapping[str, Metrics], waiting: Mapping[str, tuple[int, int]]) -> str:
    """All of it; ``waiting`` are the requests that have no answer yet, and their bytes."""
    lines: list[str] = []

    def family(name: str, kind: str, about: str, of: Callable[[str], Iterable[tuple[str, str, float]]]) -> None:
        lines.extend((f"# HELP flowrt_serving_{name} {about}", f"# TYPE flowrt_serving_{name} {kind}"))
        for model in models:
            for ending, labels, value in of(model):
                lines.append(f'flowrt_serving_{name}{ending}{{model="{escaped(model)}"{labels}}} {value:.12g}')

    family(
        "requests_total",
        "counter",
        "Requests, by how they ended.",
        lambda model: [("", f',outcome="{how}"', count) for how, count in sorted(models[model].ended.items())],
    )
    family("rows_total", "counter", "Rows that were run.", lambda model: [("", "", models[model].rows)])
    family("batch_requests", "histogram", "Requests run together.", lambda model: _histogram(models[model]))
    family("latency_seconds", "summary", "From arrival to answer.", lambda model: _latency(models[model]))
    family("waiting_requests", "gauge", "Without an answer yet.", lambda model: [("", "", waiting[model][0])])
    family("waiting_bytes", "gauge", "Of requests without an answer.", lambda model: [("", "", waiting[model][1])])
    return "\n".join(lines) + "\n"


def _histogram(metrics: Metrics) -> Iterable[tuple[str, str, float]]:
    largest = max(metrics.sizes, default=1)
    for bound in (1 << power for power in range((largest - 1).bit_length() + 1)):
        yield "_bucket", f',le="{bound}"', sum(count for size, count in metrics.sizes.items() if size <= bound)
    yield "_bucket", ',le="+Inf"', metrics.runs
    yield "_sum", "", sum(size * count for size, count in metrics.sizes.items())
    yield "_count", "", metrics.runs


def _latency(metrics: Metrics) -> Iterable[tuple[str, str, float]]:
    for quantile, seconds in metrics.quantiles().items():
        yield "", f',quantile="{quantile:g}"', seconds
    yield "_sum", "", metrics.seconds
    yield "_count", "", metrics.ended["ok"]
