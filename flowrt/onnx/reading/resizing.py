"""Resize and Upsample: along one axis after another, each entry a weighted sum of a few others.

Which ones, and by what weights, hangs on sizes alone, which must be known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flowrt.ops as fr
from flowrt.base.spec import is_float
from flowrt.onnx.reading.elementwise import rounded_once
from flowrt.onnx.reading.reader import NodeCall, Unreadable, Value, axis_of, reads
from flowrt.onnx.types import Array
from flowrt.ops.inference import described

Weigh = Callable[[float], Array]


@dataclass(frozen=True)
class Axis:
    """How one axis of ``size`` becomes one of ``wanted``; ``scale`` is what the model calls their ratio, ``region``
    the part of the axis, in shares of it, that is cut out."""

    size: int
    wanted: int
    scale: float
    region: tuple[float, float]


def _places(axis: Axis, mode: str) -> Array:
    """Where, in the old axis, each entry of the new one lies."""
    new, size, whole = np.arange(axis.wanted, dtype=np.float64), axis.size, axis.scale * axis.size
    if mode == "align_corners":
        return new * 0 if whole == 1 else new * (size - 1) / (whole - 1)
    if mode == "asymmetric":
        return new / axis.scale
    if mode == "half_pixel":
        return (new + 0.5) / axis.scale - 0.5
    if mode == "pytorch_half_pixel":
        return new * 0 - 0.5 if whole == 1 else (new + 0.5) / axis.scale - 0.5
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - axis.wanted / whole) + (new + 0.5) / axis.scale - 0.5
    if mode == "tf_crop_and_resize":
        first, last = axis.region
        middle = new * 0 + (last - first) * (size - 1) / 2
        return (middle if whole == 1 else new * (last - first) * (size - 1) / (whole - 1)) + first * (size - 1)
    raise Unreadable(f"coordinate_transformation_mode {mode!r} is not supported")


def _nearest(mode: str) -> Weigh:
    prefers: dict[str, Callable[[float], bool]] = {
        "round_prefer_floor": lambda share: share > 0.5,
        "round_prefer_ceil": lambda share: share >= 0.5,
        "floor": lambda share: False,
        "ceil": lambda share: True,
    }
    if mode not in prefers:
        raise Unreadable(f"nearest_mode {mode!r} is not supported")

    def weigh(share: float) -> Array:
        upper = share == 1 or prefers[mode](share)
        return np.array([0.0, 1.0] if upper else [1.0, 0.0])

    return weigh


def _linear(share: float) -> Array:
    return np.array([1 - share, share])


def _smooth_linear(scale: float) -> Weigh:
    """Over as many entries as become one."""
    scale = min(scale, 1.0)
    start = math.floor(-1 / scale) + 1

    def weigh(share: float) -> Array:
        found = np.clip(1 - np.abs((np.arange(start, 2 - start) - share) * scale), 0, 1)
        return np.asarray(found / found.sum())

    return weigh


def _cubic_curve(x: Array, a: float) -> Array:
    """Keys, "Cubic convolution interpolation", 1981."""
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _cubic(a: float) -> Weigh:
    return lambda share: _cubic_curve(np.arange(-1, 3) - share, a)


def _smooth_cubic(scale: float, a: float) -> Weigh:
    scale = min(scale, 1.0)
    start = math.floor(-2 / scale) + 1

    def weigh(share: float) -> Array:
        found = _cubic_curve(scale * (np.arange(start, 2 - start) - share), a)
        return np.asarray(found / found.sum())

    return weigh


def _weights(call: NodeCall, axis: Axis) -> tuple[Array, Array, Array]:
    """For each new entry the old ones that it is made of, their weights, and whether it lies outside."""
    mode, smooth = str(call.attr("mode", "nearest")), call.attr("antialias", 0)
    a = float(call.attr("cubic_coeff_a", -0.75))
    if mode == "nearest":
        weigh = _nearest(str(call.attr("nearest_mode", "round_prefer_floor")))
    elif mode == "linear":
        weigh = _smooth_linear(axis.scale) if smooth else _linear
    elif mode == "cubic":
        weigh = _smooth_cubic(axis.scale, a) if smooth else _cubic(a)
    else:
        raise Unreadable(f"mode {mode!r} is not supported")
    coordinates = str(call.attr("coordinate_transformation_mode", "half_pixel"))
    places = _places(axis, coordinates)
    before = np.floor(places)
    shares = np.where(before == places, 1.0, places - before)  # of two at the same distance the left one is nearer
    weights = np.stack([weigh(float(share)) for share in shares]) if len(shares) else np.zeros((0, 2))
    count = weights.shape[1]
    left = np.where(shares == 1.0, before - 1, before).astype(np.int64)
    old = left[:, None] + np.arange(1 - count // 2, count // 2 + 1)
    if call.attr("exclude_outside", 0):
        weights = np.where((old < 0) | (old >= axis.size), 0.0, weights)
        weights = weights / weights.sum(1, keepdims=True)
    outside = (places < 0) | (places > axis.size - 1) if coordinates == "tf_crop_and_resize" else np.zeros(1, bool)
    return np.clip(old, 0, axis.size - 1), weights, outside


def _resized(call: NodeCall, x: Value, at: int, axis: Axis) -> Value:
    old, weights, outside = _weights(call, axis)
    rank, dtype = described(x).rank, described(x).dtype

    def beside(values: Array) -> Array:
        return values.reshape([-1 if i == at else 1 for i in range(rank)])

    if all(np.count_nonzero(row) == 1 and row.max() == 1 for row in weights):  # each is one of the old ones
        found = fr.take(x, old[np.arange(len(old)), weights.argmax(1)], at)
    else:
        parts = [
            fr.multiply(fr.take(x, old[:, n], at), beside(weights[:, n].astype(dtype))) for n in range(old.shape[1])
        ]
        found = fr.add_n(parts)
    if not outside.any():
        return found
    return fr.where(beside(outside), np.asarray(call.attr("extrapolation_value", 0.0), dtype), found)


@dataclass(frozen=True)
class _Asked:
    """Which axes are resized, by ``scales`` or to ``sizes``; ``checked`` says that others were taken to stay as they
    are."""

    axes: list[int]
    scales: Array | None
    sizes: list[int] | None
    checked: bool = False


def _asked(call: NodeCall, axes: list[int], all_of_them: bool) -> _Asked:
    """What a node asks for. An axis of open size, as that of the batch mostly is, stays as it is where its scale is 1,
    or where the size it is to have is as open."""
    scales, dims = call.known(2, "the scales"), [call.shape(0)[axis] for axis in axes]
    if scales is not None and scales.size:
        moved = [n for n, dim in enumerate(dims) if all_of_them or dim is not None or scales[n] != 1]
        return _Asked([axes[n] for n in moved], scales[moved], None)
    told = None if call[3] is None else call.spec(3).value
    stretched = call.attr("keep_aspect_ratio_policy", "stretch") == "stretch" and not all_of_them
    if isinstance(told, tuple) and stretched and len(axes) == call.rank(0):
        moved = [n for n, size in enumerate(told) if dims[n] is not None or size is not None]
        sizes = [size for n in moved if isinstance(size := told[n], int)]
        if len(sizes) == len(moved) < len(axes):
            return _Asked([axes[n] for n in moved], None, sizes, checked=True)
    return _Asked(axes, None, call.integers(3, "the sizes"))


@reads("Resize")
@rounded_once
def resize(call: NodeCall) -> Value:
    rank, dims, named = call.rank(0), call.shape(0), call.attr("axes")
    region = None
    if call.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        region = call.known(1, "the region of interest")
    given = list(range(rank)) if named is None else [axis_of(axis, rank) for axis in named]
    asked = _asked(call, given, region is not None)
    axes, scales, sizes = asked.axes, asked.scales, asked.sizes
    chosen = [dims[axis] for axis in axes]
    if None in chosen:
        raise Unreadable("the sizes of what is resized must be known")
    old = [n or 0 for n in chosen]
    ratios, wanted = _wanted(call, old, scales, sizes)
    if not is_float(call.spec(0).dtype) and call.attr("mode", "nearest") != "nearest":
        raise Unreadable(f"weighted sums of {call.spec(0).dtype} are not supported; cast to float first")
    x = call[0]
    for n, at in enumerate(axes):
        part = (0.0, 1.0) if region is None else (float(region[n]), float(region[len(axes) + n]))
        if math.isclose(ratios[n], 1.0) and wanted[n] == old[n] and part == (0.0, 1.0):
            continue
        x = _resized(call, x, at, Axis(old[n], wanted[n], ratios[n], part))
    if asked.checked:
        return fr.reshape(x, call[3])  # which fits no size but the one that stayed
    return fr.identity(x) if x is call[0] else x


def _wanted(call: NodeCall, old: list[int], scales: Any, sizes: list[int] | None) -> tuple[list[float], list[int]]:
    """How many times as large each axis becomes, and how large."""
    if sizes is None:
        if scales is None:
            raise Unreadable("it has neither scales nor sizes")
        ratios = [float(scale) for scale in scales]
        if not all(0 < ratio < math.inf for ratio in ratios):
            raise Unreadable(f"scales are above 0, got {ratios}")
        return ratios, [int(np.float32(scale) * n) for scale, n in zip(scales, old, strict=True)]
    ratios = [size / n for size, n in zip(sizes, old, strict=True)]
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return ratios, sizes
    common = min(ratios) if policy == "not_larger" else max(ratios)
    return [common] * len(old), [int(common * n + 0.5) for n in old]
