"""Products of matrices, and norms."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.spec import Shape, Spec, as_dtype, is_float, normal_axes
from flowrt.base.traits import Contraction
from flowrt.op import whole
from flowrt.ops.comparison import equal, not_equal
from flowrt.ops.elementwise import abs as magnitude
from flowrt.ops.elementwise import astype, pow, rounded_once, sqrt, square, where
from flowrt.ops.inference import as_float, broadcast, described
from flowrt.ops.precision import BITS, as_product
from flowrt.ops.reduce import max, min, sum
from flowrt.ops.shape import expand_dims, reshape, squeeze
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Axes
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result

__all__ = ["matmul", "norm"]


STORED = (("bfloat16", "matmul_bfloat16"), ("float16", "matmul_float16"))


@op(promote=True, core=2, contraction=Contraction("matmul_bias", STORED))
def matmul(
    a: Operand, b: Operand, transpose_a: bool = False, transpose_b: bool = False, *, name: str | None = None
) -> Result:
    """The product of matrices in the last two axes; the axes before them broadcast.

    ``transpose_a`` and ``transpose_b`` swap the last two axes of an operand first. As in NumPy a vector stands for a
    row on the left and a column on the right, and its axis is left out of the result.
    """
    if a.dtype == bool:
        raise SpecError(f"cannot multiply matrices of bools, got {a} and {b}; use astype")
    if a.dims is None or b.dims is None:
        return Spec(a.dtype, None)
    if a.rank == 0 or b.rank == 0:
        raise SpecError(f"cannot multiply {a} by {b}: matmul takes matrices; use multiply for scalars")
    if (a.rank == 1 and transpose_a) or (b.rank == 1 and transpose_b):
        raise SpecError(f"cannot transpose a vector: {a} by {b}; leave its transpose flag out")
    (m, k), (other, n) = _matrix(a, transpose_a, row=True), _matrix(b, transpose_b, row=False)
    if k is not None and other is not None and k != other:
        raise SpecError(f"cannot multiply {a} by {b}{_fix(a, b, transpose_a, transpose_b)}")
    batch = broadcast(Spec(a.dtype, a.shape[:-2]), Spec(b.dtype, b.shape[:-2]))
    rows, columns = () if a.rank == 1 else (m,), () if b.rank == 1 else (n,)
    return Spec(a.dtype, None if batch is None else (*batch, *rows, *columns))


def _matrix(x: Spec, transposed: bool, *, row: bool) -> Shape:
    if x.rank == 1:
        return (1, x.shape[0]) if row else (x.shape[0], 1)
    return (x.shape[-1], x.shape[-2]) if transposed else x.shape[-2:]


def _fix(a: Spec, b: Spec, transpose_a: bool, transpose_b: bool) -> str:
    """The flags under which the operands would fit, the fewest changed first."""
    flags = sorted(product((False, True), repeat=2), key=lambda f: (f[0] != transpose_a) + (f[1] != transpose_b))
    for flag_a, flag_b in flags:
        if (a.rank == 1 and flag_a) or (b.rank == 1 and flag_b):
            continue
        k, other = _matrix(a, flag_a, row=True)[1], _matrix(b, flag_b, row=False)[0]
        if k is not None and k == other:
            changed = [("transpose_a", flag_a, transpose_a), ("transpose_b", flag_b, transpose_b)]
            told = ", ".join(f"{name}={new}" for name, new, old in changed if new != old)
            return f"; {told} would fit"
    return "; the last axis of the one must be as long as the second last of the other"


def _is_batch(a: Spec, b: Spec) -> bool:
    """Whether these are several matrices, whose rows are of known sizes."""
    return all(x.dims is not None and x.rank > 2 and bool(x.dims[-1]) for x in (a, b))


@matmul.gradient
def matmul_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    with as_product(node) as (a, b):
        return _matmul_grad(node, a, b, dy)


def _matmul_grad(node: Node, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Any, ...]:
    flag_a, flag_b = bool(node.attrs["transpose_a"]), bool(node.attrs["transpose_b"])
    row, column = a.spec.dims is not None and a.spec.rank == 1, b.spec.dims is not None and b.spec.rank == 1
    left, right = expand_dims(a, 0) if row else a, expand_dims(b, 1) if column else b
    dy = expand_dims(dy, -1) if column else dy
    dy = expand_dims(dy, -2) if row else dy
    da = matmul(right, dy, flag_b, True) if flag_a else matmul(dy, right, False, not flag_b)
    if not flag_a and _is_batch(left.spec, dy.spec) and right.spec.dims is not None and right.spec.rank == 2:
        # one product with the batch as more rows, not the sum of a batch of products
        left, dy = (reshape(x, (-1, x.spec.shape[-1])) for x in (left, dy))
    db = matmul(dy, left, True, flag_a) if flag_b else matmul(left, dy, not flag_a, False)
    return squeeze(da, -2) if row else da, squeeze(db, -1) if column else db


@op(contraction=Contraction(), gradient=None)
def matmul_bias(
    a: Operand, b: Operand, bias: Operand, transpose_a: bool = False, transpose_b: bool = False, activation: str = ""
) -> Result:
    """`matmul` of matrices plus a vector along the last axis, then perhaps relu: what a pass makes of the three.

    ``activation`` is "relu" or "" for none. It is made after gradients are taken, and has none of its own.
    """
    check_bias(bias, b, activation)
    if (a.dims is not None and a.rank < 2) or (b.dims is not None and b.rank < 2):
        raise SpecError(f"matmul_bias takes matrices, got {a} and {b}")
    product = matmul.infer((a, b), {"transpose_a": transpose_a, "transpose_b": transpose_b})[0]
    if product.dims is not None and bias.dims is not None and not bias.accepts(bias.dtype, product.shape[-1:]):
        raise SpecError(f"the bias of {product} must be a vector of its last axis, got {bias}")
    return product


def _of_stored(dtype: str, a: Spec, b: Spec, flags: dict[str, Any]) -> Spec:
    if any(bits.dtype not in (BITS, as_dtype(dtype)) for bits in (a, b)):
        raise SpecError(f"the bits of {dtype} are of that or of {BITS}, got {a} and {b}")
    wide = (Spec("float32", bits.dims) for bits in (a, b))
    return matmul.infer(tuple(wide), flags)[0]


@op(gradient=None)
def matmul_bfloat16(a: Operand, b: Operand, transpose_a: bool = False, transpose_b: bool = False) -> Result:
    """`matmul` of what the bits of bfloat16s stand for, added up in float32: what a pass makes of products of such.

    It is made after gradients are taken, and has none of its own.
    """
    return _of_stored("bfloat16", a, b, {"transpose_a": transpose_a, "transpose_b": transpose_b})


@op(gradient=None)
def matmul_float16(a: Operand, b: Operand, transpose_a: bool = False, transpose_b: bool = False) -> Result:
    """`matmul` of what the bits of float16s stand for; see `matmul_bfloat16`."""
    return _of_stored("float16", a, b, {"transpose_a": transpose_a, "transpose_b": transpose_b})


def check_bias(bias: Spec, weights: Spec, activation: str) -> None:
    """That ``bias`` is a floating vector of the weights' dtype, and ``activation`` one that an op with a bias knows."""
    if not is_float(bias.dtype) or bias.dtype != weights.dtype or (bias.dims is not None and bias.rank != 1):
        raise SpecError(f"a bias must be a floating vector of the dtype of {weights}, got {bias}")
    if activation not in ("", "relu"):
        raise SpecError(f"activation must be 'relu' or '' for none, got {activation!r}")


@whole
@rounded_once
@located("norm")
def norm(x: Operand, ord: float | str | None = None, axis: Axes = None, keepdims: bool = False) -> TensorOrArray:
    """The norm of the vectors along ``axis``, or of the matrices in two axes; that of all entries if both are None.

    Of vectors ``ord`` is 2 if None, inf and -inf for the largest and the least magnitude, 0 for how many entries are
    not 0, or another p, for the p-th root of the sum of p-th powers. Of matrices it is "fro" if None (the root of the
    sum of squares), or 1 and -1 for the largest and the least sum of a column's magnitudes, inf and -inf of a row's. Of
    integers in float64. The gradient is 0 where a norm is. Powers that leave the range of floats make inf, or 0.
    """
    spec = described(x)
    x = astype(x, as_float(spec).dtype)
    if ord is None:
        return _root(sum(square(x), axis, keepdims), 2)
    given = range(spec.rank) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = [normal_axes(each, spec.rank)[0] for each in given]
    if len(axes) == 1 and not isinstance(ord, str):
        return _norm_of_vectors(x, ord, axes[0], keepdims)
    if len(axes) != 2:
        raise SpecError(f"ord={ord!r} of {spec} is a norm along one axis, or of matrices in two, got axis={axis}")
    if ord == "fro":
        return _root(sum(square(x), axis, keepdims), 2)
    if ord not in (1, -1, math.inf, -math.inf):
        raise SpecError(f"of matrices ord is 'fro', 1, -1, inf or -inf, got {ord!r}; of vectors name one axis")
    along, over = axes if abs(ord) == 1 else reversed(axes)
    sums = sum(magnitude(x), along, True)
    found = max(sums, over, True) if ord > 0 else min(sums, over, True)
    return found if keepdims else squeeze(found, tuple(axes))


def _norm_of_vectors(x: Any, ord: float, axis: int, keepdims: bool) -> TensorOrArray:
    if ord == 2:
        return _root(sum(square(x), axis, keepdims), 2)
    if ord == 0:
        return sum(astype(not_equal(x, 0), x.dtype), axis, keepdims)
    sizes = magnitude(x)
    if ord == 1:
        return sum(sizes, axis, keepdims)
    if math.isinf(ord):
        return max(sizes, axis, keepdims) if ord > 0 else min(sizes, axis, keepdims)
    return _root(sum(_power(sizes, ord), axis, keepdims), ord)


def _power(x: Any, p: float) -> TensorOrArray:
    """``x ** p`` of what is not negative; the slope at 0 is 0, whatever p is."""
    zero = equal(x, 0)
    return where(zero, 0.0 if p > 0 else math.inf, pow(where(zero, 1.0, x), p))


def _root(x: Any, p: float) -> TensorOrArray:
    """The p-th root, likewise."""
    if p != 2:
        return _power(x, 1 / p)
    zero = equal(x, 0)
    return where(zero, 0.0, sqrt(where(zero, 1.0, x)))
