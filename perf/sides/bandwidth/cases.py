"""What bandwidth.py measures: each case by its program's name, what it is given, and the least that it must move.

Sizes are of float32. A gradient is of the program for the inputs in ``of``, weighted by the last input; the program's
own result is answered, too. What must move counts each array as often as it must pass through memory: statistics of
columns are known only at the end of a first pass, those of a row while the row still lies in a cache.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ids:
    """Random indices below ``bound``, sorted or not."""

    shape: Shape
    bound: int
    sorted: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A program on inputs; ``moved`` counts what passes through memory in numbers of four bytes."""

    program: str
    given: tuple[Shape | Ids, ...]
    moved: int
    of: tuple[int, ...] = ()
    scale: float = 1.0  # of the numbers

    @property
    def name(self) -> str:
        sizes = "x".join(map(str, self.given[0] if isinstance(self.given[0], tuple) else self.given[0].shape))
        return f"{self.program}{' gradient' if self.of else ''} {sizes}"

    @property
    def held(self) -> int:
        """How many numbers it is given and answers, about."""
        given = [math.prod(what if isinstance(what, tuple) else what.shape) for what in self.given]
        return sum(given) + (given[0] if self.moved >= 2 * given[0] else 0)

    def values(self) -> list[Array]:
        return [_drawn(number, what, self.scale) for number, what in enumerate(self.given)]


def _drawn(seed: int, what: Shape | Ids, scale: float) -> Array:
    rng = np.random.default_rng(seed)
    if isinstance(what, tuple):
        return rng.normal(0, scale, what).astype(np.float32)
    ids = rng.integers(0, what.bound, what.shape).astype(np.int32)
    return np.sort(ids) if what.sorted else ids


def _norms() -> list[Case]:
    cases = []
    for shape in ((128, 28, 28, 32), (32, 14, 14, 256), (256, 512)):
        n, channels = math.prod(shape), shape[-1:]
        cases.append(Case("batch_norm", (shape, channels, channels), 3 * n))
        cases.append(Case("batch_norm", (shape, channels, channels, shape), 8 * n, (0, 1, 2)))
    for shape in ((4096, 768), (128, 512), (32, 128, 256)):
        n, channels = math.prod(shape), shape[-1:]
        cases.append(Case("layer_norm", (shape, channels, channels), 2 * n))
        cases.append(Case("layer_norm", (shape, channels, channels, shape), 5 * n, (0, 1, 2)))
    return cases


def _curves() -> list[Case]:
    cases, shape = [], (1 << 20,)
    for program in ("gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "softplus"):
        cases.append(Case(program, (shape,), 2 * shape[0]))
        cases.append(Case(program, (shape, shape), 4 * shape[0], (0,)))
    return [*cases, Case("dropout", (shape,), 2 * shape[0]), Case("dropout", (shape, shape), 4 * shape[0], (0,))]


def _classes() -> list[Case]:
    shape, rows = (4096, 1024), (4096,)
    n = math.prod(shape)
    cases = [Case(program, (shape,), 2 * n) for program in ("softmax", "log_softmax")]
    cases += [Case(program, (shape, shape), 4 * n, (0,)) for program in ("softmax", "log_softmax")]
    cases += [Case("logsumexp", (shape,), n), Case("logsumexp", (shape, rows), 2 * n, (0,))]
    labels = Ids(rows, shape[1])
    cases += [Case("class_entropy", (shape, labels), n), Case("class_entropy", (shape, labels, rows), 2 * n, (0,))]
    return [*cases, Case("entropy", (shape, shape), 2 * n), Case("entropy", (shape, shape, rows), 3 * n, (0,))]


def _windows() -> list[Case]:
    x, y = (64, 32, 32, 32), (64, 16, 16, 32)
    wide, small = math.prod(x), math.prod(y)
    cases = []
    for program, again in (("max_pool", wide), ("avg_pool", 0), ("max_pool_3_by_2", wide)):
        cases.append(Case(program, (x,), wide + small))
        cases.append(Case(program, (x, y), 2 * wide + 2 * small + again, (0,)))
    return cases


def _reductions() -> list[Case]:
    shape, images = (2048, 1024), (64, 32, 32, 32)
    n, channels = math.prod(shape), (images[-1],)
    cases = [
        Case(f"{reduction}_{axis}", (shape,), n) for reduction in ("sum", "mean", "max") for axis in ("0", "1", "all")
    ]
    cases += [Case("var_0", (shape,), 2 * n), Case("var_1", (shape,), n), Case("var_all", (shape,), 2 * n)]
    cases += [Case("cumsum_0", (shape,), 2 * n), Case("cumsum_1", (shape,), 2 * n)]
    many = math.prod(images)
    cases.append(Case("bias_add", (images, channels), 2 * many))
    return [*cases, Case("bias_add", (images, channels, images), 3 * many, (1,))]


def _rows() -> list[Case]:
    table, count = (100_000, 64), 16_384
    n = count * table[1]
    ids, groups = Ids((count,), table[0]), Ids((count,), 2048, sorted=True)
    cases = [Case("take", (table, ids), 2 * n)]
    cases.append(Case("scatter_add", ((count, 64), Ids((count,), 8192)), n + 2 * n + 8192 * 64))
    return [*cases, Case("segment_sum", ((count, 64), groups), n + 2048 * 64)]


def _recurrent() -> list[Case]:
    cases = []
    for units in (128, 512):
        steps, batch, weights = 10, 32, (units, 4 * units)
        x, h, matrix = (steps, batch, units), (batch, units), math.prod(weights)
        given = (x, h, h, weights, weights, (4 * units,))
        cases.append(Case("lstm", given, 2 * matrix, scale=0.1))
        cases.append(Case("lstm", (*given, x), 6 * matrix, (3, 4, 5), 0.1))
    return cases


def _moves() -> list[Case]:
    shape, images = (2048, 1024), (64, 32, 32, 32)
    n, many = math.prod(shape), math.prod(images)
    cases = [Case("concat_0", (shape, shape), 4 * n), Case("concat_1", (shape, shape), 4 * n)]
    cases += [Case("pad", (images,), many + 64 * 34 * 34 * 32), Case("transpose", (shape,), 2 * n)]
    return [*cases, Case("to_nchw", (images,), 2 * many), Case("heads", ((32, 128, 8, 32),), 2 * 32 * 128 * 256)]


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        *_norms(), *_curves(), *_classes(), *_windows(), *_reductions(), *_rows(), *_recurrent(), *_moves(),
    )
}  # fmt: skip


def best(call: Callable[[], Any], seconds: float) -> float:
    """The least of all runs: others may use the machine."""
    for _ in range(3):
        call()
    least, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least


def sums(answers: Sequence[Any]) -> list[float]:
    """One number of each answer, by which the sides are compared."""
    return [float(np.asarray(answer, np.float64).sum()) for answer in answers]


def report(make: Callable[[Case, Sequence[Array]], tuple[Callable[[], Any], Callable[[], Sequence[Any]]]]) -> None:
    """Print, as one line of JSON, seconds and sums for every case named in the arguments (after the seconds of each).

    ``make`` answers a call to be timed and one that answers arrays.
    """
    found = {}
    for name in sys.argv[2:]:
        call, answers = make(CASES[name], CASES[name].values())
        found[name] = best(call, float(sys.argv[1])), sums(answers())
    print(json.dumps(found))
