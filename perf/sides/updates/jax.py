"""JAX's side of perf/updates.py: one jax.jit of the whole update, which is given parameters and slots to overwrite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from sides import harness as h
from sides.harness import Settings, Side
from sides.updates import data as d

SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}


def moved(rule: str, p: Any, g: Any, slots: Any, count: Any) -> tuple[Any, list[Any]]:
    """A parameter and its slots after one update."""
    match rule:
        case "sgd":
            return p - d.RATE * g, []
        case "momentum":
            v = d.MOMENTUM * slots[0] + g
            return p - d.RATE * v, [v]
    m, s = d.BETA1 * slots[0] + (1 - d.BETA1) * g, d.BETA2 * slots[1] + (1 - d.BETA2) * g * g
    mean, square = m / (1 - d.BETA1**count), s / (1 - d.BETA2**count)
    return p - d.RATE * mean / (jnp.sqrt(square) + d.EPSILON), [m, s]


def update(a: Settings) -> Side:
    values, slopes = d.parameters(a.workload)
    rule = a.workload.split("-")[0]
    h.imported()
    gradients = [jnp.asarray(slope) for slope in slopes]
    held = [jnp.array(value) for value in values], [[jnp.zeros_like(g)] * SLOTS[rule] for g in gradients]
    held = jax.tree.map(jnp.copy, held)  # memory of its own for each
    state = [(*held, jnp.float32(1))]

    def all_moved(parameters: Any, slots: Any, count: Any, gradients: Any) -> Any:
        pairs = [moved(rule, p, g, s, count) for p, g, s in zip(parameters, gradients, slots, strict=True)]
        return parameters[-1][0], [p for p, _ in pairs], [s for _, s in pairs], count + 1

    run = jax.jit(all_moved, donate_argnums=(0, 1))

    def step() -> float:
        before, *after = run(*state[0], gradients)
        jax.block_until_ready(after)
        state[0] = after
        return float(before)

    return Side(step)


if __name__ == "__main__":
    h.main(dict.fromkeys(d.WORKLOADS, update))
