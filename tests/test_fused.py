"""Fused programs: compiled as one launch or computed member by member, the answers are the same."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tape_world import whole_region
from test_fuse import plan_of

import flowrt as fr
from flowrt.kernels import background, fused
from flowrt.kernels.background import Order, are_ready, submit, wait_compiled, was_tried
from flowrt.kernels.fused import ordered_variants
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Application, Operand, Prepared, Step, apply_kernel
from flowrt.kernels.store import entry_address, is_compiled
from flowrt.ops.fused import infer_members
from flowrt.sched.tape import Tapes
from flowrt.session import Options
from flowrt.spec import Spec, spec_of

if TYPE_CHECKING:
    from pathlib import Path

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
    """The application as one launch, compiled here and now."""
    compile_orders(apply(inputs, members, results))
    made = apply(inputs, members, results)
    assert len(made.steps) == 1
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
        np.testing.assert_allclose(mine, judge, rtol=3e-7, atol=3e-7)  # a product and a sum may be rounded once


def test_results_may_lie_where_inputs_did() -> None:
    """Momentum in place: the velocity and the parameter are read and written once."""
    rng = np.random.default_rng(0)
    velocity, gradient, parameter = (rng.normal(size=1003).astype(F4) for _ in range(3))
    inputs = [velocity, gradient, parameter, np.asarray(0.9, F4), np.asarray(0.1, F4)]
    judge = member_by_member(inputs, STEP, (6, 8))
    found = run(compiled(inputs, STEP, (6, 8)), inputs, [velocity, parameter])
    assert found[0] is velocity
    for mine, other in zip(found, judge, strict=True):
        np.testing.assert_allclose(mine, other, rtol=3e-7, atol=3e-7)


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

    assert symbols((3,), (3,), (3,)) == symbols((4, 5), (4, 5), (4, 5)) == symbols((9, 1, 2), (9, 1, 2), (9, 1, 2))
    assert symbols((4, 5), (5,), (4, 5)) == symbols((7, 2), (2,), (7, 2)) == symbols((3,), (3,), (3,))
    assert symbols((4, 5), (4, 1), (4, 5)) != symbols((3,), (3,), (3,))


def test_members_of_several_shapes_are_computed_one_by_one() -> None:
    """What inference took for one size may be two in a step."""
    members = (("exp", (0,), F4, ()), ("add", (2, 1), F4, ()))
    inputs = [np.ones((1, 3), F4), np.ones((4, 3), F4)]
    application = apply(inputs, members, (3,))
    assert len(application.steps) == 2
    assert application.orders == ()
    found = run(application, inputs, [np.empty((4, 3), F4)])
    np.testing.assert_allclose(found[0], np.exp(inputs[0]) + inputs[1], rtol=1e-6)


def test_what_is_small_is_not_worth_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    members = (("exp", (0,), F4, ()), ("sqrt", (1,), F4, ()), ("tanh", (2,), F4, ()))
    assert apply([np.ones(100, F4)], members, (3,)).orders == ()
    assert len(apply([np.ones(10_000, F4)], members, (3,)).orders) == 1


def test_what_is_answered_twice_or_as_it_came_is_copied() -> None:
    members = (("exp", (0,), F4, ()), ("tanh", (1,), F4, ()), ("exp", (2,), F4, ()), ("tanh", (3,), F4, ()))
    x = np.linspace(-1, 1, 9, dtype=F4)
    for results in ((4, 4, 0), (1, 1)):
        found = run(apply([x], members, results), [x], [np.empty(9, F4) for _ in results])
        for mine, judge in zip(found, member_by_member([x], members, results), strict=True):
            np.testing.assert_array_equal(mine, judge)


PARTS = (
    ("getitem", (0,), F4, (("key", ((None, None, None), (1, 4, None))),)),
    ("getitem", (0,), F4, (("key", ((None, None, None), (4, None, None))),)),
    ("multiply", (1, 2), F4, ()),
    ("add_n", (3, 1, 2, 3), F4, (("_many", 4),)),
)


def test_parts_are_read_where_they_lie() -> None:
    x = np.linspace(-1, 1, 42, dtype=F4).reshape(6, 7)
    application = compiled([x], PARTS, (4,))
    assert application.scratch == ()
    (found,) = run(application, [x], [np.empty((6, 3), F4)])
    a, b = x[:, 1:4], x[:, 4:]
    np.testing.assert_allclose(found, a * b + a + b + a * b, rtol=1e-6)


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


FOLDED = (("greater", (0, 1), B1, ()), ("where", (3, 0, 2), F4, ()), ("square", (4,), F4, ()))


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
    ],
    ids=str,
)
def test_sums_of_what_is_computed_are_those_of_the_members(shape: tuple[int, ...], axes: Any) -> None:
    rng = np.random.default_rng(3)
    inputs = [np.asarray(rng.normal(size=s), F4) for s in (shape, (), shape)]
    reduced = (("axis", axes), ("keepdims", False))
    members = (*FOLDED, ("sum", (5,), F4, reduced), ("mean", (4,), F4, (("axis", axes), ("keepdims", True))))
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


def apply_one_by_one(inputs: Sequence[Array], members: Any, results: Sequence[int]) -> Application:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "is_compiled", lambda variant: False)
        return apply(inputs, members, results)


KINDS = {F4: ("sum", "mean", "max", "min", "prod", "any", "all"), "int32": ("sum", "max", "min", "any")}


@pytest.mark.parametrize(
    ("dtype", "shape", "axes", "costly"),
    [
        (F4, (40, 1100), (1,), True),
        (F4, (70, 33), (0,), True),
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
    folded = np.tanh(np.minimum(*inputs)) if costly else np.minimum(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judges = [folded, *(getattr(np, kind)(folded, axis=axes) for kind in kinds)]
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
    members = (*FOLDED, ("sum", (5,), F4, (("axis", (0,)), ("keepdims", False))))
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
            assert isinstance(step, Step)
            block, entry = step.block(places), ENTRY_TYPE(step.address())
            limits = [0, *cuts, step.units] if number == 0 else [0, step.units]
            for begin, end in reversed(list(itertools.pairwise(limits))):
                entry(bases.ctypes.data, block.ctypes.data, begin, end)
        return operands[len(inputs)]

    whole = result()
    np.testing.assert_array_equal(result(1), whole)
    np.testing.assert_array_equal(result(2, 3), whole)


# ── random programs, in sessions ─────────────────────────────────────────────────────────────────────────────────────

OPERANDS = {"row": (5,), "column": (6, 1), "dense": (6, 5), "scalar": (), "wide": (7, 12)}


def grow(rng: np.random.Generator, values: list[Any], count: int) -> None:
    """Add random elementwise nodes, floats and bools mixed."""
    floats = [v for v in values if v.dtype == F4]
    for _ in range(count):
        a, b = (floats[i] for i in rng.integers(len(floats), size=2))
        match rng.integers(9):
            case 0:
                made = a + b
            case 1:
                made = fr.tanh(a) * b
            case 2:
                made = fr.where(fr.less(a, b), a, b * 0.5)
            case 3:
                made = fr.astype(fr.astype(fr.maximum(a, b), "int32") + 1, F4)
            case 4:
                made = fr.relu(a) - fr.sigmoid(b)
            case 5:
                made = fr.minimum(a, 2.0)
            case 6 if a.shape == b.shape:
                made = fr.add_n([a, b, a])
            case 7:
                made = fr.abs(a) / (fr.abs(b) + 1.0)
            case _:
                made = fr.astype(fr.isfinite(a - b), F4)
        floats.append(made)
        values.append(made)


@pytest.mark.parametrize("seed", range(4))
async def test_random_programs_answer_fused_what_they_do_as_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with fr.Graph() as graph:
        feeds = {fr.placeholder(F4, shape): np.asarray(rng.normal(size=shape), F4) for shape in OPERANDS.values()}
        *operands, wide = list(feeds)
        values: list[Any] = [*operands, wide[1:, 1:6], wide[:6, 7:], wide[0, 2:7], wide[:6, 3:4]]
        grow(rng, values, 12)
        fetches = [values[i] for i in {len(values) - 1, *rng.integers(8, len(values), size=3).tolist()}]
    async with fr.Session(graph, options=Options(optimize=False, threads=1)) as session:
        judge = await session.run(fetches, feeds)
    async with fr.Session(graph, options=Options(threads=1)) as session:
        apart = [await session.run(fetches, feeds) for _ in range(2)]
        assert wait_compiled(120)
        together = [await session.run(fetches, feeds) for _ in range(2)]
    for found in (*apart, *together):
        for mine, other in zip(found, judge, strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-5, atol=2e-5, err_msg=f"seed {seed}")


# ── the helper process ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache beside which the helper begins anew."""
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path))
    yield tmp_path
    background.close()


def order(number: float) -> Order:
    """An order for a program that no other test has."""
    members = (("multiply", (0, 0), "float64", ()), ("floor", (1,), "float64", ()), ("add", (2, 0), "float64", ()))
    (made,) = apply([np.ones(3)], members[: 2 + int(number)], (3,) if number else (2,)).orders
    return made


def test_the_helper_compiles_what_is_ordered(fresh_cache: Path) -> None:
    wanted = order(1)
    assert not is_compiled(ordered_variants(wanted.request)[0])
    submit([wanted])
    submit([wanted])
    assert wait_compiled(120)
    assert are_ready([wanted])
    assert (fresh_cache / f"{wanted.symbol}.o").exists()
    assert is_compiled(ordered_variants(wanted.request)[0])
    assert (
        apply(
            [np.ones(3)],
            (("multiply", (0, 0), "float64", ()), ("floor", (1,), "float64", ()), ("add", (2, 0), "float64", ())),
            (3,),
        ).orders
        == ()
    )


def test_an_order_that_makes_no_sense_is_given_up(fresh_cache: Path) -> None:
    bad = [Order("flowrt_fused_x", "nonsense"), Order("flowrt_fused_y", order(0).request)]
    submit(bad)
    assert wait_compiled(120)
    assert are_ready(bad)
    assert all(was_tried(each.symbol) for each in bad)


def test_a_helper_that_dies_is_followed_by_another_and_then_given_up(fresh_cache: Path) -> None:
    wanted = order(0)
    submit([wanted])
    while not was_tried(wanted.symbol):
        helper = background._state.helper
        assert helper is not None
        helper.kill()
        wait_compiled(0.2)
    assert wait_compiled(1)
    assert background._state.helper is None


def test_where_the_cache_cannot_be_written_programs_stay_unfused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOWRT_CACHE", str(tmp_path / "file" / "folder"))
    wanted = order(0)
    submit([wanted])
    assert wait_compiled(120)
    assert was_tried(wanted.symbol)
    assert not is_compiled(ordered_variants(wanted.request)[0])
    background.close()


def test_orders_of_many_threads_are_taken_once(fresh_cache: Path) -> None:
    wanted = order(0)
    threads = [threading.Thread(target=lambda: [submit([wanted]), are_ready([wanted])]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wait_compiled(120)
    assert len(list(fresh_cache.glob("*.o"))) == 1


ENDING = """
import numpy as np, sys
import flowrt as fr
from flowrt.kernels import background, fused
with fr.Graph() as graph:
    x = fr.placeholder("float32", (4000,))
    y = fr.tanh(x * 3.0) + x
with fr.BlockingSession(graph) as session:
    for _ in range(3):
        session.run(y, {x: np.ones(4000, np.float32)})
print(background._state.helper.pid)
"""


def test_a_process_leaves_no_helper_behind(fresh_cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_first_steps_run_unfused_and_later_ones_fused(fresh_cache: Path) -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(F4, (None,))
        y = fr.exp(x * 0.5) - x
    with fr.BlockingSession(graph) as session:
        step = session.compile(y, [x])
        value = np.linspace(-1, 1, 50, dtype=F4)
        first = step(value)
        assert list(fresh_cache.glob("flowrt_fused_*")) == []
        second = step(value)  # a step that is run again is worth a kernel
        assert wait_compiled(120)
        assert len(list(fresh_cache.glob("flowrt_fused_*.o"))) == 1
        for found in (first, second, step(value), step(value)):
            np.testing.assert_allclose(found, np.exp(value * 0.5) - value, rtol=1e-6)


def test_a_tape_is_made_anew_once_its_kernels_are_compiled(fresh_cache: Path) -> None:
    """And so is the recording that predictions and later tapes of the plan share."""
    plan = plan_of(lambda x: fr.tanh(x * 0.5) - x, (50,))  # no other test compiles it
    region = whole_region(plan)
    tapes, values = Tapes(plan), [np.linspace(-1, 1, 50, dtype=F4)]
    first = tapes.get(region, values)
    assert first is not None
    assert first.launches > 1
    assert tapes.made(region, values) is first
    assert wait_compiled(120)
    assert tapes.made(region, values) is None
    again = tapes.get(region, values)
    assert again is not None
    assert again.launches == 1
    assert not again.recording.orders


def test_a_fed_size_of_one_is_right_too() -> None:
    with fr.Graph() as graph:
        x, y = fr.placeholder(F4, (None, 3)), fr.placeholder(F4, (None, 3))
        z = fr.exp(x) * 2.0 + y
    with fr.BlockingSession(graph) as session:
        for rows in ((4, 4), (1, 4), (4, 1)):
            a, b = (np.full((n, 3), 0.5, F4) for n in rows)
            np.testing.assert_allclose(session.run(z, {x: a, y: b}), np.exp(a) * 2 + b, rtol=1e-6)


@pytest.mark.parametrize("tapes", [True, False], ids=["tape", "machine"])
def test_slopes_of_means_are_repeated_to_what_a_step_is_fed(tapes: bool) -> None:
    """The shape to repeat to is a value, and no other operand may have it: here a row is added to each fed row."""
    with fr.Graph() as graph:
        x, y = fr.placeholder(F4, (None, 3)), fr.placeholder(F4, (None, 3))
        slopes = fr.gradients(fr.mean(fr.square(x * y) + x), [x, y])
    with fr.BlockingSession(graph, options=Options(tapes=tapes, threads=1)) as session:
        for _ in range(2):
            for rows in ((4, 4), (1, 4), (4, 1), (2, 2), (1, 1)):
                a, b = (np.linspace(-1, 1, 3 * n, dtype=F4).reshape(n, 3) for n in rows)
                count = 3 * max(rows)
                da = (2 * a * b * b + 1 + np.zeros_like(a * b)) / count
                db = 2 * a * b * a / count
                judge = [d.sum(0, keepdims=True) if n == 1 else d for d, n in zip((da, db), rows, strict=True)]
                for found, other in zip(session.run(slopes, {x: a, y: b}), judge, strict=True):
                    np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-6, err_msg=str(rows))
            assert wait_compiled(120)


REPEATED = (
    ("spread", (0, 2), F4, (("axis", 1), ("keepdims", False))),
    ("broadcast_to", (1, 2), F4, ()),
    ("multiply", (3, 4), F4, ()),
    ("exp", (5,), F4, ()),
)


def test_what_is_repeated_is_read_where_it_lies() -> None:
    x, y, shape = np.linspace(-1, 1, 6, dtype=F4), np.linspace(0, 1, 5, dtype=F4), np.array([6, 5])
    application = compiled([x, y, shape], REPEATED, (6,))
    assert application.scratch == ()
    (found,) = run(application, [x, y, shape], [np.empty((6, 5), F4)])
    np.testing.assert_allclose(found, np.exp(x[:, None] * y), rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [fr.optim.Momentum(0.1, 0.9), fr.optim.Adam(0.1), fr.optim.AdaGrad(0.1), fr.optim.RMSProp(0.1, momentum=0.5)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_optimisers_move_variables_in_one_pass_as_they_do_apart(optimizer: Any) -> None:
    start = np.linspace(-1, 1, 60, dtype=F4)

    def train(options: Options) -> list[Array]:
        with fr.Graph() as graph:
            x = fr.placeholder(F4, (60,))
            weight = fr.Variable(start, name="weight")
            move = optimizer.minimize(fr.sum(fr.square(weight * x)))
            slots = [v for v in graph.variables if v.shape]
        with fr.BlockingSession(graph, options=options) as session:
            step = session.compile(move, [x])
            for number in range(6):
                step(start + number)
                assert wait_compiled(120)
            return list(session.run(slots))

    with np.errstate(all="ignore"):
        judge = train(Options(optimize=False, tapes=False, threads=1))
        for options in (Options(threads=1), Options(threads=2)):
            for mine, other in zip(train(options), judge, strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


async def test_steps_that_run_at_once_lose_no_addition() -> None:
    with fr.Graph() as graph:
        x = fr.placeholder(F4, (4000,))
        total = fr.Variable(np.zeros(4000, F4))
        move = total.assign_add(fr.exp(x * 0.0) * 2.0 + total * 0.0)
    async with fr.Session(graph, options=Options(threads=2)) as session:
        step = session.compile(move, [x])
        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(step(np.ones(4000, F4)))
            assert wait_compiled(120)
        np.testing.assert_array_equal(await session.run(total), np.full(4000, 80, F4))


def test_a_cell_written_by_hand_is_fused_in_loops_forward_and_back() -> None:
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(5, 4, 3)).astype(F4), rng.normal(size=(3, 9)).astype(F4)

    def train(options: Options) -> list[float]:
        with fr.Graph() as graph:
            rows, weight = fr.placeholder(F4, (5, None, 3)), fr.Variable(start)

            def cell(h: Any, row: Any) -> Any:
                gates = fr.matmul(row, weight) + fr.matmul(h, weight)
                update, reset = fr.sigmoid(gates[:, :3]), fr.sigmoid(gates[:, 3:6])
                h = update * h + (1.0 - update) * fr.tanh(reset * gates[:, 6:])
                return h, h

            _, states = fr.scan(cell, fr.zeros((4, 3)), rows)
            loss = fr.mean(fr.square(states - 0.5))
            move = fr.optim.SGD(1.0).minimize(loss)
        with fr.BlockingSession(graph, options=options) as session:
            step, losses = session.compile([loss, move], [rows]), []
            for _ in range(5):
                losses.append(float(step(x)[0]))
                assert wait_compiled(120)
            return losses

    judge = train(Options(optimize=False, tapes=False, threads=1))
    assert judge[-1] < judge[0]
    for options in (Options(threads=1), Options(threads=2), Options(tapes=False, threads=1)):
        np.testing.assert_allclose(train(options), judge, rtol=1e-5)


def test_a_program_says_what_does_not_fit() -> None:
    with pytest.raises(fr.SpecError, match="only 1 come before"):
        infer_members([Spec(F4, (3,))], (("add", (0, 1), F4, ()),))
    with pytest.raises(fr.SpecError, match="no member"):
        infer_members([Spec(F4, (3,))], (("exp", (0,), "float64", ()),))
