"""Softmax over very many classes, of which a step looks at the right ones and some candidates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import is_whole
from flowrt.base.spec import is_float
from flowrt.ops.comparison import equal
from flowrt.ops.elementwise import add, astype, divide, log, log1p, multiply, subtract, where
from flowrt.ops.inference import described, far_below, settled
from flowrt.ops.layers import embedding_lookup
from flowrt.ops.linalg import matmul
from flowrt.ops.random import log_uniform
from flowrt.ops.reduce import logsumexp
from flowrt.ops.reduce import sum as sum_
from flowrt.ops.shape import concat, expand_dims, reshape
from flowrt.ops.source import shape_of

if TYPE_CHECKING:
    from flowrt.graph import TensorOrArray
    from flowrt.typed import Operand


@located("sampled_softmax")
def sampled_softmax(
    weights: Operand,
    biases: Operand | None,
    labels: Operand,
    inputs: Operand,
    num_sampled: int | None = None,
    num_classes: int | None = None,
    *,
    sampled: Operand | None = None,
    seed: int | None = None,
) -> TensorOrArray:
    """An estimate of ``softmax_cross_entropy(inputs @ weights.T + biases, labels)`` for training: per example [...].

    ``inputs`` are [..., width], ``labels`` classes [...]. ``weights`` is a table [classes, width], or a list of shards
    as in `embedding_lookup`, and ``biases`` [classes], alike, or None. Only the rows of the labels and of
    ``num_sampled`` candidates are read, wherever these tables lie, and gradients are `IndexedSlices` of those.
    ``num_classes`` is how many rows the tables have, unless it is given. To predict, use all classes.

    Candidates are drawn as `random.log_uniform` does, with replacement, new ones at every step for all examples
    together; so classes are to be numbered by falling frequency, as words mostly are. Each stands for as many others as
    it is rare: its logit is lessened by the logarithm of how often its class is expected among the candidates. One that
    is the example's own class counts for nothing. So the sum of powers is expected to be that over all classes, and
    with many candidates the loss is the softmax's. (TensorFlow lessens the own class's logit, too.)

    ``sampled`` are candidates [num_sampled] drawn likewise before: where they are part of the batch, a trainer asks
    servers for those rows alone. Jean et al., "On using very large target vocabulary for neural machine translation",
    ACL 2015.
    """
    inputs, labels = *settled(inputs), *settled(labels)
    given, told = described(inputs), described(labels)
    if not is_float(given.dtype) or given.dims == ():
        raise SpecError(f"inputs must be floats [..., width], got {given}")
    if told.dtype.kind not in "iu":
        raise SpecError(f"labels must be classes, integers, got {told}")
    classes = _rows_of(weights) if num_classes is None else num_classes
    chosen, count = _chosen(sampled, num_sampled, classes, seed)
    ids = concat([chosen, astype(reshape(labels, (-1,)), "int64")], 0)
    rows, offsets = embedding_lookup(weights, ids), None if biases is None else embedding_lookup(biases, ids)
    x = reshape(inputs, concat([[-1], shape_of(inputs)[-1:]], 0))
    own, others = sum_(multiply(x, rows[count:]), -1), matmul(x, rows[:count], transpose_b=True)
    if offsets is not None:
        own, others = add(own, offsets[count:]), add(others, offsets[:count])
    expected = multiply(count, _share_of(chosen, classes))
    others = subtract(others, astype(log(expected), described(others).dtype))
    others = where(equal(expand_dims(ids[count:], -1), chosen), far_below(others), others)
    losses = subtract(logsumexp(concat([expand_dims(own, -1), others], -1), -1), own)
    return reshape(losses, shape_of(labels))


def _chosen(sampled: Any, count: int | None, classes: int, seed: int | None) -> tuple[Any, int]:
    """The candidates, and how many there are."""
    if sampled is None:
        if count is None or not is_whole(count, 1):
            raise SpecError(f"num_sampled must be a positive integer, got {count!r}; or give sampled, the candidates")
        return log_uniform((count,), classes, seed), int(count)
    (sampled,) = settled(sampled)
    spec = described(sampled)
    if spec.dtype.kind not in "iu" or spec.dims is None or spec.rank != 1:
        raise SpecError(f"sampled must be a vector of classes, integers, got {spec}")
    found = spec.shape[0] if count is None else count
    if found is None or (spec.shape[0] or found) != found:
        raise SpecError(f"how many candidates there are must be known: {spec}, num_sampled={count}")
    return astype(sampled, "int64"), found


def _share_of(ids: Any, classes: int) -> Any:
    """How probable it is that a candidate is this class, in float64."""
    return divide(log1p(divide(1.0, astype(add(ids, 1), "float64"))), math.log(classes + 1))


def _rows_of(table: Any) -> int:
    """How many rows a table has, or its shards together."""
    total = 0
    for part in table if isinstance(table, (list, tuple)) else [table]:
        dims = getattr(part, "shape", None) or described(part).dims
        if not dims or dims[0] is None:
            raise SpecError(f"how many rows weights have is not known, got {part!r}; give num_classes")
        total += dims[0]
    return total
