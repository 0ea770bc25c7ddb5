"""Recurrent layers beyond what `op_examples` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flowrt as fr
from flowrt.errors import GraphError, SpecError
from flowrt.kernels.launch import ENTRY_TYPE, RUN_WORDS, Operand, apply_kernel
from flowrt.op import lookup
from flowrt.spec import Spec

STEPS, BATCH, WIDTH, UNITS = 4, 37, 5, 18
SHAPES = {
    "x": (STEPS, BATCH, WIDTH),
    "h": (BATCH, UNITS),
    "c": (BATCH, UNITS),
    "w_x": (WIDTH, 4 * UNITS),
    "w_h": (UNITS, 4 * UNITS),
    "bias": (4 * UNITS,),
}


def operands(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: (rng.normal(size=shape) / 2).astype(dtype) for name, shape in SHAPES.items()}


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


def launch(op: str, inputs: list[np.ndarray], outputs: list[Spec], ranges: list[tuple[int, int]]) -> list[np.ndarray]:
    """What ``op`` computes in calls for these ranges of its units, as threads would make them."""
    made = [np.full(spec.concrete, 7, spec.dtype) for spec in outputs]
    application = apply_kernel(op, [Spec(a.dtype, a.shape) for a in inputs], outputs, {})
    (step,) = application.steps
    words = np.zeros(RUN_WORDS, np.int64)
    for begin, end in ranges:
        local = [np.full(spec.concrete, 9, spec.dtype) for spec in application.local]
        arrays = [words, *inputs, *made, *local]
        bases = np.array([a.ctypes.data for a in arrays], np.int64)
        block = step.block([Operand(n) for n in range(1, len(arrays))])
        ENTRY_TYPE(step.address())(bases.ctypes.data, block.ctypes.data, begin, end)
    assert step.units == 3
    return made


def test_blocks_of_the_batch_are_computed_apart_in_any_order() -> None:
    given = operands()
    forward = lookup("lstm_steps").infer([Spec(a.dtype, a.shape) for a in given.values()], {})
    answers = launch("lstm_steps", list(given.values()), list(forward), [(0, 3)])
    for mine, whole in zip(
        launch("lstm_steps", list(given.values()), list(forward), [(2, 3), (0, 1), (1, 2)]), answers, strict=True
    ):
        np.testing.assert_array_equal(mine, whole)
    backward = [answers[0], answers[1], answers[2], given["c"], given["w_h"], answers[4]]
    specs = list(lookup("lstm_steps_grad").infer([Spec(a.dtype, a.shape) for a in backward], {}))
    for mine, whole in zip(
        launch("lstm_steps_grad", backward, specs, [(1, 3), (0, 1)]),
        launch("lstm_steps_grad", backward, specs, [(0, 3)]),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, whole)


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
