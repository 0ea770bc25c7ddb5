"""Windows of images, of which the largest entry or the mean is taken.

Images are NHWC (batch, height, width, channels). The ops below pooling are each other's gradients, so every order of
derivative is at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrt.base.errors import SpecError
from flowrt.base.spec import Shape, Spec, pair, sliding
from flowrt.ops.conv import check_result
from flowrt.ops.inference import as_float, filled, merged
from flowrt.ops.source import shape_of
from flowrt.typed import op

if TYPE_CHECKING:
    from flowrt.base.spec import Padding, Pair
    from flowrt.graph import Node, Tensor
    from flowrt.typed import Operand, Result


@op
def max_pool2d(
    x: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID", *, name: str | None = None
) -> Result:
    """The largest entry of every window of images (NHWC), per channel; NaN where the window holds one.

    ``window`` and ``strides`` (the window if None) are an integer or a pair; ``padding`` is as in `conv2d`, and what
    it adds is never the largest. The gradient goes to the first of equal entries.
    """
    return Spec(x.dtype, _pooled(x, window, strides, padding))


@max_pool2d.gradient
def max_pool2d_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (max_pool2d_spread(node.inputs[0], dy, *_pool_attrs(node)),)


def _pooled(x: Spec, window: Any, strides: Any, padding: Any) -> Shape:
    size = pair("window", window)
    if x.dtype == bool:
        raise SpecError(f"x must hold numbers, got {x}; use astype")
    if x.dims is not None and x.rank != 4:
        raise SpecError(f"x must have 4 axes (batch, height, width, channels), got {x}")
    batch, height, width, channels = x.dims or (None,) * 4
    if height == 0 or width == 0:
        raise SpecError(f"the largest of no entries is not defined: {x}")
    down, across = sliding((height, width), size, size if strides is None else strides, 1, padding)
    if not isinstance(padding, str) and any(edge >= size[i] for i in (0, 1) for edge in padding[i]):
        raise SpecError(f"padding {padding} must be smaller than the window {size}; else windows may be empty")
    return (batch, down.count, across.count, channels)


def _pool_attrs(node: Node) -> tuple[Any, ...]:
    return tuple(node.attrs[k] for k in ("window", "strides", "padding"))


@op
def max_pool2d_spread(
    x: Operand, dy: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """Zeros shaped like ``x`` with every entry of ``dy`` added where its window of ``x`` is largest."""
    check_result(dy, _pooled(x, window, strides, padding))
    return Spec(dy.dtype, x.dims)


@max_pool2d_spread.gradient
def max_pool2d_spread_grad(node: Node, dx: Tensor) -> tuple[Any, ...]:
    return None, max_pool2d_pick(node.inputs[0], dx, *_pool_attrs(node))


@op(gradient=lambda node, dy: (None, max_pool2d_spread(node.inputs[0], dy, *_pool_attrs(node))))
def max_pool2d_pick(
    x: Operand, values: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """The entries of ``values``, shaped like ``x``, from where every window of ``x`` is largest."""
    if x.dims is not None and values.dims is not None:
        merged([x.dims, values.dims], [x, values])
    return Spec(values.dtype, _pooled(x, window, strides, padding))


@op
def avg_pool2d(
    x: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID", *, name: str | None = None
) -> Result:
    """The mean of every window of images (NHWC), per channel; of integers in float64.

    The arguments are `max_pool2d`'s. What ``padding`` adds is not counted: a window at the edge is the mean of the
    entries that it really holds.
    """
    return Spec(as_float(x).dtype, _pooled(x, window, strides, padding))


@avg_pool2d.gradient
def avg_pool2d_grad(node: Node, dy: Tensor) -> tuple[Any, ...]:
    return (avg_pool2d_spread(dy, shape_of(node.inputs[0]), *_pool_attrs(node)),)


@op(gradient=lambda node, dx: (avg_pool2d(dx, *_pool_attrs(node)), None))
def avg_pool2d_spread(
    dy: Operand, shape: Operand, window: Pair = 2, strides: Pair | None = None, padding: Padding = "VALID"
) -> Result:
    """The gradient of `avg_pool2d` for its images, of ``shape``: each window's shared evenly by its entries."""
    out = filled(dy.dtype, shape)
    check_result(dy, _pooled(out, window, strides, padding))
    return out
