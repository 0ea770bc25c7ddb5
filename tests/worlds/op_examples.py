"""One table drives every check of every op: how to build it, on what, and what naive NumPy makes of the same.

A family is one list. `Example.run` builds the op from tensors or arrays alike; `reference` is the judge. Where an op
runs only in a step (state, queues, transfers), `specs` says what its inference must answer instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from example import Example, bools, integers, normal, positive
from op_examples_arrays import ARRAYS
from op_examples_control import CONTROL
from op_examples_fused import EPILOGUES, FUSED
from op_examples_layers import LAYERS
from op_examples_nn import INDEX, LINALG, LSTM, NN, RANDOM
from op_examples_precision import PRECISION
from op_examples_sorting import SORTING
from op_examples_state import FLOW, STATE

import flowrt.ops as fr
from flowrt.base.spec import Spec
from flowrt.ops import reduce, shape
from flowrt.ops.activation import gelu_slope

NAN, INF = np.float32("nan"), np.float32("inf")
EDGES = np.array([0.0, -0.0, 1.5, -1.5, NAN, INF, -INF, 2.0], np.float32)
MANY_EDGES = np.tile(EDGES, 20)  # enough for the vectorised part of a loop
PAIRS = np.meshgrid(MANY_EDGES, EDGES)
INTS = np.array([0, 1, -1, 7, -7, 2**31 - 1, -(2**31)], np.int32)
INT_PAIRS = np.meshgrid(INTS, INTS)
FAR = np.array([0.0, 1.7e308, -1e200, 3.0, 4e-160, -6e-310, 5e-324])  # whose squares are no numbers of float64


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's warnings about the very edges that the examples visit are no news."""

    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return call


SOURCE = [
    Example("constant", lambda: fr.constant([[1.0, 2.0]]), (), lambda: np.array([[1, 2]], np.float32)),
    Example("constant", lambda: fr.constant([1, 2], "uint8"), (), lambda: np.array([1, 2], np.uint8)),
    Example("constant", lambda: fr.eye(3, 4), (), lambda: np.eye(3, 4, dtype=np.float32)),
    Example("placeholder", lambda: fr.placeholder("float32", (None, 3)), specs=(Spec("float32", (None, 3)),)),
    Example("placeholder", lambda: fr.placeholder("int8"), specs=(Spec("int8", None),)),
    Example("shape_of", fr.shape_of, (normal(3, 4),), lambda x: np.array(x.shape), gradient=False),
    Example("shape_of", fr.shape_of, (bools(),), lambda x: np.zeros(0, np.int64), note="scalar"),
    Example("full", lambda v: fr.full((2, 3), v), (normal(),), lambda v: np.full((2, 3), v)),
    Example("full", lambda x: fr.zeros(fr.shape_of(x)), (bools(3, 2),), lambda x: np.zeros(x.shape, np.float32)),
    Example("full", lambda: fr.ones((), "int16"), (), lambda: np.ones((), np.int16)),
    Example("full", lambda: fr.full(2, 7), (), lambda: np.full(2, 7)),
    Example("full_like", fr.full_like, (bools(2, 3), normal()), lambda x, v: np.full(x.shape, v)),
    Example("full_like", fr.zeros_like, (integers(3),), np.zeros_like, note="zeros"),
    Example("full_like", lambda x: fr.ones_like(x, "float64"), (bools(0, 3),), lambda x: np.ones((0, 3)), note="empty"),
    Example("arange", lambda n: fr.arange(n), (np.int64(5),), lambda n: np.arange(n)),
    Example("arange", lambda a, b: fr.arange(a, b, -2), (np.int64(7), np.int64(-2)), lambda a, b: np.arange(a, b, -2)),
    Example("constant", lambda: fr.arange(0.0, 1.0, 0.25), (), lambda: np.arange(0, 1, 0.25, np.float32)),
]


def _binary(op: str, run: Any, reference: Any, left: Any, right: Any, **more: Any) -> list[Example]:
    """Broadcasting both ways, an empty tensor, and every pair of the edges."""
    a, b = left(3, 1, 4), right(2, 4, seed=1)
    judge = quiet(reference)
    return [
        Example(op, run, (a, b), judge, **more),
        Example(op, run, (left(), right(3, seed=2)), judge, note="scalar", **more),
        Example(op, run, (left(0, 3), right(3)), judge, gradient=False, note="empty", **more),
        Example(op, run, tuple(PAIRS), judge, gradient=False, note="edges", **more),
    ]


def _integral(op: str, run: Any, reference: Any) -> list[Example]:
    judge = quiet(reference)
    small = (integers(4), integers(3, 1, seed=1))
    return [Example(op, run, tuple(INT_PAIRS), judge, note="edges"), Example(op, run, small, judge)]


def _unary(op: str, run: Any, reference: Any, inputs: Any = normal, **more: Any) -> list[Example]:
    judge = quiet(reference)
    return [
        Example(op, run, (inputs(3, 5),), judge, **more),
        Example(op, run, (inputs(),), judge, note="scalar", **more),
        Example(op, run, (MANY_EDGES,), judge, gradient=False, note="edges", **more),
    ]


def _apart(*sizes: int, seed: int = 0) -> np.ndarray:
    """Normal numbers that stay away from 0, where a slope jumps."""
    x = normal(*sizes, seed=seed)
    return x + np.sign(x).astype(np.float32) * np.float32(0.1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(x.dtype)


def _curve(op: str, run: Any, reference: Any, inputs: Any = normal) -> list[Example]:
    return [example for example in _unary(op, run, reference, inputs) if example.note != "scalar"]


def _within_one(*sizes: int, seed: int = 0) -> np.ndarray:
    return np.tanh(normal(*sizes, seed=seed))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) * x.dtype.type(0.5 / np.pi) ** 0.5


def _gelu_by_tanh(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))).astype(x.dtype)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.float32(1.5) * np.expm1(np.minimum(x, 0)))


def _integer_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    powers = [
        int(x) ** int(y) if y >= 0 else (int(x) ** int(-y) if abs(x) == 1 else 0) for x, y in zip(a, b, strict=True)
    ]
    return np.array(powers, np.int64).astype(a.dtype)


ELEMENTWISE = [
    *_binary("add", fr.add, np.add, normal, normal),
    Example("add", fr.add, (bools(4), bools(4, seed=1)), np.add),
    Example("add", fr.add, (integers(4), normal(4)), np.add, gradient=False, note="promoted"),
    *_binary("subtract", fr.subtract, np.subtract, normal, normal),
    *_binary("multiply", fr.multiply, np.multiply, normal, normal),
    Example("multiply", fr.multiply, (integers(5, dtype="uint8"), integers(5, dtype="uint8", seed=1)), np.multiply),
    *_binary("divide", fr.divide, np.divide, normal, positive),
    *_integral("divide", fr.divide, np.divide),
    Example("divide", fr.divide, (bools(3), np.ones(3, bool)), np.divide),
    *_binary("floor_divide", fr.floor_divide, np.floor_divide, normal, _apart),
    Example("floor_divide", fr.floor_divide, (np.float32([1, -1, 6]), np.float32([0.1, 0.1, -3])), np.floor_divide),
    *_integral("floor_divide", fr.floor_divide, np.floor_divide),
    Example("floor_divide", fr.floor_divide, (np.uint8([7, 255, 3]), np.uint8([2, 255, 0])), quiet(np.floor_divide)),
    *_binary("remainder", fr.remainder, np.remainder, normal, _apart),
    *_integral("remainder", fr.remainder, np.remainder),
    *_binary("pow", fr.pow, np.power, positive, normal, margin=1e-5),
    Example("pow", lambda x: fr.pow(x, 3), (normal(4),), lambda x: x**3, margin=1e-5),
    Example("pow", fr.pow, (np.int64([2, -3, 1, -1, 5, 0]), np.int64([10, 3, -4, -3, -1, 0])), _integer_power),
    *_binary("maximum", fr.maximum, np.maximum, normal, normal),
    Example("maximum", fr.maximum, (integers(4), integers(4, seed=1)), np.maximum),
    *_binary("minimum", fr.minimum, np.minimum, normal, normal),
    Example("minimum", fr.minimum, (bools(4), bools(4, seed=1)), np.minimum),
    Example(
        "add_n", lambda *v: fr.add_n(v), (normal(3, 2), normal(3, 2, seed=1), normal(3, 2, seed=2)), lambda *v: sum(v)
    ),
    Example("add_n", lambda v: fr.add_n([v]), (normal(3),), lambda v: v),
    Example("add_n", lambda *v: fr.add_n(v), (integers(3), integers(3, seed=1)), lambda a, b: a + b),
    *_unary("negative", fr.negative, np.negative),
    Example("negative", fr.negative, (np.uint8([0, 1, 255]),), np.negative),
    *_unary("abs", fr.abs, np.abs, _apart),
    Example("abs", fr.abs, (INTS,), quiet(np.abs)),
    Example("abs", fr.abs, (bools(3),), np.abs),
    *_unary("sign", fr.sign, np.sign),
    Example("sign", fr.sign, (INTS,), np.sign),
    *_unary("exp", fr.exp, np.exp),
    Example("exp", fr.exp, (integers(4),), lambda x: np.exp(x.astype(np.float64))),
    *_unary("log", fr.log, np.log, positive),
    *_unary("sqrt", fr.sqrt, np.sqrt, positive),
    *_unary("rsqrt", fr.rsqrt, lambda x: 1 / np.sqrt(x), positive),
    *_unary("square", fr.square, np.square),
    Example("square", fr.square, (integers(4, dtype="int8"),), np.square),
    *_unary("reciprocal", fr.reciprocal, lambda x: 1 / x, positive),
    *_unary("tanh", fr.tanh, np.tanh),
    *_unary("sigmoid", fr.sigmoid, _sigmoid),
    Example("sigmoid", fr.sigmoid, (np.float32([-200, -90, -20, 20, 90, 200]),), quiet(_sigmoid), note="far"),
    *_unary("relu", fr.relu, lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)), _apart),
    *_unary("floor", fr.floor, np.floor),
    Example("floor", fr.floor, (INTS,), np.floor),
    *_curve("expm1", fr.expm1, np.expm1),
    *_curve("log1p", fr.log1p, np.log1p, positive),
    *_curve("sin", fr.sin, np.sin),
    *_curve("cos", fr.cos, np.cos),
    *_curve("tan", fr.tan, np.tan),
    *_curve("asin", fr.asin, np.arcsin, _within_one),
    *_curve("acos", fr.acos, np.arccos, _within_one),
    *_curve("atan", fr.atan, np.arctan),
    *_binary("atan2", fr.atan2, np.arctan2, _apart, _apart),
    Example("atan2", fr.atan2, (integers(4), integers(4, seed=1)), np.arctan2),
    *_binary("hypot", fr.hypot, np.hypot, _apart, _apart),
    Example("hypot", fr.hypot, (integers(4), integers(4, seed=1)), np.hypot),
    Example("hypot", fr.hypot, tuple(np.meshgrid(FAR, FAR)), quiet(np.hypot), gradient=False, note="far"),
    *_curve("sinh", fr.sinh, np.sinh),
    *_curve("cosh", fr.cosh, np.cosh),
    *_curve("erf", fr.erf, _erf),
    *_curve("ceil", fr.ceil, np.ceil),
    Example("ceil", fr.ceil, (INTS,), np.ceil),
    *_curve("round", fr.round, np.round),
    Example("round", fr.round, (np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.4999, 1e9]),), np.round, note="halves"),
    *_curve("softplus", fr.softplus, lambda x: np.logaddexp(x, np.float32(0))),
    Example("softplus", fr.softplus, (np.float32([0, -90, 90, 20, -20]),), lambda x: np.logaddexp(x, np.float32(0))),
    Example("multiply", fr.silu, (normal(6),), lambda x: x * _sigmoid(x), note="silu"),
    Example("gelu", fr.gelu, (normal(6),), lambda x: x / 2 * (1 + _erf(x / np.sqrt(np.float32(2))))),
    Example("gelu_slope", gelu_slope, (normal(6),), lambda x: (1 + _erf(x / 2**0.5)) / 2 + x * _density(x)),
    Example("sigmoid", lambda x: fr.gelu(x, True), (normal(6),), _gelu_by_tanh, note="gelu"),
    Example("where", fr.leaky_relu, (_apart(6),), lambda x: np.where(x > 0, x, np.float32(0.2) * x), note="leaky_relu"),
    Example("expm1", lambda x: fr.elu(x, 1.5), (_apart(6),), _elu, note="elu"),
    Example("maximum", lambda x: fr.clip(x, -0.5, 0.4), (normal(9),), lambda x: x.clip(-0.5, 0.4), note="clip"),
    Example("minimum", lambda x: fr.clip(x, max=2), (integers(9),), lambda x: x.clip(None, 2), note="clip"),
    Example("where", fr.where, (bools(3, 1), normal(4), normal(2, 3, 1, seed=1)), np.where),
    Example("where", lambda x: fr.where(x > 0, x, 0), (_apart(5),), lambda x: np.where(x > 0, x, np.float32(0))),
    Example("where", fr.where, (integers(6), integers(6, seed=1), bools(6)), lambda c, a, b: np.where(c != 0, a, b)),
    *_binary("equal", fr.equal, np.equal, normal, normal),
    *_binary("not_equal", fr.not_equal, np.not_equal, normal, normal),
    *_binary("less", fr.less, np.less, normal, normal),
    *_binary("less_equal", fr.less_equal, np.less_equal, normal, normal),
    *_binary("greater", fr.greater, np.greater, normal, normal),
    *_binary("greater_equal", fr.greater_equal, np.greater_equal, normal, normal),
    Example("less", fr.less, (np.uint64([0, 2**63]), np.uint64([1, 1])), np.less),
    *[
        Example(name, getattr(fr, name), (a, b), getattr(np, name))
        for name in ("logical_and", "logical_or", "logical_xor")
        for a, b in [(bools(8), bools(8, seed=1)), tuple(PAIRS)]
    ],
    Example("logical_not", fr.logical_not, (bools(4),), np.logical_not),
    Example("logical_not", fr.logical_not, (EDGES,), np.logical_not),
    Example("isnan", fr.isnan, (EDGES,), np.isnan),
    Example("isnan", fr.isnan, (INTS,), np.isnan),
    Example("isfinite", fr.isfinite, (EDGES,), np.isfinite),
    Example("isfinite", fr.isfinite, (bools(3),), np.isfinite),
    Example("astype", lambda x: fr.astype(x, "float64"), (normal(3),), lambda x: x.astype(np.float64)),
    Example("astype", lambda x: fr.astype(x, "int32"), (normal(9) * 5,), lambda x: x.astype(np.int32), gradient=False),
    Example("astype", lambda x: fr.astype(x, bool), (EDGES,), lambda x: x.astype(bool), gradient=False),
    Example("astype", lambda x: fr.astype(x, "float32"), (bools(3),), lambda x: x.astype(np.float32)),
    Example("astype", lambda x: fr.astype(x, "uint8"), (integers(9),), lambda x: x.astype(np.uint8)),
]

CUBE = normal(3, 4, 5)
WITH_NAN = np.where(np.arange(60).reshape(3, 4, 5) == 17, NAN, CUBE)


def _reducing(op: str, run: Any, reference: Any, x: np.ndarray = CUBE, **more: Any) -> list[Example]:
    """Every kind of axis: all, first, middle, last, neighbours, two apart; kept or not."""
    axes = [None, 0, 1, -1, (0, 1), (0, 2)]
    return [
        Example(
            op,
            lambda v, a=axis, k=keep: run(v, axis=a, keepdims=k),
            (x,),
            lambda v, a=axis, k=keep: reference(v, axis=a, keepdims=k),
            note=f"{axis}{'k' if keep else ''}",
            **more,
        )
        for axis, keep in zip(axes, (False, True, False, True, False, True), strict=True)
    ]


def _wide_sum(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64).sum().astype(x.dtype)


def _logsumexp(x: np.ndarray, axis: Any = None, keepdims: bool = False) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.log(np.exp(x.astype(np.float64)).sum(axis, keepdims=keepdims)).astype(x.dtype)


def _running(x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    return np.flip(np.flip(x, axis).cumsum(axis), axis) if reverse else x.cumsum(axis)


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    pad = x.ndim - len(shape)
    axes = (*range(pad), *(i + pad for i, n in enumerate(shape) if n == 1))
    return x.sum(axes, keepdims=True).reshape(shape)


REDUCE = [
    *_reducing("sum", fr.sum, np.sum),
    Example("sum", fr.sum, (normal(),), np.sum, note="scalar"),
    Example("sum", lambda x: fr.sum(x, 0), (normal(0, 3),), lambda x: x.sum(0), gradient=False, note="empty"),
    Example("sum", fr.sum, (np.full(100_003, 0.1, np.float32),), _wide_sum, gradient=False, note="long"),
    Example("sum", lambda x: fr.sum(x, 1), (normal(2, 50),), lambda x: x.sum(1), note="rows"),
    Example("sum", lambda x: fr.sum(x, (1, 3)), (normal(2, 3, 4, 2, 3),), lambda x: x.sum((1, 3)), note="apart"),
    Example("sum", lambda x: fr.sum(x, ()), (normal(2, 3),), lambda x: x, note="no-axis"),
    Example("sum", fr.sum, (integers(9, dtype="int8", low=-128, high=127),), np.sum),
    Example("sum", fr.sum, (integers(9, dtype="uint8", low=0, high=255),), np.sum),
    Example("sum", lambda x: fr.sum(x, 0), (bools(4, 3),), lambda x: x.sum(0)),
    *_reducing("mean", fr.mean, np.mean),
    Example("mean", lambda x: fr.mean(x, 0), (integers(4, 3),), lambda x: x.mean(0)),
    Example("mean", fr.mean, (normal(0),), quiet(lambda x: np.full((), NAN)), gradient=False, note="empty"),
    *_reducing("max", fr.max, np.max),
    Example("max", lambda x: fr.max(x, 1), (WITH_NAN,), lambda x: x.max(1), gradient=False, note="nan"),
    Example(
        "max", lambda x: fr.max(x, 1), (np.tile(WITH_NAN[0], 8),), lambda x: x.max(1), gradient=False, note="nan-rows"
    ),
    Example("max", fr.max, (-positive(50),), np.max, note="negative"),
    Example("max", fr.max, (np.uint64([3, 2**64 - 1, 5]),), np.max),
    *_reducing("min", fr.min, np.min),
    Example("min", lambda x: fr.min(x, 2), (WITH_NAN,), lambda x: x.min(2), gradient=False, note="nan"),
    Example("min", lambda x: fr.min(x, 0), (integers(4, 3),), lambda x: x.min(0)),
    *_reducing("prod", fr.prod, np.prod, margin=1e-5),
    Example(
        "prod", lambda x: fr.prod(x, 1), (np.float32([[0, 2, 3], [0, 0, 4], [1, 2, 3]]),), lambda x: x.prod(1), note="0"
    ),
    Example("prod", fr.prod, (integers(5, dtype="int8", low=1),), np.prod),
    Example("prod", fr.prod, (normal(0),), np.prod, gradient=False, note="empty"),
    *_reducing("any", fr.any, np.any, bools(3, 4, 5)),
    Example("any", fr.any, (np.float32([0, NAN]),), lambda x: np.array(True)),
    Example("any", fr.any, (bools(0),), np.any),
    *_reducing("all", fr.all, np.all, bools(3, 4, 5)),
    Example("all", lambda x: fr.all(x, 0), (integers(0, 2),), lambda x: x.all(0)),
    *[
        Example(
            name, lambda x, n=name, a=axis: getattr(fr, n)(x, a), (x,), lambda v, n=name, a=axis: getattr(np, n)(v, a)
        )
        for name in ("argmax", "argmin")
        for x, axis in [(CUBE, None), (CUBE, 0), (CUBE, -1), (WITH_NAN, 1), (integers(3, 40), 1), (integers(300, 9), 1)]
    ],
    Example("argmax", lambda x: fr.argmax(x, 1, True), (CUBE,), lambda x: x.argmax(1, keepdims=True)),
    Example(
        "spread",
        lambda y: reduce.spread(y, (3, 4, 5), axis=(0, 2)),
        (normal(4),),
        lambda y: np.broadcast_to(y[:, None], (3, 4, 5)),
    ),
    Example(
        "spread",
        lambda y, x: reduce.spread(y, fr.shape_of(x), axis=1, keepdims=True),
        (normal(3, 1, 5), CUBE),
        lambda y, x: np.broadcast_to(y, x.shape),
    ),
    Example(
        "broadcast_to",
        lambda x: fr.broadcast_to(x, (2, 3, 4)),
        (normal(3, 1),),
        lambda x: np.broadcast_to(x, (2, 3, 4)),
    ),
    Example("broadcast_to", lambda x: fr.broadcast_to(x, ()), (normal(),), lambda x: x, note="scalar"),
    Example("broadcast_to", lambda x: fr.broadcast_to(x, (0, 3)), (integers(3),), lambda x: np.broadcast_to(x, (0, 3))),
    *[
        Example("sum_to", lambda x, s=s: fr.sum_to(x, s), (CUBE,), lambda x, s=s: _summed_to(x, s), note=str(s))
        for s in [(), (5,), (4, 1), (3, 1, 5), (1, 4, 1), (3, 4, 5)]
    ],
    Example(
        "sum_to", lambda x, y: fr.sum_to(x, fr.shape_of(y)), (CUBE, normal(1, 5)), lambda x, y: _summed_to(x, y.shape)
    ),
    *[
        Example(
            "max",
            lambda x, a=a, k=k: fr.logsumexp(x, a, k),
            (CUBE,),
            lambda x, a=a, k=k: _logsumexp(x, a, k),
            note=f"logsumexp{a}",
        )
        for a, k in [(None, False), (1, True), ((0, 2), False)]
    ],
    Example(
        "max",
        lambda x: fr.logsumexp(x, 1),
        (np.float32([[-INF, -INF], [INF, 1], [NAN, 1], [2000, 2000]]),),
        lambda x: np.float32([-INF, INF, NAN, 2000 + np.log(2)]),
        gradient=False,
        note="logsumexp-far",
    ),
    Example(
        "mean",
        lambda x: fr.var(x, 0),
        (CUBE + 1000,),
        lambda x: x.astype(np.float64).var(0).astype(x.dtype),
        note="var",
        margin=1e-5,
    ),
    Example(
        "mean", lambda x: fr.var(x, (0, 2), True), (CUBE,), lambda x: x.var((0, 2), keepdims=True), note="var-kept"
    ),
    Example("sqrt", fr.std, (CUBE,), np.std, note="std"),
    *[
        Example(
            "cumsum",
            lambda x, a=a, r=r: fr.cumsum(x, a, r),
            (CUBE,),
            lambda x, a=a, r=r: _running(x, a, r),
            note=f"{a}{r}",
        )
        for a, r in [(0, False), (1, True), (-1, False)]
    ],
    Example("cumsum", fr.cumsum, (normal(0),), np.cumsum, gradient=False, note="empty"),
    Example("cumsum", fr.cumsum, (integers(4, dtype="int8", low=100, high=127),), np.cumsum),
    Example("prod", fr.size, (normal(3, 4),), lambda x: np.array(12), gradient=False, note="size"),
]


def _getting(key: Any, x: np.ndarray = CUBE) -> Example:
    plain = tuple((k.start, k.stop, k.step) if isinstance(k, slice) else "..." if k is ... else k for k in key)
    return Example("getitem", lambda v: fr.getitem(v, plain), (x,), lambda v: v[key], note=str(plain))


def _placed(x: np.ndarray, sizes: tuple[int, ...], key: Any) -> np.ndarray:
    out = np.zeros(sizes, x.dtype)
    out[key] = x
    return out


SHAPE = [
    Example("reshape", lambda x: fr.reshape(x, (5, -1)), (CUBE,), lambda x: x.reshape(5, -1)),
    Example("reshape", lambda x: fr.reshape(x, ()), (normal(1, 1),), lambda x: x.reshape(()), note="scalar"),
    Example(
        "reshape", lambda x: fr.reshape(x, (fr.shape_of(x)[0], -1)), (CUBE,), lambda x: x.reshape(3, -1), note="mixed"
    ),
    Example("reshape", lambda x: fr.reshape(x, (2, 0)), (bools(0),), lambda x: x.reshape(2, 0), note="empty"),
    Example("transpose", fr.transpose, (CUBE,), np.transpose),
    Example("transpose", lambda x: fr.transpose(x, (0, -1, 1)), (CUBE,), lambda x: x.transpose(0, 2, 1)),
    Example("transpose", fr.transpose, (normal(70, 2, 19),), np.transpose, gradient=False, note="squares"),
    Example("transpose", fr.transpose, (integers(4, 0),), np.transpose, note="empty"),
    Example("expand_dims", lambda x: fr.expand_dims(x, (0, -1)), (normal(3),), lambda x: x[None, :, None]),
    Example("squeeze", fr.squeeze, (normal(1, 3, 1),), np.squeeze),
    Example("squeeze", lambda x: fr.squeeze(x, -1), (normal(1, 3, 1),), lambda x: x[..., 0]),
    Example(
        "concat", lambda *v: fr.concat(v), (normal(2, 3), normal(0, 3), normal(1, 3)), lambda *v: np.concatenate(v)
    ),
    Example("concat", lambda *v: fr.concat(v, -1), (normal(2, 3), normal(2, 1)), lambda *v: np.concatenate(v, -1)),
    Example("concat", lambda *v: fr.concat(v), (integers(2), bools(2)), lambda *v: np.concatenate(v), note="promoted"),
    Example("slice_along", lambda x: shape.slice_along(x, 1, 2, -2), (CUBE,), lambda x: x[:, 1:3]),
    Example(
        "slice_along",
        lambda x, i, n: shape.slice_along(x, i, n),
        (integers(5), np.int64(2), np.int64(3)),
        lambda x, i, n: x[i : i + n],
        note="computed",
    ),
    Example(
        "place_along",
        lambda x: shape.place_along(x, 1, (3, 6), 1),
        (normal(3, 2),),
        lambda x: _placed(x, (3, 6), (slice(None), slice(1, 3))),
    ),
    Example("stack", lambda *v: fr.stack(v), (normal(3), normal(3, seed=1)), lambda *v: np.stack(v)),
    Example("stack", lambda *v: fr.stack(v, -1), (normal(2, 3), normal(2, 3, seed=1)), lambda *v: np.stack(v, -1)),
    Example("stack", lambda *v: fr.stack(v), (np.int64(3), np.int64(4)), lambda *v: np.stack(v), note="scalars"),
    Example("getitem", lambda x: fr.unstack(x, 1)[2], (CUBE,), lambda x: x[:, 2], open_sizes=False, note="unstack"),
    _getting((1,)),
    _getting((-1, slice(None), slice(1, -1))),
    _getting((..., 2)),
    _getting((slice(None, None, -1), None, slice(3, 0, -2))),
    _getting((slice(5, 2), ...)),
    _getting((2, 3, 4)),
    _getting((slice(1, 9, 2),), integers(7)),
    Example(
        "place",
        lambda x: fr.place(x, (4, 5), (1, (None, None, -2))),
        (normal(3),),
        lambda x: _placed(x, (4, 5), (1, slice(None, None, -2))),
    ),
    Example("pad", lambda x: fr.pad(x, ((1, 0), (0, 2))), (normal(2, 3),), lambda x: np.pad(x, ((1, 0), (0, 2)))),
    Example("pad", lambda x: fr.pad(x, 1, -1), (integers(2, 2),), lambda x: np.pad(x, 1, constant_values=-1)),
    Example(
        "pad", lambda x: fr.pad(x, (1, 2), -INF), (normal(0),), lambda x: np.full(3, -INF), gradient=False, note="empty"
    ),
    Example(
        "broadcast_to", lambda x: fr.tile(x, (2, 1, 3)), (normal(2, 3),), lambda x: np.tile(x, (2, 1, 3)), note="tile"
    ),
    *(
        Example(
            "broadcast_to",
            lambda x, times=times: fr.tile(x, times),
            (normal(*sizes),),
            lambda x, times=times: np.tile(x, times),
            note=f"tile-of-rank-{len(sizes)}",
        )
        for sizes, times in (((2, 1, 2, 1, 3), (1, 2, 1, 1, 2)), ((1, 2, 1, 1, 2, 1, 1, 2), (2, 1, 2, 3, 1, 2, 2, 2)))
    ),
]

EXAMPLES: Sequence[Example] = [
    *SOURCE,
    *ELEMENTWISE,
    *PRECISION,
    *REDUCE,
    *SHAPE,
    *INDEX,
    *LSTM,
    *LINALG,
    *ARRAYS,
    *SORTING,
    *FUSED,
    *EPILOGUES,
    *NN,
    *LAYERS,
    *RANDOM,
    *STATE,
    *FLOW,
    *CONTROL,
]
