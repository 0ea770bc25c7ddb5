"""What experiments learn: scikit-learn's handwritten digits, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Batch = dict[str, np.ndarray]


def digits(held_out: int, shape: tuple[int, ...] = (64,)) -> tuple[Batch, Batch]:
    """What is learnt, and so many that are held out: images less the mean one, of that shape, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order] / 16, labels[order]
    images = (images - images[held_out:].mean(axis=0)).astype(np.float32).reshape(-1, *shape)
    both = {"images": images, "labels": labels.astype(np.int32)}
    return (
        {name: array[held_out:] for name, array in both.items()},
        {name: array[:held_out] for name, array in both.items()},
    )


def batches(train: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Random ones without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(train["labels"]))
        for start in range(0, len(order) - size + 1, size):
            yield {name: array[order[start : start + size]] for name, array in train.items()}
