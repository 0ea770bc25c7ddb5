"""Fused programs: compiled as one launch or computed member by member, the answers are the same."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.spec import Spec, spec_of
from flowrt.kernels.fusion import chains, fused, short_rows
from flowrt.kernels.fusion.fused import ordered_variants
from flowrt.kernels.language.variants import entry_address
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Application, LaunchStep, Operand, Prepared, apply_kernel
from flowrt.ops.fused import infer_members

Array = np.ndarray[Any, Any]
F4, B1, I8 = "float32", "bool", "int64"

STEP = (  # Momentum's: velocity, gradient, parameter; momentum, rate
    ("multiply", (0, 3), F4, ()),
    ("add", (5, 1), F4, ()),
    ("multiply", (6, 4), F4, ()),
    ("subtract", (2, 7), F4, ()),
)


@pytest.fixture(autouse=True)
def small_ones_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORTH_BYTES", 0)


def apply(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    specs = infer_members([spec_of(a) for a in inputs], members)
    attrs = {"members": members, "results": tuple(results)}
    return apply_kernel("fused", specs[: len(inputs)], [specs[n] for n in results], attrs)


def compile_orders(application: Application) -> None:
    for order in application.orders:
        for variant in ordered_variants(order.request):
            entry_address(variant)


def compiled(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    """The application as one launch, compiled here and now; what would cut its rows short is copied first."""
    compile_orders(apply(inputs, members, results))
    made = apply(inputs, members, results)
    assert [step.kernel.op for step in made.steps if not step.kernel.op.startswith("copy")] == ["fused"]
    return made


def run(application: Application, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
    prepared = Prepared(application, len(inputs) + len(outputs))
    scratch = [np.empty(spec.concrete, spec.dtype) for spec in prepared.scratch]
    words = np.zeros(RUN_WORDS, np.int64)
    prepared.run(words.ctypes.data, [a.ctypes.data for a in (*inputs, *outputs, *scratch)])
    return list(outputs)


def member_by_member(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> list[Array]:
    """The judge: each member through its own kernel."""
    values = list(inputs)
    for op, operands, _, attrs in members:
        taken = [values[n] for n in operands]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mean of nothing is NaN
            values.append(np.asarray(getattr(fr.ops, op)(*taken, **dict(attrs))))
    return [values[n] for n in results]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (33, 5), (0, 5), (2, 3, 40)])
def test_one_launch_answers_what_the_members_do(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    inputs = [np.asarray(rng.normal(size=s), F4) for s in (shape, shape, shape, (), ())]
    step = compiled(inputs, STEP, (6, 8))
    found = run(step, inputs, [np.empty(shape, F4) for _ in range(2)])
    for mine, judge in zip(found, member_by_member(inputs, STEP, (6, 8)), strict=True):
        np.testing.assert_array_equal(mine, judge)


def test_results_may_lie_where_inputs_did() -> None:
    """Momentum in place: the velocity and the parameter are read and written once."""
    rng = np.random.default_rng(0)
    velocity, gradient, parameter = (rng.normal(size=1003).astype(F4) for _ in range(3))
    inputs = [velocity, gradient, parameter, np.asarray(0.9, F4), np.asarray(0.1, F4)]
    judge = member_by_member(inputs, STEP, (6, 8))
    found = run(compiled(inputs, STEP, (6, 8)), inputs, [velocity, parameter])
    assert found[0] is velocity
    for mine, other in zip(found, judge, strict=True):
        np.testing.assert_array_equal(mine, other)


MIXED = (
    ("less", (0, 1), B1, ()),
    ("astype", (2,), F4, (("dtype", F4),)),
    ("multiply", (4, 0), F4, ()),
    ("where", (3, 5, 1), F4, ()),
    ("isnan", (6,), B1, ()),
    ("logical_or", (3, 7), B1, ()),
)


@pytest.mark.parametrize("rows", [(6, 1), (5,), (6, 5)], ids=["column", "row", "dense"])
def test_dtypes_may_be_mixed_and_operands_repeat_along_rows_and_columns(rows: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x, n = rng.normal(size=(6, 5)).astype(F4), rng.integers(-4, 5, size=(6, 5)).astype(I8)
    y = rng.normal(size=rows).astype(F4)
    x.flat[::7], x.flat[1::7], y.flat[::3] = np.nan, np.inf, -0.0
    inputs = [x, y, n]
    found = run(compiled(inputs, MIXED, (6, 8)), inputs, [np.empty((6, 5), F4), np.empty((6, 5), bool)])
    for mine, judge in zip(found, member_by_member(inputs, MIXED, (6, 8)), strict=True):
        np.testing.assert_array_equal(mine, judge)


def test_sizes_do_not_decide_what_is_compiled() -> None:
    def symbols(*shapes: tuple[int, ...]) -> set[str]:
        inputs = [np.zeros(shape, F4) for shape in shapes]
        step = compiled([*inputs, np.zeros((), F4), np.zeros((), F4)], STEP, (6, 8)).steps[0]
        return {repr(step.variant().ranks)}

    assert symbols((3,), (3,), (3,)) == symbols((4, 90), (4, 90), (4, 90)) == symbols((9, 1, 2), (9, 1, 2), (9, 1, 2))
    assert symbols((4, 90), (90,), (4, 90)) == symbols((7, 70), (70,), (7, 70)) == symbols((3,), (3,), (3,))
    assert symbols((4, 90), (4, 1), (4, 90)) != symbols((3,), (3,), (3,))


def test_members_of_several_shapes_are_computed_one_by_one() -> None:
    """What inference took for one size may be two in a step."""
    members = (("exp", (0,), F4, ()), ("add", (2, 1), F4, ()))
    inputs = [np.ones((1, 3), F4), np.ones((4, 3), F4)]
    application = apply(inputs, members, (3,))
    assert len(application.steps) == 2
    assert application.orders == ()
    found = run(application, inputs, [np.empty((4, 3), F4)])
    np.testing.assert_allclose(found[0], np.exp(inputs[0]) + inputs[1], rtol=1e-6)


def test_what_small_parts_of_others_would_save_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them may be worth a compilation together."""
    monkeypatch.undo()
    members = (("exp", (0,), F4, ()), ("sqrt", (1,), F4, ()), ("tanh", (2,), F4, ()))
    program, x = {"members": members, "results": (3,)}, Spec(F4, (5, 10))
    (alone,) = apply([np.ones((5, 10), F4)], members, (3,)).wishes
    matmul = ("matmul", 2, (("transpose_a", False), ("transpose_b", False)))
    attrs = {"product": matmul, "epilogue": ("fused", tuple(program.items())), "taken": (-1,), "kept": False}
    after = apply_kernel("with_epilogue", [Spec(F4, (5, 4)), Spec(F4, (4, 10))], [x], attrs)
    assert after.wishes == (alone,)
    parts = fused.Assembly(1, 2)
    for output in (1, 2):
        parts.add(apply_kernel("fused", [x], [x], program), [0, output])
    assert parts.application().wishes == (alone, alone)


def test_what_is_small_is_not_worth_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    members = (("exp", (0,), F4, ()), ("sqrt", (1,), F4, ()), ("tanh", (2,), F4, ()))
    small = apply([np.ones(100, F4)], members, (3,))
    assert small.orders == ()
    assert len(small.wishes) == 1
    assert len(apply([np.ones(10_000, F4)], members, (3,)).orders) == 1


def test_what_is_answered_twice_or_as_it_came_is_copied() -> None:
    members = (("exp", (0,), F4, ()), ("tanh", (1,), F4, ()), ("exp", (2,), F4, ()), ("tanh", (3,), F4, ()))
    x = np.linspace(-1, 1, 9, dtype=F4)
    for results in ((4, 4, 0), (1, 1)):
        found = run(apply([x], members, results), [x], [np.empty(9, F4) for _ in results])
        for mine, judge in zip(found, member_by_member([x], members, results), strict=True):
            np.testing.assert_array_equal(mine, judge)


PARTS = (
    ("getitem", (0,), F4, (("key", ((None, None, None), (10, 40, None))),)),
    ("getitem", (0,), F4, (("key", ((None, None, None), (40, None, None))),)),
    ("multiply", (1, 2), F4, ()),
    ("add_n", (3, 1, 2, 3), F4, (("_many", 4),)),
)


def test_parts_are_read_where_they_lie() -> None:
    x = np.linspace(-1, 1, 420, dtype=F4).reshape(6, 70)
    application = compiled([x], PARTS, (4,))
    assert application.scratch == ()
    (found,) = run(application, [x], [np.empty((6, 30), F4)])
    a, b = x[:, 10:40], x[:, 40:]
    np.testing.assert_allclose(found, a * b + a + b + a * b, rtol=1e-6)


REPEATED = (
    ("spread", (0, 2), F4, (("axis", 1), ("keepdims", False))),
    ("broadcast_to", (1, 2), F4, ()),
    ("multiply", (3, 4), F4, ()),
    ("exp", (5,), F4, ()),
)


def test_what_is_repeated_is_read_where_it_lies() -> None:
    x, y, shape = np.linspace(-1, 1, 6, dtype=F4), np.linspace(0, 1, 70, dtype=F4), np.array([6, 70])
    application = compiled([x, y, shape], REPEATED, (6,))
    assert application.scratch == ()
    (found,) = run(application, [x, y, shape], [np.empty((6, 70), F4)])
    np.testing.assert_allclose(found, np.exp(x[:, None] * y), rtol=1e-6)


@pytest.mark.parametrize(("columns", "copies"), [(70, 0), (9, 2), (1, 0)])
def test_what_would_cut_rows_short_is_copied(columns: int, copies: int) -> None:
    """Both what is repeated along rows and what is repeated from row to row, but not one number for everything."""
    rng = np.random.default_rng(2)
    x, y = np.asarray(rng.normal(size=(40, 1)), F4), np.asarray(rng.normal(size=columns), F4)
    z, one = np.asarray(rng.normal(size=(40, columns)), F4), np.asarray(rng.normal(), F4)
    members = (("multiply", (0, 2), F4, ()), ("tanh", (4,), F4, ()), ("add", (5, 1), F4, ()), ("add", (6, 3), F4, ()))
    application = compiled([x, y, z, one], members, (7,))
    assert len(application.steps) == 1 + copies
    (found,) = run(application, [x, y, z, one], [np.empty((40, columns), F4)])
    np.testing.assert_allclose(found, np.tanh(x * z) + y + one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "copies"), [("square", 0), ("tanh", 1)])
def test_what_no_cache_holds_is_copied_only_beside_costly_ops(
    op: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_rows, "CACHED", 1 << 10)
    x, y = np.linspace(-1, 1, 360, dtype=F4).reshape(40, 9), np.linspace(0, 1, 9, dtype=F4)
    members = (("multiply", (0, 1), F4, ()), (op, (2,), F4, ()))
    application = compiled([x, y], members, (3,))
    assert len(application.steps) == 1 + copies
    assert len(application.scratch) == copies
    (found,) = run(application, [x, y], [np.empty_like(x)])
    np.testing.assert_allclose(found, getattr(np, op)(x * y), rtol=1e-6)


@pytest.mark.parametrize(("size", "cached", "launches"), [(5000, 1 << 22, 3), (5000, 1 << 14, 1), (900, 1 << 22, 1)])
def test_costly_ops_have_launches_of_their_own_where_what_one_leaves_to_another_stays_near(
    size: int, cached: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cheap is computed where it is wanted, and what leaves or was repeated may be wanted by several."""
    monkeypatch.setattr(chains, "CACHED", cached)
    x, y, shape = np.linspace(-2, 2, size, dtype=F4), np.array([0.5], F4), np.array([size])
    members = (
        ("broadcast_to", (1, 2), F4, ()),
        ("tanh", (0,), F4, ()),
        ("multiply", (4, 3), F4, ()),
        ("square", (0,), F4, ()),
        ("erf", (5,), F4, ()),
        ("subtract", (7, 6), F4, ()),
        ("exp", (8,), F4, ()),
        ("multiply", (9, 3), F4, ()),
    )
    inputs, results = [x, y, shape], (10, 4)
    compile_orders(apply(inputs, members, results))
    application = apply(inputs, members, results)
    assert len(application.steps) == launches
    found = run(application, inputs, [np.empty(size, F4) for _ in results])
    judges = member_by_member(inputs, members, results)
    for mine, judge in zip(found, judges, strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axes", "launches"),
    [
        ((50, 9, 3), ((0, 2),), ["fused", "sum"]),  # rows of three
        ((500, 3), ((0,), None), ["fused", "sum", "sum"]),  # columns beside everything
        (
            (500, 9),
            ((1,),),
            ["fused", "sum"],
        ),  # a number for each row costs little, and has totals as others do
        ((500, 3), ((0,),), ["fused", "sum"]),  # columns go side by side
    ],
    ids=str,
)
def test_folds_that_would_cut_rows_short_are_launches_of_their_own(
    shape: tuple[int, ...], axes: tuple[Any, ...], launches: list[str]
) -> None:
    x = np.asarray(np.random.default_rng(5).normal(size=shape), F4)
    reductions = [("sum", (2,), F4, (("axis", each), ("keepdims", False))) for each in axes]
    members = (("square", (0,), F4, ()), ("add", (1, 0), F4, ()), *reductions)
    results = tuple(range(3, 3 + len(reductions)))
    compile_orders(apply([x], members, results))
    application = apply([x], members, results)
    assert [step.kernel.op.partition("_at_once")[0] for step in application.steps] == launches
    judges = [np.asarray(np.sum(x * x + x, axis=each)) for each in axes]
    found = run(application, [x], [np.empty_like(judge) for judge in judges])
    for mine, judge in zip(found, judges, strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-5, atol=1e-4)


def test_a_part_of_one_column_is_copied() -> None:
    """Its entries lie apart, and compiled loops know only those that lie together or repeat."""
    key = (("key", ((None, None, None), (2, 3, None))),)
    members = (("getitem", (0,), F4, key), ("exp", (1,), F4, ()))
    x = np.linspace(-1, 1, 42, dtype=F4).reshape(6, 7)
    application = apply([x], members, (2,))
    assert application.orders == ()
    (found,) = run(application, [x], [np.empty((6, 1), F4)])
    np.testing.assert_allclose(found, np.exp(x[:, 2:3]), rtol=1e-6)


def test_scratch_of_a_dead_value_is_taken_again() -> None:
    members = tuple(("tanh", (n,), F4, ()) for n in range(10))
    assert len(apply([np.ones(4, F4)], members, (10,)).scratch) <= 2


REDUCED = (("greater", (0, 1), B1, ()), ("where", (3, 0, 2), F4, ()), ("square", (4,), F4, ()))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((40, 300), (0,)),
        ((40, 300), (1,)),
        ((700, 100), None),
        ((9, 50, 60), (0, 1)),
        ((9, 50, 60), (1,)),
        ((3, 1), (0,)),
        ((0, 5), (0,)),
        ((5, 0), (0,)),
        ((3, 1, 2, 1, 2, 1, 2, 60), (0,)),
        ((2, 1, 2, 1, 2, 1, 40, 3), (0, 2, 4, 6)),
    ],
    ids=str,
)
def test_sums_of_what_is_computed_are_those_of_the_members(shape: tuple[int, ...], axes: Any) -> None:
    rng = np.random.default_rng(3)
    inputs = [np.asarray(rng.normal(size=s), F4) for s in (shape, (), shape)]
    reduced = (("axis", axes), ("keepdims", False))
    members = (*REDUCED, ("sum", (5,), F4, reduced), ("mean", (4,), F4, (("axis", axes), ("keepdims", True))))
    results = (6, 4, 7)
    compile_orders(apply(inputs, members, results))
    specs = infer_members([spec_of(a) for a in inputs], members)
    apart = apply_one_by_one(inputs, members, results)
    together = apply(inputs, members, results)
    assert together.orders == ()
    for application in (apart, together):
        found = run(application, inputs, [np.empty(specs[n].concrete, F4) for n in results])
        for mine, judge in zip(found, member_by_member(inputs, members, results), strict=True):
            np.testing.assert_allclose(mine, judge, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [F4, "float64"])
def test_narrow_and_wide_blocks_of_angles_are_computed_and_reduced_alike(dtype: str) -> None:
    rng = np.random.default_rng(5)
    inputs = [np.asarray(rng.normal(size=s), dtype) for s in ((7, 2500), (7, 1))]
    inputs[0][1, 1300:1400] = inputs[0][4, 7] = inputs[0][6, -1] = 1e9
    reduced = (("axis", (1,)), ("keepdims", False))
    members = (("multiply", (0, 1), dtype, ()), ("sin", (2,), dtype, ()), ("sum", (3,), dtype, reduced))
    found = [np.empty((7, 2500), dtype), np.empty(7, dtype)]
    compile_orders(apply(inputs, members, (3, 4)))
    run(apply(inputs, members, (3, 4)), inputs, found)
    for mine, judge in zip(found, member_by_member(inputs, members, (3, 4)), strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(run(compiled(inputs, members, (3,)), inputs, [inputs[0]])[0], found[0])


def apply_one_by_one(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "is_compiled", lambda variant: False)
        return apply(inputs, members, results)


KINDS = {F4: ("sum", "mean", "max", "min", "prod", "any", "all"), "int32": ("sum", "max", "min", "any")}


@pytest.mark.parametrize(
    ("dtype", "shape", "axes", "costly"),
    [
        (F4, (40, 1100), (1,), True),
        (F4, (7001, 10), (0,), True),
        (F4, (70, 33), (0,), False),
        (F4, (3, 7, 40), (1,), True),
        (F4, (2000, 10), (1,), True),
        (F4, (2000, 10), (1,), False),
        (F4, (30, 10, 70), (0, 2), True),
        (F4, (3, 5, 40), None, True),
        (F4, (2, 0), None, True),
        ("int32", (70, 33), (0,), False),
    ],
    ids=str,
)
def test_folds_of_every_kind_are_those_of_the_members(
    dtype: str, shape: tuple[int, ...], axes: Any, costly: bool
) -> None:
    """Of rows long and short, of columns, of everything and of nothing; beside the values, and behind costly ones."""
    rng = np.random.default_rng(11)
    inputs = [rng.integers(-1, 3, size=shape).astype(dtype) for _ in range(2)]
    if dtype == F4 and shape[0] > 3:
        flat = inputs[0].reshape(shape[0], -1)
        flat[1, 2], flat[2, 1], flat[3, 1], inputs[1].reshape(shape[0], -1)[3, 1] = np.nan, np.inf, -np.inf, -np.inf
    kinds = [kind for kind in KINDS[dtype] if np.prod(shape) or kind not in ("max", "min")]
    how = (("axis", axes), ("keepdims", False))
    members: list[Any] = [("minimum", (0, 1), dtype, ())] + [("tanh", (2,), dtype, ())] * costly
    value = 1 + len(members)
    for kind in kinds:
        made = np.asarray(getattr(fr.ops, kind)(np.ones((1, 1), dtype))).dtype.name
        members.append((kind, (value,), made, how))
    results = tuple(range(value, 2 + len(members)))
    compile_orders(apply(inputs, members, results))
    together = apply(inputs, members, results)
    assert together.orders == ()
    specs = infer_members([spec_of(a) for a in inputs], members)
    found = run(together, inputs, [np.empty(specs[n].concrete, specs[n].dtype) for n in results])
    reduced = np.tanh(np.minimum(*inputs)) if costly else np.minimum(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judges = [reduced, *(getattr(np, kind)(reduced, axis=axes) for kind in kinds)]
    for kind, mine, judge in zip(("", *kinds), found, judges, strict=True):
        np.testing.assert_allclose(mine, judge, rtol=1e-5, atol=1e-5, err_msg=kind)


def awkward(seed: int, count: int) -> Array:
    """Numbers of all sizes, which nearly cancel one another."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=count) * 10.0 ** rng.uniform(-6, 6, size=count)).astype(F4)
    values[1::2] = -values[::2][: count // 2] * (1 + rng.normal(size=count // 2) * 1e-4).astype(F4)
    return rng.permutation(values)


@pytest.mark.parametrize("many", [1, 9], ids=["beside", "behind"])
@pytest.mark.parametrize("count", [31, 1000, 4099, 300_000])
def test_sums_are_as_exact_as_sums_in_pairs(count: int, many: int) -> None:
    """Behind, four float32 are added as they are: two roundings of half a unit in the last place of what is added."""
    signs = tuple(("negative", (n,), F4, ()) for n in range(many))
    members = (*signs, ("sum", (many,), F4, (("axis", None), ("keepdims", False))))
    compile_orders(apply([np.ones(1, F4)], members, (many + 1,)))
    for seed in range(5):
        values = awkward(seed, count)
        (found,) = run(apply([values], members, (many + 1,)), [values], [np.empty((), F4)])
        exact, size = -math.fsum(values.tolist()), math.fsum(np.abs(values).tolist())
        error = abs(float(found) - exact)
        assert error <= 2.5 * 2.0**-24 * size, f"seed {seed}"
        pairs = abs(float((-values).sum()) - exact)
        assert error <= max(pairs, 2.0**-24 * size), f"seed {seed}"


def test_sums_are_the_same_bits_however_their_units_are_shared_out() -> None:
    rng = np.random.default_rng(4)
    inputs = [np.asarray(rng.normal(size=s), F4) for s in ((700, 300), (), (700, 300))]
    members = (*REDUCED, ("sum", (5,), F4, (("axis", (0,)), ("keepdims", False))))
    compile_orders(apply(inputs, members, (6,)))
    application = apply(inputs, members, (6,))
    units = application.steps[0].units
    assert units > 3

    def result(*cuts: int) -> Array:
        memory = (*application.scratch, *application.local)
        operands = [*inputs, np.empty(300, F4), *(np.empty(s.concrete, s.dtype) for s in memory)]
        bases = np.array([0, *(a.ctypes.data for a in operands)], np.int64)
        places = [Operand(i + 1) for i in range(len(operands))]
        for number, step in enumerate(application.steps):
            assert isinstance(step, LaunchStep)
            block, entry = step.block(places), ENTRY_TYPE(step.address())
            limits = [0, *cuts, step.units] if number == 0 else [0, step.units]
            for begin, end in reversed(list(itertools.pairwise(limits))):
                entry(bases.ctypes.data, block.ctypes.data, begin, end)
        return operands[len(inputs)]

    whole = result()
    np.testing.assert_array_equal(result(1), whole)
    np.testing.assert_array_equal(result(2, 3), whole)


def test_a_program_says_what_does_not_fit() -> None:
    with pytest.raises(fr.SpecError, match="only 1 come before"):
        infer_members([Spec(F4, (3,))], (("add", (0, 1), F4, ()),))
    with pytest.raises(fr.SpecError, match="no member"):
        infer_members([Spec(F4, (3,))], (("exp", (0,), "float64", ()),))
