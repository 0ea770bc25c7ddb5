"""Random programs of elementwise chains, broadcasts, reductions and rows, fused and as written: is fused ever slower?

Every program is a seed's: its shapes run from scalars to some million entries, thin and wide, its folds are over any
axes, and some are followed by their gradient. Both sides are open at once and take turns, round by round; a program's
ratio is the median of its rounds' (as written ÷ fused, so that less than 1 is a loss), its spread their quartiles.
`perf/fusion.py --random` prints what is found here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGEST = 22  # the binary logarithm of how many entries a program's elements have at most
LOSS, ROUNDS, TURN = 0.97, 9, 0.006  # a ratio that is worth a look; rounds, and seconds that a side's turn takes

UNARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "relu": lambda fr, x: fr.relu(x),
    "abs": lambda fr, x: fr.abs(x),
    "negative": lambda fr, x: -x,
    "affine": lambda fr, x: x * 0.7 + 0.2,
    "clip": lambda fr, x: fr.clip(x, -1.5, 1.5),
    "square": lambda fr, x: fr.minimum(fr.square(x), 4.0),
    "root": lambda fr, x: fr.sqrt(fr.abs(x) + 0.1),
    "slope": lambda fr, x: x * fr.rsqrt(fr.square(x) + 1.0),
    "inverse": lambda fr, x: 1.0 / (1.0 + fr.abs(x)),
    "exp": lambda fr, x: fr.exp(fr.minimum(x, 1.0)),
    "log": lambda fr, x: fr.log(fr.abs(x) + 0.5),
    "tanh": lambda fr, x: fr.tanh(x),
    "sigmoid": lambda fr, x: fr.sigmoid(x),
    "erf": lambda fr, x: fr.erf(x),
    "softplus": lambda fr, x: fr.softplus(x),
    "sin": lambda fr, x: fr.sin(x),
}
BINARY: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda fr, x, y: x + y,
    "subtract": lambda fr, x, y: x - y,
    "scale": lambda fr, x, y: x * fr.minimum(y, 1.5),
    "divide": lambda fr, x, y: x / (1.0 + fr.abs(y)),
    "maximum": lambda fr, x, y: fr.maximum(x, y),
    "choose": lambda fr, x, y: fr.where(x > y, x, 0.5 * y),
}
FOLDS = ("sum", "mean", "max", "min")


@dataclass(frozen=True, slots=True)
class Line:
    """One value of a program: an op of the tables, or a fold over ``axes``, of values that come before."""

    op: str
    operands: tuple[int, ...]
    axes: tuple[int, ...] = ()
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """What a seed makes: inputs by shape, lines, the numbers of the values that leave, and whether slopes do, too."""

    seed: int
    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    slopes: bool

    def __str__(self) -> str:
        words = [f"{line.op}{list(line.axes) or ''}" for line in self.lines]
        shapes = " ".join(f"[{','.join(map(str, shape))}]" for shape in self.shapes)
        slopes = " with slopes" if self.slopes else ""
        return f"seed {self.seed}: {self.kind}{slopes}, {self.dtype} {shapes}: {' '.join(words)}"


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_program(seed: int) -> Program:
    """The program of a seed."""
    return _Making(np.random.default_rng(seed)).program(seed)


@dataclass(slots=True)
class _Making:
    """A program as it is made. ``wide`` are the values that have an entry for each element."""

    rng: np.random.Generator
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    wide: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)

    def program(self, seed: int) -> Program:
        kind = str(self.rng.choice(["chain", "broadcast", "fold", "rows"]))
        self.shapes.append(self._shape(least_rank=0 if kind == "chain" else 2))
        for _ in range(self.rng.integers(0, 3)):
            self.shapes.append(self._beside(kind != "chain"))
        self.wide += [n for n, shape in enumerate(self.shapes) if shape == self.shapes[0]]
        self._grow(int(self.rng.integers(1, 6)))
        if kind == "rows":
            self._reduce_rows()
        self._grow(int(self.rng.integers(1, 5)))
        self._end(kind)
        dtype = "float32" if self.rng.random() < 0.9 else "float64"
        slopes = bool(self.rng.random() < 0.3)
        return Program(seed, kind, dtype, tuple(self.shapes), tuple(self.lines), tuple(self.results), slopes)

    def _shape(self, least_rank: int) -> tuple[int, ...]:
        """Sizes whose binary logarithms divide one between them anyhow."""
        rank = int(self.rng.integers(least_rank, 5))
        cuts = np.sort(self.rng.random(max(rank - 1, 0)))
        parts = np.diff([0.0, *cuts, 1.0]) * self.rng.uniform(0, LARGEST)
        return tuple(max(1, round(2**part)) for part in parts[:rank])

    def _beside(self, broadcast: bool) -> tuple[int, ...]:
        """The first shape, or what is repeated to it."""
        shape = self.shapes[0]
        if not broadcast or self.rng.random() < 0.4:
            return shape
        some = tuple(1 if self.rng.random() < 0.5 else n for n in shape)
        return some[int(self.rng.integers(0, len(some))) :] if self.rng.random() < 0.5 else some

    def _put(self, line: Line, *, wide: bool) -> int:
        self.lines.append(line)
        number = len(self.shapes) + len(self.lines) - 1
        if wide:
            self.wide.append(number)
        return number

    def _grow(self, count: int) -> None:
        for _ in range(count):
            before = self.wide[-1] if self.rng.random() < 0.7 else int(self.rng.choice(self.wide))
            if self.rng.random() < 0.5:
                self._put(Line(str(self.rng.choice(list(UNARY))), (before,)), wide=True)
            else:
                other = int(self.rng.choice([*range(len(self.shapes)), *self.wide]))
                self._put(Line(str(self.rng.choice(list(BINARY))), (before, other)), wide=True)

    def _reduce_rows(self) -> None:
        rank = len(self.shapes[0])
        axes = tuple(range(int(self.rng.integers(1, rank)), rank))
        for _ in range(self.rng.integers(1, 3)):
            reduction = self._put(Line(str(self.rng.choice(FOLDS)), (self.wide[-1],), axes, True), wide=False)
            op = str(self.rng.choice(["subtract", "divide", "maximum", "add"]))
            self._put(Line(op, (self.wide[-1], reduction)), wide=True)
            self._grow(int(self.rng.integers(0, 3)))

    def _end(self, kind: str) -> None:
        reduced = kind == "fold" or (kind == "rows" and self.rng.random() < 0.4)
        if not reduced or self.rng.random() < 0.3:
            self.results.append(self.wide[-1])
        for _ in range(int(self.rng.integers(1, 3)) if reduced else 0):
            axes = tuple(n for n in range(len(self.shapes[0])) if self.rng.random() < 0.6)
            self.results.append(
                self._put(Line(str(self.rng.choice(FOLDS)), (self.wide[-1],), axes or (0,)), wide=False)
            )


def build(fr: Any, program: Program, values: Sequence[Any]) -> list[Any]:
    """What a program answers."""
    values = list(values)
    inputs = len(values)
    for line in program.lines:
        taken = [values[n] for n in line.operands]
        if line.op in FOLDS:
            values.append(getattr(fr, line.op)(*taken, axis=line.axes, keepdims=line.kept))
        else:
            values.append((UNARY.get(line.op) or BINARY[line.op])(fr, *taken))
    results = [values[n] for n in program.results]
    if program.slopes:
        loss = fr.add_n([fr.mean(result) for result in results])
        results += [loss, *(slope for slope in fr.gradients(loss, values[:inputs]) if slope is not None)]
    return results


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Found:
    """A program's seconds on both sides, the quartiles of its rounds' ratios, and how far the answers are apart."""

    program: Program
    fused: float
    written: float
    quartiles: tuple[float, float, float]
    apart: float

    @property
    def ratio(self) -> float:
        return self.quartiles[1]

    def __str__(self) -> str:
        low, middle, high = self.quartiles
        times = f"{1e6 * self.written:8.1f} / {1e6 * self.fused:8.1f} µs"
        return f"{middle:5.2f} ({low:.2f} to {high:.2f})  {times}  {self.program}"


def measure(program: Program, threads: int) -> Found:
    """A program fused and as written, in turns; what is fused is compiled before anything is timed."""
    import flowrt as fr

    rng = np.random.default_rng(program.seed)
    values = [rng.normal(size=shape).astype(program.dtype) for shape in program.shapes]
    with fr.Graph() as graph:
        feeds = [fr.placeholder(program.dtype, shape) for shape in program.shapes]
        made = build(fr, program, feeds)
    with (
        fr.BlockingSession(graph, options=fr.Options(threads=threads)) as one,
        fr.BlockingSession(graph, options=fr.Options(threads=threads, optimize=False)) as other,
    ):
        sides = [session.compile(made, feeds) for session in (one, other)]
        answers = [_warmed(step, values) for step in sides]
        rounds = [[_turn(step, values) for step in sides] for _ in range(ROUNDS)]
    fused, written = (float(np.median([pair[side] for pair in rounds])) for side in range(2))
    low, middle, high = np.quantile([b / a for a, b in rounds], (0.25, 0.5, 0.75))
    apart = max(map(_apart, *answers))
    return Found(program, fused, written, (float(low), float(middle), float(high)), apart)


def _warmed(step: Any, values: Sequence[Any]) -> list[Any]:
    """What a step answers once it is compiled and divided."""
    from flowrt.kernels.store.background import wait_compiled

    for _ in range(3):
        step(*values)
        if not wait_compiled(120):
            raise SystemExit("the fused kernels were not compiled in two minutes")
    for _ in range(8):
        answers = step(*values)
    return [np.array(a) for a in answers]


def _turn(step: Any, values: Sequence[Any]) -> float:
    """The median of one side's runs in a turn; of short ones, several are timed together."""
    begin = time.perf_counter()
    step(*values)
    step(*values)
    together = max(1, int(20e-6 / max((time.perf_counter() - begin) / 2, 1e-9)))
    until, found = time.perf_counter() + TURN, []
    while time.perf_counter() < until or len(found) < 3:
        begin = time.perf_counter()
        for _ in range(together):
            step(*values)
        found.append((time.perf_counter() - begin) / together)
    return float(np.median(found))


def _apart(one: Any, other: Any) -> float:
    """The largest difference of two answers, against the largest entry."""
    if not one.size:
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return math.inf
    largest = max(float(np.nanmax(np.abs(b), initial=0.0)), 1e-3)
    return float(np.nanmax(np.abs(a - b), initial=0.0)) / largest


def survey(count: int, seed: int, threads: int) -> Iterator[Found]:
    """What is found of the programs of ``count`` seeds from one on."""
    for number in range(seed, seed + count):
        yield measure(random_program(number), threads)


def summary(found: Sequence[Found], worst: int = 10) -> str:
    """How the ratios are distributed, and the least of them, all losses at any rate, with their programs."""
    ratios = np.array([each.ratio for each in found])
    marks = (0, 5, 25, 50, 75, 95, 100)
    quantiles = "  ".join(f"{m}%: {r:.2f}" for m, r in zip(marks, np.percentile(ratios, marks), strict=True))
    lost = int((ratios < LOSS).sum())
    lines = [f"{len(found)} programs, as written ÷ fused: {quantiles}; below {LOSS}: {lost}"]
    lines += [f"  {each}" for each in sorted(found, key=lambda each: each.ratio)[: max(worst, lost)]]
    wrong = [each for each in found if each.apart > 1e-3]
    return "\n".join([*lines, *(f"  answers {each.apart:.1g} apart: {each.program}" for each in wrong)])
