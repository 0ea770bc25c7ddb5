"""What every side of perf/replicas.py trains: a classifier of handwritten digits, 64-256-10, momentum. NumPy alone.

The data and the first weights are in the file that DIGITS names. Batch v * n + r is replica r's of version v, on every
side, and an update is the mean over the replicas, so all sides that wait for every replica find the same losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

BATCH, HIDDEN, RATE, MOMENTUM = 64, 256, 0.1, 0.9
DELAY = 0.2  # seconds that the straggler, the last worker, takes longer for a step
FIRST = {"undisturbed": 100, "straggler": 20}  # steps after which the loss is compared
WORKLOADS = tuple(FIRST)


@lru_cache(1)
def digits() -> dict[str, np.ndarray]:
    """images and labels to train on, test_images and test_labels, and the weights w1 b1 w2 b2 at first."""
    with np.load(os.environ["DIGITS"]) as file:
        return dict(file)


def save(path: str) -> None:
    """Write the file: scikit-learn's digits as scripts/train takes them, and weights drawn for it."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=360, stratify=y, random_state=0)
    mean, rng = x_train.mean(axis=0), np.random.default_rng(3)
    np.savez(
        path,
        images=(x_train - mean).astype(np.float32),
        labels=y_train.astype(np.int32),
        test_images=(x_test - mean).astype(np.float32),
        test_labels=y_test.astype(np.int32),
        w1=(rng.standard_normal((64, HIDDEN)) * (2 / 64) ** 0.5).astype(np.float32),
        b1=np.zeros(HIDDEN, np.float32),
        w2=(rng.standard_normal((HIDDEN, 10)) * (1 / HIDDEN) ** 0.5).astype(np.float32),
        b2=np.zeros(10, np.float32),
    )


def weights() -> list[np.ndarray]:
    return [digits()[name].copy() for name in ("w1", "b1", "w2", "b2")]


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(images, labels) without end, the same in every process."""
    images, labels = digits()["images"], digits()["labels"]
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield images[chosen], labels[chosen]


def batches_of(replica: int, replicas: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Those of one replica, one a version."""
    for number, batch in enumerate(batches()):
        if number % replicas == replica:
            yield batch


def gradients(w: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean cross entropy of a batch."""
    w1, b1, w2, b2 = w
    hidden = np.maximum(x @ w1 + b1, 0)
    slope = softmax(hidden @ w2 + b2)
    slope[np.arange(len(y)), y] -= 1
    slope /= np.float32(len(y))
    back = slope @ w2.T * (hidden > 0)
    return [x.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0)]


def softmax(scores: np.ndarray) -> np.ndarray:
    raised = np.exp(scores - scores.max(1, keepdims=True))
    answer: np.ndarray = raised / raised.sum(1, keepdims=True)
    return answer


def move(w: list[np.ndarray], v: list[np.ndarray], g: list[np.ndarray]) -> None:
    """Momentum's update, in place."""
    for weight, velocity, slope in zip(w, v, g, strict=True):
        velocity *= np.float32(MOMENTUM)
        velocity += slope
        weight -= np.float32(RATE) * velocity


def tested(w: list[np.ndarray]) -> tuple[float, float]:
    """The mean cross entropy on the test images, and the share of them that is recognised."""
    w1, b1, w2, b2 = w
    shares = softmax(np.maximum(digits()["test_images"] @ w1 + b1, 0) @ w2 + b2)
    labels = digits()["test_labels"]
    loss = -np.log(np.maximum(shares[np.arange(len(labels)), labels], 1e-30)).mean()
    return float(loss), float((shares.argmax(1) == labels).mean())


def expected(replicas: int, steps: int) -> float:
    """The loss on the test images after so many steps that wait for all replicas."""
    w, source = weights(), batches()
    v = [np.zeros_like(weight) for weight in w]
    for _ in range(steps):
        found = [gradients(w, *next(source)) for _ in range(replicas)]
        move(w, v, [sum(parts) / np.float32(replicas) for parts in zip(*found, strict=True)])
    return tested(w)[0]


class Judge:
    """Whether weights are what so many steps make of them: of the first nearly; later, whether they learnt."""

    def __init__(self, workload: str, replicas: int, *, waits: bool) -> None:
        self._first = FIRST[workload]
        self._wanted = expected(replicas, self._first) if waits else None
        self._notes = ""

    def right(self, steps: int, w: list[np.ndarray]) -> bool:
        loss, accuracy = tested(w)
        if steps == self._first:
            self._notes = f"loss {loss:.4f} and accuracy {accuracy:.3f} after {steps} steps"
            if self._wanted is not None:
                return abs(loss - self._wanted) < 0.02 * self._wanted
        return accuracy > (0.9 if steps >= 100 else 0.5)

    def notes(self) -> str:
        return self._notes
