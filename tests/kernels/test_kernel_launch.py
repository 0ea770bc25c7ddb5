"""Views, odometers and the forms of kernels, judged by NumPy's own strides."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from kernel_world import own_tables
from numpy.lib.stride_tricks import as_strided

import flowrt.kernels  # noqa: F401  (fills the table)
from flowrt.base.errors import FlowrtError, GraphError
from flowrt.base.spec import Spec
from flowrt.kernels.language.table import (
    Call,
    Form,
    View,
    elementwise,
    find_kernel,
    flat,
    jitable,
    kernel,
    pieces,
    require_kernel,
)
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Operand, _odometer, apply_kernel, prepare, run_kernel

Array = np.ndarray[Any, Any]
Random = np.random.Generator


def given_views(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Any) -> Call:
    """The layout that the attributes hold."""
    return Call(attrs["views"], attrs.get("words", ()))


def copy_and_count(x: Any, y: Any, z: Any, room: Any) -> None:
    """``z`` is ``y`` plus the running sum of ``x``, both taken in order."""
    room[0] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            room[0] += x[i, j]
            z[i, j] = y[i, j] + room[0]


def tell_words(y: Any, z: Any, whole: int, half: float, other: int, run: Any) -> None:
    y[0], y[1] = whole, other
    z[0], z[1] = half, whole / 2
    y[2], y[3] = run[1], run[2]
    run[0] = run[1] - 7


def tell_tuples(arrays: Any, words: Any, begin: int, end: int, run: Any) -> None:
    """`tell_words` over one unit, by a function that names neither its arrays nor its words."""
    y, z = arrays
    whole, half, other = words
    tell_words(y[begin:], z, whole, half, other, run[: 4 * end])


def rows_layout(inputs: Sequence[Spec], outputs: Sequence[Spec], attrs: Any) -> Call:
    """Each row of the input is a unit; local memory holds one of them."""
    rows, columns = inputs[0].concrete
    return Call((View.dense((rows, columns)), View.dense((rows,)), View.dense((columns,))), units=rows)


def sum_of_squares(x: Any, y: Any, row: Any, begin: int, end: int) -> None:
    for i in range(begin, end):
        for j in range(x.shape[1]):
            row[j] = x[i, j] * x[i, j]
        y[i] = 0
        for j in range(x.shape[1]):
            y[i] += row[j]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with own_tables():
        sums = [lambda: 7, lambda a: a, lambda a, b: 10 * a + b, lambda a, b, c: 100 * a + 10 * b + c]
        sums.append(lambda a, b, c, d: 1000 * a + 100 * b + 10 * c + d)
        for count, function in enumerate(sums):
            kernel(f"test_digits_{count}", layout=given_views, form=Form.SCALARS)(function)
        kernel("test_fold", layout=flat, form=Form.REDUCE)(lambda total, x: 10 * total + x)
        pieces("test_pieces", given_views, on=("cpu",))
        kernel("test_count", layout=given_views, scratch=lambda i, o, a: [Spec("int64", (1,))])(copy_and_count)
        kernel("test_words", layout=given_views)(jitable(tell_words))
        kernel("test_tuples", layout=given_views)(tell_tuples)
        kernel("test_rows", layout=rows_layout, local=lambda i, o, a: [Spec("int64", (i[0].concrete[1],))])(
            sum_of_squares
        )
        yield


def seen(view: View, base: Array) -> Array:
    """What ``view`` sees of the flat array ``base``."""
    strides = tuple(s * base.itemsize for s in view.strides)
    return as_strided(base[view.offset :], view.shape, strides, writeable=False)


# ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_shape(rng: Random, rank: int, smallest: int = 0) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(smallest, 4, rank))


def reshaped(rng: Random, view: View, array: Array) -> tuple[View, Array]:
    if not view.contiguous or not array.flags.c_contiguous or array.ndim < 2:
        return view, array
    shape = (array.shape[0] * array.shape[1], *array.shape[2:]) if rng.random() < 0.7 else (1, *array.shape)
    return view.reshape(shape), array.reshape(shape)


def permuted(rng: Random, view: View, array: Array) -> tuple[View, Array]:
    axes = [int(a) for a in rng.permutation(array.ndim)]
    return view.permute(axes), array.transpose(axes)


def repeated(rng: Random, view: View, array: Array) -> tuple[View, Array]:
    if array.ndim > 6:
        return view, array
    shape = (2, *(3 if n == 1 and rng.random() < 0.5 else n for n in array.shape))
    return view.broadcast_to(shape), np.broadcast_to(array, shape)


def cut(rng: Random, view: View, array: Array) -> tuple[View, Array]:
    """A window of random starts and steps, each of them negative as often as not."""
    starts, counts, steps, key = [], [], [], []
    for n in array.shape:
        start = int(rng.integers(n)) if n else 0
        step = int(rng.choice([-2, -1, 1, 2]))
        room = (n - 1 - start) // step + 1 if step > 0 else start // -step + 1
        count = int(rng.integers(0, room + 1)) if n else 0
        stop = start + step * count
        starts, counts, steps = [*starts, start], [*counts, count], [*steps, step]
        key.append(slice(start, stop if stop >= 0 else None, step) if count else slice(0, 0))
    return view.window(starts, counts, steps), array[tuple(key)]


@pytest.mark.parametrize("seed", range(60))
def test_views_see_what_numpys_do(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, int(rng.integers(0, 6)), smallest=1)
    base = np.arange(math.prod(shape))
    view, array = View.dense(shape), base.reshape(shape)
    for _ in range(5):
        change = [reshaped, permuted, repeated, cut][int(rng.integers(4))]
        view, array = change(rng, view, array)
        assert view.shape == array.shape
        assert view.size == array.size
        if array.size:
            np.testing.assert_array_equal(seen(view, base), array)
        assert view.contiguous == (array.size == 0 or array.flags.c_contiguous)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: View.dense((2, 3)).broadcast_to((3, 3)), r"cannot broadcast \(2, 3\) to \(3, 3\)"),
        (lambda: View.dense((1, 3)).broadcast_to((3,)), "cannot broadcast"),
        (lambda: View.dense((2, 3)).reshape((5,)), r"cannot view \(2, 3\) as \(5,\)"),
        (lambda: View.dense((2, 3)).permute((1, 0)).reshape((6,)), "cannot view"),
        (lambda: View.dense((4,)).window((2,), (3,)), r"window \(3,\) from \(2,\) leaves \(4,\)"),
        (lambda: View.dense((4,)).window((2,), (3,), (-2,)), "leaves"),
        (lambda: View.dense((4,)).window((-1,), (1,)), "leaves"),
    ],
)
def test_views_that_would_leave_their_operand_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ── the odometer ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ([View.dense(())], [1, 0, 1, 1]),
        ([View.dense((1, 1)), View.dense((1, 1))], [1, 0, 1, 1, 1]),
        ([View.dense((2, 3, 4))] * 2, [24, 0, 1, 1, 1]),
        ([View.dense((4,)).broadcast_to((3, 4)), View.dense((3, 4))], [4, 1, 3, 1, 1, 3, 0, 4]),
        ([View.dense(()).broadcast_to((3, 4)), View.dense((3, 4))], [12, 0, 1, 0, 1]),
        ([View.dense((3, 4)).permute((1, 0)), View.dense((4, 3))], [3, 1, 4, 4, 1, 4, 1, 3]),
        ([View.dense((2, 3, 4)).permute((2, 0, 1)), View.dense((4, 2, 3))], [6, 1, 4, 4, 1, 4, 1, 6]),
        ([View.dense((6,)).window((5,), (6,), (-1,)), View.dense((6,))], [6, 0, 1, -1, 1]),
        ([View.dense((0, 4)), View.dense((0, 4))], [0, 0, 1, 1, 1]),
    ],
)
def test_neighbouring_dims_are_merged_where_all_strides_allow(views: list[View], words: list[int]) -> None:
    assert _odometer(views) == words


def random_view(rng: Random, shape: tuple[int, ...], room: int) -> View:
    """Any strides that stay among ``room`` entries, zero and negative ones too."""
    dense = View.dense(shape).strides
    strides = [int(rng.choice([-2, -1, 0, 1, 2, s, -s])) for s in dense]
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n]
    low, high = -sum(s for s in steps if s < 0), room - 1 - sum(s for s in steps if s > 0)
    assert low <= high
    return View(shape, tuple(strides), int(rng.integers(low, high + 1)))


@pytest.mark.parametrize("inputs", range(5))
def test_scalar_kernels_follow_any_strides(inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    print("seed", inputs)
    room = 12000
    op = f"test_digits_{inputs}"
    bases = [rng.integers(0, 10, room) for _ in range(inputs)]
    for _ in range(60):
        rank = int(rng.integers(0, 9))
        shape = random_shape(rng, rank, smallest=0 if rng.random() < 0.1 else 1)
        views = [random_view(rng, shape, room) for _ in range(inputs)]
        axes = [int(a) for a in rng.permutation(rank)]
        order = np.argsort(axes).astype(int).tolist() if rank else []
        target = View.dense([shape[a] for a in axes]).permute(order)  # the output's dims in another order
        assert target.shape == shape
        output = Spec("int64", (target.size,))
        (got,) = run_kernel(op, bases, [output], {"views": (*views, target)})
        want = np.full(shape, 7) if inputs == 0 else np.zeros(shape, np.int64)
        for view, base in zip(views, bases, strict=True):
            want = 10 * want + (seen(view, base) if view.size else 0)
        np.testing.assert_array_equal(got, want.transpose(axes).ravel())


def test_what_a_scalar_kernel_gives_is_cast_to_the_outputs_dtype() -> None:
    with own_tables():
        elementwise("test_halves", lambda x: x / 2, on=("cpu",))
        (got,) = run_kernel("test_halves", [np.array([3, -3], np.int32)], [Spec("float32", (2,))], {})
    assert got.dtype == np.float32
    assert got.tolist() == [1.5, -1.5]


# ── arrays ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(20))
def test_array_kernels_get_strided_operands_as_copies(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, 2, smallest=0 if seed == 0 else 1)
    base, other = rng.integers(0, 100, 200), rng.integers(0, 100, 200)
    views = [random_view(rng, shape, 200) if rng.random() < 0.7 else View.dense(shape) for _ in range(2)]
    specs, output = [Spec("int64", (200,))] * 2, Spec("int64", shape)
    attrs = {"views": (*views, View.dense(shape), View.dense((1,)))}
    application = apply_kernel("test_count", specs, [output], attrs)
    strided = [view for view in views if not view.contiguous]
    assert [step.kernel.op.split("_")[0] for step in application.steps[:-1]] == ["copy"] * len(strided)
    assert application.steps[-1].kernel.op == "test_count"
    assert application.scratch == (Spec("int64", (1,)), *(Spec("int64", shape) for _ in strided))
    (got,) = run_kernel("test_count", [base, other], [output], attrs)
    x, y = (np.zeros(shape, np.int64) if 0 in shape else seen(v, b) for v, b in zip(views, (base, other), strict=True))
    np.testing.assert_array_equal(got, y + np.cumsum(x).reshape(shape))


def test_a_contiguous_part_is_not_copied() -> None:
    view = View.dense((4, 3)).window((1, 0), (2, 3))
    attrs = {"views": (view, view, View.dense((2, 3)), View.dense((1,)))}
    assert len(apply_kernel("test_count", [Spec("int64", (4, 3))] * 2, [Spec("int64", (2, 3))], attrs).steps) == 1
    x = np.arange(12).reshape(4, 3)
    (got,) = run_kernel("test_count", [x, x], [Spec("int64", (2, 3))], attrs)
    np.testing.assert_array_equal(got, x[1:3] + np.cumsum(x[1:3]).reshape(2, 3))


def test_a_block_tells_places_sizes_and_words() -> None:
    view = View.dense((4, 3)).window((1, 0), (2, 3))
    attrs = {"views": (view, View.dense((2, 3))), "words": (5, 0.5)}
    with own_tables():
        kernel("test_block", layout=given_views)(lambda x, y, a, b: None)
        (step,) = apply_kernel("test_block", [Spec("float32", (4, 3))], [Spec("float32", (2, 3))], attrs).steps
    half = int(np.float64(0.5).view(np.int64))
    assert step.block([Operand(1), Operand(6, 64)]).tolist() == [1, 12, 6, 64, 2, 3, 2, 3, 5, half]


@pytest.mark.parametrize(
    ("whole", "half", "other"),
    [
        (3, 0.5, -4),
        (-(2**63), math.inf, 2**63 - 1),
        (True, -math.inf, False),
        (2**60 + 1, math.nan, np.int32(-1)),
        (2**64 - 1, np.float32(0.25), np.uint64(2**63)),  # an integer above an int64's is told modulo 2**64
        (0, np.float64(-0.0), 0),
    ],
)
def test_words_reach_the_kernel_as_they_are(whole: Any, half: Any, other: Any) -> None:
    attrs = {"views": (View.dense((4,)), View.dense((2,))), "words": (whole, half, other)}
    outputs = [Spec("int64", (4,)), Spec("float64", (2,))]
    run = np.array([0, 7, -9, 0], np.int64)
    for op in ("test_words", "test_tuples"):
        integers, floats = run_kernel(op, [], outputs, attrs, run.copy())
        wrapped = [(int(w) + 2**63) % 2**64 - 2**63 for w in (whole, other)]
        assert integers.tolist() == [*wrapped, 7, -9]
        np.testing.assert_array_equal(floats, [float(half), wrapped[0] / 2])
        assert math.copysign(1, floats[0]) == math.copysign(1, half) or half != half


def test_a_status_that_a_kernel_sets_fails_it() -> None:
    attrs = {"views": (View.dense((4,)), View.dense((2,))), "words": (1, 0.5, 2)}
    outputs = [Spec("int64", (4,)), Spec("float64", (2,))]
    for step, message in ((8, "test_words: an index is out of range"), (3000, "test_words: failed with status 2993")):
        with pytest.raises(FlowrtError, match=message):
            run_kernel("test_words", [], outputs, attrs, np.array([0, step, 0, 0], np.int64))


# ── folds and pieces ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reduce_takes_any_number_of_operands_by_one_entry() -> None:
    addresses = set()
    for count in (1, 2, 5):
        specs, output = [Spec("int64", (2, 3))] * count, Spec("int64", (2, 3))
        inputs = [np.full((2, 3), i + 1) for i in range(count)]
        (got,) = run_kernel("test_fold", inputs, [output], {})
        np.testing.assert_array_equal(got, np.full((2, 3), int("12345"[:count])))
        addresses.add(apply_kernel("test_fold", specs, [output], {}).steps[0].address())
    assert len(addresses) == 1


def test_pieces_are_laid_over_a_fill() -> None:
    whole = View.dense((3, 4))
    flipped = View.dense((2, 2)).window((1, 1), (2, 2), (-1, -1))
    windows = flipped, whole.window((0, 0), (2, 2)), View.dense((1, 2)), whole.window((2, 3), (1, 2), (1, -2))
    x, y = np.array([[1, 2], [3, 4]]), np.array([[5, 6]])
    (got,) = run_kernel("test_pieces", [x, y], [Spec("int64", (3, 4))], {"views": windows, "words": (-1,)})
    assert got.tolist() == [[4, 3, -1, -1], [2, 1, -1, -1], [-1, 6, -1, 5]]


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        ("int64", 2**60 + 1),
        ("int64", -(2**63)),
        ("uint64", 2**64 - 1),
        ("bool", True),
        ("float32", 1),
        ("float32", 0.5),
    ],
)
def test_a_fill_is_exact(dtype: str, word: Any) -> None:
    (got,) = run_kernel("test_pieces", [], [Spec(dtype, (2,))], {"views": (), "words": (word,)})
    assert got.dtype == dtype
    assert got.tolist() == [word, word]


def test_nothing_is_launched_for_an_empty_piece() -> None:
    views = (View.dense((0, 2)), View.dense((3, 2)).window((3, 0), (0, 2)))
    specs = [Spec("int64", (0, 2))], [Spec("int64", (3, 2))]
    assert apply_kernel("test_pieces", *specs, {"views": views}).steps == ()


# ── which kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_kernel_registered_last_is_tried_first() -> None:
    general, floats, singles = (lambda x: x), (lambda x: x), (lambda x: x)
    with own_tables():
        elementwise("test_choice", general, on=("cpu",))
        elementwise("test_choice", floats, on=("cpu",), dtypes=lambda d: np.dtype(d[0]).kind == "f")
        elementwise("test_choice", singles, on=("cpu",), dtypes=lambda d: d[0] == np.float32)
        chosen = {
            name: find_kernel("test_choice", "cpu", [np.dtype(name)] * 2) for name in ("int8", "float64", "float32")
        }
        assert {name: found.function for name, found in chosen.items() if found} == {
            "int8": general,
            "float64": floats,
            "float32": singles,
        }
        assert find_kernel("test_choice", "cuda", [np.dtype("int8")] * 2) is None


def test_a_missing_kernel_is_told_with_what_there_is() -> None:
    with own_tables():
        elementwise("test_choice", lambda x: x, on=("cpu",), dtypes=lambda d: d[0] == np.float32)
        single, whole = np.dtype("float32"), np.dtype("int64")
        wanted = r"no cuda kernel for test_choice of \(float32, float32\); test_choice has kernels on cpu"
        with pytest.raises(GraphError, match=wanted):
            require_kernel("test_choice", "cuda", [single, single])
        with pytest.raises(GraphError, match=r"no cpu kernel for test_choice of \(int64, int64\)"):
            require_kernel("test_choice", "cpu", [whole, whole])
    with pytest.raises(GraphError, match="test_choice has kernels on no device"):
        require_kernel("test_choice", "cpu", [single])


def test_what_is_registered_within_is_gone_after() -> None:
    with own_tables():
        elementwise("test_choice", lambda x: x)
    assert find_kernel("test_choice", "cpu", [np.dtype("int8")] * 2) is None


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_share_what_is_prepared() -> None:
    """It holds no state of a run: each thread's operands and words are its own."""
    shape, threads = (20, 30), 8
    views = (View.dense((30, 20)).permute((1, 0)), View.dense(shape), View.dense(shape), View.dense((1,)))
    specs = [Spec("int64", (30, 20)), Spec("int64", shape)]
    prepared = prepare("test_count", specs, [Spec("int64", shape)], {"views": views})
    together = threading.Barrier(threads)

    def work(number: int) -> bool:
        x, y = np.arange(600).reshape(30, 20) + number, np.arange(600).reshape(shape) * number
        z, run = np.empty(shape, np.int64), np.zeros(4, np.int64)
        scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
        addresses = [a.ctypes.data for a in (x, y, z, *scratch)]
        want = y + np.cumsum(x.T).reshape(shape)
        together.wait(20)
        right = True
        for _ in range(100):
            z.fill(-1)
            prepared.run(run.ctypes.data, addresses)
            right = right and np.array_equal(z, want) and not run[0]
        return right

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, range(threads)))


# ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_ranges(op: str, inputs: Sequence[Array], output: Spec, attrs: Any, cuts: Sequence[int]) -> Array:
    """``op``'s last step computed range by range, in the order of ``cuts``, which are pairs of limits."""
    application = apply_kernel(op, [Spec(a.dtype, a.shape) for a in inputs], [output], attrs)
    memory = [*inputs, np.zeros(output.concrete, output.dtype)]
    memory += [np.zeros(spec.concrete, spec.dtype) for spec in (*application.scratch, *application.local)]
    places = [Operand(number + 1) for number in range(len(memory))]
    words = np.zeros(RUN_WORDS, np.int64)
    bases = np.array([words.ctypes.data, *(a.ctypes.data for a in memory)], np.int64)
    for step in application.steps[:-1]:
        ENTRY_TYPE(step.address())(bases.ctypes.data, step.block(places).ctypes.data, 0, step.units)
    step = application.steps[-1]
    assert step.units == cuts[-1]
    block, entry = step.block(places), ENTRY_TYPE(step.address())
    pairs = list(itertools.pairwise((0, *cuts)))
    for begin, end in reversed(pairs):
        entry(bases.ctypes.data, block.ctypes.data, begin, end)
    result: Array = memory[len(inputs)]
    return result


@pytest.mark.parametrize("seed", range(30))
def test_a_scalar_kernel_computes_any_ranges_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, 4, smallest=1)
    bases = [rng.integers(0, 9, 600) for _ in range(2)]
    views = [View(shape, tuple(int(s) for s in rng.integers(0, 9, 4)), 40) for _ in bases]
    target = View.dense(shape)
    size = target.size
    cuts = [*sorted(int(n) for n in rng.integers(0, size + 1, 5)), size]
    got = run_ranges("test_digits_2", bases, Spec("int64", shape), {"views": (*views, target)}, cuts)
    a, b = (seen(view, base) for view, base in zip(views, bases, strict=True))
    np.testing.assert_array_equal(got, 10 * a + b)


def test_an_empty_range_touches_nothing() -> None:
    empty = View.dense((3, 0))
    attrs = {"views": (empty, empty, empty)}
    run_ranges("test_digits_2", [np.zeros((3, 0), np.int64)] * 2, Spec("int64", (3, 0)), attrs, [0])
    row = View.dense((4,))
    attrs = {"views": (row, row, row)}
    for cuts in ([0, 2, 2, 4], [4, 4]):
        got = run_ranges("test_digits_2", [np.arange(4)] * 2, Spec("int64", (4,)), attrs, cuts)
        assert got.tolist() == [0, 11, 22, 33]


def test_a_reduce_and_a_fill_compute_ranges() -> None:
    inputs = [np.full(7, i + 1) for i in range(3)]
    assert run_ranges("test_fold", inputs, Spec("int64", (7,)), {}, [0, 2, 3, 7]).tolist() == [123] * 7
    attrs = {"views": (), "words": (5,)}
    assert run_ranges("test_pieces", [], Spec("int64", (7,)), attrs, [1, 5, 7]).tolist() == [5] * 7


def test_an_array_kernel_is_told_its_range_and_has_local_memory() -> None:
    x = np.arange(12).reshape(4, 3)
    for cuts in ([4], [1, 1, 3, 4]):
        got = run_ranges("test_rows", [x], Spec("int64", (4,)), {}, cuts)
        assert got.tolist() == [5, 50, 149, 302]
    (got,) = run_kernel("test_rows", [x], [Spec("int64", (4,))], {})
    assert got.tolist() == [5, 50, 149, 302]


def test_a_kernel_that_takes_no_range_has_one_unit_whatever_its_layout_says() -> None:
    attrs = {"views": (View.dense((4,)), View.dense((2,))), "words": (1, 0.5, 2)}
    outputs = [Spec("int64", (4,)), Spec("float64", (2,))]
    (step,) = apply_kernel("test_words", [], outputs, attrs).steps
    assert step.units == 1
