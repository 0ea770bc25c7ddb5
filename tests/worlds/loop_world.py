"""Loops that are one kernel, as tests look at them, and loops and branches that guard what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrt as fr
from flowrt.kernels.composite.scalar_loop import ScalarLoopStep
from flowrt.sched.loops.scalar_loops import apply_scalar_loop, in_one_kernel


def step_of(graph: fr.Graph) -> ScalarLoopStep:
    """The one launch that the graph's last loop comes to."""
    node = [n for n in graph.nodes if n.op.name == "loop"][-1]
    specs = [t.spec for t in node.inputs]
    assert isinstance(in_one_kernel(specs, node.attrs), float)
    made = apply_scalar_loop(specs, [t.spec for t in node.outputs], node.attrs)
    assert made is not None
    (step,) = made.steps
    assert isinstance(step, ScalarLoopStep)
    return step


def guarded(x: Any) -> dict[str, Any]:
    """What of some rows would be an error where there are none, and is then not computed."""
    count = fr.shape_of(x)[0]

    def halved(y: Any) -> Any:
        return fr.while_loop(
            lambda i, y: fr.logical_and(i < 2, fr.shape_of(y)[0] > 0),
            lambda i, y: (i + 1, y / fr.max(y)),
            (np.int64(0), y),
        )[1]

    return {
        "a branch": fr.cond(count > 0, lambda: fr.max(x), lambda: np.float32(-1)),
        "a branch's entry": fr.cond(count > 0, lambda: x[0], lambda: np.float32(-1)),
        "a branch's loop": fr.cond(count > 0, lambda: halved(x), lambda: x),
        "a loop": halved(x),
        "a scan": fr.scan(lambda c, r: (c + fr.max(x) * r + x[0], c), np.float32(0), x),
        "what is mapped": fr.map_fn(lambda r: r - fr.max(x), x),
        "a branch in a loop": fr.map_fn(lambda r: fr.cond(count > 5, lambda: x[5] + r, lambda: r), x),
    }


def assert_guarded(found: dict[str, Any], fed: Any) -> None:
    """That this is what `guarded` makes of ``fed``, one, two, ..."""
    size = len(fed)
    assert (found["a branch"], found["a branch's entry"]) == ((size, 1) if size else (-1, -1))
    for name in ("a loop", "a branch's loop"):
        np.testing.assert_allclose(found[name], fed / max(size, 1))
    assert found["a scan"][1].shape == (size,)
    np.testing.assert_array_equal(found["what is mapped"], fed - size)
    np.testing.assert_array_equal(found["a branch in a loop"], fed + 6 if size > 5 else fed)
