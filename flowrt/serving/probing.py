"""What a model is tried with before anybody asks, and whether requests can be joined at all.

Law: pure. Values are drawn from a fixed seed; of a model whose sizes are open, or that draws at random, nothing is
tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flowrt.base.spec import is_float

if TYPE_CHECKING:
    from flowrt.base.spec import Spec
    from flowrt.serving.model import Model

Array: TypeAlias = "np.ndarray[Any, Any]"

SEED = 7


def joins(model: Model) -> bool:
    """Whether all that goes in and comes out has a first axis whose size is open, for rows of several requests."""
    tensors = [*model.inputs.values(), *model.outputs.values()]
    return bool(model.inputs) and all(t.spec.dims and t.spec.dims[0] is None for t in tensors)


def sample(model: Model, rows: int) -> list[Array] | None:
    """Zeros for every input, of so many rows where that is open; None where other sizes are."""
    specs = [tensor.spec for tensor in model.inputs.values()]
    if any(spec.dims is None or None in spec.dims[1:] for spec in specs):
        return None
    shapes = [tuple(rows if size is None else size for size in spec.shape) for spec in specs]
    return [np.zeros(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]


def probes(model: Model) -> tuple[list[Array], list[Array]] | None:
    """Two rows of every input, twice, the same first one and another second one."""
    if sample(model, 2) is None or any(node.op.stateful for node in model.graph.nodes):
        return None
    rng = np.random.default_rng(SEED)
    specs = [tensor.spec for tensor in model.inputs.values()]
    one = [_drawn(rng, spec) for spec in specs]
    return one, [np.concatenate([array[:1], _drawn(rng, array)[1:]]) for array in one]


def _drawn(rng: np.random.Generator, like: Spec | Array) -> Array:
    shape = (2, *like.shape[1:])
    drawn = rng.normal(size=shape) if is_float(like.dtype) else rng.integers(0, 2, shape)
    return drawn.astype(like.dtype)
