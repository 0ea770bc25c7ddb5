"""Ops of a program's own: attributes reach kernels by name, and each usual mistake is told in a line with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from kernel_world import own_tables

import flowrt as fr
from flowrt.base.traits import Arranged
from flowrt.kernels.language import table
from flowrt.kernels.language.table import find_kernel
from flowrt.op import REGISTRY
from flowrt.sched.regions.cost import predict

X = np.array([[1.0, -2.0], [3.0, -4.0]], np.float32)


@pytest.fixture(autouse=True)
def _own_world() -> Iterator[None]:
    before = dict(REGISTRY)
    with own_tables():
        yield
    REGISTRY.clear()
    REGISTRY.update(before)


def same(x: fr.Spec) -> fr.Spec:
    return x


def made(kernel: Callable[..., Any], infer: Callable[..., Any] = same, name: str = "own") -> Any:
    infer.__name__ = name
    op = fr.op(infer)
    fr.kernel(name, on="cpu")(kernel)
    return op


def test_attributes_of_every_kind_reach_the_kernel_by_their_names() -> None:
    def affine(
        x: fr.Spec,
        factor: float = 2.0,
        shift: int = 1,
        flip: bool = False,
        pair: tuple[Any, ...] = (1, 2.5),
        table: tuple[Any, ...] = ((1, 2), (3, 4)),
        comment: str = "stays behind",
    ) -> fr.Spec:
        return x

    def kernel(x: Any, out: Any, table: Any, factor: Any, pair: Any, flip: Any, shift: Any) -> None:
        xs, outs = x.reshape(-1), out.reshape(-1)
        for i in range(xs.size):
            outs[i] = xs[i] * factor + shift + pair[0] * pair[1] + table[1][0]
            if flip:
                outs[i] = -outs[i]

    op = made(kernel, affine)
    assert np.array_equal(op(X), X * 2 + 1 + 2.5 + 3)
    assert np.array_equal(op(X, 0.5, np.int64(-1), flip=np.bool_(True), pair=[2, np.float32(4)]), -(X / 2 - 1 + 8 + 3))
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (None, 2))
        y = [op(x, 3.0), op(x, 4.0, pair=(0, 0.0))]
    with fr.BlockingSession(graph) as session:
        first, second = session.run(y, {x: X})
    assert np.array_equal(first, X * 3 + 6.5)
    assert np.array_equal(second, X * 4 + 4)


def test_an_op_of_several_inputs_and_outputs_takes_attributes_behind_all_of_them() -> None:
    def both(a: fr.Spec, b: fr.Spec, t: float) -> tuple[fr.Spec, fr.Spec]:
        return a, b

    def kernel(a: Any, b: Any, larger: Any, smaller: Any, t: Any) -> None:
        for i in range(a.shape[0]):
            larger[i] = max(a[i], b[i]) + t
            smaller[i] = min(a[i], b[i]) - t

    larger, smaller = made(kernel, both)(np.ones(3), np.zeros(3), 0.5)
    assert (larger.tolist(), smaller.tolist()) == ([1.5] * 3, [-0.5] * 3)


def test_a_kernel_reshapes_what_lies_in_order() -> None:
    def kernel(x: Any, out: Any) -> None:
        rows = x.reshape(2, 1, 2)
        for i in range(2):
            part = rows[i].reshape((2,))
            out[i, 0], out[i, 1] = part[1], part[0]

    assert np.array_equal(made(kernel, name="turned")(X), X[:, ::-1])

    def apart(x: Any, out: Any) -> None:
        out.reshape(-1)[0] = x[:, 1:].reshape(-1)[0]

    with pytest.raises(fr.GraphError, match=r"does not compile: reshape\(\) supports contiguous array only"):
        made(apart, name="apart")(X)


@numba.njit  # type: ignore[untyped-decorator]
def compiled_helper(x: Any) -> Any:
    return x + 1


def plain_helper(x: Any) -> Any:
    return x + 1


def test_a_kernel_calls_helpers_that_numba_compiles() -> None:
    def kernel(x: Any, out: Any) -> None:
        for i in np.ndindex(x.shape):
            out[i] = compiled_helper(x[i])

    assert np.array_equal(made(kernel, name="helped_by_numba")(X), X + 1)


def missing(x: Any, out: Any, slope: Any) -> None:
    out[0, 0] = slope


def too_few(x: Any) -> None:
    x[0, 0] = 1


def swapped(t: Any, x: Any, out: Any) -> None:
    out[0, 0] = t


def texts(x: Any, out: Any, mode: Any) -> None:
    out[0, 0] = 1


def tables(x: Any, out: Any, table: Any) -> None:
    out[0, 0] = 1


def huge(x: Any, out: Any, big: Any) -> None:
    out[0, 0] = big


def whole(x: Any, out: Any) -> None:
    out[:] = x * 2


def raveled(x: Any, out: Any) -> None:
    out.ravel()[0] = 1


def transformed(x: Any, out: Any) -> None:
    out[:] = np.fft.fft(x)


def worded(x: Any, out: Any) -> None:
    out[0, 0] = "a"


def helped(x: Any, out: Any) -> None:
    out[0, 0] = plain_helper(x[0, 0])


def picky(x: Any, out: Any) -> None:
    if x[0, 0] > 0:
        raise ValueError("too much")
    out[0, 0] = 1


def picked(x: Any, out: Any) -> None:
    out[0, 0] = x.item()


def exchanged(out: Any, x: Any) -> None:
    for i in np.ndindex(x.shape):
        out[i] = x[i] + 1


def in_place(x: Any, out: Any) -> None:
    x += 1


@numba.njit  # type: ignore[untyped-decorator]
def compiled_filler(x: Any) -> None:
    x.reshape(-1)[0] = 1


def misled(x: Any, out: Any) -> None:
    compiled_filler(x[0])


def allocating(x: Any, out: Any) -> None:
    x[:] = x * 2


TABLE = np.ones(2)
MISTAKES: list[tuple[Callable[..., Any], int, str]] = [
    (missing, 0, r"takes \(x, out, slope\), but the op has 1 input and 1 output; .* names: t, mode, table, big"),
    (too_few, 0, r"takes \(x\), but the op has 1 input and 1 output"),
    (swapped, 0, r"takes \(t, x, out\), .* takes these arrays first"),
    (texts, 0, r"takes the attribute mode = 'max', but only numbers"),
    (tables, 0, r"takes the attribute table = array\(.* annotate an array as Spec"),
    (huge, 0, r"takes the attribute big = \d+, but only numbers of 64 bits"),
    (whole, 1, r"it allocates .* in `out\[:\] = x \* 2`, .* entry by entry"),
    (raveled, 1, r"it allocates .*`out.ravel\(\)\[0\] = 1`.* x.reshape\(-1\) and slices are views"),
    (transformed, 1, r"Unknown attribute 'fft'"),
    (worded, 1, r"No implementation of function .*setitem"),
    (helped, 0, r"'plain_helper'.*a helper that a kernel calls is decorated with @numba.njit"),
    (picky, 2, r'the kernel raised an error \(picky, test_own_ops.py:HERE: raise ValueError\("too much"\)\)'),
    (picked, 0, r"the kernel raised an error \(picked, test_own_ops.py:HERE\)"),
    (exchanged, 2, r"writes into an input, .* takes 1 input \(out\) first, then 1 output \(x\) to fill"),
    (in_place, 0, r"writes into an input, .* takes 1 input \(x\) first"),
    (allocating, 1, r"it allocates .* in `x\[:\] = x \* 2`"),
    (misled, -3, r"hands one to a helper that may; it takes 1 input \(x\)"),
]


@pytest.mark.parametrize(("kernel", "line", "says"), MISTAKES, ids=[kernel.__name__ for kernel, _, _ in MISTAKES])
def test_a_mistake_in_a_kernel_is_told_in_a_line_with_its_place(
    kernel: Callable[..., Any], line: int, says: str
) -> None:
    def infer(x: fr.Spec, t: float = 1.0, mode: str = "max", table: Any = TABLE, big: int = 2**63) -> fr.Spec:
        return x

    op = made(kernel, infer, kernel.__name__)
    at = kernel.__code__.co_firstlineno + line
    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2, 2))
        y = op(x)
    with fr.BlockingSession(graph) as session:
        for run in (lambda: op(X), lambda: session.run(y, {x: X})):
            with pytest.raises(fr.FlowrtError, match=says.replace("HERE", str(at))) as caught:
                run()
            text = str(caught.value)
            assert f"test_own_ops.py:{at}" in text
            assert kernel.__name__ in text.partition("test_own_ops.py")[0]
            assert "\n" not in text
            assert len(text) < 600
    assert X.tolist() == [[1, -2], [3, -4]]


def test_what_can_be_no_kernel_is_refused_at_its_decorator() -> None:
    def answering(x: Any, out: Any) -> Any:
        return x * 2

    def many(*arrays: Any) -> None:
        arrays[1][0] = 1

    def defaulting(x: Any, out: Any, t: float = 2.0) -> None:
        out[0] = t

    for kernel, says in (
        (answering, "returns a value; it writes what it computes into its last arrays"),
        (many, r"takes \*arrays\S* \S+; name its inputs, outputs and attributes one by one"),
        (defaulting, "the default belongs to the op's attribute"),
    ):
        with pytest.raises(
            fr.GraphError, match=rf"^the cpu kernel .*{kernel.__name__} of 'own' \(test_own_ops.py:\d+\).*{says}"
        ):
            fr.kernel("own", on="cpu")(kernel)
    with pytest.raises(fr.GraphError, match=r'computes on "cpu" or "cuda", not on \'tpu\''):
        fr.kernel("own", on="tpu")(picky)
    with pytest.raises(fr.GraphError, match="decorates a plain function of arrays"):
        fr.kernel("own")(len)


def test_an_op_without_a_kernel_says_how_to_write_one() -> None:
    @fr.op
    def smoothed(x: fr.Spec) -> fr.Spec:
        return x

    @fr.kernel("smothed", on="cpu")
    def kernel(x: Any, out: Any) -> None:
        out[0, 0] = 1

    with pytest.raises(
        fr.GraphError, match=r'^smoothed \(\S*test_own_ops.py:\d+\) .* @fr.kernel\("smoothed", on="cpu"\).*\'smothed\''
    ):
        smoothed(X)
    with fr.Graph() as graph:
        y = smoothed(fr.constant(X))
    with (
        fr.BlockingSession(graph) as session,
        pytest.raises(fr.GraphError, match=r"^smoothed 'smoothed' \(\S*:\d+\).*@fr.kernel"),
    ):
        session.run(y)


def test_what_an_ops_function_answers_and_takes_is_checked() -> None:
    @fr.op
    def shapely(x: fr.Spec) -> Any:
        return x.shape

    @fr.kernel("shapely", on="cpu")
    def kernel(x: Any, out: Any) -> None:
        out[0, 0] = 1

    @fr.op
    def choosy(x: fr.Spec, t: float) -> fr.Spec:
        return x

    with pytest.raises(
        fr.SpecError, match=r"^shapely \(\S*:\d+\): its function answered \(2, 2\), not a Spec for each"
    ):
        shapely(X)
    with pytest.raises(fr.GraphError, match=r"^op untold: annotate its tensors, as in x: fr.Spec"):

        @fr.op
        def untold(x):  # type: ignore[no-untyped-def]
            return x

    with fr.Graph():
        x = fr.constant(X)
        with pytest.raises(fr.SpecError, match=r"^choosy \(\S*:\d+\): t is an attribute.*annotate it fr.Spec"):
            choosy(x, x)
        with pytest.raises(fr.SpecError, match=r"^choosy\(x: .* \(\S*:\d+\): missing a required argument: 't'"):
            choosy(x)
        with pytest.raises(fr.SpecError, match=r"^choosy \(\S*:\d+\): t is a number, got 'a'"):
            choosy(x, "a")


def test_gradient_rules_may_answer_one_alone_and_are_told_of_by_name() -> None:
    @fr.op
    def tripled(x: fr.Spec) -> fr.Spec:
        return x

    @fr.op
    def mixed(a: fr.Spec, b: fr.Spec) -> fr.Spec:
        return a

    with fr.Graph():
        x = fr.constant(X)
        with pytest.raises(fr.GraphError, match=r"tripled.*define one with @tripled.gradient"):
            fr.gradients(tripled(x), [x])
        tripled.gradient(lambda node, dy: dy * 3.0)
        assert fr.gradients(tripled(x), [x])[0].spec == x.spec
        mixed.gradient(lambda node, dy: dy)
        with pytest.raises(fr.GraphError, match=r"mixed.*1 gradients for 2 inputs; it answers a tuple, with None"):
            fr.gradients(mixed(x, x), [x])


def test_a_kernel_written_anew_takes_the_place_of_the_one_before() -> None:
    @fr.op
    def rewritten(x: fr.Spec) -> fr.Spec:
        return x

    def once(x: Any, out: Any) -> None:
        out[0, 0] = x[0, 0]

    def twice(x: Any, out: Any) -> None:
        out[0, 0] = 2 * x[0, 0]

    for kernel, factor in ((once, 1), (twice, 2), (once, 1)):
        fr.kernel("rewritten", on="cpu")(kernel)
        for _ in range(4):  # the way of calls that are alike changes
            assert rewritten(np.ones((1, 1)))[0, 0] == factor
        with fr.Graph() as graph:
            y = rewritten(fr.placeholder("float64", (1, 1), name="x"))
        with fr.BlockingSession(graph) as session:
            assert session.run(y, {graph.get_tensor_by_name("x:0"): np.ones((1, 1))})[0, 0] == factor


def test_whoever_looks_while_a_kernel_is_written_anew_finds_that_one_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also who looked before it was there, and stores what it found once it is; and who is told to look again."""
    looking, told = iter([True]), []
    monkeypatch.setattr(table, "REPLACED", [lambda: told.append(found())])

    def found() -> Any:
        kernel = find_kernel("own_raced", "cpu", (np.float32, np.float32))
        return kernel and kernel.function

    def asked(dtypes: Any) -> bool:
        if next(looking, False):  # as another thread may
            fr.kernel("own_raced", on="cpu")(anew)
        return True

    def before(x: Any, out: Any) -> None:
        out[:] = x

    def anew(x: Any, out: Any) -> None:
        out[:] = x

    fr.kernel("own_raced", on="cpu", dtypes=asked)(before)
    assert found() is before
    assert found() is anew
    assert told == [anew]


def test_a_kernel_that_states_its_flops_is_taken_for_as_long_as_they_last() -> None:
    def kernel(x: Any, out: Any) -> None:
        out[:] = 0

    specs = (fr.Spec("float32", (100,)), fr.Spec("float32", (100,)))
    silent = made(kernel, name="own_silent")
    fr.kernel("own_long", on="cpu", flops=lambda specs: 1e9 * specs[0].size, moves=lambda specs: 8)(kernel)
    assert predict(silent.name, specs) < 1e-6
    assert predict("own_long", specs) > 1


def test_a_view_of_a_programs_own_needs_no_kernel_and_stands_beside_what_is_fused() -> None:
    @fr.op(view=Arranged.RESHAPED)
    def own_flat(x: fr.Spec) -> fr.Spec:
        return x.with_shape((x.shape[0],))

    @own_flat.gradient
    def own_flat_gradient(node: Any, dy: Any) -> tuple[Any, ...]:
        return (fr.expand_dims(dy, 1),)

    x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 12)
    assert np.array_equal(own_flat(x[:, :1]), x[:, 0])
    with fr.Graph() as graph:
        given = fr.placeholder("float32", (None, 12))
        largest = fr.max(given, axis=1, keepdims=True)
        total = fr.log(fr.sum(fr.exp(given - largest), axis=1)) + own_flat(largest)
        (slope,) = fr.gradients(fr.sum(total), [given])
    with fr.BlockingSession(graph) as session:
        found, slopes = session.run([total, slope], {given: x})
    near = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    assert np.allclose(found, np.log(np.exp(x).sum(axis=1)), rtol=1e-5)
    assert np.allclose(slopes, near, rtol=1e-5)


def test_a_gradient_of_one_expression_may_be_stated_with_the_op() -> None:
    @fr.op(name="thrice", gradient=lambda node, dy: (dy * 3.0,))
    def thrice(x: fr.Operand) -> fr.Result:
        return x

    @fr.op(name="apart", gradient=None)
    def apart(x: fr.Operand) -> fr.Result:
        return x

    @fr.kernel("thrice", on="cpu")
    def thrice_kernel(x: Any, out: Any) -> None:
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                out[i, j] = x[i, j] * 3

    with fr.Graph() as graph:
        x = fr.placeholder("float32", (2, 2))
        y = thrice(x)
        (slope,) = fr.gradients(y, [x])
        assert fr.gradients(apart(x), [x]) == [None]
    with fr.BlockingSession(graph) as session:
        tripled, found = session.run([y, slope], {x: X})
    assert np.array_equal(tripled, 3 * X)
    assert np.array_equal(found, np.full((2, 2), 3, np.float32))
