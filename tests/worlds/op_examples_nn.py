"""The examples of the families index, linalg, nn and random; see `op_examples`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from example import Example, bools, integers, normal
from op_examples_windows import WINDOWS

import flowrt.ops as fr
from flowrt.base.spec import Spec
from flowrt.ops import conv, entropy, index, linalg, nn, recurrent, routing, slices
from flowrt.ops import parts as parted
from flowrt.ops.moments import standardize, sums_about

NAN, INF = np.float32("nan"), np.float32("inf")
CUBE = normal(3, 4, 5)
COLUMNS = normal(4, 1, seed=1), normal(4, 1, seed=2), normal(4, 1, seed=3)


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    kept = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(tuple(i for i, n in enumerate(kept) if n == 1), keepdims=True).reshape(shape)


def _scattered(updates: np.ndarray, indices: np.ndarray, size: tuple[int, ...], axis: int) -> np.ndarray:
    out = np.zeros(size, updates.dtype)
    np.add.at(out, (slice(None),) * axis + (indices,), updates)
    return out


def _hot(indices: np.ndarray, depth: int, dtype: str = "float32") -> np.ndarray:
    return (indices[..., None] == np.arange(depth)).astype(dtype)


def _padded(found: Any, order: Any, back: Any) -> tuple[np.ndarray, ...]:
    """What `route_rows` answers for 6 indices into three parts of no more than 4 of them: each has room for 4."""
    full = [np.full(31, slices.ABSENT) for _ in range(2)]
    for sorted_too, parts in zip(full, (found, order), strict=True):
        for part, given in enumerate(parts):
            sorted_too[4 * part : 4 * part + len(given)] = given
    return np.int64([0, 4, 8, 12]), *full, np.int64(back)


def _grouped(starts: Any, found: Any, order: Any, back: Any) -> Any:
    """The groups of the middle one of three parts, by the places of indices."""
    return parted.group_part(starts, found, order, back, 1, 3)


def _put(x: Any, y: Any, *routed: Any) -> Any:
    """Rows of three parts in their places: the middle one's of the table ``x``, the others' packed in ``y``."""
    numbers, _ = parted.pack_parts(*routed[:2], (0, 1, 0))
    return parted.move_parts([y, x, y], *routed, numbers, (0, 1, 2), ("numbers", "found", "numbers"), "order")


def _packed_up(x: Any, *routed: Any) -> Any:
    """The rows of ``x`` that the first and the last of three parts are sent."""
    numbers, ends = parted.pack_parts(*routed[:2], (0, 1, 0))
    return routing.part_of(parted.move_parts([x, x], *routed, numbers, (0, 2), ("order",) * 2, "numbers"), ends, 0)


ROWS = np.int64([3, -1, 3, 0, 9, 3])


def _lstm(x: np.ndarray, h: np.ndarray, c: np.ndarray, w_x: np.ndarray, w_h: np.ndarray, b: np.ndarray) -> Any:
    outputs = np.zeros((len(x), *h.shape), x.dtype)
    for t, now in enumerate(x):
        i, f, g, o = np.split(now @ w_x + h @ w_h + b, 4, axis=1)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = outputs[t] = np.tanh(c) / (1 + np.exp(-o))
    return outputs, h, c


def _layer(steps: int, batch: int, width: int, units: int) -> Example:
    shapes = [
        (steps, batch, width),
        (batch, units),
        (batch, units),
        (width, 4 * units),
        (units, 4 * units),
        (4 * units,),
    ]
    inputs = tuple(normal(*shape, seed=seed) * np.float32(0.5) for seed, shape in enumerate(shapes))
    return Example("lstm_steps", nn.lstm, inputs, _lstm, gradient=batch * steps < 20, note=f"{steps}x{batch}")


def _lstm_back(
    dy: np.ndarray, dh: np.ndarray, dc: np.ndarray, w_h: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, ...]:
    sums = np.zeros((*kept.shape[:2], w_h.shape[1]), kept.dtype)
    for t in reversed(range(len(kept))):
        i, f, g, o, before, bent = kept[t].reshape(6, *dh.shape)  # so few rows and units are one block
        dh = dh + dy[t]
        dc = dc + dh * o * (1 - bent**2)
        parts = (dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g**2), dh * bent * o * (1 - o))
        sums[t] = np.concatenate(parts, 1)
        dh, dc = sums[t] @ w_h.T, dc * f
    return sums, dh, dc


BACK = tuple(normal(*s, seed=i) for i, s in enumerate([(3, 2, 5), (2, 5), (2, 5), (5, 20), (3, 2, 30)]))
LSTM = [
    *[_layer(3, 2, 3, 2), _layer(1, 1, 1, 5), _layer(0, 2, 3, 2), _layer(2, 0, 3, 2), _layer(3, 35, 4, 17)],
    Example("lstm_steps_grad", recurrent.lstm_steps_grad, BACK, _lstm_back, gradient=False, margin=1e-5),
]

BAGS = np.random.default_rng(3).integers(-9, 9, (4, 70)).astype(np.int64)  # more than are asked for at a time
INDEX = [
    Example(
        "bag", lambda t, i: index.bag(t, i, 1, True), (normal(9, 19), BAGS), lambda t, i: t[i].mean(1), note="mean"
    ),
    Example(
        "bag",
        lambda t, i: index.bag(t, i, 2, False),
        (normal(9, 2, 35).astype(np.float64), BAGS.reshape(2, 2, 2, 35).astype(np.uint8) % 9),
        lambda t, i: t[i].sum((2, 3)),
        note="sum",
    ),
    Example(
        "bag",
        lambda t, i: index.bag(t, i, 1, False),
        (normal(9, 19), BAGS[:, :0]),
        lambda t, i: np.zeros((4, 19), np.float32),
        note="empty",
    ),
    Example("group_rows", lambda i: slices.group_rows(i, 6, 10)[:1], (ROWS,), lambda i: np.int32([3])),
    Example(
        "sum_rows",
        lambda v, i: slices.sum_rows(v, slices.group_rows(i, 6, 10)),
        (normal(6, 3), ROWS),
        lambda v, i: np.stack([v[0] + v[2] + v[5], v[1] + v[4], v[3], *[0 * v[0]] * 3]),
    ),
    Example(
        "route_rows",
        lambda i: routing.route_rows(i, np.int64([0, 1, 4, 6])),
        (np.int32([5, 0, -6, 3, 2, -1]),),
        lambda i: tuple(
            np.int64(v) for v in ([0, 2, 4, 6], [0, 0, 2, 1, 1, 1], [1, 2, 3, 4, 0, 5], [4, 0, 1, 2, 3, 5])
        ),
    ),
    Example(
        "route_rows",
        lambda i: routing.route_rows(i, np.int64([0, 1, 4]))[0],
        (integers(0),),
        lambda i: np.int64([0, 0, 0]),
        note="none",
    ),
    Example(
        "route_rows",
        lambda i: routing.route_rows(i, np.int64([0, 1, 4, 6]), absent=True, padded=True),
        (np.int64([5, 0, -6, 3, 2, slices.ABSENT]),),
        lambda i: _padded(([0, 0, slices.ABSENT], [2, 1], [1]), ([1, 2, 5], [3, 4], [0]), [8, 0, 1, 4, 5, 2]),
        note="padded",
    ),
    Example(
        "part_of",
        lambda x, s: routing.part_of(x, s, 1),
        (normal(5, 2, 1), np.int64([0, 1, 4])),
        lambda x, s: x[1:4],
        note="computed",
    ),
    Example(
        "join_parts",
        lambda x, y, s, o: routing.join_parts([x, y], s, o),
        (normal(2, 3), normal(1, 3, seed=1), np.int64([0, 2, 3]), np.int64([1, 0, 2, 0, 0])),
        lambda x, y, s, o: np.concatenate([x, y, 0 * x]),
    ),
    Example(
        "take_parts",
        lambda x, y, i: parted.take_parts([x, y], i, (0, 4, 5), absent=True),
        (normal(4, 2, 3), normal(1, 2, 3, seed=1), np.int64([4, 0, -1, 3, slices.ABSENT, -5])),
        lambda x, y, i: np.concatenate([x, y, 0 * y])[[4, 0, 4, 3, 5, 0]],
        gradient=False,
        open_sizes=False,  # parts are of a variable, whose sizes are known
    ),
    Example(
        "group_part",
        lambda i: _grouped(*routing.route_rows(i, np.int64([0, 1, 4, 6]), padded=True))[:4],
        (np.int32([5, 3, 0, 2, 3, -3]),),
        lambda i: np.int32([2, 0, 3, 4]),
    ),
    Example(
        "pack_parts",
        lambda s, f: parted.pack_parts(s, f, (1, 0, 1)),
        (np.int64([0, 2, 3, 5]), np.zeros(5, "int64")),
        lambda s, f: (np.int64([0, 1, 0, 2, 3]), np.int64([0, 1, 0, 4])),
    ),
    Example(
        "move_parts",
        lambda x, y, i: _put(x, y, *routing.route_rows(i, np.int64([0, 1, 4, 6]), absent=True, padded=True)),
        (normal(3, 2), normal(9, 2, seed=1), np.int64([5, 3, slices.ABSENT, 2, 3, -3])),
        lambda x, y, i: np.stack([y[4], x[2], y[0], x[1], x[2], x[2]]),
        gradient=False,
        open_sizes=False,
    ),
    Example(
        "move_parts",
        lambda x, i: _packed_up(x, *routing.route_rows(i, np.int64([0, 1, 4, 6]), padded=True)),
        (normal(6, 2), np.int64([5, 3, 0, 2, 3, -3])),
        lambda x, i: np.stack([x[2], *[0 * x[0]] * 3, x[0], *[0 * x[0]] * 3]),
        gradient=False,
        note="computed",
    ),
    Example(
        "take",
        lambda x, i: tuple(fr.dynamic_partition(x, i, 4)),
        (normal(5, 2), np.uint8([3, 0, 3, 1, 0])),
        lambda x, i: tuple(x[i == part] for part in range(4)),
        note="computed",
    ),
    Example(
        "take",
        lambda x, i: tuple(fr.dynamic_partition(x, i, 2)),
        (normal(2, 3, 2), np.int64([[1, 0, 1], [1, 1, 0]])),
        lambda x, i: tuple(x[i == part] for part in range(2)),
        note="computed",
    ),
    Example(
        "last_places",
        lambda i: routing.last_places(i, 3),
        (np.int32([2, 0, 2]),),
        lambda i: np.int64([1, slices.ABSENT, 2]),
    ),
    Example(
        "take",
        lambda x, y, i, j: fr.dynamic_stitch([i, j], [x, y]),
        (normal(2, 3), normal(2, 1, 3, seed=1), np.int32([4, 0]), np.int64([[1], [4]])),
        lambda x, y, i, j: np.stack([x[1], y[0, 0], 0 * x[0], 0 * x[0], y[1, 0]]),
        note="computed",
    ),
    Example(
        "take",
        lambda x, i: routing.looked_up([x[:1], x[1:4], x[4:]], (0, 1, 4, 6), i, lambda _: nullcontext()),
        (normal(6, 2), np.int32([[5, 0], [-2, 0], [3, 5]])),
        lambda x, i: x[i],
        open_sizes=False,
        note="routed",
    ),
    Example(
        "scatter_add",
        lambda x, i: fr.segment_sum(x, i, 4),
        (normal(5, 2), np.int32([3, 0, 3, 1, 0])),
        lambda x, i: _scattered(x, i, (4, 2), 0),
        note="segments",
    ),
    Example(
        "scatter_add",
        lambda x, i: fr.segment_sum(x, i),
        (normal(2, 2, 3), np.int32([[1, 0], [1, 2]])),
        lambda x, i: _scattered(x.reshape(4, 3), i.ravel(), (3, 3), 0),
        note="computed",
    ),
    *[
        Example("take", lambda x, i, a=a: fr.take(x, i, axis=a), (CUBE, i), lambda x, i, a=a: x.take(i, a), note=str(a))
        for a, i in [
            (0, np.int32([2, 0, 2])),
            (1, np.int64([[-1, -4], [3, 0]])),
            (-1, np.uint8([[4]])),
            (1, np.int8(3)),
        ]
    ],
    Example("take", fr.take, (bools(4, 2), integers(0)), lambda x, i: x.take(i, 0), note="none"),
    Example("take", fr.take, (np.zeros((0, 2), np.float32), integers(0)), lambda x, i: x.take(i, 0), note="of-none"),
    Example("take", lambda x: fr.take(x, [1, 1]), (normal(3),), lambda x: x[[1, 1]], note="constant"),
    Example(
        "scatter_add",
        lambda u, i: index.scatter_add(u, i, (5, 2)),
        (normal(4, 2), np.int32([1, 4, 1, -5])),
        lambda u, i: _scattered(u, i, (5, 2), 0),
    ),
    Example(
        "scatter_add",
        lambda u, i, x: index.scatter_add(u, i, fr.shape_of(x), axis=-2),
        (normal(3, 2, 2, 5), np.int64([[0, 1], [1, 1]]), CUBE),
        lambda u, i, x: _scattered(u, i, x.shape, 1),
        note="inner",
    ),
    Example(
        "scatter_add",
        lambda u, i: index.scatter_add(u, i, (3,)),
        (integers(0), integers(0)),
        lambda u, i: np.zeros(3, np.int32),
        note="none",
    ),
    Example("one_hot", lambda i: fr.one_hot(i, 3), (np.int32([0, 2, 3, -1]),), lambda i: _hot(i, 3)),
    Example("one_hot", lambda i: fr.one_hot(i, 4, bool), (np.uint8([[1], [3]]),), lambda i: _hot(i, 4, "bool")),
    Example("one_hot", lambda i: fr.one_hot(i, 2, "int64"), (np.int64(1),), lambda i: _hot(i, 2, "int64"), note="one"),
    Example("one_hot", lambda i: fr.one_hot(i, 0), (integers(3),), lambda i: _hot(i, 0), note="depth-0"),
]


def _product(
    left: tuple[int, ...], right: tuple[int, ...], make: Callable[..., np.ndarray] = normal, **flags: bool
) -> Example:
    """Operands that fit once they are transposed as the flags say."""

    def judge(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a = a.swapaxes(-1, -2) if flags.get("transpose_a") else a
        b = b.swapaxes(-1, -2) if flags.get("transpose_b") else b
        with np.errstate(all="ignore"):
            return np.matmul(a, b)

    note = "".join("t" if flags.get(name) else "n" for name in ("transpose_a", "transpose_b"))
    run = lambda a, b: fr.matmul(a, b, **flags)  # noqa: E731
    return Example("matmul", run, (make(*left), make(*right, seed=1)), judge, margin=5e-6, note=note)


def _doubles(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed).astype(np.float64)


LINALG = [
    _product((2, 3), (3, 4)),
    _product((3, 2), (3, 4), transpose_a=True),
    _product((2, 3), (4, 3), transpose_b=True),
    _product((3, 2), (4, 3), transpose_a=True, transpose_b=True),
    _product((40, 33), (33, 50), _doubles),
    _product((2, 3), (3, 2), integers),
    _product((2, 3, 2), (2, 3), integers, transpose_a=True, transpose_b=True),
    _product((2, 1, 3, 4), (5, 2, 4), integers, transpose_b=True),
    _product((2, 4, 3), (4, 5), integers, transpose_a=True),
    _product((2, 3, 4), (4, 2)),
    _product((2, 3, 4), (2, 5, 4), transpose_b=True),
    _product((3, 4), (2, 4, 2)),
    _product((2, 1, 3, 4), (5, 4, 2)),
    _product((2, 1, 4, 3), (1, 3, 4, 2), transpose_a=True),
    _product((0, 3), (3, 2)),
    _product((2, 0), (0, 3)),
    _product((0, 2, 3), (3, 2)),
    _product((4,), (4,)),
    _product((4,), (4, 3)),
    _product((2, 3, 4), (4,)),
    _product((4,), (2, 3, 4), transpose_b=True),
    Example(
        "matmul",
        fr.matmul,
        (np.float32([[1, NAN], [0, 1], [0, INF]]), np.float32([[1], [2]])),
        lambda a, b: np.float32([[NAN], [2], [INF]]),
        gradient=False,
        note="nan",
    ),
    Example("matmul", fr.matmul, (integers(2, 2), normal(2, 2)), np.matmul, gradient=False, note="promoted"),
]


def with_bias(result: np.ndarray, bias: np.ndarray, activation: str) -> np.ndarray:
    return np.maximum(result + bias, 0) if activation else result + bias


WITH_BIAS = [
    Example(
        "matmul_bias",
        lambda a, b, bias, how=how: linalg.matmul_bias(a, b, bias, False, True, how),
        (normal(2, 5, 3), normal(4, 3, seed=1), normal(4, seed=2)),
        lambda a, b, bias, how=how: with_bias(a @ b.T, bias, how),
        gradient=False,
        note=how or "bias",
    )
    for how in ("", "relu")
]
WITH_BIAS += [
    Example(
        "conv2d_bias",
        lambda x, w, bias, how=how: conv.conv2d_bias(x, w, bias, 1, "VALID", 1, 1, how),
        (normal(2, 4, 5, 2), normal(1, 1, 2, 3, seed=1), normal(3, seed=2)),
        lambda x, w, bias, how=how: with_bias(x @ w[0, 0], bias, how),
        gradient=False,
        note=how or "bias",
    )
    for how in ("", "relu")
]


def _normalised(x: np.ndarray, axis: Any, scale: Any, offset: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wide = x.astype(np.float64)
    mean, variance = wide.mean(axis, keepdims=True), wide.var(axis, keepdims=True)
    y = (wide - mean) / np.sqrt(variance + 1e-5) * scale + offset
    return y.astype(x.dtype), mean.squeeze(axis).astype(x.dtype), variance.squeeze(axis).astype(x.dtype)


def _sigmoid_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return (labels * np.logaddexp(0, -wide) + (1 - labels) * np.logaddexp(0, wide)).astype(logits.dtype)


TABLE = normal(7, 2)
IDS = np.int32([[6, 1, 0], [2, 5, 1]])


def _softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    wide = x.astype(np.float64)
    e = np.exp(wide - wide.max(axis, keepdims=True, initial=-np.inf))
    return (e / e.sum(axis, keepdims=True)).astype(x.dtype if x.dtype.kind == "f" else np.float64)


def _log_softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    wide = x.astype(np.float64)
    wide = wide - wide.max(axis, keepdims=True, initial=-np.inf)
    return (wide - np.log(np.exp(wide).sum(axis, keepdims=True))).astype(x.dtype if x.dtype.kind == "f" else np.float64)


def _of_classes(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return -np.take_along_axis(_log_softmax(logits), labels[..., None].astype(np.int64), -1)[..., 0]


def _of_weights(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return -(labels * _log_softmax(logits)).sum(-1, dtype=logits.dtype)


FAR = np.float32([[1000, 0, -1000], [-2000, -2000, -1999], [88, 89, 90]])
LOGITS, CLASSES = normal(2, 3, 4) * 3, integers(2, 3, low=0, high=4, seed=1)

NN = [
    *WINDOWS,
    *WITH_BIAS,
    *[
        Example(
            op, lambda x, o=op, a=a: getattr(fr.nn, o)(x, a), (x,), lambda x, j=judge, a=a: j(x, a), grad, note=note
        )
        for op, f, judge in [("softmax", fr.nn.softmax, _softmax), ("log_softmax", fr.nn.log_softmax, _log_softmax)]
        for x, a, grad, note in [
            (CUBE, -1, None, "last"),
            (CUBE, 1, None, "middle"),
            (normal(4), 0, None, "vector"),
            (FAR, 1, False, "far"),
            (np.uint8([[3, 5, 255]]), -1, None, "unsigned"),
            (np.float32([[1, NAN], [NAN, 2], [1, 2], [-INF, 0]]), -1, False, "nan"),
            (normal(0, 3), -1, False, "no-rows"),
        ]
    ],
    *[
        Example(
            "moments",
            lambda x, a=axis, k=kept: nn.moments(x, a, k),
            (x,),
            lambda x, a=axis, k=kept: (x.mean(a, keepdims=k), x.var(a, keepdims=k)),
            margin=1e-5,
            note=note,
        )
        for x, axis, kept, note in [
            (CUBE, None, False, "all"),
            (CUBE, -1, True, "last"),
            (CUBE, (0, 2), False, "middle"),
            (CUBE, 1, True, "columns"),
            (normal(6, 3), 0, False, "narrow"),
            (integers(4, 3), 0, False, "integers"),
            (normal(3, 0), 0, False, "no-columns"),
        ]
    ],
    Example("standardize", standardize, (CUBE, *COLUMNS), lambda x, m, f, o: (x - m) * f + o),
    Example("standardize", standardize, (CUBE, *COLUMNS[:2], np.float32(2)), lambda x, m, f, o: (x - m) * f + o),
    *[
        Example(
            "sums_about",
            sums_about,
            (x, normal(*x.shape, seed=1), normal(*shape, seed=2)),
            lambda x, w, m: (_summed_to(w, m.shape), _summed_to(w * (x - m), m.shape)),
            margin=1e-5,
        )
        for x, shape in [(CUBE, (5,)), (CUBE, (3, 1, 1)), (CUBE, (4, 1)), (normal(6, 3), (1, 3)), (normal(0, 3), (3,))]
    ],
    Example(
        "standardize",
        fr.nn.batch_norm,
        (normal(4, 3, 2, 5), normal(5, seed=1), normal(5, seed=2)),
        lambda x, scale, offset: _normalised(x, (0, 1, 2), scale, offset),
        margin=1e-5,
        note="batch_norm",
    ),
    Example(
        "standardize",
        lambda x, scale, offset: fr.nn.batch_norm(x, scale, offset, axis=(0, -1)),
        (CUBE, normal(4, seed=1), normal(4, seed=2)),
        lambda x, scale, offset: _normalised(x, (0, 2), scale[:, None], offset[:, None]),
        margin=1e-5,
        note="batch_norm-middle",
    ),
    Example(
        "rsqrt",
        fr.nn.layer_norm,
        (CUBE, normal(5, seed=1), normal(5, seed=2)),
        lambda x, scale, offset: _normalised(x, -1, scale, offset)[0],
        margin=1e-5,
        note="layer_norm",
    ),
    Example(
        "rsqrt",
        lambda x, scale, offset: fr.nn.layer_norm(x, scale, offset, axis=(0, 1)),
        (CUBE, normal(3, 4, seed=1), normal(3, 4, seed=2)),
        lambda x, scale, offset: _normalised(x, (0, 1), scale[..., None], offset[..., None])[0],
        margin=1e-5,
        note="layer_norm-first",
    ),
    Example("add", fr.nn.bias_add, (CUBE, normal(5, seed=1)), lambda x, b: x + b, note="bias_add"),
    Example(
        "binary_cross_entropy",
        fr.nn.sigmoid_cross_entropy,
        (normal(3, 4) * 4, np.random.default_rng(1).uniform(size=(3, 4)).astype(np.float32)),
        _sigmoid_entropy,
    ),
    Example(
        "binary_cross_entropy",
        fr.nn.sigmoid_cross_entropy,
        (np.float32([0, 30, -30, 1000, -1000]), np.int32([1, 1, 0, 0, 1])),
        _sigmoid_entropy,
        gradient=False,
        note="far",
    ),
    Example("take", fr.nn.embedding_lookup, (TABLE, IDS), lambda t, i: t[i], note="embedding"),
    Example(
        "take",
        lambda a, b, c, i: fr.nn.embedding_lookup([a, b, c], i),
        (TABLE[0::3].copy(), TABLE[1::3].copy(), TABLE[2::3].copy(), IDS),
        lambda a, b, c, i: TABLE[i],
        note="embedding-shards",
    ),
    Example("softmax", fr.nn.softmax, (normal(3, 0),), lambda x: x, note="no-classes"),
    Example("log_softmax", fr.nn.log_softmax, (normal(3, 0),), lambda x: x, note="no-classes"),
    Example("class_cross_entropy", fr.nn.softmax_cross_entropy, (LOGITS, CLASSES), _of_classes),
    Example("class_cross_entropy", fr.nn.softmax_cross_entropy, (normal(5), np.uint8(2)), _of_classes, note="one"),
    Example("class_cross_entropy", fr.nn.softmax_cross_entropy, (FAR, np.int64([0, 1, 2])), _of_classes, note="far"),
    Example("class_cross_entropy", fr.nn.softmax_cross_entropy, (normal(0, 3), integers(0)), _of_classes, note="none"),
    Example(
        "class_cross_entropy",
        fr.nn.softmax_cross_entropy,
        (np.float32([[NAN, 1], [0, 1]]), np.int32([1, 0])),
        _of_classes,
        gradient=False,
        note="nan",
    ),
    Example(
        "class_cross_entropy_slope",
        entropy.class_cross_entropy_slope,
        (LOGITS, CLASSES, normal(2, 3, seed=9)),
        lambda x, i, dy: dy[..., None] * (_softmax(x) - _hot(i, 4)),
    ),
    Example(
        "cross_entropy_slope",
        entropy.cross_entropy_slope,
        (LOGITS, normal(2, 3, 4, seed=8), normal(2, 3, seed=9)),
        lambda x, w, dy: dy[..., None] * (_softmax(x) * w.sum(-1, keepdims=True) - w),
    ),
    Example("cross_entropy", fr.nn.softmax_cross_entropy, (LOGITS, _softmax(normal(2, 3, 4, seed=7))), _of_weights),
    Example("cross_entropy", fr.nn.softmax_cross_entropy, (LOGITS, _hot(CLASSES, 4, "int32")), _of_weights, note="int"),
    Example("cross_entropy", fr.nn.softmax_cross_entropy, (LOGITS, normal(2, 3, 4, seed=8)), _of_weights, note="any"),
    Example(
        "cross_entropy",
        fr.nn.softmax_cross_entropy,
        (np.float32([[0, -INF]]), np.float32([[1, 0]])),
        lambda x, w: np.float32([0]),
        gradient=False,
        note="impossible",
    ),
    Example("cross_entropy", fr.nn.softmax_cross_entropy, (normal(0, 3), normal(0, 3)), _of_weights, note="none"),
]

RANDOM = [  # whose values have tests of their own
    Example("random_normal", lambda: fr.random.normal((2, 3)), specs=(Spec("float32", (2, 3)),)),
    Example(
        "random_normal",
        lambda x: fr.random.normal(fr.shape_of(x), 1.0, 2.0, "float64", seed=1),
        (CUBE,),
        specs=(Spec("float64", (3, 4, 5)),),
    ),
    Example("random_uniform", lambda: fr.random.uniform((), -1, 1, seed=3), specs=(Spec("float32", ()),)),
    Example("random_truncated_normal", lambda: fr.random.truncated_normal((2, 3)), specs=(Spec("float32", (2, 3)),)),
    Example("random_integers", lambda: fr.random.randint((3,), 0, 2**64, "uint64"), specs=(Spec("uint64", (3,)),)),
    Example("random_integers", lambda: fr.random.permutation(7), specs=(Spec("int64", (7,)),), note="order"),
    Example(
        "random_integers", lambda x: fr.random.permutation(x), (CUBE,), specs=(Spec("float32", (3, 4, 5)),), note="rows"
    ),
]
