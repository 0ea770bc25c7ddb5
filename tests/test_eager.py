from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import flowrt as fr
from flowrt.op import no_gradient, op

if TYPE_CHECKING:
    from flowrt.spec import Spec


@no_gradient
@op
def eager_weighted(x: Spec, weights: Any) -> Spec:
    """``x`` times the first of ``weights``."""
    return x


@fr.kernel("eager_weighted", layout=lambda inputs, outputs, attrs: _weighted_call(inputs, outputs, attrs))
def eager_weighted_kernel(x: Any, y: Any, weight: Any) -> None:
    for i in range(x.size):
        y[i] = x[i] * weight


def _weighted_call(inputs: Any, outputs: Any, attrs: Any) -> Any:
    from flowrt.kernels.table import Call, View

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
