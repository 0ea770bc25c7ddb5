"""Products of matrices in register tiles, in every vector width; NumPy in float64 is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables

from flowrt.base.spec import Spec
from flowrt.kernels.launch import run_kernel
from flowrt.kernels.ops.linalg import register
from flowrt.kernels.tiles.micro import AVX2, AVX512, NEON, SSE, Geometry, native

Array = np.ndarray[Any, Any]
ALL = {"avx512": AVX512, "avx2": AVX2, "neon": NEON, "sse": SSE}
GEOMETRIES = {name: ALL[name] for name in ("avx512", "avx2", "neon") if ALL[name] != native()}
WIDTHS = [*GEOMETRIES, "matmul"]  # which runs the machine's own
FLAGS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with own_tables():
        for name, geometry in GEOMETRIES.items():
            register(name, geometry)
        yield


def product(op: str, a: Array, b: Array, flags: tuple[bool, bool] = (False, False)) -> tuple[Array, Array]:
    """The op's result, and the judge's."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        want = (wide_a.swapaxes(-1, -2) if flags[0] else wide_a) @ (wide_b.swapaxes(-1, -2) if flags[1] else wide_b)
    attrs = {"transpose_a": flags[0], "transpose_b": flags[1]}
    (got,) = run_kernel(op, [a, b], [Spec(a.dtype, want.shape)], attrs)
    return got, want


def close(got: Array, want: Array, terms: int) -> None:
    """Within a rounding for every term of entries of about 1."""
    margin = np.finfo(got.dtype).eps * (8 + terms)
    np.testing.assert_allclose(got, want, rtol=margin, atol=margin)


def operands(
    rng: np.random.Generator, shape: tuple[int, int, int], flags: tuple[bool, bool], dtype: str
) -> tuple[Array, Array]:
    m, n, k = shape
    a = rng.standard_normal((k, m) if flags[0] else (m, k)).astype(dtype)
    b = rng.standard_normal((n, k) if flags[1] else (k, n)).astype(dtype)
    return a, b


def test_the_machine_has_one_of_the_geometries() -> None:
    assert native() in ALL.values()
    for geometry in ALL.values():
        assert geometry.columns("float32") == 2 * geometry.columns("float64") == geometry.vectors * geometry.width // 4
        assert geometry.fewer <= geometry.rows


def random_size(rng: np.random.Generator) -> int:
    return int(rng.choice([0, 1, 2, 3, int(rng.integers(4, 40)), int(rng.integers(4, 40)), int(rng.integers(40, 200))]))


@pytest.mark.parametrize("op", WIDTHS)
@pytest.mark.parametrize("flags", FLAGS)
def test_products_of_any_shape_are_right_in_every_width(op: str, flags: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        m, n, k = shape = random_size(rng), random_size(rng), random_size(rng)
        print(op, flags, shape)
        close(*product(op, *operands(rng, (m, n, k), flags, "float32"), flags), k)


@pytest.mark.parametrize("op", [WIDTHS[0], "matmul"])
@pytest.mark.parametrize("flags", FLAGS)
def test_double_precision_is_kept(op: str, flags: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        m, n, k = shape = random_size(rng), random_size(rng), random_size(rng)
        print(op, flags, shape)
        close(*product(op, *operands(rng, (m, n, k), flags, "float64"), flags), k)


@pytest.mark.parametrize("flags", FLAGS)
def test_every_edge_of_a_tile_is_right(flags: tuple[bool, bool]) -> None:
    geometry: Geometry = native()
    rng, wide = np.random.default_rng(3), geometry.columns("float32")
    for m in range(1, 2 * geometry.rows + 2):
        for n in (1, 2, wide - 1, wide, wide + 1):
            for k in (9, 40):  # without tiles some, and with them
                close(*product("matmul", *operands(rng, (m, n, k), flags, "float32"), flags), k)


@pytest.mark.parametrize("flags", FLAGS)
def test_long_sums_and_many_rows_go_block_by_block(flags: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(4)
    sizes = (
        (7, 33, 5000),
        (500, 17, 300),
        (3, 700, 20),
        (1, 300, 2500),
        (300, 1, 2500),
        (300, 100, 1500),
        (70, 90, 2000),
    )
    for shape in sizes:
        close(*product("matmul", *operands(rng, shape, flags, "float32"), flags), shape[2])


@pytest.mark.parametrize("flags", FLAGS)
def test_an_entry_outside_what_is_multiplied_is_never_used(flags: tuple[bool, bool]) -> None:
    """What lies around the operands is NaN, and what lies around the result stays as it was."""
    rng = np.random.default_rng(5)
    for shape in ((5, 3, 7), (5, 3, 70), (13, 33, 4), (6, 16, 3), (1, 5, 9), (1, 5, 90)):
        a, b = operands(rng, shape, flags, "float32")
        memory = np.full(a.size + b.size + 256, np.nan, np.float32)
        spaced = [memory[64 : 64 + a.size].reshape(a.shape), memory[128 + a.size : 128 + a.size + b.size]]
        spaced[1] = spaced[1].reshape(b.shape)
        spaced[0][...], spaced[1][...] = a, b
        close(*product("matmul", *spaced, flags), shape[2])


def test_nan_and_infinity_reach_exactly_the_entries_they_are_terms_of() -> None:
    a, b = np.zeros((9, 5), np.float32), np.ones((5, 19), np.float32)
    b[2, 17] = np.nan  # 0 times NaN is NaN
    b[3, 4] = np.inf
    got, _ = product("matmul", a, b)
    assert np.isnan(got[:, [4, 17]]).all()
    assert not np.isnan(np.delete(got, [4, 17], axis=1)).any()


@pytest.mark.parametrize("flags", FLAGS)
def test_batches_broadcast(flags: tuple[bool, bool]) -> None:
    rng = np.random.default_rng(6)
    for left, right in (((3, 2), (3, 2)), ((3, 1), (1, 4)), ((5,), ()), ((), (5,)), ((0,), (1,))):
        a, b = operands(rng, (7, 18, 5), flags, "float32")
        a, b = (rng.standard_normal((*batch, *x.shape)).astype("f") for batch, x in ((left, a), (right, b)))
        close(*product("matmul", a, b, flags), 5)


def test_no_terms_make_zeros() -> None:
    for shape in ((3, 0, 4), (0, 3, 4), (3, 4, 0), (0, 0, 0)):
        got, want = product("matmul", *operands(np.random.default_rng(7), shape, FLAGS[0], "float32"))
        np.testing.assert_array_equal(got, want)
