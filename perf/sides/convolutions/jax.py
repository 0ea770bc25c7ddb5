"""JAX's side of perf/convolutions.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from sides import harness as h
from sides.convolutions import data as d
from sides.harness import Settings, Side


def _convolution(layer: d.Layer, direction: str) -> Callable[[Settings], Side]:
    def convolved(x: Any, filters: Any) -> Any:
        how = {
            "window_strides": [layer.stride] * 2,
            "padding": [(layer.padding, layer.padding)] * 2,
            "rhs_dilation": [layer.dilation] * 2,
            "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
            "feature_group_count": layer.groups,
        }
        return lax.conv_general_dilated(x, filters, **how)

    def computed(x: Any, filters: Any, dy: Any) -> Any:
        if direction == "forward":
            return convolved(x, filters)
        return jax.vjp(convolved, x, filters)[1](dy)[direction == "filters"]

    def side(a: Settings) -> Side:
        jax.config.update("jax_enable_x64", layer.dtype == "float64")
        values = [jax.numpy.asarray(v) for v in d.arrays(layer)]
        h.imported()
        jitted = jax.jit(computed)
        return Side(lambda: np.asarray(jitted(*values)), work=layer.flops)

    return side


WORKLOADS = {name: _convolution(layer, direction) for name, layer, direction in d.named()}

if __name__ == "__main__":
    h.main(WORKLOADS)
