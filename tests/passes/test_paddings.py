"""Paddings, what is computed inside them and what is computed around them, as one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_world import compile_here
from test_fuse import ops, plan_of

import flowrt as fr
from flowrt.kernels.fusion import padded
from flowrt.passes import paddings
from flowrt.passes.fuse import MAX_INPUTS

Array = np.ndarray[Any, Any]
F4 = "float32"
LARGE = paddings.LARGE


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small programs are joined, and compiled as soon as they are ordered, by this process."""

    compile_here(monkeypatch)
    monkeypatch.setattr(paddings, "LARGE", 1)
    monkeypatch.setattr(padded, "SMALL_FRAME", 0.1)


def around(u: Any) -> Any:
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def heat(u: Any) -> Any:
    return u + 0.1 * fr.pad(around(u), 1)


def np_heat(u: Array) -> Array:
    return np.asarray(u + 0.1 * np.pad(around(u), 1))


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "a stencil": (heat, np_heat, [(70, 60)]),
    "a wide frame of ones": (
        lambda x, y: fr.pad(x * x + 1.0, ((3, 2), (0, 5)), 1.0) * y - y,
        lambda x, y: np.pad(x * x + 1, ((3, 2), (0, 5)), constant_values=1) * y - y,
        [(100, 80), (105, 85)],
    ),
    "what is repeated around it": (
        lambda x, row, column: fr.pad(fr.exp(x), ((0, 0), (1, 0), (0, 1))) * row + column + fr.abs(row),
        lambda x, row, column: np.pad(np.exp(x), ((0, 0), (1, 0), (0, 1))) * row + column + abs(row),
        [(4, 20, 30), (31,), (21, 1)],
    ),
    "nothing computed inside": (
        lambda x, y: fr.sqrt(fr.pad(x, 1, 4.0)) + y,
        lambda x, y: np.sqrt(np.pad(x, 1, constant_values=4)) + y,
        [(50,), (52,)],
    ),
    "a frame as large as what is inside": (
        lambda x, y: fr.pad(x + x, 9) * y,
        lambda x, y: np.pad(x + x, 9) * y,
        [(8, 8), (26, 26)],
    ),
    "one column inside": (
        lambda x, y: fr.pad(x * x - 1.0, ((0, 0), (0, 1), (1, 1))) * y,
        lambda x, y: np.pad(x * x - 1, ((0, 0), (0, 1), (1, 1))) * y,
        [(3, 4, 1), (3, 5, 3)],
    ),
    "nothing inside": (
        lambda x, y: fr.pad(x + x, ((2, 3), (0, 0)), 2.0) * y,
        lambda x, y: np.pad(x + x, ((2, 3), (0, 0)), constant_values=2) * y,
        [(0, 8), (5, 8)],
    ),
    "the padding read twice": (
        lambda x, y: fr.maximum(fr.pad(-x, 1), y) - fr.pad(-x, 1),
        lambda x, y: np.maximum(np.pad(-x, 1), y) - np.pad(-x, 1),
        [(30, 40), (32, 42)],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_around_a_padding_answers_as_numpy(name: str) -> None:
    function, judge, shapes = FUNCTIONS[name]
    rng = np.random.default_rng(len(name))
    values = [np.abs(rng.normal(size=shape)).astype(F4) for shape in shapes]
    with fr.Graph() as graph:
        feeds = [fr.placeholder(F4, shape) for shape in shapes]
        y = function(*feeds)
    with fr.BlockingSession(graph, options=fr.Options(threads=2)) as session:
        step = session.compile(y, feeds)
        found = [np.array(step(*values)) for _ in range(4)]
    for one in (found[0], found[-1]):  # member by member, and compiled
        np.testing.assert_allclose(one, judge(*values), rtol=1e-5, atol=1e-6)
    members = [op for op in ops(plan_of(function, *shapes)) if "pad" in op]
    assert len(members) == 1
    assert len(members[0]) > 1
    assert (members[0][0] == "pad") == (name == "nothing computed inside")


def test_a_loop_over_a_stencil_and_a_variable_that_it_moves() -> None:
    u = np.random.default_rng(3).normal(size=(40, 50)).astype(F4)
    with fr.Graph() as graph:
        start, moved = fr.placeholder(F4, u.shape), fr.Variable(u, name="u")
        first = fr.constant(0, "int32")
        _, last = fr.while_loop(lambda i, u: i < 5, lambda i, u: (i + 1, heat(u)), (first, start))
        move = moved.assign(heat(moved))
    judge = u
    with fr.BlockingSession(graph) as session:
        loop, step = session.compile(last, [start]), session.compile(move, [])
        for _ in range(5):
            judge = np_heat(judge)
            step()
        np.testing.assert_allclose(session.run(moved), judge, rtol=1e-4, atol=1e-5)
        for _ in range(3):
            np.testing.assert_allclose(loop(u), judge, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (fr.pad(x * 2.0, 1), fr.exp(fr.pad(x * 2.0, 1))),  # others want what is padded
        lambda x: fr.sum(fr.pad(x * 2.0, 1) * 3.0, 0),  # a fold behind it
        lambda x: fr.pad(fr.matmul(x, x), 1),  # nothing behind it
        lambda x: fr.exp(fr.transpose(fr.pad(x * 2.0, 1))),  # a view of it
        lambda x: fr.exp(fr.pad(x * 2.0, 1)[::-1]),  # one that is as large
        lambda x: (y := fr.pad(x * 2.0, 1)) / fr.sum(y, 1, keepdims=True),  # rows of it
        lambda x: fr.pad(x * 2.0, 1) * fr.reshape(x, (9, 9, 1))[:, :1],  # what makes more of it
        lambda x: fr.pad(x * 2.0, 1) + fr.FIFOQueue(1, "float32", (11, 11)).dequeue(),  # what may come later
    ],
)
def test_a_padding_that_others_read_or_that_nobody_goes_over_is_left_alone(function: Callable[[Any], Any]) -> None:
    assert ["pad"] in ops(plan_of(function, (9, 9)))


def test_only_what_goes_over_entries_is_joined_inside_and_as_much_as_a_kernel_takes() -> None:
    assert ["pad", "exp"] in ops(plan_of(lambda x: fr.exp(fr.pad(fr.matmul(x, x), 1)), (9, 9)))
    others = MAX_INPUTS - 1
    (most,) = ops(plan_of(lambda x, *rest: sum(rest, fr.pad(x, 1)), (9, 9), *[(11, 11)] * others))
    assert most[0] == "pad"


def test_small_paddings_and_those_of_unknown_sizes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["pad"] in ops(plan_of(heat, (None, 9)))
    assert ["pad"] in ops(plan_of(lambda x, y: fr.pad(x * 2.0, 1) * y, (9, 9), (None, 11)))
    monkeypatch.setattr(paddings, "LARGE", LARGE)
    for shape, alone in (((127, 129), True), ((128, 128), False)):
        assert (["pad"] in ops(plan_of(heat, shape))) == alone
