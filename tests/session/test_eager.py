"""Ops on plain arrays: what the first call of its kind answers, and those like it that are one C call."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from op_examples import EXAMPLES, Example

import flowrt as fr
from flowrt.base.alike import Recall
from flowrt.kernels.launch import Prepared
from flowrt.kernels.run import direct
from flowrt.kernels.run.at_once import MOST_SLOTS
from flowrt.op import lookup, no_gradient, whole
from flowrt.session.eager import _prepared
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Spec

OP = sys.modules["flowrt.op"]  # flowrt.op is its decorator
X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


@no_gradient
@op
def eager_weighted(x: Spec, weights: Any) -> Spec:
    """``x`` times the first of ``weights``."""
    return x


@fr.kernel("eager_weighted", layout=lambda inputs, outputs, attrs: _weighted_call(inputs, outputs, attrs))
def eager_weighted_kernel(x: Any, y: Any, weight: Any) -> None:
    for i in range(x.size):
        y[i] = x[i] * weight


@no_gradient
@op
def eager_shifted(x: Spec, shift: Spec = 1.0, *, back: bool = False) -> Spec:  # type: ignore[assignment]
    """``x`` plus ``shift``, or minus it."""
    return x


@fr.kernel("eager_shifted", layout=lambda inputs, outputs, attrs: _shifted_call(inputs, outputs, attrs))
def eager_shifted_kernel(arrays: Any, words: Any) -> None:
    x, shift, y = arrays
    for i in range(x.size):
        y[i] = x[i] + shift.item() * words[0]


def _shifted_call(inputs: Any, outputs: Any, attrs: Any) -> Any:
    from flowrt.kernels.language.table import Call, View

    views = tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs))
    return Call(views, (-1 if attrs["back"] else 1,))


def _weighted_call(inputs: Any, outputs: Any, attrs: Any) -> Any:
    from flowrt.kernels.language.table import Call, View

    views = tuple(View.dense(spec.concrete) for spec in (*inputs, *outputs))
    return Call(views, (float(attrs["weights"][0]),))


def test_what_was_prepared_for_one_value_is_not_taken_for_its_equal() -> None:
    x = np.float32([1])
    for value in (0.0, -0.0, 0, False, 1.0, True):
        got = fr.pad(x, 1, value)
        assert np.signbit(got).tolist() == [np.signbit(value), False, np.signbit(value)]
        np.testing.assert_array_equal(got, [value, 1, value])


def test_an_attribute_may_be_an_array() -> None:
    x = np.float32([1, 2])
    for weights in ([2.0, 0.0], [3.0, 0.0], [2.0, 1.0]):
        np.testing.assert_array_equal(eager_weighted(x, np.float64(weights)), x * np.float32(weights[0]))


# ── calls that are alike ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=[True, False], ids=["at once", "by hand"])
def recall(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recall]:
    """What is known, which is nothing yet: once with C calls, once as on an interpreter that has none."""
    if not request.param:
        monkeypatch.setattr(direct, "available", lambda: False)
    elif not direct.available():
        pytest.skip("this interpreter or NumPy has another layout")
    fresh = Recall(1024)
    monkeypatch.setattr(OP, "RECALL", fresh)
    _prepared.cache_clear()
    yield fresh
    _prepared.cache_clear()


class Forgetful(Recall):
    """Every call is the first of its kind."""

    def keep(self, key: Any, known: Any) -> None:
        pass


def outcome(call: Callable[[], Any]) -> Any:
    """The arrays that ``call`` answers, or its error."""
    try:
        found = call()
    except fr.FlowrtError as error:
        return type(error), str(error)
    return found if isinstance(found, tuple) else (found,)


def assert_same(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for mine, other in zip(got, want, strict=True):
        if isinstance(other, np.ndarray):
            assert type(mine) is type(other)
            assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.reference is not None], ids=str)
def test_calls_that_are_alike_answer_what_they_would_by_themselves(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [np.roll(a.reshape(-1), 1).reshape(a.shape) for a in example.arrays]
    monkeypatch.setattr(OP, "RECALL", Forgetful(0))
    alone = [outcome(lambda given=given: example.run(*given)) for given in (example.arrays, others)]
    monkeypatch.setattr(OP, "RECALL", Recall(1024))
    for _ in range(3):
        for given, want in zip((example.arrays, others), alone, strict=True):
            assert_same(outcome(lambda given=given: example.run(*given)), want)


def test_what_is_asked_again_is_one_call_of_c(recall: Recall) -> None:
    if not direct.available():
        pytest.skip("not on this interpreter")
    w = np.ones((3, 4), np.float32)
    for _ in range(3):
        for call in (fr.relu, fr.nn.moments, lambda x: fr.matmul(x, w), lambda x: fr.sum(x, axis=1)):
            call(X)
    assert {type(known).__name__ for known in recall.young.values()} == {"builtin_function_or_method"}


def test_calls_by_turns_are_each_what_they_are(recall: Recall) -> None:
    """What answered the last call on arrays is tried first, and is for arrays like those alone."""
    wide = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    given: list[Any] = [X, X.astype(np.float64), X.astype(np.int32), X[:, ::-1], X.T.copy(), wide[::2, :3], wide, X[:0]]
    given += [np.ma.masked_array(X), np.asfortranarray(X), X.astype(">f4"), X[0], X[0, 0], 2.0, 3, [[1.0, 2.0, 3.0]]]
    rng = np.random.default_rng(0)
    for one, other in rng.integers(0, len(given), (600, 2)):
        a, b = given[one], given[other]
        for mine, numpys in ((fr.multiply, np.multiply), (fr.maximum, np.maximum)):
            try:
                want = numpys(a, b)
            except ValueError:  # shapes that do not fit
                with pytest.raises(fr.SpecError):
                    mine(a, b)
                continue
            np.testing.assert_allclose(mine(a, b), np.asarray(want), rtol=1e-6, err_msg=f"{a!r}, {b!r}")
        x = np.asarray(a)
        np.testing.assert_allclose(fr.negative(a), -x)
        if x.ndim == 2:
            np.testing.assert_array_equal(fr.transpose(a), x.T)
            np.testing.assert_array_equal(fr.transpose(a, (0, 1)), x)
            np.testing.assert_allclose(fr.sum(a), np.sum(x), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(fr.sum(a, 1), np.sum(x, 1), rtol=1e-5, atol=1e-6)
    assert recall.last.keys() <= {fr.multiply, fr.maximum, fr.negative, fr.transpose, fr.sum}
    assert bool(recall.last) == direct.available()


def test_hundreds_of_arrays_are_one_call_of_c_too_and_more_are_not(
    recall: Recall, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand: list[int] = []
    compute = Prepared.compute

    def computed(prepared: Prepared, inputs: Any, words: Any) -> Any:
        by_hand.append(len(inputs))
        return compute(prepared, inputs, words)

    monkeypatch.setattr(Prepared, "compute", computed)
    for count in (300, MOST_SLOTS):
        parts = [np.full(2, number, np.float32) for number in range(count)]
        for _ in range(5):
            np.testing.assert_array_equal(fr.concat(parts, 0), np.concatenate(parts))
    assert by_hand.count(MOST_SLOTS) == 5
    if direct.available():
        assert by_hand.count(300) == 1  # the first


def test_arrays_of_any_layout_are_read_as_they_are(recall: Recall) -> None:
    aside = np.zeros(X.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(X.shape)
    aside[...] = X
    read_only = X.copy()
    read_only.setflags(write=False)
    columns, swapped = np.asfortranarray(X), X.astype(X.dtype.newbyteorder())
    mapped = X.view(np.matrix)
    for given in (X, X, aside, read_only, columns, swapped, mapped, np.repeat(X, 2, 1)[:, ::2], X[::-1][::-1]):
        for call in (fr.relu, lambda a: fr.add(a, 1.0), lambda a: fr.reshape(a, (3, 2)), lambda a: fr.sum(a, axis=0)):
            assert_same(outcome(lambda given=given, call=call: call(given)), (call(X.copy()),))
    assert recall.young


def test_results_are_arrays_of_their_own_and_reshaped_ones_are_views(recall: Recall) -> None:
    for _ in range(3):
        made = fr.add(X, X)
        assert made.base is None
        assert made.flags.writeable
        assert np.shares_memory(fr.reshape(X, (3, 2)), X)
        assert not np.shares_memory(fr.reshape(X.T, (3, 2)), X)
    total = fr.sum(X)
    assert type(total) is np.ndarray
    assert total.shape == ()


@pytest.mark.parametrize("given", [[1, 2, 3], (), (4, 5), [[1, 2]], 7])
def test_lists_that_are_only_reshaped_are_so_every_time(given: Any, recall: Recall) -> None:
    for _ in range(4):
        for call in (fr.identity, fr.stop_gradient, fr.squeeze, lambda x: fr.expand_dims(x, 0)):
            assert fr.size(call(given)) == np.size(given)
            np.testing.assert_array_equal(np.ravel(call(given)), np.ravel(given))


@pytest.mark.parametrize(
    ("op", "decide"),
    [
        ("cond", lambda: fr.cond(X > 0, lambda: 1, lambda: 2)),
        ("while_loop", lambda: fr.while_loop(lambda x: x < 3, lambda x: x + 1, (X,))),
    ],
)
def test_what_decides_at_once_is_one_bool(op: str, decide: Callable[[], Any]) -> None:
    with pytest.raises(fr.SpecError, match=rf"{op} \(\S*test_eager.py:\d+\): a bool scalar decides, got bool\[2,3\]"):
        decide()


def test_numbers_count_by_type_and_attributes_by_value(recall: Recall) -> None:
    ints = np.arange(3)
    for _ in range(3):
        assert fr.add(ints, 1).dtype == np.int64
        assert fr.add(ints, 1.5).tolist() == [1.5, 2.5, 3.5]
        assert fr.add(ints, True).tolist() == [1, 2, 3]
        assert fr.add(np.array([True]), True).dtype == bool
        for value in (0.0, -0.0, 2.0):
            assert np.signbit(fr.multiply(X[:, :1], value)[0, 0]) != np.signbit(value)
        for axis, want in ((0, (3,)), (1, (2,)), (None, ()), ((0, 1), ())):
            assert fr.sum(X, axis).shape == want
        assert fr.sum(X, axis=1, keepdims=True).shape == (2, 1)
        assert fr.sum(X, 1, False).shape == (2,)
        assert fr.concat([X, X], axis=1).shape == (2, 6)
        assert fr.concat([X, X, X], axis=1).shape == (2, 9)
        assert fr.expand_dims(np.arange(3), 0).shape == (1, 3)


def test_an_unusual_number_does_not_decide_for_others(recall: Recall) -> None:
    tenth = np.float32([0.1])
    small = np.int8([5])
    for number in (1e300, 1e300, 0.1, 0.1, 0.1, 1e300):
        assert fr.less(tenth, number)[0] == (number == 1e300)
    for count in (300, 300, 4, 5, 2, 300):
        assert fr.less(small, count)[0] == (count == 300)
    for large in (2**63, 2**63, 5, 5, 5, 2**63):
        assert (fr.maximum(large, 1).dtype == np.int64) == (large == 5)
    for _ in range(3):
        assert fr.multiply(X, np.float64(2)).dtype == np.float32
        with pytest.raises(fr.SpecError, match=r"add.*test_eager.py.*300 does not fit int8"):
            fr.add(small, 300)
        assert fr.add(small, 3)[0] == 8


def test_an_own_op_is_given_its_tensors_in_any_way(recall: Recall) -> None:
    x, shift = np.float32([1, 2]), np.float32(3)
    for _ in range(3):
        assert eager_shifted(x).tolist() == [2, 3]
        assert eager_shifted(x, shift).tolist() == [4, 5]
        assert eager_shifted(shift=shift, x=x, back=True).tolist() == [-2, -1]
        assert eager_shifted(x, 2.0, back=False).tolist() == [3, 4]
        with pytest.raises(fr.SpecError, match=r"eager_shifted.*unexpected keyword argument 'more'"):
            eager_shifted(x, more=1)
        with pytest.raises(fr.SpecError, match=r"eager_shifted.*missing a required argument: 'x'"):
            eager_shifted(shift=shift)
        with pytest.raises(fr.SpecError, match=r"eager_shifted.*multiple values for argument 'x'"):
            eager_shifted(x, x=x)


def test_entries_that_decide_a_shape_are_looked_at(recall: Recall) -> None:
    for _ in range(3):
        for shape in ((2, 3), (3, 2), (6, 1)):
            assert fr.reshape(X, np.array(shape)).shape == shape
            assert fr.zeros(np.array(shape)).shape == shape
        for count in (1, 2):
            assert lookup("slice_along")(X, np.int64(0), np.int64(count), axis=1).shape == (2, count)


def test_errors_are_the_first_calls_and_name_the_users_line(recall: Recall) -> None:
    for indices, good in (([0, 1], True), ([1, 9], False), ([1, 0], True), ([0, 1], True), ([-5, 0], False)):
        if good:
            assert_same((fr.take(X, np.array(indices)),), (X[indices],))
            continue
        with pytest.raises(fr.FlowrtError, match=r"take \(.*test_eager.py:\d+\): an index is out of range"):
            fr.take(X, np.array(indices))
    for start, good in ((0, True), (7, False), (1, True), (2, True), (-1, False), (7, False)):
        call = lambda start=start: lookup("slice_along")(X, np.array(start), 1, axis=1)  # noqa: E731
        if good:
            assert_same((call(),), (X[:, start : start + 1],))
            continue
        with pytest.raises(fr.SpecError, match=r"slice_along \(.*test_eager.py:\d+\): 1 entries from -?\d are not all"):
            call()
    for _ in range(3):
        with pytest.raises(fr.SpecError, match=r"relu.*test_eager.py"):
            fr.relu(X, 1)
        with pytest.raises(fr.SpecError, match=r"add.*test_eager.py.*do not broadcast"):
            fr.add(X, np.ones(5, np.float32))


def test_a_result_that_finds_no_room_is_an_error_of_the_users_line(recall: Recall) -> None:
    for _ in range(3):
        with pytest.raises(fr.ResourceError, match=r"full \(.*test_eager.py:\d+\): Unable to allocate 4.00 EiB"):
            fr.zeros((1 << 30, 1 << 30))


def test_an_op_that_fails_in_a_loop_at_once_fails_the_call(recall: Recall) -> None:
    table = np.arange(3, dtype=np.float32)
    for _ in range(3):
        last = fr.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, fr.take(table, i)), (np.int64(0), np.float32(0)))
        assert last[1] == 2
        with pytest.raises(fr.FlowrtError, match=r"an index is out of range"):
            fr.while_loop(lambda i, v: i < 9, lambda i, v: (i + 1, fr.take(table, i)), (np.int64(0), np.float32(0)))


def test_many_threads_call_the_same_ops_at_once(recall: Recall) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    failures: list[str] = []
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        x = np.full((2, 3), seed, np.float32)
        start.wait()
        for turn in range(200):
            rows = x[: 1 + turn % 2]
            got = fr.add(fr.sum(fr.matmul(rows, w), axis=1), float(turn))
            if not np.array_equal(got, (rows @ w).sum(1) + turn):
                failures.append(f"{seed} {turn}: {got}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_more_is_remembered_than_is_said_and_no_operand(recall: Recall, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Recall(4)
    monkeypatch.setattr(OP, "RECALL", few)
    for size in (*range(1, 20), 1, 2, 3, 19):
        x = np.ones(size, np.float32)
        assert fr.sum(fr.add(x, 1.0)) == 2 * size
        assert len(few.young) <= 4
        assert len(few.old) <= 4
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_draws_without_a_seed_differ_and_are_remembered_as_one(recall: Recall) -> None:
    draws = [fr.random.normal((4,)) for _ in range(5)]
    assert len({draw.tobytes() for draw in draws}) == 5
    assert len(recall.young) == 1
    for _ in range(3):
        np.testing.assert_array_equal(fr.random.uniform((4,), seed=3), fr.random.uniform((4,), seed=3))

    def noise() -> Any:
        return fr.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v + fr.random.uniform(())), (0, np.float32(0)))[1]

    assert len({float(noise()) for _ in range(3)}) == 3


# ── functions made of ops ──

WHOLE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (fr.nn.layer_norm, ((4, 5), (5,), (5,))),
    "layer_norm alone": (fr.nn.layer_norm, ((4, 5),)),
    "layer_norm over two": (lambda x, s: fr.nn.layer_norm(x, offset=s, axis=(-2, -1)), ((2, 4, 5), (4, 5))),
    "batch_norm": (lambda x, s, o: fr.nn.batch_norm(x, s, o, axis=0), ((4, 5), (5,), (5,))),
    "gelu": (lambda x: fr.gelu(x, approximate=True), ((4, 5),)),
    "elu": (lambda x: fr.elu(x, alpha=0.5), ((4, 5),)),
    "logsumexp": (lambda x: fr.logsumexp(x, axis=-1), ((4, 5),)),
    "einsum": (lambda a, b: fr.einsum("bhqd,bhkd->bhqk", a, b), ((2, 3, 4, 5), (2, 3, 2, 5))),
    "einsum of three": (lambda a, b, c: fr.einsum("ij,jk,k->i", a, b, c), ((4, 5), (5, 3), (3,))),
    "einsum of one": (lambda a: fr.einsum("ii", a), ((4, 4),)),
    "tensordot": (lambda a, b: fr.tensordot(a, b, axes=((0, 1), (1, 0))), ((3, 4, 5), (4, 3, 2))),
    "dot": (fr.dot, ((5,), (5,))),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_function_made_of_ops_is_one_call_and_answers_what_they_do(name: str, dtype: str, recall: Recall) -> None:
    function, shapes = WHOLE[name]
    draws = np.random.default_rng(0)
    for turn in range(6):
        given = [draws.standard_normal(shape).astype(dtype) for shape in shapes]
        given = [np.asfortranarray(a) for a in given] if turn == 5 else given
        got = outcome(lambda given=given: function(*given))
        kept, OP.RECALL = OP.RECALL, Forgetful(0)
        try:
            assert_same(got, outcome(lambda given=given: function(*given)))
        finally:
            OP.RECALL = kept
    if direct.available():
        whole = [known for key, known in recall.young.items() if not isinstance(key[0], type(fr.relu))]  # type: ignore[index]
        assert {type(known).__name__ for known in whole} == {"builtin_function_or_method"}


def test_products_are_rounded_wherever_that_is_asked_for(recall: Recall) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)
    exact = [fr.einsum("ij,jk->ik", a, b) for _ in range(4)][-1]
    for _ in range(3):
        with fr.mixed_precision("bfloat16"):
            rounded = fr.einsum("ij,jk->ik", a, b)
            np.testing.assert_array_equal(rounded, fr.matmul(a, b))
        assert not np.array_equal(rounded, exact)
        np.testing.assert_array_equal(fr.einsum("ij,jk->ik", a, b), exact)


def test_one_array_given_twice_is_not_taken_for_two_that_are_alike(recall: Recall) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    for x, scale in [(rows[0], rows[0])] * 3 + [(rows[1], rows[2])]:
        got = fr.nn.layer_norm(x, scale, axis=(0, 1))
        np.testing.assert_allclose(got, (x - x.mean()) / np.sqrt(x.var() + 1e-5) * scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fr.multiply(x, float(x[0, 0])),  # looks at an entry
        lambda x: fr.reshape(fr.relu(x), (-1,)),  # answers a view
        lambda x: fr.multiply(x, fr.random.uniform(())) * 0,  # draws
        lambda x: fr.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))[1],  # loops
        lambda x: x,
    ],
)
def test_a_function_that_is_more_than_its_ops_is_called_as_it_is(
    function: Callable[[Any], Any], recall: Recall
) -> None:
    function.__annotations__["x"] = "Operand"
    known = whole(function)
    for turn in range(5):
        given = X + np.float32(turn)
        assert_same((known(given),), (function(given),))
    assert_same((known(X[:1]),), (function(X[:1]),))


def test_integers_and_numbers_are_given_to_the_ops_of_a_function(recall: Recall) -> None:
    whole_numbers = np.arange(-2, 3)
    for _ in range(4):
        assert_same((fr.silu(whole_numbers),), (whole_numbers * fr.sigmoid(whole_numbers),))
        assert fr.silu(0.0) == 0
        with pytest.raises(fr.SpecError, match=r"test_eager.py:\d+"):
            fr.nn.layer_norm(X, np.ones(7, np.float32))
        with pytest.raises(fr.SpecError, match="layer_norm"):
            fr.nn.layer_norm(X, wrong=1)
