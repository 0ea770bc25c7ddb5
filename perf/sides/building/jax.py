"""JAX's side of perf/building.py: what flowrt builds is traced, and XLA compiles it before the first step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from sides.building import clock as clock

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def chain(size: int) -> clock.Built:
    def run(x: Any, a: Any, b: Any) -> Any:
        for _ in range(size // 3):
            x = jnp.tanh(x * a + b)
        return x

    given = jnp.zeros(16), jnp.full(16, 1.1), jnp.full(16, 0.1)
    lowered = jax.jit(run).lower(*given)

    def ready() -> Any:
        compiled = lowered.compile()
        return lambda: compiled(*given).block_until_ready()

    return ready


def variables(size: int) -> clock.Built:
    def loss(made: Any, x: Any) -> Any:
        return sum(jnp.sum(jnp.square(v - x)) for v in made)

    def moved(v: Any, g: Any, m: Any, s: Any, t: Any) -> Any:
        m, s = BETA1 * m + (1 - BETA1) * g, BETA2 * s + (1 - BETA2) * g * g
        step = (m / (1 - BETA1**t)) / (jnp.sqrt(s / (1 - BETA2**t)) + EPSILON)
        return v - clock.RATE * step, m, s

    def run(made: Any, first: Any, second: Any, t: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(made, x)
        after = [moved(*each, t) for each in zip(made, slopes, first, second, strict=True)]
        return value, *map(list, zip(*after, strict=True)), t + 1

    x = jnp.ones(4)
    state: list[Any] = [*([jnp.zeros(4)] * size for _ in range(3)), jnp.float32(1)]
    lowered = jax.jit(run).lower(*state, x)

    def ready() -> Any:
        compiled = lowered.compile()

        def step() -> None:
            value, *state[:] = compiled(*state, x)
            value.block_until_ready()

        return step

    return ready


if __name__ == "__main__":
    clock.measure({"chain": chain, "variables": variables})
