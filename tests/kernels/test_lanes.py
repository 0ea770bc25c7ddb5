"""Loops over vectors as one kernel: entries alike are computed by loops of vectors, and carried side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from loop_world import step_of

import flowrt as fr
from flowrt.kernels.composite.iteration import LaneValues, make_iteration, make_lanes
from flowrt.kernels.store import background

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that can be one kernel are compiled rather than ordered."""
    monkeypatch.setattr(background, "was_tried", lambda symbol: True)


def has_lanes(graph: fr.Graph) -> bool:
    """Whether the graph's last loop is one kernel that computes entries alike by loops."""
    return any(isinstance(part, LaneValues) for part in step_of(graph).program.body.parts)


def answers(build: Callable[..., Any], *fed: Array) -> Any:
    """What one kernel with lanes answers."""
    with fr.Graph() as graph:
        feeds = [fr.placeholder(value.dtype, value.shape) for value in fed]
        last = build(*feeds)
    assert has_lanes(graph)
    with fr.BlockingSession(graph, options=fr.Options(threads=1)) as session:
        return session.run(last, dict(zip(feeds, fed, strict=True)))


@pytest.mark.parametrize("size", [8, 19, 64])
@pytest.mark.parametrize("far", [1.0, 1e9])
def test_rows_are_scanned_carried_and_stacked_lane_by_lane(size: int, far: float) -> None:
    """Where an argument is far from zero, other functions than the narrow ones are taken for all lanes."""
    rng = np.random.default_rng(size)
    rows, first = rng.normal(size=(6, size)), rng.normal(size=size)
    rows[3, size // 2] *= far

    def iteration(v: Any, row: Any) -> Any:
        v = fr.sin(v + row) * 0.5 + fr.where(row > 0, v, -0.25)
        return v, (fr.exp(-v * v), fr.sum(v))

    last, (bells, sums) = answers(lambda v, x: fr.scan(iteration, v, x, reverse=True), first, rows)
    v = first
    for t in reversed(range(6)):
        v = np.sin(v + rows[t]) * 0.5 + np.where(rows[t] > 0, v, -0.25)
        np.testing.assert_allclose(bells[t], np.exp(-v * v), rtol=1e-11)
        np.testing.assert_allclose(sums[t], v.sum(), rtol=1e-11)
    np.testing.assert_allclose(last, v, rtol=1e-11)


def test_vectors_that_are_carried_change_places_iteration_around_and_are_read_at_indices() -> None:
    rng = np.random.default_rng(4)
    first = [rng.integers(-50, 50, 40) for _ in range(3)]

    def iteration(i: Any, a: Any, b: Any, c: Any) -> Any:
        following = (a * 3 - b + fr.take(c, fr.take(a, i % 40) % 40)) % 101
        return i + 1, b, fr.concat([c[1:], a[:1]], axis=0), following

    got = answers(lambda *v: fr.while_loop(lambda i, *v: i < 30, iteration, (np.int64(0), *v))[1:], *first)
    a, b, c = first
    for i in range(30):
        a, b, c = b, np.concatenate([c[1:], a[:1]]), (a * 3 - b + c[a[i % 40] % 40]) % 101
    for value, wanted in zip(got, (a, b, c), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_loops_and_branches_inside_carry_vectors_too() -> None:
    first = np.linspace(-1, 1, 33, dtype=np.float32)

    def iteration(i: Any, v: Any) -> Any:
        inner = fr.while_loop(lambda j, w: j < i, lambda j, w: (j + 1, fr.tanh(w) * 1.5 + v * 0.25), (i * 0, v))[1]
        return i + 1, fr.cond(fr.max(inner) > 1.2, lambda: inner * 0.5, lambda: inner + fr.min(v) * 0.125)

    got = answers(lambda v: fr.while_loop(lambda i, v: i < 9, iteration, (np.int32(0), v))[1], first)
    v = first.astype(np.float64)
    for i in range(9):
        w = v
        for _ in range(i):
            w = np.tanh(w) * 1.5 + v * 0.25
        v = w * 0.5 if w.max() > 1.2 else w + v.min() * 0.125
    np.testing.assert_allclose(got, v, rtol=1e-4)


def test_flags_and_small_integers_are_lanes_too() -> None:
    first = np.arange(50, dtype=np.int8)
    flags = first % 3 == 0

    def iteration(i: Any, v: Any, f: Any) -> Any:
        return i + 1, fr.where(f, v + np.int8(1), v), fr.logical_xor(f, v > 20)

    v, f = answers(lambda v, f: fr.while_loop(lambda i, *_: i < 7, iteration, (np.int64(0), v, f))[1:], first, flags)
    known, known_flags = first, flags
    for _ in range(7):
        known, known_flags = np.where(known_flags, known + np.int8(1), known), known_flags ^ (known > 20)
    np.testing.assert_array_equal(v, known)
    np.testing.assert_array_equal(f, known_flags)


def test_lanes_name_values_of_their_inputs_dtype_that_come_before() -> None:
    lanes = make_lanes(["float32", "float32"], [("add", (0, 1), "float32")], [(0, 1), (2,)], 2)
    assert make_iteration(["float32"] * 3, [lanes], [3, 4]).answers == (np.float32,) * 2
    for kinds in (["float32"] * 2, ["float32", "float64", "float32"]):
        with pytest.raises(fr.GraphError, match="lanes"):
            make_iteration(kinds, [lanes], [0])
