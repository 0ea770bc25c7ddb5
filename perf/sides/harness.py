"""What every side of a comparison shares: sizes, initial values, data, and how a step is measured. Needs NumPy alone.

A side is a script with a dict of workloads; `main` runs one of them as a server. On its standard output it says, one
JSON object a line, that it is ready (with the results of its first steps), and answers each ``measure SECONDS`` line
of its standard input with the seconds of every single call; at the end of input it says how its memory grew.

All is float32 and labels int32. A training step takes the batch as NumPy arrays, updates the parameters, and hands the
loss back as a Python float. SGD with momentum is ``v = 0.9 v + g; p = p - lr v``; the rates are small on purpose, since
units that die leave denormals in the momenta, and those would be timed instead of the system.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("OPENBLAS_CORETYPE", None)  # costs OpenBLAS much of its speed; read when NumPy is first imported

import numpy as np

CHECKED = 5  # steps whose losses all sides must agree on
MOMENTUM = 0.9
WARM_UP_SECONDS = 1.0

# Dispatch: 10,000 scalar adds
NODES, CHAINS = 10_000, 100

# One small step
VECTOR = np.arange(8, dtype=np.float32)  # y = x * 2 + 1

# A loop: while i < n: i, s = i + 1, s + i
ITERATIONS = 10_000

# MLP
MLP_SIZES, MLP_RATE = (784, 256, 128, 10), 0.001

# CNN
CNN_BATCH, CNN_RATE = 64, 0.0002

# LSTM
LSTM_IN, LSTM_UNITS, LSTM_STEPS, LSTM_BATCH, LSTM_CLASSES, LSTM_RATE = 64, 128, 64, 32, 64, 0.1

# Embeddings
VOCABULARY, WIDTH, EMBEDDING_BATCH, BAG, BATCHES = 200_000, 64, 1024, 8, 20
EMBEDDING_RATE, ACCUMULATOR, EPSILON = 0.05, 0.1, 1e-10

# Of the same kinds, with other layers, optimisers and sizes
NORMED_SIZES, NORMED_BATCH = (256, 512, 512, 512, 10), 256
ADAM_RATE, BETA1, BETA2, ADAM_EPSILON = 1e-3, 0.9, 0.999, 1e-8
RESIDUAL_BATCH, RESIDUAL_RATE = 32, 0.01
GRU_RATE = 0.1  # sizes as the LSTM's
POWER_SIZE, POWER_TURNS = 256, 200
POINTS, POINT_TURNS, POINT_TIME, SOFTENING = 1024, 10, 0.01, 0.01  # bodies; steps and their length; of squares
GRID, GRID_TURNS, GRID_RATE = 1024, 50, 0.1
COLUMNS, POOLED = (4096, 256), (32, 32, 32, 64)
MANY_ROWS, MANY_WIDTH, MANY_BATCH, MANY_BAG = 50_000, 128, 256, 32
GPT_LAYERS, GPT_WIDTH, GPT_HEADS, GPT_LENGTH, GPT_BATCH, GPT_WORDS = 4, 256, 8, 64, 16, 512


@dataclass(slots=True)
class Side:
    """One workload of one side, ready to run: the step, and how many units of work a call of it does."""

    step: Callable[[], Any]
    work: int = 1
    notes: str = ""


@dataclass(slots=True)
class Settings:
    """What the command line asks for."""

    workload: str
    variant: str
    threads: int
    batch: int = 128
    shape: str = "chain"
    device: str = ""  # "cuda": a GPU, whose products are of float32 throughout
    started: float = field(default_factory=time.perf_counter)


def edges(shape: str) -> list[list[int]]:
    """Dispatch's graph: for each node those it reads; a node that reads none reads the fed scalar."""
    if shape == "chain":
        return [[], *([i - 1] for i in range(1, NODES))]
    if shape == "parallel":
        length = NODES // CHAINS
        return [[] if i % length == 0 else [i - 1] for i in range(NODES)]
    return [[], *[[0]] * (NODES - 2), list(range(1, NODES - 1))]


def sinks(reads: list[list[int]]) -> list[int]:
    read = {j for those in reads for j in those}
    return [i for i in range(len(reads)) if i not in read]


def mlp() -> list[np.ndarray]:
    """w1 b1 w2 b2 w3 b3."""
    r = np.random.default_rng(3)
    out = []
    for a, b in itertools.pairwise(MLP_SIZES):
        out += [(r.standard_normal((a, b)) * np.sqrt(2 / a)).astype(np.float32), np.zeros(b, np.float32)]
    return out


def mlp_batch(batch: int) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(30)
    return r.standard_normal((batch, MLP_SIZES[0])).astype(np.float32), r.integers(0, 10, batch).astype(np.int32)


def cnn(layout: str = "NHWC") -> list[np.ndarray]:
    """k1 b1 k2 b2 w3 b3 w4 b4; filters HWIO, or OIHW for NCHW: the same numbers, the dense layer permuted alike."""
    r = np.random.default_rng(4)

    def he(*shape: int, fan: int) -> np.ndarray:
        return (r.standard_normal(shape) * np.sqrt(2 / fan)).astype(np.float32)

    k1, k2 = he(3, 3, 3, 32, fan=27), he(3, 3, 32, 64, fan=288)
    w3, w4 = he(8 * 8 * 64, 128, fan=4096), he(128, 10, fan=128)
    b1, b2, b3, b4 = (np.zeros(n, np.float32) for n in (32, 64, 128, 10))
    if layout == "NCHW":
        k1, k2 = (np.ascontiguousarray(k.transpose(3, 2, 0, 1)) for k in (k1, k2))
        w3 = np.ascontiguousarray(w3.reshape(8, 8, 64, 128).transpose(2, 0, 1, 3).reshape(4096, 128))
    return [k1, b1, k2, b2, w3, b3, w4, b4]


def cnn_batch(layout: str = "NHWC") -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(40)
    x = r.standard_normal((CNN_BATCH, 32, 32, 3)).astype(np.float32)
    y = r.integers(0, 10, CNN_BATCH).astype(np.int32)
    return (x if layout == "NHWC" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))), y


def lstm() -> list[np.ndarray]:
    """w_x (64, 512), w_h (128, 512), b (512), gates in the order i, f, g, o; w_out, b_out."""
    r = np.random.default_rng(5)
    k = 1 / np.sqrt(LSTM_UNITS)

    def uniform(*shape: int) -> np.ndarray:
        return r.uniform(-k, k, shape).astype(np.float32)

    return [
        uniform(LSTM_IN, 4 * LSTM_UNITS),
        uniform(LSTM_UNITS, 4 * LSTM_UNITS),
        np.zeros(4 * LSTM_UNITS, np.float32),
        uniform(LSTM_UNITS, LSTM_CLASSES),
        np.zeros(LSTM_CLASSES, np.float32),
    ]


def lstm_batch() -> tuple[np.ndarray, np.ndarray]:
    """x (time, batch, 64), y (time, batch)."""
    r = np.random.default_rng(50)
    x = r.standard_normal((LSTM_STEPS, LSTM_BATCH, LSTM_IN)).astype(np.float32)
    return x, r.integers(0, LSTM_CLASSES, (LSTM_STEPS, LSTM_BATCH)).astype(np.int32)


def normed() -> list[np.ndarray]:
    """w b scale offset of every hidden layer, then w b."""
    r = np.random.default_rng(13)
    out = []
    for a, b in itertools.pairwise(NORMED_SIZES):
        out += [(r.standard_normal((a, b)) * np.sqrt(2 / a)).astype(np.float32), np.zeros(b, np.float32)]
        out += [np.ones(b, np.float32), np.zeros(b, np.float32)] if b != NORMED_SIZES[-1] else []
    return out


def normed_batch() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(130)
    x = r.standard_normal((NORMED_BATCH, NORMED_SIZES[0])).astype(np.float32)
    return x, r.integers(0, 10, NORMED_BATCH).astype(np.int32)


def residual() -> list[np.ndarray]:
    """Four times filters (HWIO), scale, offset: 3 -> 32, 32 -> 64 halving, 64 -> 64, 1x1 32 -> 64; then w, b."""
    r = np.random.default_rng(14)
    out = []
    for size, a, b in ((3, 3, 32), (3, 32, 64), (3, 64, 64), (1, 32, 64)):
        k = (r.standard_normal((size, size, a, b)) * np.sqrt(2 / (size * size * a))).astype(np.float32)
        out += [k, np.ones(b, np.float32), np.zeros(b, np.float32)]
    return [*out, (r.standard_normal((64, 10)) * np.sqrt(1 / 64)).astype(np.float32), np.zeros(10, np.float32)]


def residual_batch() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(140)
    x = r.standard_normal((RESIDUAL_BATCH, 32, 32, 3)).astype(np.float32)
    return x, r.integers(0, 10, RESIDUAL_BATCH).astype(np.int32)


def gru() -> list[np.ndarray]:
    """w_x (64, 384), w_h (128, 384), b_x, b_h (384), gates in the order r, z, n; w_out, b_out."""
    r = np.random.default_rng(15)
    k = 1 / np.sqrt(LSTM_UNITS)

    def uniform(*shape: int) -> np.ndarray:
        return r.uniform(-k, k, shape).astype(np.float32)

    three = 3 * LSTM_UNITS
    first = [uniform(LSTM_IN, three), uniform(LSTM_UNITS, three), uniform(three), uniform(three)]
    return [*first, uniform(LSTM_UNITS, LSTM_CLASSES), np.zeros(LSTM_CLASSES, np.float32)]


def power() -> tuple[np.ndarray, np.ndarray]:
    """A symmetric matrix and a first vector for its greatest eigenvalue."""
    r = np.random.default_rng(16)
    a = r.standard_normal((POWER_SIZE, POWER_SIZE)).astype(np.float32)
    return a + a.T + 60 * np.eye(POWER_SIZE, dtype=np.float32), np.ones((POWER_SIZE, 1), np.float32)


def points() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions and velocities (n, 3) and masses (n,) of bodies that attract each other."""
    r = np.random.default_rng(18)
    x, v = (r.standard_normal((POINTS, 3)).astype(np.float32) for _ in range(2))
    return x, v, r.uniform(0.5, 1.5, POINTS).astype(np.float32) / POINTS


def grid() -> np.ndarray:
    """What heat is at first, square."""
    return np.random.default_rng(19).standard_normal((GRID, GRID)).astype(np.float32)


def columns() -> tuple[np.ndarray, np.ndarray]:
    """What a softmax over the first axis is of, and what its rows are weighted by."""
    r = np.random.default_rng(20)
    return r.standard_normal(COLUMNS).astype(np.float32), r.standard_normal((COLUMNS[0], 1)).astype(np.float32)


def pooled() -> tuple[np.ndarray, np.ndarray]:
    """Images (NHWC), and the slopes of what their windows of 2 by 2 are pooled to."""
    r, (n, height, width, channels) = np.random.default_rng(21), POOLED
    halved = r.uniform(0.5, 1.5, (n, height // 2, width // 2, channels))
    return r.standard_normal(POOLED).astype(np.float32), halved.astype(np.float32)


def many_rows() -> list[np.ndarray]:
    """The table, and w and b of a logistic regression on the sum of a bag's rows."""
    r = np.random.default_rng(17)
    table = r.standard_normal((MANY_ROWS, MANY_WIDTH), dtype=np.float32) * np.float32(0.1)
    return [table, (r.standard_normal((MANY_WIDTH, 1)) * 0.1).astype(np.float32), np.zeros(1, np.float32)]


def many_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids (batch, 32), targets (batch, 1)): evenly drawn ids."""
    r = np.random.default_rng(170)
    return [
        (
            r.integers(0, MANY_ROWS, (MANY_BATCH, MANY_BAG)).astype(np.int32),
            r.integers(0, 2, (MANY_BATCH, 1)).astype(np.float32),
        )
        for _ in range(BATCHES)
    ]


def embeddings() -> list[np.ndarray]:
    """The table, and w and b of a logistic regression on the mean of a bag's rows."""
    r = np.random.default_rng(7)
    table = r.standard_normal((VOCABULARY, WIDTH), dtype=np.float32) * np.float32(0.1)
    return [table, (r.standard_normal((WIDTH, 1)) * 0.1).astype(np.float32), np.zeros(1, np.float32)]


def embedding_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids (batch, 8), targets (batch, 1)): 8,192 ids a batch by Zipf's law, a few thousand of them distinct."""
    r = np.random.default_rng(70)
    out = []
    for _ in range(BATCHES):
        ids = ((r.zipf(1.2, (EMBEDDING_BATCH, BAG)) - 1) % VOCABULARY).astype(np.int32)
        out.append((ids, r.integers(0, 2, (EMBEDDING_BATCH, 1)).astype(np.float32)))
    return out


def gpt() -> list[np.ndarray]:
    """Words, places; scale, offset, w_qkv, w_out, scale, offset, w_up, w_down of every layer; scale, offset, w."""
    r, n = np.random.default_rng(22), GPT_WIDTH

    def normal(*shape: int) -> np.ndarray:
        return (r.standard_normal(shape) * 0.02).astype(np.float32)

    def norm() -> list[np.ndarray]:
        return [np.ones(n, np.float32), np.zeros(n, np.float32)]

    out = [normal(GPT_WORDS, n), normal(GPT_LENGTH, n)]
    for _ in range(GPT_LAYERS):
        out += [*norm(), normal(n, 3 * n), normal(n, n), *norm(), normal(n, 4 * n), normal(4 * n, n)]
    return [*out, *norm(), normal(n, GPT_WORDS)]


def gpt_batch() -> tuple[np.ndarray, np.ndarray]:
    """Words (batch, length), and those that follow them."""
    words = np.random.default_rng(220).integers(0, GPT_WORDS, (GPT_BATCH, GPT_LENGTH + 1)).astype(np.int32)
    return np.ascontiguousarray(words[:, :-1]), np.ascontiguousarray(words[:, 1:])


def gpt_mask() -> np.ndarray:
    """What is added to scores (length, length), that nobody looks ahead."""
    return np.triu(np.full((GPT_LENGTH, GPT_LENGTH), -1e9, np.float32), 1)


class Memory:
    """How far the resident set grew, in MiB, above what it was when this was made."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._before = _status("VmRSS")

    def growth(self) -> float:
        return max(0.0, _status("VmHWM") - self._before)


def _status(key: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), float("nan"))


memory: list[Memory] = []


def imported() -> None:
    """A side calls this once its libraries are imported and its data made: memory counts from here."""
    memory.append(Memory())


STEPS = {"W1": "dispatch", "W2": "overhead", "W3": "mlp", "W4": "cnn", "W5": "lstm", "W5b": "loop", "W7": "embedding"}
MORE = ("normed", "residual", "gru", "power", "bodies", "heat", "columns", "pooled", "many_rows", "gpt")


def named(functions: Mapping[str, Any]) -> dict[str, Callable[[Settings], Side]]:
    """The workloads of `steps` that are among a side's ``functions``."""
    short = STEPS | {name: name for name in MORE}
    return {key: functions[name] for key, name in short.items() if name in functions}


def main(workloads: Mapping[str, Callable[[Settings], Side]]) -> None:
    """Run the workload that the command line names, and answer what compare.py asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=sorted(workloads))
    parser.add_argument("--variant", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shape", default="chain", choices=("chain", "parallel", "fan"))
    parser.add_argument("--device", default="", choices=("", "cuda"))
    parser.add_argument("--first-only", action="store_true", help="end after the first step")
    parser.add_argument("--seconds", type=float, help="measure once for so long and print the summary")
    a = parser.parse_args()
    side = workloads[a.workload](Settings(a.workload, a.variant, a.threads, a.batch, a.shape, a.device))
    first = [_value(side.step())]
    if a.first_only:
        return
    first += [_value(side.step()) for _ in range(CHECKED - 1)]
    if a.seconds:
        _warm_up(side.step, min(WARM_UP_SECONDS, a.seconds))
        times = np.array(_times(side.step, a.seconds)) * 1e6
        low, middle, high = np.percentile(times, [10, 50, 90])
        print(f"{a.workload} {a.variant}: {middle:.2f} us ({low:.2f} to {high:.2f}), first {first}")
        return
    _serve(side, first)


def _serve(side: Side, first: list[float]) -> None:
    _say({"ready": True, "first": first, "work": side.work, "notes": side.notes})
    warm = False
    for line in sys.stdin:
        if not warm:
            _warm_up(side.step)
            warm = True
        _say({"seconds": _times(side.step, float(line.split()[1]))})
    _say({"rss_growth_mib": memory[-1].growth() if memory else None})


def _value(answer: Any) -> float:
    """What a step answered, as one number to compare."""
    return float(np.sum(answer))


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _warm_up(step: Callable[[], Any], seconds: float = WARM_UP_SECONDS) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()


def _times(step: Callable[[], Any], seconds: float, most: int = 100_000) -> list[float]:
    clock = time.perf_counter
    out: list[float] = []
    end = clock() + seconds
    while not out or (clock() < end and len(out) < most):
        begin = clock()
        step()
        out.append(clock() - begin)
    return out
