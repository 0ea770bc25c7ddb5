"""Plain data beside tensors: numbers are weak, arrays are not, and dtypes without kernels are refused where they stand.

The judge of dtypes is NumPy, asked with Python's numbers, or, where a number is of a higher kind, with that number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES

import flowrt as fr
from flowrt.base.plain import RANKS
from flowrt.base.spec import BFLOAT16, DTYPES
from flowrt.kernels.language.table import KERNELS
from flowrt.passes.place import with_halves
from flowrt.session.runners import supports

NUMBERS: list[Any] = [2.5, 2, True, np.float64(2.5), np.float32(2.5), np.float16(2.5), np.longdouble(2.5)]
NUMBERS += [np.int64(2), np.uint8(2), np.int8(2), np.bool_(True), np.sqrt(64), np.mean([1, 2])]
OPERATORS = [operator.add, operator.mul, operator.truediv, operator.floordiv, operator.pow, operator.lt]


def python_number(number: Any) -> Any:
    kind = np.asarray(number).dtype.kind
    return {"b": bool, "i": int, "u": int, "f": float}[kind](number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__}")
def test_a_number_is_weak_on_either_side_of_every_operator(dtype: str, number: Any) -> None:
    like = np.ones(2, dtype)
    with fr.Graph():
        x = fr.placeholder(dtype, (2,))
        for compute in OPERATORS:
            plain = python_number(number)
            kinds = [RANKS[np.asarray(value).dtype.kind] for value in (number, like)]
            if kinds[0] > kinds[1] and not isinstance(number, np.longdouble):  # it says what it is
                plain = number
            if compute in (operator.floordiv, operator.pow) and dtype == "bool" and plain is True:
                continue  # not defined of bools
            assert compute(x, number).dtype == compute(x, plain).dtype
            assert compute(number, x).dtype == compute(plain, x).dtype
            if compute is operator.mul:
                assert compute(x, number).dtype == compute(like, plain).dtype


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "operator": lambda x, n: x / n,
    "reflected": lambda x, n: n - x,
    "by name": lambda x, n: fr.multiply(n, x),
    "maximum": lambda x, n: fr.maximum(x, n),
    "where": lambda x, n: fr.where(x > n, x, n),
    "clip": lambda x, n: fr.clip(x, -n, n),
    "a list": lambda x, n: x * [n, 1.0, n],
    "a list of plain numbers": lambda x, n: x * [2, 1, 3],
    "stacked": lambda x, n: fr.stack([x[0], n]),
    "concatenated": lambda x, n: fr.concat([x, [n, n]]),
    "an activation": lambda x, n: fr.leaky_relu(x, n),
    "filled": lambda x, n: fr.full_like(x, n),
    "a branch": lambda x, n: fr.cond(x[0] > n, lambda: n, lambda: x[0]),
    "a loop's body": lambda x, n: fr.while_loop(lambda a: a < n, lambda a: n, x[0]),
    "a whole number in a loop's body": lambda x, n: fr.while_loop(lambda a: a < n, lambda a: 3, x[0]),
    "a gradient's weight": lambda x, n: fr.gradients(fr.sum(x), [x], [n])[0],
    "dropout": lambda x, n: fr.nn.dropout(x, n / 8, seed=1),
    "normalised": lambda x, n: fr.nn.layer_norm(x, epsilon=n),
    "normalised and scaled": lambda x, n: fr.nn.layer_norm(x, n, [2, 1, 3]),
    "normalised over a batch": lambda x, n: fr.nn.batch_norm(x, 2, n, axis=0)[0],
    "a dot product": lambda x, n: fr.dot([2, 1, 3], x) + fr.dot(x, [n, n, n]),
    "an einsum": lambda x, n: fr.einsum("i,i", x, [2, 1, 3]),
    "moments of random numbers": lambda x, n: x + fr.random.normal((3,), n, n, seed=1),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
def test_numpys_numbers_leave_a_model_in_its_dtype(way: str, dtype: str) -> None:
    if way == "moments of random numbers" and dtype == "float64":
        pytest.skip("they are float32 unless they are told")
    with fr.Graph():
        made = WAYS[way](fr.placeholder(dtype, (3,)), np.sqrt(4.0))
    assert made.dtype == dtype


def test_settings_of_optimisers_may_be_numpys_numbers() -> None:
    half = np.float64(0.5)
    for make in (fr.optim.SGD, fr.optim.Adam, fr.optim.AdaGrad, lambda lr: fr.optim.Momentum(lr, half)):
        with fr.Graph() as graph:
            w = fr.Variable(np.ones(3, np.float32))
            fr.gradients(fr.sum(w * w), [w])
            make(half).minimize(fr.sum(w * w))
        floats = {t.dtype.name for node in graph.nodes for t in node.outputs if t.dtype.kind == "f"}
        assert floats == {"float32"}


def test_eager_ops_take_numbers_as_a_graph_does() -> None:
    value = np.ones(2, np.float32)
    assert fr.multiply(value, np.float64(2)).dtype == np.float32
    assert fr.where(value > 0, np.float64(2), value).dtype == np.float32
    assert fr.add(np.int32([1]), np.int64(2)).dtype == np.int32
    for _ in range(3):
        assert fr.multiply(np.int8([1]), np.float32(2)).dtype == np.float32
        assert fr.multiply(np.int8([1]), 2.0).dtype == np.float64
        assert fr.concat([np.bool_([1]), [np.int8(2)]]).dtype == np.int64
    for number, found in ((44, True), (45, False), (300, False), (44, True)):
        assert fr.equal(np.int8([44]), number).tolist() == [found]
    for _ in range(3):
        assert fr.add(np.int8([1]), 3).tolist() == [4]
        with pytest.raises(fr.SpecError, match="300 does not fit int8"):
            fr.add(np.int8([1]), 300)


def test_arrays_and_tensors_of_one_entry_keep_their_dtype() -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2,))
        assert (x * np.array(2.0)).dtype == np.float64
        assert (x * fr.constant(np.float64(2))).dtype == np.float64
    assert fr.multiply(np.ones(2, np.float32), np.array(2.0)).dtype == np.float64


def test_numbers_by_themselves_are_what_they_say() -> None:
    assert fr.add(np.float64(1), np.float64(2)).dtype == np.float64
    assert fr.add(np.float32(1), 2.0).dtype == np.float32
    assert fr.add(1.0, 2).dtype == np.float32
    assert fr.add(1, 2).dtype == np.int64
    assert fr.constant(np.float64(1)).dtype == np.float64


TOO_LARGE: list[tuple[str, Any]] = [("int8", 300), ("int8", np.int64(-129)), ("int8", [1, 300]), ("uint8", -1)]
TOO_LARGE += [
    ("uint16", 2**16),
    ("int32", 2**31),
    ("int64", 2**63),
    ("float32", 1e300),
    ("float32", np.float64(-1e300)),
]
TOO_LARGE += [("float32", 10**60), ("float64", 10**400)]


@pytest.mark.parametrize(("dtype", "number"), TOO_LARGE)
def test_a_number_that_does_not_fit_is_refused(dtype: str, number: Any) -> None:
    says = rf"\(\S*test_plain.py:\d+\): .* does not fit {dtype}, which holds "
    with fr.Graph():
        x = fr.placeholder(dtype, (2,))
        for compute in (lambda: x + number, lambda: number * x, lambda: fr.where(x > 0, x, number)):
            with pytest.raises(fr.SpecError, match=says):
                compute()
        with pytest.raises(fr.SpecError, match=says):
            fr.constant(number, dtype)
        with pytest.raises(fr.SpecError, match=says):
            fr.Variable(number, dtype=dtype)
    with pytest.raises(fr.SpecError, match=says):
        fr.add(np.ones(2, dtype), number)


def test_a_number_alone_that_is_beyond_float32_is_refused_and_beside_float64_is_what_it_is() -> None:
    with fr.Graph():
        for make in (fr.constant, fr.exp, fr.Variable, lambda number: fr.constant([number, 1])):
            with pytest.raises(fr.SpecError, match=r"1e\+300 does not fit float32.*np.float64"):
                make(1e300)
        wide = fr.Variable(1e300, dtype="float64")
        for beside in (wide * 2, fr.add(wide, [1e300]), fr.nn.sigmoid_cross_entropy(wide, 1e300)):
            assert beside.dtype == "float64"
        assert isinstance(wide.assign(1e300), fr.Operation)
    assert fr.add(np.zeros(1), [1e300])[0] == 1e300


def test_infinity_and_nan_fit_every_float() -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2,))
        assert (x * np.inf + float("nan")).dtype == np.float32


# ── dtypes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

STRANGE: list[Any] = ["complex64", complex, np.longdouble, "U3", str, object, "datetime64[s]", "S", "V2", "V4"]
STRANGE += ["float8_e4m3fn", "no such thing", None, 3]


@fr.op
def halved(x: fr.Spec) -> fr.Spec:
    """An own op that infers what there is not."""
    return fr.Spec("complex64", x.dims)


ASKED: dict[str, Callable[[Any, Any], Any]] = {
    "placeholder": lambda x, d: fr.placeholder(d, (2,)),
    "variable": lambda x, d: fr.Variable(1.0, dtype=d or "complex64"),
    "astype": lambda x, d: fr.astype(x, d),
    "constant": lambda x, d: fr.constant(1.0, d or "complex64"),
    "zeros": lambda x, d: fr.zeros((2,), d),
    "ones": lambda x, d: fr.ones((2,), d),
    "full": lambda x, d: fr.full((2,), 1.0, d or "complex64"),
    "zeros_like": lambda x, d: fr.zeros_like(x, d or "complex64"),
    "eye": lambda x, d: fr.eye(2, dtype=d or "complex64"),
    "arange": lambda x, d: fr.arange(3, dtype=d or "complex64"),
    "one_hot": lambda x, d: fr.one_hot([1], 2, dtype=d),
    "a queue": lambda x, d: fr.FIFOQueue(2, d),
    "uniform": lambda x, d: fr.random.uniform((2,), dtype=d, seed=1),
    "normal": lambda x, d: fr.random.normal((2,), dtype=d, seed=1),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_dtype_that_no_kernel_computes_is_refused_at_the_line_that_asks_for_it(asked: str) -> None:
    with fr.Graph():
        x = fr.placeholder("float32", (2,))
        for dtype in STRANGE:
            with pytest.raises(
                fr.SpecError, match=rf"^\w*{asked} \(\S*test_plain.py:\d+\): .*int8 to int64.* or float64"
            ):
                ASKED[asked](x, dtype)


VALUES: list[Any] = [np.ones(2, "V2"), np.ones(2, complex), np.array(["a"]), np.array([None])]
VALUES += [np.array(["2020"], "M8[Y]"), 1j, "a", None, [1, None], ["a"], [2**70]]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_of_such_a_dtype_is_refused_likewise(value: Any) -> None:
    with fr.Graph():
        x = fr.placeholder("int64", (2,))
        for take in (fr.Variable, fr.constant, fr.negative, lambda v: x * v):
            with pytest.raises(fr.SpecError, match=r"\(\S*test_plain.py:\d+\): .* is not a tensor"):
                take(value)
    with pytest.raises(fr.SpecError, match=r"\(\S*test_plain.py:\d+\): .* is not a tensor"):
        fr.negative(value)


@pytest.mark.parametrize("dtype", [*DTYPES, BFLOAT16])
def test_an_op_that_accepts_a_dtype_has_a_kernel_for_it(dtype: str) -> None:
    """Each example, with all inputs of the dtype and with each alone: refused while it is built, or computed."""
    missing, able = set(), with_halves(supports)
    for example in EXAMPLES:
        count = len(example.arrays)
        for chosen in (range(count), *([n] for n in range(count))):
            with fr.Graph() as graph:
                kinds = [dtype if n in chosen else array.dtype for n, array in enumerate(example.arrays)]
                with suppress(fr.GraphError):
                    example.run(*(fr.placeholder(k, a.shape) for k, a in zip(kinds, example.arrays, strict=True)))
            for node in graph.nodes:
                dtypes = [t.dtype for t in (*node.inputs, *node.outputs)]
                computed = any(name == node.op.name for name, _ in KERNELS) and node.op.name not in MADE_BY_PASSES
                if computed and not able(node.op.name, dtypes, "cpu"):
                    missing.add((node.op.name, *map(str, dtypes)))
    assert missing == set()


MADE_BY_PASSES = ("matmul_bias", "conv2d_bias")  # of floats alone


def test_the_wrong_dtype_of_specs_own_ops_and_feeds_is_told() -> None:
    with pytest.raises(fr.SpecError, match="complex64 are not supported; they are of bool"):
        fr.Spec("complex64", (2,))
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2,))
        with pytest.raises(
            fr.SpecError, match=r"^halved \(\S*test_plain.py:\d+\): tensors of dtype complex64 are not supported"
        ):
            halved(x)
    says = r"got float16\[2\]; convert it with .astype\('float32'\)"
    with fr.BlockingSession(graph) as session, pytest.raises(fr.FeedError, match=says):
        session.run(x, {x: np.ones(2, "float16")})


def test_arrays_of_the_other_byte_order_are_taken() -> None:
    assert fr.add(np.ones(2, ">f4"), 1.0).tolist() == [2, 2]
