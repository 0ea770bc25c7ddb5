"""Examples of loops and branches; Python's own are the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from example import Example, normal

import flowrt.ops as fr
from flowrt.base.spec import Spec
from flowrt.graph import control_dependencies
from flowrt.ops import flow


def powers(x: Any, w: Any) -> Any:
    """Three turns that square and weigh."""
    return fr.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * y + w), (np.int32(0), x))[1]


def powers_by_hand(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = x * x + w
    return x


def running(carry: Any, xs: Any, w: Any, reverse: bool = False) -> Any:
    return fr.scan(lambda c, x: (fr.tanh(c * w + x), c - x), carry, xs, reverse=reverse)


def running_by_hand(carry: Any, xs: Any, w: Any, reverse: bool = False) -> Any:
    ys = np.zeros_like(xs)
    turns = range(len(xs))
    for t in reversed(turns) if reverse else turns:
        carry, ys[t] = np.tanh(carry * w + xs[t]), carry - xs[t]
    return carry, ys


def digits(n: Any) -> Any:
    """How many decimal digits ``n`` has."""
    return fr.while_loop(lambda m, d: m > 0, lambda m, d: (m // 10, d + 1), (n, 0), maximum_iterations=30)[1]


def clipped(x: Any, w: Any) -> Any:
    return fr.cond(fr.sum(x) > 0, lambda: (x * w, fr.sum(x)), lambda: (fr.sin(x), fr.sum(w)))


def clipped_by_hand(x: Any, w: Any) -> Any:
    return (x * w, np.sum(x)) if np.sum(x) > 0 else (np.sin(x), np.sum(w))


def counting(x: Any) -> Any:
    """As many turns as ``x``, with a variable that counts them."""
    v = fr.Variable(np.int64(0))

    def turn(i: Any) -> Any:
        with control_dependencies([v.assign_add(np.int64(1))]):
            return i + 1

    return fr.while_loop(lambda i: i < x, turn, np.int64(0))


def perhaps_written(x: Any) -> Any:
    v = fr.Variable(np.int64(0))
    return fr.cond(x > 0, lambda: v.assign(x), lambda: v.assign_add(x))


CONTROL: Sequence[Example] = [
    Example("enter", lambda x: fr.enter(x, "frame"), (normal(2),), specs=(Spec("float32", (2,)),)),
    Example("exit", fr.exit, (normal(2),), specs=(Spec("float32", (2,)),)),
    Example("next_iteration", fr.next_iteration, (normal(2),), specs=(Spec("float32", (2,)),)),
    Example("loop_cond", fr.loop_cond, (np.array(True),), lambda pred: pred),
    Example("no_rows", lambda: flow.no_rows(dtype="int8", shape=(2,)), specs=(Spec("int8", (None, 2)),)),
    Example("append_row", flow.append_row, (normal(3, 2), normal(2)), specs=(Spec("float32", (None, 2)),)),
    Example(
        "append_rows",
        flow.append_rows,
        (normal(3, 2), normal(4, 2), np.int64(2)),
        specs=(Spec("float32", (None, 2)),),
    ),
    Example(
        "stack_rows",
        lambda rows, n: flow.stack_rows(rows, n, reverse=False),
        (normal(3, 2), np.int64(4)),
        specs=(Spec("float32", (None, 2)),),
    ),
    Example("loop", powers, (normal(2, 3) / 2, normal(3) / 2), powers_by_hand, margin=1e-5),
    Example("loop", running, (normal(2), normal(4, 2), normal(2)), running_by_hand, note="scan"),
    Example(
        "loop",
        lambda *a: running(*a, reverse=True),
        (normal(2), normal(4, 2), normal(2)),
        lambda *a: running_by_hand(*a, reverse=True),
        note="reverse",
    ),
    Example(
        "loop", lambda xs: fr.map_fn(lambda x: x * x[0], xs), (normal(3, 2),), lambda xs: xs * xs[:, :1], note="map"
    ),
    Example("loop", lambda xs: fr.map_fn(fr.exp, xs), (normal(0, 2),), np.exp, note="of nothing"),
    Example("loop", digits, (np.int64(80_207),), lambda n: np.int64(len(str(n))), note="limited"),
    Example("cond", clipped, (np.abs(normal(3)), normal(3)), clipped_by_hand, note="true"),
    Example("cond", clipped, (-np.abs(normal(3)), normal(3)), clipped_by_hand, note="false"),
    Example(
        "cond",
        lambda n: fr.case([(n < 2, lambda: n * 2), (n < 9, lambda: n - 1)], lambda: n * n),
        (np.int64(5),),
        lambda n: n - 1,
        note="case",
    ),
    Example("stateful_loop", counting, (np.int64(3),), specs=(Spec("int64", ()),)),
    Example("stateful_cond", perhaps_written, (np.int64(3),), specs=()),
]
