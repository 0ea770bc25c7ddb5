"""Elementary functions of float32 and float64, within their bounds over all floats: zeros, infinities and NaN too.

The judge is NumPy or C's library in float64, for float64 NumPy's long doubles. Bounds are in units in the last place of
the nearest number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

import flowrt.ops as fr
from flowrt.kernels.elementary.quantile import distance_of, quantile_at
from flowrt.kernels.elementary.quotient import is_small_quotient64, near_quotient64, near_remainder64
from flowrt.ops.activation import gelu_slope

Array = np.ndarray[Any, Any]
Judge = Callable[[Array], Array]


def stable_sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1.0 + small)


erf, erfc = (np.vectorize(f, otypes=[np.float64]) for f in (math.erf, math.erfc))


def gelu(x: Array) -> Array:
    """The complement of the error function, which C's library takes of doubles, is taken beside where they end."""
    wide = -np.clip(x, -40, 40) / np.sqrt(x.dtype.type(2))
    near = wide.astype(np.float64)
    return np.maximum(x, -40) / 2 * (erfc(near) - (wide - near) * (2 / math.sqrt(math.pi)) * np.exp(-near * near))


CURVES: dict[str, tuple[Judge, float]] = {
    "exp": (np.exp, 2),
    "expm1": (np.expm1, 2),
    "log": (np.log, 2),
    "log1p": (np.log1p, 2),
    "tanh": (np.tanh, 3),
    "sigmoid": (stable_sigmoid, 3),
    "softplus": (lambda x: np.logaddexp(x, 0.0), 4),
    "sin": (np.sin, 1),
    "cos": (np.cos, 1),
    "tan": (np.tan, 1),
    "asin": (np.arcsin, 1),
    "acos": (np.arccos, 1),
    "atan": (np.arctan, 1),
    "sinh": (np.sinh, 1),
    "cosh": (np.cosh, 1),
    "erf": (erf, 2.5),
    "gelu": (gelu, 6),
}
WIDE_CURVES: dict[str, tuple[Judge, float]] = {
    "exp": (np.exp, 2),
    "expm1": (np.expm1, 3),
    "log": (np.log, 1),
    "log1p": (np.log1p, 2),
    "tanh": (np.tanh, 3),
    "sigmoid": (stable_sigmoid, 3),
    "softplus": (lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), 3),
    "sin": (np.sin, 1),
    "cos": (np.cos, 1),
    "tan": (np.tan, 2),
    "erf": (lambda x: erf(x).astype(np.longdouble), 2),  # itself within one
    "gelu": (gelu, 12),  # itself within some
    "asin": (np.arcsin, 3),
    "acos": (np.arccos, 2),
    "atan": (np.arctan, 2),
    "sinh": (np.sinh, 3),
    "cosh": (np.cosh, 2),
}
SPECIAL = np.float32([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan])


def every_exponent(rng: np.random.Generator, each: int) -> Array:
    """Random floats of every sign and exponent, those below the normal ones too, and the ends of each."""
    tops = np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)
    rests = rng.integers(0, 2**23, (512, each), np.uint32)
    rests[:, :2] = 0, 2**23 - 1
    return (tops | rests).ravel().view(np.float32)


def every_wide_exponent(rng: np.random.Generator, each: int) -> Array:
    """As `every_exponent`, of float64."""
    tops = np.arange(4096, dtype=np.uint64)[:, None] << np.uint64(52)
    rests = rng.integers(0, 2**52, (4096, each), np.uint64)
    rests[:, :2] = 0, 2**52 - 1
    return (tops | rests).ravel().view(np.float64)


def check(got: Array, want: Array, bound: float) -> None:
    """``want`` is wider. Where the nearest number is none, the very same must have come."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = want.astype(got.dtype)
        error = np.abs(got - want) / np.spacing(np.abs(nearest))
    finite = np.isfinite(nearest)
    edge = np.isinf(nearest) & np.isfinite(want) & (np.abs(got) == np.finfo(got.dtype).max)  # half a unit off
    np.testing.assert_array_equal(got[~finite & ~edge], nearest[~finite & ~edge])
    assert np.isfinite(got[finite]).all()
    assert error[finite].max(initial=0.0) <= bound


@pytest.mark.parametrize("name", WIDE_CURVES)
def test_every_double_comes_out_within_the_bound(name: str) -> None:
    judge, bound = WIDE_CURVES[name]
    rng = np.random.default_rng(11)
    print("seed 11")
    near = [rng.uniform(-r, r, 20_000) for r in (1.0, 4.0, 20.0, 40.0, 750.0, 1e6)]
    x = np.concatenate([SPECIAL.astype(np.float64), every_wide_exponent(rng, 12), *near])
    with np.errstate(all="ignore"):
        check(getattr(fr, name)(x), judge(x.astype(np.longdouble)), bound)


@pytest.mark.parametrize("name", CURVES)
def test_every_float_comes_out_within_the_bound(name: str) -> None:
    judge, bound = CURVES[name]
    rng = np.random.default_rng(7)
    print("seed 7")
    near = [rng.uniform(-r, r, 20_000).astype(np.float32) for r in (1.0, 4.0, 20.0, 105.0, 1e6)]
    x = np.concatenate([SPECIAL, every_exponent(rng, 64), *near])
    with np.errstate(all="ignore"):
        check(getattr(fr, name)(x), judge(x.astype(np.float64)), bound)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_entropies_of_doubles_come_out_within_the_bound(label: float) -> None:
    judge, bound = WIDE_CURVES["softplus"]
    rng = np.random.default_rng(13)
    print("seed 13")
    x = np.concatenate([every_wide_exponent(rng, 12), *(rng.uniform(-r, r, 20_000) for r in (1.0, 4.0, 40.0, 750.0))])
    x = x[np.isfinite(x)]
    with np.errstate(all="ignore"):
        found = fr.nn.sigmoid_cross_entropy(x, np.full_like(x, label))
        check(found, judge(np.where(label, -x, x).astype(np.longdouble)), bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["expm1", "log1p", "sin", "tan", "asin", "atan", "sinh", "tanh"])
def test_the_least_numbers_are_answered_by_themselves(name: str, dtype: Any) -> None:
    least = np.finfo(dtype).smallest_subnormal * np.arange(1, 9, dtype=dtype)
    x = np.concatenate([least, -least, np.finfo(dtype).tiny * least[:1], [0.0, -0.0]]).astype(dtype)
    np.testing.assert_array_equal(getattr(fr, name)(x), x)


def powers(x: Array, y: Array) -> None:
    wider = np.float64 if x.dtype == np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        check(fr.pow(x, y), np.power(x.astype(wider), y.astype(wider)), 1)


FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@FLOATS
def test_powers_of_edges_are_as_c_defines_them(dtype: Any) -> None:
    edges = [2, -2, 3, -3, 0.5, -0.5, 1.5, -2.5, 1e-40, -1e-40, 1e38, -1e38, 2**24, 1 - 2**24, 127, 128, -126, -150]
    edges += [2.0**53, 1 - 2.0**53, 1024, -1022, -1075, 2.0**70, 5e-324, 1e308, -1e308] * (dtype == np.float64)
    all_edges = np.concatenate(
        [SPECIAL.astype(dtype), np.array(edges, dtype), np.nextafter(dtype(1), [dtype(0), dtype(2)])]
    )
    x, y = (part.ravel() for part in np.meshgrid(all_edges, all_edges))
    powers(x, y)
    with np.errstate(all="ignore"):
        got, want = fr.pow(x, y), np.power(x, y)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@FLOATS
@pytest.mark.parametrize(("base", "power"), [((0, 10), (-30, 30)), ((0.999, 1.001), (-1e5, 1e5)), ((-9, 9), (-3, 3))])
def test_powers_are_within_a_unit(base: tuple[float, float], power: tuple[float, float], dtype: Any) -> None:
    rng = np.random.default_rng(9)
    print("seed 9")
    powers(rng.uniform(*base, 50_000).astype(dtype), rng.uniform(*power, 50_000).astype(dtype))
    powers(rng.uniform(*base, 50_000).astype(dtype), rng.integers(-5, 6, 50_000).astype(dtype))


@FLOATS
def test_powers_of_all_floats_are_within_a_unit(dtype: Any) -> None:
    rng = np.random.default_rng(10)
    print("seed 10")
    floats = every_exponent(rng, 40) if dtype == np.float32 else every_wide_exponent(rng, 6)
    powers(floats, rng.permutation(floats))


# ── angles ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@FLOATS
def test_angles_of_edges_are_as_c_defines_them(dtype: Any) -> None:
    edges = np.array([*SPECIAL, np.finfo(dtype).max, -np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal], dtype)
    y, x = (part.ravel() for part in np.meshgrid(edges, edges))
    got, want = fr.atan2(y, x), np.arctan2(y, x)
    np.testing.assert_allclose(got, want, rtol=2 * np.finfo(dtype).eps, atol=0)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(want[known]))


@pytest.mark.parametrize(("dtype", "wider", "bound"), [(np.float32, np.float64, 1), (np.float64, np.longdouble, 2)])
def test_angles_are_within_the_bound(dtype: Any, wider: Any, bound: float) -> None:
    rng = np.random.default_rng(12)
    print("seed 12")
    all_floats = every_exponent(rng, 32) if dtype == np.float32 else every_wide_exponent(rng, 6)
    y, x = all_floats, rng.permutation(all_floats)
    near = rng.normal(size=(2, 50_000)).astype(dtype)
    y, x = np.concatenate([y, near[0]]), np.concatenate([x, near[1]])
    with np.errstate(all="ignore"):
        check(fr.atan2(y, x), np.arctan2(y.astype(wider), x.astype(wider)), bound)


@pytest.mark.parametrize("name", ["sin", "tan", "asin", "atan", "sinh", "tanh", "expm1", "log1p", "erf"])
@FLOATS
def test_zero_keeps_its_sign(name: str, dtype: Any) -> None:
    got = getattr(fr, name)(np.array([0.0, -0.0] * 9, dtype))
    np.testing.assert_array_equal(np.signbit(got), [False, True] * 9)


def test_the_floats_nearest_to_quarters_of_a_turn_are_reduced_right() -> None:
    exponents = np.arange(-20, 104)
    near = np.concatenate([np.float32([16367173.0 * 2.0**72]), np.float32(np.ldexp(np.pi / 2, exponents))])
    x = np.unique(np.concatenate([near, np.nextafter(near, np.float32(np.inf)), -near]))
    check(fr.sin(x), np.sin(x.astype(np.float64)), 1)
    check(fr.cos(x), np.cos(x.astype(np.float64)), 1)
    check(fr.tan(x), np.tan(x.astype(np.float64)), 1)


def test_the_doubles_nearest_to_quarters_of_a_turn_are_reduced_right() -> None:
    quarters = np.unique(np.concatenate([np.arange(1, 4000), (2.0 ** np.arange(0, 20.3, 0.001)).astype(int)]))
    near = quarters * (np.longdouble(np.pi / 2) + np.longdouble(6.123233995736766e-17))
    x = near.astype(np.float64)
    x = np.concatenate([x, np.nextafter(x, np.inf), -x])
    for name in ("sin", "cos", "tan"):
        judge, bound = WIDE_CURVES[name]
        for part in (x[np.abs(x) < 2**20], x):
            check(getattr(fr, name)(part), judge(part.astype(np.longdouble)), bound)


@FLOATS
def test_an_angle_comes_to_the_same_bits_beside_large_ones(dtype: Any) -> None:
    rng = np.random.default_rng(13)
    print("seed 13")
    x = rng.uniform(-(2.0**20), 2.0**20, 5000).astype(dtype)
    mixed = x.copy()
    mixed[1500:2700:97] = 2.0**21, -np.inf, 1e30, *mixed[1791:2700:97]
    for function in (fr.sin, fr.cos, fr.tan):
        alone, beside = function(x), function(mixed)
        np.testing.assert_array_equal(beside[mixed == x], alone[mixed == x])
        check(beside[1500:1700:97], function(mixed[1500:1700:97].astype(np.longdouble).astype(np.float64)), 1)


# ── quotients and their rests ────────────────────────────────────────────────────────────────────────────────────────


@FLOATS
def test_quotients_by_one_subnormal_number_are_quotients(dtype: Any) -> None:
    tiny = np.finfo(dtype).smallest_subnormal * 1000
    x = np.tile(np.array([0, 1, 500, -3000], dtype) * np.finfo(dtype).smallest_subnormal, 500)
    np.testing.assert_array_equal(fr.divide(x, tiny), x / tiny)


@FLOATS
@pytest.mark.parametrize("top", [1e-30, 3, 1e6])
def test_rests_and_floors_of_quotients_are_exact(dtype: Any, top: float) -> None:
    rng = np.random.default_rng(14)
    print("seed 14")
    x = np.concatenate([rng.uniform(-top, top, 20_000), 0.1 * rng.integers(-50, 50, 2000)]).astype(dtype)
    y = np.concatenate([rng.uniform(-2, 2, 20_000), 0.1 * rng.integers(1, 9, 2000)]).astype(dtype)
    x, y = x[np.abs(x / y) < 2**23], y[np.abs(x / y) < 2**23]  # floats beyond leave out integers
    np.testing.assert_array_equal(fr.remainder(x, y), np.remainder(x, y))
    whole = np.floor_divide(x.astype(np.longdouble), y.astype(np.longdouble))  # NumPy's own of float32 may be one off
    np.testing.assert_array_equal(fr.floor_divide(x, y), whole.astype(dtype))


@FLOATS
def test_rests_of_edges_are_those_of_numpy(dtype: Any) -> None:
    edges = [0.5, 2, -2, 3, -3, 7, 1e30, -1e30, 2**22 - 1, 2**22, 2**23 + 1, 5e-40, np.finfo(dtype).max]
    values = np.concatenate([SPECIAL.astype(dtype), np.array(edges, dtype)])
    x, y = (part.ravel() for part in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        rests, quotients = np.remainder(x, y), np.floor_divide(x, y)
    np.testing.assert_array_equal(fr.remainder(x, y), rests)
    np.testing.assert_allclose(fr.floor_divide(x, y), quotients, rtol=2 * np.finfo(dtype).eps, atol=0)


def test_rests_are_exact_without_one_rounding_for_two_operations() -> None:
    """As plain Python computes them, and processors that have no such instruction."""
    rng = np.random.default_rng(15)
    print("seed 15")
    largest = np.finfo(np.float64).max
    x = np.concatenate([rng.uniform(-1, 1, 3000) * largest, [largest, -largest, 2.0**1023, 0.99 * 2.0**1023]])
    edges = [0.6 * largest, 0.51 * largest, largest, 0.6 * largest]
    y = np.concatenate([rng.choice([-1, 1], 3000) * rng.uniform(0.05, 1, 3000) * largest, edges])
    with np.errstate(all="ignore"):
        small = [bool(is_small_quotient64(a, b)) for a, b in zip(x, y, strict=True)]
        for a, b, fits in zip(x, y, small, strict=True):
            if fits:
                assert near_remainder64(a, b) == np.remainder(a, b), (a, b)
                assert near_quotient64(a, b) == np.floor_divide(a, b), (a, b)
        assert not all(small)
        assert sum(small) > 1000
        np.testing.assert_array_equal(fr.remainder(x, y), np.remainder(x, y))


@FLOATS
def test_a_rest_of_zero_has_the_divisors_sign_whatever_lies_beside_it(dtype: Any) -> None:
    x, y = np.array([0.0, -0.0, -6, 6, -6, 6], dtype), np.array([-1, 1, 3, -3, -3, 3], dtype)
    for beside in ([], [np.nan], [1e30]):
        rests = fr.remainder(np.array([*x, *beside], dtype), np.array([*y, *np.ones_like(beside)], dtype))
        np.testing.assert_array_equal(np.signbit(rests[:6]), np.signbit(y))
    for a, b in zip(x, y, strict=True):
        assert np.signbit(fr.remainder(a, b)) == np.signbit(b)


@pytest.mark.parametrize(("dtype", "bound", "far"), [(np.float32, 1e-5, 12), (np.float64, 1e-12, 36)])
def test_the_slope_of_gelu_keeps_its_digits_far_below_zero(dtype: Any, bound: float, far: int) -> None:
    x = np.linspace(-far, -1, 2001).astype(dtype)
    wide = x.astype(np.float64)
    want = erfc(-wide / math.sqrt(2)) / 2 + wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gelu_slope(x), want, rtol=bound)
    ends = gelu_slope(np.array([-np.inf, -1e30, 0, 1e30, np.inf], dtype))
    np.testing.assert_array_equal(ends, np.array([0, 0, 0.5, 1, 1], dtype))


def test_the_tanh_formula_of_gelu_keeps_its_digits_below_zero() -> None:
    x = np.linspace(-6, -1, 501)
    cube = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    want = x / (1 + np.exp(-2 * cube))
    np.testing.assert_allclose(fr.gelu(x.astype(np.float32), True), want, rtol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", [fr.gelu, lambda x: fr.gelu(x, approximate=True), fr.silu])
def test_gates_are_shut_at_minus_infinity(function: Any, dtype: Any) -> None:
    x = np.array([-np.inf, np.finfo(dtype).min, -1e30, np.inf, np.nan], dtype)
    np.testing.assert_array_equal(function(x), np.array([0, 0, 0, np.inf, np.nan], dtype))


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int64", "int8"])
def test_powers_of_integers_wrap_as_numpys(dtype: Any) -> None:
    most = np.iinfo(dtype).max
    x, y = np.meshgrid(*[np.array([0, 1, 2, 3, 7, 40, 41, most - 1, most], dtype)] * 2)
    np.testing.assert_array_equal(fr.pow(x, y), np.power(x, y))
    ends = np.array([most, np.iinfo(dtype).min], dtype)
    if dtype in ("int8", "int64"):
        np.testing.assert_array_equal(fr.pow(ends, np.array(-1, dtype)), [0, 0])


INTEGERS = (bool, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OF_INTEGERS = [(name, INTEGERS[(n + 3 * k) % 9]) for n, name in enumerate(CURVES) for k in range(3)]
"""Each function of three of them, and each of these with a third of the functions: every pair is a kernel."""


@pytest.mark.parametrize(("name", "dtype"), OF_INTEGERS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, where a function has no value
def test_a_function_of_integers_is_that_of_the_floats_that_they_are(name: str, dtype: Any) -> None:
    ends = [0, 1] if dtype is bool else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    x = np.array([*ends, 0, 1] if np.dtype(dtype).kind in "bu" else [*ends, -2, -1, 0, 1, 2], dtype)
    judge, _ = CURVES[name]
    found = getattr(fr, name)(x)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, judge(x.astype(np.float64)), rtol=1e-12)


def test_quantiles_within_two_deviations_are_within_the_bound() -> None:
    """NormalDist's are Wichura's (AS241, 1988), to 16 digits."""
    shares = np.linspace(0, 1, 4001)
    distances = distance_of(shares)
    wanted = [NormalDist().inv_cdf(0.5 + distance) for distance in distances]
    found = [quantile_at(d, math.log(1 - 4 * d * d)) for d in distances]
    np.testing.assert_allclose(found, wanted, rtol=4e-14, atol=2e-16)  # near the median the judge is told less
    assert (found[0], found[2000]) == (-2, 0)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_quotients_and_rests_of_integers_are_exact_to_the_ends_of_their_dtype(dtype: str) -> None:
    ends, rng = np.iinfo(dtype), np.random.default_rng(7)
    some = rng.integers(ends.min, ends.max, 400, dtype, endpoint=True)
    near = np.array([ends.min, ends.min + 1, -7, -3, -2, -1, 0, 1, 2, 3, 7, ends.max - 1, ends.max], dtype)
    values = np.concatenate([near, some, rng.integers(-9, 10, 60).astype(dtype)])
    x, y = (each.ravel() for each in np.meshgrid(values, values))
    with np.errstate(all="ignore"):  # 0 where the divisor is; the lowest over -1 wraps around
        np.testing.assert_array_equal(fr.floor_divide(x, y), np.floor_divide(x, y))
        np.testing.assert_array_equal(fr.remainder(x, y), np.remainder(x, y))
