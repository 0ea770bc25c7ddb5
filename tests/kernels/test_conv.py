"""Convolutions on register tiles: any stride, dilation, padding and groups, in several widths; NumPy is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables

from flowrt.base.spec import Spec, sliding
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Operand, apply_kernel
from flowrt.kernels.ops.nn.conv import register
from flowrt.kernels.tiles.micro import AVX512

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.timeout(300)  # the first to run compiles the kernels
OPS = ("conv2d", "conv2d_input_grad", "conv2d_filter_grad")
GUARD = 64  # entries around every array that a kernel must leave alone
FAR = 40  # zeros around the judge's images


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with own_tables():
        register(AVX512, ["wide_" + op for op in (*OPS, "conv2d_bias")])
        yield


def guarded(spec: Spec, value: Any = None) -> tuple[Array, Array]:
    """Memory for an array, and the array in its middle: filled with ``value``, or with NaN."""
    memory = np.full(spec.size + 2 * GUARD, -77 if spec.dtype.kind == "i" else np.nan, spec.dtype)
    array = memory[GUARD : GUARD + spec.size].reshape(spec.concrete)
    if value is not None:
        array[...] = value
    return memory, array


def run(op: str, inputs: list[Array], output: Spec, attrs: dict[str, Any], ranges: int = 1) -> Array:
    """The op computed in so many ranges of units, the last first, and a look at what lies around its memory."""
    specs = [Spec(a.dtype, a.shape) for a in inputs]
    application = apply_kernel(op, specs, [output], attrs)
    given = [guarded(spec, array) for spec, array in zip(specs, inputs, strict=True)]
    made = [guarded(spec) for spec in (output, *application.scratch, *application.local)]
    words = np.zeros(RUN_WORDS, np.int64)
    arrays = [array for _, array in (*given, *made)]
    bases = np.array([words.ctypes.data, *(a.ctypes.data for a in arrays)], np.int64)
    places = [Operand(number + 1) for number in range(len(arrays))]
    for step in application.steps:
        entry, block = ENTRY_TYPE(step.address()), step.block(places)
        for part in reversed(range(ranges)):
            begin, end = (n * step.units // ranges for n in (part, part + 1))
            entry(bases.ctypes.data, block.ctypes.data, begin, end)
    for memory, array in (*given, *made):
        around = np.concatenate([memory[:GUARD], memory[GUARD + array.size :]])
        assert (around == -77).all() if memory.dtype.kind == "i" else np.isnan(around).all()
    return made[0][1]


def judge(x: Array, filters: Array, dy: Array, attrs: dict[str, Any]) -> tuple[Array, Array, Array]:
    """The result, and the gradients for images and filters, tap by tap in float64."""
    x, filters, dy = (a.astype(np.float64) for a in (x, filters, dy))
    how = sliding(x.shape[1:3], filters.shape[:2], attrs["strides"], attrs["dilations"], attrs["padding"])
    padded = np.pad(x, ((0, 0), (FAR, FAR), (FAR, FAR), (0, 0)))
    y, dx, dfilters = np.zeros_like(dy), np.zeros_like(padded), np.zeros_like(filters)
    share, depth = dy.shape[3] // attrs["groups"], filters.shape[2]
    for tap in np.ndindex(filters.shape[0], filters.shape[1]):
        starts = [FAR - (side.before or 0) + t * side.dilation for side, t in zip(how, tap, strict=True)]
        down, across = (
            slice(s, s + side.count * side.stride, side.stride) for s, side in zip(starts, how, strict=True)
        )
        for group in range(attrs["groups"]):
            ins, outs = slice(group * depth, (group + 1) * depth), slice(group * share, (group + 1) * share)
            seen, weights = padded[:, down, across, ins], filters[(*tap, slice(None), outs)]
            y[..., outs] += seen @ weights
            dx[:, down, across, ins] += dy[..., outs] @ weights.T
            dfilters[(*tap, slice(None), outs)] += np.einsum("nhwc,nhwo->co", seen, dy[..., outs])
    return y, dx[:, FAR : FAR + x.shape[1], FAR : FAR + x.shape[2]], dfilters


def check(
    x_shape: tuple[int, ...], filter_shape: tuple[int, ...], prefix: str = "", dtype: str = "float32", **how: Any
) -> None:
    """All three kernels against the judge, within a rounding for every few terms of entries of about 1."""
    attrs = {"strides": 1, "padding": "SAME", "dilations": 1, "groups": 1, **how}
    print(x_shape, filter_shape, prefix, dtype, attrs)
    rng = np.random.default_rng(0)
    x, filters = (rng.standard_normal(shape).astype(dtype) for shape in (x_shape, filter_shape))
    sides = sliding(x_shape[1:3], filter_shape[:2], attrs["strides"], attrs["dilations"], attrs["padding"])
    dy = rng.standard_normal((x_shape[0], *(side.count for side in sides), filter_shape[3])).astype(dtype)
    wanted = judge(x, filters, dy, attrs)
    operands = [x, filters], [dy, filters, np.array(x_shape)], [x, dy, np.array(filter_shape)]
    for op, inputs, want in zip(OPS, operands, wanted, strict=True):
        got = run(prefix + op, inputs, Spec(dtype, want.shape), attrs, ranges=3)
        margin = np.finfo(dtype).eps * 64 * max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got, want, rtol=margin, atol=margin, err_msg=op)


@pytest.mark.parametrize("prefix", ["", "wide_"])
def test_ordinary_layers_are_right_in_two_widths(prefix: str) -> None:
    check((2, 12, 12, 3), (3, 3, 3, 32), prefix)
    check((3, 16, 16, 20), (3, 3, 20, 40), prefix)
    check((2, 9, 8, 4), (3, 2, 4, 6), prefix, strides=(2, 3), padding="VALID")
    check((2, 9, 12, 6), (3, 3, 3, 8), prefix, dilations=(2, 1), groups=2)


def random_case(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    groups = int(rng.choice([1, 1, 2, 3]))
    window, dilations = rng.integers(1, 5, 2), rng.integers(1, 3, 2)
    height, width = ((window - 1) * dilations + rng.integers(1, 15, 2)).tolist()
    depth, share = int(rng.integers(1, 7)), int(rng.integers(1, 20))
    edges = ((int(rng.integers(0, 4)), int(rng.integers(0, 4))), (int(rng.integers(0, 4)), int(rng.integers(0, 4))))
    padding = ["SAME", "VALID", edges][int(rng.integers(0, 3))]
    how = {"strides": tuple(rng.integers(1, 4, 2).tolist()), "dilations": tuple(dilations.tolist())}
    shape = (int(rng.integers(1, 5)), height, width, groups * depth)
    return shape, (*window.tolist(), depth, groups * share), {**how, "padding": padding, "groups": groups}


def test_random_strides_dilations_paddings_and_groups_are_right() -> None:
    rng = np.random.default_rng(11)
    for _ in range(120):
        x_shape, filter_shape, how = random_case(rng)
        check(x_shape, filter_shape, **how)


@pytest.mark.parametrize(("prefix", "dtype"), [("", "float32"), ("wide_", "float32"), ("", "float64")])
def test_channels_with_filters_of_their_own_are_right(prefix: str, dtype: str) -> None:
    rng = np.random.default_rng(14)
    for channels in (2, 3, 8, 16, 17, 32, 47):
        x_shape, filter_shape, how = random_case(rng)
        own = {**how, "groups": channels}
        check((*x_shape[:3], channels), (*filter_shape[:2], 1, channels), prefix, dtype, **own)


def test_double_precision_is_kept() -> None:
    rng = np.random.default_rng(12)
    for _ in range(15):
        x_shape, filter_shape, how = random_case(rng)
        check(x_shape, filter_shape, dtype="float64", **how)


def test_large_and_small_images_are_cut_into_blocks() -> None:
    check((1, 70, 60, 2), (5, 5, 2, 3))
    check((40, 3, 3, 5), (3, 3, 5, 4))
    check((17, 1, 1, 8), (1, 1, 8, 17))
    check((1, 5, 150, 3), (3, 3, 3, 4), strides=(1, 2))  # rows in parts, and phases of them
    check((1, 4, 70, 18), (3, 3, 1, 18), groups=18)
    check((1, 4, 4, 6), (2, 2, 3, 150), groups=2)  # panels of one block among units


@pytest.mark.parametrize("prefix", ["", "wide_"])
def test_few_channels_of_a_group_are_right(prefix: str) -> None:
    """Places are the columns of a tile then: of rows in parts, of phases, and of vectors beyond an image's last."""
    check((2, 23, 40, 9), (3, 3, 9, 3), prefix)
    check((1, 4, 100, 300), (3, 2, 300, 2), prefix)  # one row is too much for a slab
    check((2, 17, 31, 6), (5, 4, 6, 1), prefix, strides=(2, 3), dilations=(1, 2))
    check((3, 12, 9, 12), (3, 3, 4, 15), prefix, groups=3, padding=((2, 0), (0, 3)))
    check((2, 11, 13, 1), (5, 5, 1, 7), prefix, padding="VALID")
    check((9, 6, 5, 3), (4, 4, 3, 3), prefix, strides=2)


def test_few_channels_of_double_precision_are_right() -> None:
    check((2, 23, 20, 9), (3, 3, 9, 3), dtype="float64")
    check((2, 9, 11, 6), (3, 3, 3, 8), dtype="float64", groups=2, strides=2)


def test_few_channels_get_their_biases_and_keep_nan() -> None:
    rng = np.random.default_rng(15)
    x, filters, bias = (rng.standard_normal(shape).astype("f") for shape in ((2, 9, 21, 5), (3, 3, 5, 3), (3,)))
    attrs = {"strides": 1, "padding": "SAME", "dilations": 1, "groups": 1}
    want = judge(x, filters, np.zeros((2, 9, 21, 3), np.float32), attrs)[0] + bias
    x[1, 4, 20, 2] = np.nan
    for activation in ("", "relu"):
        got = run("conv2d_bias", [x, filters, bias], Spec("float32", want.shape), {**attrs, "activation": activation})
        sees = np.isnan(got)
        assert sees[1, 3:6, 19:].all()
        assert sees.sum() == 18
        expected = np.maximum(want, 0) if activation else want
        np.testing.assert_allclose(got[~sees], expected[~sees], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x_shape", [(0, 5, 5, 3), (2, 5, 5, 3), (2, 2, 2, 3)])
def test_no_images_places_or_channels_make_zeros(x_shape: tuple[int, ...]) -> None:
    check(x_shape, (3, 3, 3, 0))
    check(x_shape, (3, 3, 3, 4), padding="VALID" if x_shape[1] > 2 else "SAME")
    check((*x_shape[:3], 0), (3, 3, 0, 4))
    check(x_shape, (1, 1, 3, 4), strides=3)


def test_results_do_not_depend_on_how_the_work_is_shared() -> None:
    rng = np.random.default_rng(13)
    x, filters = rng.standard_normal((5, 13, 13, 4)).astype("f"), rng.standard_normal((3, 3, 4, 24)).astype("f")
    dy = rng.standard_normal((5, 13, 13, 24)).astype("f")
    attrs = {"strides": 1, "padding": "SAME", "dilations": 1, "groups": 1}
    operands = [x, filters], [dy, filters, np.array(x.shape)], [x, dy, np.array(filters.shape)]
    for op, inputs, shape in zip(OPS, operands, (dy.shape, x.shape, filters.shape), strict=True):
        one, other = (run(op, inputs, Spec("float32", shape), attrs, ranges) for ranges in (1, 7))
        np.testing.assert_array_equal(one, other)


def test_nan_reaches_exactly_the_places_that_see_it() -> None:
    x, filters = np.zeros((1, 6, 6, 2), np.float32), np.ones((3, 3, 2, 17), np.float32)
    x[0, 2, 2, 1] = np.nan
    attrs = {"strides": 1, "padding": "SAME", "dilations": 1, "groups": 1}
    got = run("conv2d", [x, filters], Spec("float32", (1, 6, 6, 17)), attrs)
    assert np.isnan(got[0, 1:4, 1:4]).all()
    assert np.isnan(got).sum() == 9 * 17
