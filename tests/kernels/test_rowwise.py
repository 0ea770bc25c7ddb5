"""Groups that read again what they fold along rows: what joins them, and that they answer what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kernel_world import compile_here
from test_fuse import ops, plan_of

import flowrt as fr
from flowrt.base.spec import spec_of
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.table import Form
from flowrt.kernels.language.variants import entry_address
from flowrt.kernels.launch import RUN_WORDS, Application, Prepared, apply_kernel
from flowrt.ops.fused import infer_members
from flowrt.session.session import Options

if TYPE_CHECKING:
    from flowrt.base.plan import Plan

Array = np.ndarray[Any, Any]
F4 = "float32"


@pytest.fixture(autouse=True)
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small programs are compiled as soon as they are ordered, by this process: the helper takes its time."""

    compile_here(monkeypatch)


# ── the functions, as their users write them ─────────────────────────────────────────────────────────────────────────


def softmax(x: Any) -> Any:
    e = fr.exp(x - fr.max(x, -1, keepdims=True))
    return e / fr.sum(e, -1, keepdims=True)


def log_softmax(x: Any) -> Any:
    z = x - fr.stop_gradient(fr.max(x, -1, keepdims=True))
    return z - fr.log(fr.sum(fr.exp(z), -1, keepdims=True))


def normalised(x: Any, scale: Any, offset: Any) -> Any:
    c = x - fr.mean(x, -1, keepdims=True)
    return c * fr.rsqrt(fr.mean(fr.square(c), -1, keepdims=True) + 1e-5) * scale + offset


def cosine(x: Any, y: Any) -> Any:
    return fr.sum(x * y, -1) / (fr.sqrt(fr.sum(x * x, -1)) * fr.sqrt(fr.sum(y * y, -1)))


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "softmax": (softmax, lambda x: np_softmax(x), ((3, 4, 20),)),
    "log_softmax": (log_softmax, lambda x: np.log(np_softmax(x)), ((9, 33),)),
    "logsumexp": (lambda x: fr.logsumexp(x, -1), lambda x: np.log(np.sum(np.exp(x), -1)), ((9, 33),)),
    "variance": (lambda x: fr.var(x, -1), lambda x: np.var(x, -1), ((9, 33),)),
    "layer_norm": (normalised, lambda x, s, o: np_norm(x) * s + o, ((9, 33), (33,), (33,))),
    "built-in layer_norm": (
        lambda x, s, o: fr.nn.layer_norm(x, s, o, axis=(-2, -1)),
        lambda x, s, o: np_norm(x, (-2, -1)) * s + o,
        ((9, 5, 7), (5, 7), (5, 7)),
    ),
    "rms_norm": (
        lambda x, s: x * fr.rsqrt(fr.mean(x * x, -1, keepdims=True) + 1e-6) * s,
        lambda x, s: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * s,
        ((9, 33), (33,)),
    ),
    "cross_entropy": (
        lambda x, t: -fr.sum(t * log_softmax(x), -1),
        lambda x, t: -np.sum(t * np.log(np_softmax(x)), -1),
        ((9, 33), (9, 33)),
    ),
    "normalised length": (
        lambda x: x / fr.sqrt(fr.sum(x * x, -1, keepdims=True)),
        lambda x: x / np.sqrt(np.sum(x * x, -1, keepdims=True)),
        ((9, 33),),
    ),
    "cosine": (
        cosine,
        lambda x, y: np.sum(x * y, -1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)),
        ((9, 33), (9, 33)),
    ),
    "attention": (
        lambda s, m: softmax(s * 0.25 + m),
        lambda s, m: np_softmax(s * 0.25 + m),
        ((2, 3, 16, 16), (16, 16)),
    ),
}


def np_softmax(x: Array) -> Array:
    e = np.exp(x - np.max(x, -1, keepdims=True))
    return np.asarray(e / np.sum(e, -1, keepdims=True))


def np_norm(x: Array, axis: Any = -1) -> Array:
    c = x - np.mean(x, axis, keepdims=True)
    return np.asarray(c / np.sqrt(np.mean(c * c, axis, keepdims=True) + 1e-5))


def fused_alone(plan: Plan) -> bool:
    """Whether all that is computed is in one node."""
    free = {"constant", "reshape", "expand_dims", "squeeze"}
    return [node.op for node in plan.nodes if node.op not in free] == ["fused"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_rows_is_one_node_and_so_is_its_gradient(name: str) -> None:
    function, _, shapes = FUNCTIONS[name]
    assert fused_alone(plan_of(function, *shapes))

    def slopes(*given: Any) -> Any:
        y = function(*given)
        return [y, *(g for g in fr.gradients(y, list(given), y * y) if g is not None)]

    assert fused_alone(plan_of(slopes, *shapes)), ops(plan_of(slopes, *shapes))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_rows_answers_as_numpy_and_slopes_as_differences(name: str) -> None:
    function, judge, shapes = FUNCTIONS[name]
    rng = np.random.default_rng(len(name))
    values = [rng.normal(size=shape) for shape in shapes]
    with fr.Graph() as graph:
        feeds = [fr.placeholder("float64", shape) for shape in shapes]
        y = function(*feeds)
        weights = rng.normal(size=y.spec.concrete)
        slopes = fr.gradients(fr.sum(y * weights), feeds)
    shown = [(feed, value, g) for feed, value, g in zip(feeds, values, slopes, strict=True) if g is not None]
    with fr.BlockingSession(graph, options=Options(threads=2)) as session:
        step = session.compile([y, *(g for _, _, g in shown)], feeds)
        apart = [np.array(a) for a in step(*values)]
        together = [np.array(a) for a in [step(*values) for _ in range(3)][-1]]
    for found in (apart, together):
        np.testing.assert_allclose(found[0], judge(*values), rtol=1e-10, atol=1e-12)
    moved = [at for at, g in enumerate(slopes) if g is not None]
    for feed, slope in zip(moved, together[1:], strict=True):
        direction = rng.normal(size=shapes[feed])
        ahead, behind = (
            np.sum(judge(*values[:feed], values[feed] + by * direction, *values[feed + 1 :]) * weights)
            for by in (1e-6, -1e-6)
        )
        assert (ahead - behind) / 2e-6 == pytest.approx(np.sum(slope * direction), rel=1e-5, abs=1e-7)


# ── what joins ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_several_shapes_of_what_is_one_for_each_row_are_members() -> None:
    def build(x: Any) -> Any:
        length = fr.sqrt(fr.sum(x * x, 1))
        return x / fr.expand_dims(length, 1) + fr.reshape(fr.max(x, 1), (-1, 1))

    assert fused_alone(plan_of(build, (None, 30)))


def test_what_is_repeated_may_be_repeated_again() -> None:
    def build(x: Any) -> Any:
        row = fr.broadcast_to(fr.sum(x * x, 1, keepdims=True), (9, 1))
        return x * fr.broadcast_to(row, (9, 30)) + row

    assert fused_alone(plan_of(build, (9, 30)))
    x = np.random.default_rng(0).normal(size=(9, 30))
    with fr.Graph() as graph:
        feed = fr.placeholder("float64", x.shape)
        y = build(feed)
    with fr.BlockingSession(graph) as session:
        step = session.compile([y], [feed])
        apart = np.array(step(x)[0])
        together = [np.array(step(x)[0]) for _ in range(3)][-1]
    judge = (x + 1) * np.sum(x * x, 1, keepdims=True)
    np.testing.assert_allclose(apart, judge, rtol=1e-12)
    np.testing.assert_allclose(together, judge, rtol=1e-12)


def test_sizes_only_a_step_knows_do_not_matter() -> None:
    assert fused_alone(plan_of(softmax, (None, None)))


def test_what_is_reduced_over_other_axes_is_not_read_again() -> None:
    def build(x: Any) -> Any:
        return x * 2.0 - fr.sum(x * 2.0, 0, keepdims=True)

    assert len(ops(plan_of(build, (40, 30)))) == 2
    both = plan_of(lambda x: x - fr.max(x, 1, keepdims=True) - fr.max(x, (0, 1), keepdims=True), (40, 30))
    assert len(ops(both)) == 2


def test_rows_of_two_kinds_stay_apart() -> None:
    def build(x: Any) -> Any:
        y = x - fr.max(x, 2, keepdims=True)
        return y / fr.sum(y, (1, 2), keepdims=True)

    found = ops(plan_of(build, (4, 5, 6)))
    assert len(found) == 2
    assert "max" in found[0]


def test_a_number_for_each_row_is_no_row() -> None:
    """Of a square, the sums of rows have the shape of a row, along which NumPy repeats them."""
    plan = plan_of(lambda x: x * 2.0 + fr.sum(x * 2.0, 1), (30, 30))
    assert len(ops(plan)) == 2


def test_what_comes_back_through_another_node_does_not_close_a_circle() -> None:
    def build(x: Any) -> Any:
        top = fr.max(x, 1, keepdims=True)
        return (x - top) * fr.matmul(fr.exp(x - top), x)

    assert ops(plan_of(build, (30, 30))) == [["max", "subtract", "exp"], ["matmul", "multiply"]]


# ── one launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

ALONG = (("axis", -1), ("keepdims", True))
SOFTMAX = (
    ("max", (0,), F4, ALONG),
    ("subtract", (0, 1), F4, ()),
    ("exp", (2,), F4, ()),
    ("sum", (3,), F4, ALONG),
    ("divide", (3, 4), F4, ()),
)


def applied(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    specs = infer_members([spec_of(a) for a in inputs], members)
    attrs = {"members": members, "results": tuple(results)}
    return apply_kernel("fused", specs[: len(inputs)], [specs[n] for n in results], attrs)


def compiled(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    for order in applied(inputs, members, results).orders:
        for variant in ordered_variants(order.request):
            entry_address(variant)
    return applied(inputs, members, results)


def run(application: Application, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    prepared = Prepared(application, len(inputs) + len(outputs))
    scratch = [np.full(spec.concrete, 99, spec.dtype) for spec in prepared.scratch]
    words = np.zeros(RUN_WORDS, np.int64)
    prepared.run(words.ctypes.data, [a.ctypes.data for a in (*inputs, *outputs, *scratch)])
    return list(outputs)


@pytest.mark.parametrize("shape", [(9, 64), (80, 70), (2, 5, 99), (1, 513), (3, 1100), (12, 0, 70), (0, 70)])
def test_softmax_is_one_launch_that_takes_nothing_but_a_row_of_memory(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(F4)
    application = compiled([x], SOFTMAX, [5])
    assert [step.kernel.form for step in application.steps] == [Form.ROWS]
    assert [spec.concrete for spec in application.local] == [shape[-1:]]
    (found,) = run(application, [x], [np.empty_like(x)])
    np.testing.assert_allclose(found, np_softmax(x) if x.size else x, rtol=2e-6)


def test_an_output_may_lie_where_the_input_did() -> None:
    x = np.random.default_rng(0).normal(size=(9, 700)).astype(F4)
    judge = np_softmax(x)
    (found,) = run(compiled([x], SOFTMAX, [5]), [x], [x])
    np.testing.assert_allclose(found, judge, rtol=2e-6)


def test_rows_that_hold_nan_or_infinities_answer_as_numpys() -> None:
    x = np.random.default_rng(0).normal(size=(9, 75)).astype(F4)
    x[1, 5], x[2, 74], x[3, 0], x[4] = np.nan, np.inf, -np.inf, -np.inf
    (found,) = run(compiled([x], SOFTMAX, [5]), [x], [np.empty_like(x)])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found, np_softmax(x), rtol=2e-6)


def test_rows_of_one_entry_are_rows() -> None:
    x = np.random.default_rng(0).normal(size=(7, 1)).astype(F4)
    (found,) = run(compiled([x], SOFTMAX, [5]), [x], [np.empty_like(x)])
    np.testing.assert_array_equal(found, np.ones_like(x))


@pytest.mark.parametrize("shape", [(2, 1 << 16), (700, 12)], ids=["few long rows", "short rows"])
def test_rows_that_threads_cannot_share_or_vectors_not_fill_are_left_to_launches_between_folds(
    shape: tuple[int, int],
) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(F4)
    application = compiled([x], SOFTMAX, [5])
    assert all(step.kernel.form is not Form.ROWS for step in application.steps)
    (found,) = run(application, [x], [np.empty_like(x)])
    np.testing.assert_allclose(found, np_softmax(x), rtol=2e-6)


def test_what_is_repeated_along_few_long_rows_may_be_a_result() -> None:
    x = np.random.default_rng(0).normal(size=(2, 100_000)).astype(F4)
    with fr.Graph() as graph:
        fed = fr.placeholder(F4, x.shape)
        total = fr.sum(fed, -1, keepdims=True)
        made = [fr.broadcast_to(total, x.shape), fed * total]
    with fr.BlockingSession(graph) as session:
        repeated, product = session.run(made, {fed: x})
    judge = x.sum(-1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(repeated, np.broadcast_to(judge, x.shape), rtol=1e-4)
    np.testing.assert_allclose(product, x * judge, rtol=1e-4)


def test_rows_without_entries_have_results_beside_totals() -> None:
    members = (
        ("sum", (0,), F4, ALONG),
        ("exp", (1,), F4, ()),
        ("multiply", (0, 2), F4, ()),
        ("sum", (3,), F4, (("axis", 0), ("keepdims", False))),
    )
    for shape in ((40, 50), (3, 0)):
        x = np.zeros(shape, F4)
        rows, totals = run(
            compiled([x], members, [2, 4]), [x], [np.full((shape[0], 1), 9, F4), np.full(shape[1], 9, F4)]
        )
        np.testing.assert_array_equal(rows, np.ones((shape[0], 1)))
        np.testing.assert_array_equal(totals, np.zeros(shape[1]))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_columns_are_totalled_beside_rows(dtype: str) -> None:
    mean = "float64" if dtype == "int64" else dtype
    members = (
        ("max", (0,), dtype, ALONG),
        ("subtract", (0, 1), dtype, ()),
        ("sum", (2,), dtype, (("axis", (0,)), ("keepdims", False))),
        ("max", (2,), dtype, (("axis", (0, 1)), ("keepdims", True))),
        ("mean", (2,), mean, (("axis", (0, 1)), ("keepdims", False))),
        ("sum", (0,), dtype, (("axis", (1,)), ("keepdims", True))),
    )
    for shape in ((70, 3, 40), (1, 17, 9), (300, 1, 520), (5, 40, 1000), (3, 9, 1)):
        x = (100 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
        wide = (x - x.max(-1, keepdims=True)).astype(np.float64)
        judges = [wide, wide.sum(0), wide.max((0, 1), keepdims=True), wide.mean((0, 1)), x.sum(1, np.float64)[:, None]]
        application = compiled([x], members, [2, 3, 4, 5, 6])
        assert application.steps[0].kernel.form is Form.ROWS
        dtypes = [mean if n == 3 else dtype for n in range(5)]
        outputs = [np.empty(judge.shape, dtype) for judge, dtype in zip(judges, dtypes, strict=True)]
        for found, judge in zip(run(application, [x], outputs), judges, strict=True):
            np.testing.assert_allclose(found, judge, rtol=1e-6, atol=1e-3)


def test_integers_are_reduced_exactly() -> None:
    members = (
        ("max", (0,), "int64", ALONG),
        ("subtract", (0, 1), "int64", ()),
        ("sum", (2,), "int64", ALONG),
        ("add", (2, 3), "int64", ()),
        ("mean", (0,), "float64", ALONG),
        ("min", (4,), "int64", ALONG),
        ("add", (6, 1), "int64", ()),
    )
    x = np.random.default_rng(0).integers(-(2**40), 2**40, size=(9, 30))
    application = compiled([x], members, [4, 5, 7])
    assert [step.kernel.form for step in application.steps] == [Form.ROWS]
    outputs = [np.empty_like(x), np.empty((9, 1)), np.empty((9, 1), np.int64)]
    found = run(application, [x], outputs)
    less = x - x.max(1, keepdims=True)
    judge = less + less.sum(1, keepdims=True)
    np.testing.assert_array_equal(found[0], judge)
    np.testing.assert_allclose(found[1], x.mean(1, keepdims=True), rtol=1e-14)
    np.testing.assert_array_equal(found[2], judge.min(1, keepdims=True) + x.max(1, keepdims=True))


def test_sums_of_float32_are_as_good_as_adding_in_pairs() -> None:
    """The mean of large numbers is taken from them, and their differences are summed."""
    members = (
        ("mean", (0,), F4, ALONG),
        ("subtract", (0, 1), F4, ()),
        ("sum", (2,), F4, ALONG),
        ("add", (2, 3), F4, ()),
    )
    x = (np.random.default_rng(0).normal(size=(9, 40_000)) + 1e4).astype(F4)
    (mean,) = run(compiled([x], members, [1, 4]), [x], [np.empty((9, 1), F4), np.empty_like(x)])[:1]
    exact = x.astype(np.float64).mean(1, keepdims=True)
    assert np.abs(mean - exact).max() <= max(np.abs(x.mean(1, keepdims=True) - exact).max(), 5e-4)


def test_columns_of_many_rows_one_after_another_are_added_up_as_well_as_those_of_rows_in_turns() -> None:
    members = (
        ("max", (0,), F4, ALONG),
        ("subtract", (0, 1), F4, ()),
        ("sum", (2,), F4, (("axis", 1), ("keepdims", False))),
    )
    x = np.random.default_rng(0).normal(size=(200, 900, 20)).astype(F4)
    application = compiled([x], members, [3])
    assert application.steps[0].kernel.form is Form.ROWS
    (found,) = run(application, [x], [np.empty((200, 20), F4)])
    np.testing.assert_allclose(found, (x - x.max(-1, keepdims=True)).sum(1, dtype=np.float64), rtol=2e-7)


def test_columns_are_added_up_beside_rows_the_same_however_units_are_shared_out() -> None:
    members = (
        ("max", (0,), F4, ALONG),
        ("subtract", (0, 1), F4, ()),
        ("sum", (2,), F4, (("axis", 0), ("keepdims", False))),
        ("mean", (2,), F4, (("axis", None), ("keepdims", False))),
        ("square", (2,), F4, ()),
    )
    x = np.random.default_rng(0).normal(size=(300, 600)).astype(F4)
    application = compiled([x], members, [3, 4, 5])
    assert application.steps[0].kernel.form is Form.ROWS
    assert application.steps[0].units > 4
    outputs = [np.empty(600, F4), np.empty((), F4), np.empty_like(x)]
    found = run(application, [x], outputs)
    less = x - x.max(1, keepdims=True)
    np.testing.assert_allclose(found[0], less.sum(0, dtype=np.float64), rtol=2e-6)
    np.testing.assert_allclose(found[1], less.mean(dtype=np.float64), rtol=2e-6)
    np.testing.assert_allclose(found[2], less * less, rtol=2e-6)
