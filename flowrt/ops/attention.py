"""Attention: what queries find among keys, of products and softmax.

Law: queries are taken a block at a time, each with the keys that it may see, so that half the work of causal attention
is left out, and what lies between the products is never there for all queries. What gradients keep of a block are its
weights; where there are many keys, they compute these again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.spec import Spec, is_float, kind_of
from flowrt.base.traits import Arranged
from flowrt.graph import control_dependencies
from flowrt.op import as_value, gradients_inside, whole
from flowrt.ops.comparison import greater, greater_equal, logical_and
from flowrt.ops.elementwise import add, astype, maximum, multiply, where
from flowrt.ops.flow import identity
from flowrt.ops.inference import described, far_below, settled
from flowrt.ops.linalg import matmul
from flowrt.ops.precision import mixed_precision, precision_in_force
from flowrt.ops.reduce import any as any_
from flowrt.ops.reduce import onto
from flowrt.ops.shape import concat, expand_dims, reshape
from flowrt.ops.softmax import softmax
from flowrt.ops.source import arange, shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowrt.base.spec import Shape
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

BLOCK, BLOCKS = 128, 16  # queries of a block, at least; blocks, at most
KEPT = 1024  # keys up to which gradients keep the weights of a block


@whole
@located("attention")
def attention(
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None = None,
    *,
    causal: bool = False,
    scale: Any = None,
) -> TensorOrArray:
    """``softmax(scale * q @ k.T + mask) @ v``: [..., heads, queries, depth of v].

    ``q`` is [..., heads, queries, depth], ``k`` [..., heads, keys, depth], ``v`` [..., heads, keys, depth of v]; axes
    before the last two broadcast. Where ``q`` has n times as many heads as ``k`` and ``v``, n in a row share one. That
    is PyTorch's scaled_dot_product_attention; JAX has heads behind time.

    ``mask`` broadcasts to [..., heads, queries, keys]: bools say what is attended to, floats are added to the scores,
    -inf where nothing is to be attended to. ``causal`` leaves out keys behind the query's own place, both counted from
    0. A query that attends to nothing is answered with zeros, and has no gradient. ``scale`` is 1 / sqrt(depth) unless
    it is given.

    For gradients each block of queries keeps its weights where there are up to 1,024 keys. With more of them, nothing
    is kept but ``q``, ``k``, ``v``, ``mask`` and the result, and weights are computed again, block by block: memory
    grows with time, not its square. (Sizes of time that only a step knows: all queries are one block, whose weights
    are kept.) Vaswani et al., "Attention is all you need", 2017; Rabe and Staats, "Self-attention does not need O(n²)
    memory", 2021.
    """
    q, k, v = settled(q, k, v)
    mask = None if mask is None else as_value(mask)
    _check(q, k, v, mask)
    factor = 1.0
    if scale is None:
        factor, q = _usual_scale(q)
    elif isinstance(scale, (int, float)):
        factor = float(scale)
    else:
        q = multiply(q, scale)
    groups = _sharing(described(q), described(k))
    if groups is None:
        return _attended_in_blocks(q, k, v, mask, causal, factor)
    shared = None if mask is None else _mask_in_groups(mask, *groups)
    y = _attended_in_blocks(_in_groups(q, *groups), expand_dims(k, -3), expand_dims(v, -3), shared, causal, factor)
    return _sized(y, -4, [groups[0] * groups[1]])


def _check(q: Any, k: Any, v: Any, mask: Any) -> None:
    for what, given in (("q", q), ("k", k), ("v", v)):
        spec = described(given)
        if not is_float(spec.dtype):
            raise SpecError(f"{what} must be floating, got {spec}; use astype")
        if spec.dims is not None and spec.rank < 2:
            raise SpecError(f"{what} must be [..., time, depth], got {spec}")
    if mask is not None and kind_of(described(mask).dtype) not in "bf":
        raise SpecError(f"mask must be bools or floats, got {described(mask)}; write mask != 0")
    query, key, value = (described(x).dims for x in (q, k, v))
    for one, other, axis, fix in (
        (query, key, -1, "q and k must have the same depth"),
        (key, value, -2, "k and v must have as many keys"),
    ):
        if one is not None and other is not None and None not in (one[axis], other[axis]) and one[axis] != other[axis]:
            raise SpecError(f"{fix}, got {described(q)}, {described(k)} and {described(v)}")
    if mask is not None and query is not None and key is not None:
        _check_mask(described(mask), query, key)


def _check_mask(mask: Spec, q: Shape, k: Shape) -> None:
    rank = max(len(q), len(k))
    mine, theirs = ((1,) * (rank - len(dims)) + dims[:-2] for dims in (q, k))
    scores = Spec("float32", (*(n if m == 1 else m for m, n in zip(mine, theirs, strict=True)), q[-2], k[-2]))
    if mask.dims is not None and onto(mask.dims, scores.shape) is None:
        fix = "; an axis for heads is missing: mask[:, None]" if mask.rank == rank - 1 else ""
        raise SpecError(f"mask must broadcast to {scores}, of queries and keys, got {mask}{fix}")


def _usual_scale(q: Any) -> tuple[float, Any]:
    """A number by which scores are multiplied, and ``q``, which is where only the step knows the depth."""
    spec = described(q)
    depth = None if spec.dims is None else spec.dims[-1]
    if depth is not None:
        return max(depth, 1) ** -0.5, q
    return 1.0, multiply(q, astype(shape_of(q)[-1], spec.dtype) ** -0.5)


def _sharing(q: Spec, k: Spec) -> tuple[int, int] | None:
    """How many heads keys have, and how many of the queries' share one, where these are not as many."""
    if q.dims is None or k.dims is None or min(q.rank, k.rank) < 3:
        return None
    mine, theirs = q.shape[-3], k.shape[-3]
    if mine is None or theirs is None or theirs == 1 or mine in (1, theirs):
        return None
    if mine % theirs:
        raise SpecError(
            f"{mine} heads of queries cannot share {theirs} of keys evenly: {q} and {k}; heads are before time"
        )
    return theirs, mine // theirs


def _in_groups(x: Any, heads: int, group: int) -> Any:
    """``x`` with the heads that share one along an axis of their own."""
    return _sized(x, -3, [heads, group])


def _sized(x: Any, axis: int, heads: list[int]) -> TensorOrArray:
    """``x`` with these sizes in the place of those from ``axis`` on and before time."""
    sizes = shape_of(x)
    return reshape(x, concat([sizes[:axis], heads, sizes[-2:]], 0))


def _mask_in_groups(mask: Any, heads: int, group: int) -> Any:
    dims = described(mask).dims
    if dims is None:
        raise SpecError("the rank of mask must be known where heads share keys; declare its shape")
    if len(dims) < 3:
        return mask
    return expand_dims(mask, -3) if dims[-3] == 1 else _in_groups(mask, heads, group)


def _attended_in_blocks(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> TensorOrArray:
    keys = described(k).dims
    found = [_attended(*part, scale) for part in _parts(q, k, v, mask, causal)]
    y: TensorOrArray = found[0] if len(found) == 1 else concat(found, -2)
    if len(found) > 1 and keys is not None and (keys[-2] or 0) > KEPT:
        return weighted(y, q, k, v, mask, causal=causal, scale=scale, precision=precision_in_force())
    return y


def _parts(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
    """Of each block the queries, and what they may see of keys, values and mask; then which keys they may, by time."""
    queries, keys = (None if (dims := described(x).dims) is None else dims[-2] for x in (q, k))
    if queries is None or keys is None or not _fits_blocks(mask):
        yield q, k, v, mask, _in_order(arange(shape_of(q)[-2]), arange(shape_of(k)[-2])) if causal else None
        return
    for first, last, seen in _blocks(queries, keys, causal):
        part = q if last - first == queries else q[..., first:last, :]
        near = (k, v) if seen == keys else (k[..., :seen, :], v[..., :seen, :])
        order = _in_order(arange(first, last), arange(seen)) if causal and seen > first + 1 else None
        yield part, *near, _part(mask, first, last, seen), order


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """The queries of each block, from the first to before the last, and how many keys it sees."""
    size = max(BLOCK, -(-queries // BLOCKS))
    if queries <= BLOCK or (not causal and keys <= 2 * BLOCK):
        size = max(queries, 1)
    for first in range(0, max(queries, 1), size):
        last = min(first + size, queries)
        yield first, last, min(last, keys) if causal else keys


def _in_order(queries: Any, keys: Any) -> Any:
    """Which keys do not come behind the query."""
    return greater_equal(expand_dims(queries, -1), keys)


def _fits_blocks(mask: Any) -> bool:
    """Whether a part of the mask can be told for a part of the queries and keys."""
    dims = () if mask is None else described(mask).dims
    return dims is not None and None not in dims[-2:]


def _part(mask: Any, first: int, last: int, seen: int) -> Any:
    """What of ``mask`` is for these queries and keys."""
    dims = () if mask is None else described(mask).shape
    if len(dims) > 0 and dims[-1] not in (1, seen):
        mask = mask[..., :seen]
    if len(dims) > 1 and dims[-2] not in (1, last - first):
        mask = mask[..., first:last, :]
    return mask


def _attended(q: Any, k: Any, v: Any, mask: Any, order: Any, scale: Any) -> Any:
    """What one block is answered."""
    is_bias = mask is not None and is_float(described(mask).dtype)
    scores = matmul(q, k, transpose_b=True)
    if scale != 1:
        scores = multiply(scores, scale)
    if is_bias:
        scores = add(scores, astype(maximum(mask, max(map(far_below, (mask, scores)))), described(scores).dtype))
    allowed = order if mask is None or is_bias else mask if order is None else logical_and(mask, order)
    y = matmul(softmax(scores if allowed is None else where(allowed, scores, far_below(scores))), v)
    if mask is None:
        return y
    some = greater(mask, -np.inf) if is_bias else mask
    return where(any_(some if order is None else logical_and(some, order), -1, True), y, 0)


@op(view=Arranged.RESHAPED, unread=(1, 2, 3, 4))
def weighted(
    y: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Operand | None = None,
    *,
    causal: bool = False,
    scale: float = 1.0,
    precision: str = "float32",
) -> Result:
    """``y``, which is `attention` of the others, for whose gradient each block's weights are computed again."""
    return y


@weighted.gradient
def weighted_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    _, q, k, v, *mask = node.inputs
    shared = [x for x in (k, v, *mask) if is_float(x.dtype)]
    slopes: list[Any] = []
    totals: list[Any] = []
    first = 0
    for part, keys, values, mine, order in _parts(q, k, v, mask[0] if mask else None, bool(node.attrs["causal"])):
        with control_dependencies(totals):  # else blocks may all be under way at once
            again = identity(part)  # else what was computed of it would be kept
        with mixed_precision(node.attrs["precision"]):
            y = _attended(again, keys, values, mine, order, node.attrs["scale"])
        last = first + y.shape[-2]
        slope, *found = gradients_inside([y], [again, *shared], [dy[..., first:last, :]])
        slopes.append(slope)
        totals = [total + one for total, one in zip(totals, found, strict=True)] if totals else found
        first = last
    return None, concat(slopes, -2), *totals, *[None] * (3 - len(totals) if mask else 0)
