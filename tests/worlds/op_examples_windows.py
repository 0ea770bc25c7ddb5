"""The examples of convolutions and pooling, which both go over windows of images; see `op_examples`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from example import Example, integers, normal

import flowrt.ops as fr
from flowrt.ops import conv, pooling

NAN = np.float32("nan")


def _each(
    x: np.ndarray, filters: np.ndarray, edges: Any, strides: Any, dilations: Any, groups: int
) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
    """The padded images, and for every product of a convolution where its three factors are."""
    padded = np.pad(x, ((0, 0), *edges, (0, 0)))
    rows, columns, depth, outputs = filters.shape
    high = (padded.shape[1] - (rows - 1) * dilations[0] - 1) // strides[0] + 1
    wide = (padded.shape[2] - (columns - 1) * dilations[1] - 1) // strides[1] + 1
    terms = []
    sizes = (high, wide, rows, columns, depth, outputs)
    for i, j, r, c, d, o in itertools.product(*map(range, sizes)):
        h, w = i * strides[0] + r * dilations[0], j * strides[1] + c * dilations[1]
        terms.append(((slice(None), h, w, o // (outputs // groups) * depth + d), (r, c, d, o), (slice(None), i, j, o)))
    return padded, [(high, wide), *terms]


def _convolution(
    name: str,
    images: tuple[int, ...],
    filters: tuple[int, ...],
    edges: Any,
    strides: tuple[int, int] = (1, 1),
    dilations: tuple[int, int] = (1, 1),
    groups: int = 1,
    padding: Any = "SAME",
    note: str = "",
) -> Example:
    """An example of the convolution op ``name``; ``edges`` is what ``padding`` comes to."""
    x, w = normal(*images), normal(*filters, seed=1)
    (top, bottom), (left, right) = edges
    how = (strides, padding, dilations, groups)

    def forward(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        padded, ((high, wide), *terms) = _each(x, w, edges, strides, dilations, groups)
        y = np.zeros((len(x), high, wide, w.shape[3]), x.dtype)
        for at_x, at_w, at_y in terms:
            y[at_y] += padded[at_x] * w[at_w]
        return y

    def to_images(dy: np.ndarray, w: np.ndarray) -> np.ndarray:
        padded, (_, *terms) = _each(np.zeros_like(x), w, edges, strides, dilations, groups)
        for at_x, at_w, at_y in terms:
            padded[at_x] += dy[at_y] * w[at_w]
        return padded[:, top : padded.shape[1] - bottom, left : padded.shape[2] - right]

    def to_filters(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        padded, (_, *terms) = _each(x, w, edges, strides, dilations, groups)
        out = np.zeros_like(w)
        for at_x, at_w, at_y in terms:
            out[at_w] += (padded[at_x] * dy[at_y]).sum()
        return out

    dy = normal(*forward(x, w).shape, seed=2)
    if name == "conv2d":
        return Example(name, lambda x, w: fr.nn.conv2d(x, w, *how), (x, w), forward, margin=1e-5, note=note)
    if name == "conv2d_input_grad":
        run = lambda dy, w: conv.conv2d_input_grad(dy, w, x.shape, *how)  # noqa: E731
        return Example(name, run, (dy, w), to_images, margin=1e-5, note=note)
    run = lambda x, dy: conv.conv2d_filter_grad(x, dy, w.shape, *how)  # noqa: E731
    return Example(name, run, (x, dy), to_filters, margin=1e-5, note=note)


CONVOLUTIONS = [
    example
    for name in ("conv2d", "conv2d_input_grad", "conv2d_filter_grad")
    for example in [
        _convolution(name, (2, 4, 5, 2), (3, 3, 2, 3), ((1, 1), (1, 1)), note="same"),
        _convolution(name, (1, 5, 4, 2), (2, 2, 2, 2), ((0, 1), (0, 0)), (2, 2), note="same-stride"),
        _convolution(name, (2, 4, 5, 4), (3, 2, 2, 4), ((0, 0), (0, 0)), (1, 2), (1, 2), 2, "VALID", "groups"),
        _convolution(
            name, (1, 3, 3, 3), (2, 2, 1, 3), ((1, 0), (2, 1)), (2, 1), (2, 1), 3, ((1, 0), (2, 1)), "explicit"
        ),
        _convolution(name, (0, 3, 3, 1), (2, 2, 1, 2), ((0, 1), (0, 1)), note="no-images"),
    ]
]


def _windows(x: np.ndarray, size: Any, strides: Any, edges: Any) -> Any:
    """Every window of every channel: where it is in the result, and where its first largest entry is in ``x``."""
    (top, bottom), (left, right) = edges
    high = (x.shape[1] + top + bottom - size[0]) // strides[0] + 1
    wide = (x.shape[2] + left + right - size[1]) // strides[1] + 1
    for n, i, j, c in itertools.product(range(x.shape[0]), range(high), range(wide), range(x.shape[3])):
        spots = [
            (n, h, w, c)
            for h in range(i * strides[0] - top, i * strides[0] - top + size[0])
            for w in range(j * strides[1] - left, j * strides[1] - left + size[1])
            if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]
        ]
        values = np.array([x[spot] for spot in spots])
        yield (n, i, j, c), spots[int(values.argmax())], (x.shape[0], high, wide, x.shape[3])


def _pooling(x: np.ndarray, size: Any, strides: Any, edges: Any, *how: Any, note: str = "") -> list[Example]:
    """The three pooling ops; ``how`` is what the op is told, the rest what it means."""
    found = list(_windows(x, size, strides, edges))
    shape = found[0][2] if found else (0, 1, 1, 1)

    def pick(values: np.ndarray) -> np.ndarray:
        y = np.zeros(shape, values.dtype)
        for at, spot, _ in found:
            y[at] = values[spot]
        return y

    def spread(dy: np.ndarray) -> np.ndarray:
        out = np.zeros(x.shape, dy.dtype)
        for at, spot, _ in found:
            out[spot] += dy[at]
        return out

    values, dy = normal(*x.shape, seed=3), normal(*shape, seed=4)
    quiet = None if x.dtype.kind == "f" and not np.isnan(x).any() else False
    return [
        Example("max_pool2d", lambda x: fr.nn.max_pool2d(x, *how), (x,), pick, quiet, note=note),
        Example(
            "max_pool2d_spread",
            lambda dy: pooling.max_pool2d_spread(x, dy, *how),
            (dy,),
            spread,
            note=note,
        ),
        Example("max_pool2d_pick", lambda v: pooling.max_pool2d_pick(x, v, *how), (values,), pick, note=note),
    ]


def _average(x: np.ndarray, size: Any, strides: Any, edges: Any, *how: Any, note: str = "") -> list[Example]:
    """Mean pooling and its gradient, by a matrix of shares: how much of an entry each window's mean holds."""
    ((top, bottom), (left, right)), (_, height, width, _) = edges, x.shape
    starts_h = range(-top, height + bottom - size[0] + 1, strides[0])
    starts_w = range(-left, width + right - size[1] + 1, strides[1])
    shares = np.zeros((len(starts_h), len(starts_w), height, width))
    for (i, h), (j, w) in itertools.product(enumerate(starts_h), enumerate(starts_w)):
        inside = slice(max(h, 0), h + size[0]), slice(max(w, 0), w + size[1])
        shares[i, j][inside] = 1 / shares[i, j][inside].size
    kind = x.dtype if x.dtype.kind == "f" else np.float64
    dy = normal(x.shape[0], len(starts_h), len(starts_w), x.shape[3], seed=5)
    return [
        Example(
            "avg_pool2d",
            lambda x: fr.nn.avg_pool2d(x, *how),
            (x,),
            lambda x: np.einsum("ijhw,nhwc->nijc", shares, x).astype(kind),
            note=note,
        ),
        Example(
            "avg_pool2d_spread",
            lambda dy: pooling.avg_pool2d_spread(dy, x.shape, *how),
            (dy,),
            lambda dy: np.einsum("ijhw,nijc->nhwc", shares, dy).astype(dy.dtype),
            note=note,
        ),
    ]


WITH_NAN = np.where(np.arange(32).reshape(1, 4, 4, 2) == 13, NAN, normal(1, 4, 4, 2))

WINDOWS = [
    *CONVOLUTIONS,
    *_pooling(normal(2, 4, 6, 2), (2, 2), (2, 2), ((0, 0), (0, 0))),
    *_pooling(normal(1, 5, 4, 3), (3, 2), (2, 1), ((1, 1), (0, 1)), (3, 2), (2, 1), "SAME", note="same"),
    *_pooling(normal(1, 3, 4, 1), (2, 3), (1, 2), ((1, 0), (2, 1)), (2, 3), (1, 2), ((1, 0), (2, 1)), note="explicit"),
    *_pooling(integers(1, 4, 4, 2, dtype="int8"), (2, 2), (1, 1), ((0, 0), (0, 0)), 2, 1, note="equal"),
    *_pooling(integers(2, 12, 13, 3), (9, 6), (2, 3), ((4, 3), (0, 5)), (9, 6), (2, 3), ((4, 3), (0, 5)), note="large"),
    *_pooling(WITH_NAN, (2, 2), (1, 1), ((0, 0), (0, 0)), 2, 1, note="nan"),
    *_pooling(WITH_NAN, (3, 5), (1, 1), ((1, 1), (2, 2)), (3, 5), 1, "SAME", note="nan-same"),
    *_average(normal(2, 4, 6, 2), (2, 2), (2, 2), ((0, 0), (0, 0))),
    *_average(normal(1, 5, 4, 3), (3, 2), (2, 1), ((1, 1), (0, 1)), (3, 2), (2, 1), "SAME", note="same"),
    *_average(normal(1, 3, 4, 1), (2, 3), (1, 2), ((1, 0), (2, 1)), (2, 3), (1, 2), ((1, 0), (2, 1)), note="explicit"),
    *_pooling(normal(0, 2, 2, 1), (2, 2), (2, 2), ((0, 0), (0, 0)), note="no-images"),
]
