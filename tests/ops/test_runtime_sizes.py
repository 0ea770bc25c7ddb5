"""Integers that only a step knows: counts, shapes and bounds that are fed, or are sizes of what is fed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable

COUNTS = (0, 1, 4, 64, 65)  # inference carries the values of 64 integers at most

OF_A_COUNT: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "arange": (fr.arange, np.arange),
    "arange of int32": (lambda n: fr.arange(fr.astype(n, "int32")), np.arange),
    "arange from a count down": (lambda n: fr.arange(n, -5, -3), lambda n: np.arange(n, -5, -3)),
    "arange of a dtype": (lambda n: fr.arange(n, dtype="float32"), lambda n: np.arange(n, dtype="float32")),
    "arange from a half": (lambda n: fr.arange(0.5, n), lambda n: np.arange(0.5, n)),
    "arange by halves": (lambda n: fr.arange(n / 4, -3, -0.5), lambda n: np.arange(n / 4, -3, -0.5)),
    "arange of a float": (
        lambda n: fr.arange(fr.astype(n, "float32") + 0.5, dtype="int32"),
        lambda n: np.arange(n + 0.5, dtype="int32"),
    ),
    "arange of tenths": (
        lambda n: fr.arange(0, fr.astype(n, "float32"), 0.1),
        lambda n: np.float32(np.arange(0, n, 0.1)),
    ),
    "arithmetic of an arange": (lambda n: -fr.arange(n) * 2 // 3 % 5, lambda n: -np.arange(n) * 2 // 3 % 5),
    "a part of an arange": (lambda n: fr.arange(n)[1::2], lambda n: np.arange(n)[1::2]),
    "the sum of an arange": (lambda n: fr.sum(fr.arange(n)), lambda n: np.arange(n).sum()),
    "a shape": (lambda n: fr.zeros((n, 2)), lambda n: np.zeros((n, 2), "float32")),
    "a shape of another": (lambda n: fr.ones(fr.arange(n)[:2]), lambda n: np.ones(np.arange(n)[:2], "float32")),
    "a causal mask": (
        lambda n: fr.less_equal(fr.arange(n), fr.expand_dims(fr.arange(n), 1)),
        lambda n: np.arange(n) <= np.arange(n)[:, None],
    ),
}


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"tapes": False}], ids=str)
def test_a_fed_count_makes_as_many(options: dict[str, Any]) -> None:
    with fr.Graph() as graph:
        n = fr.placeholder("int64", ())
        made = {name: build(n) for name, (build, _) in OF_A_COUNT.items()}
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        for count in COUNTS:
            for name, got in session.run(made, {n: count}).items():
                wanted = OF_A_COUNT[name][1](count)
                np.testing.assert_array_equal(got, wanted, err_msg=f"{name} of {count}")
                assert got.dtype == wanted.dtype


def test_a_step_of_nothing_to_a_fed_count_is_refused() -> None:
    with (
        fr.Graph(),
        pytest.raises(fr.SpecError, match=r"test_runtime_sizes.py:\d+\): arange needs a step other than 0"),
    ):
        fr.arange(0, fr.placeholder("float32", ()), 0)


@pytest.mark.parametrize("options", [{}, {"optimize": False, "tapes": False}], ids=["as it is", "op by op"])
def test_a_fed_step_of_nothing_or_a_count_that_is_no_number_is_refused(options: dict[str, Any]) -> None:
    with fr.Graph() as graph:
        n, step = fr.placeholder("float32", ()), fr.placeholder("float32", ())
        down, up = fr.arange(5.0, 0.0, step), fr.arange(n, dtype="int32")
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        for made, fed in ((down, {step: 0.0}), (down, {step: np.nan}), (up, {n: np.nan})):
            with pytest.raises(fr.SpecError, match=r"test_runtime_sizes.py:\d+\): .*a step other than 0, and no NaN"):
                session.run(made, fed)
        np.testing.assert_array_equal(session.run(down, {step: -2.0}), np.float32([5, 3, 1]))


@pytest.mark.parametrize("times", [(2, 3), (1, 0), (1, 1)], ids=str)
def test_a_fed_vector_says_how_often_to_repeat(times: tuple[int, int]) -> None:
    rows = np.arange(6.0).reshape(2, 3)
    with fr.Graph() as graph:
        repeats = fr.placeholder("int64", (2,))
        tiled = fr.tile(rows, repeats)
    with fr.BlockingSession(graph) as session:
        np.testing.assert_array_equal(session.run(tiled, {repeats: np.array(times)}), np.tile(rows, times))


def test_the_sizes_of_what_is_fed_count_too() -> None:
    with fr.Graph() as graph:
        rows = fr.placeholder("float32", (None, 3))
        numbers = fr.arange(fr.shape_of(rows)[0])
    with fr.BlockingSession(graph) as session:
        for count in COUNTS:
            got = session.run(numbers, {rows: np.ones((count, 3), "float32")})
            np.testing.assert_array_equal(got, np.arange(count))


@pytest.mark.parametrize("options", [{}, {"optimize": False}, {"tapes": False}], ids=str)
def test_a_sum_of_what_is_repeated_so_often_as_a_variable_or_an_iteration_says(options: dict[str, Any]) -> None:
    def of(count: Any) -> Any:
        return fr.sum(fr.cos(fr.broadcast_to(row, (count, 3))) * 0.5)  # a scalar: its shape tells nothing of the count

    with fr.Graph() as graph:
        row, n = fr.placeholder("float64", (1, 3)), fr.placeholder("int64", ())
        variable = fr.Variable(np.int64(0))
        assign, once = variable.assign(n), of(variable.read())
        start = (np.int64(0), np.float64(0))
        in_turn = fr.while_loop(lambda i, _: i < n, lambda i, total: (i + 1, total + of(i)), start)[1]
    each = np.cos(0.5) * 1.5
    with fr.BlockingSession(graph, options=fr.Options(**options)) as session:
        assert "peak memory unknown" in str(session.explain(once)) or options
        step = session.compile([once, in_turn], feeds=[row, n])
        for count in (2, 2, 2, 5, 0, 5, 2):
            session.run(assign, {n: count})
            np.testing.assert_allclose(step(np.full((1, 3), 0.5), count), [each * count, each * sum(range(count))])
