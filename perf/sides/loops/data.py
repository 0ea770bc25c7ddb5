"""What every side of perf/loops.py computes: sizes, initial values and data. Needs NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sides import harness  # noqa: F401  (before NumPy: it sets what BLAS reads)

TURNS, SIDE = 10_000, 16  # a vector times a rotation, again and again
MATRIX, POWER_TURNS = 256, 500  # power iteration
NEWTON, NEWTON_TURNS = 1000, 200  # of cube roots, as long as the largest error is above nothing, at most so often
COLLATZ = 200  # numbers whose sequences are followed to 1
BRANCHING = 2_000  # turns that decide which of two vectors to add
LONG, TABLE, BINS = 20_000, 1000, 64  # turns that read a table, or count
SINES, SQUARES = 2_000, 5_000  # turns on 16 numbers
ROWS, WIDTH = 256, 64  # mapped one by one


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent network's sizes."""

    steps: int
    batch: int
    inputs: int
    units: int


TOKENS, LAYERS, BATCH, MODEL = 64, 2, 4, 64  # that a decoder writes one after another, and what it is like
CELL, LARGE, GRU = Cell(64, 32, 64, 128), Cell(16, 512, 512, 512), Cell(64, 32, 64, 128)


def cell(size: Cell, gates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (steps, batch, inputs), w (inputs, gates x units), u (units, gates x units)."""
    r = np.random.default_rng(5)

    def uniform(*shape: int) -> np.ndarray:
        return (r.uniform(-1, 1, shape) / np.sqrt(size.units)).astype(np.float32)

    x = r.standard_normal((size.steps, size.batch, size.inputs)).astype(np.float32)
    return x, uniform(size.inputs, gates * size.units), uniform(size.units, gates * size.units)


def rotation() -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(0).normal(size=(SIDE, SIDE)))[0].astype(np.float32)


def symmetric() -> np.ndarray:
    """A matrix whose largest eigenvalue stands apart."""
    q = np.linalg.qr(np.random.default_rng(1).normal(size=(MATRIX, MATRIX)))[0]
    return ((q * np.linspace(0.1, 1, MATRIX) ** 4) @ q.T).astype(np.float32)


def numbers() -> np.ndarray:
    return np.random.default_rng(2).uniform(1, 100, NEWTON).astype(np.float32)


def rows() -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(3)
    return r.standard_normal((ROWS, WIDTH)).astype(np.float32), r.standard_normal((WIDTH, WIDTH)).astype(np.float32)


def table() -> np.ndarray:
    return np.random.default_rng(6).integers(0, TABLE, TABLE).astype(np.int32)


def binned() -> np.ndarray:
    return np.random.default_rng(7).integers(0, BINS, LONG).astype(np.int32)


def few() -> np.ndarray:
    return np.random.default_rng(8).standard_normal(16).astype(np.float32)


def square() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((4, 4)).astype(np.float32)


def decoder() -> tuple[np.ndarray, ...]:
    """A first row (batch, model), and of each layer weights of queries, keys and values; of what is seen; up; down."""
    r = np.random.default_rng(10)

    def normal(*shape: int) -> np.ndarray:
        return (r.standard_normal(shape) / np.sqrt(shape[-2])).astype(np.float32)

    sizes = (MODEL, 3 * MODEL), (MODEL, MODEL), (MODEL, 4 * MODEL), (4 * MODEL, MODEL)
    return normal(BATCH, MODEL), *(normal(LAYERS, *size) for size in sizes)
