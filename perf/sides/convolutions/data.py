"""What every side of perf/convolutions.py computes: the layers, and their data. Needs NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sides import harness  # noqa: F401  (before NumPy: it sets what BLAS reads)

DIRECTIONS = ("forward", "images", "filters")  # the result, and the gradients for the images and for the filters


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution: square images and windows, padded so that a stride of 1 keeps the size of the images."""

    batch: int
    size: int
    channels: int
    window: int
    outputs: int
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    dtype: str = "float32"

    @property
    def padding(self) -> int:
        return (self.window - 1) * self.dilation // 2

    @property
    def side(self) -> int:
        """Height and width of the result."""
        return (self.size + 2 * self.padding - (self.window - 1) * self.dilation - 1) // self.stride + 1

    @property
    def flops(self) -> int:
        """Multiplications and additions of a direction."""
        terms = self.window**2 * self.channels // self.groups
        return 2 * self.batch * self.side**2 * self.outputs * terms


LAYERS = {
    "3x3": Layer(16, 32, 64, 3, 64),
    "3x3-wide": Layer(16, 14, 256, 3, 256),
    "3x3-deep": Layer(16, 7, 512, 3, 512),
    "3x3-first": Layer(64, 32, 3, 3, 32),
    "3x3-last": Layer(8, 64, 32, 3, 3),
    "3x3-large": Layer(2, 224, 64, 3, 64),
    "3x3-single": Layer(1, 56, 64, 3, 64),
    "3x3-halving": Layer(8, 56, 64, 3, 128, stride=2),
    "3x3-dilated": Layer(8, 32, 64, 3, 64, dilation=2),
    "3x3-odd": Layer(16, 28, 33, 3, 47),
    "3x3-double": Layer(8, 32, 32, 3, 64, dtype="float64"),
    "1x1": Layer(16, 28, 128, 1, 128),
    "1x1-expand": Layer(16, 14, 96, 1, 576),
    "1x1-project": Layer(16, 14, 576, 1, 96),
    "1x1-halving": Layer(8, 56, 64, 1, 128, stride=2),
    "5x5": Layer(16, 16, 32, 5, 64),
    "5x5-of-6": Layer(32, 14, 6, 5, 16),
    "7x7-first": Layer(8, 224, 3, 7, 64, stride=2),
    "7x7-single": Layer(1, 224, 3, 7, 64, stride=2),
    "groups-of-4": Layer(8, 28, 128, 3, 128, groups=32),
    "groups-of-8": Layer(8, 28, 256, 3, 256, groups=32),
    "groups-of-32": Layer(16, 32, 64, 3, 64, groups=2),
    "depthwise": Layer(16, 28, 192, 3, 192, groups=192),
    "depthwise-halving": Layer(16, 56, 96, 3, 96, stride=2, groups=96),
    "depthwise-5x5": Layer(16, 14, 240, 5, 240, groups=240),
}


def arrays(layer: Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images (NHWC), filters (HWIO), and the gradient of the result."""
    r = np.random.default_rng(8)
    window = layer.window, layer.window, layer.channels // layer.groups, layer.outputs
    shapes = (layer.batch, layer.size, layer.size, layer.channels), window
    shapes += ((layer.batch, layer.side, layer.side, layer.outputs),)
    x, filters, dy = (r.standard_normal(shape).astype(layer.dtype) for shape in shapes)
    return x, filters, dy


def named() -> list[tuple[str, Layer, str]]:
    """Every workload: its name, the layer and the direction."""
    return [(f"{name}-{direction}", layer, direction) for name, layer in LAYERS.items() for direction in DIRECTIONS]
