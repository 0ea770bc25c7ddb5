"""Recurrent layers beyond what `op_examples` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.base.errors import GraphError, SpecError
from flowrt.base.spec import Spec
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, STATUS, Application, Operand, apply_kernel
from flowrt.kernels.ops.nn import recurrent
from flowrt.op import lookup

SIZES = STEPS, BATCH, WIDTH, UNITS = 4, 37, 5, 18


def shapes_of(steps: int, batch: int, width: int, units: int) -> dict[str, tuple[int, ...]]:
    state, weights = {"h": (batch, units), "c": (batch, units)}, {"w_x": (width, 4 * units), "w_h": (units, 4 * units)}
    return {"x": (steps, batch, width), **state, **weights, "bias": (4 * units,)}


SHAPES = shapes_of(*SIZES)


def operands(dtype: str = "float32", sizes: tuple[int, int, int, int] = SIZES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: (rng.normal(size=shape) / 2).astype(dtype) for name, shape in shapes_of(*sizes).items()}


def applied(op: str, inputs: list[np.ndarray]) -> tuple[Application, list[np.ndarray], np.ndarray]:
    """The launches of ``op``, all their operands, and the bases."""
    specs = [Spec(a.dtype, a.shape) for a in inputs]
    outputs = lookup(op).infer(specs, {})
    application = apply_kernel(op, specs, outputs, {})
    made = [np.full(s.concrete, 7, s.dtype) for s in (*outputs, *application.scratch, *application.local)]
    words = np.zeros(RUN_WORDS, np.int64)
    words[-1] = words.ctypes.data  # whom a loop asks whether it is to stop
    arrays = [words, *inputs, *made]
    bases = np.zeros(len(arrays) + application.slots, np.int64)
    bases[: len(arrays)] = [a.ctypes.data for a in arrays]
    return application, arrays, bases


def launch(op: str, inputs: list[np.ndarray], *, backwards: bool = False) -> list[np.ndarray]:
    """What ``op`` makes if every unit of its launches is a call of its own, in order or ``backwards``."""
    application, arrays, bases = applied(op, inputs)
    places = [Operand(n) for n in range(1, len(bases))]
    for step in application.steps:
        block = step.block(places)
        for unit in range(step.units)[:: -1 if backwards else 1]:
            ENTRY_TYPE(step.address())(bases.ctypes.data, block.ctypes.data, unit, unit + 1)
    assert arrays[0][STATUS] == 0
    first = 1 + len(inputs)
    return arrays[first : first + len(lookup(op).infer([Spec(a.dtype, a.shape) for a in inputs], {}))]


def forth_and_back(given: dict[str, np.ndarray], *, backwards: bool = False) -> list[np.ndarray]:
    answers = launch("lstm_steps", list(given.values()), backwards=backwards)
    slopes = [answers[0], answers[1], answers[2], given["w_h"], answers[4]]
    return [*answers, *launch("lstm_steps_grad", slopes, backwards=backwards)]


LAYERS = [(4, 37, 5, 18), (1, 3, 4, 16), (0, 5, 4, 8), (3, 0, 2, 5), (2, 4, 0, 3), (2, 17, 3, 0), (2, 150, 3, 33)]


@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_batch_or_units_are_shared_in_any_order_to_the_same_bits(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for by_rows in (False, True):
        monkeypatch.setattr(recurrent, "are_shared_by_rows", lambda steps, *_, rows=by_rows: rows or steps == 0)
        given = operands(sizes=sizes)
        found += [forth_and_back(given, backwards=backwards) for backwards in (False, True)]
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def composed(x: Any, h: Any, c: Any, w_x: Any, w_h: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The same layer of single ops."""
    outputs = []
    for t in range(STEPS):
        sums = x[t] @ w_x + h @ w_h + bias
        i, f, g, o = (sums[:, n * UNITS : (n + 1) * UNITS] for n in range(4))
        c = fr.sigmoid(f) * c + fr.sigmoid(i) * fr.tanh(g)
        h = fr.sigmoid(o) * fr.tanh(c)
        outputs.append(h)
    return fr.stack(outputs), h, c


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1, 2)], ids=["outputs", "h", "c", "all"])
async def test_answers_and_gradients_are_those_of_the_single_ops(dtype: str, used: tuple[int, ...]) -> None:
    with fr.Graph() as graph:
        inputs = [fr.placeholder(dtype, (None,) * len(shape)) for shape in SHAPES.values()]
        fixed = [fr.reshape(x, shape) for x, shape in zip(inputs, SHAPES.values(), strict=True)]
        found = []
        for layer in (fr.nn.lstm, composed):
            answers = layer(*fixed)
            loss = sum(fr.sum(fr.square(answers[n] + 0.1)) for n in used)
            found.append([answers, fr.gradients(loss, fixed)])
        anything = fr.nn.lstm(*inputs)  # no size is known before the step
    async with fr.Session(graph) as session:
        feeds = dict(zip(inputs, operands(dtype).values(), strict=True))
        (mine, judge), again = await session.run([found, anything], feeds)
    margin = 2e-5 if dtype == "float32" else 1e-11
    for got, want in ((mine[0], judge[0]), (mine[1], judge[1]), (again, judge[0])):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=margin, atol=margin)


def test_threads_share_the_turns_of_few_rows_and_many_units_and_compute_the_same_bits() -> None:
    given = operands(sizes=(12, 16, 8, 160))
    found = []
    for threads in (1, 2):
        with fr.Graph() as graph:
            inputs = [fr.placeholder("float32", a.shape) for a in given.values()]
            answers = fr.nn.lstm(*inputs)
            slopes = fr.gradients(sum(fr.sum(fr.square(y)) for y in answers), inputs)
        with fr.BlockingSession(graph, options=fr.Options(threads=threads)) as session:
            step = session.compile([answers, slopes], inputs)
            for _ in range(6):  # the first ones are alone, and timed
                made = step(*given.values())
        found.append([*made[0], *made[1]])
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_layer_that_is_to_stop_takes_no_more_turns() -> None:
    given = list(operands(sizes=(3, 4, 5, 6)).values())
    application, arrays, bases = applied("lstm_steps", given)
    loop = application.steps[-1]
    arrays[0][STATUS] = 1
    block = loop.block([Operand(n) for n in range(1, len(bases))])
    ENTRY_TYPE(loop.address())(bases.ctypes.data, block.ctypes.data, 0, 1)
    assert (arrays[1 + len(given)] == 7).all()


SHARED = [  # steps, batch, units
    ((64, 32, 128), True),  # few weights: two blocks are enough
    ((64, 16, 128), False),
    ((50, 64, 256), False),  # many: each thread would read them all for few rows
    ((50, 128, 256), True),
    ((0, 1, 512), True),
    ((5, 0, 512), False),
]


@pytest.mark.parametrize(("sizes", "by_rows"), SHARED, ids=str)
def test_threads_share_the_batch_where_it_is_large_beside_the_weights(
    sizes: tuple[int, int, int], by_rows: bool
) -> None:
    assert recurrent.are_shared_by_rows(*sizes, 4) is by_rows


MISFITS: list[tuple[str, Callable[[dict[str, np.ndarray]], Any], str]] = [
    ("h", lambda v: v | {"h": v["h"][1:]}, r"h of lstm must be float32\[37,18\], got float32\[36,18\]"),
    ("w_x", lambda v: v | {"w_x": v["w_x"].T}, r"w_x of lstm must be float32\[5,72\], got float32\[72,5\]"),
    ("bias", lambda v: v | {"bias": v["bias"][:9]}, r"bias of lstm must be float32\[72\], got float32\[9\]"),
    ("x", lambda v: v | {"x": v["x"][0]}, r"x of lstm must be float32\[\?,\?,\?\], got float32\[37,5\]"),
    ("integers", lambda v: {k: a.astype("int32") for k, a in v.items()}, "lstm computes on floats, got int32"),
]


@pytest.mark.parametrize(("change", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_what_does_not_fit_says_so(change: Callable[[dict[str, np.ndarray]], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"test_recurrent\.py:\d+.*{message}"):
        fr.nn.lstm(**change(operands()))


def test_a_second_derivative_is_refused() -> None:
    with fr.Graph():
        values = {name: fr.constant(array) for name, array in operands().items()}
        slope = fr.gradients(fr.sum(fr.nn.lstm(**values)[0]), values["x"])[0]
        with pytest.raises(GraphError, match="lstm has no second derivatives"):
            fr.gradients(fr.sum(slope * slope), values["x"])
