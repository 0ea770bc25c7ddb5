"""Tensors of floats of 16 bits: stored so, computed with in float32, and rounded by every op.

NumPy and ml_dtypes are the judges: of casts over all bits, and of each op's result, which is that of float32 rounded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_examples import EXAMPLES, Example

import flowrt as fr
from flowrt.base.spec import is_half
from flowrt.kernels.launch import RUN_WORDS
from flowrt.passes.widen import wide_attributes
from flowrt.session.eager import evaluate

Array = np.ndarray[Any, Any]

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
ALL = np.arange(1 << 16, dtype=np.uint16)
MADE_BY_PASSES = ("with_epilogue", "fused")  # of nodes that are computed in float32 by then
OF_FLOAT32 = ("narrow_bfloat16", "narrow_float16")  # whose results are bits, as numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # of NumPy's own casts
]
SLACK = {"bfloat16": 2.0**-4, "float16": 2.0**-7}  # what some roundings come to, of the largest
both = pytest.mark.parametrize("half", HALVES)


def assert_same(found: Any, wanted: Any) -> None:
    """To the bit, but for which NaN it is."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if found.dtype.kind in "fV":
        gone = np.isnan(found.astype(np.float64))
        assert (gone == np.isnan(wanted.astype(np.float64))).all()
        found, wanted = (np.where(gone, 0, a.view(f"u{a.itemsize}")) for a in (found, wanted))
    np.testing.assert_array_equal(found, wanted)


def about(dtype: Any) -> Array:
    """All that the dtype holds, what lies halfway between neighbours, just beside that, and beyond all."""
    held = ALL.view(dtype).astype(np.float32)
    ordered = np.sort(held[np.isfinite(held)]).astype(np.float64)
    halfway = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(halfway, np.float32(side)) for side in (np.inf, -np.inf)]
    return np.concatenate([held, halfway, *beside, np.float32([65519.99, 65520, 3.4e38, -3.4e38, 1e-45, 2.0**-25])])


# ── casts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_all_bits_are_read_as_what_they_stand_for(half: str) -> None:
    held = ALL.view(HALVES[half])
    for dtype in ("float32", "float64"):
        assert_same(fr.astype(held, dtype), held.astype(dtype))
    finite = held[np.isfinite(held) & (np.abs(held.astype(np.float32)) < 2**31)]
    assert_same(fr.astype(finite, "int64"), finite.astype(np.float32).astype(np.int64))
    assert_same(fr.astype(held, "bool"), held.astype(np.float32) != 0)


@both
def test_float32_is_rounded_to_the_nearest_of_two_to_the_even_one(half: str) -> None:
    x = about(HALVES[half])
    assert_same(fr.astype(x, half), x.astype(HALVES[half]))


@both
def test_float64_and_integers_are_rounded_as_numpy_does(half: str) -> None:
    x = about(HALVES[half]).astype(np.float64)
    beside = x[np.isfinite(x)] * (1 + 2.0**-40)  # a float32 does not tell it from what it is beside
    assert_same(fr.astype(np.concatenate([x, beside]), half), np.concatenate([x, beside]).astype(HALVES[half]))
    numbers = np.array([0, 1, -1, 255, 256, 257, 2049, 65519, 65520, 2**31, 2**24 + 2**16 + 1, -(2**40)])
    assert_same(fr.astype(numbers, half), numbers.astype(HALVES[half]))
    other = next(name for name in HALVES if name != half)
    assert_same(
        fr.astype(ALL.view(HALVES[half]), other), ALL.view(HALVES[half]).astype("float32").astype(HALVES[other])
    )


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PROMOTED = [
    ("bfloat16", "float16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float64", "float64"),
    ("float16", "float32", "float32"),
    *((half, other, half) for half in HALVES for other in (half, "bool", "int8", "uint8")),
    *((half, other, "float32") for half in HALVES for other in ("int16", "uint16")),
    *((half, other, "float64") for half in HALVES for other in ("int32", "int64", "uint64")),
]


@pytest.mark.parametrize(("one", "other", "wanted"), PROMOTED)
def test_dtypes_are_promoted_by_numpys_rules_where_bfloat16_is_as_float16(one: str, other: str, wanted: str) -> None:
    with fr.Graph():
        x, y = fr.placeholder(one, (2,)), fr.placeholder(other, (2,))
        assert fr.add(x, y).dtype == fr.add(y, x).dtype == fr.Spec(wanted).dtype
    if "bfloat16" not in (one, other):
        assert np.result_type(np.dtype(one), np.dtype(other)) == wanted


@both
def test_numbers_beside_them_are_weak_and_must_fit(half: str) -> None:
    x = np.ones(3, HALVES[half])
    for number in (2, 0.5, True, np.float64(2), np.int64(3), [1, 2, 3]):
        assert (fr.add(x, number)).dtype == HALVES[half]
    assert_same(fr.multiply(x, 0.1), np.full(3, 0.1, HALVES[half]))
    most = {"bfloat16": 3.3895e38, "float16": 65504.0}[half]
    assert np.isfinite(fr.multiply(x, most)).all()
    assert np.isinf(fr.multiply(x, float("inf"))).all()
    for number in (3.4e38, [1.0, 1.0, 1e39]):
        with pytest.raises(fr.SpecError, match=f"does not fit {half}, which holds numbers up to"):
            fr.multiply(x, number)
    assert (fr.less(x, 1e39)).all()  # compared with, it is what it is


@both
async def test_feeds_are_arrays_of_the_dtype_or_plain_numbers(half: str) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(half, (2,))
        y = -x
    async with fr.Session(graph) as session:
        assert_same(await session.run(y, {x: np.array([1.5, -2], HALVES[half])}), np.array([-1.5, 2], HALVES[half]))
        assert_same(await session.run(y, {x: [0.1, 3]}), -np.array([0.1, 3], HALVES[half]))
        with pytest.raises(fr.FeedError, match=rf"convert it with .astype\('{half}'\)"):
            await session.run(y, {x: np.ones(2, "float32")})
        with pytest.raises(fr.FeedError, match=f"1e\\+39 does not fit {half}"):
            await session.run(y, {x: [1, 1e39]})


def test_bfloat16_is_ml_dtypes_own_which_is_imported_with_the_first_of_them() -> None:
    assert fr.bfloat16 is ml_dtypes.bfloat16
    assert fr.Spec(fr.bfloat16, (2,)) == fr.Spec("bfloat16", (2,)) == fr.Spec(np.dtype(fr.bfloat16), (2,))
    code = (
        "import sys, flowrt as fr; assert 'ml_dtypes' not in sys.modules; fr.bfloat16; assert sys.modules['ml_dtypes']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ── ops ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown() -> Iterator[Example]:
    """The first example of each op that takes float32."""
    seen: set[str] = set()
    for example in EXAMPLES:
        floats = any(a.dtype == np.float32 for a in example.arrays)
        if floats and example.reference is not None and example.op not in (*seen, *MADE_BY_PASSES, "loop"):
            seen.add(example.op)
            yield example


def in_float32_and_rounded(
    graph: fr.Graph, feeds: Mapping[fr.Tensor, Array], fetches: Sequence[fr.Tensor]
) -> list[Any]:
    """The graph's nodes one by one, each computed in float32 between casts of NumPy's."""
    values = dict(feeds)
    for node in graph.nodes:
        if any(output in values for output in node.outputs):
            continue
        wide = [a.astype("float32") if is_half(a.dtype) else a for a in (values[t] for t in node.inputs)]
        words = np.zeros(RUN_WORDS, np.int64)
        made = evaluate(node.op, wide, wide_attributes(node.op, node.attrs), words)
        values |= {t: a.astype(t.dtype) for t, a in zip(node.outputs, made, strict=True)}
    return [values[t] for t in fetches]


@both
def test_of_all_ops_that_take_float32_two_want_no_other(half: str) -> None:
    refused = {}
    for example in shown():
        with fr.Graph():
            try:
                example.run(*(fr.placeholder(as_half(a, half).dtype, a.shape) for a in example.arrays))
            except fr.SpecError as error:
                refused[example.op] = str(error)
    assert sorted(refused) == sorted(OF_FLOAT32)
    assert all("floats of 16 bits are made of float32" in text for text in refused.values())


def as_half(array: Array, half: str) -> Array:
    return array.astype(HALVES[half]) if array.dtype == np.float32 else array


WAYS = {
    "machine": fr.Options(optimize=False, tapes=False, threads=1),
    "tape": fr.Options(optimize=False, threads=1),
    "optimized": fr.Options(threads=1),
}


@both
@pytest.mark.timeout(300)  # where nothing is compiled yet
async def test_every_op_answers_what_it_does_in_float32_rounded_however_it_is_run(half: str) -> None:
    examples = [(e, [as_half(a, half) for a in e.arrays]) for e in shown() if e.op not in OF_FLOAT32]
    feeds: dict[fr.Tensor, Array] = {}
    fetches: list[fr.Tensor] = []
    with fr.Graph() as graph:
        for example, arrays in examples:
            inputs = [fr.placeholder(a.dtype, a.shape) for a in arrays]
            feeds |= zip(inputs, arrays, strict=True)
            fetches += as_tuple(example.run(*inputs))
    wanted = in_float32_and_rounded(graph, feeds, fetches)
    assert len(wanted) > 130
    at_once = [found for example, arrays in examples for found in as_tuple(example.run(*arrays))]
    for found, judge in zip(at_once, wanted, strict=True):
        assert_same(found, judge)
    for options in WAYS.values():
        async with fr.Session(graph, options=options) as session:
            for found, judge in zip(await session.run(fetches, feeds), wanted, strict=True):
                assert_same(found, judge)


def as_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


@both
async def test_what_but_moves_entries_moves_their_bits(half: str) -> None:
    x = ALL[::16].view(HALVES[half]).reshape(64, 64)  # payloads of NaN among them
    with fr.Graph() as graph:
        a = fr.placeholder(half, (64, 64))
        moved = {
            "transpose": (fr.transpose(a), x.T),
            "concat": (fr.concat([a, a], 1), np.concatenate([x, x], 1)),
            "slice": (a[3:9, ::-2], x[3:9, ::-2]),
            "take": (fr.take(a, [5, 0, 5]), x[[5, 0, 5]]),
            "where": (fr.where(np.eye(64, dtype=bool), a, a[::-1]), np.where(np.eye(64, dtype=bool), x, x[::-1])),
            "tile": (fr.tile(a, (1, 2)), np.tile(x, (1, 2))),
            "pad": (fr.pad(a, 1, 1.5)[1:-1, 1:-1], x),
            "roll": (fr.roll(a, 3, 0), np.roll(x, 3, 0)),
        }
    async with fr.Session(graph) as session:
        for name, found in (await session.run({name: t for name, (t, _) in moved.items()}, {a: x})).items():
            assert found.view(np.uint16).tolist() == moved[name][1].view(np.uint16).tolist(), name


@both
async def test_a_fused_chain_is_rounded_after_each_op(half: str) -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(HALVES[half])
    with fr.Graph() as graph:
        a = fr.placeholder(half, (None,))
        y = fr.sum(fr.tanh(a * 3 + 0.1) - a * a)
    wide = lambda v: v.astype(np.float32)  # noqa: E731
    once = lambda v: v.astype(HALVES[half])  # noqa: E731
    inner = once(wide(once(wide(x) * 3)) + wide(once(np.float32(0.1))))
    terms = once(wide(fr.tanh(inner)) - wide(once(wide(x) * wide(x))))
    async with fr.Session(graph) as session:
        assert_same(await session.run(y, {a: x}), once(np.float32(wide(terms).sum(dtype=np.float64))))


@both
async def test_gradients_are_of_the_dtype_and_near_those_of_float32(half: str) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=shape).astype(HALVES[half]) for shape in ((4, 5), (5, 3))]
    found = []
    for dtype in (half, "float32"):
        with fr.Graph() as graph:
            a, b = (fr.placeholder(dtype, array.shape) for array in arrays)
            slopes = fr.gradients(fr.mean(fr.square(fr.nn.softmax(a @ b))), [a, b])
            assert [slope.dtype for slope in slopes] == [a.dtype] * 2
        async with fr.Session(graph) as session:
            feeds = {t: array.astype(t.dtype) for t, array in zip((a, b), arrays, strict=True)}
            found.append([slope.astype("float32") for slope in await session.run(slopes, feeds)])
    for mine, judge in zip(*found, strict=True):
        np.testing.assert_allclose(mine, judge, atol=SLACK[half] * np.abs(judge).max())


@both
async def test_loops_branches_and_queues_carry_them(half: str) -> None:
    x = np.arange(12).astype(HALVES[half]).reshape(3, 4)
    with fr.Graph() as graph:
        a = fr.placeholder(half, (3, 4))
        queue = fr.FIFOQueue(2, [half], shapes=[(4,)])
        put, (taken,) = queue.enqueue([a[1]]), queue.dequeue()
        _, powers = fr.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 1.5), [np.int64(0), a[2]])
        chosen = fr.cond(a[0, 1] > 0.5, lambda: a[0] + 1, lambda: a[0])
        carried, seen = fr.scan(lambda carry, row: (carry + row, carry * 2), a[0], a[1:])
        slope = fr.gradients(fr.sum(carried * seen[1]), [a])[0]
    wanted = [np.array([27, 30.375, 33.75, 37.125]), np.arange(4) + 1, np.array([12, 15, 18, 21])]
    for options in (fr.Options(), fr.Options(optimize=False, tapes=False)):
        async with fr.Session(graph, options=options) as session:
            await session.run(put, {a: x})
            assert_same(await session.run(taken), x[1])
            found = await session.run([powers, chosen, carried, slope], {a: x})
            assert_same(found[0], np.array(wanted[0], "float32").astype(HALVES[half]))
            for mine, judge in zip(found[1:3], wanted[1:], strict=True):
                assert_same(mine, judge.astype(HALVES[half]))
            assert found[3].dtype == HALVES[half]


def test_what_has_no_kernel_in_float32_either_is_refused_at_its_line() -> None:
    with fr.Graph() as graph:
        y = fr.placeholder("bfloat16", (2,)) + 1
        made = unknown_to_kernels(y)
    says = r"unknown_to_kernels .*test_halves.py:\d+.* no kernel for \(bfloat16, bfloat16\)"
    with fr.BlockingSession(graph) as session, pytest.raises(fr.FlowrtError, match=says):
        session.run(made, {y.op.inputs[0]: [1, 2]})


@fr.op
def unknown_to_kernels(x: fr.Operand) -> fr.Result:
    """An op that nothing computes."""
    return x


@fr.op
def entries_halved(x: fr.Operand) -> fr.Result:
    """Half of ``x``."""
    return x


@fr.kernel("entries_halved", on="cpu")
def halve_entries(x: Any, y: Any) -> None:
    for i in range(x.size):
        y.reshape(-1)[i] = x.reshape(-1)[i] * 0.5


@both
def test_a_programs_own_kernel_is_given_float32(half: str) -> None:
    x = np.array([[1, 3], [5, 0.1]], HALVES[half])
    assert_same(entries_halved(x), (x.astype("float32") * np.float32(0.5)).astype(HALVES[half]))


# ── what they do not hold ────────────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize("declared", [70_000, None])
async def test_slopes_are_shared_by_more_entries_than_they_count(half: str, declared: int | None) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(half, (declared,))
        slopes = [fr.gradients(y, [x])[0] for y in (fr.mean(x), fr.max(x), fr.nn.moments(x)[0])]
    async with fr.Session(graph) as session:
        for slope in await session.run(slopes, {x: np.ones(70_000, HALVES[half])}):
            assert_same(slope, np.full(70_000, np.float32(1 / 70_000)).astype(HALVES[half]))


@both
def test_what_several_ops_come_to_in_between_is_of_float32(half: str) -> None:
    x = np.array([[300, -300, 600, 0], [7, 7, 7, 7]], HALVES[half])
    ones = np.zeros(70_000, HALVES[half])
    for answer in (
        lambda x, ones: fr.nn.layer_norm(x, epsilon=1e-12),
        lambda x, ones: fr.nn.batch_norm(x, axis=(0,), epsilon=1e-12)[0],
        lambda x, ones: fr.norm(x),
        lambda x, ones: fr.std(x, axis=1),
        lambda x, ones: fr.var(x, axis=1),
        lambda x, ones: fr.logsumexp(ones),
    ):
        assert_same(answer(x, ones), answer(x.astype("float32"), ones.astype("float32")).astype(HALVES[half]))
    assert fr.nn.layer_norm(x, np.ones(4, "float32")).dtype == "float32"


@both
async def test_gradients_are_clipped_by_a_norm_that_they_do_not_hold(half: str) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(half, (4,))
        (clipped,), norm = fr.optim.clip_by_global_norm([x], 1.0)
    async with fr.Session(graph) as session:
        found, whole = await session.run([clipped, norm], {x: np.full(4, 200, HALVES[half])})
    assert whole == 400
    assert_same(found, np.full(4, 0.5, HALVES[half]))


@both
def test_random_numbers_are_never_the_limit_that_is_left_out(half: str) -> None:
    wide = fr.random.uniform((1 << 16,), -1.0, 3.0, seed=3)
    found = fr.random.uniform((1 << 16,), -1.0, 3.0, half, seed=3)
    rounded = wide.astype(HALVES[half])
    reached = rounded == 3
    assert reached.any()
    assert_same(found[~reached], rounded[~reached])
    assert (found[reached].astype("float32") < 3).all()
    assert (fr.random.uniform((4,), 2.0, 2.0, half, seed=3) == 2).all()


H, X = np.full(4, 1.1, np.float16), np.array([[1, 2, 3, 5], [3, 2, 6, 0]], np.float16)
normed, batched = fr.nn.layer_norm, fr.nn.batch_norm


@pytest.mark.parametrize(
    ("answer", "dtypes"),
    [
        (lambda: normed(X, epsilon=np.float32(1e-5)), ["float16"]),
        (lambda: normed(X, epsilon=np.array(1e-5, "float32")), ["float32"]),
        (lambda: normed(X, np.float64(2)), ["float16"]),
        (lambda: fr.norm(X, np.float32(np.inf), 0), ["float16"]),
        (lambda: normed(X.astype("int64"), H), ["float64"]),
        (lambda: normed(X.astype("int8"), H, H), ["float64"]),
        (lambda: normed(X, np.arange(4)), ["float64"]),
        (lambda: normed([[1, 2, 3, 4]], H), ["float16"]),
        (lambda: batched(X, H.astype("float32"), axis=(0,)), ["float32", "float16", "float16"]),
        (lambda: batched(X.astype("int64"), H, axis=(0,)), ["float64"] * 3),
        (lambda: batched(X.astype("float32"), H, axis=(0,)), ["float32"] * 3),
    ],
)
def test_what_is_rounded_once_is_of_the_dtype_its_ops_come_to(answer: Any, dtypes: list[str]) -> None:
    found = answer()
    assert [y.dtype for y in (found if isinstance(found, tuple) else (found,))] == dtypes


def test_numbers_of_16_bits_in_lists_are_rounded_once() -> None:
    assert_same(fr.norm([np.float16(300), np.float16(400)]), np.float16(500))


class Foreign:
    """An array of another library, with a dtype of its own."""

    dtype = "other.float32"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return X.astype("float32")


@pytest.mark.parametrize("function", [fr.norm, fr.var, fr.std, fr.logsumexp, normed, batched])
def test_arrays_of_other_libraries_are_taken_where_answers_are_rounded_once(function: Any) -> None:
    about = {"axis": (0,)} if function is batched else {}
    found, expected = function(Foreign(), **about), function(X.astype("float32"), **about)
    assert_same(*(y[0] if isinstance(y, tuple) else y for y in (found, expected)))


@pytest.mark.parametrize(
    ("called", "what"),
    [
        (lambda: fr.norm(np.ma.array(X, mask=X > 4)), "norm"),
        (lambda: normed(np.ma.array(X, mask=X > 4)), "layer_norm"),
        (lambda: normed(X, np.ones(4, ml_dtypes.float8_e4m3fn)), "layer_norm"),
    ],
)
def test_what_is_no_tensor_is_told_with_the_op_and_the_line(called: Any, what: str) -> None:
    with pytest.raises(fr.SpecError, match=rf"^{what} \(.*test_halves.py:\d+\): "):
        called()


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([np.array([3, 4])], [np.array([0.6, 0.8])]),
        ([[3, 4]], [np.array([0.6, 0.8])]),
        ([np.array([3.0]), np.array([4], "float32")], [np.array([0.6]), np.array([0.8])]),
        (
            [np.array([3], "float16"), np.array([4], "float32")],
            [np.array([0.6], "float16"), np.array([0.8], "float32")],
        ),
    ],
)
def test_clipped_gradients_of_16_bits_alone_keep_their_dtype(gradients: Any, expected: Any) -> None:
    for found, each in zip(fr.optim.clip_by_global_norm(gradients, 1.0)[0], expected, strict=True):
        assert found.dtype == each.dtype
        np.testing.assert_allclose(found, each, rtol=1e-3)


def test_random_numbers_reach_a_limit_that_is_rounded_down_and_none_is_beyond_their_dtype() -> None:
    assert fr.random.uniform((1 << 14,), 1.0, 1.0001, "float16", seed=1).max() == 1
    assert fr.random.uniform((1 << 14,), 0.0, 1.0004, "float16", seed=1).max() == 1
    assert fr.random.uniform((1 << 16,), 65_000.0, 65_510.0, "float16", seed=1).max() == 65_504
    with pytest.raises(fr.SpecError, match=r"uniform \(.*test_halves.py:\d+\): 70000.0 does not fit float16"):
        fr.random.uniform((4,), 0.0, 70_000.0, "float16")
