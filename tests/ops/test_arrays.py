"""What arrays are cut, arranged, measured and combined by: slopes where they jump, open sizes, bits, and misuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import flowrt as fr

if TYPE_CHECKING:
    from collections.abc import Callable

X = np.arange(12, dtype=np.float32).reshape(2, 6)
ORDERS = (None, 1, 2, 3, 1.5, 0.5, -1, np.inf, -np.inf)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("far", [0.0, np.inf, np.nan], ids=str)
def test_norms_of_edges_are_numpys(order: Any, far: float) -> None:
    for x in (np.array([far, 2.0, -1.0]), np.array([far, far]), np.array([0.0, far])):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(fr.norm(x, order), np.linalg.norm(x, order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_slopes_of_a_norm_of_0_are_0_to_the_second(order: Any) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None, 3))
        (first,) = fr.gradients(fr.norm(x, order, axis=1), x)
        (second,) = fr.gradients(fr.sum(first * first), x)
        slopes = [first] if second is None else [first, second]
    with fr.BlockingSession(graph) as session:
        for slope in session.run(slopes, {x: [[0.0, 0.0, 0.0], [1.0, 2.0, 0.5]]}):
            np.testing.assert_array_equal(slope[0], 0)
            assert np.isfinite(slope).all()


@pytest.mark.parametrize("stop", [0.3, 1e30, -7.1])
def test_the_last_of_evenly_spaced_numbers_is_the_very_end(stop: float) -> None:
    with fr.Graph() as graph:
        start, end = fr.placeholder("float32", ()), fr.placeholder("float32", ())
        made = [fr.linspace(start, end, many) for many in (2, 3, 49, 1000)]
        (slope,) = fr.gradients(made[1][-1], end)
    given = np.float32(stop)
    with fr.BlockingSession(graph) as session:
        for numbers in session.run(made, {start: 0.1, end: given}):
            assert (numbers[0], numbers[-1]) == (np.float32(0.1), given)
        assert session.run(slope, {start: 0.1, end: given}) == 1
    assert fr.linspace(0.1, stop, 49)[-1] == given


def test_bits_and_truth_are_combined_as_numpys_operators_do() -> None:
    ints, flags = np.int8([5, -3, 0]), np.array([True, False, True])

    def combined(a: Any, b: Any) -> list[Any]:
        bits = [a & 6, 6 | a, a ^ a, ~a, a & np.int32([1, 2, 3])]
        return [*bits, b & True, b | ~b, [True, True, False] ^ b, b & 1, b | a, a ^ b]

    with fr.Graph() as graph:
        a, b = fr.placeholder("int8", (None,)), fr.placeholder("bool", (None,))
        made = combined(a, b)
    with fr.BlockingSession(graph) as session:
        for mine, judge in zip(session.run(made, {a: ints, b: flags}), combined(ints, flags), strict=True):
            np.testing.assert_array_equal(mine, judge, strict=True)


def test_bits_of_sizes_are_known_while_a_graph_is_built() -> None:
    with fr.Graph():
        rows = fr.shape_of(fr.placeholder("float32", (13, None)))[0]
        assert fr.zeros((rows & 12, rows | 2, rows ^ 1)).shape == (12, 15, 12)


def test_sections_of_an_axis_whose_size_is_open_must_fill_it() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2, None))
        thirds, told, rest = fr.split(x, 3, 1), fr.split(x, [2, 4], -1), fr.split(x, [1, -1, 2], 1)
    assert [part.shape for part in (*told, *rest)] == [(2, 2), (2, 4), (2, 1), (2, None), (2, 2)]
    with fr.BlockingSession(graph) as session:
        for sections, cuts in ((thirds, [2, 4]), (told, [2]), (rest, [1, 4])):
            for mine, judge in zip(session.run(sections, {x: X}), np.split(X, cuts, 1), strict=True):
                np.testing.assert_array_equal(mine, judge)
        for sections, short in ((thirds, X[:, :5]), (told, X[:, :5]), (rest, X[:, :2])):
            with pytest.raises(fr.SpecError, match=r"test_arrays.py:\d+"):
                session.run(sections, {x: short})


def test_the_slope_of_all_sections_is_one_concatenation() -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2, 6))
        first, second = fr.split(x, [2, 4], 1)
        (slope,) = fr.gradients([first * first, second], x)
    assert slope.op.op.name == "concat"


MISUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.split(X, 4, 1), r"axis 1 of float32\[2,6\] has no 4 equal sections; give the size of each"),
    (lambda: fr.split(X, [2, 5], 1), "sizes that fill it, one of which may be -1, got"),
    (lambda: fr.split(X, [-1, -1], 1), "one of which may be -1"),
    (lambda: fr.split(X, [2.0, 4.0], 1), "sizes that fill it"),  # type: ignore[list-item]
    (lambda: fr.split(X, 0), "are how many"),
    (lambda: fr.split(X, indices_or_sections=2), "write sections="),  # type: ignore[call-arg]
    (lambda: fr.roll(X, (1, 2), (0, 1, 0)), "one shift, or one for each axis"),
    (lambda: fr.roll(X, 1, 2), "axis 2 is not among the 2 axes"),
    (lambda: fr.flip(X, 2), "axis 2 is not among the 2 axes"),
    (lambda: fr.linspace(0, 1, -1), "num must be an integer from 0 up"),
    (lambda: fr.linspace(0, 1, steps=3), "write num="),  # type: ignore[call-arg]
    (lambda: fr.norm(X, 2), "of matrices ord is 'fro', 1, -1, inf or -inf, got 2; of vectors name one axis"),
    (lambda: fr.norm(X, "fro", 0), "a norm along one axis, or of matrices in two"),
    (lambda: fr.norm(X, p=2), "write ord="),  # type: ignore[call-arg]
    (lambda: fr.bitwise_and(X, 1), r"only integers and bools have bits to combine, got float32\[2,6\]"),
]


@pytest.mark.parametrize(("call", "says"), MISUSED, ids=[says for _, says in MISUSED])
def test_misuse_is_told_with_the_line_and_what_would_do(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(fr.SpecError, match=rf"test_arrays.py:\d+\): .*{says}"):
        call()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_slopes_of_running_products_are_finite_differences_to_the_third_where_entries_are_0(
    axis: int, reverse: bool
) -> None:
    rng = np.random.default_rng(1)
    point, along, weight, turn = rng.normal(size=(4, 4, 5))
    point[[0, 1, 2, 3, 3], [4, 2, 2, 0, 4]] = 0
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (None, 5))
        made = fr.sum(fr.cumprod(x, axis, reverse) * weight)
        (first,) = fr.gradients(made, x)
        (second,) = fr.gradients(fr.sum(first * turn), x)
        (third,) = fr.gradients(fr.sum(fr.square(second)), x)
        sums = [made, fr.sum(first * turn), fr.sum(fr.square(second))]
    with fr.BlockingSession(graph) as session:
        above, below = (session.run(sums, {x: point + step * along}) for step in (1e-6, -1e-6))
        for high, low, slope in zip(above, below, session.run([first, second, third], {x: point}), strict=True):
            np.testing.assert_allclose((slope * along).sum(), (high - low) / 2e-6, rtol=1e-6, atol=1e-7)


def test_a_running_product_in_a_loop_has_the_slope_that_it_has_outside() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder("float64", (2, 6))
        rows = fr.map_fn(lambda row: fr.cumprod(fr.roll(row, 1, 0), 0, reverse=True), x)
        (inside,) = fr.gradients(fr.sum(fr.square(rows)), x)
        (outside,) = fr.gradients(fr.sum(fr.square(fr.cumprod(fr.roll(x, 1, 1), 1, reverse=True))), x)
    with fr.BlockingSession(graph) as session:
        found, wanted = session.run([inside, outside], {x: (X - 3).astype("float64")})
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize(
    "made",
    [
        lambda n: fr.split(X, n, 1),
        lambda n: fr.tensordot(X, X.T, n - 1),
        lambda n: fr.dynamic_partition(X, [0, 1], n),
        lambda n: fr.nn.conv2d_transpose(
            X.reshape(1, 2, 2, 3), np.ones((3, 3, 1, 3), "float32"), 4, "VALID", output_padding=n
        ),
        lambda n: fr.random.log_uniform((4,), n, seed=1),
        lambda n: fr.nn.sampled_softmax(X, None, [0, 1], X, n, seed=1),
    ],
    ids=["split", "tensordot", "dynamic_partition", "conv2d_transpose", "log_uniform", "sampled_softmax"],
)
def test_a_number_may_be_numpys(made: Callable[[Any], Any]) -> None:
    for found, wanted in zip(made(np.int64(2)), made(2), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_is_built_with_numpys_numbers_holds_pythons() -> None:
    n = np.int64(2)
    with fr.Graph() as graph:
        fr.FIFOQueue(n, "float32", ())
        fr.ShuffleQueue(n + 1, n, "float32", ())
        scaled = fr.LossScaled(fr.optim.LBFGS(history=n, evaluations=n), grow_every=n)
        scaled.minimize(fr.square(fr.Variable(1.0)))
    assert fr.Graph.from_bytes(graph.to_bytes()).to_bytes() == graph.to_bytes()
    fr.LocalCluster(ps=n)
