"""Convolution of images (NHWC: batch, height, width, channels) with filters (HWIO).

Its three ops are one another's gradients, so every order of derivative is at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.locating import located
from flowrt.base.plain import is_whole
from flowrt.base.spec import Shape, Spec, is_float, pair, sliding
from flowrt.base.traits import Contraction
from flowrt.ops.inference import described, filled
from flowrt.ops.linalg import check_bias
from flowrt.ops.precision import as_product
from flowrt.ops.shape import stack
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Padding, Pair
    from flowrt.graph import Node, Tensor, TensorOrArray
    from flowrt.typed import Operand, Result


@op(promote=True, contraction=Contraction("conv2d_bias"))
def conv2d(
    x: Operand,
    filters: Operand,
    strides: Pair = 1,
    padding: Padding = "SAME",
    dilations: Pair = 1,
    groups: int = 1,
    *,
    name: str | None = None,
) -> Result:
    """The cross-correlation of images (NHWC) with ``filters`` (HWIO), as networks call convolution.

    ``strides`` and ``dilations`` are an integer or a (vertical, horizontal) pair; ``padding`` is "SAME", "VALID" or
    ((top, bottom), (left, right)) zeros. With ``groups`` the channels fall into that many parts, each with its own
    part of the filters, whose third axis is then the channels of one part.
    """
    return Spec(x.dtype, _convolved(x, filters, (strides, padding, dilations, groups)))


def _convolved(x: Spec, filters: Spec, how: tuple[Any, ...]) -> Shape:
    """The shape of the result for images ``x``."""
    strides, padding, dilations, groups = how
    _check_images("x", x)
    _check_images("filters", filters)
    batch, height, width, channels = x.dims or (None,) * 4
    rows, columns, per_group, outputs = filters.dims or (None,) * 4
    if not is_whole(groups, 1):
        raise SpecError(f"groups must be a positive integer, got {groups!r}")
    if outputs is not None and outputs % groups:
        raise SpecError(f"{groups} groups do not divide the {outputs} output channels of {filters}")
    if channels is not None and per_group is not None and channels != per_group * groups:
        raise SpecError(
            f"cannot convolve {x} with {filters} in {groups} groups: the filters' third axis must be the "
            f"channels over the groups, {channels}/{groups}, got {per_group}"
        )
    if rows == 0 or columns == 0:
        raise SpecError(f"filters must not be empty, got {filters}")
    down, across = sliding((height, width), (rows, columns), strides, dilations, padding)
    return (batch, down.count, across.count, outputs)


def _check_images(what: str, x: Spec) -> None:
    if not is_float(x.dtype):
        raise SpecError(f"{what} must be floating, got {x}; use astype")
    if x.dims is not None and x.rank != 4:
        order = "(height, width, in, out)" if what == "filters" else "(batch, height, width, channels)"
        raise SpecError(f"{what} must have 4 axes {order}, got {x}")


def _sliding_attrs(node: Node) -> tuple[Any, ...]:
    return tuple(node.attrs[k] for k in ("strides", "padding", "dilations", "groups"))


@conv2d.gradient
def conv2d_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    how = _sliding_attrs(node)
    with as_product(node) as (x, filters):
        return conv2d_input_grad(dy, filters, shape_of(x), *how), conv2d_filter_grad(x, dy, shape_of(filters), *how)


@op(contraction=Contraction(), gradient=None)
def conv2d_bias(
    x: Operand,
    filters: Operand,
    bias: Operand,
    strides: Pair = 1,
    padding: Padding = "SAME",
    dilations: Pair = 1,
    groups: int = 1,
    activation: str = "",
) -> Result:
    """`conv2d` plus a vector along the channels, then perhaps relu: what a pass makes of the three.

    ``activation`` is "relu" or "" for none. It is made after gradients are taken, and has none of its own.
    """
    check_bias(bias, filters, activation)
    shape = _convolved(x, filters, (strides, padding, dilations, groups))
    if shape is not None and bias.dims is not None and not bias.accepts(bias.dtype, shape[-1:]):
        raise SpecError(f"the bias of {Spec(x.dtype, shape)} must be a vector of its channels, got {bias}")
    return Spec(x.dtype, shape)


@op(contraction=Contraction())
def conv2d_input_grad(
    dy: Operand,
    filters: Operand,
    shape: Operand,
    strides: Pair = 1,
    padding: Padding = "SAME",
    dilations: Pair = 1,
    groups: int = 1,
) -> Result:
    """The gradient of `conv2d` for its images, of ``shape``, given that of its result."""
    out = filled(dy.dtype, shape)
    check_result(dy, _convolved(out, filters, (strides, padding, dilations, groups)))
    return out


def check_result(dy: Spec, shape: Shape) -> None:
    if dy.dims is not None and not Spec(dy.dtype, shape).accepts(dy.dtype, dy.dims):
        raise SpecError(f"the result's gradient must be {Spec(dy.dtype, shape)}, got {dy}")


@conv2d_input_grad.gradient
def conv2d_input_grad_grad(node: Node, dx: Tensor) -> tuple[Any, ...]:
    how = _sliding_attrs(node)
    with as_product(node) as (dy, filters, _):
        return conv2d(dx, filters, *how), conv2d_filter_grad(dx, dy, shape_of(filters), *how), None


@op
def conv2d_filter_grad(
    x: Operand,
    dy: Operand,
    shape: Operand,
    strides: Pair = 1,
    padding: Padding = "SAME",
    dilations: Pair = 1,
    groups: int = 1,
) -> Result:
    """The gradient of `conv2d` for its filters, of ``shape``, given that of its result."""
    out = filled(x.dtype, shape)
    check_result(dy, _convolved(x, out, (strides, padding, dilations, groups)))
    return out


@conv2d_filter_grad.gradient
def conv2d_filter_grad_grad(node: Node, dfilters: Tensor) -> tuple[Any, ...]:
    x, dy, _ = node.inputs
    how = _sliding_attrs(node)
    return conv2d_input_grad(dy, dfilters, shape_of(x), *how), conv2d(x, dfilters, *how), None


@located("conv2d_transpose")
def conv2d_transpose(
    x: Operand,
    filters: Operand,
    strides: Pair = 1,
    padding: Padding = "SAME",
    dilations: Pair = 1,
    groups: int = 1,
    *,
    output_shape: Operand | None = None,
    output_padding: int | tuple[int, int] = 0,
) -> TensorOrArray:
    """The transpose of `conv2d`, as generators of images use it: ``x`` spread over an image of about ``strides`` times
    its size. It is what `conv2d`'s gradient is for its images.

    ``x`` is [batch, height, width, in]; ``filters`` [rows, columns, out / groups, in], those of the `conv2d` that makes
    ``x`` of the result (TensorFlow's and Keras' layout; PyTorch's is [in, out / groups, rows, columns]). What else
    there is means what it does in that `conv2d`.

    Several sizes may come to the size of ``x``. By default the result has ``strides`` times as many rows and columns
    where ``padding`` is "SAME", else as few as may be: ``(size - 1) * strides + dilations * (rows - 1) + 1`` less the
    padding, and ``output_padding`` (an integer or a pair, below the strides) more at the bottom and right.
    ``output_shape`` is (height, width), or the whole shape, which may be a tensor. Zeiler et al., "Deconvolutional
    networks", 2010.
    """
    how = strides, padding, dilations
    shape = _transposed_shape(x, filters, how, groups, output_shape, output_padding)
    _check_transposed(described(x), described(filters), shape, (*how, groups))
    return conv2d_input_grad(x, filters, shape, *how, groups)


def _transposed_shape(x: Any, filters: Any, how: tuple[Any, Any, Any], groups: int, given: Any, more: Any) -> Any:
    """The shape of the images: a tuple where it is known, else a tensor."""
    images, kernel = described(x), described(filters)
    for what, spec in (("x", images), ("filters", kernel)):
        _check_images(what, spec)
    if given is not None and more != 0:
        raise SpecError("give output_shape or output_padding, not both")
    told = tuple(given) if isinstance(given, (tuple, list)) else None
    if given is not None and (told is None or len(told) == 4):
        return given
    if told is not None and len(told) != 2:
        raise SpecError(f"output_shape must be (height, width) or (batch, height, width, channels), got {given!r}")
    sizes = _transposed_sizes(x, filters, how, _output_padding(more, how)) if told is None else told
    whole = (_size(x, images, 0), *sizes, _size(filters, kernel, 2) * groups)
    return whole if all(isinstance(n, int) for n in whole) else stack(whole)


def _check_transposed(x: Spec, filters: Spec, shape: Any, how: tuple[Any, ...]) -> None:
    """That images of ``shape`` are made ``x`` of by such a `conv2d`, as far as that is known."""
    channels, made = x.dims and x.dims[3], filters.dims and filters.dims[3]
    if None not in (channels, made) and channels != made:
        raise SpecError(f"the last axis of filters must be the channels of x, {channels}: {x} and {filters}")
    if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
        back = Spec(x.dtype, _convolved(Spec(x.dtype, shape), filters, how))
        if x.dims is not None and not back.accepts(x.dtype, x.dims):
            raise SpecError(f"no {x} comes of images {list(shape)}, but {back}; give another output_shape")


def _size(x: Any, spec: Spec, axis: int) -> Any:
    known = None if spec.dims is None else spec.dims[axis]
    return shape_of(x)[axis] if known is None else known


def _output_padding(given: Any, how: tuple[Any, Any, Any]) -> tuple[int, int]:
    strides, padding, _ = how
    both = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(both) != 2 or not all(is_whole(n, 0) for n in both):
        raise SpecError(f"output_padding must be an integer from 0 up or a pair of them, got {given!r}")
    if any(n >= stride for n, stride in zip(both, pair("strides", strides), strict=True) if n):
        raise SpecError(f"output_padding must be below the strides {strides}, got {given!r}")
    if padding == "SAME" and any(both):
        raise SpecError('with padding="SAME" the result has strides times as many rows as x; give output_shape')
    return int(both[0]), int(both[1])


def _transposed_sizes(x: Any, filters: Any, how: tuple[Any, Any, Any], more: tuple[int, int]) -> list[Any]:
    """Height and width by default, numbers or tensors."""
    strides, padding, dilations = how
    steps, spacing = pair("strides", strides), pair("dilations", dilations)
    images, kernel = described(x), described(filters)
    sliding((None, None), (None, None), strides, dilations, padding)  # which checks the padding
    found = []
    for axis in (0, 1):
        size = _size(x, images, 1 + axis)
        if padding == "SAME":
            found.append(size * steps[axis])
            continue
        edges = 0 if isinstance(padding, str) else sum(padding[axis])
        span = (_size(filters, kernel, axis) - 1) * spacing[axis] + 1
        found.append((size - 1) * steps[axis] + span - edges + more[axis])
    return found
