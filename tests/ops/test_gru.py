"""Gated recurrent units beyond what `op_examples` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_examples_layers import recurrent

import flowrt as fr
from flowrt.base.errors import SpecError

SHAPES = {"x": (4, 3, 2), "h": (3, 5), "w_x": (2, 15), "w_h": (5, 15), "bias": (2, 15)}


def operands(dtype: str = "float64") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def composed(x: Any, h: Any, w_x: Any, w_h: Any, bias: Any, reset_after: bool) -> tuple[Any, Any]:
    """The same layer of single ops, its steps one after another."""
    outputs = []
    for t in range(4):
        r_x, z_x, n_x = (x[t] @ w_x[:, part] + bias[0, part] for part in (slice(5), slice(5, 10), slice(10, 15)))
        r_h, z_h, n_h = (h @ w_h[:, part] + bias[1, part] for part in (slice(5), slice(5, 10), slice(10, 15)))
        r, z = fr.sigmoid(r_x + r_h), fr.sigmoid(z_x + z_h)
        h = (1 - z) * fr.tanh(n_x + (r * n_h if reset_after else (r * h) @ w_h[:, 10:] + bias[1, 10:])) + z * h
        outputs.append(h)
    return fr.stack(outputs), h


@pytest.mark.parametrize("reset_after", [True, False])
async def test_answers_and_derivatives_are_those_of_the_single_ops(reset_after: bool) -> None:
    found = []
    with fr.Graph() as graph:
        inputs = [fr.placeholder("float64", shape) for shape in SHAPES.values()]
        for layer in (fr.nn.gru, composed):
            outputs, last = layer(*inputs, reset_after=reset_after)
            first = fr.gradients(fr.sum(fr.square(outputs)) + fr.sum(last), inputs)
            second = fr.gradients(fr.add_n([fr.sum(fr.square(slope)) for slope in first]), inputs)
            found.append([outputs, last, *first, *second])
    async with fr.Session(graph) as session:
        mine, judge = await session.run(found, dict(zip(inputs, operands().values(), strict=True)))
    for got, want in zip(mine, judge, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


async def test_steps_and_examples_are_as_many_as_a_run_says() -> None:
    given = operands("float32")
    with fr.Graph() as graph:
        x, h = fr.placeholder("float32", (None, None, 2)), fr.placeholder("float32", (None, 5))
        outputs, last = fr.nn.gru(x, h, given["w_x"], given["w_h"], given["bias"])
        slope = fr.gradients(fr.sum(last), x)
    async with fr.Session(graph) as session:
        for steps, batch in ((4, 3), (2, 3), (4, 1), (0, 2)):
            some = given["x"][:steps, :batch], given["h"][:batch]
            if batch == 2:
                some = np.zeros((0, 2, 2), "float32"), given["h"][:2]
            (y, end), (d,) = await session.run([[outputs, last], slope], {x: some[0], h: some[1]})
            want_y, want_end = recurrent(*some, given["w_x"], given["w_h"], given["bias"], True)
            np.testing.assert_allclose(y, want_y, rtol=2e-6, atol=2e-6)
            np.testing.assert_allclose(end, want_end, rtol=2e-6, atol=2e-6)
            assert d.shape == some[0].shape


def test_what_is_of_several_dtypes_is_computed_in_the_one_that_holds_all() -> None:
    given = operands("float32") | {"h": np.zeros((3, 5))}
    outputs, last = fr.nn.gru(**given)
    assert outputs.dtype == last.dtype == np.float64
    with fr.Graph():
        assert fr.nn.gru(**{k: fr.constant(v) for k, v in given.items()})[0].dtype == np.float64


MISFITS: list[tuple[Callable[[dict[str, np.ndarray]], Any], str]] = [
    (lambda v: v | {"h": v["h"][1:]}, r"h of gru must be float64\[3,5\], got float64\[2,5\]"),
    (lambda v: v | {"w_x": v["w_x"].T}, r"w_x of gru must be float64\[2,15\], got float64\[15,2\]"),
    (lambda v: v | {"w_h": v["w_h"][:, :10]}, r"w_h of gru must be float64\[5,15\], got float64\[5,10\]"),
    (lambda v: v | {"bias": v["bias"][:, :9]}, r"bias of gru must be float64\[2,15\], got float64\[2,9\]"),
    (lambda v: v | {"bias": v["bias"][0, :9]}, r"bias of gru must be float64\[15\], got float64\[9\]"),
    (lambda v: v | {"x": v["x"][0]}, r"x of gru must be float64\[\?,\?,\?\], got float64\[3,2\]"),
    (lambda v: {k: a.astype("int32") for k, a in v.items()}, "gru computes on floats, got int32"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=[m[1][:8] + str(n) for n, m in enumerate(MISFITS)])
def test_what_does_not_fit_says_so(change: Callable[[dict[str, np.ndarray]], Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"gru.*test_gru\.py:\d+.*{message}"):
        fr.nn.gru(**change(operands()))
